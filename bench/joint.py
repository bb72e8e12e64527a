"""What ahead-of-time autograd costs: joint trace, functionalisation, cleaning and partition of the reference GPT, by the number of layers.

    python bench/joint.py [--layers 1,2,4,8] [--decompose] [--repeat 5] [--profile]

Processor seconds, the least of several runs; graph compilers do nothing.  The time for an operator must not grow with their number.  With
--profile: where the time goes, by function.
"""
from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import programs
import torch

import firesteel as fs
from firesteel.autograd.joint import trace_program
from firesteel.autograd.partition import min_cut_partition
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.passes import clean
from firesteel.graph.trace import interpret

STAGES = ("trace", "clean", "partition")


def captured(layers: int) -> tuple[torch.fx.GraphModule, list]:
    """The graph that capture hands over, with its inputs."""
    program, found = programs.PROGRAMS["gpt"](layers=layers), []

    def keep(gm, inputs):
        found.append((gm, inputs))
        return gm.forward
    fs.reset()
    fs.compile(program.fn, backend=keep, fullgraph=True)(*program.inputs)
    return found[0]


def once(gm: torch.fx.GraphModule, inputs: list, decompositions: dict | None) -> tuple[list[float], int]:
    """(seconds by stage, operators of the joint graph)"""
    times = [time.process_time()]
    joint = trace_program(lambda *args: interpret(gm, *args), inputs, decompositions=decompositions)
    times.append(time.process_time())
    clean(joint.gm)
    times.append(time.process_time())
    min_cut_partition(joint.gm, num_fwd_outputs=joint.num_fwd_outputs)
    times.append(time.process_time())
    return [b - a for a, b in zip(times, times[1:])], sum(node.op == "call_function" for node in joint.gm.graph.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", default="1,2,4,8")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--decompose", action="store_true", help="with the decompositions of the native backend")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    decompositions = core_decompositions() if options.decompose else None
    print(f"layers operators {' '.join(f'{stage:>10}' for stage in STAGES)}      total  us an operator")
    for layers in map(int, options.layers.split(",")):
        graph = captured(layers)
        runs = [once(*graph, decompositions) for _ in range(options.repeat)]
        times, count = min(runs, key=lambda run: sum(run[0]))
        print(f"{layers:6} {count:9} {' '.join(f'{t * 1e3:7.1f} ms' for t in times)} {sum(times) * 1e3:7.1f} ms {sum(times) / count * 1e6:15.0f}")
    if options.profile:
        with cProfile.Profile() as profile:
            once(*graph, decompositions)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
