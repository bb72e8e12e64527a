"""Runs the tiny and the capture tests on every Python from 3.11 on that this machine has: `make test-pythons`.

Interpreters are looked for on PATH and among those of pyenv; each has an environment of its own, .venv-3.12 say, made when it is missing.

    python tests/on_every_python.py                 # all
    python tests/on_every_python.py 3.13 -k loops   # one, with further arguments for pytest
"""
from __future__ import annotations

import glob
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
OLDEST = (3, 11)
TESTS = ("tests/test_tiny.py", "tests/capture", "tests/test_support.py", "tests/test_transaction.py")
NEEDED = ("pytest", "pytest-xdist", "hypothesis")
ASK = "import sys, json; print(json.dumps([sys.version_info[:3], sys.executable, sys.prefix == sys.base_prefix]))"


def candidates() -> list[str]:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin"))]
    found = [path for folder in folders for path in glob.glob(os.path.join(folder, "python3*"))]
    return [sys.executable, *(path for path in found if re.search(r"/python3(\.\d+)?$", path) and os.access(path, os.X_OK))]


def interpreters() -> dict[str, str]:
    """Version -> interpreter, one for each minor version, its latest."""
    best: dict[tuple[int, int], tuple[int, str]] = {}
    for path in dict.fromkeys(candidates()):
        done = subprocess.run([path, "-c", ASK], capture_output=True, text=True)
        if done.returncode:
            continue        # a shim without a version behind it
        (major, minor, micro), executable, plain = json.loads(done.stdout)
        if (major, minor) >= OLDEST and plain:
            best[major, minor] = max(best.get((major, minor), (-1, "")), (micro, executable))
    return {f"{major}.{minor}": path for (major, minor), (_, path) in sorted(best.items())}


def environment(version: str, interpreter: str) -> pathlib.Path:
    """The environment's Python, with the project and what the tests need."""
    folder = ROOT / f".venv-{version}"
    python, done = folder / "bin" / "python", folder / ".installed"
    wants = (ROOT / "pyproject.toml").stat().st_mtime
    if not done.exists() or done.stat().st_mtime < wants:
        if not python.exists():
            subprocess.run([interpreter, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "-e", ROOT, *NEEDED], check=True)
        done.touch()
    return python


def main(arguments: list[str]) -> int:
    found = interpreters()
    wanted = [a for a in arguments if re.fullmatch(r"\d+\.\d+", a)]
    rest = [a for a in arguments if a not in wanted]
    results = {}
    for version in wanted or found:
        print(f"Python {version}: {found[version]}", flush=True)
        python = environment(version, found[version])
        results[version] = subprocess.run([python, "-m", "pytest", "-n", "2", *TESTS, *rest], cwd=ROOT).returncode
    for version, code in results.items():
        print(f"Python {version}: {'passed' if code == 0 else 'FAILED'}")
    return max(results.values(), default=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
