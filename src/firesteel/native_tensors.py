"""Tensors in machine code: where a native method finds a tensor's data, without a call of Python's.

torch exports functions in C that take the address of an `at::Tensor`, and that is where a Python tensor has it, right behind its type (`_can_read`
looks).  Where it is elsewhere, and for subclasses, machine code calls the method `data_ptr`.

    words()         what such code needs, as an array of addresses that lives as long as the process: the places are `TENSOR`, `PARAMETER` and so on
    ADDRESS_OF      LLVM text of `i64 @firesteel_address(ptr %words, ptr %object)`: of a tensor's data, or the value of an int; -1 with an error set
    apart(most)     a function that says of tensors whether they lie apart from each other in memory
    unchanged(ts)   a function that says of tensors whether they are these, as they were when it was made
"""
from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel import native_method
from firesteel.native_method import spelled_out

HANDLE_AT = 16          # in a Python tensor, where objects begin with a count and their type
LIBRARY = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
FUNCTIONS = ("aoti_torch_get_data_ptr", "aoti_torch_get_layout", "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size")


@functools.cache
def words() -> ctypes.Array:
    """The classes torch.Tensor and Parameter (0 where their tensors cannot be read), the name of the method, torch's functions."""
    name, found = sys.intern("data_ptr"), _functions() if _can_read() else []
    plain = [id(torch.Tensor), id(torch.nn.Parameter)] if found else [0, 0]
    return (ctypes.c_int64 * (4 + len(FUNCTIONS)))(id(torch.Tensor), *plain, id(name), *found)


def _can_read() -> bool:
    made = [torch.empty(3), torch.nn.Parameter(torch.empty(2, 2)), torch.empty(0, dtype=torch.int8)[None]]
    return object.__basicsize__ == HANDLE_AT and all(ctypes.c_void_p.from_address(id(t) + HANDLE_AT).value == t._cdata for t in made)


def _functions() -> list[int]:
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", LIBRARY))
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    except (OSError, AttributeError):
        return []


# ---------------------------------------------------------------- what the texts share

# Is the object a plain tensor or parameter?  Then %read, else %other
PLAIN = r"""
  %type = fetch ptr, i8, ptr %object, i64 8
  %tensor = fetch ptr, ptr, ptr %words, i64 1
  %parameter = fetch ptr, ptr, ptr %words, i64 2
  %is_tensor = icmp eq ptr %type, %tensor
  %is_parameter = icmp eq ptr %type, %parameter
  %is_plain = or i1 %is_tensor, %is_parameter
  br i1 %is_plain, label %read, label %other
"""

# The end of a function that says yes or no.  What it owns begins with the words, True and False
ANSWER = r"""
yes:
  %yes_at = getelementptr ptr, ptr %own, i64 1
  br label %answer
no:
  %no_at = getelementptr ptr, ptr %own, i64 2
  br label %answer
answer:
  %answer_at = phi ptr [%yes_at, %yes], [%no_at, %no]
  %said = load ptr, ptr %answer_at
  call void @Py_IncRef(ptr %said)
  ret ptr %said
}
"""


# ---------------------------------------------------------------- addresses

ADDRESS_OF = spelled_out(r"""
declare i64 @PyLong_AsLongLong(ptr)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare ptr @PyObject_CallMethodObjArgs(ptr, ptr, ...)
declare void @Py_DecRef(ptr)

define internal i64 @firesteel_address(ptr %words, ptr %object) {
entry:
  %found = alloca i64""" + PLAIN + r"""
read:
  %function = fetch ptr, ptr, ptr %words, i64 4
  %handle = getelementptr i8, ptr %object, i64 16
  %failed = call i32 %function(ptr %handle, ptr %found)
  %ok = icmp eq i32 %failed, 0
  %address = load i64, ptr %found
  br i1 %ok, label %done, label %ask
done:
  ret i64 %address
other:
  %base = load ptr, ptr %words
  %some = call i32 @PyType_IsSubtype(ptr %type, ptr %base)
  if ne i32 %some, 0 then %ask else %number
ask:
  %name = fetch ptr, ptr, ptr %words, i64 3
  %answer = call ptr (ptr, ptr, ...) @PyObject_CallMethodObjArgs(ptr %object, ptr %name, ptr null)
  if eq ptr %answer, null then %error else %answered
error:
  ret i64 -1
answered:
  %asked = call i64 @PyLong_AsLongLong(ptr %answer)
  call void @Py_DecRef(ptr %answer)
  ret i64 %asked
number:
  %value = call i64 @PyLong_AsLongLong(ptr %object)
  ret i64 %value
}
""")


