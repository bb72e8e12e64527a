"""NumPy arrays: the user's own, and the memory of a tensor seen as an array.

Captured are metadata, the way from a tensor to an array and back, which copies nothing, and the functions, methods and operators in the tables
below, a node each: torch's own NumPy says what they are by operators.  The user's array becomes an input of the graph by `torch.from_numpy`;
`tensor.numpy()` is written, where it leaves the region, as the call of that method.

What always holds: shape, dtype and kind of a result (an array, or a number of NumPy's) are those that NumPy itself gives for ones of the same
shapes.  Where torch's differ, in writes to arrays and in all else, the call breaks and NumPy computes.

    torch.from_numpy(array) * 2         # one graph
    np.tanh(x.numpy()).mean(axis=0)     # one graph; the array is made of its output
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Attr, Call
from firesteel.capture.values.base import MethodOfOwner, ObjectKey, OpaqueValue, Value
from firesteel.capture.values.const import ConstValue, fresh, is_none
from firesteel.capture.values.containers import ListValue, Sequence, TupleValue
from firesteel.capture.values.functions import Args, Kwargs, NumpyFunction
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue, size_of
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break
from firesteel.sym.symint import from_sym
from firesteel.targets import on_host

CONSTANTS = ("shape", "ndim", "size", "itemsize", "nbytes")
BINARY = {"+": "add", "-": "subtract", "*": "multiply", "/": "true_divide", "//": "floor_divide", "%": "remainder", "**": "power", "@": "matmul",
          "&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor"}
COMPARED = {"<": "less", "<=": "less_equal", "==": "equal", "!=": "not_equal", ">": "greater", ">=": "greater_equal"}
UNARY = {"-": "negative", "+": "positive", "~": "invert"}
METHODS = """mean sum prod std var min max argmin argmax any all cumsum cumprod clip round reshape transpose ravel squeeze swapaxes repeat
    astype copy flatten dot trace diagonal"""
FUNCTIONS = f"""sin cos tan arcsin arccos arctan arctan2 sinh cosh tanh exp exp2 expm1 log log2 log10 log1p logaddexp sqrt square absolute
    sign floor ceil trunc rint reciprocal isnan isinf isfinite logical_not logical_and logical_or logical_xor deg2rad rad2deg hypot
    maximum minimum fmax fmin {' '.join((*BINARY.values(), *COMPARED.values(), *UNARY.values()))} sum prod mean std var min max argmin argmax any all
    cumsum cumprod clip where concatenate stack vstack hstack dot outer inner tensordot einsum transpose reshape ravel
    squeeze expand_dims swapaxes moveaxis broadcast_to tile repeat zeros_like ones_like full_like trace diagonal tril triu
    round linalg.norm copy""".split()


class ArrayOperators(Value):
    """What is done with an array or a number of NumPy's."""

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        return call_numpy(m, BINARY[op], [other, self] if reflected else [self, other], {}) if op in BINARY else None

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        raise Break("numpy", name=f"The operator {op}= on an array")

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return call_numpy(m, COMPARED[op], [self, other], {}) if op in COMPARED else None

    def unary(self, m: Machine, op: str) -> Value:
        return call_numpy(m, UNARY[op], [self], {}) if op in UNARY else super().unary(m, op)

    def getitem(self, m: Machine, key: Value) -> Value:
        return call_numpy(m, "getitem", [self, m.look(key)], {})

    def computed(self, m: Machine, name: str) -> Value | None:
        """An attribute that is computed."""
        if name == "T":
            return call_numpy(m, "transpose", [self], {})
        return ArrayMethod(self, name) if name in METHODS.split() else None

    def tensor(self, m: Machine) -> Value:
        raise NotImplementedError


class ArrayMethod(MethodOfOwner):
    """array.mean"""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return call_numpy(m, f"ndarray.{self.name}", [self.owner, *args], kwargs)


class ArrayValue(ArrayOperators, OpaqueValue):
    """An array of the user's.  Its data is not looked at; metadata is guarded where it is read."""

    memory: Value | None = None     # the first tensor over it

    def getattr(self, m: Machine, name: str) -> Value:
        if name in CONSTANTS:
            found = getattr(self.obj, name)
            m.guard(Guard(Attr(self.source, name), "equals", found))
            return fresh(m, found)
        if name == "dtype":
            return m.read_attribute(self, name)
        if name == "__class__":
            return m.constant_object(np.ndarray)
        return self.computed(m, name) or super().getattr(m, name)

    def length(self, m: Machine) -> Value:
        return self.getattr(m, "shape").getitem(m, ConstValue(0)) if self.obj.ndim else super().length(m)

    def tensor(self, m: Machine) -> Value:
        """torch.from_numpy(self): a new tensor in each call."""
        if self.memory is not None:
            return call_graph(m, "call_method", "detach", [self.memory], {})
        try:
            real = torch.from_numpy(self.obj)
        except Exception as error:      # the real call raises it
            raise Break("array", name="torch.from_numpy") from error
        m.effects.change(self, "memory", m.read(real, Call(self.source, torch.from_numpy)))
        return self.memory      # type: ignore[return-value]  # it was just set


