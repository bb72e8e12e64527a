"""Loops, LLVM, Triton and guard text of a few programs are those under tests/goldens; `make goldens` writes them again."""
import golden_texts
import pytest

import firesteel as fs


@pytest.mark.parametrize("name", golden_texts.CASES)
def test_generated_text_is_the_recorded_one(name):
    with fs.config.patch(verify=False):
        for file, text in golden_texts.texts(name).items():
            assert text == (golden_texts.FOLDER / file).read_text(), f"{file} differs: `make goldens`, then read `git diff tests/goldens`"


def test_every_file_belongs_to_a_program():
    assert {path.stem for path in golden_texts.FOLDER.iterdir()} == set(golden_texts.CASES)
