"""Hooks: Tensor.register_hook and its relatives, handles, and the hooks of modules.

Numbered rules:
1. A hook on a tensor that came in is an effect: the real hook is put on the real tensor after the graph call.  A hook on a leaf may be
   put there at any time; on another tensor only where the program does not overwrite it afterwards, else the call breaks.
2. A hook on an intermediate, or on a tensor that came in and was overwritten before, is a *seam* (autograd/seams.py) right behind the node that
   makes the tensor, however late it is registered: what was computed from the tensor before then hands its gradient through the hook,
   as in eager.
3. What a hook is, and what it holds, is no business of the graph: nothing of it is guarded, and a function that was only handed on is
   guarded by its type alone (`FunctionValue.use`).
4. The hooks of a module are guarded by their number and kinds (`hook_layout`), never by their ids, which differ between equal modules.
5. A hook that is registered on a module inside stands in the tables that calls of the module read from then on; registering and removing are
   effects too, so the module has it for real after the graph call.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.modules.module as module_internals
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.hooks import BackwardHook, RemovableHandle

from firesteel.autograd.backwards import is_gradient_call
from firesteel.autograd.seams import hook_here, module_ends, module_starts, retain_here
from firesteel.capture.effects import REPLAY
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import MODULE_HOOKS, Call, Item, Nth, OwnDict, Source
from firesteel.capture.values.base import CannotRebuild, LazyValue, MethodOfOwner, OpaqueValue, Value
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.containers import NamedTupleValue, TupleValue, gives_none
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue
from firesteel.errors import Break


# -- hooks on tensors ---------------------------------------------------------------------------------------------------
class HandleValue(Value):
    """The RemovableHandle of a hook that was registered here."""

    words = "handle of a hook"
    cls = RemovableHandle
    always_true = True

    def getattr(self, m: Machine, name: str) -> Value:
        return MethodOfOwner(self, name, gives_none(lambda m, *given: self.remove(m))) if name == "remove" else super().getattr(m, name)

    def remove(self, m: Machine) -> None:
        m.effects.do("remove_hook", self)


class RealHandle(OpaqueValue):
    """A handle from before: what it removes may be a hook that was looked at, so removing is done for real."""

    def getattr(self, m: Machine, name: str) -> Value:
        return RealMethod(self, name) if name == "remove" else super().getattr(m, name)


class RealMethod(MethodOfOwner):
    """handle.remove of such a handle"""

    words = "RemovableHandle.{self.name}"


class InputHandle(HandleValue):
    """A call of one of the registering methods on a tensor that came in.  Writing the handle makes the call: rule 1."""

    def __init__(self, m: Machine, tensor: TensorValue, method: str, args: Args):
        self.tensor, self.method, self.args, self.birth = tensor, method, args, m.steps
        self.version = None if tensor.abstract.is_leaf else tensor.abstract._version

    def rebuild(self, e: Emitter) -> str:
        if self.version is not None and self.tensor.abstract._version != self.version:
            raise CannotRebuild(self, self.birth)
        tensor, args = e.expr(self.tensor), ", ".join(map(e.expr, self.args))
        known = e.written(self)             # the hook itself holds the handle
        return known if known is not None else e.assign(f"{tensor}.{self.method}({args})")


class LateValue(Value):
    """What a seam gave: a Python object among the graph's outputs."""

    def __init__(self, node: torch.fx.Node):
        self.node = node

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.node, None

    def rebuild(self, e: Emitter) -> str:
        return e.graph_output(self)


class LateHandle(HandleValue):
    """The handle of a hook on an intermediate."""

    def __init__(self, late: LateValue):
        self.late = late

    def rebuild(self, e: Emitter) -> str:
        return e.assign(f"{e.expr(self.late)}.handle")


REPLAY.add("register", lambda e, t, d, n: "")          # writing the handle has made the call
REPLAY.add("remove_hook", lambda e, t, d, n: f"{t}.remove()")
REPLAY.add("late_hook", lambda e, t, d, n: f"{t}.hook = {d[0]}")


def put_seam(m: Machine, tensor: TensorValue, fn: Any) -> torch.fx.Node:
    """A seam behind the node that makes the tensor, and behind those that are there already: rule 2."""
    anchor = tensor.node
    while anchor.next.target in (hook_here, retain_here) and anchor.next.args[0] is tensor.node:
        anchor = anchor.next
    if any(map(is_gradient_call, m.record.behind(anchor))):
        raise Break("hook", name="a hook on a tensor through which a gradient was taken")
    return m.record.insert_after(anchor, fn, (tensor.node,))


