"""Times the reference programs with eager, torch.compile and firesteel, each in fresh processes.

    python bench/reference.py [--programs gpt,mlp] [--impl eager,torch,firesteel] [--json OUT] [--repeat 3]

A row a program and mode: the first call with an empty cache (cold), the first call of a second process with that cache
(warm), the steady state (median), graphs, kernels, fall-backs, stage times, peak memory.  Absolute times mean little on a
noisy machine: read the ratios of one run.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("pointwise", "mlp", "resnet", "gpt", "lstm")
MORE = ("unet", "dlrm", "gru", "pairwise", "mobilenet", "convnext", "bert", "vit")
IMPLS = ("eager", "torch", "firesteel")


# ---------------------------------------------------------------- in the fresh process

def worker(name: str, train: bool, impl: str, device: str, seconds: float, sizes: dict) -> dict:
    """One program, one compiler: first call and steady state."""
    import more_programs
    import programs
    program = (programs.PROGRAMS | more_programs.MORE)[name](**sizes)
    program, sync = on_device(program, device)
    import_start = time.perf_counter()
    fn = compiler(impl)(program.fn)
    imported = time.perf_counter() - import_start
    start = time.perf_counter()
    programs.step(fn, program, train)
    sync()
    first = time.perf_counter() - start
    for _ in range(3):
        programs.step(fn, program, train)
    sync()
    row = {"first": first, "import": imported, "steady": steady(lambda: programs.step(fn, program, train), seconds, sync),
           "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if impl == "firesteel":
        row.update(_firesteel_facts())
    return row


def steady(step, seconds: float, sync) -> float:
    """The median time of a step."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < deadline and len(times) < 2000:
        start = time.perf_counter()
        step()
        sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compiler(impl: str):
    import torch
    if impl == "eager":
        return lambda fn: fn
    if impl == "torch":
        return torch.compile
    import firesteel as fs
    return fs.compile


def on_device(program, device: str):
    """The program on a device, and what waits until that has done its work."""
    import torch
    if device == "cpu":
        return program, lambda: None
    if isinstance(program.fn, torch.nn.Module):
        program.fn.to(device)
        program.leaves = list(program.fn.parameters())
    inputs = tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in program.inputs)
    if not isinstance(program.fn, torch.nn.Module):
        program.leaves = list(inputs)
    program.inputs = inputs
    return program, torch.cuda.synchronize


def _firesteel_facts() -> dict:
    import firesteel as fs
    native = fs.counters["native"]
    return {"graphs": fs.counters["stats"]["unique_graphs"], "kernels": native["kernels"], "fallbacks": native["fallbacks"],
            "library_calls": native["library_calls"], "stages": {k: round(v, 4) for k, v in fs.stage_times().items()}}


# ---------------------------------------------------------------- the driver

def fresh(script: str, arguments: list, cache: str) -> dict:
    """The worker of a script in a new process; its caches are in `cache`."""
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "torch"), FIRESTEEL_CACHE_DIR=os.path.join(cache, "firesteel"),
               TRITON_CACHE_DIR=os.path.join(cache, "triton"))
    done = subprocess.run([sys.executable, script, "--worker", json.dumps(arguments)], env=env, text=True, capture_output=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr else f"status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, train: bool, impl: str, options) -> dict:
    """Cold and warm first call and steady state; medians over --repeat pairs of processes."""
    pairs = []
    for _ in range(options.repeat if impl != "torch" else 1):
        with tempfile.TemporaryDirectory() as cache:
            print(f"  {name} {'train' if train else 'infer'} {impl} ...", file=sys.stderr, flush=True)
            arguments = [name, train, impl, options.device, options.seconds, options.sizes]
            cold = fresh(__file__, arguments, cache)
            if "error" in cold:
                return cold
            warm = fresh(__file__, arguments, cache) if impl != "eager" else cold
            if "error" in warm:
                return warm
            pairs.append((cold, warm))
    row = dict(pairs[0][0])
    row["cold"] = statistics.median(c["first"] for c, _ in pairs)
    row["warm"] = statistics.median(w["first"] for _, w in pairs)
    row["steady"] = statistics.median([r["steady"] for pair in pairs for r in pair])
    return row


def show(rows: list[dict]) -> str:
    lines = ["| program | cold: torch.compile / firesteel | warm: torch.compile / firesteel | steady: eager / torch.compile / firesteel "
             "| graphs | kernels | library calls | fall-backs | peak MB: eager / firesteel |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        e, t, f = (row.get(i, {}) for i in IMPLS)
        lines.append(f"| {row['program']} {row['mode']} | {_pair(t, f, 'cold', 1, 's')} | {_pair(t, f, 'warm', 1, 's')} | "
                     f"{_ms(e)} / {_ms(t)} / {_ms(f)} | {f.get('graphs', '-')} | {f.get('kernels', '-')} | {f.get('library_calls', '-')} | "
                     f"{f.get('fallbacks', '-')} | {e.get('peak_mb', 0):.0f} / {f.get('peak_mb', 0):.0f} |")
        lines += [f"|   error: {impl}: {row[impl]['error']} |" for impl in IMPLS if "error" in row.get(impl, {})]
    return "\n".join(lines)


def _pair(t: dict, f: dict, key: str, scale: float, unit: str) -> str:
    if key not in f:
        return "-"
    text = f"{f[key] * scale:.2f} {unit}"
    return f"{t[key] * scale:.1f} / {text} ({t[key] / f[key]:.0f}x)" if key in t else f"- / {text}"


def _ms(row: dict) -> str:
    return f"{row['steady'] * 1e3:.2f} ms" if "steady" in row else "-"


def show_stages(rows: list[dict]) -> str:
    """Where firesteel's cold first call goes, in ms."""
    lines = []
    for row in rows:
        stages = sorted(row.get("firesteel", {}).get("stages", {}).items(), key=lambda s: -s[1])
        lines.append(f"{row['program']} {row['mode']}: " + ", ".join(f"{name} {spent * 1e3:.0f}" for name, spent in stages if spent >= 0.001))
    return "\n".join(lines)


def arguments(text: str, names: Sequence[str], modes: Sequence[str], repeat: int, about: str) -> argparse.ArgumentParser:
    """The options of a table of programs, a row each and mode: memory.py has them too."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--programs", default=",".join(names), help=about)
    parser.add_argument("--modes", default=",".join(modes))
    parser.add_argument("--impl", default=",".join(IMPLS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--seconds", type=float, default=2.0, help="of steady state in each process")
    parser.add_argument("--sizes", type=json.loads, default={}, help='e.g. \'{"layers": 16}\' or \'{"batch": 16}\'')
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = arguments(__doc__, NAMES, ("infer", "train"), 3, f"of {', '.join((*NAMES, *MORE))}; more: the last {len(MORE)}").parse_args()
    if options.worker:
        print(json.dumps(worker(*json.loads(options.worker))))
        return 0
    rows = []
    for name in MORE if options.programs == "more" else options.programs.split(","):
        for mode in options.modes.split(","):
            row = {"program": name, "mode": mode}
            for impl in options.impl.split(","):
                row[impl] = measure(name, mode == "train", impl, options)
            rows.append(row)
            print(show([row]).splitlines()[2], file=sys.stderr, flush=True)
    print(show(rows))
    print("\nstages of firesteel's cold first call (ms of own time)\n" + show_stages(rows))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
