"""firesteel doctor: names what is there, and what to do about what is not."""
import importlib.metadata
import subprocess
import sys

import pytest
import torch

import firesteel as fs
from firesteel import cli
from firesteel.tools import doctor


def test_everything_that_is_there_is_named(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{out}" for name in doctor.CHECKS)
    assert torch.__version__ in out and "compiled and ran" in out


def test_missing_packages(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert doctor.check_numpy() == doctor.Found("not installed", "Capture needs it: pip install numpy", True)
    assert doctor.check_llvmlite() == doctor.Found("not installed", "Kernels of the CPU need it: pip install llvmlite", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.check_triton().needed


def test_a_missing_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in doctor.check_gpu().remedy
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in doctor.check_gpu().remedy


def test_the_cache(tmp_path, monkeypatch):
    with fs.config.patch(cache_dir=""):
        assert doctor.check_cache().text == "off"
    with fs.config.patch(cache_dir=str(tmp_path / "new")):
        assert not doctor.check_cache().remedy
        monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
        assert "FIRESTEEL_CACHE_DIR" in doctor.check_cache().remedy


def test_settings_that_nothing_reads_are_named(monkeypatch):
    monkeypatch.setenv("FIRESTEEL_RECOMPILE_LIMITS", "3")
    monkeypatch.setenv("FIRESTEEL_LOGS", "graph,guard")
    remedy = doctor.check_settings().remedy
    assert "FIRESTEEL_RECOMPILE_LIMITS" in remedy and "no log guard." in remedy


def test_a_kernel_that_fails_decides_the_exit_status(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no machine code here\nat all")
    monkeypatch.setattr(fs, "compile", broken)
    assert cli.main(["doctor"]) == 1
    assert "fails: RuntimeError: no machine code here\n" in capsys.readouterr().out


@pytest.mark.parametrize("name, value, told", [
    ("FIRESTEEL_RECOMPILE_LIMIT", "many", "FIRESTEEL_RECOMPILE_LIMIT='many': the setting takes an int from 1. How many variants"),
    ("FIRESTEEL_VERIFY", "perhaps", "FIRESTEEL_VERIFY='perhaps': the setting takes a bool."),
    ("FIRESTEEL_LOGS", "everything", "FIRESTEEL_LOGS: there is no log everything; there are graph_breaks,"),
])
def test_a_wrong_variable_is_named_at_import(name, value, told, monkeypatch):
    monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", "import firesteel"], text=True, capture_output=True)
    assert told in done.stderr.splitlines()[-1]
