"""Collectives are nodes of the graph: two ranks over gloo, against eager."""
import pathlib

import pytest
import torch
from ranks import run_ranks

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo")


@pytest.fixture(scope="module")
def results():
    return run_ranks(HERE / "programs_collectives.py")


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_of_an_argument", "asynchronous", "work_leaves", "all_gather", "reduce_scatter", "all_to_all",
                                  "broadcast_and_barrier", "functional", "gradients_past_a_collective", "unread_results_are_not_dropped"])
def test_one_graph_with_the_values_of_eager(results, name):
    assert results[name] == {"equal": True, "graphs": 1, "breaks": []}


def test_functional_gradients(results):
    assert results["functional_gradients"] == {"equal": True, "graphs": 1, "breaks": []}


def test_sizes_that_change(results):
    assert results["sizes_that_change"] == {"equal": True}


def test_waits_are_late(results):
    calls = results["waits_are_late"]["calls"]
    assert calls == ["_c10d_functional::all_reduce", "aten::mm", "_c10d_functional::wait_tensor"]


def test_ranks_with_other_programs_are_told(results):
    found = results["other_collectives_on_other_ranks"]
    assert found["type"] == "DifferentPrograms"
    assert "collective 2 of" in found["text"] and "all_reduce(float32[4, 3], sum) on rank 0 and broadcast(float32[4, 3], 0) on rank 1" in found["text"]
    found = results["other_sizes_on_other_ranks"]
    assert found["type"] == "DifferentPrograms" and "float32[1, 3]" in found["text"] and "float32[2, 3]" in found["text"]
    assert results["other_work_on_other_ranks"] == {"equal": True}


def test_kernels_have_the_same_keys_on_all_ranks(tmp_path):
    """Each rank writes to a folder of its own; names of files are digests of keys."""
    assert run_ranks(HERE / "programs_cached.py", FIRESTEEL_CACHE_DIR=str(tmp_path))["trained"] == {"kernels": True}
    ours, theirs = ({path.name for path in (tmp_path / rank).rglob("*.o")} for rank in "01")
    assert ours and ours == theirs
