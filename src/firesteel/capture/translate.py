"""From a region and its inputs to code: run the machine, close the graph, write the run function.

This is the table of contents of capture: `translate` executes symbolically (`_execute`), writes what the outcome asks for (`_write`),
hands the graph to the backend (`_compile_graph`) and builds the guard function.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from firesteel.artifacts import counters, dump, log, note_break, timed
from firesteel.capture.breaks import Action, State, action_of, current_state, exit_state, handler_state, write_generators
from firesteel.capture.emit import Emitter, graph_call
from firesteel.capture.guards import GuardFunction, MachineCode, build_guards
from firesteel.capture.machine import Machine
from firesteel.capture.mistakes import eager_error
from firesteel.capture.overlap import overlap_guards
from firesteel.capture.record import Input
from firesteel.capture.source import Local
from firesteel.capture.tracebacks import located_inside
from firesteel.capture.values.base import CannotRebuild, LazyValue, UserRaise, Value
from firesteel.capture.values.contexts import set_state
from firesteel.capture.values.leaves import LeavesRegion, refuse_shared, refuse_turned
from firesteel.capture.values.overrides import run_without_modes, write_modes
from firesteel.capture.values.python_random import write_draws
from firesteel.errors import BackendError, Break, FiresteelError, InternalError

if TYPE_CHECKING:
    from firesteel.capture.entry import Region

RESTARTS = 50

# Breaks that may be the program's own error: under fullgraph the real call is made first, so that eager's error is raised.
PERHAPS_AN_ERROR = frozenset({"abstract_failure", "operator", "constant"})


class Jump:
    """What a run function returns at a break: where to go on, with which values."""

    __slots__ = ("region", "inputs")

    def __init__(self, region: Any, inputs: tuple[Any, ...]):
        self.region, self.inputs = region, inputs


@dataclass
class Outcome:
    """How the machine stopped."""
    returned: Value | None = None
    raised: Value | None = None
    stopped: Break | None = None


@dataclass
class Captured:
    """A region's new code."""
    guard: GuardFunction
    run: Callable[..., Any]
    graph: torch.fx.GraphModule | None
    broke: str
    keep: bool          # False: code that only raises, not to be used again


