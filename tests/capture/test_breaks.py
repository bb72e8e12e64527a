"""Breaks: one break is one split, wherever it is; values, effects and errors are eager's."""
# ruff: noqa: B007, B904, C416, C417, UP031, UP032  (the constructs are what is tested)
import array
import contextlib
import hashlib
import re
import weakref

import numpy as np
import pytest
import torch
from harness import capture, check, make_test, same
from torch import nn

import firesteel as fs
from firesteel.artifacts import breaks, counters
from firesteel.capture import marks
from firesteel.errors import RecompileError, RecompileLimitExceeded, Unsupported

WEIGHT = nn.Parameter(torch.randn(4, 6))


@make_test(graphs=2)
def test_print(x):
    y = x + 1
    print("hello")
    return y * 2


def level3(x):
    y = x * 3
    print("deep")
    return y + 1


def level2(x):
    return level3(x + 1) * 2


def level1(x):
    z = x.sin()
    return level2(x) + z


@make_test(graphs=2)
def test_print_at_depth_three(x):
    return level1(x).cos()


def test_print_in_a_loop():
    def f(x):
        for i in range(4):
            x = x + i
            print(i)
        return x * 2
    backend = check(f, torch.randn(3), graphs=None)
    assert len(backend.graphs) <= 5


def test_a_long_loop_with_a_break_needs_few_variants():
    def f(x):
        for i in range(60):
            x = x + i
            print(end="")
        return x
    backend = check(f, torch.randn(3), graphs=None)
    assert len(backend.graphs) <= 4


@pytest.mark.parametrize("count", [1, 3, 6])
def test_straight_line_of_breaks(count):
    def f(x):
        for step in range(count):
            x = x * 2
            marks.graph_break()
        return x + 1
    lines = "\n".join("    x = x * 2 + 1\n    graph_break()" for _ in range(count))
    scope = {"graph_break": marks.graph_break}
    exec(f"def g(x):\n{lines}\n    return x - 1", scope)
    check(scope["g"], torch.randn(3), graphs=count + 1)


def test_data_dependent_branch_compiles_each_side_when_taken():
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y[0] - 1         # of another shape, so that there is no one graph of both ways
    compiled, backend = capture(f)
    positive, negative = torch.ones(3), -torch.ones(3)
    same(compiled(positive), f(positive))
    assert len(backend.graphs) == 2
    same(compiled(negative), f(negative))
    assert len(backend.graphs) == 3
    same(compiled(positive), f(positive))
    assert len(backend.graphs) == 3
    assert "depends on the data" in breaks[-1].reason and "test_breaks.py" in breaks[-1].location


@make_test(graphs=2)
def test_item(x):
    n = x.sum().item()
    return x * n


@make_test(graphs=2)
def test_break_in_with_no_grad(x):
    w = WEIGHT * x
    with torch.no_grad():
        y = w * 2
        print("inside")
        z = y + w
    return z, w * 3


def test_grad_mode_is_right_after_an_error_in_a_block():
    def f(x):
        with torch.no_grad():
            y = x + 1
            raise_it()
        return y

    def raise_it():
        raise ValueError("stop")
    compiled, _ = capture(f)
    with pytest.raises(ValueError, match="stop"):
        compiled(torch.ones(2))
    assert torch.is_grad_enabled()


@make_test(graphs=2)
def test_break_in_try(x):
    try:
        y = x + 1
        print("trying")
        y = y * 2
    except ValueError:
        y = x
    return y - 1


def fail():
    raise KeyError("gone")


fail.__firesteel_disabled__ = ""


@make_test(graphs=2)
def test_exception_of_the_breaking_call_is_caught(x):
    y = x + 1
    try:
        fail()
    except KeyError as error:
        y = y * len(error.args)
    finally:
        z = y - 1
    return z


class Tracking:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, error, trace):
        self.log.append("exit" if kind is None else kind.__name__)
        return kind is KeyError


@make_test(graphs=2)
def test_break_in_user_context_manager(x):
    log = []
    with Tracking(log) as tracking:
        y = x + 1
        print("inside")
        y = y * 2
    return y, log, tracking is not None


@make_test(graphs=2)
def test_user_context_manager_swallows(x):
    log = []
    with Tracking(log):
        y = x + 1
        fail()
    return y * 2, log


