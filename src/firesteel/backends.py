"""Backends: a name -> `fn(gm, example_inputs) -> callable(*inputs) -> tuple`.

`gm` is what capture hands over: a `torch.fx.GraphModule` of torch-level calls (docs/contracts.md).  The rows below are
ours; users add theirs with `register_backend`, or through the entry-point group `firesteel.backends`.
"""
from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.fx
from torch.fx.graph import _PyTreeCodeGen

from firesteel import pipeline
from firesteel.autograd import kept as kept_calls
from firesteel.autograd.outline import ProgramEntry
from firesteel.config import config
from firesteel.errors import BackendError, FiresteelError, UserError
from firesteel.graph.build import write_code
from firesteel.homes import LaterModule, home_of, is_in_package
from firesteel.table import Table
from firesteel.targets import on_gpu

if TYPE_CHECKING:
    from firesteel.autograd import aot
else:
    aot = LaterModule("firesteel.autograd.aot")     # with what traces, which a process that finds its programs in the cache does not need

Backend = Callable[[torch.fx.GraphModule, list], Callable]

BACKENDS: Table[Backend] = Table("backend", "backends.py")


def rewrite(gm: torch.fx.GraphModule) -> None:
    """What is done to a whole graph for the libraries' sake, before it is partitioned."""
    from firesteel.graph.layouts import channels_last
    from firesteel.graph.sums import join_products
    join_products(gm)
    channels_last(gm)


def freeze(gm: torch.fx.GraphModule, places: Sequence[int]) -> Any:
    """What becomes of an inference graph of which these inputs are frozen."""
    from firesteel.graph import frozen  # few programs freeze
    return frozen.freeze(gm, places)


