"""docs/README.md walks through one compilation: each function that it names is there, and they are called in that order."""
import pathlib
import re
import sys

import torch

import firesteel as fs

ROOT = pathlib.Path(__file__).parent.parent
SRC = pathlib.Path(fs.__file__).parent


def walk():
    """(file, function) in the order of the page."""
    text = (ROOT / "docs" / "README.md").read_text().split("## A walk")[1].split("```")[1]
    return [tuple(line.split()[:2]) for line in text.splitlines() if line and not line.startswith("#")]


def calls(run):
    """(file, function) of every call of a function of ours."""
    found = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(SRC)):
            found.append((str(pathlib.Path(frame.f_code.co_filename).relative_to(SRC)), frame.f_code.co_qualname))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def program():
    fs.reset()
    out = fs.compile(lambda a, b: (a + b).relu())(torch.randn(3, requires_grad=True), torch.randn(3))
    out.sum().backward()


def test_the_walk_is_the_order_of_calls():
    made = calls(program)
    at = 0
    for named in walk():
        assert named in made, f"{named} is not called"
        assert named in made[at:], f"{named} is called before the function named before it"
        at = made.index(named, at) + 1


def test_the_walk_enters_each_package_once():
    """From the call to the host function it goes from package to package, and back only to hand over what was made."""
    text = (ROOT / "docs" / "README.md").read_text().split("## A walk")[1].split("# back to the caller")[0]
    headings = re.findall(r"^# (\w+)(?: and \w+)?: ", text, flags=re.MULTILINE)
    assert headings == ["capture", "autograd", "loops", "codegen"]
    folders = [line.split("/")[0] for line in text.splitlines() if re.match(r"[a-z]+/", line)]
    main = [folder for folder in folders if folder != "graph"]      # what abstract tensors are, for capture and autograd alike
    assert [folder for k, folder in enumerate(main) if k == 0 or main[k - 1] != folder] == ["capture", "autograd", "loops", "codegen", "runtime", "codegen"]
