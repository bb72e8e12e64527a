"""Tracing: a function runs on abstract tensors, and what arrives at dispatch is recorded as a functional ATen graph.

A `TraceWorld` makes a placeholder for each input and, inside of `tracing`, a node for each operator.  C++ autograd is at work above the
recorder, so the function may ask for gradients: the backward's operators are recorded in the same graph.  In-place operators are recorded as
their functional twins (`functional.py`); a write to an input changes what `to_node` gives for it.

    world = TraceWorld(env)
    x = world.add_input(example)
    with tracing(world):
        y = torch.relu(x @ x)
    world.to_node(y)            # relu(mm(arg0_1, arg0_1))

What always holds
 1. Every call_function node is an OpOverload without writes, `operator.getitem`, or a function of sizes on sizes.
 2. The Spec of a tensor in the program is the Spec of its node: strides too.
 3. Nodes carry meta: "val" (abstract), "phase" ("forward" or "backward"), "seq_nr" (ties a backward node to the forward node it
    differentiates), and "stack_trace" and "nn_module_stack" of the torch-level node being interpreted (`interpret`).
"""
from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from firesteel import transaction
from firesteel.autograd.recomputations import SavedTensors
from firesteel.autograd.regions import REGION_CALL, checkpointed
from firesteel.config import config
from firesteel.errors import InternalError, Location
from firesteel.graph.abstract import HANDLERS, AbstractWorld, OperatorHandler, call_rule, is_abstract
from firesteel.graph.build import append_call
from firesteel.graph.foreach import is_foreach, run_foreach
from firesteel.graph.functional import Alias, StorageValue, Unfollowable, ViewStep, show, spec_of_node, write
from firesteel.graph.functions import symbolic_form
from firesteel.graph.policies import Asking, by_sizes, policy_of
from firesteel.graph.random_state import operators
from firesteel.graph.record import KINDS, RECORDERS, laid_as_eager, mark_layout, record_composite, record_decomposition, strided_steps
from firesteel.graph.schemas import Facts, facts
from firesteel.graph.sizenodes import size_function, sizes_in
from firesteel.graph.spec import Spec, overlaps_itself, spec_of
from firesteel.graph.tensor import AbstractTensor
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, free_symbols
from firesteel.sym.node import postorder
from firesteel.sym.symint import SYMBOLIC, from_sym, to_symint

aten = torch.ops.aten
_NOTHING: dict[str, Any] = {}
_QUIET: AbstractContextManager[None] = nullcontext()
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "region")


