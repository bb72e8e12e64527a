"""Object code linked without LLVM: the same kernels give the same results; what does not fit is refused in words."""
import ctypes
import platform
import struct
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
    assert address.holds is not None


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


# ---------------------------------------------------------------- AArch64: words are looked at, not run

VECTOR = """
define void @vector(ptr %p) {
  %a = load <4 x float>, ptr %p
  %b = fadd <4 x float> %a, <float 1.0, float 2.5, float 3.25, float 4.125>
  store <4 x float> %b, ptr %p
  ret void
}
"""
BYTES = struct.pack("<4f", 1.0, 2.5, 3.25, 4.125)


def code_for_arm(text, model):
    llvm = pytest.importorskip("llvmlite.binding")
    try:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM has no AArch64")
    machine = target.create_target_machine(cpu="generic", opt=2, reloc="static" if model == "small" else "default", codemodel=model, jit=True)
    module = llvm.parse_assembly(text)
    module.triple = "aarch64-unknown-linux-gnu"
    return machine.emit_object(module)


def words(address, count):
    return list((ctypes.c_uint32 * count).from_address(address))


def signed(value, bits):
    return value - (1 << bits) if value >> bits - 1 else value


def reached(address, word):
    """By a branch with link."""
    assert word >> 26 == 0b100101
    return address + 4 * signed(word & (1 << 26) - 1, 26)


def addresses(address, count):
    """What movz and three movk, or adrp and an offset, put together in these instructions, by register."""
    found = {}
    for number, word in enumerate(words(address, count)):
        if word >> 23 in (0b110100101, 0b111100101):        # movz, movk
            shift = 16 * (word >> 21 & 3)
            before = found.get(word & 31, 0) if word >> 29 == 0b111 else 0
            found[word & 31] = before & ~(0xFFFF << shift) | (word >> 5 & 0xFFFF) << shift
        elif word & 0x9F000000 == 0x90000000:               # adrp
            pages = signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)
            found[word & 31] = (address + 4 * number >> 12 << 12) + (pages << 12)
        elif word & 0xFFC00000 == 0x3DC00000 and word >> 5 & 31 in found:        # ldr q, scaled by 16
            found[word >> 5 & 31] += (word >> 10 & 0xFFF) * 16
    return list(found.values())


@pytest.mark.parametrize("model", ["jitdefault", "small"])
def test_words_of_aarch64_name_the_constant(model):
    linked = elf.link([code_for_arm(VECTOR, model)], {}, elf.AARCH64)
    (place,) = addresses(linked["vector"], 10 if model == "jitdefault" else 4)
    assert ctypes.string_at(place, 16) == BYTES


def test_branches_of_aarch64_reach_functions_and_stubs():
    linked = elf.link([code_for_arm(ADD, "jitdefault"), code_for_arm(CALLS, "jitdefault")], {"given": 0x1234_5678_9ABC_DEF0}, elf.AARCH64)
    calls = [(linked["calls"] + 4 * n, word) for n, word in enumerate(words(linked["calls"], 8)) if word >> 26 == 0b100101]
    first, stub = (reached(*call) for call in calls[:2])
    assert first == linked["look"]
    assert words(stub, 2) == [0x58000050, 0xD61F0200] and ctypes.c_uint64.from_address(stub + 8).value == 0x1234_5678_9ABC_DEF0
    assert stub % 8 == 0


def test_what_a_word_cannot_reach_is_refused():
    memory = memoryview(bytearray(8))
    elf.MACHINES[elf.AARCH64].relocations[283](memory, 0, 0, (1 << 27) - 4)
    for kind, value in [(283, 1 << 27), (283, -(1 << 27) - 4), (275, 1 << 33), (261, 1 << 31)]:
        with pytest.raises(struct.error):
            elf.MACHINES[elf.AARCH64].relocations[kind](memory, 0, 0, value)


def test_code_of_another_processor_is_refused():
    with pytest.raises(fs.errors.PackageError, match="another kind of processor"):
        elf.link([code_for_arm(ADD, "jitdefault")], {})
