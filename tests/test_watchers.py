"""A progress line while compiling takes long; kernels and stages by name in traces; every documented log prints."""
import io
import logging
import os
import pathlib
import re

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


def traced(fn, *args):
    """The names of the ranges that a trace of the call has."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        fn(*args)
    return [event.name for event in trace.events()]


def squashed(x):
    return (x.sin() @ x).exp().sum()


def trained(compiled):
    compiled(torch.randn(8, 8, requires_grad=True)).backward()


def test_traces_name_stages_graphs_and_kernels(tmp_path):
    """Those of a process that compiles, of one that has compiled before the trace began, and of one that finds the program in the cache."""
    with fs.config.patch(cache_dir=str(tmp_path), verify=False):
        fs.reset()
        first = fs.compile(squashed)
        traces = [traced(trained, first), traced(trained, first)]
        assert {"firesteel compiles: capture", "firesteel compiles: fuse", "firesteel compiles: compile_backward"} <= set(traces[0])
        fs.reset()
        for names in (*traces, traced(trained, fs.compile(squashed))):
            assert names.count("firesteel graph of squashed") == names.count("firesteel backward of squashed") == 1, names
            kernels = [name for name in names if re.fullmatch(r"firesteel \w+ <- .*", name)]
            assert any(name.endswith(" sin") for name in kernels) and any("exp" in name for name in kernels) and len(kernels) >= 4, names


def test_each_kernel_of_a_launch_is_a_range():
    compiled = fs.compile(lambda x: (x.cumsum(0).exp(), x.sum(1), x.t().contiguous() * 2))
    x = torch.randn(16, 8)
    expected = compiled(x)
    names = [name for name in traced(lambda: torch.testing.assert_close(compiled(x), expected)) if " <- " in name]
    assert len(names) >= 2 and not any(";" in name for name in names), names


def test_an_index_out_of_range_is_told_in_a_trace_too():
    compiled = fs.compile(lambda x, i: x[i] * 2)
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        traced(compiled, torch.ones(3), torch.tensor([9]))
    assert "firesteel graph of" not in " ".join(traced(lambda: None))


def test_a_trace_costs_nothing_later():
    """Host functions run their own code again; what they launch is one native call."""
    compiled = fs.compile(lambda x: x.sin())
    assert any(" <- sin" in name for name in traced(compiled, torch.ones(3)))
    with fs.config.patch(error_on_recompile=True):
        assert compiled(torch.zeros(3)).tolist() == [0.0] * 3


def test_the_map_of_perf_names_kernels():
    fs.reset()
    path = pathlib.Path(f"/tmp/perf-{os.getpid()}.map")
    with fs.config.patch(profile=True):
        fs.compile(lambda x: (x.sin() @ x).exp())(torch.randn(8, 8))
    rows = [line.split(" ", 2) for line in path.read_text().splitlines()]
    path.unlink()
    assert any(name == "firesteel exp" for _, _, name in rows) and all(int(address, 16) and int(size, 16) > 0 for address, size, _ in rows)


def test_a_map_of_perf_that_cannot_be_written(caplog):
    fs.reset()
    path = pathlib.Path(f"/tmp/perf-{os.getpid()}.map")
    path.mkdir()
    try:
        with fs.config.patch(profile=True), caplog.at_level(logging.WARNING, "firesteel"):
            assert fs.compile(lambda x: x.sin() + 7)(torch.zeros(3)).tolist() == [7.0] * 3
    finally:
        path.rmdir()
    assert "perf will not know the names of kernels" in caplog.text


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
