"""NumPy arrays: the user's own, and the memory of a tensor seen as an array.

Captured are metadata, the way from a tensor to an array and back, which copies nothing, and the functions, methods and operators in the tables
below, a node each: torch's own NumPy says what they are by operators.  The user's array becomes an input of the graph by `torch.from_numpy`;
`tensor.numpy()` is written, where it leaves the region, as the call of that method.

What always holds: shape, dtype, kind (an array, or a number of NumPy's) and memory (new, or an argument's) of a result are those that NumPy itself
gives for ones of the same shapes.  Where torch's differ, and in all else, the call breaks and NumPy computes.  A write is one to the memory's tensor.

    torch.from_numpy(array) * 2         # one graph
    np.tanh(x.numpy()).mean(axis=0)     # one graph; the array is made of its output
    array[1:] += np.arange(3)           # one graph, which writes to the user's array
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
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Attr, Call, Source
from firesteel.capture.values.array_views import BACKWARDS, WHOLE, goes_backwards, is_basic, turned_view
from firesteel.capture.values.base import MethodOfOwner, ObjectKey, OpaqueValue, Value
from firesteel.capture.values.const import ConstValue, fresh, is_none
from firesteel.capture.values.containers import ListValue, NamedTupleValue, Sequence, TupleValue
from firesteel.capture.values.functions import Args, Kwargs, NumpyFunction
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue, size_of
from firesteel.capture.values.torch_calls import call_graph
from firesteel.config import config
from firesteel.errors import Break
from firesteel.homes import is_in_package
from firesteel.sym.symint import from_sym
from firesteel.targets import on_host

SEQUENCES: dict[type, Callable[..., Value]] = {list: ListValue, tuple: TupleValue}      # others are named tuples
COMPOUND = (tuple, list, dict, slice)
CONSTANTS = ("shape", "ndim", "size", "itemsize", "nbytes")
BINARY = {"+": "add", "-": "subtract", "*": "multiply", "/": "true_divide", "//": "floor_divide", "%": "remainder", "**": "power", "@": "matmul",
          "&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor"}
COMPARED = {"<": "less", "<=": "less_equal", "==": "equal", "!=": "not_equal", ">": "greater", ">=": "greater_equal"}
UNARY = {"-": "negative", "+": "positive", "~": "invert"}
METHODS = """mean sum prod std var min max argmin argmax any all cumsum cumprod clip round reshape transpose ravel squeeze swapaxes repeat
    astype copy flatten dot trace diagonal argsort take searchsorted conj conjugate nonzero"""
SIZED_BY_DATA = ("nonzero", "flatnonzero", "argwhere", "unique")        # captured where fs.config.capture_dynamic_output_shape_ops says so
MAKERS = ("zeros", "ones", "empty", "full", "arange", "linspace", "eye", "identity", "array", "indices", "hamming", "hanning", "blackman", "bartlett",
          "fft.fftfreq", "fft.rfftfreq")
FUNCTIONS = f"""sin cos tan arcsin arccos arctan arctan2 sinh cosh tanh arcsinh arccosh arctanh exp exp2 expm1 log log2 log10 log1p logaddexp
    logaddexp2 sqrt square cbrt absolute fabs sign floor ceil trunc rint reciprocal isnan isinf isfinite isposinf isneginf signbit copysign heaviside
    nextafter logical_not logical_and logical_or logical_xor deg2rad rad2deg degrees radians hypot fmod float_power left_shift right_shift ldexp
    sinc maximum minimum fmax fmin {' '.join((*BINARY.values(), *COMPARED.values(), *UNARY.values()))} sum prod mean std var min max amin amax
    argmin argmax any all ptp median average percentile quantile count_nonzero cumsum cumprod diff gradient clip where isclose nan_to_num
    concatenate stack vstack hstack dstack column_stack append split array_split hsplit vsplit dsplit dot vdot outer inner tensordot einsum
    kron cross convolve correlate transpose reshape ravel squeeze expand_dims swapaxes moveaxis broadcast_to broadcast_arrays atleast_1d atleast_2d
    atleast_3d tile repeat roll pad take take_along_axis sort argsort searchsorted meshgrid zeros_like ones_like full_like
    empty_like trace diagonal diag diagflat tril triu vander round around real imag angle conjugate copy ascontiguousarray
    linalg.norm linalg.inv linalg.det linalg.solve linalg.cholesky linalg.pinv linalg.matrix_power linalg.eigvalsh linalg.multi_dot
    linalg.qr linalg.slogdet linalg.svd
    fft.fft fft.ifft fft.rfft fft.irfft fft.fft2 fft.ifft2 fft.fftn fft.ifftn fft.fftshift fft.ifftshift""".split()


class ArrayOperators(Value):
    """What is done with an array or a number of NumPy's."""

    def truth(self, m: Machine) -> Any:
        return self.decided_by(m).truth(m)

    def decided_by(self, m: Machine) -> Value:
        return over_memory(m, self)

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        return call_numpy(m, BINARY[op], [other, self] if reflected else [self, other], {}) if op in BINARY else None

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        made = self.binary(m, op, other)
        if made is None:
            raise Break("numpy", name=f"The operator {op}= on an array")
        return self.store(m, made)

    def store(self, m: Machine, made: Value) -> Value:
        """self[...] = made, as ufuncs write a result: the shape is the same, and no kind of numbers is made a lesser one."""
        target = self.written(m)
        result = over_memory(m, made)
        if not isinstance(result, TensorValue) or not np.can_cast(dtype_of(result), dtype_of(target), "same_kind") or (
                result.abstract.dim() != target.abstract.dim() or not all(map(operator.eq, result.abstract.shape, target.abstract.shape))):
            raise Break("numpy", name="A write to an array of another kind")
        call_graph(m, "call_method", "copy_", [target, result], {})
        return self

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        if isinstance(view := backwards(m, self, m.look(key)), TurnedArray):
            self.written(m)
            view.setitem(m, ConstValue(Ellipsis), value)
            return
        target, key, value = self.written(m), over_memory(m, key), over_memory(m, value)
        if isinstance(value, Sequence):
            value = over_memory(m, call_numpy(m, "array", [value], {}))
        asked_of_numpy(m, "setitem", [target, key, value], {})
        target.setitem(m, key, value)

    def written(self, m: Machine) -> TensorValue:
        """The tensor over the memory, to write to."""
        raise Break("numpy", name="A write to a number")

    def iterate(self, m: Machine) -> list[Value]:
        return [self.getitem(m, ConstValue(i)) for i in range(m.known(self.length(m)))]

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(TupleValue(self.iterate(m)))

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return call_numpy(m, COMPARED[op], [self, other], {}) if op in COMPARED else None

    def unary(self, m: Machine, op: str) -> Value:
        return call_numpy(m, UNARY[op], [self], {}) if op in UNARY else super().unary(m, op)

    def getitem(self, m: Machine, key: Value) -> Value:
        key = m.look(key)
        return backwards(m, self, key) or call_numpy(m, "getitem", [self, key], {})

    def computed(self, m: Machine, name: str) -> Value | None:
        """An attribute that is computed."""
        if name in COMPUTED:
            return call_numpy(m, COMPUTED[name], [self], {})
        return ArrayMethod(self, name) if name in METHODS.split() or name in WRITES else None

    def as_index(self, m: Machine, alone: bool) -> Value:
        """A tensor.  One of several dimensions that is not in a tuple torch takes for a tuple of its rows."""
        rank = m.known(self.getattr(m, "ndim"))
        return self.tensor(m) if rank == 1 or rank and not alone else self

    def tensor(self, m: Machine) -> Value:
        raise NotImplementedError