class TensorArray(ArrayOperators):
    """tensor.numpy()"""

    cls = np.ndarray

    def __init__(self, memory: TensorValue):
        self.memory = memory

    def describe(self) -> str:
        return f"array over a {self.memory.describe()}"

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self)

    def constant(self) -> Any:
        raise Break("numpy", name="What is done with an array")

    def getattr(self, m: Machine, name: str) -> Value:
        shape = size_of(m, self.memory).iterate(m)
        if name == "shape":
            return TupleValue(shape)
        if name == "ndim":
            return ConstValue(len(shape))
        if name == "dtype":
            return m.constant_object(dtype_of(self.memory))
        if name == "__class__":
            return m.constant_object(np.ndarray)
        if (found := self.computed(m, name)) is not None:
            return found
        raise Break("numpy", name=f"ndarray.{name}")

    def length(self, m: Machine) -> Value:
        shape = size_of(m, self.memory).iterate(m)
        return shape[0] if shape else super().length(m)

    def tensor(self, m: Machine) -> Value:
        return call_graph(m, "call_method", "detach", [self.memory], {})

    def rebuild(self, e: Emitter) -> str:
        return f"{e.expr(self.memory)}.numpy()"


class ArrayNumber(ArrayOperators):
    """A number of NumPy's that the program has computed: np.float32, ..."""

    def __init__(self, memory: TensorValue, cls: type):
        self.memory, self.cls = memory, cls

    def describe(self) -> str:
        return f"number of type {self.cls.__name__}"

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        return None

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "item":
            return self.memory.getattr(m, "item")
        return self.computed(m, name) or super().getattr(m, name)

    def tensor(self, m: Machine) -> Value:
        return self.memory

    def rebuild(self, e: Emitter) -> str:
        return f"{e.expr(self.memory)}.numpy()[()]"


def dtype_of(tensor: TensorValue) -> Any:
    return numpy_dtype(tensor.abstract.dtype)


def numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


# -- functions of NumPy ---------------------------------------------------------------------------------------------------
def call_numpy(m: Machine, name: str, args: Args, kwargs: Kwargs) -> Value:
    """The call as a node of the graph; a break where NumPy's result is another than torch's."""
    mark = m.checkpoint()
    given = [over_memory(m, value) for value in args], {key: over_memory(m, value) for key, value in kwargs.items()}
    result = call_graph(m, "call_function", by_torch(name), *given)
    wanted = asked_of_numpy(m, name, *given)
    raises = name in ("floor_divide", "remainder", "power") and wanted[1].kind in "iub"      # on numbers for which NumPy warns
    if raises or not isinstance(result, TensorValue) or wanted != (tuple(map(size_hint(m), result.abstract.shape)), dtype_of(result), wanted[2]):
        m.rollback(mark)
        raise Break("numpy", name=f"numpy.{name}")
    return TensorArray(result) if wanted[2] is np.ndarray else ArrayNumber(result, wanted[2])


def over_memory(m: Machine, value: Value) -> Value:
    """Tensors in place of arrays.  A tensor makes NumPy's functions give tensors, and numbers of NumPy's decide dtypes as arrays do."""
    value = m.look(value)
    if isinstance(value, (TensorArray, ArrayNumber)):
        return value.memory
    if isinstance(value, ArrayValue):
        return value.tensor(m)
    if isinstance(value, (ListValue, TupleValue)) and isinstance(value, Sequence):
        return type(value)([over_memory(m, item) for item in value.items]) if type(value) in (ListValue, TupleValue) else value
    if isinstance(value, TensorValue) or value.is_constant() and isinstance(value.constant(), np.generic):
        raise Break("numpy", name="A call with a tensor, or a number of NumPy's,")
    return value


def size_hint(m: Machine) -> Callable[[Any], int]:
    env = m.world.env
    return lambda size: size if isinstance(size, int) or env is None else env.hint(from_sym(size))


def asked_of_numpy(m: Machine, name: str, args: Args, kwargs: Kwargs) -> tuple[tuple[int, ...], Any, type]:
    """Shape, dtype and type of what NumPy gives for ones of the same shapes."""
    ones = {id(node): np.ones(tuple(map(size_hint(m), val.shape)), numpy_dtype(val.dtype))
            for node, val in ((v.node, v.abstract) for v in tensors_among(m, [*args, *kwargs.values()]))}

    def real(arg: Any) -> Any:
        return torch.fx.node.map_arg(arg, lambda node: ones[id(node)])      # type: ignore[arg-type, return-value]  # arrays for nodes
    given = real(tuple(m.look(value).as_arg(m)[0] for value in args)), real({key: m.look(value).as_arg(m)[0] for key, value in kwargs.items()})
    try:
        with np.errstate(all="ignore"):
            found = found_in(np, name)(*given[0], **given[1])
    except Exception as error:      # the real call raises it, or not
        raise Break("numpy", name=f"numpy.{name}") from error
    return getattr(found, "shape", None), getattr(found, "dtype", None), type(found)        # type: ignore[return-value]  # compared only


