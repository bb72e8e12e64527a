"""Context managers of torch: made outside, used as decorators, entered by contextlib.ExitStack."""
import contextlib
import threading

import pytest
import torch

import firesteel as fs

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET, CASTING, INFERRING = torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()


def within(context):
    def program(x):
        with context:
            y = x @ x
        return y, x @ y.float()
    return program


def in_a_stack(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        y = x @ x
    return y, x * 2, torch.is_grad_enabled()


def in_a_stack_with_a_break(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        y = x @ x
        print(end="")
        z = y * 2
    return z, x * 2, torch.is_grad_enabled()


def by_calls(x):
    context = torch.no_grad()
    context.__enter__()
    y = x * 2
    context.__exit__(None, None, None)
    return y, x * 3


def of_another_device(x):
    with torch.autocast("cuda", enabled=False):
        return x @ x, torch.is_autocast_enabled("cuda")


def old_names(x):
    with torch.cuda.amp.autocast(enabled=False), torch.cpu.amp.autocast():
        return x @ x


WHOLE = {
    "no_grad": within(QUIET), "autocast": within(CASTING), "inference_mode": torch.no_grad()(within(INFERRING)), "stack": in_a_stack, "calls": by_calls,
    "device": of_another_device, "old names": old_names, "decorated": torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: x @ x),
    "decorated for inference": torch.inference_mode()(lambda x: x + 1), "decorated with a label": torch.profiler.record_function("a")(lambda x: x * 3),
    "decorated twice": torch.no_grad()(torch.autocast("cpu")(lambda x: x @ x)), "decorated by a setting": torch.set_grad_enabled(False)(lambda x: x + 1),
}


def described(result):
    leaves = torch.utils._pytree.tree_leaves(result)
    return [(t.dtype, t.requires_grad, t.is_inference(), t.tolist()) if isinstance(t, torch.Tensor) else t for t in leaves]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_one_graph(name, requires_grad):
    def x():
        return torch.full((3, 3), 0.5).requires_grad_(requires_grad)
    assert described(fs.compile(WHOLE[name], fullgraph=True)(x())) == described(WHOLE[name](x()))


def test_a_break_between_entering_and_leaving():
    def x():
        return torch.full((3, 3), 0.5).requires_grad_()
    assert described(fs.compile(in_a_stack_with_a_break)(x())) == described(in_a_stack_with_a_break(x()))
    assert torch.is_grad_enabled()


def test_another_context_is_another_program():
    class Holder:
        context = torch.autocast("cpu", dtype=torch.bfloat16)

    def program(x):
        with Holder.context:
            return x @ x

    compiled = fs.compile(program, fullgraph=True)
    assert compiled(torch.ones(2, 2)).dtype is torch.bfloat16
    Holder.context = torch.autocast("cpu", dtype=torch.float16)
    assert compiled(torch.ones(2, 2)).dtype is torch.float16
    Holder.context = torch.autocast("cpu", enabled=False)
    assert compiled(torch.ones(2, 2)).dtype is torch.float32


# -- locks ----------------------------------------------------------------------------------------------------------------
LOCKS = {"lock": threading.Lock, "rlock": threading.RLock, "condition": threading.Condition, "condition of a lock": lambda: threading.Condition(threading.Lock()),
         "semaphore": threading.Semaphore, "bounded": lambda: threading.BoundedSemaphore(2)}


def is_free(lock):
    """Can another thread take it?"""
    taken = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False) and lock.release() is None))
    other.start()
    other.join()
    return taken[0]


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_locks_are_taken_and_released(name, by_hand):
    lock, notes, x = LOCKS[name](), [], torch.randn(3)

    def under(x):
        with lock:
            notes.append(x * 2)
        return x + 1

    def by_calls(x):
        lock.acquire()
        notes.append(x * 2)
        lock.release()
        return x + 1
    compiled = fs.compile(by_calls if by_hand else under, fullgraph=True)
    for count in (1, 2, 3):
        torch.testing.assert_close(compiled(x), x + 1)
        assert len(notes) == count and is_free(lock)


@pytest.mark.parametrize("name", LOCKS)
def test_locks_made_inside(name):
    make, left = LOCKS[name], []

    def f(x):
        lock = make()
        with lock:
            x = x * 2
        if lock.acquire(blocking=False):
            left.append(lock)
        return x + 1
    compiled = fs.compile(f, fullgraph=name not in ("condition", "semaphore", "bounded"))
    for count in (1, 2):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert len(left) == count
    assert left[0] is not left[1] and [is_free(lock) for lock in left] == [name == "bounded"] * 2


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_made_inside_that_nobody_holds(make):
    def f(x):
        try:
            make().release()
        except RuntimeError:
            return x + 1
        return x
    torch.testing.assert_close(fs.compile(f, fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_an_event_made_inside():
    def f(x):
        event = threading.Event()
        event.set()
        return x + 1 if event.is_set() else x
    torch.testing.assert_close(fs.compile(f, fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_notifying_under_a_condition():
    condition, woken = threading.Condition(), []

    def wait():
        with condition:
            woken.append(condition.wait(20))

    def notify(x):
        with condition:
            condition.notify_all()
        return x + 1
    waiter = threading.Thread(target=wait)
    compiled = fs.compile(notify)
    compiled(torch.zeros(1))
    waiter.start()
    while not condition._waiters:       # it has not begun to wait
        pass
    assert compiled(torch.zeros(1)) == 1
    waiter.join(20)
    assert woken == [True]
