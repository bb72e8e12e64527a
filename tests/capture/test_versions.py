"""The normalised instructions: every version's code becomes them, and they mean what concrete.py says."""
import pathlib
import sys

import pytest

sys.path.insert(0, __file__.rsplit("/", 1)[0])

import bytecode_checks  # noqa: E402
import elsewhere  # noqa: E402

from firesteel.capture import code as codes  # noqa: E402
from firesteel.capture import versions  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def names(function):
    return [step.opname for step in codes.program(function.__code__)]


def test_method_call_is_attribute_and_null():
    steps = names(lambda x: x.relu())
    at = steps.index("LOAD_ATTR")
    assert steps[at + 1] == "PUSH_NULL" and "CALL" in steps and "PRECALL" not in steps and "LOAD_METHOD" not in steps


def test_keyword_names_are_on_the_call():
    steps = codes.program((lambda f, x: f(x, dim=1, keepdim=True)).__code__)
    call = next(step for step in steps if step.opname == "CALL")
    assert call.arg == 3 and call.kwnames == ("dim", "keepdim")


def test_exhausted_loop_lands_behind_it():
    def f(xs):
        for _ in xs:
            pass
        return 5
    steps = codes.program(f.__code__)
    loop = next(step for step in steps if step.opname == "FOR_ITER")
    assert loop.target.opname == "LOAD_CONST" and loop.target.argval == 5


def test_and_or_are_copy_jump_pop():
    steps = names(lambda a, b: a and b)
    at = steps.index("COPY")
    assert steps[at:at + 3] == ["COPY", "POP_JUMP_IF_FALSE", "POP_TOP"]


def test_run_indices_cover_the_real_instructions():
    code = bytecode_checks.roundtrip.__code__
    covered = {n for step in codes.program(code) for n in range(step.raw, step.raw_next)}
    assert covered == set(range(len(codes.decode(code))))


def test_missing_row_is_an_import_error(monkeypatch):
    rules = dict(versions.RULES)
    del rules["LOAD_CONST"]
    monkeypatch.setattr(versions, "RULES", rules)
    with pytest.raises(ImportError, match="LOAD_CONST"):
        versions.check()


def test_unknown_python_is_an_import_error(monkeypatch):
    monkeypatch.setattr(versions, "PYTHON", (3, 99))
    with pytest.raises(ImportError, match="3.99"):
        versions.check()


def test_the_page_lists_the_table():
    page = (ROOT / "docs" / "capture.md").read_text(encoding="utf-8")
    assert versions.describe() in page, "docs/capture.md is behind versions.NORMAL: put versions.describe() into it"


def test_versions_are_compared_nowhere_else():
    users = [path for path in (ROOT / "src").rglob("*.py") if "sys.version_info" in path.read_text(encoding="utf-8")]
    assert [path.name for path in users] == ["versions.py"]


def test_standard_library_is_normalised():
    wrong, count = bytecode_checks.normalised(1500)
    assert count > 10000 and wrong == 0


def test_normalised_instructions_mean_what_python_does():
    wrong, count = bytecode_checks.executed(0)
    assert count > 40 and wrong == 0


@pytest.mark.parametrize("version", elsewhere.OTHERS)
@pytest.mark.parametrize("check", ["normalised", "executed"])
def test_elsewhere(version, check):
    elsewhere.run_check(version, check, 1500)
