"""Programs between processes: what is found in the cache computes what was compiled, and whatever is wrong with an entry, it is made again."""
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel import programcache
from firesteel.artifacts import counters


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def chain(x, y):
    return (x.sin() * y + y.exp()).sum(-1), x.relu()


def writes(x, y):
    y.mul_(2)
    return y.t(), (x * y).sum()


def views(x, y):
    z = x * 2
    return z, z[1:], z.t(), y.view(-1), y


def drops(x, y):
    return F.dropout(x, 0.5) + y * torch.rand(4)


def strided(x, y):
    return (x.t() + 1).contiguous().t(), torch.cat([x, y]).chunk(2)


def constants(x, y):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + y.sum(), 3, None, "text"


def several(x, y):
    return x.exp(), y.exp(), (x + y).tanh()


def products(x, y):
    return F.layer_norm(x @ y.t(), (3,)), y.max(dim=1)


PROGRAMS = (chain, writes, views, drops, strided, constants, several, products)


def outcome(fn, train, arrived=slice(None)):
    """Results with all that can be seen of them, what became of the inputs, gradients, and the next random number."""
    torch.manual_seed(0)
    inputs = [leaf(3, 4), torch.randn(3, 4)]
    if train and fn.__name__ != "writes":
        inputs[1].requires_grad_()
    results = torch.utils._pytree.tree_leaves(fn(*inputs))
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    looks = [(t.shape, t.stride(), t.storage_offset(), t.requires_grad, t._is_view(), t._version, t.detach().clone()) for t in tensors]
    differentiable = [t for t in tensors if t.requires_grad and t.grad_fn is not None][arrived]
    if train and differentiable:
        torch.autograd.backward([t.sin().sum() for t in differentiable])
    gradients = [None if t.grad is None else t.grad.clone() for t in inputs]
    return looks, [r for r in results if not isinstance(r, torch.Tensor)], [t.detach().clone() for t in inputs], gradients, torch.rand(1)


def same(a, b):
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, atol=1e-4) if isinstance(a, torch.Tensor) else a == b


def compiled_outcome(fn, train, arrived=slice(None)):
    fs.reset()
    compiled = fs.compile(fn)
    compiled.__name__ = fn.__name__
    with torch.set_grad_enabled(train):
        return outcome(compiled, train, arrived), counters["native"].copy()


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_found_programs_compute_what_eager_does(cache, fn, train):
    with torch.set_grad_enabled(train):
        eager = outcome(fn, train)
    first, made = compiled_outcome(fn, train)
    again, found = compiled_outcome(fn, train)
    assert same(eager, first) and same(eager, again)
    assert made["program_hits"] == 0 and found["program_hits"] >= (2 if train else 1)
    assert [made[name] for name in ("kernels", "library_calls")] == [found[name] for name in ("kernels", "library_calls")]


def test_a_part_of_a_found_backward(cache):
    """Of several results one gets a gradient: the backward's graph is read from its text."""
    eager = outcome(several, True, slice(0, 1))
    compiled_outcome(several, True)
    again, found = compiled_outcome(several, True, slice(0, 1))
    assert same(eager, again) and found["program_hits"]


def test_second_order_of_a_found_program(cache):
    def gradients(fn):
        torch.manual_seed(0)
        x = leaf(3, 4)
        (g,) = torch.autograd.grad(fn(x, x.detach())[0].sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)
    eager = gradients(chain)
    for _ in range(2):
        fs.reset()
        assert same(eager, gradients(fs.compile(chain)))
    assert counters["native"]["program_hits"]


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_symbolic_sizes(cache, train):
    """The guards of a found program are those of a traced one."""
    def f(x, y):
        z = (x * x.shape[0]).reshape(-1, 2).softmax(-1)
        return torch.cat([z, y[:z.shape[0], :2]]).sum(0) if x.shape[0] > 3 else z

    def results(fn):
        torch.manual_seed(0)
        found = []
        for rows in (4, 6, 2, 8, 5, 6):
            x, y = leaf(rows, 4), torch.randn(2 * rows, 4)
            result = fn(x, y)
            if train:
                result.sin().sum().backward()
            found += [result.detach(), result.stride(), x.grad]
        return found

    def guards(fn):
        return [str(guard.data.expr) for region in fn.__firesteel_root__.all_regions() for entry in region.variants()
                for guard in entry.guard.guards if guard.kind == "expr"]

    with torch.set_grad_enabled(train):
        eager, seen = results(f), []
        for _ in range(2):
            fs.reset()
            compiled = fs.compile(f, dynamic=True)
            assert same(eager, results(compiled))
            seen.append((guards(compiled), counters["stats"]["unique_graphs"]))
    assert seen[0] == seen[1] and seen[0][0] and counters["native"]["program_hits"] >= 2


