"""Lowering: functional ATen graph -> Program of loop nests.  `ops/` writes the rows of `LOWERINGS`."""
from firesteel.loops.lower.build import LOWERINGS
from firesteel.loops.lower.graph import lower_graph

__all__ = ["LOWERINGS", "lower_graph"]
