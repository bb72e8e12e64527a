"""Random programs with breaks anywhere: eager's values, effects and output in order; n breaks in a straight line are n+1 graphs, and loops need no
more; nothing of torch runs outside of graphs; a second call compiles nothing; fullgraph=True names the line of the first break."""
from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from break_programs import program
from harness import Marking, outside, same

import firesteel as fs
from firesteel import programcache, regioncache
from firesteel.artifacts import counters


def load(source: str, name: str) -> Callable[..., Any]:
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, name, "exec"), scope)
    return scope["main"]


def result(fn: Callable[..., Any], x: torch.Tensor) -> tuple[Any, list[Any], list[str]]:
    """What a program gives (or how it ends), what it logs and what it prints."""
    log: list[Any] = []
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            out = fn(x, log)
        except (ValueError, KeyError) as error:
            out = (type(error).__name__, error.args)
    return out, log, shown.getvalue().split()


def check(seed: int, loops: bool) -> None:
    fn = load(program(seed, loops), f"program_{seed}.py")
    x = torch.linspace(0, 1, 3)
    expected = result(fn, x)
    numbers, ends = expected[2], not isinstance(expected[0][0], str)
    backend = Marking()
    compiled = fs.compile(fn, backend=backend)
    same(result(compiled, x), expected)
    graphs = backend.graphs
    assert graphs <= len(numbers) + 1 and (graphs == len(numbers) + 1 or loops or not ends), (graphs, numbers)
    again: list[Any] = []
    assert outside(lambda: again.append(result(compiled, x))) == []
    same(again[0], expected)
    assert backend.graphs == graphs
    if numbers:
        with pytest.raises(fs.errors.Unsupported, match=rf"print writes output[\s\S]* at program_{seed}.py:\d+ in [\s\S]*# break {numbers[0]}\b"):
            fs.compile(fn, backend="eager", fullgraph=True)(x, [])


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("loops", [False, True], ids=["straight", "loops"])
def test_random_programs(loops: bool, part: int) -> None:
    for seed in range(part * 8, part * 8 + 8):
        try:
            check(seed, loops)
        except Exception as error:
            raise AssertionError(f"program {seed}: {type(error).__name__}: {error}") from error


# -- builtins that run the program's functions and generators ------------------------------------------------------------
def stopping(x: Any, n: int = 0) -> Any:
    y = x + n
    print(end="")
    return y * 2


def loop(iterator: Any, x: torch.Tensor) -> Any:
    for item in iterator:
        x = x + (item[0] * item[1] if isinstance(item, tuple) else item)
    return x


def extended(x: torch.Tensor) -> Any:
    items: list[Any] = []
    items.extend(stopping(x, n) for n in range(2))
    return items


def unpacked(x: torch.Tensor) -> Any:
    a, *b = (stopping(x, n) for n in range(2))
    return a + b[0]


def advanced(x: torch.Tensor) -> Any:
    generator = (stopping(x, n) for n in range(2))
    return next(generator) + next(generator), next(generator, 3)


# (program, breaks, graphs)
BUILTINS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "map": (lambda x: loop(map(stopping, [x, x + 1]), x), 3), "filter": (lambda x: loop(filter(lambda n: stopping(n) > 2, [1, 2, 3]), x), 2),
    "zip": (lambda x: loop(zip(map(stopping, [x, x]), (stopping(x, n) for n in range(3))), x), 5),
    "enumerate": (lambda x: loop(enumerate(map(stopping, [x, x + 1])), x), 3), "sum": (lambda x: sum(stopping(x, n) for n in range(2)), 3),
    "sum of map": (lambda x: sum(map(stopping, [x, x + 1])), 3), "list": (lambda x: list(map(stopping, [x, x + 1], [1, 2])), 3),
    "tuple": (lambda x: tuple(stopping(x, n) for n in range(2)), 3), "any": (lambda x: (any(stopping(x, n).dim() == 2 for n in range(2)), x + 1), 3),
    "all": (lambda x: (all(stopping(x, n).dim() == 1 for n in range(2)), x + 1), 3), "dict": (lambda x: dict((n, stopping(x, n)) for n in range(2)), 3),      # noqa: C402
    "sorted": (lambda x: (sorted([2, 1], key=lambda n: stopping(-n)), x + 1), 2), "max": (lambda x: x + max(stopping(x, n).dim() for n in range(2)), 3),
    "star": (lambda x: torch.stack([*(stopping(x, n) for n in range(2))]), 3), "extend": (extended, 3), "unpack": (unpacked, 3), "next": (advanced, 3)}


@pytest.mark.parametrize("name", BUILTINS)
def test_breaks_inside_of_builtins(name: str) -> None:
    fn, graphs = BUILTINS[name]
    x, backend = torch.randn(3), Marking()
    compiled = fs.compile(fn, backend=backend)
    for _ in range(2):
        same(compiled(x), fn(x))
    assert outside(lambda: compiled(x)) == [] and backend.graphs <= graphs


def test_generators_that_return_after_a_break() -> None:
    def count(x: torch.Tensor) -> Any:
        yield stopping(x)
        print(end="")
        return x.shape[0]

    def fn(x: torch.Tensor) -> Any:
        generator = count(x)
        first = next(generator)
        try:
            next(generator)
        except StopIteration as stop:
            return first * stop.value

    x = torch.randn(3)
    same(fs.compile(fn, backend="eager")(x), fn(x))


def test_what_a_generator_returned_is_in_its_stop_iteration() -> None:
    def fn(x: torch.Tensor) -> Any:
        generator = (lambda: (yield x) or 5)()
        first = next(generator)
        try:
            next(generator)
        except StopIteration as stop:
            first = first * stop.value
        try:
            next(generator)
        except StopIteration as stop:
            return first, stop.value

    x = torch.randn(3)
    same(fs.compile(fn, backend="eager", fullgraph=True)(x), fn(x))


@pytest.mark.parametrize("loops", [False, True], ids=["straight", "loops"])
def test_another_process_captures_nothing(loops: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program is a module of its own; all is forgotten before a run but for what is kept on disk."""
    monkeypatch.setattr(regioncache, "STARTED", math.inf)
    monkeypatch.syspath_prepend(tmp_path)
    programcache.versions.cache_clear()
    x = torch.linspace(0, 1, 3)
    with fs.config.patch(verify=False, cache_dir=str(tmp_path / "cache")):
        for seed in range(6):
            name = f"with_breaks_{seed}_{loops}"
            (tmp_path / f"{name}.py").write_text(program(seed, loops))
            main = importlib.import_module(name).main
            expected, runs = result(main, x), []
            for _ in range(2):
                fs.reset()
                runs.append(result(fs.compile(main), x))
                assert runs[-1][1:] == expected[1:]
            same(runs[0], runs[1])
            assert "capture" not in fs.stage_times(), (seed, dict(counters["regions_not_kept"]))
            monkeypatch.delitem(sys.modules, name)
    programcache.versions.cache_clear()
