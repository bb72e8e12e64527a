"""Jagged nested tensors (`torch.nested`, layout `torch.jagged`): a graph holds their parts alone.

A nested tensor is its values, its offsets, and, where it has them, lengths and the least and greatest length.  A call of torch on one is one node,
a function of those parts (`OnParts`): it makes nested tensors of them, calls, and gives the parts of what came out.  So torch's dispatch says what
the call means, on abstract tensors as on real ones; the operators on parts to which that comes are differentiated.  An input is taken apart, and a
result put together, outside of the graph: sizes, types of gradients and the identity of offsets, by which torch
compares ragged sizes, are eager's.

    nt.sin() * 2        # v = OnParts(Tensor.sin)(values, offsets); w = OnParts(mul)(v, offsets, 2); the result: nested(w, offsets)
"""
from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from firesteel.capture.guards import Guard
from firesteel.capture.marks import DIMENSIONS
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Args, Emitter, Kwargs, Machine
from firesteel.capture.source import Call, Source
from firesteel.capture.values.base import LazyValue, Value
from firesteel.capture.values.const import NONE, ConstValue, boolean
from firesteel.capture.values.containers import Sequence, SizeValue, SliceValue
from firesteel.capture.values.tensor import BREAKING, METADATA, TensorMethod, TensorValue, dimension
from firesteel.capture.values.torch_calls import call_graph
from firesteel.config import config
from firesteel.errors import Break, DataAccess
from firesteel.records import dataclass
from firesteel.targets import on_host

nested_tensor: Any = torch.nested._internal.nested_tensor
NestedTensor: Any = nested_tensor.NestedTensor
LENGTHS = ("min_seqlen", "max_seqlen")      # of its sequences, where they are known
PARTS = ("_values", "_offsets", "_lengths", *LENGTHS)


# -- on real and on abstract tensors ------------------------------------------------------------------------------------
def around(parts: Iterable[Any], ragged: int) -> Any:
    """A nested tensor of its parts, without a history of its own."""
    values, offsets, lengths, *numbers = parts
    cache = {name: torch.zeros(number, 0) for name, number in zip(LENGTHS, numbers) if number is not None}
    return NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=cache)


class ValuesOf(torch.autograd.Function):
    """The values of a nested tensor.  No view of torch's: of those, it cannot differentiate gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.others = tensor._ragged_idx, tensor._offsets, tensor._lengths, least_length(tensor), greatest_length(tensor)
        return tensor._values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return PutTogether.apply(gradient, *ctx.others)


class PutTogether(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, values: Any, ragged: int, *others: Any) -> Any:
        return around((values.detach(), *others), ragged)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ValuesOf.apply(gradient), None, None, None, None, None


def put_together(ragged: int, values: torch.Tensor, *others: Any) -> Any:
    """A result."""
    recorded = values.requires_grad and torch.is_grad_enabled()
    return PutTogether.apply(values, ragged, *others) if recorded else around((values, *others), ragged)


@functools.cache
def reader_of(ragged: int, stride: int) -> Callable[[Any], torch.Tensor | None]:
    """What takes the values of an input, with its history whatever the program runs under.  How many there are changes with every batch; the other
    sizes, and the stride of that dimension, for each of which there is a reader, are numbers: torch multiplies a ragged size by numbers only."""
    def values_of(tensor: Any) -> torch.Tensor | None:
        if tensor._ragged_idx != ragged or tensor._values.stride(ragged - 1) != stride:
            return None     # asked what changed: everything did
        with torch.enable_grad():
            values = ValuesOf.apply(tensor) if tensor.requires_grad else tensor._values.detach()
        setattr(values, DIMENSIONS, {d: ("maybe" if d == ragged - 1 else "static", None, None) for d in range(values.dim())})
        return values
    return values_of


def least_length(tensor: Any) -> int | None:
    return tensor._maybe_min_seqlen


def greatest_length(tensor: Any) -> int | None:
    return tensor._maybe_max_seqlen


def make_of(tensor: Any) -> tuple[int, ...]:
    """How it is laid out, and which parts it has."""
    ragged, has = tensor._ragged_idx, [part is not None for part in (tensor._lengths, least_length(tensor), greatest_length(tensor))]
    return ragged, tensor._values.stride(ragged - 1), *has


class Differentiable(TorchDispatchMode):
    """Lets autograd see the operators on plain tensors to which calls on nested tensors come, and nothing else: inside, it is off but for those."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._nested_get_values.default:     # torch detaches them here, for the history is the nested tensor's
            op, args = torch.ops.aten.alias.default, (args[0]._values,)
        elif any(issubclass(cls, NestedTensor) for cls in types):
            return NotImplemented
        with torch._C._ForceDispatchKeyGuard(*self.outside):
            return DERIVED.get(op, op)(*args, **kwargs or {})


VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class Padded(torch.autograd.Function):
    """Jagged values as a padded tensor, of which torch knows a derivative only where nested tensors have a history."""

    @staticmethod
    def forward(ctx: Any, values: Any, offsets: Any, sizes: Any, padding: float = 0.0) -> Any:
        ctx.save_for_backward(*offsets)
        ctx.total = values.shape[0]
        return PAD(values, offsets, sizes, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return DERIVED[PACK](gradient, list(ctx.saved_tensors), ctx.total), None, None, None


class Packed(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, padded: Any, offsets: Any, total: Any = None) -> Any:
        ctx.save_for_backward(*offsets)
        ctx.sizes = padded.shape[1:1 + len(offsets)]
        return PACK(padded, offsets, total)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return DERIVED[PAD](gradient, list(ctx.saved_tensors), list(ctx.sizes)), None, None


PAD, PACK = torch.ops.aten._jagged_to_padded_dense_forward.default, torch.ops.aten._padded_dense_to_jagged_forward.default
DERIVED: dict[Any, Callable[..., Any]] = {PAD: Padded.apply, PACK: Packed.apply}


@dataclass(frozen=True)
class Slot:
    """An argument, or a result, of the plain function."""
    place: int


@dataclass(frozen=True)
class Whole:
    """A nested tensor: its parts are Slots, or None; `is_size` stands for its ragged size instead."""
    parts: tuple[Slot | None, ...]
    ragged: int
    is_size: bool = False


class OnParts:
    """A function of torch as one of plain tensors and numbers.  `result` says, after a call, how what it gave is put together: of Slots (those below
    zero are arguments, counted from the end), of Wholes made of them, and of constants."""

    def __init__(self, fn: Any, args: Any, kwargs: Any):
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self.__name__ = self.__qualname__ = getattr(fn, "__name__", "call")
        self.__module__ = __name__
        self.result: Any = None

    def __call__(self, *plain: Any) -> Any:
        wholes: dict[Whole, Any] = {}

        def filled(layout: Any) -> Any:
            if isinstance(layout, Slot):
                return plain[layout.place]
            if isinstance(layout, Whole):
                key = Whole(layout.parts, layout.ragged)
                if key not in wholes:
                    wholes[key] = around((None if slot is None else plain[slot.place] for slot in layout.parts), layout.ragged)
                return wholes[key]._size[layout.ragged] if layout.is_size else wholes[key]
            if isinstance(layout, slice):
                return slice(*map(filled, (layout.start, layout.stop, layout.step)))
            return type(layout)(map(filled, layout)) if type(layout) in (tuple, list) else layout

        given, named = filled(self.args), {name: filled(layout) for name, layout in self.kwargs.items()}
        with Differentiable(), torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(VIEWS):
            found = self.fn(*given, **named)
        return self._taken_apart(found, plain, wholes)

    def _taken_apart(self, found: Any, plain: tuple[Any, ...], wholes: dict[Whole, Any]) -> Any:
        given = {id(value): Slot(place - len(plain)) for place, value in enumerate(plain) if isinstance(value, torch.Tensor)}
        lengths = {id(whole._metadata_cache.get(name)): Slot(layout.parts[3 + n].place - len(plain))     # type: ignore[union-attr]
                   for layout, whole in wholes.items() for n, name in enumerate(LENGTHS) if layout.parts[3 + n] is not None}
        results: list[Any] = []

        def slot(value: Any, known: dict[int, Slot] = given) -> Slot | None:
            if value is None or id(value) in known:
                return known.get(id(value))
            results.append(value.shape[0] if known is lengths else value)
            return Slot(len(results) - 1)

        def described(value: Any) -> Any:
            if not isinstance(value, NestedTensor):
                return slot(value) if isinstance(value, (torch.Tensor, torch.SymInt)) else value
            same = next((layout for layout, whole in wholes.items() if whole is value), None)
            if same is not None:
                return Whole(tuple(part and Slot(part.place - len(plain)) for part in same.parts), same.ragged)
            return Whole((slot(value._values), slot(value._offsets), slot(value._lengths),
                          *(slot(value._metadata_cache.get(name), lengths) for name in LENGTHS)), value._ragged_idx)

        leaves, structure = tree_flatten(found)
        self.result = tree_unflatten(list(map(described, leaves)), structure)
        return tuple(results)


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None,
              enable_gqa: bool = False) -> Any:
    """scaled_dot_product_attention on the CPU.  Eager takes the sequences one by one, by their lengths, which are data; here they are padded."""
    sdpa: Any = sys.modules["torch.nested._internal.sdpa"]      # loaded by the first call on a nested tensor, here by the transposition
    sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if sdpa._select_sdp_backend(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa).name != "MATH":
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    longest = query._maybe_max_seqlen, key._maybe_max_seqlen
    if attn_mask is not None or None in longest or any(t._ragged_idx != 2 or t._lengths is not None for t in (query, key, value)):
        raise DataAccess("attention over lengths that are not known")
    padded = [t.to_padded_tensor(0.0, (*t._size[:2], size, t._size[3])) for t, size in zip((query, key, value), (*longest, longest[1]))]
    places = torch.arange(padded[1].shape[2], device=query.device)
    mask = (places < key.offsets().diff().unsqueeze(-1))[:, None, None]
    if dropout_p:
        products = padded[0] @ padded[1].transpose(-1, -2) * (scale or padded[0].shape[-1] ** -0.5)
        found = products.masked_fill(~mask, -math.inf).softmax(-1) * kept_weights(query, key, products.shape, dropout_p) @ padded[2]
    else:
        found = F.scaled_dot_product_attention(padded[0], padded[1], padded[2], attn_mask=mask, scale=scale)
    return nested_tensor.nested_from_padded(found.transpose(1, 2), query.offsets(), min_seqlen=query._maybe_min_seqlen, max_seqlen=longest[0],
                                            sum_S=query._values.shape[1]).transpose(1, 2)


