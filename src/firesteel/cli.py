"""The command line: `firesteel doctor | explain SCRIPT | bisect SCRIPT | bench | cache {show,clear,export,import} | package info FILE | report DIR |
replay DUMP`.

Commands are rows of a table: a function of the parsed arguments, with a sentence for --help.  What only one of them needs is imported in it.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

from firesteel import __version__
from firesteel.config import config
from firesteel.errors import PackageError, UserError
from firesteel.runtime import diskcache
from firesteel.table import Table

COMMANDS: Table[Callable[[argparse.Namespace], int]] = Table("command", "cli.py")


def command(name: str, sentence: str) -> Callable[[Callable[[argparse.Namespace], int]], Callable[[argparse.Namespace], int]]:
    """A row; python -OO takes docstrings away, but not the sentence."""
    def add(fn: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        fn.__doc__ = sentence
        return COMMANDS.row(name)(fn)
    return add


@command("doctor", "Says what was found on this machine, and what to do about what is missing.")
def doctor(args: argparse.Namespace) -> int:
    if args.target or args.rest:
        raise UserError("doctor takes no arguments.", hint="Say firesteel doctor.")
    from firesteel.tools.doctor import examine
    return 0 if examine() else 1


@command("explain", "Runs a script and says what was captured, what broke and where the time went: explain SCRIPT [ARGUMENTS].")
def explain(args: argparse.Namespace) -> int:
    from firesteel.tools.explain import collecting
    from firesteel.tools.scripts import run_script
    with collecting() as found:
        status = run_script(script_of(args))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"         # there may be no stdout
    print(str(found()).encode(encoding, "backslashreplace").decode(encoding))       # names of the program may be of another alphabet
    return status


@command("bisect", "Finds the stage, or the fusion, that makes a script fail: bisect SCRIPT [ARGUMENTS].")
def bisect(args: argparse.Namespace) -> int:
    from firesteel.tools.bisect import bisect as halve
    return halve(script_of(args))


def script_of(args: argparse.Namespace) -> list[str]:
    """Its path, and its arguments."""
    if args.target is None:
        raise UserError(f"{args.command} takes a script.", hint=f"Say firesteel {args.command} SCRIPT [ARGUMENTS].")
    return [args.target, *args.rest]


@command("bench", "Times the reference programs (from a checkout): bench [ARGUMENTS of bench/reference.py].")
def bench(args: argparse.Namespace) -> int:
    script = pathlib.Path.cwd() / "bench" / "reference.py"
    if not script.exists():
        print("firesteel bench runs in a checkout of the project: there is no bench/reference.py here", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(script), *([args.target] if args.target else []), *args.rest])


@command("cache", "The on-disk cache of programs and kernels: cache show, cache clear, cache export FILE, cache import FILE.")
def cache(args: argparse.Namespace) -> int:
    if args.target in ("export", "import") and len(args.rest) == 1:
        return _carry(args.target, args.rest[0])
    if args.target not in (None, "show", "clear") or args.rest:
        raise UserError(f"firesteel cache {' '.join([args.target, *args.rest])} was not understood.",
                        hint="Say cache show, cache clear, cache export FILE or cache import FILE.")
    if args.target == "clear":
        for suffix in diskcache.SUFFIXES:
            diskcache.kernels(suffix).clear()
    for suffix in diskcache.SUFFIXES:
        print(f"{suffix:8} {diskcache.kernels(suffix).show()}")
    return 0


def _carry(way: str, path: str) -> int:
    from firesteel.shipping import caches
    if way == "export":
        print(f"{caches.write_cache(path)} entries written to {path}")
        return 0
    try:
        count, others = caches.read_cache(path)
    except (PackageError, OSError) as error:
        told = getattr(error, "reason", f"{path} cannot be read: {error}.")
        raise UserError(told, hint="Such files are written by firesteel cache export FILE.") from None
    print(f"{count} entries read from {path}")
    for name, value in others.items():
        print(f"they were made with another {name}, {value!s:.80}: they are found where it is the same")
    return 0


@command("package", "Says what is in a package that fs.package wrote: package info FILE.")
def package(args: argparse.Namespace) -> int:
    from firesteel.shipping import info
    if args.target != "info" or len(args.rest) != 1:
        raise UserError("firesteel package was not understood.", hint="Say firesteel package info FILE.")
    print(info.words(args.rest[0]))
    return 0


@command("report", "Lists the stage dumps of a folder (written with FIRESTEEL_DUMP_DIR): report FOLDER.")
def report(args: argparse.Namespace) -> int:
    folder = pathlib.Path(args.target or config.dump_dir or ".")
    found = sorted(path for path in folder.rglob("[0-9]*-*.*") if path.is_file())
    if args.rest or not found:
        raise UserError(f"There are no stage dumps in {' '.join([str(folder), *args.rest])!r}.",
                        hint="They are written with FIRESTEEL_DUMP_DIR; fs.report and FIRESTEEL_REPORT write a page to look at.")
    for path in found:
        print(f"{path.relative_to(folder)!s:40} {len(path.read_text().splitlines()):6} lines")
    return 0


@command("replay", "Runs stages again from their dumps and compares with eager: replay DUMP [--from STAGE] [--to STAGE].")
def replay(args: argparse.Namespace) -> int:
    from firesteel import replay as replaying
    parser = argparse.ArgumentParser(prog="firesteel replay DUMP")
    parser.add_argument("--from", dest="start", default="graph")
    parser.add_argument("--to", dest="end", default="host")
    chosen = parser.parse_args(args.rest)
    return 0 if replaying.replay(pathlib.Path(args.target or config.dump_dir or "."), chosen.start, chosen.end) else 1


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:8} {fn.__doc__}" for name, fn in COMMANDS.items())
    parser = argparse.ArgumentParser(prog="firesteel", description="A compiler for PyTorch programs.\n\n" + lines,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"firesteel {__version__}")
    parser.add_argument("command", nargs="?", help="one of these")
    parser.add_argument("target", nargs="?", help="a script, a folder, or what to do")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="passed on")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command.  2: it was not understood, or cannot be done, which one sentence on stderr says."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if args.command not in COMMANDS:
            raise UserError(f"There is no command {args.command!r}.", hint=f"Commands are {', '.join(COMMANDS)}.")
        if args.target is None and args.rest[:1] in (["-h"], ["--help"]):
            print(f"firesteel {args.command}: {COMMANDS[args.command].__doc__}")
            return 0
        status = COMMANDS[args.command](args)
        print(end="", flush=True)
        return status
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)         # nothing is left to write when Python ends
        if not isinstance(error, BrokenPipeError):           # else the reader of the output closed the pipe
            print(f"firesteel: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"firesteel: {error.reason} {error.hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
