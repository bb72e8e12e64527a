"""Checks of code.py, versions.py and resume.py that need no torch: run by the tests in this process, and as a script by other Pythons.

    PATH/python tests/capture/bytecode_checks.py roundtrip 2000

Each check prints what it found wrong and returns the number of things it looked at.
"""
import pathlib
import random
import sys
import sysconfig
import types

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src" / "firesteel"


def use_without_torch():
    """Makes firesteel.capture importable where torch is not installed: the packages without their __init__."""
    for name, path in (("firesteel", SOURCE), ("firesteel.capture", SOURCE / "capture")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


if __name__ == "__main__":
    use_without_torch()
sys.path.insert(0, str(HERE))

from firesteel.capture import code as codes  # noqa: E402
from firesteel.capture import versions  # noqa: E402
from firesteel.capture.resume import resume_function  # noqa: E402


def nested(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def library(limit, seed=0):
    """Code objects of the standard library, a random part of its files where there is a limit; 0 is all."""
    files = [f for f in sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py"))
             if not {"site-packages", "bad_coding", "lib2to3"} & set(f.parts)]
    random.Random(seed).shuffle(files)
    count = 0
    for file in files:
        try:
            top = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        except (SyntaxError, ValueError):       # files of the library that are wrong on purpose
            continue
        for code in nested(top):
            yield code
            count += 1
            if count == limit:
                return


def roundtrip(limit):
    """decode and assemble give the same code."""
    wrong = count = 0
    for code in library(limit):
        count += 1
        new = codes.assemble(codes.copy_instrs(codes.decode(code)), code)
        same = (new.co_code == code.co_code and new.co_exceptiontable == code.co_exceptiontable
                and list(new.co_positions()) == list(code.co_positions()) and list(new.co_lines()) == list(code.co_lines())
                and codes.stack_size(codes.decode(code)) <= code.co_stacksize)
        if not same:
            wrong += 1
            print("differs:", code.co_filename, code.co_firstlineno, code.co_name)
    return wrong, count


def normalised(limit):
    """Every instruction becomes rows of NORMAL, jumps point into the list, every middle of a run can be spelled."""
    wrong = count = 0
    for code in library(limit):
        steps = codes.program(code)
        inside = set(steps)
        for step in steps:
            count += 1
            problems = [step.opname not in versions.NORMAL,
                        versions.NORMAL[step.opname].jumps != (step.target in inside),
                        step.target is not None and step.target.part != 0,
                        step.part > 0 and step.opname not in versions.SPELLINGS,
                        step.opname == "CALL_KW",
                        step.opname == "COMPARE_OP" and step.argval not in versions.COMPARE_SYMBOLS]
            if any(problems):
                wrong += 1
                print("bad:", code.co_filename, code.co_name, step, problems)
    return wrong, count


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return type(error), error.args, type(error.__cause__), type(error.__context__)


def _programs(limit):
    """Each program with (at most `limit`, where that is not 0) arguments."""
    import resume_cases
    for function in resume_cases.CASES:
        for n in (3, 1, 0, 4)[:limit or None]:
            yield function, lambda n=n: (n,)
    for method in resume_cases.METHODS:
        yield method, lambda: (resume_cases.Derived(), 3)


def executed(limit):
    """concrete.py, over normalised instructions, gives what Python gives."""
    import concrete
    wrong = count = 0
    for function, arguments in _programs(limit):
        if "super" in function.__code__.co_names and "LOAD_SUPER_ATTR" not in versions.RULES:
            continue        # super() without arguments looks at the real frame
        count += 1
        expected, found = outcome(function, *arguments()), outcome(concrete.run, function, arguments())
        if not _same(expected, found):
            wrong += 1
            print("differs:", function.__name__, expected, found)
    return wrong, count


def _same(a, b):
    return repr(a) == repr(b)


def _stopped(concrete, function, args, steps):
    """A frame after so many steps, or None where it has ended by then."""
    frame = concrete.Frame(function, args)
    for _ in range(steps):
        try:
            frame.step()
        except Exception:
            return None
        if frame.done:
            return None
    return frame


def resumed(limit):
    """Stopped after any number of instructions and resumed by real bytecode, a program ends as it does whole."""
    import concrete
    wrong = count = 0
    for function, arguments in _programs(limit):
        expected, steps = outcome(function, *arguments()), 1
        while (frame := _stopped(concrete, function, arguments(), steps)) is not None and steps < 400:
            for awaiting in (False, True):
                if awaiting and (frame.steps[frame.at].opname != "CALL" or super in frame.stack) or not _started(frame):
                    continue
                count += 1
                found = outcome(_resume, frame, awaiting)
                if not _same(expected, found):
                    wrong += 1
                    print("differs:", function.__name__, arguments(), frame.steps[frame.at], awaiting, expected, found)
                frame = _stopped(concrete, function, arguments(), steps)
            steps += 1
    return wrong, count


def _started(frame):
    return any(step.opname == "RESUME" for step in frame.steps[:frame.at])


def _resume(frame, awaiting):
    at, awaits, extra = frame.at, None, []
    if awaiting:
        awaits, at = frame.at, frame.at + 1
        extra = [frame.take_call(frame.steps[awaits])]
    function = resume_function(frame.code, at, frame.bound(), frame.kinds(), frame.function.__globals__, frame.cells(), awaits)
    return function(*[frame.slots[name] for name in frame.bound()], *frame.values(), *extra)


CHECKS = {"roundtrip": roundtrip, "normalised": normalised, "executed": executed, "resumed": resumed}

if __name__ == "__main__":
    wrong, count = CHECKS[sys.argv[1]](int(sys.argv[2]))
    print(f"{sys.argv[1]} {versions.PYTHON}: {count} looked at, {wrong} wrong")
    sys.exit(1 if wrong or not count else 0)
