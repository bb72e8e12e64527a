"""From a program and example inputs to one graph that computes its outputs and gradients.

`trace_program` runs the program on abstract tensors with torch's C++ autograd at work, looks at what came out (alias.py says what
matters), and, where something differentiable came out, asks `torch.autograd.grad` for gradients while the recorder still
listens.  The result is a `Joint`: an inference graph (no tangents) or a joint graph, and the Plan around it.

What always holds
  - placeholders are primals_0.. (one an input, in order) and tangents_0..; results are the forward's values, then one gradient an input
  - the forward's values are: new contents of written inputs, then fresh outputs, hidden bases of views, and sizes that views need
  - no value is a placeholder, and no two are the same node

    joint = trace_program(lambda x: x.sin(), [torch.randn(3, requires_grad=True)])
    joint.gm.code        # primals_0, tangents_0 -> sin(primals_0), tangents_0 * cos(primals_0)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from firesteel.artifacts import timed
from firesteel.autograd.alias import Constant, Fresh, Input, Plan, Replay, Result, View, Write
from firesteel.autograd.function import Tangent
from firesteel.backwards import engine, is_spent
from firesteel.errors import DataDependentError, FiresteelError
from firesteel.graph.build import make_module
from firesteel.graph.functional import Cell, Step
from firesteel.graph.rules.base import DataAccess
from firesteel.graph.spec import Spec, contiguous_strides, is_dense
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.graph.trace import TraceWorld, tracing
from firesteel.graph.wrappers import Packing, is_wrapper, pack_of, parts_of, places_of, width
from firesteel.sym.expr import Expr
from firesteel.sym.symint import from_sym

aten = torch.ops.aten
Program = Callable[..., Sequence[Any]]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
UNTRACEABLE = (DataAccess, DataDependentError, NotImplementedError)     # what tracing raises for programs that it cannot follow


@dataclass(frozen=True)
class Origin:
    """Where a program shows one of the forward's values: it is what input `place` holds afterwards ("input"), output `place`
    ("output"), or what output `place` is a view of ("base")."""
    kind: str
    place: int

    def find(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if self.kind == "input":
            return inputs[self.place]
        return outputs[self.place] if self.kind == "output" else outputs[self.place]._base


class Undifferentiable(Exception):
    """The forward could be traced, its backward not; the cause says why."""


@dataclass
class Joint:
    """A traced program.  Without tangents `gm` is an inference graph."""
    gm: GraphModule
    plan: Plan
    tangents: list[Tangent]
    differentiated: list[bool]              # for each input: has the joint graph a gradient for it?
    non_differentiable: list[int]           # forward values that are floating but carry no gradient
    origins: list[Origin]                   # for each tangent: where the program shows the value that it is the gradient of
    example_inputs: list[Any]               # abstract, of the placeholders
    reshaped_inputs: list[int] = field(default_factory=list)     # inputs whose metadata the program changes: not supported
    packing: Packing | None = None          # where tensor subclasses take part
    aliases: str = ""                       # what of a tensor subclass shares memory with an input or another output: not supported

    @property
    def num_fwd_outputs(self) -> int:
        return self.plan.num_values if self.packing is None else sum(map(width, self.packing.values))

    @property
    def num_primals(self) -> int:
        """Placeholders before the tangents."""
        return self.plan.num_inputs if self.packing is None else sum(map(width, self.packing.inputs))


def trace_program(program: Program, inputs: Sequence[Any], *, decompositions: Mapping[OpOverload, Callable] | None = None,
                  gradients: bool | None = None, turns_on: bool = False, spends: bool = False) -> Joint:
    """Traces `program(*inputs) -> flat sequence`.  Gradients are traced where an input requires them and grad mode is on, or the program
    turns it on.  `spends`: it takes gradients itself, after which those of some results cannot be taken again."""
    at_start = torch.is_grad_enabled() if gradients is None else gradients
    examples = [v for v in inputs if isinstance(v, torch.Tensor)]
    recording = at_start or turns_on
    wanted = recording and any(t.requires_grad for t in examples)
    recording = recording and (wanted or spends)
    world = TraceWorld(_env_of(inputs), decompositions)
    leaves = [_add_input(world, value, f"primals_{i}") for i, value in enumerate(inputs)]
    made = [isinstance(v, torch.Tensor) and v.requires_grad and not v.is_leaf for v in inputs]      # asked of a view, its trace may be asked too
    with tracing(world), torch.set_grad_enabled(recording):
        with timed("trace_forward"):
            values = [_as_made(world, leaf) if is_made and torch.is_grad_enabled() else leaf for leaf, is_made in zip(leaves, made)]
            with torch.set_grad_enabled(recording and at_start):
                outcome = Outcome(world, program, values)
        if spends:
            put_back_flags(leaves, inputs)
            _mark_spent(outcome, wanted)
        tangents: list[Tangent] = []
        grads: list[Any] = []
        if wanted and any(v.differentiable for v in outcome.values):
            with timed("trace_backward"):
                try:
                    tangents, grads = _differentiate(world, outcome, leaves)
                except UNTRACEABLE as error:
                    raise Undifferentiable(str(error)) from error
                except RuntimeError as error:       # eager raises it too, but when the gradient is asked for, and for that output alone
                    if isinstance(error, FiresteelError):
                        raise
                    raise Undifferentiable(str(error)) from error
    return _finish(world, outcome, tangents, grads, leaves)


def _add_input(world: TraceWorld, value: Any, name: str) -> Any:
    """A placeholder, or one for each part of a wrapper."""
    pack = pack_of(value)
    if pack is None:
        return world.add_input(value, name)
    leaf = pack.build(iter([world.add_input(part, f"{name}_{k}") for k, part in enumerate(parts_of(value))]))
    return leaf.requires_grad_(value.requires_grad)


def _env_of(inputs: Sequence[Any]) -> Any:
    world = find_world([part for v in inputs if isinstance(v, torch.Tensor) for part in parts_of(v)])
    if world is not None:
        return world.env
    return next((v.node.env for v in inputs if isinstance(v, _SYMBOLIC)), None)


def _as_made(world: TraceWorld, leaf: Any) -> Any:
    """The input as the program sees it: what is a result of an operator for the caller must not be a leaf here either, since only
    leaves refuse in-place writes.  The copy that makes it one is not recorded."""
    copy = leaf.clone()
    for made, part in zip(parts_of(copy), parts_of(leaf)):
        node, made.record = made.record.node, part.record
        world.graph.erase_node(node)
    return copy


def put_back_flags(leaves: Sequence[Any], inputs: Sequence[Any]) -> None:
    """A program may set requires_grad of its inputs; the caller's are as they came, when it is called."""
    for leaf, given in zip(leaves, inputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad != given.requires_grad:
            leaf.requires_grad_(given.requires_grad)


def _mark_spent(outcome: Outcome, wanted: bool) -> None:
    """Tries every result on its own.  What the tries record is read by nobody.  `wanted`: do inputs require gradients?  Where not, what still
    has a history got it from leaves that the program made."""
    for k, value in enumerate(outcome.values):
        if value.differentiable:
            try:
                engine.run_backward((value.tensor,), (torch.ones_like(value.tensor),), True, False, (), True, accumulate_grad=True)
            except RuntimeError as error:
                if not is_spent(error):
                    raise
                outcome.plan.spent[k] = f"{error}"
            if not wanted:
                outcome.plan.spent.setdefault(k, "")
            if k in outcome.plan.spent:
                value.tensor = None


def _differentiate(world: TraceWorld, outcome: Outcome, leaves: list[Any]) -> tuple[list[Tangent], list[Any]]:
    """Makes the tangents and records torch's own backward."""
    places = [k for k, value in enumerate(outcome.values) if value.differentiable]
    first_call = next(node for node in world.graph.nodes if node.op != "placeholder")
    tangents, arriving = [], []
    with world.graph.inserting_before(first_call):
        for number, k in enumerate(places):
            tangent, made = _add_tangent(world, outcome.values[k].tensor, k, f"tangents_{number}")
            tangents.append(tangent)
            arriving.append(made)
    wanted = [leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in leaves]
    draws, last = world.draws, next(iter(reversed(world.graph.nodes)))
    general = world.env.in_general() if world.env is not None else nullcontext()
    with general, torch._C._DisableAutocast():       # a backward runs outside of the forward's autocast
        found = iter(engine_gradients([outcome.values[k].tensor for k in places], [leaf for leaf in wanted if leaf is not None], arriving))
    if world.draws > draws:
        _mark_late(last)
    return tangents, [None if leaf is None else next(found) for leaf in wanted]


def _mark_late(last: Node) -> None:
    """Marks what follows: random numbers that a backward draws, it draws when it runs, even where they depend on no gradient."""
    while (last := last.next).op != "root":
        last.meta["late"] = True


def _add_tangent(world: TraceWorld, output: Any, value: int, name: str) -> tuple[Tangent, Any]:
    """What is expected for one output, and its placeholder: for a wrapper a wrapper of the same kind."""
    pack = pack_of(output)
    if pack is None:
        spec, strides = tangent_spec(output.spec)
        return Tangent(value, strides), world.add_input(world.make(spec), name)
    specs = [tangent_spec(part.spec) for part in parts_of(output)]
    parts = [world.add_input(world.make(spec), f"{name}_{k}") for k, (spec, _) in enumerate(specs)]
    return Tangent(value, None, pack, tuple(strides for _, strides in specs)), replace(pack, strides=None).build(iter(parts))


def engine_gradients(outputs: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any], create_graph: bool = False) -> Sequence[Any]:
    """torch.autograd.grad with allow_unused, straight from the engine: the public function first imports a symbolic algebra
    package (2 s) in order to compare the shapes of outputs and tangents, which agree here."""
    if not inputs:
        return ()
    return engine.run_backward(tuple(outputs), tuple(tangents), create_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


def tangent_spec(output: Spec) -> tuple[Spec, tuple[int, ...] | None]:
    """The gradient of an output is expected with the output's strides, if these cover memory without holes, else contiguous.
    Where strides hold symbols, contiguous is all that the runtime can check: then the second is None."""
    contiguous = contiguous_strides(output.shape)
    strides = output.strides
    fixed = all(type(s) is int for s in strides)
    if strides != contiguous and not (fixed and is_dense(output)):
        strides = contiguous
    return output._replace(strides=strides, offset=0), strides if all(type(s) is int for s in strides) else None      # type: ignore[return-value]


def _finish(world: TraceWorld, outcome: Outcome, tangents: list[Tangent], grads: list[Any], leaves: list[Any]) -> Joint:
    nodes = [node for value in outcome.values for node in value.nodes]
    nodes += [None if part is None else world.to_node(part) for g in grads for part in parts_of(g)]
    output = world.graph.output(tuple(nodes))
    output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in nodes)
    packing = Packing.of(leaves, [value.made for value in outcome.values], grads)
    placeholders = [node for node in world.graph.nodes if node.op == "placeholder"]
    for write in outcome.plan.writes:
        for place in places_of(packing.inputs if packing is not None else None, write.input):
            placeholders[place].meta["mutated"] = True
    quiet = [k for k, v in enumerate(outcome.values) if v.quiet and k in outcome.plan.recorded_values()]
    world.forget_history()
    return Joint(make_module(world.graph, world.constants), outcome.plan, tangents, [g is not None for g in grads] or [False] * len(leaves),
                 quiet, [outcome.values[t.value].origin for t in tangents], [node.meta["val"] for node in placeholders], outcome.reshaped,
                 packing, outcome.aliases)


