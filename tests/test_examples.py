"""The examples do what they say; the twin of docs/ too."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FIRESTEEL_CACHE_DIR": "", "OMP_NUM_THREADS": "1"}


def run(*argv, cwd):
    done = subprocess.run([sys.executable, *map(str, argv)], text=True, capture_output=True, env=ENVIRONMENT, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_training_loop_learns_and_is_taken_up_again(tmp_path):
    pytest.importorskip("tqdm")
    first = run(ROOT / "examples" / "train.py", "--epochs", 2, "--path", tmp_path / "model.pt", cwd=tmp_path)
    again = run(ROOT / "examples" / "train.py", "--epochs", 1, "--path", tmp_path / "model.pt", cwd=tmp_path)
    assert int(first.split("%")[0]) > 75 and int(again.split("%")[0]) > 75


def test_two_processes_train_together(tmp_path):
    out = run(ROOT / "examples" / "ddp.py", cwd=tmp_path)
    assert "the ranks have equal parameters" in out and out.count("step ") == 5


def test_the_notebook_runs(tmp_path):
    """Its cells as a program; the value of the second has a page for a notebook."""
    book = json.loads((ROOT / "examples" / "explain.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join([cells[0], f"assert '<details' in {cells[1]}._repr_html_()", *cells[2:]]))
    assert run(script, cwd=tmp_path).startswith("equal to eager")


def test_the_twin_runs(tmp_path):
    out = run(ROOT / "docs" / "twin.py", cwd=tmp_path)
    assert "a branch depends on the data of a tensor" in out and "mul_7 = mul(add_" in out


def test_every_page_is_in_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in text] == []
