"""The keywords of torch.compile beyond our own: what `mode` and each known option mean here.

A row is a sentence about what it does here; one that has no effect is named once, by a log record, and an unknown one is an error: nothing is
taken in silence.

    fs.compile(model, mode="max-autotune")              # without a GPU logged once: choices are not measured there
    fs.compile(model, options={"fallback_random": True})
"""
from __future__ import annotations

import ast
import contextvars
import functools
import logging
import os
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._config_module import _UNSET_SENTINEL as UNSET

from firesteel.config import KNOBS, config
from firesteel.errors import UserError
from firesteel.table import Table
from firesteel.targets import CUDA, in_use

logger = logging.getLogger("firesteel")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")

# asked for, but no tensor lives on a GPU: question -> what is done on the CPU
ON_CPU = {"tuning": "kernels of the CPU are chosen by a cost model; candidates are not measured",
          "recording": "the CPU has no CUDA graphs; launches there are native calls already"}

# as the modes are: wants_recording, wants_tuning; wants_freezing
OBEYED = ("max_autotune", "max_autotune_pointwise", "triton.cudagraphs", "freeze", "freezing")
DONE = "it is always on here"
# what an option asks for is done here anyway, or the sentence says why not, or what to say instead
OPTIONS: Table[str] = Table("option of torch.compile", "options.py")
_of_gpu = "this is a choice of the peer's code generator for GPUs"
OPTIONS.rows({
    "fallback_random": DONE,                # random numbers are eager's, unless fs.config.eager_rng is off
    "emulate_precision_casts": "set fs.config.eager_rounding to round after every operator",
    "max_autotune_gemm": "matrix products are the library's",
    "coordinate_descent_tuning": "say mode='max-autotune'", "max_autotune_gemm_backends": "matrix products are the library's",
    "epilogue_fusion": DONE, "aggressive_fusion": "fusion follows a cost model",
    "shape_padding": "operands of matrix products are not padded",
    "triton.cudagraph_trees": "say mode='reduce-overhead' for CUDA graphs", "triton.unique_kernel_names": "kernels are named by their text",
    "triton.multi_kernel": _of_gpu, "layout_optimization": "layouts are those of the program", "force_same_precision": _of_gpu,
    "trace.enabled": "set fs.config.dump_dir to keep what each stage made",
    "trace.graph_diagram": "set fs.config.dump_dir to keep what each stage made", "cpp_wrapper": "the host code is Python with native launches",
    "cpp.threads": "set fs.config.cpu_threads", "cpp.simdlen": "the vector width is the processor's", "dce": DONE, "size_asserts": DONE,
    "nan_asserts": "results are not looked at", "implicit_fallbacks": DONE, "permute_fusion": "fusion follows a cost model",
    "inplace_buffers": DONE, "allow_buffer_reuse": DONE, "memory_planning": DONE, "compile_threads": "set fs.config.compile_threads",
    "guard_filter_fn": "guards are always checked; they cost about a microsecond a call",
    "force_disable_caches": "set fs.config.cache_dir to an empty string", "disable": "it is read when torch.compile is called",
})
UNREAD = "this setting of the peer has no counterpart"

_said: set[str] = set()


# keyword -> the types that it takes, in words; what is only asked whether it is true takes anything
TAKES: dict[str, tuple[tuple[type, ...], str]] = {
    "dynamic": ((bool, int, types.NoneType), "True, False or None"), "name": ((str, types.NoneType), "a text"),
    "options": ((Mapping, types.NoneType), "a dict of settings by their names"),
}


def check_types(**keywords: Any) -> None:
    for name, value in keywords.items():
        allowed, words = TAKES[name]
        if not isinstance(value, allowed) or isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
            raise UserError(f"{name}={value!r} is of no type that it can have.", hint=f"Give {words}.")


def check_keywords(mode: str | None, options: dict[str, Any] | None, recompile_limit: int | None, backend: str) -> None:
    """Raises where a keyword cannot be obeyed; says once what has no effect.  `backend`: "native", another of "ours", or "another's", which is
    given the mode and the options itself."""
    if mode is not None and mode not in MODES and backend != "another's":
        raise UserError(f"There is no mode {mode!r}.", hint=f"Use one of {', '.join(map(repr, MODES))}.")
    if mode is not None and options:
        raise UserError("mode= and options= are given both.", hint="Leave one out.")
    if recompile_limit is not None and (isinstance(recompile_limit, bool) or not isinstance(recompile_limit, int) or recompile_limit < 1):
        raise UserError(f"recompile_limit={recompile_limit!r} is no number of variants.", hint="Give an int of at least 1.")
    if backend != "native":
        for name in [] if backend == "another's" else options or ([] if mode in (None, "default") else [mode]):
            say_once("option" if options else "mode", name, "only the native backend generates code")
        return
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    unknown = [name for name in given if name not in OPTIONS and name not in OBEYED and name not in options_of_the_peer()]
    if unknown:
        raise UserError(f"There are no options {', '.join(unknown)}.", hint="Settings of ours are attributes of fs.config.")
    for name, value in given.items():
        say_once("option", name, without_effect(name, value))
    if mode == "lite":
        say_once("mode", mode, "compiling is quick; every operator is compiled, as in the mode 'default'")
    if CUDA not in in_use():
        asked = [ON_CPU[what] for what, wants in (("recording", wants_recording), ("tuning", wants_tuning)) if wants(mode, options)]
        say_once("option" if mode is None else "mode", mode or next((name for name in given if name in OBEYED), None), "; ".join(asked))


def without_effect(name: str, value: Any) -> str:
    """Why this value of an option does nothing; "" where it is obeyed, or is what is done anyway."""
    text = "" if name in OBEYED else OPTIONS.get(name, UNREAD)
    return text if text == UNREAD or bool(value) != (text == DONE) else ""


