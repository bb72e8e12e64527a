"""How long a process waits for its first result: eager, torch.compile and firesteel side by side, in fresh processes.

    python bench/start.py [--programs gpt,bert6] [--modes infer,train] [--impl eager,torch,firesteel,package] [--repeat 3] [--json OUT]

A row a program and mode: the first call with an empty cache (cold) and that of a second process (warm), which for compilers begins with what
they import, and of which eager's is the program itself.  `import` is `import firesteel` after torch, `compile` what fs.compile loads.  Medians
of wall time; with --cpu of processor time, which other programs on the machine disturb less.  Threads are as many as the environment says, all cores
where OMP_NUM_THREADS is not set.  `STARTS` is the table of ways to start: a row
takes a program and gives the callable whose first call is timed; `package` is a file that fs.package wrote in the cold process, shown with the
time from its load to its result.  `GOALS` are told below the table where a row misses them.

Each process has --timeout seconds, each cell caches of its own.  OUT is written after every cell, and a cell that it holds is not measured
again: a run that was stopped goes on where it was; --seconds says how long one run may begin cells.
"""
from __future__ import annotations

import compileall
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from reference import HERE, NAMES, table_options

BERT = "bert6"


def bert(layers: int = 6, width: int = 256, batch: int = 4, length: int = 128):
    """BERT as transformers has it; its result is the pooled output."""
    import programs
    import torch
    from transformers import BertConfig, BertModel
    torch.manual_seed(0)
    model = BertModel(BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width))
    tokens = torch.randint(0, 1000, (batch, length))
    return programs.Program(Pooled(model), (tokens,), list(model.parameters()))


def Pooled(model):
    import torch

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens).pooler_output
    return Pooled()


# ---------------------------------------------------------------- ways to start

def start_eager(program, train):
    return program.fn


def start_torch(program, train):
    import torch
    return torch.compile(program.fn)


def start_firesteel(program, train):
    import firesteel as fs
    return fs.compile(program.fn)


def start_package(program, train):
    """Cold: the package is written, too; warm: it is there."""
    import firesteel as fs
    path = pathlib.Path(fs.config.cache_dir, "program.fsp")
    if not path.exists():
        import torch
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.set_grad_enabled(train):
            fs.package(program.fn, program.inputs, path)
    return fs.load(path)


STARTS = {"eager": start_eager, "torch": start_torch, "firesteel": start_firesteel, "package": start_package}


# ---------------------------------------------------------------- in the fresh process

def worker(name: str, train: bool, impl: str) -> dict:
    import programs
    program = bert() if name == BERT else programs.PROGRAMS[name]()
    if isinstance(program.fn, programs.nn.Module):
        program.fn.train(train)
    assert "firesteel" not in sys.modules, "what is timed is loaded already"
    times = [clocks()]
    if impl in ("firesteel", "package"):
        import firesteel  # noqa: F401
    times.append(clocks())
    fn = STARTS[impl](program, train)
    times.append(clocks())
    programs.step(fn, program, train)
    times.append(clocks())
    begin, imported, made, done = times
    spans = {"import": (begin, imported), "compile": (imported, made), "call": (made, done), "first": (begin, done)}
    return {name + end: after[n] - before[n] for name, (before, after) in spans.items() for n, end in enumerate(("", "_cpu"))}


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


# ---------------------------------------------------------------- the driver

def fresh(arguments: list, cache: str, timeout: float) -> dict:
    """The worker in a new process; its caches are in `cache`.  Bytecode is written, as where packages are installed.  What it prints goes to
    files: processes that it leaves behind hold pipes open."""
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "torch"), FIRESTEEL_CACHE_DIR=os.path.join(cache, "firesteel"),
               TRITON_CACHE_DIR=os.path.join(cache, "triton"))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, __file__, "--worker", json.dumps(arguments)], env=env, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {timeout:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)      # it and what it left behind
            process.wait()
        out.seek(0), errors.seek(0)
        if process.returncode:
            return {"error": (errors.read().strip().splitlines() or [f"status {process.returncode}"])[-1]}
        return json.loads(out.read().splitlines()[-1])


def measure(name: str, train: bool, impl: str, repeat: int, timeout: float) -> dict:
    """Medians over pairs of processes with an empty cache of their own."""
    found: dict[str, list] = {}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                row = fresh([name, train, impl], cache, timeout)
                if "error" in row:
                    return {"error": f"{kind}: {row['error']}"}
                found.setdefault(kind, []).append(row)
    return {f"{kind}_{key}": statistics.median(row[key] for row in rows) for kind, rows in found.items() for key in rows[0]}


