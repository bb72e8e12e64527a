"""Runs a program by eager and compiled, and compares all that a caller can see of it.

`check(program)` is None or a Difference.  Seen are: errors; each output's dtype, shape, strides, requires_grad and values; which outputs and inputs are the
same object or share storage; the whole storage of each input afterwards; each leaf's gradient, or that there is none.

Values may differ by what rounding explains.  A first bound is a few units in the last place of the largest element.  Beyond it eager runs again with the result of
every operator that rounds changed by one unit at random, and once on inputs that are no views, so that gradients are summed in another order; what that changes in
a result (an ill-conditioned program, a rounding that is dropped between two operators) is what the compiled one may differ by, times `FACTOR`.
"""
from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from program_inputs import Made
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import firesteel as fs

FACTOR = 8
EPS = {torch.float64: 2.0 ** -50, torch.float32: 2.0 ** -22, torch.bfloat16: 2.0 ** -7, torch.complex64: 2.0 ** -22, torch.complex128: 2.0 ** -50, torch.float16: 2.0 ** -10}
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


# ---------------------------------------------------------------- what is seen

def storage(t: torch.Tensor) -> torch.Tensor:
    """All of the storage that a tensor lies in, a copy."""
    with torch.no_grad():
        dtype = t.dtype
        return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes() // t.itemsize,), (1,)).clone()


def strides(t: torch.Tensor) -> tuple:
    """Those that an element depends on."""
    return tuple(s for n, s in zip(t.shape, t.stride()) if n > 1) if t.numel() else ()


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


def observe(function: Callable, made: list[Made], grad: bool = True) -> Seen:
    torch.manual_seed(0)
    args = [one.arg for one in made]
    with contextlib.nullcontext() if grad else torch.no_grad():
        outputs = tree_leaves(function(*args))
    tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
    everything = [*args, *tensors]
    looks, shared = [*map(look, outputs), *map(look, args)], relations(everything)
    values = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in outputs]
    storages = [storage(t) for t in args]
    loss = loss_of(list({id(t): t for t in everything}.values())) if grad else None
    if loss is not None:
        loss.backward()
    return Seen(values, looks, shared, storages, [one.leaf.grad if one.leaf is not None else None for one in made])


# ---------------------------------------------------------------- what rounding explains

EXACT = {"amax", "amin", "max", "min", "maximum", "minimum", "sort", "topk", "gather", "index", "index_select", "where", "masked_fill", "clone", "copy", "cat", "stack", "relu", "neg", "abs",
         "fill", "zeros", "ones", "full", "arange", "zero", "empty", "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "scatter", "triu", "tril", "flip", "roll", "max_pool2d_with_indices",
         "upsample_nearest2d", "upsample_nearest1d", "threshold_backward", "new_empty_strided", "slice_scatter", "select_scatter", "slice_backward", "select_backward", "embedding",
         "constant_pad_nd", "reflection_pad1d", "repeat", "eye", "lift_fresh", "masked_select", "scalar_tensor", "empty_strided", "new_empty", "resolve_conj", "sign", "sgn", "conj_physical",
         "randn_like", "repeat_interleave", "unfold_backward", "cummax"}


# kernels that scale and shift their operand, and so cancel inside what a rounding of it explains
INSIDE = {"native_group_norm", "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update"}


def with_memory(t: Any) -> Any:
    """Zeros that autograd makes without memory (the gradient of `sgn`) reach a mode below the key that knows them: kernels would read address 0."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) and t._is_zerotensor() else t


class Noise(TorchDispatchMode):
    """Each operator that rounds rounds once more, at random."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(with_memory, (args, kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in INSIDE:
            args = (self.rounded(args[0].clone()), *args[1:])
        out = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype in EPS and t.numel() and not t._is_zerotensor() and self.rounds(name, func, t, given):
                self.rounded(torch.as_strided(t, *zip(*kept)) if (kept := [(n, s) for n, s in zip(t.shape, t.stride()) if s]) else t.as_strided((), ()))
        return out

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(t.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(t.device) * 2 - 1
        with torch.no_grad():
            return t.mul_((1 + EPS[t.dtype] * noise).to(torch.float64 if t.dtype in (torch.float64, torch.complex128) else torch.float32))

    def rounds(self, name: str, func: Any, t: torch.Tensor, given: list[torch.Tensor]) -> bool:
        writes = func._schema.is_mutable
        if not writes and any(t.untyped_storage()._cdata == one.untyped_storage()._cdata for one in given):
            return False
        narrowed = any(one.dtype in EPS and EPS[one.dtype] < EPS[t.dtype] for one in given)
        return narrowed or name.rstrip("_") not in EXACT | {"_to_copy"}


def largest(t: torch.Tensor) -> float:
    return float(t.abs().double().nan_to_num(0, 0, 0).max()) if t.numel() and t.dtype in EPS else 0.0


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is not finite and the other is, or another infinity."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"), float("inf"))
    return float(gap.max()) if gap.numel() else 0.0


