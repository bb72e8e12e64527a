"""Questions about the Exprs of a Program that fusion, planning and the host function ask.  Those about steps are methods in `ir.py`.

Walks share subtrees (Exprs are hash-consed), so each costs the number of distinct nodes, not the size of the tree written out.

    symbols([s0 * 4, s1])       # ('s0', 's1')
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from firesteel.loops.ir import Buffer, Program, ProgramStep, View
from firesteel.sym.expr import Expr, bits, postorder


def load_index(load: Expr) -> tuple[Expr, ...]:
    return load.args if load.op == "load" else load.args[2:]


def step_symbols(step: ProgramStep, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Symbols whose values must be known before the step runs."""
    return symbols(step.values(buffers))


def output_buffers(program: Program) -> set[str]:
    """Buffers that outlive the call: those that an output is a View of."""
    return {view.buffer for view in program.outputs if isinstance(view, View)}


def symbols(values: Iterable[Any]) -> tuple[str, ...]:
    """Names of the symbols in Exprs (plain numbers have none), in order of appearance."""
    roots = [value for value in values if isinstance(value, Expr)]
    return tuple(dict.fromkeys(node.attr for node in postorder(*roots, only=bits("symbol")) if node.op == "symbol"))
