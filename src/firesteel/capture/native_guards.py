"""Guards in machine code: most of a guard function as a list of steps, which a small native function walks.

A model of a hundred modules has six hundred guards, nearly all of the same few sorts: a dictionary has or lacks a key, an object is of
a type, a constant is as it was.  As Python text each costs 30 to 80 ns in the midst of a program, here 5 to 10.

    steps = Steps(["self", "x"], {"self": model, "x": x})
    rest = [guard for guard in guards if not steps.check(guard)]        # what only Python text can say
    walk = steps.build([source for source in wanted if steps.reads(source) is not None], compile_text)
    walk.call(model, x)     # a tuple of those values; None: a guard fails; False: ask the Python text

What always holds
1. A step means what the Python text of its guard or source means.  Where the objects are not of the exact types that it was written for, the
   walk says "ask the Python text", so new sorts of objects cost time, not truth.
2. No step runs code of the user's: dictionaries with constant keys, tuples, lists, cells, functions, classes, all of exact types.  So
   references are borrowed until the walk is over, but for what a tensor makes when it is asked (GET).
3. The values that a walk hands out are those that it checked.
4. Entries of a dictionary whose keys are objects (an optimiser's states, by parameter) are read in one pass over it (NEXT), in the order they
   had.  Where a key is another than it was (MEETS) the Python text looks it up.
"""
from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from firesteel.capture.class_reads import VERSION_AT, ClassFacts
from firesteel.capture.guards import Guard
from firesteel.capture.source import MODULE_HOOKS, Attr, CellContents, Fixed, HiddenDict, Item, Local, Nth, OwnDict, Source, Type, literal
from firesteel.native_method import CompileText, native_method, spelled_out
from firesteel.records import dataclass
from firesteel.table import Table

WORTH_IT = 12           # fewer guards than this are quicker as Python text
MOST = 1 << 14          # slots: they live on the C stack, and a step has 16 bits for one; what comes behind is Python text

# the walk is written for objects that begin with a count and their type, and for one thread at a time
assert VERSION_AT == 384, VERSION_AT
POSSIBLE = ((object.__basicsize__, tuple.__basicsize__, ctypes.sizeof(ctypes.c_void_p)) == (16, 24, 8)
            and getattr(sys, "_is_gil_enabled", lambda: True)())

END, READ, ASK, TYPE, IS, SAME, EQUAL, WORD, EMPTY, OWN, MEMBER, PUT, KEYS, ATTR, NEXT, MEETS, GET, VERSION = range(18)
# offsets in an object: its type; a cell's content, a float's value, the length of a tuple, list or dict, a method's function; a method's object
TYPE_AT, CONTENT_AT, SECOND_AT = 8, 16, 24

