"""Table: the one way in which this project registers things.

Whatever grows (opcodes, value kinds, guard kinds, shape rules, decompositions, lowerings, spellings, knobs, errors,
backends) is a `Table`: a mapping that refuses a second row for the same key, and whose missing-row error names the
file in which to write one.  Tests iterate over the tables.

    LOWERINGS = Table("lowering", "loops/lower/")

    @LOWERINGS.row(aten.relu.default)
    def lower_relu(x): ...

    LOWERINGS[aten.relu.default](x)
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class MissingRow(KeyError):
    """Nothing is registered for a key; says where to register it."""

    def __init__(self, table: str, key: Hashable, home: str):
        super().__init__(key)
        self.key = key
        self.text = f"no {table} for {key!r}: add a row in {home}"

    def __str__(self) -> str:
        return self.text


class Table(Mapping[Any, V], Generic[V]):     # keys are strings, operators, classes: what is hashable
    """A mapping of rows, each added once."""

    def __init__(self, name: str, home: str):
        self.name, self.home = name, home
        self._rows: dict[Any, V] = {}

    def add(self, key: Any, value: V) -> V:
        if key in self._rows:
            raise ValueError(f"{self.name} table: a row for {key!r} is there already")
        self._rows[key] = value
        return value

    def row(self, *keys: Any) -> Callable[[V], V]:
        """Decorator: the decorated object is the row of each key."""
        def register(value: V) -> V:
            for key in keys:
                self.add(key, value)
            return value
        return register

    def rows(self, rows: Mapping[Any, V]) -> None:
        for key, value in rows.items():
            self.add(key, value)

    def remove(self, key: Any) -> None:
        del self._rows[key]

    def get(self, key, default=None):
        return self._rows.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __getitem__(self, key: Any) -> V:
        try:
            return self._rows[key]
        except KeyError:
            raise MissingRow(self.name, key, self.home) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {len(self)} rows)"