def kept_weights(query: Any, key: Any, shape: Any, dropout_p: float) -> torch.Tensor:
    """Factors of dropout, padded.  Eager draws those of all sequences at once, one sequence of weights after the other."""
    rows, columns = (t.offsets().diff()[:, None, None, None] for t in (query, key))
    counts = shape[1] * rows * columns
    total = counts.sum().item()
    torch._check(total >= 0)
    draws = query._values.new_zeros(total).bernoulli_(1 - dropout_p)
    drawn = torch.cat([draws / (1 - dropout_p) if dropout_p < 1 else draws, query._values.new_zeros(1)])
    head, row, column = (torch.arange(size, device=drawn.device) for size in shape[1:])
    place = counts.cumsum(0) - counts + (head[:, None, None] * rows + row[:, None]) * columns + column
    return drawn[torch.where((row[:, None] < rows) & (column < columns), place, total)]


def sequence(tensor: Any, place: int) -> torch.Tensor:
    """One of its sequences.  Where it begins and how long it is are numbers that run time reads."""
    along, offsets, lengths = tensor._ragged_idx - 1, tensor._offsets, tensor._lengths
    start = offsets[place].item()
    length = (offsets[place + 1] - offsets[place] if lengths is None else lengths[place]).item()
    torch._check(start >= 0)
    torch._check(length >= 0)
    torch._check(start + length <= tensor._values.shape[along])
    return tensor._values.narrow(along, start, length)


