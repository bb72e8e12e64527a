"""The file of a package: a zip archive whose every byte is checked before anything of it is used.

`manifest.json` has a digest of each other member.  The archive's comment, the last bytes of the file, is a digest of all of the file but the
data of `weights.bin`, which may be large and which the checksum in the archive's own directory covers.  Nothing is pickled.

    write(path, manifest, {"graphs/forward.py": text}, weights)
    with Archive(path) as archive: archive.manifest, archive.text("graphs/forward.py")
"""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import pathlib
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.errors import PackageError

MANIFEST, WEIGHTS = "manifest.json", "weights.bin"
FORMAT = "firesteel package 3"
DIGEST = 64             # letters of a digest
TEXTS = (".py", ".json", ".plan", ".txt")           # members that are worth packing
WHEN = (1980, 1, 1, 0, 0, 0)                        # equal programs give equal files
NOT_OURS = "Packages are written by fs.package; copy the file again, or rebuild it."


def write(path: str | os.PathLike, manifest: Mapping[str, Any], members: Mapping[str, bytes], weights: Sequence[bytes], kind: str = FORMAT) -> None:
    """Under a temporary name first: a reader sees all of the file or nothing."""
    path = pathlib.Path(path)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(members.items())}
    text = json.dumps({"format": kind, **manifest, "members": digests}, indent=1).encode()
    file, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(file, "w+b") as out:
            with zipfile.ZipFile(out, "w") as archive:
                for name, data in {MANIFEST: text, **members}.items():
                    archive.writestr(_info(name), data)
                with archive.open(_info(WEIGHTS), "w", force_zip64=True) as member:
                    for piece in weights:
                        member.write(piece)
                archive.comment = bytes(DIGEST)
            out.flush()
            with mmap.mmap(out.fileno(), 0, access=mmap.ACCESS_READ) as whole, zipfile.ZipFile(out) as archive:
                digest = _digest(whole, *_span(whole, archive.getinfo(WEIGHTS)))
            out.seek(-DIGEST, os.SEEK_END)
            out.write(digest.encode())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, WHEN)
    info.compress_type = zipfile.ZIP_DEFLATED if name.endswith(TEXTS) else zipfile.ZIP_STORED
    return info


def _span(data: Any, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Offset of a member's data."""
    head = info.header_offset
    start = head + 30 + int.from_bytes(data[head + 26:head + 28], "little") + int.from_bytes(data[head + 28:head + 30], "little")
    return start, start + info.compress_size


def _digest(data: Any, start: int, end: int) -> str:
    with memoryview(data) as view:
        found = hashlib.sha256(view[:start])
        found.update(view[end:len(view) - DIGEST])
    return found.hexdigest()


class Archive:
    """A package that was found to be whole."""

    def __init__(self, path: str | os.PathLike, kind: str = FORMAT):
        self.path = os.fspath(path)
        self._file = open(self.path, "rb")      # noqa: SIM115  # a missing file is Python's own error
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._weights = self._checked()
            self.manifest: dict[str, Any] = json.loads(self._zip.read(MANIFEST))
        except PackageError:
            self._file.close()
            raise
        except Exception as error:      # whatever reading an arbitrary file may raise
            self._file.close()
            what = f"{type(error).__name__}: {error}"
            raise PackageError(f"{self.path} is no package of firesteel, or it is damaged ({what}).", hint=NOT_OURS) from None
        if self.manifest.get("format") != kind:
            self._file.close()
            raise PackageError(f"{self.path} is a {self.manifest.get('format')!r}; what is read here is a {kind!r}.",
                               hint="Rebuild the file with this release.")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _checked(self) -> int:
        """Where the weights begin, in a file whose bytes are as they were written."""
        info = self._zip.getinfo(WEIGHTS)
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start, end = _span(data, info)
            if info.compress_type != zipfile.ZIP_STORED or not 0 <= start <= end <= len(data) or _digest(data, start, end).encode() != data[-DIGEST:]:
                raise PackageError(f"{self.path} is damaged: {self._damaged()}.", hint=NOT_OURS)
            with memoryview(data) as view, view[start:end] as part:
                if zlib.crc32(part) != info.CRC:
                    raise PackageError(f"{self.path} is damaged: the checksum of {WEIGHTS} is wrong.", hint=NOT_OURS)
        return start

    def _damaged(self) -> str:
        """The first member whose digest is wrong; the file's own frame where there is none."""
        for name, digest in json.loads(self._zip.read(MANIFEST))["members"].items():
            if hashlib.sha256(self._zip.read(name)).hexdigest() != digest:
                return f"the digest of {name} is wrong"
        return "the digest of the file is wrong"

    def names(self, start: str) -> list[str]:
        return [name for name in self.manifest["members"] if name.startswith(start)]

    def data(self, name: str) -> bytes:
        return self._zip.read(name)

    def text(self, name: str) -> str:
        return self.data(name).decode()

    def read_into(self, address: int, offset: int, size: int) -> None:
        """Copies a part of the weights to memory."""
        self._file.seek(self._weights + offset)
        if size and self._file.readinto((ctypes.c_char * size).from_address(address)) != size:
            raise PackageError(f"{self.path} ends within its weights.", hint=NOT_OURS)
