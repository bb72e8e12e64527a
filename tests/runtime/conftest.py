"""Tests of the runtime build their kernels with the helpers of tests/codegen."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "codegen"))
