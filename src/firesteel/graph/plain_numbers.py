"""Torch's Python meta kernels, asked with plain numbers only, without what they load for symbolic ones.

Most of them begin with `from torch.fx.experimental.symbolic_shapes import guard_or_false`, in the function: the first that does costs a program a
quarter of a second, for sympy.  Inside of `plain_numbers()` a module stands there whose functions answer for plain numbers what torch's own do:

    with plain_numbers():
        torch.ops.aten.linalg_cross.default(a, b)       # a, b: on the meta device, of plain sizes

1. A function that is asked of anything else, and a name that has no row here, loads torch's module.
2. So it does no harm where another thread sees it, or a module that is first loaded here keeps a function of it.
3. Where torch's module is loaded already, it stays.
"""
from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from firesteel import transaction
from firesteel.table import Table

NAME = "torch.fx.experimental.symbolic_shapes"
ANSWERS: Table[Callable[..., Any]] = Table("question about sizes that are plain numbers", "graph/plain_numbers.py")


def _real() -> ModuleType:
    if sys.modules.get(NAME) is STAND_IN:
        del sys.modules[NAME]
    return importlib.import_module(NAME)


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float) or isinstance(value, (list, tuple)) and all(map(_is_plain, value))


class PlainModule(ModuleType):
    """Has the functions of the rows; all else is asked of torch's module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


STAND_IN = PlainModule(NAME)


def answer(*names: str) -> Callable[[Callable], Callable]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            ANSWERS.add(name, function)
            setattr(STAND_IN, name, functools.partial(_ask, name, function))
        return function
    return add


def _ask(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args) if not options and _is_plain(args) else getattr(_real(), name)(*args, **options)


answer("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true",
       "guarding_hint_or_throw")(lambda value: value)
answer("has_guarding_hint", "has_static_value")(lambda value: True)
answer("is_nested_int")(lambda value: False)
answer("free_unbacked_symbols")(lambda value: set())


@answer("sym_and")
def _and(*values: Any) -> Any:
    return functools.reduce(operator.and_, values)


@answer("sym_or")
def _or(*values: Any) -> Any:
    return functools.reduce(operator.or_, values)


@answer("sym_eq")
def _equal(x: Any, y: Any) -> bool:
    return list(x) == list(y) if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) else x == y


@transaction.context
def plain_numbers() -> Iterator[None]:
    absent = NAME not in sys.modules
    if absent:
        sys.modules[NAME] = STAND_IN
    try:
        yield
    finally:
        if absent and sys.modules.get(NAME) is STAND_IN:
            del sys.modules[NAME]
