"""Writes random programs: `write(seed)` is a `Program`, whose `source()` is a runnable file.

A program is drawn statement by statement from the rows of program_grammar.py.  Each statement is run by eager as it is drawn, once for each of the two
sets of sizes, so that what eager refuses, or what makes numbers too large, is drawn again; the variables that later rows choose from are these results.
The same seed gives the same program on every device.

    program = write(7)
    print(program.source())
"""
from __future__ import annotations

import dataclasses
import random
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import program_functions
import torch
import torch.nn.functional as F
from program_grammar import ROWS, Row
from program_inputs import LAYOUTS, PARTS, Made, tensor

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "boolean": torch.bool, "c64": torch.complex64, "c128": torch.complex128}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCOPE = {"torch": torch, "F": F, "tensor": tensor, "Made": Made, **DTYPES, **program_functions.NAMES}
PALETTES = (["f64"], ["f64"], ["f32"], ["f32"], ["bf16"], ["bf16", "f32"], ["f32", "f64"], ["f64", "f32", "bf16"])
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 16, 17)
NUMBERS = ("0.5", "-0.75", "1.5", "0.25", "2", "-0.02", "0", "1")
REFUSED = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, ZeroDivisionError)     # what eager, or Python, raises for a statement
LARGEST, MOST = 1e3, 3000        # magnitude and number of elements of any result
# Before torch 2.13, eager's gradients of torch.func are zeros in inference mode; later ones, and compiled code with either, give the gradients.
NOT_IN_INFERENCE = ("torch.func.",) if torch.__version__ < (2, 13) else ()

HEADER = '''"""A random program on which compiled and eager differ.  Run from the repository: PYTHONPATH=src:tests/fuzz python FILE"""
import torch
import torch.nn.functional as F
from program_functions import SINK, Cubed, Doubled, Parts, Squashed, checkpoint, fs
from program_inputs import Made, tensor

f64, f32, bf16, i64, boolean, c64, c128 = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128

'''
FOOTER = '''

if __name__ == "__main__":
    import program_check
    program_check.main(inputs, program, **OPTIONS)
'''


@dataclass(frozen=True)
class Input:
    name: str
    shapes: tuple[tuple, tuple]
    dtype: str
    layout: str = "contiguous"
    grad: str = ""
    part: str = ""
    seed: int = 0
    alias: str = ""         # an expression of an earlier input instead of all that

    def line(self) -> str:
        if self.alias:
            return f"{self.name} = Made({self.alias}, None)"
        return f"{self.name} = tensor({self.shapes}[i], {self.dtype}, {self.layout!r}, {self.grad!r}, {self.part!r}, {self.seed}, device)"


@dataclass(frozen=True)
class Program:
    seed: int
    inputs: tuple[Input, ...]
    statements: tuple[str, ...]
    returns: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def text(self) -> str:
        """The two functions: `inputs(i, device)`, `program(...)`, and OPTIONS."""
        names = [one.name for one in self.inputs]
        made = [*(one.line() for one in self.inputs), f"return [{', '.join(names)}]"]
        body = [line for statement in self.statements for line in statement.split("\n")] + [f"return {', '.join(self.returns)},"]
        return "\n".join([f"OPTIONS = dict({', '.join(f'{k}={v!r}' for k, v in self.options)})", "", "", 'def inputs(i, device="cpu"):', *indented(made), "", "",
                          f"def program({', '.join(names)}):", *indented(body), ""])

    def source(self) -> str:
        return HEADER + self.text() + FOOTER

    def load(self) -> dict[str, Any]:
        scope = dict(SCOPE)
        exec(compile(self.text(), f"<program {self.seed}>", "exec"), scope)
        return scope


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


UNITS = {0: 0, 1: 4}        # depth of a variable -> how many of its `eps` it may be off; one operator, such as a norm, may round in several places


