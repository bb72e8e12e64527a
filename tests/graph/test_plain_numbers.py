"""What stands in for torch's module of symbolic sizes while a meta kernel runs on plain numbers."""
import subprocess
import sys

import pytest
from torch.fx.experimental import symbolic_shapes as real

from firesteel.graph.plain_numbers import ANSWERS, NAME, STAND_IN, plain_numbers

SAMPLES = {"guarding_hint_or_throw": [(3,), (True,)], "has_guarding_hint": [(3,), (2.5,)], "has_static_value": [(3,)], "is_nested_int": [(3,)], "free_unbacked_symbols": [(3,)],
           "sym_and": [(True,), (True, False), (True, True, True)], "sym_or": [(False,), (False, True)], "sym_eq": [(3, 3), ((1, 2), [1, 2]), ([1], [1, 2]), (1, 2)]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ANSWERS)
def test_it_answers_as_torch_does(name):
    if not hasattr(real, name):
        pytest.skip("this torch has no such question")
    for args in SAMPLES.get(name, [(True,), (False,)]):
        found, expected = getattr(STAND_IN, name)(*args), getattr(real, name)(*args)
        assert found == expected and (type(found) is type(expected) or not expected)


def test_what_is_not_plain_is_asked_of_torchs_own():
    with pytest.raises(AssertionError, match="Expected bool"):
        STAND_IN.expect_true("yes")
    assert STAND_IN.ShapeEnv is real.ShapeEnv
    with plain_numbers():
        assert sys.modules[NAME] is real        # it is loaded already


FRESH = """
import sys, torch
from firesteel.graph.plain_numbers import NAME, STAND_IN, plain_numbers
with plain_numbers():
    assert sys.modules[NAME] is STAND_IN
    torch._check(True)
    torch.linalg.cross(torch.empty(4, 3, device="meta"), torch.empty(4, 3, device="meta"))
    assert sys.modules[NAME] is STAND_IN and "sympy" not in sys.modules
assert NAME not in sys.modules
with plain_numbers():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
    assert sys.modules[NAME] is not STAND_IN and ShapeEnv.__module__ == NAME
import torch.fx.experimental.symbolic_shapes as again
assert again is sys.modules[NAME] and again.ShapeEnv is ShapeEnv and again.guard_or_false is not guard_or_false or guard_or_false(True)
"""


def test_nothing_of_it_stays():
    subprocess.run([sys.executable, "-c", FRESH], check=True)
