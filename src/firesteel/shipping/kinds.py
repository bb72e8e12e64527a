"""Kinds of loaded programs: how host functions, and the alias plan around them, make the results of a call.

A program with a backward is an autograd function whose forward saves what the partition chose and whose backward runs the other host function.
Gradients of gradients need the program itself, which a package does not hold: asking for them is an error.

    run = KINDS["training"](plan, {"forward": f, "backward": g}, manifest["backward"])
    results = run(inputs)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from firesteel.autograd.alias import AliasPlan, unrecorded_writer
from firesteel.autograd.edges import Tangent, casts, detaching, fit, in_all_places, keeps_graph, without_casting
from firesteel.errors import PackageError
from firesteel.table import Table
from firesteel.tracebacks import hiding

Run = Callable[[Sequence[Any]], tuple]
KINDS: Table[Callable[[AliasPlan, Mapping[str, Callable], Mapping[str, Any]], Run]] = Table("kind of package", "shipping/kinds.py")


def quiet(host: Callable) -> Callable:
    """The host function without automatic casting: the casts are in the program."""
    uncast = without_casting(host)
    return lambda *args: uncast(*args) if casts() else host(*args)


@KINDS.row("inference")
def inference(plan: AliasPlan, parts: Mapping[str, Callable], about: Mapping[str, Any]) -> Run:
    """Runs a forward graph and carries out the alias plan; gradients are not recorded."""
    forward, finish, write = quiet(parts["forward"]), plan.prepare().finish(), unrecorded_writer(plan.writes)

    def run(inputs: Sequence[Any]) -> tuple:
        with torch.no_grad():
            values = forward(*inputs)
            write(inputs, values)
            return plan.assemble(inputs, values if finish is None else finish(values))
    return run


@KINDS.row("training")
def training(plan: AliasPlan, parts: Mapping[str, Callable], about: Mapping[str, Any]) -> Run:
    """Runs the forward through an autograd function."""
    apply: Callable = make_function(plan.prepare(), quiet(parts["forward"]), quiet(parts["backward"]), about).apply
    if about["severed"]:
        apply = detaching(apply, about["severed"])
    if len(plan.recorded_values()) < plan.num_values:
        apply = in_all_places(apply, plan)
    return lambda inputs: plan.assemble(inputs, apply(*inputs))


def make_function(plan: AliasPlan, forward_host: Callable, backward_host: Callable, about: Mapping[str, Any]) -> type[torch.autograd.Function]:
    finish, write, recorded = plan.finish(), unrecorded_writer([w for w in plan.writes if w.how != "grad"]), sorted(plan.recorded_values())
    count, tensors_end = plan.num_values, plan.num_values + about["saved_tensors"]
    expected: Sequence[Tangent] = about["tangents"]
    places: Sequence[int | None] = about["gradients"]

    class PackagedFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward_host(*inputs)
            values = list(results[:count])
            write(inputs, values)
            if finish is not None:
                values = finish(values)
            ctx.save_for_backward(*results[count:tensors_end])
            ctx.sizes = results[tensors_end:]
            ctx.mark_non_differentiable(*[values[k] for k in about["non_differentiable"]])
            ctx.set_materialize_grads(False)
            return tuple(values[k] for k in recorded)

        @staticmethod
        @hiding
        def backward(ctx, *tangents):
            if torch.is_grad_enabled():
                raise PackageError("A gradient of a gradient was asked for (create_graph=True); a package has first gradients.",
                                   hint="Use fs.compile.")
            arrived = sum(1 << k for k, tangent in enumerate(expected) if tangents[tangent.value] is not None)
            if not arrived:
                return (None,) * len(places)
            args = [*ctx.saved_tensors, *ctx.sizes, *(fit(given(ctx, tangents, t.value), t.strides) for t in expected)]
            if not keeps_graph():
                ctx.maybe_clear_saved_tensors()
            results = backward_host(args)
            return tuple(None if k is None or not about["reaches"][k] & arrived else results[k] for k in places)

    return PackagedFunction


def given(ctx: Any, tangents: Sequence[torch.Tensor | None], place: int) -> torch.Tensor:
    """A gradient that arrived, or zeros."""
    if (tangent := tangents[place]) is not None:
        return tangent
    about = ctx._input_metadata[place]
    return torch.zeros(about.shape, dtype=about.dtype, device=about.device)
