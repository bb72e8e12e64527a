"""Views, in-place writes and shared storage: the rules, and the plan that carries them out around a functional graph.

A compiled graph is functional: it reads its inputs and returns fresh tensors.  What eager lets a caller observe beyond
values is restored around it, by these rules.

 1. *An input that comes back is the same object.*  It is returned as the caller passed it, after rule 7.
 2. *A view of an input is made again from the caller's tensor*, by the same view operators, outside of our autograd
    function.  So `_base`, `grad_fn`, the version counter and later in-place writes are eager's.
 3. *Outputs that share the storage of an intermediate* are made from one tensor: the graph returns the intermediate (as a
    hidden output where the user does not get it), and the views of it are made again as in rule 2.
 4. *A single view of an intermediate* follows rule 3 where it requires grad, because a view that an autograd function
    returns may not be written in place.  Without grad nobody can tell, and the graph returns it.
 5. *One tensor returned twice is one object twice.*
 6. *A view is made again with the history it has in eager.*  One that autograd saw is recorded; one taken under no_grad is made
    with recording off (it then still claims to require grad: so does eager's); one that does not require grad, because there was a
    detach, is a view of a detached alias; and one that shares memory with its base but was written with a history of its own
    (`x.detach().copy_(w)`) is a view of a detached alias, into which the graph's value is copied with recording on.
 7. *A mutated input receives its final value by `copy_`*, once, after the graph ran, so that the caller's tensor has the new
    data and a newer version.  Where autograd saw the write (its grad_fn changed), the copy is recorded, and gradients flow
    into the graph's output; else it is made with recording off; where even the version did not change (a write through
    `.data`), the copy goes through `.data`.
 8. *Order*: the graph, then the writes of rule 7, then the views of rules 2 and 3, which thus see the written data.
 9. *Inputs that share storage with a mutated input* can not be told apart in a functional graph.  When the storages of a
    call overlap so, the captured program itself is run, by eager; `counters["aot"]["overlapping_inputs"]` says how often.
10. *A mutated input whose old value the backward reads* is copied in the forward (partition.py); eager would refuse, or had
    a copy too.
11. *One tensor passed twice* is one input of the graph (aot.py removes the second).
12. *A tensor subclass that wraps tensors* follows rules 1, 5 and 7 as a whole; the graph has its parts.  Where one comes back that shares
    memory with an input or another output, the captured program itself is run; `counters["aot"]["aliasing_subclasses"]` counts it.
13. *A result whose history the program has used up* (by a backward of its own, or by overwriting what that needs) requires grad as in eager;
    a backward from it raises what eager raises.

`Plan` is the data for this; `Plan.assemble` builds the user's results.  Example, for f(x) = (x.add_(1), x[0], y := x * 2, y.T):

    writes  = [Write(input=0, value=0, how="grad")]
    results = [Input(0), Replay(0), Fresh(1), Replay(1)]        # replay computes x[0] and y.T from x and y
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from firesteel.backwards import spent
from firesteel.graph.wrappers import is_wrapper, parts_of

# ---------------------------------------------------------------- kinds of results


@dataclass(frozen=True)
class Fresh:
    """A value that the graph returns, by its place among the forward's outputs."""
    value: int

    def text(self) -> str:
        return f"v[{self.value}]"


@dataclass(frozen=True)
class Input:
    """The caller's own tensor (rule 1)."""
    index: int

    def text(self) -> str:
        return f"i[{self.index}]"


@dataclass(frozen=True)
class Replay:
    """A view made again (rules 2 to 4), by its place among the replayed ones."""
    index: int

    def text(self) -> str:
        return f"r[{self.index}]"


@dataclass(frozen=True)
class Constant:
    """A result that is no tensor: None, a number, a string."""
    value: Any

    def text(self) -> str:
        return repr(self.value)


Result = Fresh | Input | Replay | Constant


@dataclass(frozen=True)
class Write:
    """Rule 7: input `input` receives forward output `value`; `how` is "grad", "no_grad" or "data"."""
    input: int
    value: int
    how: str


