"""SymNode: the node behind `torch.SymInt`, `torch.SymFloat` and `torch.SymBool`.

C++ and torch's carrier classes ask a Python object: arithmetic (`add`, `mul`, ...), comparisons, and questions
(`guard_bool`, `guard_int`, ...).  Arithmetic goes to `sym.expr`, questions to the ShapeEnv.  A node is (value, env): value is a
plain number or an Expr, and nodes are kept per environment, so that equal values share one node and one carrier.

    n = to_symint(env.create_symbol(8, "x"), env)       # a torch.SymInt
    n * 2 + 1 > 5                                        # a torch.SymBool; `if` asks the env
    from_sym(n)                                          # the Expr again

Names and arguments of the methods are torch's; `file` and `line` say where in C++ the question was asked.
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.artifacts import counters
from firesteel.errors import InternalError
from firesteel.sym import expr as E
from firesteel.sym import layout
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, Size

Text = str          # inside of SymNode, `str` is torch's method of that name
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)        # a number that is not known, as torch passes it
_CARRIER = dict(zip(("i64", "f64", "bool"), SYMBOLIC))
_PLAIN = {int: "i64", float: "f64", bool: "bool"}
_PYTYPE = {"i64": int, "f64": float, "bool": bool}


# C++ asks a node what it is dozens of times for each tensor: answers that need no Python frame
_no = staticmethod(bool)
_yes = staticmethod(functools.partial(bool, True))


class SymNode:
    """Immutable, but for the cache of what the environment makes of the value.  Its subclasses are its three kinds."""

    __slots__ = ("value", "env", "carrier", "results", "_simple", "_int", "_generation")

    kind: str
    is_int = is_float = is_bool = is_nested_int = _no
    is_symbolic = _yes
    constant = None             # torch's wrappers look for these names
    fx_node = None

    def __init__(self, value: Any, env: ShapeEnv):
        self.value, self.env = value, env
        self.carrier: Any = None
        self.results: dict[tuple[Callable, SymNode], SymNode] = {}      # of operations with another node
        self._generation = -1

    # ------------------------------------------------------------ what it is

    def nested_int(self) -> None:
        return None

    def is_constant(self) -> bool:
        """Known without a guard.  Floats say no: torch's wrapper cannot unpack a constant float."""
        return self.kind != "f64" and type(self.value) is not Expr

    @property
    def pytype(self) -> type:
        return _PYTYPE[self.kind]

    @property
    def shape_env(self) -> ShapeEnv:
        return self.env

    @property
    def expr(self) -> Any:
        return self.value

    @property
    def hint(self) -> Any:
        return self.env.hint(self.value) if self.has_hint() else None

    def require_hint(self, fallback: Any = None) -> Any:       # torch 2.11 asks
        return self.env.hint(self.value) if fallback is None or self.has_hint() else fallback

    def has_hint(self) -> bool:
        return self.env.has_hint(self.value)

    def simple(self) -> Any:
        """The value under all that the environment knows by now."""
        if self._generation != self.env.generation:
            self._refresh()
        return self._simple

    def maybe_as_int(self) -> int | None:
        if self._generation != self.env.generation:
            self._refresh()
        return self._int

    def _refresh(self) -> None:
        env = self.env
        self._simple, self._generation = env.simplify(self.value), env.generation
        self._int = self._simple if type(self._simple) is int else None

    def maybe_as_float(self) -> float | None:
        value = self.simple()
        return value if type(value) is float else None

    def maybe_as_bool(self) -> bool | None:
        value = self.simple()
        return value if type(value) is bool else None

    def clone(self) -> SymNode:
        return self

    def str(self):
        return f"{self.value}"

    __str__ = __repr__ = _graph_repr = str

    # ------------------------------------------------------------ making nodes

    def wrap_int(self, number: int) -> SymNode:
        return _node(number, self.env)

    wrap_float = wrap_bool = wrap_int

    def sym_sum(self, nodes: Sequence[SymNode]) -> SymNode:
        return _node(E.sum_([node.value for node in nodes]), self.env)

    def sym_ite(self, yes: SymNode, no: SymNode) -> SymNode:
        return _node(E.where(self.value, yes.value, no.value), self.env)

    def round(self, digits: int | None = None) -> SymNode:
        return _node(E.round_(self.value, digits), self.env)

    def pos(self) -> SymNode:
        return self

    def truediv(self, other: SymNode) -> SymNode:
        """The division of C++ code, which does not raise: by 0 it is another program, or infinite.  Python's own is float_truediv or int_truediv."""
        if type(divisor := other.simple()) is Expr:
            if not self.env.is_backed(divisor):
                return _node(_infinite_truediv(E.to_float(self.value), E.to_float(divisor)), self.env)
            self.env.decide(E.ne(divisor, 0))
        return _node(E.truediv(self.value, other.value), self.env)

    # ------------------------------------------------------------ questions

    def guard_bool(self, file: Text = "", line: int = 0) -> bool:
        value = self.value
        if type(value) is Expr:
            if value.dtype != "bool":
                value = E.ne(value, 0)
            return self.env.decide(value)
        return bool(value)

    def guard_int(self, file: Text = "", line: int = 0) -> int:
        return int(self._for_cpp())

    def guard_float(self, file: Text = "", line: int = 0) -> float:
        return float(self._for_cpp())

    def _for_cpp(self) -> Any:
        """An operator's own code asks for the number; Python's `int()` calls `int_`."""
        if type(self.simple()) is Expr:
            counters["aot"]["specialized_by_op"] += 1
        return self.env.specialize(self.value, "the C++ code of an operator takes it as a number")

    def int_(self) -> int:
        return int(self.env.specialize(self.value))

    bool_ = guard_bool


