"""The keywords of torch.compile beyond our own: what `mode` and each known option mean here.

A row is a sentence about what it does here; one that has no effect is named once, by a log record, and an unknown one is an error: nothing is
taken in silence.

    fs.compile(model, mode="max-autotune")              # without a GPU logged once: choices are not measured there
    fs.compile(model, options={"fallback_random": True})
"""
from __future__ import annotations

import logging
from typing import Any

from firesteel.config import config
from firesteel.errors import UserError
from firesteel.table import Table
from firesteel.targets import CUDA, in_use

logger = logging.getLogger("firesteel")

MODES: Table[str] = Table("mode", "options.py")
for _name, _text in {
    "default": "",
    "reduce-overhead": "",                  # inference on a GPU is recorded as CUDA graphs (runtime/graphs.py)
    "max-autotune": "",                     # the same, and warps of kernels are measured (runtime/tuning.py)
    "max-autotune-no-cudagraphs": "",
}.items():
    MODES.add(_name, _text)

ON_CPU = "kernels of the CPU are chosen by a cost model; candidates are not measured"

# "" where the option asks for what is done here anyway
OPTIONS: Table[str] = Table("option of torch.compile", "options.py")
_of_gpu = "this is a choice of the peer's code generator for GPUs"
for _name, _text in {
    "fallback_random": "",                  # random numbers are eager's, unless fs.config.eager_rng is off
    "emulate_precision_casts": "set fs.config.eager_rounding to round after every operator",
    "max_autotune": "", "max_autotune_pointwise": "", "max_autotune_gemm": "matrix products are the library's",
    "coordinate_descent_tuning": "say mode='max-autotune'", "max_autotune_gemm_backends": "matrix products are the library's",
    "epilogue_fusion": "operators are fused where the cost model says that it pays", "aggressive_fusion": "fusion follows a cost model",
    "shape_padding": "operands of matrix products are not padded", "triton.cudagraphs": "",
    "triton.cudagraph_trees": "say mode='reduce-overhead' for CUDA graphs", "triton.unique_kernel_names": "kernels are named by their text",
    "triton.multi_kernel": _of_gpu, "layout_optimization": "layouts are those of the program", "force_same_precision": _of_gpu,
    "freezing": "parameters are read at each call", "trace.enabled": "set fs.config.dump_dir to keep what each stage made",
    "trace.graph_diagram": "set fs.config.dump_dir to keep what each stage made", "cpp_wrapper": "the host code is Python with native launches",
    "cpp.threads": "set fs.config.cpu_threads", "cpp.simdlen": "the vector width is the processor's", "dce": "", "size_asserts": "",
    "nan_asserts": "results are not looked at", "implicit_fallbacks": "", "permute_fusion": "fusion follows a cost model",
    "inplace_buffers": "", "allow_buffer_reuse": "", "memory_planning": "", "compile_threads": "set fs.config.compile_threads",
}.items():
    OPTIONS.add(_name, _text)

_said: set[str] = set()


def check_keywords(mode: str | None, options: dict[str, Any] | None, shapes_spec: Any, recompile_limit: int | None) -> None:
    """Raises where a keyword cannot be obeyed; says once what has no effect."""
    if mode is not None and mode not in MODES:
        raise UserError(f"There is no mode {mode!r}.", hint=f"Use one of {', '.join(map(repr, MODES))}.")
    if mode is not None and options:
        raise UserError("mode= and options= are given both.", hint="Leave one out.")
    if shapes_spec is not None:
        raise UserError("Shape specifications are not read.", hint="Say it by fs.mark_dynamic(tensor, dim, min=..., max=...) on the arguments.")
    if recompile_limit is not None and (isinstance(recompile_limit, bool) or not isinstance(recompile_limit, int) or recompile_limit < 1):
        raise UserError(f"recompile_limit={recompile_limit!r} is no number of variants.", hint="Give an int of at least 1.")
    unknown = [name for name in options or () if name.replace("-", "_") not in OPTIONS]
    if unknown:
        raise UserError(f"There are no options {', '.join(unknown)}.", hint="Settings of ours are attributes of fs.config.")
    say_once("mode", mode, ON_CPU if wants_tuning(mode, None) and CUDA not in in_use() else "")
    for name, value in (options or {}).items():
        say_once("option", name, OPTIONS[name.replace("-", "_")] if value else "")


def wants_recording(mode: str | None, options: dict[str, Any] | None) -> bool:
    """Are calls to be recorded as CUDA graphs?"""
    return mode in ("reduce-overhead", "max-autotune") or bool((options or {}).get("triton.cudagraphs"))


def wants_tuning(mode: str | None, options: dict[str, Any] | None) -> bool:
    """Are choices to be measured?"""
    asked = options or {}
    return mode in ("max-autotune", "max-autotune-no-cudagraphs") or bool(asked.get("max_autotune") or asked.get("max_autotune_pointwise"))


def say_once(kind: str, name: str | None, text: str | None) -> None:
    if text and name not in _said:
        _said.add(str(name))
        logger.warning("the %s %r has no effect: %s", kind, name, text)


# ---------------------------------------------------------------- settings of the peer

# obeyed where they were set to another value than their default; cache_size_limit is another name of the first
FOLLOWED = ("recompile_limit", "suppress_errors", "capture_scalar_outputs", "capture_dynamic_output_shape_ops", "assume_static_by_default",
            "automatic_dynamic_shapes", "specialize_int", "specialize_float", "error_on_recompile", "compiled_autograd")


def follow(module: Any, followed: dict[str, Any]) -> None:
    """Takes over what the user set in the peer's module of settings; `followed` keeps our values from before, for what is set back there."""
    entries = getattr(module, "_config", {})        # none where there is no such module: all is set back
    for name in FOLLOWED:
        value = getattr(module, name, None)
        is_set = name in entries and value is not None and value != entries[name].default
        if is_set:
            followed.setdefault(name, getattr(config, name))
            setattr(config, name, value)
        elif name in followed:
            setattr(config, name, followed.pop(name))