@dataclass(frozen=True)
class View:
    """One replayed view: `make(inputs, values)` applies the view operators; `how` is one of the four ways of rule 6.  Last is the
    forward output that an "own" view receives."""
    make: Callable[..., torch.Tensor]
    how: str                        # "recorded", "quiet", "detached" or "own"
    value: int = -1
    text: str = ""                  # for people: "i[0].t()", over Input.text and Fresh.text


@dataclass
class Plan:
    """How the results of a call come from its inputs and from the graph's outputs.  Frozen once `prepare` was called."""
    num_inputs: int
    results: list[Result]
    writes: list[Write] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    num_values: int = 0                 # outputs of the forward, without what is saved
    spent: dict[int, str] = field(default_factory=dict)     # rule 13: forward output -> what torch says
    assemble: Callable[[Sequence[Any], Sequence[Any]], tuple] = None      # type: ignore[assignment]  # until `prepare`

    def prepare(self) -> Plan:
        self.assemble = self._compile()
        return self

    def recorded_values(self) -> set[int]:
        """Forward outputs that autograd must see: written back with recording, returned, or viewed."""
        hidden = {w.value for w in self.writes if w.how != "grad"}
        return set(range(self.num_values)) - hidden

    def _compile(self) -> Callable[[Sequence[Any], Sequence[Any]], tuple]:
        """The function (inputs, values) -> results, as Python text: this runs at every call."""
        if not self.views and self.results == [Fresh(k) for k in range(self.num_values)]:
            return lambda inputs, values: tuple(values)
        body = "".join(f"{result.text()}, " for result in self.results)
        constants = [r for r in self.results if isinstance(r, Constant) and not isinstance(r.value, (int, float, bool, str, type(None)))]
        if constants:
            return self._assemble_slowly
        scope: dict[str, Any] = {"views": self.views, "make_views": make_views}
        replay = "    r = make_views(views, i, v)\n" if self.views else ""
        exec(f"def assemble(i, v):\n{replay}    return ({body})\n", scope)
        return scope["assemble"]

    def _assemble_slowly(self, inputs: Sequence[Any], values: Sequence[Any]) -> tuple:
        made = make_views(self.views, inputs, values)
        places = {Fresh: lambda r: values[r.value], Input: lambda r: inputs[r.index],
                  Replay: lambda r: made[r.index], Constant: lambda r: r.value}
        return tuple(places[type(result)](result) for result in self.results)


def with_spent(plan: Plan, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Rule 13; and rule 7 for writes of such values, which autograd saw."""
    made = [spent(value, plan.spent[k]) if k in plan.spent else value for k, value in enumerate(values)]
    write_recorded([w for w in plan.writes if w.value in plan.spent], inputs, made)
    return made


def make_views(views: Sequence[View], inputs: Sequence[Any], values: Sequence[Any]) -> list[torch.Tensor]:
    """Rules 2 to 4 and 6."""
    recording = torch.is_grad_enabled()
    made = []
    for view in views:
        if view.how == "recorded" or not recording:
            made.append(view.make(inputs, values))
        elif view.how == "quiet":
            with torch.no_grad():
                made.append(view.make(inputs, values))
        else:
            made.append(view.make(inputs, values, detached=True))
            if view.how == "own":
                made[-1].copy_(values[view.value])
    return made


def write_unrecorded(writes: Sequence[Write], inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Rule 7 for the writes that autograd does not see; called with recording off."""
    seen = [w for w in writes if w.how == "no_grad"]
    if len(seen) > 1 and not any(is_wrapper(inputs[w.input]) for w in seen):
        torch._foreach_copy_([inputs[w.input] for w in seen], [values[w.value] for w in seen])
    else:
        for w in seen:
            inputs[w.input].copy_(values[w.value])
    for w in writes:
        if w.how == "data":
            inputs[w.input].data.copy_(values[w.value])


def write_recorded(writes: Sequence[Write], inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Rule 7 for the writes that autograd sees."""
    for w in writes:
        if w.how == "grad":
            inputs[w.input].copy_(values[w.value])


def overlaps(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Rule 9: does a mutated input share its storage with another input?"""
    written = set(mutated)
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
