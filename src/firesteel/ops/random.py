"""Operators that draw random numbers.  In-place draws have functional forms, which stand here."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.graph.autofunctional import functional_form
from firesteel.graph.random_state import ZEROS_AND_ONES
from firesteel.graph.rules.base import RULES, broadcast, check, elementwise, result_dtype
from firesteel.graph.rules.refusals import known, within
from firesteel.graph.spec import Spec, device_of, fresh, like, make_spec
from firesteel.loops.lower.build import Builder
from firesteel.loops.lower.value import Operand
from firesteel.operators import find
from firesteel.ops.block import decomposition, device_rule, lowering, operator, refuses, rule
from firesteel.ops.factory import default_device, zeros, zeros_like
from firesteel.sym.expr import Size
from firesteel.targets import on_host

operator("rand.* randn.* randint.* randperm.* rand_like.* randn_like.* randint_like.* bernoulli.* uniform.* normal.* "
         "normal_functional.* exponential.* geometric.* cauchy.* log_normal.* multinomial.* poisson.* native_dropout.* "
         "_fused_dropout.* firesteel::zeros_and_ones.* firesteel::functional_aten_bernoulli__float.* firesteel::functional_aten_random__from.* "
         "firesteel::random_state.* firesteel::swap_random_state.* firesteel::put_back_random_state.* random* binomial*", library=True)


rule("rand randn rand.generator randn.generator")(zeros)
rule("""rand_like randn_like rand_like.generator randn_like.generator randint_like randint_like.generator randint_like.low_dtype
    randint_like.low_generator_dtype""")(zeros_like)


@rule("native_dropout")
def native_dropout(x: Spec, p: float, train: bool | None) -> tuple[Spec, Spec]:
    result = like(x)
    return result, result.to(torch.bool)


operator("native_dropout_backward.*", recompute="pointwise")
device_rule("native_dropout_backward", probed=True)(
    lambda grad, mask, scale: elementwise([grad, mask], result_dtype((grad, mask, scale))))
decomposition("native_dropout_backward")(lambda grad, mask, scale: grad * mask * scale)
rule("bernoulli bernoulli.p poisson binomial _standard_gamma _sample_dirichlet")(lambda x, *args, generator=None, **kwargs: fresh(x))


@rule("bernoulli.Tensor uniform normal_functional exponential geometric cauchy log_normal random random.from random.to")
def draw(x: Spec, *args: Any, generator: Any = None, **kwargs: Any) -> Spec:
    return like(x)


DRAWS = {"bernoulli.p": "bernoulli_.float", "uniform": "uniform_", "normal_functional": "normal_", "exponential": "exponential_",
         "geometric": "geometric_", "cauchy": "cauchy_", "log_normal": "log_normal_"}


def _drawn_in_place(op: Any, /, b: Builder, out: Any, x: Operand, *args: Any, **kwargs: Any) -> Any:
    """The layout of x is all that counts: numbers are drawn into memory that holds nothing yet.  Only where x was made for that: the
    operator that returns a fresh tensor does not count a write."""
    if not on_host(out) or x.body is None:
        return NotImplemented
    made = b.call(torch.ops.aten.empty_strided.default, (list(out.shape), list(out.strides)), {"dtype": out.dtype}, out)
    b.call(op, (made, *args), kwargs, None, written=[made])
    return made


for _functional, _op_name in DRAWS.items():
    lowering(_functional)(functools.partial(_drawn_in_place, find(_op_name)))


for _op in (torch.ops.aten.bernoulli_.float, getattr(torch.ops.aten.random_, "from")):
    RULES.add(functional_form(_op), draw)


RULES.add(ZEROS_AND_ONES, lambda x, chance: like(x))


@rule("randint randint.generator randint.low randint.low_generator")
def randint(*limits_and_size: Any, generator: Any = None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(tuple(limits_and_size[-1]), dtype or torch.int64, device_of(device, default_device()))


rule("randperm randperm.generator")(lambda n, **options: randint((n,), **options))
rule("multinomial")(lambda x, count, replacement=False, *, generator=None: fresh(x, (*x.shape[:-1], count), torch.int64))


@refuses("multinomial")
def refuse_multinomial(x: Spec, count: Size, replacement: bool = False, *, generator: Any = None) -> None:
    check(len(x.shape) in (1, 2), "prob_dist must be 1 or 2 dim")
    check(x.dtype.is_floating_point, f"multinomial only supports floating-point dtypes for input, got: {x.dtype}")
    within(count, 1, None, "cannot sample n_sample <= 0 samples")
    within(x.shape[-1], None, 2**24, "number of categories cannot exceed 2^24")
    if not replacement:
        within(count, None, x.shape[-1], "cannot sample n_sample > prob_dist.size(-1) samples without replacement")


rule("normal.Tensor_float")(lambda mean, std=1.0, *, generator=None: fresh(mean))
rule("normal.float_Tensor")(lambda mean, std, *, generator=None: fresh(std))
rule("normal.Tensor_Tensor")(lambda mean, std, *, generator=None: fresh(mean, broadcast(mean.shape, std.shape)))


@rule("normal.float_float")
def normal_float(mean: float, std: float, size: Sequence[Size], *, generator=None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(tuple(size), dtype or torch.get_default_dtype(), device_of(device, default_device()))


RANDOM: dict[str, tuple[Callable[..., bool], str]] = {      # operator: (are its numbers right?, what they must be)
    "exponential": (lambda lambd=1.0: lambd > 0, "exponential_ expects lambda > 0.0"),
    "geometric": (lambda p: 0 < p < 1, "geometric_ expects p to be in (0, 1)"),
    "cauchy": (lambda median=0.0, sigma=1.0: sigma > 0, "cauchy_ expects sigma > 0.0"),
    "log_normal": (lambda mean=1.0, std=2.0: std > 0, "log_normal_ expects std > 0.0"),
    "normal_functional": (lambda mean=0.0, std=1.0: std >= 0, "normal expects std >= 0.0"),
    "uniform": (lambda low=0.0, high=1.0: low <= high, "uniform_ expects to return a [from, to) range"),
    "bernoulli.p": (lambda p=0.5: 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1]"),
}


def _refuse_numbers(right: Callable[..., bool], message: str, /, x: Spec, *numbers: Any, generator: Any = None, **named: Any) -> None:
    values = (*numbers, *named.values())
    check(not all(map(known, values)) or right(*values), message)


for _name, _row in RANDOM.items():
    refuses(_name)(functools.partial(_refuse_numbers, *_row))
