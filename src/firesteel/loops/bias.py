"""Biases out of library calls: addmm(bias, x, w) becomes mm(x, w) and an addition, which the readers then do on the way.

In: a simplified Program.  Out: the same meaning.  The library writes the bias into the result first and multiplies on top of it: one
more sweep over memory, 10 to 20% of a product of 512x256x1024.  Only where all readers are nests (else the addition
would be a kernel of its own), and only for f32 and f64: a product in bf16 would be rounded once more.

    call t = addmm.out(b, x, w)                call t_mm = mm.out(x, w)
    nest y[i, j] = relu(load(t, i, j))   ->    nest t[i, j] = load(t_mm, i, j) + load(b, j);  y[i, j] = relu(load(t, i, j))
"""
from __future__ import annotations

from dataclasses import replace

import torch

from firesteel.loops import access
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, ProgramStep, Store, View, axis, load
from firesteel.loops.scalars import S

ADDMM = {torch.ops.aten.addmm.out: torch.ops.aten.mm.out, torch.ops.aten.addmm.default: torch.ops.aten.mm.default}


def separate_biases(program: Program) -> Program:
    """The program without biases in library calls where nests can add them."""
    if not any(step.call and step.call.target in ADDMM for step in program.steps):
        return program
    fixed = access.output_buffers(program).union(*[step.reads() for step in program.steps if step.call])
    buffers = dict(program.buffers)
    steps: list[ProgramStep] = []
    for step in program.steps:
        bias = _bias(step.call, program.buffers, fixed) if step.call else None
        steps += _separated(step.call, bias, buffers) if step.call and bias is not None else [step]
    return replace(program, buffers=buffers, steps=tuple(steps))


def _bias(step: Extern, buffers: dict[str, Buffer], fixed: set[str]) -> Buffer | None:
    """The buffer of the bias, if it is a row and the result is for nests alone."""
    if step.target not in ADDMM or step.kwargs or len(step.args) != 3 or step.outputs[0] in fixed:
        return None
    view = step.args[0]
    result, bias = buffers[step.outputs[0]], buffers[view.buffer]      # type: ignore[index]  # a matrix product has a result
    whole = View(bias.name, bias.shape, bias.strides, bias.offset, bias.dtype)
    return bias if view == whole and bias.shape == result.shape[1:] and bias.dtype == result.dtype in ("f32", "f64") else None


def _separated(step: Extern, bias: Buffer, buffers: dict[str, Buffer]) -> list[ProgramStep]:
    result = buffers[step.outputs[0]]       # type: ignore[index]  # as above
    name = f"{result.name}_mm"
    while name in buffers:
        name += "_"
    product = buffers[name] = replace(result, name=name)
    place = axis("i0"), axis("i1")
    value = S.add(load(product, place), load(bias, place[1:]))
    axes = tuple([Axis(f"i{d}", n) for d, n in enumerate(result.shape)])
    add = Nest(step.name, axes, (Phase("map", stores=(Store(result.name, place, value),)),), step.origin)
    return [replace(step, name=product.name, target=ADDMM[step.target], args=step.args[1:], outputs=(product.name,)), add]
