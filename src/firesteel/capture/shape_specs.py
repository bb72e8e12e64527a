"""Shape specifications (`shapes_spec=` of torch.compile): which sizes and ints of the arguments are symbols, said by the caller.

    shapes_spec={"x": TensorSpec([ShapeVar("batch", max=64), None]), "n": IntVar()}

A variable is a wish as fs.mark_dynamic is, with its bounds; an int is a size that must be that number; all that is not named is a constant.  A size
given as an expression of variables is a symbol whose relation to them is guarded where the program uses it.  Specifications are read as plain
data (their `to_jsonable`): classes of torch are not asked for.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from firesteel.capture.source import Attr, Item, Local, Source
from firesteel.errors import UserError

INSIDE = {"DictSpec": (Item, "entries"), "SeqSpec": (Item, "entries"), "ObjectSpec": (Attr, "fields")}
VARIADIC: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*args", inspect.Parameter.VAR_KEYWORD: "**kwargs"}
VARIABLES = ("IntVar", "ShapeVar")


def plain(spec: Any) -> Any:
    """A specification as dicts, lists and ints."""
    if isinstance(spec, Mapping):
        return {key: plain(value) for key, value in spec.items()}
    return list(map(plain, spec)) if isinstance(spec, (list, tuple)) else spec.to_jsonable() if hasattr(spec, "to_jsonable") else spec


def parameters(given: Any) -> dict[str, Any]:
    """Name of a parameter of the compiled callable -> its specification."""
    spec = plain(given)
    while isinstance(spec, dict) and isinstance(spec.get("type"), str):
        if spec.get("assumptions"):
            raise UserError("Assumptions about sizes are not read.", hint="Leave them out: what the program asks about sizes is guarded.")
        spec = spec.get("params") or {}
    if not isinstance(spec, dict):
        raise UserError(f"shapes_spec={given!r} is no specification.", hint="Give a dict of parameter names, a ParamsSpec or a ShapesSpec.")
    return spec


class ShapeSpec:
    """The specification of one compiled callable.  Compared by identity."""

    def __init__(self, given: Any, fn: Callable[..., Any]):
        self.params = parameters(given)
        module: Any = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        self.leads = int(isinstance(fn, torch.nn.Module) or getattr(fn, "__func__", None) is torch.nn.Module._call_impl)
        known = inspect.signature(module.forward if self.leads else fn).parameters.values()
        self.names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {VARIADIC.get(p.kind, p.name) for p in known}
        if unknown := [name for name in self.params if name not in named]:
            raise UserError(f"shapes_spec names {', '.join(unknown)}, which the callable does not take.", hint=f"It takes {', '.join(self.names)}.")

    def of_call(self, arguments: list[str], positional: int, keywords: tuple[str, ...]) -> dict[str, Any]:
        """Argument of the region -> its specification.  A module is the first argument of its call."""
        by_place = [self.params.get(name) for name in self.names] + self.params.get("*args", [])
        more = self.params.get("**kwargs", {})
        return {**dict(zip(arguments[self.leads:positional], by_place)), **{name: self.params.get(name, more.get(name)) for name in keywords}}


def at(specs: Mapping[str, Any], source: Source) -> Any:
    """The specification of what is read there; None for none."""
    if isinstance(source, Local):
        return specs.get(source.key)
    outer: Any = at(specs, source.base) if isinstance(source, (Item, Attr)) else None
    kind, name = INSIDE.get(outer["type"], (Local, "")) if isinstance(outer, dict) else (Local, "")
    if not isinstance(source, kind):
        return None
    inside: Any = outer[name]
    return inside.get(str(source.key)) if isinstance(inside, dict) else inside[source.key] if source.key < len(inside) else None


def size_wishes(spec: Any, tensor: torch.Tensor, source: Source) -> dict[int, tuple[str, int | None, int | None]]:
    """Dimension -> (wish, least, greatest), as marks.dimension_wishes."""
    if not isinstance(spec, dict) or spec["type"] != "TensorSpec":
        return {}
    dims = spec["dims"]
    if len(dims) != tensor.dim() or any(type(d) is int and d != n for d, n in zip(dims, tensor.shape)):
        raise UserError(f"{source.name} has the shape {tuple(tensor.shape)}, which is not what shapes_spec says.", hint=f"It says {dims}.")
    ranges = {n: ("dynamic", d["min"] or None, d["max"]) for n, d in enumerate(dims) if isinstance(d, dict)}
    return {**{n: ("maybe", None, None) for n, d in enumerate(dims) if isinstance(d, torch.SymInt)}, **ranges}


def is_variable(spec: Any) -> bool:
    return isinstance(spec, dict) and spec["type"] in VARIABLES
