"""__torch_function__: subclasses of Tensor, objects that override functions, modes, devices as contexts; and inference mode entered inside."""
import contextlib
import enum
import functools

import pytest
import torch
from harness import capture, check, make_test, same
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import firesteel as fs
from firesteel import torchstate
from firesteel.capture.values import overrides

one = functools.partial(make_test, fullgraph=True)


class Plain(torch.Tensor):
    pass


class Logged(torch.Tensor):
    calls = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

    def doubled(self):
        return self * 2


class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.add or func == torch.Tensor.add:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})) * 10
        return super().__torch_function__(func, types, args, kwargs or {})


class Duck:
    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.cos:
            return NotImplemented
        return Duck(func(*[a.inside if isinstance(a, Duck) else a for a in args], **(kwargs or {})))


class Picky(torch.Tensor):
    def __new__(cls, data, unit):
        made = torch.Tensor._make_subclass(cls, data)
        made.unit = unit
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Picky):
            out.unit = next(a.unit for a in args if isinstance(a, Picky))
        return out


@one
def test_default_override_keeps_the_class(x):
    s = x.as_subclass(Plain)
    y = torch.sin(s) + 1
    parts = y.chunk(2)
    before = s
    s.mul_(2)
    return y, type(y) is Plain, type(parts[0]) is Plain, isinstance(y, torch.Tensor), s is before, y.shape, y.sum(0), x, type(y.shape) is torch.Size


@one
def test_overrides_see_what_eager_shows_them(x):
    Logged.calls.clear()
    s = x.as_subclass(Logged)
    y = torch.cat([s, x]) - (1 - s.doubled()).sum()
    y[0] = 3
    z = y[1:], torch.nn.functional.dropout(s, 0.0), s.size(0), s.dtype, s == 1, -s
    s += 1
    return list(Logged.calls), z[0].as_subclass(torch.Tensor), y.as_subclass(torch.Tensor)


@one
def test_override_changes_the_meaning(x):
    s = x.as_subclass(Scaled)
    return torch.add(s, 1), torch.add(x, s).as_subclass(torch.Tensor), s + 1, torch.mul(s, 2)


@one
def test_objects_that_are_no_tensors(x):
    d = Duck(x)
    try:
        torch.cos(d)
    except TypeError as e:
        error = type(e).__name__
    return torch.add(d, 1).inside, torch.sin(d).inside, torch.stack([d, d]).inside if False else 0, error


@one
def test_attributes_of_subclass_tensors(x):
    p = Picky(x, "m")
    q = p * 2
    return q.unit, q, type(q) is Picky, q.as_subclass(torch.Tensor) + 1


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("cls", [Plain, Logged, Scaled])
def test_subclass_inputs(cls, backend):
    def f(t, w):
        return (torch.add(t, w) * t).sum(0), t

    t, w = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    compiled = fs.compile(f, backend=backend, fullgraph=True)
    for _ in range(2):
        s = t.clone().as_subclass(cls)
        (ours, back), (theirs, _) = compiled(s, w), f(s, w)
        assert type(ours) is type(theirs) and back is s
        torch.testing.assert_close(ours.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))
        got, want = (torch.autograd.grad(out.as_subclass(torch.Tensor).sum(), w)[0] for out in (ours, theirs))
        torch.testing.assert_close(got, want)
    plain = compiled(t, w)[0]
    assert type(plain) is torch.Tensor
    torch.testing.assert_close(plain, f(t, w)[0])


class Posed(torch.Tensor):
    """Python's operators mean something else."""

    def __add__(self, other):
        return NotImplemented if isinstance(other, str) else super().__add__(other) * 10

    def __mul__(self, other):
        return self.plain() + 100

    def __rsub__(self, other):
        return self.plain() - 200

    def __matmul__(self, other):
        return (self.plain().unsqueeze(-1) + other).as_subclass(Posed)

    def __imul__(self, other):
        return self.plain() + 300

    def __lt__(self, other):
        return self.plain() + 400

    def __neg__(self):
        return self.plain() + 500

    def __getitem__(self, key):
        return self.plain()[0] + 600 + key

    def __len__(self):
        return 7

    def __bool__(self):
        return False

    def __iter__(self):
        return iter([self.plain() + 700, self.plain() + 800])

    def __contains__(self, item):
        return item == "there"

    def __call__(self, more):
        return self.plain() + more

    def plain(self):
        return self.as_subclass(torch.Tensor)


