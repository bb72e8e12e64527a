"""Makes a failing program smaller while it fails in the same way: fewer statements, results and inputs, plainer inputs and options."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from program_writer import Program


def without(items: tuple, number: int) -> tuple:
    return items[:number] + items[number + 1:]


def fewer_statements(program: Program) -> Iterator[Program]:
    """Without one statement, and without the result that it made."""
    for number in reversed(range(len(program.statements))):
        returns = tuple(name for name in program.returns if not program.statements[number].startswith(f"{name} = "))
        if returns:
            yield dataclasses.replace(program, statements=without(program.statements, number), returns=returns)


def fewer_returns(program: Program) -> Iterator[Program]:
    for number in range(len(program.returns) if len(program.returns) > 1 else 0):
        yield dataclasses.replace(program, returns=without(program.returns, number))


def fewer_inputs(program: Program) -> Iterator[Program]:
    for number in reversed(range(len(program.inputs))):
        yield dataclasses.replace(program, inputs=without(program.inputs, number))


def plainer_inputs(program: Program) -> Iterator[Program]:
    plain = {"layout": "contiguous", "grad": "", "part": ""}
    for number, one in enumerate(program.inputs):
        for name, value in plain.items():
            if getattr(one, name) != value:
                changed = dataclasses.replace(one, **{name: value})
                yield dataclasses.replace(program, inputs=(*program.inputs[:number], changed, *program.inputs[number + 1:]))


def plainer_options(program: Program) -> Iterator[Program]:
    for name, value in {"dynamic": None, "inference": False, "eager_rounding": False}.items():
        if dict(program.options)[name] != value:
            yield dataclasses.replace(program, options=tuple({**dict(program.options), name: value}.items()))


STEPS = (fewer_statements, fewer_returns, fewer_inputs, plainer_inputs, plainer_options)


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 200) -> Program:
    """The smallest found; `fails` says whether a program still fails in the same way."""
    improved = True
    while improved:
        improved = False
        for step in STEPS:
            for candidate in step(program):
                tries -= 1
                if tries < 0:
                    return program
                if fails(candidate):
                    program, improved = candidate, True
                    break
    return program
