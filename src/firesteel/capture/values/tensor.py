"""TensorValue: a tensor in the graph, with the abstract tensor that knows its metadata.

Operators, methods and item access become nodes (`torch_calls.call_graph`); metadata is read from the abstract tensor;
whatever asks for data (`bool`, `item`, `tolist`, ...) is a Break.
"""
from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Args, Emitter, Kwargs, Machine
from firesteel.capture.python_operators import OPERATORS, UNARY_OPERATORS
from firesteel.capture.replaced import replaced
from firesteel.capture.source import Attr, Fixed
from firesteel.capture.values.base import MethodOfOwner, ObjectKey, Value
from firesteel.capture.values.const import NONE, ConstValue, is_constant_object
from firesteel.capture.values.containers import ListValue, SizeValue, TupleValue
from firesteel.capture.values.functions import BoundMethodValue, function_value
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.known_data import is_written, known_data
from firesteel.capture.values.messages import call_warn
from firesteel.capture.values.number import SymNumber, answered, ask, converted, number
from firesteel.capture.values.torch_calls import METHOD_CALLS, beside_each_other, call_graph, call_or_inline
from firesteel.capture.values.wrappers import is_wrapper_class, wrapper_attribute
from firesteel.config import config
from firesteel.errors import Break
from firesteel.sym.symint import SYMBOLIC
from firesteel.table import Table

aten = torch.ops.aten

METADATA = frozenset([
    "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes",
    "is_leaf", "names", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_sparse_csr", "retains_grad"])
GRAPH_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])
# method -> the kind of break that a call of it is; those with a row of TENSOR_METHODS break there, if at all
BREAKING: dict[str, str] = {
    **dict.fromkeys(("__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"), "data_scalar"),
    **dict.fromkeys(("__array__", "__array_wrap__"), "numpy"), **dict.fromkeys(("__repr__", "__format__"), "data_read"),
    **dict.fromkeys(("share_memory_", "storage", "untyped_storage", "data_ptr", "record_stream", "__dlpack__", "set_"), "storage"),
    **dict.fromkeys(("__deepcopy__", "__reduce_ex__"), "copy"), "__hash__": "introspection",
}

NO_LEAF = ("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its .grad attribute won't be populated during "
           "autograd.backward(). If you indeed want the .grad field to be populated for a non-leaf Tensor, use .retain_grad() on the non-leaf "
           "Tensor. If you access the non-leaf Tensor by mistake, make sure you access the leaf Tensor instead.")

# method name -> function(machine, tensor, args, kwargs) -> Value
TENSOR_METHODS: Table[Callable[..., Value]] = Table("tensor method", "capture/values/tensor.py")

# attribute -> function(machine, tensor, value): what storing it means
TENSOR_STORES: Table[Callable[..., None]] = Table("store of a tensor's attribute", "capture/values/tensor.py")


