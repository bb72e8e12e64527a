"""Decompositions: operators written in terms of the primitives that `loops/lower` knows.

`DECOMPOSITIONS` maps an OpOverload to a Python function over tensors.  `core_decompositions()` is the part of it that the
native backend asks for: rows for which a lowering of the whole operator would be better are left out.

The primitives: pointwise operators, sum, mean, var_mean, amax, amin, prod, any, all, argmax, argmin, cumsum, views, index, gather,
embedding, index_put, scatter, where, full, arange, cat, constant_pad_nd, and the library calls (matrix products, convolution,
attention, pooling, random numbers).
"""
from firesteel.graph.decomp import basic, loss, norm, resample
from firesteel.graph.decomp.table import DECOMPOSITIONS, core_decompositions

__all__ = ["DECOMPOSITIONS", "basic", "core_decompositions", "loss", "norm", "resample"]
