"""Convolution and its gradient: library calls."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.rules.base import check, each
from firesteel.graph.rules.refusals import within
from firesteel.graph.sizes import must_match, same
from firesteel.graph.spec import Shape, Spec, channels_last_strides, contiguous_strides, fresh, is_contiguous, suggests_channels_last
from firesteel.ops.block import decomposition, device_rule, operator, refuses, rule
from firesteel.ops.matmul import one_dtype
from firesteel.targets import on_gpu

aten = torch.ops.aten
operator("convolution.* convolution_backward.* _convolution.* conv1d.* conv2d.* conv3d.* mkldnn_convolution.* "
         "cudnn_convolution.* conv_* slow_conv* _slow_conv* mkldnn::_convolution_pointwise.*", library=True)


def conv_shape(x: Spec, weight: Spec, stride, padding, dilation, transposed: bool, output_padding, groups: int) -> Shape:
    n = len(weight.shape) - 2
    batch = x.shape[:1] if len(x.shape) == n + 2 else ()
    spatial = x.shape[len(x.shape) - n:]
    stride, padding, dilation, extra = (each(v, n) for v in (stride, padding, dilation, output_padding))
    sizes = []
    for i, size in enumerate(spatial):
        reach = dilation[i] * (weight.shape[i + 2] - 1)
        if transposed:
            sizes.append((size - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            sizes.append((size + 2 * padding[i] - reach - 1) // stride[i] + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    given = x.shape[len(x.shape) - n - 1]
    return (*batch, 0 if same(given, 0) else channels, *sizes)      # eager's convolution of no channels has none


def _as_image(x: Spec) -> Spec:
    """A signal as an image of height one."""
    (batch, channels, width), (s0, s1, s2) = x.shape, x.strides
    return x._replace(shape=(batch, channels, 1, width), strides=(s0, s1, width * s2, s2))


def _convolved_strides(shape: Shape, x: Spec, weight: Spec) -> Shape:
    """Strides of a convolution's results: channels-last where input or weight are, but not of doubles on a GPU.  Signals are convolved as
    images, the input made contiguous."""
    if len(shape) == 3:
        x = x if is_contiguous(x) else fresh(x)
        image = _convolved_strides((*shape[:2], 1, shape[2]), _as_image(x), _as_image(weight))
        return (*image[:2], image[3])
    plain = len(shape) not in (4, 5) or (on_gpu(x) and x.dtype is torch.float64)
    last = not plain and (suggests_channels_last(x) or suggests_channels_last(weight))
    return channels_last_strides(shape) if last else contiguous_strides(shape)


@device_rule("convolution convolution_overrideable _convolution")
def convolution(x: Spec, weight: Spec, bias: Spec | None, stride, padding, dilation, transposed: bool, output_padding,
                groups: int, *flags: bool) -> Spec:
    n = len(weight.shape) - 2
    check(len(x.shape) in (n + 1, n + 2), f"Expected {n + 1}D (unbatched) or {n + 2}D (batched) input, but got input of size: {list(x.shape)}")
    one_dtype(x, weight)
    channels = x.shape[len(x.shape) - n - 1]
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    must_match(channels, wanted, f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(x.shape)} to have "
          f"{wanted} channels, but got {channels} channels instead")
    shape = conv_shape(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return Spec(shape, _convolved_strides(shape, x, weight), 0, x.dtype, x.device)


@device_rule("mkldnn::_convolution_pointwise")
def convolution_pointwise(x: Spec, weight: Spec, bias: Spec | None, padding, stride, dilation, groups: int, *activation: Any) -> Spec:
    """Of a weight that the library has reordered: the result is channels-last."""
    shape = conv_shape(x, weight, stride, padding, dilation, False, 0, groups)
    return Spec(shape, channels_last_strides(shape), 0, x.dtype, x.device)


rule("mkldnn::_reorder_convolution_weight mkldnn::_reorder_linear_weight")(lambda weight, *how: fresh(weight))


@refuses("convolution")
def refuse_convolution(x: Spec, weight: Spec, bias: Spec | None, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
                groups: int) -> None:
    for p in padding:
        within(p, 0, None, "negative padding is not supported")
    for s in stride:
        within(s, 1, None, "non-positive stride is not supported")
    for d in dilation:
        within(d, 1, None, "dilation should be greater than zero")
    within(groups, 1, None, "non-positive groups is not supported")
    if bias is not None:
        wanted = weight.shape[1] * groups if transposed else weight.shape[0]
        check(len(bias.shape) == 1, "expected bias to be 1-dimensional")
        must_match(bias.shape[0], wanted, f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {wanted} elements")
        check(bias.dtype is x.dtype or transposed or len(weight.shape) > 4, f"Input type ({x.dtype}) and bias type ({bias.dtype}) should be the same")


@decomposition("convolution")
def decompose_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Without its bias on a GPU, whose library adds it by a kernel of its own, to a result that is rounded already: ours add it on the way."""
    if bias is None or not on_gpu(x) or how[-1] != 1 or bias.dtype is not x.dtype or _is_empty(weight):
        return NotImplemented
    return aten.add.Tensor(aten.convolution.default(x, weight, None, *how), aten.view.default(bias, [-1, *[1] * (weight.dim() - 2)]))


def _is_empty(weight: Tensor) -> bool:
    """Then eager's result has a shape of its own."""
    return any(isinstance(size, int) and size == 0 for size in weight.shape)


@decomposition("convolution_backward")
def decompose_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *how: Any) -> Any:
    """The gradient of a bias as the sum that eager's is, on a GPU."""
    *settings, mask = how
    if not mask[2] or not on_gpu(grad) or settings[-1] != 1 or _is_empty(weight):
        return NotImplemented
    others = aten.convolution_backward.default(grad, x, weight, None, *settings, [*mask[:2], False])[:2] if any(mask[:2]) else (None, None)
    return *others, aten.sum.dim_IntList(grad, [d for d in range(grad.dim()) if d != 1])


@device_rule("convolution_backward")
def convolution_backward(grad: Spec, x: Spec, weight: Spec, bias_sizes, stride, padding, dilation, transposed: bool,
                         output_padding, groups: int, mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    def laid(spec: Spec) -> Spec:
        return Spec(spec.shape, _convolved_strides(spec.shape, x, weight), 0, spec.dtype, spec.device)
    bias = fresh(grad, (grad.shape[1],)) if mask[2] else None
    return laid(x) if mask[0] else None, laid(weight) if mask[1] else None, bias
