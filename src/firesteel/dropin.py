"""Taking torch.compile's place: fs.install() makes torch.compile, and torch.compiler with it, firesteel for the whole process, libraries included;
`peer_backend` is what torch.compile(model, backend="firesteel") finds.

    fs.install();  torch.compile(model);  model.compile();  fs.uninstall()

All keywords of torch.compile are taken (options.py).  "inductor" and no backend at all mean native; a backend that was registered for the peer is
called with our graphs.  Settings that the program changes in the peer's modules of settings are followed, or named once where there is no
counterpart; they are looked at before each compilation.  Those modules are never imported here, only found where the program has.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler

from firesteel import api, backends
from firesteel.capture import entry, marks
from firesteel.errors import UserError
from firesteel.options import follow, say_once
from firesteel.table import Table
from firesteel_autoload import PATCHED, place

REPLACEMENTS: Table[Callable] = Table("replacement of a function of torch", "dropin.py")
_originals: dict[str, Any] = {}         # while installed
_followed: dict[str, Any] = {}          # settings taken over from the peer -> ours from before
_default: Any = None                    # backend where none is named

NATIVE = ("inductor", "firesteel", None)        # backends of the peer that mean our own code generator


def install() -> None:
    """torch.compile, nn.Module.compile and torch.compiler go to firesteel from now on; a second call does nothing."""
    if _originals:
        return
    for name in PATCHED:
        owner, attribute = place(torch, name)
        found = getattr(owner, attribute, None)
        _originals[name] = getattr(found, "__firesteel_original__", found)
        setattr(owner, attribute, REPLACEMENTS[name])
    entry.BEFORE_COMPILING.append(_follow_settings)


def uninstall() -> None:
    """torch's own functions again.  What was compiled stays compiled."""
    global _default
    if not _originals:
        return
    entry.BEFORE_COMPILING.remove(_follow_settings)
    for name, original in _originals.items():
        owner, attribute = place(torch, name)
        if original is not None:
            setattr(owner, attribute, original)
        else:
            delattr(owner, attribute)
    _originals.clear()
    _default = None
    follow(_followed, installed=False)


def is_installed() -> bool:
    return bool(_originals)


def _follow_settings() -> None:
    follow(_followed, installed=True)


# ---------------------------------------------------------------- the replacements

@REPLACEMENTS.row("compile", "compiler.compile")
def compile(model: Any = None, *, backend: Any = None, disable: bool = False, **keywords: Any) -> Any:
    """torch.compile, done by firesteel."""
    return api.compile(model, backend=_backend(backend), disable=disable or _is_turned_off(), **keywords)


def _is_turned_off() -> bool:
    """Is torch.compile to leave functions as they are, by the environment or the peer's settings?"""
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1" or bool(getattr(sys.modules.get("torch._dynamo.config"), "disable", False))


def _backend(wanted: Any) -> Any:
    wanted = _default if wanted is None else wanted
    if wanted in NATIVE:
        return "native"
    if callable(wanted) or wanted in backends.list_backends():
        return wanted
    return _of_the_peer(wanted)


def _of_the_peer(name: str) -> Callable:
    """A backend that a package registered for the peer by name."""
    from importlib.metadata import entry_points
    found = {e.name: e for e in entry_points(group="torch_dynamo_backends")}
    registry = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {})
    if name in found:
        return found[name].load()
    if registry.get(name) is not None:
        return registry[name]
    raise UserError(f"There is no backend {name!r}.",
                    hint=f"Use 'inductor' (native here), a callable, or one of {', '.join(backends.list_backends())}.")


@REPLACEMENTS.row("compiler.disable")
def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    return marks.disable(fn, recursive=recursive, reason=reason)


@REPLACEMENTS.row("compiler.substitute_in_graph")
def substitute_in_graph(original_fn: Any, *, can_constant_fold_through: bool = False, skip_signature_check: bool = False) -> Any:
    """Both keywords choose how the peer looks at the replacement; ours is called as any function is."""
    return marks.substitute_in_graph(original_fn)


@REPLACEMENTS.row("compiler.list_backends")
def list_backends(exclude_tags: Any = ()) -> list[str]:
    """Ours have no tags by which one could be left out."""
    return sorted({*backends.list_backends(), "inductor"})


@REPLACEMENTS.row("compiler.set_default_backend")
def set_default_backend(backend: Any) -> None:
    global _default
    if backend is not None:
        _backend(backend)       # an error now rather than at the first compilation
    _default = backend


@REPLACEMENTS.row("compiler.get_default_backend")
def get_default_backend() -> Any:
    return "inductor" if _default is None else _default


@REPLACEMENTS.row("compiler.cudagraph_mark_step_begin")
def cudagraph_mark_step_begin() -> None:
    """A step begins: nothing to do, since results never live in memory that a later step takes."""


@REPLACEMENTS.row("compiler.set_enable_guard_collectives")
def set_enable_guard_collectives(enabled: bool) -> bool:
    """Returns the setting from before."""
    say_once("setting", "guard collectives", "ranks compare their collectives when they compile (fs.config.rank_wait)" if enabled else "")
    return False


_ours: dict[str, Callable] = {"compiler.reset": api.reset, "compiler.set_stance": api.set_stance, "compiler.allow_in_graph": marks.allow_in_graph,
                              "compiler.assume_constant_result": marks.assume_constant_result}
REPLACEMENTS.rows(_ours)


# ---------------------------------------------------------------- torch.compile(model, backend="firesteel")

def peer_backend(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
    """A graph of the peer's capture, differentiated and compiled by us: its code is captured as any module's is, at the first call.  The sizes
    that the peer made symbolic come as numbers, which are symbols here too."""
    symbolic = any(isinstance(value, (int, torch.SymInt)) for value in example_inputs)
    plain = torch.fx.GraphModule(gm, gm.graph)      # the peer's write their code at the first call
    return api.compile(plain, dynamic=True if symbolic else None)