@dataclass(eq=False)
class Variable:
    """A variable with its value for both sets of sizes.  `depth`: how many roundings made it; `eps`: the coarsest of them."""
    name: str
    tensors: list[torch.Tensor]
    depth: int
    eps: float

    @property
    def dtype(self) -> torch.dtype: return self.tensors[0].dtype

    @property
    def dim(self) -> int: return self.tensors[0].dim()

    @cached_property
    def storages(self) -> set[int]:
        return {storage(t) for t in self.tensors}

    def shares(self, other: Variable) -> bool:
        return bool(self.storages & other.storages)

    def _values(self) -> list[torch.Tensor]:
        return [t.detach().double() for t in self.tensors]

    def _margin(self, t: torch.Tensor) -> float:
        return UNITS.get(self.depth, 64) * self.eps * max(1.0, float(t.abs().max()))

    def apart(self, c: Any) -> bool:
        """No element is within rounding errors of c."""
        return self.depth < 1 or all(not t.numel() or float((t - float(c)).abs().min()) > self._margin(t) for t in self._values())

    def apart_from_halves(self) -> bool:
        return all(not t.numel() or float(((t * 2).round() - t * 2).abs().min()) > self._margin(t) for t in self._values())

    def distinct(self, d: int | None) -> bool:
        """No two elements along d are within rounding errors of each other."""
        for t in self._values():
            t = t.reshape(-1) if d is None or not t.dim() else t
            gaps = t.sort(d or 0).values.diff(dim=d or 0)
            if gaps.numel() and float(gaps.min()) <= self._margin(t):
                return False
        return True

    def sum_apart(self, c: Any) -> bool:
        return all(abs(float(t.sum()) - float(c)) > 0.05 + self._margin(t) * t.numel() for t in self._values())


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


