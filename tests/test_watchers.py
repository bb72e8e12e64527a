"""A progress line while compiling takes long; kernels and stages by name in traces; every documented log prints."""
import io
import logging
import os
import pathlib
import re
import tempfile

import pytest
import torch

import firesteel as fs
from firesteel import artifacts, watchers


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def compiled_slowly(monkeypatch):
    """stderr of a compilation for which no time is too short; `terminal`: what stderr is."""
    def run(terminal, **settings):
        fs.reset()
        monkeypatch.setattr(watchers, "AFTER", -1.0)
        monkeypatch.setattr("sys.stderr", terminal)
        with fs.config.patch(**settings):
            fs.compile(lambda x: (x.sin() @ x).exp().sum(1) * 3)(torch.randn(8, 8))
        return terminal.getvalue()
    return run


def test_a_terminal_shows_one_line(compiled_slowly):
    text = compiled_slowly(Terminal())
    assert "\n" not in text and text.endswith("\r\x1b[K")
    shown = [line for line in text.split("\r\x1b[K") if line]
    assert all(re.fullmatch(r"firesteel: compiling, [a-z_]+(, \d+ of \d+ kernels)?, \d+\.\d s", line) for line in shown), shown
    assert any("compile_kernels, 0 of " in line for line in shown) and any("compiling, fuse" in line for line in shown)


def test_a_pipe_and_who_asks_for_silence_get_nothing(compiled_slowly):
    assert compiled_slowly(io.StringIO()) == ""
    assert compiled_slowly(Terminal(), progress=False) == ""


def test_short_compilations_are_silent(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(watchers, "AFTER", 3600.0)
    fs.compile(lambda x: x * 7)(torch.ones(3))
    assert terminal.getvalue() == "" and watchers.progress.owner == 0


def test_an_interrupted_compilation_leaves_no_line(compiled_slowly):
    def broken(gm, inputs):
        raise ValueError("no")
    terminal = Terminal()
    compiled_slowly(terminal)
    with pytest.raises(fs.errors.BackendError):
        fs.compile(lambda x: x * 2, backend=broken)(torch.ones(3))
    assert terminal.getvalue().endswith("\r\x1b[K") and watchers.progress.owner == 0


def test_traces_name_kernels_and_stages():
    fs.reset()
    with fs.config.patch(profile=True), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        fs.compile(lambda x: (x.sin() @ x).exp())(torch.randn(8, 8))
    names = {event.name for event in trace.events()}
    assert {"firesteel compiles: capture", "firesteel compiles: fuse"} <= names
    assert any(name.startswith("firesteel graph of test_traces_name_kernels_and_stages") for name in names), names
    assert any(re.fullmatch(r"firesteel exp <- .*exp.*", name) for name in names), names
    path = os.path.join(tempfile.gettempdir(), f"perf-{os.getpid()}.map")
    rows = [line.split(" ", 2) for line in pathlib.Path(path).read_text().splitlines()]
    assert any(name == "firesteel exp" for _, _, name in rows) and all(int(address, 16) and int(size, 16) > 0 for address, size, _ in rows)
    os.unlink(path)


LENGTH = fs.compile(lambda x, word: x * len(word), backend="eager")
LOGGED = {name: lambda: fs.compile(lambda x: (x * 2).relu().sum())(torch.ones(3, requires_grad=True)) for name in artifacts.LOG_NAMES}
LOGGED |= {
    "graph_breaks": lambda: fs.compile(lambda x: (fs.graph_break(), x * 2))(torch.ones(3)),
    "recompiles": lambda: [LENGTH(torch.ones(3), word) for word in ("a", "bc")],
    "autograd": lambda: fs.compiled_autograd()(lambda: (torch.ones(3, requires_grad=True) * 2).sum().backward())(),
}


@pytest.mark.parametrize("name", artifacts.LOG_NAMES)
def test_every_log_prints_something(name, caplog, tmp_path):
    fs.reset()
    with fs.config.patch(cache_dir=str(tmp_path) if name == "cache" else ""), caplog.at_level(logging.DEBUG, "firesteel"):
        fs.set_logs(**{name: True})
        try:
            LOGGED[name]()
        finally:
            fs.set_logs(**{name: False})
    assert any(record.getMessage().startswith(f"[{name}] ") for record in caplog.records)
