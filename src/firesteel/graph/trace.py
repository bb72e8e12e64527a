"""trace: runs a function on abstract tensors and records what arrives at dispatch as a functional ATen graph.

`trace(fn, inputs)` calls `fn` with fresh abstract tensors like `inputs`.  C++ autograd is at work above the recorder, so `fn` may
call `torch.autograd.grad`: the backward's operators are recorded in the same graph.  In-place operators are recorded as their
functional twins (`functional.py`); writes to inputs are reported, not recorded.

    def joint(x, w):
        y = torch.relu(x @ w).sum()
        return [y, *torch.autograd.grad(y, [w])]
    traced = trace(joint, [x, w])
    print(traced.gm.code)

What always holds
 1. Every call_function node is an OpOverload without writes, `operator.getitem`, or a function of sizes on sizes.
 2. The Spec of a tensor in the program is the Spec of the node that shows it: strides too.
 3. Nodes carry meta: "val" (abstract), "phase" ("forward" or "backward"), "seq_nr" (ties a backward node to the forward node it
    differentiates), and "stack_trace" and "nn_module_stack" of the torch-level node being interpreted (`interpret`).
"""
from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from firesteel.errors import InternalError, Location
from firesteel.graph.abstract import HANDLERS, AbstractWorld, Way, call_rule
from firesteel.graph.build import append_call, make_module
from firesteel.graph.foreach import is_foreach, run_foreach
from firesteel.graph.functional import Cell, Place, Step, Unfollowable, show, spec_of_node, write
from firesteel.graph.functions import symbolic_form
from firesteel.graph.ops import EMPTY_VIEWS, Facts, facts
from firesteel.graph.record import KINDS, RECORDERS, record_composite, record_decomposition
from firesteel.graph.sizenodes import size_function, sizes_in
from firesteel.graph.spec import Spec, spec_of
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, free_symbols
from firesteel.sym.node import postorder
from firesteel.sym.symint import from_sym, to_symint

aten = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NOTHING: dict[str, Any] = {}
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "region")


@dataclass
class Mutation:
    """A written input.  `value` is the node of its final value (None where only its metadata changed); `spec` its final Spec."""
    input: int
    value: Node | None
    metadata: bool
    spec: Spec


@dataclass
class Result:
    """An output of the traced function: which input's storage it shows (None: its own), and by which views."""
    tensor: Any
    source: int | None = None
    steps: tuple[Step, ...] = ()
    cell: Any = None


@dataclass
class Traced:
    """The graph, whose outputs are those of the function and then the final values of `mutations`, in order."""
    gm: GraphModule
    results: list[Result]
    mutations: list[Mutation] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)      # the abstract values that the function was called with


