"""Taking torch.compile's place: fs.install() makes torch.compile, and torch.compiler with it, firesteel for the whole process, libraries included;
`peer_backend` is what torch.compile(model, backend="firesteel") finds.

    fs.install();  torch.compile(model);  model.compile();  fs.uninstall()

All keywords of torch.compile are taken (options.py).  "inductor" and no backend at all mean native; a backend that was registered for the peer is
called with our graphs.  Settings that the program changes in the peer's modules of settings are followed, or named once where there is no
counterpart; they are looked at before each compilation.  Those modules are never imported here, only found where the program has.
"""
from __future__ import annotations

import collections
import functools
import importlib.metadata
import inspect
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler
from torch.compiler._cache import CacheInfo

from firesteel import api, backends
from firesteel.artifacts import counters
from firesteel.capture import entry, marks
from firesteel.config import config
from firesteel.errors import FiresteelError, PackageError, UserError
from firesteel.homes import LaterModule
from firesteel.options import UNREAD, follow, say_once, settings_of_calls
from firesteel.table import Table
from firesteel_autoload import PATCHED, PATCHED_LATER, PEER, original_of, place, when_imported

if TYPE_CHECKING:
    from firesteel.shipping import caches
else:
    caches = LaterModule("firesteel.shipping.caches")

logger = logging.getLogger("firesteel")

REPLACEMENTS: Table[Callable] = Table("replacement of a function of torch", "dropin.py")
_originals: dict[str, Any] = {}         # while installed
_torchs: dict[str, Any] = {}            # what was there before the first time
_followed: dict[str, Any] = {}          # settings taken over from the peer -> ours from before
_default: Any = None                    # backend where none is named

# boundary: recognises torch.compile and shows its signature as ours
NATIVE = ("inductor", "firesteel")        # backends of the peer that mean our own code generator


def install() -> None:
    """torch.compile, nn.Module.compile, torch.compiler and what programs call of torch._dynamo go to firesteel from now on; a second call does
    nothing."""
    if _originals:
        return
    _replace(PATCHED)
    when_imported.watch(lambda: _replace(PATCHED_LATER))
    entry.BEFORE_COMPILING.append(_follow_settings)
    entry.AFTER_COMPILING.append(_tell_counters)


def _replace(names: tuple[str, ...]) -> None:
    for name in names:
        owner, attribute = place(torch, name)
        found = getattr(owner, attribute, None)
        _originals[name] = original_of(found)
        _torchs.setdefault(name, _originals[name])
        setattr(owner, attribute, REPLACEMENTS[name])


def uninstall() -> None:
    """torch's own functions again.  What was compiled stays compiled; what another library has put around ours stays, and leads to torch's."""
    global _default
    if _originals:
        entry.BEFORE_COMPILING.remove(_follow_settings)
        entry.AFTER_COMPILING.remove(_tell_counters)
    for name in (*PATCHED, *(PATCHED_LATER if PEER in sys.modules else ())):
        owner, attribute = place(torch, name)
        found = getattr(owner, attribute, None)
        original = _originals.get(name) if found is REPLACEMENTS[name] else original_of(found)
        if original is not None:
            setattr(owner, attribute, original)
        elif found is not None:
            delattr(owner, attribute)
    when_imported.watch(None)
    _originals.clear()
    _default = None
    follow(_followed, installed=False)


def is_installed() -> bool:
    return bool(_originals)


def _follow_settings() -> None:
    if not torch.compiler.is_exporting():       # torch.export changes settings of its own while it traces
        follow(_followed, installed=True)


# ---------------------------------------------------------------- the replacements

