"""What differs between Python versions, as rows; nothing else in the project looks at `sys.version_info`.

The machine does not execute CPython's instructions but *normalised* ones (`NORMAL`), the same for every version.  A row of
`REAL` says for one instruction of some versions how it becomes normalised ones; a row of `GROUPS` says it for a run of
instructions that belong together (KW_NAMES PRECALL CALL -> CALL).  On import the rows valid for this interpreter are checked
against `dis.opmap`: an instruction without a row, or a row without an instruction, is an ImportError.

    3.11  LOAD_METHOD f           ->  LOAD_ATTR f, PUSH_NULL, SWAP 2
    3.13  LOAD_FAST_LOAD_FAST a b ->  LOAD_FAST a, LOAD_FAST b

What always holds: executing a run's normalised instructions has the run's effect on the stack, the locals and the control
flow; between two runs the stack is slot for slot CPython's, NULLs included, so any such point can be resumed by real bytecode.
No torch here: the tests run this file under every interpreter they find.
"""
from __future__ import annotations

import dis
import opcode
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from firesteel.capture.instr import Instr
from firesteel.records import dataclass
from firesteel.table import Table

Version = tuple[int, int]
PYTHON: Version = sys.version_info[:2]
SUPPORTED: tuple[Version, ...] = ((3, 11), (3, 12), (3, 13))


def applies(since: Version | None, until: Version | None) -> bool:
    """Is this interpreter in [since, until)?"""
    return (since is None or since <= PYTHON) and (until is None or until > PYTHON)


# ---------------------------------------------------------------------------------------------------------------------
# The normalised instructions


@dataclass(frozen=True)
class InstrMeaning:
    stack: str          # before -- after, top at the right
    text: str
    jumps: bool = False


