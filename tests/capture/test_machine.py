"""The machine on straight code, control flow over Python values, containers, calls and modules: one graph, eager's values."""
# ruff: noqa: B007, B904, C416, C417, UP031, UP032  (the constructs are what is tested)
import collections
import dataclasses
import functools
import math
import operator

import torch
import torch.nn.functional as F
from harness import capture, check, make_test, same
from torch import nn

GLOBAL_SCALE = 3
Pair = collections.namedtuple("Pair", ["first", "second"])


@make_test(ops=3)
def test_straight_line(x, y):
    z = x + y
    return torch.relu(z) * 2


@make_test
def test_methods_and_functions(x):
    return x.sum(dim=-1, keepdim=True).exp(), F.softmax(x, dim=-1), x.view(6, 4).t(), x.size(0), x.shape


@make_test
def test_globals(x):
    return x * GLOBAL_SCALE + math.pi


@make_test
def test_branches_on_python_values(x):
    if x.shape[0] > 3 and x.dim() == 2:
        x = x + 1
    else:
        x = x - 1
    return x if x.dtype is torch.float32 else x.float()


@make_test(ops=5)
def test_loop_is_unrolled(x):
    for i in range(5):
        x = x + i
    return x


@make_test
def test_while_break_continue(x):
    n = 0
    while True:
        n += 1
        if n == 2:
            continue
        if n > 4:
            break
        x = x * n
    else:
        x = x - 100
    return x, n


@make_test
def test_containers(x, y):
    items = [x, y]
    items.append(x + y)
    items[0] = items[2] * 2
    first, *rest = items
    table = {"a": first, "b": rest[0]}
    table["c"] = (x, [y])
    return items, table, items[1:], len(items), "a" in table, list(table), table.get("d", 5)


@make_test
def test_comprehensions(x):
    squares = [x * i for i in range(4) if i % 2]
    table = {str(i): x + i for i in range(3)}
    kinds = {i % 2 for i in range(5)}
    return squares, table, kinds, sum(v.sum() for v in table.values())


@make_test(graphs=0)
def test_f_strings_and_text(x):
    name = f"{x.shape[0]:>3}|{'a'!r}|{1.5:.2f}"
    return x, name.upper().split("|"), "-".join(["p", "q"]), "%d %s" % (3, "u"), "{}".format(7)


def helper(x, scale=2, *rest, bias=1, **more):
    return x * scale + bias + len(rest) + more.get("extra", 0)


@make_test
def test_calls_with_all_kinds_of_arguments(x):
    packed = {"extra": 5}
    return helper(x), helper(x, 3), helper(x, bias=4), helper(x, 1, 2, 3), helper(x, **packed), helper(*(x, 2), bias=0)


@make_test
def test_closures_and_lambdas(x, y):
    total = 0

    def add(value):
        nonlocal total
        total += value
        return y + total
    return add(1) + add(2), (lambda a, b=3: a * b)(x), total


@make_test
def test_recursion(x):
    def power(n):
        return x if n == 0 else power(n - 1) * x
    return power(4)


@make_test
def test_builtins(x, y):
    pairs = list(zip([x, y], (1, 2)))
    best = max([3, 1, 2]), min(4, 2), sum([1, 2]), abs(-3), round(2.567, 1), divmod(7, 2)
    flags = any([False, True]), all([]), isinstance(x, torch.Tensor), callable(helper), hasattr(x, "shape"), type(x) is torch.Tensor
    return [a * b for a, b in pairs], list(enumerate("ab", 1)), sorted([3, 1, 2], key=lambda v: -v), best, flags, list(reversed([1, 2])), \
        list(map(lambda v: v + 1, [1, 2])), list(filter(None, [0, 1, 2])), getattr(x, "nothing", 7), int("3"), str(4), repr("a"), bool([])


@make_test
def test_operators(x, y):
    return x @ y.t(), -x, ~(x > 0), x ** 2, x // 2, x % 3, 1 - x, 2 / (x.abs() + 1), x == y, x != 0, (x > 0) & (y > 0), operator.add(x, y)


@make_test
def test_in_place(x):
    y = x + 0
    y += 1
    y.mul_(2)
    y[0] = 5.0
    y[1:, ::2] -= 3
    return y


def test_in_place_on_an_input_returns_the_input():
    def f(x):
        x.add_(1)
        return x, x * 2
    compiled, _ = capture(f)
    x = torch.zeros(3)
    out, twice = compiled(x)
    assert out is x
    same(x, torch.ones(3))
    same(twice, torch.full((3,), 2.0))


def test_returned_inputs_are_the_same_objects():
    compiled, backend = capture(lambda x, table: (x, table))
    x, table = torch.ones(2), {"a": 1}
    out = compiled(x, table)
    assert out[0] is x and out[1] is table and not backend.graphs