class NoView(torch.autograd.Function):
    """The same memory, as a tensor that is no view for autograd."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def without_views(made: list[Made]) -> list[Made]:
    """A compiled graph sums the gradients of an input at that input; eager sums those of a view that was written at the view, then at its base."""
    return [Made(NoView.apply(one.arg), one.leaf) if one.arg._is_view() and not one.arg.is_leaf and not one.arg.is_neg() and not one.arg.is_conj() else one
            for one in made]


class Explained:
    """How far each value of a program may be from eager's: computed when it is first asked for."""

    def __init__(self, again: Callable[..., Seen]):
        self.again, self._runs = again, None

    @property
    def runs(self) -> list[Seen]:
        if self._runs is None:
            try:
                self._runs = [self.again(without_views)]
            except RuntimeError:        # eager refuses the program with other histories
                self._runs = []
            for seed in range(4):
                with Noise(seed):
                    self._runs.append(self.again())
        return self._runs

    def bound(self, want: torch.Tensor, of: Callable[[Seen], Any]) -> float:
        return max(FACTOR * (apart(found, want) if isinstance(found := of(run), torch.Tensor) else 0.0) for run in self.runs)


def close(got: Any, want: Any, explained: Explained, of: Callable[[Seen], Any]) -> str:
    """"" or the sentence that says how they differ."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if type(got) is type(want) and got == want else f"{got!r}, eager {want!r}"
    gap = apart(got, want)
    if gap <= EPS.get(want.dtype, 0.0) * largest(want) or gap <= explained.bound(want, of):
        return ""
    return f"off by {gap:.4g}, explained {explained.bound(want, of):.4g}\n{got}\neager\n{want}"


# ---------------------------------------------------------------- comparison

def compare(got: Seen, want: Seen, explained: Explained) -> Difference | None:
    if len(got.outputs) != len(want.outputs):
        return Difference("outputs", f"{len(got.outputs)}, eager {len(want.outputs)}")
    for number, (a, b) in enumerate(zip(got.looks, want.looks)):
        if b[2:3] == (None,):       # a negated view of eager's, see `relations`
            a = (*a[:2], None, *a[3:])
        if a != b:
            part = next((name for name, one, other in zip(LOOKS, a, b) if one != other), "type")
            return Difference(part, f"of {'output' if number < len(want.outputs) else 'input'} {number}: {a}, eager {b}")
    if got.relations != want.relations:
        return Difference("alias", f"{got.relations}, eager {want.relations}")
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


def check_functions(inputs: Callable, program: Callable, dynamic: bool | None = None, grad: bool = True, eager_rounding: bool = False, device: str = "cpu") -> Difference | None:
    """None where nothing differs; also where eager refuses the program on this device."""
    fs.reset()
    with quiet(), fs.config.patch(verify=True, cache_dir="", eager_rounding=eager_rounding):
        compiled = fs.compile(program, dynamic=dynamic)
        for number, i in enumerate(CALLS):
            again = lambda change=list: observe(program, change(inputs(i, device)), grad)
            try:
                want = again()
            except (RuntimeError, NotImplementedError):
                return None
            try:
                got = observe(compiled, inputs(i, device), grad)
            except Exception as error:
                return Difference(f"raises {type(error).__name__}", f"at call {number}: {''.join(traceback.format_exception(error))[-3000:]}")
            if (found := compare(got, want, Explained(again))) is not None:
                return Difference(found.kind, f"call {number} (sizes {i}), {found.text}")
    return None


def check(program: Any, device: str = "cpu") -> Difference | None:
    scope = program.load()
    return check_functions(scope["inputs"], scope["program"], device=device, **scope["OPTIONS"])


def main(inputs: Callable, program: Callable, **options: Any) -> None:
    print(check_functions(inputs, program, **options) or "no difference")
