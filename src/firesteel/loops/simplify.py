"""simplify: not yet simplifying; same Program."""
from __future__ import annotations

from firesteel.loops.ir import Program


def simplify(program: Program) -> Program:
    return program
