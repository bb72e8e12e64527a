"""torch.autograd.Function: a call of `apply` becomes one node, which holds a graph of the forward and one of the backward.

Both are executed symbolically on trial when `apply` is called, the backward on stand-ins for the gradients that will arrive, so whatever
they read is guarded, and tensors that they read beside the arguments are inputs of the node.  The node applies a function of the same
kind that runs the two graphs.  A break in the forward, or an effect of it on the user's objects, is a break of the whole call, and the
forward is compiled on its own (parts.py); in the backward it
makes the call a seam: the class's own `apply` is called for real, between two compiled graphs.
Where no gradient is wanted the forward is inlined.  What the user has put into the graph as it is (allow_in_graph), and functions with
rules of their own for vmap or forward mode, are one node that calls the class's own `apply`.

    class Double(Function): ...
    Double.apply(x) * w         # double = Double_apply(x); mul = double * w
"""
from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch.autograd.function import once_differentiable

from firesteel import transaction
from firesteel.autograd.custom import CustomFunction, ValueRef
from firesteel.autograd.regions import module_of
from firesteel.autograd.seams import is_seam_function
from firesteel.capture import marks, polyfills
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import UserRaise, Value
from firesteel.capture.values.class_objects import INSTANTIATE, ClassValue
from firesteel.capture.values.const import NONE
from firesteel.capture.values.containers import Sequence as SequenceValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import NATIVE_CALLS, Args, Kwargs
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.tensor import TensorValue, wrap_output
from firesteel.capture.values.torch_calls import call_graph, run_abstract
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.errors import Break
from firesteel.homes import is_in_package

Node = torch.fx.Node
BASE = torch.autograd.function._SingleLevelFunction
_once: Any = once_differentiable(print)
ONCE = _once.__code__       # of the wrapper


class TrialContext:
    """Stands for `ctx` while forward and backward are tried."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    dirty: tuple[Any, ...] = ()
    constant: tuple[Any, ...] = ()
    materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def call_apply(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Wherever the bound method was read: of the class, by an alias, by super() in an `apply` of the user's."""
    cls = m.look(args[0])
    if not isinstance(cls, ClassValue):
        raise Break("autograd_function", name="torch.autograd.Function.apply")
    return Application(cls.cls).call(m, args[1:], kwargs)


_apply: Any = torch.autograd.Function.apply
if isinstance(_apply, types.MethodType):
    CALLS.add(_apply.__func__, call_apply)
