"""Exceptions and context managers of the language: raised, chained, grouped, caught, cleaned up; one graph each, eager's values."""
# ruff: noqa: B007, B012, B017, B904, BLE001, SIM105, SIM117, TRY002, TRY003, TRY300, TRY301, RET505  (the constructs are what is tested)
import concurrent.futures
import contextlib
import functools
import sys

import pytest
import torch
from harness import capture, check, make_test

import firesteel as fs

one = functools.partial(make_test, fullgraph=True)


class Custom(Exception):
    def __init__(self, code, detail="none"):
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self):
        return f"{self.code}:{self.detail}"


class Special(Custom):
    pass


@one
def test_raise_and_catch_with_attributes(x):
    try:
        raise Special(3, detail="deep")
    except (ValueError, Custom) as e:
        return x * e.code, e.detail, e.args, str(e), type(e).__name__, isinstance(e, Custom)


@one
def test_the_exception_being_handled(x):
    try:
        raise Special(3)
    except Custom as e:
        try:
            raise KeyError("inner")
        except KeyError:
            inner = type(sys.exception()).__name__
        return x * 2, inner, sys.exception() is e


def test_no_exception_is_being_handled():
    """On a thread of its own: whoever runs the tests may be handling one."""
    def fn(x):
        return x * 2, sys.exception()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(check, fn, torch.randn(4)).result()


@one
def test_raise_from_and_context(x):
    try:
        try:
            raise KeyError("first")
        except KeyError as inner:
            raise ValueError("second") from inner
    except ValueError as e:
        cause = e.__cause__
        return x + 1, str(e), type(cause).__name__, cause.args, e.__suppress_context__


@one
def test_implicit_context(x):
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")
    except ValueError as e:
        return x + 1, type(e.__context__).__name__, e.__cause__ is None


@one
def test_raise_from_none_and_bare_raise(x):
    try:
        try:
            raise KeyError("k")
        except KeyError:
            raise
    except KeyError as e:
        first = e.args
    try:
        raise ValueError from None
    except ValueError as e:
        return x + 1, first, e.args, e.__suppress_context__


def early(x, log):
    try:
        return x + 1
    finally:
        log.append("finally")


def overriding(x):
    for i in range(3):
        try:
            if i == 1:
                continue
            if i == 2:
                return x + i
        finally:
            x = x * 2
    return x


def swallowed(x):
    try:
        raise ValueError("lost")
    finally:
        return x - 1


@one
def test_finally_with_return(x):
    log = []
    return early(x, log), log, overriding(x), swallowed(x)


@one
def test_try_else_and_nested(x):
    order = []
    try:
        order.append("try")
    except ValueError:
        order.append("except")
    else:
        order.append("else")
        try:
            raise KeyError(1)
        except ValueError:
            order.append("wrong")
        except KeyError:
            order.append("right")
    finally:
        order.append("finally")
    return x + 1, order


def deep(n):
    if n == 0:
        raise IndexError("bottom")
    return deep(n - 1)


@one
def test_exception_through_frames(x):
    try:
        deep(4)
    except LookupError as e:
        return x * 2, str(e)


@one
def test_errors_of_builtins_are_caught(x):
    found = []
    for act in (lambda: [][1], lambda: {}["k"], lambda: int("z"), lambda: 1 / 0, lambda: None.missing, lambda: undefined_name,  # noqa: F821
                lambda: len(3), lambda: "a" + 1, lambda: next(iter([])), lambda: (1, 2).index(5), lambda: [1].remove(2)):
        try:
            act()
        except Exception as e:
            found.append(type(e).__name__)
    return x + 1, found


@one
def test_except_star(x):
    seen = []
    try:
        raise ExceptionGroup("group", [ValueError("v"), KeyError("k"), ExceptionGroup("inner", [ValueError("w")])])
    except* ValueError as group:
        seen.append(len(group.exceptions))
    except* KeyError as group:
        seen.append([type(e).__name__ for e in group.exceptions])
    return x + 1, seen


@one
def test_except_star_on_a_plain_exception(x):
    seen = []
    try:
        raise ValueError("plain")
    except* (TypeError, ValueError) as group:
        seen.append((type(group).__name__, [str(e) for e in group.exceptions]))
    return x + 1, seen


def test_except_star_raises_the_rest():
    def fn(x):
        try:
            raise ExceptionGroup("group", [ValueError("v"), KeyError("k")])
        except* ValueError:
            x = x + 1
        return x

    compiled, _ = capture(fn)
    with pytest.raises(ExceptionGroup) as caught:
        compiled(torch.ones(3))
    assert [type(e) for e in caught.value.exceptions] == [KeyError]


