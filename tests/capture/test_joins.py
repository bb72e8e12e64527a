"""Branches on data: both ways in one graph, values, gradients and effects as in eager."""
import copy
import random

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import firesteel as fs


def counted(backend="native"):
    graphs = []

    def compiler(gm, inputs):
        graphs.append(gm)
        return fs.backends.lookup_backend(backend)(gm, inputs)
    return compiler, graphs


def same(fn, *rows, grad=True, backend="native", seed=0):
    """One graph under fullgraph for all rows of arguments; values and gradients of each as in eager."""
    fs.reset()
    compiler, graphs = counted(backend)
    compiled = fs.compile(fn, backend=compiler, fullgraph=True)
    for row in rows:
        results = []
        for f in (fn, compiled):
            given = [a.detach().clone().requires_grad_(grad and a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in row]
            torch.manual_seed(seed)
            random.seed(seed)
            out = f(*given)
            leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
            if leaves:
                sum(t.sum() * (k + 1) for k, t in enumerate(leaves)).backward()
            results.append((out, [a.grad for a in given if isinstance(a, torch.Tensor)], [a.detach() for a in given if isinstance(a, torch.Tensor)]))
        texts = [[leaf for leaf in tree_flatten(result)[0] if not isinstance(leaf, (torch.Tensor, int, float))] for result in results]
        assert texts[0] == texts[1]
        assert tree_flatten(results[0])[1] == tree_flatten(results[1])[1]
        torch.testing.assert_close(*([leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, (torch.Tensor, int, float))] for result in results[::-1]))
    assert len(graphs) == 1
    return graphs[0]


X = torch.linspace(0.5, 2, 12).reshape(3, 4)


def if_else(x):
    if x.sum() > 0:
        y = x.sin()
    else:
        y = x.cos() * 2
    return y + 1


def only_one_way(x):
    y = x * 2
    if x.mean() > 0:
        y = y.exp()
    return y - x


def expression(x):
    return (x * 3 if x.max() > 1 else x - 3).relu()


def early_return(x):
    if (x > 0).all():
        return x.log(), x
    x = x * 2
    return x.abs(), x


def nested(x):
    if x.sum() > 0:
        if x[0, 0] > 0.75:
            x = x + 1
        else:
            x = x - 1
    else:
        x = x.neg()
    return x * x


def two_conditions(x):
    if x.sum() > 0 and x[0, 0] < 10:
        return x * 2
    return x / 2


def several_results(x):
    a, b = x, x + 1
    if x.sum() > 3:
        a, b = b, a
        pair = (a, [b])
    else:
        pair = (b, [a * 2])
    return a * 3, b, pair


def without_gradients(x):
    with torch.no_grad():
        if x.sum() > 0:
            scale = x.abs().mean()
        else:
            scale = x.abs().max()
    return x * scale


def nested_without_gradients(x):
    with torch.no_grad():
        if x.sum() > 0:
            scale = x * 2
            if x[0, 0] > 0.2:
                scale = scale + 1
        else:
            scale = x.abs()
    return x * scale


def no_grad_inside(x):
    y = x * 2
    if x.sum() > 0:
        with torch.no_grad():
            y = y * 3
        y = y + x
    return y


def in_a_function(x):
    def choose(t):
        if t.sum() > 0:
            return t.sin()
        return t.tanh()
    return choose(choose(x) - 3)


def with_cond(x):
    return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() + 1, (x,))


def random_in_one_way(x):
    if x.sum() > 0:
        return x + torch.rand_like(x)
    return x


def written_in_one_way(x):
    y = x * 1
    if x.sum() > 0:
        y.add_(1)
    return y * 2


def written_in_both(x):
    y, z = x.exp() * x, x.new_zeros(3, 2)
    before = (y + 1).sin()
    if x.sum() > 0:
        y.mul_(x)
        if y.max() > 1:
            y[0] = 5
    else:
        y.zero_()
    with torch.no_grad():
        if x.max() > 1:
            z[1] = x.flatten()[:2]
    y.add_(3)
    return before * y, z * x.sum()


