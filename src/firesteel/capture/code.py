"""Code objects as lists of instructions, and back.

`decode(code)` gives the real instructions: EXTENDED_ARG folded, caches gone, jumps and exception handlers pointing to instructions.
`program(code)` gives the normalised ones of `versions.py`, which the machine executes.  `assemble` makes a code object of real
instructions again; offsets exist only inside it.

    for instr in program(f.__code__):
        print(instr.index, instr.opname, instr.argval, instr.target and instr.target.index)

What always holds: `assemble(decode(code), code)` has the same bytes, positions and exception table as `code` (tested over the
standard library on every Python).  Lists from the two caches are shared: never change their instructions, copy them.
"""
from __future__ import annotations

import dataclasses
import dis
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from firesteel.capture import versions
from firesteel.capture.instr import Handler, Instr, Position


def per_code(make: Callable[[types.CodeType], Any]) -> Callable[[types.CodeType], Any]:
    """Caches by the identity of the code object: equal ones may differ in their lines."""
    made: dict[int, tuple[weakref.ref, Any]] = {}

    def cached(code: types.CodeType) -> Any:
        key = id(code)
        entry = made.get(key)
        if entry is not None:
            return entry[1]
        result = make(code)
        made[key] = (weakref.ref(code, lambda _: made.pop(key, None)), result)
        return result

    cached.__doc__, cached.__name__ = make.__doc__, make.__name__
    return cached


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def slot_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of the frame's slots: locals, cells that are not locals, free variables."""
    local = code.co_varnames        # a new tuple at each access
    return local + tuple(name for name in code.co_cellvars if name not in local) + code.co_freevars


def _argument_meaning(code: types.CodeType) -> Callable[[str, int, int], Any]:
    consts, names, slots = code.co_consts, code.co_names, slot_names(code)

    def meaning(name: str, op: int, arg: int) -> Any:
        if op in versions.HAS_SLOT:
            return (slots[arg >> 4], slots[arg & 15]) if name in versions.PAIRS else slots[arg]
        if op in versions.HAS_CONST:
            return consts[arg]
        if op in versions.HAS_NAME:
            return names[arg >> versions.NAME_SHIFT.get(name, 0)]
        if name == "BINARY_OP":
            return versions.BINARY_SYMBOLS[arg]
        if name == "COMPARE_OP":
            return versions.COMPARE_SYMBOLS[arg >> versions.COMPARE_SHIFT]
        return None

    return meaning


def _units(code: types.CodeType) -> Iterator[tuple[int, int, int, int]]:
    """(first unit, unit behind it with its caches, opcode, argument) of each instruction."""
    raw = code.co_code
    at, count = 0, len(raw) // 2
    while at < count:
        start, arg = at, 0
        op = raw[2 * at]
        while op == versions.EXTENDED_ARG:
            arg = (arg | raw[2 * at + 1]) << 8
            at += 1
            op = raw[2 * at]
        arg |= raw[2 * at + 1]
        at += 1 + versions.CACHES[op]
        yield start, at, op, arg


@per_code
def decode(code: types.CodeType) -> list[Instr]:
    """The real instructions of a code object; shared, not to be changed (see `copy_instrs`)."""
    meaning, positions = _argument_meaning(code), list(code.co_positions())
    instrs: list[Instr] = []
    by_unit: dict[int, Instr] = {}
    jumps: list[tuple[Instr, int]] = []
    for start, end, op, arg in _units(code):
        name = dis.opname[op]
        if op < dis.HAVE_ARGUMENT:
            instr = Instr(name, None, None, None, None, positions[start], len(instrs))
        else:
            instr = Instr(name, arg, meaning(name, op, arg), None, None, positions[start], len(instrs))
            if op in versions.HAS_JUMP:
                instr.prefixes = end - start - 1 - versions.CACHES[op]
                jumps.append((instr, end - arg if name in versions.BACKWARD else end + arg))
        by_unit[start] = instr
        instrs.append(instr)
    for instr, target in jumps:
        instr.target = by_unit[target]
    _attach_handlers(code, by_unit)
    return instrs