def posed(p, x):
    yield from (p + 1, p * x, p * p, x - p, 1 - p, p @ x, p < x, x > p, -p, p[1], p(900), p - 1, p > 0, +p)
    q = p
    q *= 2
    r = p
    r @= x
    first, second = p
    yield from (q, r, first, second, len(p), bool(p), "there" in p, "here" in p, [type(part) for part in p], 1 if p else 2)


@pytest.mark.parametrize("inside", [False, True])
def test_operators_call_the_methods_of_a_subclass(inside):
    def f(p, x):
        return list(posed(x.as_subclass(Posed) if inside else p, x))
    x = torch.randn(3)
    found, expected = fs.compile(f, fullgraph=True)(x.as_subclass(Posed), x), f(x.as_subclass(Posed), x)
    assert [type(value) for value in found] == [type(value) for value in expected]
    for have, want in zip(found, expected):
        same(*(value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value for value in (have, want)))


def test_writing_an_item_of_a_subclass():
    class Kept(torch.Tensor):
        def __setitem__(self, key, value):
            super().__setitem__(key, value * 2)

    def f(x):
        y = x.clone().as_subclass(Kept)
        y[1] = torch.tensor(4.0)
        return y.as_subclass(torch.Tensor)
    x = torch.randn(3)
    same(fs.compile(f, fullgraph=True)(x), f(x))


class Left:
    def __add__(self, other):
        return 1

    def __lt__(self, other):
        return 2


class Right(Left):
    def __radd__(self, other):
        return 3

    def __gt__(self, other):
        return 4


class Silent(Left):
    def __radd__(self, other):
        return NotImplemented


@one
def test_the_operand_of_a_subclass_is_asked_first(x):
    return x + 1, Left() + Right(), Left() < Right(), Left() + Silent(), Right() + Left(), Left() + Left(), True + 1, 1 + True


class SinIsCos(TorchFunctionMode):
    def __init__(self, log):
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append(func.__name__)
        if func is torch.sin:
            return torch.cos(*args)
        return func(*args, **(kwargs or {}))


@one
def test_modes(x):
    log, outer = [], []
    with SinIsCos(outer), SinIsCos(log):
        y = torch.sin(x)
        z = torch.ones(2) + x.shape[0]
    return y, z, torch.sin(x), log, outer


def test_break_under_a_mode():
    def f(x):
        log = []
        y = x + 1
        with SinIsCos(log):
            y = torch.sin(y)
            print(end="")
            y = torch.sin(y)
        return torch.sin(y), log
    check(f, torch.randn(3), graphs=2)


def test_a_mode_entered_outside():
    """It is traced through, sees each call once, and nothing of what guards and compiled graphs do."""
    def f(x):
        return torch.sin(x) + x.shape[0]
    x, ours, theirs = torch.randn(3), SinIsCos([]), SinIsCos([])
    compiled, backend = capture(f, fullgraph=True)
    for _ in range(2):
        with ours:
            out = compiled(x)
        with theirs:
            expected = f(x)
        same(out, expected)
        same(compiled(x), torch.sin(x) + 3)
    assert ours.log == theirs.log
    assert len(backend.graphs) == 2


class Scale(TorchFunctionMode):
    def __init__(self, by):
        self.by = by

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.by if func in (torch.add, torch.Tensor.add) else out


def test_what_a_mode_outside_reads_is_guarded():
    def f(x):
        return torch.add(x, 1)
    compiled, backend = capture(f, fullgraph=True)
    for by in ("2", 2, 2, 5):
        mode = Scale(int(by))
        with mode, SinIsCos([]):
            out = compiled(torch.ones(2))
        same(out, torch.full((2,), 2.0 * int(by)))
    assert len(backend.graphs) == 2