@REPLACEMENTS.row("compile", "compiler.compile")
def compile(model: Any = None, *, backend: Any = None, disable: bool = False, mode: str | None = None, options: Any = None, **keywords: Any) -> Any:
    """torch.compile, done by firesteel.  Whoever keeps it beyond fs.uninstall() has torch's again."""
    if not _originals:
        return _torchs["compile"](model, backend=backend, disable=disable, mode=mode, options=options, **keywords)
    chosen, asked = _backend(backend), settings_of_calls()
    _follow_settings()
    if chosen == "native" and mode is None and not options:
        options = asked or options
    return api.compile(model, backend=chosen, disable=disable or _is_turned_off(), mode=mode, options=options, **keywords)


compile.__signature__ = inspect.signature(original_of(torch.compile))       # type: ignore[attr-defined]  # libraries ask which keywords there are


def _is_turned_off() -> bool:
    """Is torch.compile to leave functions as they are, by the environment or the peer's settings?"""
    said = any(os.environ.get(name) == "1" for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"))
    return said or bool(getattr(sys.modules.get("torch._dynamo.config"), "disable", False))


def _backend(wanted: Any) -> Any:
    wanted = _default if wanted is None else wanted
    if wanted is None or wanted in NATIVE:
        return "native"
    if not isinstance(wanted, str) or wanted in backends.list_backends():
        return wanted
    return _of_the_peer(wanted)


def _of_the_peer(name: str) -> Callable:
    """A backend that a package registered for the peer by name."""
    if name not in (found := _all_of_the_peer()):
        known = ", ".join(list_backends())
        raise UserError(f"There is no backend {name!r}.", hint=f"Use a callable, or one of {known}; import first what registers another.")
    made = found[name]
    return made.load() if isinstance(made, importlib.metadata.EntryPoint) else made


def _all_of_the_peer() -> dict[str, Any]:
    """Name -> a function, or the entry point that loads it."""
    registry = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_COMPILER_FNS", {})
    declared = {e.name: e for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    return declared | {name: fn for name, fn in registry.items() if fn is not None}


@REPLACEMENTS.row("compiler.disable")
def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    return marks.disable(fn, recursive=recursive, reason=reason)


@REPLACEMENTS.row("compiler.substitute_in_graph", "_dynamo.substitute_in_graph")
def substitute_in_graph(original_fn: Any, *, can_constant_fold_through: bool = False, skip_signature_check: bool = False,
                        is_embedded_type: bool = False) -> Any:
    """The keywords choose how the peer looks at the replacement; ours is called as any function is."""
    return marks.substitute_in_graph(original_fn)


@REPLACEMENTS.row("compiler.list_backends")
def list_backends(exclude_tags: Any = ("debug", "experimental")) -> list[str]:
    """With those that were registered for the peer; ours have no tags by which one could be left out."""
    left_out = set(exclude_tags or ())
    theirs = [name for name, made in _all_of_the_peer().items() if not left_out.intersection(getattr(made, "_tags", ()))]
    return sorted({*backends.list_backends(), *theirs, "inductor"})


@REPLACEMENTS.row("compiler.set_default_backend")
def set_default_backend(backend: Any) -> None:
    global _default
    if backend is not None:
        _backend(backend)       # an error now rather than at the first compilation
    _default = backend


@REPLACEMENTS.row("compiler.get_default_backend")
def get_default_backend() -> Any:
    return "inductor" if _default is None else _default


@REPLACEMENTS.row("compiler.set_stance", "_dynamo.set_stance")
def set_stance(stance: str = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: Any = None) -> Any:
    forced = None if force_backend is None else _backend(force_backend)
    return api.set_stance(stance, skip_guard_eval_unsafe=skip_guard_eval_unsafe, force_backend=forced)


@REPLACEMENTS.row("compiler.cudagraph_mark_step_begin")
def cudagraph_mark_step_begin() -> None:
    """A step begins: nothing to do, since results never live in memory that a later step takes."""


@REPLACEMENTS.row("compiler.set_enable_guard_collectives")
def set_enable_guard_collectives(enabled: bool) -> bool:
    """Returns the setting from before."""
    say_once("setting", "guard collectives", "ranks compare their collectives when they compile (fs.config.rank_wait)" if enabled else "")
    return False


@REPLACEMENTS.row("compiler.reset", "_dynamo.reset")
def reset() -> None:
    """Forgets what was compiled, by the peer too where it is there."""
    _told.clear()
    api.reset()
    if (theirs := _torchs.get("_dynamo.reset")) is not None:
        theirs()


@REPLACEMENTS.row("compiler.save_cache_artifacts")
def save_cache_artifacts() -> tuple[bytes, Any] | None:
    """The cache on disk, as `firesteel cache export` writes it; None where there is nothing in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "cache")
        return (path.read_bytes(), _cache_info(path)) if config.cache_dir and caches.write_cache(path) else None


@REPLACEMENTS.row("compiler.load_cache_artifacts")
def load_cache_artifacts(serialized_artifacts: bytes) -> Any:
    """What was saved so goes into the cache on disk; None, with a warning, where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "cache")
        path.write_bytes(serialized_artifacts)
        try:
            caches.read_cache(path)
        except FiresteelError as error:
            why = "firesteel has not saved it" if isinstance(error, PackageError) else error
            logger.warning("what was given to load_cache_artifacts is not used: %s", why)
            return None
        return _cache_info(path)


def _cache_info(path: pathlib.Path) -> CacheInfo:
    info = CacheInfo()
    info.artifacts["firesteel"] += caches.names_in(path)
    return info


# ---------------------------------------------------------------- the peer's own functions

UNUSED = ("guard_export_fn", "guard_fail_fn", "guard_filter_fn", "package", "rebuild_ctx")      # keywords that look into the peer's guards


@REPLACEMENTS.row("_dynamo.optimize")
def optimize(backend: Any = "inductor", *, nopython: bool = False, error_on_graph_break: bool | None = None, **keywords: Any) -> Callable:
    """torch._dynamo.optimize(backend)(fn), the older spelling of torch.compile."""
    for name in UNUSED:
        say_once("option", name, UNREAD if keywords.pop(name, None) is not None else "")
    return functools.partial(compile, backend=backend, fullgraph=nopython or bool(error_on_graph_break), **keywords)


@REPLACEMENTS.row("_dynamo.optimize_assert")
def optimize_assert(backend: Any, **keywords: Any) -> Callable:
    return optimize(backend, nopython=True, **keywords)


@REPLACEMENTS.row("_dynamo.explain")
def explain(f: Callable, *args: Any, **kwargs: Any) -> Any:
    from firesteel.tools.explain import explain as ours  # with what writes pages
    return ours(f)(*args, **kwargs) if args or kwargs else ours(f)


TOLD = ("stats", "frames", "graph_break")       # counters that mean the same there
_told: dict[str, collections.Counter] = {}      # what they had when they were told


def _tell_counters() -> None:
    """Adds what was counted since to the peer's counters, which tests of programs read."""
    theirs = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if theirs is not None:
        for name in TOLD:
            before, now = _told.get(name, collections.Counter()), counters[name].copy()
            theirs[name].update(now if before - now else now - before)      # less than before: ours were reset
            _told[name] = now


_ours: dict[str, Callable] = {"compiler.allow_in_graph": marks.allow_in_graph,
                              "compiler.assume_constant_result": marks.assume_constant_result}
REPLACEMENTS.rows(_ours)


# ---------------------------------------------------------------- torch.compile(model, backend="firesteel")

def peer_backend(gm: torch.fx.GraphModule, example_inputs: list, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Callable:
    """A graph of the peer's capture, differentiated and compiled by us: its code is captured as any module's is, at the first call.  The sizes
    that the peer made symbolic come as numbers, which are symbols here too."""
    symbolic = any(isinstance(value, (int, torch.SymInt)) for value in example_inputs)
    plain = torch.fx.GraphModule(gm, gm.graph)      # the peer's write their code at the first call
    return api.compile(plain, dynamic=True if symbolic else None, mode=mode, options=options)
