"""LLVM text -> native code in this process: optimise, compile, cache, link.

In: Kernels (or any LLVM text).  Out: addresses of functions (`Word`), valid as long as one of these objects lives.
 - One text is compiled once in a process, and once for a machine where fs.config.cache_dir allows it: object code is kept
   under a digest of the text, the LLVM version, the processor's features and the settings that change code.
 - Several kernels are compiled at the same time (fs.config.compile_threads).
 - llvmlite is loaded at the first kernel that must be compiled; what is in the cache on disk is linked without it (elf.py).
 - `reset` forgets all code; what compiled callables still hold stays loaded until they go.
 - llvmlite is called on threads of their own (`transaction.aside`): it frees memory in Python, and an interrupt there would free it twice.
 - A fork waits until no thread is inside of LLVM, so that the child's copy is whole.

    (address,) = load([print_nest(nest, buffers)])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(args)
"""
from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import mmap
import os
import platform
import re
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import firesteel.runtime.diskcache as diskcache
from firesteel import native_method, stages, transaction
from firesteel.artifacts import counters, timed
from firesteel.codegen.target import Target, llvm_binding, this_machine, vector_library
from firesteel.config import config
from firesteel.errors import PackageError, UserError
from firesteel.native_method import KERNEL, Word
from firesteel.runtime import elf, threads
from firesteel.watchers import progress

if TYPE_CHECKING:
    from firesteel.codegen.printer import Kernel

MOST_CODE = 1 << 16     # bytes of a kernel, for perf
_VERSION = 2            # of what is done to a text before it is code: change it with the pass list


class Library:
    """Functions that were linked together."""


class KeptCode(NamedTuple):
    """Object code of a function, as the cache on disk has it."""
    symbol: str
    key: bytes      # digest of its key there
    code: bytes


CODES: dict[str, Any] = {}      # addresses of all that is loaded, by symbol, which has a digest of the text
KEYS: dict[str, bytes] = {}     # symbol -> digest of its key in the cache