NORMAL: Table[InstrMeaning] = Table("normalised instruction", "capture/versions.py")
for _name, _stack, _text, *_jumps in [
    ("NOP", "--", "nothing"),
    ("RESUME", "--", "start of the function, or the point after a yield"),
    ("POP_TOP", "a --", "drop"),
    ("PUSH_NULL", "-- NULL", "the empty slot beside a callable"),
    ("COPY", "a ... -- a ... a", "push the arg-th item from the top (1 is the top)"),
    ("SWAP", "a ... b -- b ... a", "swap the top with the arg-th item from the top"),
    ("LOAD_CONST", "-- c", "argval is the constant"),
    ("LOAD_FAST", "-- v", "local argval; unbound: UnboundLocalError"),
    ("LOAD_FAST_AND_CLEAR", "-- v", "local argval, NULL where unbound; then unbinds it (inlined comprehensions)"),
    ("STORE_FAST", "v --", "local argval; a NULL unbinds it"),
    ("DELETE_FAST", "--", "unbinds local argval; unbound: UnboundLocalError"),
    ("LOAD_CLOSURE", "-- cell", "the cell itself in slot argval"),
    ("MAKE_CELL", "--", "slot argval becomes a new cell holding what was in the slot (perhaps nothing)"),
    ("COPY_FREE_VARS", "--", "the function's arg closure cells go into the slots of co_freevars"),
    ("LOAD_DEREF", "-- v", "content of cell argval; empty: NameError (free) or UnboundLocalError"),
    ("STORE_DEREF", "v --", "sets the content of cell argval"),
    ("DELETE_DEREF", "--", "empties cell argval"),
    ("LOAD_GLOBAL", "-- v", "globals, then builtins, of name argval"),
    ("STORE_GLOBAL", "v --", "sets global argval"),
    ("DELETE_GLOBAL", "--", "deletes global argval"),
    ("LOAD_NAME", "-- v", "class bodies: locals, globals, builtins"),
    ("STORE_NAME", "v --", "class bodies: sets name argval"),
    ("DELETE_NAME", "--", "class bodies: deletes name argval"),
    ("LOAD_LOCALS", "-- d", "class bodies: the namespace"),
    ("LOAD_FROM_DICT_OR_DEREF", "d -- v", "d[argval] if there, else the cell's content"),
    ("LOAD_FROM_DICT_OR_GLOBALS", "d -- v", "d[argval] if there, else global or builtin"),
    ("LOAD_BUILD_CLASS", "-- f", "builtins.__build_class__"),
    ("LOAD_ASSERTION_ERROR", "-- c", "AssertionError"),
    ("SETUP_ANNOTATIONS", "--", "class bodies: makes __annotations__"),
    ("LOAD_ATTR", "o -- v", "o.argval"),
    ("STORE_ATTR", "v o --", "o.argval = v"),
    ("DELETE_ATTR", "o --", "del o.argval"),
    ("LOAD_SUPER_ATTR", "super cls self -- v", "super(cls, self).argval; arg is 0 where the source says super() with no arguments"),
    ("BINARY_SUBSCR", "o k -- v", "o[k]"),
    ("STORE_SUBSCR", "v o k --", "o[k] = v"),
    ("DELETE_SUBSCR", "o k --", "del o[k]"),
    ("UNARY_NEGATIVE", "a -- v", "-a"),
    ("UNARY_POSITIVE", "a -- v", "+a"),
    ("UNARY_INVERT", "a -- v", "~a"),
    ("UNARY_NOT", "a -- v", "not a, for any object a"),
    ("TO_BOOL", "a -- v", "bool(a); only where no jump or UNARY_NOT follows, which ask for the truth themselves"),
    ("BINARY_OP", "a b -- v", "argval is '+' ... or, in place, '+=' ..."),
    ("COMPARE_OP", "a b -- v", "argval is '<' '<=' '==' '!=' '>' '>='"),
    ("IS_OP", "a b -- v", "a is b; arg 1: is not"),
    ("CONTAINS_OP", "a b -- v", "a in b; arg 1: not in"),
    ("BUILD_TUPLE", "a*arg -- v", "tuple of arg items"),
    ("BUILD_LIST", "a*arg -- v", "list of arg items"),
    ("BUILD_SET", "a*arg -- v", "set of arg items"),
    ("BUILD_MAP", "(k v)*arg -- d", "dict of arg pairs"),
    ("BUILD_CONST_KEY_MAP", "v*arg keys -- d", "dict; keys is a constant tuple"),
    ("BUILD_STRING", "s*arg -- s", "concatenation"),
    ("BUILD_SLICE", "start stop [step] -- v", "arg is 2 or 3"),
    ("LIST_APPEND", "v --", "appends to the list at depth arg (1 is the top after popping)"),
    ("SET_ADD", "v --", "adds to the set at depth arg"),
    ("MAP_ADD", "k v --", "sets in the dict at depth arg"),
    ("LIST_EXTEND", "it --", "extends the list at depth arg"),
    ("SET_UPDATE", "it --", "updates the set at depth arg"),
    ("DICT_UPDATE", "m --", "updates the dict at depth arg"),
    ("DICT_MERGE", "m --", "as DICT_UPDATE; a key there already is a TypeError (f(**a, **b))"),
    ("LIST_TO_TUPLE", "list -- tuple", ""),
    ("UNPACK_SEQUENCE", "it -- v*arg", "first item ends on top"),
    ("UNPACK_EX", "it -- v*", "argval is (number before, number after the star); first item ends on top"),
    ("CONVERT_VALUE", "v -- s", "argval is str, repr or ascii"),
    ("FORMAT_SIMPLE", "v -- s", "format(v, '')"),
    ("FORMAT_WITH_SPEC", "v spec -- s", "format(v, spec)"),
    ("CALL", "x y a*arg -- v", "x NULL: y(*a); y NULL: x(*a); else x(y, *a). The last len(kwnames) of a are keywords, named by kwnames"),
    ("CALL_KW", "x y a*arg names -- v", "CALL with the keyword names on the stack (only where they are not known in advance)"),
    ("CALL_FUNCTION_EX", "x y args [kwargs] -- v", "one of x, y is NULL; kwargs is there if arg & 1"),
    ("MAKE_FUNCTION", "[defaults] [kwdefaults] [annotations] [closure] code -- f", "present if arg & 1, 2, 4, 8"),
    ("GET_ITER", "o -- it", "iter(o)"),
    ("FOR_ITER", "it -- it v", "next(it); exhausted: pops it and jumps to target", True),
    ("JUMP", "--", "to target", True),
    ("POP_JUMP_IF_TRUE", "a --", "to target if a is true, for any object a", True),
    ("POP_JUMP_IF_FALSE", "a --", "to target if a is false, for any object a", True),
    ("POP_JUMP_IF_NONE", "a --", "to target if a is None", True),
    ("POP_JUMP_IF_NOT_NONE", "a --", "to target if a is not None", True),
    ("RETURN_VALUE", "v --", "return"),
    ("RAISE_VARARGS", "[exc [cause]] --", "arg 0: re-raise the current exception; 1: raise exc; 2: raise exc from cause"),
    ("PUSH_EXC_INFO", "exc -- previous exc", "start of a handler; previous is the exception handled outside, or None"),
    ("CHECK_EXC_MATCH", "exc t -- exc bool", "does the except clause's type match"),
    ("CHECK_EG_MATCH", "exc t -- rest match", "except*"),
    ("POP_EXCEPT", "previous --", "previous is the handled exception again"),
    ("RERAISE", "[lasti] exc --", "raise exc again; below it, if arg is not 0, is the place it came from (popped with the frame's stack)"),
    ("BEFORE_WITH", "cm -- exit v", "exit is the bound __exit__, v is __enter__()"),
    ("WITH_EXCEPT_START", "exit lasti previous exc -- exit lasti previous exc v", "v = exit(type, exc, traceback)"),
    ("PREP_RERAISE_STAR", "orig list -- exc", "except*"),
    ("RETURN_GENERATOR", "-- None", "the call returns a generator here; execution of the body continues from here with the first send(None)"),
    ("YIELD_VALUE", "v -- sent", "yield"),
    ("GET_YIELD_FROM_ITER", "o -- it", "iter(o), generators and coroutines as they are"),
    ("SEND", "it v -- it yielded", "it.send(v) or next(it); returned: pops it, pushes the return value, jumps to target", True),
    ("END_SEND", "it v -- v", "drops the item under the top"),
    ("CLEANUP_THROW", "it last exc -- None v", "exc a StopIteration: v is its value; else raises exc"),
    ("GET_AWAITABLE", "o -- it", "await"),
    ("GET_AITER", "o -- it", "async for"),
    ("GET_ANEXT", "it -- it awaitable", "async for"),
    ("END_ASYNC_FOR", "it exc --", "async for: exc is StopAsyncIteration: drop both; else raises it"),
    ("BEFORE_ASYNC_WITH", "cm -- exit awaitable", "async with"),
    ("ASYNC_GEN_WRAP", "v -- v", "yield in an async generator"),
    ("IMPORT_NAME", "level fromlist -- module", "argval is the module's name"),
    ("IMPORT_FROM", "module -- module v", "argval is the name in it"),
    ("IMPORT_STAR", "module --", "module level only"),
    ("PRINT_EXPR", "v --", "interactive only"),
    ("GET_LEN", "o -- o n", "len(o)"),
    ("MATCH_MAPPING", "o -- o bool", "match"),
    ("MATCH_SEQUENCE", "o -- o bool", "match"),
    ("MATCH_KEYS", "o keys -- o keys values", "match; values is None where a key is missing"),
    ("MATCH_CLASS", "o cls names -- values", "match; arg positional patterns; None where it does not match"),
    ("CALL_INTRINSIC_1", "a -- v", "argval names it (type parameters, StopIteration in generators)"),
    ("CALL_INTRINSIC_2", "a b -- v", "argval names it (type parameters)"),
]:
    NORMAL.add(_name, InstrMeaning(str(_stack), str(_text), bool(_jumps)))


