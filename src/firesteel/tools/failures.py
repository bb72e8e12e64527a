"""A failure of the compiler leaves a program that reproduces it: a file, named in a note of the error.

Written below fs.config.cache_dir, or in a temporary folder where there is no cache; equal programs are one file.  What is wrong here is
only logged: the failure itself is what its reader needs.
"""
from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import re
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

import firesteel
from firesteel.artifacts import logger
from firesteel.config import config
from firesteel.homes import home_of, is_in_package
from firesteel.sym.symint import SYMBOLIC
from firesteel.tools.cases import FILE, Case, input_text
from firesteel.tools.debug import examples

GO_AROUND = "fs.disable on the function, or FIRESTEEL_SUPPRESS_ERRORS=1, runs it eagerly"


def note_graph(error: Exception, gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Of a graph that could not be compiled; inputs without data become random ones."""
    symbolic = any(isinstance(size, SYMBOLIC) for node in gm.graph.find_nodes(op="placeholder")
                   for size in (node.meta["val"].shape if isinstance(node.meta.get("val"), torch.Tensor) else (node.meta.get("val"),)))
    _note(error, lambda: Case(gm, tuple(examples(inputs)), dynamic=symbolic).file(_why(error), firesteel.__version__))


def note_capture(error: Exception, fn: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Of a function that could not be captured: its source, which runs by itself where it needs no other names."""
    _note(error, lambda: _function_file(error, fn, inputs))


def _function_file(error: Exception, fn: Callable[..., Any], inputs: Sequence[Any]) -> str:
    plain = inspect.unwrap(fn)
    if is_in_package(home_of(plain), "firesteel") or not inspect.isfunction(plain):
        raise ValueError("the source of a module does not run by itself")
    given = "\n".join(f"        {input_text(place, value, False)}," for place, value in enumerate(inputs))
    return FILE.format(why=_why(error), version=firesteel.__version__, source=textwrap.dedent(inspect.getsource(plain)), inputs=given,
                       name=plain.__name__, settings="")


def _why(error: Exception) -> str:
    return "\n# ".join(traceback.format_exception_only(error)[-1].strip().splitlines()[:3])


def _note(error: Exception, text: Callable[[], str]) -> None:
    if getattr(error, "__notes__", None):
        return
    try:
        path = _written(text())
    except Exception as trouble:
        logger.debug("no program that reproduces the failure was written: %s", trouble)
        error.add_note(f"This is a failure of firesteel itself; {GO_AROUND}.")
    else:
        error.add_note(f"This is a failure of firesteel itself; {GO_AROUND}.\nA program that reproduces it: python {path}")


def _written(text: str) -> pathlib.Path:
    name = f"{hashlib.sha256(re.sub(r'<case [0-9]+>', '', text).encode()).hexdigest()[:12]}.py"
    if config.cache_dir:
        folder = pathlib.Path(config.cache_dir) / "failures"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            (folder / name).write_text(text, encoding="utf-8")
            return folder / name
    path = pathlib.Path(tempfile.mkdtemp(prefix="firesteel-")) / name
    path.write_text(text, encoding="utf-8")
    return path
