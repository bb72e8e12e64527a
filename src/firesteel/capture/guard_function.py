"""GuardFunction: the guards of a region as one generated function, which also reads the inputs that the run function needs.

The text is in order of cost: types and structure, then tensors in one call of torch's C++ check, then expressions.  Most guards become steps
in machine code (`native_guards.py`), where a compiler is given.

    g = build_guards(guards, ["self", "x"], returns=sources)
    g.check(model, x)       # True or False; with `returns`, a tuple of those values, or None
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from firesteel.capture import native_guards as native
from firesteel.capture.guards import CONSTANT, KINDS, TENSOR, Guard, Writer, tensor_checker
from firesteel.capture.source import Constants, Local, Source, SourceWriter, build_function, identifier, shown
from firesteel.native_method import CompileText
from firesteel.records import dataclass


class GuardFunction:
    """The guards of a region as one function over its arguments.

    `check(*args)` is the generated function itself: True or False; or, built with `returns`, a tuple of those sources' values, or None.
    """

    def __init__(self, guards: list[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None, python_only: bool = False,
                 machine_code: MachineCode | None = None):
        self.guards, self.arg_names, self._returns = guards, list(arg_names), returns
        self._single: dict[int, Callable[..., Any]] = {}
        self._python_only = python_only
        self._in_python: Callable[..., Any] | None = None
        walk = _Walked(guards, arg_names, returns, machine_code) if machine_code is not None and returns is not None else None
        self.walks = walk is not None and walk.worth_it
        self.check = _Writing(guards, arg_names, returns, False, walk).build(lambda *args: self.in_python(*args)) if self.walks else self.in_python

    def __call__(self, *args: Any) -> Any:
        return self.check(*args)

    @property
    def in_python(self) -> Callable[..., Any]:
        """The check without machine code; made when it is first asked for.  No cached_property: in Python 3.11 all objects of the class share its
        lock, which in a forked child a thread may hold that is not there."""
        if self._in_python is None:
            self._in_python = _generate(self.guards, self.arg_names, self._returns, self._python_only)
        return self._in_python

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
            return f"{guard.name} is {shown(now)}; {guard.kind} does not apply to it ({type(error).__name__})"


@dataclass(frozen=True)
class MachineCode:
    """What guards need to be machine code where they can: a compiler, and the arguments, of which they all hold now."""
    compile_text: CompileText
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
    return sorted({guard.key(): guard for guard in _aliases_known(guards)}.values(), key=place)


def _aliases_known(guards: Iterable[Guard]) -> Iterable[Guard]:
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

    def __init__(self, emitter: SourceWriter, failure: str):
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
        self.exports: list[Source] = []

    def take(self, sources: Iterable[Source]) -> dict[Source, int]:
        """The places of these, or of the last ones on the way to them that are read in machine code."""
        last = dict.fromkeys(self._last(source) for source in sources)
        wanted = [source for source in last if source.base is not None and self.steps.reads(source) is not None]
        self.exports += wanted
        return {source: len(self.exports) - len(wanted) + n for n, source in enumerate(wanted)}

    def _last(self, source: Source) -> Source:
        while source.base is not None and self.steps.reads(source) is None:
            source = source.base
        return source

    def row(self, sources: Sequence[Source]) -> str:
        """Text for a tuple of these sources, where all are read in machine code; else nothing."""
        if not sources or any(self.steps.reads(source) is None for source in sources):
            return ""
        self.exports += sources
        return f"found[{len(self.exports) - len(sources)}:{len(self.exports)}]"

    def write(self, constants: Constants, arguments: str, otherwise: Callable[..., Any]) -> list[str]:
        walk = self.steps.build(self.exports, self.compile_text)
        constants.bind(walk, "alive")       # as long as the function
        return [f"found = {constants.bind(walk.call, 'walk')}({arguments})", "if found is None: return None",
                f"if found is False: return {constants.bind(otherwise, 'in_python')}({arguments})"]


class _Writing:
    """Writes the function: arguments, what is machine code, the rest by rank, the values."""

    def __init__(self, guards: Sequence[Guard], arg_names: Sequence[str], returns: Sequence[Source] | None, python_only: bool, walk: _Walked | None):
        self.parameters, self.returns, self.walk = [identifier(name) for name in arg_names], returns, walk
        self.constants = Constants()
        self.emitter = SourceWriter(self.constants)
        self.body, self.writer = _Body(self.emitter, "None" if returns is not None else "False"), Writer(self.emitter)
        self.tensors = [guard for guard in guards if guard.kind == "tensor"]
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
