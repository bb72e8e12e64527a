"""firesteel: a compiler for PyTorch programs.  The public names; see the README for a first example.

    import firesteel as fs
    compiled = fs.compile(model)
"""
import importlib
from typing import TYPE_CHECKING, Any

from firesteel import errors, support, transaction  # noqa: F401  support looks at torch's release before the rest needs it
from firesteel.artifacts import counters, set_logs, stage_times
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
from firesteel_autoload import autoload

if TYPE_CHECKING:
    from firesteel import testing
    from firesteel.autograd import aot
    from firesteel.autograd.engine import in_compiled_autograd_region
    from firesteel.public import (
        checkpoint_budget,
        compile,
        compiled_autograd,
        disable_compiled_autograd,
        install,
        list_backends,
        lookup_backend,
        memory_report,
        register_backend,
        reset,
        set_stance,
        uninstall,
    )
    from firesteel.shipping.load import load
    from firesteel.shipping.pack import package
    from firesteel.tools import debug
    from firesteel.tools.explain import explain
    from firesteel.tools.report import report

__version__ = "0.1.0"
autoload()      # FIRESTEEL_INSTALL=1 where torch was told not to call it

__all__ = [
    "allow_in_graph", "aot", "assume_constant_result", "checkpoint_budget", "compile", "compiled_autograd", "config", "counters", "debug", "disable",
    "disable_compiled_autograd", "errors", "explain", "forbid_in_graph", "graph_break", "in_compiled_autograd_region", "install",
    "is_compiling", "list_backends", "load", "lookup_backend", "mark_dynamic", "mark_static",
    "mark_unbacked", "maybe_mark_dynamic", "memory_report", "package", "register_backend", "report", "reset", "set_logs", "set_stance", "stage_times",
    "substitute_in_graph", "testing", "uninstall",
]


# names with a home of their own, which is loaded when they are used; a home that ends in a point is the thing itself
LATER = {"aot": "autograd.aot.", "debug": "tools.debug.", "explain": "tools.explain", "in_compiled_autograd_region": "autograd.engine",
         "load": "shipping.load", "package": "shipping.pack", "report": "tools.report", "testing": "testing."}


def __getattr__(name: str) -> Any:
    """The names of public.py, all at once; those of LATER each by itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = LATER.get(name, "public")
    home = transaction.loaded(importlib.import_module, f"{__name__}.{place.rstrip('.')}")
    names = [name] if name in LATER else [name for name in __all__ if name not in globals() and name not in LATER]
    globals().update({name: home if place.endswith(".") else getattr(home, name) for name in names})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
