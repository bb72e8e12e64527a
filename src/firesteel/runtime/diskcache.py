"""Compiled kernels and programs between processes: a folder of checked files, one a key.

In: a key (text) and bytes.  Out: the same bytes, later or in another process, or None.  What always holds:
 - A file is written under a temporary name and renamed, so a reader sees all of it or nothing; it begins with a digest of
   its key and the rest, so a file that was cut short, damaged at any byte or put under another name is a miss and is removed.
 - What is read here is run.  A folder that another user owns or can write, or whose place another user can take, is not used, which is said
   once; a file of that kind is a miss.  What is made here is for its user alone.
 - Processes may read and write the same folder at the same time; the last writer of a key wins, with equal bytes.
 - Who makes an entry may hold its lock (`claim`); others wait for it, but not for ever.  A lock is the system's, which a killed process lets go.
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
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

from firesteel.artifacts import logger
from firesteel.config import config

try:
    import fcntl
except ImportError:     # another system: nobody waits for anybody
    fcntl = None        # type: ignore[assignment]  # a module, or nothing

SUFFIXES = (".o", ".cubin", ".program", ".tuned")       # kinds of content: kernels of the CPU, of a GPU, programs, choices that were measured
LIMIT = 512 << 20
_MAGIC = b"firesteel2\n"
_DIGEST = 32
_PRUNE_EVERY = 256          # writes between two looks at the folder's size
_FRESH = 24 * 3600.0        # a file's time of use is renewed at most once in this many seconds
_ABANDONED = 3600.0         # temporary files and locks older than this belong to a crashed process
WAIT = 60.0                 # seconds for which an entry is waited for that another process makes


_given_up: set[pathlib.Path] = set()


class DiskCache:
    """The files below one folder; `suffix` distinguishes kinds of content."""

    def __init__(self, folder: str, suffix: str = ".o", limit: int = LIMIT):
        self.folder, self.suffix, self.limit = pathlib.Path(folder), suffix, limit
        self._usable = bool(folder)
        self._trusted = False       # the folder and those above it were looked at
        self._writes = 0

    def get(self, key: str) -> bytes | None:
        return self.get_hashed(hashed(key))

    def get_hashed(self, key: bytes) -> bytes | None:
        """Of a key by its digest."""
        if not self._usable:
            return None
        path = self._place(key)
        try:
            self._check_folders(path.parent)
            data = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        payload = None if data is None else _checked(key, data)
        if payload is None:
            self._remove(path)
        else:
            self._renew(path)
        return payload

    def has(self, key: str) -> bool:
        """Is there a file?  It may be of no use."""
        return self._usable and self._path(key).exists()

    def forget(self, key: str) -> None:
        """Of an entry that turned out to be of no use."""
        self._remove(self._path(key))

    def put(self, key: str, payload: bytes) -> None:
        self.put_hashed(hashed(key), payload)

    def put_hashed(self, key: bytes, payload: bytes) -> None:
        if not self._usable:
            return
        path = self._place(key)
        try:
            _make_folders(path.parent)
            self._check_folders(path.parent)
            _write_whole(path, _MAGIC + _digest(key, payload) + payload)
        except OSError as error:
            self._give_up(error)
            return
        if self._writes % _PRUNE_EVERY == 0:
            self.prune()
        self._writes += 1

    def claim(self, key: str) -> tuple[Callable[[], None], bool]:
        """Takes the lock of a key; what gives it back, and whether there is an entry now, which another process made meanwhile."""
        entry = self._path(key)
        path = entry.with_suffix(".lock")
        if fcntl is None or not self._usable or path in _claimed:
            return _nothing, False
        try:
            _make_folders(path.parent)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:     # a read-only folder: nothing will be kept in it either
            return _nothing, False
        try:
            _lock(handle)
        except BaseException:
            os.close(handle)
            raise
        _claimed.add(path)
        held, owner = [handle], os.getpid()

        def let_go() -> None:
            if held and os.getpid() == owner:       # a forked child leaves it to its parent
                _claimed.discard(path)
                self._remove(path)
                with contextlib.suppress(OSError):
                    fcntl.flock(held[0], fcntl.LOCK_UN)     # children may have the handle, too
                os.close(held.pop())
        return let_go, entry.exists()

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All that is whole: digests of keys, and payloads."""
        for path, _ in sorted(self._files(self.suffix)):
            key = bytes.fromhex(path.parent.name + path.stem)
            payload = self.get_hashed(key)
            if payload is not None:
                yield key, payload

    def prune(self) -> None:
        """Removes what a crash left behind, then the least recently used files above the limit."""
        now = time.time()
        for path, found in [*self._files(".tmp"), *self._files(".lock")]:
            if now - found.st_mtime > _ABANDONED:
                self._remove(path)
        files = sorted(self._files(self.suffix), key=lambda f: f[1].st_mtime)
        excess = sum(found.st_size for _, found in files) - self.limit
        for path, found in files:
            if excess <= 0:
                break
            self._remove(path)
            excess -= found.st_size

    def is_empty(self) -> bool:
        return not self._usable or next(iter(self._files(self.suffix)), None) is None

    def show(self) -> str:
        """One line for people."""
        sizes = [found.st_size for _, found in self._files(self.suffix)]
        return f"{self.folder}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"

    def clear(self) -> None:
        for path, _ in [*self._files(self.suffix), *self._files(".tmp")]:
            self._remove(path)

    def _check_folders(self, inner: pathlib.Path) -> None:
        """Raises where others might have written what is read here."""
        if not self._trusted:
            refuse_strangers(self.folder.stat(), self.folder)
            self.folder = self.folder.resolve()     # links on the way there may be changed from now on
            for above in self.folder.parents:
                refuse_replaceable(above.stat(), above)
            self._trusted = True
        refuse_strangers(inner.lstat(), inner)

    def _path(self, key: str) -> pathlib.Path:
        return self._place(hashed(key))

    def _place(self, key: bytes) -> pathlib.Path:
        name = key.hex()
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
        if self._usable and self.folder not in _given_up:
            _given_up.add(self.folder)          # caches of several kinds are in it
            logger.warning("the kernel cache %s is not usable (%s); kernels are compiled anew in each process", self.folder, error)
        self._usable = False