def tensors_among(m: Machine, values: Args) -> list[TensorValue]:
    found: list[TensorValue] = []
    for value in map(m.look, values):
        found += [value] if isinstance(value, TensorValue) else tensors_among(m, value.items) if isinstance(value, Sequence) else []
    return found


def found_in(module: Any, name: str) -> Any:
    return operator.getitem if name == "getitem" else functools.reduce(getattr, name.split("."), module)


@functools.cache
def by_torch(name: str) -> Callable[..., Any]:
    """NumPy's function as one of tensors."""
    def numpy_function(*args: Any, **kwargs: Any) -> Any:
        numpy = torch_numpy()
        if name == "getitem":
            return operator.getitem(*args)
        args, kwargs = torch.utils._pytree.tree_map(functools.partial(as_torch_numpy, numpy), (args, kwargs))
        found = found_in(numpy, name)(*args, **kwargs)
        return found.tensor if isinstance(found, numpy.ndarray) else found

    numpy_function.__name__ = numpy_function.__qualname__ = f"numpy_{name.replace('.', '_')}"
    return numpy_function


def torch_numpy() -> Any:
    import torch._numpy  # a tenth of a second, and few programs need it
    return torch._numpy


def as_torch_numpy(numpy: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return numpy.ndarray(value)
    return numpy.dtype(np.dtype(value).name) if isinstance(value, (np.dtype, type)) else value


def _captured(name: str, function: Any) -> Any:
    def call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if any(is_over_memory(m, value) for value in (*args, *kwargs.values())):
            return call_numpy(m, name, args, kwargs)
        return NumpyFunction(function).call(m, args, kwargs)
    return call


def is_over_memory(m: Machine, value: Value) -> bool:
    value = m.look(value)
    return isinstance(value, ArrayOperators) or isinstance(value, Sequence) and any(is_over_memory(m, item) for item in value.items)


for _name in FUNCTIONS:
    if found_in(np, _name) not in CALLS:
        CALLS.add(found_in(np, _name), _captured(_name, found_in(np, _name)))


@TENSOR_METHODS.row("numpy")
def method_numpy(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    if args or set(kwargs) - {"force"}:
        raise Break("numpy", name="Tensor.numpy")
    if kwargs and m.truth_now(m.look(kwargs["force"])):
        tensor = tensor if not tensor.abstract.requires_grad else call_graph(m, "call_method", "detach", [tensor], {})      # type: ignore[assignment]
    abstract = tensor.abstract
    plain = tensor.python_type() in (torch.Tensor, torch.nn.Parameter) and not abstract.is_conj() and not abstract.is_neg()
    if not plain or abstract.requires_grad or not on_host(abstract) or not has_twin(abstract.dtype):
        raise Break("numpy", name="Tensor.numpy")
    return TensorArray(tensor)


def has_twin(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:       # bfloat16
        return False
    return True


CALLS.row(torch.from_numpy)(lambda m, args, kwargs: memory_of(m, args[0], "torch.from_numpy"))


def memory_of(m: Machine, value: Value, name: str) -> Value:
    array = m.look(value)
    if not isinstance(array, (ArrayValue, TensorArray)) or m.modes.entered:
        raise Break("array", name=name)
    return array.tensor(m)


def is_array(m: Machine, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(m.look((args or [*kwargs.values()])[0]), (ArrayValue, TensorArray))


def copied_array(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """torch.tensor(array, dtype=..., device=...)"""
    if len(args) != 1 or set(kwargs) - {"dtype", "device"}:
        raise Break("array", name="torch.tensor")
    copy = call_graph(m, "call_method", "clone", [memory_of(m, args[0], "torch.tensor")], {"memory_format": ConstValue(torch.contiguous_format)})
    return converted(m, copy, kwargs)


def converted(m: Machine, tensor: Value, settings: Kwargs) -> Value:
    given = {name: value for name, value in settings.items() if not is_none(m.look(value))}
    return call_graph(m, "call_method", "to", [tensor], given) if given else tensor


def _shared(function: Any) -> Any:
    """torch.as_tensor(array) shares the memory where nothing is converted."""
    def call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if not is_array(m, args, kwargs):
            return call_graph(m, "call_function", function, args, kwargs)
        if len(args) != 1 or set(kwargs) - {"dtype", "device"}:
            raise Break("array", name=f"torch.{function.__name__}")
        return converted(m, memory_of(m, args[0], f"torch.{function.__name__}"), kwargs)
    return call


for _function in (torch.as_tensor, torch.asarray):
    CALLS.add(_function, _shared(_function))


@CALLS.row(np.asarray)
def call_asarray(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = m.look(args[0]) if args else None
    if len(args) != 1 or kwargs or not isinstance(given, (TensorValue, ArrayValue, TensorArray)):
        raise Break("array", name="numpy.asarray")
    return method_numpy(m, given, [], {}) if isinstance(given, TensorValue) else given


@CALLS.row(np.dtype)
def call_dtype(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return m.constant_object(m.run_real(np.dtype, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()}))
