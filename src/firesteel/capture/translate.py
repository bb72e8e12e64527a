"""From a region and its inputs to code: run the machine, close the graph, write the run function.

This is the table of contents of capture: `translate` executes symbolically (`_execute`), writes what the outcome asks for (`_write`),
hands the graph to the backend (`_compile_graph`) and builds the guard function.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from firesteel import stages, torchstate, transaction
from firesteel.artifacts import counters, note_break, timed
from firesteel.autograd.branches import Left, inside_bodies
from firesteel.autograd.ranks import RankPlace, compare_ranks, follow
from firesteel.autograd.seams import runs_users_code
from firesteel.capture import class_reads, marks
from firesteel.capture.breaks import Action, Exit, FramesState, action_of, current_state, exit_state, handler_state, write_generators
from firesteel.capture.collectives import HAND_ON
from firesteel.capture.eager_errors import eager_error
from firesteel.capture.emit import RunEmitter, boxed_graph_call, careful_graph_call, graph_call
from firesteel.capture.guard_function import GuardFunction, MachineCode, build_guards
from firesteel.capture.joins import refuse_written
from firesteel.capture.machine import SymbolicMachine
from firesteel.capture.overlap import overlap_guards, written_groups
from firesteel.capture.policy import SymbolPolicy
from firesteel.capture.record import GraphInput
from firesteel.capture.region_code import Jump, RegionCode
from firesteel.capture.services import set_state
from firesteel.capture.source import Call, Item, Local, build_function
from firesteel.capture.values.base import CannotRebuild, LazyValue, Undecided, Unjoinable, UserRaise, Value
from firesteel.capture.values.leaves import LeavesRegion, refuse_shared, refuse_turned
from firesteel.capture.values.overrides import write_modes
from firesteel.capture.values.python_random import write_draws
from firesteel.capture.world import TensorWorld
from firesteel.config import config
from firesteel.errors import BackendError, Break, InternalError
from firesteel.homes import is_operator_of_the_user
from firesteel.records import dataclass
from firesteel.tracebacks import located_inside

RESTARTS = 50

# Breaks that may be the program's own error: under fullgraph the real call is made first, so that eager's error is raised.
PERHAPS_AN_ERROR = frozenset({"abstract_failure", "operator", "constant"})


class Captures(Protocol):
    """What is captured: a region (entry.py)."""
    root: Any
    backend: Any
    name: str
    policy: SymbolPolicy
    arg_names: list[str]
    resumes: bool
    stolen: Any
    ranks: RankPlace | None

    @property
    def owns_inputs(self) -> bool: ...
    def start(self, m: SymbolicMachine, values: list[Value]) -> Value | None: ...
    def step(self, inputs: tuple[Any, ...]) -> Any: ...


@dataclass
class MachineResult:
    """How the machine stopped."""
    returned: Value | None = None
    raised: Value | None = None
    stopped: Break | None = None


@dataclass(frozen=True)
class Captured:
    """What a capture made and relied on, for who keeps it (regioncache.py)."""
    guard: GuardFunction
    returns: list[Any]                      # sources, in the order of the run function's arguments
    run: Any
    graph: torch.fx.GraphModule | None
    compiled: Callable[..., Any] | None
    stopped: Break | None
    objects: list[tuple[Any, Value]]        # of the program and of libraries, that were looked at
    executed: dict[Any, dict[str, Any]]     # code -> its globals
    imported: dict[str, tuple[str, ...]]    # by import statements: modules, and names of them


def translate(region: Captures, inputs: tuple[Any, ...]) -> RegionCode:
    """Captures a region for these inputs."""
    break_at: frozenset[int] = frozenset()
    real_leaves: frozenset[int] = frozenset()
    unjoined: frozenset[int] = frozenset()
    for _ in range(RESTARTS):
        m = SymbolicMachine(region.root.make_world, region.policy, break_at)
        m.leaves.real, m.part = real_leaves, None if region.root.fullgraph else region.root.part
        m.unjoined, m.exit = unjoined, exit_writer(region, m)
        transaction.on_failure(m.close)
        try:
            with torchstate.outside_inference(), outside_transforms(), class_reads.recording(m.class_reads):
                outcome = _execute(region, m, inputs)
            e = RunEmitter(m)
            _write(region, m, e, outcome)
            refuse_shared(m, e)
            refuse_turned(m, e)
            refuse_written(m)
        except Unjoinable as branch:
            unjoined |= {branch.step}
            continue
        except LeavesRegion as needed:
            real_leaves |= {needed.birth}
            continue
        except CannotRebuild as trouble:    # rule: the step that made it breaks instead, so that a real one is made
            if trouble.birth in break_at:
                raise InternalError(f"{trouble.value!r} cannot be handed over at a break") from None
            break_at |= {trouble.birth}
            continue
        finally:
            m.close()
        return _finish(region, m, e, outcome, inputs)
    raise InternalError(f"capture of {region.name} does not come to an end")


@transaction.context
def outside_transforms() -> Iterator[None]:
    """Transforms of torch.func that are running are set aside: what they wrapped is captured as the tensors that the program sees.  Under
    one the graph runs as it is, operator by operator."""
    layers = torchstate.take_transforms()
    try:
        yield
    finally:
        layers.put_back()


def _execute(region: Captures, m: SymbolicMachine, inputs: tuple[Any, ...]) -> MachineResult:
    values: list[Value] = [LazyValue(obj, Local(name)) for obj, name in zip(inputs, region.arg_names)]
    try:
        known = region.start(m, values)
        returned = m.run() if known is None else known
        return MachineResult(returned=returned if type(returned) is Undecided else m.look(returned))
    except UserRaise as raised:
        return MachineResult(raised=raised.value)
    except Break as stop:
        if not m.frames:
            raise
        if is_whole(region, m) and stop.kind not in PERHAPS_AN_ERROR:
            raise stop.unsupported() from None
        return MachineResult(stopped=stop)


def is_whole(region: Captures, m: SymbolicMachine) -> bool:
    """Is a break an error: for all of it, or in the block that it is in?"""
    return region.root.fullgraph or marks.breaks_are_errors(lambda scope, name: m.effects.written(m.scope_value(scope), name))


# -- writing ------------------------------------------------------------------------------------------------------------
def _write(region: Captures, m: SymbolicMachine, e: RunEmitter, outcome: MachineResult) -> None:
    """The lines after the graph call."""
    if outcome.stopped is not None:
        _write_break(region, m, e, outcome.stopped)
        return
    value: Any = outcome.returned if outcome.raised is None else outcome.raised
    m.effects.emit(e)       # first: an iterator is rebuilt over the container as it is then
    write_generators(e, m)
    text = e.expr(value)
    _write_states(m, e)
    e.line(f"{'return' if outcome.raised is None else 'raise'} {text}")


def _write_states(m: SymbolicMachine, e: RunEmitter) -> None:
    for key, value in m.states.changed():
        e.line(f"{e.constant(set_state)}({key!r}, {e.constants.name(value)})")
    write_modes(m, e)


def _write_break(region: Captures, m: SymbolicMachine, e: RunEmitter, stop: Break) -> None:
    m.effects.emit(e)
    write_generators(e, m)
    e.constants.namespace["__name__"] = m.frames[-1].scope.get("__name__")      # what the breaking call may ask its caller for
    action = action_of(e, m)
    if action is None:
        _write_eager_rest(region, m, e, current_state(e, m))
        return
    exits = [(leave.condition, exit_state(e, m, leave)) for leave in action.exits]
    handler = handler_state(e, m, "error")
    _write_states(m, e)
    _write_action(region, m, e, action, handler)
    if is_whole(region, m):
        e.line(f"raise {e.constant(stop.unsupported())}")
        return
    for condition, state in exits:
        jump = f"return {e.constant(Jump)}({_target(region, e, state)}, {_values(state)})"
        e.line(f"if {condition}: {jump}" if condition else jump)


def _write_action(region: Captures, m: SymbolicMachine, e: RunEmitter, action: Action, handler: FramesState | None) -> None:
    e.line("try:")
    e.lines += [f"    {line}" for line in action.lines]
    e.line("except BaseException as error:")
    if handler is None or is_whole(region, m):
        e.line(f"    raise {e.constant(located_inside)}(error, {m.places()!r})")
        return
    # not a Jump: inside of the except block Python still knows which exception is being handled
    e.line(f"    return {e.constant(go_on)}({_target(region, e, handler)}, {_values(handler)})")


def _write_eager_rest(region: Captures, m: SymbolicMachine, e: RunEmitter, state: FramesState) -> None:
    _write_states(m, e)
    e.line(f"return {_target(region, e, state)}.eager({_values(state)})")


def exit_writer(region: Captures, m: SymbolicMachine) -> Callable[[int], tuple[RunEmitter, list[torch.fx.Node]]]:
    """Writes how the program leaves the graph at the branch where it stands, to go on in eager at another instruction; the tensors it needs."""
    def write(index: int) -> tuple[RunEmitter, list[torch.fx.Node]]:
        e = RunEmitter(m)
        m.effects.emit(e)
        write_generators(e, m)
        _write_eager_rest(region, m, e, exit_state(e, m, Exit(index, 1)))
        return e, e.outputs
    return write


def with_exits(e: RunEmitter, graph: torch.fx.GraphModule, lines: list[str]) -> list[str]:
    """The lines that call a graph, and go on elsewhere where the program leaves it."""
    nodes = list(graph.graph.nodes)
    exits = list(dict.fromkeys(node.target.exit for node in (*nodes, *inside_bodies(nodes)) if hasattr(node.target, "exit")))
    if not exits:
        return lines
    found = ["left = None", "try:", *(f"    {line}" for line in lines), f"except {e.constant(Left)} as error:", "    left = error"]
    for leave in exits:
        given = [e.source(source) for source in leave.sources]
        function = build_function("leave", [*leave.sources.values(), *(f"g_{n}" for n in range(len(leave.outputs)))], leave.lines, leave.constants,
                                  "<firesteel leave>")
        call = f"{e.constant(function)}({', '.join([*given, '*left.values'])})"
        found.append(f"if left is not None and left.exit is {e.constant(leave)}: return {call}")
    return found


def _target(region: Captures, e: RunEmitter, state: FramesState) -> str:
    return e.constants.bind(region.root.continuation(state.spec), "continuation")


def _values(state: FramesState) -> str:
    return f"({''.join(f'{text}, ' for text in state.values)})"


def go_on(region: Captures, inputs: tuple[Any, ...]) -> Any:
    """Runs a continuation and what it jumps to."""
    out = region.step(inputs)
    while type(out) is Jump:
        out = out.go()
    return out


# -- closing ------------------------------------------------------------------------------------------------------------
def _finish(region: Captures, m: SymbolicMachine, e: RunEmitter, outcome: MachineResult, inputs: tuple[Any, ...]) -> RegionCode:
    stop = outcome.stopped
    m.check_wishes()
    if stop is not None:
        note_break(stop.sentence, stop.location, stop.hint)
    graph, compiled, lines, boxed = None, None, write_draws(m, e), False
    if config.rank_wait > 0 and torch.distributed.is_available() and torch.distributed.is_initialized():
        meet_others(region, m, inputs, stop is not None, e.constants.namespace.values())
    written = written_groups(m.record.inputs)
    if m.record.nodes:
        graph, used = m.record.finish(e.outputs)
        again = not lines and may_begin_again(m, graph, used)
        as_given(m.world, used)
        if stop is not None or region.resumes:
            mark_held(used)
        if getattr(region.backend, "freezes", bool)():
            mark_frozen(used)
        if m.record.call_count():
            careful = bool(m.effects.entries) and (region.owns_inputs or again) and any(map(may_refuse_data, graph.graph.nodes))
            if region.ranks is not None:
                graph.meta["ranks"] = region.ranks
            graph.meta["hands_on"] = any(frame.code in HAND_ON for frame in m.frames)
            graph.meta["boxed"] = region.owns_inputs and not m.modes.outer and not careful
            compiled = _compile_graph(region, graph, used)
            boxed = graph.meta["boxed"] and getattr(compiled, "_boxed_call", False)
            called = boxed_graph_call(e, compiled, used, region.stolen) if boxed else \
                careful_graph_call(e, compiled, graph, used, region) if careful and not m.modes.outer else \
                graph_call(e, functools.partial(torchstate.without_modes, compiled) if m.modes.outer else compiled, graph, used)
            lines += with_exits(e, graph, called)
        else:
            graph = None
    if graph is None and region.ranks is not None:
        compare_ranks({"": []}, region.ranks)
    compile_text = region.root.native_compiler()
    machine_code = MachineCode(compile_text, dict(zip(region.arg_names, inputs))) if compile_text is not None else None
    guard = build_guards([*m.all_guards(), *overlap_guards(written)], region.arg_names, list(e.sources), machine_code)
    if m.world.env is not None:
        m.world.env.freeze()
    run = e.build("run", lines, boxed)
    broke, raises = stop.sentence if stop is not None else "", stop is not None and is_whole(region, m)
    if (store := region.root.kept()) is not None and not (boxed or raises):
        store.keep(region, inputs, Captured(guard, list(e.sources), run, graph, compiled, stop, m.known_objects(), m.executed, m.imported))
    m.release()
    return RegionCode(guard, run, lambda: graph, broke, not raises, boxed)


def meet_others(region: Captures, m: SymbolicMachine, inputs: tuple[Any, ...], stopped: bool, names: Iterable[Any]) -> None:
    """Sets at which place ranks compare the region, and those behind its break."""
    name, _, path = region.ranks or RankPlace(place_text(region, inputs))
    at = m.frames[-1] if stopped else None
    line = "" if at is None else f"{os.path.basename(at.code.co_filename)}:{at.program[at.pc].lineno} ({at.pc})"
    region.ranks = RankPlace(name, line and f"{name.partition(', after ')[0]}, after {line}", path)
    follow(region.ranks, names)


def place_text(region: Captures, inputs: tuple[Any, ...]) -> str:
    """Which function, or which module's forward, it is, on all ranks and machines."""
    forward = getattr(type(inputs[0]), "forward", None) if inputs else None
    code = region.root.code or getattr(forward, "__code__", None)
    return f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else region.name