JUMPS = frozenset(name for name, meaning in NORMAL.items() if meaning.jumps)


class Part(NamedTuple):
    """One normalised instruction, before it is given its place; a jumping one takes the run's target."""
    name: str
    arg: int | None = None
    value: Any = None
    kwnames: tuple[str, ...] = ()


Cells = frozenset[str]                                  # names of slots that hold cells
Rule = Callable[[Sequence["Instr"], Cells], list[Part]]


# ---------------------------------------------------------------------------------------------------------------------
# Rules: how a run of real instructions is said in normalised ones


def same(run: Sequence[Instr], cells: Cells) -> list[Part]:
    instr = run[0]
    return [Part(instr.opname, instr.arg, instr.argval)]


def drop(run: Sequence[Instr], cells: Cells) -> list[Part]:
    return [Part("NOP")]


def _load(name: str, cells: Cells) -> Part:
    return Part("LOAD_CLOSURE" if name in cells else "LOAD_FAST", None, name)


def load_fast(run: Sequence[Instr], cells: Cells) -> list[Part]:
    return [_load(run[0].argval, cells)]


def pair(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """Two instructions on a local each, in one."""
    both = zip(PAIRS[run[0].opname], run[0].argval)
    return [_load(name, cells) if op == "LOAD_FAST" else Part(op, None, name) for op, name in both]


def _beside_null(load: Part) -> list[Part]:
    """A callable together with the NULL that CALL wants beside it: below it until 3.12, above it since 3.13."""
    return [load, Part("PUSH_NULL")] if NULL_ABOVE else [load, Part("PUSH_NULL"), Part("SWAP", 2)]


def load_global(run: Sequence[Instr], cells: Cells) -> list[Part]:
    load = Part("LOAD_GLOBAL", None, run[0].argval)
    if not run[0].arg & 1:
        return [load]
    return [load, Part("PUSH_NULL")] if NULL_ABOVE else [Part("PUSH_NULL"), load]


def load_method(run: Sequence[Instr], cells: Cells) -> list[Part]:
    # A bound method with a NULL is as good for CALL as (function, self), and there is one kind of attribute load less.
    return _beside_null(Part("LOAD_ATTR", None, run[0].argval))


def load_attr(run: Sequence[Instr], cells: Cells) -> list[Part]:
    return load_method(run, cells) if run[0].arg & 1 else [Part("LOAD_ATTR", None, run[0].argval)]


def load_super_attr(run: Sequence[Instr], cells: Cells) -> list[Part]:
    arg = run[0].arg
    load = Part("LOAD_SUPER_ATTR", arg >> 1 & 1, run[0].argval)
    return _beside_null(load) if arg & 1 else [load]


def compare(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """Since 3.13 a flag says "and make it a bool"; jumps and UNARY_NOT, which follow it nearly always, do that themselves."""
    part = Part("COMPARE_OP", None, run[0].argval)
    wants_bool = len(run) == 1 and COMPARE_BOOL_BIT & run[0].arg
    return [part, Part("TO_BOOL")] if wants_bool else [part]


def compare_then_ask(run: Sequence[Instr], cells: Cells) -> list[Part]:
    return compare(run, cells) + [Part(run[1].opname, run[1].arg)]


def ask(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """TO_BOOL and the jump or UNARY_NOT after it: those ask for the truth themselves."""
    return [Part(run[1].opname, run[1].arg)]


def or_pop(jump: str) -> Rule:
    return lambda run, cells: [Part("COPY", 1), Part(jump), Part("POP_TOP")]


def jump(name: str) -> Rule:
    return lambda run, cells: [Part(name)]


def call(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """[KW_NAMES] [PRECALL] CALL, or LOAD_CONST CALL_KW."""
    names = run[0].argval if run[0].opname in ("KW_NAMES", "LOAD_CONST") else ()
    return [Part("CALL", run[-1].arg, None, names)]


def make_function(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """3.11 and 3.12 have flags, 3.13 a SET_FUNCTION_ATTRIBUTE for each of them after it."""
    flags = run[0].arg or 0
    for setting in run[1:]:
        flags |= setting.arg
    return [Part("MAKE_FUNCTION", flags)]


CONVERSIONS = (None, str, repr, ascii)


def format_value(run: Sequence[Instr], cells: Cells) -> list[Part]:
    """The conversion concerns the value, which is below the spec where there is one."""
    conversion, has_spec = run[0].arg & 3, run[0].arg & 4
    last = Part("FORMAT_WITH_SPEC" if has_spec else "FORMAT_SIMPLE")
    if not conversion:
        return [last]
    convert = Part("CONVERT_VALUE", conversion, CONVERSIONS[conversion])
    return [Part("SWAP", 2), convert, Part("SWAP", 2), last] if has_spec else [convert, last]


INTRINSIC_1 = ("INVALID", "PRINT_EXPR", "IMPORT_STAR", "STOPITERATION_ERROR", "ASYNC_GEN_WRAP", "UNARY_POSITIVE", "LIST_TO_TUPLE",
               "TYPEVAR", "PARAMSPEC", "TYPEVARTUPLE", "SUBSCRIPT_GENERIC", "TYPEALIAS")
INTRINSIC_2 = ("INVALID", "PREP_RERAISE_STAR", "TYPEVAR_WITH_BOUND", "TYPEVAR_WITH_CONSTRAINTS", "SET_FUNCTION_TYPE_PARAMS",
               "SET_TYPEPARAM_DEFAULT")
PUSHES_NONE = ("PRINT_EXPR", "IMPORT_STAR")     # as intrinsics they leave None, which a POP_TOP drops


def intrinsic(names: tuple[str, ...], run: Sequence[Instr], cells: Cells) -> list[Part]:
    name = names[run[0].arg]
    if name in PUSHES_NONE:
        return [Part(name), Part("LOAD_CONST", None, None)]
    return [Part(name) if name in NORMAL else Part(run[0].opname, run[0].arg, name)]


# ---------------------------------------------------------------------------------------------------------------------
# Rows: which instructions there are, from which version until before which


@dataclass(frozen=True)
class InstrRow:
    names: tuple[str, ...]      # one name, or the names of a run
    rule: Rule
    since: Version | None = None
    until: Version | None = None


def _rows(names: str, rule: Rule, since: Version | None = None, until: Version | None = None) -> list[InstrRow]:
    return [InstrRow((name,), rule, since, until) for name in names.split()]


P12, P13 = (3, 12), (3, 13)

REAL: list[InstrRow] = [
    *_rows("NOP RESUME POP_TOP PUSH_NULL COPY SWAP LOAD_CONST STORE_FAST DELETE_FAST MAKE_CELL COPY_FREE_VARS LOAD_DEREF STORE_DEREF "
           "DELETE_DEREF STORE_GLOBAL DELETE_GLOBAL LOAD_NAME STORE_NAME DELETE_NAME LOAD_BUILD_CLASS LOAD_ASSERTION_ERROR "
           "SETUP_ANNOTATIONS STORE_ATTR DELETE_ATTR BINARY_SUBSCR STORE_SUBSCR DELETE_SUBSCR UNARY_NEGATIVE UNARY_INVERT UNARY_NOT "
           "BINARY_OP IS_OP CONTAINS_OP BUILD_TUPLE BUILD_LIST BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP BUILD_STRING BUILD_SLICE "
           "LIST_APPEND SET_ADD MAP_ADD LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE UNPACK_SEQUENCE CALL_FUNCTION_EX GET_ITER FOR_ITER "
           "RETURN_VALUE RAISE_VARARGS PUSH_EXC_INFO CHECK_EXC_MATCH CHECK_EG_MATCH POP_EXCEPT RERAISE BEFORE_WITH WITH_EXCEPT_START "
           "RETURN_GENERATOR YIELD_VALUE GET_YIELD_FROM_ITER SEND GET_AWAITABLE GET_AITER GET_ANEXT END_ASYNC_FOR BEFORE_ASYNC_WITH "
           "IMPORT_NAME IMPORT_FROM GET_LEN MATCH_MAPPING MATCH_SEQUENCE MATCH_KEYS MATCH_CLASS", same),
    *_rows("LOAD_FAST", load_fast),
    *_rows("LOAD_GLOBAL", load_global),
    *_rows("COMPARE_OP", compare),
    *_rows("UNPACK_EX", lambda run, cells: [Part("UNPACK_EX", run[0].arg, (run[0].arg & 0xFF, run[0].arg >> 8))]),
    *_rows("CALL", call),
    *_rows("MAKE_FUNCTION", make_function),
    *_rows("JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT", jump("JUMP")),
    *_rows("LOAD_CLOSURE", same, until=P13),
    *_rows("FORMAT_VALUE", format_value, until=P13),
    *_rows("KW_NAMES", drop, until=P13),
    *_rows("LOAD_CLASSDEREF", lambda run, cells: [Part("LOAD_LOCALS"), Part("LOAD_FROM_DICT_OR_DEREF", None, run[0].argval)], until=P12),
    *_rows("LOAD_METHOD", load_method, until=P12),
    *_rows("LOAD_ATTR", same, until=P12),
    *_rows("PRECALL", drop, until=P12),
    *_rows("UNARY_POSITIVE LIST_TO_TUPLE IMPORT_STAR PRINT_EXPR ASYNC_GEN_WRAP PREP_RERAISE_STAR", same, until=P12),
    *_rows("JUMP_IF_TRUE_OR_POP", or_pop("POP_JUMP_IF_TRUE"), until=P12),
    *_rows("JUMP_IF_FALSE_OR_POP", or_pop("POP_JUMP_IF_FALSE"), until=P12),
    *_rows("POP_JUMP_FORWARD_IF_TRUE POP_JUMP_BACKWARD_IF_TRUE", jump("POP_JUMP_IF_TRUE"), until=P12),
    *_rows("POP_JUMP_FORWARD_IF_FALSE POP_JUMP_BACKWARD_IF_FALSE", jump("POP_JUMP_IF_FALSE"), until=P12),
    *_rows("POP_JUMP_FORWARD_IF_NONE POP_JUMP_BACKWARD_IF_NONE", jump("POP_JUMP_IF_NONE"), until=P12),
    *_rows("POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_NOT_NONE", jump("POP_JUMP_IF_NOT_NONE"), until=P12),
    *_rows("POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE", same, since=P12),
    *_rows("LOAD_ATTR", load_attr, since=P12),
    *_rows("LOAD_SUPER_ATTR", load_super_attr, since=P12),
    *_rows("LOAD_FAST_CHECK", load_fast, since=P12),
    *_rows("LOAD_FAST_AND_CLEAR LOAD_LOCALS LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS END_SEND CLEANUP_THROW", same, since=P12),
    *_rows("BINARY_SLICE", lambda run, cells: [Part("BUILD_SLICE", 2), Part("BINARY_SUBSCR")], since=P12),
    *_rows("STORE_SLICE", lambda run, cells: [Part("BUILD_SLICE", 2), Part("STORE_SUBSCR")], since=P12),
    *_rows("RETURN_CONST", lambda run, cells: [Part("LOAD_CONST", None, run[0].argval), Part("RETURN_VALUE")], since=P12),
    *_rows("CALL_INTRINSIC_1", partial(intrinsic, INTRINSIC_1), since=P12),
    *_rows("CALL_INTRINSIC_2", partial(intrinsic, INTRINSIC_2), since=P12),
    *_rows("END_FOR", drop, since=P12),        # never reached: FOR_ITER lands behind it
    *_rows("LOAD_FAST_LOAD_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST", pair, since=P13),
    *_rows("CALL_KW TO_BOOL FORMAT_SIMPLE FORMAT_WITH_SPEC", same, since=P13),
    *_rows("CONVERT_VALUE", lambda run, cells: [Part("CONVERT_VALUE", run[0].arg, CONVERSIONS[run[0].arg])], since=P13),
]

ASKING = ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "UNARY_NOT")

GROUPS: list[InstrRow] = [
    InstrRow(("KW_NAMES", "PRECALL", "CALL"), call, until=P12),
    InstrRow(("PRECALL", "CALL"), call, until=P12),
    InstrRow(("KW_NAMES", "CALL"), call, P12, P13),
    InstrRow(("LOAD_CONST", "CALL_KW"), call, P13),
    *[InstrRow(("TO_BOOL", asking), ask, P13) for asking in ASKING],
    *[InstrRow(("COMPARE_OP", asking), compare_then_ask, P13) for asking in ASKING],
    *[InstrRow(("MAKE_FUNCTION", *["SET_FUNCTION_ATTRIBUTE"] * n), make_function, P13) for n in (4, 3, 2, 1)],
]

GROUPED_ONLY = {"SET_FUNCTION_ATTRIBUTE": P13}     # real instructions that occur in a group only, and since when
INTERNAL = frozenset(["CACHE", "EXTENDED_ARG", "INTERPRETER_EXIT", "RESERVED", "ENTER_EXECUTOR", "EXIT_INIT_CHECK"])  # never in co_code as read

# ---------------------------------------------------------------------------------------------------------------------
# What arguments mean


NULL_ABOVE: bool = applies(P13, None)               # CALL's NULL: above the callable, or below it
MERGED_POSITIONS: bool = applies(P12, None)         # instructions at one place share an entry of the line table
COMPARE_BOOL_BIT: int = 16 if applies(P13, None) else 0


@dataclass(frozen=True)
class Fact:
    """A number about an instruction in some versions."""
    name: str
    number: int
    since: Version | None = None
    until: Version | None = None


def _facts(facts: list[Fact]) -> dict[str, int]:
    return {fact.name: fact.number for fact in facts if applies(fact.since, fact.until)}


# names index co_names by arg >> number; the low bits are flags
NAME_SHIFT = _facts([Fact("LOAD_GLOBAL", 1), Fact("LOAD_ATTR", 1, P12), Fact("LOAD_SUPER_ATTR", 2, P12)])
COMPARE_SHIFT = _facts([Fact("COMPARE_OP", 0, None, P12), Fact("COMPARE_OP", 4, P12, P13), Fact("COMPARE_OP", 5, P13)])["COMPARE_OP"]
# where the jump of an exhausted iterator lands: this many instructions behind its written target
LANDING = _facts([Fact("FOR_ITER", 1, P12, P13), Fact("FOR_ITER", 2, P13), Fact("SEND", 1, P12)])
# two locals in four bits each -> the two instructions it stands for
PAIRS = {"LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"), "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
         "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST")}
BINARY_SYMBOLS = ("+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^",
                  "+=", "&=", "//=", "<<=", "@=", "*=", "%=", "|=", "**=", ">>=", "-=", "/=", "^=")
COMPARE_SYMBOLS = ("<", "<=", "==", "!=", ">", ">=")

# Unconditional exits: the instruction after one of these is not reached from it.
STOPS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})

