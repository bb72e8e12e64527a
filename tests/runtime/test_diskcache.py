"""The disk cache: crashes, concurrent processes, unusable folders, bounded size."""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import pytest

from firesteel.config import _default_cache_dir
from firesteel.runtime import diskcache
from firesteel.runtime.diskcache import DiskCache


@pytest.fixture
def cache(tmp_path):
    return DiskCache(str(tmp_path / "cache"))


def only_file(cache):
    (path,) = [p for p, _ in cache._files(cache.suffix)]
    return path


def test_what_is_put_is_got(cache):
    assert cache.get("a") is None
    cache.put("a", b"code")
    cache.put("b", b"")
    assert cache.get("a") == b"code" and cache.get("b") == b"" and cache.get("c") is None
    assert DiskCache(str(cache.folder)).get("a") == b"code"


def test_a_long_key_with_odd_characters(cache):
    key = "define void @f()\n{}/../" * 1000
    cache.put(key, b"x")
    assert cache.get(key) == b"x"


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:5], lambda d: b"", lambda d: d[:-1] + b"?", lambda d: b"other" + d])
def test_a_damaged_file_is_a_miss_and_goes(cache, damage):
    cache.put("a", b"0123456789")
    path = only_file(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("a") is None and not path.exists()
    cache.put("a", b"again")
    assert cache.get("a") == b"again"


def test_damage_at_any_byte_is_a_miss(cache):
    cache.put("a", b"0123456789")
    path = only_file(cache)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        assert cache.get("a") is None and not path.exists()
    path.write_bytes(whole)
    path.chmod(0o600)
    assert cache.get("a") == b"0123456789"


def test_an_entry_under_the_name_of_another_is_a_miss(cache):
    cache.put("a", b"code of a")
    cache.put("b", b"code of b")
    os.replace(cache._path("a"), cache._path("b"))
    assert cache.get("b") is None and cache.get("a") is None


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")


@posix
def test_what_is_made_is_for_the_user_alone(cache):
    before = os.umask(0)
    try:
        cache.put("a", b"code")
    finally:
        os.umask(before)
    path = only_file(cache)
    assert [p.stat().st_mode & 0o777 for p in (cache.folder, path.parent, path)] == [0o700, 0o700, 0o600]


def refused(folder, caplog):
    cache = DiskCache(str(folder))
    with caplog.at_level(logging.WARNING, "firesteel"):
        for _ in range(3):
            found = cache.get("a")
            cache.put("b", b"more")
    return found is None and len(caplog.records) == 1 and "others may write" in caplog.text and not cache._path("b").exists()


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(cache, caplog, mode):
    cache.put("a", b"code")
    cache.folder.chmod(mode)
    assert refused(cache.folder, caplog)


@posix
def test_a_folder_inside_that_others_can_write_is_not_used(cache, caplog):
    cache.put("a", b"code")
    only_file(cache).parent.chmod(0o777)
    with caplog.at_level(logging.WARNING, "firesteel"):
        assert DiskCache(str(cache.folder)).get("a") is None
    assert "others may write" in caplog.text


@posix
def test_a_folder_whose_place_others_can_take_is_not_used(tmp_path, caplog):
    open_to_all = tmp_path / "open"
    DiskCache(str(open_to_all / "cache")).put("a", b"code")
    open_to_all.chmod(0o1777)
    assert DiskCache(str(open_to_all / "cache")).get("a") == b"code"        # sticky: only the owner takes it away
    open_to_all.chmod(0o777)
    assert refused(open_to_all / "cache", caplog)


@posix
def test_a_folder_of_another_user_is_not_used(cache, caplog, monkeypatch):
    cache.put("a", b"code")
    monkeypatch.setattr(diskcache, "_user", lambda: os.geteuid() + 1)
    assert refused(cache.folder, caplog)


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o200])
def test_a_file_that_others_can_write_or_nobody_reads_is_made_anew(cache, mode):
    cache.put("a", b"code")
    path = only_file(cache)
    path.chmod(mode)
    assert cache.get("a") is None or mode == 0o200      # root reads all
    cache.put("a", b"code")
    assert cache.get("a") == b"code" and path.stat().st_mode & 0o777 == 0o600


@posix
def test_a_link_is_not_followed(cache, tmp_path):
    cache.put("a", b"code")
    path, elsewhere = only_file(cache), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert cache.get("a") is None and elsewhere.exists()
    cache.put("a", b"again")
    assert cache.get("a") == b"again" and not path.is_symlink()


def test_without_a_home_no_shared_folder_is_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "missing" / "cache"))
    assert _default_cache_dir() == ""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert _default_cache_dir() == str(tmp_path / "firesteel")


def test_a_crash_while_writing_leaves_no_file_under_the_name(cache, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(diskcache.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        cache.put("a", b"code")
    assert cache.get("a") is None and not list(cache._files(".tmp"))


def test_what_a_killed_process_left_is_removed(cache):
    cache.put("a", b"code")
    left = only_file(cache).with_suffix(".tmp")
    left.write_bytes(b"half")
    cache.prune()
    assert left.exists()                # it may belong to a process at work
    os.utime(left, (time.time() - 7200,) * 2)
    cache.prune()
    assert not left.exists() and cache.get("a") == b"code"


def test_an_unusable_folder_is_said_once(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = DiskCache(str(blocked / "cache"))
    with caplog.at_level(logging.WARNING, "firesteel"):
        for _ in range(3):
            cache.put("a", b"code")
            assert cache.get("a") is None
    assert len(caplog.records) == 1 and "not usable" in caplog.text


def test_no_folder_means_no_cache():
    cache = DiskCache("")
    cache.put("a", b"code")
    assert cache.get("a") is None


def test_the_size_is_bounded_and_the_oldest_go_first(tmp_path):
    cache = DiskCache(str(tmp_path), limit=5000)
    for i in range(10):
        cache.put(str(i), bytes(1000))
        os.utime(cache._path(str(i)), (1000 + i,) * 2)
    cache.prune()
    kept = [i for i in range(10) if cache._path(str(i)).exists()]
    assert kept == [6, 7, 8, 9]         # 1043 bytes each


def test_a_read_renews_an_old_file(cache):
    cache.put("a", b"code")
    path = only_file(cache)
    os.utime(path, (1000, 1000))
    cache.get("a")
    assert path.stat().st_mtime > time.time() - 100


def test_show_and_clear(cache):
    cache.put("a", b"code")
    assert "1 files" in cache.show()
    cache.clear()
    assert "0 files" in cache.show() and cache.get("a") is None


WRITER = """
import sys
from firesteel.runtime.diskcache import DiskCache
cache = DiskCache(sys.argv[1])
for round in range(40):
    for key in range(5):
        data = bytes([key]) * 20000
        cache.put(str(key), data)
        got = cache.get(str(key))
        assert got is None or got == data, (key, len(got))
"""


def test_processes_may_write_at_the_same_time(tmp_path):
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, error = process.communicate(timeout=100)
        assert process.returncode == 0, error.decode()
    cache = DiskCache(str(tmp_path))
    assert all(cache.get(str(key)) == bytes([key]) * 20000 for key in range(5))
    assert not list(cache._files(".tmp"))