# ---------------------------------------------------------------- what a program did

@dataclass
class Value:
    """One output of the forward, by its nodes: one, or one for each part of a wrapper.  `tensor` is what autograd knows of it (None for sizes
    and for unseen bases), `made` the wrapper."""
    nodes: list[Any]
    tensor: Any = None
    origin: Any = None
    made: Any = None

    @property
    def differentiable(self) -> bool:
        return self.tensor is not None and is_tracked(self.tensor)

    @property
    def quiet(self) -> bool:
        """Could it carry a gradient, and does not?  A base that the program does not show never does."""
        seen = self.tensor if self.tensor is not None or not isinstance(self.nodes[0], Node) else self.nodes[0].meta["val"]
        untracked = isinstance(seen, torch.Tensor) and (self.tensor is None or not is_tracked(seen))
        return untracked and (seen.is_floating_point() or seen.is_complex())


def is_tracked(tensor: torch.Tensor) -> bool:
    """Has autograd recorded how the tensor came about?  A view that was taken under no_grad requires grad but has no history."""
    return tensor.requires_grad and tensor.grad_fn is not None


class Outcome:
    """Runs a program inside a trace and sorts what it returned and wrote by the rules of alias.py.  A builder: complete once made."""

    def __init__(self, world: TraceWorld, program: Program, inputs: Sequence[Any]):
        self.world, self.inputs = world, inputs
        self.values: list[Value] = []
        self.views: list[View] = []
        self.reshaped: list[int] = []
        self.aliases = ""
        tensors = {i: t for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        before = {i: ([(p.record.cell, p.record.cell.version) for p in parts_of(t)], t.grad_fn, t._version) for i, t in tensors.items()}
        self.owner: dict[Cell, int] = {cell: i for i, (cells, *_) in before.items() for cell, _ in cells}
        outputs = list(program(*inputs))
        self.plan = Plan(len(inputs), [], [w for i, t in tensors.items() if (w := self._write(i, t, *before[i])) is not None], self.views)
        self.made: dict[int, Result] = {id(t): Input(i) for i, t in reversed(tensors.items())}
        self.bases: dict[Cell, tuple[int, AbstractTensor | None]] = {}
        self.sizes: dict[Expr, int] = {}
        self.members = self._members(outputs)
        self.plan.results = [self._result(output, place) for place, output in enumerate(outputs)]
        self.plan.num_values = len(self.values)
        self.plan.prepare()

    # ------------------------------------------------------------ writes (rule 7)

    def _write(self, index: int, tensor: torch.Tensor, cells: list[tuple[Cell, int]], history: Any, counter: int) -> Write | None:
        parts = parts_of(tensor)
        if len(parts) != len(cells) or any(p.record.cell is not cell or p.record.steps for p, (cell, _) in zip(parts, cells)):
            self.reshaped.append(index)
        if all(cell.version == version for cell, version in cells):
            return None
        recorded = tensor.requires_grad and tensor.grad_fn is not history
        how = "grad" if recorded else "no_grad" if tensor._version != counter else "data"
        return Write(index, self._add_tensor(tensor, tensor if recorded else None, Origin("input", index)), how)

    # ------------------------------------------------------------ outputs (rules 1 to 6)

    def _members(self, outputs: list[Any]) -> dict[Cell, list[tuple[int, AbstractTensor]]]:
        """The outputs that lie in each storage which the program made, each once, with their places."""
        members: dict[Cell, dict[int, tuple[int, AbstractTensor]]] = {}
        for place, output in enumerate(outputs):
            for part in parts_of(output):
                if type(part) is AbstractTensor and part.record.cell not in self.owner:
                    members.setdefault(part.record.cell, {}).setdefault(id(part), (place, part))
        return {cell: list(group.values()) for cell, group in members.items()}

    def _result(self, output: Any, place: int) -> Result:
        if type(output) in _SYMBOLIC:
            size = from_sym(output)
            return Fresh(self._size(size)) if type(size) is Expr else Constant(size)
        if not isinstance(output, torch.Tensor) or type(output) is not AbstractTensor and not is_wrapper(output):
            return Constant(output)
        if id(output) not in self.made:
            find: Any = self._wrapper_result if is_wrapper(output) else self._tensor_result
            self.made[id(output)] = find(output, Origin("output", place))
        return self.made[id(output)]

    def _wrapper_result(self, output: Any, origin: Origin) -> Result:
        """A wrapper of fresh tensors.  Views of wrappers are not made again (rule 12)."""
        cells = [part.record.cell for part in parts_of(output)]
        if len(set(cells)) != len(cells) or any(cell in self.owner or len(self.members[cell]) > 1 for cell in cells):
            self.aliases = f"output {origin.place}, a {type(output).__name__}, shares memory with an input or another output"
        return Fresh(self._add_tensor(output, output, origin))

    def _tensor_result(self, output: AbstractTensor, origin: Origin) -> Result:
        cell = output.record.cell
        if cell in self.owner:
            index = self.owner[cell]
            if is_wrapper(self.inputs[index]):
                self.aliases = f"output {origin.place} shares memory with a part of input {index}"
            return self._replay("i", index, self.inputs[index], output, output.record.steps, origin)
        if len(self.members[cell]) == 1 and not (output.requires_grad and output._is_view()):
            return Fresh(self._add(self.world.to_node(output), output, origin))
        value, base = self._base(cell)
        if output is base:
            return Fresh(value)
        inner = base.record.steps if base is not None else ()
        if output.record.steps[:len(inner)] != inner:       # not reached from the base: the graph computes it apart
            return Fresh(self._add(self.world.to_node(output), output, origin))
        return self._replay("v", value, base, output, output.record.steps[len(inner):], origin)

    def _base(self, cell: Cell) -> tuple[int, AbstractTensor | None]:
        """The tensor that the outputs in a storage are made from, as (forward value, what autograd knows of it)."""
        if cell not in self.bases:
            place, base = self._find_base(cell)
            node = cell.node if base is None else self.world.to_node(base)
            self.bases[cell] = self._add(node, base, place), base
        return self.bases[cell]

    def _find_base(self, cell: Cell) -> tuple[Origin | None, Any]:
        for place, t in self.members[cell]:
            if t.requires_grad:
                return (Origin("base", place), t._base) if t._is_view() else (Origin("output", place), t)
        return next(((Origin("output", place), t) for place, t in self.members[cell] if not t.record.steps), (None, None))

    def _replay(self, kind: str, place: int, base: AbstractTensor | None, output: AbstractTensor, steps: Sequence[Step], origin: Origin) -> Replay:
        calls = [self._call(step) for step in steps]
        if not calls or not output._is_view():      # what detach gives shares memory and is no view
            calls.append((_alias if output._is_view() else torch.Tensor.detach, (), {}))
        how = _history(base, output)
        value = self._add(self.world.to_node(output), output, origin) if how == "own" else -1
        text = "".join(f".{getattr(op, '__name__', '').split('.')[0].strip('_')}({', '.join(map(str, args))})" for op, args, _ in calls)
        self.views.append(View(_maker(kind, place, calls), how, value, f"{kind}[{place}]{text}"))
        return Replay(len(self.views) - 1)

    def _call(self, step: Step) -> tuple[Callable, tuple, dict]:
        """A view operator with its arguments; sizes that are symbols become places among the forward's values."""
        if step.op is aten.as_strided.default:
            size, stride, offset = step.args
            return _strided, self._at((list(size), list(stride), offset - step.before.offset)), {}
        return step.op, self._at(step.args), {k: self._at(v) for k, v in step.kwargs.items()}

    def _at(self, value: Any) -> Any:
        if type(value) is Expr:
            return At(self._size(value))
        return type(value)(self._at(v) for v in value) if isinstance(value, (list, tuple)) else value

    # ------------------------------------------------------------ values

    def _size(self, size: Expr) -> int:
        if size not in self.sizes:
            self.values.append(Value([self.world.size_node(size)]))
            self.sizes[size] = len(self.values) - 1
        return self.sizes[size]

    def _add(self, node: Node, tensor: AbstractTensor | None, origin: Origin | None) -> int:
        self.values.append(Value([self._own(node)], tensor, origin))
        return len(self.values) - 1

    def _add_tensor(self, made: torch.Tensor, tensor: torch.Tensor | None, origin: Origin | None) -> int:
        """As `_add`, for a tensor of any kind."""
        nodes: list[Any] = []
        for part in parts_of(made):
            node = self._own(self.world.to_node(part))
            nodes.append(self.world.emit(aten.clone.default, node) if node in nodes else node)
        self.values.append(Value(nodes, tensor, origin, made))
        return len(self.values) - 1

    def _own(self, node: Node) -> Node:
        """The node, or a copy where it is an input or returned already."""
        if node.op in ("placeholder", "get_attr") or any(node is other for value in self.values for other in value.nodes):
            return self.world.emit(aten.clone.default, node)
        return node


# ---------------------------------------------------------------- making views again

def _history(base: AbstractTensor | None, output: AbstractTensor) -> str:
    """Which of the ways of rule 6 gives a view its history."""
    if is_tracked(output):
        if not output._is_view() or output._base is not base:
            return "own"
        return "recorded" if _leads_to(output.grad_fn, base) else "quiet"      # behind a view taken under no_grad
    if output.requires_grad:
        return "quiet"
    return "detached" if base is not None and base.requires_grad else "recorded"


def _leads_to(history: Any, base: Any) -> bool:
    """Does a view's history go back to its base?"""
    wanted = base.grad_fn
    while history is not None:
        if history is wanted or getattr(history, "variable", None) is base:
            return True
        history = history.next_functions[0][0] if history.next_functions else None
    return False


@dataclass(frozen=True)
class At:
    """An argument that is read from the forward's values at run time."""
    value: int

    def __str__(self) -> str:
        return f"v[{self.value}]"


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return aten.alias.default(tensor)


def _strided(tensor: torch.Tensor, size: Any, stride: Any, shift: Any) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + shift)


