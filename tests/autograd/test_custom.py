"""torch.autograd.Function in its variants and custom operators of torch.library, compiled: values, gradients and errors are eager's."""
import dataclasses
import functools
import types

import pytest
import torch
from alias_programs import Dirty
from torch.autograd.function import once_differentiable

import firesteel as fs
from firesteel.artifacts import counters

BACKENDS = ("aot_eager", "native")


# ---------------------------------------------------------------- functions

class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, g * x * 3        # not the true gradient: it must be this one that runs


class Attributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, name):
        ctx.factor, ctx.name = factor, name
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * (2 if ctx.name == "double" else 1), None, None


class WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.sort()
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx, g, _):
        places, = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, places, g)


class FloatAside(torch.autograd.Function):
    """A floating result that carries no gradient."""
    @staticmethod
    def forward(ctx, x):
        y, z = x * 2, x * 5
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, g, _):
        return g * 2


class NoMaterialize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return (a * 2 if a is not None else 0) + (b * 3 if b is not None else 0)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.exp()


class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w, x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w = inputs
        ctx.save_for_backward(x, w, output[0])

    @staticmethod
    def backward(ctx, g, h):
        x, w, out = ctx.saved_tensors
        return g * w + h, g * x + out * 0


class NeedsGrad(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w if ctx.needs_input_grad[0] else None, g * x if ctx.needs_input_grad[1] else None


PROGRAMS = {
    "saved": lambda x, w: Saved.apply(x, w).sin(),
    "attributes": lambda x, w: Attributes.apply(x, 2.5, "double") + Attributes.apply(w, 3, "single"),
    "dirty": lambda x, w: Dirty.apply(x * 2) * w,
    "indices": lambda x, w: (lambda pair: (pair[0] * w, pair[1]))(WithIndices.apply(x)),
    "float aside": lambda x, w: (lambda pair: (pair[0] * w, pair[1]))(FloatAside.apply(x)),
    "no materialize": lambda x, w: NoMaterialize.apply(x)[1] * w,
    "once": lambda x, w: Once.apply(x) * w,
    "setup": lambda x, w: Setup.apply(x, w)[0] + Setup.apply(w, x)[1],
    "needs": lambda x, w: NeedsGrad.apply(x, w.detach()) + NeedsGrad.apply(x.detach(), w),
    "twice": lambda x, w: Saved.apply(Saved.apply(x, w), w),
}


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)


