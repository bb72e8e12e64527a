"""The releases of torch and NumPy that are supported: said in one place, and what is used of torch's insides is there."""
import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from firesteel import support

ROOT = pathlib.Path(__file__).parent.parent


def test_the_requirement_is_the_range_that_is_supported():
    least, beyond = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert tuple(map(int, least.split("."))) == support.OLDEST
    assert tuple(map(int, beyond.split("."))) == (support.NEWEST[0], support.NEWEST[1] + 1)
    numpy = re.search(r'"numpy>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert tuple(map(int, numpy.split("."))) == support.OLDEST_NUMPY


@pytest.mark.parametrize("numpy, told", [
    ("import numpy; numpy.__version__ = '1.24.4'", "works with NumPy 1.25 and newer; this is 1.24.4: pip install 'numpy>=1.25'"),
    ("import sys, numpy; sys.modules['numpy'] = None", "needs NumPy, which cannot be imported"),
    ("import faulthandler, numpy; numpy.random.default_rng = faulthandler.is_enabled", ""),       # NumPy 1 has a plain builtin there
], ids=["old", "none", "1.x"])
def test_numpy(numpy, told):
    done = subprocess.run([sys.executable, "-c", f"import torch; {numpy}; import firesteel as fs; fs.compile"], capture_output=True, text=True)
    assert (told in done.stderr.splitlines()[-1] and done.returncode == 1) if told else done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1", torch.__version__])
def test_a_supported_release_is_taken(version, recwarn):
    support.check_torch(version)
    assert not recwarn


def test_an_older_release_is_an_error_and_a_newer_one_a_warning():
    with pytest.raises(ImportError, match="torch 2.11 to 2.15; this is 2.10.1"):
        support.check_torch("2.10.1")
    with pytest.warns(UserWarning, match="this is 3.0.0"):
        support.check_torch("3.0.0")


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0"])
def test_rows_for_other_releases_fit_together(version):
    program = f"import torch; torch.__version__ = {version!r}; import firesteel.public"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def chain(node):
    """("torch", "_C", ...) of an attribute of attributes."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def used_of_torch():
    """What src/ names of torch's private parts, without what it asks for by getattr or hasattr."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = chain(node)
            if names[:1] == ("torch",) and any(name.startswith("_") for name in names):
                yield names, path.name


def importable(name):
    """A part of torch that nobody has imported yet; then it is imported."""
    try:
        return bool(importlib.import_module(name))
    except ImportError:
        return False


def missing(names):
    value = torch
    for place, name in enumerate(names[1:], 2):
        if not hasattr(value, name) and not importable(".".join(names[:place])):
            return True
        value = getattr(value, name)
    return False


def test_what_is_used_of_torchs_insides_is_there():
    used = set(used_of_torch())
    assert len(used) > 60
    builds = {names for names, _ in used if names[-1].startswith("_cuda") and not torch.backends.cuda.is_built()}      # of a build for the CPU alone
    assert not sorted((".".join(names), file) for names, file in used if names not in builds and missing(names))
