"""Programs through a package: written here, loaded in this process and in a fresh one, against eager."""
import collections
import copy
import json
import platform
import re
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.errors import PackageError
from firesteel.shipping.processors import PROCESSORS, runs_here

pytestmark = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="packages are for x86-64")
Pair = collections.namedtuple("Pair", "first second")


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.second.weight.data *= 2

    def forward(self, x, scale=None):
        h = F.gelu(self.first(x))
        return self.second(h if scale is None else h * scale)


class Counting(torch.nn.Module):
    """Buffers written in place, random numbers, views, an input that comes back, numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(6), persistent=False)

    def forward(self, x, where):
        self.calls += 1
        h = self.drop(self.norm(x)) + self.hidden
        where["mask"].fill_(True)
        return {"h": h, "view": h[1:], "x": x, "rows": x.shape[0], "of x": x.t(), "pair": [(h.softmax(-1), None), "text"]}


def package(model, args, path, **settings):
    with torch.no_grad():
        fs.package(model, args, path, **settings)
    return fs.load(path)


def same(a, b):
    leaves = [torch.utils._pytree.tree_flatten(value) for value in (a, b)]
    assert leaves[0][1] == leaves[1][1]
    for one, other in zip(leaves[0][0], leaves[1][0], strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert one == other and type(one) is type(other)


@torch.no_grad()
def test_a_module_over_a_range_of_sizes(tmp_path):
    model = Mlp()
    program = package(model, (torch.randn(3, 8),), tmp_path / "p", dynamic={"x": {0: (1, 50)}})
    for rows in (1, 2, 3, 17, 50):
        x = torch.randn(rows, 8)
        same(program(x), model(x))
        same(program(x=x), model(x))
    assert list(program.state_dict()) == list(model.state_dict()) and not any(p.requires_grad for p in program.parameters())
    program.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.load_state_dict(program.state_dict())
    same(program(x), model(x))


@torch.no_grad()
def test_what_a_call_changes_beside_its_result(tmp_path):
    model = Counting()
    args = (torch.randn(5, 6), {"mask": (example := torch.zeros(5, dtype=torch.bool))})
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    program = package(model, args, tmp_path / "p", dynamic=True)
    assert torch.equal(torch.get_rng_state(), state) and not example.any(), "writing a package computes nothing"
    same(model.state_dict(), before)
    for rows in (5, 9):
        x, masks = torch.randn(rows, 6), [torch.zeros(rows, dtype=torch.bool) for _ in range(2)]
        torch.manual_seed(3)
        expected = model(x, {"mask": masks[0]})
        torch.manual_seed(3)
        found = program(x, {"mask": masks[1]})
        same(found, expected)
        assert found["x"] is x and found["of x"]._base is x and found["view"]._base is found["h"] and masks[1].all()
        same(program.state_dict(), model.state_dict())
    assert "hidden" not in program.state_dict()


PROGRAMS = {
    "convolutions": (torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)).eval(),
                     lambda: (torch.randn(2, 3, 12, 12),)),
    "attention": (torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(), lambda: (torch.randn(2, 7, 16),)),
    "a function": (lambda x, k=3: (x.sort(-1).values[:, :k], x.argmax(-1), x.cumsum(0)), lambda: (torch.randn(5, 9),)),
    "large constants": (lambda x: x * torch.arange(6000.0) + torch.tensor([2.5] * 6000), lambda: (torch.randn(2, 6000),)),
    "an embedding": (torch.nn.EmbeddingBag(20, 8, mode="mean"), lambda: (torch.randint(0, 20, (3, 4)),)),
    "half precision": (lambda x, y: (x.bfloat16() @ y.bfloat16()).float().exp().sum(), lambda: (torch.randn(4, 5), torch.randn(5, 6))),
    "one tensor twice": (lambda x, y: x * y + y.sin(), lambda: (torch.randn(4),) * 2),
    "containers": (lambda pair, rest: Pair(pair.first + rest[0]["a"], pair.second * rest[1]),
                   lambda: (Pair(torch.randn(3), torch.randn(3)), [{"a": torch.randn(3)}, 2])),
    "an empty tensor": (lambda x: (x.sum(), x * 2), lambda: (torch.randn(0, 3),)),
    "complex numbers": (lambda x: (x * x.conj()).abs().sum(), lambda: (torch.randn(4, dtype=torch.complex64),)),
    "no_grad inside": (lambda x: torch.no_grad()(lambda y: y * 2)(x) + 1, lambda: (torch.randn(3),)),
}
torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")


@pytest.mark.parametrize("name", PROGRAMS)
@torch.no_grad()
def test_programs(name, tmp_path):
    model, make = PROGRAMS[name]
    program = package(model, make(), tmp_path / "p")
    for _ in range(2):
        args = make()
        same(program(*args), model(*args))


class Scope:
    value = None


class Scoped(torch.nn.Module):
    """Sets a global object for the time of its call, as libraries do."""

    def forward(self, x):
        Scope.value, before = [x], Scope.value
        y = Scope.value[0] * 2
        Scope.value = before
        return y


@torch.no_grad()
def test_what_is_put_back_is_no_effect(tmp_path):
    x = torch.randn(3)
    same(package(Scoped(), (x,), tmp_path / "p")(x), x * 2)
    assert Scope.value is None


@pytest.mark.parametrize("processor", [name for name, row in PROCESSORS.items() if row.machine == platform.machine()])
@torch.no_grad()
def test_machine_code_for_named_processors(processor, tmp_path):
    model, x = Mlp(), torch.randn(9, 8)
    fs.package(model, (x,), tmp_path / "p", processors=[processor])
    assert [name for name in zipfile.ZipFile(tmp_path / "p").namelist() if name.startswith(processor)]
    if runs_here(processor):
        same(fs.load(tmp_path / "p")(x), model(x))


def test_writing_leaves_no_mark_on_the_example_and_equal_programs_give_equal_files(tmp_path):
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 8)
    for name in "ab":
        package(model, (x,), tmp_path / name, dynamic={"x": {0: True}})
    assert not vars(x) and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_nothing_of_the_machine_is_in_the_file(tmp_path):
    package(Counting(), (torch.randn(5, 6), {"mask": torch.zeros(5, dtype=torch.bool)}), tmp_path / "p", dynamic=True)
    with zipfile.ZipFile(tmp_path / "p") as archive:
        texts = [archive.read(name).decode() for name in archive.namelist() if name.endswith((".py", ".json", ".plan"))]
    found = [hit for text in texts for hit in re.findall(r"0x[0-9a-f]{6,}|/home|/tmp|/usr|site-packages|" + re.escape(__file__), text)]
    assert not found


@torch.no_grad()
def test_weights_may_be_left_out(tmp_path):
    model, x = Mlp(), torch.randn(3, 8)
    fs.package(model, (x,), tmp_path / "p", weights=False)
    with pytest.raises(PackageError, match="first.weight: the package has no weights"):
        fs.load(tmp_path / "p")
    other = Mlp()
    same(fs.load(tmp_path / "p", weights=other.state_dict())(x), other(x))
    with pytest.raises(PackageError, match="first.bias"):
        fs.load(tmp_path / "p", weights={"first.weight": other.first.weight})


class Flagged(torch.nn.Module):
    """Sets an attribute to what it is, as transformers' models do, and looks rows up, which may raise."""

    def __init__(self):
        super().__init__()
        self.table, self.flag = torch.nn.Embedding(5, 4), True

    def forward(self, i):
        before, self.flag = self.flag, False
        out = self.table(i) * 2
        self.flag = before
        return out


