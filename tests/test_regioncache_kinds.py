"""Captured regions between processes, by kind: the user's autograd functions, factors of symbolic sizes; and every kind under damage, kill -9 and company."""
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_regioncache import as_eager, cache, seeded, x  # noqa: F401
from torch import nn
from torch.autograd.function import once_differentiable

import firesteel as fs
from firesteel.artifacts import counters


class Scaled(torch.autograd.Function):
    """With a number for an argument, a result that carries no gradient, and a backward that is not the forward's."""

    @staticmethod
    def forward(ctx, x, factor):
        rounded = x.round()
        ctx.save_for_backward(x)
        ctx.factor = factor
        ctx.mark_non_differentiable(rounded)
        return x * factor, rounded

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * ctx.factor, None


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].sin()


class Prints(torch.autograd.Function):
    """Whose forward is compiled on its own, at a break."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        print(end="")
        ctx.save_for_backward(x)
        return y.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def applies(x):
    scaled, rounded = Scaled.apply(x.sin(), 3.0)
    return scaled + Nested.apply(x) + rounded


def applies_behind_a_break(x):
    y = x.sin()
    print(end="")
    return Nested.apply(y) + Scaled.apply(y, 2.0)[0]


def breaks_inside(x):
    return Prints.apply(x.sin()) + 1


def run(fn, give):
    """Its result and gradient."""
    given = give().requires_grad_()
    out = fn(given)
    out.sin().sum().backward()
    return out.detach(), given.grad


@pytest.mark.parametrize("fn", [applies, applies_behind_a_break, breaks_inside], ids=lambda fn: fn.__name__)
def test_autograd_functions_of_the_user(cache, monkeypatch, fn):  # noqa: F811
    for _ in range(2):
        fs.reset()
        torch.testing.assert_close(run(fs.compile(fn), lambda: x(3, 4)), run(fn, lambda: x(3, 4)))
    assert counters["native"]["region_hits"] and not {"capture", "joint"} & fs.stage_times().keys(), dict(counters["regions_not_kept"])
    for cls in (Nested, Prints):
        monkeypatch.setattr(cls, "backward", staticmethod(lambda ctx, gradient: gradient * 7))
    fs.reset()
    torch.testing.assert_close(run(fs.compile(fn), lambda: x(3, 4)), run(fn, lambda: x(3, 4)))


@pytest.mark.parametrize("layer, shape", [(lambda: nn.BatchNorm1d(4), (5, 4)), (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
                                          (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 8))], ids=["1d", "2d", "instance"])
def test_batch_norm_in_training_with_symbolic_sizes(cache, layer, shape):  # noqa: F811
    for _ in range(2):
        fs.reset()
        modules = [seeded(layer)().double() for _ in range(2)]
        compiled = fs.compile(modules[1], dynamic=True)
        for rows in (shape[0], shape[0] + 3, shape[0] + 1):
            given = torch.randn(rows, *shape[1:], dtype=torch.float64)
            torch.testing.assert_close(run(compiled, given.clone), run(modules[0], given.clone))
        torch.testing.assert_close(*([*module.state_dict().values(), *(p.grad for p in module.parameters())] for module in modules))
    assert counters["native"]["region_hits"] == 1 and "capture" not in fs.stage_times(), dict(counters["regions_not_kept"])


def chooses(x):
    y = x * 2
    if x.sum() > 0:
        y = y.sin()
    elif x.max() > 0.5:
        y = y.cos()
    return y * 3


def repeats(x):
    while x.abs().sum() < 100 and x.max() < 30:
        x = x * 2 + 1
    return x.tanh()


@torch.compiler.nested_compile_region
def block(x, weight):
    return (x @ weight).tanh() + x


def blocks(x):
    weight = torch.ones(4, 4)
    return block(block(block(x, weight), weight * 2), weight * 3)


@pytest.mark.parametrize("fn", [chooses, repeats, blocks], ids=lambda fn: fn.__name__)
def test_branches_loops_and_nested_regions(cache, fn):  # noqa: F811
    for _ in range(2):
        fs.reset()
        compiled = fs.compile(fn, fullgraph=True)
        for scale in (1, -1, 30):
            torch.testing.assert_close(run(compiled, lambda: x(3, 4) * scale + 0.1), run(fn, lambda: x(3, 4) * scale + 0.1))
    assert counters["native"]["region_hits"] == 1 and not {"capture", "joint"} & fs.stage_times().keys(), dict(counters["regions_not_kept"])


def goes_on(x):
    hidden = x.tanh()
    return hidden, hidden.sin().sum()


def by_size(x):
    return x.softmax(0) * x.shape[0]


@pytest.mark.parametrize("fn, dynamic", [(goes_on, None), (applies_behind_a_break, None), (breaks_inside, None), (by_size, True)],
                         ids=["parts", "break", "part of its own", "symbols"])
def test_damage_at_any_byte(cache, fn, dynamic):  # noqa: F811
    """Of any entry: what is right is found, the rest is made again."""
    def once():
        fs.reset()
        return as_eager(lambda: fn, x(3, 4).requires_grad_())
    once(), once()
    assert "capture" not in fs.stage_times(), dict(counters["regions_not_kept"])
    places = random.Random(0)
    for path in sorted(cache.rglob("*.program")):
        whole = path.read_bytes()
        for at in [places.randrange(len(whole)) for _ in range(3)]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << places.randrange(8)]) + whole[at + 1:])
            once()
        path.write_bytes(whole[:places.randrange(len(whole))])
        once()
    once()
    assert "capture" not in fs.stage_times()


SCRIPT = """
import sys, torch, firesteel as fs
import its_programs
torch.manual_seed(0)
for number, fn in enumerate(its_programs.PROGRAMS):
    compiled = fs.compile(fn, dynamic=number == 3)
    for rows in (3, 5):
        given = [torch.linspace(-1, 1, rows * 4).reshape(rows, 4).requires_grad_() for _ in range(2)]
        results = [torch.utils._pytree.tree_leaves(f(x))[-1] for f, x in zip((fn, compiled), given)]
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(x.grad for x in given))
print("right", "capture" in fs.stage_times(), dict(fs.counters["regions_not_kept"]))
"""


def test_processes_some_of_which_are_killed(tmp_path):
    """Breaks, parts, variants and autograd functions; at last all is found."""
    source = pathlib.Path(__file__).read_text()
    kinds = source[source.index("class Scaled"):source.index("def run(")] + source[source.index("def goes_on"):source.index("@pytest.mark.parametrize(\"fn, dynamic\"")]
    head = "import torch\nfrom torch.autograd.function import once_differentiable\n"
    (tmp_path / "its_programs.py").write_text(f"{head}{kinds}\nPROGRAMS = (applies, applies_behind_a_break, breaks_inside, by_size, goes_on)\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("its_programs.py", "script.py"):
        os.utime(tmp_path / name, (1, 1))
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).parent.parent), "FIRESTEEL_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=env, stdout=subprocess.PIPE, text=True)
    for count in (1, 6, 20):        # entries that are there when a process dies
        victim = start()
        while len(list(tmp_path.rglob("*.program"))) < count and victim.poll() is None:
            time.sleep(0.01)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    answers = [process.communicate(timeout=600)[0] for process in [start() for _ in range(3)]]
    assert all(answer.startswith("right") for answer in answers), answers
    assert start().communicate(timeout=600)[0] == "right False {}\n"


# what a second process finds of these needs modules that capture loads, and that it must load by itself
OTHERS = """
import collections.abc, functools, torch, typing
from torch.nn import functional as F

