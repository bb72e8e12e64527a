"""A cache carried to another folder: its programs are found there; a damaged or foreign file is refused and changes nothing."""
import pytest
import torch

import firesteel as fs
from firesteel import cli, programcache
from firesteel.artifacts import counters
from firesteel.errors import PackageError
from firesteel.runtime import diskcache
from firesteel.shipping import archive, caches


def program(x):
    return (x.sin() * 2).sum(-1)


def hits(folder):
    """Of a process that begins with this folder."""
    programcache.versions.cache_clear()
    with fs.config.patch(verify=False, cache_dir=str(folder)):
        fs.reset()
        x = torch.randn(3, 4)
        torch.testing.assert_close(fs.compile(program)(x), program(x))
        found = counters["native"]["program_hits"]
        fs.reset()
    programcache.versions.cache_clear()
    return found


def test_programs_are_found_in_another_folder(tmp_path, capsys):
    file = tmp_path / "cache.fsc"
    assert hits(tmp_path / "one") == 0
    with fs.config.patch(cache_dir=str(tmp_path / "one")):
        assert cli.main(["cache", "export", str(file)]) == 0
        written = sum(len(list(diskcache.kernels(suffix).entries())) for suffix in diskcache.SUFFIXES)
    with fs.config.patch(cache_dir=str(tmp_path / "other")):
        assert cli.main(["cache", "import", str(file)]) == 0
    assert f"{written} entries written" in capsys.readouterr().out and written > 1
    assert hits(tmp_path / "other") == 1


def test_what_differs_is_said(tmp_path, monkeypatch):
    file = tmp_path / "cache.fsc"
    with fs.config.patch(cache_dir=str(tmp_path / "one")):
        diskcache.kernels().put("key", b"code")
        caches.write_cache(file)
    monkeypatch.setattr(torch, "__version__", "9.9")
    with fs.config.patch(cache_dir=str(tmp_path / "other")):
        count, others = caches.read_cache(file)
        assert count == 1 and list(others) == ["torch"] and diskcache.kernels().get("key") == b"code"


def test_damage_and_strangers_are_refused(tmp_path, capsys):
    file, torn = tmp_path / "cache.fsc", tmp_path / "torn.fsc"
    with fs.config.patch(cache_dir=str(tmp_path / "one")):
        diskcache.kernels().put("key", b"code" * 9)
        caches.write_cache(file)
    data = file.read_bytes()
    with fs.config.patch(cache_dir=str(tmp_path / "other")):
        for at in range(0, len(data), 7):
            torn.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
            with pytest.raises(PackageError):
                caches.read_cache(torn)
        torn.write_bytes(data[:-9])
        with pytest.raises(PackageError):
            caches.read_cache(torn)
        archive.write(torn, {}, {"graphs/forward.py": b"x"}, ())
        with pytest.raises(PackageError, match=archive.FORMAT):
            caches.read_cache(torn)
        archive.write(torn, {}, {"../x.o": b"x"}, (), caches.FORMAT)
        with pytest.raises(PackageError, match="no entry"):
            caches.read_cache(torn)
        assert cli.main(["cache", "import", str(torn)]) == 2 and "no entry" in capsys.readouterr().err
        assert cli.main(["cache", "import", str(tmp_path / "none")]) == 2
        assert not list(diskcache.kernels().entries())
