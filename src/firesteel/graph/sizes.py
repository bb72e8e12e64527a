"""Questions about sizes, for the shape rules.

A size is a plain int or an integer Expr.  Everything here is decided at once for ints and for identical Exprs; any
other question goes to the ShapeEnv of the world at work, which answers it and records the answer as a guard.

    same(3, 3)             # True
    same(s0, 4)            # asks the ShapeEnv: a guard s0 == 4 or s0 != 4
    product((s0, 4))       # s0 * 4
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from firesteel import transaction
from firesteel.config import config
from firesteel.errors import DataDependentError
from firesteel.sym.expr import Expr, Size, eq, le, lt, product  # noqa: F401  # product: also known from here


class DataShape(DataDependentError):
    """The size of an operator's result depends on data, and settings do not ask for a symbol."""

    def __init__(self, operator: str):
        super().__init__(f"The output size of {operator} depends on data.", hint="Set fs.config.capture_dynamic_output_shape_ops.")
        self.operator = operator


class NotKnown(Exception):
    """The answer to a question about a layout needs a guard; see `where_known`."""


class _Current(threading.local):
    """The ShapeEnv that answers in this thread: that of the last dispatch of abstract tensors, or of the `asking` around a question."""
    env: Any = None
    guards: bool = True         # may a question about a layout be answered by a guard?
    shape: Sequence[Size] = ()  # see `where_known`


current = _Current()
transaction.keep("who answers questions about sizes", current)


@transaction.context
def asking(env: Any) -> Iterator[None]:
    """Questions inside go to `env`."""
    before, current.env = current.env, env
    try:
        yield
    finally:
        current.env = before


def ask(condition: Expr | bool) -> bool:
    """The truth of a condition over sizes, guarded."""
    return current.env.decide(condition) if type(condition) is Expr else bool(condition)


def same(a: Size, b: Size) -> bool:
    return a is b or (ask(eq(a, b)) if type(a) is Expr or type(b) is Expr else a == b)


def less(a: Size, b: Size) -> bool:
    return ask(lt(a, b))


def must(condition: Expr | bool, message: str) -> None:
    """What eager would raise an error for: a question where the sizes are known now, else a fact that is checked at run time."""
    if not (current.env.assume(condition, message) if type(condition) is Expr else condition):
        raise RuntimeError(message)


def must_match(a: Size, b: Size, message: str) -> None:
    if a is not b:
        must(eq(a, b), message)


def expands_alone(a: Size, b: Size) -> bool:
    """Are two sizes that meet in broadcasting equal?  Neither is the number 1.  Where only run time knows, they have to be, since a
    size of 1 would give another program."""
    if a is b:
        return True
    if not unknown(a, b):
        return same(a, b)
    must_match(a, b, f"The size {a} must match the size {b}: sizes that depend on data are not broadcast")
    return True


def unknown(*sizes: Any) -> bool:
    """Does one of them depend on what only run time knows?"""
    return any(type(s) is Expr and not current.env.is_backed(current.env.simplify(s)) for s in sizes)


def layout_same(a: Size, b: Size) -> bool:
    """`same` for layouts, where "no" is a safe answer: asked of sizes that only run time knows, they are neither 0 nor 1.  Nor is a size
    1 that is so only as it happens, such as half of a size of 2."""
    if a is b:
        return True
    if type(a) is Expr and a.op != "symbol" and type(b) is int and b == 1 and current.env.known(eq(a, b)) is None \
            and current.env.has_hint(a) and current.env.hint(a) == 1:
        return False
    return _ask_layout(eq(a, b)) if type(a) is Expr or type(b) is Expr else a == b


def layout_less(a: Size, b: Size) -> bool:
    return _ask_layout(lt(a, b))


def _ask_layout(condition: Expr | bool) -> bool:
    if type(condition) is not Expr:
        return bool(condition)
    if current.guards:
        return current.env.decide_layout(condition)
    known = current.env.known(condition)
    if known is None:
        known = current.env.known_of_elements(condition, current.shape)
    if known is None:
        raise NotKnown(condition)
    return known


def where_known(function: Callable[..., Any], *args: Any, shape: Sequence[Size] = ()) -> Any:
    """What a function of layouts returns, or None if that takes a guard.  Where several ways lead to one layout, nothing need be asked.
    With a shape: of a tensor of that shape that is not empty, since an empty one has no layout to speak of."""
    before, current.guards, current.shape = current.guards, False, shape
    try:
        return function(*args)
    except NotKnown:
        return None
    finally:
        current.guards = before


def unbacked(operator: str, lo: int | None = 0, hi: Size | None = None, dtype: str = "i64") -> Expr:
    """A fresh symbol for a number that `operator` reads from data."""
    env = current.env
    # inside of the engine's backward a size that depends on data is that of a tensor whose gradient is computed
    if env is None or not (env.replaying or config.capture_dynamic_output_shape_ops or torch._C._current_autograd_node() is not None):
        raise DataShape(operator)
    size = env.create_unbacked(lo, hi if type(hi) is int else None, operator, dtype)
    if type(hi) is Expr and not env.replaying:
        env.learn(le(size, hi))
    return size


def hint(size: Size) -> int:
    """The size in the example call; no guard."""
    return current.env.hint(size) if type(size) is Expr else size


def fixed(size: Size, why: str = "its value is needed as a number") -> int:
    """The size as a plain int; a symbol is specialised to its hint by a guard."""
    return current.env.specialize(size, why) if type(size) is Expr else size


def static(sizes: Iterable[Size]) -> bool:
    return all(type(size) is not Expr for size in sizes)
