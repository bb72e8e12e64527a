"""Re-runs the seed tests recorded as passing: nothing that worked may be lost.

    python tests/conformance_recorded.py ../shared/conformance/run tests/conformance-passing.txt            # check
    python tests/conformance_recorded.py ../shared/conformance/run tests/conformance-passing.txt --record   # add new passes

The list has one `suite Class.test` a line and only grows.  A test that does not pass is run once more by itself, since some upstream
tests depend on time or memory.  Where the runner cannot get its sources the check is skipped with a message.  Suites are run with --on-cpu where the list says `suite+cpu`.
"""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

SUITES = ("hooks", "aot_autograd", "activation_checkpointing+cpu", "compiled_autograd", "dynamic_shapes+cpu")
UNREACHABLE = ("could not be downloaded", "no Debian archive", "apt-get is not here")


def run_suite(runner: str, suite: str, only: Sequence[str] = ()) -> set[str] | None:
    """Names of the passing tests; None where the sources cannot be had."""
    name, _, cpu = suite.partition("+")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command = [sys.executable, runner, name, *only, *(["--on-cpu"] if cpu else []), "--json", str(out)]
        done = subprocess.run(command, text=True, capture_output=True)
        if not out.exists():
            if any(text in done.stderr for text in UNREACHABLE):
                return None
            sys.exit(f"conformance: {suite} did not run:\n{done.stderr[-3000:]}")
        results = json.loads(out.read_text())["suites"][name]
    return {test for test, result in results.items() if result["outcome"] == "passed"}


def main() -> int:
    runner, path = sys.argv[1], pathlib.Path(sys.argv[2])
    recording = "--record" in sys.argv
    recorded = {tuple(line.split()) for line in path.read_text().splitlines()} if path.exists() else set()
    lost, found = [], set()
    for suite in SUITES if recording else [s for s in SUITES if any(r[0] == s for r in recorded)]:
        passing = run_suite(runner, suite)
        if passing is None:
            print(f"conformance: the sources of {suite} cannot be had here, skipped")
            continue
        wanted = {test for s, test in recorded if s == suite}
        for test in sorted(wanted - passing):
            passing |= run_suite(runner, suite, ["-k", test]) or set()
        found |= {(suite, test) for test in passing}
        lost += [f"{suite} {test}" for test in sorted(wanted - passing)]
        print(f"conformance: {suite}: {len(wanted & passing)} of {len(wanted)} recorded tests pass, {len(passing)} in all", flush=True)
    if recording:
        path.write_text("".join(f"{s} {t}\n" for s, t in sorted(recorded | found)))
        return 0
    for line in lost:
        print(f"conformance: lost {line}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