class Jit:
    """The one JIT of a process."""

    def __init__(self) -> None:
        llvm = llvm_binding()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.llvm = llvm
        self.target = llvm.Target.from_default_triple()
        self.jit = llvm.create_lljit_compiler(self.machine())
        self.names = itertools.count()      # of libraries: none is given twice, since one whose linking was interrupted stays in use
        self.codes = CODES
        self.loaded: dict[weakref.ref[Library], Any] = {}       # llvmlite's object for each, which unloads it
        self.dead: list[weakref.ref[Library]] = []              # libraries that nobody holds any more
        self.imports: dict[str, Word] = {}
        self.machines: list[Any] = []       # target machines that nobody uses at the moment
        self.emit = _unlocked_emit(llvm)
        vector_library()                    # its functions are found among the process's symbols
        self._add_launch()

    def machine(self, target: Target | None = None) -> Any:
        """A target machine, for this processor or another of its kind; each use of the compiler takes one, and the JIT."""
        cpu = target or this_machine()
        # "jitdefault": code and its constants are loaded into two places, which may be more than 2 GB apart in a process full of libraries
        return self.target.create_target_machine(cpu=cpu.cpu, features=cpu.features, opt=2, reloc="default", codemodel="jitdefault", jit=True)

    def _add_launch(self) -> None:
        text, imports = launch_text()
        (code,) = self.compile([("fs_launch", text)])
        self.imports.update(self.link([("fs_launch", code)], imports, LAUNCH_FUNCTIONS))

    def compile(self, texts: Sequence[tuple[str, str]]) -> list[bytes]:
        """Object code of each (symbol, text), out of the disk cache where it is there.  Processes that miss the same at once make it once."""
        cache = diskcache.kernels()
        keys = [_key(text) for _, text in texts]
        KEYS.update((symbol, diskcache.hashed(key)) for key, (symbol, _) in zip(keys, texts))
        found = {k: code for k in dict.fromkeys(keys) if (code := cache.get(k)) is not None}
        missing = {k: text for k, (_, text) in zip(keys, texts) if k not in found}
        let_go, is_made = cache.claim(next(iter(missing))) if missing else (None, False)
        try:
            if is_made:
                found.update((k, code) for k in missing if (code := cache.get(k)) is not None)
                missing = {k: text for k, text in missing.items() if k not in found}
            counters["native"]["cache_hits"] += len(found)
            counters["native"]["compiled"] += len(missing)
            for key, code in zip(missing, self._compile_all(list(missing.values())), strict=True):
                found[key] = code
                cache.put(key, code)
        finally:
            if let_go is not None:
                let_go()
        return [found[k] for k in keys]

    def _compile_all(self, texts: list[str]) -> list[bytes]:
        def compile_one(number: int) -> bytes:
            progress.show(f"{number} of {len(texts)} kernels")
            return self._compile(texts[number])
        return transaction.side_by_side(compile_one, [*range(len(texts))], min(config.compile_threads, len(texts)))

    def _compile(self, text: str, machine: Any = None) -> bytes:
        """Text -> object code, by `machine` or one of ours."""
        if machine is not None:
            return self._compile_by(machine, text)
        machine = self.machines.pop() if self.machines else self.machine()
        try:
            return self._compile_by(machine, text)
        finally:
            self.machines.append(machine)   # not left to the thread, whose end may meet the end of Python: LLVM's memory is given back by Python code

    def _compile_by(self, machine: Any, text: str) -> bytes:
        """Each text has a context of its own and a machine that no other uses, so threads do not meet in LLVM."""
        context = self.llvm.create_context()
        with self.llvm.parse_assembly(text, context) as module:
            if config.verify:
                module.verify()
            builder = self.llvm.create_pass_builder(machine, self.llvm.create_pipeline_tuning_options(speed_level=2))
            passes = self.llvm.create_new_module_pass_manager()
            passes.add_sroa_pass()      # loops are printed as they should run: only memory slots have to become registers
            passes.run(module, builder)
            return self.emit(machine, module)

    def link(self, codes: Sequence[tuple[str, bytes]], imports: Mapping[str, int], exports: Sequence[str] = ()) -> dict[str, Word]:
        """Loads object code; by symbol, of `exports` where they are not the codes' own symbols."""
        builder = self.llvm.JITLibraryBuilder().add_current_process()
        for name, address in imports.items():
            builder.import_symbol(name, address)
        exports = exports or [symbol for symbol, _ in codes]
        for _, code in codes:
            builder.add_object_img(code)
        for symbol in exports:
            builder.export_symbol(symbol)
        try:
            tracker, library = builder.link(self.jit, f"library{next(self.names)}"), Library()
        except RuntimeError:
            check_memory()
            raise
        self.loaded[weakref.ref(library, self.dead.append)] = tracker
        return {symbol: Word.of(tracker[symbol], KERNEL, symbol, library) for symbol in exports}

    def unload(self) -> None:
        """Gives the memory of dead libraries back.  Not done where the last holder lets go: that may be any thread, at any line."""
        while self.dead:
            self.loaded.pop(self.dead.pop()).close()

    def load(self, texts: Sequence[tuple[str, str]]) -> list[Word]:
        """The functions, in order."""
        found = [code for symbol, _ in texts if (code := self.codes.get(symbol)) is not None]
        return found if len(found) == len(texts) else transaction.aside(_lock.holding, self._load, texts)

    def _link_new(self, new: dict[str, str]) -> dict[str, Word]:
        codes = self.compile(list(new.items()))
        try:
            return self.link(list(zip(new, codes)), self.imports)
        except UserError:
            raise
        except RuntimeError:        # object code out of the cache may not fit this process: it is compiled again, once
            for text in new.values():
                diskcache.kernels().forget(_key(text))
            return self.link(list(zip(new, self.compile(list(new.items())))), self.imports)

    def load_codes(self, codes: Mapping[str, bytes]) -> None:
        """Object code that was compiled before."""
        transaction.aside(_lock.holding, lambda: CODES.update(self.link(list(codes.items()), self.imports)))

    def _load(self, texts: Sequence[tuple[str, str]]) -> list[Word]:
        self.unload()
        new = {symbol: text for symbol, text in texts if symbol not in self.codes}
        if new:
            self.codes.update(self._link_new(new))
        return [self.codes[symbol] for symbol, _ in texts]