def test_break_under_a_mode_entered_outside():
    def f(x):
        y = torch.add(x, 1)
        print(end="")
        return torch.add(y, 1)
    compiled, backend = capture(f)
    for _ in range(2):
        with Scale(3):
            out = compiled(torch.zeros(2))
            assert torch._C._len_torch_function_stack() == 1
        same(out, torch.full((2,), 12.0))
    assert len(backend.graphs) == 2


def test_default_device_set_inside():
    def f(x):
        torch.set_default_device("meta")
        return torch.ones(2).device.type, x + 1
    compiled, _ = capture(f, fullgraph=True)
    try:
        assert compiled(torch.ones(2))[0] == "meta"
        assert torch.ones(1).device.type == "meta" and torch.get_default_device().type == "meta"
        assert compiled(torch.ones(2, device="cpu"))[0] == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu" and torch._C._len_torch_function_stack() == 0


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_every_operator():
    def f(x):
        return x.sin() + 1
    compiled, _ = capture(f, fullgraph=True)
    compiled(torch.ones(2))
    with Operators() as mode:
        compiled(torch.ones(2))
    assert mode.seen[-2:] == ["aten.sin.default", "aten.add.Tensor"]


@one
def test_device_as_a_context(x):
    with torch.device("meta") as d:
        y, z = torch.zeros(3), torch.ones(2, device="cpu")
        with torch.device("cpu"):
            w = torch.arange(2)
    return x.sum() + z, y.device, d, w, torch.zeros(1)


def test_break_under_a_device():
    def f(x):
        with torch.device("cpu"):
            y = torch.zeros(3) + x
            print(end="")
            return y + torch.ones(3)
    check(f, torch.randn(3), graphs=None)


# -- inference mode -----------------------------------------------------------------------------------------------------
def inferred(x, w):
    with torch.inference_mode():
        y = (x * w).relu()
        view, flags = x[0], (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), y.is_inference(), x.is_inference())
    return y, view, y + 1, w * 2, flags, torch.is_inference_mode_enabled()


@torch.inference_mode()
def decorated(x):
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_inference_mode_inside(backend):
    x, w = torch.randn(4), torch.randn(4, requires_grad=True)
    ours, theirs = fs.compile(inferred, backend=backend, fullgraph=True)(x, w), inferred(x, w)
    for a, b in zip(ours, theirs):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b)
            assert (a.is_inference(), a.requires_grad) == (b.is_inference(), b.requires_grad)
        else:
            assert a == b


def test_inference_mode_as_a_decorator_and_with_a_break():
    def f(x):
        with torch.inference_mode():
            y = decorated(x) + 1
            print(end="")
            z = y * 2
        return z, z.is_inference(), torch.is_inference_mode_enabled()
    x = torch.randn(3)
    compiled, backend = capture(f)
    (z, *flags), (want, *wanted) = compiled(x), f(x)
    assert flags == wanted and z.is_inference() and torch.equal(z, want) and not torch.is_inference_mode_enabled()
    assert len(backend.graphs) == 2
    strict, graphs = capture(lambda x: decorated(x) + 1, fullgraph=True)
    assert strict(x).is_inference() is decorated(x).add(1).is_inference() and len(graphs.graphs) == 1


def gradients_switched_on(x, w):
    with torch.no_grad(), torch.enable_grad():
        made, view, asked = w.neg() + w, w[0], torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return made, view, asked, w.abs(), x * w


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_switched_on_under_inference_mode(inside):
    """There is no history there, and so nothing but a view of what requires a gradient does."""
    within = torch.inference_mode()(gradients_switched_on)
    seen = []
    for run in (within, fs.compile(within) if inside else torch.inference_mode()(fs.compile(gradients_switched_on))):
        found = run(torch.ones(3), torch.ones(3, requires_grad=True))
        seen.append([(t.requires_grad, t.is_inference(), t.tolist()) if isinstance(t, torch.Tensor) else t for t in found])
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert seen[1] == seen[0]


