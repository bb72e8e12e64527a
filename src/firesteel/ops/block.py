"""How a family's file writes what the compiler knows of its operators: every row by name, an operator and its gradient in one block.

    operator("_softmax.*", recompute="reduce")      # facts, each on its own or together
    @rule("_softmax")                               # its meaning on Specs, with device_rule and probed_rule for what is checked before
    @refuses("_softmax")                            # what eager refuses of its arguments
    @decomposition("_softmax", core=False)          # the operator as others; core=False: not for the native backend
    @lowering("_softmax")                           # the operator as loops; without one it is a library call
    @loop_lowering("flip")                          # the same, of tensors that fit into one nest and can be read
    @pointwise("relu", unary(same_dtype))           # rule and scalar formula of a pointwise operator

What is one expression is a row without a name: `device_rule("linalg_cross")(lambda x, y, *, dim=-1: fresh(x, broadcast(x.shape, y.shape)))`.
A function's name says what it is: a rule has the operator's name; `refuse_`, `decompose_`, `lower_` and `compute_` (a scalar formula) the others.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firesteel.autograd.exact import DECIDES
from firesteel.autograd.recompute import CLASS_OF
from firesteel.graph.decomp import decomposition
from firesteel.graph.meta import shape
from firesteel.graph.rules.base import device_rule, probed_rule, rule
from firesteel.graph.rules.refusals import refuses
from firesteel.loops.lower.build import loop_lowering, lowering
from firesteel.loops.lower.library import LIBRARY
from firesteel.loops.lower.pointwise import pointwise as lower_by_formula
from firesteel.operators import Facet

__all__ = ["decomposition", "device_rule", "loop_lowering", "lowering", "operator", "pointwise", "probed_rule", "refuses", "rule", "shape"]


def operator(names: str, *, recompute: str | None = None, library: bool = False, decides: bool = False) -> None:
    """Facts about the operators named: their recompute class where tags lack it, whether the library's kernel is the right answer, whether
    they decide by their floats."""
    facts: tuple[tuple[Facet[Any], Any], ...] = ((CLASS_OF, recompute), (LIBRARY, library), (DECIDES, decides))
    for facet, fact in facts:
        if fact:
            facet.named(names)(fact)


def pointwise(names: str, rule: Callable[..., Any] | None = None, *, decides: bool = False, recompute: str | None = None,
              **how: Any) -> Callable:
    """Decorator: a scalar formula, as the lowering of the operators named; with their rule, for which eager's kernel is asked about dtypes."""
    if rule is not None:
        probed_rule(names)(rule)
    operator(names, decides=decides, recompute=recompute)
    return lower_by_formula(names, **how)
