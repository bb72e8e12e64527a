"""Lowering of a whole graph: a walk over its nodes, each given to the row of its operator.

In: a functional ATen GraphModule, each node with meta["val"] (an object with `.spec`, a SymInt, a number, or a tuple of
these).  Out: a Program.  Nodes that nobody reads are left out, unless they draw random numbers or have effects.

    program = lower_graph(gm, example_inputs)
"""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from firesteel.config import config
from firesteel.errors import InternalError
from firesteel.loops.access import step_symbols
from firesteel.loops.ir import Buffer, Extern, Given, Program, ProgramStep, View
from firesteel.loops.lower.build import LOWERINGS, Builder, supported
from firesteel.loops.lower.library import is_view, lower_call
from firesteel.loops.lower.value import Operand, TensorSpec, spec_of
from firesteel.loops.scalars import SHORT, literal
from firesteel.operators import collective
from firesteel.sym.expr import Expr, as_expr, as_size, free_symbols, make, ne, postorder
from firesteel.sym.meaning import meaning
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.targets import on_host


def lower_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Program:
    """The Program of a functional ATen graph."""
    nodes = with_late_waits(list(gm.graph.nodes))
    wanted = needed(nodes)
    walk = Walk(gm, wanted)
    position = 0
    for node in nodes:
        if node.op == "placeholder":
            walk.placeholder(node, example_inputs[position] if position < len(example_inputs) else None, node in wanted)
            position += 1
        elif node in wanted:
            WALK[node.op](walk, node)
    return walk.program(gm.meta.get("boxed", False), gm.meta.get("into", {}))


@functools.cache
def has_effects(target: Any) -> bool:
    """Must the call happen though nobody reads its result?"""
    return isinstance(target, torch._ops.OpOverload) and (target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
                                                          or not target._schema.returns or collective(target) is not None)


