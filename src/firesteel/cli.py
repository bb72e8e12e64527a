"""The command line: `firesteel doctor | explain SCRIPT | bench | cache {show,clear} | report DIR | replay DUMP`.

Commands are rows of a table: a function of the parsed arguments, with a sentence for --help.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable

from firesteel import artifacts
from firesteel import replay as replaying
from firesteel.config import config
from firesteel.runtime import diskcache
from firesteel.table import Table

COMMANDS: Table[Callable[[argparse.Namespace], int]] = Table("command", "cli.py")


@COMMANDS.row("doctor")
def doctor(args: argparse.Namespace) -> int:
    """What this machine offers to compiled code."""
    import torch
    rows = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}",
            **{name: _version(name) for name in ("torch", "llvmlite", "triton")},
            "threads": torch.get_num_threads(), "CUDA": torch.version.cuda if torch.cuda.is_available() else "none",
            "cache": config.cache_dir or "off"}
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


@COMMANDS.row("explain")
def explain(args: argparse.Namespace) -> int:
    """Runs a script and says what was captured, what broke and where the time went."""
    sys.argv = [args.target, *args.rest]
    runpy.run_path(args.target, run_name="__main__")
    for group, counter in artifacts.counters.items():
        for name, count in counter.items():
            print(f"{group}: {name}: {count}")
    for record in artifacts.breaks:
        print(f"break: {record.location}: {record.reason} {record.hint}")
    for stage, seconds in sorted(artifacts.stage_times().items(), key=lambda row: -row[1]):
        print(f"time: {stage}: {seconds * 1e3:.1f} ms")
    return 0


@COMMANDS.row("bench")
def bench(args: argparse.Namespace) -> int:
    """Times the reference programs (from a checkout)."""
    script = pathlib.Path.cwd() / "bench" / "reference.py"
    if not script.exists():
        print("firesteel bench runs in a checkout of the project: there is no bench/reference.py here", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(script), *([args.target] if args.target else []), *args.rest])


@COMMANDS.row("cache")
def cache(args: argparse.Namespace) -> int:
    """Shows or clears the on-disk cache of compiled kernels: cache show, cache clear."""
    if args.target == "clear":
        for suffix in diskcache.SUFFIXES:
            diskcache.kernels(suffix).clear()
    for suffix in diskcache.SUFFIXES:
        print(f"{suffix:8} {diskcache.kernels(suffix).show()}")
    return 0


@COMMANDS.row("report")
def report(args: argparse.Namespace) -> int:
    """Lists the stage dumps of a folder (written with FIRESTEEL_DUMP_DIR)."""
    folder = pathlib.Path(args.target or config.dump_dir or ".")
    for path in sorted(path for path in folder.rglob("[0-9]*-*.*") if path.is_file()):
        print(f"{path.relative_to(folder)!s:40} {len(path.read_text().splitlines()):6} lines")
    return 0


@COMMANDS.row("replay")
def replay(args: argparse.Namespace) -> int:
    """Runs stages again from their dumps and compares with eager: replay DUMP [--from STAGE] [--to STAGE]."""
    parser = argparse.ArgumentParser(prog="firesteel replay DUMP")
    parser.add_argument("--from", dest="start", default="graph")
    parser.add_argument("--to", dest="end", default="host")
    chosen = parser.parse_args(args.rest)
    return 0 if replaying.replay(pathlib.Path(args.target or config.dump_dir or "."), chosen.start, chosen.end) else 1


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(argv: list[str] | None = None) -> int:
    lines = "\n".join(f"  {name:8} {str(fn.__doc__).splitlines()[0]}" for name, fn in COMMANDS.items())
    parser = argparse.ArgumentParser(prog="firesteel", description="A compiler for PyTorch programs.\n\n" + lines,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("target", nargs="?", help="a script, a folder, or show / clear")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="passed on")
    args = parser.parse_args(argv)
    return COMMANDS[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
