"""Facts about operators, read once from their schemas: what is written, what is a view, what the functional twin is.

    facts(aten.add_.Tensor).kind      # "inplace"
    facts(aten.add_.Tensor).twin      # aten.add.Tensor
    facts(aten.slice.Tensor).kind     # "view"
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from firesteel.graph.autofunctional import functional_form
from firesteel.graph.rules.refusals import checked_rule
from firesteel.records import dataclass

aten = torch.ops.aten
# reshape: changes the metadata of its argument in place; update: gives fresh results and writes arguments beside
Kind = Literal["pure", "view", "inplace", "out", "reshape", "update"]

# Functional forms of another name.
TWINS = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    getattr(aten.random_, "from"): functional_form(getattr(aten.random_, "from")),      # random.from cannot be written as Python
    aten.rrelu_with_noise_.default: aten.rrelu_with_noise_functional.default,
    aten.__ilshift__.Scalar: aten.__lshift__.Scalar,
    aten.__ilshift__.Tensor: aten.__lshift__.Tensor,
    aten.__irshift__.Scalar: aten.__rshift__.Scalar,
    aten.__irshift__.Tensor: aten.__rshift__.Tensor,
}

# Operators that write to arguments although their schemas do not say so: argument number -> condition argument number.
HIDDEN_WRITES = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}

EMPTY_VIEWS = frozenset({aten.alias.default, aten.detach.default, aten.lift_fresh.default})


@dataclass(frozen=True, slots=True)
class Facts:
    """What the schema of an operator says, and its rule."""
    op: OpOverload
    kind: Kind
    rule: Callable[..., Any] | None
    twin: OpOverload | None = None          # the functional operator, for "inplace" and "out"
    writes: tuple[int | str, ...] = ()      # arguments written: positions, or names of keyword-only arguments
    composite: bool = False                 # has a decomposition in C++ that must be used (CompositeImplicitAutograd)
    random: bool = False
    returns_list: bool = False
    empty: bool = False                     # a view with its argument's Spec


_facts: dict[int, Facts] = {}       # by id: operators live for ever, and hashing one costs a microsecond


def facts(op: OpOverload) -> Facts:
    found = _facts.get(id(op))
    if found is None:
        found = _facts[id(op)] = _read(op)
    return found


def drops_nothing(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Is it attention or a recurrent layer with a dropout of 0, which draws no numbers though its operator is marked random?"""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return bool((args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)) == 0)
    return False


def _read(op: OpOverload) -> Facts:
    schema = op._schema
    writes = tuple(a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    tags = op.tags
    rule, twin = checked_rule(op), None
    kind: Kind
    if not writes:
        kind = "view" if any(r.alias_info is not None for r in schema.returns) else "pure"
    elif torch.Tag.inplace_view in tags:
        kind, twin = "reshape", _inplace_twin(op)
    elif op.namespace != "aten" and any(_is_special(a) for a in schema.arguments):
        kind, twin = "update", functional_form(op)
    elif any(isinstance(w, str) for w in writes):
        kind, twin = "out", _by_arguments(_packet(op, schema.name.split("::")[1]), op, sum(1 for a in schema.arguments if not a.is_out))
    elif schema.returns and all(r.alias_info is None for r in schema.returns):
        kind, twin = "update", _functional_form(op) or functional_form(op)
    else:
        kind, twin = "inplace", _inplace_twin(op) or (functional_form(op) if op.namespace != "aten" else None)
    if rule is None and twin is not None and kind != "update":
        rule = checked_rule(twin)
    known = rule is None and torch._C._dispatch_has_kernel(op.name())       # aten.size, for one, is known to Python alone
    composite = known and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    returns_list = len(schema.returns) == 1 and str(schema.returns[0].type).endswith("]")
    return Facts(op, kind, rule, twin, writes, composite, torch.Tag.nondeterministic_seeded in tags, returns_list, op in EMPTY_VIEWS)


def _is_special(argument: Any) -> bool:
    """Is it written, and a list, possibly None, or a keyword that is no `out=`?  Then only the functional form returns the new values."""
    written = argument.alias_info is not None and argument.alias_info.is_write
    return written and (str(argument.type) != "Tensor" or argument.kwarg_only and not argument.is_out)


def _packet(op: OpOverload, name: str) -> Any:
    namespace = getattr(torch.ops, op.namespace)
    return getattr(namespace, name, None)


def _inplace_twin(op: OpOverload) -> OpOverload | None:
    """add_.Tensor -> add.Tensor; the arguments of the twin are the same."""
    if op in TWINS:
        return TWINS[op]
    name = op._schema.name.split("::")[1]
    packet = _packet(op, name[:-1]) if name.endswith("_") else _packet(op, name)
    twin = getattr(packet, op._overloadname, None) if packet is not None else None
    if twin is not None and twin is not op and not twin._schema.is_mutable and _same_arguments(twin, op):
        return twin
    return _by_arguments(packet, op, len(op._schema.arguments)) if packet is not None else None


def _same_arguments(a: OpOverload, b: OpOverload) -> bool:
    return [(x.name, str(x.type)) for x in a._schema.arguments] == [(x.name, str(x.type)) for x in b._schema.arguments]


def _functional_form(op: OpOverload) -> OpOverload | None:
    """rrelu_with_noise -> rrelu_with_noise_functional: the results, and then the new values of what was written."""
    packet = _packet(op, op._schema.name.split("::")[1] + "_functional")
    return getattr(packet, op._overloadname, None) or getattr(packet, "default", None) if packet is not None else None


def _by_arguments(packet: Any, op: OpOverload, count: int) -> OpOverload | None:
    """The pure overload of a packet whose arguments are the first `count` of op's."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out][:count]
    for name in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, name)
        arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments]
        if not candidate._schema.is_mutable and arguments[:len(wanted)] == wanted and all(
                a.has_default_value() for a in candidate._schema.arguments[len(wanted):]):
            return candidate
    return None