def test_an_inference_tensor_in_a_computation_with_gradients_is_eagers_error():
    def f(x, w):
        with torch.inference_mode():
            y = x * 2
        return w * y
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError) as theirs:
        f(x, w)
    for fullgraph in (False, True):
        compiled, _ = capture(f, fullgraph=fullgraph)
        with pytest.raises(RuntimeError) as ours:
            compiled(x, w)
        assert str(ours.value) == str(theirs.value)


def test_the_default_device_is_guarded():
    def f(x):
        return torch.zeros(2), x + 1
    compiled, backend = capture(f)
    for name in ("cpu", "meta", "cpu"):
        with torch.device(name):
            assert compiled(torch.ones(1, device="cpu"))[0].device.type == name
    assert len(backend.graphs) == 2


# -- parameters and properties of subclasses ----------------------------------------------------------------------------
class Bare(torch.Tensor):
    pass


def test_parameter_of_a_subclass_is_a_parameter():
    def f(p):
        return p * 2 if isinstance(p, torch.nn.Parameter) else p * 3
    compiled, _ = capture(f, fullgraph=True)
    plain = torch.ones(1)
    for made in (torch.nn.Parameter(plain.as_subclass(Bare)), plain.as_subclass(Bare), plain, torch.nn.Parameter(plain)):
        assert compiled(made).item() == f(made).item()


class Properties(torch.Tensor):
    HANDLED = {torch.Tensor.shape.__get__: (7,)}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.ndim.__get__:
            return 10
        return cls.HANDLED[func] if func in cls.HANDLED else super().__torch_function__(func, types, args, kwargs or {})


def test_properties_are_told_apart_in_an_override():
    def f(x):
        return x.ndim, x.shape, (x + 1).sum().as_subclass(torch.Tensor)
    same(capture(f, fullgraph=True)[0](torch.ones(2).as_subclass(Properties)), (10, (7,), torch.tensor(4.0)))


# -- symbolic sizes under modes -------------------------------------------------------------------------------------------
SIZED = {
    "int": lambda x: torch.zeros(x.shape[0]), "ints": lambda x: torch.ones(x.shape[0], 2), "tuple": lambda x: torch.zeros((x.shape[0], 2)),
    "list": lambda x: torch.ones([x.shape[0]]), "Size": lambda x: torch.zeros(x.shape), "starred": lambda x: torch.zeros(*x.shape),
    "keyword": lambda x: torch.zeros(size=(x.shape[0],)), "computed": lambda x: torch.zeros(x.shape[0] * 2 + 1), "empty": lambda x: torch.empty(x.numel()).fill_(1),
    "full": lambda x: torch.full((x.shape[0],), 3.0), "full of": lambda x: torch.full((2,), x.shape[0]), "rand": lambda x: torch.rand(x.shape[0]) * 0,
    "randn": lambda x: torch.randn(x.shape[0], 2) * 0, "randint": lambda x: torch.randint(0, x.shape[0], (x.shape[0],)) * 0,
    "randperm": lambda x: torch.randperm(x.shape[0]).sort().values, "normal": lambda x: torch.normal(0.0, 1.0, (x.shape[0],)) * 0,
    "arange": lambda x: torch.arange(x.shape[0]), "arange from": lambda x: torch.arange(1, x.shape[0], 2), "arange of floats": lambda x: torch.arange(x.shape[0] / 2),
    "linspace": lambda x: torch.linspace(0, 1, x.shape[0]), "linspace to": lambda x: torch.linspace(0, x.shape[0], steps=5),
    "logspace": lambda x: torch.logspace(0, 1, x.shape[0]), "eye": lambda x: torch.eye(x.shape[0], 3), "tril_indices": lambda x: torch.tril_indices(x.shape[0], 3),
    "tensor": lambda x: torch.tensor([x.shape[0], 1]), "as_tensor": lambda x: torch.as_tensor(x.shape[0]), "asarray": lambda x: torch.asarray(x.shape[0]),
    "zeros_like": lambda x: torch.zeros_like(x), "full_like": lambda x: torch.full_like(x, x.shape[0]), "new_zeros": lambda x: x.new_zeros(x.shape[0]),
    "new_full": lambda x: x.new_full((x.shape[0],), x.shape[0]), "new_ones": lambda x: x.new_ones(*x.shape), "new_tensor": lambda x: x.new_tensor([x.shape[0]]),
    "empty_strided": lambda x: torch.empty_strided((x.shape[0], 2), (2, 1)).zero_(), "window": lambda x: torch.hann_window(x.shape[0]),
    "fftfreq": lambda x: torch.fft.fftfreq(x.shape[0]), "view": lambda x: x.view(x.shape[0], 1), "expand": lambda x: x[:1].expand(x.shape[0]),
    "scalar": lambda x: x + x.shape[0], "slice": lambda x: x[1:x.shape[0] - 1], "index": lambda x: x[x.shape[0] - 1], "split": lambda x: x.split(x.shape[0] - 1)[0],
    "pad": lambda x: torch.nn.functional.pad(x, (0, x.shape[0])), "interpolate": lambda x: torch.nn.functional.interpolate(x[None, None], size=x.shape[0] * 2),
    "one_hot": lambda x: torch.nn.functional.one_hot(torch.arange(x.shape[0]) % 3, x.shape[0] + 3), "bool": lambda x: torch.full((2,), x.shape[0] > 5),
    "after a break": lambda x: x.sum() + torch.arange(x.shape[0] if x.sum().item() > 0 else 1),
}


