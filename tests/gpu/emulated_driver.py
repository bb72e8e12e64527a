"""A CUDA driver without a GPU: "cubins" are Triton texts, functions are emulated (emulated.py), and device memory is the host's.

Inside of `emulated_driver(monkeypatch)` programs on CPU tensors go all the way of a GPU's: Triton texts, cubins, launches by the launcher's machine
code.  What the driver was asked for is in `asked`.
"""
from __future__ import annotations

import ctypes
import functools
import json
from concurrent.futures import Future
from typing import Any

import emulated
import torch

from firesteel import pipeline
from firesteel.codegen import host
from firesteel.codegen.triton_ops import POINTER
from firesteel.loops.scalars import DTYPES
from firesteel.runtime import cubins, cuda, gpu
from firesteel.targets import CUDA

REACH = 1 << 18         # bytes behind an address that a kernel may name
TYPES = {text: DTYPES[name] for name, text in POINTER.items()}
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class EmulatedDriver:
    def __init__(self) -> None:
        self.modules: list[Any] = []        # jobs
        self.asked: list[str] = []          # functions loaded, with their alignment
        self.launched: list[str] = []
        self.failed: list[BaseException] = []
        self.refuses = False
        nothing = ONE(lambda value: 0)
        self.functions = {"cuLaunchKernel": LAUNCH(self.launch), "cuCtxPushCurrent_v2": nothing, "cuCtxPopCurrent_v2": nothing}

    def address(self, name: str) -> int:
        return ctypes.cast(self.functions[name], ctypes.c_void_p).value or 0

    def call(self, name: str, *args: Any) -> None:
        if name == "cuModuleLoadData":
            if self.refuses:
                raise RuntimeError("cuModuleLoadData failed: CUDA driver error 209")
            self.modules.append(json.loads(args[1].value))
            args[0]._obj.value = len(self.modules)
        if name == "cuModuleGetFunction":
            job = self.modules[args[1].value - 1]
            assert args[2].decode() == job["function"]
            self.asked.append(f"{job['function']} {job['alignment']}")
            args[0]._obj.value = args[1].value

    def launch(self, handle, x, y, z, tx, ty, tz, shared, stream, parameters, extra) -> int:
        job = self.modules[handle - 1]
        try:
            assert tx == 32 * job["options"]["num_warps"] and shared == len(job["function"]) and stream == 0x222
            words = [ctypes.c_int64.from_address(parameters[k]).value for k in range(len(job["signature"]))]
            assert not job["alignment"] or not any(words[k] % job["alignment"] for k in job["pointers"])
            scope = emulated._scope()
            exec(job["text"], scope)
            arguments = [self.argument(kind, word) for kind, word in zip(job["signature"], words)]
            emulated.races.__init__()
            for number in range(x):
                emulated.program[0] = number
                scope[job["function"]](*arguments)
            self.launched.append(f"{job['function']} {job['alignment']}")
        except BaseException as error:      # an exception cannot cross machine code
            self.failed.append(error)
        return 0

    def argument(self, kind: str, word: int) -> Any:
        if kind in TYPES:
            memory = (ctypes.c_uint8 * (8 if kind == "*i64" and word == cuda.flag().address else REACH)).from_address(word)
            return emulated.Pointer.of(torch.frombuffer(memory, dtype=TYPES[kind]))
        number = ctypes.c_double.from_buffer(ctypes.c_int64(word)).value if kind == "fp64" else word
        return emulated.T(torch.tensor(number, dtype=torch.float64 if kind == "fp64" else torch.int64))


def begin(jobs):
    """What `cubins.begin` gives: each job is its own machine code."""
    begun = [Future() for _ in jobs]
    for job, made in zip(jobs, begun):
        made.set_result((job["function"], len(job["function"]), json.dumps(job).encode()))
    return begun


class HostFlag(cuda.Flag):
    def __init__(self) -> None:
        self.word = ctypes.c_int64()
        self.address = ctypes.addressof(self.word)


def emulated_driver(monkeypatch, capability: int = 90) -> EmulatedDriver:
    driver = EmulatedDriver()
    for name in ("device", "table"):        # those of this test
        monkeypatch.setattr(cuda, name, functools.cache(getattr(cuda, name).__wrapped__))
    monkeypatch.setattr(cuda, "twins", cuda.Twins())
    monkeypatch.setattr(gpu, "KNOWN", {})
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "flag", functools.cache(HostFlag))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x222, raising=False)
    monkeypatch.setattr(gpu, "device_index", lambda where: 0)
    monkeypatch.setattr(cubins, "begin", begin)
    monkeypatch.setattr(host._Writer, "_far_address", lambda self, buffer, device, frame: self._address(buffer, frame))
    monkeypatch.setattr(pipeline, "target_of", lambda program: pipeline.TARGETS[CUDA])
    return driver