def unbound(tensor: Any, dim: int = 0) -> Any:
    """tensor.unbind()"""
    if dim != 0:
        raise RuntimeError("unbind(): only supported for NestedTensor on dim=0")
    return tuple(sequence(tensor, place) for place in range(len(tensor._offsets) - 1))


def item(tensor: Any, key: Any) -> Any:
    """tensor[key]"""
    return sequence(tensor, range(len(tensor._offsets) - 1)[key]) if type(key) is int else tensor[key]


# function -> what is called instead, on the CPU
INSTEAD: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: attention, torch.Tensor.unbind: unbound, torch.unbind: unbound,
                                          operator.getitem: item}
READS_LENGTHS = frozenset({unbound, item, attention})


# -- while a program is captured ----------------------------------------------------------------------------------------
class RaggedSize(Value):
    """nt.size(1)"""

    def __init__(self, owner: JaggedValue):
        self.owner = owner

    def python_type(self) -> type:
        return torch.SymInt

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if op not in ("==", "!="):
            return None
        same = isinstance(other, RaggedSize) and other.owner.lengths_source is self.owner.lengths_source
        return boolean(same == (op == "=="))

    def rebuild(self, e: Emitter) -> str:
        return f"{e.expr(self.owner)}.size({self.owner.ragged})"


class JaggedValue(TensorValue):
    """A nested tensor.  `parts` as `PARTS` names them, None for those that it has not; `owns`: the call that made it made its values."""

    words = "nested tensor over {self.values}"

    inference = False

    def __init__(self, m: Machine, parts: tuple[Any, ...], ragged: int, source: Source | None = None, real: Any = None,
                 owns: bool = False):
        self.parts, self.ragged, self.source, self.real, self.owns = parts, ragged, source, real, owns
        plain = [part if part is None else part.as_arg(m)[1] for part in parts]
        with torch.no_grad(), m.world.active():
            self.abstract = around(plain, ragged)

    @property
    def node(self) -> Any:          # type: ignore[override]  # there is none
        raise Break("argument", name="a nested tensor")

    @property
    def values(self) -> TensorValue:
        return self.parts[0]

    @property
    def lengths_source(self) -> Value:
        """What torch compares ragged sizes by."""
        return self.parts[2] or self.parts[1]

    def python_type(self) -> type:
        return NestedTensor

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        raise Break("argument", name="a nested tensor")

    def sizes(self, m: Machine) -> list[Value]:
        batch = dimension(m, self.parts[1], 0).binary(m, "-", ConstValue(1))
        inner = [RaggedSize(self) if d == self.ragged - 1 else dimension(m, self.values, d) for d in range(self.values.abstract.dim())]
        return [batch, *inner]      # type: ignore[list-item]  # two ints have a difference

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return written
        if name == "shape":
            return SizeValue(self.sizes(m))
        if name in ("requires_grad", "is_leaf"):
            return self._of_history(m, name)
        if name in METADATA:
            return ConstValue(getattr(self.abstract, name))
        if name in PARTS[:3]:
            return self.parts[PARTS.index(name)] or NONE
        if name == "__class__":
            return m.constant_object(NestedTensor)
        if callable(getattr(NestedTensor, name, None)):
            return TensorMethod(self, name)
        if self.source is not None and name in ("grad", "grad_fn"):
            return m.read_attribute(self, name)
        if isinstance(getattr(torch.Tensor, name, None), property):
            return call_graph(m, "call_function", getattr, [self, ConstValue(name)], {})
        raise Break("attribute", name=name, value=self.describe())

    def _of_history(self, m: Machine, name: str) -> Value:
        if self.source is None or name == "requires_grad":
            return ConstValue(getattr(self.values.abstract, name))
        self.guard_leaf(m)
        return ConstValue(self.real.is_leaf)

    def length(self, m: Machine) -> Value:
        return self.sizes(m)[0]

    def iterate(self, m: Machine) -> list[Value]:
        return self.getattr(m, "unbind").call(m, [], {}).iterate(m)

    def rebuild(self, e: Emitter) -> str:
        parts = ["None" if part is None else e.expr(part) for part in self.parts]
        return e.with_attributes(self, e.assign(f"{e.constant(put_together)}({self.ragged}, {', '.join(parts)})"))


