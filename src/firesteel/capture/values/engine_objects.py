"""Objects that code of a backward meets: contexts of custom functions, torch's engine, locks.

The context of a custom function is an instance like others: what the forward stored on it is read attribute by attribute; what its C part
answers is read and guarded.  `queue_callback` and taking a lock are effects, made for real in the program's order.

    ctx.scale * grad                                                            # ctx came in: guarded as any attribute
    torch.autograd.Variable._execution_engine.queue_callback(finish)            # after the graph
    with lock: counts.append(grad.sum())                                        # acquire; append; release
"""
from __future__ import annotations

import _thread
import threading
import types
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.variable import Variable

from firesteel.capture.builder import BASES, WRAPPERS, guard, guarded
from firesteel.capture.effects import REPLAY
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Attr, Source
from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import LazyValue, MethodOfOwner, OpaqueValue, Value
from firesteel.capture.values.const import FALSE, NONE, TRUE
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break


# -- contexts of custom functions ---------------------------------------------------------------------------------------
class FunctionContext(ObjectValue):
    """`ctx`, outside of the call that made it."""

    def plain_getattr(self, m: Machine, name: str) -> Value | None:
        attribute = mro_lookup(self.cls, name)
        if attribute is not MISSING and isinstance(attribute, types.GetSetDescriptorType) and name != "__dict__":
            assert self.source is not None
            return m.look(LazyValue(getattr(self.obj, name), Attr(self.source, name)))
        return super().plain_getattr(m, name)

    def plain_setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        """What a forward says of itself is set on the real context; it is asked for when the forward has returned."""
        if name not in SAID:
            return super().plain_setattr(m, name, value)
        m.effects.log("setattr", self, value, name=name)
        return None


# save_for_backward, mark_dirty, mark_non_differentiable, set_materialize_grads, save_for_forward
SAID = frozenset({"to_save", "dirty_tensors", "non_differentiable", "materialize_grads", "saved_for_forward"})


@BASES.row(BackwardCFunction)
def wrap_function_context(m: Machine, obj: Any, source: Source) -> Value:
    guard(m, source, "type", type(obj))
    return FunctionContext(type(obj), obj, source)


class NodeInput(OpaqueValue):
    """What a node of the engine knows of a gradient that it takes: `ctx._input_metadata[0]`."""

    READ = ("shape", "dtype", "device")

    def getattr(self, m: Machine, name: str) -> Value:
        assert self.source is not None
        return m.look(LazyValue(getattr(self.obj, name), Attr(self.source, name))) if name in self.READ else super().getattr(m, name)


WRAPPERS.add(torch._C._autograd._InputMetadata, guarded("type", NodeInput))      # type: ignore[attr-defined]


# -- methods that are effects -------------------------------------------------------------------------------------------
class EffectMethod(MethodOfOwner):
    """A bound method whose call is made for real after the graph, with the result that it has while capturing."""

    cls = types.BuiltinMethodType

    def __init__(self, owner: Value, name: str, result: Value):
        super().__init__(owner, name)
        self.result = result

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if kwargs:
            raise Break("arguments", name=f"{self.name} with keywords")
        m.effects.log("call_method", self.owner, *args, name=self.name)
        return self.result


REPLAY.add("call_method", lambda e, t, d, n: f"{t}.{n}({', '.join(d)})")


class EngineValue(OpaqueValue):
    """torch's autograd engine, or who stands in its place."""

    def getattr(self, m: Machine, name: str) -> Value:
        return EffectMethod(self, name, NONE) if name == "queue_callback" else super().getattr(m, name)


BASES.add(type(Variable._execution_engine), guarded("type", EngineValue))


class LockValue(OpaqueValue):
    """A lock: it is acquired and released around the effects made under it.  Conditions and semaphores are Python code around one."""

    held = 0        # how often the captured program holds it

    def getattr(self, m: Machine, name: str) -> Value:
        if not hasattr(self.obj, name):     # a Condition asks
            raise m.raise_real(AttributeError(f"{type(self.obj).__name__!r} object has no attribute {name!r}"))
        return LockMethod(self, name) if name in LOCK_METHODS else super().getattr(m, name)

    def enter(self, m: Machine) -> tuple[Value, Value]:
        self.hold(m, "acquire", 1)
        return LockMethod(self, "__exit__"), TRUE

    def hold(self, m: Machine, method: str, change: int) -> None:
        m.effects.log("call_method", self, name=method)
        m.effects.change(self, "held", self.held + change)


# method -> how it changes `held`, and what it gives.  Methods that only ask are known while the program holds the lock: see LockMethod
LOCK_METHODS = {"__enter__": (1, TRUE), "acquire": (1, TRUE), "__exit__": (-1, FALSE), "release": (-1, NONE),
                "locked": (0, TRUE), "_is_owned": (0, TRUE)}


class OwnLock(LockValue):
    """One that the program makes: no other thread can hold it."""

    def __init__(self, make: Any):
        self.make = make
        super().__init__(make(), None)

    def hold(self, m: Machine, method: str, change: int) -> None:
        if change == 1 and self.held and isinstance(self.obj, _thread.LockType):
            raise Break("call", name="acquire of a lock that is held")
        if change == -1 and not self.held:
            m.run_real(self.obj.release)        # raises
        super().hold(m, method, change)

    def rebuild(self, e: Emitter) -> str:
        name = e.assign(f"{e.constant(self.make)}()")
        for _ in range(self.held):
            e.line(f"{name}.acquire()")
        return name


CALLS.row(_thread.allocate_lock)(lambda m, args, kwargs: OwnLock(_thread.allocate_lock))
CALLS.row(threading.RLock)(lambda m, args, kwargs: OwnLock(threading.RLock))


class LockMethod(MethodOfOwner):
    """A bound method of a lock."""

    cls = types.BuiltinMethodType

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        lock, (change, result) = self.owner, LOCK_METHODS[self.name]
        given = [m.known(value) for value in (*args, *kwargs.values())] if change == 1 else []
        if isinstance(lock, OwnLock) and not lock.held and change >= 0:     # it is free
            given, result = [], result if change else FALSE
        elif (given or not change) and not lock.held or given[:1] not in ([], [False]):
            raise Break("arguments", name=f"{type(lock.obj).__name__}.{self.name} of a lock that another thread may hold")
        if not change or given and isinstance(lock.obj, _thread.LockType):
            return FALSE if given else result
        lock.hold(m, "acquire" if change == 1 else "release", change)
        return result


WRAPPERS.row(_thread.LockType, _thread.RLock)(guarded("type", LockValue))
