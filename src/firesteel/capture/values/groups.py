"""Exception groups: `except*` on Values.

A group is an ExceptionValue with (message, exceptions) as arguments.  `split_group` divides by type, keeping the tree's shape;
what comes of one group remembers it as its `origin`, so that parts raised again are merged and others are not.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.containers import ListValue, Sequence
from firesteel.capture.values.exceptions import ExceptionValue


def is_group(value: Value) -> bool:
    return isinstance(value, ExceptionValue) and issubclass(value.cls, BaseExceptionGroup)


def origin(value: Value) -> Value:
    return getattr(value, "origin", value)


def members(m: Machine, group: ExceptionValue) -> list[Any]:
    """Values of exceptions."""
    return [m.look(item) for item in m.look(group.args[1]).iterate(m)]


def derive(m: Machine, group: ExceptionValue, kept: list[Value]) -> Value:
    """The group with these members only; None where there are none."""
    if not kept:
        return NONE
    made = ExceptionValue(group.cls, [group.args[0], ListValue(kept)])
    made.origin = origin(group)     # type: ignore[attr-defined]  # only groups that were split have one
    for name, value in m.effects.attributes(group).items():
        m.effects.store_attr(made, name, value)
    return made


def parts(m: Machine, value: ExceptionValue, wanted: Callable[[ExceptionValue], bool]) -> Value:
    """The tree of those leaves (or whole subgroups) that are wanted."""
    if wanted(value):
        return value
    if not is_group(value):
        return NONE
    kept = [part for item in members(m, value) if (part := parts(m, item, wanted)) is not NONE]
    return derive(m, value, kept)


def split_group(m: Machine, value: Value, types: Value) -> tuple[Value, Value]:
    """(rest, match) of CHECK_EG_MATCH"""
    if value is NONE or not isinstance(value, ExceptionValue):
        return NONE, NONE
    listed = [m.look(c) for c in types.items] if isinstance(types, Sequence) else [types]
    classes = tuple(c.constant() for c in listed)
    if not is_group(value):
        if not issubclass(value.cls, classes):
            return value, NONE
        kind = ExceptionGroup if issubclass(value.cls, Exception) else BaseExceptionGroup
        return NONE, ExceptionValue(kind, [ConstValue(""), ListValue([value])])
    match = parts(m, value, lambda part: issubclass(part.cls, classes))
    rest = _without(m, value, classes)
    return rest, match


def _without(m: Machine, value: ExceptionValue, classes: tuple[type, ...]) -> Value:
    if issubclass(value.cls, classes):
        return NONE
    if not is_group(value):
        return value
    before = members(m, value)
    kept = [rest for item in before if (rest := _without(m, item, classes)) is not NONE]
    return value if len(kept) == len(before) and all(a is b for a, b in zip(kept, before)) else derive(m, value, kept)


def leaves(m: Machine, value: ExceptionValue) -> list[Value]:
    return [leaf for item in members(m, value) for leaf in leaves(m, item)] if is_group(value) else [value]


def prepare_reraise(m: Machine, original: Any, raised: list[Value]) -> Value:
    """PREP_RERAISE_STAR: what leaves the except* clauses."""
    errors: list[Any] = [m.look(error) for error in raised if m.look(error) is not NONE]
    if not errors or not is_group(original):
        return errors[0] if errors else NONE
    again = [error for error in errors if origin(error) is origin(original)]
    new = [error for error in errors if origin(error) is not origin(original)]
    kept = {id(leaf) for error in again for leaf in leaves(m, error)}
    rest = parts(m, original, lambda part: not is_group(part) and id(part) in kept)
    if not new:
        return rest
    kind = ExceptionGroup if all(issubclass(e.cls, Exception) for e in new) else BaseExceptionGroup
    return ExceptionValue(kind, [ConstValue(""), ListValue(new + ([] if rest is NONE else [rest]))])
