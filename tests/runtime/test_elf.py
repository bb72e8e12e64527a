"""Object code linked without LLVM: the same kernels give the same results; what does not fit is refused in words."""
import ctypes
import platform
import sys

import pytest

import firesteel as fs
from firesteel.runtime import cpu, elf

pytestmark = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="ELF files of x86-64")

ADD = """
define i64 @one() { ret i64 1 }
@table = internal constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
@count = internal global i64 0
define i64 @look(i64 %k) {
  %before = load i64, ptr @count
  %after = add i64 %before, 1
  store i64 %after, ptr @count
  %at = getelementptr i64, ptr @table, i64 %k
  %value = load i64, ptr %at
  %sum = add i64 %value, %after
  ret i64 %sum
}
"""
CALLS = """
declare i64 @look(i64)
declare i64 @given(i64)
declare double @cbrt(double)
define i64 @calls(i64 %k) {
  %a = call i64 @look(i64 %k)
  %b = call i64 @given(i64 %a)
  ret i64 %b
}
define double @root(double %x) {
  %y = call double @cbrt(double %x)
  ret double %y
}
"""


def code_of(*texts):
    return cpu.jit().compile([(f"test_{number}", text) for number, text in enumerate(texts)])


def function(address, result=ctypes.c_int64, *arguments):
    return ctypes.CFUNCTYPE(result, *(arguments or (ctypes.c_int64,)))(address)


def test_functions_constants_data_and_calls_between_files():
    given = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda x: x * 2)
    linked = elf.link(code_of(ADD, CALLS), {"given": ctypes.cast(given, ctypes.c_void_p).value})
    assert function(linked["look"])(2) == 31 and function(linked["look"])(2) == 32
    assert function(linked["calls"])(3) == 2 * (40 + 3)
    assert function(linked["root"], ctypes.c_double, ctypes.c_double)(27.0) == pytest.approx(3.0)


def test_code_lives_as_long_as_an_address():
    address = elf.link(code_of(ADD), {})["one"]
    assert function(address)(0) == 1
    assert address.memory is not None


def test_nothing_is_writable_and_executable():
    linked = elf.link(code_of(ADD), {})
    with open("/proc/self/maps", encoding="utf-8") as maps:
        rows = [line.split() for line in maps]
    around = [rights for places, rights, *_ in rows if (ends := [int(end, 16) for end in places.split("-")])[0] <= linked["one"] < ends[1]]
    assert around == ["r-xp"]


def test_a_missing_function_is_named():
    text = "declare void @there_is_no_such_function()\ndefine void @f() { call void @there_is_no_such_function()\n ret void }"
    with pytest.raises(fs.errors.PackageError, match="there_is_no_such_function"):
        elf.link(code_of(text), {})


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x02\x01" + bytes(58)])
def test_what_is_no_object_file_is_refused(data):
    with pytest.raises(fs.errors.PackageError):
        elf.link([data], {})
