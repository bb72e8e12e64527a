"""What the layers know of operators.  A Facet is a table over OpOverloads, one for each question a layer asks; its rows are written by name.

The files of `ops/` write the rows, a family of operators in each: its shape rule, refusals, decomposition, lowering and recompute class stand side by
side.  Graph, loops and autograd own their facets and read them.

    LOWERINGS: Facet[Callable] = Facet("lowering")

    @LOWERINGS.named("add.Tensor relu")         # an overload, a default overload
    CLASS_OF.named("sum.* linalg_*")("reduce")  # all overloads of a name, all names that begin so; `of` finds these
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from firesteel.table import Table

V = TypeVar("V")
FACETS: list[Facet] = []
_collectives: dict[int, str | None] = {}        # by id: operators live for ever, and hashing one costs a microsecond


def find(name: str) -> OpOverload | None:
    """The overload "add.Tensor", "relu" (its default) or "prims::iota"; None where this torch has none."""
    space, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space or "aten"), packet, None), overload or "default", None)


class Facet(Table[V]):
    """Rows by operator, each with the module in which it was written."""

    def __init__(self, name: str):
        super().__init__(name, "ops/")
        self.homes: dict[Any, str] = {}
        self.missing: dict[str, V] = {}        # rows of names that torch does not know, or not yet
        self.patterns: dict[str, V] = {}       # "aten::sum.", "aten::linalg_": beginnings of names
        FACETS.append(self)

    def add(self, key: Any, value: V) -> V:
        self.homes[key] = _module_being_imported()
        return super().add(key, value)

    def named(self, names: str) -> Callable[[V], V]:
        """Decorator: the row of each operator named; those of other torch versions are left out."""
        def register(value: V) -> V:
            for name in names.split():
                if name.endswith("*"):
                    full = name if "::" in name else f"aten::{name}"
                    self.patterns[full[:-1]] = value
                    self.homes[full[:-1]] = _module_being_imported()
                elif (op := find(name)) is not None:
                    self.add(op, value)
                else:
                    self.missing[name] = value
            return value
        return register

    def of(self, op: OpOverload) -> V | None:
        """The row of the operator, else that of a pattern."""
        found = self._rows.get(op)
        if found is None and self.patterns:
            name = f"{op._schema.name}.{op._overloadname}"
            return next((value for start, value in self.patterns.items() if name.startswith(start)), None)
        return found


def complete(op: OpOverload) -> None:
    """Adds the rows of an operator that did not exist when they were written: some modules of torch define theirs when they are imported."""
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    for facet in FACETS:
        if name in facet.missing:
            facet.add(op, facet.missing.pop(name))


COLLECTIVES: Facet[str] = Facet("collective")       # "start" or "wait"


def collective(target: Any) -> str | None:
    """Is it a call that all ranks of a process group make?  It is made once, whoever reads its result, and starts keep the program's order."""
    if type(target) is not OpOverload:
        return None
    if id(target) not in _collectives:
        _collectives[id(target)] = COLLECTIVES.of(target)
    return _collectives[id(target)]


def _module_being_imported() -> str:
    """The innermost module whose top level is running: that is where a row is written."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals["__name__"]
