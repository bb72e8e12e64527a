"""torch.autograd.grad, torch.autograd.backward and Tensor.backward inside of the program.

The abstract tensors have torch's own history, so gradients are one node (`backwards.gradients`), and what `backward` would accumulate into are
the leaves found by walking that history.  The rest of it is done as torch's AccumulateGrad does:

1. A leaf without a gradient gets a fresh one, an effect; else its gradient is added to, in place; under create_graph, out of place.
2. Hooks of a leaf are inlined: those of the gradient before it is accumulated or given back, the others behind that, leaf after leaf in the
   engine's order.
3. That a leaf is one, and how many hooks it has, is guarded.
4. A history that is not all in the graph (a tensor that came in has one from before; a hook on an intermediate makes a seam) is a break.
5. Where the engine itself captures backwards (compiled autograd), the call is a break, and the engine's.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.variable import Variable

from firesteel.autograd.backwards import (
    History,
    after_hooks,
    fresh_gradient,
    gradient_hooks,
    gradients,
    has_layout_of,
    history_of,
    late_after_hooks,
    late_gradient_hooks,
)
from firesteel.autograd.seams import is_seam_function, retain_here
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Call, Item
from firesteel.capture.values.base import LazyValue, Value
from firesteel.capture.values.const import FALSE, NONE, TRUE, ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.hooks import InputHandle
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.number import ask
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.capture.values.torch_states import StateQuery, guard_answer
from firesteel.errors import Break
from firesteel.torchstate import is_tracked


# -- compiled autograd --------------------------------------------------------------------------------------------------
def engine_captures() -> bool:
    """Does the engine capture the backwards that this thread starts?"""
    asked = getattr(Variable._execution_engine, "captures", None)
    return asked is not None and asked()


def leave_to_engine(m: Machine, name: str) -> None:
    """Rule 5."""
    guard_answer(m, StateQuery(engine_captures, (), ()))
    if engine_captures():
        raise Break("gradient", name=f"{name} under compiled autograd")


# -- histories ----------------------------------------------------------------------------------------------------------
def known_history(m: Machine, roots: Sequence[TensorValue], name: str, wanted: Sequence[TensorValue] = ()) -> History:
    """Rules 3 and 4.  Only inputs can be in the history of an input; behind a wanted one the history does not matter."""
    came = [tensor for tensor in wanted if tensor.source is not None]
    found = history_of([root.abstract for root in roots], came[0].abstract if len(came) == 1 else None)
    if found.outside and (came or not wanted):
        raise Break("gradient", name=f"{name} with a history from before the region")
    if cuts_history(m.record.nodes):
        raise Break("gradient", name=f"{name} through a hook on an intermediate tensor")
    return found


def cuts_history(nodes: list[torch.fx.Node]) -> bool:
    """Is there a seam behind something that has a history?"""
    tracked = False
    for node in nodes:
        if node.op == "call_function" and is_seam_function(node.target) and node.target is not retain_here and tracked:
            return True
        val = node.meta.get("val")
        tracked = tracked or isinstance(val, torch.Tensor) and is_tracked(val)
    return False


# -- leaves and their hooks ---------------------------------------------------------------------------------------------
def leaf_facts(leaf: torch.Tensor) -> tuple[bool, int, int]:
    """(is it one, number of hooks on its gradient, number of hooks behind that)"""
    first, then = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return leaf.is_leaf, 0 if not first else len(first), 0 if not then else len(then)


def leaf_value(m: Machine, abstract: torch.Tensor, name: str) -> TensorValue:
    found: Any = m.record.owner(abstract)
    if found is None or found.python_type() not in (torch.Tensor, torch.nn.Parameter):
        raise Break("gradient", name=f"{name} of another kind of tensor")
    if found.source is not None and not any(made.leaf is found for made in m.leaves.filled):
        m.guard(Guard(Call(found.source, leaf_facts), "equals", leaf_facts(found.real)))
    return found


REGISTERING: dict[Any, str] = {gradient_hooks: "register_hook", after_hooks: "register_post_accumulate_grad_hook"}


def hooks_of(m: Machine, leaf: TensorValue, kind: Callable[[torch.Tensor], tuple[Any, ...]]) -> list[Value]:
    """Those that it came with, and those that the program has put on it."""
    if leaf.source is None:
        return []
    place = Call(leaf.source, kind)
    handles = [e.target for e in m.effects.entries if isinstance(e.target, InputHandle) and e.kind == "register" and e.target.tensor is leaf]
    removed = [e.target for e in m.effects.entries if e.kind == "remove_hook"]
    return [*(m.look(LazyValue(hook, Item(place, n))) for n, hook in enumerate(kind(leaf.real))),
            *(handle.args[0] for handle in handles if handle.method == REGISTERING[kind] and handle not in removed)]


def _late(kind: Callable[[torch.Tensor], tuple[Any, ...]], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    leaf = m.look(args[0])
    if not isinstance(leaf, TensorValue) or leaf.source is None or leaf.python_type() not in (torch.Tensor, torch.nn.Parameter):
        return TupleValue([])       # a class of the user's may watch what is read
    m.guard(Guard(Call(leaf.source, leaf_facts), "equals", leaf_facts(leaf.real)))
    return TupleValue(hooks_of(m, leaf, kind)[m.known(m.look(args[1])):])


CALLS.add(late_gradient_hooks, functools.partial(_late, gradient_hooks))
CALLS.add(late_after_hooks, functools.partial(_late, after_hooks))


# -- torch.autograd.grad ------------------------------------------------------------------------------------------------
def tensors_in(m: Machine, value: Value, name: str) -> list[Any]:
    """A tensor or a sequence of them."""
    value = m.look(value)
    found = [value] if isinstance(value, TensorValue) else [m.look(item) for item in value.iterate(m)]
    if not all(isinstance(item, TensorValue) for item in found):
        raise Break("abstract_failure", name=name, text="an argument is no tensor")
    return found


GRAD_ARGUMENTS = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched",
                  "materialize_grads")


@CALLS.row(torch.autograd.grad)
def call_grad(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    name = "torch.autograd.grad"
    if (found := m.overridden("call_function", torch.autograd.grad, args, kwargs)) is not None:
        return found
    leave_to_engine(m, name)
    given = {key: m.look(value) for key, value in (dict(zip(GRAD_ARGUMENTS, args)) | kwargs).items()}
    if not {"outputs", "inputs"} <= given.keys() or given.get("only_inputs", TRUE).truth(m) is False:
        raise Break("abstract_failure", name=name, text="such arguments")
    inputs = given["inputs"]
    roots, wanted = tensors_in(m, given["outputs"], name), tensors_in(m, dict_values(m, inputs), name)
    history = known_history(m, roots, name, wanted)
    hooks = {leaf: hooks_on_gradient(m, leaf, history, name) for leaf in wanted}
    if given.get("is_grads_batched", FALSE).truth(m):
        if any(hooks.values()) or isinstance(inputs, DictValue):
            raise Break("gradient", name=f"{name} of a batch, of such inputs")
        return call_graph(m, "call_function", torch.autograd.grad, args, kwargs)
    keep, create = settings_of(m, given)
    tangents = tangents_in(m, given.get("grad_outputs", NONE), roots)
    check_start(roots, tangents, name)
    if not wanted or not all(tensor.abstract.requires_grad for tensor in wanted):
        raise Break("abstract_failure", name=name, text="inputs must require a gradient")
    made = taken(m, roots, tangents, wanted, keep, create)
    before = torch.is_grad_enabled()
    if any(hooks.values()):
        m.states.set([(("grad",), create)])
        made = [through_hooks(m, gradient, hooks[tensor]) for tensor, gradient in zip(wanted, made)]
        m.states.set([(("grad",), before)])
    return as_asked(m, inputs, wanted, made, given, name)


def dict_values(m: Machine, inputs: Value) -> Value:
    return TupleValue([value for _, value in inputs.know_all(m).values()]) if isinstance(inputs, DictValue) else inputs


def hooks_on_gradient(m: Machine, tensor: TensorValue, history: History, name: str) -> list[Value]:
    if any(tensor.abstract is leaf for leaf in history.leaves):
        return hooks_of(m, leaf_value(m, tensor.abstract, name), gradient_hooks)
    if tensor.source is not None:
        m.guard(Guard(Call(tensor.source, leaf_facts), "equals", leaf_facts(tensor.real)))
        if tensor.real._backward_hooks:
            raise Break("gradient", name=f"{name} of a tensor with hooks")
    return []


def as_asked(m: Machine, inputs: Value, wanted: list[TensorValue], made: list[Value], given: Kwargs, name: str) -> Value:
    """What grad returns, given its settings for inputs that the outputs do not depend on."""
    zeros, unused = given.get("materialize_grads", FALSE).truth(m), given.get("allow_unused", NONE)
    if unused is not NONE and zeros and not unused.truth(m) or not zeros and NONE in made and (unused is NONE or not unused.truth(m)):
        raise Break("abstract_failure", name=name, text="the outputs do not depend on an input")
    if zeros:
        made = [call_graph(m, "call_function", torch.zeros_like, [tensor], {}) if gradient is NONE else gradient
                for tensor, gradient in zip(wanted, made)]
    if not isinstance(inputs, DictValue):
        return TupleValue(made)
    return DictValue({hashed: (key, gradient) for (hashed, (key, _)), gradient in zip(inputs.know_all(m).items(), made)})


# -- what both do -------------------------------------------------------------------------------------------------------
def settings_of(m: Machine, given: Kwargs) -> tuple[bool, bool]:
    """(retain_graph, create_graph)"""
    create = m.look(given.get("create_graph", FALSE)).truth(m)
    retain = m.look(given.get("retain_graph", NONE))
    return create if retain is NONE else retain.truth(m), create


def tangents_in(m: Machine, given: Value, roots: list[TensorValue]) -> list[Value]:
    if given is NONE:
        return [NONE] * len(roots)
    return [given] if isinstance(given, TensorValue) else [m.look(item) for item in given.iterate(m)]


def taken(m: Machine, roots: list[TensorValue], tangents: list[Value], wanted: list[TensorValue], keep: bool, create: bool) -> list[Value]:
    """The gradients, by one node."""
    found = call_graph(m, "call_function", gradients, [TupleValue([*roots]), TupleValue(tangents), TupleValue([*wanted]),
                                                       ConstValue(keep), ConstValue(create)], {})
    return [m.look(item) for item in found.iterate(m)]


def through_hooks(m: Machine, gradient: Value, hooks: list[Value]) -> Value:
    for hook in hooks if gradient is not NONE else ():
        changed = m.call_now(hook, [gradient], {})
        gradient = gradient if changed is NONE else changed
        if not isinstance(gradient, TensorValue):
            raise Break("gradient", name="a hook that gives no gradient")
    return gradient


# -- backward -----------------------------------------------------------------------------------------------------------
@TENSOR_METHODS.row("backward")
def method_backward(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args)) | kwargs
    return backward(m, [tensor], [m.look(given.get("gradient", NONE))], given)


@CALLS.row(torch.autograd.backward)
def call_backward(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args)) | kwargs
    roots = tensors_in(m, given["tensors"], "torch.autograd.backward")
    if m.look(given.get("grad_variables", NONE)) is not NONE:
        raise Break("gradient", name="torch.autograd.backward with grad_variables")
    return backward(m, roots, tangents_in(m, m.look(given.get("grad_tensors", NONE)), roots), given)


def backward(m: Machine, roots: list[TensorValue], tangents: list[Value], given: Kwargs) -> Value:
    name = "Tensor.backward"
    leave_to_engine(m, name)
    keep, create = settings_of(m, given)
    check_start(roots, tangents, name)
    history = known_history(m, roots, name)
    wanted = m.look(given.get("inputs", NONE))
    retained = retaining(m, wanted, keep, name)
    leaves = [leaf_value(m, leaf, name) for leaf in history.leaves] if wanted is NONE else wanted_leaves(m, wanted, name)
    if not leaves and not retained:
        return NONE
    before = torch.is_grad_enabled()
    made = taken(m, roots, tangents, [*leaves, *retained], keep, create)
    if any(gradient is NONE for gradient in made[len(leaves):]):
        raise Break("gradient", name=f"{name} that does not reach a tensor that retains its gradient")
    shared = None if create or history.python else shared_memory(m, made)
    m.states.set([(("grad",), create)])
    for leaf, gradient in zip([*leaves, *retained], made):
        if isinstance(gradient, TensorValue):
            accumulate(m, leaf, gradient, create, shared)
    m.states.set([(("grad",), before)])
    return NONE


def shared_memory(m: Machine, made: list[Value]) -> set[int]:
    """The storages that several tensors alias: a gradient that aliases nothing can be kept as it is."""
    tensors = [abstract for abstract, _ in m.record.tensors.values()]
    again = [item.abstract for n, item in enumerate(made) if isinstance(item, TensorValue) and item in made[:n]]
    return {place for place, count in Counter(map(m.world.memory, [*tensors, *again])).items() if count > 1}


def check_start(roots: list[TensorValue], tangents: list[Value], name: str) -> None:
    """What torch checks first: where it would complain, the call is made for real, and does."""
    if len(roots) != len(tangents):
        raise Break("abstract_failure", name=name, text="as many gradients as tensors are needed")
    for root, tangent in zip(roots, tangents):
        shape = root.abstract.shape
        if tangent is NONE:
            right = root.abstract.is_floating_point() and ask(bool, root.abstract.numel() == 1)
        else:
            right = isinstance(tangent, TensorValue) and tangent.abstract.dtype.is_complex == root.abstract.dtype.is_complex \
                and len(shape) == tangent.abstract.dim() and all(ask(bool, a == b) for a, b in zip(shape, tangent.abstract.shape))
        if not right or not root.abstract.requires_grad:
            raise Break("abstract_failure", name=name, text="what it starts from has no gradient, or one of another shape")


def wanted_leaves(m: Machine, wanted: Value, name: str) -> list[TensorValue]:
    """Those of `inputs=`."""
    leaves = tensors_in(m, wanted, name)
    if not leaves or not all(leaf.abstract.requires_grad and leaf.abstract.is_leaf for leaf in leaves):
        raise Break("abstract_failure", name=name, text="inputs must be leaves that require a gradient")
    return [leaf_value(m, leaf.abstract, name) for leaf in dict.fromkeys(leaves)]


def accumulate(m: Machine, leaf: TensorValue, gradient: Any, create: bool, shared: set[int] | None) -> None:
    """Rules 1 and 2."""
    given, gradient = gradient, through_hooks(m, gradient, hooks_of(m, leaf, gradient_hooks))
    old = m.look(leaf.getattr(m, "grad")) if leaf.abstract.is_leaf else m.effects.written(leaf, "grad") or NONE
    if old is NONE:
        kept = gradient is given and shared is not None and m.world.memory(gradient.abstract) not in shared \
            and has_layout_of(gradient.abstract, leaf.abstract)
        leaf.setattr(m, "grad", gradient if kept else call_graph(m, "call_function", fresh_gradient, [leaf, gradient], {}))
    elif create:
        leaf.setattr(m, "grad", m.binary("+", old, gradient))
    else:
        call_graph(m, "call_method", "add_", [old, gradient], {})
    for hook in hooks_of(m, leaf, after_hooks):
        if m.call_now(hook, [leaf], {}) is not NONE:
            raise Break("gradient", name="a hook behind a gradient that gives something")


# -- retain_grad --------------------------------------------------------------------------------------------------------
def retaining(m: Machine, wanted: Value, keep: bool, name: str) -> list[TensorValue]:
    """The intermediates on which retain_grad was called: this backward gives them their gradients, and no other comes."""
    seams = [node for node in m.record.nodes if node.target is retain_here]
    if seams and (keep or wanted is not NONE):
        raise Break("gradient", name=f"{name} that is not the last, through a tensor that retains its gradient")
    found: list[Any] = [m.record.owner(node.args[0].meta["val"]) for node in seams]     # type: ignore[union-attr]  # a tensor's node
    for node in seams:
        m.record.drop(node)
    return found