def needed(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that an output or an effect depends on."""
    wanted: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in wanted or (node.op == "call_function" and has_effects(node.target)):
            wanted.add(node)
            wanted.update(node._input_nodes)
    return wanted


def with_late_waits(nodes: list[Node]) -> list[Node]:
    """Waits for collectives, and views and copies of their results, stand before the first node that computes with them.  None moves behind a write:
    it may be to memory that the collective reads."""
    if not any(collective(node.target) == "wait" for node in nodes):
        return nodes
    order: list[Node] = []
    held: dict[Node, None] = {}

    def put(node: Node) -> None:
        held.pop(node, None)
        for read in node._input_nodes:
            if read in held:
                put(read)
        order.append(node)
    for node in nodes:
        moved = is_view(node.target) or node.target is torch.ops.aten.clone.default
        if node.users and (collective(node.target) == "wait" or moved and any(read in held for read in node._input_nodes)):
            held[node] = None
            continue
        if node.op == "call_function" and writes(node.target):
            for waiting in list(held):
                if waiting in held:
                    put(waiting)
        put(node)
    return order


def writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


class NodeFacts:
    """meta["val"] as rows want it: Specs for tensors, Sizes for symbolic numbers.  Sizes are written as the ShapeEnv knows
    them now: symbols that turned out equal after a node was recorded are one symbol here, known ones are numbers."""

    def __init__(self, nodes: Iterable[Node]):
        self.env: Any = next(filter(None, (environment(node.meta.get("val")) for node in nodes)), None)
        self.known: dict[Expr, Any] = {}
        self.bound: set[Expr] = set()            # symbols bound by inputs, where the sizes mention others
        self._find_bound([from_node for from_node in nodes if from_node.op == "placeholder"])
        self.unbacked = self.env.unbacked_since(0) if self.env is not None and self.env.has_unbacked else ()
        self.by_python: dict[Expr, Expr] = {}      # what kernels do not compute -> the symbol that stands for it
        self._numbers: list[Extern] = []        # the calls that compute those, not yet taken

    def _find_bound(self, placeholders: Sequence[Node]) -> None:
        """An input's size may be 4*s0 while no input has the size s0 itself: then sizes are written over symbols that inputs bind."""
        if self.env is None:
            return
        raw = [size for node in placeholders for size in _sizes_of(node.meta.get("val"))]
        simple = [self.env.simplify(size) for size in raw]
        shown = {size for size in simple if type(size) is Expr and size.op == "symbol"}
        if not free_symbols(*simple) <= shown:
            self.bound = shown | {size for size in raw if size.op == "symbol"}

    def of(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple([self.of(v) for v in value])
        if isinstance(value, torch.Tensor) or hasattr(value, "spec"):
            return self.spec(spec_of(value))
        return self.number(value)

    def number(self, value: Any) -> Any:
        """A SymInt, SymFloat or SymBool as the Expr it carries; anything else as it is."""
        if isinstance(value, SYMBOLIC):
            value = from_sym(value)
        return self.size(value) if type(value) is Expr else value

    def size(self, size: Expr) -> Any:
        found = self.known.get(size)
        if found is None:
            found = self.known[size] = size if self.env is None else self._written(self.env.simplify(size))
        return found

    def for_kernels(self, size: Any) -> Any:
        """Kernels compute with integers; the rest (floats, powers, shifts) is computed by Python, which is exact, before they run."""
        if type(size) is not Expr or not any(is_for_python(node) for node in postorder(size)):
            return size
        if is_for_python(size):     # kernels take integers and floats
            return self._computed_by_python(size) if size.dtype != "bool" else ne(self._computed_by_python(make("to", "i64", (size,))), 0)
        return make(size.op, size.dtype, tuple([as_expr(self.for_kernels(arg)) for arg in size.args]), size.attr)

    def _computed_by_python(self, node: Expr) -> Expr:
        if node not in self.by_python:
            low, high = self.env.interval(node) if node.dtype == "i64" else (None, None)
            name = self.by_python[node] = self.env.create_unbacked(low, high, str(node), node.dtype)
            compute = meaning(node.op, node.dtype).compute
            self._numbers.append(Extern(name.attr, (name.attr,), compute, tuple(map(as_size, node.args)), origin=(name.attr,)))
        return self.by_python[node]

    def computed(self, given: Any) -> Any:
        """A number that Python would have to compute, and that an input gives: it is read, not recomputed."""
        if type(given) is not Expr or given.dtype != "f64" or given.op in ("symbol", "const"):
            return given
        return self.by_python.setdefault(given, self.env.create_unbacked(None, None, str(given), given.dtype))

    def take_numbers(self) -> list[Extern]:
        """The calls that must stand before whatever uses the sizes asked for so far."""
        taken, self._numbers = self._numbers, []
        return taken

    def _written(self, size: Any) -> Any:
        if not self.bound or type(size) is not Expr or free_symbols(size) <= self.bound - self.replaced():
            return size
        found = self.env.in_terms_of(size, self.bound)
        return size if found is None else found

    def replaced(self) -> set[Expr]:
        """Bound symbols that the environment knows by another name."""
        return {s for s in self.bound if self.env.simplify(s) is not s}

    def spec(self, spec: Any) -> Any:
        for size in (*spec.shape, *spec.strides, spec.offset):
            if type(size) is Expr:
                return TensorSpec(self.sizes(spec.shape), self.sizes(spec.strides), self.sizes((spec.offset,))[0], spec.dtype, spec.device)
        return spec

    def sizes(self, sizes: Sequence[Any]) -> tuple:
        return tuple([self.for_kernels(self.size(n)) if type(n) is Expr else n for n in sizes])


def _sizes_of(value: Any) -> list[Expr]:
    """The symbolic sizes that an input binds."""
    if isinstance(value, SYMBOLIC):
        sizes: tuple = (from_sym(value),)
    elif isinstance(value, torch.Tensor) or hasattr(value, "spec"):
        spec = spec_of(value)
        sizes = (*spec.shape, *spec.strides, spec.offset)
    else:
        return []
    return [size for size in sizes if type(size) is Expr]


def environment(value: Any) -> Any:
    """The ShapeEnv behind an abstract tensor or a symbolic number, if there is one."""
    if isinstance(value, SYMBOLIC):
        return value.node.env
    return getattr(getattr(value, "world", None), "env", None)


class Walk:
    """The state of one lowering: the Builder, and what each node's value is."""

    def __init__(self, gm: GraphModule, wanted: set[Node]):
        self.facts = NodeFacts(gm.graph.nodes)
        self.gm, self.wanted, self.b = gm, wanted, Builder(self.facts.env)
        self.values: dict[Node, Any] = {}
        self.inputs: list[str | None] = []
        self.outputs: tuple[Any, ...] = ()
        self.symbols: dict[str, tuple[int, str, int]] = {}
        results: Any = gm.graph.output_node().args[0]
        self.received = {results[place] for place in gm.meta.get("into", ())}

    # ------------------------------------------------------------ nodes

    def placeholder(self, node: Node, example: Any, wanted: bool) -> None:
        value = node.meta.get("val", example)
        number = len(self.inputs)
        if isinstance(value, torch.Tensor) or hasattr(value, "spec"):
            spec = self.facts.of(value)
            self._read_symbols(number, spec)
            self._read_symbols(number, spec_of(value), self.facts.unbacked)
            buffer = self.b.buffer(spec, "input", node.name)
            self.values[node] = Operand.of(buffer, spec)
            self.inputs.append(buffer.name if wanted else None)
            return
        value = Given(number) if isinstance(value, torch.Generator) else self.facts.computed(self.facts.number(value))
        self.values[node] = value
        symbol = value.attr if isinstance(value, Expr) and value.op == "symbol" else None
        if symbol is not None:
            self.symbols[symbol] = (number, "value", 0)
        self.inputs.append(symbol)

    def _read_symbols(self, number: int, spec: Any, only: Collection[Expr] | None = None) -> None:
        """Where each symbol of the input's Spec (of those in `only`) can be read; the first place found stays."""
        if only is not None and not only:
            return
        for kind, sizes in (("shape", spec.shape), ("stride", spec.strides), ("offset", (spec.offset,))):
            for dim, size in enumerate(sizes):
                if isinstance(size, Expr) and size.op == "symbol" and (only is None or size in only):
                    self.symbols.setdefault(size.attr, (number, kind, dim))

    def attribute(self, node: Node) -> None:
        """A tensor held by the module.  One CPU number is read now and becomes a constant of the bodies."""
        value = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(value, torch.Tensor):
            self.values[node] = value
            return
        spec = spec_of(value)
        if not value.shape and on_host(value) and supported(SHORT.get(value.dtype, "")):
            element = literal(value.item(), SHORT[value.dtype])
            self.values[node] = Operand.lazy(spec, lambda i: element)
        else:
            self.values[node] = Operand.of(self.b.buffer(spec, "constant", node.name, value.detach()), spec)

    def call(self, node: Node) -> None:
        out = self.facts.of(node.meta.get("val"))
        b, target = self.b, node.target
        b.steps += self.facts.take_numbers()
        row = LOWERINGS.get(target)
        if target is CHECK:
            b.steps.append(Extern(node.name, (), target, (self.condition(node.args[0]), node.args[1]), origin=(node.name,)))
            return
        if row is None and computes_size(target):
            self.values[node] = out
            return
        b.node, b.target, b.used = node.name, target, self.used(node) if type(out) is tuple else None
        b.loose = not (config.eager_rounding or node.meta.get("exact"))
        args, kwargs = self.arguments(node.args), {k: self.argument(v) for k, v in node.kwargs.items()}
        b.steps += self.facts.take_numbers()
        if target is operator.getitem:
            self.values[node] = args[0][args[1]]
            return
        if "unbacked" in node.meta:
            self.values[node] = self.telling(node, out, args, kwargs)
            return
        result = row(b, out, *args, **kwargs) if row is not None else NotImplemented
        self.values[node] = lower_call(b, out, target, args, kwargs) if result is NotImplemented else result
        if node in self.received:
            self.take_part(node)

    def take_part(self, node: Node) -> None:
        """scatter(x, source, ...), where an input receives the result and `source` is what became of view(x, ...): from now on it is that view
        of the result, and needs no memory of its own."""
        base, source = (*node.args, None, None)[:2]
        if type(base) is not Node or type(source) is not Node or not source.args:
            return
        view = source.args[0]
        if type(view) is not Node or not is_view(view.target) or view.args != (base, *node.args[2:]) or view.kwargs != node.kwargs:
            return
        of, whole, shown, made = self.values[base], self.values[node], self.values[view], self.values[source]
        if all(type(v) is Operand and v.buffer is not None and v.strided for v in (of, whole, shown, made)) and of.index is whole.index is None \
                and _layout(of.buffer) == _layout(whole.buffer) and shown.buffer is of.buffer and made.index is None \
                and (made.spec.shape, made.spec.strides) == (shown.spec.shape, shown.spec.strides):
            self.values[source] = Operand(shown.spec, whole.buffer, shown.index, None)

    def condition(self, value: Any) -> Any:
        """What a check looks at: as stated, not as concluded from it."""
        raw = from_sym(value.meta["val"]) if type(value) is Node else value
        return self.facts.env.as_stated(raw) if type(raw) is Expr else raw

    def telling(self, node: Node, out: Any, args: tuple, kwargs: dict) -> Any:
        """A library call that binds unbacked symbols.  They are bound by their own names, also where the environment
        has concluded what they must be: that is what the program's conditions check."""
        b, raw = self.b, node.meta["val"]
        if isinstance(raw, SYMBOLIC):
            views = tuple([b.argument(a) for a in args])
            symbol: Any = from_sym(raw)     # an Expr, by the type of `raw`
            b.steps.append(Extern(node.name, (symbol.attr,), node.target, views, dict(kwargs), origin=(node.name,)))
            return out
        result = lower_call(b, out, node.target, args, kwargs)
        call = cast(Extern, b.steps[-1])
        specs = [spec_of(v) for v in (raw if isinstance(raw, (tuple, list)) else (raw,))]
        binds = [(size.attr, name, kind, dim) for name, spec in zip(call.outputs, specs) if name is not None
                 for kind, sizes in (("shape", spec.shape), ("stride", spec.strides)) for dim, size in enumerate(sizes)
                 if type(size) is Expr and size.op == "symbol" and size in node.meta["unbacked"]]
        first = {bind[0]: bind for bind in reversed(binds)}
        b.steps[-1] = dataclasses.replace(call, binds=tuple(first.values()))
        return result

    def used(self, node: Node) -> set[int] | None:
        """Which of several results are read; None where a reader takes them all."""
        readers = [user for user in node.users if user in self.wanted]
        return {cast(int, user.args[1]) for user in readers} if all(user.target is operator.getitem for user in readers) else None

    def output(self, node: Node) -> None:
        results = node.args[0]
        self.outputs = tuple(self.result(r) for r in (results if isinstance(results, (tuple, list)) else (results,)))

    def result(self, value: Any) -> Any:
        """What the program returns: Views, Exprs, plain values."""
        self.b.node = getattr(value, "name", "output")
        value = self.values[value] if type(value) is Node else self.facts.number(value)
        return self.b.strided(value).view() if type(value) is Operand else value

    # ------------------------------------------------------------ arguments

    def arguments(self, args: Sequence[Any]) -> tuple:
        return tuple([self.given(a) if type(a) is Node else a if type(a) in PLAIN else self.argument(a) for a in args])

    def given(self, node: Node) -> Any:
        value = self.values[node]
        return self.facts.for_kernels(value) if type(value) is Expr else value

    def argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is Node:
            return self.given(value)
        if isinstance(value, (list, tuple)):
            return [self.argument(v) for v in value]
        if isinstance(value, torch.Tensor):
            raise InternalError(f"a tensor stands as a constant among the arguments of {self.b.node}")
        return self.facts.for_kernels(self.facts.number(value))

    # ------------------------------------------------------------ the end

    def program(self, boxed: bool, into: Mapping[int, int]) -> Program:
        """Buffers that an output looks into become outputs."""
        buffers = self.b.buffers
        for view in self.outputs:
            name = getattr(view, "buffer", None)
            if name is not None and buffers[name].kind == "temp":
                buffers[name] = dataclasses.replace(buffers[name], kind="output")
        return Program(buffers, tuple(told_early(self.b.steps, buffers)), tuple(self.inputs), self.outputs, self.symbols, boxed,
                       tuple(self.written_inputs(into)))

    def written_inputs(self, into: Mapping[int, int]) -> Iterator[tuple[str, str]]:
        """(result, input) for the results that are written to inputs, where both are whole buffers of one layout."""
        returned = [view.buffer for view in self.outputs if isinstance(view, View)]
        for place, number in into.items():
            view, name = self.outputs[place], self.inputs[number]
            if isinstance(view, View) and name in self.b.buffers and returned.count(view.buffer) == 1 and name not in returned:
                made, given = self.b.buffers[view.buffer], self.b.buffers[name]
                whole = (view.dtype, view.shape, view.strides, view.offset) == (made.dtype, made.shape, made.strides, 0)
                if whole and made.kind == "output" and _layout(made)[:4] == _layout(given)[:4]:
                    yield made.name, given.name


def _layout(buffer: Buffer) -> tuple:
    return buffer.dtype, buffer.shape, buffer.strides, buffer.device, buffer.offset


def told_early(steps: Sequence[ProgramStep], buffers: Mapping[str, Buffer]) -> list[ProgramStep]:
    """Each check right behind the call that binds the last of its symbols: all sizes are written as if it held, earlier ones too.  And what
    Python computes from numbers as early: the kernels behind it are one launch, and write inputs where nothing may fail any more."""
    bound: dict[str, int] = {}
    places = []
    for number, step in enumerate(steps):
        early = step.call is not None and (step.call.target is CHECK or step.call.is_number(buffers))
        places.append(max([bound.get(s, -1) for s in step_symbols(step, buffers)], default=-1) if early else number)
        bound.update(dict.fromkeys(step.bound_symbols(buffers), places[-1]))
    return [steps[number] for number in sorted(range(len(steps)), key=lambda number: places[number])]


CHECK = torch.ops.aten._assert_scalar.default
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def computes_size(target: Any) -> bool:
    """Sizes and what is computed from them need no step: tracing has found their value as an Expr already."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.startswith("aten::sym_")
    return target is not operator.getitem


IN_KERNELS = frozenset({"symbol", "const", "add", "sub", "mul", "neg", "floordiv", "mod", "min", "max", "abs", "eq", "ne", "lt", "le", "and", "or",
                        "not", "where", "to"})


def is_for_python(node: Expr) -> bool:
    """Is it an operation on numbers that a kernel would not compute, or not as Python does?  Nor does it take a truth value as such."""
    if node.op == "symbol" and node.dtype == "bool":
        return True
    return node.op not in IN_KERNELS or "f64" in [node.dtype, *[arg.dtype for arg in node.args]] and node.op not in ("symbol", "const")


WALK = {"call_function": Walk.call, "get_attr": Walk.attribute, "output": Walk.output}
