"""The house rules that a test can check: layers, the boundary to the peer, a light import, files that say what they are for."""
import ast
import pathlib
import subprocess
import sys

import pytest

SRC = pathlib.Path(__file__).parent.parent / "src" / "firesteel"
FILES = sorted(SRC.rglob("*.py"))

# what each layer may import, besides itself
BASE = {"table", "config", "errors", "artifacts", "seams", "backwards"}
LAYERS = {
    **dict.fromkeys(BASE, BASE),
    "sym": BASE,
    "loops": BASE | {"sym"},
    "codegen": BASE | {"sym", "loops"},
    "runtime": BASE | {"sym", "loops", "codegen"},
    "graph": BASE | {"sym"},
    "autograd": BASE | {"sym", "graph"},
    "capture": BASE | {"sym"},
}
PEER = ("torch._dynamo", "torch._inductor", "torch._functorch", "functorch", "torch.fx.experimental", "torch._subclasses",
        "torch.compile", "sympy")


def imported(path):
    """Dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(path):
    part = path.relative_to(SRC).parts[0]
    return part.removesuffix(".py")


@pytest.mark.parametrize("path", [f for f in FILES if layer(f) in LAYERS], ids=lambda p: str(p.relative_to(SRC)))
def test_layers_import_downwards_only(path):
    own = layer(path)
    allowed = LAYERS[own] | {own}
    ours = [name.split(".")[1] for name in imported(path) if name.startswith("firesteel.")]
    assert set(ours) <= allowed, f"{path} imports {set(ours) - allowed}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_no_file_imports_the_peer(path):
    leaning = [name for name in imported(path) if any(name == p or name.startswith(p + ".") for p in PEER)]
    assert not leaning


@pytest.mark.parametrize("path", [f for f in FILES if f.stat().st_size], ids=lambda p: str(p.relative_to(SRC)))
def test_every_file_says_first_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def run_fresh(code):
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)


def test_import_is_light():
    code = ("import sys, torch; before = set(sys.modules); import firesteel; new = set(sys.modules) - before\n"
            "heavy = [m for m in new if m.split('.')[0] in ('sympy', 'llvmlite', 'scipy', 'triton', 'networkx')"
            " or m.startswith(('torch._dynamo', 'torch._inductor'))]\n"
            "assert not heavy, heavy")
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr


PEER_REPLACED = """
import sys, torch
def refuse(*args, **kwargs):
    raise AssertionError("the peer was called")
torch.compile = refuse
class Refusing:
    # whoever imports a module of the peer from here on fails
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental", "torch._subclasses", "functorch", "sympy")) \\
                and name not in sys.modules:
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refusing())
import firesteel as fs
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
x = torch.randn(3, 8)
expected = model(x)
expected.sum().backward()
gradients = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
result = fs.compile(model)(x)
result.sum().backward()
assert torch.allclose(result, expected, atol=1e-5)
for p, g in zip(model.parameters(), gradients):
    assert torch.allclose(p.grad, g, atol=1e-5)
assert fs.counters["stats"]["unique_graphs"] == 1 and fs.counters["native"]["kernels"] > 0
"""


def test_a_model_trains_without_the_peer():
    done = run_fresh(PEER_REPLACED)
    assert done.returncode == 0, done.stderr


def test_every_setting_is_read_somewhere():
    """A setting that nothing reads would be ignored without a word."""
    from firesteel.config import KNOBS
    text = "\n".join(path.read_text() for path in FILES if path.name != "config.py")
    assert [name for name in KNOBS if f"config.{name}" not in text] == []
