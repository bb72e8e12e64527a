"""What the layers know of operators.  A Facet is a table over OpOverloads, one for each question a layer asks; its rows are written by name.

The files of `ops/` write the rows, a family of operators in each: its shape rule, refusals, decomposition, lowering and recompute class stand side by
side.  Graph, loops and autograd own their facets and read them.

    LOWERINGS: Facet[Callable] = Facet("lowering")

    @LOWERINGS.named("add.Tensor relu")         # an overload, a default overload
    CLASS_OF.named("sum.* linalg_*")("reduce")  # all overloads of a name, all names that begin so; `of` finds these
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from firesteel.table import Table

V = TypeVar("V")
FACETS: list[Facet] = []
ROWS = "firesteel.ops"      # who writes them
OWN: Table[Callable] = Table("operator of ours", "graph/")     # its function, which host functions call 50 us sooner than torch's dispatcher
_collectives: dict[int, str | None] = {}        # by id: operators live for ever, and hashing one costs a microsecond


def find(name: str) -> OpOverload | None:
    """The overload "add.Tensor", "relu" (its default) or "prims::iota"; None where this torch has none."""
    space, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space or "aten"), packet, None), overload or "default", None)


class Facet(Table[V]):
    """Rows by operator, kept under its full name ("aten::add.Tensor", "aten::relu"): torch creates an operator at its first lookup, and
    writing the rows of all would make them all."""

    def __init__(self, name: str):
        super().__init__(name, "ops/")
        self.homes: dict[Any, str] = {}         # name, or beginning of names -> the module in which its row was written
        self.patterns: dict[str, V] = {}        # "aten::sum.", "aten::linalg_": beginnings of names
        self._by_pattern: dict[str, V | None] = {}      # what `of` found there
        FACETS.append(self)

    def add(self, key: Any, value: V) -> V:
        self.homes[_name(key)] = _module_being_imported()
        return super().add(_name(key), value)

    def named(self, names: str) -> Callable[[V], V]:
        """Decorator: the row of each operator named; those of other torch versions are never asked for."""
        def register(value: V) -> V:
            home = _module_being_imported()
            for name in names.split():
                name = (name if "::" in name else f"aten::{name}").removesuffix(".default")
                self.homes[name.removesuffix("*")] = home
                if name.endswith("*"):
                    self.patterns[name[:-1]] = value
                    self._by_pattern.clear()
                else:
                    super(Facet, self).add(name, value)
            return value
        return register

    def of(self, op: OpOverload) -> V | None:
        """The row of the operator, else that of a pattern."""
        found = self.get(op)
        if found is None and self.patterns:
            if op._name not in self._by_pattern:
                name = f"{op._schema.name}.{op._overloadname}"
                self._by_pattern[op._name] = next((value for start, value in self.patterns.items() if name.startswith(start)), None)
            return self._by_pattern[op._name]
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        name = _name(key)
        return self._rows[name] if name in self._rows else _written(self._rows).get(name, default)

    def __contains__(self, key: object) -> bool:
        return _name(key) in _written(self._rows)

    def __getitem__(self, key: Any) -> V:
        _written(self._rows)
        return super().__getitem__(_name(key))

    def __iter__(self) -> Iterator[Any]:
        """The operators that this torch has."""
        found = (find(key) if isinstance(key, str) else key for key in list(_written(self._rows)))
        return (op for op in found if op is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _written(rows: dict[Any, V]) -> dict[Any, V]:
    """The rows, after ops/ wrote them: the first lookup imports it.  Where another thread is doing that this one waits; ops/ itself, which asks while
    it is loaded, does not."""
    module = sys.modules.get(ROWS)
    if module is None or getattr(module.__spec__, "_initializing", False):
        importlib.import_module(ROWS)
    return rows


def _name(op: Any) -> Any:
    return getattr(op, "_name", op)


COLLECTIVES: Facet[str] = Facet("collective")       # "start" or "wait"


def collective(target: Any) -> str | None:
    """Is it a call that all ranks of a process group make?  It is made once, read or not, and starts keep the program's order."""
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
