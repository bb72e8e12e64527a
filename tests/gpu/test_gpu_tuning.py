"""Tiles and warps that are measured: on a GPU where there is one, and by a made-up clock without."""
from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import emulated
import pytest
import torch
import torch.nn.functional as F
from native_nests import contiguous, pointwise, reduction, softmax

import firesteel as fs
from firesteel import programcache
from firesteel.codegen import triton
from firesteel.codegen.triton import GpuKernel, Pass
from firesteel.loops.ir import Buffer
from firesteel.loops.plan import Run
from firesteel.loops.scalars import S
from firesteel.runtime import cuda, gpu, graphs, tuning
from firesteel.sym.expr import symbol

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNEL = GpuKernel("relu", "k_1", "text", (Pass("k_1_0", 4, 2),), ("*fp32", "*fp32", "*i64"), ("x", "y"), (), (), False)


def plan(size):
    return SimpleNamespace(program=SimpleNamespace(buffers={name: Buffer(name, "f32", (size,), (1,), "temp", "cuda") for name in "xy"}), steps=())


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds by warps, and the kernels that were loaded and measured."""
    made = SimpleNamespace(times={1: 3.0, 2: 2.0, 4: 1.0, 8: 1.5}, loaded=[], measured=[])
    device = SimpleNamespace(index=0)

    def clock(device, memory, kernel):
        made.measured.append((kernel.symbol, kernel.passes[0].warps, memory))
        return lambda: made.times[kernel.passes[0].warps]
    for name, value in (("device", lambda index: contextlib.nullcontext()), ("current_device", lambda: 0), ("get_device_name", lambda index: "made up")):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "device", lambda index: device)
    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(call=lambda name, *args: None))
    monkeypatch.setattr(gpu, "load_functions", lambda device, wanted: made.loaded.extend(one.warps for _, one, _ in wanted))
    monkeypatch.setattr(tuning, "_memory", lambda device, sizes: tuple(sizes))
    monkeypatch.setattr(tuning, "_clock", clock)
    monkeypatch.setattr(tuning, "_chosen", {})
    return made


def test_the_quickest_is_taken_and_kept(clock, tmp_path):
    with fs.config.patch(cache_dir=str(tmp_path)):
        found = tuning.measured(plan(4000), [KERNEL, replace(KERNEL, name="again")])
        assert [(k.name, k.passes[0].warps) for k in found] == [("relu", 4), ("again", 4)]
        assert clock.loaded == [2, 1, 4, 8] and clock.measured == [("k_1", warps, (16000, 16000)) for warps in (2, 1, 4, 8)]
        tuning._chosen.clear()      # another process
        assert tuning.tuned(plan(4000), [KERNEL])[0].passes[0].warps == 4
        assert tuning.measured(plan(4000), [KERNEL])[0].passes[0].warps == 4 and len(clock.measured) == 4
        other = replace(KERNEL, passes=(Pass("k_1_0", 8, 2),))      # the same text over more points
        tuning.measured(plan(8000), [other])
        assert len(clock.measured) == 8


def test_noise_changes_nothing(clock):
    clock.times = {1: 1.0, 2: 1.0, 4: 0.99, 8: 2.0}
    with fs.config.patch(cache_dir=""):
        assert tuning.measured(plan(4000), [KERNEL])[0] == KERNEL


class Function:
    """A host function of some kernels."""
    source, _boxed_call = "", False

    def __init__(self, kernels):
        self.kernels, self.counts = kernels, {"kernels": len(kernels)}

    def __call__(self, x):
        return self.kernels[0].passes[0].warps, x


def test_a_program_changes_to_the_quickest_while_it_runs(clock, monkeypatch):
    held, times = threading.Event(), clock.times
    clock.times = None
    monkeypatch.setattr(tuning, "_memory", lambda device, sizes: held.wait(60) and tuple(sizes))
    call = tuning.improving(plan(4000), [KERNEL], Function([KERNEL]), Function)
    assert call(1) == (2, 1) and not clock.measured        # the cost model's, at once
    with pytest.raises(programcache.NotKept, match="measured"):
        programcache.host_payload(call, {})
    clock.times = times
    held.set()
    tuning._background.wait()
    assert call(1) == (4, 1) and call.counts == {"kernels": 1} and fs.counters["native"]["improved_programs"]
    known = Function([KERNEL])
    assert tuning.improving(plan(4000), [KERNEL], known, Function) is known       # nothing is left to measure


def test_a_recorded_program_is_recorded_anew_with_the_quickest(clock):
    facts = graphs.RecordedFacts(0, False, (), (), (), (), False)
    recording = graphs.Recording(facts, Function([KERNEL]))
    recording.graph = "of the old kernels"
    assert tuning.improving(plan(4000), [KERNEL], recording, Function) is recording
    tuning._background.wait()
    assert recording.graph is None and recording.call(1) == (4, 1)


@pytest.mark.parametrize("failing", ["_memory", "_clock"])
def test_what_cannot_be_measured_stays_as_it_was(clock, monkeypatch, caplog, failing):
    def fails(*args):
        raise torch.OutOfMemoryError("no memory")
    monkeypatch.setattr(tuning, failing, fails)
    call = tuning.improving(plan(4000), [KERNEL], Function([KERNEL]), Function)
    tuning._background.wait()
    assert call(1) == (2, 1) and "not measured" in caplog.text


def test_memory_that_the_program_may_need_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000, 2000))
    with pytest.raises(RuntimeError, match="1000 are free"):
        tuning._memory(SimpleNamespace(index=0), [200, 300])


@pytest.mark.parametrize("kernel", [replace(KERNEL, symbols=("s0",)), replace(KERNEL, passes=KERNEL.passes * 2)], ids=["symbols", "two functions"])
def test_others_are_as_they_were(clock, kernel):
    assert tuning.measured(plan(4000), [kernel]) == [kernel] and not clock.measured


NESTS = {
    "points": lambda: pointwise(lambda v: S.mul(v, 2.0), contiguous("y", (5000,)), contiguous("x", (5000,))),
    "rows": lambda: softmax(300, 100),
    "long rows": lambda: softmax(300, 5000),
    "few rows": lambda: softmax(3, 40_000),
    "columns": lambda: reduction("sum", contiguous("x", (3000, 40)), (0,)),
    "all": lambda: reduction("sum", contiguous("x", (200, 500)), (0, 1)),
}


@pytest.mark.parametrize("name", NESTS)
def test_every_tiling_computes_the_same(name):
    nest, buffers = NESTS[name]()
    count = triton.count_tilings(nest, buffers)
    kernels = [triton.print_nest(nest, buffers, number) for number in range(count)]
    assert count > 1 and len({kernel.symbol for kernel in kernels}) == count and kernels[0] == triton.print_nest(nest, buffers)
    found = []
    for kernel in kernels:
        tensors = {b.name: torch.randn(b.shape, generator=torch.Generator().manual_seed(0)) for b in buffers.values()}
        emulated.run(kernel, tensors, {})
        found.append(tensors["y"])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_unknown_sizes_have_one_tiling():
    assert triton.count_tilings(*softmax(symbol("n"), 100)) == 1


def test_the_quickest_tiling_is_taken_and_found_again(clock, tmp_path, monkeypatch):
    nest, buffers = softmax(300, 100)
    plan = SimpleNamespace(program=SimpleNamespace(buffers=buffers), steps=[Run(nest)])
    kernel = triton.print_nest(nest, buffers)
    wanted = triton.print_nest(nest, buffers, 2)
    monkeypatch.setattr(tuning, "_clock", lambda *args: clock.measured.append(args[2].symbol) or (lambda: 2.0 - (args[2].symbol == wanted.symbol)))
    with fs.config.patch(cache_dir=str(tmp_path)):
        assert tuning.measured(plan, [kernel]) == [wanted]
        count = len(clock.measured)
        tuning._chosen.clear()
        assert tuning.measured(plan, [kernel]) == [wanted] and len(clock.measured) == count


@gpu_only
@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_a_tuned_program_equals_eager(mode, tmp_path, monkeypatch):
    fs.reset()
    monkeypatch.setattr(tuning, "_chosen", {})
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(0), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    x = torch.randn(3000, 64, device="cuda")
    with fs.config.patch(cache_dir=str(tmp_path)):
        compiled = fs.compile(model, mode=mode)
        for _ in range(5):
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        tuning._background.wait()
        gradients = []
        for fn in (compiled, compiled, model):
            tuning._background.wait()
            model.zero_grad()
            F.cross_entropy(fn(x), torch.zeros(3000, dtype=torch.long, device="cuda")).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for found in gradients[:2]:
            torch.testing.assert_close(found, gradients[2], rtol=1e-3, atol=1e-4)
        sliced = torch.randn(3000 * 64 + 1, device="cuda")[1:].view(3000, 64)       # at an address that is not aligned: the twin has the same warps
        torch.testing.assert_close(compiled(sliced), model(sliced), rtol=1e-4, atol=1e-4)
    assert fs.counters["native"]["measured_kernels"]
