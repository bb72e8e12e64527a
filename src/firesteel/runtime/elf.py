"""Object code -> functions in this process, without a compiler library: a linker for the relocatable ELF files that LLVM writes for kernels.

In: the bytes of object files and addresses of what they import.  Out: `link(...)`, the addresses of their functions, as long as one of these
lives.  All files go into one mapping: code first, which becomes readable and executable, then constants, then data; nothing is ever
writable and executable.  Kernels are compiled in the large code model, so that nearly every reference is a whole address.

    code = link([object_bytes], {"fs_launch": address})
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code["k_12"])(args)
"""
from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence

from firesteel.errors import PackageError
from firesteel.records import dataclass
from firesteel.table import Table

PROGBITS, SYMTAB, RELA, NOBITS = 1, 2, 4, 8         # kinds of sections
WRITE, ALLOC, EXECUTE = 1, 2, 4                     # their flags
UNDEFINED, ABSOLUTE = 0, 0xFFF1                     # "sections" of symbols
LOCAL, WEAK = 0, 2                                  # bindings of symbols
X86_64 = 62
LIBRARIES = ("libm.so.6", "libmvec.so.1")           # where functions are looked for that the process does not show


class LinkedAddress(int):
    """The address of a native function.  It holds the function's memory."""

    memory: mmap.mmap


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

    def __init__(self, data: bytes):
        self.data = data
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
            raise PackageError("The machine code is no 64-bit ELF file.")
        kind, machine = struct.unpack_from("<HH", data, 16)
        if (kind, machine) != (1, X86_64):
            raise PackageError(f"The machine code is for another kind of processor (ELF machine {machine}).")
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

def _absolute(form: str) -> Callable[[memoryview, int, int, int], None]:
    return lambda memory, at, place, value: struct.pack_into(form, memory, at, value)


def _relative(form: str) -> Callable[[memoryview, int, int, int], None]:
    return lambda memory, at, place, value: struct.pack_into(form, memory, at, value - place)


# kind -> writes the value (symbol + addend) at a place; a value that does not fit is a struct.error
RELOCATIONS: Table[Callable[[memoryview, int, int, int], None]] = Table("relocation of x86-64", "runtime/elf.py")
for _kind, _write in {1: _absolute("<Q"), 2: _relative("<i"), 4: _relative("<i"), 10: _absolute("<I"), 11: _absolute("<i"),
                      24: _relative("<q")}.items():
    RELOCATIONS.add(_kind, _write)


# ---------------------------------------------------------------- linking

def link(files: Sequence[bytes], imports: Mapping[str, int]) -> dict[str, LinkedAddress]:
    """Loads the files together; their global functions by name."""
    objects = [ObjectFile(data) for data in files]
    places, size, end_of_code = _layout(objects)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    own = {symbol.name: base + places[number, symbol.section] + symbol.value for number, file in enumerate(objects) for symbol in file.symbols
           if symbol.binding != LOCAL and (number, symbol.section) in places}
    known: dict[str, int] = {**imports, **own}
    with memoryview(memory) as view:
        for number, file in enumerate(objects):
            _fill(file, number, view, places)
            _relocate(file, number, view, base, places, known)
    _protect(base, end_of_code)
    return {name: _held(address, memory) for name, address in own.items()}


def _held(address: int, memory: mmap.mmap) -> LinkedAddress:
    held = LinkedAddress(address)
    held.memory = memory
    return held


def _layout(objects: Sequence[ObjectFile]) -> tuple[dict[tuple[int, int], int], int, int]:
    """(offset of each section, by file and section; size of all; where code ends)."""
    places: dict[tuple[int, int], int] = {}
    at = end_of_code = 0
    for code in (True, False):
        for number, file in enumerate(objects):
            for k in file.loaded():
                section = file.sections[k]
                if bool(section.flags & EXECUTE) is code:
                    at = -(-at // section.align) * section.align
                    places[number, k] = at
                    at += section.size
        at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end_of_code = end_of_code or at
    return places, max(at, mmap.PAGESIZE), end_of_code


def _fill(file: ObjectFile, number: int, view: memoryview, places: Mapping[tuple[int, int], int]) -> None:
    for k in file.loaded():
        section, at = file.sections[k], places[number, k]
        if section.kind != NOBITS:
            view[at:at + section.size] = file.data[section.offset:section.offset + section.size]


def _relocate(file: ObjectFile, number: int, view: memoryview, base: int, places: Mapping[tuple[int, int], int], known: Mapping[str, int]) -> None:
    for section, offset, kind, index, addend in file.relocations():
        symbol = file.symbols[index]
        if symbol.section == UNDEFINED:
            value = known[symbol.name] if symbol.name in known else function_address(symbol.name)
        else:
            value = symbol.value + (0 if symbol.section == ABSOLUTE else base + places[number, symbol.section])
        at = places[number, section] + offset
        try:
            RELOCATIONS[kind](view, at, base + at, value + addend)
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
                       hint="Make the package again on a system with the C library of this one.")


def _protect(base: int, size: int) -> None:
    if size and ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise PackageError(f"The system refuses executable memory (error {ctypes.get_errno()}).")
