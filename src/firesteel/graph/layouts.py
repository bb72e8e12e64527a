"""Convolutions in the channels-last format.

The libraries convolve images of some dtypes (targets.py) channels-last: of a contiguous image they make a copy in that format, or in a blocked one of
their own, and copy the result back.  `channels_last(gm)` lays out a functional graph so that images are in that format from the first convolution on,
and what is computed from them, element by element, stays in it.

What always holds: values, shapes and dtypes are those of before; inputs and outputs of the graph have the strides of before; where an operator
looks at memory (as_strided), draws random numbers, or has no rule for its strides, it reads its arguments in the strides of before.

    conv(x, w)  ->  conv(clone(x, memory_format=channels_last), w)
    view(conv, [4, -1])  ->  view(clone(conv, memory_format=contiguous_format), [4, -1])
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from firesteel.graph.build import append_call
from firesteel.graph.schemas import facts
from firesteel.graph.sizes import asking
from firesteel.graph.spec import Spec, channels_last_strides, contiguous_strides
from firesteel.graph.tensor import AbstractTensor, to_spec
from firesteel.targets import kind_of

aten = torch.ops.aten
IMAGES = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}    # operator -> which arguments are images
WEIGHT = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
BY_MEMORY = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default})
FEWEST = 2              # a single convolution does not pay for the copies before and behind it


def channels_last(gm: GraphModule) -> bool:
    """Lays out the graph's images; says whether there were any."""
    chosen = {node for node in gm.graph.nodes if node.target in IMAGES and is_image_convolution(node)}
    convolutions = sum(node.target is aten.convolution.default for node in chosen)
    if convolutions < FEWEST or sum(map(_splits_channels, gm.graph.nodes)) > convolutions // 2:
        return False
    layout = _Layout(gm, chosen)
    for node in list(gm.graph.nodes):
        layout.visit(node)
    gm.recompile()
    return True


def is_image_convolution(node: Node) -> bool:
    """A convolution of a batch of images of known sizes, which the library does channels-last?"""
    args: Any = node.args
    specs = [spec_of(arg) for arg in (args[0], args[1], args[WEIGHT[node.target]])]     # type: ignore[index]  # the caller has looked
    transposed = args[WEIGHT[node.target] + 5]                                          # type: ignore[index]
    return not transposed and all(map(_is_image, specs))


def _is_image(spec: Spec | None) -> bool:
    kind = kind_of(spec.device) if spec is not None and len(spec.shape) == 4 else None
    return spec is not None and kind is not None and spec.dtype in kind.images and all(type(size) is int and size > 0 for size in spec.shape)


def _splits_channels(node: Node) -> bool:
    """A view of an image with its channels in groups?  What is normalised by groups reads a channels-last image in runs of a group, which costs
    more than the copies around a convolution (a U-Net in bfloat16 on an H200: 6.0 ms instead of 3.6)."""
    before, now = (spec_of(node.args[0]), spec_of(node)) if node.target is aten.view.default else (None, None)
    return before is not None and now is not None and len(before.shape) == 4 and len(now.shape) == 5 and now.shape[3:] == before.shape[2:]


def spec_of(node: Any) -> Spec | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.spec if type(value) is AbstractTensor else None