def test_a_part_of_a_found_backward_with_symbolic_sizes(cache):
    def gradients(fn, rows):
        torch.manual_seed(0)
        x, y = leaf(rows, 4), leaf(rows, 4)
        fn(x, y)[0].sum().backward()
        return x.grad, y.grad
    for _ in range(2):
        fs.reset()
        compiled = fs.compile(several, dynamic=True)
        for rows in (3, 5):
            assert same(gradients(several, rows), gradients(compiled, rows))


def test_batch_norm_in_training(cache):
    def states(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        model2 = wrap(model)
        for _ in range(2):
            model2(torch.randn(2, 3, 8, 8)).sum().backward()
        return [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    eager = states(lambda m: m)
    for _ in range(2):
        fs.reset()
        assert same(eager, states(fs.compile))
    assert counters["native"]["program_hits"] == 2


def test_frozen_parameters(cache):
    """The cache has how values are computed of them: another process computes its own, of its own parameters."""
    def run(seed):
        fs.reset()
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 300, 3), torch.nn.Flatten(),
                                    torch.nn.Linear(4800, 100)).eval()
        compiled, x = fs.compile(model), torch.randn(64, 3, 8, 8)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
                model[0].weight.mul_(2)
        return counters["native"]["program_hits"], counters["native"]["library_calls"]
    with fs.config.patch(freeze=True):
        (none, calls), (found, same_calls) = run(0), run(1)
    assert none == 0 and found == 1 and calls == same_calls
    assert sum(path.stat().st_size for path in entries(cache)) < 4800 * 100 * 4
    assert run(0)[0] == 0       # without freezing it is another program


def entries(cache):
    return sorted(cache.rglob("*.program"))


