"""Runs a program by eager and compiled, and compares all that a caller can see of it.

`check(program)` is None or a Difference.  Seen are: errors; each output's dtype, shape, strides, requires_grad and values; which outputs and inputs are the
same object or share storage; the whole storage of each input afterwards; each leaf's gradient, or that there is none; what comes of writing to the
outputs with a gradient afterwards.

Values may differ by what rounding explains (program_rounding.py).
"""
from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from program_inputs import Made
from program_rounding import Explained, apart, first_bound
from torch.utils._pytree import tree_leaves

import firesteel as fs

CALLS = (0, 1, 0)       # which set of sizes each call has


@dataclass(frozen=True)
class Difference:
    kind: str       # what the shrinker keeps
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Seen:
    outputs: list[Any]
    looks: list[tuple]
    relations: list
    storages: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    refused: list[str]
    scale: torch.Tensor | None


# ---------------------------------------------------------------- what is seen

def storage(t: torch.Tensor) -> torch.Tensor:
    """All of the storage that a tensor lies in, a copy."""
    with torch.no_grad():
        dtype = t.dtype
        return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes() // t.itemsize,), (1,)).clone()


def strides(t: torch.Tensor) -> tuple:
    """Those of a tensor with elements.  Without: a size that is an expression is not asked whether it is 0, and eager's contiguous strides count 0 as 1."""
    return t.stride() if t.numel() else ()


def counting(seen: tuple) -> tuple:
    """What was seen of a tensor, with strides of sizes above 1 alone."""
    return (*seen[:2], tuple(s for n, s in zip(seen[1], seen[2]) if n > 1), *seen[3:]) if len(seen) == len(LOOKS) and seen[2] is not None else seen


def look(t: Any) -> tuple:
    if not isinstance(t, torch.Tensor):
        return type(t), t
    return t.dtype, tuple(t.shape), None if t.is_neg() else strides(t), t.requires_grad, t.device.type, t.is_conj()


LOOKS = ("dtype", "shape", "stride", "requires_grad", "device", "conj")


def relations(tensors: list[torch.Tensor]) -> list:
    """Which lie in one storage, and which are the same object.  The imaginary part of a conjugate, which eager shows in the storage of its base by a
    bit that says "negated", may be a tensor of its own."""
    where = [t.untyped_storage()._cdata for t in tensors]
    return [(i, j, tensors[i] is tensors[j]) for i in range(len(where)) for j in range(i)
            if where[i] == where[j] and not (tensors[i].is_neg() or tensors[j].is_neg())]


def loss_of(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """A sum in which every element counts differently."""
    total = None
    for number, t in enumerate(tensors):
        if not t.requires_grad or t.is_leaf or not t.numel():
            continue
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64, device=t.device).view(t.shape).to(t.dtype)
        part = (t * weights).sum().double() * (number + 1)
        total = part if total is None else total + part
    return total


def written(outputs: list[torch.Tensor], everything: list[torch.Tensor]) -> tuple[list[str], torch.Tensor | None]:
    """Each output in turn (of a type in which the sum of many products means something) scaled in place by one leaf: what refuses that, and its gradient.  A view of what it is a view of, under which mode of
    autograd it was made, decides both."""
    refused, scale = [], torch.tensor(1.25, requires_grad=True, device=everything[0].device)
    for t in outputs:
        try:
            t.mul_(scale)
            refused.append("")
        except RuntimeError as error:
            refused.append(re.sub(r"Output \d+ of \w+", "It", str(error))[:60])      # views of views: which was made last is not asked
    loss = loss_of(everything)
    try:
        return refused, None if loss is None else torch.autograd.grad(loss, scale, allow_unused=True)[0]
    except RuntimeError:        # a value that a backward needs is gone
        return refused, None