class ArrayMethod(MethodOfOwner):
    """array.mean"""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if self.name not in WRITES:
            return call_numpy(m, f"ndarray.{self.name}", [self.owner, *args], kwargs)
        WRITES[self.name](m, self.owner, args, kwargs)
        return ConstValue(None)


COMPUTED = {"T": "transpose", "real": "real", "imag": "imag"}
WRITES: dict[str, Callable[[Machine, Any, Args, Kwargs], Any]] = {
    "fill": lambda m, array, args, kwargs: array.setitem(m, ConstValue(Ellipsis), *args, **kwargs),
    "__setitem__": lambda m, array, args, kwargs: array.setitem(m, *args, **kwargs),
    "sort": lambda m, array, args, kwargs: array.store(m, call_numpy(m, "sort", [array, *args], kwargs)),
}


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

    def written(self, m: Machine) -> TensorValue:
        if not self.obj.flags.writeable:
            raise Break("numpy", name="A write to an array that is not writeable")
        m.guard(Guard(Attr(Attr(self.source, "flags"), "writeable"), "equals", True))
        return self.memory or self.tensor(m)       # type: ignore[return-value]


class TensorArray(ArrayOperators):
    """tensor.numpy()"""

    words = "array over a {self.memory}"
    cls = np.ndarray
    form = "{memory}.numpy()"

    def __init__(self, memory: TensorValue):
        self.memory = memory

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
        if name == "size":
            one: Value = ConstValue(1)
            return functools.reduce(lambda a, b: m.binary("*", a, b), shape, one)
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

    def written(self, m: Machine) -> TensorValue:
        return self.memory


