"""Views, in-place writes and shared storage: the rules, and the plan that carries them out around a functional graph.

A compiled graph is functional: it reads its inputs and returns fresh tensors.  What eager lets a caller observe beyond
values is restored around it, by these rules.

 1. *An input that comes back is the same object.*  It is returned as the caller passed it, after rule 7.
 2. *A view of an input is replayed from the caller's tensor*, by the same view operators, outside of our autograd
    function.  So `_base`, `grad_fn`, the version counter and later in-place writes are eager's.  Each tensor on the way is made once:
    two results that are views of one detached tensor are so again.
 3. *Outputs that share the storage of an intermediate* are made from one tensor: the graph returns the intermediate (as a
    hidden output where the user does not get it), and the views of it are replayed as in rule 2.
 4. *A single view of an intermediate* follows rule 3 too: that it is a view can be seen, and one that an autograd function
    returned could not be written in place.
 5. *One tensor returned twice is one object twice.*
 6. *A view is replayed with the history it has in eager.*  Each operator on the way runs under the grad mode of its own time, so
    that a view taken under no_grad has none (and still claims to require grad: so does eager's), and one behind a detach is a view of a
    detached tensor.  A tensor that is no view, but shares memory and was written with a history of its own (`x.detach().copy_(w)`), then
    receives the graph's value by a recorded copy.  A view that a custom function returned is made inside of a function of that name, whose
    gradient goes to the graph's value.
 7. *A mutated input receives its final value by `copy_`*, once, after the graph ran, so that the caller's tensor has the new
    data.  Where autograd saw the write (its grad_fn changed), the copy is recorded, and gradients flow
    into the graph's output; else it is made with recording off; where even the version did not change (a write through
    `.data`), the copy goes through `.data`.  Versions, of fresh outputs too, are then raised to what eager's would be.
 8. *Order*: the graph, then the writes of rule 7, then the views of rules 2 and 3, which thus see the written data.  A view that such a write made
    invalid, by eager's rules, is made before it, and so is invalid too.
 9. *Inputs that share storage with a mutated input* cannot be distinguished in a functional graph.  When the storages of a
    call overlap so, the captured program itself is run, by eager; `counters["aot"]["overlapping_inputs"]` says how often.
10. *A mutated input whose old value the backward reads* is copied in the forward (partition.py); eager would refuse, or had
    a copy too.
11. *One tensor passed twice* is one input of the graph (aot.py removes the second).
12. *A tensor subclass that wraps tensors* follows rules 1, 2, 5 and 7 as a whole; the graph has its parts.  Where one comes back that shares
    memory otherwise (with another output, only in part, or as one of several views that one call gave), the captured program itself is run;
    `counters["aot"]["aliasing_subclasses"]` counts it, and `masked_results` DTensors that are still to be masked.
13. *What changes an input otherwise* (its sizes and strides in place, `set_`, `resize_`, `requires_grad_`, `detach_`) makes the captured
    program run in eager, counted as `reshaped_inputs` and `requires_grad_changes`; so do results that share memory without being views
    (`set_` to an input's storage: `unfollowed_aliases`) and leaves that the program makes (`leaves_made_inside`).
14. *A result whose history the program has used up* (by a backward of its own, or by overwriting what that needs) requires grad as in eager;
    a backward from it raises what eager raises, one that asks for an input that it depends on too.

`AliasPlan` is the data for this; `AliasPlan.assemble` builds the user's results.  Example, for f(x) = (x.add_(1), x[0], y := x * 2, y.T):

    writes  = [Write(input=0, value=0, how="grad")]
    results = [InputItself(0), Replay(0), Fresh(1), Replay(1)]        # the views are x[0] and y.T, made of x and y
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from firesteel.graph.wrappers import is_wrapper, parts_of
from firesteel.native_tensors import apart
from firesteel.records import dataclass

# ---------------------------------------------------------------- kinds of results


@dataclass(frozen=True)
class Fresh:
    """A value that the graph returns, by its place among the forward's outputs."""
    value: int

    def text(self) -> str:
        return f"v[{self.value}]"


