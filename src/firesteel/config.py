"""The settings, one typed object: `fs.config`.

Each knob is a row of `KNOBS`: its type, its default, one sentence, and whether it changes the code that is generated
(then its value is part of every cache key).  `FIRESTEEL_<NAME>` in the environment sets it at import; assigning an
unknown name is an error.

    fs.config.recompile_limit = 16
    with fs.config.patch(eager_rng=False): ...
    @fs.config.patch(dynamic_limit=3)
    def test(): ...
"""
from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from firesteel.records import dataclass
from firesteel.table import Table


@dataclass(frozen=True)
class Knob:
    type: type
    default: Any
    text: str
    generates: bool = False     # does it change generated code?
    least: float = -math.inf
    most: float = math.inf

    def refuses(self, value: Any) -> bool:
        """Is it of another type, or out of range?"""
        return not isinstance(value, self.type) or isinstance(value, (int, float)) and not self.least <= value <= self.most

    def __str__(self) -> str:
        """What it takes."""
        bounds = [f"{word} {bound:g}" for word, bound in (("from", self.least), ("to", self.most)) if math.isfinite(bound)]
        return " ".join(["an" if self.type is int else "a", self.type.__name__, *bounds])


def _default_cache_dir() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.access(os.path.dirname(home) or "/", os.W_OK):
        return os.path.join(home, "firesteel")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")     # no temporary folder: others could make a folder of that name there first
    return os.path.join(runtime, "firesteel") if runtime and os.access(runtime, os.W_OK) else ""


KNOBS: Table[Knob] = Table("knob", "config.py")
KNOBS.rows({
    "recompile_limit": Knob(int, 8, "How many variants of one function or resume point are compiled before the limit rule applies.", least=1),
    "error_on_recompile_limit": Knob(bool, False, "Raise RecompileLimitExceeded at the limit, as under fullgraph=True."),
    "error_on_recompile": Knob(bool, False, "Raise RecompileError instead of compiling a second variant."),
    "assume_static_by_default": Knob(bool, True, "With dynamic=None, sizes are constants until they change."),
    "automatic_dynamic_shapes": Knob(bool, True, "With dynamic=None, a size, int or float that changes between calls becomes a symbol."),
    "specialize_int": Knob(bool, False, "Treat every Python int as a constant, also after it changed."),
    "specialize_float": Knob(bool, False, "Treat every Python float as a constant, also after it changed."),
    "capture_scalar_outputs": Knob(bool, False, "Capture Tensor.item() and friends as fresh symbols instead of breaking."),
    "capture_dynamic_output_shape_ops": Knob(bool, False, "Capture operators such as nonzero, whose output size depends on data."),
    "suppress_errors": Knob(bool, False, "Run eagerly, with a warning and a counter, when the compiler itself fails."),
    "memory_budget": Knob(float, 1.0, "Share of the activations that the backward may keep; below 1.0 more is recomputed.", True, 0.0, 1.0),
    "eager_rng": Knob(bool, True, "Random numbers follow eager's for the same seed.", True),
    "eager_rounding": Knob(bool, False, "Round to bf16/f16 after every operator, as eager does, instead of once per kernel.", True),
    "freeze": Knob(bool, False, "In inference on the CPU, compute once what depends on modules' parameters and buffers alone, until one changes: "
                                "batch norms folded into weights, weights reordered for the library.  Writes to `.data` are not seen."),
    "fusion_fuel": Knob(int, -1, "How many fusions may be made (for bisecting a wrong result); -1 is no limit.", True, -1),
    "cpu_threads": Knob(int, 0, "Threads of generated CPU kernels; 0 follows torch.set_num_threads.", least=0),
    "compile_threads": Knob(int, 2, "How many kernels are compiled at the same time.", least=1),
    "cache_dir": Knob(str, _default_cache_dir(), "Where compiled kernels are kept between processes; an empty string turns that off."),
    "compiled_autograd": Knob(bool, False, "Capture the backwards that compiled callables start from the autograd engine; read by fs.compile."),
    "rank_wait": Knob(float, 10.0, "Seconds for which a rank waits to compare its collectives with others', as it compiles; 0: never.", least=0.0),
    "verify": Knob(bool, False, "Run each stage's verifier; on in tests."),
    "dump_dir": Knob(str, "", "Write what each stage produced into this folder; `firesteel replay` runs the stages again from it."),
    "progress": Knob(bool, True, "Show a line on a terminal while a compilation takes more than a second."),
    "profile": Knob(bool, False, "Write the names of kernels where perf looks for them, /tmp/perf-PID.map; programs are not taken from the cache."),
    "internal_frames": Knob(bool, False, "Show the compiler's own frames in tracebacks of the program's errors."),
    "report": Knob(str, "", "Write an HTML report about everything that is compiled into this folder when the process ends."),
    "keep_stages": Knob(bool, False, "Keep what each stage produced with the compiled entry, as entry.stages."),
})