# A jump and the same jump in the other direction, where the instruction set distinguishes them.
_TURNS = [("JUMP_FORWARD", "JUMP_BACKWARD", None)] + [
    (f"POP_JUMP_FORWARD_IF_{when}", f"POP_JUMP_BACKWARD_IF_{when}", P12) for when in ("TRUE", "FALSE", "NONE", "NOT_NONE")]
BACKWARD_OF = {forward: backward for forward, backward, until in _TURNS if applies(None, until)}
FORWARD_OF = {backward: forward for forward, backward in BACKWARD_OF.items()}
BACKWARD = frozenset(FORWARD_OF) | {"JUMP_BACKWARD_NO_INTERRUPT"}


# How normalised instructions that are not the first of their run are said in real ones, for resuming in the middle of a run:
# each real instruction with what its argument is: arg, slot, name, const, jump, a number, or nothing.
_SPELLINGS: list[tuple[str, str, Version | None, Version | None]] = [
    ("PUSH_NULL", "PUSH_NULL", None, None),
    ("SWAP", "SWAP:arg", None, None),
    ("POP_TOP", "POP_TOP", None, None),
    ("LOAD_CONST", "LOAD_CONST:const", None, None),
    ("LOAD_FAST", "LOAD_FAST:slot", None, None),
    ("DELETE_FAST", "DELETE_FAST:slot", None, None),
    ("STORE_FAST", "STORE_FAST:slot", None, None),
    ("LOAD_CLOSURE", "LOAD_CLOSURE:slot", None, P13),
    ("LOAD_CLOSURE", "LOAD_FAST:slot", P13, None),
    ("LOAD_GLOBAL", "LOAD_GLOBAL:name", None, None),
    ("BINARY_SUBSCR", "BINARY_SUBSCR", None, None),
    ("STORE_SUBSCR", "STORE_SUBSCR", None, None),
    ("RETURN_VALUE", "RETURN_VALUE", None, None),
    ("TO_BOOL", "UNARY_NOT UNARY_NOT", None, P13),
    ("TO_BOOL", "TO_BOOL", P13, None),
    ("UNARY_NOT", "UNARY_NOT", None, P13),
    ("UNARY_NOT", "TO_BOOL UNARY_NOT", P13, None),
    *[(f"POP_JUMP_IF_{when}", f"POP_JUMP_FORWARD_IF_{when}:jump", None, P12) for when in ("TRUE", "FALSE")],
    *[(f"POP_JUMP_IF_{when}", f"POP_JUMP_IF_{when}:jump", P12, P13) for when in ("TRUE", "FALSE")],
    *[(f"POP_JUMP_IF_{when}", f"TO_BOOL POP_JUMP_IF_{when}:jump", P13, None) for when in ("TRUE", "FALSE")],
    ("CONVERT_VALUE", "FORMAT_VALUE:arg", None, P13),       # formats too, which changes nothing in a str
    ("FORMAT_SIMPLE", "FORMAT_VALUE:0", None, P13),
    ("FORMAT_WITH_SPEC", "FORMAT_VALUE:4", None, P13),
    ("LOAD_FROM_DICT_OR_DEREF", "LOAD_CLASSDEREF:slot", None, P12),     # class bodies, never resumed
    ("CALL", "PRECALL:arg CALL:arg", None, P12),
    ("CALL", "CALL:arg", P12, None),
]
Spelling = tuple[tuple[str, str], ...]
SPELLINGS: dict[str, Spelling] = {
    name: tuple((word.partition(":")[0], word.partition(":")[2]) for word in text.split())
    for name, text, since, until in _SPELLINGS if applies(since, until)}


