"""fs.debug: where compiled code and eager differ, and the smallest program that reproduces it.

    print(fs.debug.compare(model)(x))           # equal, or the first operator, its source line and an element that differ
    fs.debug.minify(model, (x,), path="small.py")

Both run the program compiled with its graphs recorded, then each graph by itself, as a Case.  Functions that write to the world outside write
twice; modules are copied.
"""
from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import firesteel
from firesteel import api, dumps
from firesteel.backends import lookup_backend
from firesteel.errors import FiresteelError, Location, UserError
from firesteel.records import dataclass
from firesteel.tools.cases import Case, Failure, copied, first_difference, grad_of, location, outcome, tensor

__all__ = ["Comparison", "compare", "minify", "show", "tensor"]


class RecordingBackend:
    """A backend that keeps each graph with the inputs of its first call, as a Case."""

    def __init__(self, backend: str, dynamic: bool):
        self.backend, self.dynamic = backend, dynamic
        self.cases: list[Case] = []

    def __call__(self, gm: GraphModule, example_inputs: list) -> Callable:
        place = len(self.cases)
        self.cases.append(Case(gm, tuple(examples(example_inputs)), self.backend, self.dynamic))
        compiled = lookup_backend(self.backend)(gm, example_inputs)
        called = False

        def run(*inputs: Any) -> Any:
            nonlocal called
            if not called:
                called, self.cases[place] = True, Case(gm, tuple(copied(inputs)), self.backend, self.dynamic)
            return compiled(*inputs)
        return run


def examples(abstract: Sequence[Any]) -> list[Any]:
    """Random values in the place of abstract ones."""
    env: Any = dumps.environment(list(abstract))
    with torch.random.fork_rng(devices=[]):
        return [dumps.example_of(value, env) for value in abstract]


@dataclass(frozen=True)
class Difference:
    """The first operator of a graph at which compiled code fails; `failure` says how."""
    graph: int
    operator: str
    location: Location | None
    failure: Failure

    def __str__(self) -> str:
        where = f" at {self.location}\n    {self.location.source()}" if self.location is not None else ""
        what = f"{self.failure.what}: " if self.failure.what else ""
        return f"first in the {self.failure.phase} of {self.operator}, graph {self.graph}{where}\n  {what}{self.failure.text}"


@dataclass(frozen=True)
class Comparison:
    """What fs.debug.compare found; prints as a page."""
    graphs: int
    values: int                     # how many results, arguments and gradients were compared
    failure: Failure | None         # of the program as a whole
    differences: list[Difference]   # of its graphs by themselves

    @property
    def equal(self) -> bool:
        return self.failure is None and not self.differences

    def __str__(self) -> str:
        if self.equal:
            return f"equal to eager: {self.values} values, {self.graphs} graph(s)"
        whole = [f"differs from eager: {self.failure.what or self.failure.phase}: {self.failure.text}"] if self.failure else []
        if not self.differences:
            whole.append("each graph by itself computes what eager does: capture, or the Python around the graphs, differs")
        return "\n".join([*whole, *map(str, self.differences)])


def compare(fn: Callable, *, backend: str = "native", **settings: Any) -> Callable[..., Comparison]:
    """`compare(fn)(*args)` runs `fn` eagerly and compiled, forward and backward, and names the first operator, line and element that differ."""
    def compared(*args: Any, **kwargs: Any) -> Comparison:
        with torch.random.fork_rng(devices=[]):
            failure, cases, count = run_both(fn, args, kwargs, backend, settings)
            found = [difference_in(number, case) for number, case in enumerate(cases, 1)]
        return Comparison(len(cases), count, failure, [one for one in found if one is not None])
    return compared