def written_through_views(x):
    y = x * 2
    part, same = y[1:], y.detach()
    if x.sum() > 0:
        part.mul_(2)
        z = y + 1
        y.add_(z)
    else:
        z = y - part.sum()
    return z, part, y * same


def written_in_a_loop(x):
    y = x * 1
    for row in x:
        if row.sum() > 0:
            y.mul_(2)
        else:
            y.sub_(row)
    return y * x


def cell_changes(x):
    y = x

    def use():
        return y * 2
    if x.sum() > 0:
        y = x + 1
    return use()


PROGRAMS = [if_else, only_one_way, expression, early_return, nested, two_conditions, several_results, without_gradients, nested_without_gradients, no_grad_inside,
            in_a_function, with_cond, random_in_one_way, written_in_one_way, written_in_both, written_through_views, written_in_a_loop, cell_changes]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_one_graph(program):
    same(program, (X,), (-X,), (X * 0.1,))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_partitioned"])
def test_other_backends(backend):
    same(nested, (X,), (-X,), (X * 0.1,), backend=backend)


def test_symbolic_sizes():
    def f(x, w):
        h = x @ w
        if h.sum() > 0:
            h = torch.cat([h, x]).view(-1, x.shape[1])
        else:
            h = torch.cat([x, x])
        return h.sum(0) * x.shape[0]
    compiler, graphs = counted()
    compiled = fs.compile(f, backend=compiler, fullgraph=True, dynamic=True)
    for n in (3, 5, 7):
        for sign in (1, -1):
            x, w = torch.rand(n, 4, requires_grad=True), (torch.rand(4, 4) * sign).requires_grad_()
            got, want = compiled(x, w), f(x, w)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), (x, w), allow_unused=True), torch.autograd.grad(want.sum(), (x, w), allow_unused=True))
    assert len(graphs) == 1


class Layers(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), draw

    def forward(self, x):
        seen = ()
        for layer in self.layers:
            seen += (x,)
            if self.training and self.draw() < 0.5:
                continue
            x = layer(x).relu()
        return x, seen


class LayersWithFlag(Layers):
    def forward(self, x):
        for layer in self.layers:
            drop = False
            if self.training:
                chance = self.draw()
                if chance < 0.5:
                    drop = True
            if not drop:
                x = layer(x).relu()
        return (x,)


@pytest.mark.parametrize("kind", [Layers, LayersWithFlag])
@pytest.mark.parametrize("draw", [lambda: torch.rand([]), lambda: random.uniform(0, 1)], ids=["torch", "python"])
def test_layerdrop(draw, kind):
    eager = kind(draw)
    compiled = copy.deepcopy(eager)
    compiler, graphs = counted()
    run = fs.compile(compiled, backend=compiler, fullgraph=True)
    for seed in range(6):
        outs = []
        for f in (eager, run):
            torch.manual_seed(seed)
            random.seed(seed)
            out = f(X)
            out[0].sum().backward() if out[0].requires_grad else None
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])
    assert len(graphs) == 1


class Slot:
    def __init__(self):
        self.kept, self.filled = None, False

    def put(self, tensor):
        self.dtype, self.kept, self.filled = tensor.dtype, tensor, True


class Cache:
    def __init__(self, count):
        self.slots, self.updated = [Slot() for _ in range(count)], dict.fromkeys(range(count), False)

    def facts(self):
        return [vars(slot) for slot in self.slots], self.updated


def assert_like(got, want):
    (got, made), (want, wanted) = tree_flatten(got), tree_flatten(want)
    assert made == wanted
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other) if isinstance(other, torch.Tensor) else None
        assert isinstance(other, torch.Tensor) or one is other or type(one) is type(other) and one == other


def with_cache(x, w, draws):
    """Layerdrop that leaves some entries of a cache made inside as they were."""
    cache = Cache(3)
    for n, slot in enumerate(cache.slots):
        if draws[n] < 0.5:
            continue
        x = (x @ w).sin()
        slot.put(x * 2)
        cache.updated[n] = True
    return x, cache


