"""The Pythons on this machine on which the checks of bytecode_checks.py can run."""
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("bytecode_checks.py")
VERSIONS = ("3.11", "3.12", "3.13")


def interpreter(version):
    """A Python of this version below pyenv's root, or None."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = sorted(root.glob(f"{version}.*/bin/python"))
    return found[-1] if found else None


def run_check(version, check, limit):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} below pyenv's root on this machine")
    done = subprocess.run([str(python), str(SCRIPT), check, str(limit)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


OTHERS = [version for version in VERSIONS if not sys.version.startswith(version + ".")]
