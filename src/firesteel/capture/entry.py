"""Regions and their Entries: where compiled code starts, and how a call finds it.

A `Region` is a place where compiled code may start: a function with one shape of call, or a `Continuation` after a break.  It has a
list of Entries; an `Entry` is a guard function (which also reads the values that the code needs) and a run function.  A call takes the
first Entry whose guards hold, where those behind the first few are ordered by use; a miss captures a new one.  Run functions return the
result, or a `Jump` to a continuation, which the driver follows in a loop, so that breaks in long loops do not grow Python's stack.

    compiled = compile_function(fn, backend=backend, fullgraph=False, dynamic=None, make_world=make_world)
    compiled(x)
"""
from __future__ import annotations

import functools
import logging
import sys
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from firesteel import stages, torchstate, transaction
from firesteel.artifacts import counters, log, timed
from firesteel.autograd.ranks import RankPlace
from firesteel.capture import marks
from firesteel.capture.guard_function import GuardFunction
from firesteel.capture.limits import advice
from firesteel.capture.policy import SHARED, SymbolPolicy, shared_records
from firesteel.capture.region_code import Jump, RegionCode, Spec, input_names
from firesteel.capture.replaced import needed
from firesteel.capture.source import Local, Source
from firesteel.config import config
from firesteel.errors import BackendError, Break, FiresteelError, InternalError, RecompileError, RecompileLimitExceeded
from firesteel.native_method import CompileText
from firesteel.records import dataclass
from firesteel.stages import Compilation, Record
from firesteel.torchstate import count_modes, current_modes, without_modes
from firesteel.tracebacks import is_ours, without_ours

if TYPE_CHECKING:
    from firesteel.capture.machine import SymbolicMachine
    from firesteel.capture.shape_specs import ShapeSpec
    from firesteel.capture.values.base import Value
    from firesteel.capture.world import MakeWorld

logger = logging.getLogger("firesteel")

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


TRIED_FIRST = 8         # Entries that keep their places: constants are tried before the more general code that was made for them later


@dataclass(eq=False)
class Entry:
    """A compiled variant of a region."""
    guard: GuardFunction
    run: Callable[..., Any]
    read_graph: Callable[[], torch.fx.GraphModule | None]
    reason: str                         # why it was compiled: the guard of an earlier Entry that failed
    seconds: float
    broke: str = ""                     # the break that ended it, if any
    late: bool = False                  # is it one of those that are ordered by use?
    boxed: bool = False                 # does `run` take its values in one list, which it empties?
    compilation: Compilation | None = None       # where fs.config asks for them: what the stages made
    check: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.check = self.guard.check

    @property
    def graph(self) -> torch.fx.GraphModule | None:
        """The captured graph; of an Entry that was loaded it is read now."""
        return self.read_graph()

    @property
    def stages(self) -> list[Record]:
        """What each stage made, as long as it is asked for; the backward's stages from its first use on."""
        return self.compilation.records if self.compilation is not None else []


def makes_parameters(inputs: tuple[Any, ...]) -> bool:
    """Is one of the inputs a lazy module that waits for its first call?"""
    modules = (m for x in inputs if isinstance(x, torch.nn.Module) for m in x.modules())
    return any(isinstance(m, LazyModuleMixin) and "_initialize_hook" in vars(m) for m in modules)