class _Layout:
    """Walks a graph in order; a builder."""

    def __init__(self, gm: GraphModule, chosen: set[Node]):
        self.graph, self.chosen = gm.graph, chosen
        self.relaid: set[Node] = set()                              # values in other strides than before
        self.copies: dict[tuple[Node, Any, Any], Node] = {}         # (value, format, region of its reader) -> its copy

    def visit(self, node: Node) -> None:
        before = node.args, node.kwargs
        if node in self.chosen:
            self._lay_images(node)
        elif not self._read_copies(node) and self.relaid.isdisjoint(node.all_input_nodes):
            return
        if node.op == "output" or not self._derive(node):
            if node not in self.chosen:
                node.args, node.kwargs = before
            self._put_back(node)

    def _read_copies(self, node: Node) -> bool:
        """A pointwise node reads the channels-last copies that convolutions have of its arguments, where all of its images are in that format
        then: what is added to a block's input stays channels-last, and the next block's convolution needs no copy."""
        if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags or node.target._schema.is_mutable:
            return False
        region = node.meta.get("region")
        found = {value: self.copies.get((value, torch.channels_last, region), value) for value in node.all_input_nodes}
        images = [spec for spec in map(spec_of, found.values()) if spec is not None and _is_image(spec)]
        if all(value is copy for value, copy in found.items()) or not all(spec.strides == channels_last_strides(spec.shape) for spec in images):
            return False
        node.args, node.kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
        return True

    def _lay_images(self, node: Node) -> None:
        args = list(node.args)
        for place in IMAGES[node.target]:       # type: ignore[index]  # a convolution
            args[place] = self._copied(args[place], torch.channels_last, node)
        node.args = tuple(args)

    def _put_back(self, node: Node) -> None:
        """The node reads its arguments in the strides of before."""
        def plain(value: Node) -> Node:
            return self._copied(value, torch.contiguous_format, node) if value in self.relaid else value
        node.args, node.kwargs = map_arg((node.args, node.kwargs), plain)

    def _copied(self, value: Any, layout: torch.memory_format, reader: Node) -> Node:
        """The value in a format, copied once for all readers of a checkpointed region."""
        have: Any = spec_of(value)
        if have.strides == _strides(have, layout) or layout is torch.channels_last and _has_both_layouts(have):
            return value
        key = value, layout, reader.meta.get("region")
        if key not in self.copies:
            with self.graph.inserting_before(reader):
                copy = self.copies[key] = append_call(self.graph, aten.clone.default, (value,), {"memory_format": layout})
            copy.meta = {name: item for name, item in _origin(value, reader).items() if name not in ("val", "relaid", "unbacked")}
            copy.meta["val"] = value.meta["val"].world.make(Spec(have.shape, _strides(have, layout), 0, have.dtype, have.device))
            if "recompute" in copy.meta:
                copy.meta["recompute"] = "must"
        return self.copies[key]

    def _derive(self, node: Node) -> bool:
        """Asks the rule for the node's strides.  False where it cannot read its arguments as they are."""
        if node.target is operator.getitem:
            return self._take(node, node.args[0].meta["val"][node.args[1]])     # type: ignore[union-attr]  # an item of a node
        fact = facts(node.target) if isinstance(node.target, OpOverload) else None
        if fact is None or fact.rule is None or fact.random or node.target in BY_MEMORY or "relaid" in node.meta or "unbacked" in node.meta:
            return False
        world = next(n.meta["val"].world for n in node.all_input_nodes if type(n.meta.get("val")) is AbstractTensor)
        with asking(world.env):
            try:
                found = fact.rule(*map(_seen, node.args), **{key: _seen(value) for key, value in node.kwargs.items()})
            except RuntimeError:        # a view that these strides do not allow
                return False
        return self._take(node, world.make(found) if type(found) is Spec else [spec and world.make(spec) for spec in found])

    def _take(self, node: Node, value: Any) -> bool:
        """The node's value from now on, if it is the one of before in the same or in the channels-last format."""
        before = node.meta["val"]
        pairs = list(zip(before, value)) if isinstance(value, (list, tuple)) else [(before, value)]
        if not all(a is b is None or _is_another_layout(a.spec, b.spec) for a, b in pairs):
            return False
        if any(a is not None and a.spec.strides != b.spec.strides for a, b in pairs):
            node.meta["val"] = type(before)(value) if isinstance(before, (list, tuple)) else value
            self.relaid.add(node)
        return True


def _seen(value: Any) -> Any:
    """An argument as rules see it."""
    return to_spec(map_arg(value, lambda node: node.meta["val"]))


def _origin(value: Node, reader: Node) -> dict[str, Any]:
    """Whose meta a copy has: the reader's, but for results, which have none."""
    return value.meta if reader.op == "output" else reader.meta


def _strides(spec: Spec, layout: torch.memory_format) -> Any:
    return channels_last_strides(spec.shape) if layout is torch.channels_last else contiguous_strides(spec.shape)


def _has_both_layouts(spec: Spec) -> bool:
    """One channel, or one pixel: the formats are the same memory."""
    return spec.shape[1] == 1 or spec.shape[2:] == (1, 1)


def _is_another_layout(before: Spec, now: Spec) -> bool:
    if before.strides == now.strides:
        return before == now
    plain = before.strides == contiguous_strides(before.shape) and len(before.shape) == 4
    return plain and now == before._replace(strides=channels_last_strides(before.shape)) and before.offset == 0

