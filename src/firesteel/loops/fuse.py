"""fuse: not yet fusing; same Program."""
from __future__ import annotations

from firesteel.loops.ir import Program


def fuse(program: Program) -> Program:
    return program
