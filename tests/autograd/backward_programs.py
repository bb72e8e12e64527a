"""Random autograd graphs with hooks of every kind at random places, for comparing a captured backward with the eager engine's.

A program is made from a seed and run twice: `run(seed)` builds leaves and intermediates, puts hooks on some, and takes gradients in one of the
ways that torch has.  What it returns is all that can be observed: the order and the arguments of every hook, gradients with their
strides, the identity of `.grad`, errors.

    python tests/autograd/backward_programs.py 3000 --seed 0 --backend eager      # prints the programs that differ; exit status 1 if there are any
"""
import argparse
import random
import sys
import time

import torch
from captured import OnlySecond, Scale, counted, difference
from torch.utils.checkpoint import checkpoint

import firesteel as fs


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * y + b, a * x + b


class Broken(torch.autograd.Function):
    """Its backward cannot be captured whole, and asks for a call at the end."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.save_for_backward(x)
        ctx.note = note
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        part = grad * x.sin()
        fs.graph_break()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: ctx.note("callback", part))
        return -part, None


class Raised(Exception):
    """A hook had enough."""


def block(x, y):
    return torch.tanh(x * y) + x.relu()


def write_slice(t):
    out = t * 1
    out[0].mul_(2)
    return out


def write_views(t):
    """A chain of views, written at its end."""
    out = t.sin().contiguous()
    out.view(-1)[2:10].view(2, 4).t()[1].mul_(3)
    return out


def through(dtype):
    return lambda t: t.to(dtype).sin().to(t.dtype)


UNARY = {
    "write views": write_views, "double": through(torch.float64), "complex": lambda t: torch.view_as_real(torch.complex(t, t.cos()).exp()).sum(-1),
    "chain": lambda t: t.t().reshape(2, -1).flip(0).reshape(t.shape[1], -1).t(), "unsqueeze": lambda t: t.unsqueeze(1).expand(-1, 2, -1)[:, 1] * 2,
    "norm": lambda t: torch.nn.functional.layer_norm(t, t.shape[1:]), "split": lambda t: torch.cat(t.split(1, 1)[::-1], 1),
    "index": lambda t: t[torch.arange(t.shape[0] - 1, -1, -1)], "shared": lambda t: (t * t) * t + t,
    "mul": lambda t: t * 1.5, "tanh": torch.tanh, "sum": lambda t: t.sum(0, keepdim=True).expand(t.shape), "t": lambda t: t.t().contiguous().t(),
    "slice": lambda t: torch.cat([t[:1] * 2, t[1:]]), "scale": lambda t: Scale.apply(t, 0.7), "write": write_slice,
    "softmax": lambda t: t.softmax(-1), "view": lambda t: t.reshape(t.shape[::-1]).sin().reshape(t.shape), "same": lambda t: t.clone(),
}
BINARY = {
    "add": torch.add, "mul": torch.mul, "two": lambda a, b: sum(Two.apply(a, b)), "where": lambda a, b: torch.where(a > 0, a, b),
    "mm": lambda a, b: (a @ b.t()) @ b, "max": torch.maximum, "undefined": OnlySecond.apply, "detached": lambda a, b: a.detach() * b,
}


class Program:
    """One run; `log` is what its hooks saw."""

    def __init__(self, seed, compiled, shape):
        self.random = random.Random(seed)
        self.log, self.text = [], []            # the text is for who looks for the cause of a difference
        self.compiled, self.shape = compiled, shape
        self.raises = self.random.random() < 0.08           # does one of its hooks raise an error?
        torch.manual_seed(seed)

    def note(self, kind, *tensors):
        self.log.append((kind, *(None if t is None else t.detach().clone() for t in tensors)))

    # -- hooks -----------------------------------------------------------------------------------------------------
    def hook_tensor(self, t, name):
        change = self.random.random() < 0.5

        def hook(grad):
            self.note(f"tensor {name}", grad)
            return grad * 1.25 if change and grad is not None else None
        t.register_hook(hook)

    def hook_writes(self, t, name):
        t.register_hook(lambda grad: self.note(f"writes {name}", grad if grad is None or 0 in grad.stride() else grad.mul_(2)))

    def hook_fails(self, t, name):
        if self.raises:
            def hook(grad):
                self.note(f"fails {name}", grad)
                raise Raised(name)
            t.register_hook(hook)

    def hook_leaves(self, t, name):
        """Removes itself."""
        def hook(grad):
            self.note(f"once {name}", grad)
            handle.remove()
            return None if grad is None else grad + 1
        handle = t.register_hook(hook)

    def hook_before(self, t, name):
        if t.grad_fn is not None:
            def hook(grads):
                self.note(f"before {name}", *grads)
                return tuple(None if g is None else g * 0.5 for g in grads)
            t.grad_fn.register_prehook(hook)

    def hook_behind(self, t, name):
        if t.grad_fn is not None:
            t.grad_fn.register_hook(lambda results, grads: self.note(f"behind {name}", *results, *grads))

    def hook_accumulated(self, t, name):
        if t.is_leaf:
            clears = self.random.random() < 0.3

            def hook(leaf):
                self.note(f"accumulated {name}", leaf.grad)
                if clears:
                    leaf.grad = None
            t.register_post_accumulate_grad_hook(hook)

    def hook_retain(self, t, name):
        if not t.is_leaf:
            t.retain_grad()
            self.retained.append(t)

    def hook_breaks(self, t, name):
        """Cannot be captured whole."""
        def hook(grad):
            twice = None if grad is None else grad * 2
            fs.graph_break()
            self.note(f"breaks {name}", grad)
            return twice
        t.register_hook(hook)

    def hook_late(self, t, name):
        """Another hook, registered while the backward runs, for the next one: on what has run already."""
        def hook(grad):
            self.note(f"registers {name}", grad)
            if not registered:
                registered.append(t.register_hook(lambda grad: self.note(f"registered {name}", grad)))
        registered = []
        t.register_hook(hook)

    def hook_many(self, t, name):
        others = [t, *(v for v in self.values[-2:] if v.requires_grad and v is not t)]
        mode = self.random.choice(("all", "any"))

        def hook(grads):
            self.note(f"many {name}", *(grads if mode == "all" else (grads,)))
        torch.autograd.graph.register_multi_grad_hook(others, hook, mode=mode)

    HOOKS = (hook_tensor, hook_tensor, hook_writes, hook_fails, hook_leaves, hook_before, hook_behind, hook_accumulated, hook_retain, hook_many,
             hook_breaks, hook_late)

    def maybe_hook(self, t, name):
        if t.requires_grad and self.random.random() < 0.3:
            hook = self.random.choice(self.HOOKS)
            self.text.append(f"{hook.__name__} on {name}")
            hook(self, t, name)

    # -- the program -----------------------------------------------------------------------------------------------
    def build(self):
        self.retained = []
        self.values = []
        self.leaves = [torch.randn(self.shape, requires_grad=True) for _ in range(self.random.randint(1, 3))]
        for n, leaf in enumerate(self.leaves):
            self.give_gradient(leaf)
            self.maybe_hook(leaf, f"leaf{n}")
        values = self.values = list(self.leaves)
        for n in range(self.random.randint(2, 7)):
            values.append(self.step(values, n))
            self.maybe_hook(values[-1], f"value{n}")
        return values

    def give_gradient(self, leaf):
        """Sometimes one is there before, of its own memory or a view of what others have too."""
        kind = self.random.random()
        if kind < 0.1:
            leaf.grad = torch.randn(self.shape)
        elif kind < 0.2:
            self.bucket = torch.randn(2, *self.shape)
            leaf.grad = self.bucket[1]

    def step(self, values, n):
        kind = self.random.random()
        i, j = self.random.randrange(len(values)), self.random.randrange(max(0, len(values) - 3), len(values))
        a, b = values[i], values[j]
        name = self.random.choice(list(UNARY if kind < 0.6 else BINARY))
        special = next((special for limit, special in self.SPECIAL if kind < limit), None)
        self.text.append(f"value{n} = {name if special is None else special.__name__}({i}, {j})")
        if special is not None:
            return special(self, a, b, n)
        return UNARY[name](b) if kind < 0.6 else BINARY[name](a, b)

    def compiled_block(self, a, b, n):
        return self.compiled(a, b)

    def hooked(self, a, b, n):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return a * b

    def module_call(self, a, b, n):
        return self.module(n)(b)

    def broken(self, a, b, n):
        return Broken.apply(b, self.note)

    def checkpointed(self, a, b, n):
        return checkpoint(block, a, b, use_reentrant=False)

    # up to this number -> what makes the next value
    SPECIAL = ((0.1, compiled_block), (0.16, hooked), (0.21, module_call), (0.24, broken), (0.27, checkpointed))

    def module(self, n):
        """A linear layer with hooks; its parameters are leaves too."""
        module = torch.nn.Linear(self.shape[1], self.shape[1], bias=self.random.random() < 0.5)
        change = self.random.random() < 0.5
        module.register_full_backward_pre_hook(lambda m, grads: self.note(f"module before {n}", *grads))
        module.register_full_backward_hook(
            lambda m, results, grads: self.note(f"module {n}", *results, *grads) or (tuple(g if g is None else g * 2 for g in results) if change else None))
        self.leaves += module.parameters()
        return module

    def take(self, values):
        """Gradients, in one of the ways that torch has."""
        loss, leaves = values[-1].sum() + values[self.random.randrange(len(values))].sum() * 0.5, self.leaves
        way = self.random.choice(("backward", "backward", "twice", "grad", "inputs", "roots", "create"))
        self.text.append(way)
        if way == "backward":
            return loss.backward()
        if way == "twice":
            loss.backward(retain_graph=True)
            return loss.backward()
        if way == "roots":
            return torch.autograd.backward([values[-1], loss], [torch.ones(self.shape), None])
        some = self.random.sample(leaves, self.random.randint(1, len(leaves)))
        if way == "inputs":
            return loss.backward(inputs=some)
        if way == "create":
            first = torch.autograd.grad(loss, some, allow_unused=True, create_graph=True)
            second = [g.square().sum() for g in first if g is not None and g.requires_grad]
            if second:
                sum(second).backward()
            return first
        return torch.autograd.grad(loss, some, allow_unused=True)

    def observe(self):
        values = self.build()
        before = [leaf.grad for leaf in self.leaves]
        given, error = (), None
        try:
            given = self.take(values)
        except (RuntimeError, Raised) as raised:
            error = f"{type(raised).__name__} {raised}".partition("\n")[0]
        grads = [t.grad for t in (*self.leaves, *self.retained)]
        return {"error": error, "log": self.log, "given": list(given or ()), "grads": grads, "bucket": getattr(self, "bucket", None),
                "strides": [None if g is None else g.stride() for g in grads],
                "kept": [old is not None and old is leaf.grad for old, leaf in zip(before, self.leaves)]}


SHAPES = ((3, 4), (6, 3))       # the second with what the first left in the cache
compiled_blocks = {"eager": fs.compile(block, backend="aot_eager"), "native": fs.compile(block)}


def run(seed, captured=False, backend="eager"):
    """What the program does for each of the shapes."""
    if not captured:
        return [Program(seed, compiled_blocks[backend], shape).observe() for shape in SHAPES]
    with fs.compiled_autograd(lambda gm: fs.compile(gm, backend=backend)):
        return [Program(seed, compiled_blocks[backend], shape).observe() for shape in SHAPES]


def compare(seed, backend):
    """What a captured backward does otherwise than eager's.  Gradients that are nothing but rounding errors differ in single precision alone."""
    found = difference(run(seed, backend=backend), run(seed, captured=True, backend=backend))
    if found is None:
        return None
    torch.set_default_dtype(torch.float64)
    try:
        return difference(run(seed, backend=backend), run(seed, captured=True, backend=backend))
    finally:
        torch.set_default_dtype(torch.float32)


# -- by hand --------------------------------------------------------------------------------------------------------------
def main():
    parser = argparse.ArgumentParser(description="Compares random backwards of the eager engine with captured ones.")
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--backend", choices=sorted(compiled_blocks), default="eager")
    options = parser.parse_args()
    begun, wrong, totals = time.time(), [], [0, 0, 0]
    for seed in range(options.seed, options.seed + options.count):
        found = compare(seed, options.backend)
        if found is not None:
            wrong.append(seed)
            print(f"program {seed}{found}", flush=True)
        if seed % 50 == 49 or seed == options.seed + options.count - 1:
            totals = [sum(pair) for pair in zip(totals, counted())]
            fs.reset()      # which forgets the counts
    print(f"{options.count} programs, {len(wrong)} differ; captures, by eager, of unknown order: {totals}; {time.time() - begun:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
