"""LLVM text -> native code in this process: optimise, compile, cache, link.

In: Kernels (or any LLVM text).  Out: addresses of native functions, which stay valid for the life of the process.
 - One text is compiled once in a process, and once for a machine where fs.config.cache_dir allows it: object code is kept
   under a digest of the text, the LLVM version, the processor's features and the settings that change code.
 - Several kernels are compiled at the same time (fs.config.compile_threads).
 - llvmlite is loaded at the first kernel, not at import.

    (address,) = load([print_nest(nest, buffers)])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(args)
"""
from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import firesteel.runtime.diskcache as diskcache
from firesteel.artifacts import counters, timed
from firesteel.codegen.printer import Kernel
from firesteel.codegen.target import host, vector_library
from firesteel.config import config
from firesteel.runtime import threads

_VERSION = 2            # of what is done to a text before it is code: change it with the pass list


class Engine:
    """The one JIT of a process."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.llvm = llvm
        self.target = llvm.Target.from_default_triple()
        self.jit = llvm.create_lljit_compiler(self.machine())
        self.trackers: list[Any] = []       # keep the code alive
        self.addresses: dict[str, int] = {}     # digest of text -> address
        self.lock = threading.RLock()
        self.imports: dict[str, int] = {}
        self.emit = _unlocked_emit(llvm)
        vector_library()                    # its functions are found among the process's symbols
        self._add_launch()

    def machine(self) -> Any:
        """A target machine; the compiler takes one for each thread and one for the JIT."""
        cpu = host()
        # "jitdefault": code and its constants are loaded into two places, which may be more than 2 GB apart in a process full of libraries
        return self.target.create_target_machine(cpu=cpu.cpu, features=cpu.features, opt=2, reloc="default", codemodel="jitdefault", jit=True)

    def _add_launch(self) -> None:
        entry_points = threads.openmp()
        text = threads.LAUNCH if entry_points else threads.LAUNCH_SERIAL
        imports = {**entry_points, "fs_wanted": threads.wanted_address()} if entry_points else {}
        (code,) = self.compile([("fs_launch", text)])
        self.imports.update(self.link([("fs_launch", code)], imports, ("fs_launch", "fs_run")))

    def compile(self, texts: Sequence[tuple[str, str]]) -> list[bytes]:
        """Object code of each (symbol, text), out of the disk cache where it is there."""
        cache = diskcache.kernels()
        keys = [_key(text) for _, text in texts]
        found = {k: code for k in dict.fromkeys(keys) if (code := cache.get(k)) is not None}
        missing = {k: text for k, (_, text) in zip(keys, texts) if k not in found}
        counters["native"]["cache_hits"] += len(found)
        counters["native"]["compiled"] += len(missing)
        for key, code in zip(missing, self._compile_all(list(missing.values())), strict=True):
            found[key] = code
            cache.put(key, code)
        return [found[k] for k in keys]

    def _compile_all(self, texts: list[str]) -> list[bytes]:
        workers = min(config.compile_threads, len(texts))
        if workers <= 1:
            return [self._compile(t) for t in texts]
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self._compile, texts))

    def _compile(self, text: str) -> bytes:
        """Text -> object code.  Each has a context of its own, so threads do not meet in LLVM."""
        machine = _of_thread(self)
        context = self.llvm.create_context()
        with self.llvm.parse_assembly(text, context) as module:
            if config.verify:
                module.verify()
            builder = self.llvm.create_pass_builder(machine, self.llvm.create_pipeline_tuning_options(speed_level=2))
            passes = self.llvm.create_new_module_pass_manager()
            passes.add_sroa_pass()      # loops are printed as they should run: only memory slots have to become registers
            passes.run(module, builder)
            return self.emit(machine, module)

    def link(self, codes: Sequence[tuple[str, bytes]], imports: dict[str, int], exports: Sequence[str] = ()) -> dict[str, int]:
        """Loads object code; symbol -> address, of `exports` where they are not the codes' own symbols."""
        builder = self.llvm.JITLibraryBuilder().add_current_process()
        for name, address in imports.items():
            builder.import_symbol(name, address)
        exports = exports or [symbol for symbol, _ in codes]
        for _, code in codes:
            builder.add_object_img(code)
        for symbol in exports:
            builder.export_symbol(symbol)
        tracker = builder.link(self.jit, f"library{len(self.trackers)}")
        self.trackers.append(tracker)
        return {symbol: tracker[symbol] for symbol in exports}

    def load(self, texts: Sequence[tuple[str, str]]) -> list[int]:
        """Addresses of the functions, in order."""
        with self.lock:
            new = {symbol: text for symbol, text in texts if symbol not in self.addresses}
            if new:
                codes = self.compile(list(new.items()))
                self.addresses.update(self.link(list(zip(new, codes)), self.imports))
            return [self.addresses[symbol] for symbol, _ in texts]


_engines: list[Engine] = []
_engine_lock = threading.Lock()


def engine() -> Engine:
    """The engine, made at the first call.  Never two: the code of one that is dropped would be freed under its kernels."""
    if not _engines:
        with _engine_lock:
            if not _engines:
                _engines.append(Engine())
    return _engines[0]


_local = threading.local()


def _of_thread(owner: Engine) -> Any:
    """The target machine of the calling thread."""
    if getattr(_local, "owner", None) is not owner:
        _local.owner, _local.machine = owner, owner.machine()
    return _local.machine


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
    return "\n".join([text, _machine_key(), repr(config.code_key())])


@functools.cache
def _machine_key() -> str:
    import llvmlite.binding as llvm
    cpu = host()
    return repr((_VERSION, llvm.llvm_version_info, cpu.cpu, cpu.features))      # the rest of the target is in the text


# ---------------------------------------------------------------- what the rest of the house calls

def load(kernels: Sequence[Kernel]) -> list[int]:
    """Addresses of the kernels' functions, compiled where they are new."""
    if not kernels:
        return []
    with timed("compile_kernels"):
        return engine().load([(k.symbol, k.text) for k in kernels])


def compile_text(text: str, function: str) -> int:
    """The address of a function in LLVM text written by others (the host's launcher)."""
    symbol = f"{function}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return engine().load([(symbol, text.replace(f"@{function}(", f"@{symbol}("))])[0]


def compiler_at_hand() -> Callable[[str, str], int] | None:
    """`compile_text` in a process where LLVM is loaded already; None where that would cost the first call 100 ms."""
    return compile_text if _engines else None
