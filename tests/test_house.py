"""The house rules that a test can check: layers, the boundary to the peer, a light import, files that say what they are for."""
import ast
import os
import pathlib
import subprocess
import sys

import pytest

from firesteel.homes import is_in_package, is_in_private, is_library

SRC = pathlib.Path(__file__).parent.parent / "src" / "firesteel"
FILES = sorted(SRC.rglob("*.py"))

# what each layer may import, besides itself
BASE = {"table", "operators", "config", "errors", "artifacts", "homes", "transaction", "torchstate", "stages", "targets", "native_method", "native_tensors", "records", "watchers",
        "support", "tracebacks", "layouts"}
# what captured graphs call for autograd: capture writes such calls, graph/ traces through them, and they need neither; how graphs are built, and compared with other ranks'
CALLS = {"autograd.seams", "autograd.backwards", "autograd.regions", "autograd.recomputations", "autograd.branches",
         "autograd.custom", "autograd.ranks", "graph.build"}
LAYERS = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(CALLS, BASE | CALLS | {"sym"}),
    "sym": BASE,
    "loops": BASE | {"sym"},
    "codegen": BASE | {"sym", "loops"},
    "runtime": BASE | {"sym", "loops", "codegen"},
    "graph": BASE | CALLS | {"sym"},
    "autograd": BASE | CALLS | {"sym", "graph"},
    "ops": BASE | CALLS | {"sym", "graph", "loops", "autograd"},
    "capture": BASE | CALLS | {"sym"},
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


def layer(name):
    """The layer of a dotted name below firesteel: a file with a row of its own, or its folder."""
    parts = name.split(".")
    return next((own for own in (".".join(parts[:2]), parts[0]) if own in LAYERS), parts[0])


def own_layer(path):
    return layer(".".join(path.relative_to(SRC).with_suffix("").parts))


@pytest.mark.parametrize("path", [f for f in FILES if own_layer(f) in LAYERS], ids=lambda p: str(p.relative_to(SRC)))
def test_layers_import_downwards_only(path):
    own = own_layer(path)
    allowed = LAYERS[own] | {own}
    ours = [layer(name.removeprefix("firesteel.")) for name in imported(path) if name.startswith("firesteel.")]
    assert set(ours) <= allowed, f"{path} imports {set(ours) - allowed}"


# files that name each other's classes, for type checkers alone: a builder and the tables of what it builds
TIED = {"graph.record", "graph.trace", "autograd.function", "autograd.groups", "autograd.pieces", "codegen.llvm_code", "codegen.llvm_math",
        "codegen.llvm_ops", "codegen.lane_masks", "codegen.lane_reads"}


def test_imports_go_in_no_circle():
    """Imports for type checkers count: in capture, Values ask the machine through protocols.py and do not know it."""
    files = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in FILES if path.name != "__init__.py"}
    names = {name: {used.removeprefix("firesteel.") for used in imported(path)} for name, path in files.items()}
    left = {name: {one if one in files else one.rpartition(".")[0] for one in used} & files.keys() - {name} for name, used in names.items()}
    while ends := [name for name, used in left.items() if not used & left.keys() or not any(name in other for other in left.values())]:
        for name in ends:
            del left[name]
    assert left.keys() == TIED, f"among these there is a cycle: {sorted(left.keys() ^ TIED)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_no_file_imports_the_peer(path):
    leaning = [name for name in imported(path) if any(name == p or name.startswith(p + ".") for p in PEER)]
    assert not leaning


def prefix_tests(tree):
    """Lines that recognise a package by the beginning of a name, or by a piece of it: torchrl is not torch."""
    packages = ("torch", "firesteel", "numpy")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "match", "find", "index"):
            asked = [c.value for a in node.args for c in ast.walk(a) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)) and isinstance(node.left, ast.Constant):
            asked = [node.left.value]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Subscript) and isinstance(node.left.slice, ast.Slice):
            asked = [c.value for c in node.comparators if isinstance(c, ast.Constant)]
        else:
            continue
        if any(str(text).startswith(packages) for text in asked):
            yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_packages_are_not_recognised_by_the_beginning_of_a_name(path):
    assert not list(prefix_tests(ast.parse(path.read_text()))), "firesteel.homes says what is in a package"


