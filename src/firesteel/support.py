"""Which releases of torch and NumPy this project is for: the one place that says it (the requirements in pyproject.toml are tested to be the same).

An older one lacks functions that are used here, so the import fails with that sentence; a newer torch was not tried, which is a warning.
"""
from __future__ import annotations

import re
import warnings

import torch

OLDEST = (2, 11)
NEWEST = (2, 15)
OLDEST_NUMPY = (1, 25)      # its functions are of one type


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


def check_numpy() -> None:
    """Before capture is loaded, which asks it about arrays."""
    wanted = ".".join(map(str, OLDEST_NUMPY))
    try:
        from numpy import __version__ as version
    except ImportError as error:
        raise ImportError(f"firesteel needs NumPy, which cannot be imported ({error}): pip install 'numpy>={wanted}'") from None
    if release(version) < OLDEST_NUMPY:
        raise ImportError(f"firesteel works with NumPy {wanted} and newer; this is {version}: pip install 'numpy>={wanted}'")


if not hasattr(torch, "__version__"):
    where = getattr(torch, "__file__", None) or list(torch.__path__)
    raise ImportError(f"the torch that Python found is not PyTorch but {where}: rename it, or pip install torch")
check_torch(torch.__version__)
