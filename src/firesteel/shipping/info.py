"""`firesteel package info FILE`: the manifest of a package, in words."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from firesteel.shipping.archive import Archive


def words(path: str | os.PathLike) -> str:
    with Archive(path) as archive:
        return "\n".join(_lines(archive.manifest))


def _lines(about: Mapping[str, Any]) -> Iterator[str]:
    made = ", ".join(f"{name} {version}" for name, version in about["made_by"].items())
    yield f"{about['of']}, for {about['kind']}, of a model in {'training' if about['training_mode'] else 'evaluation'} mode; made by {made}"
    yield f"machine code for {', '.join([*about['processors'], *about['architectures']])}"
    known = {row["leaf"]: row for row in about["inputs"] if "leaf" in row}
    leaves = [leaf for row in about["arguments"] for leaf in row["leaves"]]
    for number, leaf in enumerate(leaves):
        yield f"argument {leaf['name']}: {_leaf(leaf, known.get(number), leaves)}"
    for name, row in about["symbols"].items():
        said = [condition["words"] for condition in about["conditions"] if condition["reads"] == [name]]
        yield f"{name} is {row['is']}{': ' if said else ''}{', '.join(said)}"
    for row in about["conditions"]:
        if len(row["reads"]) != 1:
            yield f"needs {row['words']}{row['why']}"
    for name, state in about["torch_state"].items():
        yield f"torch's {name}: {state}"
    stored = [row for row in about["weights"] if row["stored"]]
    yield f"{len(about['weights'])} weights, {len(stored)} of them stored: {sum(row['bytes'] for row in stored) / 1e6:.1f} MB"
    yield from (f"fixed: {guard}" for guard in about["guards"])
    yield from (f"member {name} {digest}" for name, digest in about["members"].items())


def _leaf(leaf: Mapping[str, Any], row: Mapping[str, Any] | None, leaves: list[dict[str, Any]]) -> str:
    if "same_as" in leaf:
        return f"the same tensor as {leaves[leaf['same_as']]['name']}"
    if row is not None:
        return row.get("words", f"a number ({row.get('type')})")
    return leaf.get("is", f"always {leaf.get('value')!r}")
