"""The data of tensors that the program makes of numbers alone, known while capturing: what asks for it gets the number, and no branch is left.

    t = torch.linspace(0, 1, 4)
    while t[i] < 0.5: i += 1            # decided now

Computed at the first question by calling the nodes for real, in eager: all of `OPERATORS`, none written since, none large.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from firesteel.capture.protocols import Machine

LARGEST = 4096      # elements of a tensor, and nodes on the way to it
FACTORIES = {"linspace", "arange", "zeros", "ones", "full", "tensor", "scalar_tensor", "eye"}
ARITHMETIC = {"add", "sub", "mul", "truediv", "true_divide", "div", "floordiv", "mod", "pow", "neg", "abs", "sqrt", "square", "exp", "log", "sign",
              "floor", "ceil", "round"}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "inv", "invert", "logical_not", "logical_and", "logical_or", "isnan",
               "isfinite", "isinf"}
REDUCTIONS = {"all", "any", "sum", "prod", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "cumsum", "diff"}
ARRANGED = {"getitem", "select", "flip", "squeeze", "unsqueeze", "reshape", "view", "flatten", "cat", "stack", "expand", "clone", "detach",
            "contiguous", "t", "transpose", "permute", "as_strided"}
CONVERSIONS = {"to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "where", "clamp", "maximum", "minimum"}
OPERATORS = FACTORIES | ARITHMETIC | COMPARISONS | REDUCTIONS | ARRANGED | CONVERSIONS
OF_OTHER_SHAPE = {"_unique2", "unique_dim", "unique_consecutive", "nonzero", "argwhere", "masked_select", "getitem", "repeat_interleave", "bincount"}
MODULES = {"_operator", "torch", "torch._C", "torch._C._VariableFunctions", None}


def known_data(m: Machine, value: Any) -> torch.Tensor | None:
    """The data of a TensorValue, or None."""
    found = known_of(m.record.known, value.node)
    return found if isinstance(found, torch.Tensor) and not is_written(value.abstract) else None


def known_of(known: dict[Node, Any], node: Node) -> Any:
    todo = [node]
    while todo:
        top = todo[-1]
        missing = [read for read in top.all_input_nodes if read not in known]
        if top in known:
            todo.pop()
        elif not is_pure(top) or len(todo) > LARGEST:
            return None
        elif missing:
            todo += missing
        else:
            found = compute(top.target, top.args, top.kwargs, known)
            if described(found) != described(top.meta["val"]):      # made under a mode
                return None
            known[top] = found
    return known[node]


def known_results(m: Machine, target: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives whose shapes depend on data, where that is known; None for other calls."""
    read: list[Node] = []
    map_arg((args, kwargs), read.append)
    if name_of(target) not in OF_OTHER_SHAPE or any(known_of(m.record.known, node) is None or not is_plain(node) for node in read):
        return None
    found = compute(target, args, kwargs, m.record.known)
    return found if all(t.numel() <= LARGEST and t.isfinite().all() for t in tree_leaves(found)) else None


def name_of(target: Any) -> str:
    """Of a method, an operator of Python or a function of torch."""
    return target if isinstance(target, str) else getattr(target, "__name__", "") if getattr(target, "__module__", "") in MODULES else ""


def is_pure(node: Node) -> bool:
    """Is it a row of OPERATORS, on numbers and tensors, whose memory nobody has written?"""
    return node.op in ("call_function", "call_method") and name_of(node.target) in OPERATORS and not {"out", "generator"} & node.kwargs.keys() \
        and all(is_plain(one) for one in (node, *node.all_input_nodes))


def is_plain(node: Node) -> bool:
    return all(isinstance(t, torch.Tensor) and not is_written(t) and not t.requires_grad and t.layout is torch.strided
               and all(type(size) is int for size in t.shape) and t.numel() <= LARGEST for t in tree_leaves(node.meta.get("val")))


def writes(t: torch.Tensor) -> int | None:
    """How often it was written; None where that is not known: x.data, over the same memory, raises no version."""
    return None if getattr(t, "uncounted", False) else t._version


def is_written(t: torch.Tensor) -> bool:
    """Perhaps."""
    return writes(t) != 0


def described(found: Any) -> Any:
    return [(tuple(t.shape), t.dtype, t.device) for t in tree_leaves(found)]


@torch.no_grad()
def compute(target: Any, args: Any, kwargs: Any, known: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((tuple(args), kwargs), known.__getitem__)
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
