"""The examples do what they say; the twin of docs/ too."""
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request

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


def test_a_package_is_served(tmp_path):
    """Packed by one process, answered by another; a wrong size is an answer too, and the next one is right."""
    run(ROOT / "examples" / "serve.py", "pack", "model.fsp", cwd=tmp_path)
    serving = subprocess.Popen([sys.executable, str(ROOT / "examples" / "serve.py"), "serve", "model.fsp", "--port", "0"], text=True, stdout=subprocess.PIPE,
                               env=ENVIRONMENT, cwd=tmp_path)
    try:
        address = serving.stdout.readline().strip()

        def ask(rows):
            try:
                with urllib.request.urlopen(urllib.request.Request(address, json.dumps(rows).encode()), timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
        assert [ask([[0.1] * 5])[0], ask(["x"])[0]] == [400, 400]
        for count in (1, 7):
            status, text = ask([[0.1, 0.2, 0.3, 0.4]] * count)
            assert status == 200 and [round(sum(row), 4) for row in json.loads(text)] == [1.0] * count
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()


def test_the_trainer_of_transformers_learns(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    first, last = re.findall(r"loss (\S+) to (\S+), 1 graphs, 0 recompiles", run(ROOT / "examples" / "trainer.py", cwd=tmp_path))[0]
    assert float(last) < 0.7 * float(first)


def test_lightning_learns(tmp_path):
    pytest.importorskip("lightning")
    assert int(run(ROOT / "examples" / "lightning_rings.py", cwd=tmp_path).splitlines()[-1].split("%")[0]) > 85


def test_every_example_is_told_of():
    told = "".join((ROOT / page).read_text() for page in ("README.md", "docs/guide.md", "Makefile"))
    assert [path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb") and f"examples/{path.name}" not in told] == []


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
