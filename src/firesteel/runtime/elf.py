"""Object code -> functions in this process, without a compiler library: a linker for the relocatable ELF files that LLVM writes for kernels.

In: the bytes of object files and addresses of what they import.  Out: `link(...)`, the addresses of their functions, as long as one of these
lives.  All files go into one mapping: code first, which becomes readable and executable, then constants, then data; nothing is ever
writable and executable.  Kernels are compiled in the large code model, so that nearly every reference is a whole address; what a branch of
AArch64 cannot reach is called through a stub behind the code.  `MACHINES` has a row a kind of processor.

    code = link([object_bytes], {"fs_launch": address})
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code["k_12"])(args)
"""
from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
from collections.abc import Callable, Mapping, Sequence

from firesteel.errors import PackageError
from firesteel.native_method import KERNEL, Word
from firesteel.records import dataclass
from firesteel.table import Table

PROGBITS, SYMTAB, RELA, NOBITS = 1, 2, 4, 8         # kinds of sections
WRITE, ALLOC, EXECUTE = 1, 2, 4                     # their flags
UNDEFINED, ABSOLUTE = 0, 0xFFF1                     # "sections" of symbols
LOCAL, WEAK = 0, 2                                  # bindings of symbols
X86_64, AARCH64 = 62, 183                           # ELF's numbers of processors
LIBRARIES = ("libm.so.6", "libmvec.so.1")           # where functions are looked for that the process does not export


@dataclass(frozen=True)
class Section:
    name: int
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


@dataclass(frozen=True)
class ObjectSymbol:
    name: str
    binding: int
    section: int
    value: int


class ObjectFile:
    """The tables of one file."""

    def __init__(self, data: bytes, machine: int):
        self.data = data
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
            raise PackageError("The machine code is no 64-bit ELF file.")
        kind, found = struct.unpack_from("<HH", data, 16)
        if (kind, found) != (1, machine):
            raise PackageError(f"The machine code is for another kind of processor (ELF machine {found}).")
        start, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        self.sections = [self._section(start + k * size) for k in range(count)]
        tables = [s for s in self.sections if s.kind == SYMTAB]
        self.symbols = self._symbols(tables[0]) if tables else []

    def _section(self, at: int) -> Section:
        name, kind, flags, _, offset, size, link, info, align, _ = struct.unpack_from("<IIQQQQIIQQ", self.data, at)
        return Section(name, kind, flags, offset, size, link, info, max(align, 1))

    def _symbols(self, table: Section) -> list[ObjectSymbol]:
        texts = self.sections[table.link].offset
        rows = struct.iter_unpack("<IBBHQQ", self.data[table.offset:table.offset + table.size])
        return [ObjectSymbol(self._text(texts + name), info >> 4, section, value) for name, info, _, section, value, _ in rows]

    def _text(self, at: int) -> str:
        return self.data[at:self.data.index(b"\0", at)].decode()

    def loaded(self) -> list[int]:
        return [k for k, s in enumerate(self.sections) if s.flags & ALLOC and s.size and s.kind != RELA]

    def relocations(self) -> list[tuple[int, int, int, int, int]]:
        """(section, offset in it, kind, symbol, addend) of those in sections that are loaded."""
        return [(s.info, offset, info & 0xFFFFFFFF, info >> 32, addend) for s in self.sections
                if s.kind == RELA and self.sections[s.info].flags & ALLOC
                for offset, info, addend in struct.iter_unpack("<QQq", self.data[s.offset:s.offset + s.size])]


# ---------------------------------------------------------------- relocations

Write = Callable[[memoryview, int, int, int], None]     # of a value (symbol + addend) at a place; one that does not fit is a struct.error


def _absolute(form: str) -> Write:
    return lambda memory, at, place, value: struct.pack_into(form, memory, at, value)


def _relative(form: str) -> Write:
    return lambda memory, at, place, value: struct.pack_into(form, memory, at, value - place)


def _patched(memory: memoryview, at: int, field: int, width: int, low: int) -> None:
    """Writes a field of an instruction, whose lowest bit is `low`."""
    mask = (1 << width) - 1
    (word,) = struct.unpack_from("<I", memory, at)
    struct.pack_into("<I", memory, at, word & ~(mask << low) | (field & mask) << low)


def _reaches(distance: int, bits: int) -> None:
    if not -(1 << bits - 1) <= distance < 1 << bits - 1:
        raise struct.error("too far")


def _sixteen_bits(number: int) -> Write:
    """Of a whole address that four instructions make: movz, movk, movk, movk."""
    return lambda memory, at, place, value: _patched(memory, at, value >> 16 * number, 16, 5)


def _in_page(scale: int) -> Write:
    """The offset in a page, in units of what is loaded."""
    return lambda memory, at, place, value: _patched(memory, at, (value & 0xFFF) >> scale, 12, 10)


def _page(memory: memoryview, at: int, place: int, value: int) -> None:
    pages = (value >> 12) - (place >> 12)
    _reaches(pages, 21)
    _patched(memory, at, pages, 2, 29)
    _patched(memory, at, pages >> 2, 19, 5)


def _branch(memory: memoryview, at: int, place: int, value: int) -> None:
    _reaches(value - place, 28)
    _patched(memory, at, value - place >> 2, 26, 0)


@dataclass(frozen=True)
class ElfMachine:
    """A kind of processor: its relocations; those of branches, and the code that goes to the address behind it, for what they cannot reach."""
    relocations: dict[int, Write]
    branches: frozenset[int] = frozenset()
    stub: bytes = b""