def _maker(kind: str, place: int, calls: list[tuple[Callable, tuple, dict]]) -> Callable[..., torch.Tensor]:
    """(inputs, values) -> the view.  Arguments without sizes are used as they are."""
    static = not any(_has_at(args) or _has_at(tuple(kwargs.values())) for _, args, kwargs in calls)

    def make(inputs: Sequence[Any], values: Sequence[Any], detached: bool = False) -> torch.Tensor:
        tensor = inputs[place] if kind == "i" else values[place]
        if detached and calls[-1][0] is not torch.Tensor.detach:
            tensor = tensor.detach()
        for op, args, kwargs in calls:
            tensor = op(tensor, *args, **kwargs) if static else op(tensor, *_fill(args, values), **{k: _fill(v, values) for k, v in kwargs.items()})
        return tensor
    return make


def _has_at(value: Any) -> bool:
    return type(value) is At or isinstance(value, (list, tuple)) and any(map(_has_at, value))


def _fill(value: Any, values: Sequence[Any]) -> Any:
    if type(value) is At:
        return values[value.value]
    return type(value)(_fill(v, values) for v in value) if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------- gradients as a program

def gradient_program(program: Program, joint: Joint, wanted: Sequence[int], present: Sequence[int]) -> Program:
    """The program (inputs, tangents) -> gradients of the inputs `wanted`, itself differentiable; it runs on abstract and on real
    tensors.  `present` says which of the tangents, in the order of Joint.tangents, arrive; torch's create_graph does the rest."""
    count, written = joint.plan.num_inputs, {w.input for w in joint.plan.writes}
    origins = [joint.origins[k] for k in present]

    def gradients(*args: Any) -> list[Any]:
        inputs, tangents = args[:count], args[count:]
        with torch.enable_grad():
            passed = [_unwritten(t) if i in written else t for i, t in enumerate(inputs)]
            outputs = list(program(*passed))
            starts = [origin.find(passed, outputs) for origin in origins]
            return list(engine_gradients(starts, [inputs[i] for i in wanted], tangents, create_graph=True))
    return gradients


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the program may overwrite: the caller's tensor was written by the first forward already."""
    if is_wrapper(tensor):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