# ---------------------------------------------------------------- memory

# own: the words above, True, False, (start, end) of what was found apart the last time, how many, how many fit.  Where all are as they were nothing
# has to be compared; otherwise the spans are sorted.  False is no answer: who asks looks more closely.
LIE_APART = spelled_out(r"""
%span = type { i64, i64 }
declare ptr @PyLong_AsVoidPtr(ptr)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare void @Py_IncRef(ptr)
declare void @qsort(ptr, i64, i64, ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal i32 @order(ptr %a, ptr %b) {
  %x = load i64, ptr %a
  %y = load i64, ptr %b
  %more = icmp ugt i64 %x, %y
  %less = icmp ult i64 %x, %y
  %up = zext i1 %more to i32
  %down = zext i1 %less to i32
  %result = sub i32 %up, %down
  ret i32 %result
}

define ptr @firesteel_apart(ptr %self, ptr %objects, i64 %count) {
entry:
  %own = call ptr @PyLong_AsVoidPtr(ptr %self)
  %words = load ptr, ptr %own
  %known = fetch ptr, ptr, ptr %own, i64 3
  %known_count_at = getelementptr i64, ptr %own, i64 4
  %known_count = load i64, ptr %known_count_at
  %room = fetch i64, i64, ptr %own, i64 5
  %tensor_base = load ptr, ptr %words
  %data_of = fetch ptr, ptr, ptr %words, i64 4
  %layout_of = fetch ptr, ptr, ptr %words, i64 5
  %offset_of = fetch ptr, ptr, ptr %words, i64 6
  %size_of = fetch ptr, ptr, ptr %words, i64 7
  %word = alloca i64
  if ule i64 %count, %room then %begin else %no
begin:
  %spans = alloca %span, i64 %count
  br label %next
next:
  %i = phi i64 [0, %begin], [%i_next, %taken]
  %n = phi i64 [0, %begin], [%n_next, %taken]
  %same = phi i1 [true, %begin], [%same_next, %taken]
  if slt i64 %i, %count then %look else %all
look:
  %object = fetch ptr, ptr, ptr %objects, i64 %i""" + PLAIN + r"""
other:
  %some = call i32 @PyType_IsSubtype(ptr %type, ptr %tensor_base)
  if ne i32 %some, 0 then %no else %taken
read:
  %handle = getelementptr i8, ptr %object, i64 16
  store i64 0, ptr %word
  %e1 = call i32 %layout_of(ptr %handle, ptr %word)
  %layout = load i32, ptr %word
  %odd = or i32 %e1, %layout                    ; 0 is strided
  if eq i32 %odd, 0 then %placed else %no
placed:
  %e2 = call i32 %offset_of(ptr %handle, ptr %word)
  %offset = load i64, ptr %word
  %e3 = call i32 %size_of(ptr %handle, ptr %word)
  %size = load i64, ptr %word
  %e4 = call i32 %data_of(ptr %handle, ptr %word)
  %start = load i64, ptr %word
  %e23 = or i32 %e2, %e3
  %e234 = or i32 %e23, %e4
  %errors = zext i32 %e234 to i64
  %troubles = or i64 %errors, %offset
  if eq i64 %troubles, 0 then %sized else %no
sized:
  if eq i64 %size, 0 then %taken else %keep
keep:
  %end = add i64 %start, %size
  %start_at = getelementptr %span, ptr %spans, i64 %n, i32 0
  store i64 %start, ptr %start_at
  %end_at = getelementptr %span, ptr %spans, i64 %n, i32 1
  store i64 %end, ptr %end_at
  %was_start = fetch i64, %span, ptr %known, i64 %n, i32 0
  %was_end = fetch i64, %span, ptr %known, i64 %n, i32 1
  %s1 = icmp eq i64 %start, %was_start
  %s2 = icmp eq i64 %end, %was_end
  %s12 = and i1 %s1, %s2
  %same_here = and i1 %same, %s12
  %n_here = add i64 %n, 1
  br label %taken
taken:
  %n_next = phi i64 [%n, %other], [%n, %sized], [%n_here, %keep]
  %same_next = phi i1 [%same, %other], [%same, %sized], [%same_here, %keep]
  %i_next = add i64 %i, 1
  br label %next
all:
  %as_many = icmp eq i64 %n, %known_count
  %as_before = and i1 %same, %as_many
  br i1 %as_before, label %yes, label %sort
sort:
  %bytes = mul i64 %n, 16
  call void @llvm.memcpy.p0.p0.i64(ptr %known, ptr %spans, i64 %bytes, i1 false)
  store i64 -1, ptr %known_count_at
  call void @qsort(ptr %spans, i64 %n, i64 16, ptr @order)
  br label %pair
pair:
  %p = phi i64 [1, %sort], [%p_next, %compare]
  if slt i64 %p, %n then %compare else %learn
compare:
  %before = sub i64 %p, 1
  %p_end = fetch i64, %span, ptr %spans, i64 %before, i32 1
  %p_start = fetch i64, %span, ptr %spans, i64 %p, i32 0
  %p_next = add i64 %p, 1
  if ule i64 %p_end, %p_start then %pair else %no
learn:
  store i64 %n, ptr %known_count_at
  br label %yes
""" + ANSWER)


