"""Programs of GPUs in the cache and in packages: with an emulated driver, and at the end on a GPU where there is one."""
from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import emulated_driver
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel import backends, pipeline, programcache
from firesteel.artifacts import counters
from firesteel.errors import PackageError
from firesteel.runtime import graphs
from firesteel.shipping import info
from firesteel.targets import CUDA


@pytest.fixture
def driver(monkeypatch):
    made = emulated_driver.emulated_driver(monkeypatch)
    yield made
    if made.failed:
        raise made.failed[0]


def chain(x, y):
    return (x.sin() * y).softmax(-1), (y + 1).sum(0)


def sized(x, y):
    return F.layer_norm(x @ y.t(), (x.shape[0],)) * x.shape[0]


def outcome(fn, rows=6):
    torch.manual_seed(0)
    x, y = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 8)
    results = torch.utils._pytree.tree_leaves(fn(x, y))
    torch.autograd.backward([r.sin().sum() for r in results if r.requires_grad])
    return [*results, x.grad]


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [chain, sized])
def test_a_second_process_finds_the_program(cache, driver, monkeypatch, fn, dynamic):
    want, others = outcome(fn), outcome(fn, 7)
    assert_close(outcome(fs.compile(fn, dynamic=dynamic)), want)
    assert driver.launched and not counters["native"]["program_hits"] and not counters["regions_not_kept"]
    fs.reset()
    second = emulated_driver.emulated_driver(monkeypatch)
    monkeypatch.setattr(emulated_driver.cubins, "begin", lambda jobs: pytest.fail("compiled") if jobs else [])
    compiled = fs.compile(fn, dynamic=dynamic)
    assert_close(outcome(compiled), want)
    assert counters["native"]["program_hits"] == 2 and counters["native"]["region_hits"] == 1
    assert set(second.launched) == set(driver.launched) and not second.failed
    if dynamic:
        assert_close(outcome(compiled, 7), others)


def test_how_a_program_is_recorded_is_kept(cache, driver, monkeypatch):
    made = []

    class Plain(graphs.Recording):
        def __init__(self, facts, call):
            super().__init__(facts, call)
            made.append(facts)

        def __call__(self, *given):
            return self.call(*given)
    for name, value in {"Recording": Plain, "FEW_STEPS": 0, "MANY_STEPS": 0}.items():
        monkeypatch.setattr(graphs, name, value)

    def written(x, y):
        x.add_(1)
        return (x.sin() * y).softmax(-1)
    for _ in range(2):
        x = y = None
        fs.reset()
        x, y = torch.ones(6, 8), torch.ones(6, 8)
        want = written(x.clone(), y)
        assert_close([fs.compile(written)(x, y), x], [want, torch.full((6, 8), 2.0)])
    assert len(made) == 2 and made[0] == made[1] and made[0].tensors == (0, 1) and counters["native"]["program_hits"] == 1


@pytest.mark.parametrize("wanted", [(True, False), (None, True), (True, True)], ids=["recorded", "tuned", "both"])
def test_programs_of_modes_are_found_by_their_mode(cache, driver, monkeypatch, wanted):
    """Forward and backward, with what records them; not by another mode, nor without one."""
    monkeypatch.setattr(backends, "_on_gpu", lambda inputs: True)
    monkeypatch.setattr(graphs.Recording, "__call__", lambda self, *given: self.call(*given))
    monkeypatch.setattr(graphs, "FEW_STEPS", 0)
    monkeypatch.setitem(pipeline.TARGETS._rows, CUDA, dataclasses.replace(pipeline.TARGETS[CUDA], tune=lambda plan, kernels: tuned.append(plan) or kernels,
                                                                             improve=lambda plan, kernels, call, build: call))      # all is known
    tuned, recorded, original = [], [], graphs.Recording.__init__

    def init(self, facts, call):
        original(self, facts, call)
        recorded.append(facts)
    monkeypatch.setattr(graphs.Recording, "__init__", init)
    want = outcome(chain)
    assert_close(outcome(fs.compile(chain, backend=backends.FOR_GPU[wanted])), want)
    made, measured = list(recorded), len(tuned)
    assert len(made) == 2 * bool(wanted[0]) and measured == 2 * wanted[1] and not counters["regions_not_kept"], counters["regions_not_kept"]
    for other, hits in ((wanted, 2), ((False, False), 0)):
        fs.reset()
        assert_close(outcome(fs.compile(chain, backend=backends.FOR_GPU[other])), want)
        assert counters["native"]["program_hits"] == hits and counters["native"]["region_hits"] == bool(hits)
    assert recorded[len(made):] == made and len(tuned) == measured