@make_test
def test_indexing(x):
    return x[0], x[..., None], x[1:3, -1], x[[0, 2]], x[:, torch.tensor([1, 3])]


@make_test
def test_unpacking_a_tensor(x):
    a, b, c, d = x
    return a + b, torch.stack([row * 2 for row in (c, d)]), len(x)


@make_test
def test_multiple_results(x):
    values, indices = x.max(dim=1)
    top = torch.topk(x, 2)
    a, b = x.split(3, dim=1)
    return values, indices, top.values, a + b, torch.max(x, 0)[1]


@make_test
def test_namedtuple(x, y):
    pair = Pair(x, second=y)
    swapped = pair._replace(first=pair.second)
    return pair, swapped.first + pair[0], Pair._fields


@dataclasses.dataclass
class Options:
    scale: float
    name: str = "plain"

    def apply(self, x):
        return x * self.scale

    @property
    def double(self):
        return self.scale * 2

    @classmethod
    def make(cls, scale):
        return cls(scale, "made")

    @staticmethod
    def shift(x):
        return x + 1


@make_test
def test_objects(x):
    options = Options(2.0)
    made = Options.make(3.0)
    made.extra = made.double
    return options.apply(x), made, Options.shift(x), made.name, made == Options(3.0, "made")


class Base:
    def __init__(self, bias):
        self.bias = bias

    def run(self, x):
        return x + self.bias


class Derived(Base):
    def __init__(self, bias):
        super().__init__(bias + 1)

    def run(self, x):
        return super().run(x) * 2


class Vector:
    def __init__(self, data):
        self.data = data

    def __add__(self, other):
        return Vector(self.data + other.data)

    def __getitem__(self, i):
        return self.data[i]

    def __len__(self):
        return 3

    def __eq__(self, other):
        return isinstance(other, Vector)

    def __call__(self, x):
        return x * self.data

    def __iter__(self):
        return iter([1, 2, 3])

    def __contains__(self, item):
        return item == 2


@make_test
def test_inheritance_and_super(x):
    return Derived(1).run(x)


@make_test
def test_special_methods(x, y):
    total = Vector(x) + Vector(y)
    return total.data, total[0], len(total), total == Vector(x), total(y), [i for i in total], 2 in total, bool(total)


@make_test
def test_generators(x):
    def scaled(n):
        for i in range(n):
            yield x * i
    return list(scaled(3)), sum(v.sum() for v in scaled(2)), next(scaled(2))


@make_test
def test_partial_and_reduce(x):
    return functools.partial(helper, scale=4)(x), functools.reduce(lambda a, b: a + b, [x, x, x])


@make_test
def test_try_without_a_break(x):
    try:
        value = {"a": 1}["b"]
    except KeyError as error:
        value = len(error.args)
    finally:
        x = x + 1
    try:
        raise ValueError("no", 3)
    except (TypeError, ValueError) as error:
        value += error.args[1]
    return x, value


@make_test(graphs=0)
def test_match_none_and_is(x):
    y = None
    return x if y is None else y, x is x, x is not None, not x.requires_grad


@make_test
def test_torch_factories(x):
    zeros = torch.zeros(x.shape[0], 6, dtype=x.dtype, device=x.device)
    return x + zeros, torch.arange(4), torch.ones_like(x), torch.full((2,), 3), torch.rand(2, 3)


# -- modules ------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.5))
        self.table = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
        self.register_buffer("offset", torch.ones(width))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.steps = 2

    def forward(self, x, kind="a"):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i else self.layers[0](x)
        for name, module in self.table.items():
            x = module(x)
        x = self.table[kind](self.head(self.norm(x)))
        return x * self.scale + self.offset * self.steps if self.training else x


def test_module_tree():
    torch.manual_seed(0)
    block = Block(6)
    compiled, backend = capture(block)
    x = torch.randn(4, 6)
    for mode in (True, False, True):
        block.train(mode)
        torch.manual_seed(3)
        expected = block(x)
        torch.manual_seed(3)
        same(compiled(x), expected)
    assert len(backend.graphs) == 2
    names = [n.name for n in backend.graphs[0].graph.nodes if n.op == "placeholder"]
    assert len(names) == 13 and len(set(names)) == 13


def test_gradients_flow_through_an_eager_graph():
    block = nn.Linear(6, 6)
    compiled, _ = capture(block)
    x = torch.randn(4, 6)
    compiled(x).sum().backward()
    ours = block.weight.grad.clone()
    block.zero_grad()
    block(x).sum().backward()
    same(ours, block.weight.grad)