class TensorValue(Value):
    """A tensor."""

    def __init__(self, node: torch.fx.Node, abstract: torch.Tensor, source: Any = None, real: Any = None):
        self.node, self.abstract, self.source, self.real = node, abstract, source, real
        self.inference = real is not None and real.is_inference()

    def python_type(self) -> type:
        if self.real is None:
            return type(self.abstract) if is_wrapper_class(type(self.abstract)) else torch.Tensor
        return type(self.real)

    def describe(self) -> str:
        return f"tensor {tuple(self.abstract.shape)} {self.abstract.dtype}"

    def identity(self) -> Any:
        return self.real

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self.real if self.real is not None else self)

    def truth(self, m: Machine) -> bool:
        self.check_own(bool)
        if (data := known_data(m, self)) is not None and data.numel() == 1:
            return bool(data)
        for known in (truth_of_draw(self), answered(m, self)):
            if known is not None:
                return known
        raise Break("data_branch", value=self.describe())

    # -- attributes ------------------------------------------------------------------------------------------------
    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return written
        if name in replaced():
            return self._replaced(m, name)
        if (found := m.override_attribute(self, name)) is not None:
            return found
        if is_wrapper_class(type(self.abstract)) and (found := wrapper_attribute(m, self, name)) is not None:
            return found
        if name == "shape":
            return size_of(m, self)
        if name in METADATA:
            return self._metadata(m, name)
        if name in ("real", "imag") and is_conj(self):
            return part_of_conjugate(m, self, name)
        if name in GRAPH_ATTRIBUTES:
            return call_graph(m, "call_function", getattr, [self, ConstValue(name)], {})
        if name == "__class__":
            return m.constant_object(self.python_type())
        if name == "grad_fn" and (self.source is None or self.node.op != "placeholder" or self.abstract.is_leaf):
            self.guard_leaf(m)
            return NONE if self.abstract.grad_fn is None else HistoryValue(self)
        if callable(getattr(torch.Tensor, name, None)):
            return TensorMethod(self, name)
        if self.source is not None and hasattr(self.real, name):
            return m.read_attribute(self, name)
        if name == "grad":
            if not self.abstract.is_leaf:
                call_warn(m, [ConstValue(NO_LEAF)], {})
            return NONE
        if not hasattr(torch.Tensor, name):
            if self.source is not None:
                m.guard(Guard(self.source, "no_attr", name))
            raise m.raise_real(AttributeError(f"{self.python_type().__name__!r} object has no attribute {name!r}"))
        raise Break("attribute", name=name, value=self.describe())

    def _replaced(self, m: Machine, name: str) -> Value:
        """What the program has put into torch.Tensor."""
        own = replaced()[name]
        if isinstance(own, types.FunctionType):
            return BoundMethodValue(function_value(m, own, Fixed(own)), self, name=name)
        if isinstance(own, property) and isinstance(own.fget, types.FunctionType):
            return function_value(m, own.fget, Fixed(own.fget)).call(m, [self], {})
        raise Break("attribute", name=f"{name}, which the program has replaced,", value=self.describe())

    def check_own(self, fn: Callable[..., Any], prefix: str = "") -> None:
        """Python's operator means what the program has put into torch.Tensor."""
        if (name := f"__{prefix}{fn.__name__.strip('_')}__") in replaced():
            raise Break("operator", name=f"{name}, which the program has replaced,", value=self.describe())

    def guard_leaf(self, m: Machine) -> None:
        """A tensor that came in is a leaf, or is none, in later calls too."""
        if self.source is not None and self.real.requires_grad:
            m.guard(Guard(Attr(self.source, "is_leaf"), "equals", self.real.is_leaf))

    def _metadata(self, m: Machine, name: str) -> Value:
        found = getattr(self.abstract, name)
        if name == "is_leaf":
            self.guard_leaf(m)
        if not is_constant_object(found):
            raise Break("attribute", name=name, value=self.describe())
        return ConstValue(found)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        row = TENSOR_STORES.get(name)
        if row is not None:
            row(m, self, value)
            return
        if hasattr(torch.Tensor, name) and name != "grad":
            raise Break("store", name=f"attribute {name}", value=self.describe())
        if name == "grad" and not fits_as_gradient(self.abstract, value):
            raise Break("store", name="a gradient of another kind", value=self.describe())
        m.effects.store_attr(self, name, value)

    # -- operators -------------------------------------------------------------------------------------------------
    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if not can_be_argument(other):
            return None
        self.check_own(OPERATORS[op], "r" if reflected else "")
        return call_graph(m, "call_function", OPERATORS[op], [other, self] if reflected else [self, other], {})

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        return TensorValue.binary(self, m, op + "=", other)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return TensorValue.binary(self, m, op, other)

    def unary(self, m: Machine, op: str) -> Value:
        if op == "not":
            self.truth(m)
        self.check_own(UNARY_OPERATORS[op])
        return call_graph(m, "call_function", UNARY_OPERATORS[op], [self], {})

    def getitem(self, m: Machine, key: Value) -> Value:
        self.check_own(operator.getitem)
        part, rest = select_symbols(m, self, key)
        return part if rest is None else call_graph(m, "call_function", operator.getitem, [part, rest], {})

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        self.check_own(operator.setitem)
        part, rest = select_symbols(m, self, key)
        call_graph(m, "call_function", operator.setitem, [part, ConstValue(Ellipsis) if rest is None else rest, value], {})

    # -- as a sequence ---------------------------------------------------------------------------------------------
    def length(self, m: Machine) -> Value:
        self.check_own(len)
        if self.abstract.dim() == 0:
            raise Break("operator", name="len()", value=self.describe())
        return dimension(m, self, 0)

    def iterate(self, m: Machine) -> list[Value]:
        self.check_own(iter)
        if self.abstract.dim() == 0:
            raise Break("iterate", value=self.describe())
        return [self.getitem(m, ConstValue(i)) for i in range(ask(int, self.abstract.shape[0]))]

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(TupleValue(self.iterate(m)))

    # -- leaving ---------------------------------------------------------------------------------------------------
    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.node, self.abstract

    def rebuild(self, e: Emitter) -> str:
        text = e.graph_output(self)
        if self.inference and not e.m.modes.started_in_inference:
            text = e.assign(f"{e.constant(as_inference)}({text})")
        return e.with_attributes(self, text)