def _by_opcode(names: Sequence[int]) -> frozenset[int]:
    return frozenset(op for op in names if op < 256)


HAS_CONST, HAS_NAME = _by_opcode(dis.hasconst), _by_opcode(dis.hasname)
HAS_SLOT = _by_opcode(dis.haslocal) | _by_opcode(dis.hasfree)
HAS_JUMP = _by_opcode(dis.hasjrel)
EXTENDED_ARG, CACHE = dis.opmap["EXTENDED_ARG"], dis.opmap["CACHE"]


def _cache_counts() -> list[int]:
    """Inline cache units after each opcode; the standard library keeps them by number until 3.12 and by name since."""
    entries = opcode._inline_cache_entries      # type: ignore[attr-defined]  # CPython's own table
    if isinstance(entries, dict):
        return [entries.get(name, 0) for name in opcode.opname[:256]]
    return list(entries)[:256]


CACHES = _cache_counts()
RULES: dict[str, Rule] = {row.names[0]: row.rule for row in REAL if applies(row.since, row.until)}


def _groups() -> dict[str, list[InstrRow]]:
    """First name -> its groups, longest first."""
    found: dict[str, list[InstrRow]] = {}
    for row in sorted(GROUPS, key=lambda row: -len(row.names)):
        if applies(row.since, row.until):
            found.setdefault(row.names[0], []).append(row)
    return found