@BACKENDS.row("native")
def native(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
    """Ahead-of-time autograd, then our code generator.  A graph traced elsewhere may take and give nested containers."""
    shape = gm.graph._codegen
    if not isinstance(shape, _PyTreeCodeGen):
        return _native(gm, example_inputs, cache=kept_programs)
    flat = torch.fx.GraphModule(gm, torch.fx.Graph())
    flat.graph.output(flat.graph.graph_copy(gm.graph, {}))
    compiled = native(flat, shape.process_inputs(*example_inputs))
    return lambda *inputs: shape.process_outputs(compiled(*shape.process_inputs(*inputs)))


class GpuBackend:
    """`native` with what a mode asks for on a GPU: programs recorded as CUDA graphs, inference with its writes to inputs; measured choices."""

    def __init__(self, recorded: bool | None, tuned: bool):
        self.recorded, self.compiler = recorded, functools.partial(pipeline.compile_native, recorded=recorded, tuned=tuned)
        self.mode = f"recorded {recorded}, tuned {tuned}"      # in keys of the cache

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        return _native(gm, example_inputs, self.compiler, keep_inference_input_mutations=bool(self.recorded),
                       cache=functools.partial(kept_programs, mode=self.mode)) if _on_gpu(example_inputs) else native(gm, example_inputs)


class FreezingBackend:
    """`native` for which an option says whether parameters are frozen, whatever fs.config.freeze says."""

    def __init__(self, freezes: bool):
        self.freezes, self.mode = freezes, "frozen" if freezes else "not frozen"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        return _native(gm, example_inputs, cache=functools.partial(kept_programs, mode=self.mode))


FREEZING = {wanted: FreezingBackend(wanted) for wanted in (True, False)}


def is_native(backend: Backend) -> bool:
    return backend is native or isinstance(backend, (GpuBackend, FreezingBackend))


def freezes(backend: Backend) -> bool:
    """Are parameters and buffers to be marked in the graphs that it gets?"""
    if isinstance(backend, FreezingBackend):
        return backend.freezes
    return config.freeze and is_native(backend)


FOR_GPU = {wanted: GpuBackend(*wanted) for wanted in itertools.product((None, False, True), (False, True))}        # (recorded, tuned): one of each
COMPILERS: dict[str, Callable] = {"": pipeline.compile_native, **{one.mode: pipeline.compile_native for one in FREEZING.values()},
                                  **{backend.mode: backend.compiler for backend in FOR_GPU.values()}}


def _on_gpu(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and on_gpu(x) for x in inputs)


expect_kernels = pipeline.later("runtime.gpu", "expect_kernels")


def _native(gm: torch.fx.GraphModule, example_inputs: list, compiler: Callable = pipeline.compile_native, **more: Any) -> Callable:
    if _on_gpu(example_inputs):
        expect_kernels()
    return aot.compile_aot(gm, example_inputs, hookable_results=True, **_settings(compiler), **more)


def _settings(compiler: Callable = pipeline.compile_native) -> dict[str, Any]:
    from firesteel.graph.decomp import core_decompositions
    return {"fw_compiler": compiler, "bw_compiler": compiler, "partition_fn": aot.min_cut_partition, "decompositions": core_decompositions(),
            "rewrite": rewrite, "freeze": freeze}


def mode_of(backend: Callable) -> str:
    """Of one that `checked` gave: what its programs' keys in the cache say of it."""
    return getattr(getattr(backend, "__wrapped__", None), "mode", "")


def kept(entry: ProgramEntry, read_graph: Callable[[], torch.fx.GraphModule], whole: bool, turns_on: bool, ranks: Any, mode: str) -> Callable | None:
    """What the backend of this mode makes of a captured graph that the cache has; None where it has not.  The graph is read where something
    needs it."""
    made = functools.cache(lambda: aot.late_graphs(aot.Compilers.of(**_settings(COMPILERS[mode]), whole=whole)))
    late = kept_calls.LateGraphs(*(functools.partial(_compile_late, made, name) for name in kept_calls.LateGraphs.__match_args__))
    return kept_calls.compile_kept(entry, lambda *inputs: aot.program_of(read_graph())[0](*inputs), lambda *inputs: read_graph().forward(*inputs),
                                   late, turns_on, ranks)


def _compile_late(made: Callable[[], kept_calls.LateGraphs], name: str, *args: Any) -> Callable:
    return getattr(made(), name)(*args)


def kept_parts(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cache: Callable[..., ProgramEntry], mode: str) -> Callable:
    """The same of a graph that is compiled in parts: `cache` has all of them, or raises."""
    return aot.compile_aot(gm, example_inputs, hookable_results=True, **_settings(COMPILERS[mode]), cache=cache)


def kept_programs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], mode: str = "") -> Any:
    """The place of a graph in the cache on disk, where there is one."""
    if not config.cache_dir:
        return None
    from firesteel import programcache  # with what reads and writes texts
    return programcache.entry_of(gm, example_inputs, mode)


