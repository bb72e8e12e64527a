"""firesteel bisect: the stage and the fusion that make a script fail."""
import textwrap

import pytest

from firesteel import cli

START = "import sys, torch, firesteel as fs\n"
BREAK_FUSION = """
from firesteel.loops import group
unite = group.unite
def wrong(first, second, match):        # a group of exp and a sum is not right
    global bad
    bad = bad or "exp" in str(first.origin + second.origin)
    return unite(first, second, match)
bad = False
group.unite = wrong
"""
SCRIPTS = {
    "without the compiler": "sys.exit(3)",
    "capture": "fs.compile(lambda x: x + 1)(torch.ones(2))\nsys.exit(bool(fs.counters['frames']['ok']))",
    "autograd ahead": "fs.compile(lambda x: x + 1)(torch.ones(2))\nsys.exit(bool(fs.counters['aot']['ok']))",
    "code generation": "fs.compile(lambda x: x + 1)(torch.ones(2))\nassert not fs.counters['native']['kernels'], 'a kernel'",
    "fusion": BREAK_FUSION + "fs.compile(lambda x: (x.cos().sum(1), x.exp().sum(1)))(torch.ones(64, 64))\nassert not bad",
}


@pytest.mark.parametrize("part", SCRIPTS)
def test_the_part_is_named(part, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FIRESTEEL_CACHE_DIR", "")
    script = tmp_path / "script.py"
    script.write_text(START + textwrap.dedent(SCRIPTS[part]))
    assert cli.main(["bisect", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = next(line for line in lines if line.startswith("the first part"))
    assert part in told and sum(line.startswith("fails") for line in lines) == 1
    if part == "fusion":
        assert "the first fusion that makes it fail is number" in lines[-2] and "exp" in lines[-1]


def test_a_script_that_passes(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['a', '--b']\n")
    assert cli.main(["bisect", str(script), "a", "--b"]) == 1
    assert capsys.readouterr().out.endswith("the script passes in every way\n")
    assert cli.main(["bisect", str(tmp_path / "missing.py")]) == 2