def observe(function: Callable, made: list[Made], grad: bool = True, inference: bool = False) -> Seen:
    """`grad`: with gradients; `inference`: called in inference mode."""
    torch.manual_seed(0)
    args, grad = [one.arg for one in made], grad and not inference
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        outputs = tree_leaves(function(*args))
    tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
    everything = [*args, *tensors]
    looks, shared = [*map(look, outputs), *map(look, args)], relations(everything)
    values = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in outputs]
    storages = [storage(t) for t in args]
    distinct = list({id(t): t for t in everything}.values())
    loss = loss_of(distinct) if grad else None
    if loss is not None:
        loss.backward()
    grads = [one.leaf.grad if one.leaf is not None else None for one in made]
    refused, scale = written([t for t in tensors if t.dtype in (torch.float32, torch.float64)], distinct) if grad and distinct else ([], None)
    return Seen(values, looks, shared, storages, grads, refused, scale)


def close(got: Any, want: Any, explained: Explained, of: Callable[[Seen], Any]) -> str:
    """"" or the sentence that says how they differ."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if type(got) is type(want) and got == want else f"{got!r}, eager {want!r}"
    gap = apart(got, want)
    if gap <= first_bound(want) or gap <= explained.bound(want, of):
        return ""
    return f"off by {gap:.4g}, explained {explained.bound(want, of):.4g}\n{got}\neager\n{want}"


# ---------------------------------------------------------------- comparison

def compare(got: Seen, want: Seen, explained: Explained, idle: bool = True) -> Difference | None:
    """`idle`: strides of dimensions of size 1 count."""
    if len(got.outputs) != len(want.outputs):
        return Difference("outputs", f"{len(got.outputs)}, eager {len(want.outputs)}")
    for number, (a, b) in enumerate(zip(got.looks, want.looks)):
        if b[2:3] == (None,):       # a negated view of eager's, see `relations`
            a = (*a[:2], None, *a[3:])
        if a != b and (idle or counting(a) != counting(b)):
            part = next((name for name, one, other in zip(LOOKS, a, b) if one != other), "type")
            return Difference(part, f"of {'output' if number < len(want.outputs) else 'input'} {number}: {a}, eager {b}")
    if got.relations != want.relations:
        return Difference("alias", f"{got.relations}, eager {want.relations}")
    if got.refused != want.refused:
        return Difference("refused write", f"{got.refused}, eager {want.refused}")
    if want.scale is not None and (text := close(got.scale, want.scale, explained, lambda seen: seen.scale)):
        return Difference("gradient of a later write", text)
    parts = [("value", "outputs"), ("written input", "storages"), ("gradient", "grads")]
    for kind, field in parts:
        for number, (a, b) in enumerate(zip(getattr(got, field), getattr(want, field))):
            if (a is None) != (b is None):
                return Difference("no gradient", f"of input {number}: {a}, eager {b}")
            if text := close(a, b, explained, lambda seen: getattr(seen, field)[number]):
                return Difference(kind, f"{number}: {text}")
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_functions(inputs: Callable, program: Callable, dynamic: bool | None = None, grad: bool = True, inference: bool = False, eager_rounding: bool = False,
                    device: str = "cpu") -> Difference | None:
    """None where nothing differs; also where eager refuses the program on this device, or where it is none any more (a name that is gone)."""
    fs.reset()
    with quiet(), fs.config.patch(verify=True, cache_dir="", eager_rounding=eager_rounding):
        compiled = fs.compile(program, dynamic=dynamic)
        for number, i in enumerate(CALLS):
            idle = dynamic is not True and number == 0 and device == "cpu"      # an expression is not asked whether it is 1; eager's GPU kernels have their own
            again = lambda change=list: observe(program, change(inputs(i, device)), grad, inference)
            try:
                want = again()
            except (RuntimeError, NameError, TypeError, IndexError, ValueError):
                return None
            try:
                got = observe(compiled, inputs(i, device), grad, inference)
            except Exception as error:
                return Difference(f"raises {type(error).__name__}", f"at call {number}: {''.join(traceback.format_exception(error))[-3000:]}")
            if (found := compare(got, want, Explained(again), idle)) is not None:
                return Difference(found.kind, f"call {number} (sizes {i}), {found.text}")
    return None


def check(program: Any, device: str = "cpu") -> Difference | None:
    scope = program.load()
    return check_functions(scope["inputs"], scope["program"], device=device, **scope["OPTIONS"])


def main(inputs: Callable, program: Callable, **options: Any) -> None:
    print(check_functions(inputs, program, **options) or "no difference")