def test_uncaught_exceptions_keep_their_chain():
    def fn(x):
        y = x + 1
        try:
            raise KeyError("first")
        except KeyError as e:
            raise Custom(y.shape[0]) from e

    for settings in ({}, {"fullgraph": True}):
        compiled, _ = capture(fn, **settings)
        with pytest.raises(Custom) as caught:
            compiled(torch.ones(3))
        assert caught.value.code == 3 and isinstance(caught.value.__cause__, KeyError)


def test_raising_a_non_exception_is_a_type_error():
    def fn(x):
        raise x.shape

    compiled, _ = capture(fn)
    with pytest.raises(TypeError, match="BaseException"):
        compiled(torch.ones(3))


@one
def test_name_of_the_exception_is_unbound_after(x):
    try:
        raise ValueError
    except ValueError as e:     # noqa: F841  the name is what is tested
        pass
    try:
        e  # noqa: B018, F821
    except UnboundLocalError as missing:
        return x + 1, type(missing).__name__


# -- context managers ---------------------------------------------------------------------------------------------------
class Manager:
    def __init__(self, log, name, swallow=False):
        self.log, self.name, self.swallow = log, name, swallow

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self.name

    def __exit__(self, kind, value, trace):
        self.log.append((f"exit {self.name}", None if kind is None else kind.__name__))
        return self.swallow


@one
def test_with_several_managers(x):
    log = []
    with Manager(log, "a") as a, Manager(log, "b", True) as b, torch.no_grad():
        x = x * 2
        raise ValueError("inside")
    return x, a, b, log, torch.is_grad_enabled()


@one
def test_with_return_and_break(x):
    log = []

    def leave(t):
        for i in range(3):
            with Manager(log, str(i)):
                if i == 1:
                    break
                with Manager(log, "inner"):
                    t = t + i
        with Manager(log, "last"):
            return t * 2

    return leave(x), log


@contextlib.contextmanager
def tagged(log, name):
    log.append(f"enter {name}")
    try:
        yield name
    except KeyError:
        log.append("swallowed")
    finally:
        log.append(f"exit {name}")


@one
def test_contextmanager_functions(x):
    log = []
    with tagged(log, "a") as a:
        x = x + 1
        with tagged(log, "b"):
            raise KeyError("k")
    try:
        with tagged(log, "c"):
            raise ValueError("v")
    except ValueError as e:
        log.append(str(e))
    return x, a, log


@one
def test_exit_stack_nullcontext_suppress_closing(x):
    log = []
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(tagged(log, n)) for n in "ab"]
        stack.callback(log.append, "callback")
        x = x * 2
    with contextlib.nullcontext(5) as five:
        x = x + five
    with contextlib.suppress(ValueError, KeyError):
        raise ValueError
    with contextlib.closing(tagged_items(log)) as items:
        first = next(items)
    return x, names, log, first


def tagged_items(log):
    try:
        yield 1
        yield 2
    finally:
        log.append("closed")


@one
def test_contextmanager_as_decorator(x):
    log = []

    @tagged(log, "d")
    def run(t):
        log.append("body")
        return t * 3
    return run(x), log


class Switch(contextlib.ContextDecorator):
    depth = 0

    def __enter__(self):
        Switch.depth += 1
        return self

    def __exit__(self, *exc):
        Switch.depth -= 1


@one
def test_context_decorator_class(x):
    @Switch()
    def run(t):
        return t * Switch.depth
    with Switch():
        y = run(x)
    return y, Switch.depth


def test_an_exception_that_the_caller_handles():
    def asked(x):
        return x + 1, sys.exception(), sys.exc_info()[0]

    def raised_again(x):
        y = x + 1
        if y.shape[0] == 2:
            raise
        return y

    def program(function):
        found = [function(torch.ones(2))[1:] if function is not again else None]
        try:
            raise Custom(3)
        except Custom as error:
            try:
                found += [one is error or one for one in function(torch.ones(2))[1:]]
            except Custom as same:
                found.append(same is error)
        try:
            found.append(function(torch.ones(2))[1:])
        except RuntimeError as error:
            found.append(str(error))
        return found
    again = raised_again
    want = program(asked), program(again)
    compiled = fs.compile(asked)
    again = fs.compile(raised_again)
    assert (program(compiled), program(again)) == want