def test_damage_at_any_byte_is_a_miss(cache):
    eager = outcome(chain, True)
    compiled_outcome(chain, True)
    whole = {path: path.read_bytes() for path in entries(cache)}
    assert len(whole) >= 3
    for path, data in whole.items():
        for place in {0, 20, 50, len(data) // 3, len(data) // 2, len(data) - 1}:
            path.write_bytes(bytes([*data[:place], data[place] ^ 1, *data[place + 1:]]))
            programcache.versions.cache_clear()
            assert same(eager, compiled_outcome(chain, True)[0])
            path.write_bytes(data)
        path.write_bytes(data[:len(data) // 2])
        assert same(eager, compiled_outcome(chain, True)[0])
    assert {path: path.read_bytes() for path in entries(cache)}.keys() == whole.keys()
    assert compiled_outcome(chain, True)[1]["program_hits"] == 2


def test_an_entry_that_cannot_be_read_is_made_again(cache, monkeypatch):
    """Whole by its digest, and yet nothing that this process can use."""
    eager = outcome(chain, True)
    with monkeypatch.context() as patch:
        patch.setattr(programcache, "host_payload", lambda call, about: b'{"code": 3}\nabc')
        compiled_outcome(chain, True)
    assert same(eager, compiled_outcome(chain, True)[0])
    again, found = compiled_outcome(chain, True)
    assert same(eager, again) and found["program_hits"] == 2


def said(caplog, fn, train=False):
    caplog.clear()
    fs.set_logs(cache=True)
    try:
        with caplog.at_level("DEBUG", logger="firesteel"):
            compiled_outcome(fn, train)
    finally:
        fs.set_logs(cache=False)
    return caplog.text


def test_why_it_missed_is_said(cache, caplog, monkeypatch):
    assert "no such graph was kept" in said(caplog, chain)
    assert "forward: found" in said(caplog, chain)
    with fs.config.patch(eager_rounding=True):
        assert "eager_rounding was False, is True" in said(caplog, chain)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "__version__", "0.0.0")
        programcache.versions.cache_clear()
        assert "firesteel was 0.1.0, is 0.0.0" in said(caplog, chain)
        programcache.versions.cache_clear()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before != "high" else "medium")
    try:
        assert f"matmul precision was {before}" in said(caplog, chain)
    finally:
        torch.set_float32_matmul_precision(before)


def users(x):
    return x + 1


def test_programs_whose_text_does_not_say_all_are_not_kept(cache, caplog):
    fs.allow_in_graph(users)
    assert "the program's own" in said(caplog, lambda x, y: users(x))
    held = torch.randn(5000)
    fs.reset()
    kept = fs.compile(lambda x: x + held.sum())
    assert torch.allclose(kept(torch.ones(2)), 1 + held.sum())


def test_large_constants_are_not_kept(cache, caplog):
    """Texts do not hold their data."""
    numbers = [k / 12 for k in range(12)] * 500

    def f(x, y):
        return (x.sin().reshape(-1, 1) * torch.tensor(numbers)).mean(-1)
    eager = outcome(f, True)
    for _ in range(2):
        assert same(eager, compiled_outcome(f, True)[0])
        assert "large constant" in said(caplog, f, True)


def test_settings_of_the_processor_are_in_the_key(cache, monkeypatch):
    compiled_outcome(chain, False)
    monkeypatch.setattr(programcache.cpu, "machine_key", lambda: "another")
    programcache.versions.cache_clear()
    assert not compiled_outcome(chain, False)[1]["program_hits"]


SCRIPT = """
import sys, torch
import firesteel as fs
torch.manual_seed(0)
def f(x, w):
    for _ in range(6):
        x = torch.nn.functional.gelu(x @ w).softmax(-1)
    return x.sum()
x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
r = fs.compile(f)(x, w)
r.backward()
torch.testing.assert_close(r, f(x, w))
print(fs.counters["native"]["program_hits"], float(w.grad.abs().sum()), "llvmlite" in sys.modules)
"""


def start(folder):
    env = {**os.environ, "FIRESTEEL_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1",
           "PYTHONPATH": os.pathsep.join([str(pathlib.Path(fs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True)


def test_processes_at_once_and_one_that_is_killed(tmp_path):
    """All are right; who comes after them finds the program, and needs no LLVM."""
    victim = start(tmp_path)
    others = [start(tmp_path) for _ in range(2)]
    while not list(tmp_path.rglob("*.o")) and victim.poll() is None:
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    found = [process.communicate()[0].split() for process in others]
    assert all(process.returncode == 0 for process in others)
    last = start(tmp_path).communicate()[0].split()
    assert last[0] == "2" and {value for _, value, _ in found} == {last[1]}
    assert last[2] == "False" or (sys.platform, platform.machine()) != ("linux", "x86_64")


AT_ONCE = """
import os, signal, sys, time, torch
import firesteel as fs
from firesteel.runtime import diskcache
def f(x, w):
    for _ in range(4):
        x = torch.nn.functional.gelu(x @ w).softmax(-1)
    return x.sum()
def run():
    x, w = torch.ones(4, 8), torch.full((8, 8), 0.5, requires_grad=True)
    fs.compile(f)(x, w).backward()
    return fs.counters["native"]["program_hits"], fs.counters["native"]["compiled"]
fs.compile
begin, ready = os.pipe(), os.pipe()
results = os.pipe()
victim = os.fork() if sys.argv[2] == "killed" else 0
if sys.argv[2] == "killed" and not victim:
    put = diskcache.DiskCache.put_hashed
    def wait(self, key, data):
        if self.suffix == ".program" and len(data) > 900:       # the program itself
            os.write(ready[1], b"x")
            signal.pause()
        put(self, key, data)
    diskcache.DiskCache.put_hashed = wait
    run()
children = []
for _ in range(int(sys.argv[1])):
    if (pid := os.fork()) == 0:
        os.close(begin[1])
        os.read(begin[0], 1)
        os.write(results[1], b"%d %d\\n" % run())
        os._exit(0)
    children.append(pid)
if victim:
    os.read(ready[0], 1)
os.close(begin[1])
if victim:
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
status = [os.waitpid(pid, 0)[1] for pid in children]
print(status.count(0), *os.read(results[0], 4096).decode().splitlines(), sep="|")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and the locks of the system")
@pytest.mark.parametrize("count, how", [(2, "together"), (8, "together"), (3, "killed")])
def test_processes_that_miss_at_once_compile_once(tmp_path, count, how):
    env = {**os.environ, "FIRESTEEL_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "FIRESTEEL_VERIFY": "0",
           "PYTHONPATH": os.pathsep.join([str(pathlib.Path(fs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(count), how], env=env, stdout=subprocess.PIPE, text=True, timeout=300)
    right, *rows = done.stdout.strip().split("|")
    assert int(right) == len(rows) == count, done.stdout
    hits = sorted(int(row.split()[0]) for row in rows)
    assert sum(hits) == 2 * (count - 1), rows        # forward and backward are made once, not always by the same process
    assert not list(tmp_path.rglob("*.lock"))


def test_views_whose_history_may_not_be_asked_for(cache):
    def written_behind_a_view(x):
        view = x.mT
        x.masked_fill_(torch.tensor(True), 2)
        return view + 1

    for _ in range(2):
        fs.reset()
        with torch.no_grad():
            torch.testing.assert_close(fs.compile(written_behind_a_view)((leaf(6, 6) * 1)[1:5, 1:5]), torch.full((4, 4), 3.0))


RECURRENT = """
import torch, firesteel as fs
torch.manual_seed(0)
layer, states = torch.nn.GRU(3, 4), torch.zeros(1, 2, 4)
packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
fs.compile(lambda packed, states: layer(packed, states)[1])(packed, states).sum().backward()
print(fs.counters["native"]["program_hits"], *layer.weight_hh_l0.grad.flatten().tolist())
"""


def test_operators_of_ours_are_known_in_a_second_process(tmp_path):
    """The backward of a found program is compiled from a text that names them."""
    env = {**os.environ, "FIRESTEEL_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "FIRESTEEL_VERIFY": "0"}
    first, second = (subprocess.run([sys.executable, "-c", RECURRENT], env=env, capture_output=True, text=True, check=True).stdout.split() for _ in range(2))
    assert int(first[0]) == 0 and int(second[0]) > 0
    torch.testing.assert_close([float(x) for x in first[1:]], [float(x) for x in second[1:]])