class HistoryValue(Value):
    """tensor.grad_fn: that there is one is all that is known of it."""

    words = "the history of {self.tensor}"
    always_true = True
    form = "{tensor}.grad_fn"

    def __init__(self, tensor: TensorValue):
        self.tensor = tensor

    def python_type(self) -> type:
        return type(self.tensor.abstract.grad_fn)


def fits_as_gradient(tensor: torch.Tensor, value: Value) -> bool:
    """Does torch take it as the tensor's gradient?"""
    if not isinstance(value, TensorValue):
        return value is NONE or value.is_constant() and value.constant() is None
    given = value.abstract
    return given is not tensor and given.dtype == tensor.dtype and given.device == tensor.device and given.dim() == tensor.dim() \
        and all(ask(bool, a == b) for a, b in zip(given.shape, tensor.shape))


def as_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that inference mode has made."""
    with torch.inference_mode():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)     # type: ignore[call-overload]  # its stub lacks this form


def is_inference_result(m: Machine, out: torch.Tensor) -> bool:
    """Made under inference mode, and not a view of another tensor."""
    if not m.modes.inference or not out._is_view():
        return m.modes.inference
    owner = m.record.owner(out._base)       # type: ignore[arg-type]  # a view has a base
    return owner is not None and owner.inference     # type: ignore[attr-defined]  # a tensor


PLACES = (torch.int64, torch.int32, torch.int16, torch.int8)


def select_symbols(m: Machine, tensor: Value, key: Value) -> tuple[Value, Value | None]:
    """The tensor and the rest of the key, after the symbolic ints in the key (which torch's own indexing refuses) have been applied."""
    if isinstance(key, TupleValue):
        key = TupleValue([as_place(m, tensor, m.look(item).as_index(m, alone=False)) for item in key.items])
    else:
        key = as_place(m, tensor, key.as_index(m, alone=True))
    items = key.items if isinstance(key, TupleValue) else [key]
    places = [i for i, item in enumerate(items) if isinstance(item, SymNumber) and item.python_type() is int]
    if not places:
        return tensor, key
    for i in reversed(places):
        after = [d for d in map(_dims_taken, items[i + 1:]) if d]
        from_end = any(item.is_constant() and item.constant() is Ellipsis for item in items[:i])
        dim = -1 - sum(after) if from_end else sum(map(_dims_taken, items[:i]))
        tensor = call_graph(m, "call_method", "select", [tensor, ConstValue(dim), items[i]], {})
    rest = [item for i, item in enumerate(items) if i not in places]
    return tensor, TupleValue(rest) if rest else None


def as_place(m: Machine, tensor: Value, item: Value) -> Value:
    """An index of no dimension is one place: torch reads it as a number, and the result is a view.  Nobody else sees the number."""
    if type(item) is not TensorValue or item.abstract.dim() or item.abstract.dtype not in PLACES or m.world.env is None:
        return item
    if tensor.asks_its_class or m.modes.entered or m.bodies:        # an override sees the index; inside of torch.func.vmap it is many numbers
        return item
    if m.world.literal(item.abstract) is not None or known_data(m, item) is not None:
        return item
    with config.patch(capture_scalar_outputs=True):
        return call_graph(m, "call_method", "item", [item], {})


def _dims_taken(item: Value) -> int:
    """How many dimensions of the tensor one item of a key stands for."""
    if item.is_constant():
        return 0 if item.constant() is None or item.constant() is Ellipsis or isinstance(item.constant(), bool) else 1
    return item.abstract.dim() if isinstance(item, TensorValue) and item.abstract.dtype in (torch.bool, torch.uint8) else 1


def can_be_argument(value: Value) -> bool:
    value = getattr(value, "payload", value)        # an object over int or float
    return isinstance(value, (TensorValue, SymNumber)) or value.is_argument or (
        isinstance(value, ConstValue) and (isinstance(value.value, (int, float, complex, np.generic)) or value.value is None))


def dimension(m: Machine, tensor: TensorValue, dim: int) -> Value:
    """One size; a symbol becomes a sym_size node where the graph needs it."""
    size = tensor.abstract.shape[dim]
    node = tensor.node
    return number(m, size, lambda: m.record.call_function(aten.sym_size.int, (node, dim), {}, size))


def size_of(m: Machine, tensor: TensorValue) -> Value:
    return SizeValue([dimension(m, tensor, d) for d in range(tensor.abstract.dim())])


class TensorMethod(MethodOfOwner):
    """A bound method of a tensor."""

    words = "Tensor.{self.name}"

    def python_type(self) -> type:
        return type(getattr(torch.Tensor, self.name))

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        row = TENSOR_METHODS.get(self.name)
        if row is not None and (found := m.overridden("call_method", self.name, [self.owner, *args], kwargs)) is not None:
            return found
        if row is not None:
            return row(m, self.owner, args, kwargs)
        if self.name in BREAKING:
            raise Break(BREAKING[self.name], name=f"Tensor.{self.name}", text="")
        return call_or_inline(m, "call_method", self.name, [self.owner, *args], kwargs, getattr(torch, self.name, None))


def _store_part(name: str, m: Machine, tensor: TensorValue, value: Value) -> None:
    """z.real = x"""
    call_graph(m, "call_method", "copy_", [tensor.getattr(m, name), value], {})


def part_of_conjugate(m: Machine, tensor: TensorValue, name: str) -> Value:
    """A view of the same memory, as in eager: a real tensor has no conjugate bit, and the imaginary part has the negative one instead."""
    plain = call_graph(m, "call_function", torch._conj, [tensor], {})
    part = call_graph(m, "call_function", getattr, [plain, ConstValue(name)], {})
    return call_graph(m, "call_function", torch._neg_view, [part], {}) if name == "imag" else part


TENSOR_STORES.add("real", functools.partial(_store_part, "real"))
TENSOR_STORES.add("imag", functools.partial(_store_part, "imag"))


@METHOD_CALLS.row("methods with a meaning here")
def call_unbound(m: Machine, name: str, args: Args, kwargs: Kwargs) -> Value | None:
    """torch.Tensor.item(x)"""
    special = name in TENSOR_METHODS or name in BREAKING
    return TensorMethod(args[0], name).call(m, args[1:], kwargs) if special and args and isinstance(args[0], TensorValue) else None


@METHOD_CALLS.row("parts of a conjugate")
def call_part(m: Machine, name: str, args: Args, kwargs: Kwargs) -> Value | None:
    """torch.imag(z)"""
    ours = name in ("real", "imag") and len(args) == 1 and isinstance(args[0], TensorValue) and is_conj(args[0])
    return args[0].getattr(m, name) if ours else None


@TENSOR_METHODS.row("new")
def method_new(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    """A torch.Size is a shape, a plain sequence is data; graphs do not distinguish them."""
    name = "new_empty" if args and isinstance(m.look(args[0]), SizeValue) else "new"
    return call_graph(m, "call_method", name, [tensor, *args], kwargs)


@TENSOR_METHODS.row("size")
def method_size(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    dim = args[0] if args else kwargs.get("dim")
    if dim is None or m.known(dim) is None:
        return size_of(m, tensor)
    index, rank = m.known(dim), tensor.abstract.dim()
    if not -rank <= index < rank:
        raise Break("abstract_failure", name="Tensor.size", text=f"dimension {index} of {rank}")
    return dimension(m, tensor, index % rank)


def resolved(m: Machine, tensor: TensorValue, bit: Any) -> Value:
    """The tensor itself, or a copy where it has the bit."""
    return call_graph(m, "call_method", "clone", [tensor], {}) if bit in bits_of(tensor) else tensor


def is_conj(tensor: TensorValue) -> bool:
    return torch.ops.aten._conj.default in bits_of(tensor)


def bits_of(tensor: TensorValue) -> frozenset[Any]:
    return getattr(tensor.abstract, "bits", frozenset())        # a wrapper has none of its own


# method without arguments -> what it reads of a tensor; an input's bits are guarded
READS: dict[str, Callable[[TensorValue], Any]] = {
    "dim": lambda t: t.abstract.dim(), "ndimension": lambda t: t.abstract.dim(), "is_inference": lambda t: t.inference, "is_conj": is_conj,
    "is_neg": lambda t: aten._neg_view.default in bits_of(t)}
for _name, _read in READS.items():
    TENSOR_METHODS.add(_name, lambda m, tensor, args, kwargs, read=_read: ConstValue(read(tensor)))
for _name, _bit in {"resolve_conj": aten._conj.default, "resolve_neg": aten._neg_view.default}.items():
    TENSOR_METHODS.add(_name, lambda m, tensor, args, kwargs, bit=_bit: resolved(m, tensor, bit))


@TENSOR_METHODS.row("type")
def method_type(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    """A class such as torch.FloatTensor is given by its name, which a graph can hold."""
    if args and isinstance(args[0].identity(), type(torch.FloatTensor)):
        cls = args[0].constant()
        args = [ConstValue(f"{cls.__module__}.{cls.__name__}"), *args[1:]]
    return call_graph(m, "call_method", "type", [tensor, *args], kwargs)


TENSOR_METHODS.row("resize_")(
    lambda m, tensor, args, kwargs: _resized(m, tensor, "resize_", tree_leaves([value.as_arg(m)[1] for value in args]), args, kwargs))
TENSOR_METHODS.row("resize_as_")(
    lambda m, tensor, args, kwargs: _resized(m, tensor, "resize_as_", args[0].as_arg(m)[1].shape, args, kwargs))


def _resized(m: Machine, tensor: TensorValue, name: str, sizes: Any, args: Args, kwargs: Kwargs) -> Value:
    """A storage that gets other elements is no part of a graph."""
    if not ask(bool, math.prod(sizes) == math.prod(tensor.abstract.shape)):
        raise Break("storage", name=f"Tensor.{name} to another number of elements")
    return call_graph(m, "call_method", name, [tensor, *args], kwargs)


TENSOR_METHODS.row("item")(lambda m, tensor, args, kwargs: read_number(m, tensor, "Tensor.item"))


def read_number(m: Machine, tensor: TensorValue, name: str) -> Value:
    """The one element as a number: a symbol, where settings ask for that.  A flag is one in any case: programs branch on flags.  So is a float in a
    `for` loop that is being unrolled, as a break there would be one a round."""
    if (data := known_data(m, tensor)) is not None and data.numel() == 1:
        return ConstValue(data.item())
    dtype = tensor.abstract.dtype
    wanted = (dtype is torch.bool or dtype.is_floating_point and is_unrolling(m)) and not m.bodies and not m.modes.entered
    if not (config.capture_scalar_outputs or wanted) or m.world.env is None or tensor.abstract.dtype.is_complex:
        raise Break("data_scalar", name=name)
    with config.patch(capture_scalar_outputs=True):
        return call_graph(m, "call_method", "item", [tensor], {})


UNROLLED = 1000     # nodes of a graph, from which on such a loop is left at a break


def is_unrolling(m: Machine) -> bool:
    return len(m.record.nodes) < UNROLLED and any(isinstance(item, IteratorValue) for frame in m.frames for item in frame.stack)


@TENSOR_METHODS.row("tolist")
def method_tolist(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    if tensor.abstract.dim() == 0:
        return read_number(m, tensor, "Tensor.tolist")
    if not config.capture_scalar_outputs and known_data(m, tensor) is None:
        raise Break("data_scalar", name="Tensor.tolist")
    return ListValue([method_tolist(m, row, [], {}) for row in tensor.iterate(m)])


TENSOR_METHODS.row("__int__", "__index__")(lambda m, tensor, args, kwargs: converted(m, read_number(m, tensor, "int() of a tensor"), int))
TENSOR_METHODS.row("__float__")(lambda m, tensor, args, kwargs: converted(m, read_number(m, tensor, "float() of a tensor"), float))
TENSOR_METHODS.row("__len__")(lambda m, tensor, args, kwargs: tensor.length(m))


def _with_tensor_value(name: str, combine: Any, m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    """x.addcdiv_(a, b, value=t) with a tensor t: torch would read it as a number, which is known at run time only."""
    args, kwargs = beside_each_other(m, args, kwargs)
    value = kwargs.get("value")
    if not isinstance(value, TensorValue) or len(args) != 2:
        return call_graph(m, "call_method", name, [tensor, *args], kwargs)
    change = call_graph(m, "call_function", operator.mul, [value, call_graph(m, "call_function", combine, args, {})], {})
    return call_graph(m, "call_method", "add_" if name.endswith("_") else "add", [tensor, change], {})


for _name, _combine in {"addcdiv": torch.div, "addcmul": torch.mul}.items():
    TENSOR_METHODS.add(_name, functools.partial(_with_tensor_value, _name, _combine))
    TENSOR_METHODS.add(_name + "_", functools.partial(_with_tensor_value, _name + "_", _combine))


def scaled_by_tensor(m: Machine, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of add and sub with `alpha=t` of a tensor t, which eager reads as a number: the second times t."""
    args, kwargs = beside_each_other(m, args, kwargs)
    other, alpha = args[1] if len(args) == 2 else None, kwargs.get("alpha")
    if not isinstance(alpha, TensorValue) or not isinstance(other, TensorValue) or alpha.abstract.dim() or not other.abstract.is_floating_point():
        return args, kwargs
    if m.world.literal(alpha.abstract) is not None:     # a number already
        return args, kwargs
    read = call_graph(m, "call_method", "detach", [alpha], {})
    number = call_graph(m, "call_method", "to", [read, ConstValue(other.abstract.dtype)], {"copy": ConstValue(True)})      # it may be written later
    return [args[0], call_graph(m, "call_function", operator.mul, [other, number], {})], {name: v for name, v in kwargs.items() if name != "alpha"}


def _with_alpha(kind: str, target: Any, m: Machine, *given: Any) -> Value:
    args, kwargs = scaled_by_tensor(m, [*given[:-2], *given[-2]], given[-1])
    return call_graph(m, kind, target, args, kwargs)


for _name in ("add", "sub"):
    CALLS.add(getattr(torch, _name), functools.partial(_with_alpha, "call_function", getattr(torch, _name)))
    TENSOR_METHODS.add(_name, functools.partial(_with_alpha, "call_method", _name))
    TENSOR_METHODS.add(_name + "_", functools.partial(_with_alpha, "call_method", _name + "_"))


# comparison of a number in [0, 1) with another -> what it gives where that is at most 0, and at least 1
OF_DRAWS = {operator.lt: (False, True), operator.ge: (True, False)}


def truth_of_draw(value: TensorValue) -> bool | None:
    """Of `torch.rand([]) < p` for a p that every draw is below, or none: layerdrop that is off."""
    node = value.node
    if node.target not in OF_DRAWS or any(type(size) is not int or size != 1 for size in value.abstract.shape) or is_written(value.abstract):
        return None
    draw, bound = node.args
    if not isinstance(draw, torch.fx.Node) or draw.target is not torch.rand or is_written(draw.meta["val"]) or not isinstance(bound, (int, float)):
        return None
    low, high = OF_DRAWS[node.target]
    return low if bound <= 0 else high if bound >= 1 else None


def wrap_output(m: Machine, out: Any, node: torch.fx.Node) -> Value:
    """The Value of what a torch call gave, `node` being its node."""
    if isinstance(out, torch.Tensor):
        owner = m.record.owner(out)
        if owner is not None:
            m.record.renode(owner, node)
            return owner
        value = TensorValue(node, out)
        value.inference = is_inference_result(m, out)
        m.record.own(out, value)
        return value
    if isinstance(out, SYMBOLIC):
        return SymNumber(out, lambda: node)
    if isinstance(out, (tuple, list)):
        return m.sequence_like(out, [wrap_item(m, item, node, i) for i, item in enumerate(out)])
    if is_constant_object(out):
        return ConstValue(out)
    raise Break("object", name=type(out).__qualname__)


def wrap_item(m: Machine, item: Any, node: torch.fx.Node, index: int) -> Value:
    if is_constant_object(item):
        return ConstValue(item)
    return wrap_output(m, item, m.record.call_function(operator.getitem, (node, index), {}, item))
