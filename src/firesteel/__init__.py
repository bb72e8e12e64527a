"""firesteel: a compiler for PyTorch programs.  The public names; see the README for a first example.

    import firesteel as fs
    compiled = fs.compile(model)
"""
from firesteel import errors, testing
from firesteel.api import compile, explain, reset
from firesteel.artifacts import counters, set_logs, stage_times
from firesteel.autograd import aot
from firesteel.backends import list_backends, lookup_backend, register_backend
from firesteel.capture.marks import (
    allow_in_graph,
    assume_constant_result,
    disable,
    forbid_in_graph,
    graph_break,
    is_compiling,
    mark_dynamic,
    mark_static,
    mark_unbacked,
    maybe_mark_dynamic,
    set_stance,
    substitute_in_graph,
)
from firesteel.config import config

__version__ = "0.1.0"

__all__ = [
    "allow_in_graph", "aot", "assume_constant_result", "compile", "config", "counters", "disable", "errors", "explain",
    "forbid_in_graph", "graph_break", "is_compiling", "list_backends", "lookup_backend", "mark_dynamic", "mark_static",
    "mark_unbacked", "maybe_mark_dynamic", "register_backend", "reset", "set_logs", "set_stance", "stage_times",
    "substitute_in_graph", "testing",
]
