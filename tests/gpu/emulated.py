"""Triton's language on CPU tensors, as far as our kernels use it: kernels run without a GPU and without Triton.

`run(kernel, tensors, symbols)` runs every program of every pass in order.  Types are as strict as Triton's where a mistake would
change values: integers divide towards zero, both operands of an operator have one type.  An access of memory outside of its tensor
fails, and so does one that races: programs of a pass run in any order, so none may read or set what another one sets, and
within a program a barrier stands between a store and a load of the same element.
"""
from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from firesteel.codegen.triton import GpuKernel
from firesteel.codegen.triton_ops import HELPER_NAMES, HELPERS
from firesteel.loops.scalars import DTYPES
from firesteel.sym.expr import evaluate

program = [0]


class Races:
    """Who read and set each element in the current pass: the number of a program, or NOBODY."""
    NOBODY = -1
    SEVERAL = -2

    def __init__(self) -> None:
        self.writers: dict[int, torch.Tensor] = {}
        self.readers: dict[int, torch.Tensor] = {}
        self.unseen: dict[int, torch.Tensor] = {}       # set by this program since its last barrier

    def _of(self, table: dict[int, torch.Tensor], elements: torch.Tensor) -> torch.Tensor:
        if elements.data_ptr() not in table:
            table[elements.data_ptr()] = torch.full((elements.numel(),), self.NOBODY)
        return table[elements.data_ptr()]

    def read(self, elements: torch.Tensor, at: torch.Tensor) -> None:
        me, writers, readers = program[0], self._of(self.writers, elements), self._of(self.readers, elements)
        assert ((writers[at] == me) | (writers[at] == self.NOBODY)).all(), "a program reads what another one sets"
        assert (self._of(self.unseen, elements)[at] != me).all(), "no barrier between a store and a load"
        readers[at] = torch.where((readers[at] == me) | (readers[at] == self.NOBODY), me, self.SEVERAL)

    def write(self, elements: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
        me, writers, readers = program[0], self._of(self.writers, elements), self._of(self.readers, elements)
        same = elements[at] == values
        assert ((writers[at] == me) | (writers[at] == self.NOBODY) | same).all(), "two programs set one element"
        assert ((readers[at] == me) | (readers[at] == self.NOBODY)).all(), "a program sets what another one reads"
        writers[at] = me
        self._of(self.unseen, elements)[at] = me


races = Races()


def _plain(value: Any) -> Any:
    return value.t if isinstance(value, T) else value


class T:
    """A block or scalar."""

    def __init__(self, t: torch.Tensor):
        self.t = t

    @property
    def dtype(self) -> torch.dtype:
        return self.t.dtype

    def __index__(self) -> int:
        return int(self.t)

    def __bool__(self) -> bool:
        assert self.t.ndim == 0, "a block decides nothing"
        return bool(self.t)

    def __getitem__(self, index: tuple) -> T:
        return T(self.t[index])

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> T:
        return T(self.t.view(dtype) if bitcast else self.t.to(dtype))

    def __invert__(self) -> T:
        return T(~self.t)

    __hash__ = None     # type: ignore[assignment]


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in one type: a plain number takes the other's; of two tensors integers may differ in width only."""
    if not isinstance(a, T):
        b, a = _pair(b, a)
        return a, b
    if not isinstance(b, T):
        assert isinstance(b, (int, bool)) or a.dtype.is_floating_point, f"{a.dtype} with {b!r}"
        return a.t, torch.tensor(b, dtype=a.dtype)
    if a.dtype != b.dtype:
        whole = {torch.int32, torch.int64}
        assert {a.dtype, b.dtype} <= whole, f"{a.dtype} with {b.dtype}"
        return a.t.to(torch.int64), b.t.to(torch.int64)
    return a.t, b.t


def _cdiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Towards zero; nothing traps on a GPU."""
    safe = torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
    return torch.where(b == -1, torch.zeros_like(a) - a, torch.div(a, safe, rounding_mode="trunc")) if a.dtype is not torch.uint8 else torch.div(a, safe, rounding_mode="trunc")


def _crem(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, torch.where((b == 0) | (b == -1), torch.ones_like(b), b))


_OPERATORS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": _cdiv, "mod": _crem, "truediv": torch.div, "and": torch.bitwise_and,
              "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
              "ne": torch.ne, "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift}


def _method(function: Any, swapped: bool) -> Any:
    def method(self: T, other: Any) -> T:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = _pair(other, self) if swapped else _pair(self, other)
        if function is torch.div:
            assert a.dtype.is_floating_point
        return T(function(a, b))
    return method


for _name, _function in _OPERATORS.items():
    setattr(T, f"__{_name}__", _method(_function, False))
    setattr(T, f"__r{_name}__", _method(_function, True))


class Pointer:
    """Addresses in one storage."""

    def __init__(self, elements: torch.Tensor, at: torch.Tensor):
        self.elements, self.at = elements, at

    @staticmethod
    def of(tensor: torch.Tensor) -> Pointer:
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        return Pointer(torch.as_strided(tensor, (count,), (1,), 0), torch.tensor(tensor.storage_offset()))

    def __add__(self, offset: Any) -> Pointer:
        if isinstance(offset, T):
            assert offset.dtype in (torch.int32, torch.int64), offset.dtype
        return Pointer(self.elements, self.at + _plain(offset))


class Language:
    """What kernels call `tl`."""
    float32, float64, float16, bfloat16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
    int64, int32, int16, int8, uint8, int1 = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool

    class PropagateNan:
        ALL = "all"

    @staticmethod
    def program_id(axis: int) -> T:
        return T(torch.tensor(program[0], dtype=torch.int32))

    @staticmethod
    def arange(start: int, end: int) -> T:
        assert end & (end - 1) == 0, f"{end} is no power of two"
        return T(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def full(shape: list[int], value: Any, dtype: torch.dtype) -> T:
        return T(torch.full(shape, value, dtype=dtype))

    @staticmethod
    def broadcast_to(value: T | Pointer, shape: list[int]) -> T | Pointer:
        if isinstance(value, Pointer):
            return Pointer(value.elements, value.at.broadcast_to(shape))
        return T(value.t.broadcast_to(shape))

    @staticmethod
    def load(pointer: Pointer, mask: T | None = None, other: T | None = None) -> T:
        at, wanted = _masked(pointer, mask)
        assert other is None or mask is not None
        races.read(pointer.elements, at[wanted])
        values = pointer.elements[torch.where(wanted, at, 0)] if pointer.elements.numel() else torch.zeros(at.shape, dtype=pointer.elements.dtype)
        if mask is not None:
            instead = _plain(other) if other is not None else torch.tensor(77).to(values.dtype)     # anything may stand there
            values = torch.where(wanted, values, instead.to(values.dtype))
        return T(values)

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: T | None = None) -> None:
        at, wanted = _masked(pointer, mask)
        values = value.t if isinstance(value, T) else torch.tensor(value)
        values = values.to(pointer.elements.dtype).broadcast_to(at.shape)
        races.write(pointer.elements, at[wanted], values[wanted])
        pointer.elements[at[wanted]] = values[wanted]

    @staticmethod
    def atomic_add(pointer: Pointer, value: T, mask: T | None = None, sem: str = "") -> None:
        at, wanted = _masked(pointer, mask)
        pointer.elements.index_put_((at[wanted],), value.t.to(pointer.elements.dtype).broadcast_to(at.shape)[wanted], accumulate=True)

    @staticmethod
    def where(condition: T, a: T, b: T) -> T:
        assert condition.dtype is torch.bool
        x, y = _pair(a, b) if isinstance(a, T) or isinstance(b, T) else (torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32))
        return T(torch.where(condition.t, x, y))

    @staticmethod
    def maximum(a: Any, b: Any, propagate_nan: Any = None) -> T:
        return T(torch.maximum(*_pair(a, b)))

    @staticmethod
    def minimum(a: Any, b: Any, propagate_nan: Any = None) -> T:
        return T(torch.minimum(*_pair(a, b)))

    @staticmethod
    def reduce(value: T, axis: int, combine: Any, keep_dims: bool = False) -> T:
        assert value.t.ndim == (2 if keep_dims else 1)
        t = value.t
        while t.shape[axis] > 1:
            half = t.shape[axis] // 2
            t = combine(T(t.narrow(axis, 0, half)), T(t.narrow(axis, half, half))).t
        return T(t if keep_dims else t[0])

    @staticmethod
    def associative_scan(value: T, axis: int, combine: Any) -> T:
        t, step = value.t.clone(), 1
        while step < t.shape[axis]:
            length = t.shape[axis] - step
            t = torch.cat([t.narrow(axis, 0, step), combine(T(t.narrow(axis, 0, length)), T(t.narrow(axis, step, length))).t], axis)
            step *= 2
        return T(t)

    @staticmethod
    def div_rn(a: Any, b: T) -> T:
        assert b.dtype is torch.float32
        return T(torch.div(*_pair(a, b)))

    @staticmethod
    def fma(a: T, b: T, c: T) -> T:
        assert a.dtype is b.dtype is torch.float32
        return T((a.t.double() * b.t.double() + _plain(c)).float())

    @staticmethod
    def sqrt_rn(a: T) -> T:
        assert a.dtype is torch.float32
        return T(torch.sqrt(a.t))

    @staticmethod
    def debug_barrier() -> None:
        races.unseen.clear()

    abs = staticmethod(lambda a: T(torch.abs(a.t)))
    floor = staticmethod(lambda a: T(torch.floor(a.t)))
    ceil = staticmethod(lambda a: T(torch.ceil(a.t)))


def _masked(pointer: Pointer, mask: T | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(addresses, which of them are accessed), those in range."""
    wanted = torch.ones(pointer.at.shape, dtype=torch.bool) if mask is None else mask.t
    if pointer.at.ndim == 0:
        assert wanted.ndim == 0, "a block mask for one address"
    at, wanted = torch.broadcast_tensors(pointer.at, wanted)
    used = at[wanted]
    assert used.numel() == 0 or (used.min() >= 0 and used.max() < pointer.elements.numel()), "an address outside of its tensor"
    return at, wanted


class Library:
    """What kernels call `libdevice`."""
    _NAMES = {"rint": "round", "pow": "pow"}

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, self._NAMES.get(name, name))

        def call(*args: T) -> T:
            assert all(a.dtype in (torch.float32, torch.float64) and a.dtype is args[0].dtype for a in args)
            return T(function(*(a.t for a in args)))
        return call