@pytest.mark.parametrize("line", ['name.startswith("torch")', 'name.startswith(("math", "torch."))', '"torch" in path', 'name[:5] == "torch"'])
def test_such_a_line_would_be_found(line):
    assert list(prefix_tests(ast.parse(line))) == [1]


def test_names_are_compared_part_by_part():
    assert all(is_in_package(name, "torch") for name in ("torch", "torch.nn", "torch._C._nn"))
    assert not any(is_in_package(name, "torch") for name in ("torchrl", "torch_geometric.nn", "torchvision.ops", "", "mytorch", "math"))
    assert is_library("torch.nn") and is_library("os.path") and not is_library("torchode") and not is_library("mathutils")
    assert is_in_private("torch._C._nn", "torch") and not is_in_private("torch_x._y", "torch") and not is_in_private("torch.nn._x", "torch")


@pytest.mark.parametrize("path", [f for f in FILES if f.stat().st_size], ids=lambda p: str(p.relative_to(SRC)))
def test_every_file_says_first_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def run_fresh(code):
    """In a process of its own that finds nothing in a cache on disk."""
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env={**os.environ, "FIRESTEEL_CACHE_DIR": ""})


def test_rows_of_operators_are_there_for_all_threads():
    """They are loaded when they are first asked for: who asks meanwhile waits."""
    code = ("import sys, threading, torch, firesteel.public\n"
            "from firesteel.loops.lower.build import LOWERINGS\n"
            "assert 'firesteel.ops' not in sys.modules\n"
            "found = []\n"
            "def ask(): found.append(LOWERINGS.of(torch.ops.aten.where.self))\n"
            "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
            "[t.start() for t in threads], [t.join() for t in threads]\n"
            "assert len(found) == 8 and None not in found")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_light():
    code = ("import sys, torch; before = set(sys.modules); import firesteel; early = set(sys.modules) - before\n"
            "assert not [m for m in early if m.startswith('firesteel.') and m.count('.') > 1 and m != 'firesteel.capture.marks'], early\n"
            "firesteel.compile; new = set(sys.modules) - before\n"
            "rare = ('dumps', 'replay', 'autograd.budget', 'codegen.triton', 'runtime.gpu')\n"
            "assert not [m for m in rare if f'firesteel.{m}' in new]\n"
            "heavy = [m for m in new if m.split('.')[0] in ('sympy', 'llvmlite', 'scipy', 'triton', 'networkx')"
            " or m.startswith(('torch._dynamo', 'torch._inductor'))]\n"
            "assert not heavy, heavy")
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr


FIRST_CALLS = """
import sys, torch, firesteel as fs
from torch.utils.checkpoint import checkpoint
layer = torch.nn.Linear(4, 4)
def solved(x, y):
    root = torch.linalg.cholesky(x.mT @ x + torch.eye(3))
    lines = torch.cross(x, x * 2, dim=-1).sum() + torch.dist(x, x + 1) + torch.linalg.solve(root, y[:3]).sum() + torch.linalg.svdvals(x).sum()
    return torch.cdist(x, y).sum() + torch.block_diag(x, y, x[0], x[0, 0]).sum() + lines
calls = {
    "leaf": lambda: fs.compile(layer)(torch.randn(2, 4)),
    "result": lambda: fs.compile(layer)(torch.randn(2, 4, requires_grad=True) * 2),
    "view": lambda: fs.compile(lambda x: x * 2)(torch.randn(3, 4)[1:]),
    "written view": lambda: fs.compile(lambda x: x.add_(1))(torch.randn(3, 4)[1:]),
    "conjugate": lambda: fs.compile(lambda x: x * 2)(torch.randn(4, dtype=torch.complex64).conj()),
    "sizes": lambda: fs.compile(lambda x: x.view(-1, 2).softmax(0), dynamic=True)(torch.randn(6, 4)),
    "recurrent": lambda: fs.compile(torch.nn.LSTM(4, 4))(torch.randn(2, 3, 4)),
    "region": lambda: fs.compile(lambda x: checkpoint(layer, x, use_reentrant=False))(torch.randn(2, 4)),
    "meta kernels": lambda: fs.compile(solved)(torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)).backward(),
    "captured backward": lambda: fs.compiled_autograd()(lambda: layer(torch.randn(2, 4)).sum().backward())(),
}
for name, call in calls.items():
    call()
    loaded = [module for module in ("torch.distributed.tensor", "torch._dynamo", "sympy") if module in sys.modules]
    assert not loaded, f"{name}: {loaded}"
"""


