"""`firesteel bisect SCRIPT [ARGUMENTS]`: which stage of the compiler, and which fusion, makes a script fail.

The script's exit status says whether it passes: an assertion is enough.  It runs once for each row of TRIALS, in a process of its
own, each row with one more part of the compiler at work; the first row that fails names the stage.  Where that is fusion, the number of
fusions is halved until one is left.

    firesteel bisect train.py --steps 3
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

from firesteel.records import dataclass
from firesteel.tools.scripts import check_script, run_script


@dataclass(frozen=True)
class ScriptRun:
    """A way to run the script: `backend` for every compiled callable, at most `fuel` fusions in a graph."""
    what: str           # what is at work that was not in the row before
    backend: str
    fuel: int = -1


TRIALS = (
    ScriptRun("nothing: the script fails without the compiler too", ""),
    ScriptRun("capture (or guards)", "eager"),
    ScriptRun("autograd ahead of time", "aot_eager"),
    ScriptRun("partition and decompositions", "aot_eager_partitioned"),
    ScriptRun("lowering, memory plan, code generation or runtime", "native", 0),
    ScriptRun("fusion", "native"),
)
MOST = 1 << 20      # fusions in a graph


def fails(trial: ScriptRun, script: Sequence[str], log: bool = False) -> tuple[bool, str]:
    """Does the script fail in this way?  And what it printed to stderr."""
    environment = {**os.environ, "FIRESTEEL_FUSION_FUEL": str(trial.fuel), "FIRESTEEL_SUPPRESS_ERRORS": "0",
                   **({"FIRESTEEL_LOGS": "schedule"} if log else {})}
    done = subprocess.run([sys.executable, "-m", "firesteel.tools.bisect", trial.backend, *script], env=environment, text=True, capture_output=True)
    return done.returncode != 0, done.stderr


def bisect(script: Sequence[str], write: Callable[[str], None] = print) -> int:
    """Writes which row fails first; 0 where one does."""
    check_script(script)
    for trial in TRIALS:
        failed, _ = fails(trial, script)
        write(f"{'fails' if failed else 'passes':7} with {f'backend {trial.backend!r}' if trial.backend else 'everything eager'}"
             f"{', no fusions' if trial.fuel == 0 else ''}")
        if failed:
            write(f"the first part that makes it fail: {trial.what}")
            if trial is TRIALS[-1]:
                write(first_bad_fusion(script))
            return 0
    write("the script passes in every way")
    return 1


def first_bad_fusion(script: Sequence[str]) -> str:
    """Halves the number of fusions that each graph may make."""
    high = 1
    while high < MOST and not fails(ScriptRun("", "native", high), script)[0]:
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(ScriptRun("", "native", middle), script)[0] else (middle, high)
    _, text = fails(ScriptRun("", "native", high), script, log=True)
    named = sorted(set(re.findall(rf"^.*\bfusion {high}: (.*)$", text, re.MULTILINE)))
    return "\n".join([f"the first fusion that makes it fail is number {high} of a graph (FIRESTEEL_FUSION_FUEL={high} fails, {high - 1} does not):",
                      *(f"  {line}" for line in named)])


def main(backend: str, script: Sequence[str]) -> int:
    """In the child: the script under a stance."""
    import firesteel as fs
    fs.set_stance("force_eager") if not backend else fs.set_stance("default", force_backend=backend)
    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