def _scope() -> dict[str, Any]:
    scope = {"tl": Language, "libdevice": Library()}
    exec(HELPERS, scope)
    return {"jit": lambda function: function, **{name: scope[name] for name in ("tl", "libdevice", *HELPER_NAMES)}}


def check_carried(text: str) -> None:
    """A name that is set before a loop and again inside must keep its type in Triton: it is an accumulator, made from itself."""
    for function in ast.walk(ast.parse(text)):
        before: set[str] = set()
        for statement in function.body if isinstance(function, ast.FunctionDef) else ():
            for assign in ast.walk(statement) if isinstance(statement, ast.For) else ():
                if isinstance(assign, ast.Assign):
                    read = {node.id for node in ast.walk(assign.value) if isinstance(node, ast.Name)}
                    assert all(name not in before or name in read for name in _names(assign)), f"a loop sets anew: {ast.unparse(assign)}"
            before |= {name for node in ast.walk(statement) if isinstance(node, ast.Assign) for name in _names(node)}


def _names(assign: ast.Assign) -> list[str]:
    return [target.id for target in assign.targets if isinstance(target, ast.Name)]


def run(kernel: GpuKernel, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
    """Runs a kernel; the value of the error flag."""
    scope = _scope()
    check_carried(kernel.text)
    exec(kernel.text, scope)
    error = torch.zeros(1, dtype=torch.int64)
    scratch = [torch.zeros(max(evaluate(n, symbols), 1), dtype=DTYPES[d]) for d, n in kernel.scratch]
    for memory in scratch:
        memory.fill_(99)        # nobody may rely on zeros
    numbers = [T(torch.tensor(symbols[s], dtype=torch.float64 if isinstance(symbols[s], float) else torch.int64)) for s in kernel.symbols]
    arguments = [*(Pointer.of(t) for t in itertools.chain((tensors[b] for b in kernel.buffers), scratch)), *numbers, Pointer.of(error)]
    for one in kernel.passes:
        races.__init__()
        for number in range(evaluate(one.programs, symbols)):
            program[0] = number
            scope[one.function](*arguments)
    return int(error)
