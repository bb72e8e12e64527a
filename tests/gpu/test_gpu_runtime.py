"""How kernels are compiled and launched.  The launcher's machine code runs against a driver made of Python functions."""
from __future__ import annotations

import ctypes
import importlib.util
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from native_nests import buffer, contiguous, layernorm, pointwise, reduction, softmax

from firesteel.codegen import hosted
from firesteel.codegen.triton import print_nest
from firesteel.config import config
from firesteel.loops.ir import Axis, Nest, Phase, Reduce, Store, acc, axis, check_index, load
from firesteel.loops.scalars import S, to
from firesteel.runtime import cpu, cubins, cuda, diskcache, gpu
from firesteel.sym.expr import symbol

triton_only = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")


class FakeDriver:
    """Notes what the launcher asks for."""

    def __init__(self, result: int = 0):
        self.calls: list = []
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)

        def launched(function, x, y, z, tx, ty, tz, shared, stream, parameters, extra):
            words = [ctypes.c_int64.from_address(parameters[i]).value for i in range(self.count)]
            self.calls.append(("launch", function, x, tx, shared, stream, words))
            return result

        def noted(name):
            return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda value: self.calls.append((name, value)) or 0)
        self.keep = [launch(launched), noted("push"), ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda where: self.calls.append(("pop",)) or 0),
                     cuda.TWIN(self.twin)]
        self.table = (ctypes.c_int64 * 4)(*(ctypes.cast(f, ctypes.c_void_p).value for f in self.keep))

    def twin(self, number: int, shared) -> int:
        self.calls.append(("twin", number))
        shared[0] = 96
        return 0x999

    def launch(self, addresses: list[int], rest: list[int], programs: int = 7) -> int:
        parameters = [*addresses, *rest]
        self.count = len(parameters)
        words = [ctypes.addressof(self.table), 0x111, 5, len(addresses), programs, 128, 64, 0x222, 0x333, len(parameters), *parameters]
        recipe = [1, len(words) + 1, gpu._launcher(), len(words) + 1, *(part for word in words for part in (-2, word)), -1, 0]
        return hosted.launcher(recipe, cpu.compile_text)()


def test_a_launch_hands_everything_to_the_driver():
    driver = FakeDriver()
    assert driver.launch([0x1000, 0x2010], [42, -1]) == 0
    assert driver.calls == [("push", 0x333), ("launch", 0x111, 7, 128, 64, 0x222, [0x1000, 0x2010, 42, -1]), ("pop",)]


@pytest.mark.parametrize("address", [0x1008, 0x2011])
def test_an_address_that_is_not_aligned_runs_the_twin(address):
    driver = FakeDriver()
    assert driver.launch([0x1000, address], [3]) == 0
    assert driver.calls[0] == ("twin", 5) and driver.calls[2][:5] == ("launch", 0x999, 7, 128, 96)      # with the twin's own shared memory


def test_nothing_to_do_launches_nothing():
    driver = FakeDriver()
    assert driver.launch([0x1000], [], programs=0) == 0 and driver.calls == []


def test_a_failed_launch_is_reported():
    driver = FakeDriver(result=700)
    assert driver.launch([0x1000], []) == 700 and ("pop",) in driver.calls
    assert "700" in str(hosted.launch_error(700))


def test_scratch_places_are_aligned_and_apart():
    kernel = print_nest(*reduction("sum", contiguous("x", (symbol("s0"), 10)), (0,)))
    places, total = gpu.scratch_places(kernel)
    assert places == (0,) and total % 256 == 0
    two = print_nest(*_two_sums())
    places, total = gpu.scratch_places(two)
    assert len(places) == 2 and places[1] % 256 == 0 and total >= places[1] + 4 * two.scratch[1][1]


def _two_sums():
    X = contiguous("x", (100_000,))
    v = load(X, (axis("r"),))
    a, b = Reduce("a", "sum", v, "f32"), Reduce("b", "max", v, "f32")
    nest = Nest("two", (), (Phase("reduce", (Axis("r", 100_000),), (a, b)), Phase("map", (), (), (Store("y", (), S.add(acc(a), acc(b))),))))
    return nest, {"x": X, "y": contiguous("y", ())}


def _embedding():
    W, I, Y = contiguous("w", (50, 64)), contiguous("i", (25,), "i64"), contiguous("y", (25, 64))
    row = check_index(load(I, (axis("a"),)), 50)
    return Nest("e", (Axis("a", 25), Axis("b", 64)), (Phase("map", (), (), (Store("y", (axis("a"), axis("b")), load(W, (row, axis("b")))),)),)), {"w": W, "i": I, "y": Y}


