"""What the pages say works: every Python block of the README and of docs/ runs, and what they point at is there."""
import ast
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import torch

import firesteel as fs
from firesteel.artifacts import LOG_NAMES, breaks
from firesteel.cli import COMMANDS
from firesteel.config import KNOBS, OTHER_VARIABLES
from firesteel.errors import BREAKS

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page):
    """Python blocks of a page, which share their names, but not those of errors.md behind a comment; (line, text)."""
    text = page.read_text()
    return [(text[:found.start(1)].count("\n") + 1, found[1]) for found in re.finditer(r"(?<!-->\n\n)^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path):
    """In a process of their own, in order; a traceback names the page's line."""
    lines = [""] * page.read_text().count("\n")
    for start, text in blocks(page):
        lines[start - 1:start - 1 + text.count("\n")] = text.splitlines()
    script = tmp_path / "page.py"       # a file: capture reads source lines
    script.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "FIRESTEEL_CACHE_DIR": "", "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr.replace(str(script), page.name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_pages_name_are_there(page):
    named = re.findall(r"`((?:docs|tests|bench|examples|src)/[\w./-]*\.\w+)`", page.read_text())
    named += re.findall(r"python ((?:docs|tests|bench|examples)/[\w./-]*\.py)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_site_reads_every_fence(page):
    """Its Markdown knows no words behind the language: it would show the text as prose, and prose as code."""
    fences = [line.strip() for line in page.read_text().splitlines() if line.strip().startswith("```")]
    assert len(fences) % 2 == 0 and all(re.fullmatch(r"```\w*", fence) for fence in fences) and set(fences[1::2]) <= {"```"}


def test_what_was_measured_has_its_command():
    """Each section with a table begins with what printed it."""
    page = (ROOT / "docs" / "measured.md").read_text()
    sections = page.split("\n## ")[1:]
    assert [text.splitlines()[0] for text in sections if "|---" in text and not re.search(r"`[\w= ]*python bench/", text.split("|---")[0])] == []


def test_pages_link_to_each_other():
    """A page that is named is a link: the site is read by clicking."""
    names = "|".join(page.stem for page in (ROOT / "docs").glob("*.md"))
    assert {page.name: found for page in (ROOT / "docs").glob("*.md")
            if (found := [name for name in re.findall(rf"(?<!\[)`((?:docs/)?(?:{names})\.md)`", page.read_text())
                          if not name.endswith(("README.md", page.name))])} == {}


def test_the_guide_names_every_command_and_log():
    page = (ROOT / "docs" / "guide.md").read_text()
    rows = page.split("## Commands, settings and logs")[1].split("\n## ")[0]
    assert {name.split()[0] for name in re.findall(r"^\| `firesteel (\w+)", rows, re.MULTILINE)} == set(COMMANDS)
    told = [name for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", rows, re.MULTILINE) for name in re.findall(r"\w+", row)]
    assert sorted(told) == sorted(LOG_NAMES)


def test_variables_that_pages_name_are_read():
    named = {name for page in PAGES for name in re.findall(r"\bFIRESTEEL_[A-Z_]+\b", page.read_text())}
    assert named - set(OTHER_VARIABLES) - {f"FIRESTEEL_{name.upper()}" for name in KNOBS} == {"FIRESTEEL_FUZZ"}      # which tests read


# ---------------------------------------------------------------- docs/errors.md

EXAMPLES = re.findall(r"^<!-- (error|break)=(\w+) -->\n\n```python\n(.*?)^```$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE | re.DOTALL)
RAISED_BY_SEVERAL = {"DifferentPrograms", "InternalError"}        # by two processes, by a bug: tests/distributed, tests/tools/test_debug.py


def executed(text, tmp_path, name):
    """The names of a block; from a file, so that lines are known."""
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    names = {"fs": fs, "torch": torch, "__name__": name}
    exec(compile(text, str(file), "exec"), names)
    return names


@pytest.mark.parametrize("sort, kind, text", EXAMPLES, ids=[kind for _, kind, _ in EXAMPLES])
def test_the_examples_of_errors_do_that(sort, kind, text, tmp_path, capsys, monkeypatch):
    fs.reset()
    monkeypatch.chdir(tmp_path)
    if sort == "error":
        with pytest.raises(getattr(fs.errors, kind)):
            executed(text, tmp_path, kind)
        return
    f = executed(text, tmp_path, kind)["f"]
    fs.compile(f, backend="eager")(torch.ones(3))
    record = breaks[0]
    assert record.hint == BREAKS[kind].hint, record
    assert f"{kind}.py" in record.location


def test_every_error_and_every_break_has_a_section():
    classes = {name for name, cls in vars(fs.errors).items() if isinstance(cls, type) and issubclass(cls, fs.errors.FiresteelError)}
    assert {kind for sort, kind, _ in EXAMPLES if sort == "break"} == set(BREAKS)
    assert {kind for sort, kind, _ in EXAMPLES if sort == "error"} | RAISED_BY_SEVERAL == classes - {"FiresteelError"}
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert set(headings) == set(BREAKS) | classes - {"FiresteelError"}


def test_the_sections_say_what_the_messages_do():
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [kind for kind, row in BREAKS.items() if row.hint not in page] == []


# ---------------------------------------------------------------- its warnings

WARNINGS = re.findall(r"^`([^`]+)`: ([^#]*)", (ROOT / "docs" / "errors.md").read_text().split("## Warnings")[1], re.MULTILINE)
SHOWN = {message: found[1] for message, text in WARNINGS if (found := re.search(r"^<!-- warning -->\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))}


def pieces(message, hole):
    return [piece for piece in re.split(hole, message) if len(piece.strip()) > 1]


@pytest.mark.parametrize("message", SHOWN)
def test_the_examples_of_warnings_do_that(message, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"import torch\nimport firesteel as fs\n{SHOWN[message]}")
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "FIRESTEEL_CACHE_DIR": "", "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0 and re.search(".*".join(map(re.escape, pieces(message, r"\.\.\."))), done.stderr), done.stderr


def said():
    """The texts that src/ logs or says as warnings."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("warning", "warn", "say_once") and node.args:
                first = node.args[0]
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                yield [piece for part in parts if isinstance(part, ast.Constant) for piece in pieces(part.value, r"%\w")]


def test_every_warning_has_a_section():
    eagers = ["'saved_variables' is deprecated"]
    names = ["option", "mode", "stance", "setting"]         # kinds of what has no effect
    texts = [text for text in said() if text and text[0].strip() not in names and not text[0].startswith(tuple(eagers))]
    assert len(texts) >= 9
    assert [text for text in texts if not any(all(piece.strip() in message for piece in text) for message, _ in WARNINGS)] == []


def test_the_readme_fits_on_a_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 64


def test_the_version_stands_in_one_more_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fs.__version__ and f"## {fs.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "src" / "firesteel" / "py.typed").exists()


def test_the_diffs_of_how_to_add_stand_in_the_files():
    page = (ROOT / "docs" / "adding.md").read_text()
    missing, file, places = [], "", 0
    for line in "\n".join(re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines():
        if line.startswith("--- a/"):
            file, places = (ROOT / line.removeprefix("--- a/")).read_text(), places + 1
        elif line.removeprefix("+").split("  #")[0].strip() not in file:
            missing.append(line)
    assert missing == [] and places > 12
    assert page.count("```diff") >= page.count("\n## ") - 1, "every section but that of settings has one"
