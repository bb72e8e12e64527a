"""How long a process waits for its first result: eager, torch.compile and firesteel side by side, in fresh processes.

    python bench/start.py [--programs gpt,bert6] [--modes infer,train] [--impl eager,torch,firesteel,package] [--repeat 3] [--json OUT]

A row a program and mode: the first call with an empty cache (cold) and that of a second process (warm), which for compilers begins with what
they import, and of which eager's is the program itself.  `import` is `import firesteel` after torch.  Medians of wall time; with --cpu of
processor time, which other programs on the machine disturb less.  `STARTS` is the table of ways to start: a row takes a program and gives
the callable whose first call is timed; `package` is a file that fs.package wrote in the cold process.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

from reference import NAMES, fresh

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
    clocks = (time.perf_counter, time.process_time)
    times = [[clock() for clock in clocks]]
    if impl in ("firesteel", "package"):
        import firesteel  # noqa: F401
    times.append([clock() for clock in clocks])
    fn = STARTS[impl](program, train)
    programs.step(fn, program, train)
    times.append([clock() for clock in clocks])
    begin, imported, done = times
    return {"import": imported[0] - begin[0], "first": done[0] - begin[0], "import_cpu": imported[1] - begin[1], "first_cpu": done[1] - begin[1]}


# ---------------------------------------------------------------- the driver

def measure(name: str, train: bool, impl: str, repeat: int) -> dict:
    """Medians over pairs of processes with an empty cache of their own."""
    found: dict[str, list] = {}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            print(f"  {name} {'train' if train else 'infer'} {impl} ...", file=sys.stderr, flush=True)
            for kind in ("cold", "warm"):
                row = fresh(__file__, [name, train, impl], cache)
                if "error" in row:
                    return row
                found.setdefault(kind, []).append(row)
    return {f"{kind}_{key}": statistics.median(row[key] for row in rows) for kind, rows in found.items() for key in rows[0]}


def show(rows: list[dict], impls: list[str], cpu: bool) -> str:
    end = "_cpu" if cpu else ""
    lines = [f"| program | import | cold: {' / '.join(impls)} | warm: {' / '.join(impls)} |", "|---|---|---|---|"]
    for row in rows:
        cells = [" / ".join(f"{row[i][f'{kind}_first{end}']:.2f}" if "error" not in row[i] else "error" for i in impls) + ratio(row, f"{kind}_first{end}")
                 for kind in ("cold", "warm")]
        own = row.get("firesteel", {})
        imported = f"{own[f'warm_import{end}'] * 1e3:.0f} ms" if f"warm_import{end}" in own else "-"
        lines.append(f"| {row['program']} {row['mode']} | {imported} | {' s | '.join(cells)} s |")
        lines += [f"|   error: {i}: {row[i]['error']} |" for i in impls if "error" in row[i]]
    return "\n".join(lines)


def ratio(row: dict, key: str) -> str:
    peer, own = row.get("torch", {}), row.get("firesteel", {})
    return f" ({peer[key] / own[key]:.0f}x)" if key in peer and key in own else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join((*NAMES, BERT)))
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--impl", default=",".join(STARTS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="show processor time")
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*json.loads(options.worker))))
        return 0
    impls = options.impl.split(",")
    rows = [{"program": name, "mode": mode, **{impl: measure(name, mode == "train", impl, options.repeat) for impl in impls}}
            for name in options.programs.split(",") for mode in options.modes.split(",")]
    print(show(rows, impls, options.cpu))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