# method of a nested tensor -> what it is here
METHODS: dict[str, Callable[[Machine, JaggedValue, Args], Value]] = {
    "values": lambda m, t, args: call_graph(m, "call_function", torch.ops.aten.alias.default, [t.values], {}),
    "offsets": lambda m, t, args: t.parts[1],
    "lengths": lambda m, t, args: t.parts[2] or NONE,
    "dim": lambda m, t, args: ConstValue(t.abstract.dim()), "ndimension": lambda m, t, args: ConstValue(t.abstract.dim()),
    "size": lambda m, t, args: t.sizes(m)[m.known(args[0])] if args else SizeValue(t.sizes(m)),
    "is_inference": lambda m, t, args: boolean(t.values.inference),
    "register_hook": lambda m, t, args: hooked(m, t, args),
}


# methods about a history, which parts do not have
OF_HISTORY = frozenset({"requires_grad_", "detach_", "retain_grad", "register_post_accumulate_grad_hook", "backward"})


def hook_on_values(hook: Any, ragged: int, *others: Any) -> Callable[[Any], Any]:
    """A hook on a nested tensor as one on its values.  Executed symbolically; what it gives runs in the backward."""
    def on_values(gradient: Any) -> Any:
        found = hook(put_together(ragged, gradient, *others))
        return None if found is None else found.values()
    return on_values


def hooked(m: Machine, tensor: JaggedValue, args: Args) -> Value:
    """tensor.register_hook(hook)"""
    if not tensor.owns or len(args) != 1:
        raise Break("call", name="Tensor.register_hook of a nested tensor")
    others = [NONE if part is None else part for part in tensor.parts[1:]]
    hook = m.call_now(m.constant_object(hook_on_values), [args[0], ConstValue(tensor.ragged), *others], {})
    return tensor.values.getattr(m, "register_hook").call(m, [hook], {})


def wrap_jagged(m: Machine, obj: Any, source: Source, number: Callable[..., Value]) -> Value:
    """An input.  `number` makes the Value of one that changes with every batch."""
    nested_tensor._nt_view_dummy()      # torch keeps it: it must not become an abstract tensor
    m.guard(Guard(source, "type", type(obj)))
    m.guard(Guard(Call(source, make_of), "equals", make_of(obj)))
    read_values = reader_of(*make_of(obj)[:2])
    values = m.look(LazyValue(read_values(obj), Call(source, read_values)))
    offsets = m.look(LazyValue(obj._offsets, source.attr("_offsets")))
    lengths = None if obj._lengths is None else m.look(LazyValue(obj._lengths, source.attr("_lengths")))
    numbers = [None if read(obj) is None else number(m, read(obj), Call(source, read)) for read in (least_length, greatest_length)]
    return JaggedValue(m, (values, offsets, lengths, *numbers), obj._ragged_idx, source, obj)


