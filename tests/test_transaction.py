"""Compiling is a transaction: interrupted at any line it leaves no trace, and the next call compiles and gives eager's result."""
from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.utils._python_dispatch as dispatch_modes
from torch.overrides import TorchFunctionMode

import firesteel as fs
from firesteel import torchstate, transaction
from firesteel.runtime import cpu

sys.path.insert(0, __file__.rpartition("/")[0])
from interrupts import Lines, interrupted  # noqa: E402


class Doing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@contextlib.contextmanager
def under_a_transform():
    """Inside of torch.func.grad, say."""
    torch._C._functorch._grad_increment_nesting()
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()


SITUATIONS = {
    "plain": contextlib.nullcontext, "no gradients": torch.no_grad, "saved tensor hooks": hooks, "inference": torch.inference_mode,
    "function mode": Doing, "default device": lambda: torch.device("cpu"), "casting": lambda: torch.autocast("cpu"), "transform": under_a_transform,
}


def program(x, w):
    with torch.no_grad():
        scale = x.mean()
    return torch.softmax(x @ w, -1) * scale


def run(fn, x, w):
    """Values and, where there are any, gradients."""
    out = fn(x, w)
    return out, (torch.autograd.grad(out.sum(), w)[0] if out.requires_grad else None)


def states():
    """What an exception must not change on this thread."""
    flags = {name: value for name, value in vars(dispatch_modes).items() if name.startswith("_is_in_")}
    stacks = [[stack(i) for i in range(size())] for size, stack in (
        (torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at), (torch._C._len_torch_function_stack, torch._C._get_function_stack_at))]
    return {"grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(), "device": torch.get_default_device(), "stacks": stacks, "flags": flags,
            "inference": torch.is_inference_mode_enabled(), "casting": torch.is_autocast_enabled("cpu"), "random": torch.get_rng_state().tolist(),
            "threads": torch._C._is_multithreading_enabled(), "replay": torch._C._is_view_replay_enabled(),
            "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True), "transforms": torch._C._functorch.get_dynamic_layer_stack_depth(),
            "compiling": fs.is_compiling(), "undo": transaction._begun.undo, "owned": cpu._lock.held() or cpu._library_lock()._is_owned()}


def check_interrupted(x, w, stop, situation=contextlib.nullcontext):
    fs.reset()
    compiled = fs.compile(program)
    with situation():
        expected, before = run(program, x, w), states()
        error = interrupted(lambda: run(compiled, x, w), stop)
        assert states() == before
        del error       # and the frames in its traceback
        assert states() == before
        torch.testing.assert_close(run(compiled, x, w), expected, rtol=1e-2 if situation is SITUATIONS["casting"] else None,
                                   atol=1e-2 if situation is SITUATIONS["casting"] else None)
    (region,) = compiled.__firesteel_root__.all_regions()
    assert len(region.variants()) == 1 and not region.eager_only


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    x, w = torch.randn(6, 8), torch.randn(8, 8, requires_grad=True)
    with fs.config.patch(verify=False):     # verifiers are half of the lines
        run(fs.compile(program), x, w)      # what is made once in a process
        yield x, w


def lines_of(x, w, situation=contextlib.nullcontext):
    fs.reset()
    lines, compiled = Lines(), fs.compile(program)
    with situation(), lines:
        run(compiled, x, w)
    return lines