def cells(options) -> list[tuple[str, str, str]]:
    return [(name, mode, impl) for name in options.programs.split(",") for mode in options.modes.split(",") for impl in options.impl.split(",")]


def fill(rows: dict[str, dict], options) -> bool:
    """Measures what is missing.  Is nothing missing any more?"""
    begun = time.perf_counter()
    for name, mode, impl in cells(options):
        row = rows.setdefault(f"{name} {mode}", {})
        if impl in row:
            continue
        if time.perf_counter() - begun > options.seconds:
            return False
        print(f"  {name} {mode} {impl} ...", file=sys.stderr, flush=True)
        row[impl] = measure(name, mode == "train", impl, options.repeat, options.timeout)
        if options.json:
            temporary = pathlib.Path(f"{options.json}.tmp")
            temporary.write_text(json.dumps(rows, indent=1) + "\n")
            temporary.replace(options.json)
    return True


# ---------------------------------------------------------------- the table

GOALS = {       # sentence -> of a row and the clock's suffix: is it missed?
    "import of firesteel at most 60 ms": lambda row, end: row["firesteel"][f"warm_import{end}"] > 0.06,
    "cold at least 30 times faster than torch.compile": lambda row, end: ratio(row, f"cold_first{end}") < 30,
    "warm at least 15 times faster than torch.compile": lambda row, end: ratio(row, f"warm_first{end}") < 15,
    "a package's result at most 0.1 s after its load": lambda row, end: row["package"][f"warm_call{end}"] > 0.1,
}


def ratio(row: dict, key: str) -> float:
    return row["torch"][key] / row["firesteel"][key]


def show(rows: dict[str, dict], impls: list[str], cpu: bool) -> str:
    end = "_cpu" if cpu else ""
    lines = [f"| program | import, compile | cold: {' / '.join(impls)} | warm: {' / '.join(impls)} | package: load, then result |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        own, package = row.get("firesteel", {}), row.get("package", {})
        lines.append(f"| {name} | {milliseconds(own, f'warm_import{end}', f'warm_compile{end}')} | {seconds(row, impls, f'cold_first{end}')} | "
                     f"{seconds(row, impls, f'warm_first{end}')} | {milliseconds(package, f'warm_compile{end}', f'warm_call{end}')} |")
    lines += [f"error: {name}: {impl}: {cell['error']}" for name, row in rows.items() for impl, cell in row.items() if "error" in cell]
    return "\n".join([*lines, *missed(rows, end)])


def milliseconds(cell: dict, *keys: str) -> str:
    return ", ".join(f"{cell[key] * 1e3:.0f} ms" for key in keys if key in cell) or "-"


def seconds(row: dict, impls: list[str], key: str) -> str:
    times = " / ".join(f"{row[impl][key]:.2f}" if key in row.get(impl, {}) else "-" for impl in impls)
    return f"{times} s" + (f" ({ratio(row, key):.0f}x)" if all(key in row.get(impl, {}) for impl in ("torch", "firesteel")) else "")


def missed(rows: dict[str, dict], end: str) -> list[str]:
    """A line a goal that a row misses; goals that need what was not measured are left out."""
    found = []
    for sentence, misses in GOALS.items():
        names = []
        for name, row in rows.items():
            try:
                names += [name] if misses(row, end) else []
            except KeyError:
                continue
        if names:
            found.append(f"missed: {sentence}: {', '.join(names)}")
    return found


def main() -> int:
    parser = table_options(__doc__, (*NAMES, BERT), ("infer", "train"), list(STARTS), figures="write all figures there; those that it holds are not measured again")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="show processor time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no cell is begun")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*json.loads(options.worker))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # the process under way is ended, too
    for folder in (HERE, *(pathlib.Path(place, "firesteel") for place in sys.path if pathlib.Path(place, "firesteel").is_dir())):
        compileall.compile_dir(folder, quiet=2)     # as where packages are installed
    rows = json.loads(pathlib.Path(options.json).read_text()) if options.json and pathlib.Path(options.json).exists() else {}
    complete = fill(rows, options)
    wanted = {f"{name} {mode}" for name, mode, _ in cells(options)}
    print(show({name: row for name, row in rows.items() if name in wanted and row}, options.impl.split(","), options.cpu))
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