def check_memory() -> None:
    """LLVM does not say that the system refused it, which is no failure of ours.  Others than Linux refuse memory that is writable, too."""
    if sys.platform != "linux":
        return
    try:
        mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError as error:
        raise UserError(f"Kernels of the CPU need executable memory, which the system refuses: {error}.",
                        hint='Allow it (systemd: MemoryDenyWriteExecute=no; SELinux: execmem); backend="aot_eager" needs none.') from None


_jits: list[Jit] = []
_lock = transaction.Lock()      # of everything that goes on inside of LLVM


def jit() -> Jit:
    """The JIT compiler, made at the first call.  Never two: the code of one that is dropped would be freed under its kernels."""
    return _jits[0] if _jits else transaction.aside(_lock.holding, _make_jit)


def _make_jit() -> Jit:
    if not _jits:
        _jits.append(Jit())
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_jits[0]))      # never freed: that would be Python code, of which little is left at the end
    return _jits[0]


def reset() -> None:
    """Forgets all code: what nothing holds is unloaded."""
    CODES.clear()
    for made in _jits:
        transaction.aside(_lock.holding, made.unload)


# ---------------------------------------------------------------- forks

def _library_lock() -> Any:
    """llvmlite's own lock, around each call into LLVM; None where there is none, or none yet."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    lock = getattr(getattr(getattr(ffi, "lib", None), "_lock", None), "_lock", None)
    return lock if hasattr(lock, "_is_owned") else None


def _before_fork() -> None:
    _lock.acquire()
    if (lock := _library_lock()) is not None:
        lock.acquire()


def _after_fork_in_parent() -> None:
    if (lock := _library_lock()) is not None:
        lock.release()
    _lock.release()


def _after_fork_in_child() -> None:
    if (lock := _library_lock()) is not None:
        lock._at_fork_reinit()
    threads.after_fork()


atexit.register(_lock.holding, int)     # what an interrupted caller no longer waits for comes to its end before LLVM is taken down
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _unlocked_emit(llvm: Any) -> Any:
    """`machine.emit_object` without llvmlite's global lock, where its insides are as we know them: code generation is
    nearly all of the time, and threads with contexts of their own need no lock."""
    from llvmlite.binding import ffi
    try:
        raw = ctypes.CDLL(ffi.lib._name).LLVMPY_TargetMachineEmitToMemory
    except (AttributeError, OSError):
        return lambda machine, module: machine.emit_object(module)
    raw.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    raw.restype = ffi.LLVMMemoryBufferRef

    def emit(machine: Any, module: Any) -> bytes:
        with ffi.OutputString() as error:
            buffer = raw(machine._ptr, module._ptr, 1, error._as_parameter_)
            if not buffer:
                raise RuntimeError(str(error))
        try:
            start = ffi.lib.LLVMPY_GetBufferStart(buffer)
            return ctypes.string_at(start, ffi.lib.LLVMPY_GetBufferSize(buffer))
        finally:
            ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)
    return emit


def _key(text: str) -> str:
    return "\n".join([text, machine_key(), repr(config.code_key())])


@functools.cache
def machine_key() -> str:
    """What object code depends on besides its text, in which the rest of the target is.  Asked of the system where it says, without LLVM."""
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        version = llvm_binding().__name__       # or the error that says what is missing
    return repr((_VERSION, version, platform.machine(), _processor()))


def _processor() -> Any:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().partition("\n\n")[0]
        facts = dict(re.findall(r"^(vendor_id|cpu family|model|model name|stepping|flags)\s*:\s*(.*)$", first, flags=re.MULTILINE))
    except OSError:
        facts = {}
    return facts if "flags" in facts else (this_machine().cpu, this_machine().features)


# ---------------------------------------------------------------- without LLVM

def link_without_llvm(codes: Mapping[str, bytes]) -> bool:
    """Loads object code; says whether it could.  To load LLVM takes longer than all of a warm start's linking."""
    return not _jits and _lock.holding(_link_without_llvm, codes)


def _link_without_llvm(codes: Mapping[str, bytes]) -> bool:
    try:
        found = elf.link(list(codes.values()), _launch_functions())
        CODES.update({symbol: found[symbol] for symbol in codes})
    except (PackageError, LookupError, OSError, ValueError, struct.error):     # another system, another kind of relocation, a file of something else
        return False
    return True


_launch: dict[str, Any] = {}    # never let go: kernels call it


