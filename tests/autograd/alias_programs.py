"""Random programs of views, writes and shared storage, and all that a caller can see of a call, as plain data.

A program is a list of instructions over a growing list of tensors, the first of which are its inputs.  What an instruction cannot be done
to (a row of a scalar, say) is left as it is, so that every list of instructions is a program.

    program = make_program(random.Random(7))
    observe(program, run_program)             # by eager; an error is its sentence
"""
import contextlib
import random

import torch

VIEWS = {
    "t": lambda x: x.t() if x.dim() == 2 else x,
    "flat": lambda x: x.reshape(-1) if x.is_contiguous() else x.t() if x.dim() == 2 else x,
    "row": lambda x: x[0] if x.dim() == 2 else x,
    "tail": lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x,
    "step": lambda x: x[::2] if x.dim() else x,
    "column": lambda x: x[:, 1] if x.dim() == 2 and x.shape[1] > 1 else x,
    "unsqueeze": lambda x: x.unsqueeze(0) if x.dim() == 1 else x,
    "squeeze": lambda x: x.squeeze(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: x.view_as(x),
    "expand": lambda x: x.expand(3, *x.shape) if x.dim() < 2 else x.expand_as(x),
    "diagonal": lambda x: x.diagonal() if x.dim() == 2 else x,
    "strided": lambda x: x.as_strided((2, 2), (3, 1)) if x.dim() == 2 and x.numel() >= 8 else x,
    "apart": lambda x: x.as_strided((2,), (1,), x.storage_offset()) if x.dim() == 2 and x.stride(-1) == 1 and x.shape[1] > 1 else x,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x)) if x.dim() == 2 and x.shape[1] == 2 and x.stride() == (2, 1) else x,
    "split": lambda x: x.split(1)[0] if x.dim() else x,
    "unbind": lambda x: x.unbind()[-1] if x.dim() else x,
    "chunk": lambda x: x.chunk(2)[0] if x.dim() else x,
}
PURE = {
    "double": lambda x, y: x * 2,
    "sin": lambda x, y: x.sin(),
    "add": lambda x, y: x + y if x.shape == y.shape else x + 1,
    "scale": lambda x, y: x * y.sum(),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "twin": lambda x, y: Twin.apply(x),
}
WRITES = {
    "mul_": lambda x, y: x.mul_(2),
    "sin_": lambda x, y: x.sin_(),
    "add_": lambda x, y: x.add_(source(x, y) if x.shape == y.shape else 1),
    "copy_": lambda x, y: x.copy_(source(x, y) if x.shape == y.shape else x * 3),
    "zero_": lambda x, y: x.zero_(),
    "set_first": lambda x, y: x.__setitem__(0, 5.0) if x.dim() else x.fill_(1.0),
    "clamp_": lambda x, y: x.clamp_(-1.5, 1.5),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 0.5) if x.shape == y.shape else x.masked_fill_(x > 1, 0.5),
    "dirty": lambda x, y: Dirty.apply(x),
}
SHAPES = {
    "t_": lambda x, y: x.t_() if x.dim() == 2 else x,
    "unsqueeze_": lambda x, y: x.unsqueeze_(0) if x.dim() < 2 else x,
    "squeeze_": lambda x, y: x.squeeze_(),
    "transpose_": lambda x, y: x.transpose_(0, 1) if x.dim() == 2 else x,
    "detach_": lambda x, y: x.detach_(),
    "set_": lambda x, y: x.set_(y.detach()),
    "resize_": lambda x, y: x.resize_(x.shape[0] // 2 + 1) if x.dim() == 1 else x,
    "data=": lambda x, y: setattr(x, "data", y.detach() * 2),
    "grad_on": lambda x, y: x.requires_grad_(True),
    "grad_off": lambda x, y: x.requires_grad_(False),
}
KINDS = {"view": {name: (lambda f: lambda x, y: f(x))(f) for name, f in VIEWS.items()}, "pure": PURE, "write": WRITES, "shape": SHAPES}
MODES = {"": contextlib.nullcontext, "no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "inference": torch.inference_mode}


def source(x, y):
    """y, to be written to x.  Where both lie in one storage with holes in between, what eager writes depends on the order of its loops."""
    return y if x.is_contiguous() and y.is_contiguous() else y.clone()


class Dirty(torch.autograd.Function):
    """x -> x, written in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Twin(torch.autograd.Function):
    """x -> x * x, with what it saves."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return 2 * x * gradient


# ---------------------------------------------------------------- programs

# how an input is made of a fresh leaf and of the inputs before it
INPUTS = {
    "leaf": lambda t, before: t.requires_grad_(),
    "data": lambda t, before: t,
    "result": lambda t, before: t.requires_grad_() * 1.5,
    "turned": lambda t, before: (t.reshape(4, 2).requires_grad_() * 1.5).t(),
    "part": lambda t, before: t.repeat(2, 1)[1:3],
    "part_of_result": lambda t, before: (t.repeat(2, 1).requires_grad_() * 2)[1:3],
    "quiet_part": lambda t, before: quiet_part(t.repeat(2, 1).requires_grad_()),
    "leaf_part": lambda t, before: t.repeat(2, 1)[1:3].requires_grad_(),
    "expanded": lambda t, before: t[:, :1].expand(2, 4),
    "again": lambda t, before: before[0] if before else t,
    "overlapping": lambda t, before: before[0][0] if before and before[0].dim() == 2 else t,
    "alias": lambda t, before: before[-1].detach() if before else t,
    "sibling": lambda t, before: before[-1]._base[:2] if before and before[-1]._base is not None and before[-1]._base.dim() == 2 else t,
}


def quiet_part(t):
    with torch.no_grad():
        return t[1:3]


def make_program(rng, rare=0.3, without=()):
    """(instructions, returned, kinds of inputs).  `rare`: how probable changes of shapes and odd inputs are."""
    kinds = ["view", "view", "pure", "write"] + (["shape"] if rng.random() < rare else [])
    modes = ["", "", "", "", "no_grad"] + (["enable_grad", "inference"] if rng.random() < rare else [])
    instructions = []
    for _ in range(rng.randint(2, 7)):
        kind = rng.choice(kinds)
        instructions.append((kind, rng.choice([name for name in KINDS[kind] if name not in without]), rng.random(), rng.random(), rng.choice(modes)))
    plain = ["leaf", "data", "result"]
    inputs = [rng.choice(list(INPUTS) if rng.random() < rare else plain) for _ in range(rng.randint(1, 4))]
    return instructions, [rng.random() for _ in range(rng.randint(1, 4))], inputs, rng.random()


def run_program(program, inputs):
    instructions, returned, *_ = program
    tensors = list(inputs)
    for kind, name, a, b, mode in instructions:
        x, y = tensors[int(a * len(tensors))], tensors[int(b * len(tensors))]
        with MODES[mode]():
            result = KINDS[kind][name](x, y)
        if isinstance(result, torch.Tensor):
            tensors.append(result)
    return [tensors[int(r * len(tensors))] for r in returned]


def make_inputs(kinds):
    generator = torch.Generator().manual_seed(len(kinds))
    leaves, inputs = [], []
    for kind in kinds:
        leaves.append(torch.randn(2, 4, generator=generator))
        inputs.append(INPUTS[kind](leaves[-1], inputs))
    return leaves, inputs


# ---------------------------------------------------------------- what can be seen

def storage(t):
    return t.untyped_storage()._cdata


def history(t):
    """Has it a history?  To ask may be an error, which is then what is seen."""
    try:
        return t.grad_fn is not None
    except RuntimeError as error:
        return str(error)


def looks(t, grad=True):
    """What one tensor shows."""
    own = (t.requires_grad, t.is_leaf, history(t)) if grad else ()
    return t.tolist(), t.shape, t.stride(), t.storage_offset(), t._is_view(), t._version if not t.is_inference() else "none", t.is_inference(), *own


def relations(tensors):
    """Which are the same, lie in the same storage, are views of which, and have the same base."""
    bases = [t._base for t in tensors]
    return [[a is b for a in tensors] for b in tensors], [[storage(a) == storage(b) for a in tensors] for b in tensors], [
        [base is b for base in bases] for b in tensors], [[a is not None and a is b for a in bases] for b in bases]


def observe(program, run):
    """All that can be seen of one call: a list of parts."""
    leaves, inputs = make_inputs(program[2])
    outputs = run(program, inputs)
    everything = [*inputs, *outputs]
    seen = [list(map(looks, everything)), relations(everything)]
    loss = sum(((k + 1) * t).sum() for k, t in enumerate(everything) if t.requires_grad)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
        seen.append([leaf.grad.tolist() if leaf.grad is not None else None for leaf in leaves if leaf.is_leaf])
    outputs[int(program[3] * len(outputs))].mul_(3) if random.Random(program[3]).random() < 0.5 else write_quietly(outputs[int(program[3] * len(outputs))])
    return [*seen, list(map(looks, everything))]


def write_quietly(t):
    with torch.no_grad():
        t.mul_(3)


def attempt(program, run):
    """What is seen of a call, or the sentence of its error."""
    try:
        return observe(program, run)
    except RuntimeError as error:
        return type(error).__name__, str(error)


def freely(parts):
    """The same without the strides of dimensions of size 1, which no element depends on."""
    if not isinstance(parts, (list, tuple)) or isinstance(parts, torch.Size):
        return parts
    if len(parts) > 2 and isinstance(parts[1], torch.Size):
        values, shape, strides, *rest = parts
        return values, shape, tuple(0 if n == 1 else s for n, s in zip(shape, strides)), *rest
    return type(parts)(map(freely, parts))


def close(a, b):
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(close, a, b))
    return a == b or isinstance(a, float) and isinstance(b, float) and (abs(a - b) <= 1e-4 * max(1, abs(b)) or a != a and b != b)