class TurnedArray(TensorArray):
    """A view of a tensor's memory that reads it backwards in some dimensions."""

    form = "{memory}.numpy()[{key}]"

    def __init__(self, memory: TensorValue, turned: frozenset[int]):
        super().__init__(memory)
        self.turned = turned

    @property
    def key(self) -> ConstValue:
        return ConstValue(tuple(BACKWARDS if dim in self.turned else WHOLE for dim in range(self.memory.abstract.dim())))

    def flipped(self, m: Machine, tensor: Value) -> Value:
        """A tensor of the view's shape from the memory's order to the view's, or back."""
        return call_graph(m, "call_function", torch.flip, [tensor, ConstValue(tuple(sorted(self.turned)))], {})

    def copied(self, m: Machine) -> Value:
        """The elements as the view has them.  What is a view of this one is none of the array."""
        copy: Any = self.flipped(m, self.memory)
        copy.node.meta["turned"] = sorted(self.turned)
        return copy

    def tensor(self, m: Machine) -> Value:
        raise Break("array", name="torch.from_numpy")       # torch refuses it

    def store(self, m: Machine, made: Value) -> Value:
        TensorArray(self.memory).store(m, TensorArray(self.flipped(m, over_memory(m, made))))      # type: ignore[arg-type]  # a tensor
        return self

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        view, value = self.getitem(m, key), over_memory(m, value)
        if not isinstance(view, TensorArray):
            raise Break("numpy", name="A write to an array that is read backwards")
        if isinstance(value, TensorValue) and isinstance(view, TurnedArray):
            value = view.flipped(m, call_graph(m, "call_method", "expand", [value, size_of(m, view.memory)], {}))
        view.memory.setitem(m, ConstValue(Ellipsis), value)


def backwards(m: Machine, array: ArrayOperators, key: Value) -> Value | None:
    """What a basic index gives of or as a view that is read backwards; None for all else."""
    if isinstance(array, ArrayNumber) or not key.is_constant():
        return None
    index, turned = key.constant(), array.turned if isinstance(array, TurnedArray) else frozenset[int]()
    index = index if isinstance(index, tuple) else (index,)
    if not is_basic(index) or not (turned or goes_backwards(index)):
        return None
    memory: Any = array.memory if isinstance(array, TensorArray) else over_memory(m, array)
    try:
        view = turned_view(index, [functools.partial(m.known, size) for size in size_of(m, memory).iterate(m)], turned)
    except IndexError as error:     # the real call raises it
        raise Break("numpy", name="numpy.getitem") from error
    made: Any = call_graph(m, "call_function", operator.getitem, [memory, ConstValue(view.key)], {})
    if made.abstract.dim() == 0:
        return call_numpy(m, "getitem", [TensorArray(made), ConstValue(())], {})
    return TurnedArray(made, view.turned) if view.turned else TensorArray(made)


