"""Nests as Triton kernels: the second target, a second spelling table over printer.py.

In: one Nest (loops/ir.py, after fuse and plan). Out: the text of a Triton kernel and
the facts its launch needs. The text is deterministic; its digest is the kernel's name.
"""
