"""The shape rules: RULES maps an OpOverload to a function from argument Specs to result Specs.

Importing this package fills the table; each file is a family of operators.
"""
from firesteel.graph.rules import data, factory, index, matmul, nn, pointwise, random, rare, reduce, refusals, shapes, views
from firesteel.graph.rules.base import RULES

__all__ = ["RULES", "data", "factory", "index", "matmul", "nn", "pointwise", "random", "rare", "reduce", "refusals", "shapes", "views"]