def may_refuse_data(node: torch.fx.Node) -> bool:
    """May the call raise what nobody can know before?  Operators and functions of the user's may, and calls that take integers as places or
    factor a matrix; derivatives take what the forward has checked."""
    theirs = getattr(node.target, "calls_the_user", None)
    if theirs is not None or node.op not in ("call_function", "call_method"):
        return bool(theirs)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return is_operator_of_the_user(node.target) or any(word in name for word in REFUSING) or any(map(is_integer, node.all_input_nodes))


REFUSING = ("linalg", "cholesky", "inverse", "multinomial")


def is_integer(node: torch.fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not (val.dtype.is_floating_point or val.dtype.is_complex or val.dtype is torch.bool)


def may_begin_again(m: SymbolicMachine, graph: torch.fx.GraphModule, used: list[GraphInput]) -> bool:
    """Has nothing that the program can see happened when the graph fails?"""
    written = any(isinstance(one.abstract, torch.Tensor) and one.abstract._version for one in used)
    return not written and not m.world.draws and not any(map(runs_users_code, graph.graph.nodes))


def as_given(world: TensorWorld, used: list[GraphInput]) -> None:
    """Inputs are what they were when the region began: a write that autograd records gives one a history, which the graph's own write will."""
    for one in used:
        if isinstance(one.abstract, torch.Tensor) and isinstance(one.real, torch.Tensor):
            one.abstract = one.node.meta["val"] = world.unwritten(one.abstract, one.real)


def mark_held(used: list[GraphInput]) -> None:
    """Marks the tensors that the program continues with before or behind a break, but parameters: it may overwrite them before the backward runs."""
    for one in used:
        if isinstance(one.real, torch.Tensor) and not isinstance(one.real, torch.nn.Parameter) and is_local(one.source):
            one.node.meta["held"] = True


def mark_frozen(used: list[GraphInput]) -> None:
    """Marks parameters and buffers that modules have, which a backend that freezes takes as constants until they change.  Tensors made in inference
    mode have no versions that would tell, and FSDP writes parameters without counting."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    for one in used if not distributed else ():
        plain = type(one.real) in (torch.Tensor, torch.nn.Parameter) and not one.real.is_inference()
        table = one.source.base if type(one.source) is Item else None
        if plain and type(table) is Item and table.key in ("_parameters", "_buffers"):
            one.node.meta["frozen"] = True


def is_local(source: Any) -> bool:
    """An argument or local variable, an item of one, or the memory below one; what hangs on a module or another object is not."""
    while type(source) in (Item, Call):
        source = source.base
    return type(source) is Local


def _compile_graph(region: Captures, graph: torch.fx.GraphModule, used: list[GraphInput]) -> Callable[..., Any]:
    counters["stats"]["unique_graphs"] += 1
    counters["stats"]["calls_captured"] += sum(1 for n in graph.graph.nodes if n.op in ("call_function", "call_method"))
    graph.meta["fullgraph"] = region.root.fullgraph
    stages.done("graph", graph)
    try:
        with timed("backend"), torchstate.outside_inference(), outside_transforms():
            return region.backend(graph, [i.abstract for i in used])
    except (BackendError, InternalError) as error:
        if (known := eager_error(graph, [i.real for i in used])) is not None:
            raise known from None
        if getattr(error, "ours", True):
            stages.failed("note_graph", error, graph, [i.abstract for i in used])
        raise
    finally:        # a graph that ends at a break may leave states of torch set, and a backend may have run it
        for node in graph.graph.nodes:
            if "state" in node.meta:
                set_state(*node.meta["state"])
