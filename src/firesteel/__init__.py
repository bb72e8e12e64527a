"""firesteel: a compiler for PyTorch programs.  The public names; see the README for a first example.

    import firesteel as fs
    compiled = fs.compile(model)
"""
from firesteel import errors, support, testing  # noqa: F401  support looks at torch's release before the rest needs it
from firesteel.api import (
    checkpoint_budget,
    compile,
    compiled_autograd,
    disable_compiled_autograd,
    explain,
    memory_report,
    reset,
    set_stance,
)
from firesteel.artifacts import counters, set_logs, stage_times
from firesteel.autograd import aot
from firesteel.autograd.engine import in_compiled_autograd_region
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
    substitute_in_graph,
)
from firesteel.config import config
from firesteel.dropin import install, uninstall

__version__ = "0.1.0"

__all__ = [
    "allow_in_graph", "aot", "assume_constant_result", "checkpoint_budget", "compile", "compiled_autograd", "config", "counters", "disable",
    "disable_compiled_autograd", "errors", "explain", "forbid_in_graph", "graph_break", "in_compiled_autograd_region", "install",
    "is_compiling", "list_backends", "lookup_backend", "mark_dynamic", "mark_static",
    "mark_unbacked", "maybe_mark_dynamic", "memory_report", "register_backend", "reset", "set_logs", "set_stance", "stage_times",
    "substitute_in_graph", "testing", "uninstall",
]
