"""What things cost, roughly, and the yes/no questions that fusion asks about it.

In: scalar bodies, buffers, extents.  Out: numbers in units of one cheap vector operation an element (about 0.02 ns on a core with
8 lanes), and decisions.  One table of weights; every threshold is named here and nowhere else.

What always holds: a decision depends on the program alone (never on time, hashes or addresses), so compiling is repeatable.

    body_cost(exp(load(x, i) - acc(m)))     # 20 + 1 + 2
"""
from __future__ import annotations

from collections.abc import Iterable

from firesteel.loops.ir import LOADS, Axis, Buffer
from firesteel.loops.scalars import ITEMSIZE
from firesteel.sym.expr import Expr, Size, bits, postorder
from firesteel.targets import has_arena

FREE_OPS = frozenset({"axis", "const", "symbol", "acc", "to", "check_index"})
_WEIGHTS: dict[str, int] = {}
for _weight, _ops in {
    4: ("div", "sqrt", "rsqrt", "recip", "mod", "floordiv", "fmod", "round", "nextafter"),
    20: ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "sin", "cos", "tanh", "hypot"),
    30: ("tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "pow"),
    60: ("erfinv", "i0", "i0e", "i1", "i1e", "erfcx"),
    200: ("lgamma", "digamma", "trigamma", "log_ndtr"),
}.items():
    _WEIGHTS.update(dict.fromkeys(_ops, _weight))

LOAD, GATHER = 2, 8             # an element in order, an element at a computed place
BYTE = 1                        # a byte written to memory and read back, once it has left the nearest cache
CACHED_PAIR = 6                 # a store and a load of an element that stays in the nearest cache
FAR_PAIR = 100                  # a store and a load of an element in a GPU's memory
WRITTEN_OUT = 28                # an element that is written out to memory for nothing: a little more than one exp
CACHE_BYTES = 1 << 20           # what stays in a core's own cache from one use to the next
MOST_NODES = 1500               # of one body: beyond that compile time grows faster than run time shrinks
SMALL = 4096                    # elements: below that a kernel's start costs more than its work
ENOUGH_ROWS = 8                 # points of the parallel axes that keep a machine's cores busy
LONG_SWEEP = 1 << 19            # elements of a sweep that are worth several cores
FEW_POINTS = 8                  # points of work: fewer leave cores idle
CORE_LANES = 64                 # elements in a row of which sweeps make one point of work
MOST_PARTS = 64                 # of a sweep that is spread over cores
SHORT_ROW = 12                  # elements of a row that may be made one by one, with lanes along the rows
UNKNOWN_SIZE = 256              # what a symbolic size counts for
BY_FLOATS = bits("floor")       # in a place that is computed with floats, as interpolation does


def op_cost(node: Expr) -> int:
    if node.op in LOADS:
        index = node.args[2 if node.op == "masked" else 0:]
        return GATHER if any(arg.op in LOADS or arg.op == "check_index" or arg.holds & BY_FLOATS for arg in index) else LOAD
    return 0 if node.op in FREE_OPS else _WEIGHTS.get(node.op, 1)


def is_heavy(op: str) -> bool:
    """Is it a call, or a loop of its own, for each element?"""
    return _WEIGHTS.get(op, 1) >= 20 or op in ("mod", "fmod")


def body_cost(*roots: Expr) -> int:
    """Work for one element; what the roots share counts once.  Index arithmetic is free: it moves out of the innermost loop."""
    return measure(*roots)[0]


def measure(*roots: Expr) -> tuple[int, int]:
    """(work for one element, number of nodes)."""
    nodes = postorder(*roots, below=lambda node: node.args if node.op not in LOADS else node.args[:2] if node.op == "masked" else ())
    return sum(map(op_cost, nodes)), len(nodes)


def hint(size: Size) -> int:
    """An estimate of a size; exact for known ones."""
    return size if isinstance(size, int) else UNKNOWN_SIZE


def points(axes: Iterable[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= hint(axis.extent)
    return total


def elements(buffer: Buffer) -> int:
    return hint_product(buffer.shape)


def hint_product(shape: Iterable[Size]) -> int:
    total = 1
    for size in shape:
        total *= hint(size)
    return total


# ---------------------------------------------------------------- questions

def worth_inlining(cost: int, buffer: Buffer, uses: int) -> bool:
    """Is computing a value again at each of `uses` places cheaper than writing it once and reading it there?"""
    if uses <= 1:
        return True
    return (uses - 1) * cost <= BYTE * ITEMSIZE[buffer.dtype] * (2 + uses)


def worth_recomputing(cost: int, buffer: Buffer, stored_anyway: bool) -> bool:
    """In a later sweep over the same row: compute the value again, or read back what an earlier sweep stored?  The row itself
    is in the nearest cache; but a large buffer that nobody else reads also goes out to memory in the end.  A GPU computes much
    while it moves one element, and what fits its registers it computes once."""
    if stored_anyway:
        return cost <= LOAD
    if not has_arena(buffer.device):
        return cost <= FAR_PAIR
    return cost <= (WRITTEN_OUT if elements(buffer) * ITEMSIZE[buffer.dtype] > CACHE_BYTES else CACHED_PAIR)


def enough_rows(rows: Iterable[Axis], work: int) -> bool:
    """Do these parallel axes keep the cores busy, given that `work` elements are swept in all?"""
    return work <= SMALL * 8 or points(rows) >= ENOUGH_ROWS