def test_nodes_know_their_place():
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    compiled, backend = capture(block)
    compiled(torch.randn(2, 6))
    nodes = [n for n in backend.graphs[0].graph.nodes if n.op == "call_function"]
    assert all(n.meta["val"].shape == (2, 6) for n in nodes)
    assert "linear.py" in nodes[0].meta["stack_trace"]
    assert [cls for _, cls in nodes[0].meta["nn_module_stack"].values()] == [nn.Sequential, nn.Linear]


def test_module_hooks_run_in_order():
    block = nn.Linear(6, 6)
    seen = []
    block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block.register_forward_hook(lambda module, args, out: out + 1)
    compiled, backend = capture(block)
    x = torch.randn(4, 6)
    same(compiled(x), block(x))
    assert len(backend.graphs) == 1
    block.register_forward_hook(lambda module, args, out: out * 3)
    same(compiled(x), block(x))
    assert not seen


def test_hook_added_after_compiling():
    block = nn.Linear(6, 6)
    compiled, _ = capture(block)
    x = torch.randn(4, 6)
    same(compiled(x), block(x))
    block.register_forward_hook(lambda module, args, out: out * 3)
    same(compiled(x), block(x))


def test_attribute_effects_on_modules():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.calls += 1
            self.seen.append(x.shape[0])
            self.mean = self.mean * 0.5 + x.mean(0)
            return x * self.calls

    ours, theirs = Counter(), Counter()
    compiled, backend = capture(ours)
    x = torch.randn(4, 6)
    for _ in range(4):
        same(compiled(x), theirs(x))
        assert ours.calls == theirs.calls and ours.seen == theirs.seen
        same(ours.mean, theirs.mean)
    assert len(backend.graphs) <= 3


def test_effects_on_arguments_and_globals():
    global GLOBAL_SCALE

    def f(x, items, table):
        global GLOBAL_SCALE
        GLOBAL_SCALE += 1
        items.append(x)
        items[0] = x * 2
        table["sum"] = x.sum()
        del table["old"]
        table.setdefault("n", 0)
        return x * GLOBAL_SCALE
    compiled, _ = capture(f)
    x = torch.ones(2)
    ours, theirs = ([1], {"old": 1}), ([1], {"old": 1})
    before = GLOBAL_SCALE
    out = compiled(x, *ours)
    GLOBAL_SCALE = before
    same(out, f(x, *theirs))
    same(list(ours), list(theirs))
    GLOBAL_SCALE = before


def test_lstm_loop_unrolled():
    cell = nn.LSTMCell(6, 8)

    def run(x, h, c):
        outs = []
        for t in range(5):
            h, c = cell(x[t], (h, c))
            outs.append(h)
        return torch.stack(outs), (h, c)
    check(run, torch.randn(5, 4, 6), torch.zeros(4, 8), torch.zeros(4, 8), graphs=1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * ctx.scale * 10, None


def test_autograd_function_is_one_node():
    def f(x):
        return Scaled.apply(x * 2, 3.0).sum()
    backend = check(f, torch.randn(3, requires_grad=True), graphs=1)
    assert [getattr(node.target, "__name__", node.target) for node in backend.graphs[0].graph.nodes if node.op.startswith("call")] == [
        "mul", "Scaled_apply", "getitem", "sum"]
    compiled, _ = capture(f)
    x = torch.randn(3, requires_grad=True)
    compiled(x).backward()
    same(x.grad, torch.full((3,), 60.0))


class Noisy(torch.autograd.Function):
    seen: list = []

    @staticmethod
    def forward(ctx, x):
        Noisy.seen.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_autograd_function_with_effects_breaks():
    for requires_grad, graphs in ((True, 3), (False, 1)):       # its forward is a graph of its own; without a gradient it is inlined
        compiled, backend = capture(lambda x: Noisy.apply(x + 1) + 1)
        before = len(Noisy.seen)
        compiled(torch.ones(2, requires_grad=requires_grad))
        assert len(Noisy.seen) == before + 1 and len(backend.graphs) == graphs


@make_test
def test_yield_from(x):
    def inner(n):
        for i in range(n):
            yield x + i
        return n

    def outer():
        count = yield from inner(2)
        yield x * count
    return list(outer())


def test_named_parameters():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled, backend = capture(lambda x: {name: (p * x).sum() for name, p in block.named_parameters()})
    x = torch.ones(1)
    out = compiled(x)
    assert list(out) == [name for name, _ in block.named_parameters()] and len(backend.graphs) == 1


def test_capture_keeps_no_module_alive():
    import weakref
    block = nn.Linear(4, 4)
    gone = weakref.ref(block.weight)
    compiled, backend = capture(lambda module, x: module(x))
    compiled(block, torch.ones(2, 4))
    del block
    assert gone() is None and backend.graphs
