"""Functional forms of operators that write their arguments and have none: custom operators, mostly.

`functional_form(op)` defines, once an operator, `firesteel::functional_NAMESPACE_NAME_OVERLOAD`: the same arguments, none of them written.
It returns the operator's own fresh results, if any, and then the new value of each written argument.

    functional_form(torch.ops.mine.accumulate_.default)     # (Tensor total, Tensor x) -> Tensor
"""
from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import torch
from torch._ops import OpOverload

library = torch.library.Library("firesteel", "FRAGMENT")       # what is defined lives as long as this object
_ALIAS = re.compile(r"Tensor\(\w+!?(?: -> [^)]*)?\)")
_defined: set[str] = set()      # names of forms
VALUE_TYPES = {"List[Tensor]": "Tensor[]", "Optional[Tensor]": "Tensor"}        # of new values, as schemas spell them


@functools.cache
def functional_form(op: OpOverload, absent: frozenset[str] = frozenset()) -> OpOverload:
    """`absent` are the written arguments that are None in a call: they have no new value."""
    schema = op._schema
    written = [(a.name, VALUE_TYPES.get(str(a.type), str(a.type))) for a in schema.arguments
               if a.alias_info is not None and a.alias_info.is_write and a.name not in absent]
    fresh = [str(r.type) for r in schema.returns if r.alias_info is None]
    name = _new_name(f"functional_{schema.name.replace('::', '_')}_{op._overloadname}{''.join(f'_without_{a}' for a in sorted(absent))}")
    arguments = _ALIAS.sub("Tensor", _arguments(str(schema)))
    tags = tuple(tag for tag in op.tags if tag != getattr(torch.Tag, "inplace", None))
    library.define(f"{name}({arguments}) -> ({', '.join([*fresh, *(kind for _, kind in written)])})", tags=tags)
    library.impl(name, _implementation(op, [n for n, _ in written], len(fresh)), "CompositeExplicitAutograd")
    return getattr(torch.ops.firesteel, name).default


def _new_name(name: str) -> str:
    """An operator can be removed and redefined with another schema; its functional forms stay."""
    name = next(n for n in (name, *(f"{name}_{k}" for k in itertools.count(2))) if n not in _defined) if name in _defined else name
    _defined.add(name)
    return name


def _arguments(schema: str) -> str:
    """What stands between the parentheses of "mine::op(Tensor(a!) x, int n=3) -> ()"."""
    depth = 0
    start = schema.index("(")
    for place in range(start, len(schema)):
        depth += {"(": 1, ")": -1}.get(schema[place], 0)
        if depth == 0:
            return schema[start + 1:place]
    raise ValueError(schema)


def _implementation(op: OpOverload, written: list[str], fresh: int) -> Any:
    names = [a.name for a in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args)), **kwargs}
        for name in written:
            values[name] = _copy(values.get(name))
        own = op(**values)
        results = () if not fresh else own if isinstance(own, tuple) else (own,)
        everything = (*results[:fresh], *(values[name] for name in written))
        return None if not everything else everything[0] if len(everything) == 1 else everything
    return run


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