class ArrayNumber(ArrayOperators):
    """A number of NumPy's that the program has computed, or that changed between calls: np.float32, ..."""

    words = "number of type {self.cls.__name__}"
    form = "{memory}.numpy()[()]"
    item: Value | None = None       # Python's number, where torch has taken it for that
    is_argument = True

    def __init__(self, memory: TensorValue, cls: type, source: Source | None = None, real: Any = None):
        self.memory, self.cls, self.source, self.real = memory, cls, source, real

    def specialize(self, m: Machine) -> ConstValue:
        """The number itself, under a guard."""
        if self.source is None:
            raise Break("constant", value=self.describe())
        m.guard(Guard(self.source, "equals", self.real))
        return ConstValue(self.real)

    def hash_key(self, m: Machine) -> Any:
        return self.specialize(m).value

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        """Torch takes it for a number of Python's."""
        number = self.number(m)
        return super().as_arg(m) if number is None else number.as_arg(m)

    def number(self, m: Machine) -> Value | None:
        """Python's number, one that run time knows; None where that is no symbol."""
        if self.item is None and m.world.env is not None and not self.memory.abstract.dtype.is_complex:
            with config.patch(capture_scalar_outputs=True):
                m.effects.change(self, "item", call_graph(m, "call_method", "item", [self.memory], {}))
        return self.item

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        return None if isinstance(other, TensorValue) else super().binary(m, op, other, reflected)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return None if isinstance(other, TensorValue) else super().compare(m, op, other)

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        return None

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "item":
            return self.memory.getattr(m, "item")
        return self.computed(m, name) or super().getattr(m, name)

    def tensor(self, m: Machine) -> Value:
        return self.memory


def number_now(m: Machine, value: Value) -> Value | None:
    """A number that is a symbol, NumPy's as Python's; else None."""
    return value.number(m) if isinstance(value, ArrayNumber) else value if isinstance(value, SymNumber) else None


def dtype_of(tensor: TensorValue) -> Any:
    return numpy_dtype(tensor.abstract.dtype)