def _attach_handlers(code: types.CodeType, by_unit: dict[int, Instr]) -> None:
    handlers: dict[int, Handler] = {}
    for start, end, target, depth, lasti in read_exception_table(code.co_exceptiontable):
        handler = handlers.setdefault(target, Handler(by_unit[target], depth, lasti))
        for unit in range(start, end):
            if unit in by_unit:
                by_unit[unit].handler = handler


def read_exception_table(table: bytes) -> list[tuple[int, int, int, int, bool]]:
    """(start, end, target, depth, lasti), in code units: four numbers of six bits a byte, the first byte of an entry marked."""
    data = iter(table)
    entries = []

    def number(first: int) -> int:
        value, more = first & 63, first & 64
        while more:
            byte = next(data)
            value, more = value << 6 | byte & 63, byte & 64
        return value

    for byte in data:
        start, length, target, what = number(byte), number(next(data)), number(next(data)), number(next(data))
        entries.append((start, start + length, target, what >> 1, bool(what & 1)))
    return entries


# ---------------------------------------------------------------------------------------------------------------------
# Normalising


def jump_targets(instrs: Sequence[Instr]) -> set[Instr]:
    """Every instruction that something other than its predecessor can lead to."""
    found = {instr.target for instr in instrs if instr.target is not None}
    found.update(instr.handler.target for instr in instrs if instr.handler is not None)
    return found


def _run_at(instrs: Sequence[Instr], at: int, entered: set[Instr]) -> tuple[int, versions.Rule]:
    """How many instructions from `at` belong together, and their rule; a run is entered at its start only."""
    first = instrs[at].opname
    for row in versions.GROUPS_BY_FIRST.get(first, ()):
        run = instrs[at:at + len(row.names)]
        if (tuple(instr.opname for instr in run) == row.names
                and not any(instr in entered or instr.handler is not run[0].handler for instr in run[1:])):
            return len(run), row.rule
    return 1, versions.RULES[first]


def normalise(instrs: Sequence[Instr], cells: versions.Cells) -> list[Instr]:
    """Real instructions as normalised ones; `cells` are the names of slots that hold cells."""
    entered, at = jump_targets(instrs), 0
    result: list[Instr] = []
    first_of: dict[Any, Any] = {}
    while at < len(instrs):
        length, rule = _run_at(instrs, at, entered)
        run = instrs[at:at + length]
        first_of[instrs[at]] = len(result)
        landing = _landing(instrs, run)
        handler, position = run[0].handler, run[-1].position
        for number, (name, arg, value, kwnames) in enumerate(rule(run, cells)):
            target = landing if name in versions.JUMPS else None
            result.append(Instr(name, arg if target is None else None, value, target, handler, position, len(result),
                                kwnames, at, at + length, number))
        at += length
    _point_to({instr: result[n] for instr, n in first_of.items()}, result)
    return result


def _landing(instrs: Sequence[Instr], run: Sequence[Instr]) -> Instr | None:
    """Where the run's jump really continues."""
    for instr in run:
        if instr.target is not None:
            return instrs[instr.target.index + versions.LANDING.get(instr.opname, 0)]
    return None


def _point_to(new: dict[Instr, Instr], instrs: Iterable[Instr]) -> None:
    """Jumps and handlers of `instrs` lead to what stands for their old targets."""
    handlers: dict[Handler, Handler] = {}
    for instr in instrs:
        if instr.target is not None:
            instr.target = new[instr.target]
        if (old := instr.handler) is not None:
            if old not in handlers:
                handlers[old] = Handler(new[old.target], old.depth, old.lasti)
            instr.handler = handlers[old]


