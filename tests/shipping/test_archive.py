"""The file of a package: what is not exactly as it was written is refused."""
import random

import pytest

from firesteel.errors import PackageError
from firesteel.shipping import archive

MEMBERS = {"graphs/a.py": b"x = 1\n" * 50, "x/k.o": bytes(range(256)) * 3}
WEIGHTS = bytes(range(200)) * 7


@pytest.fixture
def path(tmp_path):
    archive.write(tmp_path / "p", {"what": "a test"}, MEMBERS, [WEIGHTS[:100], WEIGHTS[100:]])
    return tmp_path / "p"


def test_members_come_back(path):
    import ctypes
    with archive.Archive(path) as found:
        assert found.manifest["what"] == "a test" and {name: found.data(name) for name in found.manifest["members"]} == MEMBERS
        buffer = ctypes.create_string_buffer(50)
        found.read_into(ctypes.addressof(buffer), 90, 50)
        assert buffer.raw == WEIGHTS[90:140]
    assert [file.name for file in path.parent.iterdir()] == ["p"]


def test_a_changed_byte_anywhere_is_found(path):
    data = path.read_bytes()
    chosen = random.Random(0)
    places = {*range(0, len(data), 7), *range(len(data) - 200, len(data)), *range(60)}
    for place in sorted(places):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(PackageError):
            archive.Archive(path)
    path.write_bytes(data)
    archive.Archive(path).__exit__()


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d[:len(d) // 2], lambda d: d + b"x", lambda d: b"", lambda d: b"x" + d, lambda d: b"PK" * 500])
def test_a_file_that_was_cut_or_added_to_is_refused(path, change):
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(PackageError):
        archive.Archive(path)


def test_a_damaged_member_is_named(path):
    data = path.read_bytes()
    place = data.index(MEMBERS["x/k.o"])
    path.write_bytes(data[:place] + b"!" + data[place + 1:])
    with pytest.raises(PackageError, match="no package of firesteel, or it is damaged|x/k.o"):
        archive.Archive(path)


def test_a_missing_file_is_pythons_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        archive.Archive(tmp_path / "none")


def test_a_failed_write_leaves_the_old_file(path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        archive.write(path, {"bad": object()}, MEMBERS, [])
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