class Region:
    """See the module's text.  Subclasses say how a capture starts and what eager execution is."""

    stolen: Source | None = None        # a list that came in and that the compiled code may empty, to free its tensors early

    resumes = False     # does it begin behind a break?
    can_wait = True     # may calls run eagerly until an Entry is made on another thread?
    tier: Any = None    # how far that is (tiers.py)
    ranks: RankPlace | None = None      # where it is compared with other ranks' (autograd/ranks.py)

    @property
    def owns_inputs(self) -> bool:
        """May its code let go of what comes in as soon as it is read?  Of a captured backward, whose list is stolen, or a rest of one."""
        return self.stolen is not None or self.resumes and self.root.steals is not None

    def __init__(self, root: Root, name: str, arg_names: list[str]):
        self.root, self.name, self.arg_names = root, name, arg_names
        self.entries: list[Entry] = []              # as they were made
        self.order: tuple[Entry, ...] = ()          # as they are tried; replaced as a whole, so that any thread may read it
        self.policy = SymbolPolicy(root.dynamic, shared_records(root.code, (type(self), *self.place())))
        self.eager_only = False         # nothing of it can be captured
        self._warned = False
        self._general = False           # the variant at the recompile limit is made
        self._first: Entry | None = None            # what a stance had compiled for the first call alone
        self.backend = root.backend                 # who gets the graph that is being captured
        self._under_modes: UnderModes | None = None

    @property
    def can_be_kept(self) -> bool:
        """Between processes?"""
        return self._first is None and not self.owns_inputs and self.backend is self.root.backend

    def place(self) -> tuple[Any, ...]:
        """Which region of its function it is."""
        return tuple(self.arg_names)

    def start(self, m: SymbolicMachine, values: list[Value]) -> Value | None:
        """Puts the first frames on the machine; or the result, where it is known at once."""
        raise NotImplementedError

    def eager(self, inputs: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    # -- calling ---------------------------------------------------------------------------------------------------
    def step(self, inputs: tuple[Any, ...], in_range: bool = False) -> Any:
        """Runs the region on its inputs: a result, or a Jump.  While torch.profiler records it is a range of the trace."""
        if profiler._is_profiler_enabled and not in_range and torch.autograd._profiler_enabled():       # the flag is set before it records
            with torch._C._profiler._RecordFunctionFast(f"firesteel graph of {self.name}"):
                return self.step(inputs, True)
        if count_modes():
            return self._step_under_modes(inputs)
        for entry in self.order:
            values = entry.check(*inputs)
            if values is not None:
                if entry.late:
                    self._promote(entry)
                if entry.boxed:
                    del inputs
                    values = list(values)       # nothing else holds them
                    return entry.run(values)
                return entry.run(*values)
        return self._miss(inputs)

    def _promote(self, entry: Entry) -> None:
        """The Entry that was just used is tried first of those that are ordered by use; not while another thread compiles or does the same."""
        if self.order[TRIED_FIRST] is not entry:
            self.root.lock.holding_if_free(self._put_first, entry)

    def _put_first(self, entry: Entry) -> None:
        late = [other for other in self.order[TRIED_FIRST:] if other is not entry]
        self.order = (*self.order[:TRIED_FIRST], entry, *late)

    def _miss(self, inputs: tuple[Any, ...]) -> Any:
        entry, values = self.serve(inputs)
        if entry is None:
            return self.eager(inputs)
        if entry.boxed:
            del inputs
            values = list(values)
            return entry.run(values)
        return entry.run(*values)

    def serve(self, inputs: tuple[Any, ...]) -> tuple[Entry | None, Any]:
        """An Entry for these inputs, made where there is none, and the values it reads; (None, None): the call is to run eagerly."""
        if self.root.later is not None and self.can_wait and self.stolen is None and self.root.later(self, inputs):
            return None, None
        if sys.is_finalizing():
            counters["eager_calls"]["Python ends, and imports nothing any more"] += 1
            return None, None
        return (None, None) if self.eager_only else torchstate.unwatched(transaction.atomic, self.root.lock.holding, self._serve, inputs)

    def _serve(self, inputs: tuple[Any, ...]) -> tuple[Entry | None, Any]:
        entry, values = self._find(inputs)
        if entry is None:
            for prepare in BEFORE_COMPILING:
                prepare()
            entry = None if self._refuses(inputs) else self._compile(inputs)
            for tell in AFTER_COMPILING:
                tell()
            if entry is None:
                return None, None
            values = entry.check(*inputs)
            if values is None:
                raise InternalError(f"guards of {self.name} fail right after capture: {entry.guard.explain(inputs)}")
        return entry, values

    def prepare(self, inputs: tuple[Any, ...]) -> bool:
        """Makes an Entry for such inputs, for calls to come.  Is there one now?  Its guards need not hold any more: the program goes on."""
        return torchstate.unwatched(transaction.atomic, self.root.lock.holding, self._prepare, inputs)

    def _prepare(self, inputs: tuple[Any, ...]) -> bool:
        if self._find(inputs)[0] is not None:
            return True
        for prepare in BEFORE_COMPILING:
            prepare()
        count = len(self.entries)
        if not self.eager_only and not self._refuses(inputs):
            self._compile(inputs)
        for tell in AFTER_COMPILING:
            tell()
        return len(self.entries) > count

    def _step_under_modes(self, inputs: tuple[Any, ...]) -> Any:
        if self._under_modes is None:
            self._under_modes = UnderModes(self)
        return self._under_modes.step((*inputs, current_modes()))

    def variants(self) -> list[Entry]:
        """All Entries, those for calls under modes included."""
        return [*self.entries, *(self._under_modes.entries if self._under_modes is not None else ())]

    def _find(self, inputs: tuple[Any, ...]) -> tuple[Entry | None, Any]:
        for entry in self.order:
            values = entry.check(*inputs)
            if values is not None:
                if entry.late:
                    self._promote(entry)
                return entry, values
        return None, None

    # -- recompiling -----------------------------------------------------------------------------------------------
    def _refuses(self, inputs: tuple[Any, ...]) -> bool:
        """Is this call to run eagerly?  Raises where settings say so."""
        if torch._C._len_torch_dispatch_stack() and any(not mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):
            counters["eager_calls"]["a torch dispatch mode is on, which must see every operator"] += 1
            log("perf", lambda: f"{self.name} runs eagerly: a torch dispatch mode is on, which must see every operator")
            return True
        if marks.is_symbolic(inputs):
            return True     # torch.fx.symbolic_trace must see every operator too
        if names := needed():
            counters["eager_calls"][f"the program has replaced torch.Tensor.{names[0]}, which compiled code needs"] += 1
            log("perf", lambda: f"{self.name} runs eagerly: the program has replaced torch.Tensor.{names[0]}, which compiled code needs")
            return True
        if makes_parameters(inputs):
            log("perf", lambda: f"{self.name} runs eagerly once: that call makes the parameters of a lazy module")
            return True
        stance = marks.stance()
        if stance == "eager_on_recompile":
            return True
        if not self.entries and stance != "fail_on_recompile":
            return False
        why = self.why(inputs)
        if stance == "fail_on_recompile" or config.error_on_recompile:
            what = f"compiled again: {why}" if self.entries else "compiled: nothing is, for such a call"
            raise RecompileError(f"{self.name} would be {what}", hint="Keep what the guard names unchanged, or allow recompiles.")
        if len(self.entries) < (self.root.recompile_limit or config.recompile_limit):
            return False
        if self.root.fullgraph or config.error_on_recompile_limit:
            raise RecompileLimitExceeded(f"{self.name} has {len(self.entries)} variants already; the next is asked for because {why}",
                                         hint="Keep what the guard names unchanged, or raise fs.config.recompile_limit.")
        return self._at_limit(inputs)

    def _at_limit(self, inputs: tuple[Any, ...]) -> bool:
        """Is this call to run eagerly?  No, if one more variant, with symbols for what varied, serves it."""
        guards = [guard for entry in self.entries for guard in entry.guard.guards]
        general = not self._general and self.policy.settle(guards, dict(zip(self.arg_names, inputs)))
        if not self._warned:
            self._warned = True
            logger.warning("%s has %d compiled variants (fs.config.recompile_limit); %s: %s", self.name, len(self.entries),
                           "one more is made, dynamic in what varied" if general else "other inputs run eagerly",
                           advice([entry.guard for entry in self.entries], inputs))
        if general:
            self._general = True
            transaction.on_failure(functools.partial(setattr, self, "_general", False))
        counters["recompile_limit"][f"{self.name}: {'made dynamic' if general else 'eager'}"] += 1
        return not general

    def why(self, inputs: tuple[Any, ...]) -> str:
        """What keeps these inputs from the latest Entry."""
        return self.entries[-1].guard.explain(inputs) if self.entries else "first call"

    # -- compiling -------------------------------------------------------------------------------------------------
    def _compile(self, inputs: tuple[Any, ...]) -> Entry | None:
        reason = self.why(inputs)
        arguments = dict(zip(self.arg_names, inputs))
        if self.entries:
            counters["recompiles"][self.root.name] += 1
            log("recompiles", lambda: f"{self.name}: {reason}")
        for entry in (*self.entries, *((self._first,) if self._first is not None else ())):
            self.policy.learn(entry.guard.guards, arguments)
        first = self.root.first_backends.get(marks.stance(), self.root.backend)
        self.backend = self.root.backend if self.entries or self._first is not None else first
        counters["frames"]["total"] += 1
        begun = time.perf_counter()
        try:
            with marks.compiling(), stages.kept_by(stages.wanted(self.name, reason if self.entries else ""), self.name) as compilation:
                store = self.root.kept()
                captured = store.load(self, inputs) if store is not None else None
                if captured is None:
                    captured = self._capture(inputs)
                stages.done("captured", captured)
        except Break as stop:           # at the very call of the region: there is nothing to split
            if self.root.fullgraph or marks.breaks_are_errors():
                raise stop.unsupported() from None
            self.eager_only = True
            counters["graph_break"][stop.sentence] += 1
            return None
        except Exception as error:
            if isinstance(error, FiresteelError) and not isinstance(error, (BackendError, InternalError)):
                raise
            if not config.suppress_errors:
                if is_ours(error) and getattr(error, "ours", True):
                    stages.failed("note_capture", error, self.root.fn, inputs)
                raise
            counters["suppressed"][self.name] += 1
            logger.warning("capture of %s failed; it runs eagerly", self.name, exc_info=True)
            self.eager_only = True
            return None
        return self._store(captured, reason, time.perf_counter() - begun, compilation)

    def _capture(self, inputs: tuple[Any, ...]) -> RegionCode:
        from firesteel.capture.translate import translate  # with the machine, which a process that finds all in the cache does not need
        with timed("capture"):
            return translate(self, inputs)

    def _store(self, captured: RegionCode, reason: str, seconds: float, compilation: Compilation | None) -> Entry:
        entry = Entry(captured.guard, captured.run, captured.graph, reason, seconds, captured.broke, boxed=captured.boxed, compilation=compilation)
        if self.backend is not self.root.backend:       # for the first call alone: the next one decides what varies
            self._first = entry
        elif captured.keep:
            entry.late = len(self.entries) >= TRIED_FIRST
            self.entries.append(entry)
            self.order = (*self.order[:TRIED_FIRST], entry, *self.order[TRIED_FIRST:])
            counters["frames"]["ok"] += 1
        log("perf", lambda: f"{self.name} was compiled in {seconds * 1e3:.1f} ms{f' ({captured.broke})' if captured.broke else ''}")
        log("guards", lambda: f"{self.name}\n{entry.guard.text}")
        return entry


class FunctionRegion(Region):
    """The start of a function, for one shape of call: so many positional arguments, these keywords."""

    def __init__(self, root: Root, positional: int, keywords: tuple[str, ...]):
        self.positional, self.keywords = positional, keywords
        super().__init__(root, root.name, [*positional_names(root.names, positional, keywords), *keywords])
        if root.spec is not None:
            self.policy = SymbolPolicy(False, specified=root.spec.of_call(self.arg_names, positional, keywords))
        self.stolen = Local(self.arg_names[root.steals]) if root.steals is not None and root.steals < positional else None

    def start(self, m: SymbolicMachine, values: list[Value]) -> Value | None:
        from firesteel.capture.starts import start_function
        return start_function(m, self.root.fn, values[:self.positional], dict(zip(self.keywords, values[self.positional:])))

    def eager(self, inputs: tuple[Any, ...]) -> Any:
        part = self.root.part(self.root.fn) if self.eager_only and not isinstance(self.root.fn, types.FunctionType) else None
        fn = self.root.fn if part is None else part
        if marks.is_symbolic(inputs):
            fn = getattr(fn, marks.TRACED, fn)
        return fn(*inputs[:self.positional], **dict(zip(self.keywords, inputs[self.positional:])))


class UnderModes(Region):
    """A region in calls made under torch function modes: those are its last input, and traced through.  What is not the program's (guards,
    capture, the compiled graph) runs without them."""

    can_wait = False    # modes are a thread's own
    can_be_kept = False

    def __init__(self, region: Region):
        self.region = region
        super().__init__(region.root, region.name, [*region.arg_names, "torch_function_modes"])

    def start(self, m: SymbolicMachine, values: list[Value]) -> Value | None:
        m.modes.entered = m.modes.outer = tuple(m.look(mode) for mode in m.look(values[-1]).iterate(m))
        return self.region.start(m, values[:-1])

    def step(self, inputs: tuple[Any, ...], in_range: bool = False) -> Any:
        entry, values = without_modes(self.serve, inputs)
        return self.region.eager(inputs[:-1]) if entry is None else entry.run(*values)


def code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """Of a function, a method or a module's forward."""
    inner = type(fn).forward if isinstance(fn, torch.nn.Module) else fn.__func__ if isinstance(fn, types.MethodType) else fn
    code = getattr(inner, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def own_names(fn: Callable[..., Any]) -> Sequence[str]:
    """Of the positional arguments, where they are known."""
    code, skip = code_of(fn), int(isinstance(fn, (torch.nn.Module, types.MethodType)))
    return code.co_varnames[skip:code.co_argcount] if code is not None else ()


def positional_names(own: Sequence[str], count: int, keywords: tuple[str, ...]) -> list[str]:
    """The function's own; others for *args, and where a name would come twice (a bad call says it as a keyword, too)."""
    return [own[n] if n < len(own) and own[n] not in (*keywords, *own[:n]) else f"arg{n}" for n in range(count)]


class Continuation(Region):
    """The rest of the program after a break: suspended frames, whose values are the inputs."""

    resumes = True

    def __init__(self, root: Root, spec: Spec):
        self.spec = spec
        super().__init__(root, f"{root.name} after line {_line(spec)}", input_names(spec))

    def place(self) -> tuple[Any, ...]:
        return tuple((frame.code.co_qualname, frame.index, frame.slots, frame.stack) for frame in self.spec)

    def start(self, m: SymbolicMachine, values: list[Value]) -> Value | None:
        from firesteel.capture.starts import start_frames
        start_frames(m, self.spec, iter(values))
        return None

    def eager(self, inputs: tuple[Any, ...]) -> Any:
        from firesteel.capture.suspended import run_frames
        return run_frames(self.spec, inputs)


def _line(spec: Spec) -> int | None:
    from firesteel.capture.code import program
    frame = spec[-1]
    return program(frame.code)[max(frame.index - 1, 0)].lineno


# -- the whole function -------------------------------------------------------------------------------------------------
class Root:
    """One compiled callable: its settings, its regions, its lock."""

    def __init__(self, fn: Callable[..., Any], *, backend: Backend, make_world: MakeWorld, fullgraph: bool = False, dynamic: bool | None = None,
                 native_compiler: Callable[[], CompileText | None] = lambda: None, steals: int | None = None, name: str | None = None,
                 recompile_limit: int | None = None, first_backends: Mapping[str, Backend] = types.MappingProxyType({}),
                 code: types.CodeType | None = None, later: Callable[[Region, tuple[Any, ...]], bool] | None = None,
                 kept: Callable[[], Any] = lambda: None, spec: ShapeSpec | None = None, names: Sequence[str] | None = None):
        self.fn, self.backend, self.fullgraph, self.dynamic, self.make_world = fn, backend, fullgraph, dynamic, make_world
        own = getattr(fn, "__module__", None) == "firesteel.api"        # that calls modules: one function for all of them
        self.code = code if own else code_of(fn)    # whose records of what changed are shared
        self.names = own_names(fn) if names is None else names      # of arguments, for people
        self.steals = steals                        # the argument that is a list, which compiled code may empty
        self.native_compiler = native_compiler      # for guards; None while there is none
        self.name = name or getattr(fn, "__qualname__", None) or type(fn).__qualname__
        self.recompile_limit = recompile_limit      # of each region; None: the setting
        self.first_backends = first_backends        # stance -> who compiles for the first call
        self.later = later                          # sees to it that an Entry is made; False: it is to be made at once
        self.spec = spec                            # what the caller said of the arguments' sizes
        self.kept = kept                            # where captured regions are kept between processes; None: nowhere
        self.lock = transaction.Lock()
        self.regions: dict[Any, FunctionRegion] = {}
        self.continuations: dict[Spec, Continuation] = {}
        self.parts: dict[Any, Any] = {}             # function -> what is called for real in its place
        self.forced: dict[Backend, Any] = {}        # a backend that a stance forced -> the callable compiled by it
        ROOTS.add(self)

    def region(self, positional: int, keywords: tuple[str, ...]) -> FunctionRegion:
        return self.regions.setdefault((positional, *keywords), FunctionRegion(self, positional, keywords))     # the lock may be held for long

    def continuation(self, spec: Spec) -> Continuation:
        return self.lock.holding(self._continuation, spec)

    def _continuation(self, spec: Spec) -> Continuation:
        if spec not in self.continuations:
            self.continuations[spec] = Continuation(self, spec)
        return self.continuations[spec]

    def part(self, fn: Any) -> Any:
        """What compiled code calls for real in the place of `fn`; None for the function itself."""
        key = getattr(fn, "__func__", fn), getattr(fn, "__self__", None)
        if not any(isinstance(one, (type, types.FunctionType)) for one in key):
            return None
        if key not in self.parts:
            from firesteel.capture.parts import part_of
            self.parts[key] = part_of(fn, functools.partial(self._compiled, backend=self.backend))
        return self.parts[key]

    def _compiled(self, fn: Callable[..., Any], backend: Backend, **settings: Any) -> Callable[..., Any]:
        return compile_function(fn, backend=backend, dynamic=self.dynamic, make_world=self.make_world, native_compiler=self.native_compiler,
                                recompile_limit=self.recompile_limit, first_backends=self.first_backends, later=self.later, kept=self.kept,
                                **settings)

    def unusual(self) -> Callable[..., Any]:
        """What is called where a stance or a block says so: the function itself, or code of the backend that is forced."""
        backend = marks.forced_backend()
        if marks.eager_only() or backend is None:
            return self.fn
        key = getattr(backend, "__wrapped__", backend)
        if key not in self.forced:
            self.forced[key] = self._compiled(self.fn, backend, fullgraph=self.fullgraph, steals=self.steals, name=self.name, spec=self.spec)
        return self.forced[key].__firesteel_root__.drive

    def drive(self, *args: Any, **kwargs: Any) -> Any:
        """A call of compiled code, whatever the stance is."""
        return drive(self.region(len(args), tuple(kwargs)), (*args, *kwargs.values()))

    def all_regions(self) -> list[Region]:
        return [*self.regions.values(), *self.continuations.values()]

    def learn_from(self, other: Root) -> None:
        """What changed between calls of the other is taken as changing here too."""
        for (positional, *keywords), region in other.regions.items():
            self.region(positional, tuple(keywords)).policy.take(region.policy)

    def reset(self) -> None:
        self.lock.holding(self._forget)

    def _forget(self) -> None:
        self.regions.clear()
        self.continuations.clear()
        self.parts.clear()
        self.forced.clear()


ROOTS: weakref.WeakSet[Root] = weakref.WeakSet()
BEFORE_COMPILING: list[Callable[[], None]] = []     # called where no Entry serves a call: settings from outside are looked at
AFTER_COMPILING: list[Callable[[], None]] = []      # called when it is over, but for errors: what was counted is told


def drive(region: Region, inputs: tuple[Any, ...]) -> Any:
    """Runs a region and the continuations it jumps to."""
    grad = torch.is_grad_enabled()
    try:
        out = region.step(inputs)
        while type(out) is Jump:
            out = out.go()
        return out
    except BaseException as error:
        torch._C._set_grad_enabled(grad)     # a block that set it was left by the exception
        without_ours(error)
        raise


def compile_function(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A compiled version of a function, a bound method, a module or another callable; the settings are those of `Root`."""
    root = Root(fn, **settings)
    regions, is_unusual = root.regions, marks.is_unusual

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if is_unusual():
            return root.unusual()(*args, **kwargs)
        region = regions.get((len(args), *kwargs) if kwargs else (len(args),)) or root.region(len(args), tuple(kwargs))
        return drive(region, (*args, *kwargs.values()) if kwargs else args)

    if not isinstance(fn, torch.nn.Module):
        functools.update_wrapper(compiled, fn)
    marks.stands_for(compiled, fn)
    compiled.__firesteel_root__ = root      # type: ignore[attr-defined]  # read by fs.explain
    return compiled


def reset() -> None:
    """Forgets every compiled variant in this process."""
    for root in list(ROOTS):
        root.reset()
    SHARED.clear()