def observed(fn, *args):
    out = fn(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    loss = sum((t * t).sum() for t in outputs if t.requires_grad)
    loss.backward()
    return [*outputs, *(a.grad for a in args)], [t.requires_grad for t in outputs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_function(name, backend):
    fs.reset()
    got, flags = observed(fs.compile(PROGRAMS[name], backend=backend), *inputs())
    want, wanted_flags = observed(PROGRAMS[name], *inputs())
    assert flags == wanted_flags
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["saved", "attributes", "setup", "needs"])
def test_second_order(name):
    """The gradient that a custom backward computes is differentiated again, as in eager."""
    def second(fn):
        x, w = inputs()
        g, = torch.autograd.grad(fn(x, w).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum() + (x * w).sum(), (x, w), allow_unused=True)
    fs.reset()
    for a, b in zip(second(fs.compile(PROGRAMS[name], backend="aot_eager")), second(PROGRAMS[name])):
        torch.testing.assert_close(a, b)


def test_once_differentiable_refuses_a_second_time():
    def second(fn):
        x, w = inputs()
        g, = torch.autograd.grad(fn(x, w).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(g.sum(), x)
        return str(caught.value)
    fs.reset()
    assert second(fs.compile(PROGRAMS["once"], backend="aot_eager")) == second(PROGRAMS["once"])


# ---------------------------------------------------------------- what functions read and do besides

@dataclasses.dataclass
class Settings:
    factor: float
    weight: torch.Tensor


SETTINGS = Settings(2.0, torch.tensor(3.0, requires_grad=True))
CALLS: list = []


class ReadsGlobals(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings):
        ctx.settings, ctx.kept = settings, x.exp()
        return x * SETTINGS.weight * settings.weight

    @staticmethod
    def backward(ctx, g):
        return g * SETTINGS.factor * SETTINGS.weight * ctx.kept * ctx.settings.factor, None


class Tells(torch.autograd.Function):
    """Its backward does something besides."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        CALLS.append(g.sum().item())
        return g * 3


class Defaults(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=2.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * len(ctx.needs_input_grad), None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, g):
        return g * 3, g * 5


class RecordsInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x.detach() * 1
            ctx.recording = torch.is_grad_enabled()
        return y * 2

    @staticmethod
    def backward(ctx, g):
        return g * (3 if ctx.recording else 5)


BESIDES = {
    "records inside": lambda x, w: RecordsInside.apply(x) * w,
    "globals": lambda x, w: ReadsGlobals.apply(x, Settings(4.0, w)),
    "effect": lambda x, w: Tells.apply(x * w) * w,
    "defaults": lambda x, w: Defaults.apply(x) + Defaults.apply(w, 3.0),
    "one tensor twice": lambda x, w: Pair.apply(x, x) * w,
    "instance": lambda x, w: Pair().apply(x, w),
    "view": lambda x, w: Saved.apply(x.view(5, 1), w.view(1, 5)).t(),
}


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize("name", BESIDES)
def test_what_a_function_reads_and_does(name, backend):
    def run(fn):
        found = []
        for factor in (2.0, 2.0, 7.0):
            SETTINGS.factor, SETTINGS.weight = factor, torch.tensor(factor + 1, requires_grad=True)
            found += [*observed(fn, *inputs())[0], SETTINGS.weight.grad]
        found += CALLS
        CALLS.clear()
        return found
    fs.reset()
    graphs = fs.counters["stats"]["unique_graphs"]
    got = run(fs.compile(BESIDES[name], backend=backend, fullgraph=True))
    assert fs.counters["stats"]["unique_graphs"] - graphs <= 2
    assert torch.is_grad_enabled()
    for a, b in zip(got, run(BESIDES[name]), strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------- operators

@torch.library.custom_op("fstest::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * factor)


@scaled.register_fake
def _(x, factor):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, g: (scaled(g, ctx.factor), None), setup_context=_save)


@torch.library.custom_op("fstest::accumulate_", mutates_args=("total",))
def accumulate_(total: torch.Tensor, x: torch.Tensor) -> None:
    total.numpy()[...] += x.detach().numpy()


@torch.library.custom_op("fstest::count_", mutates_args=("total",))
def count_(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x.numel())
    return x * 2


@count_.register_fake
def _(total, x):
    return torch.empty_like(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_custom_operator(backend):
    f = lambda x, w: scaled(x * w, 2.5).sin()
    fs.reset()
    got, _ = observed(fs.compile(f, backend=backend, fullgraph=True), *inputs())
    want, _ = observed(f, *inputs())
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [False, True])
def test_custom_operator_that_writes(backend, view):
    def f(total, x):
        y = x * 2
        accumulate_(total[1:] if view else total, y[1:] if view else y)
        return total * 3

    fs.reset()
    results = []
    for fn in (fs.compile(f, backend=backend, fullgraph=True), f):
        total, x = torch.ones(4), torch.arange(4.0)
        results.append((fn(total, x), total))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_custom_operator_that_writes_and_returns(backend):
    def f(total, x):
        local = total + 1
        y = count_(local, x)
        return local * 2, y

    fs.reset()
    torch.testing.assert_close(fs.compile(f, backend=backend, fullgraph=True)(torch.ones(3), torch.arange(3.0)), f(torch.ones(3), torch.arange(3.0)))


library = torch.library.Library("fstest", "FRAGMENT")
library.define("mix_(Tensor(a!) a, Tensor[] b, SymInt c, *, Tensor(b!)? d, SymInt e=2) -> ()")
library.define("each_(Tensor a, Tensor(a!)[] b) -> ()")
library.define("maybe_(Tensor a, Tensor(b!)? b) -> ()")


def _mix(a, b, c, d, e=2):
    a.add_(b[0] * c * e)
    if d is not None:
        d.add_(b[1])


library.impl("mix_", _mix, "CompositeExplicitAutograd")
library.impl("each_", lambda a, b: [x.add_(a) for x in b] and None, "CompositeExplicitAutograd")
library.impl("maybe_", lambda a, b: None if b is None else (b.add_(1), None)[1], "CompositeExplicitAutograd")
for _name in ("mix_", "each_", "maybe_"):
    torch.library.register_fake(f"fstest::{_name}", lambda *args, **kwargs: None)


def _optional(a, b, d):
    torch.ops.fstest.maybe_(a, None)
    torch.ops.fstest.maybe_(a, b)
    return b * 2


WRITES = {
    "by keyword": lambda a, b, d: torch.ops.fstest.mix_(a, (b, b * 2), 4, d=d) or a + d,
    "keyword of none": lambda a, b, d: torch.ops.fstest.mix_(a, (b, b * 2), 4, d=None) or a + d,
    "a list": lambda a, b, d: torch.ops.fstest.each_(a, [b, d]) or b * d,
    "optional": _optional,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRITES)
def test_custom_operator_that_writes_in_other_ways(name, backend):
    fs.reset()
    results = []
    for fn in (fs.compile(WRITES[name], backend=backend, fullgraph=True), WRITES[name]):
        tensors = [torch.arange(3.0), torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1.0, 4.0, 6.0])]
        results.append((fn(*tensors), tensors))
    torch.testing.assert_close(results[0], results[1])


# ---------------------------------------------------------------- apply, by whatever name

saved = Saved.apply
saved_twice = functools.partial(Saved.apply)


class Scaled(Saved):
    """With an `apply` of its own."""
    @classmethod
    def apply(cls, x, w):
        return super().apply(x, w) * 10


class HoldsApply:
    act = Saved.apply


class ModuleWithApply(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.act = Saved.apply

    def forward(self, x, w):
        return self.act(x, w) + 1


def by_closure():
    act = Saved.apply
    return lambda x, w: act(x, w) + 1


def elsewhere(name):
    """A module of this name with a function and an alias of its `apply`."""
    module = types.ModuleType(name)
    made = type("Elsewhere", (Saved,), {"__module__": name})
    module.fn = made.apply
    exec("def use(x, w): return fn(x, w) + 1", vars(module))
    return module.use


times_ten = Scaled.apply
ALIASES = {
    "global": lambda x, w: saved(x, w) + 1, "partial": lambda x, w: saved_twice(x, w) + 1, "class attribute": lambda x, w: HoldsApply.act(x, w) + 1,
    "of an instance": lambda x, w, holder=HoldsApply(): holder.act(x, w) + 1, "module": ModuleWithApply(), "closure": by_closure(),
    "default": lambda x, w, act=Saved.apply: act(x, w) + 1, "in a list": lambda x, w, acts=(Saved.apply,): acts[0](x, w) + 1, "itself": Saved.apply,
    "overridden": lambda x, w: Scaled.apply(x, w) + 1, "alias of an overridden one": lambda x, w: times_ten(x, w) + 1,
    "compared": lambda x, w: saved(x, w) if saved == Saved.apply and saved != times_ten else x, "torchish module": elsewhere("torchrl_like.act"),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("fn", ALIASES.values(), ids=ALIASES)
def test_apply_under_any_name_is_captured(fn, grad):
    args = [torch.randn(3, requires_grad=grad) for _ in range(2)]
    twins = [a.detach().clone().requires_grad_(grad) for a in args]
    expected, given = fn(*args), fs.compile(fn, fullgraph=True)(*twins)
    torch.testing.assert_close(given, expected)
    if grad:
        expected.sum().backward()
        given.sum().backward()
        torch.testing.assert_close([t.grad for t in twins], [a.grad for a in args])


# ---------------------------------------------------------------- views of its own

class ViewOfOwn(torch.autograd.Function):
    """As DTensor.to_local: a view of memory without a history."""
    @staticmethod
    def forward(ctx, x):
        made = x.t() * 2
        return made.view_as(made)

    @staticmethod
    def backward(ctx, g):
        return (g * torch.rand_like(g)).t()


def used_view(call):
    x = torch.arange(6.).view(2, 3).requires_grad_()
    torch.manual_seed(0)
    results = call(x)
    refused = []
    for result in results:
        with pytest.raises(RuntimeError, match="created inside a custom Function") as info:
            result.add_(1)
        refused.append(str(info.value))
    sum(result.square().sum() for result in results).backward()
    return [*results, x.grad, torch.rand(1)], refused, [(r._is_view(), r._base.requires_grad, r.grad_fn.name(), r._version) for r in results]


@pytest.mark.parametrize("fn", [lambda x: (ViewOfOwn.apply(x.sin()),), lambda x: (y := ViewOfOwn.apply(x.sin()), y.t(), y[0])], ids=["alone", "with views"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_own_memory_are_compiled(fn, backend):
    """And what is tried of a backward draws nothing."""
    fs.reset()
    counters["aot"].clear()
    (want, *looks), (got, *others) = used_view(fn), used_view(fs.compile(fn, backend=backend, fullgraph=True))
    assert looks == others and counters["aot"]["ok"] == counters["aot"]["total"] > 0
    for a, b in zip(want, got):
        torch.testing.assert_close(a, b)