# variables of the environment that are no settings
OTHER_VARIABLES = {"FIRESTEEL_LOGS": "Log artifacts to print, separated by commas.", "FIRESTEEL_INSTALL": "1: in torch.compile's place."}
TRUTHS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off", ""), False)}


def _parse(name: str, knob: Knob, text: str) -> Any:
    try:
        value = TRUTHS[text.strip().lower()] if knob.type is bool else knob.type(text)
    except (KeyError, ValueError):
        value = None
    if knob.refuses(value):
        raise ValueError(f"FIRESTEEL_{name.upper()}={text!r}: the setting takes {knob}. {knob.text}")
    return value


def _say_what_nothing_reads() -> None:
    """Variables that look like settings: a slip of the keyboard is ignored else."""
    known = [*(f"FIRESTEEL_{name.upper()}" for name in KNOBS), *OTHER_VARIABLES]
    for name in os.environ:
        if name.startswith("FIRESTEEL_") and name not in known and (meant := difflib.get_close_matches(name, known, 1, 0.8)):
            logging.getLogger("firesteel").warning("There is no setting %s; %s?", name, meant[0])
    if (installs := os.environ.get("FIRESTEEL_INSTALL", "")).strip().lower() not in TRUTHS:
        logging.getLogger("firesteel").warning("FIRESTEEL_INSTALL=%r is neither 0 nor 1: nothing is installed", installs)


class Config:
    """Holds the values; attributes are exactly the rows of KNOBS."""

    __slots__ = ("_values", "_watchers")

    def __init__(self) -> None:
        values = {name: knob.default for name, knob in KNOBS.items()}
        for name, knob in KNOBS.items():
            text = os.environ.get(f"FIRESTEEL_{name.upper()}")
            if text is not None:
                values[name] = _parse(name, knob, text)
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_watchers", {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"firesteel has no setting {name!r}; see fs.config.describe()") from None

    def __setattr__(self, name: str, value: Any) -> None:
        knob = KNOBS.get(name)
        if knob is None:
            raise AttributeError(f"firesteel has no setting {name!r}; see fs.config.describe()")
        if knob.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if knob.refuses(value):
            raise TypeError(f"fs.config.{name} takes {knob}, not {value!r}")
        self._values[name] = value
        self._notify(name)

    def watch(self, name: str, watcher: Callable[[Any], None]) -> None:
        """Calls `watcher(value)` now and after each change: for a setting that machine code reads from memory."""
        self._watchers.setdefault(name, []).append(watcher)
        watcher(self._values[name])

    def _notify(self, name: str) -> None:
        for watcher in self._watchers.get(name, ()):
            watcher(self._values[name])

    def __dir__(self) -> list[str]:
        return [*KNOBS, "patch", "watch", "describe", "code_key"]

    @contextlib.contextmanager
    def patch(self, **changes: Any) -> Iterator[None]:
        """Context manager and decorator: these values inside, the old ones again outside."""
        before = {name: getattr(self, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(self, name, value)
            yield
        finally:
            self._values.update(before)
            for name in before:
                self._notify(name)

    def code_key(self) -> tuple:
        """The values that generated code depends on."""
        return tuple((name, self._values[name]) for name, knob in KNOBS.items() if knob.generates)

    def describe(self) -> str:
        """All settings as a readable page."""
        return "\n".join(f"{name} = {self._values[name]!r} ({knob.type.__name__})\n    {knob.text}" for name, knob in KNOBS.items())


config = Config()
STARTED = time.time()       # a file that is newer than this may not be what was imported
_say_what_nothing_reads()
