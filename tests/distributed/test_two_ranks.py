"""Distributed programs, compiled, against eager: two ranks over gloo, started once for all programs, since starting them takes longest."""
import pathlib

import pytest
import torch
from ranks import has_loopback, run_ranks

HERE = pathlib.Path(__file__).parent
ONE_GRAPH = {"equal": True, "graphs": 1, "breaks": []}
CAPTURED = ["all_reduce", "all_reduce_of_an_argument", "asynchronous", "futures", "work_leaves", "all_gather", "reduce_scatter", "reduce_scatter_of_parts", "all_to_all", "lists_of_all_to_all", "reduce", "gather_and_scatter", "coalesced", "send_and_receive", "exchange", "exchange_goes_on_outside", "batch_of_exchanges", "functions_with_groups", "differentiable_collectives", "broadcast_and_barrier", "functional", "functional_gradients", "gradients_past_a_collective", "unread_results_are_not_dropped", "operators", "relu", "conversions", "distributed_inside", "facts_of_dtensors", "gradients_of_dtensors", "local_results", "tensor_parallel", "loss_parallel", "ddp_around_compiled"]
OF_TWO_GRAPHS = ["inputs_that_arrive_late", "optimisers_of_dtensors"]       # with gradients and without; the first step makes the states
# What prepares the ranks runs between graphs, once before the module and once after it.
AROUND = ["fsdp1", "ddp", "ddp_static_graph", "ddp_unused_parameters", "ddp_communication_hook", "ddp_no_sync", "zero"]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="docs/distributed.md: tried with torch 2.13")
@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and has_loopback()), reason="needs gloo")
def test_programs(tmp_path):
    results = run_ranks(HERE / "programs_collectives.py", HERE / "programs_sharded.py", KERNELS=str(tmp_path))
    for check in (in_one_graph, around_modules, of_sizes_and_waits, buckets_leave_early, ranks_are_told):
        check(results)
    assert results["kernels_are_made_once"] == len(list((tmp_path / "common").rglob("*.o"))) > 0
    keys_are_those_of_all_ranks(tmp_path)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="docs/distributed.md: tried with torch 2.13")
@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and has_loopback()), reason="needs gloo")
def test_training():
    results = run_ranks(HERE / "programs_training.py")
    assert {name: result for name, result in results.items() if not result.get("equal")} == {}
    assert {name: result["graphs"] for name, result in results.items()} == {name: GRAPHS.get(name, 1) for name in results} and len(results) == 13
    assert all("works on the world outside" in text for result in results.values() for text in result["breaks"])
    assert not any("by eager" in result for result in results.values())


# a layer each, and the root before and after them; the last has two for the optimiser
GRAPHS = {**dict.fromkeys(("fsdp2_in_bf16", "fsdp2_keeps_parameters", "fsdp2_checkpointed", "fsdp2_on_two_dimensions", "fsdp2_accumulates",
                           "tensor_parallel_and_sharded"), 4), "fsdp2_clips_and_optimises": 6}


def test_programs_and_regions_are_kept(tmp_path):
    """By both ranks, in one folder; then one of them has lost what it kept."""
    for lost, found in ((False, {}), (False, KEPT), (True, {name: [0, 0] for name in KEPT})):
        results = run_ranks(HERE / "programs_kept.py", FIRESTEEL_VERIFY="0", FIRESTEEL_CACHE_DIR=str(tmp_path / "cache"), LOST="0" if lost else "")
        assert all(result.pop("equal", None) is True for result in results.values()), results
        assert {name: results[name]["found"] for name in found} == found, results
        assert found or {name: result["by both"] for name, result in results.items()} == MADE_BY_ANOTHER, results
        assert results["rank_as_a_constant"]["value"] == 5.0        # of rank 0: 1 * 2 + 2 * 2 - 1, and no other rank's


