"""How fast is the size algebra?  Builds and simplifies the same random expressions with firesteel.sym and with sympy.

    python bench/sym.py             # prints microseconds an operation, the ratio, and the cost of the questions

Times are CPU time, so that a busy machine disturbs less.  Only this benchmark imports sympy.  The expressions are what shape
and index code makes: sums, products, floor divisions and remainders of a few non-negative symbols.  sympy gets its own
`floor(a/b)` and `Mod`, and integer, non-negative symbols.
"""
from __future__ import annotations

import random
import time
import timeit
from collections.abc import Callable

import sympy
import torch

from firesteel.sym import expr as E
from firesteel.sym.env import ShapeEnv
from firesteel.sym.symint import to_symint

SYMBOLS = 6
OPERATIONS = ("add", "sub", "mul", "floordiv", "mod")


def random_program(seed: int, length: int) -> list[tuple[str, int, int]]:
    """Instructions (op, left, right) over a growing list of values; the first ones are symbols and small numbers."""
    rng = random.Random(seed)
    program = []
    for step in range(length):
        op = rng.choices(OPERATIONS, (4, 2, 3, 2, 2))[0]
        low = 0 if rng.random() < 0.5 else max(0, step - 4)
        right = rng.randrange(SYMBOLS) if op in ("floordiv", "mod", "mul") else rng.randrange(low, SYMBOLS + 3 + step)
        program.append((op, rng.randrange(low, SYMBOLS + 3 + step), right))
    return program


def run(program: list[tuple[str, int, int]], start: list, functions: dict[str, Callable]) -> list:
    values = list(start)
    for op, left, right in program:
        values.append(functions[op](values[left], values[right]))
    return values


OURS = {"add": E.add, "sub": E.sub, "mul": E.mul, "floordiv": E.floordiv, "mod": E.mod}
THEIRS = {"add": lambda a, b: sympy.expand(a + b), "sub": lambda a, b: sympy.expand(a - b), "mul": lambda a, b: sympy.expand(a * b),
          "floordiv": lambda a, b: sympy.floor(a / b), "mod": lambda a, b: sympy.Mod(a, b)}


def clear_sympy() -> None:
    sympy.core.cache.clear_cache()


def seconds_of(seeds: range, length: int, functions: dict[str, Callable], starts: Callable[[int], list]) -> float:
    """Cold: every program has symbols of its own, so nothing is remembered from another."""
    total = 0.0
    for seed in seeds:
        program, start = random_program(seed, length), starts(seed)
        begin = time.process_time()
        run(program, start, functions)
        total += time.process_time() - begin
    return total


def our_start(seed: int) -> list:
    return [*[E.symbol(f"p{seed}_{k}") for k in range(SYMBOLS)], 2, 3, 8]


def their_start(seed: int) -> list:
    return [*sympy.symbols(" ".join(f"p{seed}_{k}" for k in range(SYMBOLS)), integer=True, positive=True), *map(sympy.Integer, (2, 3, 8))]


def compare(programs: int = 30, length: int = 12) -> None:
    clear_sympy()
    seeds = range(programs)
    seconds_of(range(-2, 0), length, OURS, our_start)
    seconds_of(range(-2, 0), length, THEIRS, lambda seed: their_start(abs(seed) + 10_000))
    ours = seconds_of(seeds, length, OURS, our_start)
    theirs = seconds_of(seeds, length, THEIRS, their_start)
    count = programs * length
    print(f"build, {count} operations: firesteel {ours / count * 1e6:8.2f} us/op, sympy {theirs / count * 1e6:8.2f} us/op, {theirs / ours:6.1f}x")


def compare_index() -> None:
    """(b*T + i) // T % T and friends with 0 <= i < T: sympy cannot use the ranges and is asked for `simplify`-free building only."""
    begin = time.process_time()
    count = 200
    for k in range(count):
        T, C, b = (E.symbol(f"{name}{k}") for name in "TCb")
        i, j = (E.make("axis", "i64", (), f"{name}{k}") for name in "ij")
        flat = (b * T + i) * C + j
        ranges = {i: (0, T - 1), j: (0, C - 1)}
        assert E.simplify(flat // C % T, ranges) is i and E.simplify(flat % C, ranges) is j
        assert E.simplify(flat // (T * C), ranges) is b
    print(f"index digits of a 3-d view, symbolic: {(time.process_time() - begin) / count * 1e6:8.1f} us for three")


def questions() -> None:
    env = ShapeEnv()
    s0, s1 = env.create_symbol(8, "x"), env.create_symbol(16, "y")
    a, b = to_symint(s0, env), to_symint(s1, env)
    for text, function in {
        "s0 + 3 (repeated)": lambda: s0 + 3,
        "same question again": lambda: env.decide(s0 < s1),
        "node: a.mul(b)": lambda: a.node.mul(b.node),
        "node: a.eq(b), guard_bool": lambda: a.node.eq(b.node).guard_bool("", 0),
        "SymInt: a * 2": lambda: a * 2,
        "SymInt: bool(a < b)": lambda: bool(a < b),
        "to_symint": lambda: to_symint(s0, env),
    }.items():
        number = 20_000
        print(f"{text:32s} {min(timeit.repeat(function, timer=time.process_time, number=number, repeat=3)) / number * 1e6:6.2f} us")


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def wrappers() -> None:
    env = ShapeEnv()
    s0, s1 = env.create_symbol(8, "x"), env.create_symbol(16, "y")
    sizes = tuple(to_symint(s, env) for s in (s0, s1, 4))
    strides = tuple(to_symint(s, env) for s in (s1 * 4, 4, 1))
    make = torch.Tensor._make_wrapper_subclass
    number = 2_000
    for text, function in {
        "wrapper tensor, symbolic": lambda: make(_Wrapper, sizes, strides, dtype=torch.float32),
        "same, storage_size given": lambda: make(_Wrapper, sizes, strides, dtype=torch.float32, storage_size=0),
        "same, and is_contiguous()": lambda: make(_Wrapper, sizes, strides, dtype=torch.float32, storage_size=0).is_contiguous(),
        "wrapper tensor, static": lambda: make(_Wrapper, (8, 16, 4), (64, 4, 1), dtype=torch.float32),
    }.items():
        print(f"{text:32s} {min(timeit.repeat(function, timer=time.process_time, number=number, repeat=3)) / number * 1e6:6.2f} us")


if __name__ == "__main__":
    compare()
    compare_index()
    questions()
    wrappers()
