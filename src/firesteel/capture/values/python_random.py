"""Random numbers of Python and NumPy: random.Random, numpy.random.RandomState and numpy.random.Generator objects.

What such an object gives is known at run time only.  The run function makes the calls in the order of the program before it calls the graph
(`write_draws`); a number that one gives is a symbol without a hint, and an input of the graph where the graph uses it.  What needs the
number itself, such as a branch, breaks as it does for data of tensors.  An array, whose shape another object of the class says, is an input by
torch.from_numpy.  Methods without a row are called for real, at a break.

    x * random.uniform(0.5, 1.5)        # d_0 = random.uniform(0.5, 1.5); graph(x, d_0)
    x + np.random.rand(4)               # d_0 = from_numpy(np.random.rand(4)); graph(x, d_0)
"""
from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from firesteel.capture.effects import Literal
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Constants, Source
from firesteel.capture.values.arrays import TensorArray
from firesteel.capture.values.base import MethodOfOwner, RealObject, Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import NONE
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.world import STATIC
from firesteel.errors import Break
from firesteel.records import dataclass
from firesteel.sym.symint import to_symint
from firesteel.table import Table


class Drawn(Source):
    """What one of the calls gave; the run function has it under a name.  The key is its number and what people are shown."""

    __slots__ = ()

    def write(self, base: str, constants: Constants) -> str:
        return f"d_{self.key[0]}"

    @property
    def name(self) -> str:
        return self.key[1]


@dataclass(frozen=True)
class Draw:
    """A call to make before the graph: a method of `owner`, or (None) the class `make`."""
    source: Drawn
    owner: Value | None
    method: Any
    args: Args
    kwargs: Kwargs
    is_array: bool = False      # which the graph is given as a tensor


def write_draws(m: Machine, e: Emitter) -> list[str]:
    """The lines that make the calls, for the start of the run function."""
    lines = []
    for draw in m.draws:
        called = e.constant(draw.method) if draw.owner is None else f"{e.expr(draw.owner)}.{draw.method}"
        given = [*map(e.expr, draw.args), *(f"{name}={e.expr(value)}" for name, value in draw.kwargs.items())]
        call = f"{called}({', '.join(given)})"
        lines.append(f"{e.source(draw.source)} = {f'{e.constant(torch.from_numpy)}({call})' if draw.is_array else call}")
    return lines


def add_draw(m: Machine, owner: Value | None, method: Any, args: Args, kwargs: Kwargs, what: str, is_array: bool = False) -> Drawn:
    """Notes a call.  Its arguments must be there before the graph runs."""
    for value in (*args, *kwargs.values()):
        if not value.is_constant() and value.source is None and not isinstance(value, Literal):
            raise Break("random_state", name=what)
    source = Drawn(None, (len(m.draws), f"{what}()"))
    m.effects.change(m, "draws", (*m.draws, Draw(source, owner, method, args, kwargs, is_array)))
    return source


# -- what calls give ------------------------------------------------------------------------------------------------------
class DrawnObject(Value):
    """An object that is only passed on: the state of a generator."""

    words = "{self.source.name}"

    def __init__(self, source: Drawn):
        self.source = source


def drawn_number(m: Machine, source: Drawn, cls: type) -> Value:
    """A float, or an int of 64 bits."""
    env = m.world.env
    sym = to_symint(env.create_unbacked(None, None, source.name, "i64" if cls is int else "f64"), env)
    name = m.symbol_name(source)
    return SymNumber(sym, lambda: m.record.placeholder(name, source, sym, cls(0)), source)


def drawn_array(m: Machine, owner: PythonRandom, method: str, args: Args, kwargs: Kwargs, what: str) -> Value:
    """An array of NumPy's whose shape and dtype follow from known arguments."""
    given, named = [m.known(value) for value in args], {name: m.known(value) for name, value in kwargs.items()}
    try:
        like = np.random.RandomState(0) if type(owner.obj) is np.random.RandomState else np.random.default_rng(0)
        example = torch.from_numpy(getattr(like, method)(*given, **named))
    except Exception as error:      # no array, or what the real call raises
        raise Break("random_state", name=what) from error
    source = add_draw(m, owner, method, list(map(Literal, given)), {key: Literal(value) for key, value in named.items()}, what, is_array=True)
    name = m.input_name(source)
    abstract = m.world.wrap(example, name, (STATIC,) * example.dim(), set())
    value = TensorValue(m.record.placeholder(name, source, abstract, example), abstract, source, example)
    m.record.own(abstract, value)
    return TensorArray(value)


