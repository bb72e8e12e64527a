"""The host function: one straight line of Python that allocates, launches kernels, makes library calls and returns.

In: a Plan, and for each Nest a `Launch` (where the kernel is, which buffers and sizes it wants).  Out: a callable
`fn(*inputs) -> tuple`, whose text is kept as `fn.source`.

What always holds
 - Kernels in a row, with no library call between them, are one native call.  `launcher` makes it: a Python function in machine
   code (METH_FASTCALL) that takes addresses and sizes as ints, lets the GIL go, and runs the kernels one after the other.
 - A kernel is `void k(int64* args)`: buffer addresses, then sizes, then the address of the error slot.
 - The function touches no global state, so threads may run it at the same time.
 - Autograd never sees inside: grad mode is off while it runs.
 - A library call's result has the strides that were planned; where the library chose others it is copied once.
 - A boxed program's function takes its inputs in one list, which it empties, and lets each go behind its last reader.
 - A plan with guard zones (codegen/zones.py) runs its kernels one by one and looks at the zones after each, and at what library calls return.

    def call(x0, x1):
        s0 = x0.shape[0]
        b_y = empty((s0, 256), (256, 1), d_f32)
        if run_0(x0.data_ptr(), x1.data_ptr(), b_y.data_ptr(), s0): raise index_error()
        return (b_y,)
"""
from __future__ import annotations

import ctypes
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

import torch

from firesteel.artifacts import counters
from firesteel.codegen.zones import Zones
from firesteel.loops.ir import Extern, Given, Nest, View
from firesteel.loops.plan import Alloc, Free, Plan, Return, Run, is_large, numbytes
from firesteel.loops.scalars import DTYPES, ITEMSIZE
from firesteel.native_method import CompileText, native_method
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size
from firesteel.table import Table
from firesteel.targets import CPU, has_arena, is_the_only_gpu

Word = int | Expr | str       # an argument of a kernel: a number, a size, or the source text of what each call computes


