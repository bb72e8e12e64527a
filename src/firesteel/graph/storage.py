"""How far into a storage a tensor may look: `as_strided` and its kind name places by sizes, strides and an offset of the program's own.

What is known of a storage is how far the tensors over it reach.  A place behind that is refused: the storage of an input may be larger, but
no guard says that it still is in the next call, so eager runs such a call.

    within_storage([x], torch.float32, (2, 3), (3, 1), 0)       # x: f32[6]
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import check
from firesteel.graph.sizes import must
from firesteel.graph.spec import Spec
from firesteel.sym.expr import Size, ge, le


def reach(sizes: Sequence[Size], strides: Sequence[Size], offset: Size) -> Size:
    """The place behind the last element, from the storage's start."""
    end = offset + 1
    for size, stride in zip(sizes, strides):
        end = end + (size - 1) * stride
    return end


def within_storage(tensors: Sequence[Spec], dtype: torch.dtype, sizes: Sequence[Size], strides: Sequence[Size], offset: Size) -> None:
    """`tensors` are over the storage; sizes, strides and offset are those of the tensor to be made, counted in elements of `dtype`."""
    check(len(sizes) == len(strides), "mismatch in length of strides and shape")
    for number, what in (*((s, "size") for s in sizes), *((s, "stride") for s in strides), (offset, "storage offset")):
        must(ge(number, 0), f"as_strided: invalid {what} {number}")
    if 0 in sizes:
        return
    held = [reach(t.shape, t.strides, t.offset) * t.dtype.itemsize // dtype.itemsize for t in tensors if 0 not in t.shape]
    check(bool(held), "setStorage: out of bounds for storage of size 0")
    most: Any = max(held) if all(type(h) is int for h in held) else held[0]
    must(le(reach(sizes, strides, offset), most), f"setStorage: sizes {list(sizes)}, strides {list(strides)}, storage offset {offset}: out of bounds")
