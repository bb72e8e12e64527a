"""Compiled kernels between processes: a folder of checked files, one a key.

In: a key (text) and bytes.  Out: the same bytes, later or in another process, or None.  What always holds:
 - A file is written under a temporary name and renamed, so a reader sees all of it or nothing; it begins with a digest of
   the rest, so a file cut short by a crash or a full disk is a miss and is removed.
 - Processes may read and write the same folder at the same time; the last writer of a key wins, with equal bytes.
 - A folder that cannot be made or written is reported once in the log and then left alone: no cache is not an error.
 - The folder stays below `LIMIT` bytes: the files that were not used for longest go first.

    cache = DiskCache("/tmp/kernels")
    cache.put("key", b"code"); cache.get("key")     # b"code"
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from firesteel.artifacts import logger
from firesteel.config import config

SUFFIXES = (".o", ".cubin")     # kinds of content: kernels of the CPU, kernels of a GPU
LIMIT = 512 << 20
_MAGIC = b"firesteel1\n"
_DIGEST = 32
_PRUNE_EVERY = 256          # writes between two looks at the folder's size
_FRESH = 24 * 3600.0        # a file's time of use is renewed at most once in this many seconds
_ABANDONED = 3600.0         # temporary files older than this belong to a crashed process


class DiskCache:
    """The files below one folder; `suffix` tells kinds of content apart."""

    def __init__(self, folder: str, suffix: str = ".o", limit: int = LIMIT):
        self.folder, self.suffix, self.limit = pathlib.Path(folder), suffix, limit
        self._usable = bool(folder)
        self._writes = 0

    def get(self, key: str) -> bytes | None:
        if not self._usable:
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        payload = _checked(data)
        if payload is None:
            self._remove(path)
        else:
            self._renew(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        if not self._usable:
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            self._give_up(error)
            return
        if self._writes % _PRUNE_EVERY == 0:
            self.prune()
        self._writes += 1

    def prune(self) -> None:
        """Removes what a crash left behind, then the least recently used files above the limit."""
        now = time.time()
        for path, stat in self._files(".tmp"):
            if now - stat.st_mtime > _ABANDONED:
                self._remove(path)
        files = sorted(self._files(self.suffix), key=lambda f: f[1].st_mtime)
        excess = sum(stat.st_size for _, stat in files) - self.limit
        for path, stat in files:
            if excess <= 0:
                break
            self._remove(path)
            excess -= stat.st_size

    def show(self) -> str:
        """One line for people."""
        sizes = [stat.st_size for _, stat in self._files(self.suffix)]
        return f"{self.folder}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"

    def clear(self) -> None:
        for path, _ in [*self._files(self.suffix), *self._files(".tmp")]:
            self._remove(path)

    def _path(self, key: str) -> pathlib.Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / name[:2] / (name[2:] + self.suffix)

    def _files(self, suffix: str) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
        for path in self.folder.glob(f"??/*{suffix}"):
            with contextlib.suppress(FileNotFoundError):    # another process removed it meanwhile
                yield path, path.stat()

    def _renew(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):      # a read-only folder still serves
            if time.time() - path.stat().st_mtime > _FRESH:
                os.utime(path)

    def _remove(self, path: pathlib.Path) -> None:
        with contextlib.suppress(OSError):      # gone already, or not ours to remove
            path.unlink()

    def _give_up(self, error: OSError) -> None:
        if self._usable:
            logger.warning("the kernel cache %s is not usable (%s); kernels are compiled anew in each process", self.folder, error)
        self._usable = False


def _checked(data: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST
    payload = data[start:]
    whole = data[:len(_MAGIC)] == _MAGIC and data[len(_MAGIC):start] == hashlib.sha256(payload).digest()
    return payload if whole else None


def _write_whole(path: pathlib.Path, data: bytes) -> None:
    """Under a name of its own, then renamed."""
    handle, name = tempfile.mkstemp(prefix=path.stem[:8], suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


_caches: dict[tuple[str, str], DiskCache] = {}


def kernels(suffix: str = ".o") -> DiskCache:
    """The cache in fs.config.cache_dir."""
    folder = os.path.join(config.cache_dir, "kernels") if config.cache_dir else ""
    key = folder, suffix
    if key not in _caches:
        _caches[key] = DiskCache(folder, suffix)
    return _caches[key]
