"""Lowering: functional ATen graph -> Program of loop nests.  Importing this registers every row of `LOWERINGS`."""
from firesteel.loops.lower import activations, combine, create, index, pointwise, reduce, views  # noqa: F401  (rows)
from firesteel.loops.lower.build import LOWERINGS
from firesteel.loops.lower.graph import lower_graph

__all__ = ["LOWERINGS", "lower_graph"]