@dataclass(frozen=True)
class Launch:
    """How one Nest is run: the address of its kernel, the buffers whose addresses it wants, and the names of its symbols."""
    address: int
    buffers: tuple[str, ...]
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceLaunch(Launch):
    """A kernel of another device, run by a native function at `address`, which takes words before the buffers' addresses, then
    the addresses of scratch memory, symbols, and words at the end.  Launches of one nest share its scratch memory."""
    device: str = ""
    before: tuple[Word, ...] = ()
    scratch: tuple[Size, ...] = ()      # places in it, in bytes
    scratch_bytes: Size = 0
    after: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Setup:
    """Lines at the start of the host function, and the names they use."""
    lines: tuple[str, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- fast doors of torch, with their plain twins

def _empty_plain(shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _reinterpret_plain(x: torch.Tensor, shape: tuple, strides: tuple, offset: int) -> torch.Tensor:
    return torch.as_strided(x, shape, strides, x.storage_offset() + offset)


_doors = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty = getattr(_doors, "_empty_strided_cpu", _empty_plain)               # 1.0 us against 1.4
_empty_cuda = getattr(_doors, "_empty_strided_cuda", None)                 # on the current device
_reinterpret = getattr(_doors, "_reinterpret_tensor", _reinterpret_plain)  # 1.0 us against 1.7


def check_number(condition: bool, message: str) -> None:
    """A condition that the program stated, or that a shape relies on."""
    if not condition:
        raise RuntimeError(message)


def draw_normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Drawn in the strides of its argument, which a clone would lose: eager fills contiguous memory by an algorithm of its own."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).normal_(mean, std, generator=generator)


_aten = torch.ops.aten
QUICK_CALLS: Table[Callable] = Table("quick call", "codegen/host.py")   # torch's own functions cost 1.5 us less than an OpOverload
_functions: dict[Any, Callable] = {
    _aten.mm.default: torch.mm, _aten.mm.out: torch.mm, _aten.addmm.default: torch.addmm, _aten.addmm.out: torch.addmm,
    _aten.bmm.default: torch.bmm, _aten.bmm.out: torch.bmm, _aten.baddbmm.default: torch.baddbmm,
    _aten.convolution.default: torch.convolution, _aten._assert_scalar.default: check_number,
    _aten._local_scalar_dense.default: torch.Tensor.item, _aten.normal_functional.default: draw_normal,
}
for _overload, _function in _functions.items():
    QUICK_CALLS.add(_overload, _function)

_ROW_MAJOR_RESULTS = ("mm", "addmm", "bmm", "baddbmm")      # their results are always contiguous: nothing to check


def laid_out(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The result of a library call in the strides that its readers were compiled for."""
    actual = result.stride()
    if actual == strides or all(a == s or n <= 1 for a, s, n in zip(actual, strides, result.shape)) or result.numel() == 0:
        return result
    counters["native"]["restrided"] += 1
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def as_dtype(x: torch.Tensor, dtype: torch.dtype, shape: tuple, strides: tuple, distance: int) -> torch.Tensor:
    """The same storage read as another dtype, from `distance` bytes behind the start of x on."""
    start = (x.storage_offset() * x.itemsize + distance) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), start, shape, strides)


def index_error() -> IndexError:
    return IndexError("index out of range in self")


def launch_error(code: int) -> RuntimeError:
    return RuntimeError(f"a kernel could not be launched: CUDA driver error {code}")


def as_word(value: int | float) -> int:
    """A number among the inputs as the i64 that kernels take: a float by its bits."""
    return struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)


# ---------------------------------------------------------------- the launcher

# What a launch runs is a row of i64: number of kernels, most arguments of one; then for each kernel its address, its number
# of arguments, and for each argument (slot, addend): slot >= 0 is frame[slot] + addend, -1 the error slot, -2 the addend itself.
LAUNCHER = r"""
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyErr_Occurred()

define i64 @firesteel_run(ptr %recipe, ptr %frame) {
entry:
  %error = alloca i64
  store i64 0, ptr %error
  %kernels = load i64, ptr %recipe
  %most_at = getelementptr i64, ptr %recipe, i64 1
  %most = load i64, ptr %most_at
  %args = alloca i64, i64 %most
  %first = getelementptr i64, ptr %recipe, i64 2
  %error_address = ptrtoint ptr %error to i64
  br label %kernel
kernel:
  %k = phi i64 [0, %entry], [%k_next, %launched]
  %at = phi ptr [%first, %entry], [%slot_at, %launched]
  %more = icmp slt i64 %k, %kernels
  br i1 %more, label %arguments, label %done
arguments:
  %address = load ptr, ptr %at
  %count_at = getelementptr i64, ptr %at, i64 1
  %count = load i64, ptr %count_at
  %slots = getelementptr i64, ptr %at, i64 2
  br label %argument
argument:
  %a = phi i64 [0, %arguments], [%a_next, %stored]
  %slot_at = phi ptr [%slots, %arguments], [%slot_next, %stored]
  %unfinished = icmp slt i64 %a, %count
  br i1 %unfinished, label %one, label %launched
one:
  %slot = load i64, ptr %slot_at
  %addend_at = getelementptr i64, ptr %slot_at, i64 1
  %addend = load i64, ptr %addend_at
  switch i64 %slot, label %framed [ i64 -1, label %error_slot
                                    i64 -2, label %literal ]
framed:
  %value_at = getelementptr i64, ptr %frame, i64 %slot
  %value = load i64, ptr %value_at
  %sum = add i64 %value, %addend
  br label %stored
error_slot:
  br label %stored
literal:
  br label %stored
stored:
  %argument_value = phi i64 [%sum, %framed], [%error_address, %error_slot], [%addend, %literal]
  %place = getelementptr i64, ptr %args, i64 %a
  store i64 %argument_value, ptr %place
  %a_next = add i64 %a, 1
  %slot_next = getelementptr i64, ptr %slot_at, i64 2
  br label %argument
launched:
  call void %address(ptr %args)
  %k_next = add i64 %k, 1
  br label %kernel
done:
  %result = load i64, ptr %error
  ret i64 %result
}

define ptr @firesteel_launch(ptr %self, ptr %objects, i64 %count) {
entry:
  %recipe = call ptr @PyLong_AsVoidPtr(ptr %self)
  %frame = alloca i64, i64 %count
  br label %next
next:
  %i = phi i64 [0, %entry], [%i_next, %converted]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %convert, label %ready
convert:
  %object_at = getelementptr ptr, ptr %objects, i64 %i
  %object = load ptr, ptr %object_at
  %value = call i64 @PyLong_AsLongLong(ptr %object)
  %odd = icmp eq i64 %value, -1                 ; the number -1, or one that does not fit
  br i1 %odd, label %ask, label %converted
ask:
  %raised = call ptr @PyErr_Occurred()
  %fits = icmp eq ptr %raised, null
  br i1 %fits, label %converted, label %raise
raise:
  ret ptr null
converted:
  %place = getelementptr i64, ptr %frame, i64 %i
  store i64 %value, ptr %place
  %i_next = add i64 %i, 1
  br label %next
ready:
  %thread = call ptr @PyEval_SaveThread()
  %error = call i64 @firesteel_run(ptr %recipe, ptr %frame)
  call void @PyEval_RestoreThread(ptr %thread)
  %result = call ptr @PyLong_FromLongLong(i64 %error)
  ret ptr %result
}
"""


class _Recipe(int):
    """The address of a recipe: the `self` of a launcher, so that what machine code points to lives as long as that."""

    words: ctypes.Array
    kernels: list[int]      # the kernels' addresses are objects that keep their code loaded


def launcher(recipe: list[int], compile_text: CompileText | None) -> Callable[..., int]:
    """A function of the frame's values that runs the recipe's kernels; its result is not 0 where an index was out of range."""
    if compile_text is None:
        return _plain_launcher(recipe)
    words = (ctypes.c_int64 * len(recipe))(*recipe)
    own = _Recipe(ctypes.addressof(words))
    own.words, own.kernels = words, [word for word in recipe if type(word) is not int]
    return native_method("firesteel_launch", LAUNCHER, compile_text, own)


def _plain_launcher(recipe: list[int]) -> Callable[..., int]:
    """The launcher without machine code: one call through ctypes a kernel."""
    kernels, at = [], 2
    for _ in range(recipe[0]):
        address, count = recipe[at:at + 2]
        slots = [tuple(recipe[i:i + 2]) for i in range(at + 2, at + 2 + 2 * count, 2)]
        kernels.append((ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), slots))
        at += 2 + 2 * count

    def run(*frame: int) -> int:
        error = ctypes.c_int64(0)
        for function, slots in kernels:
            values = [ctypes.addressof(error) if slot == -1 else addend if slot == -2 else frame[slot] + addend for slot, addend in slots]
            function((ctypes.c_int64 * len(values))(*values))
        return error.value
    return run


# ---------------------------------------------------------------- the source text

SCOPE: dict[str, Any] = {   # what every host function may name
    "empty": _empty, "empty_cuda": _empty_cuda, "empty_strided": torch.empty_strided, "view": _reinterpret, "as_strided": torch.as_strided,
    "Tensor": torch.Tensor, "laid_out": laid_out, "as_dtype": as_dtype, "index_error": index_error, "launch_error": launch_error,
    "as_word": as_word, "math": math, "grad_on": torch.is_grad_enabled, "no_grad": torch.no_grad, "Zones": Zones,
}


def build(plan: Plan, launches: Mapping[str, Launch | tuple[DeviceLaunch, ...]], compile_text: CompileText | None = None,
          setup: Setup | None = None) -> Callable[..., tuple]:
    """The callable of a Plan.  `launches` has an entry for each Nest by its name: one launch, or several in order."""
    return _Writer(plan, launches, compile_text, setup or Setup()).build()


class _Writer:
    """Writes the function line by line; a builder."""

    def __init__(self, plan: Plan, launches: Mapping[str, Launch | tuple[DeviceLaunch, ...]], compile_text: CompileText | None, setup: Setup):
        self.plan, self.program, self.launches, self.compile_text = plan, plan.program, launches, compile_text
        self.buffers = plan.program.buffers
        self.lines: list[str] = list(setup.lines)
        self.moved: dict[tuple[str, str], str] = {}     # (CPU buffer, device) -> variable of its copy there
        self.names: dict[str, str] = {}             # buffer -> Python variable
        self.taken: set[str] = set()                # variables in use
        self.scope: dict[str, Any] = {**SCOPE, **setup.scope}
        self.objects: dict[int, str] = {}           # id of an object in the scope -> its name
        self.places: dict[str, Size] = {}           # buffer -> byte offset in the arena
        self.group: list[Nest] = []                 # kernels that the next launch will run
        self.freed: list[str] = []                  # buffers to let go after it
        self.holds_much = False                     # is one of them large?
        self.launched = 0
        self.makes_views = False                    # is an output a view of an input?
        self.reused = {step.reuse for step in plan.steps if isinstance(step, Alloc)}

    def build(self) -> Callable[..., tuple]:
        self._inputs()
        self._symbols()
        if self.plan.zone:
            self.lines.append("zones = Zones(empty)")
        if self.plan.arena != 0:
            self.lines.append(f"arena = empty(({self._size(self.plan.arena)},), (1,), {self._dtype('u8')})")
        for step in self.plan.steps:
            _STEP_WRITERS[type(step)](self, step)
        return self._compiled()

    def _compiled(self) -> Callable[..., tuple]:
        boxed = self.program.boxed
        given = "box" if boxed else ", ".join(self.parameters)
        grad = ["if grad_on():", f"    with no_grad(): return call({given})"] if self._asks_torch() else []
        source = "\n    ".join([f"def call({given}):", *grad, *(self._unbox() if boxed else ()), *self.lines]) + "\n"
        exec(compile(source, "<firesteel host>", "exec"), self.scope)
        call = self.scope["call"]
        call.source, call._boxed_call = source, boxed
        return call

    def _unbox(self) -> list[str]:
        """The inputs are this function's alone, so that each can be freed; those that nobody reads go at once."""
        named = set(re.findall(r"\bx\d+\b", "\n".join(self.lines)))
        used = [name if name in named else "_" for name in self.parameters]
        unread = ["_ = None"] * ("_" in used)
        return [f"{', '.join(used)}, = box", "box.clear()", *unread] if used else []

    def _asks_torch(self) -> bool:
        """Does it call what autograd could record?"""
        return self.makes_views or any(step.call for step in self.program.steps)

    # ------------------------------------------------ names

    def _inputs(self) -> None:
        self.parameters = [f"x{number}" for number in range(len(self.program.inputs))]
        for parameter, name in zip(self.parameters, self.program.inputs):
            if name is not None and name in self.buffers:
                self.names.setdefault(name, parameter)
        for name, buffer in self.buffers.items():
            if buffer.kind == "constant":
                self.names[name] = self._object(buffer.value, "constant")

    def _symbols(self) -> None:
        """Each symbol is read from the input that has it; only those that the program uses."""
        for symbol, (number, kind, dim) in self.program.symbols.items():
            self.lines.append(f"{symbol} = {_SYMBOL_SOURCES[kind].format(x=self.parameters[number], d=dim)}")

    def _variable(self, buffer: str) -> str:
        if buffer not in self.names:
            name = f"b_{buffer}" if buffer.isidentifier() else re.sub(r"\W", "_", f"b_{buffer}")
            self.names[buffer] = name if name not in self.taken else f"{name}_{len(self.names)}"
            self.taken.add(self.names[buffer])
        return self.names[buffer]

    def _object(self, value: Any, stem: str) -> str:
        """A name in the function's scope for a Python object."""
        if id(value) not in self.objects:
            self.objects[id(value)] = name = f"{stem}_{len(self.objects)}"
            self.scope[name] = value
        return self.objects[id(value)]

    def _dtype(self, name: str) -> str:
        text = f"d_{name}"          # not as it is: u8 is also a symbol's name
        self.scope[text] = DTYPES[name]
        return text

    def _size(self, size: Size) -> str:
        return str(size)

    def _sizes(self, sizes: tuple[Size, ...]) -> str:
        return f"({''.join(self._size(s) + ', ' for s in sizes)})"

    # ------------------------------------------------ steps

    def alloc(self, step: Alloc) -> None:
        if step.at is not None:
            self.places[step.buffer] = step.at
            if step.reuse is not None and self.plan.zone:
                self.lines.append(f"zones.drop({step.reuse!r})")
            self._guard_place(step.buffer, step.at)
            return
        if step.reuse is not None:
            self._take_over(step.buffer, step.reuse)
            return
        buffer = self.buffers[step.buffer]
        if self.holds_much and is_large(buffer):
            self._flush()       # what the waiting kernels are the last to read is freed first
        layout = f"{self._sizes(buffer.shape)}, {self._sizes(buffer.strides)}"
        variable = self._variable(step.buffer)
        if self.plan.zone and has_arena(buffer.device):
            self.lines.append(f"{variable} = zones.empty({variable!r}, {layout}, {self._dtype(buffer.dtype)})")
        else:
            self.lines.append(f"{variable} = {self._empty(layout, buffer.dtype, buffer.device)}")

    def _take_over(self, new: str, old: str) -> None:
        """The memory of one tensor becomes another; where the two differ in shape, a view of it."""
        buffer, before = self.buffers[new], self._variable(old)
        if (buffer.shape, buffer.strides) == (self.buffers[old].shape, self.buffers[old].strides):
            self.names[new] = before
            return
        variable = self._variable(new)
        self.lines.append(f"{variable} = view({before}, {self._sizes(buffer.shape)}, {self._sizes(buffer.strides)}, 0)")
        if self.plan.zone:
            self.lines.append(f"zones.move({before!r}, {variable!r})")
        self.freed.append(before)

    def _guard_place(self, buffer: str, at: Size) -> None:
        """Zones around a place in the arena, which may have been another place's inside."""
        if self.plan.zone:
            size = self._size(numbytes(self.buffers[buffer]))
            self.lines.append(f"zones.place({buffer!r}, arena.data_ptr() + {self._size(at)}, {size})")

    def _empty(self, layout: str, dtype: str, device: str) -> str:
        """Source text of fresh memory."""
        if device == CPU or _empty_cuda is not None and is_the_only_gpu(device):
            return f"{'empty' if device == CPU else 'empty_cuda'}({layout}, {self._dtype(dtype)})"
        return f"empty_strided({layout}, dtype={self._dtype(dtype)}, device={device!r})"

    def run(self, step: Run) -> None:
        if step.step.nest:
            self.group.append(step.step.nest)
        elif step.step.call:
            self._flush()
            self._extern(step.step.call)
        if self.plan.zone:
            self._flush()
            kind = "kernel" if step.step.nest else "library call"
            self.lines.append(f"zones.check({f'{kind} {step.step.name}'!r})")

    def free(self, step: Free) -> None:
        if step.buffer not in self.places and step.buffer not in self.reused:
            self.freed.append(self._variable(step.buffer))
            self.holds_much |= is_large(self.buffers[step.buffer])
        if step.buffer in self.places and self.plan.zone:
            self.lines.append(f"zones.drop({step.buffer!r})")
        if not self.group:
            self._let_go()

    def finish(self, step: Return) -> None:
        self.freed.clear()      # the return lets everything go
        self._flush()
        while self.lines and self.lines[-1].startswith("del "):
            self.lines.pop()
        if self.plan.zone:
            self._leave(step.outputs)
        self.lines.append(f"return ({''.join(self._argument(output, aliases=True) + ', ' for output in step.outputs)})")

    def _leave(self, outputs: tuple[Any, ...]) -> None:
        """Outputs leave the zones: users see storages of the usual size."""
        for name in dict.fromkeys(output.buffer for output in outputs if isinstance(output, View)):
            if self.buffers[name].kind not in ("input", "constant"):
                variable = self._variable(name)
                self.lines.append(f"{variable} = zones.leave({variable})")

    def _let_go(self) -> None:
        if self.freed:
            if self.plan.zone:
                self.lines.append(f"zones.drop({', '.join(map(repr, self.freed))})")
            self.lines.append(f"del {', '.join(self.freed)}")
            self.freed.clear()
        self.holds_much = False

    # ------------------------------------------------ launches

    def _flush(self) -> None:
        """The launch of the kernels gathered so far."""
        if not self.group:
            return
        frame: dict[str, int] = {}      # text of a value -> its slot
        rows = [(launch.address, [*slots, (-1, 0)]) for nest in self.group for launch, slots in self._rows(nest, frame)]
        recipe = [len(rows), max(len(slots) for _, slots in rows)]
        for address, slots in rows:
            recipe += [address, len(slots), *itertools.chain.from_iterable(slots)]
        name = f"run_{self.launched}"
        self.scope[name] = launcher(recipe, self.compile_text)
        call = f"{name}({', '.join(frame)})"
        far = any(isinstance(self.launches[nest.name], tuple) for nest in self.group)
        self.lines.append(f"if code := {call}: raise launch_error(code)" if far else f"if {call}: raise index_error()")
        self.launched += 1
        self.group.clear()
        self._let_go()

    def _rows(self, nest: Nest, frame: dict[str, int]) -> list[tuple[Launch, list[tuple[int, int]]]]:
        """The launches of a nest, each with (slot, addend) of its arguments."""
        found = self.launches[nest.name]
        if not isinstance(found, tuple):
            return [(found, [*(self._address(name, frame) for name in found.buffers), *(self._value(s, frame) for s in found.symbols)])]
        scratch = ""
        if found and found[0].scratch:
            scratch = f"scratch_{len(self.lines)}"
            self.lines.append(f"{scratch} = {self._empty(f'({self._size(found[0].scratch_bytes)},), (1,)', 'u8', found[0].device)}")
        return [(launch, self._far_slots(launch, scratch, frame)) for launch in found]

    def _far_slots(self, launch: DeviceLaunch, scratch: str, frame: dict[str, int]) -> list[tuple[int, int]]:
        places = [(_slot(f"{scratch}.data_ptr()", frame), place) if isinstance(place, int) else
                  (_slot(f"{scratch}.data_ptr() + {self._size(place)}", frame), 0) for place in launch.scratch]
        addresses = [self._far_address(name, launch.device, frame) for name in launch.buffers]
        symbols = [self._value(s, frame) for s in launch.symbols]
        before, after = ([self._word(w, frame) for w in words] for words in (launch.before, launch.after))
        return [*before, *addresses, *places, *symbols, *after]

    def _word(self, word: Word, frame: dict[str, int]) -> tuple[int, int]:
        return (-2, word) if isinstance(word, int) else (_slot(word if isinstance(word, str) else self._size(word), frame), 0)

    def _far_address(self, buffer: str, device: str, frame: dict[str, int]) -> tuple[int, int]:
        """The address on a device; a scalar in host memory is copied there."""
        if self.buffers[buffer].device != CPU:
            return self._address(buffer, frame)
        if (buffer, device) not in self.moved:
            self.moved[buffer, device] = f"far_{len(self.moved)}"
            self.lines.append(f"{self.moved[buffer, device]} = {self._variable(buffer)}.to({device!r})")
        return _slot(f"{self.moved[buffer, device]}.data_ptr()", frame), 0

    def _address(self, buffer: str, frame: dict[str, int]) -> tuple[int, int]:
        """(slot, addend) that give the buffer's address."""
        place = self.places.get(buffer)
        if place is None:
            if self.buffers[buffer].kind == "constant":
                return -2, self.buffers[buffer].value.data_ptr()
            return _slot(f"{self._variable(buffer)}.data_ptr()", frame), 0
        if isinstance(place, int):
            return _slot("arena.data_ptr()", frame), place
        return _slot(f"arena.data_ptr() + {self._size(place)}", frame), 0

    def _value(self, symbol: str, frame: dict[str, int]) -> tuple[int, int]:
        _, kind, _ = self.program.symbols.get(symbol, (0, "value", 0))
        return _slot(f"as_word({symbol})" if kind == "value" else symbol, frame), 0

    # ------------------------------------------------ library calls

    def _extern(self, step: Extern) -> None:
        function = self._object(QUICK_CALLS.get(step.target, step.target), _call_stem(step.target))
        arguments = [self._argument(arg) for arg in step.args] + [f"{key}={self._argument(value)}" for key, value in step.kwargs.items()]
        if step.out:
            arguments += [f"{key}={self._variable(name)}" for key, name in zip(_out_names(step), step.outputs) if name is not None]
            self.lines.append(f"{function}({', '.join(arguments)})")
            self._check_results(step)
            return
        call = f"{function}({', '.join(arguments)})"
        if _returns_lists(step):
            call = f"{self._object(flat, 'flat')}({call})"
        if not any(step.outputs):
            self.lines.append(call)
            return
        targets = ["_" if name is None else self._variable(name) if name in self.buffers else name for name in step.outputs]
        self.lines.append(f"{', '.join(targets)} = {call}" if _returns_one(step) else f"{', '.join(targets)}, = {call}")
        self.lines += [f"{symbol} = {_SYMBOL_SOURCES[kind].format(x=self._variable(name), d=dim)}" for symbol, name, kind, dim in step.binds]
        if _call_stem(step.target) not in _ROW_MAJOR_RESULTS:
            self.lines += [f"{target} = laid_out({target}, {self._sizes(self.buffers[name].strides)})"
                           for target, name in zip(targets, step.outputs) if name in self.buffers]
        self._check_results(step)

    def _check_results(self, step: Extern) -> None:
        """Its readers were compiled for the shapes of the operator's rule: where a rule is wrong they would read outside."""
        if self.plan.zone:
            self.lines += [f"zones.meets({step.name!r}, {self._variable(name)}, {self._sizes(buffer.shape)}, {self._dtype(buffer.dtype)})"
                           for name in step.outputs if name is not None and (buffer := self.buffers.get(name)) is not None]

    def _argument(self, value: Any, aliases: bool = False) -> str:
        """Source text of an argument, or (`aliases`) of an output, which must be a true view where it is one of an input."""
        if isinstance(value, View):
            return self._view(value, aliases)
        if isinstance(value, Expr):
            return self._size(value)
        if isinstance(value, Given):
            return self.parameters[value.number]
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self._argument(item, aliases) for item in value)}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._object(value, type(value).__name__)

    def _view(self, view: View, aliases: bool) -> str:
        buffer, variable = self.buffers[view.buffer], self._variable(view.buffer)
        if (view.shape, view.strides, view.offset, view.dtype) == (buffer.shape, buffer.strides, buffer.offset, buffer.dtype):
            return variable
        layout = f"{self._sizes(view.shape)}, {self._sizes(view.strides)}"
        if view.dtype != buffer.dtype:
            distance = view.offset * ITEMSIZE[view.dtype] - buffer.offset * ITEMSIZE[buffer.dtype]
            return f"as_dtype({variable}, {self._dtype(view.dtype)}, {layout}, {self._size(distance)})"
        distance = view.offset - buffer.offset
        if not aliases or buffer.kind not in ("input", "constant"):
            return f"view({variable}, {layout}, {self._size(distance)})"
        self.makes_views = True
        return f"as_strided({variable}, {layout}, {variable}.storage_offset() + {self._size(distance)})"


def _slot(text: str, frame: dict[str, int]) -> int:
    return frame.setdefault(text, len(frame))


def _call_stem(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return re.sub(r"\W", "_", getattr(packet, "__name__", "call"))


def _returns_one(step: Extern) -> bool:
    schema = getattr(step.target, "_schema", None)
    if schema is None:
        return len(step.outputs) == 1
    return len(schema.returns) == 1 and not str(schema.returns[0].type).startswith("List")


def _returns_lists(step: Extern) -> bool:
    """Several lists, whose items are the step's outputs."""
    schema = getattr(step.target, "_schema", None)
    return schema is not None and len(schema.returns) > 1 and any(str(r.type).startswith("List") for r in schema.returns)


def flat(results: Iterable[Any]) -> list[Any]:
    return [item for result in results for item in (result if isinstance(result, (list, tuple)) else (result,))]


def _out_names(step: Extern) -> list[str]:
    """Names of the keyword arguments that the call writes its results into."""
    return [a.name for a in step.target._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]


_SYMBOL_SOURCES: Table[str] = Table("place of a symbol", "codegen/host.py")
for _kind, _text in {"shape": "{x}.shape[{d}]", "stride": "{x}.stride({d})", "offset": "{x}.storage_offset()", "value": "{x}"}.items():
    _SYMBOL_SOURCES.add(_kind, _text)

_STEP_WRITERS: Table[Callable[[_Writer, Any], None]] = Table("plan step writer", "codegen/host.py")
_STEP_WRITERS.add(Alloc, _Writer.alloc)
_STEP_WRITERS.add(Run, _Writer.run)
_STEP_WRITERS.add(Free, _Writer.free)
_STEP_WRITERS.add(Return, _Writer.finish)
