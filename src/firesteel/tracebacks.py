"""Tracebacks that name the user's lines: of errors that a captured program raises, and of those that its graph meets.

Generated code has one frame, `<firesteel run>`.  The frames of the user's functions, which were interpreted and never ran, are put
behind it, so that a traceback reads as eager's does:

      File "<firesteel run>", line 7, in run
      File "model.py", line 31, in Model.forward
        self.check(x)
      File "model.py", line 12, in Model.check
        raise ValueError("too many rows")
"""
from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

from firesteel.config import config
from firesteel.errors import FiresteelError, InternalError
from firesteel.homes import is_in_package

CodeLine = tuple[str, int, str]            # file, line, qualified name: outermost first where there are several

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
OURS = ("<firesteel ", os.path.dirname(__file__) + os.sep)
ASKING = frozenset({"eager", "unpack_saved", "saved", "_unpack", "backward"})      # of ours, which the program or torch answers with errors
_ONE_LINE = bytes([0x80 | 13 << 3 | 7, 0])      # a table of positions: the first eight units are on the function's line, columns unknown


def places_of(stack_trace: str | None) -> list[CodeLine]:
    """The places in the `stack_trace` of a node."""
    return [(file, int(line), name) for file, line, name in _LINE.findall(stack_trace or "")]


def is_ours(error: BaseException) -> bool:
    """Was it raised by a line of this project's?"""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_in_package(trace.tb_frame.f_globals.get("__name__", ""), "firesteel")


def without_ours(error: BaseException) -> None:
    """Takes this project's frames out of the traceback of an error that is the program's, or ends with a hint; a bug of ours keeps them.
    Called where ours are entered from outside: by a call of compiled code, by the autograd engine."""
    if config.internal_frames:
        return
    trace, kept = error.__traceback__, []
    while trace is not None:
        kept.append(trace)
        trace = trace.tb_next
    if not kept or _is_bug(error, kept[-1]):
        return
    for one in reversed([one for one in kept if not _is_hidden(one)]):
        trace = types.TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = trace


def hiding(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of ours, for a caller outside: the autograd engine, say."""
    def call(*args: Any) -> Any:
        try:
            return fn(*args)
        except BaseException as error:
            without_ours(error)
            raise
    return call


def _is_bug(error: BaseException, innermost: types.TracebackType) -> bool:
    if isinstance(error, FiresteelError):
        return isinstance(error, InternalError) or getattr(error, "ours", False)
    anywhere = isinstance(error, (KeyboardInterrupt, RecursionError))
    return not anywhere and _is_hidden(innermost) and innermost.tb_frame.f_code.co_name not in ASKING


def _is_hidden(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(OURS)      # a frame that never ran has only its file


def located(error: BaseException, places: Iterable[CodeLine]) -> BaseException:
    """The error with the user's frames in its traceback, before those that it has."""
    trace = error.__traceback__
    for file, line, name in reversed(list(places)):
        trace = types.TracebackType(trace, _frame(file, line, name), 0, line)
    return error.with_traceback(trace)


def located_inside(error: BaseException, places: Iterable[CodeLine]) -> BaseException:
    """The same where generated code has just caught the error: its own frame, which comes first, is added again when it is raised."""
    return located(error.with_traceback(error.__traceback__.tb_next if error.__traceback__ is not None else None), places)


def _frame(file: str, line: int, name: str) -> types.FrameType:
    """A frame that says it is at this place; it never runs."""
    code = _never_run.__code__.replace(co_filename=file, co_firstlineno=line, co_name=name.rpartition(".")[2], co_qualname=name,
                                       co_linetable=_ONE_LINE)
    return types.FunctionType(code, {"__name__": name})().gi_frame


def _never_run():
    yield