class IntNode(SymNode):
    __slots__ = ()
    kind = "i64"
    is_int = _yes


class FloatNode(SymNode):
    __slots__ = ()
    kind = "f64"
    is_float = _yes


class BoolNode(SymNode):
    __slots__ = ()
    kind = "bool"
    is_bool = _yes


def _infinite_truediv(a: Any, b: Any) -> Any:
    """a / b as C++ computes it, by operations that do not raise: for 0 stands the least number, and 0 / 0 is not a number."""
    nothing = E.eq(b, 0.0)
    return E.truediv(E.where(E.and_(nothing, E.eq(a, 0.0)), math.nan, a), E.where(nothing, math.ulp(0.0), b))


_CLASSES = {"i64": IntNode, "f64": FloatNode, "bool": BoolNode}


def _node(value: Any, env: ShapeEnv) -> SymNode:
    """The one node of a value in an environment."""
    kind = type(value)
    key = value if kind is Expr else (repr(value) if kind is float else value, kind)     # 0.0 is not -0.0
    node = env.nodes.get(key)
    if node is None:
        made = _CLASSES[value.dtype if kind is Expr else _PLAIN[kind]](value, env)
        node = env.nodes.setdefault(key, made)
    return node


# ---------------------------------------------------------------- questions, layouts, arithmetic: one row a method

def _is_dense(env: ShapeEnv, sizes: Sequence[Size], strides: Sequence[Size]) -> bool:
    def ask(question: bool | Expr) -> bool:
        return env.decide_or(question, False)
    return ask(layout.is_empty(sizes)) or layout.is_dense(sizes, strides, lambda a, b: ask(E.eq(a, b)), lambda a, b: not ask(E.le(b, a)))


QUESTIONS: dict[str, Callable[[ShapeEnv, Any], bool]] = {
    "expect_true": lambda env, value: env.assume(value),       # torch._check: an assertion at run time for unbacked symbols, else a guard
    "expect_size": lambda env, value: env.assume(E.ge(value, 0), "a size is not negative"),
    "guard_size_oblivious": lambda env, value: env.decide_oblivious(value), "statically_known_true": lambda env, value: env.known(value) is True,
    "guard_or_false": lambda env, value: env.decide_or(value, False), "guard_or_true": lambda env, value: env.decide_or(value, True),
}
LAYOUTS: dict[str, Callable[[ShapeEnv, Sequence[Size], Sequence[Size]], Any]] = {
    "is_contiguous": lambda env, sizes, strides: layout.is_contiguous(sizes, strides),
    "is_channels_last_contiguous_2d": lambda env, sizes, strides: layout.is_channels_last_contiguous(sizes, strides, 4),
    "is_channels_last_contiguous_3d": lambda env, sizes, strides: layout.is_channels_last_contiguous(sizes, strides, 5),
    "is_channels_last_strides_2d": lambda env, sizes, strides: layout.is_channels_last_strides(sizes, strides, 4),
    "is_channels_last_strides_3d": lambda env, sizes, strides: layout.is_channels_last_strides(sizes, strides, 5),
    "is_non_overlapping_and_dense": _is_dense,
    "is_non_overlapping_and_dense_indicator": lambda env, sizes, strides: E.to_int(_is_dense(env, sizes, strides)),
}


def _question(decide: Callable[[ShapeEnv, Any], bool]) -> Callable[..., bool]:
    def method(self: SymNode, file: str = "", line: int = 0) -> bool:
        return decide(self.env, self.value)
    return method