@dataclass(frozen=True)
class InputItself:
    """The caller's own tensor (rule 1)."""
    index: int

    def text(self) -> str:
        return f"i[{self.index}]"


@dataclass(frozen=True)
class Replay:
    """A view replayed (rules 2 to 4), by its place among the replayed ones."""
    index: int

    def text(self) -> str:
        return f"r[{self.index}]"


@dataclass(frozen=True)
class Constant:
    """A result that is no tensor: None, a number, a string."""
    value: Any

    def text(self) -> str:
        return repr(self.value)


Result = Fresh | InputItself | Replay | Constant


@dataclass(frozen=True)
class Write:
    """Rule 7: input `input` receives forward output `value`; `how` is "grad", "no_grad" or "data"."""
    input: int
    value: int
    how: str


# ---------------------------------------------------------------- replayed views

View = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]        # (what it is made of, the forward's values) -> the view


@dataclass(frozen=True)
class At:
    """An argument that is read from the forward's values at run time."""
    value: int

    def __str__(self) -> str:
        return f"v[{self.value}]"


@dataclass(frozen=True)
class ViewCall:
    """A view operator, and which of its results."""
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None

    def function(self) -> View:
        op, args, kwargs, item = self.op, self.args, self.kwargs, self.item
        if _has_at(args) or _has_at(tuple(kwargs.values())):
            found: Any = lambda t, v: op(t, *_fill(args, v), **{k: _fill(a, v) for k, a in kwargs.items()})
        else:
            found = lambda t, v: op(t, *args, **kwargs)
        if op is torch.ops.aten.view_as_real.default:
            return lambda t, v: found(t.resolve_conj(), v)      # abstract tensors have no such bit
        if op in (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default):
            return lambda t, v: t.with_bit if hasattr(t, "with_bit") else op(t)     # capture/builder.py, without_bit
        return found if item is None else lambda t, v: found(t, v)[item]


@dataclass(frozen=True)
class DataOf:
    """`.data`."""

    def function(self) -> View:
        return lambda tensor, values: tensor.data


