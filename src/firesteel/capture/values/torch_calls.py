"""Calls that go into the graph as one node: torch functions, tensor methods, operators, OpOverloads.

`call_graph` runs the real function on the abstract arguments to learn the result, and records the node.  A call whose
result holds neither tensors nor symbols is executed now and leaves no node (`torch.is_tensor`, `x.is_contiguous()`).
`meanings.py` says which callables are such nodes.

    call_graph(m, "call_function", torch.add, [x, y], {})
"""
from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture import marks
from firesteel.capture.guards import Guard
from firesteel.capture.polyfills import CHECKED
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Fixed, StorageOffset
from firesteel.capture.values.base import CallableObject, Value
from firesteel.capture.values.const import is_constant_object
from firesteel.capture.values.containers import ListValue, SizeValue, SliceValue, TupleValue
from firesteel.capture.values.functions import function_value, name_of
from firesteel.capture.values.known_data import known_data, known_results
from firesteel.errors import Break, DataAccess, DataDependentError
from firesteel.table import Table

NO_DATA = "its data is not allocated yet"       # what C++ code says that reaches for the data of an abstract tensor


def split_args(m: Machine, values: list[Value]) -> tuple[list[Any], list[Any]]:
    """Values as (graph arguments, abstract arguments)."""
    nodes, reals = [], []
    for value in values:
        node, real = value.as_arg(m)
        nodes.append(node)
        reals.append(real)
    return nodes, reals


def wrapped_method(target: Any) -> Any:
    """Tensor.__pow__ is a function around the method `pow`, found in no module under its name: generated code calls the method."""
    inner = getattr(target, "__wrapped__", None)
    return inner if inner is not None and getattr(torch.Tensor, getattr(inner, "__name__", ""), None) is inner else target