@contextlib.contextmanager
def scaled(values):
    values.append(1)
    yield 3
    values.append(2)


@make_test(graphs=1)
def test_generator_context_manager(x):
    values = []
    with scaled(values) as scale:
        y = x * scale
    return y, values


@make_test(graphs=None)
def test_break_in_generator_context_manager(x):
    values = []
    with scaled(values) as scale:
        y = x * scale
        print("inside")
        y = y + 1
    return y, values


def test_live_values_of_every_kind_cross_a_break():
    def f(x, items):
        table, pair, fn = {"a": x + 1}, (x, 2), lambda v: v + pair[1]
        it = iter([x, x * 2])
        total = 0
        size = x.shape
        ids = {1, 2}
        part = slice(0, 2)

        def bump():
            nonlocal total
            total += 1
        bump()
        items.append(total)
        print("here")
        bump()
        items.append(total)
        return next(it), fn(x), table, total, size, ids, x[part], items
    check(f, torch.randn(3, 2), [0], graphs=2)


def test_effects_before_a_break_are_visible_to_it():
    seen = []

    @marks.disable
    def look(holder, items):
        seen.append((holder.value, list(items)))

    class Holder:
        value = 0

    def f(x, holder, items):
        holder.value = 5
        items.append(1)
        look(holder, items)
        holder.value = 6
        return x + holder.value
    holder, items = Holder(), []
    compiled, _ = capture(f)
    same(compiled(torch.zeros(1), holder, items), torch.full((1,), 6.0))
    assert seen == [(5, [1])] and holder.value == 6


def test_disabled_function_breaks_once_and_says_why():
    @marks.disable(reason="it logs")
    def log(x):
        return x + 1

    def f(x):
        return log(x * 2) * 3
    breaks.clear()
    check(f, torch.randn(2), graphs=2)
    assert any("it logs" in b.reason for b in breaks)


def test_fullgraph_names_the_line():
    def f(x):
        print(x)
        return x
    compiled, _ = capture(f, fullgraph=True)
    with pytest.raises(Unsupported, match="print writes output") as error:
        compiled(torch.ones(1))
    assert "print(x)" in str(error.value) and "Hint" in str(error.value)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_programs_own_error_is_eagers(fullgraph):
    def f(x, y):
        z = x + 1
        return z @ y
    compiled, _ = capture(f, fullgraph=fullgraph)
    with pytest.raises(RuntimeError) as ours:
        compiled(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError) as theirs:
        f(torch.ones(2, 3), torch.ones(2, 3))
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
    same(compiled(torch.ones(2, 3), torch.ones(3, 2)), f(torch.ones(2, 3), torch.ones(3, 2)))


def test_wrong_arguments_raise_type_error():
    def f(x):
        def inner(a):
            return a
        return inner(x, 2)
    compiled, _ = capture(f)
    with pytest.raises(TypeError, match="positional argument"):
        compiled(torch.ones(1))
    with pytest.raises(TypeError):
        compiled(torch.ones(1), 2)


def test_raised_exception_with_effects_before_it():
    def f(x, items):
        items.append(1)
        if x.shape[0] == 2:
            raise ValueError("bad size", x.shape[0])
        return x
    compiled, _ = capture(f)
    items = []
    with pytest.raises(ValueError) as error:
        compiled(torch.ones(2), items)
    assert error.value.args == ("bad size", 2) and items == [1]


def test_assert_message():
    def f(x, n):
        assert n > 2, f"n is {n}"
        return x * n
    compiled, _ = capture(f)
    with pytest.raises(AssertionError, match="n is 1"):
        compiled(torch.ones(1), 1)
    same(compiled(torch.ones(1), 3), torch.full((1,), 3.0))


def test_a_value_on_the_stack_that_cannot_be_looked_at():
    """The rest runs eagerly, in all of its frames."""
    def common(names, wanted):
        kept = set(wanted)
        kept.intersection_update(name for name in names)
        return kept

    def f(x, names, wanted):
        found = common(names, wanted)
        return x + len(found), found
    compiled, _ = capture(f)
    got, found = compiled(torch.ones(2), [1, 2, object], {object, 2, 5})
    same(got, torch.full((2,), 3.0))
    assert found == {object, 2}