def translate(region: Region, inputs: tuple[Any, ...]) -> Captured:
    """Captures a region for these inputs."""
    break_at: frozenset[int] = frozenset()
    real_leaves: frozenset[int] = frozenset()
    for _ in range(RESTARTS):
        m = Machine(region.root.make_world, region.policy, break_at)
        m.real_leaves = real_leaves
        try:
            with outside_inference(), outside_transforms():
                outcome = _execute(region, m, inputs)
            e = Emitter(m)
            _write(region, m, e, outcome)
            refuse_shared(m, e)
            refuse_turned(m, e)
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


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Abstract tensors have versions and histories, which inference mode would take from them; without it, no gradients is what is left."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Transforms of torch.func that are running are set aside: what they wrapped is captured as the tensors that the program sees.  Under
    one the graph runs as it is, operator by operator."""
    layers = []
    while torch._C._functorch.peek_interpreter_stack() is not None:
        layers.append(torch._C._functorch.pop_dynamic_layer_stack())
    try:
        yield
    finally:
        for layer in reversed(layers):
            torch._C._functorch.push_dynamic_layer_stack(layer)


def _execute(region: Region, m: Machine, inputs: tuple[Any, ...]) -> Outcome:
    values: list[Value] = [LazyValue(obj, Local(name)) for obj, name in zip(inputs, region.arg_names)]
    try:
        known = region.start(m, values)
        return Outcome(returned=m.look(m.run() if known is None else known))
    except UserRaise as raised:
        return Outcome(raised=raised.value)
    except Break as stop:
        if not m.frames:
            raise
        if region.root.fullgraph and stop.kind not in PERHAPS_AN_ERROR:
            raise stop.unsupported() from None
        return Outcome(stopped=stop)


# -- writing ------------------------------------------------------------------------------------------------------------
def _write(region: Region, m: Machine, e: Emitter, outcome: Outcome) -> None:
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


def _write_states(m: Machine, e: Emitter) -> None:
    for key, value in m.changed_states():
        e.line(f"{e.helper(set_state)}({key!r}, {e.constants.name(value)})")
    write_modes(m, e)


def _write_break(region: Region, m: Machine, e: Emitter, stop: Break) -> None:
    m.effects.emit(e)
    write_generators(e, m)
    e.constants.namespace["__name__"] = m.frames[-1].scope.get("__name__")      # what the breaking call may ask its caller for
    action = action_of(e, m)
    if action is None:
        _write_eager_rest(region, m, e)
        return
    exits = [(leave.condition, exit_state(e, m, leave)) for leave in action.exits]
    handler = handler_state(e, m, "error")
    _write_states(m, e)
    _write_action(region, m, e, action, handler)
    if region.root.fullgraph:
        e.line(f"raise {e.constant(stop.unsupported())}")
        return
    for condition, state in exits:
        jump = f"return {e.helper(Jump)}({_target(region, e, state)}, {_values(state)})"
        e.line(f"if {condition}: {jump}" if condition else jump)


def _write_action(region: Region, m: Machine, e: Emitter, action: Action, handler: State | None) -> None:
    e.line("try:")
    e.lines += [f"    {line}" for line in action.lines]
    e.line("except BaseException as error:")
    if handler is None or region.root.fullgraph:
        e.line(f"    raise {e.helper(located_inside)}(error, {m.places()!r})")
        return
    # not a Jump: inside of the except block Python still knows which exception is being handled
    e.line(f"    return {e.helper(go_on)}({_target(region, e, handler)}, {_values(handler)})")


def _write_eager_rest(region: Region, m: Machine, e: Emitter) -> None:
    state = current_state(e, m)
    _write_states(m, e)
    e.line(f"return {_target(region, e, state)}.eager({_values(state)})")


def _target(region: Region, e: Emitter, state: State) -> str:
    return e.constants.bind(region.root.continuation(state.spec), "continuation")


def _values(state: State) -> str:
    return f"({''.join(f'{text}, ' for text in state.values)})"


def go_on(region: Region, inputs: tuple[Any, ...]) -> Any:
    """Runs a continuation and what it jumps to."""
    out = region.step(inputs)
    while type(out) is Jump:
        out = out.region.step(out.inputs)
    return out


# -- closing ------------------------------------------------------------------------------------------------------------
def _finish(region: Region, m: Machine, e: Emitter, outcome: Outcome, inputs: tuple[Any, ...]) -> Captured:
    stop = outcome.stopped
    m.check_wishes()
    if stop is not None:
        note_break(stop.sentence, stop.location, stop.hint)
    graph, lines = None, write_draws(m, e)
    if m.record.nodes:
        graph, used = m.record.finish(e.outputs)
        if m.record.call_count():
            compiled = _compile_graph(region, graph, used)
            lines += graph_call(e, run_without_modes(compiled) if m.outer_modes else compiled, graph, used)
        else:
            graph = None
    compile_text = region.root.native_compiler()
    machine_code = MachineCode(compile_text, dict(zip(region.arg_names, inputs))) if compile_text is not None else None
    guard = build_guards([*m.all_guards(), *overlap_guards(m.record.inputs)], region.arg_names, list(e.sources), machine_code)
    if m.world.env is not None:
        m.world.env.freeze()
    run = e.build("run", lines)
    broke = stop.sentence if stop is not None else ""
    m.release()
    return Captured(guard, run, graph, broke, not (region.root.fullgraph and stop is not None))


def _compile_graph(region: Region, graph: torch.fx.GraphModule, used: list[Input]) -> Callable[..., Any]:
    counters["stats"]["unique_graphs"] += 1
    counters["stats"]["calls_captured"] += sum(1 for n in graph.graph.nodes if n.op in ("call_function", "call_method"))
    log("graph", lambda: f"{region.name}\n{graph.print_readable(print_output=False)}")
    dump("captured", "py", lambda: graph.print_readable(print_output=False))
    graph.meta["fullgraph"] = region.root.fullgraph
    try:
        with timed("backend"), outside_inference(), outside_transforms():
            return region.root.backend(graph, [i.abstract for i in used])
    except BackendError as error:
        raise eager_error(graph, [i.real for i in used]) or error from None
    except FiresteelError:
        raise
    except Exception as error:
        name = getattr(region.root.backend, "__name__", type(region.root.backend).__name__)
        raise BackendError(f"The backend {name} failed on a graph of {region.name}: {type(error).__name__}: {error}") from error
    finally:        # a graph that ends at a break may leave states of torch set, and a backend may have run it
        for node in graph.graph.nodes:
            if "state" in node.meta:
                set_state(*node.meta["state"])