def test_the_twin_of_a_found_kernel(cache, driver, monkeypatch):
    def run(fn):
        return fn(torch.arange(9.0)[1:])

    def doubled(x):
        return x.exp() * 2
    want = run(doubled)
    aligned = fs.compile(doubled)
    aligned(torch.arange(8.0))
    assert not any(name.endswith(" 0") for name in driver.launched)
    fs.reset()
    second = emulated_driver.emulated_driver(monkeypatch)
    compiled = fs.compile(doubled)
    assert_close([compiled(torch.arange(8.0))], [torch.arange(8.0).exp() * 2])
    assert counters["native"]["program_hits"] == 1 and counters["native"]["unaligned_launches"] == 0
    assert_close([run(compiled)], [want])
    assert counters["native"]["unaligned_launches"] == 1 and second.launched[-1].endswith(" 0") and not second.failed


def test_machine_code_that_the_driver_refuses_is_made_again(cache, driver, monkeypatch):
    want = outcome(chain)
    assert_close(outcome(fs.compile(chain)), want)
    fs.reset()
    second = emulated_driver.emulated_driver(monkeypatch)
    load, refused = second.call, []

    def refusing(name, *args):
        if name == "cuModuleLoadData" and len(refused) < 2:     # what the entry has, then what the cache of cubins has
            refused.append(args[1].value)
            raise RuntimeError("cuModuleLoadData failed: CUDA driver error 209")
        load(name, *args)
    monkeypatch.setattr(second, "call", refusing)
    assert_close(outcome(fs.compile(chain)), want)
    assert len(refused) == 2 and not second.failed


def test_gpus_are_in_the_keys_of_programs_that_name_one(monkeypatch):
    monkeypatch.setattr(programcache.cuda, "facts", lambda: {"GPUs": "sm_90"})
    assert programcache.key_of_text("x = arg('cuda:0')").facts["GPUs"] == "sm_90" and "GPUs" not in programcache.key_of_text("x = arg('cpu')").facts


def package(path, fn, **more):
    fs.package(fn, (torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)), path, **more)
    return path


@pytest.mark.parametrize("dynamic", [None, {0: {0: (2, 64)}, 1: {0: (2, 64)}}], ids=["fixed", "dynamic"])
def test_packages(tmp_path, driver, monkeypatch, dynamic):
    path = package(tmp_path / "chain.fsp", chain, dynamic=dynamic, processors=["sm_80", "sm_90"])
    with fs.config.patch(cache_dir=""):
        second = emulated_driver.emulated_driver(monkeypatch)
        monkeypatch.setattr(emulated_driver.cubins, "begin", lambda jobs: pytest.fail("compiled"))
        program = fs.load(path)
        assert_close(outcome(program), outcome(chain))
        assert {module["capability"] for module in second.modules} == {90} and set(second.asked) == set(driver.asked) and not second.failed
        if dynamic:
            assert_close(outcome(program, 7), outcome(chain, 7))
        shifted = torch.randn(49)[1:].view(6, 8)
        assert_close(program(shifted, shifted), chain(shifted, shifted))
        assert any(name.endswith(" 0") for name in second.launched) and not second.failed