class Known(int):
    """The address of `own`."""

    own: ctypes.Array
    spans: ctypes.Array


def apart(most: int) -> Callable[..., bool] | None:
    """A function of at most so many arguments: have all plain tensors among them memory that no other of them has?  Its no may be a don't know.  None
    where there is no such function, or no compiler at hand."""
    compile_text = native_method.compiler_at_hand()
    if compile_text is None or not words()[1]:
        return None
    spans = (ctypes.c_int64 * (2 * most + 2))()
    head = (ctypes.c_int64 * 6)(ctypes.addressof(words()), id(True), id(False), ctypes.addressof(spans), -1, most)
    own = Known(ctypes.addressof(head))
    own.own, own.spans = head, spans
    return native_method.native_method("firesteel_apart", LIE_APART, compile_text, own)


# ---------------------------------------------------------------- versions

# For what is read here torch exports no function: where a tensor has the address of its version counter, which views share, and where that has the
# count.  `_has_counters` looks whether it is so in this torch.
COUNTER_AT, COUNT_AT = 40, 16

# own: the words above, True, False, (version counter, version, address of its data, bytes of it to compare, address of their copy) of each tensor,
# how many
AS_BEFORE = spelled_out(r"""
%fact = type { i64, i64, i64, i64, ptr }
declare ptr @PyLong_AsVoidPtr(ptr)
declare void @Py_IncRef(ptr)
declare i32 @memcmp(ptr, ptr, i64)

define ptr @firesteel_unchanged(ptr %self, ptr %objects, i64 %count) {
entry:
  %own = call ptr @PyLong_AsVoidPtr(ptr %self)
  %words = load ptr, ptr %own
  %known = fetch ptr, ptr, ptr %own, i64 3
  %known_count = fetch i64, i64, ptr %own, i64 4
  %data_of = fetch ptr, ptr, ptr %words, i64 4
  %word = alloca i64
  if eq i64 %count, %known_count then %next else %no
next:
  %i = phi i64 [0, %entry], [%i_next, %same]
  if slt i64 %i, %count then %look else %yes
look:
  %object = fetch ptr, ptr, ptr %objects, i64 %i""" + PLAIN + r"""
other:
  br label %no
read:
  %handle = getelementptr i8, ptr %object, i64 16
  %impl = load ptr, ptr %handle
  %counter = fetch i64, i8, ptr %impl, i64 COUNTER
  %was_counter = fetch i64, %fact, ptr %known, i64 %i, i32 0
  if eq i64 %counter, %was_counter then %counted else %no
counted:
  %counter_at = inttoptr i64 %counter to ptr
  %version = fetch i32, i8, ptr %counter_at, i64 COUNT
  %wide = zext i32 %version to i64
  %was_version = fetch i64, %fact, ptr %known, i64 %i, i32 1
  if eq i64 %wide, %was_version then %placed else %no
placed:
  store i64 0, ptr %word
  %failed = call i32 %data_of(ptr %handle, ptr %word)
  %data = load i64, ptr %word
  %was_data = fetch i64, %fact, ptr %known, i64 %i, i32 2
  %as_was = icmp eq i64 %data, %was_data
  %ok = icmp eq i32 %failed, 0
  %both = and i1 %as_was, %ok
  br i1 %both, label %here, label %no
here:
  %size = fetch i64, %fact, ptr %known, i64 %i, i32 3
  if eq i64 %size, 0 then %same else %compare
compare:
  %data_at = inttoptr i64 %data to ptr
  %copy = fetch ptr, %fact, ptr %known, i64 %i, i32 4
  %order = call i32 @memcmp(ptr %data_at, ptr %copy, i64 %size)
  if eq i32 %order, 0 then %same else %no
same:
  %i_next = add i64 %i, 1
  br label %next
""".replace("COUNTER", str(COUNTER_AT)).replace("COUNT", str(COUNT_AT)) + ANSWER)


