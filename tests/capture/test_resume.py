"""Resuming real frames in the middle."""
import sys
import traceback
import types
import weakref

import pytest

sys.path.insert(0, __file__.rsplit("/", 1)[0])

import bytecode_checks  # noqa: E402
import concrete  # noqa: E402
import elsewhere  # noqa: E402

from firesteel.capture.code import program  # noqa: E402
from firesteel.capture.resume import VALUE, make_resume, resume_function  # noqa: E402


def stop(function, args, opname, skip=0):
    """A frame just before the first instruction of this name."""
    frame = concrete.Frame(function, args)
    while frame.steps[frame.at].opname != opname or (skip := skip - 1) >= 0:
        frame.step()
    return frame


def test_every_point_of_every_program():
    wrong, count = bytecode_checks.resumed(2)
    assert count > 1000 and wrong == 0


@pytest.mark.parametrize("version", elsewhere.OTHERS)
def test_every_point_of_every_program_elsewhere(version):
    elsewhere.run_check(version, "resumed", 2)


def test_given_iterator_goes_on_where_it_is():
    def f(xs):
        total = 0
        for x in xs:
            total += x
        return total
    at = next(step for step in program(f.__code__) if step.opname == "FOR_ITER").index
    iterator = iter([1, 2, 3])
    next(iterator)
    assert resume_function(f.__code__, at, ["xs", "total"], [VALUE], globals())(None, 100, iterator) == 105


def test_error_shows_the_users_line():
    def f(x):
        y = x + 1
        return y / 0
    at = next(step for step in program(f.__code__) if step.opname == "BINARY_OP" and step.argval == "/").index
    with pytest.raises(ZeroDivisionError) as caught:
        resume_function(f.__code__, at, ["x", "y"], [VALUE, VALUE], globals())(1, 2, 2, 0)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.lineno, last.line) == (f.__code__.co_firstlineno + 2, "return y / 0")


def test_awaited_call_is_inside_the_try():
    def f(g):
        try:
            return g(1)
        except KeyError as error:
            return error.args[0]
    at = next(step for step in program(f.__code__) if step.opname == "CALL").index
    function = resume_function(f.__code__, at + 1, ["g"], [], globals(), awaits=at)
    assert function(None, lambda: 5) == 5
    assert function(None, lambda: {}["missing"]) == "missing"


def test_awaited_result_may_be_dropped():
    def f(x):
        try:
            x.a = 1
        except AttributeError as error:
            return str(error)
        return "set"
    at = next(step for step in program(f.__code__) if step.opname == "STORE_ATTR").index
    function = resume_function(f.__code__, at + 1, ["x"], [], globals(), awaits=at, drop=True)
    assert function(None, lambda: "unwanted") == "set"
    assert function(None, lambda: (_ for _ in ()).throw(AttributeError("no a"))) == "no a"


def test_cells_stay_shared():
    def f():
        count = 0

        def bump():
            nonlocal count
            count += 1
        count += 10
        return bump, count
    cell = types.CellType(5)
    at = next(step for step in program(f.__code__) if step.opname == "BINARY_OP").index
    bump, count = resume_function(f.__code__, at, ["bump"], [VALUE, VALUE], globals(), {"count": cell})(cell_reader(cell), 5, 10)
    assert count == 15 and cell.cell_contents == 15 and bump() == 15


def cell_reader(cell):
    return lambda: cell.cell_contents


def test_stack_items_do_not_live_longer():
    class Thing:
        pass

    def f(make, alive):
        x = make()
        del x
        return alive()
    thing = Thing()
    seen = weakref.ref(thing)
    at = next(step for step in program(f.__code__) if step.opname == "STORE_FAST" and step.argval == "x").index
    function = resume_function(f.__code__, at, ["make", "alive"], [VALUE], globals())
    box = [thing]
    del thing
    still_there = function(None, lambda: seen() is not None, box.pop())     # not inside assert, which keeps its operands
    assert still_there is False


def test_unbound_local_stays_unbound():
    def f(x):
        if x:
            y = 1
        return y
    at = next(step for step in program(f.__code__) if step.opname == "LOAD_FAST" and step.argval == "y").index
    with pytest.raises(UnboundLocalError):
        resume_function(f.__code__, at, ["x"], [], globals())(0)


def test_generators_are_refused():
    def f():
        yield 1
    with pytest.raises(ValueError, match="generator"):
        make_resume(f.__code__, 3, [], [])


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no kind"):
        make_resume(test_generators_are_refused.__code__, 3, [], ["thing"])
