"""fs.report: one file with everything, which a browser shows."""
import html
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import firesteel as fs
from firesteel.tools import report as tools_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.nn.functional.gelu(y) + x


@pytest.fixture
def report(tmp_path):
    """Of a model that was compiled and trained for two sizes, without anything kept for it."""
    fs.reset()
    model = fs.compile(Model())
    for n in (4, 5):
        model(torch.randn(n, 8)).sum().backward()
    yield fs.report(tmp_path / "report.html")
    fs.reset()


data_of = tools_report.read


def test_everything_is_in_it(report):
    data = data_of(report)
    first, second = (c for c in data["compilations"] if any(n["name"] == "gelu" for n in c["graphs"][0]["nodes"]))
    assert [g["title"] for g in first["graphs"]] == ["captured graph", "joint graph", "forward graph", "backward graph"]
    assert {k["phase"] for k in first["kernels"]} == {"forward", "backward"} and all("define" in k["text"] and "nest" in k["loops"] for k in first["kernels"])
    assert "size 5 in dimension 0; it was 4" in second["reason"]
    node = next(n for n in first["graphs"][0]["nodes"] if n["name"] == "gelu")
    assert node["places"][0]["file"] == __file__ and "gelu(y) + x" in data["sources"][__file__][str(node["places"][0]["line"])]
    assert all(plan["steps"] for plan in first["plans"]) and sum(b["bytes"] for plan in first["plans"] for b in plan["buffers"]) > 0
    assert any("is a float32 tensor (4, 8)" in word for word in first["words"]) and data["events"]


@pytest.mark.usefixtures("library_products")
def test_layers_are_written_once(tmp_path):
    """A model ten times as deep has the same kernels and lines: its report is not ten times as large."""
    sizes = []
    for depth in (2, 20):
        fs.reset()
        fs.compile(torch.nn.Sequential(*(Model() for _ in range(depth))))(torch.randn(4, 8)).sum().backward()
        sizes.append(fs.report(tmp_path / f"{depth}.html").stat().st_size)
    fs.reset()
    assert sizes[1] < 3 * sizes[0], sizes


def test_of_inference_and_of_that_run_alone(tmp_path):
    """No backward where gradients were off, whoever asks for the report; times of the stages that it shows, not of the first compilation too."""
    fs.reset()
    model = fs.compile(Model())
    with torch.no_grad():
        model(torch.randn(4, 8))
    before = fs.stage_times()
    data = data_of(fs.report(tmp_path / "report.html"))
    spent = sum(fs.stage_times().values()) - sum(before.values())
    (name, _), = [row for row in data["sections"] if row[0].startswith("time")]
    assert [g["title"] for c in data["compilations"] for g in c["graphs"]] == ["captured graph", "joint graph", "forward graph"] and "backward" not in data["headline"]
    assert name == f"time, {spent * 1e3:.0f} ms in all"
    fs.reset()


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    """The error is raised; no half of a report, and an older one stays."""
    old = tmp_path / "report.html"
    old.write_text("old")

    def write_half(path, text, **settings):
        path.touch()
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(pathlib.Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left on device: '.*report.html'"):
        fs.report(old)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "old"


def test_the_file_needs_nothing_else(report):
    text = report.read_text()
    assert not re.search(r'(src|href)\s*=\s*["\']', text.split('id="data"')[0] + text.split("</script>", 1)[1].replace("http://www.w3.org/2000/svg", ""))


def test_of_a_whole_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch, firesteel as fs\nfs.compile(lambda x: x.sin())(torch.ones(3))\n")
    folder = tmp_path / "reports"
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, env={**os.environ, "FIRESTEEL_REPORT": str(folder)})
    (path,) = folder.iterdir()
    assert done.returncode == 0 and str(path) in done.stderr
    assert [c["kernels"][0]["phase"] for c in data_of(path)["compilations"]] == ["forward"]


RANKS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp, firesteel as fs

def train(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    def step(x):
        dist.all_reduce(x)
        return x.sin() + 1
    fs.compile(step)(torch.ones(3))
    if rank:
        fs.compile(lambda x: (print(end=""), x * 2))(torch.ones(3))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), 2)
"""


def test_ranks_stand_side_by_side(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "reports"
    script.write_text(RANKS)
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "meeting")], text=True, capture_output=True, timeout=300,
                          env={**os.environ, "FIRESTEEL_REPORT": str(folder), "FIRESTEEL_CACHE_DIR": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and f"the report is {folder / 'ranks.html'}" in done.stderr, done.stderr
    assert sorted(path.name for path in folder.glob("*.html")) == ["ranks.html", "report-rank0.html", "report-rank1.html"]
    data = data_of(folder / "ranks.html")
    facts = [rank["facts"] for rank in data["ranks"]]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1] and [f["breaks"] for f in facts] == ["0", "1"]
    assert all(f["collectives"].startswith("all_reduce") for f in facts) and all(rank["events"] for rank in data["ranks"])
    assert {c["name"].split(":")[0] for c in data["compilations"]} == {"rank 0", "rank 1"}
    if BROWSER is not None:
        page = dom(folder / "ranks.html", tmp_path)
        assert page.count("<th>rank ") == 2 and '<tr class="differs"><td>breaks</td><td>0</td><td>1</td>' in page


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "-c", "import torch, firesteel as fs; fs.compile(lambda x: x.sin())(torch.ones(3))"], text=True,
                          capture_output=True, env={**os.environ, "FIRESTEEL_REPORT": str(tmp_path / "file")})
    assert done.returncode == 0 and done.stderr.startswith("firesteel: the report could not be written") and done.stderr.count("\n") == 1


def dom(path, folder, hash=""):
    """The page as a browser has it once it is loaded."""
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=5000",
                           "--dump-dom", f"file://{path}{hash}"], text=True, capture_output=True, timeout=120)
    return html.unescape(done.stdout)


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_a_browser_shows_the_code_of_a_node(report, tmp_path):
    place = next(n for n, c in enumerate(data_of(report)["compilations"]) if any(node["name"] == "gelu" for node in c["graphs"][0]["nodes"]))
    assert place == 0
    page = dom(report, tmp_path, "#open=1/gelu")
    aside = page.split("<aside")[1].split("</aside>")[0]
    assert "gelu = torch._C._nn.gelu(" in aside and "return torch.nn.functional.gelu(y) + x" in aside and __file__ in aside
    assert page.count('class="node') > 4 and "captured graph" in page.split("<main")[1].split("</main>")[0]
