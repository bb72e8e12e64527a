"""Questions about sizes, for the shape rules.

A size is a plain int or an integer Expr.  Everything here is decided at once for ints and for identical Exprs; any
other question goes to the ShapeEnv of the world at work, which answers it and records the answer as a guard.

    same(3, 3)             # True
    same(s0, 4)            # asks the ShapeEnv: a guard s0 == 4 or s0 != 4
    product((s0, 4))       # s0 * 4
"""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from firesteel.sym.expr import Expr, Size, eq, lt


class _Current(threading.local):
    """The ShapeEnv that answers in this thread; set by the dispatch of abstract tensors, nowhere else."""
    env: Any = None


current = _Current()


@contextmanager
def asking(env: Any) -> Iterator[None]:
    """Questions inside go to `env`."""
    before, current.env = current.env, env
    try:
        yield
    finally:
        current.env = before


def ask(condition: Expr | bool) -> bool:
    """The truth of a condition over sizes, guarded."""
    if type(condition) is not Expr:
        return bool(condition)
    return current.env.decide(condition)


def same(a: Size, b: Size) -> bool:
    if a is b:
        return True
    if type(a) is Expr or type(b) is Expr:
        return ask(eq(a, b))
    return a == b


def less(a: Size, b: Size) -> bool:
    if type(a) is Expr or type(b) is Expr:
        return ask(lt(a, b))
    return a < b


def hint(size: Size) -> int:
    """The size in the example call; no guard."""
    return current.env.hint(size) if type(size) is Expr else size


def fixed(size: Size) -> int:
    """The size as a plain int; a symbol is specialised to its hint by a guard."""
    return current.env.specialize(size) if type(size) is Expr else size


def product(sizes: Iterable[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def static(sizes: Iterable[Size]) -> bool:
    return all(type(size) is not Expr for size in sizes)
