"""Random programs by the thousand: `python tests/fuzz/fuzz.py --count 1000 --seed 0 --device cuda`.

Each failing program is made smaller and printed as a runnable file (and kept in --keep).  Programs run in workers of `--batch` programs, so that a crash of the process
is one more failure, and memory is given back.  `--default-device` and `--default-dtype` set torch's before anything runs.
"""
from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch  # noqa: E402
from program_check import Difference, check  # noqa: E402
from program_shrink import shrink  # noqa: E402
from program_writer import Program, write  # noqa: E402

from firesteel.capture.policy import SHARED  # noqa: E402


def fails(program: Program, device: str) -> Difference | None:
    """The difference, or None where there is none."""
    SHARED.clear()
    return check(program, device)


def reduced(program: Program, found: Difference, device: str) -> Program:
    return shrink(program, lambda one: (again := fails(one, device)) is not None and again.kind == found.kind)


def run_one(seed: int, options: argparse.Namespace) -> bool:
    print(f"seed {seed}", flush=True)
    program = write(seed)
    found = fails(program, options.device)
    if found is None:
        return True
    program = reduced(program, found, options.device) if options.shrink else program
    source = f"# seed {seed}: " + str(fails(program, options.device) or found).replace("\n", "\n# ") + "\n" + program.source()
    print(f"FAILED {seed} {found.kind}\n{source}", flush=True)
    if options.keep:
        pathlib.Path(options.keep).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(options.keep) / f"program_{seed}.py").write_text(source)
    return False


def work(options: argparse.Namespace) -> int:
    """One worker: its programs in this process."""
    if options.default_dtype:
        torch.set_default_dtype(getattr(torch, options.default_dtype))
    if options.default_device:
        torch.set_default_device(options.default_device)
    if options.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    return sum(not run_one(seed, options) for seed in range(options.seed, options.seed + options.count))


def batches(options: argparse.Namespace) -> int:
    """Starts workers one after another; a worker that dies counts as one failure, and the next begins behind its program."""
    seed, end, failures, started = options.seed, options.seed + options.count, 0, time.time()
    passed = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("device", "default_device", "default_dtype", "keep", "shrink")]
    while seed < end:
        count = min(options.batch, end - seed)
        command = [sys.executable, __file__, "--worker", f"--seed={seed}", f"--count={count}", *passed]
        last, quiet = seed, True
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
            for line in worker.stdout:
                if line.startswith("seed "):
                    last, quiet = int(line.split()[1]), True
                    continue
                failures += line.startswith("FAILED ")
                quiet = quiet and not line.startswith("FAILED ")
                print(line, end="", flush=True)
        done = seed + count if worker.returncode == 0 else last + 1
        if worker.returncode != 0:
            failures += 1
            print(f"FAILED {last} the process ended with {worker.returncode}; fuzz.py --worker --seed {last} --count 1 does it again", flush=True)
        seed = done
        print(f"{seed - options.seed} programs, {failures} failures, {time.time() - started:.0f} s", flush=True)
    return failures


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"count": 1000, "seed": 0, "batch": 100, "shrink": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("device", "default-device", "default-dtype", "keep"):
        parser.add_argument(f"--{name}", default="cpu" if name == "device" else "")
    parser.add_argument("--worker", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    if options.worker:
        work(options)
    else:
        sys.exit(batches(options) > 0)
