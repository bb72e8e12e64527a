"""What a program did: its results and writes, sorted by the rules of alias.py.

`TraceOutcome(world, program, inputs)` runs a program inside a trace and looks at the abstract tensors that came out.  Autograd is at work on them, so
that they know what eager's tensors would: which is a view of which (`_base`), whether there is a history, versions.  Out come the
forward's values and the `AliasPlan` that makes the caller's results of them and of the inputs.

A tensor that shares memory with another is replayed: `Alias.via` holds the calls by which it came out of an input or out of a tensor that the
graph returns, and under which grad mode.  Each tensor on the way is made once, so that two results which are views of one tensor that
nobody returned are so again.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.fx import Node

from firesteel.autograd.alias import (
    AliasPlan,
    At,
    AttachedView,
    Constant,
    DataOf,
    Fresh,
    InputItself,
    MakesView,
    RemadeView,
    Replay,
    Result,
    ViewCall,
    Write,
)
from firesteel.autograd.outline import Origin, Program
from firesteel.graph.functional import Alias, MadeBy, StorageValue, spec_of_node
from firesteel.graph.schemas import EMPTY_VIEWS
from firesteel.graph.spec import Spec, differ_idly
from firesteel.graph.tensor import AbstractTensor
from firesteel.graph.trace import TraceWorld
from firesteel.graph.wrappers import is_wrapper, parts_of
from firesteel.layouts import take_masks
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, eq
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.torchstate import is_stale, is_tracked

aten = torch.ops.aten
set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter


# ---------------------------------------------------------------- what autograd knows of a tensor

def owner_of(tensor: torch.Tensor) -> Any:
    """The tensor whose history a view follows: its base, or itself where it is none (what detach gives is none)."""
    return tensor._base if tensor._is_view() else tensor


def follows(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Does a view's history consist of views alone?  What a custom function returns has one of its own."""
    history, end = view.grad_fn, base.grad_fn
    while history is not None and history is not end:
        if isinstance(history, BackwardCFunction):
            return False
        history = history.next_functions[0][0] if history.next_functions else None
    return True