def run_both(fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], backend: str, settings: Mapping[str, Any]) \
        -> tuple[Failure | None, list[Case], int]:
    """How the program as a whole fails; its graphs; how many values were compared."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    recorder = RecordingBackend(backend, bool(settings.get("dynamic")))
    twin = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
    wanted = outcome(*as_flat(twin, twin, leaves, spec))
    try:
        got = outcome(*as_flat(api.compile(fn, backend=recorder, **settings), fn, leaves, spec))
    except Exception as error:
        return Failure("forward", "", f"{type(error).__name__}: {error}", type(error.__cause__ or error).__name__), recorder.cases, len(wanted)
    return first_difference(got, wanted), recorder.cases, len(wanted)


def as_flat(run: Callable, owner: Callable, leaves: Sequence[Any], spec: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of copies of the arguments, and of the module's own tensors, by their names."""
    given = dict(zip((f"argument {n}" for n in range(len(leaves))), copied(leaves)))
    own = dict([*owner.named_parameters(), *owner.named_buffers()]) if isinstance(owner, torch.nn.Module) else {}

    def flat(*values: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(list(values[:len(leaves)]), spec)
        return run(*args, **kwargs)
    return flat, {**given, **own}


def difference_in(number: int, case: Case) -> Difference | None:
    try:
        found = case.first_failing()
    except FiresteelError:          # no file can hold it: the difference is reported for the program as a whole
        return None
    if found is None:
        return None
    count, failure = found
    node = case.calls[count - 1] if count else case.results()[0]
    name = dumps.name_of(node.target) if node.op == "call_function" else f"Tensor.{node.target}"
    return Difference(number, name, location(node), failure)


# ---------------------------------------------------------------- minify

def minify(fn: Callable, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, path: str | pathlib.Path = "minified.py",
           backend: str = "native", **settings: Any) -> pathlib.Path:
    """Writes the smallest program found that fails as `fn(*args, **kwargs)` does when it is compiled: `python FILE` reproduces the failure."""
    with torch.random.fork_rng(devices=[]):
        _, cases, _ = run_both(fn, args, kwargs or {}, backend, settings)
        failing = next((case for case in cases if case.failure() is not None), None)
        if failing is None:
            raise UserError("No graph of the program fails by itself: there is nothing to make smaller.",
                            hint="fs.debug.compare says whether the program as a whole does.")
        return write(shrunk(failing), pathlib.Path(path))


def shrunk(case: Case) -> Case:
    """Fewer calls, results and inputs, as long as it fails alike."""
    found = case.first_failing()
    assert found is not None
    failure = found[1]
    case = next((smaller for smaller in (case.upto(found[0]),) if failure.alike(smaller.failure())), case)
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(case):
            if failure.alike(candidate.failure()):
                case, smaller = candidate, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, the much smaller first: one result alone; calls whose values are given instead."""
    results = case.results()
    if len(results) > 1:
        yield from (case.rebuilt(case.calls, [node]) for node in results)
    values, size = case.values(), len(case.calls)
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, len(case.calls) - 1, size):
            given = [node for node in case.calls[start:start + size] if node not in results and isinstance(values[node], torch.Tensor)]
            if given:
                yield case.rebuilt(case.calls, results, {node: values[node] for node in given})
        if size == 1:
            return


def write(case: Case, path: pathlib.Path) -> pathlib.Path:
    """The case as a file: with random inputs if these reproduce the failure, else with the data."""
    failure = case.failure()
    torch.manual_seed(0)
    random = [tensor(v.dtype, v.shape, v.stride(), device=str(v.device), offset=int(v.storage_offset()), grad=grad_of(v))
              if isinstance(v, torch.Tensor) else v for v in case.inputs]
    same = failure is not None and failure.alike(Case(case.gm, tuple(random), case.backend, case.dynamic).failure())
    if not same:
        torch.save([v.detach() if isinstance(v, torch.Tensor) else v for v in case.inputs], path.with_suffix(".pt"))
    why = failure.text.splitlines()[0] if failure is not None else "It does not fail by itself."
    path.write_text(case.file(why, firesteel.__version__, data=not same), encoding="utf-8")
    return path


def show(program: Callable, inputs: Sequence[Any], *, backend: str = "native", dynamic: bool = False, minify: bool = False) -> int:
    """What a written file does: prints the comparison, and with `minify` writes a smaller file.  1 where compiled code fails."""
    comparison = compare(program, backend=backend, dynamic=dynamic or None)(*inputs)
    print(comparison)
    if minify and not comparison.equal:
        print(f"a smaller program is in {_minify(program, inputs, backend=backend, dynamic=dynamic or None)}")
    return 0 if comparison.equal else 1


_minify = minify