else:       # since torch 2.15 it is C++'s own, bound to the class
    @NATIVE_CALLS.row("custom functions")
    def call_native_apply(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Value | None:
        owner: Any = getattr(fn, "__self__", None)
        of_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and fn.__name__ == "apply"
        return Application(owner).call(m, args, kwargs) if of_function else None


class Application:
    """Calls of cls.apply."""

    def __init__(self, cls: type[torch.autograd.Function]):
        self.cls = cls

    def describe(self) -> str:
        return f"{self.cls.__qualname__}.apply"

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        args, kwargs = self._bound(m, [m.look(value) for value in args], kwargs)
        tensors = [value.abstract for value in args if isinstance(value, TensorValue)]
        if kwargs or self._is_whole() or any(is_wrapper_class(type(t)) for t in tensors):
            return self._as_it_is(m, args, kwargs)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            context = ObjectValue(TrialContext)
            m.effects.store_attr(context, "needs_input_grad", m.fresh((False,) * len(args)))
            return m.constant_object(polyfills.apply_forward).call(m, [m.constant_object(self.cls), context, *args], {})
        try:
            return Trial(m, self.cls, args).node(m)
        except BackwardBreak:
            self._try_forward(m, args, kwargs)
            return call_graph(m, "call_function", apply_of(self.cls, made_for_real=True), args, kwargs)

    def _bound(self, m: Machine, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Where setup_context stands apart, torch fills in the forward's defaults."""
        if self.cls.setup_context is BASE.setup_context:
            return args, kwargs
        signature = inspect.signature(self.cls.forward)
        try:
            bound = signature.bind(*args, **{name: m.look(value) for name, value in kwargs.items()})
        except TypeError:       # the real call raises it
            raise Break("autograd_function", name=self.describe()) from None
        for name, parameter in signature.parameters.items():
            if name not in bound.arguments and parameter.default is not parameter.empty:
                bound.arguments[name] = m.constant_object(parameter.default)
        bound.arguments = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
        return list(bound.args), bound.kwargs

    def _is_whole(self) -> bool:
        """Does the graph hold calls of the class itself?"""
        own = self.cls.jvp is not BASE.jvp or self.cls.vmap is not torch.autograd.Function.vmap
        return own or marks.is_marked(self.cls, marks.ALLOWED)

    def _as_it_is(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if not marks.is_marked(self.cls, marks.ALLOWED):
            self._try_forward(m, args, kwargs)
        return call_graph(m, "call_function", apply_of(self.cls), args, kwargs)

    def _try_forward(self, m: Machine, args: Args, kwargs: Kwargs) -> None:
        with on_trial(m) as refuse:
            m.call_now(m.constant_object(polyfills.apply_forward), [m.constant_object(self.cls), ObjectValue(TrialContext), *args], kwargs)
            refuse(f"{self.describe()}, whose forward")


class FunctionObject(Value):
    """An instance, as in Double().apply(x): all that it is good for."""

    form = "{cls}()"

    def __init__(self, cls: type[torch.autograd.Function]):
        self.cls = cls

    def getattr(self, m: Machine, name: str) -> Value:
        return m.constant_object(self.cls).getattr(m, name) if name == "apply" else super().getattr(m, name)


@INSTANTIATE.row("autograd function")
def new_function(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    made = issubclass(cls, torch.autograd.Function) and not args and not kwargs and cls.__init__ is torch.autograd.Function.__init__
    return FunctionObject(cls) if made else None


@functools.cache
def apply_of(cls: type[torch.autograd.Function], made_for_real: bool = False) -> Callable[..., Any]:
    """cls.apply as a function of its own: fx writes a method of torch by a name that is not there."""
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    apply.__module__ = __name__ if is_in_package(cls.__module__, "torch") else cls.__module__       # printed graphs look for names of torch in torch
    apply.made_for_real = made_for_real     # type: ignore[attr-defined]
    return apply


@transaction.context
def on_trial(m: Machine) -> Iterator[Callable[[str], None]]:
    """Inside, calls are as torch makes them, without gradients; afterwards the capture is as before.  Gives a function that refuses effects."""
    mark, draws = m.checkpoint(), m.draws
    m.states.initial.setdefault(("grad",), torch.is_grad_enabled())
    with torch.no_grad():
        try:
            yield functools.partial(refuse_effects, m, mark, draws)
        finally:
            m.rollback(mark)        # here: it also undoes what set the mode inside


def refuse_effects(m: Machine, mark: tuple[Any, ...], draws: tuple[Any, ...], name: str) -> None:
    """What the function did besides computing would be done at other times, and as often as it is traced."""
    seams = any(node.op == "call_function" and is_seam_function(node.target) for node in m.record.nodes[mark[0][0]:])
    if seams or len(m.effects.entries) > mark[1][0] or m.draws is not draws:
        raise Break("autograd_function", name=f"{name} changes objects outside of it")


# -- the trial ------------------------------------------------------------------------------------------------------------
def gradient(place: int) -> None:
    """Stands for a gradient that arrives while the backward is recorded."""


class BackwardBreak(Exception):
    """The forward can be captured, the backward not."""


class Trial:
    """Forward and backward of one call, executed symbolically; afterwards the capture is as before, but for guards."""

    def __init__(self, m: Machine, cls: type[torch.autograd.Function], args: Args):
        self.cls, self.args = cls, args
        self.direct = [value.node for value in args if isinstance(value, TensorValue)]      # an in-place call changes which node stands for it
        start = len(m.record.nodes)
        with on_trial(m) as refuse:
            context = ObjectValue(TrialContext)
            m.effects.store_attr(context, "needs_input_grad", m.fresh(tuple(is_tracked(value) for value in args)))
            out = m.look(m.call_now(m.constant_object(polyfills.apply_forward), [m.constant_object(cls), context, *args], {}))
            self.single = not isinstance(out, TupleValue)
            self.outputs = [m.look(item) for item in out.items] if isinstance(out, TupleValue) else [out]
            behind = len(m.record.nodes)
            refuse(f"{cls.__qualname__}.apply, whose forward")
            given = [self._gradient(m, place, value) for place, value in enumerate(self.outputs)]
            try:
                found = self._gradients(m, context, given)
                refuse(f"{cls.__qualname__}.apply, whose backward")
            except (Break, UserRaise) as stop:
                raise BackwardBreak from stop
            self._write(m, context, m.record.nodes[start:behind], m.record.nodes[behind:], found)

    def _gradient(self, m: Machine, place: int, output: Value) -> Value:
        if not isinstance(output, TensorValue):
            if not output.is_constant():
                raise Break("autograd_function", name=f"{self.cls.__qualname__} gives {output.describe()}")
            return NONE
        like = run_abstract(m, torch.empty_like, [output.abstract], {}, "the gradient of a result")
        made = TensorValue(m.record.call_function(gradient, (place,), {}, like), like)
        m.record.own(like, made)
        return made

    def _attribute(self, m: Machine, context: ObjectValue, name: str) -> Value:
        return m.look(m.finish_now(context.getattr(m, name)))

    def _gradients(self, m: Machine, context: ObjectValue, given: list[Value]) -> list[Value]:
        """What the backward gives, one for each argument.  Which of several gradients arrive is not known where None stands for missing ones."""
        if len(given) > 1 and not self._attribute(m, context, "materialize_grads").constant():
            raise Break("autograd_function", name="a backward with set_materialize_grads(False)")
        own = self.cls.vjp if self.cls.backward is BASE.backward else self.cls.backward
        result = m.look(m.call_now(m.constant_object(own), [context, *given], {}))
        found = [m.look(item) for item in result.iterate(m)] if isinstance(result, SequenceValue) else [result]
        missing = found[len(self.args):]
        usable = all(isinstance(g, TensorValue) and isinstance(a, TensorValue) or g.is_constant() and g.constant() is None
                     for g, a in zip(found, self.args))
        if len(found) < len(self.args) or not usable or any(not g.is_constant() or g.constant() is not None for g in missing):
            raise Break("autograd_function", name=f"the backward of {self.cls.__qualname__} gives something else than a gradient for each argument")
        return found[:len(self.args)]

    def _write(self, m: Machine, context: ObjectValue, forward: list[Node], backward: list[Node], gradients: list[Value]) -> None:
        """The two graphs, and where the backward's inputs come from."""
        behind = {node: place for node in backward if node.target is gradient and isinstance(place := node.args[0], int)}
        outputs = [value.node for value in self.outputs if isinstance(value, TensorValue)]
        wanted = [value.node if isinstance(value, TensorValue) else None for value in gradients]
        read = outside_of(backward, wanted)
        inner = set(forward)
        extras = list(dict.fromkeys(node for node in read if node in inner and node not in outputs))
        direct = self.direct
        beside = outside_of(forward, [*outputs, *(node for node in read if node not in inner)])
        self.inputs = [*direct, *(node for node in beside if node not in direct)]
        results = [*outputs, *extras]
        self.forward = as_module("Forward", self.inputs, forward, results)
        self.backward = as_module("Backward", [*(node for node, _ in sorted(behind.items(), key=operator.itemgetter(1))), *read],
                                  [node for node in backward if node not in behind], wanted)
        marked = {name: [m.look(value) for value in self._attribute(m, context, name).iterate(m)] for name in ("saved_tensors", "dirty", "constant")}
        saved, constant = ([value.as_arg(m)[0] for value in marked[name]] for name in ("saved_tensors", "constant"))
        places = [value_ref(node, self.inputs, results, node in saved) for node in read]
        tensors = [value for value in self.args if isinstance(value, TensorValue)]
        self.recipe = CustomFunction(
            self.cls.__name__, self.cls.__module__, getattr(self.cls.backward, "__code__", None) is ONCE, self.cls.generate_vmap_rule,
            self.forward, self.backward, len(outputs), places, [k for k, value in enumerate(tensors) if value in marked["dirty"]],
            [*(outputs.index(node) for node in constant if node in outputs), *range(len(outputs), len(results))],
            [k for k, value in enumerate(gradients) if isinstance(self.args[k], TensorValue)], len(self.inputs))

    def node(self, m: Machine) -> Value:
        """The call in the graph."""
        apply = self.recipe.applied()
        out = run_abstract(m, apply, [node.meta["val"] for node in self.inputs], {}, f"{self.cls.__qualname__}.apply")
        node = m.record.call_function(apply, tuple(self.inputs), {}, out)
        items = iter(range(self.recipe.outputs))
        values = [value if not isinstance(value, TensorValue) else self._item(m, node, out, next(items)) for value in self.outputs]
        return values[0] if self.single else TupleValue(values)

    def _item(self, m: Machine, node: Node, out: Any, place: int) -> Value:
        return wrap_output(m, out[place], m.record.call_function(operator.getitem, (node, place), {}, out[place]))


def value_ref(node: Node, inputs: list[Node], results: list[Node], saved: bool) -> ValueRef:
    is_input = node not in results
    return ValueRef(is_input, (inputs if is_input else results).index(node), saved)


def is_tracked(value: Value) -> bool:
    return isinstance(value, TensorValue) and value.abstract.requires_grad


def outside_of(nodes: Sequence[Node], results: Sequence[Any]) -> list[Node]:
    """What the nodes read, and what of the results is, outside of them, in order."""
    inside = set(nodes)
    read = [before for node in nodes for before in node.all_input_nodes] + [node for node in results if node is not None]
    return list(dict.fromkeys(node for node in read if node not in inside))


def as_module(name: str, inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Any]) -> torch.fx.GraphModule:
    """The nodes as a graph of their own."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for number, node in enumerate(inputs):
        placeholder = graph.placeholder(f"{node.name}_{number}")        # a tensor may be given twice
        placeholder.meta = dict(node.meta)
        copies.setdefault(node, placeholder)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for node in results))
    return module_of(graph, name)