DRAWS = [torch.tensor(row) for row in ([0.1, 0.9, 0.9], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9], [0.1, 0.1, 0.1])]


def compare_caches(compiled, fn, x, w, draws):
    (got, cache), (want, eager) = compiled(x, w, draws), fn(x, w, draws)
    assert_like((got, *cache.facts()), (want, *eager.facts()))
    loss = [out.sum() + sum(slot.kept.sum() for slot in made.slots if slot.filled) for out, made in ((got, cache), (want, eager))]
    grads = [torch.autograd.grad(one, (x, w), allow_unused=True) for one in loss]
    assert_like(*grads)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cache_that_one_way_fills(dynamic):
    fs.reset()
    compiler, graphs = counted()
    compiled = fs.compile(with_cache, backend=compiler, fullgraph=True, dynamic=dynamic)
    for draws in DRAWS:
        compare_caches(compiled, with_cache, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), draws)
    assert len(graphs) == 1


def test_a_cache_that_is_read_after_all():
    def reads(x, w, draws):
        out, cache = with_cache(x, w, draws)
        return out + 1 if cache.updated[0] else out, cache
    compiled = fs.compile(reads)
    for draws in DRAWS:
        compare_caches(compiled, reads, torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), draws)


def test_attributes_that_are_listed_after_all():
    def lists(x, draws):
        slot = Slot()
        if draws[0] < 0.5:
            slot.put(x)
        return hasattr(slot, "dtype"), sorted(vars(slot)), slot.kept is None
    compiled = fs.compile(lists)
    for draws in DRAWS:
        assert compiled(X, draws) == lists(X, draws)


def test_a_condition_that_is_written_later():
    def f(x, flag):
        slot = Slot()
        if flag:
            slot.put(x.sin())
        flag.logical_not_()
        return slot
    compiled = fs.compile(f)
    for truth in (True, False):
        got, want = (fn(X, torch.tensor(truth)) for fn in (compiled, f))
        assert_like(vars(got), vars(want))


def test_a_draw_that_cannot_be_below():
    """rand() < 0.0: the layer is never dropped; the number is drawn."""
    model = Layers(None)

    def f(x):
        kept = []
        for layer in model.layers:
            if torch.rand([]) < 0.0 or torch.rand(()) >= 1.0:
                continue
            x = layer(x)
            kept.append(float(len(kept)))
        return x, kept, torch.rand(2)
    same(f, (X,), backend="eager")


def test_flags_that_are_read_after_all():
    def f(x):
        large = False
        if x.sum() > 0:
            large = True
        y = x.sin() if large else x.cos()
        return y + 1
    same(f, (X,), (-X,))
    compiled = fs.compile(lambda x: (f(x), "large" if x.sum() > 0 else "small"))
    for x in (X, -X):
        torch.testing.assert_close(compiled(x)[0], f(x))
        assert compiled(x)[1] == ("large" if x is X else "small")


def test_a_way_that_makes_and_looks_at_dictionaries():
    def f(x, settings):
        for scale in (1, 2):
            if x.sum() > 0:
                given = {"scale": scale, **settings}
                x = x * given["scale"] + given["shift"]
        return x + settings["shift"]
    compiled = fs.compile(f, fullgraph=True)
    for x in (X, -X):
        torch.testing.assert_close(compiled(x, {"shift": 0.5}), f(x, {"shift": 0.5}))


def test_the_same_tensor_comes_back():
    def f(x):
        if x.sum() > 0:
            x = x + 1
        return x
    compiled = fs.compile(f, fullgraph=True)
    assert compiled(-X) is not compiled(X)
    given = -X
    assert compiled(given) is given


def splits(f, *rows):
    """Not joined: a break, and still eager's values and effects."""
    compiler, graphs = counted()
    compiled = fs.compile(f, backend=compiler)
    for row in rows:
        one, two = copy.deepcopy(row), copy.deepcopy(row)
        torch.testing.assert_close(compiled(*two), f(*one))
        torch.testing.assert_close(two, one, equal_nan=True)
    return graphs