@torch.no_grad()
def test_attributes_that_are_in_the_end_as_they_were(tmp_path):
    model, places = Flagged(), torch.tensor([1, 4, 0])
    fs.package(model, (places,), tmp_path / "p")
    same(fs.load(tmp_path / "p")(places), model(places))


# ---------------------------------------------------------------- what is refused

class Steps(torch.nn.Module):
    count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


REFUSED = {
    "an attribute": (Steps(), (torch.ones(3),), {}, "changes more than tensors: s_0.count = 1, where s_0 is a Steps"),
    "a list": (lambda x, found: found.append(x + 1) or x * 2, (torch.ones(3), []), {}, "changes more than tensors"),
    "nothing": (lambda x: 3, (torch.ones(3),), {}, "nothing to compile"),
    "an unknown argument": (lambda x: x + 1, (torch.ones(3),), {"dynamic": {"y": {0: True}}}, "'y'"),
    "a processor of another kind": (lambda x: x + 1, (torch.ones(3),), {"processors": ["x86-64-v3", "armv8-a"]}, "is made on"),
    "an unknown processor": (lambda x: x + 1, (torch.ones(3),), {"processors": ["z80"]}, "z80"),
    "an object": (lambda x, o: x + 1, (torch.ones(3), object()), {}, "cannot be written"),
    "no tuple": (lambda x: x + 1, torch.ones(3), {}, "tuple of example arguments"),
    "a fixed size": (lambda x: x.view(3), (torch.ones(3),), {"dynamic": {"x": {0: True}}}, "dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_said(name, tmp_path):
    model, args, settings, words = REFUSED[name]
    with pytest.raises(fs.errors.FiresteelError, match=words), torch.no_grad():
        fs.package(model, args, tmp_path / "p", **settings)
    assert not list(tmp_path.iterdir()), "no file is left behind"
    assert Steps.count == 0 and "count" not in vars(REFUSED["an attribute"][0])


def test_a_break_is_named_with_the_users_line(tmp_path):
    def program(x):
        print(x)
        return x + 1
    with pytest.raises(fs.errors.Unsupported, match="test_pack.py"):
        fs.package(program, (torch.ones(3),), tmp_path / "p")


# ---------------------------------------------------------------- in another process

FRESH = """
import sys, torch, firesteel as fs
program, inputs = fs.load(sys.argv[1]), torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(program(*inputs), sys.argv[3])
heavy = [m for m in sys.modules if m.split(".")[0] in ("llvmlite", "triton", "sympy") or m in ("firesteel.pipeline", "firesteel.graph.trace")]
assert not heavy, heavy
"""


@torch.no_grad()
def test_a_fresh_process_runs_it_without_a_compiler(tmp_path):
    model, x = Mlp(), torch.randn(11, 8)
    fs.package(model, (torch.randn(3, 8),), tmp_path / "p", dynamic={0: {0: True}})
    torch.save((x,), tmp_path / "in")
    done = subprocess.run([sys.executable, "-c", FRESH, tmp_path / "p", tmp_path / "in", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same(torch.load(tmp_path / "out"), model(x))


def test_the_manifest_can_be_read_by_people(tmp_path, capsys):
    from firesteel.cli import main
    package(Mlp(), (torch.randn(3, 8),), tmp_path / "p", dynamic={"x": {0: (2, 50)}})
    assert main(["package", "info", str(tmp_path / "p")]) == 0
    said = capsys.readouterr().out
    assert "Mlp, for inference" in said and "argument x: float32[s0, 8]" in said and "s0 is x.size(0): x.size(0) >= 2, x.size(0) <= 50" in said
    assert json.loads(zipfile.ZipFile(tmp_path / "p").read("manifest.json"))["kind"] == "inference"
    (tmp_path / "q").write_text("something else")
    assert main(["package", "info", str(tmp_path / "q")]) == 2 and "no package of firesteel" in capsys.readouterr().err
