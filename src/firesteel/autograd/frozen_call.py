"""A compiled inference graph some of whose inputs are computed once of parameters and buffers (graph/frozen.py), until one of these changes.

`FrozenCall` stands between the caller, who gives the graph's inputs, and the compiled graph, which takes the computed values behind them.  What
always holds
 - Before each call the versions, version counters and addresses of the tensors that the values were computed of are compared
   (native_tensors.unchanged), which costs about a microsecond for a hundred tensors.  Where one differs the values are computed again; nothing is
   compiled again.  Writes to `.data` count no version: they are not seen.
 - Modules that share code have values each, as long as their tensors live; a set of values is never changed, so threads share it.
 - Tensors made in inference mode have no versions: of those the values are computed at each call.
"""
from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel import native_tensors
from firesteel.artifacts import counters

MOST = 256          # sets of values; modules beyond that compute theirs again


Layout = Sequence[int] | None       # strides of a value; None of one in a format of the library's


class FrozenCall:
    """The graph compiled, as a function of its own inputs."""

    def __init__(self, call: Callable[..., Sequence[Any]], once: str, places: Sequence[int], layouts: Sequence[Layout]):
        self.call, self.once, self.places, self.layouts = call, once, tuple(places), layouts
        self._boxed_call = getattr(call, "_boxed_call", False)
        self.pick = operator.itemgetter(*places) if len(places) > 1 else lambda inputs: (inputs[places[0]],)
        self.last: Values | None = None
        self.sets: dict[tuple[int, ...], Values] = {}       # by the tensors' ids
        scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
        exec(once, scope)
        self.compute: Callable[..., Sequence[torch.Tensor]] = functools.partial(scope["forward"], None)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self._boxed_call:
            box, = inputs
            box += self.values(self.pick(box))
            return self.call(box)
        return self.call(*inputs, *self.values(self.pick(inputs)))

    def values(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        last = self.last
        if last is not None and last.hold(*tensors):
            return last.tensors
        known = self.sets.get(key := tuple(map(id, tensors)))
        if known is None or not known.hold(*tensors):
            known = self._computed(key, tensors)
        self.last = known
        return known.tensors

    def _computed(self, key: tuple[int, ...], tensors: tuple[torch.Tensor, ...]) -> Values:
        hold = native_tensors.unchanged(tensors)        # before they are read: a write meanwhile is seen at the next call
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            found = self.compute(*(tensor.detach() for tensor in tensors))
            values = [laid_out(value, layout) for value, layout in zip(found, self.layouts, strict=True)]
        counters["frozen"]["times computed"] += 1
        sets = self.sets
        if len(sets) >= MOST and key not in sets:
            sets.pop(next(iter(sets)), None)
        made = sets[key] = Values(hold, values, weakref.ref(tensors[0], lambda dead: sets.pop(key, None)))
        return made


class Values:
    """What was computed of some tensors, and whether they are as they were."""

    __slots__ = ("hold", "tensors", "owner")

    def __init__(self, hold: Callable[..., bool], tensors: list[torch.Tensor], owner: weakref.ref[torch.Tensor]):
        self.hold, self.tensors, self.owner = hold, tensors, owner


def laid_out(value: torch.Tensor, strides: Layout) -> torch.Tensor:
    """The value as the compiled graph reads it: in these strides, from where its memory begins."""
    if strides is None or value.storage_offset() == 0 and list(value.stride()) == list(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
