"""Fewer kernels with the same meaning: Program -> Program.

In: a simplified Program of one nest an operator.  Out: a Program in which
 - inputs that are copied, changed and copied back are mutated in place (`inplace.py`),
 - biases are added by nests rather than by library calls (`bias.py`),
 - pointwise producers are computed inside of their readers (`inline.py`),
 - loads are such that lanes can read memory in a row (`loads.py`),
 - what is left of nests over the same rows is one nest: several outputs, rows reduced and normalised in one go (`group.py`), with as
   few sweeps over a row as the data flow allows (`phases.py`),
 - sweeps over a few elements at many points are written out (`rows.py`),
 - what chooses by place among parts, as a concatenation or a padding does, has a nest for each range of places (`ranges.py`),
 - long sweeps of few rows are spread over the cores (`spread.py`).
`cost.py` decides what is worth it.  `config.fusion_fuel` limits the number of fusions: bisecting over it finds a wrong one.

What always holds: results are the same up to the rounding of bf16/f16 between operators; never across a library call that depends on
the one and feeds the other; the same program gives the same result in every process; cost linear in the program, nearly.

    fuse(simplify(lower_graph(gm, inputs)))
"""
from __future__ import annotations

from firesteel.config import config
from firesteel.loops.bias import separate_biases
from firesteel.loops.group import group
from firesteel.loops.inline import Fuel, inline, written_again
from firesteel.loops.inplace import write_in_place, write_to_inputs
from firesteel.loops.ir import Program
from firesteel.loops.loads import read_in_rows, without_needless_masks
from firesteel.loops.ranges import by_ranges
from firesteel.loops.rows import short_rows, will_be_written_out
from firesteel.loops.simplify import split_axes
from firesteel.loops.spread import spread


def fuse(program: Program) -> Program:
    """Producers into readers, then neighbours into groups; then indices, rows and ranges, which need whole nests; then parts for the cores."""
    program = separate_biases(write_in_place(program))
    fuel, rewritten = Fuel(config.fusion_fuel), written_again(program)
    program = write_to_inputs(without_needless_masks(inline(program, fuel, rewritten)))
    rewritten = written_again(program)
    program = split_axes(read_in_rows(group(program, fuel, rewritten), rewritten), will_be_written_out)
    return spread(by_ranges(short_rows(program, fuel), fuel))