class Arguments:
    """The arguments of a call, and the plain ones that they are made of."""

    def __init__(self, m: Machine):
        self.m = m
        self.plain: list[Value] = []

    def layout(self, value: Value) -> Any:
        value = self.m.look(value)
        if isinstance(value, (JaggedValue, RaggedSize)):
            owner = value.owner if isinstance(value, RaggedSize) else value
            return Whole(tuple(part and self._slot(part) for part in owner.parts), owner.ragged, value is not owner)
        if isinstance(value, Sequence):
            return (list if value.cls is list else tuple)(map(self.layout, value.items))
        if isinstance(value, SliceValue):
            return slice(*map(self.layout, value.parts))
        return value.constant() if value.is_constant() else self._slot(value)

    def _slot(self, value: Value) -> Slot:
        place = next((n for n, known in enumerate(self.plain) if known is value), len(self.plain))
        if place == len(self.plain):
            self.plain.append(value)
        return Slot(place)


def is_nested(m: Machine, value: Value) -> bool:
    value = m.look(value)
    return isinstance(value, (JaggedValue, RaggedSize)) or isinstance(value, Sequence) and any(is_nested(m, item) for item in value.items)


def called(m: Machine, kind: str, target: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """A call of torch, where nested tensors are among its arguments."""
    if not any(is_nested(m, value) for value in (*args, *kwargs.values())):
        return None
    first = m.look(args[0])
    if kind == "call_method" and isinstance(first, JaggedValue) and target in METHODS and len(args) + len(kwargs) <= 2:
        return METHODS[target](m, first, [*args[1:], *kwargs.values()])
    if kind == "call_method" and (target in OF_HISTORY or target in BREAKING):
        raise Break("call", name=f"Tensor.{target} of a nested tensor")
    fn = getattr(NestedTensor, target) if kind == "call_method" else target
    is_ours = isinstance(first, JaggedValue) and on_host(first.abstract)
    return call(m, INSTEAD.get(fn, fn) if is_ours else fn, args, kwargs)


def call(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Value:
    """One node."""
    nested_tensor._nt_view_dummy()
    arguments = Arguments(m)
    function = OnParts(fn, tuple(map(arguments.layout, args)), {name: arguments.layout(value) for name, value in kwargs.items()})
    mark = m.checkpoint()
    with config.patch(capture_scalar_outputs=config.capture_scalar_outputs or fn in READS_LENGTHS,
                      capture_dynamic_output_shape_ops=config.capture_dynamic_output_shape_ops or fn is torch.nested.masked_select):
        made = call_graph(m, "call_function", function, arguments.plain, {})
    results = made.iterate(m) if isinstance(made, Sequence) else []
    try:
        return result_of(m, function.result, arguments.plain, results, [m.look(value) for value in (*args, *kwargs.values())])
    except Break:
        m.rollback(mark)
        raise


def result_of(m: Machine, layout: Any, plain: Args, results: Args, given: Args) -> Value:
    def found(slot: Slot | None) -> Any:
        return None if slot is None else m.look((results if slot.place >= 0 else plain)[slot.place])

    if isinstance(layout, Slot):
        return found(layout)
    if isinstance(layout, Whole):
        parts = tuple(map(found, layout.parts))
        same = next((value for value in given if isinstance(value, JaggedValue) and value.parts == parts), None)
        if same is not None and same.source is not None and same.values.abstract.requires_grad:
            raise Break("call", name="a function that writes a nested tensor from before with a history")
        return same or JaggedValue(m, parts, layout.ragged, owns=layout.parts[0].place >= 0)      # type: ignore[union-attr]  # it has values
    if type(layout) in (tuple, list):
        return m.sequence_like(layout, [result_of(m, item, plain, results, given) for item in layout])
    return m.fresh(layout)


def maker(fn: Any) -> Callable[..., Value | None]:
    def make(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return call(m, fn, args, kwargs)
    return make


for _fn in (torch.nested.nested_tensor_from_jagged, torch.nested.nested_tensor, torch.nested.as_nested_tensor, torch.nested.narrow,
            torch.nested.masked_select):
    CALLS.add(_fn, maker(_fn))
