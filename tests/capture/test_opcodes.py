"""Every normalised instruction of every supported Python has a handler; those that break on purpose are named with their reason."""
import types

import pytest
import torch
from harness import capture

from firesteel.capture import machine, opcodes_statements, versions
from firesteel.capture.instr import Instr
from firesteel.capture.opcodes import OPCODES
from firesteel.capture.policy import SymbolPolicy
from firesteel.capture.values.base import UserRaise
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.containers import ListValue, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import CellValue
from firesteel.capture.values.mappings import DictValue
from firesteel.errors import Break
from firesteel.graph.abstract import AbstractWorld


def test_every_normalised_instruction_has_a_handler():
    missing = [name for name in versions.NORMAL if name not in OPCODES]
    assert not missing
    assert not [name for name in OPCODES if name not in versions.NORMAL]


def test_instructions_that_break_say_why():
    assert all(reason for reason in opcodes_statements.BREAKS_ON_PURPOSE.values())
    assert set(opcodes_statements.BREAKS_ON_PURPOSE) <= set(versions.NORMAL)
    for name in opcodes_statements.BREAKS_ON_PURPOSE:
        with pytest.raises(Break, match=name):
            step(Instr(name), [NONE, NONE])


def step(instr, stack, slots=None, namespace=None):
    """One instruction on a frame of its own: what of it is left."""
    m = machine.SymbolicMachine(AbstractWorld, SymbolPolicy(None))
    code = (lambda: None).__code__
    frame = machine.Frame(code, {"known": 3}, dict(slots or {}))
    frame.program = [instr, Instr("NOP"), Instr("NOP")]
    frame.pc, frame.stack, frame.namespace = 1, list(stack), namespace
    for n, each in enumerate(frame.program):
        each.index = n
    m.frames.append(frame)
    OPCODES[instr.opname](m, frame, instr)
    return frame


def consts(stack):
    return [value.constant() if value.is_constant() else value for value in stack]


# instructions that only 3.12 and 3.13 have, by hand: (instruction, stack before, stack after)
LATER = {
    "TO_BOOL": (Instr("TO_BOOL"), [ListValue([])], [False]),
    "FORMAT_SIMPLE": (Instr("FORMAT_SIMPLE"), [ConstValue(3)], ["3"]),
    "FORMAT_WITH_SPEC": (Instr("FORMAT_WITH_SPEC"), [ConstValue(3), ConstValue("03d")], ["003"]),
    "CONVERT_VALUE": (Instr("CONVERT_VALUE", argval=repr), [ConstValue("a")], ["'a'"]),
    "END_SEND": (Instr("END_SEND"), [ConstValue(1), ConstValue(2)], [2]),
    "CLEANUP_THROW": (Instr("CLEANUP_THROW"), [NONE, NONE, ExceptionValue(StopIteration, [ConstValue(7)])], [None, 7]),
}


@pytest.mark.parametrize("name", list(LATER))
def test_later_instructions(name):
    instr, before, after = LATER[name]
    assert consts(step(instr, before).stack) == after


def test_cleanup_throw_raises_other_errors():
    with pytest.raises(UserRaise):
        step(Instr("CLEANUP_THROW"), [NONE, NONE, ExceptionValue(ValueError, [])])


def test_load_fast_and_clear_keeps_the_outer_variable():
    frame = step(Instr("LOAD_FAST_AND_CLEAR", argval="x"), [], {"x": ConstValue(1)})
    assert consts(frame.stack) == [1] and "x" not in frame.slots
    assert "x" not in step(Instr("LOAD_FAST_AND_CLEAR", argval="x"), []).slots


def test_names_of_class_bodies():
    names = DictValue({"a": (ConstValue("a"), ConstValue(1))})
    assert consts(step(Instr("LOAD_NAME", argval="a"), [], namespace=names).stack) == [1]
    assert consts(step(Instr("LOAD_NAME", argval="known"), [], namespace=names).stack) == [3]
    assert consts(step(Instr("LOAD_FROM_DICT_OR_GLOBALS", argval="known"), [names]).stack) == [3]
    cell = {"b": CellValue(ConstValue(5))}
    assert consts(step(Instr("LOAD_FROM_DICT_OR_DEREF", argval="b"), [names], cell).stack) == [5]
    step(Instr("STORE_NAME", argval="c"), [ConstValue(2)], namespace=names)
    assert "c" in names.entries
    step(Instr("DELETE_NAME", argval="c"), [], namespace=names)
    assert "c" not in names.entries


def test_stop_iteration_leaves_a_generator_as_runtime_error():
    frame = step(Instr("CALL_INTRINSIC_1", argval="STOPITERATION_ERROR"), [ExceptionValue(StopIteration, [])])
    assert frame.stack[-1].python_type() is RuntimeError


def test_type_parameters_break():
    with pytest.raises(Break, match="TYPEVAR"):
        step(Instr("CALL_INTRINSIC_1", argval="TYPEVAR"), [ConstValue("T")])


def test_match_instructions():
    assert consts(step(Instr("MATCH_SEQUENCE"), [TupleValue([])]).stack)[1] is True
    assert consts(step(Instr("MATCH_SEQUENCE"), [ConstValue("text")]).stack)[1] is False
    assert consts(step(Instr("MATCH_MAPPING"), [DictValue({})]).stack)[1] is True


def test_an_instruction_without_a_handler_would_break(monkeypatch):
    monkeypatch.setattr(machine, "OPCODES", types.MappingProxyType({k: v for k, v in OPCODES.items() if k != "BINARY_OP"}))
    compiled, backend = capture(lambda x: x.sin() + 1)
    x = torch.ones(2)
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    assert len(backend.graphs) == 1
