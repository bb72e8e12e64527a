"""Runs a script as `python SCRIPT` does: its arguments, its folder first on the path, its exit status."""
from __future__ import annotations

import os
import runpy
import sys
import traceback
import types
from collections.abc import Sequence

from firesteel.errors import UserError


def run_script(argv: Sequence[str]) -> int:
    """Runs `argv[0]` with the other arguments; its exit status.  An exception is printed, and is 1."""
    check_script(argv)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:1] = list(argv), [os.path.dirname(os.path.abspath(argv[0]))]
    try:
        runpy.run_path(argv[0], run_name="__main__")
        return 0
    except SystemExit as leaving:
        return exit_status(leaving.code)
    except Exception as error:
        traceback.print_exception(error.with_traceback(_of_script(error, argv[0])))
        return 1
    finally:
        sys.argv, sys.path[:] = before


def check_script(argv: Sequence[str]) -> None:
    if not os.path.isfile(argv[0]):
        raise UserError(f"There is no script {argv[0]!r}.", hint="Say the path of a Python file.")


def exit_status(code: object) -> int:
    """As the interpreter makes one of what sys.exit was given."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


def _of_script(error: BaseException, script: str) -> types.TracebackType | None:
    """The traceback from the script's own frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace or error.__traceback__
