"""What happens with the product of each stage: it is verified, logged, dumped, and kept while it is asked for.

The rows of `STAGES` are in pipeline.py, the one list of stages.  Whoever runs a stage does so by its name, or hands its product to `done`.
`fs.config.dump_dir` and `fs.config.keep_stages` ask for products: then a `Compilation` has a Record of each, with what it was made of.

    program = stages.run("program", gm, example_inputs)     # lower_graph(gm, example_inputs), timed, verified, logged, dumped

What always holds: without such a wish nothing is kept, and a product's text is not made.
"""
from __future__ import annotations

import functools
import importlib
import itertools
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from firesteel import artifacts, transaction
from firesteel.config import config
from firesteel.records import dataclass
from firesteel.table import Table


@dataclass(frozen=True)
class Stage:
    """A row: `run` maps what is named in `takes` to what is named in `gives`."""
    name: str
    run: Callable[..., Any]
    takes: str
    gives: str
    text: Callable[[Any], str]                      # of its dump: what `read` takes
    extension: str
    read: Callable[[str], Any] | None = None        # None: its dump is for people
    verify: Callable[[Any], None] | None = None
    log: str = ""                                   # its log artifact
    show: Callable[[Any], str] = str                # its text there


STAGES: Table[Stage] = Table("stage", "pipeline.py")


@dataclass(frozen=True)
class Record:
    """The product of one run of a stage; prints as its dump."""
    stage: Stage
    product: Any
    made_of: Record | None
    file: str                   # name of its dump

    def __str__(self) -> str:
        return self.stage.text(self.product)


class StageReached(Exception):
    """The stage at which a replay shall end is done."""


class Compilation:
    """What the stages made of one captured graph, its backward included, in order."""

    def __init__(self, name: str, until: str = "", reason: str = ""):
        self.name, self.until, self.reason = name, until, reason        # why it is compiled again
        self.records: list[Record] = []
        self.guards: list[Any] = []         # of an entry whose stages are run again
        self._folder = ""

    def add(self, stage: Stage, product: Any, made_of: Any) -> None:
        before = next((record for record in reversed(self.records) if record.product is made_of), None)
        record = Record(stage, product, before, f"{len(self.records) + 1:02d}-{stage.name}.{stage.extension}")
        self.records.append(record)
        if config.dump_dir:
            try:
                self._write(record)
            except OSError as error:
                say_once(f"stages are not dumped to {config.dump_dir}: {error.strerror}")
        if stage.name == self.until:
            raise StageReached(stage.name)

    def _write(self, record: Record) -> None:
        self._folder = self._folder or f"{next(_numbers):03d}-{re.sub(r'[^A-Za-z0-9_]+', '_', self.name).strip('_')}"
        folder = pathlib.Path(config.dump_dir) / self._folder
        folder.mkdir(parents=True, exist_ok=True)
        made_of = record.made_of.file if record.made_of is not None else "-"
        head = f"{comment_of(record.file)} {record.stage.name} from {made_of}\n"
        (folder / record.file).write_text(f"{head}{record}\n", encoding="utf-8")


@functools.cache
def say_once(text: str) -> None:
    artifacts.logger.warning(text)


def comment_of(file: str) -> str:
    """How a comment begins in a dump."""
    return ";" if file.endswith(".ll") else "#"


class _Kept(threading.local):
    compilation: Compilation | None = None
    name = ""


_kept = _Kept()
transaction.keep("the compilation whose stages are kept", _kept)
_numbers = itertools.count(1)


def reset() -> None:
    global _numbers
    _numbers = itertools.count(1)


def current() -> Compilation | None:
    """Who keeps what is made now; for what is compiled later, such as a backward."""
    return _kept.compilation


def name() -> str:
    """Of the function that is compiled now; for traces."""
    return _kept.name


@transaction.context
def kept_by(compilation: Compilation | None, name: str = "") -> Iterator[Compilation | None]:
    """Inside, products are kept by this compilation, of the function of this name."""
    before = _kept.compilation, _kept.name
    _kept.compilation, _kept.name = compilation, name or _kept.name
    try:
        yield compilation
    finally:
        _kept.compilation, _kept.name = before


COLLECTORS: list[list[Compilation]] = []        # who asks for everything that is compiled from now on


def wanted(name: str, reason: str = "") -> Compilation | None:
    """A compilation to keep products in, if they are asked for."""
    if config.report:
        importlib.import_module("firesteel.tools.report").begin()
    if not (config.dump_dir or config.keep_stages or COLLECTORS):
        return None
    made = Compilation(name, reason=reason)
    for collected in COLLECTORS:
        collected.append(made)
    return made


def failed(how: str, error: Exception, *what: Any) -> None:
    """The compiler failed: tools/failures.py, which few processes need, writes a program that reproduces it and notes where."""
    getattr(importlib.import_module("firesteel.tools.failures"), how)(error, *what)


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a stage on the product of another, its first argument."""
    with artifacts.timed(name):
        product = STAGES[name].run(*args, **kwargs)
    return done(name, product, args[0])


def done(name: str, product: Any, made_of: Any = None) -> Any:
    """What is done with each product, which is returned."""
    stage = STAGES[name]
    if stage.verify is not None and config.verify:
        with artifacts.timed("verify"):
            stage.verify(product)
    if stage.log:
        artifacts.log(stage.log, lambda: f"{name}\n{stage.show(product)}")
    if _kept.compilation is not None:
        _kept.compilation.add(stage, product, made_of)
    return product
