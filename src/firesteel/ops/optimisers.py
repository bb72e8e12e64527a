"""Steps of optimisers and fake quantisation, which come as one library call."""
from __future__ import annotations

from typing import Any

import torch

from firesteel.graph.spec import Spec, like
from firesteel.ops.block import rule


@rule("_amp_update_scale_")
def _reject_amp(*args: Any) -> Spec:
    raise RuntimeError("loss scaling updates are not captured")


@rule("fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
      "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize(x: Spec, *settings: Any) -> tuple[Spec, Spec]:
    """The values, and where they lay within the range."""
    return like(x), like(x, dtype=torch.bool)


def _fused_step(lists: int) -> Any:
    """The first lists of arguments come back changed."""
    return lambda *args, **kwargs: tuple([list(specs) for specs in args[:lists]])


for _names, _lists in (("_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr", 5),
                       ("_fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr", 3)):
    rule(_names)(_fused_step(_lists))