def test_recompiles_are_counted_and_explained():
    counters["recompiles"].clear()

    def f(x, flag):
        return x + 1 if flag else x - 1
    compiled, backend = capture(f)
    x = torch.ones(2)
    for flag in (True, False, True, False):
        same(compiled(x, flag), f(x, flag))
    assert len(backend.graphs) == 2
    assert sum(counters["recompiles"].values()) == 1
    assert "flag is False; it was True" in compiled.__firesteel_root__.all_regions()[0].entries[1].reason


def test_recompile_limit_runs_eagerly_with_a_warning(caplog):
    from firesteel.config import config

    def f(x, name):
        return x + len(name)
    compiled, backend = capture(f)
    with config.patch(recompile_limit=2):
        for n in range(5):
            same(compiled(torch.ones(2), "a" * n), f(torch.ones(2), "a" * n))
    assert len(backend.graphs) == 2
    assert len([r for r in caplog.records if "recompile_limit" in r.getMessage()]) == 1
    strict, _ = capture(f, fullgraph=True)
    with config.patch(recompile_limit=1), pytest.raises(RecompileLimitExceeded, match="name"):
        strict(torch.ones(2), "a")
        strict(torch.ones(2), "b")
    with config.patch(error_on_recompile=True), pytest.raises(RecompileError):
        strict(torch.ones(2), "c")


def test_continuation_at_the_limit_goes_on_eagerly():
    from firesteel.config import config

    def inner(x, name):
        y = x + 1
        print(end="")
        return y * len(name)

    def f(x, name):
        return inner(x, name) + 1
    compiled, backend = capture(f)
    with config.patch(recompile_limit=1):
        for n in range(1, 4):
            same(compiled(torch.ones(2), "a" * n), f(torch.ones(2), "a" * n))
    assert len(backend.graphs) == 2


def test_stances():
    def f(x):
        return x + 1
    compiled, backend = capture(f)
    with marks.Stance("force_eager"):
        compiled(torch.ones(2))
    assert not backend.graphs
    with marks.Stance("eager_on_recompile"):
        compiled(torch.ones(2))
    with marks.Stance("fail_on_recompile"), pytest.raises(RecompileError, match="nothing is, for such a call"):
        compiled(torch.ones(2))
    assert not backend.graphs
    compiled(torch.ones(2))
    with marks.Stance("eager_on_recompile"):
        same(compiled(torch.ones(2, dtype=torch.float64)), torch.full((2,), 2.0, dtype=torch.float64))
    assert len(backend.graphs) == 1
    with marks.Stance("fail_on_recompile"), pytest.raises(RecompileError):
        compiled(torch.ones(2, dtype=torch.float64))


def test_module_in_a_loop_with_a_break_shares_its_code():
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def f(x):
        for layer in layers:
            x = layer(x)
            print(end="")
        return x
    compiled, backend = capture(f)
    x = torch.randn(2, 4)
    same(compiled(x), f(x))
    assert len(backend.graphs) <= 3


@make_test(graphs=1)
def test_backward_is_captured(x):
    w = WEIGHT
    loss = (w * 2).sum()
    loss.backward()
    grad, w.grad = w.grad, None
    return grad + x


@make_test(graphs=1)
def test_grad_modes(x):
    w = WEIGHT * x
    with torch.no_grad():
        a = w * 2
        with torch.enable_grad():
            b = w * 3
    with torch.set_grad_enabled(False):
        c = w * 4
    return a, b, c, w * 5


@make_test(graphs=1)
def test_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y, x @ x.t()


@torch.no_grad()
def decorated(x):
    return x * 2


@make_test(graphs=1)
def test_decorated_with_no_grad(x):
    w = WEIGHT * x
    return decorated(w), w * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_states_of_torch_are_put_back_after_a_break_inside_of_them(backend, capsys):
    layer = torch.nn.Linear(4, 2)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            y = layer(x)
            print("between")
            z = y @ y.t()
        return z, layer(x)

    fs.reset()
    compiled, x = fs.compile(f, backend=backend), torch.randn(2, 4)
    for _ in range(2):
        for got, want in zip(compiled(x), f(x)):
            torch.testing.assert_close(got, want)
            assert got.requires_grad == want.requires_grad
        assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert fs.counters["stats"]["unique_graphs"] == 2