def numpy_dtype(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch."))


# -- functions of NumPy ---------------------------------------------------------------------------------------------------
def call_numpy(m: Machine, name: str, args: Args, kwargs: Kwargs) -> Value:
    """The call as a node of the graph; a break where NumPy's result is another than torch's."""
    if "out" in kwargs and not is_none(m.look(kwargs["out"])):
        return into(m, kwargs["out"], call_numpy(m, name, args, {key: value for key, value in kwargs.items() if key != "out"}))
    mark = m.checkpoint()
    given = [over_memory(m, value) for value in args], {key: over_memory(m, value) for key, value in kwargs.items()}
    wanted, shared = asked_of_numpy(m, name, *given)
    made = call_graph(m, "call_function", by_torch(name), loop_dtypes(m, name, *given), given[1])
    sources = tensors_among(m, [*given[0], *given[1].values()])
    raises = name in ("floor_divide", "remainder", "power") and wanted.dtype.kind in "iub"      # on numbers for which NumPy warns
    lost = shared and any("turned" in tensor.node.meta for tensor in sources)       # a view of what is a copy here
    result = None if raises or lost else as_asked(m, made, wanted, shared, sources)
    if result is None:
        m.rollback(mark)
        raise Break("numpy", name=f"numpy.{name}")
    return result


def into(m: Machine, out: Value, made: Value) -> Value:
    array = m.look(out)
    if isinstance(array, TupleValue) and len(array.items) == 1:
        array = m.look(array.items[0])
    if not isinstance(array, ArrayOperators):
        raise Break("numpy", name="A write to what is no array")
    return array.store(m, made)


def as_asked(m: Machine, made: Value, wanted: Any, shared: bool, given: list[TensorValue]) -> Value | None:
    """The array, number or list of arrays that NumPy would give; None where torch's is another."""
    if isinstance(wanted, (list, tuple)):
        if not isinstance(made, Sequence) or len(made.items) != len(wanted):
            return None
        items = [as_asked(m, m.look(part), one, shared, given) for part, one in zip(made.items, wanted)]
        return None if None in items else SEQUENCES.get(type(wanted), functools.partial(NamedTupleValue, type(wanted)))(items)
    if not isinstance(made, TensorValue) or getattr(wanted, "dtype", None) != dtype_of(made):
        return None
    aliases = any(memory_owner(made) is memory_owner(tensor) for tensor in given)
    if shared and not aliases and type(wanted) is np.ndarray and wanted.flags.writeable:
        return None
    copied = aliases and not shared
    tensor = made.abstract
    for needed, method, args in ((wanted.shape == () and tensor.dim() == 1, "reshape", [TupleValue([])]),       # torch's median and quantile
                                 (tensor.is_complex(), "resolve_conj", []), (tensor.is_neg(), "resolve_neg", []), (copied, "clone", [])):
        made = call_graph(m, "call_method", method, [made, *args], {}) if needed else made
    if not isinstance(made, TensorValue) or len(wanted.shape) != made.abstract.dim() or not all(
            size_hint(m)(size) == known or isinstance(size, torch.SymInt) and not m.world.env.is_backed(from_sym(size))
            for size, known in zip(made.abstract.shape, wanted.shape)):
        return None
    return TensorArray(made) if type(wanted) is np.ndarray else ArrayNumber(made, type(wanted))


def memory_owner(value: TensorValue) -> Any:
    return value.abstract._base if value.abstract._is_view() else value.abstract


def loop_dtypes(m: Machine, name: str, args: Args, kwargs: Kwargs) -> Args:
    """The arguments of a ufunc in the dtypes in which NumPy computes: torch has rules of its own."""
    ufunc = found_in(np, name)
    if not isinstance(ufunc, np.ufunc) or len(args) != ufunc.nin or ufunc.signature is not None or kwargs:
        return args
    asked = [dtype_of(v) if isinstance(v, TensorValue) else v.python_type() for v in args]
    try:
        loop = ufunc.resolve_dtypes((*asked, *[None] * ufunc.nout))
    except TypeError:
        return args
    return [converted(m, v, {"dtype": ConstValue(torch_dtype(dtype))}) if isinstance(v, TensorValue) and dtype_of(v) != dtype else v
            for v, dtype in zip(args, loop)]


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def over_memory(m: Machine, value: Value) -> Value:
    """Tensors in place of arrays, and of numbers of NumPy's, which decide dtypes as arrays do.  A tensor makes NumPy's functions give tensors."""
    value = m.look(value)
    if isinstance(value, TurnedArray):
        return value.copied(m)
    if isinstance(value, (TensorArray, ArrayNumber)):
        return value.memory
    if isinstance(value, ArrayValue):
        return value.tensor(m)
    if isinstance(value, (ListValue, TupleValue)) and isinstance(value, Sequence):
        return type(value)([over_memory(m, item) for item in value.items]) if type(value) in (ListValue, TupleValue) else value
    if isinstance(value, TensorValue):
        raise Break("numpy", name="A call with a tensor")
    number = value.constant() if value.is_constant() else None
    if isinstance(number, np.dtype) or isinstance(number, type) and issubclass(number, np.generic):
        return ConstValue(torch_dtype(number)) if has_torch_twin(np.dtype(number)) else value
    if isinstance(number, np.generic) and has_torch_twin(number.dtype):
        settings: Kwargs = {"dtype": ConstValue(torch_dtype(number.dtype))}
        return call_graph(m, "call_function", torch.full, [TupleValue([]), ConstValue(number.item())], settings)
    return value


def has_torch_twin(dtype: Any) -> bool:
    return dtype.kind in "biufc" and dtype.itemsize <= 16


def size_hint(m: Machine) -> Callable[[Any], int]:
    """Of a size that only run time knows any number does."""
    env = m.world.env
    return lambda size: size if isinstance(size, int) or env is None else env.hint(from_sym(size)) if env.is_backed(from_sym(size)) else 3


def stand_in(m: Machine, val: Any, regular: bool = False) -> Any:
    """Ones for a tensor, in its shape and strides, or matrices that can be inverted; a symbol's number."""
    hint = size_hint(m)
    if not isinstance(val, torch.Tensor):
        return hint(val)
    shape, strides = tuple(map(hint, val.shape)), tuple(map(hint, val.stride()))
    if regular and len(shape) > 1:
        return np.ones(shape, numpy_dtype(val.dtype)) + np.eye(shape[-2], shape[-1], dtype=numpy_dtype(val.dtype))
    needed = 1 + sum((size - 1) * step for size, step in zip(shape, strides)) if 0 not in shape else 0
    return torch.ones(needed, dtype=val.dtype).as_strided(shape, strides).numpy()


def asked_of_numpy(m: Machine, name: str, args: Args, kwargs: Kwargs) -> tuple[Any, bool]:
    """What NumPy gives for ones of the same shapes, and whether it aliases an argument."""
    ones: dict[int, Any] = {}

    def real(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            one = ones.setdefault(id(arg), stand_in(m, arg.meta["val"], regular=is_in_package(name, "linalg")))
            return np.flip(one, arg.meta["turned"]) if "turned" in arg.meta else one
        return numpy_dtype(arg) if isinstance(arg, torch.dtype) else torch.fx.node.map_aggregate(arg, real) if isinstance(arg, COMPOUND) else arg
    given = real((tuple(m.look(value).as_arg(m)[0] for value in args), {key: m.look(value).as_arg(m)[0] for key, value in kwargs.items()}))
    try:
        with np.errstate(all="ignore"):
            found = found_in(np, name)(*given[0], **given[1])
    except Exception as error:      # the real call raises it, or not
        raise Break("numpy", name=f"numpy.{name}") from error
    parts = found if isinstance(found, (list, tuple)) else [found]
    return found, any(np.may_share_memory(part, one) for part in parts for one in ones.values() if isinstance(one, np.ndarray))


def tensors_among(m: Machine, values: Args) -> list[TensorValue]:
    found: list[TensorValue] = []
    for value in map(m.look, values):
        found += [value] if isinstance(value, TensorValue) else tensors_among(m, value.items) if isinstance(value, Sequence) else []
    return found


def found_in(module: Any, name: str) -> Any:
    return getattr(operator, name) if name in ("getitem", "setitem") else functools.reduce(getattr, name.split("."), module)


@functools.cache
def by_torch(name: str) -> Callable[..., Any]:
    """NumPy's function as one of tensors."""
    def numpy_function(*args: Any, **kwargs: Any) -> Any:
        if name in BY_TENSORS:
            return BY_TENSORS[name](*args, **kwargs)
        import torch._numpy as numpy  # a tenth of a second, and few programs need it
        args, kwargs = torch.utils._pytree.tree_map(functools.partial(as_torch_numpy, numpy), (args, kwargs))
        found = found_in(numpy, name)(*args, **kwargs)
        return torch.utils._pytree.tree_map(lambda part: part.tensor if isinstance(part, numpy.ndarray) else part, found)

    numpy_function.__name__ = numpy_function.__qualname__ = f"numpy_{name.replace('.', '_')}"
    return numpy_function


def padded(tensor: torch.Tensor, width: Any, mode: str = "constant", constant_values: Any = 0) -> torch.Tensor:
    if mode != "constant" or isinstance(constant_values, (list, tuple)):
        raise NotImplementedError(mode)
    pairs = np.broadcast_to(width, (tensor.dim(), 2)).tolist()
    return torch.nn.functional.pad(tensor, [n for pair in reversed(pairs) for n in pair], value=constant_values)


def decomposed(matrix: torch.Tensor, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "complete"):
        raise NotImplementedError(mode)
    return tuple(torch.linalg.qr(matrix, mode))


def singular_values(matrix: torch.Tensor, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> torch.Tensor:
    if compute_uv or hermitian:         # vectors have signs of their library's choice
        raise NotImplementedError("singular vectors")
    return torch.linalg.svdvals(matrix)


def without_repeats(tensor: torch.Tensor, **settings: Any) -> Any:
    """np.unique.  NumPy has one NaN of several, torch has all, behind all others."""
    if settings.keys() - {"return_inverse", "return_counts"} or tensor.is_complex() or tensor.is_floating_point() and settings:
        raise Break("numpy", name="numpy.unique")
    found = torch.unique(tensor, **settings)
    return found[torch.isnan(found).cumsum(0) < 2] if tensor.is_floating_point() else found


BY_TENSORS: dict[str, Callable[..., Any]] = {      # of which torch's NumPy has none, one that reads data, or one of other dtypes
    "getitem": operator.getitem, "unique": without_repeats, "argwhere": torch.argwhere, "nonzero": lambda t: torch.nonzero(t, as_tuple=True),
    "ndarray.nonzero": lambda t: torch.nonzero(t, as_tuple=True), "flatnonzero": lambda t: torch.nonzero(t.reshape(-1), as_tuple=True)[0],
    "pad": padded, "linalg.qr": decomposed, "linalg.svd": singular_values, "identity": lambda n, dtype=torch.float64: torch.eye(n, dtype=dtype),
    "fft.fftfreq": lambda n, d=1.0: torch.fft.fftfreq(n, d, dtype=torch.float64),
    "fft.rfftfreq": lambda n, d=1.0: torch.fft.rfftfreq(n, d, dtype=torch.float64),
    **{f"fft.{name}": getattr(torch.fft, name) for name in ["fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "fftn", "ifftn"]}}


def as_torch_numpy(numpy: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return numpy.ndarray(value)
    value = numpy_dtype(value) if isinstance(value, torch.dtype) else value
    return numpy.dtype(np.dtype(value).name) if isinstance(value, (np.dtype, type)) else value


def _captured(name: str, function: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if name in MAKERS or any(is_over_memory(m, value) for value in (*args, *kwargs.values())):
        return call_numpy(m, name, args, kwargs)
    return NumpyFunction(function).call(m, args, kwargs)


def is_over_memory(m: Machine, value: Value) -> bool:
    value = m.look(value)
    return isinstance(value, ArrayOperators) or isinstance(value, Sequence) and any(is_over_memory(m, item) for item in value.items)


for _name in (*FUNCTIONS, *MAKERS, *SIZED_BY_DATA):
    if found_in(np, _name) not in CALLS:
        CALLS.add(found_in(np, _name), functools.partial(_captured, _name, found_in(np, _name)))


def turned(m: Machine, array: Any, axis: Any = None) -> Value:
    """np.flip"""
    rank = m.known(array.getattr(m, "ndim"))
    dims = range(rank) if axis is None else [one % rank for one in (axis if isinstance(axis, tuple) else (axis,))]
    return array.getitem(m, ConstValue(tuple(BACKWARDS if dim in dims else WHOLE for dim in range(rank))))


def rotated(m: Machine, array: Any, k: int = 1, axes: Any = (0, 1)) -> Value:
    """np.rot90"""
    if k % 2 == 0:
        return array if k % 4 == 0 else turned(m, array, tuple(axes))
    other = call_numpy(m, "swapaxes", [array, *map(ConstValue, axes)], {})
    return turned(m, other, axes[0] if k % 4 == 1 else axes[1])


TURNING: dict[Callable[..., Any], Callable[..., Value]] = {
    np.flip: turned, np.rot90: rotated, np.flipud: lambda m, array: turned(m, array, 0), np.fliplr: lambda m, array: turned(m, array, 1)}


def _turning(make: Callable[..., Value], real: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    array = m.look(args[0]) if args else None
    if not isinstance(array, (ArrayValue, TensorArray)):
        return NumpyFunction(real).call(m, args, kwargs)
    settings = [m.known(value) for value in args[1:]], {name: m.known(value) for name, value in kwargs.items()}
    asked_of_numpy(m, real.__name__, [over_memory(m, array), *args[1:]], kwargs)        # a bad axis
    return make(m, array, *settings[0], **settings[1])


for _real, _make in TURNING.items():
    CALLS.add(_real, functools.partial(_turning, _make, _real))


@TENSOR_METHODS.row("numpy")
def method_numpy(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    if args or set(kwargs) - {"force"}:
        raise Break("numpy", name="Tensor.numpy")
    if kwargs and m.look(kwargs["force"]).truth(m):
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


def converted(m: Machine, tensor: Value, settings: Kwargs) -> Value:
    given = {name: value for name, value in settings.items() if not is_none(m.look(value))}
    return call_graph(m, "call_method", "to", [tensor], given) if given else tensor


@CALLS.row(np.asarray)
def call_asarray(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = m.look(args[0]) if args else None
    if len(args) != 1 or kwargs or not isinstance(given, (TensorValue, ArrayValue, TensorArray)):
        return call_numpy(m, "array", args, kwargs)
    return method_numpy(m, given, [], {}) if isinstance(given, TensorValue) else given


@CALLS.row(np.dtype)
def call_dtype(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return m.constant_object(m.run_real(np.dtype, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()}))