Pair = collections.namedtuple("Pair", "a b")
class Named(dict):
    pass
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
recurrent = torch.nn.LSTM(4, 4)

def breaks(x):
    y = x.sin()
    print(end="")
    return y.cos()
def breaks_in_a_loop(x):
    for i in range(3):
        x = x + i
        print(end="")
    return x
def generates(x):
    def parts():
        for i in range(3):
            yield x * i
    return sum(parts())
def named(x):
    return Pair(x + 1, {"k": x.shape, "l": [x * 2]})
def casts(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net[0](x)
def catches(x):
    try:
        raise ValueError("a")
    except ValueError as error:
        return x + len(str(error))
def attends(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])
def sums(x, parts):
    return sum(x * part for part in parts)
def multiplies(x, pairs):
    return sum(x * a * b for a, b in pairs)
def looks_up(d):
    return d["a"] * 2
parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
optimiser = torch.optim.AdamW(parameters)
def steps(x):
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimiser.step()
    return x + 1
def asks(x):
    return x.sin() if torch.is_anomaly_enabled() else torch.autograd.grad(x.cos().sum(), x)[0]
@functools.lru_cache
def counted(name):
    return len(name)
def remembers(x):
    return x * counted("abc")
def begins_empty(x):
    grown = torch.cat([torch.tensor([]), x.flatten()])
    return grown, grown.sin().sum()
class Settings(collections.abc.Mapping):
    def __init__(self):
        self.held = {"a": 3.0}
    def __getitem__(self, name):
        return self.held[name]
    def __iter__(self):
        return iter(self.held)
    def __len__(self):
        return len(self.held)
settings = Settings()
def reads_settings(x):
    return x * settings.get("a") if typing.Optional is not None else x
def writes(x):
    x.add_(1)
    return x.t()
"""
OTHERS_SCRIPT = """
import sys, torch, firesteel as fs
import its_programs as own
given = lambda: torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
plain = lambda: given().detach()
calls = [(f, given, False) for f in (own.net, own.breaks, own.breaks_in_a_loop, own.generates, own.named, own.casts, own.catches, own.attends,
                                      own.steps, own.asks, own.remembers, own.reads_settings)]
calls += [(own.sums, lambda: (plain(), iter([1, 2])), False), (own.multiplies, lambda: (plain(), zip([1, 2], [3, 4])), False),
          (own.looks_up, lambda: own.Named(a=given()), False), (own.writes, plain, False), (own.breaks, given, True), (own.attends, given, True)]
for fn, make, dynamic in calls:
    torch.manual_seed(0)
    args = make()
    fs.compile(fn, dynamic=dynamic)(*(args if isinstance(args, tuple) else (args,)))
tracing = [name for name in ("capture.machine", "autograd.joint", "graph.trace", "loops.ir", "codegen.llvm") if f"firesteel.{name}" in sys.modules]
fs.compile(own.recurrent)(plain()), fs.compile(own.begins_empty)(given())       # which read graphs
print("capture" in fs.stage_times(), tracing, dict(fs.counters["regions_not_kept"]))
"""


def test_a_second_process_loads_nothing_that_captures_or_traces(tmp_path):
    (tmp_path / "its_programs.py").write_text(OTHERS)
    (tmp_path / "script.py").write_text(OTHERS_SCRIPT)
    for name in ("its_programs.py", "script.py"):
        os.utime(tmp_path / name, (1, 1))
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).parent.parent), "FIRESTEEL_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    first, second = (subprocess.run([sys.executable, str(tmp_path / "script.py")], env=env, capture_output=True, text=True) for _ in range(2))
    assert first.stdout.startswith("True ["), first.stderr
    assert second.stdout == "False [] {}\n", second.stderr