@BACKENDS.row("aot_eager")
def aot_eager(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
    """Ahead-of-time autograd; PyTorch runs the graphs."""
    return aot.compile_aot(gm, example_inputs, fw_compiler=aot.nop, bw_compiler=aot.nop, hookable_results=True)


@BACKENDS.row("aot_eager_partitioned")
def aot_eager_partitioned(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
    """The same with the min-cut partitioner and our decompositions."""
    return aot.compile_aot(gm, example_inputs, fw_compiler=aot.nop, bw_compiler=aot.nop,
                           partition_fn=aot.min_cut_partition, decompositions=_settings()["decompositions"], hookable_results=True)


@BACKENDS.row("eager")
def eager(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
    """The captured graph, run as it is."""
    return write_code(gm).forward


PARTITIONED = {"native": rewrite, "aot_eager": None, "aot_eager_partitioned": None}      # what is done to a graph before


class BudgetBackend:
    """One of our backends that partition, with a limit on the bytes saved for backward of each graph."""

    def __init__(self, name: Any, limit: int):
        if name not in PARTITIONED:
            raise UserError(f"The backend {name!r} has no partitioner that could keep to a limit.", hint=f"Use one of {', '.join(PARTITIONED)}.")
        from firesteel.autograd.budget import Budget  # few programs have a limit
        self.compiler, self.rewrite, self.partition = pipeline.compile_native if name == "native" else aot.nop, PARTITIONED[name], Budget(limit)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        return aot.compile_aot(gm, example_inputs, fw_compiler=self.compiler, bw_compiler=self.compiler, partition_fn=self.partition,
                               decompositions=_settings()["decompositions"], hookable_results=True, rewrite=self.rewrite)


OURS = frozenset([*(BACKENDS[name] for name in BACKENDS), *FOR_GPU.values(), *FREEZING.values()])


def is_ours(backend: Backend) -> bool:
    return backend in OURS or isinstance(backend, BudgetBackend)


def with_keywords(backend: Callable, mode: str | None, options: dict[str, Any] | None) -> Backend:
    """Another's backend, called with the mode and the options that were given for it, as torch.compile does."""
    given = {**({} if mode in (None, "default") else {"mode": mode}), **({"options": options} if options else {})}
    return functools.update_wrapper(functools.partial(backend, **given), backend, updated=()) if given else backend


def checked(backend: Backend) -> Backend:
    """The backend, whose failures reach the user as a BackendError that names it."""
    ours = is_ours(backend)
    compiler = backend if ours else pipeline.later("graph.tracing_context", "with_tracing_context")(backend)

    @functools.wraps(backend, updated=())
    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        try:
            compiled = compiler(gm if ours else write_code(gm), example_inputs)
        except FiresteelError:
            raise
        except Exception as e:
            raise BackendError(f"The backend {_name(backend)} failed on a graph: {type(e).__name__}: {e}", ours=ours) from e
        if not callable(compiled):
            raise BackendError(f"The backend {_name(backend)} returned {type(compiled).__name__}, not a callable.", ours=ours)
        known = is_in_package(home_of(backend), "firesteel") or getattr(compiled, "__self__", compiled) is gm
        return compiled if known else with_results_of(gm, compiled, _name(backend))
    compile_graph.freezes = functools.partial(freezes, backend)        # type: ignore[attr-defined]  # capture asks
    return compile_graph


def with_results_of(gm: torch.fx.GraphModule, compiled: Callable, name: str) -> Callable:
    """What a user's backend made, whose results are a tuple or a list with as many items as the graph has."""
    results = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0]
    count = len(results) if isinstance(results, (tuple, list)) else -1
    if count < 1:
        return compiled

    @functools.wraps(compiled, updated=("__dict__",))
    def call(*args: Any) -> Any:
        out = compiled(*args)
        if not isinstance(out, (tuple, list)) or len(out) != count:
            what = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
            raise BackendError(f"What the backend {name} compiled returned {what}; the graph has {count} result{'s'[:count > 1]}.",
                               hint="Return all results of the graph, also a single one, as a tuple or a list.")
        return out
    return call


def _name(backend: Callable) -> str:
    return getattr(backend, "__name__", type(backend).__name__)


def register_backend(fn: Backend | None = None, *, name: str | None = None) -> Any:
    """Adds a backend under its function's name or `name`; also a decorator."""
    if fn is None:
        return lambda f: register_backend(f, name=name)
    BACKENDS.add(name or fn.__name__, fn)
    return fn


def list_backends() -> list[str]:
    return sorted({*(str(name) for name in BACKENDS), *_installed()})


def lookup_backend(backend: str | Backend) -> Backend:
    """The function behind a name; a callable is its own backend."""
    if callable(backend):
        return backend
    if not isinstance(backend, str):
        raise UserError(f"A backend is a name or a callable, not {type(backend).__name__}.", hint=f"Names are {', '.join(list_backends())}.")
    if backend not in BACKENDS and backend in _installed():
        BACKENDS.add(backend, _installed()[backend].load())
    if backend not in BACKENDS:
        raise UserError(f"There is no backend {backend!r}.", hint=f"Use one of {', '.join(list_backends())}, or a callable.")
    return BACKENDS[backend]


def _installed() -> dict[str, importlib.metadata.EntryPoint]:
    return {e.name: e for e in importlib.metadata.entry_points(group="firesteel.backends")}