WALK = spelled_out("""
%step = type { i8, i8, i16, i16, i16, ptr }                     ; what to do, function, type of x or -1, slot of x, slot of the result, operand
%head = type { i64, i64, ptr, ptr, ptr, ptr, ptr, ptr }         ; number of slots, of exports; slots to export, steps, types, functions, None, False

declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare void @PyErr_Clear()
declare i32 @PyObject_RichCompareBool(ptr, ptr, i32)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare ptr @_PyObject_GetDictPtr(ptr)
declare ptr @_PyType_Lookup(ptr, ptr)
declare i32 @PyDict_Next(ptr, ptr, ptr, ptr)
declare ptr @PyObject_GetAttr(ptr, ptr)

define ptr @firesteel_walk(ptr %self, ptr %objects, i64 %count) {
entry:
  %head = call ptr @PyLong_AsVoidPtr(ptr %self)
  %slot_count = load i64, ptr %head
  %slots = alloca ptr, i64 %slot_count
  %position = alloca i64
  %key_at = alloca ptr
  %owned = alloca ptr, i64 %slot_count
  %owned_count = alloca i64
  store i64 0, ptr %owned_count
  %exports = fetch i64, %head, ptr %head, i64 0, i32 1
  %types = fetch ptr, %head, ptr %head, i64 0, i32 4
  %functions = fetch ptr, %head, ptr %head, i64 0, i32 5
  %result = call ptr @PyTuple_New(i64 %exports)
  if eq ptr %result, null then %raise else %argument
raise:
  ret ptr null
argument:
  %i = phi i64 [0, %entry], [%i_next, %copy]
  if slt i64 %i, %count then %copy else %begin
copy:
  %object = fetch ptr, ptr, ptr %objects, i64 %i
  %first_at = getelementptr ptr, ptr %slots, i64 %i
  store ptr %object, ptr %first_at
  %i_next = add i64 %i, 1
  br label %argument
begin:
  %steps = fetch ptr, %head, ptr %head, i64 0, i32 3
  br label %step

step:
  %at = phi ptr [%steps, %begin], [%next, %go_on]
  %next = getelementptr %step, ptr %at, i64 1
  %op = load i8, ptr %at
  %function_number = fetch i8, %step, ptr %at, i64 0, i32 1
  %function_at = getelementptr ptr, ptr %functions, i8 %function_number
  %type_number = fetch i16, %step, ptr %at, i64 0, i32 2
  %x_slot = fetch i16, %step, ptr %at, i64 0, i32 3
  %x = fetch ptr, ptr, ptr %slots, i16 %x_slot
  %out = fetch i16, %step, ptr %at, i64 0, i32 4
  %out_slot_at = getelementptr ptr, ptr %slots, i16 %out
  %operand = fetch ptr, %step, ptr %at, i64 0, i32 5
  if slt i16 %type_number, 0 then %do else %of_type
of_type:
  %wants = fetch ptr, ptr, ptr %types, i16 %type_number
  %has = fetch ptr, i8, ptr %x, i64 8
  if eq ptr %has, %wants then %do else %unsure
do:
  switch i8 %op, label %held [ i8 1, label %read
                               i8 2, label %ask
                               i8 3, label %type
                               i8 4, label %is
                               i8 5, label %same
                               i8 6, label %equal
                               i8 7, label %word
                               i8 8, label %empty
                               i8 9, label %own
                               i8 10, label %member
                               i8 11, label %found
                               i8 12, label %keys
                               i8 13, label %attr
                               i8 14, label %next_entry
                               i8 15, label %meets
                               i8 16, label %get
                               i8 17, label %version ]
go_on:
  br label %step

read:
  %r_function = load ptr, ptr %function_at
  %r_value = call ptr %r_function(ptr %x, ptr %operand)
  br label %found
attr:
  %d_type = fetch ptr, i8, ptr %x, i64 8
  %d_of_class = call ptr @_PyType_Lookup(ptr %d_type, ptr %operand)
  if eq ptr %d_of_class, null then %own else %unsure
own:
  %o_dict_at = call ptr @_PyObject_GetDictPtr(ptr %x)
  if eq ptr %o_dict_at, null then %trouble else %owned_dict
owned_dict:
  %o_dict = load ptr, ptr %o_dict_at
  if eq i8 %op, 13 then %attr_owned else %found
attr_owned:
  if eq ptr %o_dict, null then %trouble else %attr_get
attr_get:
  %d_value = call ptr @PyDict_GetItemWithError(ptr %o_dict, ptr %operand)
  br label %found
member:
  %m_offset = ptrtoint ptr %operand to i64
  %m_value = fetch ptr, i8, ptr %x, i64 %m_offset
  br label %found
get:
  %g_value = call ptr @PyObject_GetAttr(ptr %x, ptr %operand)
  if eq ptr %g_value, null then %trouble else %hold
hold:
  %g_count = load i64, ptr %owned_count
  %g_at = getelementptr ptr, ptr %owned, i64 %g_count
  store ptr %g_value, ptr %g_at
  %g_after = add i64 %g_count, 1
  store i64 %g_after, ptr %owned_count
  br label %found
next_entry:
  %p_first = icmp ne ptr %operand, null
  %p_position = load i64, ptr %position
  %p_from = select i1 %p_first, i64 0, i64 %p_position
  store i64 %p_from, ptr %position
  %p_value_at = getelementptr ptr, ptr %out_slot_at, i64 1
  %p_any = call i32 @PyDict_Next(ptr %x, ptr %position, ptr %out_slot_at, ptr %p_value_at)
  if ne i32 %p_any, 0 then %go_on else %unsure
meets:
  %y_other = load ptr, ptr %out_slot_at
  if eq ptr %x, %y_other then %go_on else %unsure
found:
  %value = phi ptr [%operand, %do], [%r_value, %read], [%o_dict, %owned_dict], [%m_value, %member], [%d_value, %attr_get], [%g_value, %hold]
  if eq ptr %value, null then %trouble else %keep
keep:
  store ptr %value, ptr %out_slot_at
  br label %go_on

ask:
  %a_function = load ptr, ptr %function_at
  %a_answer = call i32 %a_function(ptr %x, ptr %operand)
  if slt i32 %a_answer, 0 then %trouble else %answered
answered:
  %a_wanted = sext i16 %out to i32
  if eq i32 %a_answer, %a_wanted then %go_on else %fails
type:
  %t_has = fetch ptr, i8, ptr %x, i64 8
  if eq ptr %t_has, %operand then %go_on else %fails
is:
  if eq ptr %x, %operand then %go_on else %fails
same:
  %s_other = load ptr, ptr %out_slot_at
  if eq ptr %x, %s_other then %go_on else %fails
equal:
  if eq ptr %x, %operand then %go_on else %compare
compare:
  %e_answer = call i32 @PyObject_RichCompareBool(ptr %x, ptr %operand, i32 2)
  if eq i32 %e_answer, 1 then %go_on else %differs
differs:
  if slt i32 %e_answer, 0 then %trouble else %fails
word:
  %w_bits = fetch ptr, i8, ptr %x, i64 16
  if eq ptr %w_bits, %operand then %go_on else %fails
version:
  %v_now = fetch i32, i8, ptr %x, i64 384
  %v_then = load i32, ptr %operand
  if eq i32 %v_now, %v_then then %go_on else %unsure
empty:
  %n_value = call ptr @PyDict_GetItemWithError(ptr %x, ptr %operand)
  if eq ptr %n_value, null then %trouble else %counting
counting:
  %n_wants = fetch ptr, ptr, ptr %types, i16 %out
  %n_has = fetch ptr, i8, ptr %n_value, i64 8
  if eq ptr %n_has, %n_wants then %counted else %unsure
counted:
  %n_length = fetch i64, i8, ptr %n_value, i64 16
  if eq i64 %n_length, 0 then %go_on else %fails
keys:
  %k_count = fetch i64, i8, ptr %operand, i64 16
  %k_first_at = getelementptr i8, ptr %operand, i64 24
  store i64 0, ptr %position
  br label %key_next
key_next:
  %k = phi i64 [0, %keys], [%k_next, %key_held]
  %k_more = call i32 @PyDict_Next(ptr %x, ptr %position, ptr %key_at, ptr null)
  %k_any = icmp ne i32 %k_more, 0
  %k_wanted = icmp slt i64 %k, %k_count
  %k_both = and i1 %k_any, %k_wanted
  br i1 %k_both, label %key_compare, label %key_end
key_end:
  %k_one = or i1 %k_any, %k_wanted
  br i1 %k_one, label %fails, label %go_on
key_compare:
  %k_key = load ptr, ptr %key_at
  %k_expected = fetch ptr, ptr, ptr %k_first_at, i64 %k
  if eq ptr %k_key, %k_expected then %key_held else %key_other
key_other:
  %k_type = fetch ptr, i8, ptr %k_key, i64 8
  %k_str = fetch ptr, i8, ptr %k_expected, i64 8
  if eq ptr %k_type, %k_str then %key_equal else %unsure
key_equal:
  %k_answer = call i32 @PyObject_RichCompareBool(ptr %k_key, ptr %k_expected, i32 2)
  if eq i32 %k_answer, 1 then %key_held else %unsure
key_held:
  %k_next = add i64 %k, 1
  br label %key_next

held:
  %list = fetch ptr, %head, ptr %head, i64 0, i32 2
  br label %export
export:
  %e = phi i64 [0, %held], [%e_next, %exporting]
  if slt i64 %e, %exports then %exporting else %done
exporting:
  %e_slot = fetch i64, i64, ptr %list, i64 %e
  %e_value = fetch ptr, ptr, ptr %slots, i64 %e_slot
  call void @Py_IncRef(ptr %e_value)
  %e_stored = call i32 @PyTuple_SetItem(ptr %result, i64 %e, ptr %e_value)
  %e_next = add i64 %e, 1
  br label %export
done:
  br label %release

trouble:
  call void @PyErr_Clear()
  br label %unsure
unsure:
  %u_at = getelementptr %head, ptr %head, i64 0, i32 7
  br label %answer
fails:
  %f_at = getelementptr %head, ptr %head, i64 0, i32 6
  br label %answer
answer:
  %answer_at = phi ptr [%u_at, %unsure], [%f_at, %fails]
  %said = load ptr, ptr %answer_at
  call void @Py_IncRef(ptr %said)
  call void @Py_DecRef(ptr %result)
  br label %release
release:
  %returned = phi ptr [%result, %done], [%said, %answer]
  %h_count = load i64, ptr %owned_count
  br label %release_next
release_next:
  %h = phi i64 [0, %release], [%h_next, %releasing]
  if slt i64 %h, %h_count then %releasing else %released
releasing:
  %h_object = fetch ptr, ptr, ptr %owned, i64 %h
  call void @Py_DecRef(ptr %h_object)
  %h_next = add i64 %h, 1
  br label %release_next
released:
  ret ptr %returned
}
""")