def _of_layout(question: Callable[[ShapeEnv, Sequence[Size], Sequence[Size]], Any]) -> Callable[..., SymNode]:
    def method(self: SymNode, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        return _node(question(self.env, [n.simple() for n in sizes], [n.simple() for n in strides]), self.env)
    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[SymNode], SymNode]:
    def method(self: SymNode) -> SymNode:
        return _node(function(self.value), self.env)
    return method


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[SymNode, SymNode], SymNode]:
    def method(self: SymNode, other: SymNode) -> SymNode:
        found = self.results.get((function, other))        # torch asks the same of every tensor of a shape
        if found is None:
            found = self.results[function, other] = _node(function(self.value, other.value), self.env)
        return found
    return method


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": E.add, "sub": E.sub, "mul": E.mul, "mod": E.mod, "floordiv": E.floordiv, "int_floordiv": E.floordiv,
    "float_truediv": E.truediv, "int_truediv": E.truediv, "pow": E.pow_, "float_pow": E.pow_, "pow_by_natural": E.pow_,
    "lshift": E.lshift, "rshift": E.rshift, "bitwise_and": E.bitand, "bitwise_or": E.bitor, "bitwise_xor": E.bitxor,
    "eq": E.eq, "ne": E.ne, "lt": E.lt, "le": E.le, "gt": E.gt, "ge": E.ge, "sym_min": E.min_, "sym_max": E.max_,
    "and_": E.and_, "or_": E.or_, "sym_and": E.and_, "sym_or": E.or_,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": E.neg, "abs": E.abs_, "sym_not": E.not_, "floor": E.floor, "ceil": E.ceil, "trunc": E.trunc, "sym_float": E.to_float,
    "sym_int": E.to_int, "is_integer": E.is_integer, **{f"sym_{name}": function for name, function in E.MATH.items()},
}
METHODS: tuple[tuple[Callable, dict[str, Any]], ...] = ((_question, QUESTIONS), (_of_layout, LAYOUTS), (_unary, UNARY), (_binary, BINARY))
for _make, _rows in METHODS:
    for _name, _row in _rows.items():
        setattr(SymNode, _name, _make(_row))


# ---------------------------------------------------------------- in and out

def to_symint(size: Any, env: ShapeEnv) -> Any:
    """A Size (or float, or bool) as torch takes it: plain if it is known, else a SymInt, SymFloat or SymBool."""
    if type(size) is not Expr or size.op == "const":
        return E.as_size(size)
    node = _node(size, env)
    if node.carrier is None:
        node.carrier = _CARRIER[node.kind](node)
    return node.carrier


def from_sym(value: Any) -> Size:
    """The Size (or float, or bool, plain or Expr) that torch's value carries."""
    if type(value) not in SYMBOLIC:
        return value
    node = value.node
    if isinstance(node, SymNode):
        return node.value
    if node.is_constant():
        return node.guard_int("", 0)
    raise InternalError(f"{value} belongs to another compiler")


from_symint = from_sym


# ---------------------------------------------------------------- functions of `math` on numbers of which some are symbols

def _on_symbols(name: str) -> Callable[[Any], Any]:
    plain, symbolic = getattr(math, name), E.MATH[name]

    def function(x: Any) -> Any:
        return to_symint(symbolic(from_sym(x)), x.node.env) if type(x) in SYMBOLIC else plain(x)
    function.__name__ = function.__qualname__ = f"sym_{name}"
    return function


def sym_ite(condition: Any, yes: Any, no: Any) -> Any:
    """torch.sym_ite, which takes torch's own nodes only."""
    if type(condition) is not torch.SymBool:
        return yes if condition else no
    return to_symint(E.where(*map(from_sym, (condition, yes, no))), condition.node.env)


def _on_floats(name: str, plain: Callable[[Any, Any], Any], symbolic: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Python's operator on numbers of which one is a float.  torch's SymFloat has another: the floor of a rounded quotient, a power of what is not
    negative."""
    def function(a: Any, b: Any) -> Any:
        env = next((x.node.env for x in (a, b) if type(x) in SYMBOLIC), None)
        return plain(a, b) if env is None else to_symint(symbolic(E.to_float(from_sym(a)), E.to_float(from_sym(b))), env)
    function.__name__ = function.__qualname__ = f"sym_{name}"
    return function


FLOAT_FUNCTIONS = {"floordiv": _on_floats("float_floordiv", operator.floordiv, E.floordiv), "pow": _on_floats("float_pow", operator.pow, E.pow_)}

# torch has some of them, under names that users' backends know
MATH_ON_SYMBOLS: dict[str, Callable[[Any], Any]] = {name: getattr(torch, f"_sym_{name}", None) or _on_symbols(name) for name in E.MATH}