class TraceWorld(AbstractWorld):
    """The world inside a trace: a graph builder.  Mutable while tracing."""

    def __init__(self, env: Any, decompositions: Mapping[OpOverload, Callable] | None = None):
        super().__init__(env if env is not None else ShapeEnv())
        self.graph = Graph()
        self.decompositions = decompositions or {}
        self.origin: Node | None = None         # the torch-level node being interpreted
        self.in_function = False                # is it a node of a user's autograd function?
        self.inputs: list[Any] = []
        self.taken: Sequence[AbstractTensor] = ()       # inputs with an offset into their storage, while gradients are traced
        self.tried: list[Node] = []             # of backwards that only were to raise what they raise: nobody reads their results
        self.verifies = config.verify
        self.constants: dict[str, Any] = {}     # tensors, and generators of random numbers
        self._constant_nodes: dict[int, tuple[Node, Any]] = {}
        self._generators: dict[int, Node] = {}      # _cdata of what stands for a generator here -> its placeholder; the object itself does not last
        self._sizes: dict[Expr, Any] = {}       # a node, a number, or where to read it: (operator, input node, dimension)
        self._origins: dict[int, dict[str, Any]] = {}   # seq_nr -> meta of the forward node
        self._carried: dict[Node, dict[str, Any]] = {}
        self._asserted = 0                      # how many of the environment's conditions have been looked at
        self._waiting: list[Any] = []           # those whose symbols no node has given yet
        self._asking: dict[str, AbstractContextManager[Any]] = {}       # name of a selective region -> who asks its policy

    # ------------------------------------------------------------ nodes

    def node(self, op: Any, args: tuple, kwargs: dict[str, Any], value: Any) -> Node:
        """Appends a call; `value` is its abstract result."""
        if self.origin is not None and "region" in self.origin.meta and type(value) is AbstractTensor:
            made = by_sizes(op, kwargs, value.spec)
            if made is not None:
                op, args, kwargs = made[0], tuple(map(self.to_node, made[1])), made[2]
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
            elif type(value) in SYMBOLIC:
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
            if self.in_function and self.origin is not None and "stack_trace" in self.origin.meta:
                meta["stack_trace"] = self.origin.meta["stack_trace"]       # the user's own line, not that of the call that it differentiates
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

    def asking(self, policies: tuple[tuple[str, Callable[[], Any]], ...]) -> AbstractContextManager[Any]:
        """Inside, the policies of the selective regions around a node are asked, where gradients are recorded, as in eager.  A region has
        one policy from its first operator to its last."""
        stack = ExitStack()
        if not torch.is_grad_enabled():
            return stack
        for name, context_fn in policies:
            if name not in self._asking:
                policy = policy_of(context_fn)
                self._asking[name] = Asking(self.graph, policy) if policy is not None else nullcontext()
            stack.enter_context(self._asking[name])
        return stack

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
        if kind in SYMBOLIC:
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
        unbound = any(s not in self._sizes for s in free_symbols(size))
        found = self.env.in_terms_of(size, self._sizes) if unbound else None
        if found is not None:
            return self._raw_size(found)     # as it is: simplified it would be the same again
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
        elif type(value) in SYMBOLIC and type(expr := from_sym(value)) is Expr:
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
        tensor.value = getattr(like, "given", None)
        tensor.record = Alias(StorageValue(node, spec, number), (), node, 0)
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
        the graph and its nodes' references into the user's program would never be freed."""
        for node in self.graph.nodes:
            node.meta["val"] = pytree.tree_map_only(AbstractTensor, self._leaf, node.meta.get("val"))

    def _leaf(self, value: AbstractTensor) -> torch.Tensor:
        if value._base is None and value.grad_fn is None:     # to ask a view for its history may raise
            return value
        return self.make(value.spec).requires_grad_(value.requires_grad)

    # ------------------------------------------------------------ operators

    def run(self, op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled():
            raise Unfollowable("inference_inside", "what is made under inference mode has neither versions nor a history")
        return super().run(op, args, kwargs)

    def _find_way(self, fact: Facts) -> OperatorHandler:
        """How an operator is recorded.  A decomposition may decline by returning NotImplemented."""
        decomposition = self.decompositions.get(fact.op)
        if decomposition is not None:
            return partial(record_decomposition, decomposition)
        return self._plain_way(fact)

    def _plain_way(self, fact: Facts) -> OperatorHandler:
        if fact.composite:
            return record_composite
        if is_foreach(fact):
            return run_foreach
        return RECORDERS.get(fact.op) or HANDLERS.get(fact.op) or KINDS[fact.kind]

    def record_pure(self, fact: Facts, args: tuple, kwargs: dict[str, Any]) -> Any:
        if fact.random:
            args = laid_as_eager(self, args)
        specs = call_rule(fact, args, kwargs)
        nodes = tuple([self.to_node(a) for a in args])
        node_kwargs = {k: self.to_node(v) for k, v in kwargs.items()} if kwargs else {}
        if type(specs) is Spec:
            result = self.make(specs)
            node = self.node(fact.op, nodes, node_kwargs, result)
            result.record = Alias(StorageValue(node, specs), (), node, 0)
            if self.verifies:
                mark_layout(node, args, nodes)
            return result
        result = self.from_specs(specs)
        node = self.node(fact.op, nodes, node_kwargs, result)
        if self.verifies:
            mark_layout(node, args, nodes)
        if isinstance(result, (list, tuple)):
            self._unpack(node, result)
        elif type(result) in SYMBOLIC:
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
                result.record = Alias(StorageValue(item, result.spec), (), item, 0)
            elif isinstance(result, (list, tuple)):
                self._unpack(item, result)
            elif type(result) in SYMBOLIC:
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
        place = _written_place(target)
        if overlapping(place, target):
            raise Unfollowable("overlapping_writes", "a self-overlapping tensor is written: each of its elements would be a value of its own")
        write(place, node, self.emit)
        target.value = None


def overlapping(place: Alias, target: AbstractTensor) -> bool:
    """Is the storage seen, on the way to what is written, by a self-overlapping tensor?"""
    if place.cell.version == 0 and place.cell.source is not None and overlaps_itself(place.cell.spec):
        return True
    shown = [*(step.before for step in place.steps[1:]), target.spec]
    return any(step.op in OVERLAPPING and overlaps_itself(spec) for step, spec in zip(place.steps, shown))


OVERLAPPING = frozenset({aten.as_strided.default, aten.unfold.default})     # expand has its own refusal


def _written_place(target: AbstractTensor) -> Alias:
    """Where a write to the tensor goes.  Behind an expand, several elements of a view are one of the storage: there the part that
    is written is found by its strides, which must not overlap themselves."""
    place, spec = target.record, target.spec
    if not any(step.op is aten.expand.default and not _keeps_shape(step) for step in place.steps):
        return place
    if any(type(s) is int and s == 0 and n != 1 for n, s in zip(spec.shape, spec.strides)):
        return place        # refused by the row of expand
    return Alias(place.cell, strided_steps(place, spec), place.node, -1)


def _keeps_shape(step: ViewStep) -> bool:
    shape = step.before.shape
    return len(step.args[0]) == len(shape) and all(type(n) is int and n == -1 or n is size or n == size for n, size in zip(step.args[0], shape))


# ---------------------------------------------------------------- the function

class _Active(threading.local):
    """The traces at work in this thread, the innermost last."""

    def __init__(self) -> None:
        self.worlds: list[TraceWorld] = []


_active = _Active()
transaction.keep("traces", _active)


def is_recording() -> bool:
    """Is a trace at work?"""
    return bool(_active.worlds)


@transaction.context
def tracing(world: TraceWorld) -> Iterator[None]:
    _active.worlds.append(world)
    locate, world.env.locate = world.env.locate, world.location
    try:
        with torch.autograd.set_multithreading_enabled(False), world.active():
            yield
    finally:
        _active.worlds.pop()
        world.env.locate = locate


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
            policies = node.meta.get("policies")
            with world.asking(policies) if world is not None and policies and node.target is not REGION_CALL else _QUIET:
                values[node] = _RUN[node.op](gm, node.target, *torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__))
    raise InternalError("a graph without an output node")


def _call(gm: GraphModule, target: Any, args: tuple, kwargs: dict) -> Any:
    if target is REGION_CALL:       # interpreted where nothing is computed yet, so that its nodes give their meta, else torch's checkpoint
        return interpret(*args) if is_abstract() else checkpointed(*args)
    if isinstance(target, SavedTensors):
        return run_again(target, *args)
    if hasattr(target, "firesteel_function"):         # a user's autograd function
        return target.firesteel_function(run_function).apply(*args)
    symbols = bool(_active.worlds) and bool(_active.worlds[-1].env.symbols)
    return symbolic_form(target, symbols)(*args, **kwargs)


def run_function(body: GraphModule, *args: Any) -> Any:
    """The forward or backward of a user's autograd function: interpreted where it is traced, so that its nodes give their lines."""
    world = _active.worlds[-1] if _active.worlds else None
    if world is None:
        return body(*args)
    before, world.in_function = (world.origin, world.in_function), True
    try:
        return interpret(body, *args)
    finally:
        world.origin, world.in_function = before


def run_again(saving: SavedTensors, args: Sequence[Any], states: Sequence[Any]) -> Any:
    """The recomputation of a region that eager checkpointed: interpreted where nothing is computed yet."""
    random = operators()
    return saving(args, states, interpret, random.swap, random.put_back) if is_abstract() else saving(args, states)


_RUN: dict[str, Callable[..., Any]] = {
    "call_function": _call,
    "call_method": lambda gm, target, args, kwargs: symbolic_form(getattr(args[0], target))(*args[1:], **kwargs),
    "call_module": lambda gm, target, args, kwargs: operator.attrgetter(target)(gm)(*args, **kwargs),
    "get_attr": lambda gm, target, args, kwargs: operator.attrgetter(target)(gm),
}