class _Step(ctypes.Structure):
    _fields_ = [("op", ctypes.c_int8), ("function", ctypes.c_int8), ("type", ctypes.c_int16), ("x", ctypes.c_int16), ("out", ctypes.c_int16),
                ("operand", ctypes.c_void_p)]


class _Head(ctypes.Structure):
    _fields_ = [("slots", ctypes.c_int64), ("exports", ctypes.c_int64), ("list", ctypes.c_void_p), ("steps", ctypes.c_void_p),
                ("types", ctypes.c_void_p), ("functions", ctypes.c_void_p), ("none", ctypes.c_void_p), ("false", ctypes.c_void_p)]


FUNCTIONS = ("PyDict_GetItemWithError", "PyDict_Contains", "PyTuple_GetItem", "PyList_GetItem", "PyFunction_GetCode", "PyFunction_GetDefaults",
             "PyFunction_GetKwDefaults", "PyFunction_GetClosure", "_PyType_Lookup")     # of (x, operand); the results are borrowed


@functools.cache
def _functions() -> ctypes.Array:
    return (ctypes.c_void_p * len(FUNCTIONS))(*[ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in FUNCTIONS])


class GuardWalk:
    """`call` is a native function of the region's arguments; it may be called as long as this object, which holds all that the steps
    point to, is alive."""

    def __init__(self, steps: Sequence[_Step], slots: int, exports: Sequence[int], types: Sequence[type], keep: list[Any], compile_text: CompileText):
        self._steps, self._exports, self._keep = (_Step * len(steps))(*steps), (ctypes.c_int64 * len(exports))(*exports), [*keep, *types]
        self._types = (ctypes.c_void_p * len(types))(*map(id, types))
        tables = [ctypes.addressof(table) for table in (self._exports, self._steps, self._types, _functions())]
        self._head = _Head(slots, len(exports), *tables, id(None), id(False))
        self.call = native_method("firesteel_walk", WALK, compile_text, ctypes.addressof(self._head))


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Read:
    """How a source is read of its base: by a function of Python's, by `OWN`, as a member, or as an attribute that its class does not have."""
    op: int
    operand: Any = 0        # an object, or a number
    function: str = ""


