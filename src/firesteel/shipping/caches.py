"""The cache on disk as one file: `firesteel cache export FILE` on one machine, `firesteel cache import FILE` on another.

In: a cache folder, or such a file.  Out: the other one.  Keys hold neither paths nor ranks, so an entry is found wherever the program, its
settings, the versions and the processor are the same; others are never asked for.  The file is an archive of `archive.py`: a damaged or
foreign one is refused as a whole before anything of it is used.  As with packages, what is in it will be run: import files that you trust.

    written = write_cache("cache.fsc");  read_cache("cache.fsc")
"""
from __future__ import annotations

import os
import platform
from typing import Any

import torch

import firesteel
from firesteel.errors import PackageError, UserError
from firesteel.runtime import cpu, diskcache
from firesteel.shipping.archive import Archive, write

FORMAT = "firesteel cache 1"


def made_with() -> dict[str, str]:
    """What entries of this process depend on, for people."""
    return {"firesteel": firesteel.__version__, "torch": torch.__version__, "Python": platform.python_version(), "processor": cpu.machine_key()}


def write_cache(path: str | os.PathLike) -> int:
    """How many entries were written; what is damaged in the folder is left out."""
    members = {f"{key.hex()}{suffix}": payload for suffix in diskcache.SUFFIXES for key, payload in diskcache.kernels(suffix).entries()}
    write(path, {"made with": made_with()}, members, (), FORMAT)
    return len(members)


def read_cache(path: str | os.PathLike) -> tuple[int, dict[str, Any]]:
    """How many entries were read, and what they were made with that differs here."""
    if not diskcache.kernels().folder.name:
        raise UserError("There is no cache to import to.", hint="Set FIRESTEEL_CACHE_DIR.")
    with Archive(path, FORMAT) as archive:
        names = [name.partition(".") for name in archive.names("")]
        if any(point + suffix not in diskcache.SUFFIXES or len(key) != 64 or set(key) - set("0123456789abcdef") for key, point, suffix in names):
            raise PackageError(f"{archive.path} has a member that is no entry of a cache.", hint="Export the cache again.")
        for key, point, suffix in names:
            diskcache.kernels(point + suffix).put_hashed(bytes.fromhex(key), archive.data(f"{key}{point}{suffix}"))
        then, now = archive.manifest.get("made with", {}), made_with()
        return len(names), {name: then.get(name) for name, value in now.items() if then.get(name) != value}


def names_in(path: str | os.PathLike) -> list[str]:
    with Archive(path, FORMAT) as archive:
        return list(archive.names(""))
