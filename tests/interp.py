"""The reference interpreter: executes a Program with torch, for tests.

In: a Program (or a Plan) and the tensors and numbers of its inputs.  Out: its outputs.  A nest is evaluated over the whole grid
of its axes at once: each Expr becomes a tensor that broadcasts over (nest axes..., phase axes...).  Slow is fine; right is
all that matters: it follows the words of `loops/ir.py`, and it checks what the verifier cannot see: that no element is set
twice, and that no load leaves its buffer.

    outputs = run(program, [x, y])
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from firesteel.loops.ir import Axis, Buffer, Extern, Given, Nest, Phase, Program, ProgramStep, Reduce, Store, View, names_by_data
from firesteel.loops.plan import Alloc, Free, Plan, Run
from firesteel.loops.scalars import DTYPES, OPS, REDUCE_OPS
from firesteel.sym.expr import Expr, evaluate, postorder
from firesteel.targets import CPU


def run(program: Program, inputs: Sequence[Any], *, check_sets: bool = True) -> list[Any]:
    """The outputs of the program for these inputs."""
    machine = Interpreter(program, inputs, check_sets)
    for step in program.steps:
        machine.step(step)
    return [machine.resolve(output) for output in program.outputs]


def run_plan(plan: Plan, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a plan.  Freed memory is overwritten at once, so that a plan which frees too early gives wrong results."""
    machine = Interpreter(plan.program, inputs)
    machine.arena = torch.zeros(machine.size(plan.arena), dtype=torch.uint8)
    outputs: list[Any] = []
    for step in plan.steps:
        if isinstance(step, Alloc):
            machine.take(step)
        elif isinstance(step, Free):
            if plan.program.buffers[step.buffer].kind != "input":       # that of a boxed program is its caller's
                machine.free(step.buffer)
        elif isinstance(step, Run):
            machine.step(step.step)
        else:
            outputs = [machine.resolve(output) for output in step.outputs]
    return outputs


class Interpreter:
    """Memory (a tensor for each buffer) and the values of the symbols."""

    def __init__(self, program: Program, inputs: Sequence[Any], check_sets: bool = True):
        self.buffers, self.inputs, self.check_sets = program.buffers, inputs, check_sets
        self.freed: dict[str, torch.Tensor] = {}
        self.symbols = {name: _read(inputs[number], kind, dim) for name, (number, kind, dim) in program.symbols.items()}
        self.memory: dict[str, torch.Tensor] = {n: b.value for n, b in program.buffers.items() if b.kind == "constant"}
        for name, value in zip(program.inputs, inputs):
            if name in program.buffers:
                self.memory[name] = value.detach()

    def size(self, size: Any) -> Any:
        return evaluate(size, self.symbols)

    def allocate(self, buffer: Buffer) -> torch.Tensor:
        shape, strides = [self.size(n) for n in buffer.shape], [self.size(n) for n in buffer.strides]
        made = torch.empty_strided(shape, strides, dtype=DTYPES[buffer.dtype], device=buffer.device)
        return made.fill_(_GARBAGE.get(buffer.dtype, 0))

    # ------------------------------------------------------------ the memory of a plan

    arena: torch.Tensor

    def take(self, step: Alloc) -> None:
        """Memory of its own, a place in the arena, or what a dead buffer had, or one that the next step overwrites while it reads it."""
        buffer = self.buffers[step.buffer]
        if step.reuse is not None:
            before = self.freed.pop(step.reuse) if step.reuse in self.freed else self.memory[step.reuse]
            self.memory[step.buffer] = before.as_strided([self.size(n) for n in buffer.shape], [self.size(n) for n in buffer.strides])
        elif step.at is None:
            self.memory[step.buffer] = self.allocate(buffer)
        else:
            shape, strides = [self.size(n) for n in buffer.shape], [self.size(n) for n in buffer.strides]
            start, dtype = self.size(step.at), DTYPES[buffer.dtype]
            assert start % dtype.itemsize == 0
            made = torch.empty(0, dtype=dtype).set_(self.arena.untyped_storage(), start // dtype.itemsize, shape, strides)
            self.memory[step.buffer] = made.fill_(_GARBAGE.get(buffer.dtype, 0))

    def free(self, name: str) -> None:
        freed = self.freed[name] = self.memory.pop(name)
        freed.fill_(_GARBAGE.get(self.buffers[name].dtype, 0))

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.memory:
            self.memory[name] = self.allocate(self.buffers[name])
        return self.memory[name]

    def step(self, step: ProgramStep) -> None:
        if step.nest:
            NestRun(self, step.nest).run()
        elif step.call:
            self.call(step.call)

    # ------------------------------------------------------------ library calls

    def resolve(self, value: Any) -> Any:
        """An Extern's argument or a Program's output as a real value."""
        if isinstance(value, View):
            return self.window(value)
        if isinstance(value, Expr):
            return self.size(value)
        if isinstance(value, Given):
            return self.inputs[value.number]
        if isinstance(value, (list, tuple)):
            return type(value)(self.resolve(v) for v in value)
        return value

    def window(self, view: View) -> torch.Tensor:
        base, buffer = self.tensor(view.buffer), self.buffers[view.buffer]
        shape, strides = [self.size(n) for n in view.shape], [self.size(n) for n in view.strides]
        offset, start = self.size(view.offset), self.size(buffer.offset)
        if view.dtype != buffer.dtype:
            dtype = DTYPES[view.dtype]
            return _as_dtype(base, dtype, shape, strides, offset * dtype.itemsize - start * base.itemsize)
        return base.as_strided(shape, strides, base.storage_offset() + offset - start)

    def call(self, step: Extern) -> None:
        args, kwargs = self.resolve(step.args), {k: self.resolve(v) for k, v in step.kwargs.items()}
        if step.out:
            step.target(*args, **kwargs, out=self.tensor(step.outputs[0]))      # type: ignore[arg-type]  # which has a name
            return
        results = _flat(step.target(*args, **kwargs))
        made = dict(zip(step.outputs, results))
        self.symbols.update({symbol: _read(made[name], kind, dim) for symbol, name, kind, dim in step.binds})
        for name, result in zip(step.outputs, results):
            if name in self.buffers:
                self.memory[name] = self.fitted(self.buffers[name], result)
            elif name is not None:
                self.symbols[name] = result

    def fitted(self, buffer: Buffer, result: torch.Tensor) -> torch.Tensor:
        """The result in the layout that the buffer promises; a private copy, since a view may share its argument's storage."""
        shape, strides = [self.size(n) for n in buffer.shape], [self.size(n) for n in buffer.strides]
        assert list(result.shape) == shape, f"{buffer.name} is {list(result.shape)}, not {shape}"
        assert result.dtype is DTYPES[buffer.dtype], f"{buffer.name} is {result.dtype}, not {buffer.dtype}"
        made = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
        return made.copy_(result)


_GARBAGE = {"f32": -7.25e9, "f64": -7.25e9, "f16": -7e3, "bf16": -7e9, "i64": -123456789, "i32": -1234567, "i16": -12345, "i8": -99, "u8": 99}


def _read(value: Any, kind: str, dim: int) -> Any:
    if kind == "shape":
        return value.shape[dim]
    if kind == "stride":
        return value.stride(dim)
    return value.storage_offset() if kind == "offset" else value


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for r in result for leaf in _flat(r)]
    return [result]