def _launch_functions() -> dict[str, Any]:
    """What kernels import, out of the cache too."""
    if not _launch:
        text, imports = launch_text()
        code = diskcache.kernels().get(_key(text))
        if code is None:
            raise LookupError("not in the cache")
        _launch.update(elf.link([code], imports))
        counters["native"]["cache_hits"] += 1
    return _launch


def launch_text() -> tuple[str, dict[str, int]]:
    """The function that runs kernels on several threads, and what it imports."""
    entry_points = threads.openmp()
    return (threads.LAUNCH, {**entry_points, "fs_wanted": threads.wanted_address()}) if entry_points else (threads.LAUNCH_SERIAL, {})


LAUNCH_FUNCTIONS = ("fs_launch", "fs_run")


def load_texts(texts: Sequence[tuple[str, str]]) -> list[Any]:
    """The functions of (symbol, text)."""
    if not _jits:
        new = {symbol: diskcache.kernels().get(_key(text)) for symbol, text in texts if symbol not in CODES}
        found = {symbol: code for symbol, code in new.items() if code is not None}
        if len(found) == len(new) and (not new or link_without_llvm(found)):
            counters["native"]["cache_hits"] += len(new)
            KEYS.update((symbol, diskcache.hashed(_key(text))) for symbol, text in texts)
            return [CODES[symbol] for symbol, _ in texts]
    return jit().load(texts)


# ---------------------------------------------------------------- what the rest of the house calls

def load(kernels: Sequence[Kernel]) -> list[Word]:
    """The kernels' functions, compiled where they are new."""
    if not kernels:
        return []
    with timed("compile_kernels"):
        found = load_texts([(k.symbol, k.text) for k in kernels])
    if config.profile:
        _log_perf(kernels, found)
    return found


def _log_perf(kernels: Sequence[Kernel], addresses: Sequence[int]) -> None:
    """Names of kernels for `perf report`, in the file where it looks for them.  Sizes are not known: up to the next kernel, a page at most."""
    ends = sorted({*addresses, *CODES.values()})
    sizes = [min([end - address for end in ends if end > address] + [MOST_CODE]) for address in addresses]
    lines = [f"{address:x} {size:x} firesteel {kernel.name}\n" for kernel, address, size in zip(kernels, addresses, sizes)]
    try:
        with open(f"/tmp/perf-{os.getpid()}.map", "a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        stages.say_once(f"perf will not know the names of kernels: {error}")


def kept_codes(symbols: Iterable[str]) -> list[KeptCode] | None:
    """Object code of functions that were loaded, out of the cache on disk; None where one is not there."""
    cache = diskcache.kernels()
    found = [KeptCode(symbol, KEYS[symbol], cache.get_hashed(KEYS[symbol]) or b"") for symbol in symbols if symbol in KEYS]
    return found if len(found) == len(set(symbols)) and all(code.code for code in found) else None


def load_codes(codes: Sequence[KeptCode]) -> dict[str, Any]:
    """The functions of object code, by symbol."""
    new = {kept.symbol: kept.code for kept in codes if kept.symbol not in CODES}
    with timed("load_kernels"):
        if new and not link_without_llvm(new):
            jit().load_codes(new)
    KEYS.update((kept.symbol, kept.key) for kept in codes)
    return {kept.symbol: CODES[kept.symbol] for kept in codes}


def compile_text(text: str, function: str) -> Word:
    """A function in LLVM text written by others (the host's launcher)."""
    symbol = f"{function}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return load_texts([(symbol, text.replace(f"@{function}(", f"@{symbol}("))])[0]


def object_code(texts: Mapping[str, str], target: Target) -> dict[str, bytes]:
    """Of each text, by its name, for a processor that need not be this one."""
    return transaction.aside(_lock.holding, _object_code, jit(), texts, target)


def _object_code(made: Jit, texts: Mapping[str, str], target: Target) -> dict[str, bytes]:
    machine = made.machine(target)
    return {name: made._compile(text, machine) for name, text in texts.items()}


def compiler_at_hand() -> Callable[[str, str], int] | None:
    """`compile_text` in a process that has loaded native code already; None where that would cost the first call 100 ms."""
    return compile_text if _jits or CODES else None


native_method.compilers.append(compiler_at_hand)
