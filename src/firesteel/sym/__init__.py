"""Symbolic sizes: expressions (`expr`), their bounds (`bounds`), the questions asked of them (`env`), the node behind
`torch.SymInt` (`symint`).

    from firesteel import sym
    n = sym.symbol("s0")
    (n * 4 + 1) // 4                     # n
"""
from firesteel.sym.expr import *  # noqa: F403
