"""Results without a common input are results of different autograd functions: a backward of some does not reach what made the inputs of others."""
import contextlib
import gc
import weakref

import pytest
import torch

import firesteel as fs


@fs.disable
def by_eager(x):
    return x.sin()


def dead_clamp(x):
    t = by_eager(x)
    x[..., 1:].add_(-0.02)
    r = x.logsumexp(1, keepdim=True)
    t.clamp_(-1.5, 1.5)
    return r


def two_ways(a, b):
    return a.exp() * 2, (b * 3).sin()


def crossed(a, b):
    """Each saves a result of the other."""
    x, y = a.exp(), b.exp()
    return x * y.detach(), y * x.detach(), x, y


def made_of(*leaves):
    return [leaf * 1 for leaf in leaves]


def leaves(count=2, shape=(4, 5)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_overwritten_input_of_an_operator_of_eager(dynamic):
    compiled = fs.compile(dead_clamp, dynamic=dynamic)
    for shape in ((4, 5), (4, 7)):
        (one,), (two,) = leaves(1, shape), leaves(1, shape)
        dead_clamp(*made_of(one)).sum().backward()
        compiled(*made_of(two)).sum().backward()
        torch.testing.assert_close(two.grad, one.grad)


@pytest.mark.parametrize("program", [two_ways, crossed])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_gradients_of_some_results(program, wanted):
    """Twice over the same graph, then with create_graph."""
    found = []
    for run in (program, fs.compile(program)):
        given = leaves()
        results = run(*made_of(*given))
        loss = sum(results[k].sum() for k in wanted)
        first = torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True)
        again = torch.autograd.grad(loss, given, allow_unused=True, create_graph=True)
        second = torch.autograd.grad(sum((g ** 2).sum() for g in again if g is not None), given, allow_unused=True)
        found.append([*first, *again, *second])
    for want, got in zip(*found):
        assert (want is None) == (got is None)
        torch.testing.assert_close(got, want)


def test_leaves_make_one_node():
    compiled = fs.compile(two_ways)
    x, y = compiled(*leaves())
    assert x.grad_fn is y.grad_fn
    x, y = compiled(*made_of(*leaves()))
    assert x.grad_fn is not y.grad_fn


def three_ways(a, b, c):
    return a.exp() * 2, (b * 3).sin(), c.cos(), c.tanh()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 1, 0), (0, 0, 1), (1, (0, 2)), (0, (1, 2), 1), (0, (0, 1), 2), (0, "write", 2, 1), (2, 2, "write", 1, 2)])
def test_backward_of_leaves_leaves_other_groups_theirs(order):
    """Each result's own backward, one after another; "write" overwrites what the last group saved."""
    seen = []
    for run in (three_ways, fs.compile(three_ways)):
        given, said = leaves(3), []
        results = run(*given)
        for step in order:
            try:
                if step == "write":
                    with torch.no_grad():
                        given[2].add_(1)
                else:
                    sum(results[k].sum() for k in (step if isinstance(step, tuple) else (step,))).backward()
                said.append("")
            except RuntimeError as error:
                said.append(str(error)[:40])
        refused = any(isinstance(step, tuple) and text for step, text in zip(order, said))      # how far the engine came before is not asked
        seen.append((said, [] if refused else [leaf.grad for leaf in given]))
    assert seen[1][0] == seen[0][0]
    torch.testing.assert_close(seen[1][1], seen[0][1])


def test_what_is_spared_is_freed():
    """With the last backward, or with the graph."""
    for spend in (lambda results: results[1].sum().backward(), lambda results: None):
        x = torch.ones(4, requires_grad=True)
        results = list(fs.compile(two_ways)(x, torch.ones(4, requires_grad=True)))
        results[0].sum().backward()
        spared = results[0].grad_fn.spared.tensors
        alive = [weakref.ref(t) for t in spared if t is not None]
        assert alive
        gc.disable()
        try:
            del spared
            spend(results)
            results.clear()
            assert not any(ref() is not None for ref in alive)
        finally:
            gc.enable()


def test_symbolic_sizes():
    compiled = fs.compile(crossed, dynamic=True)
    for shape in ((4, 5), (3, 6)):
        one, two = leaves(2, shape), leaves(2, shape)
        crossed(*made_of(*one))[1].sum().backward()
        compiled(*made_of(*two))[1].sum().backward()
        assert two[0].grad is None
        torch.testing.assert_close(two[1].grad, one[1].grad)


