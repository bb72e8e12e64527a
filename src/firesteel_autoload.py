"""FIRESTEEL_INSTALL=1 without a change of code: torch calls `autoload` when it is imported (its entry-point group "torch.backends"); where it is
told not to (TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import firesteel` does.

torch is not whole yet at that moment, so the names of PATCHED get stand-ins that install firesteel at their first use.  Nothing else is imported
here: every process that imports torch beside an installed firesteel comes by.
"""
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# boundary: recognises torch.compile and torch._dynamo, where ours is put in place: never called
# what fs.install() replaces, below torch; firesteel/dropin.py has the replacements
PATCHED = ("compile", "compiler.compile", "compiler.reset", "compiler.set_stance", "compiler.disable", "compiler.allow_in_graph",
           "compiler.assume_constant_result", "compiler.substitute_in_graph", "compiler.list_backends", "compiler.set_default_backend",
           "compiler.get_default_backend", "compiler.cudagraph_mark_step_begin", "compiler.set_enable_guard_collectives",
           "compiler.save_cache_artifacts", "compiler.load_cache_artifacts")
PEER = "torch._dynamo"
# of the peer itself, once the program has imported it
PATCHED_LATER = tuple(f"_dynamo.{name}" for name in ("optimize", "optimize_assert", "reset", "set_stance", "explain", "substitute_in_graph"))


def autoload() -> None:
    if os.environ.get("FIRESTEEL_INSTALL", "").strip().lower() not in ("1", "true", "yes", "on"):
        return
    import torch

    if hasattr(torch.compile, "__firesteel_original__"):
        return
    put_stand_ins(torch, PATCHED)
    when_imported.watch(lambda: put_stand_ins(torch, PATCHED_LATER))


def put_stand_ins(torch: Any, names: tuple[str, ...]) -> None:
    for name in names:
        owner, attribute = place(torch, name)
        setattr(owner, attribute, stand_in(torch, name, getattr(owner, attribute, None)))


def place(torch: Any, name: str) -> tuple[Any, str]:
    """The module, and the attribute of it, behind a row of PATCHED or of PATCHED_LATER."""
    parent, _, attribute = name.rpartition(".")
    if parent == "compiler":
        import torch.compiler
    return (sys.modules[f"torch.{parent}"] if parent else torch), attribute


def original_of(found: Any) -> Any:
    """What a stand-in stands for; anything else is its own."""
    return getattr(found, "__firesteel_original__", found)


def stand_in(torch: Any, name: str, original: Any) -> Any:
    @functools.wraps(original if original is not None else autoload)
    def installs(*args: Any, **kwargs: Any) -> Any:
        import firesteel
        firesteel.install()
        owner, attribute = place(torch, name)
        return getattr(owner, attribute)(*args, **kwargs)
    installs.__firesteel_original__ = original      # type: ignore[attr-defined]  # what fs.uninstall() puts back
    return installs


class WhenImported:
    """An entry of sys.meta_path: calls a function when the program has imported the peer, which nothing here does."""

    def __init__(self) -> None:
        self.then: Callable[[], None] | None = None

    def watch(self, then: Callable[[], None] | None) -> None:
        """Calls it now, if the peer is there already; None: nothing more is to be done."""
        self.then = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        if then is not None and PEER in sys.modules:
            then()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == PEER and self.then is not None else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.then is not None:
                self.then()
        spec.loader.exec_module = exec_module       # type: ignore[method-assign]
        return spec


when_imported = WhenImported()
