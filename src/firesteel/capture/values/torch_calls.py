"""Calls that go into the graph as one node: torch functions, tensor methods, operators, OpOverloads.

`call_graph` runs the real function on the abstract arguments to learn the result, and records the node.  A call whose
result holds neither tensors nor symbols is executed now and leaves no node (`torch.is_tensor`, `x.is_contiguous()`).
`is_torch_function(fn)` says which callables are such leaves.

    call_graph(m, "call_function", torch.add, [x, y], {})
"""
from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional

from firesteel.capture import marks
from firesteel.capture.guards import Guard
from firesteel.capture.polyfills import CHECKED
from firesteel.capture.source import Fixed, StorageOffset
from firesteel.capture.values.base import CallableObject, Value
from firesteel.capture.values.const import is_constant_object
from firesteel.capture.values.functions import function_value
from firesteel.errors import Break, DataAccess, DataDependentError
from firesteel.table import Table

if TYPE_CHECKING:
    from firesteel.capture.machine import Machine

# Python functions that are one node each; what is not named here is inlined
LEAF_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._jit_internal", "torch._tensor", "torch.special",
                          "torch.linalg", "torch.fft", "torch._VF", "torch.masked._ops"})
LEAF_FUNCTIONS = frozenset({torch.is_tensor, torch.is_storage, torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min,
                            torch.sym_not})
FUNCTIONAL = frozenset(id(f) for f in vars(torch.nn.functional).values() if callable(f) and not isinstance(f, type))
NATIVE_TYPES = (types.BuiltinFunctionType, types.BuiltinMethodType, types.MethodDescriptorType, types.WrapperDescriptorType)
OPERATOR_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

# native functions with effects that a graph does not hold
NOT_IN_GRAPH = frozenset([
    "manual_seed", "seed", "initial_seed", "set_rng_state", "get_rng_state", "save", "load", "set_num_threads", "set_default_dtype",
    "set_default_tensor_type", "set_printoptions", "set_grad_enabled", "set_deterministic", "use_deterministic_algorithms", "from_numpy",
    "tensor_from_file", "_C_is_compiling", "from_dlpack", "frombuffer"])
SETTERS = frozenset({"set", "push", "pop", "enter", "exit", "clear", "reset", "unset", "exchange", "increment", "decrement", "remove"})
NO_DATA = "its data is not allocated yet"       # what C++ code says that reaches for the data of an abstract tensor
WORDLESS = frozenset({"_assert_async", "_assert", "setitem"})       # give None, and matter


def is_torch_function(fn: Any) -> bool:
    """Does a call of fn go into the graph as one node?"""
    if isinstance(fn, OPERATOR_TYPES) or id(fn) in FUNCTIONAL or marks.is_marked(fn, marks.ALLOWED):
        return True
    if isinstance(fn, NATIVE_TYPES):
        return is_native_torch(fn)
    return isinstance(fn, types.FunctionType) and (fn in LEAF_FUNCTIONS or fn.__module__ in LEAF_MODULES)


def is_native_torch(fn: Any) -> bool:
    if getattr(fn, "__module__", None) == "torch._C._functorch":       # these push and pop levels of function transforms
        return False
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, (torch.Tensor, torch.Generator)):      # a method that is bound to an object which is no part of the graph
        return False
    home = getattr(fn, "__module__", None) or getattr(owner, "__module__", None) or ""
    return home.startswith("torch") or owner is torch._C._VariableFunctions or getattr(fn, "__objclass__", None) is torch._C.TensorBase


def split_args(m: Machine, values: list[Value]) -> tuple[list[Any], list[Any]]:
    """Values as (graph arguments, abstract arguments)."""
    nodes, reals = [], []
    for value in values:
        node, real = value.as_arg(m)
        nodes.append(node)
        reals.append(real)
    return nodes, reals