# ---------------------------------------------------------------- locks

_claimed: set[pathlib.Path] = set()     # by this process


def _nothing() -> None:
    pass


def _lock(handle: int) -> None:
    """After WAIT seconds it goes on without, as on a file system without locks."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_claimed.clear)      # they are the parent's


# ---------------------------------------------------------------- who may write

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _user() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def refuse_strangers(found: os.stat_result, path: pathlib.Path) -> None:
    """Only this user may own and write it."""
    if _user() is not None and (found.st_uid != _user() or found.st_mode & _OTHERS):
        raise PermissionError(f"{path} belongs to another user, or others may write to it (chmod go-w)")


def refuse_replaceable(found: os.stat_result, path: pathlib.Path) -> None:
    """Of a folder above: nobody but this user and root may rename what is inside.  In a sticky folder only owners may; a group of the
    user's own is commonly the user alone."""
    others = stat.S_IWOTH | (0 if found.st_gid == os.getegid() else stat.S_IWGRP) if _user() is not None else 0
    if _user() is not None and (found.st_uid not in (0, _user()) or found.st_mode & others and not found.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{path}, a folder above it, belongs to another user, or others may write to it (chmod go-w)")


def _make_folders(folder: pathlib.Path) -> None:
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


# ---------------------------------------------------------------- files

def _read(path: pathlib.Path) -> bytes | None:
    """The content; None where it is no plain file of this user's alone."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError:         # a link, or a file that this user may not read
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        try:
            refuse_strangers(found, path)
        except PermissionError:
            return None
        return file.read() if stat.S_ISREG(found.st_mode) else None


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _digest(key: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(key + payload).digest()


def _checked(key: bytes, data: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST
    payload = data[start:]
    whole = data[:len(_MAGIC)] == _MAGIC and data[len(_MAGIC):start] == _digest(key, payload)
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
