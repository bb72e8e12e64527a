"""What happens at the recompile limit: one warning that says what varied and what to change, and one general variant.

A region that has `recompile_limit` Entries and meets inputs that none serves is not dropped to eager at once.  If sizes or numbers are
what varied, one more Entry is made in which all that varied are symbols, whatever the settings say; else, and for what that Entry does
not serve either, calls run eagerly and are counted in `fs.counters["recompile_limit"]`.

    advice([entry.guard for entry in region.entries], inputs)      # "name is 'c'; it was 'b'. Seen so far: 'a', 'b'. Keep ..."
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firesteel.capture.guard_function import GuardFunction
from firesteel.capture.guards import Guard

SHOWN = 8       # values in a message

# kind of guard -> what the user can change
CHANGES = {
    "tensor": "Mark the size that varies with fs.mark_dynamic, or pad inputs to few sizes.",
    "equals": "Keep it constant, or make it a tensor if only its value matters.",
    "length": "Keep the length constant, or stack the items into one tensor.",
    "keys": "Keep the same keys in the same order.",
    "identity": "Pass the same object each time instead of a new one.",
    "type": "Pass objects of one type.",
    "code": "Define the function once, outside of the loop that calls the compiled one.",
}
OTHERWISE = "Keep it unchanged between calls, or raise fs.config.recompile_limit."


def advice(variants: Sequence[GuardFunction], inputs: tuple[Any, ...]) -> str:
    """The guard that fails, the values that were seen for it, and what to change."""
    guard = variants[-1].failing(inputs)
    sentence = variants[-1].explain(inputs)
    if guard is None:
        return f"{sentence}. {OTHERWISE}"
    seen = list(dict.fromkeys(filter(None, (_value(variant, guard) for variant in variants))))
    shown = f" Seen so far: {', '.join(seen[-SHOWN:])}." if seen else ""
    return f"{sentence}.{shown} {CHANGES.get(guard.kind, OTHERWISE)}"


def _value(variant: GuardFunction, wanted: Guard) -> str:
    """What a variant wants where `wanted` failed."""
    for guard in variant.guards:
        if guard.kind == wanted.kind and guard.source == wanted.source and guard.source is not None:
            return str(tuple(guard.data.sizes)) if guard.kind == "tensor" else f"{guard.data!r:.60}"
    return ""
