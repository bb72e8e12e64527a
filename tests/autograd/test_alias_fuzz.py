"""Random programs of views, in-place writes and results that share storage: what a caller can observe is eager's.

A program is a list of instructions over a growing list of tensors, the first of which are its inputs.  Compared are values, strides,
requires_grad, is_leaf of what is no view, which results are the same object, share storage with one another or with an input, which of those
that require grad are views of which, what inputs
hold afterwards, whether their versions rose, gradients, and all that again after a further write.  Where eager refuses a program, the
compiled one is refused with the same sentence.
"""
import os
import random

import pytest
import torch

from firesteel.autograd import aot

VIEWS = {
    "t": lambda x: x.t() if x.dim() == 2 else x,
    "flat": lambda x: x.reshape(-1) if x.is_contiguous() else x.t() if x.dim() == 2 else x,
    "row": lambda x: x[0] if x.dim() == 2 else x,
    "tail": lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x,
    "step": lambda x: x[::2] if x.dim() else x,
    "column": lambda x: x[:, 1] if x.dim() == 2 and x.shape[1] > 1 else x,
    "unsqueeze": lambda x: x.unsqueeze(0) if x.dim() == 1 else x,
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.view_as(x),
}
PURE = {
    "double": lambda x, y: x * 2,
    "sin": lambda x, y: x.sin(),
    "add": lambda x, y: x + y if x.shape == y.shape else x + 1,
    "scale": lambda x, y: x * y.sum(),
    "clone": lambda x, y: x.clone(),
}
WRITES = {
    "mul_": lambda x, y: x.mul_(2),
    "sin_": lambda x, y: x.sin_(),
    "add_": lambda x, y: x.add_(y if x.shape == y.shape else 1),
    "copy_": lambda x, y: x.copy_(y if x.shape == y.shape else x * 3),
    "zero_": lambda x, y: x.zero_(),
    "set_first": lambda x, y: x.__setitem__(0, 5.0) if x.dim() else x.fill_(1.0),
}
KINDS = {"view": VIEWS, "pure": PURE, "write": WRITES}
INPUTS = ("leaf", "data", "result", "leaf", "data")


def make_program(rng):
    instructions = []
    for _ in range(rng.randint(2, 7)):
        kind = rng.choice(("view", "view", "pure", "write"))
        instructions.append((kind, rng.choice(list(KINDS[kind])), rng.random(), rng.random(), rng.random() < 0.15))
    return instructions, [rng.random() for _ in range(rng.randint(1, 4))]


def run_program(program, inputs):
    instructions, returned = program
    tensors = list(inputs)
    for kind, name, a, b, quiet in instructions:
        x, y = tensors[int(a * len(tensors))], tensors[int(b * len(tensors))]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not quiet):
            result = VIEWS[name](x) if kind == "view" else KINDS[kind][name](x, y)
        if isinstance(result, torch.Tensor):
            tensors.append(result)
    return [tensors[int(r * len(tensors))] for r in returned]


def make_inputs(count):
    generator = torch.Generator().manual_seed(count)
    leaves = [torch.randn(2, 4, generator=generator).requires_grad_(kind != "data") for kind in INPUTS[:count]]
    return leaves, [leaf * 1.5 if kind == "result" else leaf for kind, leaf in zip(INPUTS, leaves)]


def storage(t):
    return t.untyped_storage()._cdata


def strides(t):
    """Those that say where elements lie."""
    return [s for n, s in zip(t.shape, t.stride()) if n > 1]


def observe(fn, program, count, written):
    """All that can be seen of one call, as plain data."""
    leaves, inputs = make_inputs(count)
    outputs = fn(program, inputs)
    everything = [*inputs, *outputs]
    seen = [[(t.tolist(), strides(t), t.requires_grad, t.is_leaf or t._is_view()) for t in everything],
            [[a is b for a in everything] for b in everything], [[a.requires_grad and a._base is b for a in everything] for b in everything], [[storage(a) == storage(b) for a in everything] for b in everything],
            [t._version > 0 for t in inputs]]
    loss = sum(((k + 1) * t).sum() for k, t in enumerate(everything) if t.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
        seen.append([leaf.grad.tolist() if leaf.grad is not None else None for leaf in leaves if leaf.requires_grad and leaf.is_leaf])
    with torch.no_grad():
        outputs[int(written * len(outputs))].mul_(3)
    return [*seen, [t.tolist() for t in everything]]


def close(a, b):
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(close, a, b))
    return a == b or isinstance(a, float) and isinstance(b, float) and (abs(a - b) <= 1e-4 * max(1, abs(b)) or a != a and b != b)


def compiled(program, inputs):
    fn = aot.function(lambda *inputs: run_program(program, inputs), aot.nop, partition_fn=aot.min_cut_partition)
    return fn(*inputs)


def compiled_without_partition(program, inputs):
    return aot.function(lambda *inputs: run_program(program, inputs), aot.nop)(*inputs)


def attempt(fn, program, count, written):
    """What is seen of a call, or the error."""
    try:
        return observe(fn, program, count, written)
    except RuntimeError as error:
        return error


def check_seed(seed):
    """Compares one random program with eager; False where eager refuses it."""
    rng = random.Random(seed)
    program, count, written = make_program(rng), rng.randint(1, 5), rng.random()
    want = attempt(run_program, program, count, written)
    for fn in (compiled, compiled_without_partition):
        got = attempt(fn, program, count, written)
        if isinstance(want, RuntimeError) or isinstance(got, RuntimeError):
            assert (type(got), str(got)) == (type(want), str(want)), (seed, program, count)
            continue
        for part, (g, w) in enumerate(zip(got, want)):
            assert close(g, w), (seed, program, count, part, g, w)
    return not isinstance(want, RuntimeError)


@pytest.mark.parametrize("block", range(8))
def test_random_programs(block):
    """FIRESTEEL_FUZZ says how many programs in all."""
    size = int(os.environ.get("FIRESTEEL_FUZZ", 480)) // 8
    run = sum(check_seed(seed) for seed in range(block * size, (block + 1) * size))
    assert run > size // 4