@functools.cache
def options_of_the_peer() -> frozenset[str]:
    """The names of the settings of the peer's code generator, which are its options.  Read as text: nothing of it is run."""
    path = pathlib.Path(torch.__path__[0], "_inductor", "config.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    groups = [("", body), *((f"{node.name}.", node.body) for node in body if isinstance(node, ast.ClassDef))]
    return frozenset(f"{prefix}{name}" for prefix, nodes in groups for node in nodes for name in _assigned(node))


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def wants_recording(mode: str | None, options: dict[str, Any] | None) -> bool | None:
    """Are calls to be recorded as CUDA graphs?  None where nothing says so: those for which it is certain to pay."""
    asked = (options or {}).get("triton.cudagraphs")
    if asked is not None:
        return bool(asked)
    return {"reduce-overhead": True, "max-autotune": True, "max-autotune-no-cudagraphs": False}.get(mode or "")


def wants_tuning(mode: str | None, options: dict[str, Any] | None) -> bool:
    """Are choices to be measured?"""
    asked = options or {}
    return mode in ("max-autotune", "max-autotune-no-cudagraphs") or bool(asked.get("max_autotune") or asked.get("max_autotune_pointwise"))


def wants_freezing(options: dict[str, Any] | None) -> bool | None:
    """Are parameters frozen in inference?  None where fs.config.freeze says."""
    asked = [bool(options[name]) for name in ("freeze", "freezing") if name in options] if options else []
    return asked[0] if asked else None


def say_once(kind: str, name: str | None, text: str | None) -> None:
    if text and name not in _said:
        _said.add(str(name))
        logger.warning("the %s %r has no effect: %s", kind, name, text)


# ---------------------------------------------------------------- settings of the peer

GENERATOR = "torch._inductor.config"
_read: dict[str, Any] = {}      # of its settings, by the latest torch.compile

# module of the peer's settings -> its setting -> ours.  cache_size_limit is another name of the first
FOLLOWED = {
    "torch._dynamo.config": {"fail_on_recompile_limit_hit": "error_on_recompile_limit"} | {name: name for name in (
        "recompile_limit", "suppress_errors", "capture_scalar_outputs", "capture_dynamic_output_shape_ops", "assume_static_by_default",
        "automatic_dynamic_shapes", "specialize_int", "specialize_float", "error_on_recompile", "compiled_autograd")},
    "torch._functorch.config": {"activation_memory_budget": "memory_budget"},
    GENERATOR: {"emulate_precision_casts": "eager_rounding", "freezing": "freeze"},
    "torch.compiler.config": {"force_disable_caches": "cache_dir"},
    "torch.fx.experimental._config": {},
}
# variables of the environment by which the peer's settings begin at 1 -> ours; the first two are settings of each call
ENVIRONMENT = {
    "TORCHINDUCTOR_MAX_AUTOTUNE": "max_autotune", "TORCHINDUCTOR_CUDAGRAPHS": "triton.cudagraphs", "TORCHINDUCTOR_FREEZING": "freeze",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "eager_rounding", "TORCHDYNAMO_SUPPRESS_ERRORS": "suppress_errors",
    "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS": "capture_scalar_outputs",
    "TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS": "capture_dynamic_output_shape_ops",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "cache_dir", "TORCH_COMPILE_FORCE_DISABLE_CACHES": "cache_dir",
}
MEANS = {"cache_dir": lambda disabled: "" if disabled else config.cache_dir}      # of theirs, where it is not ours' value


def settings_of_calls() -> dict[str, Any]:
    """What the user set in the settings of the peer's code generator of that which is decided here for each compiled callable."""
    _read.clear()
    given = by_environment() | set_by_user(sys.modules.get(GENERATOR))
    _read.update({name: given[name] for name in OBEYED if name in given and name not in FOLLOWED[GENERATOR]})
    return dict(_read)


def by_environment() -> dict[str, Any]:
    return {name: True for variable, name in ENVIRONMENT.items() if os.environ.get(variable) == "1"}


def follow(followed: dict[str, Any], installed: bool) -> None:
    """Takes over what the user set in the peer's settings, and names once what has no counterpart; `followed` keeps our values from before, for
    what is set back there.  The modules are found where the program has imported them."""
    changed = {module: set_by_user(sys.modules.get(module)) if installed else {} for module in FOLLOWED}
    wanted = {name: value for name, value in by_environment().items() if installed and name in KNOBS}
    wanted |= {ours: changed[module].pop(theirs) for module, names in FOLLOWED.items() for theirs, ours in names.items() if theirs in changed[module]}
    for ours, value in wanted.items():
        followed.setdefault(ours, getattr(config, ours))
        setattr(config, ours, MEANS[ours](value) if ours in MEANS else value)
    for ours in [ours for ours in followed if ours not in wanted]:
        setattr(config, ours, followed.pop(ours))
    for module, name, value in [(module, name, value) for module, left in changed.items() for name, value in left.items()]:
        if module == GENERATOR and name in OBEYED:
            text = "" if _read.get(name) == value else f"set it before torch.compile is called, or say options={{{name!r}: ...}}, or a mode"
        else:
            text = without_effect(name, value)
        say_once("setting", f"{module}.{name}", text)


def set_by_user(module: Any) -> dict[str, Any]:
    """Setting -> its value, where it is another than the default."""
    overrides = {name: (entry, getattr(entry, "user_override", UNSET)) for name, entry in getattr(module, "_config", {}).items()}
    values = {name: (entry, given.get() if isinstance(given, contextvars.ContextVar) else given) for name, (entry, given) in overrides.items()}
    return {name: value for name, (entry, value) in values.items() if value is not UNSET and value != entry.default}
