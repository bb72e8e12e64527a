"""What all printers share: the Kernel they return, decomposition of what they cannot spell, and a measure of work.

    kernel = llvm.print_nest(nest, buffers)
    kernel.buffers, kernel.symbols      # the order of its arguments
"""
from __future__ import annotations

from collections.abc import Callable

from firesteel.codegen.flat import FlatNest, FlatPhase, FlatStore
from firesteel.loops.cost import is_heavy
from firesteel.loops.decompose import DECOMPOSED
from firesteel.loops.ir import Reduce
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, postorder, rebuild


@dataclass(frozen=True, slots=True)
class Kernel:
    """Printed code of one nest.  Equal texts are one kernel: `symbol`, the function's name, is a digest of the text."""
    name: str                   # the nest's
    symbol: str
    text: str
    buffers: tuple[str, ...]    # arguments: the address of element [0, ..., 0] of each,
    symbols: tuple[str, ...]    # then the value of each (i64, or the bits of a double), then the address of the error slot
    can_fail: bool = False      # may it set the error slot?


def decompose(nest: FlatNest, spelled: Callable[[Expr], bool]) -> FlatNest:
    """The nest in operators that the target spells."""
    memo: dict[Expr, Expr] = {}
    missing = False

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        nonlocal missing
        if spelled(node):
            return None
        missing = True
        simpler = DECOMPOSED[node.op](*args)
        return rebuild(simpler, change, memo)       # what it is made of may need it too

    for root in [r for p in nest.phases for r in p.roots()]:
        rebuild(root, change, memo)
    if not missing:
        return nest
    return FlatNest(nest.axes, tuple(renamed(p, memo) for p in nest.phases), nest.dtypes)


def renamed(phase: FlatPhase, memo: dict[Expr, Expr]) -> FlatPhase:
    """The phase of what its values have become."""
    reduces = tuple(Reduce(r.name, r.op, memo[r.value], r.dtype) for r in phase.reduces)
    stores = tuple(FlatStore(s.buffer, s.address, tuple(memo[i] for i in s.irregular), memo[s.value], s.mode, s.private) for s in phase.stores)
    return FlatPhase(phase.kind, phase.axes, reduces, stores)


def weight(phase: FlatPhase) -> int:
    """Scalar operations for one point of the phase's axes."""
    nodes = postorder(*phase.roots())
    return len(phase.reduces) + len(phase.stores) + sum(10 if is_heavy(n.op) else 1 for n in nodes if n.op not in ("const", "axis", "symbol", "acc"))
