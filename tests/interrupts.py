"""Raising KeyboardInterrupt at a chosen line: for tests that an exception anywhere leaves no trace."""
import ctypes
import sys


class Lines:
    """Counts the lines that are run in every Python file, and raises at the `stop`-th; `last` has the number of the last run of each line."""

    def __init__(self, stop=0):
        self.stop, self.count, self.last, self.names = stop, 0, {}, {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(lambda frame, event, arg: self._line)

    def __exit__(self, *exc):
        sys.settrace(self._before)

    def _line(self, frame, event, arg):
        if event == "line":
            self.count += 1
            if self.count == self.stop:
                sys.settrace(None)
                raise KeyboardInterrupt
            code = frame.f_code
            self.last[code, frame.f_lineno] = self.count
        return self._line

    def inside(self, *functions):
        """Numbers of the last runs of the lines of these functions."""
        codes = [getattr(fn, "__wrapped__", fn).__code__ for fn in functions]
        return sorted(count for (code, _), count in self.last.items() if code in codes)


def interrupted(call, stop):
    """Calls with an interrupt at that line; the exception, or None where the call ended before.

    Python has no cleanup for an error of a trace function at a line where a handler begins or ends, where it handles no signals: what was caught there would be the exception being
    handled from then on, in all that runs later.
    """
    before = sys.exception()
    try:
        return _interrupted(call, stop)
    finally:
        ctypes.pythonapi.PyErr_SetHandledException(ctypes.py_object(before))


def _interrupted(call, stop):
    try:
        with Lines(stop):
            call()
    except KeyboardInterrupt as error:
        return error
    return None