@per_code
def program(code: types.CodeType) -> list[Instr]:
    """The normalised instructions of a code object: what the machine executes; shared, not to be changed."""
    return normalise(decode(code), frozenset(code.co_cellvars) | frozenset(code.co_freevars))


# ---------------------------------------------------------------------------------------------------------------------
# Assembling


def copy_instrs(instrs: Sequence[Instr]) -> list[Instr]:
    """Instructions of one's own to change: jumps and handlers point within the copy."""
    copies = {instr: dataclasses.replace(instr) for instr in instrs}
    _point_to(copies, copies.values())
    return list(copies.values())


def assemble(instrs: Sequence[Instr], template: types.CodeType, **changes: Any) -> types.CodeType:
    """A code object of these real instructions, otherwise like `template` with `changes` (arguments of code.replace)."""
    starts, ends, args = _place(instrs)
    changes.setdefault("co_stacksize", max(template.co_stacksize, stack_size(instrs)))
    first_line = changes.get("co_firstlineno", template.co_firstlineno)
    return template.replace(
        co_code=_write_code(instrs, starts, ends, args),
        co_exceptiontable=write_exception_table(_handler_ranges(instrs, starts, ends)),
        co_linetable=write_positions([(i.position, end - start) for i, start, end in zip(instrs, starts, ends)], first_line),
        **changes)


def _place(instrs: Sequence[Instr]) -> tuple[list[int], list[int], list[int]]:
    """First unit, unit behind, and argument of each instruction; grows EXTENDED_ARGs until the jumps fit."""
    _turn_jumps(instrs)
    where = {instr: n for n, instr in enumerate(instrs)}
    tails = [1 + versions.CACHES[instr.opcode] for instr in instrs]
    args = [0 if instr.target is not None else instr.arg or 0 for instr in instrs]
    prefixes = [max(instr.prefixes, _prefixes(arg)) for instr, arg in zip(instrs, args)]
    jumps = [(n, where[instr.target], instr.opname in versions.BACKWARD) for n, instr in enumerate(instrs) if instr.target is not None]
    while True:
        starts, ends, at = [], [], 0
        for prefix, tail in zip(prefixes, tails):
            starts.append(at)
            at += prefix + tail
            ends.append(at)
        grown = False
        for n, target, backward in jumps:
            args[n] = ends[n] - starts[target] if backward else starts[target] - ends[n]
            if _prefixes(args[n]) > prefixes[n]:
                prefixes[n], grown = _prefixes(args[n]), True
        if not grown:
            return starts, ends, args


def _prefixes(arg: int) -> int:
    """How many EXTENDED_ARGs an argument needs."""
    return (arg.bit_length() - 1) // 8 if arg > 255 else 0


def _turn_jumps(instrs: Sequence[Instr]) -> None:
    """Gives each jump the name for its direction, where the instruction set has two."""
    where = {instr: n for n, instr in enumerate(instrs)}
    for n, instr in enumerate(instrs):
        if instr.target is None:
            continue
        backward = where[instr.target] <= n
        if backward != (instr.opname in versions.BACKWARD):
            turned = (versions.BACKWARD_OF if backward else versions.FORWARD_OF).get(instr.opname)
            if turned is None:
                raise ValueError(f"{instr!r} cannot jump {'back' if backward else 'forward'} in this version of Python")
            instr.opname = turned


def _write_code(instrs: Sequence[Instr], starts: list[int], ends: list[int], args: list[int]) -> bytes:
    out = bytearray()
    for instr, start, end, arg in zip(instrs, starts, ends, args):
        caches = versions.CACHES[instr.opcode]
        for shift in range(end - start - 1 - caches, 0, -1):
            out += bytes((versions.EXTENDED_ARG, arg >> 8 * shift & 255))
        out += bytes((instr.opcode, arg & 255))
        out += bytes((versions.CACHE, 0)) * caches
    return bytes(out)