def test_compiled_autograd():
    compiled = fs.compile(crossed)
    for wanted in ((0,), (1,), (0, 1, 2)):
        one, two = leaves(), leaves()
        sum(crossed(*made_of(*one))[k].sum() for k in wanted).backward()
        with fs.compiled_autograd():
            sum(compiled(*made_of(*two))[k].sum() for k in wanted).backward()
        for want, got in zip(one, two):
            assert (want.grad is None) == (got.grad is None)
            torch.testing.assert_close(got.grad, want.grad)


def test_nothing_holds_itself():
    """Results that another group saved are saved without their history: no circle."""
    results = fs.compile(crossed)(*made_of(*leaves()))
    alive = [weakref.ref(result) for result in results]
    gc.disable()
    try:
        del results
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_a_saved_result_that_was_overwritten_is_noticed():
    results = fs.compile(crossed)(*made_of(*leaves()))
    with torch.no_grad():
        results[3].add_(1)      # y, which the first product reads
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


# ---------------------------------------------------------------- results whose gradient nobody can have
def break_here(x):
    fs.graph_break()


CUTS = {"none": lambda x: None, "break": break_here, "number": lambda x: float(x.detach().sum()), "sized by data": lambda x: (x > 0).nonzero(),
        "branch": lambda x: x.detach() * 2 if x.sum() > 0 else x.detach()}


def overwritten(cut):
    """`dead` cannot be differentiated: an operand is overwritten.  Nobody asks."""
    def program(x, y):
        operand = x * 1
        dead = operand.exp().sin() * operand
        operand[1:].add_(y[1:])
        cut(y)
        dead[0] = operand.sum(0)
        dead.mul_(1.5)
        return operand * 0.25 + y, dead
    return program


def outcome_of(run, ask):
    """The gradients as text, or the error."""
    try:
        return repr([None if t is None else t.mul(1e9).round().tolist() for t in ask(run)])
    except RuntimeError as error:
        return str(error).split(":")[0]


ASKED = {"the other": lambda run: gradients_of(run, lambda alive, dead, x, y: alive.sum().backward()),
         "all": lambda run: gradients_of(run, lambda alive, dead, x, y: (alive.sum() + dead.sum()).backward()),
         "of one input": lambda run: gradients_of(run, lambda alive, dead, x, y: torch.autograd.grad(dead.sum() + x.sum(), x)),
         "of the written one": lambda run: gradients_of(run, lambda alive, dead, x, y: torch.autograd.grad((dead * 2).sum(), y))}


def gradients_of(run, ask):
    given = leaves()
    asked = ask(*run(*given), *given)
    return [leaf.grad for leaf in given] + list(asked or ())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("cut", CUTS)
def test_overwritten_operand_of_a_result(cut, asked):
    program = overwritten(CUTS[cut])
    assert outcome_of(fs.compile(program), ASKED[asked]) == outcome_of(program, ASKED[asked])


def no_way(x, y):
    operand = x.sin()
    dead = operand * operand
    operand.add_(y)
    return operand, dead


@pytest.mark.parametrize("asked", ASKED)
def test_a_result_that_can_be_differentiated_no_more_is_compiled(asked):
    before = fs.counters["aot"]["untraceable_backwards"]
    assert outcome_of(fs.compile(no_way), ASKED[asked]) == outcome_of(no_way, ASKED[asked])
    assert fs.counters["aot"]["untraceable_backwards"] == before


def some_ways(x, y):
    """Nothing was overwritten on the way to y."""
    operand = x.sin()
    total = operand * operand + y
    operand.add_(1)
    return total, operand


@pytest.mark.parametrize("of", [0, 1])
def test_a_result_with_a_gradient_of_some_inputs(of):
    asked = lambda run: gradients_of(run, lambda total, operand, *given: torch.autograd.grad(total.sum(), given[of]))
    assert outcome_of(fs.compile(some_ways), asked) == outcome_of(some_ways, asked)


@pytest.mark.parametrize("first", [False, True])
def test_hooks_that_keep_what_is_overwritten(first):
    """`first`: the hooks are there when it is compiled."""
    compiled = fs.compile(no_way)
    for hooked in (first, not first, first):
        keeping = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept) if hooked else contextlib.nullcontext()
        found = []
        for run in (no_way, compiled):
            with keeping:
                found.append(outcome_of(run, ASKED["all"]))
        assert found[1] == found[0] and found[0].startswith("[" if hooked else "one of the variables")
