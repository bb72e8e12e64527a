"""What a loaded package refuses: calls that were not recorded, other versions and processors; and what it says then."""
import json
import platform
import sys

import pytest
import torch

import firesteel as fs
from firesteel.codegen import hosted
from firesteel.errors import PackageError
from firesteel.shipping import archive, load, processors

pytestmark = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="packages are for x86-64")


def program(x, y=None, *, options=(1, "a")):
    return x.mul_(2) + (0 if y is None else y["b"]) * options[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("package") / "p"
    with torch.no_grad():
        fs.package(program, (torch.ones(3, 4), {"b": torch.ones(4)}), file, dynamic={"x": {0: (2, 9)}}, example_keywords={"options": (2, "b")})
    return file


def call(loaded, x=None, y=None, **kwargs):
    arguments = {"options": (2, "b"), **kwargs}
    return loaded(torch.ones(3, 4) if x is None else x, {"b": torch.ones(4)} if y is None else y, **arguments)


CALLS = {
    "too many rows": (lambda p: call(p, torch.ones(10, 4)), r"x.size\(0\) is 10; .* x.size\(0\) <= 9"),
    "too few rows": (lambda p: call(p, torch.ones(1, 4)), r"x.size\(0\) is 1; .* x.size\(0\) >= 2"),
    "another size": (lambda p: call(p, torch.ones(3, 5)), r"x has the sizes \(3, 5\); .*float32\[s0, 4\]"),
    "another dtype": (lambda p: call(p, torch.ones(3, 4).double()), "x has the dtype torch.float64; .*float32"),
    "another number of dimensions": (lambda p: call(p, torch.ones(3)), "x has the dimensions 1; .* 2"),
    "other strides": (lambda p: call(p, torch.ones(4, 3).t()), r"x has the strides \(1, 3\)"),
    "another device": (lambda p: call(p, torch.ones(3, 4, device="meta")), "x has the device meta; .*cpu"),
    "a subclass": (lambda p: call(p, torch.ones(3, 4).as_subclass(Own)), "x is a Own; .* plain tensor"),
    "another structure": (lambda p: call(p, y=[torch.ones(4)]), "y is built as"),
    "another number": (lambda p: call(p, options=(3, "b")), r"options\[0\] is 3; .* 2"),
    "another text": (lambda p: call(p, options=(2, "c")), r"options\[1\] is 'c'; .* 'b'"),
    "a bool for a number": (lambda p: call(p, options=(2.0, "b")), r"options\[0\] is 2.0"),
    "a missing argument": (lambda p: p(torch.ones(3, 4)), "argument y is missing; .* x, y, options"),
    "an extra argument": (lambda p: call(p, more=1), "argument more was passed"),
    "too many arguments": (lambda p: p(1, 2, 3), "3 positional arguments were passed; .* x, y"),
    "an argument twice": (lambda p: p(torch.ones(3, 4), x=1), "x was passed twice"),
    "shared memory": (lambda p: call(p, (s := torch.ones(4, 4))[:3], {"b": s[0]}), "share memory"),
    "a gradient": (lambda p: call(p, torch.ones(3, 4, requires_grad=True)), "x requires a gradient; .* without gradients"),
    "a transform": (lambda p: torch.vmap(lambda x: call(p, x))(torch.ones(2, 3, 4)), "function transform"),
    "a conjugate": (lambda p: call(p, y={"b": torch.ones(4).to(torch.complex64).conj()}), r"y\['b'\] has the dtype"),
}


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_were_not_recorded_are_refused_in_words(name, path):
    function, words = CALLS[name]
    with pytest.raises(PackageError, match=words):
        function(fs.load(path))


def test_settings_of_torch_are_checked(path):
    loaded = fs.load(path)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PackageError, match="automatic casting is cpu torch.bfloat16; .* off"):
        call(loaded)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(PackageError, match="default dtype is torch.float64"):
            call(loaded, torch.ones(3, 4, dtype=torch.float32), {"b": torch.ones(4, dtype=torch.float32)})
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(call(loaded), torch.full((3, 4), 4.0))


def rewritten(path, new, **changes):
    """The same package with another manifest."""
    with archive.Archive(path) as old:
        members = {name: old.data(name) for name in old.manifest["members"]}
        archive.write(new, {**old.manifest, **changes}, members, [old.data(archive.WEIGHTS)])
    return new


def test_other_releases_are_refused(path, tmp_path):
    made = json.loads(json.dumps(fs.load(path).manifest["made_by"]))
    with pytest.raises(PackageError, match=r"made with torch 1.2.3; this is torch"):
        fs.load(rewritten(path, tmp_path / "a", made_by={**made, "torch": "1.2.3"}))
    with pytest.raises(PackageError, match=r"made with firesteel 9.0.0"):
        fs.load(rewritten(path, tmp_path / "b", made_by={**made, "firesteel": "9.0.0"}))
    with pytest.raises(PackageError, match="'firesteel package 99'"):
        fs.load(rewritten(path, tmp_path / "c", format="firesteel package 99"))
    assert torch.equal(call(fs.load(rewritten(path, tmp_path / "d", made_by={**made, "python": "3.99.0"}))), torch.full((3, 4), 4.0))


def test_host_functions_are_compiled_where_another_python_wrote_the_package(path, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(hosted, "compiled", lambda source, own=hosted.compiled: compiled.append(source) or own(source))
    assert torch.equal(call(fs.load(path)), torch.full((3, 4), 4.0)) and not compiled
    with archive.Archive(path) as old:
        members = {name: old.data(name) for name in old.manifest["members"]}
        without = {name: data for name, data in members.items() if not name.endswith(load.BYTE_CODE)}
        others = {name: b"none" + data[4:] if name.endswith(load.BYTE_CODE) else data for name, data in members.items()}
        for found in (without, others):
            archive.write(tmp_path / "p", old.manifest, found, [old.data(archive.WEIGHTS)])
            assert torch.equal(call(fs.load(tmp_path / "p")), torch.full((3, 4), 4.0)) and compiled.pop()


def test_a_processor_that_lacks_something_is_told_what(path, monkeypatch):
    monkeypatch.setattr(processors, "flags", lambda: frozenset({"sse4_1", "popcnt"}))
    with pytest.raises(PackageError, match="machine code for x86-64-v., which this processor does not run: it lacks .*cx16"):
        fs.load(path)


def test_another_mode_is_another_package(path):
    loaded = fs.load(path)
    with pytest.raises(PackageError, match="evaluation mode"):
        loaded.train()
    assert loaded.eval() is loaded


def test_a_program_is_called_by_several_threads(path):
    from concurrent.futures import ThreadPoolExecutor
    loaded = fs.load(path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: call(loaded, torch.full((3, 4), float(k))), range(40)))
    assert all(torch.equal(value, torch.full((3, 4), 2.0 * k + 2)) for k, value in enumerate(found))