def _scan():
    X, index = contiguous("x", (30, 3000)), (axis("i"), axis("r"))
    running = Reduce("s", "sum", load(X, index), "f32")
    nest = Nest("scan", (Axis("i", 30),), (Phase("scan", (Axis("r", 3000),), (running,), (Store("y", index, acc(running)),)),))
    return nest, {"x": X, "y": contiguous("y", (30, 3000))}


COMPILED = {
    "pointwise": lambda: pointwise(lambda v: to(S.tanh(S.exp(to(v, "f32"))), "bf16"), contiguous("y", (4096,), "bf16"), contiguous("x", (4096,), "bf16")),
    "softmax": lambda: softmax(1000, 512), "symbolic softmax": lambda: softmax(symbol("s0"), symbol("s1")), "layernorm": lambda: layernorm(100, 9000),
    "columns": lambda: reduction("sum", contiguous("x", (4000, 100)), (0,)), "two sums": _two_sums, "embedding": _embedding, "scan": _scan,
}


@triton_only
@pytest.mark.parametrize("name", COMPILED)
def test_triton_compiles_the_text(name):
    kernel = print_nest(*COMPILED[name]())
    for one in kernel.passes:
        (binary,) = gpu.binaries([(kernel, one, True, 90)])
        titled = one.function.replace(kernel.symbol, f"{kernel.title}_{kernel.symbol[2:10]}")
        assert binary.cubin[:4] == b"\x7fELF" and binary.name == titled


def test_threads_have_few_calls_of_the_math_library():
    def chain(calls):
        def body(v):
            for _ in range(calls):
                v = S.tanh(v)
            return v
        return print_nest(*pointwise(body, contiguous("y", (1 << 20,)), contiguous("x", (1 << 20,)))).passes[0].warps
    assert [chain(calls) for calls in (0, 1, 4, 5, 20)] == [4, 4, 4, 8, 8]
    assert [print_nest(*softmax(1000, size)).passes[0].warps for size in (1024, 4096, 8192)] == [1, 8, 8]


@triton_only
def test_binaries_are_kept_on_disk(tmp_path, monkeypatch):
    kernel = print_nest(*softmax(64, 128))
    with config.patch(cache_dir=str(tmp_path)):
        diskcache._caches.clear()
        wanted = [(kernel, kernel.passes[0], True, 90)]
        first = gpu.binaries(wanted)
        monkeypatch.setattr(cubins, "compile_here", lambda job: pytest.fail("compiled twice"))
        monkeypatch.setattr(cubins.Workers, "_asked", lambda *args: pytest.fail("compiled twice"))
        assert gpu.binaries(wanted) == first
    diskcache._caches.clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_views_that_are_not_aligned():
    import gpu_nests
    x, y = torch.randn(1001), torch.empty(1000)
    gpu_nests.run(*pointwise(lambda v: S.mul(v, 2.0), buffer("y", y), buffer("x", x[1:])), {"x": x[1:], "y": y})
    assert torch.equal(y, x[1:] * 2)


# ---------------------------------------------------------------- kernels compiled ahead

def test_what_is_compiled_ahead_is_compiled_once(monkeypatch):
    asked = []

    def begin(jobs):
        asked.extend(job["function"] for job in jobs)
        made = [Future() for _ in jobs]
        for job, future in zip(jobs, made):
            future.set_result((job["function"], 0, b"code"))
        return made
    monkeypatch.setattr(gpu.cubins, "begin", begin)
    monkeypatch.setattr(gpu.cuda, "device", lambda index: SimpleNamespace(capability=90, loaded={}))
    monkeypatch.setattr(gpu, "device_index", lambda where: 0)
    monkeypatch.setattr(gpu, "_launcher", lambda: None)
    monkeypatch.setattr(gpu.cuda, "flag", lambda: None)
    x, y = torch.randn(1000), torch.empty(1000)
    kernel = print_nest(*pointwise(lambda v: S.mul(v, 2.0), buffer("y", y), buffer("x", x)))
    wanted = [(kernel, kernel.passes[0], True, 90)]
    assert gpu.compile_ahead([(kernel, "cuda")]) and gpu.compile_ahead([(kernel, "cuda")])
    assert [binary.cubin for binary in gpu.binaries(wanted * 2)] == [b"code"] * 2 and len(asked) == 1
    assert not gpu._ahead and gpu.binaries(wanted) and len(asked) == 2