def share_versions(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two tensors count their writes together?  `.data` gives a tensor that counts alone, `detach` does not."""
    before = a._version, b._version
    set_versions((a,), (before[0] + 1,))
    moved = b._version != before[1]
    set_versions((a,), (before[0],))
    return moved


@dataclass
class ForwardValue:
    """One output of the forward, by its nodes: one, or one for each part of a wrapper.  `tensor` is what autograd knows of it (None for sizes
    and for unseen bases), `made` the wrapper."""
    nodes: list[Any]
    tensor: Any = None
    origin: Any = None
    made: Any = None

    @property
    def differentiable(self) -> bool:
        return self.tensor is not None and is_tracked(self.tensor)

    @property
    def quiet(self) -> bool:
        """Could it carry a gradient, and does not?  A base that the program does not return never does."""
        seen = self.tensor if self.tensor is not None or not isinstance(self.nodes[0], Node) else self.nodes[0].meta["val"]
        untracked = isinstance(seen, torch.Tensor) and (self.tensor is None or not is_tracked(seen))
        return untracked and (seen.is_floating_point() or seen.is_complex())


# ---------------------------------------------------------------- the outcome

@dataclass(frozen=True)
class Before:
    """An input when the program began."""
    places: list[tuple[Alias, Any]]     # of its parts, with their shapes
    cells: list[tuple[StorageValue, int]]       # of its parts, with their versions
    history: Any
    version: int
    requires_grad: bool


class TraceOutcome:
    """A builder: complete once made.  `shown`: views of memory that the program made are results of the graph as they are, for a graph that
    is run by itself."""

    def __init__(self, world: TraceWorld, program: Program, inputs: Sequence[Any], shown: bool = False):
        self.world, self.inputs, self.shown = world, inputs, shown
        self.values: list[ForwardValue] = []
        self.views: list[RemadeView] = []
        self.refusal: tuple[str, str] | None = None     # (counter, reason): only eager can run the program
        tensors = {i: t for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        before = {i: Before([(p.record, p.spec.shape) for p in parts_of(t)], [(p.record.cell, p.record.cell.version) for p in parts_of(t)],
                            t.grad_fn, t._version, t.requires_grad) for i, t in tensors.items()}
        leaves = world.leaves_made
        self.owner: dict[StorageValue, int] = {cell: i for i, b in before.items() for cell, _ in b.cells}
        self.rebuilt: dict[Alias, Result] = {t.record: InputItself(i) for i, t in tensors.items() if type(t) is AbstractTensor}
        self.parts = {part.record: (i, number) for i, t in tensors.items() for number, part in enumerate(parts_of(t))}
        outputs = list(program(*inputs))
        self.plan = AliasPlan(len(inputs), [], [], self.views)
        for i, t in tensors.items():
            self._look_at_input(i, t, before[i])
        self.made: dict[int, Result] = {id(t): InputItself(i) for i, t in reversed(tensors.items())}
        self.sizes: dict[Expr, int] = {}
        self.members = self._members(outputs)
        self.parted: dict[Any, set[int]] = {}       # a call with several results -> those of them that lead to results of wrappers
        for whole, item in {found for output in outputs if is_wrapper(output) for part in parts_of(output) for found in parted_calls(part.record)}:
            self.parted.setdefault(whole, set()).add(item)
        self.rooted: set[StorageValue] = set()
        self.seen: dict[Alias, torch.Tensor] = self._seen(tensors.values(), outputs)
        self.plan.results = [self._result(output, place) for place, output in enumerate(outputs)]
        self.plan.num_values = len(self.values)
        self.made_leaves = world.leaves_made != leaves
        if self.made_leaves and has_leaves_beyond([v.tensor for v in self.values if v.differentiable], self.inputs):
            self._refuse("leaves_made_inside", "a result depends on a leaf that the program made")

    def _refuse(self, counter: str, reason: str) -> None:
        self.refusal = self.refusal or (counter, reason)

    # ------------------------------------------------------------ inputs (rule 7)

    def _look_at_input(self, index: int, tensor: torch.Tensor, before: Before) -> None:
        parts = parts_of(tensor)
        if [(part.record, part.spec.shape) for part in parts] != before.places:
            self._refuse("reshaped_inputs", f"input {index} changes its sizes or strides in place")
        elif tensor.requires_grad != before.requires_grad and tensor.grad_fn is before.history or is_changed_to_leaf(tensor, before.history):
            self._refuse("requires_grad_changes", f"requires_grad of input {index} is changed")
        elif any(cell.version != version for cell, version in before.cells):
            self._write(index, tensor, before)
        elif tensor.grad_fn is not before.history:
            self._refuse("reshaped_inputs", f"a view of input {index} changes its sizes, strides or storage in place")
        elif tensor._version != before.version:     # a view of it changed its sizes in place, say
            self.plan.rises[index] = tensor._version - before.version

    def _write(self, index: int, tensor: torch.Tensor, before: Before) -> None:
        recorded = tensor.requires_grad and not is_stale(tensor) and tensor.grad_fn is not before.history
        rise = tensor._version - before.version
        how = "grad" if recorded else "no_grad" if rise else "data"
        self.plan.writes.append(Write(index, self._add_tensor(tensor, tensor if recorded else None, Origin("input", index)), how))
        if rise > 1:
            self.plan.rises[index] = rise - 1

    # ------------------------------------------------------------ outputs (rules 1 to 6)

    def _seen(self, inputs: Iterable[Any], outputs: Sequence[Any]) -> dict[Alias, torch.Tensor]:
        """The tensors that can be asked, by their places: outputs, what they are views of, and inputs."""
        shown = [t for t in outputs if type(t) is AbstractTensor]
        return {t.record: t for t in (*shown, *map(owner_of, shown), *inputs) if type(t) is AbstractTensor}

    def _members(self, outputs: list[Any]) -> dict[StorageValue, list[tuple[int, AbstractTensor]]]:
        """The outputs over each storage that the program allocated, each once, with their places."""
        members: dict[StorageValue, dict[int, tuple[int, AbstractTensor]]] = {}
        for place, output in enumerate(outputs):
            for part in parts_of(output):
                if type(part) is AbstractTensor and part.record.cell not in self.owner:
                    members.setdefault(part.record.cell, {}).setdefault(id(part), (place, part))
        return {cell: list(group.values()) for cell, group in members.items()}

    def _result(self, output: Any, place: int) -> Result:
        if type(output) in SYMBOLIC:
            size = from_sym(output)
            return Fresh(self._size(size)) if type(size) is Expr else Constant(size)
        if not isinstance(output, torch.Tensor) or type(output) is not AbstractTensor and not is_wrapper(output):
            return Constant(output)
        if id(output) not in self.made:
            find: Any = self._wrapper_result if is_wrapper(output) else self._tensor_result
            self.made[id(output)] = find(output, Origin("output", place))
        return self.made[id(output)]

    def _wrapper_result(self, output: Any, origin: Origin) -> Result:
        """A wrapper of fresh tensors, or a view of an input that is a wrapper, replayed by the calls that made each of its parts (rule 12)."""
        if take_masks(output):
            self._refuse("masked_results", f"output {origin.place}, a {type(output).__name__}, is still to be masked")
        cells = [part.record.cell for part in parts_of(output)]
        if all(cell in self.owner for cell in cells) and (view := self._wrapper_view(output)) is not None:
            return view
        if len(set(cells)) != len(cells) or any(cell in self.owner or len(self.members[cell]) > 1 for cell in cells):
            self._refuse("aliasing_subclasses", f"output {origin.place}, a {type(output).__name__}, shares memory with an input or another output")
        return Fresh(self._add_tensor(output, output, origin))

    def _wrapper_view(self, output: Any) -> Result | None:
        """None where the parts did not come about alike, from the parts of one input, or where the history is not that of views."""
        ways = [(self.parts.get(root_of(part.record)), calls_to(part.record)) for part in parts_of(output)]
        index, calls = ways[0][0] and ways[0][0][0], ways[0][1]
        if index is None or any(way != ((index, number), calls) for number, way in enumerate(ways)) or type(self.inputs[index]) is not type(output):
            return None
        if any(len(self.parted[whole]) > 1 for part in parts_of(output) for whole, _ in parted_calls(part.record)):
            return None         # calls of their own would have gradients of their own, each with zeros for the others, which a class may refuse
        if is_stale(output) or is_tracked(output) and (owner_of(output) is not self.inputs[index] or not follows(output, owner_of(output))):
            return None
        made: Result = InputItself(index)
        for via in calls:
            self.views.append(RemadeView(made, self._call(via), via.recorded, text=self._text(via)))
            made = Replay(len(self.views) - 1)
        return made

    def _tensor_result(self, output: AbstractTensor, origin: Origin) -> Result:
        cell = output.record.cell
        alone = cell not in self.owner and len(self.members[cell]) == 1 and not output._is_view() and self._fills(output)
        if alone or self.shown and cell not in self.owner:
            return self._fresh(output, origin)
        if cell in self.owner and is_wrapper(self.inputs[self.owner[cell]]):
            self._refuse("aliasing_subclasses", f"output {origin.place} shares memory with a part of input {self.owner[cell]}")
            return Constant(None)
        if cell not in self.owner and cell not in self.rooted:
            self._root(cell)
        if is_stale(output):
            return self._rebuild_early(output.record)
        base = owner_of(output)
        if output is not base and is_tracked(output) and not follows(output, base):
            return self._attached(output, base, origin)
        if output.requires_grad and not self.seen.get(base.record, base).requires_grad:     # an input may be a leaf that is a view
            self._refuse("leaves_made_inside", f"output {origin.place} is a leaf that the program made")
        return self._with_history(output, origin) if output is base else self._view_of(base, output, origin)

    def _fresh(self, output: AbstractTensor, origin: Origin) -> Fresh:
        value = self._add(self._laid(self.world.to_node(output), output.spec), output, origin)
        if is_view_call(self.values[value].nodes[0]):
            self.plan.plain.append(value)
        if output.requires_grad and not is_tracked(output):
            self._refuse("leaves_made_inside", f"output {origin.place} is a leaf that the program made")
        if output._version:
            self.plan.versions[value] = output._version
        return Fresh(value)

    def _fills(self, tensor: AbstractTensor) -> bool:
        """Does it cover its storage from offset 0 to the end?"""
        part, whole = tensor.spec, tensor.record.cell.spec
        return all(self.world.env.known(eq(a, b)) is True for a, b in ((part.offset, whole.offset), (part.numel(), whole.numel())))

    def _root(self, cell: StorageValue) -> None:
        """Lets the graph return what the outputs in a storage are made from: the tensor that all come of, or what the storage began as (inside of a
        decomposition, say, which autograd does not see)."""
        self.rooted.add(cell)
        owners = {owner.record: (owner, place, owner is t) for place, t in reversed(self.members[cell]) for owner in [owner_of(t)]}
        start = root_of(self.members[cell][0][1].record)
        place = next((p for p, (t, *_) in owners.items() if self._fills(t) and all(p in way_to(other) for other in owners)), start)
        if place in owners:
            tensor, output, shown = owners[place]
            self.rebuilt[place] = self._fresh(tensor, Origin("output" if shown else "base", output))
        else:
            value = self._add(self._laid(cell.node, cell.spec), None, None)
            self.rebuilt[place] = Fresh(value)
            if version := max(t._version for _, t in self.members[cell]):
                self.plan.versions[value] = version

    def _view_of(self, base: AbstractTensor, output: AbstractTensor, origin: Origin) -> Result:
        self._with_history(base, Origin("base", origin.place))
        return self._rebuild(output.record)

    def _with_history(self, tensor: AbstractTensor, origin: Origin) -> Result:
        """A tensor that is no view.  One that shares memory and was written with a history of its own receives the graph's value (rule 6)."""
        made = self._rebuild(tensor.record)
        if not isinstance(made, Replay) or self.views[made.index].own >= 0:
            return made
        if is_tracked(tensor):
            self.views[made.index].own = self._add(self.world.to_node(tensor), tensor, origin)
        elif tensor.requires_grad:
            self._refuse("leaves_made_inside", f"output {origin.place} is a leaf that the program made")
        return made

    def _call_at(self, place: Alias) -> tuple[MakesView, int]:
        """The call that leads to a place, and the version of what it gives, where that counts its writes alone: then the call was `.data`."""
        via, tensor = place.via, self.seen.get(place)
        assert via is not None
        if via.op is not aten.detach.default or tensor is None:
            return self._call(via), 0
        before: Alias | None = via.parent
        while before is not None and before not in self.seen:
            before = before.via.parent if before.via is not None else None
        if before is None or share_versions(self.seen[before], tensor):
            return self._call(via), 0
        return DataOf(), tensor._version

    # ------------------------------------------------------------ making again

    def _rebuild_early(self, place: Alias) -> Result:
        """As `_rebuild`, before the writes."""
        made = result = self._rebuild(place)
        while isinstance(made, Replay):
            self.views[made.index].early = True
            made = self.views[made.index].parent
        return result

    def _rebuild(self, place: Alias) -> Result:
        """The tensor at a place, made of what is there by the calls that led to it."""
        way = []
        while place not in self.rebuilt:
            if place.via is None:
                self._refuse("unfollowed_aliases", "an output shares memory with a tensor that it was not made of by views")
                return Constant(None)
            way.append(place)
            place = place.via.parent
        for step in reversed(way):
            via = step.via
            assert via is not None
            call, version = self._call_at(step)
            self.views.append(RemadeView(self.rebuilt[via.parent], call, via.recorded, version=version, text=self._text(via)))
            self.rebuilt[step] = Replay(len(self.views) - 1)
        return self.rebuilt[way[0] if way else place]

    def _attached(self, output: AbstractTensor, base: AbstractTensor, origin: Origin) -> Result:
        """A view with a history that is not that of views (rule 6)."""
        self._view_of(base, base, origin)
        calls, place = [], output.record
        while place is not base.record and place.via is not None:
            if place.via.op not in EMPTY_VIEWS:
                calls.append(self._call(place.via))
            place = place.via.parent
        value = self._add(self.world.to_node(output), output, origin)
        self.plan.plain.append(value)       # it may be the base's memory, which has no history where this one has
        name: str = output.grad_fn.name()       # type: ignore[union-attr]  # it is tracked
        self.views.append(RemadeView(self.rebuilt[base.record], AttachedView(name, tuple(calls[::-1]), value), True, text=f"{name}()"))
        self.rebuilt[output.record] = Replay(len(self.views) - 1)
        return self.rebuilt[output.record]

    def _call(self, via: MadeBy) -> ViewCall:
        """Sizes that are symbols are read from the forward's values."""
        return ViewCall(via.op, self._at(via.args), {k: self._at(v) for k, v in via.kwargs.items()}, via.item)

    def _text(self, via: MadeBy) -> str:
        item = "" if via.item is None else f"[{via.item}]"
        return f"{via.op._opname.strip('_')}({', '.join(str(self._at(a)) for a in via.args)}){item}"

    def _at(self, value: Any) -> Any:
        if type(value) is Expr:
            return At(self._size(value))
        return type(value)(self._at(v) for v in value) if isinstance(value, (list, tuple)) else value

    # ------------------------------------------------------------ values

    def _size(self, size: Expr) -> int:
        if size not in self.sizes:
            self.values.append(ForwardValue([self.world.size_node(size)]))
            self.sizes[size] = len(self.values) - 1
        return self.sizes[size]

    def _add(self, node: Node, tensor: AbstractTensor | None, origin: Origin | None) -> int:
        self.values.append(ForwardValue([self._own(node)], tensor, origin))
        return len(self.values) - 1

    def _laid(self, node: Node, wanted: Spec) -> Node:
        """The node with eager's strides, where no element depends on them: the graph is free there."""
        have, env = spec_of_node(node), self.world.env
        return self.world.emit(aten.as_strided.default, node, wanted.shape, wanted.strides, have.offset) if differ_idly(have, wanted, env) else node

    def _add_tensor(self, made: torch.Tensor, tensor: torch.Tensor | None, origin: Origin | None) -> int:
        """As `_add`, for a tensor of any kind."""
        nodes: list[Any] = []
        for part in parts_of(made):
            node = self._own(self.world.to_node(part))
            nodes.append(self.world.emit(aten.clone.default, node) if node in nodes else node)
        self.values.append(ForwardValue(nodes, tensor, origin, made))
        return len(self.values) - 1

    def _own(self, node: Node) -> Node:
        """The node, or a copy where it is an input or returned already."""
        if node.op in ("placeholder", "get_attr") or any(node is other for value in self.values for other in value.nodes):
            return self.world.emit(aten.clone.default, node)
        return node


def has_leaves_beyond(tensors: Sequence[torch.Tensor], inputs: Sequence[Any]) -> bool:
    """Does the history of one of the tensors end at a leaf that is no input?"""
    known = {id(t) for t in inputs if isinstance(t, torch.Tensor)}
    histories: list[Any] = [t.grad_fn for t in tensors]
    starts = {t.grad_fn for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and not is_stale(t)}
    seen = set(starts)
    while histories:
        node = histories.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            return True
        histories += [n for n, _ in node.next_functions]
    return False


def is_changed_to_leaf(tensor: torch.Tensor, history: Any) -> bool:
    """Was it the result of an operator before, and is no more (`detach_`)?"""
    return history is not None and not is_stale(tensor) and tensor.grad_fn is None


def is_view_call(node: Node) -> bool:
    """Does the node give a view, as autograd sees it?"""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return isinstance(node.target, OpOverload) and node.target._schema.arguments[0].alias_info is not None


def calls_to(place: Alias) -> list[MadeBy]:
    """The calls that led to a place, without what they were made on."""
    found: list[Any] = []
    while place.via is not None:
        found.append(place.via._replace(parent=None))       # type: ignore[arg-type]  # so that they can be compared
        place = place.via.parent
    return found[::-1]


def parted_calls(place: Alias) -> list[tuple[Any, int]]:
    """Of the calls that led to a place, those with several results: (what tells the call from others, which result)."""
    found = [via for way in way_to(place) if (via := way.via) is not None and via.item is not None]
    return [((id(via.parent), via.op, repr(via.args)), via.item) for via in found if via.item is not None]


def way_to(place: Alias) -> list[Alias]:
    """The place, and those that it was made from, one of the other."""
    way = [place]
    while (via := way[-1].via) is not None:
        way.append(via.parent)
    return way


def root_of(place: Alias) -> Alias:
    return way_to(place)[-1]