def stands_outside(tensor: TensorValue) -> bool:
    """Is the tensor's place in the autograd graph outside of the region?"""
    return tensor.source is not None and (tensor.node.op == "placeholder" or tensor.abstract.is_leaf)


def check_tracked(tensor: TensorValue, method: str) -> None:
    """Eager's error, where the tensor has no gradient; a leaf made inside is real only after the graph call."""
    if not tensor.abstract.requires_grad or (tensor.source is None and tensor.abstract.is_leaf):
        raise Break("hook", name=f"Tensor.{method}")


def the_hook(args: Args, kwargs: Kwargs, method: str) -> Value:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not set(kwargs) <= {"hook"}:
        raise Break("hook", name=f"Tensor.{method}")
    return given[0]


@TENSOR_METHODS.row("register_hook")
def method_register_hook(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    hook = the_hook(args, kwargs, "register_hook")
    check_tracked(tensor, "register_hook")
    if stands_outside(tensor):
        return register_on_input(m, tensor, "register_hook", [hook])
    late = LateValue(put_seam(m, tensor, hook_here))
    m.effects.do("late_hook", late, hook)
    return LateHandle(late)


@TENSOR_METHODS.row("register_post_accumulate_grad_hook")
def method_register_post_accumulate(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    hook = the_hook(args, kwargs, "register_post_accumulate_grad_hook")
    if not tensor.abstract.is_leaf:
        raise Break("hook", name="Tensor.register_post_accumulate_grad_hook")
    check_tracked(tensor, "register_post_accumulate_grad_hook")
    return register_on_input(m, tensor, "register_post_accumulate_grad_hook", [hook])


@TENSOR_METHODS.row("retain_grad")
def method_retain_grad(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    check_tracked(tensor, "retain_grad")
    if stands_outside(tensor):
        register_on_input(m, tensor, "retain_grad", [])
    else:
        put_seam(m, tensor, retain_here)
    return NONE


def register_on_input(m: Machine, tensor: TensorValue, method: str, args: Args) -> HandleValue:
    handle = InputHandle(m, tensor, method, args)
    m.effects.do("register", handle)
    return handle


# -- tables of hooks of modules -----------------------------------------------------------------------------------------
FLAG_TABLES = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def hook_layout(module: torch.nn.Module) -> tuple[Any, ...]:
    """How many hooks of which kind a module has, in order."""
    own = module.__dict__
    if not (own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]):
        return (), (), (), (), own["_is_full_backward_hook"]
    flags = [own[table] for table in FLAG_TABLES]
    tables = [tuple(tuple(key in flag for flag in flags) for key in own[table]) for table in MODULE_HOOKS]
    return (*tables, own["_is_full_backward_hook"])


def dict_values(table: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(table.values())


class HookId(Value):
    """The id under which a hook is registered: another one for every module, so it is never looked at."""

    cls = int

    def __init__(self, number: int, source: Source):
        self.number, self.source = number, source

    def hash_key(self, m: Machine) -> Any:
        return self.number


class HookTable(DictValue):
    """A module's table of hooks, or of flags of hooks; `hook_layout` guards it."""

    def find(self, m: Machine, key: Value) -> Value | None:
        if not isinstance(key, HookId):
            return super().find(m, key)
        entry = self.entries.get(key.hash_key(m))
        return None if entry is None else m.look(entry[1])

    def know_all(self, m: Machine) -> dict[Any, tuple[Value, Value]]:
        return self.entries

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        raise Break("store", name="a hook", value="module")

    def change(self, m: Machine, entries: dict[Any, tuple[Value, Value]], kind: str, *data: Value) -> None:
        raise Break("store", name="a hook", value="module")


def hook_table(m: Machine, module: torch.nn.Module, module_source: Source, name: str) -> Value:
    """module.name for one of the tables above."""
    obj = module.__dict__[name]
    known = m.same_object(obj)
    if known is not None:
        return known
    source = module_source.attr(name)
    layout, own = hook_layout(module), OwnDict(module_source)
    if any(layout[:-1]):
        m.guard(Guard(Call(module_source, hook_layout), "equals", layout))
    else:       # the same, in words of machine code
        m.guard(Guard(own, "no_hooks"))
        m.guard(Guard(own.item("_is_full_backward_hook"), "equals", layout[-1]))
    values = Call(source, dict_values)
    entries: dict[Any, tuple[Value, Value]] = {
        key: (HookId(key, Nth(source, i)), LazyValue(hook, Item(values, i))) for i, (key, hook) in enumerate(obj.items())}
    table = HookTable(entries, source, obj, type(obj))
    m.remember(obj, table)
    return table


def has_always_called(module: Any) -> bool:
    return bool(module._forward_hooks_always_called or module_internals._global_forward_hooks_always_called)


# -- backward hooks of modules ------------------------------------------------------------------------------------------
class BackwardHookValue(Value):
    """BackwardHook(module, hooks, pre_hooks) of torch: two identities around the module, whose nodes carry the hooks."""

    words = "backward hooks of a module"
    cls = BackwardHook
    always_true = True

    def __init__(self, module: Value, hooks: Value, pre_hooks: Value):
        self.parts = (module, hooks, pre_hooks)
        self.node: torch.fx.Node | None = None      # of the real object, where a seam makes one
        self.inputs = -1

    def getattr(self, m: Machine, name: str) -> Value:
        return MethodOfOwner(self, name, SETUPS[name]) if name in SETUPS else super().getattr(m, name)

    def setup_input(self, m: Machine, args: Value) -> Value:
        items = parts_of(m, args)
        m.effects.change(self, "inputs", len(items))
        return self._apply(m, args, items, lambda places: (module_starts, (len(items), places)))

    def setup_output(self, m: Machine, result: Value) -> Value:
        if isinstance(result, TupleValue):
            items = parts_of(m, result)
            return self._apply(m, result, items, lambda places: (module_ends, (self.node, self.inputs, len(items), places)))
        return self._apply(m, TupleValue([result]), [result], lambda places: (module_ends, (self.node, self.inputs, 1, places))).iterate(m)[0]

    def _apply(self, m: Machine, args: Value, items: list[Value], call: Any) -> Value:
        """`args` with the tensors that the seam gave."""
        places = tuple(i for i, item in enumerate(items) if isinstance(item, TensorValue))
        tensors = [item for item in items if isinstance(item, TensorValue)]
        if not torch.is_grad_enabled() or not any(t.abstract.requires_grad for t in tensors):
            return args
        with m.world.active():
            made = BackwardHookFunction.apply(*[t.abstract for t in tensors])
        fn, first = call(places)
        node = m.record.call_function(fn, (*first, *(t.node for t in tensors)), {}, (None, *made))
        self._now_real(m, m.record.call_function(operator.getitem, (node, 0), {}, None))
        changed = list(items)
        for n, (place, abstract) in enumerate(zip(places, made), 1):
            changed[place] = m.wrap_output(abstract, m.record.call_function(operator.getitem, (node, n), {}, abstract))
        return NamedTupleValue(args.cls, changed) if isinstance(args, NamedTupleValue) else TupleValue(changed)

    def _now_real(self, m: Machine, node: torch.fx.Node) -> None:
        first = self.node is None
        m.effects.change(self, "node", node)
        if first:
            m.effects.do("backward_hook", self, *self.parts)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.node, None

    def rebuild(self, e: Emitter) -> str:
        if self.node is not None:
            return e.graph_output(self)
        return f"{e.constant(make_backward_hook)}({', '.join(map(e.expr, self.parts))}, {self.inputs})"


def parts_of(m: Machine, args: Value) -> list[Value]:
    items = [m.look(item) for item in args.iterate(m)]
    if any(isinstance(item, OpaqueValue) and isinstance(item.obj, torch.Tensor) for item in items):
        raise Break("hook", name="a module with backward hooks on a tensor of another kind")
    return items


def make_backward_hook(module: Any, hooks: list, pre_hooks: list, inputs: int) -> BackwardHook:
    """One whose inputs did not require gradients."""
    made = BackwardHook(module, hooks, pre_hooks)
    made.n_inputs = inputs
    return made


def fill_backward_hook(hook: BackwardHook, module: Any, hooks: list, pre_hooks: list) -> None:
    hook.module, hook.user_hooks, hook.user_pre_hooks = module, hooks, pre_hooks


REPLAY.add("backward_hook", lambda e, t, d, n: f"{e.constant(fill_backward_hook)}({t}, {', '.join(d)})")
SETUPS = {"setup_input_hook": lambda m, hook, args, kwargs: hook.setup_input(m, args[0]),
          "setup_output_hook": lambda m, hook, args, kwargs: hook.setup_output(m, args[0])}


@CALLS.row(BackwardHook.setup_input_hook, BackwardHook.setup_output_hook)
def call_setup_for_real(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """On an object that was made before a break."""
    raise Break("hook", name="the backward hooks of a module, after a break inside of it")


CALLS.row(BackwardHook)(lambda m, args, kwargs: BackwardHookValue(*args))


# -- registering on modules ---------------------------------------------------------------------------------------------
# method -> the table of its hooks, and keyword -> the table of flags that it sets
REGISTERING: dict[str, tuple[str, dict[str, str]]] = {
    "register_forward_hook": ("_forward_hooks", {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"}),
    "register_forward_pre_hook": ("_forward_pre_hooks", {"with_kwargs": "_forward_pre_hooks_with_kwargs"}),
    "register_full_backward_hook": ("_backward_hooks", {}),
    "register_full_backward_pre_hook": ("_backward_pre_hooks", {}),
}


class ModuleHandle(HandleValue):
    """A call of one of the registering methods on a module: rule 5."""

    def __init__(self, module: Any, method: str, hook: Value, flags: dict[str, bool]):
        self.module, self.method, self.hook, self.flags = module, method, hook, flags
        self.tables = (REGISTERING[method][0], *(REGISTERING[method][1][name] for name, on in flags.items() if on and name != "prepend"))

    def put(self, m: Machine) -> None:
        key = HookId(id(self), None)        # type: ignore[arg-type]  # it is never written
        for name, value in zip(self.tables, (self.hook, *[ConstValue(True)] * len(self.tables))):
            table = self.module.own_attribute(m, name)
            entry = {id(self): (key, value)}
            first = self.flags.get("prepend") and name == self.tables[0]
            m.effects.change(table, "entries", {**entry, **table.entries} if first else {**table.entries, **entry})
        if self.tables[0] == "_backward_hooks":
            m.effects.shadow(self.module, "_is_full_backward_hook", ConstValue(True))
        m.effects.do("register", self)

    def remove(self, m: Machine) -> None:
        for name in self.tables:
            table = self.module.own_attribute(m, name)
            m.effects.change(table, "entries", {key: entry for key, entry in table.entries.items() if key != id(self)})
        super().remove(m)

    def rebuild(self, e: Emitter) -> str:
        module, hook = e.expr(self.module), e.expr(self.hook)
        known = e.written(self)             # the hook itself holds the handle
        settings = "".join(f", {name}={on}" for name, on in self.flags.items())
        return known if known is not None else e.assign(f"{module}.{self.method}({hook}{settings})")


def _registering(method: str) -> Any:
    names = ("prepend", *REGISTERING[method][1])

    def register(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        module: Any = m.look(args[0])
        settings = {name: value for name, value in kwargs.items() if name != "hook"}
        hooks = [*args[1:], *(value for name, value in kwargs.items() if name == "hook")]
        if len(hooks) != 1 or not set(settings) <= {*names} or module.source is None or has_hooks_of_the_old_kind(m, module):
            raise Break("hook", name=f"Module.{method}")        # a wrong call, or a module made here
        handle = ModuleHandle(module, method, hooks[0], {name: m.look(value).truth(m) for name, value in settings.items()})
        handle.put(m)
        return handle
    return register


def has_hooks_of_the_old_kind(m: Machine, module: Any) -> bool:
    return m.look(module.getattr(m, "_is_full_backward_hook")).constant() is False


def has_hooks_from_here(m: Machine, module: torch.nn.Module) -> bool:
    """Does a table have hooks that this program registered?"""
    tables: list[Any] = [m.same_object(module.__dict__[name]) for name in MODULE_HOOKS]
    return any(table is not None and table.entries for table in tables)


for _name in REGISTERING:
    CALLS.add(getattr(torch.nn.Module, _name), _registering(_name))


@CALLS.row(torch.nn.Module.register_backward_hook)
def call_register_backward_hook(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    raise Break("hook", name="Module.register_backward_hook")
