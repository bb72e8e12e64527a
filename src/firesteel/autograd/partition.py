"""Partitioners: a joint graph in, a forward and a backward graph out.

A joint graph has placeholders `primals_*` and `tangents_*` and returns the forward's outputs followed by the gradients.
    forward:   primals                    -> outputs, saved tensors, saved sizes
    backward:  saved tensors, saved sizes, tangents -> gradients
What always holds: no value of the backward is computed from a tangent in the forward; random and heavy operators of the
forward run once; an input that the program overwrites is copied before it is saved; a result is saved only where the backward reads it
itself, as eager's does, since the caller may overwrite it.

`default_partition` saves what eager would: each forward value that the backward reads, but for those of checkpointed
regions.  `min_cut_partition` chooses the cheapest set of values from which the backward can compute the rest again.  Each
value is an edge whose capacity is the cost of saving it (recompute.py); values that cannot be recomputed hang on the
source, values that the backward reads on the sink; a cut is a set to save, and the minimum cut nearest to the sink
recomputes least.

    fw, bw = min_cut_partition(joint_gm, inputs, num_fwd_outputs=1)
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from firesteel.autograd.maxflow import INFINITE, SINK, SOURCE, Network
from firesteel.autograd.recompute import (
    RecomputePolicy,
    base_of,
    bytes_of,
    find_entries,
    is_size,
    op_class,
    policy,
    reads_much_more,
    save_cost,
    tensors_of,
)
from firesteel.autograd.regions import AGAIN
from firesteel.autograd.symbols import environment, missing_symbols, sizes_of, where_bound
from firesteel.config import config
from firesteel.errors import InternalError
from firesteel.graph.build import LazyModule, append_call, results_of
from firesteel.graph.passes import counted_in, moved
from firesteel.graph.random_state import operators as random_state
from firesteel.graph.random_state import state_spec
from firesteel.graph.spec import contiguous_strides
from firesteel.operators import collective
from firesteel.records import dataclass
from firesteel.sym.expr import Expr
from firesteel.sym.symint import to_symint

Partition = tuple[GraphModule, GraphModule]


def default_partition(joint: GraphModule, inputs: Any = None, *, num_fwd_outputs: int, **_: Any) -> Partition:
    """Saves every forward value that the backward reads, as eager does: so not those inside of a checkpointed region."""
    roles = Roles.of(joint, num_fwd_outputs)
    return build(roles, [*roles.primals, *(node for node in roles.nodes if roles.made_by_forward(node) and not asked_again(roles, node))])


def asked_again(roles: Roles, node: Node) -> bool:
    """Did the user ask for the value to be recomputed?"""
    return node.meta.get("recompute") in AGAIN and roles.policy(node).recompute


def min_cut_partition(joint: GraphModule, inputs: Any = None, *, num_fwd_outputs: int, memory_budget: float | None = None,
                      **_: Any) -> Partition:
    """Saves the cheapest set of values; below a budget of 1.0 heavy operators are run again until the saved bytes fit."""
    roles = Roles.of(joint, num_fwd_outputs)
    budget = config.memory_budget if memory_budget is None else memory_budget
    saved = choose_saved(roles)
    if budget < 1.0:
        saved = fit_budget(roles, saved, budget)
    return build(roles, saved)


# ---------------------------------------------------------------- who is who in a joint graph

@dataclass(eq=False)
class Roles:
    """The nodes of a joint graph by what they are for."""
    joint: GraphModule
    nodes: list[Node]               # all but the output, in order
    primals: list[Node]
    tangents: list[Node]
    outputs: list[Any]              # of the forward
    gradients: list[Any]            # nodes or None
    effects: list[Node]             # runs in the forward even if nothing reads its result: assertions, and draws of random numbers
    late_effects: list[Node]        # those of the backward
    forward: set[Node]              # what the outputs are computed from
    after_tangents: set[Node]       # what is computed from a tangent
    backward: set[Node]             # what the gradients are computed from
    reads: dict[Node, list[Node]]   # node -> its arguments that are nodes (looked up often, and slow to ask of a node)
    entries: set[Node]              # what checkpointed regions take from others
    returned: set[Node]             # the outputs that are nodes
    costs: dict[Node, int] = field(default_factory=dict)
    policies: dict[Node, RecomputePolicy] = field(default_factory=dict)

    @classmethod
    def of(cls, joint: GraphModule, num_fwd_outputs: int) -> Roles:
        nodes = list(joint.graph.nodes)[:-1]
        results = results_of(joint)
        reads = {node: node.all_input_nodes for node in nodes}
        outputs, gradients = results[:num_fwd_outputs], results[num_fwd_outputs:]
        placeholders = [node for node in nodes if node.op == "placeholder"]
        tangents = [node for node in placeholders if is_tangent(node)]
        effects = [node for node in nodes if node.op == "call_function" and has_effect(node)]
        after_tangents, forward = descendants(tangents, reads), ancestors(outputs, reads)
        # a backward (of a custom function, say) may draw random numbers that depend on no gradient
        late = [node for node in effects if node in after_tangents or op_class(node) == "random" and node.meta.get("late", False)]
        effects = [node for node in effects if node not in late]
        forward |= ancestors(effects, reads)
        forward.update(node for node in nodes if node.target is operator.getitem and node.args[0] in forward)
        return cls(joint, nodes, [n for n in placeholders if not is_tangent(n)], tangents, outputs, gradients, effects, late,
                   forward, after_tangents, ancestors([*gradients, *late], reads), reads, find_entries(nodes),
                   {node for node in outputs if isinstance(node, Node)})

    def policy(self, node: Node) -> RecomputePolicy:
        found = self.policies.get(node)
        if found is None:
            found = policy(node)
            if node in self.entries:
                found = RecomputePolicy(recompute=False, save=True, fusible=found.fusible)
            elif self.reads[node] and op_class(node) == "create":       # new_zeros of a value that the backward may not read
                found = RecomputePolicy(recompute=True, save=True, fusible=True)
            self.policies[node] = found
        return found

    def made_by_forward(self, node: Node) -> bool:
        """Does eager compute the value in the forward, be it for a result that is dead since?  Its backward then reads what was saved."""
        return node in self.forward or node.meta.get("phase") == "forward" and node not in self.after_tangents

    def read_by_backward(self) -> list[Node]:
        """Values that do not depend on tangents and that the part which does reads, in order."""
        tail = self.after_tangents & self.backward
        results = {node for node in self.gradients if isinstance(node, Node)}
        return [node for node in self.nodes if node in self.backward and node not in tail
                and (node in results or any(user in tail for user in node.users))]


def is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def ancestors(roots: Iterable[Any], reads: dict[Node, list[Node]], stops: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """The roots that are nodes, and all that they are computed from, not looking behind one that `stops`."""
    seen = {node for node in roots if isinstance(node, Node)}
    stack = list(seen)
    while stack:
        if not stops(last := stack.pop()):
            for node in reads[last]:
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
    return seen


def descendants(roots: Sequence[Node], reads: dict[Node, list[Node]]) -> set[Node]:
    """The roots and all that is computed from them; `reads` is in topological order."""
    seen = set(roots)
    for node, before in reads.items():
        if node not in seen and not seen.isdisjoint(before):
            seen.add(node)
    return seen


def has_effect(node: Node) -> bool:
    """Must the call be made even if its result is not read?  Eager draws random numbers then too, and where the program says so."""
    return op_class(node) == "random" or isinstance(node.target, torch._ops.OpOverload) and (
        not node.target._schema.returns or collective(node.target) is not None)


# ---------------------------------------------------------------- the minimum cut

@dataclass(frozen=True)
class Terms:
    """What a cut may do with a value, and what that costs."""
    again: Callable[[Node], bool]           # may the backward compute it?
    savable: Callable[[Node], bool]
    saving: Callable[[Node], int]
    computing: Callable[[Node], int]        # by the backward, once more


def choose_saved(roles: Roles, again: frozenset[Node] = frozenset()) -> list[Node]:
    """The values to save.  Heavy operators in `again` may be recomputed."""
    stored = in_memory(roles)
    return minimum_cut(roles, Terms(lambda node: may_recompute(roles, node, again), lambda node: roles.policy(node).save,
                                    lambda node: _cost(roles, node, stored), lambda node: 0))


def minimum_cut(roles: Roles, terms: Terms) -> list[Node]:
    """The values to save such that saving them and computing the others costs least.  A recomputed value is on the side of the
    sink: what that costs is an edge from the source, which is then cut."""
    needed = roles.read_by_backward()
    must_save = set(needed)
    lent, pinned = lent_values(roles)
    again: Callable[[Node], bool] = lambda node: terms.again(node) and not (node in pinned and roles.policy(node).save and _one_value(node))
    seen = ancestors(needed, roles.reads, lambda node: not again(node))      # and what would have to be computed for it again
    part = [node for node in roles.nodes if node in seen]
    net, enter, leave = Network(), {}, {}
    for node in part:
        once = not again(node)
        savable = terms.savable(node) and _one_value(node) or node.op == "placeholder"
        if not savable and once and node in must_save:
            raise InternalError(f"The backward reads {node}, which can be neither saved nor recomputed.")
        enter[node] = SOURCE if once else SINK if node in must_save and not savable else net.vertex()
        leave[node] = SINK if node in must_save else net.vertex() if savable else enter[node]
        if savable:
            net.edge(enter[node], leave[node], INFINITE if node in lent else terms.saving(node))
        if not once:
            if cost := terms.computing(node):
                net.edge(SOURCE, enter[node], cost)
            for before in roles.reads[node]:
                if leave[before] != SINK:
                    net.edge(leave[before], enter[node], INFINITE)
    kept = net.sink_side()
    return [node for node in part if leave[node] in kept and enter[node] not in kept]


def may_recompute(roles: Roles, node: Node, again: frozenset[Node] = frozenset()) -> bool:
    """May the backward compute this?  What only the backward needs is computed there in any case, and thus once."""
    if node.op != "call_function":
        return node.op == "get_attr"
    if node not in roles.forward and not is_size(node):
        return True
    if node in again:
        return True
    if op_class(node) == "reduce" and "recompute" not in node.meta and (node.meta.get("exact") or reads_much_more(node)):
        return False        # another kernel adds in another order: an exact value would not be equal to itself
    return roles.policy(node).recompute


def lent_values(roles: Roles) -> tuple[set[Node], set[Node]]:
    """(results and held inputs, with all views of their memory, that the backward would read only in order to compute others again; what it may not
    compute again from one that it reads itself).  The program may overwrite them before the backward runs; eager, which saves what its backward
    reads, would not notice: never for the former, not where the tangents for which it reads the value do not arrive for the latter."""
    late = {node for node in roles.nodes if not is_size(node) and (not roles.made_by_forward(node) or node.meta.get("recompute") in AGAIN)}
    direct: dict[Node, list[Node]] = {}         # value -> those that read it in the backward
    for node in late:
        for before in roles.reads[node]:
            direct.setdefault(base_of(before), []).append(node)
    gradients = {node for node in roles.gradients if isinstance(node, Node)}
    shown = {base_of(node) for node in roles.outputs if isinstance(node, Node) and not is_size(node) and node not in gradients}
    shown.update(node for node in roles.primals if node.meta.get("held") and node not in gradients)
    lent = {node for node in roles.nodes if (base := base_of(node)) in shown and base not in direct}
    return lent, _read_by_chance(roles, late, {node: direct[node] for node in shown & direct.keys()})


def _read_by_chance(roles: Roles, late: set[Node], direct: dict[Node, list[Node]]) -> set[Node]:
    """Forward values made of a value in `direct` that some tangents need and that the readers of it which are run for these do not cover."""
    if not direct or len(roles.tangents) < 2:
        return set()
    reached = {node: 1 << number for number, node in enumerate(roles.tangents)}         # node -> the tangents that it depends on, as bits
    for node in roles.nodes:
        if node in roles.after_tangents and node not in reached:
            reached[node] = functools.reduce(operator.or_, (reached.get(before, 0) for before in roles.reads[node]))
    needs: dict[Node, set[int]] = {}            # value that depends on no tangent -> the tangents of each that needs it
    for node in reversed(roles.nodes):
        if node not in reached:
            needs[node] = set().union(*({reached[user]} if user in reached else needs.get(user, ()) for user in node.users))
    run_for = lambda node: reached[node] if node in reached else functools.reduce(operator.or_, needs[node], 0)
    found = set()
    for node, needed in needs.items():
        covers = [[run_for(one) for one in direct[value]] for before in roles.reads[node] if (value := base_of(before)) in direct]
        if node not in late and covers and op_class(node) != "view" and any(all(bits & ~cover for cover in one) for one in covers for bits in needed):
            found.add(node)
    return found


def _one_value(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), (tuple, list))


def _cost(roles: Roles, node: Node, stored: set[Node]) -> int:
    cost = roles.costs.get(node)
    if cost is None:
        is_held = node.op == "placeholder" and not node.meta.get("mutated") or node in roles.returned      # by the caller
        cost = roles.costs[node] = 1 if is_size(node) else save_cost(bytes_of(node), is_held, node in stored, node in roles.forward,
                                                                             node.meta.get("recompute") == "prefer" and node not in roles.entries)
    return cost


def in_memory(roles: Roles) -> set[Node]:
    """Values that fused kernels would write out anyway: results, operands of heavy operators, and what is read again after one.
    A level counts the heavy operators on the longest way to a value; readers of a higher level run in another kernel."""
    level: dict[Node, int] = {}
    fused = {node: node.op == "call_function" and roles.policy(node).fusible for node in roles.nodes if node not in roles.after_tangents}
    for node in fused:
        step = 0 if fused[node] else 1
        level[node] = max((level[b] + (step or (0 if fused[b] else 1)) for b in roles.reads[node]), default=0)
    stored = {node for node in roles.outputs if isinstance(node, Node)}
    for node in reversed(fused):
        if not fused[node] or any(_stores(node, user, fused, level, stored) for user in node.users):
            stored.add(node)
    return stored


def _stores(node: Node, user: Node, fused: dict, level: dict, stored: set[Node]) -> bool:
    """Does this reader need the value in memory?  A view asks on behalf of its own readers."""
    if user not in fused:
        return False
    return not fused[user] or level[user] > level[node] or (user in stored and op_class(user) == "view")


# ---------------------------------------------------------------- less memory than the minimum cut

def saved_bytes(saved: Iterable[Node]) -> int:
    """Bytes kept beyond the inputs."""
    return sum(bytes_of(node) for node in saved if node.op != "placeholder")


def fit_budget(roles: Roles, saved: list[Node], budget: float) -> list[Node]:
    """Runs heavy operators again, those that free most bytes first, until the saved bytes are at most `budget` of what they
    were.  The number of such operators is found by bisection: more of them never save more."""
    limit = budget * saved_bytes(saved)
    heavy = sorted((node for node in saved if _may_run_twice(node)), key=lambda node: -bytes_of(node))
    first = set(heavy)
    heavy += [node for node in roles.nodes if node in roles.forward and node not in first and _may_run_twice(node)]
    low, high, best = 1, len(heavy), choose_saved(roles, _with_tuples(heavy))
    while low < high:
        middle = (low + high) // 2
        tried = choose_saved(roles, _with_tuples(heavy[:middle]))
        if saved_bytes(tried) <= limit:
            high, best = middle, tried
        else:
            low = middle + 1
    return best


def _may_run_twice(node: Node) -> bool:
    return node.op == "call_function" and op_class(node) in ("heavy", "reduce") and node.meta.get("recompute") != "never"


def _with_tuples(nodes: Iterable[Node]) -> frozenset[Node]:
    """With an item of a tuple goes the operator that makes it, and its other items."""
    found: set[Node] = set()
    for node in nodes:
        maker: Any = node.args[0] if node.target is operator.getitem else node
        found.add(maker)
        found.update(user for user in maker.users if user.target is operator.getitem)
    return frozenset(found)


# ---------------------------------------------------------------- building the two graphs

def build(roles: Roles, saved: Iterable[Node]) -> Partition:
    """Cuts the joint graph: the backward takes what it needs of `saved` and computes the rest."""
    available = set(saved)
    reached = ancestors([*roles.gradients, *roles.late_effects], roles.reads, (available | set(roles.tangents)).__contains__)
    kept = [node for node in roles.nodes if node in reached and node in available]
    states = random_states(roles, reached, available)
    kept += states.values()
    kept += size_nodes(roles, reached, kept)
    kept.sort(key=is_size)      # stable: tensors, then sizes
    backward = GraphCopier(roles, states)
    for node in [*kept, *roles.tangents]:
        backward.placeholder(node)
    late = set(roles.late_effects)
    for node in roles.nodes:
        if node in reached and (node in roles.after_tangents or node in late):
            backward.copy(node)
    bw = backward.finish(roles.gradients)
    forward = GraphCopier(roles)
    for node in roles.primals:
        forward.placeholder(node)
    needed = ancestors([*roles.outputs, *roles.effects, *kept], roles.reads)
    for node in roles.nodes:
        if node in needed and node.op != "placeholder":
            forward.copy(node)
    return forward.finish([*roles.outputs, *map(forward.kept, kept)]), bw


def random_states(roles: Roles, reached: set[Node], available: set[Node]) -> dict[Node, Node]:
    """For each draw of the forward that the backward makes again a new node, right before it, that reads the state of its generator."""
    found: dict[Node, Node] = {}
    for node in [n for n in roles.nodes if n in reached and n not in available and n in roles.forward]:
        if isinstance(node.target, torch._ops.OpOverload) and op_class(node) == "random":
            device, named = generator_of(node)
            if device.type == "meta":       # where nothing is drawn
                continue
            with roles.joint.graph.inserting_before(node):
                state = found[node] = append_call(roles.joint.graph, random_state().read, (device,), named)
            state.meta.update(val=abstract_state(device, node.meta["val"]), phase="forward")
            roles.nodes.insert(roles.nodes.index(node), state)
            roles.reads[state] = state.all_input_nodes
            reached.update(state.all_input_nodes)
    return found


def abstract_state(device: torch.device, like: Any) -> torch.Tensor:
    """The value of a node that reads a state, in the world of another node's value."""
    world, spec = getattr(next(tensors_of(like)), "world", None), state_spec(device)
    return world.make(spec) if world is not None else torch.empty([int(size) for size in spec.shape], dtype=spec.dtype)     # type: ignore[arg-type]