@dataclass(frozen=True)
class AttachedView:
    """A view which is a result of an autograd function called `name`, as the user's is; its gradient goes to forward output `value`."""
    name: str
    calls: tuple[ViewCall, ...]
    value: int

    def function(self) -> View:
        calls, value = [call.function() for call in self.calls], self.value

        def forward(ctx: Any, base: torch.Tensor, source: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
            for call in calls:
                base = call(base, values)
            return base

        def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
            return None, gradient, None
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function: Any = type(self.name.removesuffix("Backward"), (torch.autograd.Function,), methods)
        return lambda tensor, values: function.apply(tensor, values[value], values)


MakesView = ViewCall | DataOf | AttachedView


def _has_at(value: Any) -> bool:
    return type(value) is At or isinstance(value, (list, tuple)) and any(map(_has_at, value))


def _fill(value: Any, values: Sequence[Any]) -> Any:
    if type(value) is At:
        return values[value.value]
    return type(value)(_fill(v, values) for v in value) if isinstance(value, (list, tuple)) else value


@dataclass
class RemadeView:
    """One tensor replayed: by `call`, of its parent, under grad mode `recorded`; before the writes where `early`.  `own` is the forward output
    that it then receives with a history of its own (rule 6)."""
    parent: Result
    call: MakesView
    recorded: bool
    early: bool = False
    own: int = -1
    version: int = 0                # where it counts its writes alone (`.data`)
    text: str = ""                  # of the call, for people


@dataclass(frozen=True)
class Spending:
    """Rule 14: what torch says of a result's history, "" where it leads to no tensor of the caller's; the inputs that it led to."""
    words: str
    inputs: tuple[int, ...]


@dataclass
class AliasPlan:
    """How the results of a call come from its inputs and from the graph's outputs.  Frozen once `prepare` was called."""
    num_inputs: int
    results: list[Result]
    writes: list[Write] = field(default_factory=list)
    views: list[RemadeView] = field(default_factory=list)
    rises: dict[int, int] = field(default_factory=dict)         # input -> by how much its version rises beyond the one copy (rule 7)
    versions: dict[int, int] = field(default_factory=dict)      # forward output -> its version, where it was written
    plain: list[int] = field(default_factory=list)              # forward outputs that a view operator gives, and that are no views for the caller
    spent: dict[int, Spending] = field(default_factory=dict)    # rule 14, of forward outputs
    num_values: int = 0                 # outputs of the forward, without what is saved
    assemble: Callable[[Sequence[Any], Sequence[Any]], tuple] = None      # type: ignore[assignment]  # until `prepare`

    def prepare(self) -> AliasPlan:
        self.assemble = self._compile()
        return self

    def recorded_values(self) -> set[int]:
        """Forward outputs that autograd must see: written back with recording, returned, or viewed."""
        hidden = {w.value for w in self.writes if w.how != "grad"}
        return set(range(self.num_values)) - hidden

    def kept_inputs(self) -> set[int]:
        """Inputs that results are made of, or that are written when the graph has run."""
        parents = [view.parent for view in self.views]
        spent = {i for spending in self.spent.values() for i in spending.inputs}
        return {r.index for r in (*self.results, *parents) if isinstance(r, InputItself)} | {w.input for w in self.writes} | set(self.rises) | spent

    def finish(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """The function that makes fresh outputs what they are in eager, before one of them is saved: no views, and with eager's versions.  None where
        there is nothing to do."""
        plain, versions = self.plain, list(self.versions.items())
        if not plain and not versions:
            return None

        def finish(values: Sequence[Any]) -> list[Any]:
            finished = list(values)
            for k in plain:
                finished[k] = finished[k].detach()
            set_versions([(finished[k], version) for k, version in versions])
            return finished
        return finish

    def is_made_without(self, tracked: Collection[int], result: Result) -> bool:
        """Is a result made of forward outputs alone, none of which is in `tracked`?"""
        if not isinstance(result, Replay):
            return isinstance(result, Fresh) and result.value not in tracked
        view = self.views[result.index]
        attached = isinstance(view.call, AttachedView) and view.call.value in tracked
        return view.own not in tracked and not attached and self.is_made_without(tracked, view.parent)

    def text_of(self, result: Result) -> str:
        """For people: how a result comes about, over InputItself.text and Fresh.text."""
        if not isinstance(result, Replay):
            return result.text()
        view = self.views[result.index]
        return f"{self.text_of(view.parent)}.{view.text}"

    def _compile(self) -> Callable[[Sequence[Any], Sequence[Any]], tuple]:
        """The function (inputs, values) -> results, as Python text: this runs at every call."""
        recorded = [w for w in self.writes if w.how == "grad"]
        if not self.views and not recorded and not self.rises and not self.spent and self.results == [Fresh(k) for k in range(self.num_values)]:
            return lambda inputs, values: tuple(values)
        constants = [r.value for r in self.results if isinstance(r, Constant)]
        scope: dict[str, Any] = {"calls": [view.call.function() for view in self.views],
                                 "recording": torch.is_grad_enabled, "record": torch._C._set_grad_enabled,
                                 "writes": recorded, "write_recorded": write_recorded, "rise": raise_versions, "constants": constants,
                                 "raise_all": raise_all, "set_versions": set_versions, "spent": self.spent, "with_spent": with_spent}
        early = [k for k, view in enumerate(self.views) if view.early]
        lines = ["v = with_spent(spent, i, v)"] if self.spent else []
        roots = self._written_roots(early)      # their versions are for a while what they were before the last write that rule 8 is about
        lines += [f"rise([({text}, -1)])" for text in roots] + self._view_lines(early) + ["record(before)"] * bool(early)
        lines += ["write_recorded(writes, i, v)"] * bool(recorded)
        for by in sorted(set(self.rises.values())):
            lines.append(f"raise_all([{', '.join(f'i[{k}]' for k, rise in self.rises.items() if rise == by)}], {by})")
        lines += [f"rise([({text}, 1)])" for text in roots]
        lines += self._view_lines([k for k, view in enumerate(self.views) if not view.early])
        numbers = iter(range(len(constants)))
        body = "".join(f"constants[{next(numbers)}], " if isinstance(r, Constant) else f"{r.text()}, " for r in self.results)
        if self.views:
            inside = [f"    {line}" for line in lines]
            lines = [f"r = [None] * {len(self.views)}", "before = recording()", "try:", *inside, "finally:", "    record(before)"]
        exec("\n    ".join(["def assemble(i, v):", *lines, f"return ({body})\n"]), scope)
        return scope["assemble"]

    def written_alone(self) -> dict[int, int]:
        """Values that are written to an input without a record and are nothing else: value -> input."""
        parents = [view.parent for view in self.views]
        values = [w.value for w in self.writes] + [r.value for r in (*self.results, *parents) if isinstance(r, Fresh)] + [v.own for v in self.views]
        values += [view.call.value for view in self.views if isinstance(view.call, AttachedView)]
        return {w.value: w.input for w in self.writes if w.how in ("no_grad", "data") and values.count(w.value) == 1}

    def _view_lines(self, places: Sequence[int]) -> list[str]:
        lines, mode = [], None
        for k in places:
            view = self.views[k]
            if view.recorded is not mode:
                lines.append(f"record({view.recorded})")
                mode = view.recorded
            lines.append(f"r[{k}] = calls[{k}]({view.parent.text()}, v)")
            if view.own >= 0:
                lines += ["record(True)", f"r[{k}].copy_(v[{view.own}])", f"rise([(r[{k}], -1)])", f"record({mode})"]    # the storage has its version
            if view.version:
                lines.append(f"set_versions([(r[{k}], {view.version})])")
        return lines

    def _written_roots(self, early: Sequence[int]) -> list[str]:
        unrecorded = {InputItself(w.input) for w in self.writes if w.how == "no_grad"}
        roots = dict.fromkeys(self._root(self.views[k]) for k in early)
        return [root.text() for root in roots if root in unrecorded or isinstance(root, Fresh)]

    def _root(self, view: RemadeView) -> Result:
        while isinstance(view.parent, Replay):
            view = self.views[view.parent.index]
        return view.parent


def with_spent(spendings: Mapping[int, Spending], inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Rule 14."""
    from firesteel.autograd.backwards import spent  # few programs use a history up; a loaded package does without what this imports
    return [spent(value, spendings[k].words, [inputs[i] for i in spendings[k].inputs]) if k in spendings else value for k, value in enumerate(values)]


def set_versions(pairs: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Inference tensors have no version."""
    kept = [pair for pair in pairs if not pair[0].is_inference()]
    if kept:
        torch._C._autograd._unsafe_set_version_counter(*zip(*kept))


def raise_versions(pairs: Sequence[tuple[torch.Tensor, int]]) -> None:
    set_versions([(tensor, tensor._version + by) for tensor, by in pairs if not tensor.is_inference()])


def raise_all(tensors: Sequence[torch.Tensor], by: int) -> None:
    """The same by one number, in a tenth of the time: an optimiser writes thousands."""
    kept = [tensor for tensor in tensors if not tensor.is_inference()] if any(map(torch.Tensor.is_inference, tensors)) else tensors
    for _ in range(by):
        torch.autograd.graph.increment_version(kept)


def unrecorded_writer(writes: Sequence[Write]) -> Callable[[Sequence[Any], Sequence[Any]], None]:
    """Rule 7 for the writes that autograd does not see, as a function of inputs and values; called with recording off."""
    targets, found, counted = (items(numbers) for numbers in ([w.input for w in writes], [w.value for w in writes],
                                                              [w.input for w in writes if w.how == "no_grad"]))

    def write(inputs: Sequence[Any], values: Sequence[Any]) -> None:
        if all(map(operator.is_, targets(inputs), found(values))):      # the graph wrote there itself
            raise_all(counted(inputs), 1)
        else:
            write_unrecorded(writes, inputs, values)
    return write


def items(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    return operator.itemgetter(*numbers) if len(numbers) > 1 else lambda row: [row[k] for k in numbers]


def write_unrecorded(writes: Sequence[Write], inputs: Sequence[Any], values: Sequence[Any]) -> None:
    there = [w for w in writes if values[w.value] is inputs[w.input]]
    if there:
        raise_all([inputs[w.input] for w in there if w.how == "no_grad"], 1)
        writes = [w for w in writes if values[w.value] is not inputs[w.input]] if len(there) < len(writes) else ()
    for how, target in (("no_grad", lambda x: x), ("data", operator.attrgetter("data"))):
        found = [w for w in writes if w.how == how]
        if len(found) > 1 and not any(is_wrapper(inputs[w.input]) for w in found):
            torch._foreach_copy_([target(inputs[w.input]) for w in found], [values[w.value] for w in found])
        else:
            for w in found:
                target(inputs[w.input]).copy_(values[w.value])


def write_recorded(writes: Sequence[Write], inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Rule 7 for the writes that autograd sees."""
    for w in writes:
        if w.how == "grad":
            inputs[w.input].copy_(values[w.value])


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_identity = operator.attrgetter("_cdata")


def overlap_check(mutated: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """Rule 9 as a function of the inputs.  It runs at each call with writes, over all of an optimiser's tensors: machine code looks at many."""
    made: list[Callable[..., bool]] = []

    def check(inputs: Sequence[Any]) -> bool:
        if len(inputs) < MANY:
            return overlaps(inputs, mutated)
        if not made:
            made.append(apart(len(inputs)) or (lambda *inputs: _lie_apart(inputs)))
        return not made[0](*inputs) and overlaps(inputs, mutated)
    return check


MANY = 16       # inputs: fewer are not worth another native function


def overlaps(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Rule 9: does a mutated input share its storage with another input?"""
    return not _lie_apart(inputs) and _share(inputs, set(mutated))


def _lie_apart(inputs: Sequence[Any]) -> bool:
    """Have plain tensors a storage each, of torch's own?"""
    others = set(map(type, inputs)) - _PLAIN
    if any(issubclass(kind, torch.Tensor) for kind in others):
        return False
    storages = list(map(torch.Tensor.untyped_storage, [value for value in inputs if type(value) in _PLAIN] if others else inputs))
    return len(set(map(_identity, storages))) == len(storages) and all(map(torch.UntypedStorage.resizable, storages))


def _share(inputs: Sequence[Any], written: set[int]) -> bool:
    owner: dict[int, tuple[int, int]] = {}
    foreign: list[tuple[int, int, bool]] = []       # start, end, written; memory that is not torch's (an array of NumPy) may have two storages
    for index, value in enumerate(inputs):
        for number, part in enumerate(parts_of(value)):
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                first = owner.setdefault(storage._cdata, (index, number))
                if first != (index, number) and (first[0] in written or index in written):
                    return True
                if not storage.resizable():
                    foreign.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), index in written))
    return len(foreign) > 1 and meet(foreign)


def meet(spans: list[tuple[int, int, bool]]) -> bool:
    """Do two of the spans (start, end, written) meet, of which one is written?"""
    ends = {False: 0, True: 0}      # of those that begin before
    for start, end, written in sorted(spans):
        if start < ends[True] or written and start < ends[False]:
            return True
        ends[written] = max(ends[written], end)
    return False
