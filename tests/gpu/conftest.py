"""The nests and operators of tests/codegen/ are those of the GPU tests too."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "codegen"))
