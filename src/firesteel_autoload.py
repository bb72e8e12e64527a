"""FIRESTEEL_INSTALL=1 without a change of code: torch calls `autoload` when it is imported (its entry-point group "torch.backends").

torch is not whole yet at that moment, so the names of PATCHED get stand-ins that install firesteel at their first use.  Nothing else is imported
here: every process that imports torch beside an installed firesteel comes by.
"""
from __future__ import annotations

import os
from typing import Any

# what fs.install() replaces, below torch; firesteel/dropin.py has the replacements
PATCHED = ("compile", "compiler.compile", "compiler.reset", "compiler.set_stance", "compiler.disable", "compiler.allow_in_graph",
           "compiler.assume_constant_result", "compiler.substitute_in_graph", "compiler.list_backends", "compiler.set_default_backend",
           "compiler.get_default_backend", "compiler.cudagraph_mark_step_begin", "compiler.set_enable_guard_collectives")


def autoload() -> None:
    if os.environ.get("FIRESTEEL_INSTALL", "").strip().lower() not in ("1", "true", "yes", "on"):
        return
    import torch

    for name in PATCHED:
        owner, attribute = place(torch, name)
        setattr(owner, attribute, stand_in(torch, name, getattr(owner, attribute, None)))


def place(torch: Any, name: str) -> tuple[Any, str]:
    """The module, and the attribute of it, behind a row of PATCHED."""
    parent, _, attribute = name.rpartition(".")
    if parent:
        import torch.compiler
    return (torch.compiler if parent else torch), attribute


def stand_in(torch: Any, name: str, original: Any) -> Any:
    def installs(*args: Any, **kwargs: Any) -> Any:
        import firesteel
        firesteel.install()
        owner, attribute = place(torch, name)
        return getattr(owner, attribute)(*args, **kwargs)
    installs.__firesteel_original__ = original      # type: ignore[attr-defined]  # what fs.uninstall() puts back
    return installs