def generator_of(node: Node) -> tuple[torch.device, dict[str, Any]]:
    """The device that a node draws on, and the generator that it was given, by name."""
    arguments = node.target._schema.arguments      # type: ignore[union-attr]  # an operator, says who asks
    values = {a.name: value for a, value in zip(arguments, node.args)} | node.kwargs
    given = [values[a.name] for a in arguments if "Generator" in str(a.type) and values.get(a.name) is not None]
    return next(tensors_of(node.meta["val"])).device, {"generator": given[0]} if given else {}


def size_nodes(roles: Roles, reached: set[Node], kept: Sequence[Node]) -> list[Node]:
    """Nodes for the size symbols that the backward mentions and that its other inputs do not bind."""
    env = environment(roles.nodes[:len(roles.primals)])
    if env is None:
        return []
    missing = missing_symbols(reached, [*kept, *roles.tangents], env)
    return [_size_node(roles, symbol, env) for symbol in missing]


def _size_node(roles: Roles, symbol: Expr, env: Any) -> Node:
    """The node that computes a symbol, or a new one that asks an input for it, or a value that was made of data."""
    for node in roles.nodes:
        if is_size(node) and node not in roles.after_tangents and next(sizes_of(node.meta["val"], env), None) is symbol:
            return node
    found = where_bound(symbol, roles.primals, env) or where_bound(symbol, (n for n in roles.nodes if n not in roles.after_tangents), env)
    if found is None:
        raise InternalError(f"The backward needs the size {symbol}, which no input has.")
    source, op, dim = found
    with roles.joint.graph.inserting_before(roles.joint.graph.output_node()):
        node = append_call(roles.joint.graph, op, (source, dim), {})
    node.meta.update(val=to_symint(symbol, env), phase="forward")
    roles.nodes.append(node)
    roles.reads[node] = [source]
    return node


