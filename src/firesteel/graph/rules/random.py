"""Rules of operators that draw random numbers.  In-place draws (`bernoulli_`, `uniform_`, ...) have functional rows too."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.autofunctional import functional_form
from firesteel.graph.rules.base import RULES, broadcast, rule
from firesteel.graph.rules.factory import default_device
from firesteel.graph.spec import Spec, device_of, fresh, like, make_spec
from firesteel.sym.expr import Size


@rule("native_dropout")
def native_dropout(x: Spec, p: float, train: bool | None) -> tuple[Spec, Spec]:
    result = like(x)
    return result, result.to(torch.bool)


@rule("bernoulli bernoulli.p poisson binomial _standard_gamma _sample_dirichlet")
def bernoulli(x: Spec, *args: Any, generator: Any = None, **kwargs: Any) -> Spec:
    return fresh(x)


@rule("bernoulli.Tensor uniform normal_functional exponential geometric cauchy log_normal random random.from random.to")
def draw(x: Spec, *args: Any, generator: Any = None, **kwargs: Any) -> Spec:
    return like(x)


for _op in (torch.ops.aten.bernoulli_.float, getattr(torch.ops.aten.random_, "from")):
    RULES.add(functional_form(_op), draw)


@rule("randint randint.generator")
def randint(high: Any, size: Sequence[Size], *, generator: Any = None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(tuple(size), dtype or torch.int64, device_of(device, default_device()))


@rule("randint.low randint.low_generator")
def randint_low(low: Any, high: Any, size: Sequence[Size], *, generator: Any = None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(tuple(size), dtype or torch.int64, device_of(device, default_device()))


@rule("randperm randperm.generator")
def randperm(n: Size, *, generator: Any = None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec((n,), dtype or torch.int64, device_of(device, default_device()))


@rule("multinomial")
def multinomial(x: Spec, count: Size, replacement: bool = False, *, generator: Any = None) -> Spec:
    return fresh(x, (*x.shape[:-1], count), torch.int64)


@rule("normal.Tensor_float")
def normal_tensor_float(mean: Spec, std: float = 1.0, *, generator: Any = None) -> Spec:
    return fresh(mean)


@rule("normal.float_Tensor")
def normal_float_tensor(mean: float, std: Spec, *, generator: Any = None) -> Spec:
    return fresh(std)


@rule("normal.Tensor_Tensor")
def normal_tensors(mean: Spec, std: Spec, *, generator: Any = None) -> Spec:
    return fresh(mean, broadcast(mean.shape, std.shape))


@rule("normal.float_float")
def normal_float(mean: float, std: float, size: Sequence[Size], *, generator=None, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(tuple(size), dtype or torch.get_default_dtype(), device_of(device, default_device()))