class Writer:
    """Draws one program; every draw is from `self.random`."""

    def __init__(self, seed: int):
        self.seed, self.random = seed, random.Random(seed)
        self.palette = self.random.choice(PALETTES)
        self.grads = self.random.random() < 0.85
        self.inputs: list[Input] = []
        self.statements: list[str] = []
        self.variables: list[Variable] = []
        self.scopes: list[dict[str, Any]] = [dict(SCOPE), dict(SCOPE)]
        self.broken = False

    # -- inputs ----------------------------------------------------------------------------------------------------
    def size(self) -> int:
        r = self.random.random()
        return 0 if r < 0.015 else 1 if r < 0.12 else self.random.choice(SIZES)

    def shapes(self) -> list[tuple[tuple, tuple]]:
        """Shapes of the first inputs, of a few letters each of which has a size in both sets."""
        letters = {letter: (n, n if self.random.random() < 0.4 else self.size()) for letter in "nmk" for n in [self.size()]}
        image = self.random.random() < 0.25
        if image:
            letters["h"] = tuple(self.random.choice((4, 5, 6, 8)) for _ in range(2))
        forms = ["nkhh", "nkhh", "k", "kh", "nk"] if image else ["nm", "nm", "nkm", "m", "n", "mm", "nmk", "mk", "km", "nnm", "", "kmn"]
        chosen = [self.random.choice(forms[:2])] + self.random.choices(forms, k=self.random.randint(0, 3))
        return [tuple(tuple(letters[letter][i] for letter in form) for i in range(2)) for form in chosen]

    def add_input(self, shapes: tuple[tuple, tuple], dtype: str, grad: str | None = None, layout: str | None = None) -> str:
        name, r = f"x{len(self.inputs)}", self.random
        floating = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex
        if grad is None:
            grad = r.choice(["leaf", "inner", "inner", ""]) if self.grads and floating else ""
        part = r.choice(list(PARTS)) if dtype in ("f32", "f64") and layout is None and r.random() < 0.08 else "conj" if dtype[0] == "c" and r.random() < 0.5 else ""
        layout = layout or r.choice(list(LAYOUTS) + ["contiguous"] * 6)
        return self.put_input(Input(name, shapes, dtype, layout, grad, part, r.randrange(10_000)))

    def put_input(self, one: Input) -> str:
        for i, scope in enumerate(self.scopes):
            scope.update(i=i, device="cpu")
            exec(one.line(), scope)
            scope.setdefault("mades", {})[one.name] = scope[one.name]
            scope[one.name] = scope[one.name].arg
        self.inputs.append(dataclasses.replace(one, alias=one.alias))
        values = [scope[one.name] for scope in self.scopes]
        self.variables.append(Variable(one.name, values, 0, eps_of(values[0].dtype)))
        return one.name

    def first_inputs(self) -> None:
        for number, shapes in enumerate(self.shapes()):
            r = self.random.random()
            dtype = self.random.choice(self.palette) if number == 0 or r < 0.7 else "i64" if r < 0.85 else "boolean" if r < 0.93 else "c64" if self.palette[0] == "f32" else "c128"
            self.add_input(shapes, dtype)
        if self.random.random() < 0.4:
            self.add_input(self.inputs[0].shapes, "i64")
        if self.random.random() < 0.05:
            self.add_alias()

    def add_alias(self) -> None:
        one = self.inputs[0]
        made = self.random.choice(["{}.arg", "{}.arg[1:]", "{}.arg.detach()"]).format(one.name)
        for scope in self.scopes:
            scope[one.name] = scope["mades"][one.name]
        try:
            self.put_input(Input(f"x{len(self.inputs)}", ((), ()), one.dtype, alias=made))
        finally:
            for scope in self.scopes:
                scope[one.name] = scope["mades"][one.name].arg

    # -- statements ------------------------------------------------------------------------------------------------
    def statement(self) -> None:
        for _ in range(60):
            if self.attempt(self.random.choices(ROWS, [row.weight for row in ROWS])[0]):
                return

    def attempt(self, row: Row) -> bool:
        drawn = self.draw(row)
        if drawn is None or (row.when is not None and not row.when(drawn)):
            return False
        before = len(self.inputs)
        for slot, shape in row.inputs.items():
            drawn[slot] = self.parameter([shape(*(v.tensors[i] for v in drawn["chosen"])) for i in range(2)], drawn["chosen"][0])
        if self.run(row, drawn):
            return True
        self.forget_inputs(before)
        return False

    def draw(self, row: Row) -> dict[str, Any] | None:
        drawn: dict[str, Any] = {"y": f"t{len(self.statements)}", "k": self.random.random() < 0.5, "c": self.random.choice(NUMBERS), "i": self.random.randint(1, 3)}
        chosen = []
        for slot, need in row.needs.items():
            candidates = [v for v in self.variables if need(v)]
            if not candidates:
                return None
            drawn[slot] = self.random.choices(candidates, range(2, len(candidates) + 2))[0]
            chosen.append(drawn[slot])
        dim = max(chosen[0].dim, 1)
        drawn["d"], drawn["d2"] = (self.random.randrange(dim) - (dim if self.random.random() < 0.4 else 0) for _ in range(2))
        drawn["chosen"] = chosen
        return drawn

    def parameter(self, shapes: list[Any], like: Variable) -> str:
        grad = None
        if isinstance(shapes[0][-1], str):
            shapes, grad = [s[0] for s in shapes], ""
        dtype = NAMES[like.dtype] if like.dtype.is_floating_point else self.palette[0]
        return self.add_input((tuple(map(int, shapes[0])), tuple(map(int, shapes[1]))), dtype, grad, None if grad is None else "contiguous")

    def forget_inputs(self, count: int) -> None:
        gone = {one.name for one in self.inputs[count:]}
        del self.inputs[count:]
        self.variables = [v for v in self.variables if v.name not in gone]

    def run(self, row: Row, drawn: dict[str, Any]) -> bool:
        text = row.text.format(**{k: v.name if isinstance(v, Variable) else v for k, v in drawn.items()})
        try:
            for scope in self.scopes:
                exec(text, scope)
        except REFUSED:
            self.broken |= bool(row.writes) and self.wrote_half(drawn["chosen"][0])
            return False
        ok = self.note_write(drawn) if row.writes else self.note_result(drawn)
        if ok:
            self.statements.append(text)
        return ok

    def wrote_half(self, v: Variable) -> bool:
        """Was a write done for one set of sizes before the other one refused it?"""
        return any(not torch.equal(scope[v.name], t) for scope, t in zip(self.scopes, v.tensors))

    def note_result(self, drawn: dict[str, Any]) -> bool:
        values = [scope[drawn["y"]] for scope in self.scopes]
        if not all(isinstance(t, torch.Tensor) and tame(t) for t in values) or values[0].dim() != values[1].dim() or values[0].dtype != values[1].dtype:
            return False
        if any(t.device.type == "meta" or t.dtype not in NAMES for t in values):
            return False
        sources = [*drawn["chosen"], *(v for v in self.variables if v.name in (drawn.get("p"), drawn.get("q")))]
        own = any(storage(values[0]) in v.storages for v in sources)
        exact = eps_of(values[0].dtype) == 0.0
        depth = 0 if exact else max(v.depth for v in sources) + (not own)
        self.variables.append(Variable(drawn["y"], values, depth, max(eps_of(values[0].dtype), *(v.eps for v in sources))))
        return True

    def note_write(self, drawn: dict[str, Any]) -> bool:
        target = drawn["a"]
        if not all(map(tame, target.tensors)):
            self.broken = True
            return False
        depth, eps = max(v.depth for v in drawn["chosen"]) + 1, max(v.eps for v in drawn["chosen"])
        for v in self.variables:
            if v.shares(target):
                v.depth, v.eps = max(depth, v.depth), max(eps, v.eps)
        return True

    # -- the whole -------------------------------------------------------------------------------------------------
    def program(self) -> Program | None:
        self.first_inputs()
        for _ in range(self.random.randint(2, 9)):
            self.statement()
        if self.broken or not self.statements:
            return None
        made = [v.name for v in self.variables if v.name.startswith("t")]
        unread = [name for name in made if not any(re.search(rf"\b{name}\b(?! = )", text) for text in self.statements)]
        unread = self.random.sample(unread, len(unread) // 2) if self.random.random() < 0.25 else unread      # what nobody asks for may be written and saved too
        returns = unread[-4:] + self.random.sample(made, min(len(made), self.random.randint(0, 2)))
        if not returns or self.random.random() < 0.1:
            returns.append(self.random.choice(self.variables).name)
        options = {"dynamic": self.random.choice([None, None, True]), "grad": self.random.random() < 0.93, "inference": self.random.random() < 0.03, "eager_rounding": self.random.random() < 0.15}
        options["inference"] &= not any(name in text for name in NOT_IN_INFERENCE for text in self.statements)
        return Program(self.seed, tuple(self.inputs), tuple(self.statements), tuple(dict.fromkeys(returns)), tuple(options.items()))


def tame(t: torch.Tensor) -> bool:
    if t.numel() > MOST or not t.numel() or t.dtype is torch.bool:
        return t.numel() <= MOST
    return bool(torch.isfinite(t).all()) and float(t.detach().abs().max()) <= LARGEST


def write(seed: int) -> Program:
    """The program of a seed.  Programs that eager refuses as a whole, in the backward say, are drawn again."""
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        for trial in range(1000):
            torch.manual_seed(seed)
            program = drawn(1000 * seed + trial)
            if program is not None and runs(program):
                return program
    raise AssertionError(f"no program for seed {seed}")


def drawn(seed: int) -> Program | None:
    """None also where a variable cannot be read any more: another result of its `unbind` was written."""
    try:
        return Writer(seed).program()
    except RuntimeError:
        return None


def runs(program: Program) -> bool:
    """Does eager run it, for both sets of sizes and with finite gradients?"""
    from program_check import observe
    try:
        scope = program.load()
        for i in range(2):
            seen = observe(scope["program"], scope["inputs"](i), dict(program.options)["grad"], dict(program.options)["inference"])
            if not all(g is None or bool(torch.isfinite(g).all()) and (not g.numel() or float(g.abs().max()) < 1e5) for g in seen.grads):
                return False
    except (*REFUSED, NameError):
        return False
    return True
