"""Guards: what must still hold of the program's objects for a compiled region to be right.

A Guard is (source, kind, data).  A kind is a row of `KINDS`: the Python text of its check, and the sentence told when it fails.
`build_guards` makes ONE function of all the guards of a region, over the region's arguments.

    guards = [Guard(Local("n"), "equals", 3), Guard(Local("x"), "tensor", TensorFacts.of(x))]
    g = build_guards(guards, ["n", "x"])
    g.check(3, x)                   # True
    g.explain([4, x])               # "n is 4; it was 3"

What always holds:
1. A check only reads; where reading fails (an attribute was deleted, a list got shorter) the guard fails and nothing is raised.
2. Equal guards are checked once; what several sources share is computed once.
3. Arguments themselves are looked at first, their tensors too: they change most often.  Then checks run in the order of their rows:
   structure, since later checks rely on it, then constants, then what is dear.
4. All tensors are checked by one call, which also checks that no two of them have become one object.
5. What can be said in machine code is (steps.py), where there is a compiler at hand; it stands between arguments and the rest.
"""
from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.modules.module as module_internals

from firesteel.capture import steps as native
from firesteel.capture.source import MODULE_HOOKS, Constants, Emitter, Local, Source, build_function, identifier, literal
from firesteel.sym.expr import python_text
from firesteel.table import Table

try:        # primitives of torch's C++ core; GlobalState.write and TensorFacts.write say the same in Python, slower
    from torch._C._dynamo import guards as _core
except ImportError:
    _core = None        # type: ignore[assignment]  # a module, or nothing
CoreState: Any = getattr(_core, "GlobalStateGuard", None)
CoreTensors: Any = getattr(_core, "TensorGuards", None)


RANGE = "range of"       # begins the reason of a bound that every symbol has


@dataclass(frozen=True)
class Guard:
    """One condition; `source` is None where it concerns no object (global state)."""
    source: Any     # a Source or None
    kind: str
    data: Any = None

    def key(self) -> tuple:
        """Equal for guards that say the same."""
        data = self.data
        if self.kind in ("tensor", "state"):
            return self.source, self.kind       # facts of one object at one time: the first say it all
        return self.source, self.kind, (type(data), data) if literal(data) is not None or isinstance(data, Source) else id(data)

    @property
    def name(self) -> str:
        return self.source.name if self.source is not None else ""

    @property
    def place(self) -> Source:
        """The source, of a guard that has one."""
        assert self.source is not None, self
        return self.source

    def specialization(self) -> str:
        """Which sizes or numbers the code is compiled for, and why; empty for guards on other things."""
        if self.kind == "expr" and not self.data.why.startswith(RANGE):
            because = [self.data.why, f"asked at {self.data.reason}" if self.data.reason else ""]
            return ": ".join([self.data.text(lambda source: source.name), *filter(None, because)])
        if self.kind == "equals" and type(self.data) in (int, float):
            return f"{self.name} == {self.data!r}: a number is a constant until it changes"
        if self.kind == "tensor" and any(size is not None for size in self.data.sizes):
            shown = ", ".join("any" if size is None else str(size) for size in self.data.sizes)
            return f"{self.name}.shape == ({shown}): sizes are constants until they change, or where they are marked as static"
        return ""

    def __str__(self) -> str:
        return f"{self.kind}({self.name}{f', {self.data!r}' if self.data is not None else ''})"


# ---------------------------------------------------------------------------------------------------------------------
# Kinds


class Writer:
    """What a row's `check` may use: text for the guard's value, for other sources, and for constants."""

    def __init__(self, emitter: Emitter):
        self.emitter = emitter
        self.load = emitter.load
        self.constant = emitter.constants.name
        self.bind = emitter.constants.bind


