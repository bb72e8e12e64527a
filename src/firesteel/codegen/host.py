"""The host function: one straight line of Python that allocates, launches kernels, makes library calls and returns.

In: a Plan, and for each Nest a `Launch` (where the kernel is, which buffers and sizes it wants).  Out: a callable
`fn(*inputs) -> tuple`, whose text is kept as `fn.source`.

What always holds
 - Kernels in a row, with no library call between them, are one native call.  `launcher` makes it: a Python function in machine
   code (METH_FASTCALL) that takes tensors and sizes, lets the GIL go, and runs the kernels one after the other.
 - A kernel is `void k(int64* args)`: buffer addresses, then sizes, then the address of the error slot.
 - The function touches no global state, so threads may run it at the same time.
 - Autograd never sees inside: grad mode is off while it runs.
 - A library call's result has the strides that were planned; where the library chose others it is copied once.
 - While torch.profiler records, each kernel is launched by itself, in a range with its title, the comment behind the launch (hosted.traced).
 - A boxed program's function takes its inputs in one list, which it empties, and lets each go behind its last reader.
 - A plan with guard zones (codegen/zones.py) runs its kernels one by one and looks at the zones after each, and at what library calls return.

    def call(x0, x1):
        s0 = x0.shape[0]
        b_y = empty((s0, 256), (256, 1), d_f32)
        if run_0(x0, x1, b_y, s0): raise index_error()    # y <- mul, add
        return (b_y,)
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import torch

from firesteel.codegen.hosted import TITLES, HostCode, check_number, draw_normal, empty_cuda, flat, made
from firesteel.loops.ir import Extern, Given, Nest, View
from firesteel.loops.plan import Alloc, Free, Plan, Return, Run, is_large, numbytes
from firesteel.loops.scalars import DTYPES, ITEMSIZE
from firesteel.native_method import CONSTANT, CompileText, Word
from firesteel.operators import OWN
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, row_major
from firesteel.table import Table
from firesteel.targets import CPU, has_arena, is_the_only_gpu

Argument = int | Expr | str       # an argument of a kernel: a number, a size, or the source text of what each call computes


def title(nest: Nest) -> str:
    """For traces: the kernel and the nodes of the graph that it computes."""
    return f"{nest.name} <- {', '.join(nest.origin)}"


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
    before: tuple[Argument, ...] = ()
    scratch: tuple[Size, ...] = ()      # places in it, in bytes
    scratch_bytes: Size = 0
    after: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class Setup:
    """Lines at the start of the host function, and the names they use."""
    lines: tuple[str, ...] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- quick calls

_aten = torch.ops.aten
QUICK_CALLS: Table[Callable] = Table("quick call", "codegen/host.py")   # torch's own functions cost 1.5 us less than an OpOverload
_functions: dict[Any, Callable] = {
    _aten.mm.default: torch.mm, _aten.mm.out: torch.mm, _aten.addmm.default: torch.addmm, _aten.addmm.out: torch.addmm,
    _aten.bmm.default: torch.bmm, _aten.bmm.out: torch.bmm, _aten.baddbmm.default: torch.baddbmm,
    _aten.convolution.default: torch.convolution, _aten.concat.default: torch.cat, _aten._assert_scalar.default: check_number,
    _aten._local_scalar_dense.default: torch.Tensor.item, _aten.normal_functional.default: draw_normal,
}
for _factory in (torch.rand, torch.randn, torch.randint, torch.randperm):       # an overload of these counts its own write as the caller's
    _packet = getattr(_aten, _factory.__name__)
    _functions |= {getattr(_packet, name): _factory for name in _packet.overloads() if not name.endswith(("out", "names"))}
QUICK_CALLS.rows(_functions)

_ROW_MAJOR_RESULTS = ("mm", "addmm", "bmm", "baddbmm")      # their results are always contiguous: nothing to check


# ---------------------------------------------------------------- the source text

def build(plan: Plan, launches: Mapping[str, Launch | tuple[DeviceLaunch, ...]], compile_text: CompileText | None = None,
          setup: Setup | None = None) -> Callable[..., tuple]:
    """The callable of a Plan.  `launches` has an entry for each Nest by its name: one launch, or several in order."""
    return made(write(plan, launches, setup), compile_text)


def write(plan: Plan, launches: Mapping[str, Launch | tuple[DeviceLaunch, ...]], setup: Setup | None = None) -> HostCode:
    return _Writer(plan, launches, setup or Setup()).write()


def rows_of(plan: Plan) -> list[list[Nest]]:
    """The nests whose kernels stand in a row: each row is one native call."""
    writer = _RowFinder(plan, {}, Setup())
    writer.write()
    return writer.rows


class _Writer:
    """Writes the function line by line; a builder."""

    def __init__(self, plan: Plan, launches: Mapping[str, Launch | tuple[DeviceLaunch, ...]], setup: Setup):
        self.plan, self.program, self.launches = plan, plan.program, launches
        self.buffers = plan.program.buffers
        self.lines: list[str] = list(setup.lines)
        self.moved: dict[tuple[str, str], str] = {}     # (CPU buffer, device) -> variable of its copy there
        self.names: dict[str, str] = {}             # buffer -> Python variable
        self.taken: set[str] = set()                # variables in use
        self.scope: dict[str, Any] = dict(setup.scope)
        self.recipes: dict[str, list[int]] = {}
        self.objects: dict[int, str] = {}           # id of an object in the scope -> its name
        self.places: dict[str, Size] = {}           # buffer -> byte offset in the arena
        self.group: list[Nest] = []                 # kernels that the next launch will run
        self.freed: list[str] = []                  # buffers to let go after it
        self.given: list[str] = []                  # variables whose memory the next step takes over: it may still read them
        self.holds_much = False                     # is one of those to let go large?
        self.allocated: dict[str, str] = {}         # buffer -> the line that allocates it
        self.reused = {step.reuse for step in plan.steps if isinstance(step, Alloc)}

    def write(self) -> HostCode:
        self._inputs()
        self._symbols()
        if self.plan.zone:
            self.lines.append("zones = Zones(empty)")
        if self.plan.arena != 0:
            self.lines.append(f"arena = empty(({self.plan.arena},), (1,), {self._dtype('u8')})")
        for step in self.plan.steps:
            _STEP_WRITERS[type(step)](self, step)
        return self._code()

    def _code(self) -> HostCode:
        boxed = self.program.boxed
        given = "box" if boxed else ", ".join(self.parameters)
        watched = f"if profiler._is_profiler_enabled: return traced(call)({given})"
        recorded = any(step.call for step in self.program.steps)        # what it calls, autograd could record
        grad = ["if grad_on():", f"    with no_grad(): return call({given})"] if recorded else []
        source = "\n    ".join([f"def call({given}):", watched, *grad, *(self._unbox() if boxed else ()), *self.lines]) + "\n"
        return HostCode(source, boxed, self.scope, self.recipes)

    def _unbox(self) -> list[str]:
        """The inputs are this function's alone, so that each can be freed; those that nobody reads go at once."""
        named = set(re.findall(r"\bx\d+\b", "\n".join(self.lines)))
        used = [name if name in named else "_" for name in self.parameters]
        unread = ["_ = None"] * ("_" in used)
        return [f"{', '.join(used)}, = box", "box.clear()", *unread] if used else []

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

    def _sizes(self, sizes: tuple[Size, ...]) -> str:
        return f"({''.join(f'{size}, ' for size in sizes)})"

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
            self.allocated[step.buffer] = f"{variable} = {self._empty(layout, buffer.dtype, buffer.device)}"
            self.lines.append(self.allocated[step.buffer])

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
        self.given.append(before)

    def _guard_place(self, buffer: str, at: Size) -> None:
        """Zones around a place in the arena, which may have been another place's inside."""
        if self.plan.zone:
            self.lines.append(f"zones.place({buffer!r}, arena.data_ptr() + {at}, {numbytes(self.buffers[buffer])})")

    def _empty(self, layout: str, dtype: str, device: str) -> str:
        """Source text of fresh memory."""
        if device == CPU or empty_cuda is not None and is_the_only_gpu(device):
            return f"{'empty' if device == CPU else 'empty_cuda'}({layout}, {self._dtype(dtype)})"
        return f"empty_strided({layout}, dtype={self._dtype(dtype)}, device={device!r})"

    def run(self, step: Run) -> None:
        if step.step.nest:
            self.group.append(step.step.nest)
        elif step.step.call:
            self._flush()
            self._extern(step.step.call)
        self.freed += self.given
        self.given.clear()
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
        if written := self._written_inputs():
            self.lines.append(f"was_written({', '.join(written)})")
        self.lines.append(f"return ({''.join(self._argument(output) + ', ' for output in step.outputs)})")

    def _written_inputs(self) -> list[str]:
        """Inputs that kernels write: library calls raise versions themselves, and so does the caller for what it knows to be written."""
        written = {name for step in self.program.steps if step.nest for name in step.writes()} - {name for _, name in self.program.into}
        return [parameter for parameter, name in zip(self.parameters, self.program.inputs) if name in written]

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
        name = f"run_{len(self.recipes)}"
        self.recipes[name] = recipe
        call = f"{name}({', '.join(frame)})"
        far = any(isinstance(self.launches[nest.name], tuple) for nest in self.group)
        line = f"if code := {call}: raise launch_error(code)" if far else f"if {call}: raise index_error()"
        self.lines.append(f"{line}{TITLES}{'; '.join(map(title, self.group))}")
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
            self.lines.append(f"{scratch} = {self._empty(f'({found[0].scratch_bytes},), (1,)', 'u8', found[0].device)}")
        return [(launch, self._far_slots(launch, scratch, frame)) for launch in found]

    def _far_slots(self, launch: DeviceLaunch, scratch: str, frame: dict[str, int]) -> list[tuple[int, int]]:
        places = [(_slot(scratch, frame), place) if isinstance(place, int) else
                  (_slot(f"{scratch}.data_ptr() + {place}", frame), 0) for place in launch.scratch]
        addresses = [self._far_address(name, launch.device, frame) for name in launch.buffers]
        symbols = [self._value(s, frame) for s in launch.symbols]
        before, after = ([self._word(w, frame) for w in words] for words in (launch.before, launch.after))
        return [*before, *addresses, *places, *symbols, *after]

    def _word(self, word: Argument, frame: dict[str, int]) -> tuple[int, int]:
        return (-2, word) if isinstance(word, int) else (_slot(str(word), frame), 0)

    def _far_address(self, buffer: str, device: str, frame: dict[str, int]) -> tuple[int, int]:
        """The address on a device; a scalar in host memory is copied there."""
        if self.buffers[buffer].device != CPU:
            return self._address(buffer, frame)
        if (buffer, device) not in self.moved:
            self.moved[buffer, device] = f"far_{len(self.moved)}"
            self.lines.append(f"{self.moved[buffer, device]} = {self._variable(buffer)}.to({device!r})")
        return _slot(self.moved[buffer, device], frame), 0

    def _address(self, buffer: str, frame: dict[str, int]) -> tuple[int, int]:
        """(slot, addend) that give the buffer's address."""
        place = self.places.get(buffer)
        if place is None:
            if self.buffers[buffer].kind == "constant":
                return -2, Word.of(self.buffers[buffer].value.data_ptr(), CONSTANT, self._variable(buffer))
            return _slot(self._variable(buffer), frame), 0
        if isinstance(place, int):
            return _slot("arena", frame), place
        return _slot(f"arena.data_ptr() + {place}", frame), 0

    def _value(self, symbol: str, frame: dict[str, int]) -> tuple[int, int]:
        _, kind, _ = self.program.symbols.get(symbol, (0, "value", 0))
        return _slot(f"as_word({symbol})" if kind == "value" else symbol, frame), 0

    # ------------------------------------------------ library calls

    def _extern(self, step: Extern) -> None:
        function = self._object(QUICK_CALLS.get(step.target) or OWN.get(step.target, step.target), _call_stem(step.target))
        arguments = [self._argument(arg) for arg in step.args] + [f"{key}={self._argument(value)}" for key, value in step.kwargs.items()]
        if step.out and not self._makes_its_result(step):
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

    def _makes_its_result(self, step: Extern) -> bool:
        """A product whose result has memory of its own may as well allocate it, without counting that as a write to the result."""
        name = step.outputs[0] or ""
        line = self.allocated.get(name) if step.target in QUICK_CALLS else None
        if line is None or self.buffers[name].strides != row_major(self.buffers[name].shape):
            return False
        self.lines.remove(line)
        return True

    def _check_results(self, step: Extern) -> None:
        """Its readers were compiled for the shapes of the operator's rule: where a rule is wrong they would read outside."""
        if self.plan.zone:
            self.lines += [f"zones.meets({step.name!r}, {self._variable(name)}, {self._sizes(buffer.shape)}, {self._dtype(buffer.dtype)})"
                           for name in step.outputs if name is not None and (buffer := self.buffers.get(name)) is not None]

    def _argument(self, value: Any) -> str:
        """Source text of an argument, or of an output.  An output that shares an input's memory is no view for autograd: those are made behind the
        graph, by rule 2 of `autograd/alias.py`."""
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Expr):
            return str(value)
        if isinstance(value, Given):
            return self.parameters[value.number]
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self._argument(item) for item in value)}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._object(value, type(value).__name__)

    def _view(self, view: View) -> str:
        buffer, variable = self.buffers[view.buffer], self._variable(view.buffer)
        if (view.shape, view.strides, view.offset, view.dtype) == (buffer.shape, buffer.strides, buffer.offset, buffer.dtype):
            return variable
        layout = f"{self._sizes(view.shape)}, {self._sizes(view.strides)}"
        if view.dtype != buffer.dtype:
            distance = view.offset * ITEMSIZE[view.dtype] - buffer.offset * ITEMSIZE[buffer.dtype]
            return f"as_dtype({variable}, {self._dtype(view.dtype)}, {layout}, {distance})"
        return f"view({variable}, {layout}, {view.offset - buffer.offset})"


class _RowFinder(_Writer):
    """Writes all but the launches, and keeps what they would run."""

    def __init__(self, plan: Plan, launches: Mapping[str, Any], setup: Setup):
        super().__init__(plan, launches, setup)
        self.rows: list[list[Nest]] = []

    def _flush(self) -> None:
        if self.group:
            self.rows.append(self.group)
            self.group = []
            self._let_go()


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


def _out_names(step: Extern) -> list[str]:
    """Names of the keyword arguments that the call writes its results into."""
    return [a.name for a in step.target._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]


_SYMBOL_SOURCES: Table[str] = Table("place of a symbol", "codegen/host.py")
_SYMBOL_SOURCES.rows({"shape": "{x}.shape[{d}]", "stride": "{x}.stride({d})", "offset": "{x}.storage_offset()", "value": "{x}"})

_STEP_WRITERS: Table[Callable[[_Writer, Any], None]] = Table("plan step writer", "codegen/host.py")
_STEP_WRITERS.add(Alloc, _Writer.alloc)
_STEP_WRITERS.add(Run, _Writer.run)
_STEP_WRITERS.add(Free, _Writer.free)
_STEP_WRITERS.add(Return, _Writer.finish)
