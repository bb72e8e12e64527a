"""Policy: which sizes and numbers of a region are symbols.

dynamic=False: none; dynamic=True: all sizes, and int arguments (an int attribute of a module is a setting, and a symbol only
after it changed); dynamic=None: none at first, and each that was seen to change
("automatic dynamic"); but the learning rate of an optimiser, which schedulers change, always is one.
The user's marks on a tensor come first, and what a shape specification says (shape_specs.py).
Records are kept by source, for all variants of a region; those of arguments are shared by all compiled versions of a function, until `reset`.

    policy.learn(guards, arguments)     # a guard failed: what changed becomes a symbol from now on
"""
from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from firesteel import transaction
from firesteel.capture import shape_specs
from firesteel.capture.guards import Guard
from firesteel.capture.marks import dimension_wishes
from firesteel.capture.source import Attr, Item, Local, Source
from firesteel.capture.world import DYNAMIC, STATIC, UNBACKED, DimPolicy
from firesteel.config import config

WISHES: dict[str, DimPolicy] = {"dynamic": DYNAMIC, "maybe": DYNAMIC, "static": STATIC, "unbacked": UNBACKED}

# types of numbers that become inputs of the graph when they change; for NumPy's others torch has no arithmetic
VARYING = frozenset({int, float, *(np.dtype(code).type for code in "bhilqBHIefd")})


class Records:
    """What was seen to change in a region.  Mutable."""

    def __init__(self) -> None:
        self.sizes: dict[Source, set[int]] = {}
        self.strides: dict[Source, set[int]] = {}
        self.numbers: set[Source] = set()

    def take(self, other: Records, only: Callable[[Source], bool] = lambda source: True) -> None:
        """Merges another's records, filtered by `only`."""
        for mine, theirs in ((self.sizes, other.sizes), (self.strides, other.strides)):
            for source, dims in list(theirs.items()):
                if only(source):
                    mine.setdefault(source, set()).update(dims)
        self.numbers.update(filter(only, list(other.numbers)))


# code object of a function -> which region of it -> records
SHARED: weakref.WeakKeyDictionary[types.CodeType, dict[Any, Records]] = weakref.WeakKeyDictionary()


def shared_records(code: types.CodeType | None, region: Any) -> Records:
    """Those of a function's region; new ones where the callable is no function of Python."""
    return Records() if code is None else SHARED.setdefault(code, {}).setdefault(region, Records())


