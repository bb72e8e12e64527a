"""Random programs with breaks at random places: statements of all kinds, nested in each other, functions that call each other.

`program(seed)` is the source of a module with a function `main(x, log)`.  A break is a `print` of its number, with an operator of torch on each side;
`log` notes the order of what happens between.  Programs end, and do not depend on the data of tensors.

    source = program(7)
"""
from __future__ import annotations

import random
from collections.abc import Callable

PRELUDE = '''
import contextlib
import torch


class Manager:
    def __init__(self, log, swallows=False):
        self.log, self.swallows = log, swallows

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, kind, error, trace):
        self.log.append("out")
        return self.swallows and kind is ValueError


@contextlib.contextmanager
def managed(log):
    log.append("enter")
    try:
        yield 2
    finally:
        log.append("leave")


class Box:
    def __init__(self, value):
        self.value = value

    @property
    def twice(self):
        return self.value * 2

    def __getitem__(self, key):
        return self.value + key
'''


class Writer:
    """Writes one program; `budget` is how many statements there may still be."""

    def __init__(self, seed: int, loops: bool):
        self.random, self.loops = random.Random(seed), loops
        self.budget, self.number, self.names = 14, 0, 0
        self.functions: list[str] = []
        self.in_loop = False

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    def op(self) -> str:
        c = self.random.randint(1, 5)
        return self.random.choice([f"x = x + {c}", f"x = x * {c}", f"x = (x - {c}).sin()", f"x = torch.add(x, {c})", f"x = x + Box(x)[{c}]", "x = x + Box(x).twice"])

    def stop(self) -> list[str]:
        self.number += 1
        return [self.op(), f"print({self.number}, end=' ')  # break {self.number}", self.op()]

    def block(self, depth: int) -> list[str]:
        lines: list[str] = []
        for _ in range(self.random.randint(1, 3)):
            lines += self.statement(depth)
        return lines

    def statement(self, depth: int) -> list[str]:
        self.budget -= 1
        if depth >= 4 or self.budget <= 0:
            return [self.op()]
        kinds: list[Callable[[int], list[str]]] = [self.simple, self.simple, self.stops, self.stops, self.branch, self.context, self.attempt, self.call, self.call, self.match]
        if self.loops:
            kinds += [self.loop, self.loop, self.countdown, self.comprehension, self.generator]
        return self.random.choice(kinds)(depth)

    def simple(self, depth: int) -> list[str]:
        return [self.op(), f"log.append({self.random.randint(0, 99)})"]

    def stops(self, depth: int) -> list[str]:
        return self.stop()

    def branch(self, depth: int) -> list[str]:
        condition = self.random.choice(["x.shape[0] == 3", "x.dim() == 2", "log and x.dim() == 1", "(n := x.shape[0]) > 2"])
        return [f"if {condition}:", *indented(self.block(depth + 1)), "else:", *indented(self.block(depth + 1))]

    def context(self, depth: int) -> list[str]:
        what = self.random.choice(["Manager(log)", "managed(log) as k", "torch.no_grad()", "Manager(log), managed(log)", "torch.enable_grad()", "contextlib.nullcontext(3) as k"])
        return [f"with {what}:", *indented(self.block(depth + 1))]

    def attempt(self, depth: int) -> list[str]:
        inside = self.block(depth + 1)
        if raises := self.random.random() < 0.5:
            inside += ["log.append('raise')", f"raise {self.random.choice(['ValueError', 'KeyError'])}({self.random.randint(0, 9)})"]
        if raises and self.random.random() < 0.3:
            return ["with contextlib.suppress(KeyError), Manager(log, True):", *indented(inside)]
        lines = ["try:", *indented(inside), "except ValueError as error:", *indented([*self.block(depth + 1), "log.append(error.args)"]),
                 "except KeyError:", *indented(self.block(depth + 1))]
        if not raises and self.random.random() < 0.5:
            lines += ["else:", *indented(self.block(depth + 1))]
        if self.random.random() < 0.5:
            lines += ["finally:", *indented(self.block(depth + 1))]
        return lines

    def call(self, depth: int) -> list[str]:
        name = self.function(depth)
        form = self.random.choice(["x = {f}(x, log)", "x = {f}(x, log=log) + 1", "x = (lambda y: {f}(y * 2, log))(x)", "x = torch.add({f}(x, log), {f}(x + 1, log))",
                                   "x = {f}(*[x], **{{'log': log}})", "x = Box({f}(x, log)).twice"])
        return [form.format(f=name)]

    def match(self, depth: int) -> list[str]:
        return ["match {'k': [x.dim() % 2, 2]}:", "    case {'k': [0, n]}:", *indented(indented(self.block(depth + 1))), "    case _:",
                *indented(indented(self.block(depth + 1)))]

    def function(self, depth: int) -> str:
        name, saved = self.name("f"), self.in_loop
        self.in_loop = False
        body = self.block(depth + 1)
        if self.random.random() < 0.3:
            body = ["count = 1", "def bump():", "    nonlocal count", "    count += 1", *indented(["log.append(count)", *(self.random.choice([[], self.stop_of("z")]))]), "    return count",
                    "x = x + bump()", *body]
        self.in_loop = saved
        self.functions.append("\n".join([f"def {name}(x, log):", *indented([*body, "return x"])]))
        return name

    def stop_of(self, name: str) -> list[str]:
        self.number += 1
        return [f"print({self.number}, end=' ')  # break {self.number}"]

    # -- loops -----------------------------------------------------------------------------------------------------
    def loop(self, depth: int) -> list[str]:
        i = self.name("i")
        over = self.random.choice([f"{i} in range(3)", f"{i} in [1, 2]", f"{i}, k in enumerate([5, 6])", f"k, {i} in zip([1, 2, 3], (4, 5))", f"k, {i} in {{'a': 1, 'b': 2}}.items()",
                                   f"{i} in reversed([1, 2])", f"{i} in map(lambda v: v + 1, [1, 2])", f"_, {i} in enumerate(map(lambda v: v * 2, [1, 2]))", f"{i} in {{3: 1, 4: 2}}", f"{i}, _ in enumerate(filter(None, [1, 2]))", f"{i} in iter((1, 2))"])
        saved, self.in_loop = self.in_loop, True
        body = [f"x = x + {i}", *self.block(depth + 1)]
        self.in_loop = saved
        if self.random.random() < 0.3:
            body.insert(self.random.randint(0, 1), f"if {i} == 2: {self.random.choice(['continue', 'break'])}")
        lines = [f"for {over}:", *indented(body)]
        return [*lines, "else:", *indented(self.block(depth + 1))] if self.random.random() < 0.3 else lines

    def countdown(self, depth: int) -> list[str]:
        n = self.name("n")
        saved, self.in_loop = self.in_loop, True
        body = self.block(depth + 1)
        self.in_loop = saved
        return [f"{n} = 3", f"while {n} > 0:", *indented([f"{n} -= 1", *body])]

    def comprehension(self, depth: int) -> list[str]:
        name = self.function(depth)
        form = self.random.choice(["x = sum([{f}(x + i, log) for i in range(3)])", "x = sum({{i: {f}(x, log) for i in range(2)}}.values())", "x = [{f}(x * i, log) for i in range(3) if i != 1][-1]",
                                   "x = [[{f}(x + i, log) for i in range(2)][j] for j in range(2)][1]", "x = torch.stack([{f}(x, log) for _ in 'ab'])[0]"])
        return [form.format(f=name)]

    def generator(self, depth: int) -> list[str]:
        name, saved = self.name("g"), self.in_loop
        self.in_loop = False
        first, second = self.block(depth + 1), self.block(depth + 1)
        self.in_loop = saved
        self.functions.append("\n".join([f"def {name}(x, log):", *indented([*first, "yield x", *second, "yield x * 2"])]))
        if self.random.random() < 0.3:
            outer = self.name("g")
            self.functions.append("\n".join([f"def {outer}(x, log):", "    yield x", f"    yield from {name}(x, log)"]))
            name = outer
        form = self.random.choice(["for y in {f}(x, log):\n    x = x + y", "x = sum({f}(x, log))", "x = sum(y * 2 for y in {f}(x, log))", "for y, k in zip({f}(x, log), [1, 2]):\n    x = y * k"])
        return form.format(f=name).split("\n")

    def text(self) -> str:
        body = ["log.append('start')", self.op(), *self.block(0), *self.stop(), *self.block(0), self.op(), "return x, len(log)"]
        main = "\n".join(["def main(x, log):", *indented(body)])
        return "\n\n\n".join([PRELUDE, *self.functions, main]) + "\n"


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def program(seed: int, loops: bool = True) -> str:
    return Writer(seed, loops).text()