def _as_dtype(base: torch.Tensor, dtype: torch.dtype, shape: list[int], strides: list[int], distance: int) -> torch.Tensor:
    """The same storage read as another dtype, from `distance` bytes behind the start of the tensor on."""
    start = (base.storage_offset() * base.itemsize + distance) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), start, shape, strides)


# ---------------------------------------------------------------- nests

class NestRun:
    """One nest being executed."""

    def __init__(self, machine: Interpreter, nest: Nest):
        self.machine, self.nest = machine, nest
        self.outer = [machine.size(a.extent) for a in nest.axes]
        self.accumulators: dict[str, torch.Tensor] = {}     # over the nest's axes alone

    def run(self) -> None:
        for phase in self.nest.phases:
            PhaseRun(self, phase).run()


class PhaseRun:
    """One phase over its grid.  `values` caches what each Expr is, as a tensor that broadcasts over the grid."""

    def __init__(self, sweep: NestRun, phase: Phase):
        self.sweep, self.phase, self.machine = sweep, phase, sweep.machine
        self.inner = [self.machine.size(a.extent) for a in phase.axes]
        self.grid = tuple(sweep.outer + self.inner)
        self.axes = self._axes((*sweep.nest.axes, *phase.axes))
        self.running: dict[str, torch.Tensor] = {}
        self.values: dict[Expr, torch.Tensor] = {}

    def _axes(self, axes: tuple[Axis, ...]) -> dict[str, torch.Tensor]:
        made = {}
        for place, (axis, size) in enumerate(zip(axes, self.grid)):
            shape = [1] * len(self.grid)
            shape[place] = size
            made[axis.name] = torch.arange(size).reshape(shape)
        return made

    def run(self) -> None:
        if self.phase.kind == "scan":
            for reduce in self.phase.reduces:
                self.running[reduce.name] = self._scan(reduce)
        for store in self.phase.stores:     # a CPU's kernels compute all values before they store them
            if self.machine.buffers[store.buffer].device == CPU and 0 not in self.grid:
                self.value(store.value)
        for store in self.phase.stores:
            self.store(store)
        for reduce in self.phase.reduces:
            self.sweep.accumulators[reduce.name] = self._reduce(reduce)

    def _full(self, value: Expr) -> torch.Tensor:
        return self.value(value).expand(self.grid)

    def _reduce(self, reduce: Reduce) -> torch.Tensor:
        dims, row = tuple(range(len(self.sweep.outer), len(self.grid))), REDUCE_OPS[reduce.op]
        full = self._full(reduce.value)
        if not dims:
            return full
        if 0 in self.inner:
            return torch.full(self.sweep.outer, row.identity(reduce.dtype), dtype=full.dtype)
        return row.along(full.contiguous(), dims)

    def _scan(self, reduce: Reduce) -> torch.Tensor:
        full = self._full(reduce.value)
        return full if 0 in self.grid else REDUCE_OPS[reduce.op].running(full, len(self.grid) - 1)

    # ------------------------------------------------------------ scalars

    def value(self, root: Expr) -> torch.Tensor:
        for node in postorder(root):
            if node not in self.values:
                leaf = _LEAVES.get(node.op)
                self.values[node] = leaf(self, node) if leaf else meaning(node, [self.values[a] for a in node.args])
        return self.values[root]

    def constant(self, node: Expr) -> torch.Tensor:
        return torch.tensor(node.attr, dtype=DTYPES[node.dtype])

    def symbol(self, node: Expr) -> torch.Tensor:
        return torch.tensor(self.machine.symbols[node.attr], dtype=DTYPES[node.dtype])

    def axis(self, node: Expr) -> torch.Tensor:
        return self.axes[node.attr]

    def accumulator(self, node: Expr) -> torch.Tensor:
        if node.attr in self.running:
            return self.running[node.attr]
        final = self.sweep.accumulators[node.attr]
        return final.reshape((*final.shape, *[1] * len(self.inner)))

    def load(self, node: Expr) -> torch.Tensor:
        source = self.machine.tensor(node.attr)
        return source[self.place(node.args, source)] if node.args else source

    def masked(self, node: Expr) -> torch.Tensor:
        source = self.machine.tensor(node.attr)
        mask, other, *index = (self.values[a] for a in node.args)
        if not index:
            return torch.where(mask, source, other)
        if 0 in source.shape:
            assert not mask.any(), f"a masked load from the empty buffer {node.attr}"
            return torch.where(mask, other, other)
        inside = tuple(torch.where(mask, i, 0) for i in index)
        for i, size in zip(inside, source.shape):
            assert _within(i, size), f"a masked load of {node.attr} leaves the buffer: {node!r}"
        return torch.where(mask, source[inside], other)

    def checked(self, node: Expr) -> torch.Tensor:
        index, size = (self.values[a] for a in node.args)
        lowest = 0 if node.attr == "strict" else -size
        if ((index < lowest) | (index >= size)).expand(torch.broadcast_shapes(index.shape, self.grid)).any():
            raise IndexError(f"index out of range in {self.sweep.nest.name}")
        return torch.where(index < 0, index + size, index)

    def place(self, index: Sequence[Expr], target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = tuple(self.value(i) for i in index)
        for i, size in zip(places, target.shape):
            assert 0 in self.grid or _within(i, size), f"an index of {self.sweep.nest.name} leaves its buffer: {index!r}, {size}"
        if 0 in self.grid:
            return tuple(torch.zeros(i.shape, dtype=torch.int64) if 0 not in i.shape else i for i in places)
        return places

    # ------------------------------------------------------------ stores

    def store(self, store: Store) -> None:
        target = self.machine.tensor(store.buffer)
        if 0 in self.grid:
            return
        value = self._full(store.value)
        if not store.index:
            target.copy_(target + value.sum() if store.mode == "add" else value.reshape(()))
            return
        places = tuple(i.expand(self.grid) for i in self.place(store.index, target))
        if store.mode == "set" and self.machine.check_sets and not names_by_data(store.index):
            self._check_once(store, places, target)
        target.index_put_(places if places[0].ndim else tuple(i.reshape(1) for i in places), value, accumulate=store.mode == "add")

    def _check_once(self, store: Store, places: tuple[torch.Tensor, ...], target: torch.Tensor) -> None:
        linear = torch.zeros((), dtype=torch.int64)
        for i, size in zip(places, target.shape):
            linear = linear * size + i
        assert linear.unique().numel() == linear.numel(), f"{self.sweep.nest.name} sets an element of {store.buffer} twice"


def _within(index: torch.Tensor, size: int) -> bool:
    return index.numel() == 0 or bool((index.min() >= 0) & (index.max() < size))


_LEAVES: Mapping[str, Any] = {
    "const": PhaseRun.constant, "symbol": PhaseRun.symbol, "axis": PhaseRun.axis, "acc": PhaseRun.accumulator,
    "load": PhaseRun.load, "masked": PhaseRun.masked, "check_index": PhaseRun.checked,
}


def meaning(node: Expr, args: list[torch.Tensor]) -> torch.Tensor:
    """The node's value for its arguments' values (`Interpreter` deals with the leaves)."""
    if node.op == "to":
        return args[0].to(DTYPES[node.dtype])
    return OPS[node.op].meaning(*args)