READS: Table[Callable[[Any, Any], Read | None]] = Table("native read", "capture/native_guards.py")      # (source, value of its base) -> how, or None
_BY_INDEX: dict[type, str] = {tuple: "PyTuple_GetItem", list: "PyList_GetItem"}
_OF_FUNCTION = {"__code__": "PyFunction_GetCode", "__defaults__": "PyFunction_GetDefaults", "__kwdefaults__": "PyFunction_GetKwDefaults",
                "__closure__": "PyFunction_GetClosure"}
_OF_METHOD = {"__func__": CONTENT_AT, "__self__": SECOND_AT}
DICTS = (dict, OrderedDict, defaultdict)
IN_ORDER = (dict, defaultdict)      # their own order is that of their memory
MISSING = object()
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
GETTERS = {name: vars(torch._C.TensorBase)[name] for name in ("grad",)}     # attributes of tensors that are read without code of Python's
SEEN_AS_THEY_ARE = (types.FunctionType, property, types.WrapperDescriptorType)      # descriptors that a class hands out themselves


def _find(cls: type, name: str) -> Any:
    """What a class or one of its bases has under this name; MISSING where none has."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)


def _is_plain(base: Any) -> bool:
    """Is it an object whose attributes are in a dictionary, read as all objects' are?"""
    own, read = (_find(type(base), name) for name in ("__dict__", "__getattribute__"))
    return isinstance(own, types.GetSetDescriptorType) and read is object.__getattribute__ and not issubclass(type(base), type)