def test_bound_methods_of_builtins_cross_a_break():
    def f(x):
        step, sub = iter([1, 2]).__next__, re.compile("a").sub
        print(end="")
        return x + step() + step(), sub("b", "aa")
    check(f, torch.ones(2), graphs=None)


def test_a_match_that_crosses_a_break_is_no_reason_to_compile_again():
    find = fs.disable(lambda text: re.search("a+", text))

    def f(x, text):
        y = x + 1
        found = find(text)
        return y * 2, found

    compiled, backend = capture(f)
    for text in ("a", "baa", "aaa"):
        assert compiled(torch.ones(2), text)[1].group() == re.search("a+", text).group()
    assert len(backend.graphs) == 2


def test_a_method_of_an_object_of_native_code_breaks_where_it_is_called():
    def program(x, digest, seeds):
        y = x + 1
        digest.update(b"a")
        state = seeds.generate_state(2)
        return y * 2, digest.hexdigest(), state.tolist()
    fs.reset()
    for _ in range(2):
        counters.clear()
        found = fs.compile(program)(torch.ones(3), hashlib.md5(), np.random.SeedSequence(3))
        assert sum(counters["graph_break"].values()) == 4       # update, generate_state, tolist, hexdigest
        same(found, program(torch.ones(3), hashlib.md5(), np.random.SeedSequence(3)))


def test_an_attribute_of_the_instance_hides_a_method_of_an_opaque_object():
    class Words(dict):
        def words(self):
            return 1

    def program(x, words):
        return x + words.words()
    plain, hiding = Words({object(): 1, (): 2}), Words({object(): 1, (): 2})
    hiding.words = lambda: 2
    compiled = fs.compile(program)
    assert [compiled(torch.zeros(()), one).item() for one in (plain, hiding, plain)] == [1, 2, 1]


def test_a_bound_method_of_native_code_is_guarded_by_its_owner_and_name():
    """Each lookup makes another object; another owner or method is another program."""
    def program(x, call):
        y = x + 1
        call()
        return y * 2
    compiled, first, second = fs.compile(program), array.array("i", [1]), array.array("i", [2])
    before = sum(counters["recompiles"].values())
    for owner, name, recompiles in ((first, "tolist", 0), (first, "tolist", 0), (second, "tolist", 1), (first, "tolist", 1), (first, "reverse", 2)):
        assert torch.equal(compiled(torch.ones(3), getattr(owner, name)), torch.full((3,), 4.0))
        assert sum(counters["recompiles"].values()) - before == recompiles


class Thing:
    def __init__(self, data=None):
        self.data = data


class Noted:
    log = []

    def __del__(self):
        self.log.append("gone")


def referred(x):
    thing = Thing(x * 2)
    reference = weakref.ref(thing)
    fs.graph_break()
    y = x + 1
    fs.graph_break()
    return reference().data + y


def referred_tensor(x):
    y = x * 2
    reference = weakref.ref(y)
    fs.graph_break()
    return reference() + 1


def in_weak_containers(x):
    things, names, thing = weakref.WeakSet(), weakref.WeakValueDictionary(), Thing(x * 2)
    things.add(thing)
    names["it"] = thing
    fs.graph_break()
    return sum(one.data for one in things) + len(things), names["it"].data


def with_a_finalizer(x):
    noted = Noted()     # noqa: F841  # lives until the function returns
    fs.graph_break()
    Noted.log.append("here")
    return x + 1


@pytest.mark.parametrize("program", [referred, referred_tensor, in_weak_containers, with_a_finalizer])
def test_variables_keep_objects_alive_behind_a_break(program):
    compiled = fs.compile(program)
    for k in range(2):
        found = []
        for fn in (program, compiled):
            Noted.log.clear()
            found.append((fn(torch.ones(2) * k), [*Noted.log]))
        assert str(found[0]) == str(found[1])


def test_a_profiler_entered_inside():
    def program(x):
        with torch.autograd.profiler.profile() as recorded:
            y = (x @ x).sin()
        return y * 2, len(recorded.function_events) > 0
    compiled, x = fs.compile(program), torch.ones(2, 2)
    for _ in range(2):
        assert str(compiled(x)) == str(program(x))
