"""Patterns of library code: __getattribute__, instance dicts, signatures, subclasses of containers; each a reduced case."""
from __future__ import annotations

import inspect
from typing import Any

import torch
from harness import capture, check


class Settings:
    """Counts no reads: the program's own __getattribute__ runs only where the program reads."""

    aliases = {"width": "hidden"}

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def __getattribute__(self, name: str) -> Any:
        extra = super().__getattribute__("__dict__").get("_extra")
        if extra is not None and name in extra:
            return extra[name]
        return super().__getattribute__(super().__getattribute__("aliases").get(name, name))


def test_own_getattribute_is_followed_and_guarded() -> None:
    def fn(x: torch.Tensor, settings: Settings) -> torch.Tensor:
        return x * settings.width + getattr(settings, "bias", 5)

    compiled, backend = capture(fn, fullgraph=True)
    x, settings = torch.ones(3), Settings(hidden=2)
    assert torch.equal(compiled(x, settings), x * 2 + 5)
    settings.bias = 7
    assert torch.equal(compiled(x, settings), x * 2 + 7)
    settings._extra = {"width": 11}
    assert torch.equal(compiled(x, settings), x * 11 + 7)
    assert len(backend.graphs) == 3


def test_instance_dict_is_read_and_written() -> None:
    class Box:
        pass

    def fn(x: torch.Tensor, box: Box) -> tuple:
        box.__dict__["a"] = x + 1
        names = sorted(vars(box))
        return box.a, names, "b" in vars(box), vars(box).get("missing", 3)

    box = Box()
    box.b = 4
    check(fn, torch.ones(2), box)


def test_signature_of_functions_and_methods() -> None:
    class Model(torch.nn.Module):
        def chunk(self, a: Any, b: Any = 2) -> Any:
            return a * b

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chunk(x) + len(inspect.signature(self.chunk).parameters)

    check(Model(), torch.ones(2), fullgraph=True)