@pytest.mark.parametrize("name", SITUATIONS)
def test_an_interrupt_at_any_line_leaves_no_trace(inputs, name):
    lines = lines_of(*inputs, SITUATIONS[name])
    for part in range(5):
        check_interrupted(*inputs, 1 + part * lines.count // 5 + 11 * part, SITUATIONS[name])


def test_an_interrupt_as_a_context_is_left(inputs):
    """Where `finally` has not begun."""
    places = lines_of(*inputs).inside(dispatch_modes.TorchDispatchMode.__exit__, contextlib._GeneratorContextManager.__exit__, transaction.Lock.holding,
                                      torch.autograd.set_multithreading_enabled.__exit__, torch.set_grad_enabled.__exit__)
    assert len(places) > 15
    for stop in places[::2]:
        check_interrupted(*inputs, stop)


def test_an_interrupt_while_code_is_linked(inputs):
    """It is linked on a thread of its own, which comes to its end."""
    places = lines_of(*inputs).inside(cpu.Jit.load, cpu.load, cpu.compile_text, transaction.aside)
    assert len(places) > 12
    for stop in places:
        check_interrupted(*inputs, stop)


def test_a_thread_aside_holds_nothing_when_it_tells_its_end():
    """What it would free behind that may meet the end of the process."""
    class Held:
        def fail(self):
            raise ValueError

    for function in (Held.__repr__, Held.fail):
        held = Held()
        call, results, errors, seen = [(function, (held,))], [], [], []
        alive = weakref.ref(held)
        del held
        transaction._work(call, results, errors, lambda: (errors and errors[0].with_traceback(None), seen.append(alive())))
        assert seen == [None] and len(results) + len(errors) == 1
    with pytest.raises(ValueError):
        transaction.aside(Held().fail)


def test_a_name_of_a_library_is_not_given_twice(monkeypatch):
    """An exception behind the linking itself: the name is in use, though nobody has the library."""
    text = "define i64 @{0}() {{\n  ret i64 7\n}}\n"
    cpu.compile_text(text.format("before"), "before")
    monkeypatch.setattr(cpu.Word, "of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cpu.compile_text(text.format("during"), "during")
    monkeypatch.undo()
    assert cpu.compile_text(text.format("during"), "during") and cpu.compile_text(text.format("after"), "after")


def test_an_interrupt_while_a_stack_is_away():
    with hooks(), hooks():
        top, take = torch._C._autograd._top_saved_tensors_default_hooks, torchstate.take_saved_tensor_hooks

        def work():
            transaction.atomic(lambda: take().put_back())
        lines = Lines()
        with lines:
            work()
        for stop in range(1, lines.count + 1):
            before = top(True)
            assert interrupted(work, stop) is not None and top(True) == before
            taken = take()
            assert len(taken.items) == 2
            taken.put_back()
            del taken


def test_an_exception_at_any_line_gives_a_lock_back():
    lock, lines = transaction.Lock(), Lines()
    with lines:
        lock.holding(lock.holding, int)
    for stop in range(1, lines.count + 1):
        assert interrupted(lambda: lock.holding(lock.holding, int), stop) is not None
        assert not lock.held()
        other = threading.Thread(target=lock.holding, args=(int,), daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()


def test_an_interrupt_while_undoing_starts_it_again():
    done = []

    def undone():
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    def fail():
        transaction.on_failure(undone)
        torch._C._set_grad_enabled(False)
        raise ValueError
    with pytest.raises(KeyboardInterrupt):
        transaction.atomic(fail)
    assert done == [0, 1] and torch.is_grad_enabled() and transaction._begun.undo is None


def test_a_context_that_was_left_suspended_is_finished_with_the_transaction():
    seen = []

    @transaction.context
    def entered():
        try:
            yield
        finally:
            seen.append("left")

    kept = []

    def fail():
        kept.append(entered())
        kept[0].__enter__()
        raise KeyboardInterrupt         # before __exit__ begins
    with pytest.raises(KeyboardInterrupt):
        transaction.atomic(fail)
    assert seen == ["left"]
    kept.clear()
    assert seen == ["left"]


def test_an_error_of_the_program_is_undone_too():
    def broken(x):
        with torch.no_grad():
            return x.view(7)
    with pytest.raises(RuntimeError):
        fs.compile(broken, fullgraph=True)(torch.ones(3))
    assert torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()


def test_at_the_limit_an_interrupted_variant_is_made_by_the_next_call():
    def scaled(x, k):
        return x * k
    x = torch.ones(3)
    with fs.config.patch(recompile_limit=2, specialize_int=True):
        compiled = fs.compile(scaled)
        compiled(x, 2), compiled(x, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("firesteel.capture.translate.translate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                compiled(x, 4)
        compiled(x, 4), compiled(x, 5)
        (region,) = compiled.__firesteel_root__.all_regions()
        assert len(region.entries) == 3


def test_collections_wait_until_a_graph_is_compiled():
    before, seen = gc.get_threshold(), []

    def backend(gm, inputs):
        seen.append(gc.get_threshold())
        if len(seen) > 1:
            raise ValueError("no")
        return gm.forward

    fs.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen[0] == (transaction.YOUNG, before[1], transaction.NEVER) and gc.get_threshold() == before
    with pytest.raises(fs.errors.BackendError):
        fs.compile(torch.cos, backend=backend)(torch.ones(2))
    assert gc.get_threshold() == before


def test_loading_leaves_nothing_young_and_keeps_what_a_program_froze():
    class Cycle:
        pass

    def make():
        one = Cycle()
        one.me = one
        return weakref.ref(one)

    gone = transaction.loaded(make)
    assert gc.get_count()[1:] == (0, 0) and gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        transaction.loaded(dict)
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_an_interrupt_leaves_no_exception_behind():
    @contextlib.contextmanager
    def context():
        yield

    def program():
        with context(), contextlib.suppress(KeyError):
            raise KeyError
    for stop in range(1, 100):
        found = interrupted(program, stop)
        assert sys.exception() is None
        if found is None:
            break
    assert 10 < stop < 99
