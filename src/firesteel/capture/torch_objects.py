"""Wrapping torch's own objects that are called: operators that take functions, scripted functions, classes of tensors, versions.

`torch.cond` and its relatives become the plain Python that they mean (`HIGHER_ORDER` of polyfills.py): a condition that is known chooses its
branch, one that is a tensor is a branch on data (joins.py).  A scripted or traced function is the Python function it was made of; a scripted
module, and what was loaded, is one call of the graph, made for real between two compiled graphs (autograd/seams.py).

    torch.cond(x.shape[0] > 2, f, g, (x,))      # f(x), or g(x)
"""
# boundary: recognises torch._dynamo.decorators.DynamoConfigPatchProxy and torch._dynamo.error_on_graph_break by their names
# boundary: recognises _torchdynamo_inline, by which torch.jit says what a scripted function was made of
from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from firesteel.capture.builder import BASES, BY_CLASS, WRAPPERS, build, guard, guarded, opaque
from firesteel.capture.polyfills import HIGHER_ORDER
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Fixed, Source
from firesteel.capture.values.base import Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import ListValue, SizeValue, TupleValue
from firesteel.capture.values.contexts import ContextValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.scripted import ScriptedValue
from firesteel.capture.values.torch_calls import call_graph, run_abstract


@BASES.row(torch._ops.HigherOrderOperator)
def wrap_higher_order(m: Machine, obj: Any, source: Source) -> Value:
    meaning = HIGHER_ORDER.get(obj.name())
    if meaning is None:
        return opaque(m, obj, source)
    guard(m, source, "identity", obj)
    return build(m, meaning, Fixed(meaning))


@WRAPPERS.row(torch.jit.ScriptFunction)
def wrap_scripted(m: Machine, obj: Any, source: Source) -> Value:
    original = getattr(obj, "_torchdynamo_inline", None)
    guard(m, source, "identity", obj)
    return ScriptedValue(obj, source) if original is None else build(m, original, Fixed(original))


WRAPPERS.add(TorchVersion, guarded("identity", lambda obj, source: ConstValue(obj)))
# torch._dynamo.dont_skip_tracing and others, which exported modules use: settings of the peer, which mean nothing here
BY_CLASS.add("torch._dynamo.decorators.DynamoConfigPatchProxy",
             guarded("identity", lambda obj, source: ContextValue(type(obj), [], {}, [], source, obj)))
# torch._dynamo.error_on_graph_break as a decorator: its methods are executed as a user's are, and write the name that marks.breaks_are_errors reads
BY_CLASS.add("torch._dynamo.decorators.ErrorOnGraphBreakDecoratorContextManager",
             guarded("type", lambda obj, source: ObjectValue(type(obj), obj, source)))


@INSTANTIATE.row("tensor by its class")
def new_tensor(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """torch.Tensor(2, 3), torch.LongTensor([1, 2]): numbers and a torch.Size are a shape, other sequences are data."""
    if cls is not torch.Tensor and (type(cls) is not type(torch.FloatTensor) or cls.is_cuda or cls.is_sparse) or kwargs:
        return None
    given = [m.look(arg) for arg in args]
    dtype = ConstValue(torch.get_default_dtype() if cls is torch.Tensor else cls.dtype)
    if len(given) == 1 and isinstance(given[0], (ListValue, TupleValue)) and not isinstance(given[0], SizeValue):
        return call_graph(m, "call_function", torch.tensor, given, {"dtype": dtype})
    if not all(isinstance(arg, (SizeValue, SymNumber)) or arg.python_type() is int for arg in given):
        return None
    return call_graph(m, "call_function", torch.empty, given or [ConstValue(0)], {"dtype": dtype})


class AttentionParams(Value):
    """torch.backends.cuda.SDPAParams: what an attention is asked for, over abstract tensors.  C++ says which kernels take it."""

    words = "parameters of an attention"
    form = "{cls}({parts})"
    cls = torch.backends.cuda.SDPAParams

    def __init__(self, parts: Args, real: Any):
        self.parts, self.real = parts, real

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.real, self.real

    def getattr(self, m: Machine, name: str) -> Value:
        names = ("query", "key", "value", "attn_mask", "dropout", "is_causal", "enable_gqa")
        return self.parts[names.index(name)] if name in names else super().getattr(m, name)


@INSTANTIATE.row("parameters of an attention")
def new_attention_params(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    if cls is not AttentionParams.cls or kwargs:
        return None
    parts = [m.look(arg) for arg in args]
    return AttentionParams(parts, run_abstract(m, cls, [part.as_arg(m)[1] for part in parts], {}, cls))
