"""Bytes saved for backward, peak memory and time of training steps, with and without checkpointed layers.

    python bench/memory.py [--programs gpt4,resnet] [--modes none,full,selective] [--impl eager,torch,firesteel,captured] [--device cuda] [--json OUT]

A row a program and mode.  `none` is the program as it is; in `full` each layer is one `torch.utils.checkpoint.checkpoint`; in `selective` its
policy keeps the results of matmuls, attention and convolutions.  Each implementation runs in a fresh process; for the time those of a row take
turns (reference.py).  `captured` is eager's forward with the backward captured by fs.compiled_autograd.  `limit=N` is the program as it is under fs.checkpoint_budget(bytes=N), which only firesteel has:

    python bench/memory.py --programs gpt4 --impl firesteel --modes none,limit=12e6,limit=6e6

The figures are the allocator's, the same for all: on the CPU the events that torch's profiler records for every allocation, on a GPU the
statistics of the caching allocator.  saved: bytes that live at the end of the forward and did not at its start, whoever holds them.  peak: the
most bytes that lived at once between the start of a step and its end, beyond those at its start (parameters, inputs).  Gradients are None then.
"""
from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import statistics
import sys
import tempfile

import reference

NAMES = ("gpt4", "gpt8", "gpt16", "resnet")
MODES = ("none", "full", "selective")
LIMIT = "limit="
AFTER_FORWARD = "the forward is done"


# ---------------------------------------------------------------- in the fresh process

def worker(name: str, mode: str, impl: str, device: str, sizes: dict) -> None:
    """One program, one way of checkpointing, one compiler: memory of one step, and the time of as many as are asked for."""
    import programs
    stem = name.rstrip("0123456789")
    layers = {"layers": int(name[len(stem):])} if name != stem else {}
    program = programs.PROGRAMS[stem](**layers, **sizes)
    checkpoint_layers(program.fn, mode)
    program, sync = reference.on_device(program, device)
    if impl != "captured":
        program.fn = compiler(mode, impl)(program.fn)
    with captured_backwards() if impl == "captured" else contextlib.nullcontext():
        step = reference.timed_step(lambda: programs.step(program.fn, program, train=True), sync)
        saved, peak = (measure_cpu if device == "cpu" else measure_cuda)(program)
        reference.serve({"saved": saved, "peak": peak}, step)


def compiler(mode: str, impl: str):
    if not mode.startswith(LIMIT):
        return reference.compiler(impl)
    import firesteel as fs
    return functools.partial(fs.checkpoint_budget, bytes=float(mode.removeprefix(LIMIT)))


def captured_backwards():
    """The forward is eager's, checkpoints included; its backward is captured from the engine."""
    import firesteel as fs
    return fs.compiled_autograd(fs.compile)


def checkpoint_layers(model, mode: str) -> None:
    """Puts a checkpoint around each layer of the GPT, and each residual block of the ResNet."""
    if mode == "none" or mode.startswith(LIMIT):
        return
    blocks = model.layers if hasattr(model, "layers") else model.stages
    for number, block in enumerate(blocks):
        blocks[number] = checkpointed(block, mode)


def checkpointed(block, mode: str):
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default, aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_efficient_attention.default]
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)} if mode == "selective" else {}

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False, **options)
    return Checkpointed()


def measure_cpu(program) -> tuple[int, int]:
    """(saved, peak) from the profiler's record of each allocation."""
    import torch
    for leaf in program.leaves:
        leaf.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = loss_of(program)
        with torch.profiler.record_function(AFTER_FORWARD):
            pass
        loss.backward()
    events = sorted((e for e in profile.profiler.kineto_results.events() if e.name() in ("[memory]", AFTER_FORWARD)), key=lambda e: e.start_ns())
    live = peak = saved = 0
    for event in events:
        if event.name() == AFTER_FORWARD:
            saved = live
        else:
            live += event.nbytes()
            peak = max(peak, live)
    return saved, peak


def measure_cuda(program) -> tuple[int, int]:
    import torch
    for leaf in program.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(program)
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return saved, torch.cuda.max_memory_allocated() - before


def loss_of(program):
    result = program.fn(*program.inputs)
    return result if result.ndim == 0 else result.sin().mean()


# ---------------------------------------------------------------- the driver

def measure(name: str, mode: str, cache: str, options) -> dict:
    """One row: medians over --repeat processes of each implementation, which take turns; memory does not vary."""
    found: dict[str, list[dict]] = {impl: [] for impl in options.impl.split(",")}
    for _ in range(options.repeat):
        lives = {}
        for impl in found:
            print(f"  {name} {mode} {impl} ...", file=sys.stderr, flush=True)
            lives[impl] = reference.Live(__file__, [name, mode, impl, options.device, options.sizes], cache)
        times = reference.take_turns(lives, options.seconds)
        for impl, live in lives.items():
            found[impl].append(live.close() | ({"time": times[impl]} if impl in times else {}))
    return {"program": name, "mode": mode, **{impl: summary(rows) for impl, rows in found.items()}}


def summary(rows: list[dict]) -> dict:
    broken = [row for row in rows if "error" in row]
    return broken[0] if broken else {key: statistics.median(row[key] for row in rows) for key in rows[0]}


COLUMNS = (("saved", 1e6, "MB"), ("peak", 1e6, "MB"), ("time", 1e-3, "ms"))


def show(rows: list[dict], impls: list[str]) -> str:
    heads = [f"{key} ({unit}): {' / '.join(impls)}" for key, _, unit in COLUMNS]
    lines = [f"| program | {' | '.join(heads)} | above the best |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [" / ".join(figure(row.get(impl, {}), key, scale) for impl in impls) for key, scale, _ in COLUMNS]
        lines.append(f"| {row['program']} {row['mode']} | {' | '.join(cells)} | {', '.join(above_the_best(row)) or '-'} |")
        lines += [f"|   error: {impl}: {row[impl]['error']} |" for impl in impls if "error" in row.get(impl, {})]
    return "\n".join(lines)


def figure(row: dict, key: str, scale: float) -> str:
    return f"{row[key] / scale:.2f}" if key in row else "-"


def above_the_best(row: dict) -> list[str]:
    """The figures in which firesteel is not at most the best of the others."""
    ours, others = row.get("firesteel", {}), [row[impl] for impl in reference.IMPLS if impl != "firesteel" and "saved" in row.get(impl, {})]
    return [f"{key} x{ours[key] / best:.2f}" for key, _, _ in COLUMNS if key in ours and others and ours[key] > (best := min(o[key] for o in others))]


def main() -> int:
    options = reference.arguments(__doc__, NAMES, MODES, 1, "gptN has N layers").parse_args()
    if options.worker:
        worker(*json.loads(options.worker))
        return 0
    impls, rows = options.impl.split(","), []
    with tempfile.TemporaryDirectory() as cache:
        for name in options.programs.split(","):
            for mode in options.modes.split(","):
                rows.append(measure(name, mode, cache, options))
                print(show(rows[-1:], impls).splitlines()[2], file=sys.stderr, flush=True)
    print(show(rows, impls))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
