"""The tracing context of torch that a graph compiler of the user's finds while it runs.

Such compilers ask torch for the context of the compilation: `torch._guards.detect_fake_mode(example_inputs)` reads
`TracingContext.try_get().fake_mode`.  `with_tracing_context(compiler)` sets such a context around each call.  Its mode is ours: inside of it
operators run on abstract tensors.  Compilers of our own need no context and get none.

    @fs.register_backend
    def mine(gm, example_inputs):
        mode = torch._guards.detect_fake_mode(example_inputs)
        with mode:
            torch.zeros(3) + example_inputs[0]      # abstract
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node

from firesteel import artifacts, transaction
from firesteel.graph.abstract import AbstractMode, AbstractWorld
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.sym.env import ShapeEnv

GraphCompiler = Callable[[GraphModule, list], Callable]


class ContextMode(AbstractMode):
    """The mode that user's compilers find: a dispatch mode with the attributes that they read.  Real tensors are always taken."""

    allow_non_fake_inputs = True
    static_shapes = False

    @property
    def shape_env(self) -> Any:
        return self.world.env

    def from_tensor(self, tensor: torch.Tensor, **wishes: Any) -> torch.Tensor:
        """An abstract tensor like a real one, its sizes as numbers."""
        return tensor if type(tensor) is AbstractTensor else self.world.wrap(tensor, "")


class ContextGraph(Graph):
    """A graph whose dead code is found without the peer's settings, which torch reads while a context is set: an unused random operator
    draws from eager's numbers and stays."""

    def eliminate_dead_code(self, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
        return super().eliminate_dead_code(is_impure_node or Node.is_impure)

    def __deepcopy__(self, memo: dict | None = None) -> Graph:
        copy = super().__deepcopy__(memo)
        copy.__class__ = ContextGraph
        return copy


@transaction.context
def tracing(mode: Any) -> Iterator[None]:
    """Inside, torch reports a compilation under this mode."""
    guards = torch._guards
    before = guards.TracingContext.try_get()
    guards._TLS.tracing_context = guards.TracingContext(mode)
    try:
        yield
    finally:
        guards._TLS.tracing_context = before


def mode_of(example_inputs: Sequence[Any]) -> ContextMode:
    world = find_world([v for v in pytree.tree_leaves(example_inputs) if isinstance(v, torch.Tensor)])
    return ContextMode(AbstractWorld(world.env if world is not None else None))


def with_tracing_context(compiler: GraphCompiler) -> GraphCompiler:
    """The user's compiler, called inside of such a context."""
    @functools.wraps(compiler, updated=())
    def compile_graph(gm: GraphModule, example_inputs: list) -> Callable:
        gm.graph.__class__ = ContextGraph
        for node in gm.graph.nodes:     # the key by which graphs of torch.compile have their tensors
            node.meta.update({"example_value": node.meta["val"]} if "val" in node.meta else {})
        try:
            with tracing(mode_of(example_inputs)):
                return compiler(gm, example_inputs)
        except AttributeError as error:
            if not isinstance(error.obj, (ContextMode, ShapeEnv)):
                raise
            asked = error.name
        artifacts.log("aot", lambda: f"a backend asks for {asked}, which abstract tensors do not have: it is given inputs of calls")
        return WithInputsOfCalls(compiler, gm, example_inputs)
    return compile_graph


# boundary: recognises torch._subclasses.fake_tensor and its sizes where a compiler that wants these has loaded them; nothing here imports them
TRACERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch._dynamo.source")


class WithInputsOfCalls:
    """What a compiler makes that traces by means of torch's own (aot_autograd of the peer), for each kind of inputs that comes.  Where sizes of
    the graph are symbols it is given torch's symbols for them, and compiles again where the guards that it has put on these fail."""

    def __init__(self, compiler: GraphCompiler, gm: GraphModule, examples: Sequence[Any]):
        self.compiler, self.gm, self.examples = compiler, gm, examples
        self.tracers = [sys.modules[name] for name in TRACERS if name in sys.modules]
        symbolic = any(type(size) is not int for example in examples for size in sizes_of(example))
        self.compile = self._with_symbols if symbolic and len(self.tracers) == len(TRACERS) else self._as_they_are
        self.made: dict[tuple, list[tuple[Callable[[Sequence[Any]], bool], Callable]]] = {}

    def __call__(self, *inputs: Any) -> Any:
        kind = (torch.is_grad_enabled(), *map(self._kind, self.examples, inputs))
        known = self.made.setdefault(kind, [])
        compiled = next((compiled for holds, compiled in known if holds(inputs)), None)
        if compiled is None:
            holds, compiled = self.compile(inputs)
            known.append((holds, compiled))
        return compiled(*inputs)

    def _kind(self, example: Any, value: Any) -> Any:
        symbols = self.compile == self._with_symbols
        if not isinstance(value, torch.Tensor):
            return type(value) if symbols and isinstance(example, torch.SymInt) else value
        return () if symbols else (value.shape, value.stride()), value.dtype, value.device, value.requires_grad, type(value)

    def _as_they_are(self, inputs: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], bool], Callable]:
        return lambda others: True, self.compiler(self.gm, list(inputs))

    def _with_symbols(self, inputs: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], bool], Callable]:
        fakes, symbols, sources = self.tracers
        env = symbols.ShapeEnv(duck_shape=False)
        mode = fakes.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

        def stand_in(example: Any, value: Any, place: int) -> Any:
            source = sources.ConstantSource(f"input_{place}")
            if isinstance(value, torch.Tensor):
                kinds = [symbols.DimDynamic.STATIC if type(size) is int else symbols.DimDynamic.DYNAMIC for size in example.shape]
                return mode.from_tensor(value, source=source, symbolic_context=symbols.StatelessSymbolicContext(dynamic_sizes=kinds))
            if not isinstance(example, torch.SymInt):
                return value
            return env.create_symintnode(env.create_symbol(value, source, symbols.DimDynamic.DYNAMIC), hint=value, source=source)
        given = [stand_in(example, value, place) for place, (example, value) in enumerate(zip(self.examples, inputs))]
        with tracing(mode):
            compiled = self.compiler(self.gm, given)
        numbered = [place for place, one in enumerate(given) if isinstance(one, (torch.Tensor, torch.SymInt))]
        guards = env.produce_guards_expression([given[place] for place in numbered])
        fixed = [[known_size(size) for size in sizes_of(given[place])] for place in numbered]       # which the guards leave out

        def holds(others: Sequence[Any]) -> bool:
            read = [others[place] for place in numbered]
            same = all(known in (None, size) for one, known_sizes in zip(read, fixed) for known, size in zip(known_sizes, sizes_of(one)))
            return same and (not guards or env.evaluate_guards_expression(guards, read))
        return holds, compiled


def sizes_of(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else [value] if isinstance(value, (int, torch.SymInt)) else []


def known_size(size: Any) -> int | None:
    return size if type(size) is int else size.node.maybe_as_int()