@contextlib.contextmanager
def default_device():
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class HandsOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Lengthens(TorchFunctionMode):
    """Changes the arguments."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.zeros, torch.arange, torch.ones):
            args = tuple(a + 1 if isinstance(a, int) else a for a in args)
        return func(*args, **(kwargs or {}))


def everything():
    stack = contextlib.ExitStack()
    for context in (default_device, default_dtype, HandsOn, Lengthens):
        stack.enter_context(context())
    return stack


SURROUNDINGS = {"default device": default_device, "with device": lambda: torch.device("cpu"), "default dtype": default_dtype, "mode": HandsOn,
                "changing mode": Lengthens, "everything": everything}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("fn", SIZED.values(), ids=SIZED)
def test_sizes_reach_functions_through_modes(fn, surrounding):
    for dynamic in (True, None):        # None: constant sizes first
        compiled, _ = capture(fn, dynamic=dynamic)
        for size in (5, 6, 9):
            x = torch.arange(size) + 1.0
            with surrounding():
                expected, given = fn(x), compiled(x)
            assert given.dtype == expected.dtype
            torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("mode", [HandsOn, Lengthens, lambda: torch.device("cpu")], ids=["hands on", "lengthens", "device"])
def test_sizes_reach_functions_through_modes_entered_inside(mode):
    def fn(x):
        with mode():
            return torch.zeros(x.shape[0]), x.view(x.shape[0], 1), x[:x.shape[0] - 1], torch.arange(x.shape[0]) + x.shape[0]

    compiled, _ = capture(fn, dynamic=True)
    for size in (5, 7):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), fn(x))


def test_nothing_computes_with_what_stands_for_a_symbol():
    for base, token in overrides.SYMBOLIC_TOKENS.items():
        assert isinstance(token(1), base)
        for compute in (lambda n: n + 1, lambda n: 2 * n, lambda n: -n, lambda n: n < 3, lambda n: n == 1, bool, int, float, lambda n: n // 2):
            with pytest.raises(TypeError, match="symbolic"):
                compute(token(1))


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("program", [lambda x, n: x ** n, lambda x, n: x.clone().__ipow__(n), lambda x, n: 2 ** x, lambda x, n: torch.Tensor.__pow__(x, n)])
def test_powers_under_a_mode_from_outside(program, backend):
    """A mode is given the function around the method `pow`, which no module has under its name."""
    x, n = torch.linspace(1, 2, 3), torch.tensor([1, 2, 3])
    with torch.device("cpu"):
        torch.testing.assert_close(fs.compile(program, backend=backend)(x, n), program(x, n))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passing, lambda: torch.device("cpu")])
@pytest.mark.parametrize("inside", [False, True])
def test_a_check_fails_while_a_mode_is_asked(mode, inside):
    """torch has taken the mode off its stack, and puts it back."""
    def nll(x, var):
        return torch.nn.functional.gaussian_nll_loss(x, x, var)

    def fn(x, var):
        with mode():
            return nll(x, var)

    compiled, x = fs.compile(fn if inside else nll), torch.ones(3)
    with contextlib.nullcontext() if inside else mode():
        before = torchstate.count_modes()
        for var in (x, -x, x, -x):
            with pytest.raises(ValueError, match="negative") if var is not x else contextlib.nullcontext():
                assert compiled(x, var) == 0
            assert torchstate.count_modes() == before


INSIDE = {"a tensor's layout": (lambda x, m: torch.masked._ops._input_mask(x, mask=m), True), "many": (lambda x, m: torch.masked.sum(x, 0, mask=m), False),
          "a class": (lambda x, m: torch.masked.softmax(x, 0, mask=m), False), "sizes": (lambda x, m: torch.svd_lowrank(x, 2)[1].shape, False),
          "one": (lambda x, m: torch.atleast_3d(x, x[0]), True), "a list": (lambda x, m: torch.meshgrid(x[0], x[1], indexing="ij"), True)}


@pytest.mark.parametrize("mode", [Passing, lambda: torch.device("cpu")])
@pytest.mark.parametrize("name", INSIDE)
def test_functions_of_torch_that_ask_a_mode_inside_only(name, mode):
    """What the mode is asked first is not the call itself: its answer was taken for the result."""
    fn, fullgraph = INSIDE[name]
    x, mask = torch.randn(4, 3), torch.tensor([True, False, True])
    with mode():
        same(fs.compile(fn, fullgraph=fullgraph)(x, mask), fn(x, mask))


class Tagged(torch.Tensor):
    """Without a __new__ of its own: torch makes it of a tensor, or of sizes."""

    def __init__(self, *given):
        self.tag = given[-1] if type(given[-1]) is int else 7


class Number(enum.IntEnum):
    THREE = 3


def test_subclasses_that_torch_makes():
    def f(x):
        of_tensor, of_sizes, of_none = Tagged(x), Tagged(2, x.shape[0]), Tagged(Number.THREE)
        return x * of_tensor.tag + of_sizes.tag + of_none.tag, of_tensor, of_sizes.shape, of_none.shape, type(of_sizes)
    compiled = fs.compile(f, fullgraph=True)
    for n in (3, 4):
        x = torch.ones(n)
        (mine, mine_tagged, *facts), (eager, eager_tagged, *expected) = compiled(x), f(x)
        assert mine.tolist() == eager.tolist() and facts == expected
        assert type(mine_tagged) is Tagged and mine_tagged.tag == eager_tagged.tag and mine_tagged.tolist() == eager_tagged.tolist()


def test_attention_with_a_causal_bias():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    outside = causal_lower_right(4, 6)

    def f(q, k, v):
        lower, upper = causal_lower_right(q.shape[2], k.shape[2]), causal_upper_left(q.shape[2], k.shape[2])
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, lower), attention(q, k, v, upper), attention(q[:, :, :4], k, v, outside, dropout_p=0.0)
    compiled = fs.compile(f, fullgraph=True)
    for rows in (4, 5, 6):
        given = [torch.randn(2, 2, n, 8, requires_grad=True) for n in (rows, 6, 6)]
        mine, eager = compiled(*given), f(*given)
        torch.testing.assert_close(mine, eager)
        for one, other in zip(*(torch.autograd.grad(sum(part.sin().sum() for part in out), given) for out in (mine, eager))):
            torch.testing.assert_close(one, other)