Gives = Callable[[Machine, Drawn], Value]


@dataclass(frozen=True)
class DrawRow:
    """A method: what a call gives, with how many arguments at most."""
    gives: Gives
    most: int = 9


DRAWS: Table[DrawRow] = Table("method of a random number generator", "capture/values/python_random.py")     # (class, method) -> DrawRow


FLOAT: Gives = lambda m, source: drawn_number(m, source, float)
INT: Gives = lambda m, source: drawn_number(m, source, int)
NOTHING: Gives = lambda m, source: NONE
OBJECT: Gives = lambda m, source: DrawnObject(source)


def _rows(cls: type, gives: Gives, methods: str) -> None:
    """Methods are written as name/most arguments: NumPy's give an array with one more."""
    for name, _, most in (text.partition("/") for text in methods.split()):
        DRAWS.add((cls, name), DrawRow(gives, int(most or 9)))


_rows(random.Random, FLOAT, "random uniform triangular betavariate expovariate gammavariate gauss lognormvariate normalvariate vonmisesvariate "
                             "paretovariate weibullvariate")
_rows(random.Random, INT, "randint randrange")
_rows(random.Random, NOTHING, "seed setstate")
_rows(random.Random, OBJECT, "getstate")
_FLOATS = "random/0 uniform/2 normal/2 standard_normal/0 exponential/1 standard_exponential/0 gamma/2 beta/2 laplace/2 lognormal/2 gumbel/2"
_rows(np.random.RandomState, FLOAT, f"{_FLOATS} rand/0 randn/0 random_sample/0")
_rows(np.random.RandomState, INT, "randint/2")
_rows(np.random.RandomState, NOTHING, "seed/1 set_state/1")
_rows(np.random.RandomState, OBJECT, "get_state/0")
_rows(np.random.Generator, FLOAT, _FLOATS)
ARRAYS = frozenset(f"""{_FLOATS} rand randn random_sample randint integers permutation choice poisson binomial geometric chisquare dirichlet
    triangular multinomial multivariate_normal power rayleigh weibull""".translate(str.maketrans("/0123456789", " " * 11)).split())


# -- the objects ----------------------------------------------------------------------------------------------------------
RANDOM = (random.Random, np.random.RandomState, np.random.Generator)


class PythonRandom(RealObject):
    """An object that draws numbers."""

    always_true = True

    def describe(self) -> str:
        return f"{type(self.obj).__name__} object"

    def getattr(self, m: Machine, name: str) -> Value:
        if callable(getattr(type(self.obj), name, None)):
            return DrawMethod(self, name)
        return super().getattr(m, name)


class DrawMethod(MethodOfOwner):
    """A bound method of such an object."""

    def describe(self) -> str:
        return f"{type(self.owner.obj).__name__}.{self.name}"

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        row = DRAWS.get((type(self.owner.obj), self.name))
        given = {name: m.look(value) for name, value in kwargs.items()}
        if row is None or len(args) + len(kwargs) > row.most or "size" in kwargs or m.world.env is None:
            if self.name not in ARRAYS or isinstance(self.owner.obj, random.Random):
                raise Break("random_state", name=self.describe())
            return drawn_array(m, self.owner, self.name, list(map(m.look, args)), given, self.describe())
        return row.gives(m, add_draw(m, self.owner, self.name, [m.look(value) for value in args], given, self.describe()))


def _made_inside(make: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A new one in each call; the one made now is only looked at."""
    example = m.run_real(make, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()})
    return PythonRandom(example, add_draw(m, None, make, args, kwargs, make.__name__))


INSTANTIATE.row("random number generator of Python")(
    lambda m, cls, args, kwargs: _made_inside(cls, m, args, kwargs) if cls in (random.Random, np.random.RandomState) else None)
CALLS.add(np.random.default_rng, functools.partial(_made_inside, np.random.default_rng))


@CALLS.row(np.random.seed)
def call_numpy_seed(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    owner: Any = np.random.rand
    return m.constant_object(owner.__self__).getattr(m, "seed").call(m, args, kwargs)