def views_to(node: Node) -> list[Node]:
    """The chain of views that ends with this node, the first one first.  An item is one where its tuple holds views."""
    chain: list[Node] = []
    while node.op == "call_function" and op_class(node) == "view":
        viewed = node.args[0] if node.args else None
        if not isinstance(viewed, Node):
            break
        chain.append(node)
        node = viewed
    return chain[::-1]


def _copy_of(base: Node, spec: Any) -> tuple[Any, tuple]:
    """The call that copies a value with its strides, holes included: the backward's kernels read it by these."""
    if spec is None or spec.strides == contiguous_strides(spec.shape):
        return torch.ops.aten.clone.default, (base,)
    return torch.ops.aten.copy.default, (base, base)


def _from_start(value: Any, start: Any, dtype: torch.dtype | None) -> Any:
    """A value, or a view of it, with a storage offset less by `start` elements of `dtype`: it is at the front of a storage now."""
    return value if dtype is None or type(start) is int and start == 0 else moved(value, -start, dtype)


class GraphCopier:
    """Builds a graph from nodes of the joint graph; a node is copied just before its first reader, so that recomputed values
    live shortly."""

    def __init__(self, roles: Roles, states: Mapping[Node, Node] | None = None):
        self.roles, self.graph = roles, Graph()
        self.states = states or {}      # draw that is recomputed -> the state of its generator
        self.copies: dict[Node, Node] = {}

    def placeholder(self, node: Node) -> None:
        copy = self.copies[node] = self.graph.create_node("placeholder", node.name, name=node.name)
        copy.meta = dict(node.meta)

    def copy(self, node: Node) -> None:
        """Copies the node and, before it, what it reads and what is not there yet."""
        copies, reads = self.copies, self.roles.reads
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in reads[top] if n not in copies]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if top not in copies:
                copies[top] = self._copy_one(top)

    def _copy_one(self, node: Node) -> Node:
        if node.op != "call_function":
            return self.graph.node_copy(node, self.copies.__getitem__)
        state = self.states.get(node)
        before = self._set_state(random_state().swap, self.copies[state], state) if state is not None else None
        copy = append_call(self.graph, node.target, map_arg(node.args, self.copies.__getitem__), map_arg(node.kwargs, self.copies.__getitem__))
        copy.meta = dict(node.meta)
        if state is not None and before is not None:
            self._set_state(random_state().put_back, before, state).meta["val"] = None
        return copy

    def _set_state(self, op: Any, value: Node, like: Node) -> Node:
        """A call that sets the state of the generator that the state `like` is of."""
        call = append_call(self.graph, op, (value, *like.args), map_arg(like.kwargs, self.copies.__getitem__))
        call.meta = dict(like.meta)
        return call

    def kept(self, node: Node) -> Node:
        """What the forward returns for a saved value; where it aliases an input that will be mutated, the same view of a copy."""
        views, base = views_to(node), base_of(node)
        if not (base.op == "placeholder" and base.meta.get("mutated")) or is_size(node):
            return node
        spec = getattr(base.meta["val"], "spec", None)
        copy = append_call(self.graph, *_copy_of(self.copies[base], spec), {})
        start, dtype = (spec.offset, spec.dtype) if spec is not None else (0, None)      # the copy begins at the front of its own storage
        copy.meta = {key: value for key, value in base.meta.items() if key != "mutated"} | {"val": _from_start(base.meta["val"], start, dtype)}
        for view in views:
            rest, options = map_arg((view.args[1:], view.kwargs), self.copies.__getitem__)
            if view.target is torch.ops.aten.as_strided.default and isinstance(rest[2], int) and isinstance(start, int):
                rest = (rest[0], rest[1], rest[2] - counted_in(view.meta["val"].dtype, start, dtype or view.meta["val"].dtype))
            copy = append_call(self.graph, view.target, (copy, *rest), options)
            copy.meta = dict(view.meta) | {"val": _from_start(view.meta["val"], start, dtype)}
        self.copies[copy] = copy
        return copy

    def finish(self, results: Sequence[Any]) -> GraphModule:
        for node in results:
            if isinstance(node, Node) and node not in self.copies:
                self.copy(node)
        output = self.graph.output(tuple(self.copies[r] if isinstance(r, Node) else r for r in results))
        output.meta["val"] = tuple(r.meta.get("val") if isinstance(r, Node) else r for r in results)
        return LazyModule(self.roles.joint, self.graph)


PartitionFn = Callable[..., Partition]
