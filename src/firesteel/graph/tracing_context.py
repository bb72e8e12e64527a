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
def context_of(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, torch reports a compilation with these inputs."""
    guards = torch._guards
    world = find_world([v for v in pytree.tree_leaves(example_inputs) if isinstance(v, torch.Tensor)])
    before = guards.TracingContext.try_get()
    mode: Any = ContextMode(AbstractWorld(world.env if world is not None else None))
    guards._TLS.tracing_context = guards.TracingContext(mode)
    try:
        yield
    finally:
        guards._TLS.tracing_context = before


def with_tracing_context(compiler: GraphCompiler) -> GraphCompiler:
    """The user's compiler, called inside of such a context."""
    @functools.wraps(compiler, updated=())
    def compile_graph(gm: GraphModule, example_inputs: list) -> Callable:
        gm.graph.__class__ = ContextGraph
        try:
            with context_of(example_inputs):
                return compiler(gm, example_inputs)
        except AttributeError as error:
            if not isinstance(error.obj, (ContextMode, ShapeEnv)):
                raise
            asked = error.name
        artifacts.log("aot", lambda: f"a backend asks for {asked}, which abstract tensors do not have: it is given the inputs of the first call")
        return WithRealInputs(compiler, gm)
    return compile_graph


class WithRealInputs:
    """What a compiler makes that traces by means of torch's own (aot_autograd of the peer), for each kind of inputs that comes."""

    def __init__(self, compiler: GraphCompiler, gm: GraphModule):
        self.compiler, self.gm = compiler, gm
        self.made: dict[tuple, Callable] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = torch.is_grad_enabled(), *((v.shape, v.stride(), v.dtype, v.device, v.requires_grad, type(v)) if isinstance(v, torch.Tensor) else v
                                         for v in inputs)
        if key not in self.made:
            self.made[key] = self.compiler(self.gm, list(inputs))
        return self.made[key](*inputs)
