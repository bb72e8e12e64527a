"""What the tests of the machine share: `make_test` (the body is the test) and a counting eager backend."""
from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function
from torch.fx import GraphModule

from firesteel.artifacts import breaks
from firesteel.capture.entry import compile_function
from firesteel.capture.source import Item, OwnDict, Source
from firesteel.graph.abstract import AbstractWorld


@dataclass(eq=False)
class Counting:
    """An eager backend that keeps the graphs it was given."""
    graphs: list[GraphModule] = field(default_factory=list)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    @property
    def ops(self) -> int:
        return sum(n.op in ("call_function", "call_method") for g in self.graphs for n in g.graph.nodes)


class Marking:
    """An eager backend whose graphs can be told in a profile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            with record_function("graph"):
                return gm.forward(*args)
        return run


def outside(run: Callable[[], Any]) -> list[str]:
    """Operators of torch that `run` calls outside of graphs."""
    with profile() as seen:
        run()

    def in_graph(event: Any) -> bool:
        return event is not None and (event.name == "graph" or in_graph(event.cpu_parent))
    return [event.name for event in seen.function_events if event.name.startswith("aten::") and not in_graph(event)]


def capture(fn: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], Counting]:
    backend = Counting()
    return compile_function(fn, backend=backend, make_world=AbstractWorld, **settings), backend


def same(a: Any, b: Any) -> None:
    """Equal values, and of the same kind all the way down."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert a.requires_grad == b.requires_grad
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif hasattr(a, "__dict__") and not callable(a):
        same(vars(a), vars(b))
    elif not callable(a):
        assert a == b or a != a, (a, b)


def check(fn: Callable[..., Any], *args: Any, graphs: int | None = 1, ops: int | None = None, calls: int = 2, **settings: Any) -> Counting:
    """Eager and captured give the same, twice; the number of graphs is as said."""
    breaks.clear()
    compiled, backend = capture(fn, **settings)
    for _ in range(calls):
        theirs, ours = copy.deepcopy(args), copy.deepcopy(args)
        torch.manual_seed(0)
        expected = fn(*theirs)
        torch.manual_seed(0)
        same(compiled(*ours), expected)
        same(list(ours), list(theirs))
    if graphs is not None:
        assert len(backend.graphs) == graphs, f"{len(backend.graphs)} graphs; {[(b.reason, b.location) for b in breaks]}"
    if ops is not None:
        assert backend.ops == ops, f"{backend.ops} ops"
    return backend


def make_test(fn: Callable[..., Any] | None = None, *, graphs: int | None = 1, ops: int | None = None, **settings: Any) -> Any:
    """Decorator: the function is called with random tensors for its parameters, eagerly and captured, and compared."""
    if fn is None:
        return functools.partial(make_test, graphs=graphs, ops=ops, **settings)

    def test() -> None:
        torch.manual_seed(1)
        args = [torch.randn(4, 6) for _ in inspect.signature(fn).parameters]
        check(fn, *args, graphs=graphs, ops=ops, **settings)

    test.__name__ = test.__qualname__ = fn.__name__
    return test


def member(source: Source, *names: str, table: str = "_parameters") -> Item:
    """The source of a parameter, or of an entry of another table, of a module: the last name; those before are children."""
    for child in names[:-1]:
        source = member(source, child, table="_modules")
    return OwnDict(source).item(table).item(names[-1])