@dataclass(frozen=True)
class Kind:
    rank: int                                               # lower is checked earlier
    check: Callable[[str, Any, Writer], str]                # (text of the value, data, writer) -> text of a condition
    sentence: Callable[[str, Any, Any], str]                # (name, data, value now) -> why it failed
    uses: int = 1                                           # how often the check's text says the value
    sources: Callable[[Any], Iterable[Source]] = lambda data: ()    # further sources that it loads


KINDS: Table[Kind] = Table("guard kind", "capture/guards.py")
STRUCTURE, CONSTANT, STATE, TENSOR, RELATION = range(5)     # the ranks


def _show(value: Any, limit: int = 80) -> str:
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= limit else text[:limit - 3] + "..."


def same_constant(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down; nan is nan, 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (a != a and b != b)
    if type(a) is complex:
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if type(a) is slice:
        return same_constant((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def _equals(x: str, data: Any, w: Writer) -> str:
    kind = type(data)
    if data is None or kind is bool or data is Ellipsis or isinstance(data, (type, torch.dtype, torch.layout, torch.memory_format)):
        return f"{x} is {w.constant(data)}"
    if kind in (int, str, bytes) or (kind is float and data != 0 and math.isfinite(data)):
        return f"type({x}) is {kind.__name__} and {x} == {data!r}"
    return f"{w.bind(same_constant)}({x}, {w.bind(data)})"


KINDS.add("type", Kind(STRUCTURE, lambda x, data, w: f"type({x}) is {w.bind(data)}",
                       lambda name, data, now: f"{name} is of type {_show(type(now))}; it was {_show(data)}"))
KINDS.add("instance", Kind(STRUCTURE, lambda x, data, w: f"isinstance({x}, {w.bind(data)})",
                           lambda name, data, now: f"{name} is of type {_show(type(now))}, no longer a {_show(data)}"))
KINDS.add("identity", Kind(STRUCTURE, lambda x, data, w: f"{x} is {w.bind(data)}",
                           lambda name, data, now: f"{name} is another object, {_show(now)}; it was {_show(data)}"))
KINDS.add("none", Kind(STRUCTURE, lambda x, data, w: f"{x} is None", lambda name, data, now: f"{name} is {_show(now)}; it was None"))
KINDS.add("not_none", Kind(STRUCTURE, lambda x, data, w: f"{x} is not None", lambda name, data, now: f"{name} is None; it was not"))
KINDS.add("length", Kind(STRUCTURE, lambda x, data, w: f"len({x}) == {data}",
                         lambda name, data, now: f"{name} has {len(now)} items; it had {data}"))
KINDS.add("remaining", Kind(STRUCTURE, lambda x, data, w: f"{x}.__length_hint__() == {data}",
                            lambda name, data, now: f"the iterator {name} has {now.__length_hint__()} items left; it had {data}"))
KINDS.add("keys", Kind(STRUCTURE, lambda x, data, w: f"(*{x},) == {w.constant(tuple(data), 'keys')}",
                       lambda name, data, now: f"{name} has the keys {_show(list(now))}; they were {_show(list(data))}"))
KINDS.add("has_key", Kind(STRUCTURE, lambda x, data, w: f"{w.constant(data)} in {x}",
                          lambda name, data, now: f"{name} has no key {data!r} any more"))
KINDS.add("no_key", Kind(STRUCTURE, lambda x, data, w: f"{w.constant(data)} not in {x}",
                         lambda name, data, now: f"{name} has got the key {data!r}"))
KINDS.add("has_object", Kind(STRUCTURE, lambda x, data, w: f"{w.load(data)} in {x}",
                             lambda name, data, now: f"{name} has no key {data.name} any more", sources=lambda data: (data,)))
KINDS.add("no_object", Kind(STRUCTURE, lambda x, data, w: f"{w.load(data)} not in {x}",
                            lambda name, data, now: f"{name} has got the key {data.name}", sources=lambda data: (data,)))
KINDS.add("has_attr", Kind(STRUCTURE, lambda x, data, w: f"hasattr({x}, {data!r})",
                           lambda name, data, now: f"{name} has no attribute {data} any more"))
KINDS.add("no_attr", Kind(STRUCTURE, lambda x, data, w: f"not hasattr({x}, {data!r})",
                          lambda name, data, now: f"{name} has got the attribute {data}"))
KINDS.add("code", Kind(STRUCTURE, lambda x, data, w: f"{x}.__code__ is {w.bind(data)}",
                       lambda name, data, now: f"{name} is another function, {_show(now)}; it was {data.co_name}"))
KINDS.add("truth", Kind(CONSTANT, lambda x, data, w: f"{'' if data else 'not '}{x}",
                        lambda name, data, now: f"{name} is {'false' if data else 'true'} now; it was {'true' if data else 'false'}"))
KINDS.add("equals", Kind(CONSTANT, _equals, lambda name, data, now: f"{name} is {_show(now)}; it was {_show(data)}", uses=2))
KINDS.add("contiguous", Kind(CONSTANT, lambda x, data, w: f"{x}.is_contiguous()", lambda name, data, now: f"{name} is not contiguous any more"))
KINDS.add("same", Kind(RELATION, lambda x, data, w: f"{x} is {w.load(data)}",
                       lambda name, data, now: f"{name} is no longer the same object as {data.name}", sources=lambda data: (data,)))
KINDS.add("distinct", Kind(RELATION, lambda x, data, w: f"{x} is not {w.load(data)}",
                           lambda name, data, now: f"{name} has become the same object as {data.name}", sources=lambda data: (data,)))

KINDS.add("all_distinct", Kind(RELATION, lambda x, data, w: f"len({{{', '.join(f'id({w.load(source)})' for source in data)}}}) == {len(data)}",
                               lambda name, data, now: f"two of {', '.join(source.name for source in data)} have become the same object",
                               sources=lambda data: data))

def _hooks_of(attributes: Mapping[str, Any]) -> str:
    return ", ".join(name.strip("_").replace("_", " ") for name in MODULE_HOOKS if attributes[name])


KINDS.add("module", Kind(STRUCTURE, lambda x, data, w: f"type({x}) is {w.bind(data[0])} and {x}.training is {data[1]}",
                         lambda name, data, now: (f"{name} is in {'training' if now.training else 'evaluation'} mode now" if type(now) is data[0]
                                                  else f"{name} is a {_show(type(now))}; it was a {_show(data[0])}"), uses=2))
KINDS.add("no_hooks", Kind(STRUCTURE, lambda x, data, w: f"not ({' or '.join(f'{x}[{hook!r}]' for hook in MODULE_HOOKS)})",
                           lambda name, data, now: f"{name} has got hooks ({_hooks_of(now)})", uses=4))


# -- expressions over sizes and numbers


@dataclass(frozen=True)
class Question:
    """A condition over symbols (an Expr of dtype bool) and where each symbol's value is found."""
    expr: Any
    symbols: tuple[tuple[str, Source], ...]
    reason: str = ""        # the user's line that asked it
    why: str = ""           # what the answer was needed for

    def text(self, load: Callable[[Source], str]) -> str:
        return python_text(self.expr, {symbol: load(source) for symbol, source in self.symbols})


def _question_sentence(name: str, data: Question, now: Any) -> str:
    return f"{data.text(lambda source: source.name)} does not hold any more{f' (asked at {data.reason})' if data.reason else ''}"


KINDS.add("expr", Kind(RELATION, lambda x, data, w: data.text(w.load), _question_sentence,
                       sources=lambda data: [source for _, source in data.symbols]))


# -- global state


@dataclass(frozen=True)
class StateRow:
    read: Callable[[], Any]
    sentence: str


def _autocast() -> Any:
    """False while no autocast is on; else what is on, by device type."""
    if not torch._C._is_any_autocast_enabled():
        return False
    devices = ("cpu", "cuda")
    return (torch.is_autocast_cache_enabled(), *[torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in devices])


def _module_hooks() -> Any:
    """False while there are no hooks that torch calls for every module; else the kind of the backward ones."""
    some = bool(module_internals._has_any_global_hook())
    return some and (module_internals._global_is_full_backward_hook, bool(module_internals._global_forward_hooks_always_called))


STATES: Table[StateRow] = Table("global state", "capture/guards.py")
for _name, _read, _sentence in [
    ("grad", torch.is_grad_enabled, "gradients are recorded: {now}; it was {then}"),
    ("inference", torch.is_inference_mode_enabled, "inference mode is {now}; it was {then}"),
    ("autocast", _autocast, "autocast is {now}; it was {then}"),
    ("default_dtype", torch.get_default_dtype, "the default dtype is {now}; it was {then}"),
    ("deterministic", torch._C._get_deterministic_algorithms, "deterministic algorithms: {now}; it was {then}"),
    ("torch_function", torch._C._is_torch_function_enabled, "__torch_function__ is enabled: {now}; it was {then}"),
    ("dispatch_modes", torch._C._len_torch_dispatch_stack, "{now} torch dispatch modes are active; it was {then}"),
    ("module_hooks", _module_hooks, "hooks on all modules: {now}; it was {then}"),
]:
    STATES.add(_name, StateRow(_read, _sentence))

# what torch's own C++ check compares in one call; where it says "unchanged", these rows need no look
_IN_CORE = frozenset({"grad", "autocast", "default_dtype", "deterministic", "torch_function"})


@dataclass(frozen=True)
class GlobalState:
    """The global state at the start of a capture; make it before anything of the program runs."""
    values: tuple[tuple[str, Any], ...]
    core: Any = field(default=None, compare=False)      # torch's C++ snapshot, where there is one

    @staticmethod
    def now() -> GlobalState:
        values = tuple((str(name), row.read()) for name, row in STATES.items())
        return GlobalState(values, CoreState() if CoreState is not None else None)

    def write(self, w: Writer) -> str:
        """The C++ snapshot also compares things that do not matter here (thread counts), so its no is asked again row by row."""
        def conditions(rows: Iterable[tuple[str, Any]]) -> str:
            return " and ".join(f"{w.bind(STATES[name].read, name)}() == {w.constant(value)}" for name, value in rows)
        inside = [row for row in self.values if row[0] in _IN_CORE]
        outside = [row for row in self.values if row[0] not in _IN_CORE]
        if self.core is None:
            return conditions(self.values)
        return f"({w.bind(self.core.check, 'state')}() or {conditions(inside)}) and {conditions(outside)}"

    def difference(self) -> str:
        for name, then in self.values:
            now = STATES[name].read()
            if now != then:
                return STATES[name].sentence.format(now=now, then=then)
        return "the global state of torch is as it was"


KINDS.add("state", Kind(STATE, lambda x, data, w: data.write(w), lambda name, data, now: data.difference()))


def state_guard() -> Guard:
    """The guard on the global state as it is now."""
    return Guard(None, "state", GlobalState.now())


# -- tensors


Dims = tuple["int | None", ...]


@dataclass(frozen=True, eq=False)
class TensorFacts:
    """What is guarded of a tensor; a None in `sizes` or `strides` is a dimension that may change."""
    cls: type
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    sizes: Dims
    strides: Dims
    example: Callable[[], torch.Tensor | None]      # a weak reference: guards keep no tensor alive

    @staticmethod
    def of(tensor: torch.Tensor, sizes: Dims | None = None, strides: Dims | None = None) -> TensorFacts:
        strided = tensor.layout is torch.strided
        own_strides = tuple(tensor.stride()) if strided else ()
        return TensorFacts(type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
                           tuple(tensor.shape) if sizes is None else tuple(sizes),
                           own_strides if strides is None else tuple(strides), weakref.ref(tensor))

    def write(self, x: str, w: Writer) -> str:
        """The check in Python."""
        parts = [f"type({x}) is {w.bind(self.cls)}", f"{x}.dtype is {w.bind(self.dtype)}", f"{x}.device == {w.bind(self.device)}",
                 f"{x}.layout is {w.bind(self.layout)}", f"{x}.requires_grad is {self.requires_grad}",
                 *_dims_text(f"{x}.shape", self.sizes)]
        if self.layout is torch.strided:
            parts += _dims_text(f"{x}.stride()", self.strides)
        return " and ".join(parts)

    def difference(self, name: str, now: Any) -> str:
        if not isinstance(now, torch.Tensor) or type(now) is not self.cls:
            return f"{name} is of type {_show(type(now))}; it was {_show(self.cls)}"
        for what in ("dtype", "device", "layout", "requires_grad"):
            if getattr(now, what) != getattr(self, what):
                return f"{name}.{what} is {getattr(now, what)}; it was {getattr(self, what)}"
        if now.dim() != len(self.sizes):
            return f"{name} has {now.dim()} dimensions; it had {len(self.sizes)}"
        for what, then, value in (("size", self.sizes, tuple(now.shape)), ("stride", self.strides, now.stride() if self.strides else ())):
            for d, (old, new) in enumerate(zip(then, value)):
                if old is not None and old != new:
                    return f"{name} has {what} {new} in dimension {d}; it was {old}"
        return f"{name} differs from before in its dispatch keys (conjugate, negative or inference tensor, vmap or grad level)"


def _dims_text(x: str, dims: Dims) -> list[str]:
    if None not in dims:
        return [f"{x} == {dims!r}"]
    return [f"len({x}) == {len(dims)}", *[f"{x}[{d}] == {n}" for d, n in enumerate(dims) if n is not None]]


KINDS.add("tensor", Kind(TENSOR, lambda x, data, w: data.write(x, w), lambda name, data, now: data.difference(name, now), uses=7))


def tensor_checker(facts: Sequence[TensorFacts]) -> Callable[..., bool] | None:
    """torch's C++ check of many tensors in one call: 0.15 to 0.25 us each, against about 1 us in Python.

    It also says no where two of the tensors are one object.  None where it is missing, or an example has gone.
    """
    examples = [fact.example() for fact in facts]
    if CoreTensors is None or any(example is None for example in examples):
        return None
    return CoreTensors(*examples, dynamic_dims_sizes=[list(fact.sizes) for fact in facts],
                       dynamic_dims_strides=[list(fact.strides) for fact in facts]).check


# ---------------------------------------------------------------------------------------------------------------------
# One function of many guards


class GuardFunction:
    """The guards of a region as one function over its arguments.

    `check(*args)` is the generated function itself: True or False; or, built with `returns`, a tuple of those sources' values, or None.
    """

    def __init__(self, guards: list[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None, python_only: bool = False,
                 machine_code: MachineCode | None = None):
        self.guards, self.arg_names, self._returns = guards, list(arg_names), returns
        self._single: dict[int, Callable[..., Any]] = {}
        self._python_only = python_only
        walk = _Walked(guards, arg_names, returns, machine_code) if machine_code is not None and returns is not None else None
        self.walks = walk is not None and walk.worth_it
        self.check = _Writing(guards, arg_names, returns, False, walk).build(self._slowly) if self.walks else self.in_python

    def __call__(self, *args: Any) -> Any:
        return self.check(*args)

    @functools.cached_property
    def in_python(self) -> Callable[..., Any]:
        """The check without machine code; made when it is first asked for."""
        return _generate(self.guards, self.arg_names, self._returns, self._python_only)

    def _slowly(self, *args: Any) -> Any:
        return self.in_python(*args)

    @property
    def text(self) -> str:
        """The generated Python."""
        return self.in_python.__source__    # type: ignore[attr-defined]  # from build_function

    def explain(self, args: Sequence[Any] | Mapping[str, Any]) -> str:
        """The first guard that fails on these arguments, as a sentence; an empty string where all hold."""
        arguments = dict(args) if isinstance(args, Mapping) else dict(zip(self.arg_names, args, strict=True))
        for n, guard in enumerate(self.guards):
            if text := self._failure(n, guard, arguments):
                return text
        if self.check(*[arguments[name] for name in self.arg_names]) in (False, None):
            return _tensor_failure(self.guards, arguments)
        return ""

    def failing(self, args: Sequence[Any]) -> Guard | None:
        """The first guard that fails on these arguments."""
        arguments = dict(zip(self.arg_names, args, strict=True))
        return next((guard for n, guard in enumerate(self.guards) if self._failure(n, guard, arguments)), None)

    def _failure(self, n: int, guard: Guard, arguments: Mapping[str, Any]) -> str:
        """Why this one fails, or an empty string; each guard is compiled alone when first asked."""
        try:
            now = guard.place.fetch(arguments) if guard.source is not None else None
        except Exception as error:      # the object is not where it was: that is the reason
            return f"{guard.name} cannot be read any more ({type(error).__name__}: {error})"
        if n not in self._single:
            self._single[n] = _generate([guard], self.arg_names, None, python_only=True)
        if self._single[n](*[arguments[name] for name in self.arg_names]):
            return ""
        try:
            return KINDS[guard.kind].sentence(guard.name, guard.data, now)
        except Exception as error:      # the value is so different that the sentence cannot be said of it
            return f"{guard.name} is {_show(now)}; {guard.kind} does not apply to it ({type(error).__name__})"


@dataclass(frozen=True)
class MachineCode:
    """What guards need to be machine code where they can: a compiler, and the arguments, of which they all hold now."""
    compile_text: native.CompileText
    arguments: Mapping[str, Any]


def build_guards(guards: Iterable[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None = None,
                 machine_code: MachineCode | None = None) -> GuardFunction:
    """One function that checks all guards; with `returns`, it hands back those sources' values, read once for check and use."""
    return GuardFunction(_ordered(guards), arg_names, returns, machine_code=machine_code)


def _concerns_argument(guard: Guard) -> bool:
    """A cheap look at an argument itself: it comes first."""
    return type(guard.source) is Local and KINDS[guard.kind].rank <= CONSTANT


def _ordered(guards: Iterable[Guard]) -> list[Guard]:
    """Each guard once; cheap ones on arguments, then by rank, and within a rank from the roots outward."""
    def place(guard: Guard) -> tuple[bool, int, int]:
        rank, depth = KINDS[guard.kind].rank, len(guard.source.chain()) if guard.source is not None else 0
        return not _concerns_argument(guard), rank, depth
    return sorted({guard.key(): guard for guard in _aliases_told(guards)}.values(), key=place)


def _aliases_told(guards: Iterable[Guard]) -> Iterable[Guard]:
    """A second tensor guard on the same tensor becomes "the same object as the first": the C++ check wants them distinct."""
    seen: dict[int, Source] = {}
    for guard in guards:
        example = guard.data.example() if guard.kind == "tensor" else None
        if example is not None and seen.setdefault(id(example), guard.place) != guard.source:
            yield Guard(guard.source, "same", seen[id(example)])
        else:
            yield guard


def _loads(guard: Guard) -> Iterable[Source]:
    kind = KINDS[guard.kind]
    if guard.source is not None:
        yield from [guard.source] * kind.uses
    yield from kind.sources(guard.data)


class _Body:
    """Collects conditions and the assignments they need, in order, so that a condition stands before later assignments."""

    def __init__(self, emitter: Emitter, failure: str):
        self.emitter, self.failure = emitter, failure
        self.waiting: list[str] = []

    def add(self, write: Callable[[], str]) -> None:
        before = len(self.emitter.lines)
        condition = write()
        if len(self.emitter.lines) > before and self.waiting:
            self.emitter.lines.insert(before, self._test())
        self.waiting.append(condition)
        if len(self.waiting) >= 32:
            self.flush()

    def _test(self) -> str:
        tests, self.waiting = self.waiting, []
        inside = " and ".join(f"({test})" if " or " in test else test for test in tests)
        return f"if not ({inside}): return {self.failure}"

    def flush(self) -> None:
        if self.waiting:
            self.emitter.lines.append(self._test())


class _Walked:
    """The guards that are steps in machine code, and the places of what Python text takes over in the tuple `found`."""

    def __init__(self, guards: Sequence[Guard], arg_names: Sequence[str], returns: Sequence[Source], machine_code: MachineCode):
        self.steps, self.compile_text = native.Steps(arg_names, machine_code.arguments), machine_code.compile_text
        self.done = {n for n, guard in enumerate(guards) if not _concerns_argument(guard) and self.steps.check(guard)}
        self.worth_it = native.POSSIBLE and len(self.done) >= native.WORTH_IT
        self.places: dict[Source, int] = {}
        for source in [*returns, *[guard.place for guard in guards if guard.kind == "tensor"]]:
            self._export(source)

    def _export(self, source: Source) -> int:
        return self.places.setdefault(source, len(self.places)) if self.steps.reads(source) is not None else -1

    def take(self, sources: Iterable[Source]) -> dict[Source, int]:
        """The places of these, or of the last ones on the way to them that are read in machine code."""
        return {step: place for source in sources for step in [self._last(source)] if step.base is not None and (place := self._export(step)) >= 0}

    def _last(self, source: Source) -> Source:
        while source.base is not None and self.steps.reads(source) is None:
            source = source.base
        return source

    def row(self, sources: Sequence[Source]) -> str:
        """Text for a tuple of these sources, where they stand in a row; else nothing."""
        places = [self.places.get(source, -1) for source in sources]
        if not places or places != list(range(max(places[0], 0), places[0] + len(places))):
            return ""
        return f"found[{places[0]}:{places[-1] + 1}]"

    def write(self, constants: Constants, arguments: str, otherwise: Callable[..., Any]) -> list[str]:
        walk = self.steps.build(list(self.places), self.compile_text)
        constants.bind(walk, "alive")       # as long as the function
        return [f"found = {constants.bind(walk.call, 'walk')}({arguments})", "if found is None: return None",
                f"if found is False: return {constants.bind(otherwise, 'in_python')}({arguments})"]


class _Writing:
    """Writes the function: arguments, what is machine code, the rest by rank, the values."""

    def __init__(self, guards: Sequence[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None, python_only: bool, walk: _Walked | None):
        self.parameters, self.returns, self.walk = [identifier(name) for name in arg_names], returns, walk
        self.constants = Constants()
        self.emitter = Emitter(self.constants)
        self.body, self.writer = _Body(self.emitter, "None" if returns is not None else "False"), Writer(self.emitter)
        self.tensors = [guard for guard in guards if guard.kind == "tensor"]
        if walk is not None:        # in the order in which they are handed over
            self.tensors.sort(key=lambda guard: walk.places.get(guard.place, -1))
        self.checker = tensor_checker([guard.data for guard in self.tensors]) if self.tensors and not python_only else None
        done = walk.done if walk is not None else ()
        self.guards = [guard for n, guard in enumerate(guards) if n not in done and (guard.kind != "tensor" or self.checker is None)]
        self.tensor_row = walk.row([guard.place for guard in self.tensors]) if walk is not None else ""
        self.result_row = walk.row(returns) if walk is not None and returns is not None else ""

    def build(self, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        loads = self._loads()
        self.emitter.share(loads)
        self._arguments()
        if self.walk is not None:
            self._walk(self.walk, loads, otherwise)
        self._rest()
        return self._function()

    def _loads(self) -> list[Source]:
        """All that Python text will say."""
        found = [source for guard in self.guards for source in _loads(guard)]
        found += [guard.place for guard in self.tensors] if self.checker is not None and not self.tensor_row else []
        return found + list(self.returns or () if not self.result_row else ())

    def _arguments(self) -> None:
        for guard in filter(_concerns_argument, self.guards):
            self._check(guard)
        tensors = [guard for guard in self.tensors if type(guard.place) is Local]
        if self.checker is not None and 0 < len(tensors) < len(self.tensors):   # twice, so that another size costs no look at the whole model
            self._check_tensors(tensor_checker([guard.data for guard in tensors]), tensors)

    def _walk(self, walk: _Walked, loads: list[Source], otherwise: Callable[..., Any]) -> None:
        self.body.flush()
        taken = walk.take(loads)
        self.emitter.lines += walk.write(self.constants, ", ".join(self.parameters), otherwise)
        for source, place in taken.items():
            self.emitter.assign(source, f"found[{place}]")

    def _rest(self) -> None:
        rest = [guard for guard in self.guards if not _concerns_argument(guard)]
        for guard in [guard for guard in rest if KINDS[guard.kind].rank < TENSOR]:
            self._check(guard)
        if self.checker is not None:
            self._check_tensors(self.checker, self.tensors, self.tensor_row)
        for guard in [guard for guard in rest if KINDS[guard.kind].rank >= TENSOR]:
            self._check(guard)
        if self.checker is None and len(self.tensors) > 1:
            self.body.add(lambda: f"len({{{', '.join(f'id({self.emitter.load(guard.place)})' for guard in self.tensors)}}}) == {len(self.tensors)}")
        self.body.flush()

    def _check(self, guard: Guard) -> None:
        load = self.emitter.load
        self.body.add(lambda: KINDS[guard.kind].check(load(guard.source) if guard.source is not None else "", guard.data, self.writer))

    def _check_tensors(self, checker: Callable[..., bool] | None, tensors: Sequence[Guard], row: str = "") -> None:
        name = self.constants.bind(checker, "tensors")
        self.body.add(lambda: f"{name}({f'*{row}' if row else ', '.join(self.emitter.load(guard.place) for guard in tensors)})")

    def _function(self) -> Callable[..., Any]:
        values = "True" if self.returns is None else self.result_row or f"({''.join(f'{self.emitter.load(source)}, ' for source in self.returns)})"
        # Rule 1: whatever reading meets (a missing attribute, a shorter list, a user's property that raises) is a guard that fails.
        inside = [f"    {line}" for line in [*self.emitter.lines, f"return {values}"]]
        lines = ["try:", *inside, "except Exception:", f"    return {self.body.failure}"]
        return build_function("guard", self.parameters, lines, self.constants, "<firesteel guard>")


def _generate(guards: Sequence[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None, python_only: bool = False) -> Callable[..., Any]:
    return _Writing(guards, arg_names, returns, python_only, None).build(bool)


def _tensor_failure(guards: Sequence[Guard], arguments: Mapping[str, Any]) -> str:
    """Each tensor alone is as before in Python's eyes: two have become one object, or dispatch keys differ."""
    tensors = [guard for guard in guards if guard.kind == "tensor"]
    first: dict[int, str] = {}
    for guard in tensors:
        now = guard.place.fetch(arguments)
        if id(now) in first:
            return f"{guard.name} and {first[id(now)]} are the same tensor now; they were not"
        first[id(now)] = guard.name
    for guard in tensors:
        checker = tensor_checker([guard.data])
        if checker is not None and not checker(guard.place.fetch(arguments)):
            return guard.data.difference(guard.name, guard.place.fetch(arguments))
    return "a tensor or the thread's dispatch state differs from before"