def call_graph(m: Machine, kind: str, target: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The result of a torch call, its node recorded; or what overrides of its arguments say."""
    if (found := m.overridden(kind, target, args, kwargs)) is not None:
        return found
    if any(value.is_either for value in (*args, *kwargs.values())):
        args, kwargs = beside_each_other(m, args, kwargs)
    if "from" in kwargs and len(args) == 1:     # a word that generated code cannot use as a name; it is the first parameter wherever it is one
        args, kwargs = [*args, kwargs["from"]], {name: value for name, value in kwargs.items() if name != "from"}
    node_args, real_args = split_args(m, args)
    node_kwargs, real_kwargs = {}, {}
    for name, value in kwargs.items():
        node_kwargs[name], real_kwargs[name] = value.as_arg(m)
    if name_of(target).rpartition(".")[2] in READS_OFFSET:
        guard_offset(m, args, kwargs)
    fn = getattr(real_args[0], target) if kind == "call_method" else target
    literals = literals_in(m, (node_args, node_kwargs))
    symbols = len(m.world.env.symbols) if m.world.env is not None else 0
    try:
        out = run_abstract(m, fn, real_args[1:] if kind == "call_method" else real_args, real_kwargs, target)
    except Break as stop:
        if stop.kind == "data_read" and (numbers := with_numbers(m, kind, args, kwargs)) is not None:
            return call_graph(m, kind, target, *numbers)
        if stop.kind == "data_shape" and target is operator.getitem and (places := with_places(m, *args)) is not args[1]:
            return call_graph(m, kind, target, [args[0], places], kwargs)
        if stop.kind != "data_shape" or (found := known_results(m, target, node_args, node_kwargs)) is None:
            raise
        return literal_of(m, found)
    if "requires_grad" in kwargs and getattr(out, "requires_grad", False):      # a leaf: it must be there for real when gradients arrive
        made = call_graph(m, kind, target, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
        return m.new_leaf(made, f"{name_of(target)} with requires_grad=True")
    if not m.modes.inference and getattr(out, "requires_grad", False) and any(getattr(value, "inference", False) for value in args):
        raise Break("abstract_failure", name=name_of(target), text="an inference tensor takes part in a computation with gradients")
    if is_constant_object(out) and (out is not None or not mutates(target, real_args, real_kwargs)):
        return m.fresh(out)
    make = m.record.call_method if kind == "call_method" else m.record.call_function
    node = make(wrapped_method(target), tuple(node_args), node_kwargs, out)
    if literals:
        node.meta["literals"] = [literals.get(read) for read in node.all_input_nodes]
    if m.world.env is not None and len(m.world.env.symbols) > symbols:
        node.meta["unbacked"] = m.world.env.unbacked_since(symbols)     # a later stage that repeats the call binds the same symbols
    return m.wrap_output(out, node)


def beside_each_other(m: Machine, args: list[Value], kwargs: dict[str, Value]) -> tuple[list[Value], dict[str, Value]]:
    given = [*args, *kwargs.values()]
    return [value.beside(m, given) for value in args], {name: value.beside(m, given) for name, value in kwargs.items()}


def with_numbers(m: Machine, kind: str, args: list[Value], kwargs: dict[str, Value]) -> tuple[list[Value], dict[str, Value]] | None:
    """Arguments but for the owner of a method, `as_number`; None where they are as before."""
    looked = list(map(m.look, (*args, *kwargs.values())))
    start = int(kind == "call_method")
    numbers = [*looked[:start], *(as_number(m, value) for value in looked[start:])]
    same = all(a is b for a, b in zip(numbers, looked))
    return None if same else (numbers[:len(args)], dict(zip(kwargs, numbers[len(args):])))


def as_number(m: Machine, value: Any) -> Value:
    """An argument that torch reads as a number, x.view(torch.div(4, 2), -1), as that number where it is known."""
    value = m.look(value)
    abstract = getattr(value, "abstract", None)
    if isinstance(abstract, torch.Tensor):
        whole = abstract.dim() == 0 and abstract.dtype in WHOLE
        return m.fresh(int(data)) if whole and (data := known_data(m, value)) is not None else value
    parts = value.parts if type(value) is SliceValue else value.items if type(value) in (ListValue, SizeValue, TupleValue) else ()
    numbers = [as_number(m, part) for part in parts]
    if all(number is m.look(part) for number, part in zip(numbers, parts)):
        return value
    return SliceValue(*numbers) if type(value) is SliceValue else type(value)(numbers)


WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def with_places(m: Machine, tensor: Any, key: Any) -> Value:
    """A key with the places where masks are true, for masks of known data on known sizes: these fit."""
    if any(type(size) is not int for size in tensor.abstract.shape):
        return key
    parts: list[Any] = list(map(m.look, key.items)) if type(key) is TupleValue else [key]
    found = [known_data(m, part) if getattr(part, "abstract", None) is not None and part.abstract.dtype is torch.bool else None for part in parts]
    if all(data is None for data in found):
        return key
    return TupleValue([item for part, data in zip(parts, found) for item in (
        [part] if data is None else [literal_of(m, places) for places in data.nonzero(as_tuple=True)] if data.dim() else [part])])


def literals_in(m: Machine, args: Any) -> dict[torch.fx.Node, torch.Tensor]:
    """The arguments whose data is known before the call, so that it may be read as a number."""
    found: dict[torch.fx.Node, torch.Tensor] = {}

    def look(node: torch.fx.Node) -> torch.fx.Node:
        data = m.world.literal(node.meta.get("val"))
        if data is not None:
            found[node] = data
        return node
    torch.fx.map_arg(args, look)
    return found


def literal_of(m: Machine, found: Any) -> Value:
    """Tensors with data, as literals of the program, in the order of their memory: that of `nonzero` is transposed."""
    if not isinstance(found, torch.Tensor):
        return m.sequence_like(found, [literal_of(m, one) for one in found])
    shape, strides = tuple(found.shape), found.stride()
    plain = strides == torch.empty(shape, device="meta").stride() or found.untyped_storage().nbytes() != found.nbytes
    data = found.tolist() if plain else found.as_strided((found.numel(),), (1,)).tolist()
    made = call_graph(m, "call_function", torch.tensor, [m.fresh(data)], {"dtype": m.fresh(found.dtype), "device": m.fresh(found.device)})
    return call_graph(m, "call_method", "reshape" if plain else "as_strided", [made, *map(m.fresh, (shape,) if plain else (shape, strides))], {})


# functions whose result depends on the storage offset
READS_OFFSET = frozenset({"storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})


def guard_offset(m: Machine, args: list[Value], kwargs: dict[str, Value]) -> None:
    """Guards the storage offset of the inputs over this storage.  No other function's result depends on it."""
    strided = len(args) > 1 or kwargs
    if not args or strided and "storage_offset" not in kwargs and len(args) < 4:
        return
    tensor = getattr(args[0], "abstract", None)
    if tensor is None:
        return
    owner: Any
    for abstract, owner in list(m.record.tensors.values()):
        if getattr(owner, "source", None) is not None and isinstance(owner.real, torch.Tensor) and _whole(abstract) is _whole(tensor):
            m.guard(Guard(StorageOffset(owner.source), "equals", owner.real.storage_offset()))


def _whole(tensor: torch.Tensor) -> Any:
    return tensor._base if tensor._is_view() else tensor


def run_abstract(m: Machine, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], target: Any) -> Any:
    """Executes on abstract tensors; whatever goes wrong is a break, so that the real call can raise eager's error."""
    try:
        with m.world.active():
            return m.world.function(fn)(*args, **kwargs)
    except Break:
        raise
    except DataDependentError as error:
        raise Break("data_shape", error=error, name=name_of(target)) from error
    except DataAccess as error:
        raise Break("data_read", name=name_of(target), text=f" ({error.what})") from error
    except Exception as error:      # eager's own error, or a missing rule: the real call decides
        if NO_DATA in str(error):
            raise Break("data_read", name=name_of(target), text="") from error
        raise Break("abstract_failure", name=name_of(target), text=f"{type(error).__name__}: {error}") from error