def test_architectures_of_packages(tmp_path, driver, monkeypatch):
    path = package(tmp_path / "chain.fsp", chain, processors=["sm_80", "sm_90"])
    for capability, chosen in ((86, 80), (89, 80), (90, 90)):
        assert {module["capability"] for module in loaded_on(monkeypatch, path, capability).modules} == {chosen}
    for capability in (75, 100):
        with pytest.raises(PackageError, match=f"architecture sm_80, sm_90; this one is sm_{capability}"):
            loaded_on(monkeypatch, path, capability)
    assert "sm_80, sm_90" in info.words(path)


def loaded_on(monkeypatch, path, capability):
    own = emulated_driver.emulated_driver(monkeypatch, capability)
    fs.load(path)
    return own


def test_a_package_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    from firesteel.shipping.load import check_devices
    with pytest.raises(PackageError, match=f"is for cuda:7, of which torch finds {torch.cuda.device_count()} here"):
        check_devices({"inputs": [{"device": "cuda:7"}, {"type": "int"}], "weights": [{"device": "cpu"}], "constants": []})


# ---------------------------------------------------------------- on a GPU

PROCESS = """
import json, sys, time
import torch
without, how, path = sys.argv[1] == "without", sys.argv[2], sys.argv[3]
if without:
    sys.modules.update(triton=None, llvmlite=None)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
        self.table = torch.nn.Embedding(10, 32)

    def forward(self, x, i):
        return (self.parts(x + self.table(i)).softmax(-1) * torch.tensor([1.0, 2.0, 3.0, 4.0] * 2, device=x.device)).cumsum(1)

torch.manual_seed(0)
model, x, i = Model().cuda(), torch.randn(17, 32, device="cuda"), torch.randint(0, 10, (17,), device="cuda")
begun = time.perf_counter()
import firesteel as fs
if how == "package" and not without:
    fs.package(model, (x, i), path, dynamic={0: {0: (2, 99)}, 1: {0: (2, 99)}})
fn = fs.load(path) if how == "package" else model if how == "eager" else fs.compile(model, dynamic=True)
found = []
for rows in (17, 9):
    torch.manual_seed(1)
    result = fn(x[:rows], i[:rows])
    (result * result.detach().sin()).sum().backward()
    found += [result, *(p.grad for p in fn.parameters()), *(b.clone() for b in fn.buffers())]
    fn.zero_grad()
torch.cuda.synchronize()
seconds = time.perf_counter() - begun
shifted = torch.randn(17 * 32 + 1, device="cuda")[1:].view(17, 32)
torch.manual_seed(1)
found.append(fn(shifted, i)) if not without else None       # a twin, which a second process would have to compile
from firesteel.artifacts import counters
print(json.dumps({"values": [t.double().sum().item() for t in found], "seconds": seconds, "hits": counters["native"]["program_hits"],
                  "regions": counters["native"]["region_hits"], "not kept": dict(counters["regions_not_kept"])}))
"""


def on_gpu(folder, without, how):
    env = {**os.environ, "FIRESTEEL_CACHE_DIR": str(folder / "cache"), "FIRESTEEL_LOGS": ""}
    (folder / "process.py").write_text(PROCESS)
    done = subprocess.run([sys.executable, folder / "process.py", "without" if without else "with", how, folder / "model.fsp"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(how, "without compilers" if without else "", done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", ["cache", "package"])
def test_a_second_process_needs_no_compiler(tmp_path, how):
    want, first, second = on_gpu(tmp_path, False, "eager"), on_gpu(tmp_path, False, how), on_gpu(tmp_path, True, how)
    assert first["values"] == pytest.approx(want["values"], rel=1e-3, abs=1e-4)
    assert second["values"] == pytest.approx(first["values"][:-1], rel=1e-5, abs=1e-6)
    assert how == "package" or second["hits"] == 2 and second["regions"] == 1, (first, second)
