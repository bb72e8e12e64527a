"""Stages run again from their dumps, without the program that was compiled: each makes what it made, and the result is eager's."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import firesteel as fs
from firesteel import cli, replay
from firesteel.errors import UserError
from firesteel.stages import STAGES


def dumped(folder: pathlib.Path, fn, *inputs, **settings) -> pathlib.Path:
    """Compiles and runs a function, its backward too, with dumps."""
    fs.reset()
    with fs.config.patch(dump_dir=str(folder), verify=True):
        out = fs.compile(fn, **settings)(*inputs)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.sum().backward()
    return folder


def replayed(folder: pathlib.Path, *arguments: str) -> tuple[int, str]:
    lines: list[str] = []
    good = replay.replay(folder, *arguments, write=lines.append)
    return good, "\n".join(lines)


@pytest.fixture(scope="module")
def training_step(tmp_path_factory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    return dumped(tmp_path_factory.mktemp("dump"), lambda a, b: F.mse_loss(model(a), b), torch.randn(3, 8), torch.randn(3, 4))


@pytest.mark.parametrize("stage", replay.STARTS)
def test_a_training_step_is_replayed_from_each_stage(training_step, stage):
    good, text = replayed(training_step, stage)
    assert good and "equal to eager: yes" in text and "differs" not in text
    assert text.count("-host.py (as dumped)") == (1 if stage in ("forward", "backward") else 2)


@pytest.mark.parametrize("stage", ["graph", "joint", "forward", "program", "simplify", "fuse", "plan", "kernels"])
def test_a_replay_ends_where_it_is_told_to(training_step, stage):
    good, text = replayed(training_step, "graph", stage)
    assert good and "equal to eager" not in text
    assert f"-{stage}." in text and "-host.py" not in text


def test_the_command_needs_nothing_of_the_program(tmp_path):
    """The module of the compiled function is gone when the dump is replayed."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent("""
        import torch, firesteel as fs
        w = torch.randn(4, 4, requires_grad=True)
        @fs.compile(dynamic=True)
        def f(x, n):
            return (x @ w).softmax(-1) * n + x.shape[0]
        f(torch.randn(5, 4), 3).sum().backward()
    """))
    folder = tmp_path / "dump"
    subprocess.run([sys.executable, str(script)], check=True, env={**os.environ, "FIRESTEEL_DUMP_DIR": str(folder)})
    script.unlink()
    done = subprocess.run([sys.executable, "-m", "firesteel.cli", "replay", str(folder), "--from", "graph"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "s0 = backed(5, " in done.stdout and "equal to eager: yes" in done.stdout and "differs" not in done.stdout


def symbolic(a):
    return torch.cat([a, a * 2])[: a.shape[0] + 1].sum(1) / a.shape[1]


def mutating(a):
    a.mul_(2)
    return a[1:].t().relu()


def checkpointed(a):
    return checkpoint(lambda b: (b.sin() * b).exp(), a, use_reentrant=False) * 2


def hooked(a):
    b = a * 2
    b.register_hook(lambda g: g * 3)
    return b.exp()


def unbacked(a):
    return a[a > 0] * 2


def chosen(a):
    return torch.where(a > a.amax(0, keepdim=True) - 1, a, -float("inf")).logsumexp(0)


PROGRAMS = {
    "symbolic sizes": (symbolic, lambda: (torch.randn(5, 3),), {"dynamic": True}),
    "a write to an input": (mutating, lambda: (torch.randn(4, 3),), {}),
    "strides": (lambda a, b: a + b, lambda: (torch.randn(4, 3).t(), torch.randn(2, 3, 4)[1]), {}),
    "embedding": (lambda t, i: F.embedding(i, t), lambda: (torch.randn(4, 3, requires_grad=True), torch.tensor([1, 3])), {}),
    "dropout": (lambda a: F.dropout(a, 0.5), lambda: (torch.randn(8, 8, requires_grad=True),), {}),
    "a constant": (lambda a: a * torch.tensor([1.0, 2.0, float("inf")]), lambda: (torch.randn(4, 3),), {}),
    "several results": (lambda a: (a.max(0), a.sum()), lambda: (torch.randn(4, 3),), {}),
    "a result of an operator": (lambda a: a.mul_(2) + 1, lambda: (torch.randn(3, requires_grad=True) * 1,), {}),
    "bfloat16": (lambda a: a.softmax(-1), lambda: (torch.randn(4, 8, dtype=torch.bfloat16),), {}),
    "a checkpointed region": (checkpointed, lambda: (torch.randn(4, requires_grad=True),), {}),
    "a hook between two graphs": (hooked, lambda: (torch.randn(4, requires_grad=True),), {}),
    "a size that data tells": (unbacked, lambda: (torch.randn(9),), {}),
    "comparisons": (chosen, lambda: (torch.randn(9, 4, requires_grad=True),), {}),
    "a convolution": (lambda a, w: F.conv2d(a, w, padding=1).relu(), lambda: (torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)), {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_replayed(tmp_path, name):
    fn, inputs, settings = PROGRAMS[name]
    with fs.config.patch(capture_dynamic_output_shape_ops=True):
        dumped(tmp_path, fn, *inputs(), **settings)
    good, text = replayed(tmp_path)
    assert good and "differs" not in text, text
    for stage in ("joint", "program", "plan"):
        good, text = replayed(tmp_path, stage)
        assert good, text


def test_a_wrong_product_is_found(training_step, tmp_path):
    """A plan changed by hand computes something else."""
    for path in next(training_step.iterdir()).iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("make('erf'", "make('exp'"))
    good, text = replayed(tmp_path, "plan")
    assert not good and "equal to eager: no" in text


def test_symbols_keep_their_names_and_what_is_known_of_them(tmp_path):
    def f(a, b):
        return a + b if a.shape[0] == b.shape[0] else a
    folder = dumped(tmp_path, f, torch.randn(5, 3), torch.randn(5, 3), dynamic=True)
    text = next(folder.rglob("*-joint.py")).read_text()
    assert "known(make('eq', 'bool', " in text
    good, again = replayed(folder)
    assert good and "differs" not in again


def test_products_are_kept_where_they_are_asked_for():
    def f(a):
        return (a * 2).relu()
    with fs.config.patch(keep_stages=True):
        compiled = fs.compile(f)
        a = torch.randn(3, requires_grad=True)
        compiled(a).sum().backward()
    entry, = [entry for region in compiled.__firesteel_root__.all_regions() for entry in region.variants()]
    made = [record.stage.name for record in entry.stages]
    native = ["program", "simplify", "fuse", "plan", "kernels", "host"]
    assert made == ["graph", "joint", "forward", "backward", *native, "captured", *native]
    backward = next(record for record in entry.stages if record.stage.name == "backward")
    assert backward.made_of.stage.name == "joint" and "tangents_0" in str(backward)
    plain = fs.compile(f)
    plain(a)
    assert all(entry.stages == [] for region in plain.__firesteel_root__.all_regions() for entry in region.variants())


@pytest.mark.parametrize("start", ["graph", "joint", "forward", "program", "plan"])
def test_frozen_programs(tmp_path, start):
    """What is kept of parameters is an input of the forward graph."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Hardswish(), torch.nn.Conv2d(8, 8, 1), torch.nn.ReLU()).eval()
    with torch.no_grad(), fs.config.patch(freeze=True):
        folder = dumped(tmp_path, model, torch.randn(2, 3, 8, 8))
    assert "frozen_" in next(folder.rglob("*forward*")).read_text()
    good, text = replayed(folder, start)
    assert good, text


def test_every_stage_says_what_it_takes_and_gives():
    assert list(STAGES) == ["captured", "graph", "joint", "forward", "backward", "program", "simplify", "fuse", "plan", "kernels", "host"]
    assert all(stage.takes and stage.gives and callable(stage.run) for stage in STAGES.values())
    assert set(replay.STARTS) == {name for name, stage in STAGES.items() if stage.read is not None}


def test_what_cannot_be_replayed_is_said(tmp_path):
    with pytest.raises(UserError, match="no dump of graph"):
        replay.replay(tmp_path)
    with pytest.raises(UserError, match="no stage 'fission'"):
        replay.replay(tmp_path, "fission")
    with pytest.raises(UserError, match="cannot start from host"):
        replay.replay(tmp_path, "host")
    (tmp_path / "01-graph.py").write_text("print(1)\n")
    with pytest.raises(UserError, match="no dump of a stage"):
        replay.replay(tmp_path)


def test_the_command_line(training_step, capsys):
    assert cli.main(["replay", str(training_step), "--from", "plan"]) == 0
    assert "equal to eager: yes" in capsys.readouterr().out
    assert cli.main(["report", str(training_step)]) == 0
    assert "01-graph.py" in capsys.readouterr().out