class SeenTensors(int):
    """The address of `own`.  `tensors` share memory and version counter with those that were seen: neither's place is another's meanwhile."""

    own: ctypes.Array
    facts: ctypes.Array
    tensors: list[torch.Tensor]
    copies: list[torch.Tensor | None]


def unchanged(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: are they these, with the data that they have now?  Vectors that are no parameters are compared themselves:
    eager's batch normalisation writes its statistics without a version.  Of others, writes to `.data` cannot be seen.  What inference mode made has
    no version: of that it is never said."""
    with torch.inference_mode(False):
        kept = [tensor.detach() for tensor in tensors]
    copies = [tensor.detach().clone() if tensor.dim() <= 1 and not isinstance(tensor, torch.nn.Parameter) else None for tensor in tensors]
    if any(tensor.is_inference() for tensor in tensors) or not all(tensor.is_contiguous() for tensor, copy in zip(kept, copies) if copy is not None):
        return lambda *now: False
    compile_text = native_method.compiler_at_hand()
    versions, places = [tensor._version for tensor in kept], [tensor.data_ptr() for tensor in kept]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    if compile_text is None or not words()[1] or not plain or not _has_counters():
        return _unchanged_by_python(list(zip(map(weakref.ref, tensors), kept, versions, places, copies)))
    compared = [(0, 0) if copy is None else (copy.nbytes, copy.data_ptr()) for copy in copies]
    rows = [(_counter_of(tensor), version, place, *more) for tensor, version, place, more in zip(kept, versions, places, compared)]
    facts = (ctypes.c_int64 * (5 * len(kept)))(*(fact for row in rows for fact in row))
    head = (ctypes.c_int64 * 5)(ctypes.addressof(words()), id(True), id(False), ctypes.addressof(facts), len(kept))
    own = SeenTensors(ctypes.addressof(head))
    own.own, own.facts, own.tensors, own.copies = head, facts, kept, copies
    return native_method.native_method("firesteel_unchanged", AS_BEFORE, compile_text, own)


def _unchanged_by_python(rows: list[tuple[Any, torch.Tensor, int, int, torch.Tensor | None]]) -> Callable[..., bool]:
    def same(*now: torch.Tensor) -> bool:
        return len(rows) == len(now) and all(
            ref() is tensor and tensor._version == version and tensor.data_ptr() == place
            and (copy is None or torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (copy, tensor))))
            for tensor, (ref, _, version, place, copy) in zip(now, rows))
    return same


def _counter_of(tensor: torch.Tensor) -> int:
    return ctypes.c_int64.from_address(tensor._cdata + COUNTER_AT).value


@functools.cache
def _has_counters() -> bool:
    """Is what is read there shared by a tensor and its views, another for other tensors and for `.data`, and a count of writes?"""
    a, b = torch.zeros(3), torch.nn.Parameter(torch.zeros(3))
    for tensor in (a, b):
        shared, others = _counter_of(tensor), (_counter_of(tensor.data), _counter_of(b if tensor is a else a))
        if not shared or shared in others or shared != _counter_of(tensor.detach()) or _counter_of(torch.ones(2)) == shared:
            return False
    counts = []
    for _ in range(3):
        counts.append([ctypes.c_uint32.from_address(_counter_of(tensor) + COUNT_AT).value == tensor._version for tensor in (a, b)])
        with torch.no_grad():
            a.add_(1)
            b.mul_(2).add_(1)
    return all(map(all, counts))
