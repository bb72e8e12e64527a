"""Parts: functions that compiled code calls for real, at a break, compiled on their own.

A call that cannot be captured is made for real.  Where Python code of the user's is behind it all the same, that code is compiled as a
part of the callable: with its settings, and with guards and breaks of its own.  `PARTS` has a row for each kind of such calls.

    tensor_hook(hook, grad)     # marked as whole: a hook that breaks is not split into the graphs around it; they are split once, at its call
    MySin.apply(x)              # torch makes the call; MySin.forward is compiled
"""
from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionMeta

from firesteel.capture import marks
from firesteel.homes import home_of, is_in_package
from firesteel.table import Table

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

# kind of call -> function(what is called, how to compile a function) -> what is called in its place; None: it is of another kind
PARTS: Table[Callable[[Any, Compile], Any]] = Table("part of a compiled callable", "capture/parts.py")


def part_of(fn: Any, compiled: Compile) -> Any:
    """What to call for real in the place of `fn`; None where that is the function itself."""
    return next((part for row in PARTS.values() if (part := row(fn, compiled)) is not None), None)


PARTS.row("whole function")(
    lambda fn, compiled: compiled(fn) if isinstance(fn, types.FunctionType) and getattr(fn, marks.WHOLE, False) else None)


# -- custom functions ---------------------------------------------------------------------------------------------------
_apply: Any = torch.autograd.Function.apply


def applied_class(fn: Any) -> type[torch.autograd.Function] | None:
    """The class whose `apply` it is."""
    owner = getattr(fn, "__self__", None)
    own = getattr(fn, "__func__", None) is getattr(_apply, "__func__", _apply) or isinstance(fn, types.BuiltinMethodType)
    of_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return owner if of_function and own and fn.__name__ == "apply" else None


@PARTS.row("custom function")
def custom_function(fn: Any, compiled: Compile) -> Any:
    cls = applied_class(fn)
    forward = None if cls is None else inspect.getattr_static(cls, "forward")
    if cls is None or not is_plain(cls) or not isinstance(forward, staticmethod) or not isinstance(forward.__func__, types.FunctionType):
        return None
    return with_forward(cls, compiled(forward.__func__)).apply


def is_plain(cls: type) -> bool:
    """May a class be derived from it unseen?  torch's own functions know how torch calls them."""
    own = [vars(base) for base in cls.__mro__ if base not in torch.autograd.Function.__mro__]
    watched = any("__init_subclass__" in names or "apply" in names for names in own)
    return type(cls) is FunctionMeta and not watched and not is_in_package(home_of(cls), "torch") and not marks.is_marked(cls, marks.ALLOWED)


def with_forward(cls: type[torch.autograd.Function], forward: Callable[..., Any]) -> Any:
    """The class with another forward.  The nodes that it makes are those of the class itself."""
    names = {"forward": staticmethod(forward), "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = FunctionMeta(cls.__name__, (cls,), names)
    made._backward_cls = cls._backward_cls
    return made
