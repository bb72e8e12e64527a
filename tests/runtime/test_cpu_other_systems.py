"""What other systems lack: nothing of the package needs it when it is loaded, and errors of theirs stay what they are."""
import subprocess
import sys

import pytest

from firesteel.runtime import cpu

WITHOUT = """
import importlib, os, pkgutil, sys
import torch
del os.register_at_fork
sys.modules["fcntl"] = None
import firesteel
for module in pkgutil.walk_packages(firesteel.__path__, "firesteel."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
f = lambda x: (x * 2 + 1).relu().sum(0)
x = torch.randn(30, 40)
torch.testing.assert_close(firesteel.compile(f)(x), f(x))
print("compiled")
"""


def test_no_fork_and_no_file_locks():
    """As on Windows."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_memory_is_not_asked_for_as_on_linux(system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(cpu, "mmap", None)
    cpu.check_memory()