def _handler_ranges(instrs: Sequence[Instr], starts: list[int], ends: list[int]) -> list[tuple[int, int, int, int, bool]]:
    where = dict(zip(instrs, starts))
    ranges: list[tuple[int, int, int, int, bool]] = []
    open_handler, open_start = None, 0
    for instr, start in [*zip(instrs, starts), (None, ends[-1])]:
        handler = instr.handler if instr is not None else None
        if handler is open_handler and instr is not None:
            continue
        if open_handler is not None:
            ranges.append((open_start, start, where[open_handler.target], open_handler.depth, open_handler.lasti))
        open_handler, open_start = handler, start
    return ranges


def write_exception_table(ranges: Sequence[tuple[int, int, int, int, bool]]) -> bytes:
    out = bytearray()
    for start, end, target, depth, lasti in ranges:
        for n, value in enumerate((start, end - start, target, depth << 1 | lasti)):
            digits = [value & 63]
            while value := value >> 6:
                digits.append(value & 63 | 64)
            digits.reverse()
            digits[0] |= 128 if n == 0 else 0
            out += bytes(digits)
    return bytes(out)


def write_positions(spans: Sequence[tuple[Position, int]], first_line: int) -> bytes:
    """The line table: for each span of at most eight units a head byte (marked, kind, length) and what the kind wants."""
    out, line = bytearray(), first_line
    merged: list[list] = []
    for position, length in spans:
        if versions.MERGED_POSITIONS and merged and merged[-1][0] == position:
            merged[-1][1] += length
        else:
            merged.append([position, length])
    for position, length in merged:
        while length > 0:
            line = _write_span(out, position, min(length, 8), line)
            length -= 8
    return bytes(out)


def _write_span(out: bytearray, position: Position, length: int, before: int) -> int:
    """Appends one span; returns the line that the next one counts from."""
    line, end_line, column, end_column = position
    head = 128 | length - 1
    if line is None:
        out.append(head | 15 << 3)
        return before
    delta = line - before
    if column is None or end_column is None:
        out.append(head | 13 << 3)
        _write_signed(out, delta)
    elif end_line == line and delta == 0 and column < 80 and 0 <= end_column - column < 16:
        out += bytes((head | column >> 3 << 3, (column & 7) << 4 | end_column - column))
    elif end_line == line and 0 <= delta < 3 and column < 128 and end_column < 128:
        out += bytes((head | 10 + delta << 3, column, end_column))
    else:
        out.append(head | 14 << 3)
        _write_signed(out, delta)
        _write_varint(out, (end_line if end_line is not None else line) - line)
        _write_varint(out, column + 1)
        _write_varint(out, end_column + 1)
    return line


def _write_varint(out: bytearray, value: int) -> None:
    while value >= 64:
        out.append(value & 63 | 64)
        value >>= 6
    out.append(value)


def _write_signed(out: bytearray, value: int) -> None:
    _write_varint(out, -value << 1 | 1 if value < 0 else value << 1)


def stack_size(instrs: Sequence[Instr], entry_depth: int = 0) -> int:
    """The deepest the stack gets on any path from the first instruction."""
    where = {instr: n for n, instr in enumerate(instrs)}
    seen: dict[int, int] = {}
    waiting = [(0, entry_depth)]
    deepest = entry_depth
    while waiting:
        at, depth = waiting.pop()
        while at < len(instrs) and seen.get(at, -1) < depth:
            seen[at] = depth
            instr = instrs[at]
            op, arg = instr.opcode, instr.arg if instr.arg is not None else None
            if instr.handler is not None:
                waiting.append((where[instr.handler.target], instr.handler.depth + 1 + instr.handler.lasti))
            if instr.target is not None:
                waiting.append((where[instr.target], depth + dis.stack_effect(op, arg or 0, jump=True)))
                arg = arg or 0
            after = depth + dis.stack_effect(op, arg, jump=False)
            deepest = max(deepest, depth, after)
            if instr.opname in versions.STOPS:
                break
            at, depth = at + 1, after
    return deepest