def test_a_later_write_of_what_may_be_the_input():
    def f(x):
        y = x
        if x.sum() > 0:
            y = x * 2
        y.add_(1)
        return y + x
    splits(f, (X,), (-X,))


def test_a_later_write_behind_flags_that_differ():
    """Joined at the second place, where the flag is not read any more; then found unjoinable: the branch is not tried again for ever."""
    def f(x):
        if x.sum() > 0:
            large, y = True, x
        else:
            large, y = False, x * 2
        z = y + 1 if large else y - 1
        y.mul_(2)
        return y, z
    splits(f, (X,), (-X,))


@pytest.mark.parametrize("change", [lambda y: y.unsqueeze_(0), lambda y: y.t_(), lambda y: y.requires_grad_()])
def test_a_way_that_changes_more_of_a_tensor_than_its_elements(change):
    def f(x):
        y = x.detach() * 1
        if x.sum() > 0:
            change(y)
        return y * 2
    splits(f, (X,), (-X,))


class Holder:
    pass


class Stores(torch.nn.Module):
    """Attributes and entries of the user's objects that one way stores."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.last, self.held, self.named = None, Holder(), {"a": torch.ones(2)}
        self.held.value = torch.zeros(2)

    def forward(self, x):
        y = x * self.mean.clone()
        if x.sum() > 0:
            self.mean = self.mean + x.detach()
            self.count += 1
            self.last = x.detach() * 2
            if x.max() > 1:
                self.held.value = self.mean * 3
                self.mean.mul_(2)
        else:
            self.mean.add_(1)
            self.named["a"] = x.detach()
        return y + self.mean + self.held.value * self.named["a"] + self.count

    def state(self):
        return [self.mean.clone(), self.count.clone(), self.last, self.held.value, self.named["a"]]


@pytest.mark.parametrize("backend", ["native", "eager", "aot_eager"])
def test_what_the_ways_store_in_the_users_objects(backend):
    plain, stored = Stores(), Stores()
    compiler, made = counted() if backend == "native" else (backend, None)
    compiled = fs.compile(stored, backend=compiler, fullgraph=True)
    for scale in (0.1, -1, 3, -2, 0.5):
        xs = [(torch.tensor([0.5, 1.0]) * scale).requires_grad_() for _ in range(2)]
        kept = stored.held.value
        want, got = plain(xs[0]), compiled(xs[1])
        for result in (want, got):
            result.sum().backward()
        torch.testing.assert_close([got, xs[1].grad, *stored.state()], [want, xs[0].grad, *plain.state()])
        assert scale > 1 or stored.held.value is kept


def test_a_counter_in_one_way():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            if x.sum() > 0:
                self.calls += 1
            return x * 2
    module = Counts()
    compiled = fs.compile(module)
    for x in (X, -X, X):
        torch.testing.assert_close(compiled(x), x * 2)
    assert module.calls == 2


def test_effects_in_one_way():
    def f(x, seen):
        if x.sum() > 0:
            seen.append(1)
        return x * len(seen)
    splits(f, (X, []), (-X, []))


def test_lists_that_both_ways_change():
    def f(x):
        kept, other, alias = [x], [x, 7], []
        alias.append(kept)
        if x.sum() > 0:
            kept.append(x + 1)
            kept += [3, (x, x * 2)]
            other[0] = x * 3
        else:
            kept.extend([x.sin(), 3, (x.cos(), x)])
        kept.append(x)
        return kept, other, len(alias[0]), alias[0] is kept
    same(f, (X,), (-X,))


def test_a_list_that_is_read_inside():
    def f(x):
        kept = []
        for k in range(3):
            if (x.sum() + k) > 0:
                kept.append(x * 2 + (kept[-1] if kept else 0))
            else:
                kept.append(x - 1)
        return torch.stack(kept)
    same(f, (X,), (-X,))


def test_lists_and_numbers_that_differ():
    def f(x):
        kept, n = [x], 0
        if x.sum() > 0:
            kept.append(x + 1)
            n = n + 1
        return kept[-1] * 2 + n, len(kept)
    splits(f, (X,), (-X,))


def test_shapes_that_differ():
    def f(x):
        if x.sum() > 0:
            x = x[0]
        return x * 2
    splits(f, (X,), (-X,))


def test_loops_on_data():
    def f(x):
        while x.sum() < 100:
            x = x * 2
        return x
    splits(f, (X,), (X * 7,))


def test_a_loop_that_data_ends():
    def f(x):
        for _ in range(5):
            x = x * 2
            if x.sum() > 60:
                break
        return x + 1
    splits(f, (X,), (X * 7,))


def test_gradients_taken_inside():
    def f(x):
        w = x.detach().requires_grad_()
        y = w * 2
        if x.sum() > 0:
            y = y.sin()
        return torch.autograd.grad(y.sum(), w)[0]
    splits(f, (X,), (-X,))


# -- checks -------------------------------------------------------------------------------------------------------------
def raised(f, *args):
    try:
        return f(*args)
    except Exception as error:
        return type(error), str(error)


def checks(f, *rows, graphs=1):
    """One graph; errors, values and what is left in the arguments as in eager."""
    compiler, made = counted()
    compiled = fs.compile(f, backend=compiler, fullgraph=True)
    for row in rows:
        one, two = copy.deepcopy(row), copy.deepcopy(row)
        want, got = raised(f, *one), raised(compiled, *two)
        assert type(got) is type(want)
        if isinstance(want, tuple) and isinstance(want[0], type):
            assert got == want
        else:
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(two, one, equal_nan=True)
    assert len(made) == graphs


def test_a_check_with_data_in_its_message():
    def f(x):
        if not (x > 0).all():
            raise ValueError(f"not positive: {x.min()}")
        return x.log()
    checks(f, (X,), (-X,), (X * 2,))


def test_assert():
    scope = {"torch": torch}        # pytest rewrites those of this file
    exec("def f(x):\n    y = x.log()\n    assert torch.isfinite(y).all(), 'not finite'\n    return y + 1", scope)
    checks(scope["f"], (X,), (-X,))


def test_effects_and_writes_before_a_check():
    def f(x, seen):
        seen.append(1)
        x.mul_(2)
        if x.sum() < 0:
            raise RuntimeError("negative")
        seen.append(2)
        return x + len(seen)
    checks(f, (X, []), (-X, []))


def test_a_check_that_is_caught_inside():
    def inner(x):
        if x.sum() < 0:
            raise RuntimeError("negative")
        return x + 1

    def f(x):
        try:
            y = inner(x * 2)
        except RuntimeError:
            y = x * 10
        return y * 3
    checks(f, (X,), (-X,))


def test_a_check_in_one_way():
    def f(x):
        if x[0, 0] > 1:
            if x.sum() > 40:
                raise ValueError(f"too much: {x.sum():.2f}")
            return x * 2
        return x * 3
    checks(f, (X,), (X * 2.1,), (X * 4,))


def test_checks_of_distributions():
    def f(mean, scale, value):
        return torch.distributions.Normal(mean, scale, validate_args=True).log_prob(value)
    checks(f, (X, X + 1, X + 2), (X, -X, X + 2), (X, X + 1, X - float("nan")), (X, X + 2, X + 3))


def test_gradients_through_a_check():
    def f(x):
        y = x * x
        if y.sum() < 0:
            raise ValueError("never")
        return y.sin()
    same(f, (X,), (-X,))


# -- questions about data -----------------------------------------------------------------------------------------------
def test_equal_and_allclose():
    def f(x, y):
        z = x * 2
        if torch.equal(z, y):
            z = z + 1
        if not z.allclose(y, atol=0.5):
            z = z * y
        return z, torch.equal(x, y)
    same(f, (X, X * 2), (X, X), (X * 3, X * 2))


def test_a_question_with_another_answer_for_the_same_tensor():
    def f(x):
        return torch.equal(x, x), torch.allclose(x, x), torch.allclose(x, x, equal_nan=True)
    compiled = fs.compile(f, fullgraph=True)
    for x in (X, X * float("nan")):
        assert compiled(x) == f(x)