class SymbolPolicy:
    """Mutable: learns from guards that failed."""

    def __init__(self, dynamic: bool | None, shared: Records | None = None, specified: Mapping[str, Any] = types.MappingProxyType({})):
        self.dynamic, self.shared, own = dynamic, Records() if shared is None else shared, Records()
        self._own, self._sizes, self._strides, self._numbers = own, own.sizes, own.strides, own.numbers
        if dynamic is not False and config.automatic_dynamic_shapes:
            own.take(self.shared)
        self.specified = specified  # argument -> its specification
        self._settled = False       # at the limit: what varied is a symbol whatever the settings say

    # -- asked while capturing -------------------------------------------------------------------------------------
    @property
    def everywhere(self) -> bool:
        """Are sizes and numbers symbols from the first call on?"""
        return self.dynamic is True or self.dynamic is None and not config.assume_static_by_default

    def text(self) -> str:
        """What was learnt, equal in two processes."""
        dims = [sorted((source.name, sorted(found)) for source, found in known.items()) for known in (self._sizes, self._strides)]
        return f"{dims} {sorted(source.name for source in self._numbers)} {self._settled}"

    def dimensions(self, tensor: torch.Tensor, source: Source) -> tuple[DimPolicy, ...]:
        wishes, seen = self.wishes(tensor, source), self._sizes.get(source, ())
        everywhere = self.everywhere and not isinstance(tensor, torch.nn.Parameter)
        return tuple(wished(*wishes[d]) if d in wishes else DYNAMIC if everywhere or d in seen else STATIC for d in range(tensor.dim()))

    def wishes(self, tensor: torch.Tensor, source: Source) -> dict[int, tuple[str, int | None, int | None]]:
        """Dimension -> what the user said of its size."""
        specified = shape_specs.size_wishes(shape_specs.at(self.specified, source), tensor, source) if self.specified else {}
        return {**dimension_wishes(tensor), **specified}

    def strides(self, source: Source, rank: int) -> set[int]:
        """Dimensions whose stride was seen to change, of those that a tensor of this rank has: an earlier one may have had more."""
        return {d for d in self._strides.get(source, ()) if d < rank}

    def number_is_symbol(self, source: Source, number: int | float) -> bool:
        if self._settled and source in self._numbers:
            return True
        if config.specialize_float if isinstance(number, (float, np.floating)) else config.specialize_int:
            return False
        if isinstance(number, float) and self.dynamic is not False and is_learning_rate(source):
            return True
        if self.specified and shape_specs.is_variable(shape_specs.at(self.specified, source)):
            return True
        return source in self._numbers or (self.everywhere and type(number) is int and number not in (0, 1) and is_argument(source))

    def read_shape(self, source: Source, count: int) -> None:
        """A torch.Size that came in holds sizes, wherever it is kept: they are symbols where sizes are."""
        if self.everywhere and is_of_an_argument(source):
            self._numbers.update(Item(source, place) for place in range(count))

    def take(self, other: SymbolPolicy) -> None:
        self._own.take(other._own)

    # -- called when a guard fails ---------------------------------------------------------------------------------
    def learn(self, guards: Iterable[Guard], arguments: Mapping[str, Any]) -> None:
        """Looks for sizes and numbers that differ from what an Entry was made for."""
        if self.dynamic is not False and config.automatic_dynamic_shapes:
            self._learn(guards, arguments)
            self.shared.take(self._own, is_of_an_argument)

    def settle(self, guards: Iterable[Guard], arguments: Mapping[str, Any]) -> bool:
        """At the limit: learns past the settings (but not past dynamic=False).  Did that teach anything?"""
        if self.dynamic is False:
            return False
        before, settled = self._known(), self._settled
        transaction.on_failure(functools.partial(self._know, before, settled))
        self._settled = True
        self._learn(guards, arguments)
        return self._known() != before or bool(self._numbers) and not settled and (config.specialize_int or config.specialize_float)

    def _known(self) -> tuple[Any, ...]:
        return {s: set(d) for s, d in self._sizes.items()}, {s: set(d) for s, d in self._strides.items()}, set(self._numbers)

    def _know(self, known: tuple[Any, ...], settled: bool) -> None:
        """Back to what was known: the next call has to be taught the same again."""
        own: Any
        for own, then in zip((self._sizes, self._strides, self._numbers), known):
            own.clear()
            own.update(then)
        self._settled = settled

    def _learn(self, guards: Iterable[Guard], arguments: Mapping[str, Any]) -> None:
        for guard in guards:
            if guard.kind == "tensor":
                self._learn_sizes(guard, arguments)
            elif guard.kind == "equals" and type(guard.data) in VARYING:
                now = fetch(guard.source, arguments)
                if type(now) is type(guard.data) and now != guard.data:
                    self._numbers.add(guard.source)

    def _learn_sizes(self, guard: Guard, arguments: Mapping[str, Any]) -> None:
        now = fetch(guard.source, arguments)
        if not isinstance(now, torch.Tensor) or now.dim() != len(guard.data.sizes) or now.layout is not torch.strided:
            return
        for known, then, new in ((self._sizes, guard.data.sizes, now.shape), (self._strides, guard.data.strides, now.stride())):
            changed = {d for d, size in enumerate(then) if size is not None and size != new[d]}
            if changed:
                known.setdefault(guard.source, set()).update(changed)


def wished(wish: str, least: int | None, greatest: int | None) -> DimPolicy:
    return WISHES[wish] if wish != "dynamic" else ("wished", least, greatest)


def is_of_an_argument(source: Source) -> bool:
    """Does reading it start at an argument of the call?"""
    return isinstance(source.root, Local)


def is_argument(source: Source) -> bool:
    """Is it an argument of the call, or an item of one?"""
    while isinstance(source, Item):
        source = source.base
    return isinstance(source, Local)


def is_learning_rate(source: Source) -> bool:
    """optimizer.param_groups[i]["lr"]"""
    return isinstance(source, Item) and source.key == "lr" and isinstance(source.base, Item) and isinstance(source.base.base, Attr) \
        and source.base.base.key == "param_groups"


def fetch(source: Source, arguments: Mapping[str, Any]) -> Any:
    """The value at a source now; None where it cannot be read any more."""
    try:
        return source.fetch(arguments)
    except Exception:       # the objects on the way have changed: nothing is learnt from that
        return None