KEPT = {"all_reduce": [1, 1], "gradients": [1, 2], "rank_as_a_constant": [1, 1], "groups_and_sizes": [2, 2],
        "tensor_parallel": [1, 2], "own_rows": [1, 1], "rows_of_an_embedding": [1, 1], "sharded_modules": [7, 4]}        # regions and programs
# with an empty cache: programs that only one rank made, or that layers share
MADE_BY_ANOTHER = {"all_reduce": 1, "gradients": 2, "groups_and_sizes": 1, "tensor_parallel": 2, "sharded_modules": 4,
                   "rank_as_a_constant": 0, "own_rows": 0, "rows_of_an_embedding": 0}


def in_one_graph(results):
    assert {name: results[name] for name in CAPTURED if results[name] != ONE_GRAPH} == {}


def around_modules(results):
    assert {name: results[name] for name in (*AROUND, "fsdp2") if not results[name].get("equal")} == {}
    assert {results[name]["graphs"] for name in AROUND} == {1}
    assert all("works on the world outside" in text for name in (*AROUND, "fsdp2") for text in results[name]["breaks"])
    assert results["fsdp2"]["graphs"] == 2      # one a layer
    assert {name: results[name] for name in OF_TWO_GRAPHS if results[name] != {**ONE_GRAPH, "graphs": 2}} == {}
    assert [results["loss_parallel_with_a_break"][what] for what in ("equal", "graphs", "left")] == [True, 2, True]
    backwards = results["backwards_of_dtensors"]
    assert backwards == {"results": [{**ONE_GRAPH, "traced": 1}] * 5, "of another layout": {**ONE_GRAPH, "traced": 2}}
    assert results["sizes_of_dtensors"] == {**ONE_GRAPH, "graphs": 3}
    masked = results["masked_results"]
    assert masked["equal"] and {name: masked["by eager"].get(name) for name in ("masked_results", "aliasing_subclasses")} == {
        "masked_results": 1, "aliasing_subclasses": 1}
    assert results["fsdp2_by_layer"] == {"equal": True, "graphs": 2, "breaks": []}


def of_sizes_and_waits(results):
    assert results["sizes_that_change"] == {"equal": True}
    assert results["barrier_with_devices"] in ({"errors": 2, "same": True}, {"errors": 0, "same": False})
    assert results["waits_are_late"]["calls"] == ["_c10d_functional::all_reduce", "aten::mm", "_c10d_functional::wait_tensor"]


def buckets_leave_early(results):
    """The first, of 1 MiB, before the second piece of the backward."""
    for events in results["ddp_buckets_leave_early"].values():
        assert events[:3] == ["piece", "bucket", "piece"] and events[-1] == "bucket", events


def ranks_are_told(results):
    found = results["other_collectives_on_other_ranks"]
    assert found["type"] == "DifferentPrograms"
    assert "collective 2 of" in found["text"] and "all_reduce(float32[4, 3], sum) on rank 0 and broadcast(float32[4, 3], 0) on rank 1" in found["text"]
    found = results["other_sizes_on_other_ranks"]
    assert found["type"] == "DifferentPrograms" and "float32[1, 3]" in found["text"] and "float32[2, 3]" in found["text"]
    found = results["others_behind_a_break"]
    assert found["type"] == "DifferentPrograms" and "collective 1 of" in found["text"] and "after programs_collectives.py:" in found["text"]
    found = results["others_in_a_later_compilation"]
    assert found["type"] == "DifferentPrograms" and "collective 4 of" in found["text"] and "none on rank 0" in found["text"]
    assert results["other_work_on_other_ranks"] == {"equal": True}
    assert results["breaks_of_one_rank"] == {"equal": True, "said": []}


def keys_are_those_of_all_ranks(folder):
    """Each rank wrote kernels to a folder of its own; names of files are digests of keys."""
    ours, theirs = ({path.name for path in (folder / rank).rglob("*.o")} for rank in "01")
    assert ours and ours == theirs