def mutates(target: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """May a call that gave None have changed a tensor, or is it a function of the user's?"""
    return marks.is_marked(target, marks.ALLOWED) or any(isinstance(a, torch.Tensor) for a in torch.utils._pytree.tree_leaves((args, kwargs)))


# kinds of breaks that a function of torch may be spared by executing Python code for it instead of calling it as one node: an argument that a
# graph cannot hold (a module, a function), data that is read, so that only the reading breaks, or overrides of what it calls
WHAT_INSIDE = frozenset({"argument", "data_read", "data_shape", "override"})


def call_or_inline(m: Machine, kind: str, target: Any, args: list[Value], kwargs: dict[str, Value], fn: Any) -> Value:
    """The call as one node; or, where a row of WHAT_INSIDE forbids that, the Python code of `fn`, if there is some."""
    inside: Any = fn if isinstance(fn, types.FunctionType) and not getattr(fn, marks.ALLOWED, False) else CHECKED.get(fn)
    if inside is None:
        return call_graph(m, kind, target, args, kwargs)
    mark = m.checkpoint()
    try:
        return call_graph(m, kind, target, args, kwargs)
    except Break as stopped:
        if stopped.kind not in WHAT_INSIDE:
            raise
    m.rollback(mark)
    return function_value(m, inside, Fixed(inside)).call(m, args, kwargs)


# functions(machine, name, args, kwargs) -> Value or None: methods of torch.Tensor that are called as functions
METHOD_CALLS: Table[Callable[..., Value | None]] = Table("unbound tensor method", "capture/values/tensor.py")
# functions about the bits of a tensor, which do as its method or attribute of the same name
OF_BITS = frozenset({torch.is_conj, torch.is_neg, torch.resolve_conj, torch.resolve_neg, torch.real, torch.imag})


class TorchFunctionValue(CallableObject):
    """A torch function as an object."""

    def describe(self) -> str:
        return f"torch function {name_of(self.fn)}"

    def call(self, m: Machine, args: list[Value], kwargs: dict[str, Value]) -> Value:
        name = name_of(self.fn).rpartition(".")[2]
        for row in METHOD_CALLS.values() if getattr(torch.Tensor, name, None) is self.fn or self.fn in OF_BITS else ():
            if (found := row(m, name, args, kwargs)) is not None:
                return found
        return call_or_inline(m, "call_function", self.fn, args, kwargs, self.fn)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.fn, self.fn