GROUPS_BY_FIRST = _groups()


def check() -> None:
    """Raises ImportError where the rows do not describe this interpreter."""
    if PYTHON not in SUPPORTED:
        raise ImportError(f"firesteel captures Python {'.'.join(map(str, SUPPORTED[0]))} to {'.'.join(map(str, SUPPORTED[-1]))} bytecode, "
                          f"not {'.'.join(map(str, PYTHON))}")
    real = {name for name, op in dis.opmap.items() if op < 256 and not name.startswith("INSTRUMENTED_")} - INTERNAL
    described = set(RULES) | {name for name, since in GROUPED_ONLY.items() if applies(since, None)}
    if real != described:
        raise ImportError(f"capture/versions.py: no row for {sorted(real - described)}, no instruction for {sorted(described - real)}")
    binary = tuple(symbol for _, symbol in dis._nb_ops)     # type: ignore[attr-defined]  # CPython's own table
    if binary != BINARY_SYMBOLS or tuple(dis.cmp_op) != COMPARE_SYMBOLS:
        raise ImportError("capture/versions.py: the operator numbers differ from those of this interpreter")


check()


def describe() -> str:
    """The normalised instructions as a page of Markdown (docs/capture.md holds it)."""
    lines = ["| instruction | stack (before -- after) | meaning |", "| --- | --- | --- |"]
    for name, meaning in NORMAL.items():
        lines.append(f"| `{name}` | `{meaning.stack}` | {meaning.text}{' (jumps)' if meaning.jumps else ''} |".replace("a | b", "a \\| b"))
    return "\n".join(lines)
