"""Which releases of torch this project is for: the one place that says it (the requirement in pyproject.toml is tested to be the same).

An older torch lacks functions that are used here, so the import fails with that sentence; a newer one was not tried, which is a warning.
"""
from __future__ import annotations

import re
import warnings

import torch

OLDEST = (2, 11)
NEWEST = (2, 15)


def release(version: str) -> tuple[int, int]:
    """Its first two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else OLDEST


def check_torch(version: str) -> None:
    """Says so where this release of torch is not one of those."""
    known = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release(version) < OLDEST:
        raise ImportError(f"firesteel works with {known}; this is {version}")
    if release(version) > NEWEST:
        warnings.warn(f"firesteel was tried with {known}; this is {version}", stacklevel=3)


check_torch(torch.__version__)