MACHINES: Table[ElfMachine] = Table("machine", "runtime/elf.py")
MACHINES.add(X86_64, ElfMachine({1: _absolute("<Q"), 2: _relative("<i"), 4: _relative("<i"), 10: _absolute("<I"), 11: _absolute("<i"),
                              24: _relative("<q")}))
MACHINES.add(AARCH64, ElfMachine(
    {257: _absolute("<Q"), 258: _absolute("<I"), 260: _relative("<q"), 261: _relative("<i"), 264: _sixteen_bits(0), 266: _sixteen_bits(1),
     268: _sixteen_bits(2), 269: _sixteen_bits(3), 275: _page, 277: _in_page(0), 278: _in_page(0), 284: _in_page(1), 285: _in_page(2),
     286: _in_page(3), 299: _in_page(4), 282: _branch, 283: _branch},
    frozenset([282, 283]), struct.pack("<II", 0x58000050, 0xD61F0200)))        # ldr x16, the address; br x16
HERE = {"x86_64": X86_64, "aarch64": AARCH64}.get(platform.machine(), 0)


# ---------------------------------------------------------------- linking

def link(files: Sequence[bytes], imports: Mapping[str, int], machine: int = HERE) -> dict[str, Word]:
    """Loads the files together; their global functions by name."""
    objects = [ObjectFile(data, machine) for data in files]
    own_names = {symbol.name for file in objects for symbol in file.symbols if symbol.section != UNDEFINED and symbol.binding != LOCAL}
    far = sorted({file.symbols[index].name for file in objects for _, _, kind, index, _ in file.relocations()
                  if kind in MACHINES[machine].branches and file.symbols[index].section == UNDEFINED} - own_names)
    size_of_stub = len(MACHINES[machine].stub) + 8
    places, stubs, size, end_of_code = _layout(objects, size_of_stub * len(far))
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    own = {symbol.name: base + places[number, symbol.section] + symbol.value for number, file in enumerate(objects) for symbol in file.symbols
           if symbol.binding != LOCAL and (number, symbol.section) in places}
    known: dict[str, int] = {**imports, **own}
    with memoryview(memory) as view:
        for number, name in enumerate(far):
            at = stubs + number * size_of_stub
            view[at:at + size_of_stub] = MACHINES[machine].stub + struct.pack("<Q", known[name] if name in known else function_address(name))
        reached = {**known, **{name: base + stubs + number * size_of_stub for number, name in enumerate(far)}}
        for number, file in enumerate(objects):
            _fill(file, number, view, places)
            _relocate(file, number, view, base, places, known, reached, MACHINES[machine])
    _protect(base, end_of_code)
    return {name: Word.of(address, KERNEL, name, memory) for name, address in own.items()}


def _layout(objects: Sequence[ObjectFile], size_of_stubs: int) -> tuple[dict[tuple[int, int], int], int, int, int]:
    """(offset of each section, by file and section; of stubs; size of all; where code ends)."""
    places: dict[tuple[int, int], int] = {}
    at = stubs = end_of_code = 0
    for code in (True, False):
        for number, file in enumerate(objects):
            for k in file.loaded():
                section = file.sections[k]
                if bool(section.flags & EXECUTE) is code:
                    at = -(-at // section.align) * section.align
                    places[number, k] = at
                    at += section.size
        if code:
            stubs = -(-at // 16) * 16
            at = stubs + size_of_stubs
        at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end_of_code = end_of_code or at
    return places, stubs, max(at, mmap.PAGESIZE), end_of_code


def _fill(file: ObjectFile, number: int, view: memoryview, places: Mapping[tuple[int, int], int]) -> None:
    for k in file.loaded():
        section, at = file.sections[k], places[number, k]
        if section.kind != NOBITS:
            view[at:at + section.size] = file.data[section.offset:section.offset + section.size]


def _relocate(file: ObjectFile, number: int, view: memoryview, base: int, places: Mapping[tuple[int, int], int], known: Mapping[str, int],
              reached: Mapping[str, int], machine: ElfMachine) -> None:
    for section, offset, kind, index, addend in file.relocations():
        symbol = file.symbols[index]
        if symbol.section == UNDEFINED:
            from_here = reached if kind in machine.branches else known
            value = from_here[symbol.name] if symbol.name in from_here else function_address(symbol.name)
        else:
            value = symbol.value + (0 if symbol.section == ABSOLUTE else base + places[number, symbol.section])
        at = places[number, section] + offset
        try:
            machine.relocations[kind](view, at, base + at, value + addend)
        except KeyError:
            raise PackageError(f"The machine code has a relocation of kind {kind}, which is not known.") from None
        except struct.error:
            raise PackageError(f"The machine code reaches for {symbol.name or 'a constant'} too far away.") from None


def function_address(name: str) -> int:
    """Of a C function of this process or of the mathematical libraries."""
    for library in (None, *LIBRARIES):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    raise PackageError(f"The machine code calls {name}, which neither this process nor {' or '.join(LIBRARIES)} has.",
                       hint="Rebuild the package on a system with the C library of this one.")


def _protect(base: int, size: int) -> None:
    if size and ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise PackageError(f"The system refuses executable memory (error {ctypes.get_errno()}).")
    if HERE == AARCH64:     # instructions and data have caches of their own
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(base), ctypes.c_void_p(base + size))