def test_a_first_call_loads_nothing_heavy():
    """Distributed tensors alone cost a first call half a second: torch loads them to ask for their class."""
    done = run_fresh(FIRST_CALLS)
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
fs.config.cache_dir = ""        # a program in the cache would have no kernels to count
torch.manual_seed(0)
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


def test_records_are_quick_to_define():
    """The standard library's dataclass compiles five functions of each class when it is imported."""
    slow = [path.name for path in FILES if path.name != "records.py" and {"dataclasses.dataclass"} & set(imported(path))]
    assert slow == [], "import dataclass from firesteel.records"


def test_kinds_of_devices_are_named_in_one_file():
    """Who needs to know a device's kind asks targets.py: a new kind is then a row there and one in pipeline.TARGETS."""
    named = [path.name for path in FILES if path.name != "targets.py" for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and node.value in ("cpu", "cuda")]
    assert named == []


def test_a_class_name_means_one_class():
    """A reader who meets a name looks for one definition of it; docs/glossary.md says which names are taken."""
    classes = [node.name for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    twice = {name for name in classes if classes.count(name) > 1}
    assert not twice, f"{twice} are taken"


# ---------------------------------------------------------------- tests mirror sources

TESTS = pathlib.Path(__file__).parent
ACROSS = {"distributed", "e2e", "errors", "fuzz", "gpu", "packages"}       # folders of programs that go through every stage
# test files without a source of their name, by what they are about instead
ELSEWHERE = {
    "all of ahead-of-time autograd": "gradients symbolic_gradients opinfo opinfo_sizes checkpoint state subclasses",
    "programs of the Python language": "language_corners language_errors language_library language_objects language_statements",
    "a break at any instruction": "break_anywhere break_programs one_split user_lines",
    "whole training steps in one function": "backward_inside requires_grad_inside training_inside",
    "which changes of a program are noticed": "bits dynamic guard_fuzz handed_on stale states",
    "every operator of torch": "torch_surface result_dtypes graph_symbolic graph_gpu",
    "what a user meets": "bad_programs bad_environments",
    "a package as a whole": "properties tables fork process_end house tiny goldens walk docs examples",
    "the reference interpreter, tests/interp.py": "interp",
}


def sources_of(folder):
    """Names that a test file of a folder may begin with: its source files, those of folders below, and those folders."""
    return {path.stem for path in (SRC / folder).rglob("*") if path.suffix == ".py" or path.is_dir()}


def mirrored(path):
    folder = path.parent.relative_to(TESTS)
    words = path.stem.removeprefix("test_").removeprefix(f"{folder}_").split("_")
    return any("_".join(words[:n]) in sources_of(folder) for n in range(1, len(words) + 1))


def test_every_test_file_has_a_source_or_a_reason():
    files = [path for path in TESTS.rglob("test_*.py") if path.parent.name not in ACROSS]
    without = {path.stem.removeprefix("test_") for path in files if not mirrored(path)}
    excused = {name for names in ELSEWHERE.values() for name in names.split()}
    assert without == excused, f"name these after a source file, or give a reason: {without - excused}; no exceptions any more: {excused - without}"


def test_the_table_of_lines_has_every_folder():
    """`make lines` writes it; the numbers may be some commits old, the folders may not."""
    folders = {"/".join(path.relative_to(SRC).parts[:-1]) or "." for path in FILES if path.stat().st_size}
    rows = (TESTS.parent / "docs" / "README.md").read_text().split("made by `make lines` -->")[1].split("<!--")[0].splitlines()[3:-1]
    assert {row.split("`")[1] for row in rows} == folders