READS.row(OwnDict)(lambda source, base: Read(OWN) if _is_plain(base) else None)


READS.row(HiddenDict)(lambda source, base: None if issubclass(type(base), type) or type(base).__dictoffset__ == 0 else Read(OWN))


@READS.row(Item)
def _item(source: Item, base: Any) -> Read | None:
    if type(base) in DICTS and literal(source.key) is not None:
        return Read(READ, source.key, "PyDict_GetItemWithError")
    if type(base) in _BY_INDEX and type(source.key) is int and 0 <= source.key < 1 << 31:
        return Read(READ, ctypes.c_void_p(source.key), _BY_INDEX[type(base)])
    return None


@READS.row(Attr)
def _attr(source: Attr, base: Any) -> Read | None:
    if type(base) is types.FunctionType:
        return Read(READ, None, _OF_FUNCTION[source.key]) if source.key in _OF_FUNCTION else None
    if type(base) is types.MethodType and source.key in _OF_METHOD:
        return Read(MEMBER, ctypes.c_void_p(_OF_METHOD[source.key]))
    if type(base) in PLAIN_TENSORS:
        return Read(GET, sys.intern(source.key)) if _find(type(base), source.key) is GETTERS.get(source.key, MISSING) is not MISSING else None
    if _is_plain(base):
        return Read(ATTR, sys.intern(source.key)) if _find(type(base), source.key) is MISSING and source.key in base.__dict__ else None
    meta = type(base)
    if not issubclass(meta, type) or meta.__getattribute__ is not type.__getattribute__ or hasattr(_find(meta, source.key), "__set__"):
        return None
    found = _find(base, source.key)
    as_it_is = found is not MISSING and (type(found) in SEEN_AS_THEY_ARE or not hasattr(type(found), "__get__"))
    return Read(READ, sys.intern(source.key), "_PyType_Lookup") if as_it_is else None


READS.row(CellContents)(lambda source, base: Read(MEMBER, ctypes.c_void_p(CONTENT_AT)) if type(base) is types.CellType else None)
READS.row(Type)(lambda source, base: Read(MEMBER, ctypes.c_void_p(TYPE_AT)))


# ---------------------------------------------------------------------------------------------------------------------
# Checking


CHECKS: Table[Callable[[Steps, int, Any, Any], bool]] = Table("native check", "capture/native_guards.py")    # (steps, slot, data, value now) -> done?


CHECKS.row("type")(lambda steps, slot, data, now: steps.add(TYPE, slot, data))
CHECKS.row("identity")(lambda steps, slot, data, now: steps.add(IS, slot, data))
CHECKS.row("none")(lambda steps, slot, data, now: steps.add(IS, slot, None))


