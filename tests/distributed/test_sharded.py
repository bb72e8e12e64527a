"""DTensor, tensor parallelism, FSDP and DDP with compiled modules: two ranks over gloo, against eager."""
import pathlib

import pytest
import torch
from ranks import run_ranks

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo")


@pytest.fixture(scope="module")
def results():
    return run_ranks(HERE / "programs_sharded.py")


@pytest.mark.parametrize("name", ["operators", "conversions", "gradients_of_dtensors", "tensor_parallel", "ddp_around_compiled"])
def test_one_graph(results, name):
    assert results[name] == {"equal": True, "graphs": 1, "breaks": []}


# What prepares the ranks runs between graphs, once before the module and once after it.
@pytest.mark.parametrize("name", ["fsdp1", "ddp", "ddp_static_graph", "ddp_unused_parameters", "ddp_communication_hook", "ddp_no_sync", "zero"])
def test_one_graph_between_what_prepares_the_ranks(results, name):
    result = results[name]
    assert result["equal"], result
    assert result["graphs"] == 1
    assert all("works on the world outside" in text for text in result["breaks"])


def test_fsdp2(results):
    """Two layers, and an addition after each."""
    result = results["fsdp2"]
    assert result["equal"], result
    assert result["graphs"] <= 4 and all("works on the world outside" in text for text in result["breaks"])
    assert results["fsdp2_by_layer"] == {"equal": True, "graphs": 2, "breaks": []}


def test_buckets_of_ddp_leave_while_the_backward_runs(results):
    """The first, of 1 MiB, before the second piece."""
    for events in results["ddp_buckets_leave_early"].values():
        assert events[:3] == ["piece", "bucket", "piece"] and events[-1] == "bucket", events