def call_graph(m: Machine, kind: str, target: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The result of a torch call, its node recorded; or what overrides of its arguments say."""
    if (found := m.overridden(kind, target, args, kwargs)) is not None:
        return found
    if "from" in kwargs and len(args) == 1:     # a word that generated code cannot use as a name; it is the first parameter wherever it is one
        args, kwargs = [*args, kwargs["from"]], {name: value for name, value in kwargs.items() if name != "from"}
    node_args, real_args = split_args(m, args)
    node_kwargs, real_kwargs = {}, {}
    for name, value in kwargs.items():
        node_kwargs[name], real_kwargs[name] = value.as_arg(m)
    if name_of(target).rpartition(".")[2] in TELLS_OFFSET:
        guard_offset(m, args, kwargs)
    fn = getattr(real_args[0], target) if kind == "call_method" else target
    symbols = len(m.world.env.symbols) if m.world.env is not None else 0
    out = run_abstract(m, fn, real_args[1:] if kind == "call_method" else real_args, real_kwargs, target)
    if "requires_grad" in kwargs and getattr(out, "requires_grad", False):      # a leaf: it must be there for real when gradients arrive
        made = call_graph(m, kind, target, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
        return m.new_leaf(made, f"{name_of(target)} with requires_grad=True")
    if not m.inference and getattr(out, "requires_grad", False) and any(getattr(value, "inference", False) for value in args):
        raise Break("abstract_failure", name=name_of(target), text="an inference tensor takes part in a computation with gradients")
    if is_constant_object(out) and (out is not None or not mutates(target, real_args, real_kwargs)):
        return m.fresh(out)
    make = m.record.call_method if kind == "call_method" else m.record.call_function
    node = make(target, tuple(node_args), node_kwargs, out)
    if m.world.env is not None and len(m.world.env.symbols) > symbols:
        node.meta["unbacked"] = m.world.env.unbacked_since(symbols)     # a later stage that makes the call again gives the same symbols
    return m.wrap_output(out, node)


# functions that count places from the start of a tensor's storage
TELLS_OFFSET = frozenset({"storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})


def guard_offset(m: Machine, args: list[Value], kwargs: dict[str, Value]) -> None:
    """What came in of the tensor's storage lies at the same place of it in later calls.  No other function's result depends on that."""
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
    except Exception as error:      # eager's own error, or a rule that is missing: the real call tells
        if NO_DATA in str(error):
            raise Break("data_read", name=name_of(target), text="") from error
        raise Break("abstract_failure", name=name_of(target), text=f"{type(error).__name__}: {error}") from error


def mutates(target: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """May a call that gave None have changed a tensor, or is it a function of the user's?"""
    return marks.is_marked(target, marks.ALLOWED) or any(isinstance(a, torch.Tensor) for a in torch.utils._pytree.tree_leaves((args, kwargs)))


def name_of(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or str(target)
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


# kinds of breaks that a function of torch may be spared by executing Python code for it instead of calling it as one node: an argument that a
# graph cannot hold (a module, a function), or data that is read, so that only the reading breaks
WHAT_INSIDE = frozenset({"argument", "data_read", "data_shape"})


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

class TorchFunctionValue(CallableObject):
    """A torch function as an object."""

    def describe(self) -> str:
        return f"torch function {name_of(self.fn)}"

    def call(self, m: Machine, args: list[Value], kwargs: dict[str, Value]) -> Value:
        name = name_of(self.fn).rpartition(".")[2]
        if marks.is_marked(self.fn, marks.FORBIDDEN):
            raise Break("call", name=f"{name_of(self.fn)}, marked with forbid_in_graph,")
        if name in NOT_IN_GRAPH or name.strip("_").partition("_")[0] in SETTERS and getattr(torch._C, name, None) is self.fn:
            raise Break("call", name=name_of(self.fn))
        for row in METHOD_CALLS.values() if getattr(torch.Tensor, name, None) is self.fn else ():
            if (found := row(m, name, args, kwargs)) is not None:
                return found
        return call_or_inline(m, "call_function", self.fn, args, kwargs, self.fn)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.fn, self.fn


IN_PLACE = {f"{symbol}=": getattr(operator, f"i{name}") for symbol, name in {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}.items()}
BINARY = {f"{symbol}": getattr(operator, name) for symbol, name in {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and_", "|": "or_", "^": "xor", "<<": "lshift", ">>": "rshift"}.items()}
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {**BINARY, **IN_PLACE, **COMPARE}
UNARY_OPERATORS: dict[str, Callable[[Any], Any]] = {"-": operator.neg, "+": operator.pos, "~": operator.invert, "not": operator.not_}