@CHECKS.row("code")
def _check_code(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    if type(now) is not types.FunctionType:
        return False
    code = steps.slot()
    steps.add(READ, slot, None, code, function="PyFunction_GetCode", of=types.FunctionType)
    return steps.add(IS, code, data)


@CHECKS.row("equals")
def _check_equals(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    if data is None or isinstance(data, bool):
        return steps.add(IS, slot, data)
    if type(data) in (int, str, bytes, torch.device):
        return steps.add(EQUAL, slot, data, of=type(data))
    if type(data) is float and not math.isnan(data):        # by its bits: 0.0 is not -0.0
        return steps.add(WORD, slot, ctypes.c_void_p(struct.unpack("Q", struct.pack("d", data))[0]), of=float)
    return False


@CHECKS.row("length")
def _check_length(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    return type(now) in (tuple, list, *DICTS) and steps.add(WORD, slot, ctypes.c_void_p(data), of=type(now))


@CHECKS.row("keys")
def _check_keys(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    if not data:
        return _check_length(steps, slot, 0, now)
    return type(now) is dict and all(type(key) is str for key in data) and steps.add(KEYS, slot, tuple(data), of=dict)


def _contains(steps: Steps, slot: int, data: Any, now: Any, answer: int) -> bool:
    possible = type(now) in DICTS and literal(data) is not None
    return possible and steps.add(ASK, slot, data, answer, function="PyDict_Contains", of=type(now))


CHECKS.row("has_key")(lambda steps, slot, data, now: _contains(steps, slot, data, now, 1))
CHECKS.row("no_key")(lambda steps, slot, data, now: _contains(steps, slot, data, now, 0))


@CHECKS.row("class")
def _check_class(steps: Steps, slot: int, data: ClassFacts, now: Any) -> bool:
    steps.keep(data)
    return steps.add(VERSION, slot, ctypes.c_void_p(ctypes.addressof(data.seen)))


@CHECKS.row("same")
def _check_same(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    other = steps.reads(data)
    return other is not None and steps.add(SAME, slot, None, other)


@CHECKS.row("has_object")
def _check_has_object(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    key = steps.reads(data)
    place = steps.key_slot(slot, now, steps.value(data)) if key is not None else None
    return key is not None and place is not None and steps.add(MEETS, key, None, place)


@CHECKS.row("no_hooks")
def _check_no_hooks(steps: Steps, slot: int, data: Any, now: Any) -> bool:
    if type(now) is not dict or any(type(now[name]) not in DICTS for name in MODULE_HOOKS):
        return False
    return all(steps.add(EMPTY, slot, name, steps.type_number(type(now[name])), of=dict) for name in MODULE_HOOKS)


class Steps:
    """A builder.  `arguments` are the region's arguments as they are now, of which all guards hold."""

    def __init__(self, arg_names: Sequence[str], arguments: Mapping[str, Any]):
        self.count = len(arg_names)
        self.steps: list[_Step] = []
        self.checks = 0                                 # guards that are steps
        self._keep: list[Any] = []
        self._types: dict[type, int] = {}
        self._slots: dict[Source, int | None] = {Local(name): n for n, name in enumerate(arg_names)}
        self._now: dict[Source, Any] = {Local(name): arguments[name] for name in arg_names}
        self._entries: dict[int, tuple[int, dict[int, int]]] = {}       # of a dictionary by its slot: see _pass_over
        self._getters: set[tuple[type, str]] = set()

    def check(self, guard: Guard) -> bool:
        """Makes steps of a guard; False where there are none for it."""
        if guard.kind not in CHECKS or guard.source is None or self.count >= MOST:
            return False
        slot = self.reads(guard.source)
        if slot is None or not CHECKS[guard.kind](self, slot, guard.data, self._now[guard.source]):
            return False
        self.checks += 1
        return True

    def reads(self, source: Source) -> int | None:
        """The slot that this source's value is in; None where only Python text can read it."""
        if source not in self._slots:
            self._slots[source] = self._read(source)
        return self._slots[source]

    def value(self, source: Source) -> Any:
        """Of a source that has a slot: what it is now."""
        return self._now[source]

    def _read(self, source: Source) -> int | None:
        if self.count >= MOST:
            return None
        if type(source) is Fixed:
            self._now[source] = source.key
            slot = self.slot()
            self.add(PUT, 0, source.key, slot)
            return slot
        base = self.reads(source.base) if source.base is not None else None
        if base is None:
            return None
        value = self._now[source.base]
        if type(value) in IN_ORDER and (type(source) is Nth or type(source) is Item and literal(source.key) is None):
            return self._read_entry(source, base, value)
        how = READS[type(source)](source, value) if type(source) in READS else None
        if how is None:
            return None
        if how.op == GET:
            self._check_getter(base, source.key, type(value))
        self._now[source] = source.step(value)
        slot = self.slot()
        self.add(how.op, base, how.operand, slot, function=how.function, of=type(value))
        return slot

    def _read_entry(self, source: Source, base: int, value: dict) -> int | None:
        """Rule 4: the key at a place, or the value of a key."""
        first, places = self._pass_over(base, value)
        place = source.key if type(source) is Nth else places.get(id(source.key), len(places))
        if place >= len(places) or self.count >= MOST:
            return None
        self._now[source] = source.step(value)
        if type(source) is Nth:
            return first + 2 * place
        self.add(MEETS, first + 2 * place, None, self.reads(Fixed(source.key)) or 0)
        return first + 2 * place + 1

    def _pass_over(self, base: int, value: dict) -> tuple[int, dict[int, int]]:
        """Steps that read all entries, once: the slot of the first key, before its value's, the next key's and so on; places of keys by id."""
        if base not in self._entries:
            places = {id(key): place for place, key in enumerate(itertools.islice(value, max(MOST - self.count, 0) // 2))}
            self._entries[base] = self.count, places
            for place in range(len(places)):
                self.add(NEXT, base, ctypes.c_void_p(int(place == 0)), self.slot(), of=type(value))
                self.slot()
        return self._entries[base]

    def key_slot(self, base: int, value: dict, key: Any) -> int | None:
        """Of a dictionary's key that is this object."""
        first, places = self._pass_over(base, value) if type(value) in IN_ORDER else (0, {})
        return first + 2 * places[id(key)] if id(key) in places else None

    def _check_getter(self, base: int, name: str, cls: type) -> None:
        """A class whose attribute the program has replaced since would run its code."""
        if (cls, name) not in self._getters:
            self._getters.add((cls, name))
            type_slot, found = self.slot(), self.slot()
            self.add(MEMBER, base, ctypes.c_void_p(TYPE_AT), type_slot, of=cls)
            self.add(READ, type_slot, sys.intern(name), found, function="_PyType_Lookup")
            self.add(MEETS, found, None, self.reads(Fixed(_find(cls, name))) or 0)

    def slot(self) -> int:
        self.count += 1
        assert self.count < 1 << 15, self.count
        return self.count - 1

    def type_number(self, cls: type) -> int:
        return self._types.setdefault(cls, len(self._types))

    def add(self, op: int, x: int, operand: Any, out: int = 0, *, function: str = "", of: type | None = None) -> bool:
        """Adds a step; the operand is an object, or a number in a c_void_p."""
        self._keep.append(operand)
        word = operand.value if type(operand) is ctypes.c_void_p else id(operand)
        number = self.type_number(of) if of is not None else -1
        self.steps.append(_Step(op, FUNCTIONS.index(function) if function else 0, number, x, out, word))
        return True

    def keep(self, obj: Any) -> None:
        """As long as the walk, which points into it."""
        self._keep.append(obj)

    def build(self, exports: Sequence[Source], compile_text: CompileText) -> GuardWalk:
        """The walk, which hands out the values of these sources."""
        self.add(END, 0, None)
        slots = [self._slots[source] or 0 for source in exports]
        return GuardWalk(self.steps, max(self.count, 1), slots, list(self._types), self._keep, compile_text)
