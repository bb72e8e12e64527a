"""Times the reference programs with eager, torch.compile and firesteel, each in fresh processes.

    python bench/reference.py [--programs gpt,mlp] [--impl eager,torch,firesteel] [--json OUT] [--repeat 3]

A row a program and mode: the first call with an empty cache (cold), the first call of a second process with that cache
(warm), the steady state, graphs, kernels, fall-backs, stage times, peak memory of the warm process.  Absolute times mean little on a noisy
machine, whose speed changes within minutes: for the steady state the processes of a row stay alive and take turns, a short
window each, and the figure is the lower quartile of all of an implementation's steps.  Read the ratios of one run.
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
from collections.abc import Callable, Sequence

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("pointwise", "mlp", "resnet", "gpt", "lstm")
MORE = ("unet", "dlrm", "gru", "pairwise", "mobilenet", "convnext", "bert", "vit")
IMPLS = ("eager", "torch", "firesteel")
WINDOW = 0.4        # seconds of steps until it is another process's turn


# ---------------------------------------------------------------- in the fresh process

def worker(name: str, train: bool, impl: str, device: str, sizes: dict) -> tuple[dict, Callable[[], None]]:
    """One program, one compiler: facts of the first call, and a step of the steady state."""
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
    again = timed_step(lambda: programs.step(fn, program, train), sync)
    row = {"first": first, "import": imported, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if impl == "firesteel":
        row.update(_firesteel_facts())
    return row, again


def timed_step(step: Callable, sync: Callable) -> Callable[[], None]:
    def whole() -> None:
        step()
        sync()
    for _ in range(3):
        whole()
    return whole


def serve(row: dict, step: Callable[[], None]) -> None:
    """Prints the row; then, for each number of seconds that comes in, the times of as many steps."""
    print(json.dumps(row), flush=True)
    for line in sys.stdin:
        times: list[float] = []
        deadline = time.perf_counter() + float(line)
        while not times or time.perf_counter() < deadline:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


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

class Live:
    """The worker of a script in a new process, which stays alive; its caches are in `cache`.  Modules keep their byte code, as installed ones have
    it: without, most of a first call is Python's own compiler."""

    def __init__(self, script: str, arguments: list, cache: str):
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "torch"), FIRESTEEL_CACHE_DIR=os.path.join(cache, "firesteel"),
                   TRITON_CACHE_DIR=os.path.join(cache, "triton"), PYTHONDONTWRITEBYTECODE="")
        self.errors = tempfile.TemporaryFile("w+")     # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen([sys.executable, script, "--worker", json.dumps(arguments)], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.row = self.read()

    def read(self):
        """The next thing that it tells, or its error."""
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        return {"error": (self.errors.read().strip().splitlines() or [f"status {self.process.returncode}"])[-1]}

    def steps(self, seconds: float) -> list[float]:
        print(seconds, file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> dict:
        self.process.communicate()
        self.errors.close()
        return self.row


def fresh(script: str, arguments: list, cache: str) -> dict:
    """What the worker of a script tells in a new process."""
    return Live(script, arguments, cache).close()


def take_turns(lives: dict[str, Live], seconds: float) -> dict[str, float]:
    """The lower quartile of each one's times of a step; those with errors are left out."""
    times: dict[str, list[float]] = {impl: [] for impl, live in lives.items() if "error" not in live.row}
    for _ in range(max(3, round(seconds / WINDOW))):
        for impl, found in times.items():
            found += lives[impl].steps(WINDOW)
    return {impl: statistics.quantiles(found, n=4)[0] for impl, found in times.items()}


def measure(name: str, mode: str, options) -> dict:
    """One row: medians over --repeat times a cold and a warm process of each implementation; torch's are started once, as they take long."""
    found: dict[str, list[dict]] = {impl: [] for impl in options.impl.split(",")}
    lives: dict[str, Live] = {}
    for number in range(options.repeat):
        for impl in found:
            if impl == "torch" and number:
                continue
            if impl in lives:
                lives[impl].close()
            print(f"  {name} {mode} {impl} ...", file=sys.stderr, flush=True)
            found[impl].append(cold_and_warm([name, mode == "train", impl, options.device, options.sizes], impl, lives))
        for impl, spent in take_turns(lives, options.seconds).items():
            found[impl][-1].setdefault("steadies", []).append(spent)
    for live in lives.values():
        live.close()
    return {"program": name, "mode": mode, **{impl: summary(rows) for impl, rows in found.items()}}


def cold_and_warm(arguments: list, impl: str, lives: dict[str, Live]) -> dict:
    """Facts of the cold process and the first call of the warm one, which stays in `lives`."""
    with tempfile.TemporaryDirectory() as cache:
        live = lives[impl] = Live(__file__, arguments, cache)
        cold = live.row
        if impl != "eager" and "error" not in cold:
            live.close()
            live = lives[impl] = Live(__file__, arguments, cache)
    return live.row if "error" in live.row else cold | {"cold": cold["first"], "warm": live.row["first"], "peak_mb": live.row["peak_mb"]}


def summary(rows: list[dict]) -> dict:
    broken = [row for row in rows if "error" in row]
    if broken:
        return broken[0]
    return rows[0] | {key: statistics.median(row[key] for row in rows) for key in ("cold", "warm")} \
        | {"steady": statistics.median(spent for row in rows for spent in row["steadies"])}


def show(rows: list[dict]) -> str:
    lines = ["| program | cold: torch.compile / firesteel | warm: torch.compile / firesteel | steady: eager / torch.compile / firesteel "
             "| graphs | kernels | library calls | fall-backs | peak MB: eager / torch.compile / firesteel |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        e, t, f = (row.get(i, {}) for i in IMPLS)
        peaks = " / ".join(f"{found.get('peak_mb', 0):.0f}" for found in (e, t, f))
        lines.append(f"| {row['program']} {row['mode']} | {_pair(t, f, 'cold', 1, 's')} | {_pair(t, f, 'warm', 1, 's')} | "
                     f"{_ms(e)} / {_ms(t)} / {_ms(f)} | {f.get('graphs', '-')} | {f.get('kernels', '-')} | {f.get('library_calls', '-')} | "
                     f"{f.get('fallbacks', '-')} | {peaks} |")
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


def table_options(text: str, names: Sequence[str], modes: Sequence[str], impls: Sequence[str], about: str = "",
                  rows: str = "--programs", figures: str = "write all figures there") -> argparse.ArgumentParser:
    """The options of a table with a row for each program and mode, whose figures come of a process each."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument(rows, default=",".join(names), help=about)
    parser.add_argument("--modes", default=",".join(modes))
    parser.add_argument("--impl", default=",".join(impls))
    parser.add_argument("--json", help=figures)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def arguments(text: str, names: Sequence[str], modes: Sequence[str], repeat: int, about: str) -> argparse.ArgumentParser:
    """The options of this table, and of memory.py."""
    parser = table_options(text, names, modes, IMPLS, about)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--seconds", type=float, default=2.0, help="of steady state in each process")
    parser.add_argument("--sizes", type=json.loads, default={}, help='e.g. \'{"layers": 16}\' or \'{"batch": 16}\'')
    return parser


def main() -> int:
    options = arguments(__doc__, NAMES, ("infer", "train"), 3, f"of {', '.join((*NAMES, *MORE))}; more: the last {len(MORE)}").parse_args()
    if options.worker:
        serve(*worker(*json.loads(options.worker)))
        return 0
    rows = []
    for name in MORE if options.programs == "more" else options.programs.split(","):
        for mode in options.modes.split(","):
            rows.append(measure(name, mode, options))
            print(show(rows[-1:]).splitlines()[2], file=sys.stderr, flush=True)
    print(show(rows))
    print("\nstages of firesteel's cold first call (ms of own time)\n" + show_stages(rows))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