class TraceWorld(AbstractWorld):
    """The world inside a trace: a graph builder.  Mutable while tracing; `fn` may ask it through `current_trace()`."""

    def __init__(self, env: Any, decompositions: Mapping[OpOverload, Callable] | None = None):
        super().__init__(env if env is not None else ShapeEnv())
        self.graph = Graph()
        self.decompositions = decompositions or {}
        self.origin: Node | None = None         # the torch-level node being interpreted
        self.inputs: list[Any] = []
        self.constants: dict[str, Any] = {}     # tensors, and generators of random numbers
        self._constant_nodes: dict[int, tuple[Node, Any]] = {}
        self._generators: dict[int, Node] = {}      # _cdata of what stands for a generator here -> its placeholder; the object itself does not last
        self._sizes: dict[Expr, Any] = {}       # a node, a number, or where to read it: (operator, input node, dimension)
        self._origins: dict[int, dict[str, Any]] = {}   # seq_nr -> meta of the forward node
        self._carried: dict[Node, dict[str, Any]] = {}
        self._asserted = 0                      # how many of the environment's conditions have been looked at
        self._waiting: list[Any] = []           # those whose symbols no node has given yet

    # ------------------------------------------------------------ nodes

    def node(self, op: Any, args: tuple, kwargs: dict[str, Any], value: Any) -> Node:
        """Appends a call; `value` is its abstract result."""
        node = append_call(self.graph, op, args, kwargs)
        meta = node.meta
        self._describe(meta)
        meta["val"] = value
        if type(value) is AbstractTensor:
            value.born = node
        if self.env.has_unbacked:
            self._bind(node, value)
        if meta["phase"] == "forward" and any(n.meta["phase"] == "backward" for n in node._input_nodes):
            meta["phase"] = "backward"      # made after the gradients, from them
        return node

    def location(self) -> Location | None:
        """The user's line that the node being interpreted came from."""
        backward = torch._C._current_autograd_node()
        meta = self.origin.meta if self.origin is not None else _NOTHING
        if backward is not None:
            meta = self._origins.get(backward._sequence_nr(), _NOTHING)
        text = meta.get("stack_trace")
        lines = _TRACE_LINE.findall(text or "")
        return Location(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else None

    def _bind(self, node: Node, value: Any) -> None:
        """Notes the unbacked symbols that this node is the first to give, and checks the conditions that can be checked now."""
        env = self.env
        found = [s for s in free_symbols(*sizes_in(value)) if s not in self._sizes and env.symbols[s].hint is None]
        if found:
            node.meta["unbacked"] = found       # such a node is neither merged with an equal one nor run twice
            if type(value) is AbstractTensor:
                self._learn_sizes(node, value.spec)
            elif type(value) in _SYMBOLIC:
                self._sizes[from_sym(value)] = node     # type: ignore[index]  # the type says that it carries an Expr
        if found or len(env.asserts) > self._asserted:
            self._check()

    def _check(self) -> None:
        """Nodes for the conditions whose symbols are all known."""
        env = self.env
        pending = self._waiting + env.asserts[self._asserted:]
        self._asserted, self._waiting = len(env.asserts), []
        for guard in pending:
            if all(s in self._sizes for s in free_symbols(guard.expr) if env.symbols[s].hint is None):
                condition = self._raw_size(guard.expr)
                node = append_call(self.graph, aten._assert_scalar.default, (condition, guard.why), {})
                self._describe(node.meta)
                node.meta.update(val=None, phase=condition.meta["phase"] if isinstance(condition, Node) else "forward")
            else:
                self._waiting.append(guard)

    def _raw_size(self, size: Expr) -> Any:
        """The node of a condition as it was stated: what has been concluded from it since must not decide it."""
        if size in self._sizes or size.op in ("const", "symbol"):
            return self.size_node(size)
        return self._append_size(size_function(size), tuple([self._raw_size(a) for a in size.args]), size)

    def _append_size(self, op: Any, args: tuple, size: Expr) -> Node:
        """Appends a call that gives a size."""
        node = append_call(self.graph, op, args, {})
        backward = any(n.meta["phase"] == "backward" for n in node._input_nodes)
        node.meta.update(val=to_symint(size, self.env), phase="backward" if backward else "forward")
        return node

    def _describe(self, meta: dict[str, Any]) -> None:
        """Where in the program the node comes from.  A backward node carries the meta of the forward node it differentiates."""
        backward = torch._C._current_autograd_node()
        if backward is not None:
            seq = backward._sequence_nr()
            meta.update(self._origins.get(seq, _NOTHING))
            meta["phase"], meta["seq_nr"] = "backward", seq
            return
        seq = torch.autograd._get_sequence_nr() - 1
        meta["phase"], meta["seq_nr"] = "forward", seq
        origin = self.origin
        if origin is not None:
            carried = self._carried.get(origin)
            if carried is None:
                carried = self._carried[origin] = {k: origin.meta[k] for k in _CARRIED if k in origin.meta}
            self._origins.setdefault(seq, carried)
            meta.update(carried)

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Appends a call on nodes and sizes whose Spec the rule finds."""
        specs = [spec_of_node(a) if isinstance(a, Node) else a for a in args]
        value = self.from_specs(facts(op).rule(*specs, **kwargs))       # type: ignore[misc]  # what is emitted has a rule
        return self.node(op, tuple(self.to_node(a) for a in args), {k: self.to_node(v) for k, v in kwargs.items()}, value)

    def to_node(self, value: Any) -> Any:
        """An argument as the graph holds it."""
        kind = type(value)
        if kind is AbstractTensor:
            place = value.record
            if place is None:
                raise InternalError(f"{value!r} is not of this trace")
            return place.node if place.version == place.cell.version else show(place, self.emit)
        if kind is list or kind is tuple or isinstance(value, (list, tuple)):
            return [self.to_node(v) for v in value]
        if kind in _SYMBOLIC:
            return self.size_node(from_sym(value))
        if kind is Expr:
            return self.size_node(value)
        if kind is torch.Generator and value._cdata in self._generators:
            return self._generators[value._cdata]
        return self.constant(value) if isinstance(value, (torch.Tensor, torch.Generator)) else value

    def constant(self, value: Any) -> Node:
        """A real tensor of the program, or a generator of random numbers that is no input, as an attribute of the graph's module."""
        is_tensor = isinstance(value, torch.Tensor)
        key = id(value) if is_tensor else value._cdata
        found = self._constant_nodes.get(key)
        if found is None:
            name = f"_{'tensor' if is_tensor else 'generator'}_constant{len(self.constants)}"
            self.constants[name] = value
            node = self.graph.create_node("get_attr", name, (), {})
            node.meta.update(val=self.make(spec_of(value)) if is_tensor else value, phase="forward")
            found = self._constant_nodes[key] = (node, value)
        return found[0]

    # ------------------------------------------------------------ sizes

    def size_node(self, size: Any) -> Any:
        """A size as a node, or as a number where it is known."""
        if type(size) is not Expr:
            return size
        found = self._sizes.get(size)
        if type(found) is tuple:
            op, source, dim = found
            found = self._append_size(op, (source, dim) if dim is not None else (source,), size)
        elif found is None:
            simple = self.env.simplify(size)
            found = self.size_node(simple) if simple is not size else self._compute_size(size)
        self._sizes[size] = found
        return found

    def _compute_size(self, size: Expr) -> Any:
        if size.op == "const":
            return size.attr
        untold = any(s not in self._sizes for s in free_symbols(size))
        told = self.env.in_terms_of(size, self._sizes) if untold else None
        if told is not None:
            return self._raw_size(told)     # as it is: simplified it would be the same again
        if size.op == "symbol":
            raise InternalError(f"the size {size} is not known from any input of the graph")
        for part in postorder(*size.args):      # one by one: sums may be long
            if part.op != "const":
                self.size_node(part)
        return self._append_size(size_function(size), tuple(self.size_node(a) for a in size.args), size)

    def _learn_sizes(self, node: Node, spec: Spec) -> None:
        """Remembers where each symbolic size can be read; a symbol itself is better than an expression."""
        for op, sizes in ((aten.sym_size.int, spec.shape), (aten.sym_stride.int, spec.strides)):
            for dim, size in enumerate(sizes):
                if type(size) is Expr and size not in self._sizes and (size.op == "symbol" or op is aten.sym_size.int):
                    self._sizes[size] = (op, node, dim)
        if type(spec.offset) is Expr and spec.offset.op == "symbol":
            self._sizes.setdefault(spec.offset, (aten.sym_storage_offset.default, node, None))

    # ------------------------------------------------------------ inputs and outputs

    def add_input(self, value: Any, name: str | None = None) -> Any:
        """A placeholder; tensors become fresh leaves of this trace."""
        number = len(self.inputs)
        node = self.graph.placeholder(name or f"arg{number}_1")
        node.meta.update(val=value, phase="forward")
        if isinstance(value, torch.Tensor):
            value = self._input_tensor(value, node, number)
        elif type(value) in _SYMBOLIC and type(expr := from_sym(value)) is Expr:
            self._sizes[expr] = node
            value = to_symint(expr, self.env)
            node.meta["val"] = value
        elif type(value) is torch.Generator:
            value = node.meta["val"] = torch.Generator(value.device)    # nothing is drawn from it
            self._generators[value._cdata] = node
        self.inputs.append(value)
        return value

    def _input_tensor(self, like: torch.Tensor, node: Node, number: int) -> AbstractTensor:
        spec = like.spec if type(like) is AbstractTensor else spec_of(like)
        tensor = self.make(spec)
        tensor.record = Place(Cell(node, spec, number), (), node, 0)
        node.meta["val"] = self.make(spec)
        self._learn_sizes(node, spec)
        if like.requires_grad:
            tensor.requires_grad_(True)
            node.meta["val"].requires_grad_(True)
        for mark in ("_is_param", "_is_buffer"):
            if getattr(like, mark, False):
                setattr(tensor, mark, True)
        return tensor

    def forget_history(self) -> None:
        """The values of nodes become leaves.  With their history, of which C++ owns a part, they hold each other in cycles that no collector sees:
        the graph and what its nodes tell of the user's program would never be freed."""
        for node in self.graph.nodes:
            node.meta["val"] = pytree.tree_map_only(AbstractTensor, self._leaf, node.meta.get("val"))

    def _leaf(self, value: AbstractTensor) -> torch.Tensor:
        if value._base is None and value.grad_fn is None:     # to ask a view for its history may raise
            return value
        return self.make(value.spec).requires_grad_(value.requires_grad)

    def mutations(self) -> list[Mutation]:
        """The inputs written so far (data or metadata)."""
        found = []
        for number, value in enumerate(self.inputs):
            if type(value) is AbstractTensor:
                cell, steps = value.record.cell, value.record.steps
                original = cell.source == number and not any(s.op not in EMPTY_VIEWS for s in steps)
                if cell.version or not original:
                    found.append(Mutation(number, self.to_node(value) if cell.version or cell.source != number else None, not original, value.spec))
        return found

    # ------------------------------------------------------------ operators

    def run(self, op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():
            raise Unfollowable("inference_inside", "what is made under inference mode has neither versions nor a history")
        return super().run(op, args, kwargs)

    def _find_way(self, fact: Facts) -> Way:
        """How an operator is recorded.  A decomposition may decline by returning NotImplemented."""
        decomposition = self.decompositions.get(fact.op)
        if decomposition is not None:
            return partial(record_decomposition, decomposition)
        return self._plain_way(fact)

    def _plain_way(self, fact: Facts) -> Way:
        if fact.composite:
            return record_composite
        if is_foreach(fact):
            return run_foreach
        return RECORDERS.get(fact.op) or HANDLERS.get(fact.op) or KINDS[fact.kind]

    def record_pure(self, fact: Facts, args: tuple, kwargs: dict[str, Any]) -> Any:
        specs = call_rule(fact, args, kwargs)
        nodes = tuple([self.to_node(a) for a in args])
        node_kwargs = {k: self.to_node(v) for k, v in kwargs.items()} if kwargs else {}
        if type(specs) is Spec:
            result = self.make(specs)
            node = self.node(fact.op, nodes, node_kwargs, result)
            result.record = Place(Cell(node, specs), (), node, 0)
            return result
        result = self.from_specs(specs)
        node = self.node(fact.op, nodes, node_kwargs, result)
        if isinstance(result, (list, tuple)):
            self._unpack(node, result)
        elif type(result) in _SYMBOLIC:
            self._sizes[from_sym(result)] = node        # type: ignore[index]  # as in _bind
        return result

    def _unpack(self, node: Node, results: Sequence[Any]) -> list[Node | None]:
        """getitem nodes for the results of a node; tensors among them become cells."""
        items: list[Node | None] = []
        for i, result in enumerate(results):
            if result is None:
                items.append(None)
                continue
            item = self.node(operator.getitem, (node, i), {}, result)
            items.append(item)
            if type(result) is AbstractTensor:
                result.record = Place(Cell(item, result.spec), (), item, 0)
            elif isinstance(result, (list, tuple)):
                self._unpack(item, result)
            elif type(result) in _SYMBOLIC:
                self._sizes[from_sym(result)] = item        # type: ignore[index]  # as in _bind
        return items

    def set_data(self, tensor: AbstractTensor, value: Any) -> None:
        raise Unfollowable("reshaped_inputs", "x.data = y moves a tensor to another storage")

    def assign(self, target: AbstractTensor, node: Node) -> None:
        """Writes a node's value into a tensor, converted to its dtype."""
        spec = spec_of_node(node)
        if spec.dtype is not target.spec.dtype:
            node = self.emit(aten._to_copy.default, node, dtype=target.spec.dtype)
        if type(target) is not AbstractTensor or target.record is None:
            raise NotImplementedError("a constant of the program is written in place")
        write(_written_place(target), node, self.emit)


def _written_place(target: AbstractTensor) -> Place:
    """Where a write to the tensor goes.  Behind an expand, several elements of a view are one of the storage: there the part that
    is written is found by its strides, which must not overlap themselves."""
    place, spec = target.record, target.spec
    if not any(step.op is aten.expand.default and not _keeps_shape(step) for step in place.steps):
        return place
    if any(type(s) is int and s == 0 and n != 1 for n, s in zip(spec.shape, spec.strides)):
        return place        # refused by the row of expand
    step = Step(aten.as_strided.default, (list(spec.shape), list(spec.strides), spec.offset), {}, place.cell.spec)
    return Place(place.cell, (step,), place.node, -1)


def _keeps_shape(step: Step) -> bool:
    shape = step.before.shape
    return len(step.args[0]) == len(shape) and all(type(n) is int and n == -1 or n is size or n == size for n, size in zip(step.args[0], shape))


# ---------------------------------------------------------------- the function

class _Active(threading.local):
    """The traces at work in this thread, the innermost last."""

    def __init__(self) -> None:
        self.worlds: list[TraceWorld] = []


_active = _Active()


def current_trace() -> TraceWorld:
    """The innermost trace at work."""
    return _active.worlds[-1]


@contextmanager
def tracing(world: TraceWorld) -> Iterator[None]:
    _active.worlds.append(world)
    locate, world.env.locate = world.env.locate, world.location
    try:
        with torch.autograd.set_multithreading_enabled(False), world.active():
            yield
    finally:
        _active.worlds.pop()
        world.env.locate = locate


def trace(fn: Callable[..., Any], inputs: Sequence[Any], *, decompositions: Mapping[OpOverload, Callable] | None = None,
          env: Any = None, names: Sequence[str] | None = None) -> Traced:
    """Runs `fn(*inputs)` on fresh abstract inputs and records it.  `fn` returns a flat list or tuple."""
    world = TraceWorld(env if env is not None else _env_of(inputs), decompositions)
    values = [world.add_input(value) for value in inputs]
    with tracing(world):
        outputs = fn(*values)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    mutations = world.mutations()
    results = [_result(o) for o in outputs]
    nodes = [world.to_node(o) for o in outputs]
    world.graph.output(tuple(nodes + [m.value for m in mutations if m.value is not None])).meta["val"] = None
    gm = make_module(world.graph, world.constants)
    return Traced(gm, results, mutations, values)


def _env_of(inputs: Sequence[Any]) -> Any:
    world = find_world([v for v in inputs if isinstance(v, torch.Tensor)])
    return world.env if world is not None else None


def _result(output: Any) -> Result:
    if type(output) is not AbstractTensor or output.record is None:
        return Result(output)
    place = output.record
    return Result(output, place.cell.source, place.steps, place.cell)


def interpret(gm: GraphModule, *args: Any) -> Any:
    """Runs a captured graph inside a trace; what is recorded carries the meta of the node it comes from."""
    world = _active.worlds[-1] if _active.worlds else None
    values: dict[Node, Any] = {}
    supplied = iter(args)
    for node in gm.graph.nodes:
        if world is not None:
            world.origin = node
            world.env.replay(node.meta.get("unbacked"))
        if node.op == "placeholder":
            values[node] = next(supplied)
        elif node.op == "output":
            if world is not None:
                world.origin = None
            return torch.fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            values[node] = _RUN[node.op](gm, node.target, *_fetch(node, values))
    raise InternalError("a graph without an output node")


def _fetch(node: Node, values: dict[Node, Any]) -> tuple[tuple, dict]:
    return torch.fx.node.map_arg(node.args, values.__getitem__), torch.fx.node.map_arg(node.kwargs, values.__getitem__)


def _attribute(gm: GraphModule, path: str) -> Any:
    value: Any = gm
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _call(gm: GraphModule, target: Any, args: tuple, kwargs: dict) -> Any:
    """Where the target is a captured function with a graph of its own, that is interpreted too, so that its nodes give their meta."""
    if type(target) is FunctionType and "inline" in vars(target):
        return vars(target)["inline"](partial(interpret, vars(target)["body"]), *args)
    symbols = bool(_active.worlds) and bool(_active.worlds[-1].env.symbols)
    return symbolic_form(target, symbols)(*args, **kwargs)


_RUN: dict[str, Callable[..., Any]] = {
    "call_function": _call,
    "call_method": lambda gm, target, args, kwargs: symbolic_form(getattr(args[0], target))(*args[1:], **kwargs),
    "call_module": lambda gm, target, args, kwargs: _attribute(gm, target)(*args, **kwargs),
    "get_attr": lambda gm, target, args, kwargs: _attribute(gm, target),
}
