"""Every scalar operator as a GPU kernel, with the samples of tests/codegen/test_llvm_ops.py."""
from __future__ import annotations

import gpu_nests
import pytest
import test_llvm_ops as llvm_ops
from test_llvm_ops import (  # noqa: F401
    test_constants_of_every_kind,
    test_conversion,
    test_half_arithmetic_in_float,
    test_half_rounding_is_to_nearest_even,
    test_integer_division_by_zero_does_not_trap,
    test_integer_division_signs,
    test_many_arguments,
    test_operator,
    test_rounding_in_between_is_kept,
    test_special_pairs,
    test_special_values,
)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr(llvm_ops, "run", gpu_nests.run)
