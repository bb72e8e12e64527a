"""Where a function or a class lives: which package a module's name belongs to.

A name is compared part by part: "torchrl.data" is no module of torch, though its name begins like one.

    is_in_package("torch.nn.functional", "torch")     # True
    is_in_package("torchrl.data", "torch")            # False
"""
from __future__ import annotations

import importlib
import sys
from typing import Any


def home_of(thing: Any) -> str:
    """The name of the module that a function or a class says it is of; "" where it says none."""
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""


class LaterModule:
    """A module of ours that is loaded when something of it is first asked for: a process that finds its programs in the cache needs few.

        if TYPE_CHECKING:
            from firesteel import dumps
        else:
            dumps = LaterModule("firesteel.dumps")
    """

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def is_in_package(name: str, *packages: str) -> bool:
    """Is it the name of one of these packages, or of a module in one?"""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_in_private(name: str, package: str) -> bool:
    """Is it the name of a module in a part of the package whose name begins with an underscore?"""
    return name.startswith(f"{package}._")


def is_library(name: str) -> bool:
    """Is it a module of torch or of the standard library, or where pybind11 says that its native classes are?"""
    top = name.partition(".")[0]
    return top in ("torch", "pybind11_builtins") or top in sys.stdlib_module_names


LIBRARY_OPERATORS = ("aten", "prim", "prims", "mkldnn", "firesteel")


def is_operator_of_the_user(target: Any) -> bool:
    """Is it an operator that neither torch nor this project defines?  What it may do or raise is not known."""
    return getattr(target, "namespace", None) is not None and target.namespace not in LIBRARY_OPERATORS
