"""decode, assemble and the tables inside code objects."""
import sys

import pytest

sys.path.insert(0, __file__.rsplit("/", 1)[0])

import bytecode_checks  # noqa: E402
import elsewhere  # noqa: E402

from firesteel.capture import code as codes  # noqa: E402
from firesteel.capture.instr import Instr


def sample(a, b=2):
    try:
        for i in range(a):
            b += i
    except ValueError:
        b = None
    return b


def test_jumps_and_handlers_point_to_instructions():
    instrs = codes.decode(sample.__code__)
    assert [i.index for i in instrs] == list(range(len(instrs)))
    loop = next(i for i in instrs if i.opname == "FOR_ITER")
    assert loop.target in instrs and loop.target.index > loop.index
    assert loop.handler is not None and loop.handler.target.opname == "PUSH_EXC_INFO" and loop.handler.depth == 0
    assert instrs[0].handler is None


def test_positions_are_the_users():
    store = [i for i in codes.decode(sample.__code__) if i.opname == "BINARY_OP"][0]
    line, end_line, column, end_column = store.position
    assert line == end_line == sample.__code__.co_firstlineno + 3 and end_column > column


def test_decoding_is_cached_by_identity():
    code = sample.__code__
    assert codes.decode(code) is codes.decode(code)
    assert codes.decode(code.replace(co_firstlineno=1)) is not codes.decode(code)
    twin = code.replace()
    assert twin == code and codes.decode(twin) is not codes.decode(code)


def test_changed_code_runs():
    instrs = codes.copy_instrs(codes.decode(sample.__code__))
    constant = next(i for i in instrs if i.opname == "BINARY_OP")
    constant.arg = bytecode_checks.versions.BINARY_SYMBOLS.index("-=")
    changed = type(sample)(codes.assemble(instrs, sample.__code__), globals(), "changed", (2,))
    assert sample(4) == 8 and changed(4) == -4
    assert codes.decode(sample.__code__)[constant.index].argval == "+="


def test_long_jumps_get_extended_arguments():
    body = "".join(f"        x = x + {n}\n" for n in range(400))
    space = {}
    exec(f"def f(n, x=0):\n    while n:\n        n -= 1\n{body}    return x\n", space)
    code = space["f"].__code__
    instrs = codes.copy_instrs(codes.decode(code))
    jump = next(i for i in instrs if i.target is not None)
    for _ in range(300):    # push the target further away
        instrs.insert(jump.index + 1, Instr("NOP", position=jump.position))
    grown = codes.assemble(instrs, code)
    assert type(space["f"])(grown, {}, "g", (0,))(2) == space["f"](2) == 2 * sum(range(400))


def test_impossible_jump_is_refused():
    instrs = codes.copy_instrs(codes.decode(sample.__code__))
    loop = next(i for i in instrs if i.opname == "FOR_ITER")
    loop.target = instrs[0]
    with pytest.raises(ValueError, match="cannot jump back"):
        codes.assemble(instrs, sample.__code__)


@pytest.mark.parametrize("ranges", [[], [(0, 5, 9, 0, False)], [(3, 70, 5000, 3, True), (80, 300000, 12, 70, False)]])
def test_exception_table_round_trip(ranges):
    assert codes.read_exception_table(codes.write_exception_table(ranges)) == ranges


def test_standard_library_round_trips():
    wrong, count = bytecode_checks.roundtrip(1500)
    assert count == 1500 and wrong == 0


@pytest.mark.parametrize("version", elsewhere.OTHERS)
def test_standard_library_round_trips_elsewhere(version):
    elsewhere.run_check(version, "roundtrip", 1500)
