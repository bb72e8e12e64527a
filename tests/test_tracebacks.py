"""Errors of compiled programs name the user's lines, as eager's tracebacks do."""
import os
import traceback

import pytest
import torch

import firesteel as fs


def check(v):
    if v.shape[0] > 2:
        raise ValueError("too many rows")
    return v


def raises(x):
    y = x + 1
    check(y)
    return y


def wrong_attribute(x):
    y = x + 1
    return y @ None.T      # type: ignore[attr-defined]


def wrong_shapes(x):
    y = x + 1
    return y @ torch.ones(7, 7)


def out_of_range(x):
    return x[torch.tensor([5, 9])] + 1


def singular(x):
    y = x * 0
    return torch.linalg.inv(y[:, :3])


def wrapped(x):
    try:
        return raises(x)
    except ValueError as error:
        raise KeyError("again") from error


def behind_a_break(x):
    print(end="")
    return raises(x)


def breaking_call_fails(x):
    y = x + 1
    os.stat("/no/such/file")
    return y


def in_a_generator(x):
    def rows():
        yield x[0]
        check(x)
    return list(rows())


def frames(error):
    """The lines in this file: of the error and of its cause."""
    def of(e):
        return [(f.lineno, f.name) for f in traceback.extract_tb(e.__traceback__) if f.filename == __file__ and f.name not in ("met", "<lambda>")]
    return of(error), of(error.__cause__) if error.__cause__ is not None else None


def met(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return error
    raise AssertionError("no error")


PROGRAMS = [raises, wrong_attribute, wrong_shapes, out_of_range, singular, wrapped, behind_a_break, breaking_call_fails, in_a_generator]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_lines_are_eagers(program):
    x = torch.ones(3, 3)
    eager, compiled = met(program, x), fs.compile(program)
    for _ in range(2):
        found = met(compiled, x)
        assert type(found) is type(eager) and str(found) == str(eager)
        assert frames(found) == frames(eager)


def test_a_raised_object_keeps_its_own_history():
    try:
        check(torch.ones(3))
    except ValueError as caught:
        kept = caught

    def again(x):
        raise kept

    found = met(fs.compile(again), torch.ones(3))
    assert found is kept
    assert [name for _, name in frames(found)[0]][-1] == "check"


def test_no_operator_of_the_user_runs_twice():
    calls = []

    @torch.library.custom_op("tracebacks::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise RuntimeError("from inside")

    fails.register_fake(lambda x: torch.empty_like(x))
    assert "from inside" in str(met(fs.compile(lambda x: fails(x) + 1), torch.ones(3)))
    assert calls == [1]
