"""Native methods: a function in machine code as a builtin of Python, which receives its arguments as a C array (METH_FASTCALL).

    run = native_method("firesteel_walk", LLVM_TEXT, compile_text, own)     # run(*args): machine code, with `own` as its `self`
"""
from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from typing import Any

KERNEL, CONSTANT = "kernel", "constant"     # kinds of words


class Word(int):
    """A word of a launch that is another number in each process: an address, say.  It is written as (kind, name), and holds what it depends on."""

    kind: str
    name: Any
    holds: Any

    @classmethod
    def of(cls, value: int, kind: str, name: Any, holds: Any = None) -> Word:
        word = cls(value)
        word.kind, word.name, word.holds = kind, name, holds
        return word


CompileText = Callable[[str, str], int]     # (LLVM text, function name) -> address
compilers: list[Callable[[], CompileText | None]] = []      # runtime/cpu.py puts its own here when it is loaded


def compiler_at_hand() -> CompileText | None:
    """Where the process has machine code already; else it would cost the first call 100 ms."""
    return compilers[0]() if compilers else None


def spelled_out(text: str) -> str:
    """LLVM text in which `%x = fetch i64, %head, ptr %p, ...` stands for the address of an element and a load from it, and
    `if eq i64 %a, %b then %yes else %no` for a comparison and the branch on it."""
    text, number = re.sub(r"(%[\w.]+) = fetch (\w+), (.*)", r"\1.from = getelementptr \3\n  \1 = load \2, ptr \1.from", text), itertools.count()
    return re.sub(r"if (.*) then (\S+) else (\S+)",
                  lambda m: f"%if.{(n := next(number))} = icmp {m[1]}\n  br i1 %if.{n}, label {m[2]}, label {m[3]}", text)


class _MethodDef(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


_METH_FASTCALL = 0x80
_made: dict[str, tuple[_MethodDef, int]] = {}       # once a process, with its code: it outlives every method


def native_method(name: str, text: str, compile_text: CompileText, own: Any) -> Callable[..., Any]:
    """The function of that name in the LLVM text, bound to an object."""
    if name not in _made:
        code = compile_text(text, name)
        _made.setdefault(name, (_MethodDef(name.encode(), code, _METH_FASTCALL, None), code))      # another thread's may be in use already
    new = ctypes.pythonapi.PyCMethod_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p]
    return new(ctypes.addressof(_made[name][0]), own, None, None)
