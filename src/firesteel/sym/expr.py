"""Expr: the one expression type, used for sizes, strides, indices and the scalar bodies of loops.

An Expr is (op, dtype, args, attr), frozen and hash-consed: two equal expressions are the same object, so `is` and `==`
mean structural equality, and a dict keyed by Exprs is a cache.  `make` builds a node as it is; the functions and
operators below it fold constants and apply the rules of `sym/rules.py`, for integer and boolean expressions only:
floating-point bodies are never rearranged.

A `Size` is a plain `int` or an integer Expr that is not a constant: every function here takes both and returns a plain
int wherever the result is known, so code over sizes costs nothing when sizes are static.

    n = symbol("s0")
    (n + 3) - n          # 3
    (n * 4) // 4         # n
    n < n + 1            # True
    n == m               # identity, never a question; `sym.env` asks questions and records guards

dtypes are short names: i64 (every size and index), bool, f64; loop bodies also f32 f16 bf16 i32 i16 i8 u8.
The ops that come out for integers: add mul floordiv mod min max abs where pow lshift rshift bitand bitor bitxor, eq ne le,
and or not, to (conversion to the node's dtype); for f64 also sub neg truediv lt floor ceil and the functions of `math`.  All
integers are exact (an index never overflows): rules such as (n * 4) // 4 -> n are for sizes and indices, not for int64 data.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import firesteel.sym.logic  # noqa: F401  (fills the engine's table)
import firesteel.sym.rules  # noqa: F401
from firesteel.sym.meaning import MATH_FUNCTIONS, meaning
from firesteel.sym.node import (  # noqa: F401  (the public names of the node)
    Expr,
    Size,
    as_expr,
    as_size,
    bits,
    const,
    free_symbols,
    is_const,
    make,
    order,
    postorder,
    rebuild,
    symbol,
)
from firesteel.sym.poly import accumulate, poly
from firesteel.sym.rewrite import FREE, SUMS, Context, parts
from firesteel.sym.text import python_text

Number = int | float | bool
_memo: dict[tuple, Any] = {}
MEMO_LIMIT = 500_000        # a process that compiles for days must not grow for ever
COMPARISONS = frozenset(("eq", "ne", "lt", "le"))


# ---------------------------------------------------------------- building

def _dtype(value: Any) -> str:
    kind = type(value)
    return value.dtype if kind is Expr else "i64" if kind is int else "bool" if kind is bool else "f64"


def _common_dtype(op: str, dtypes: list[str]) -> str:
    """Python's promotion: bool < int < float; other dtypes (loop bodies) only meet themselves and plain numbers."""
    for dtype in ("f64", "i64", "bool"):
        if dtype in dtypes:
            others = set(dtypes) - {"f64", "i64", "bool"}
            if others:
                raise TypeError(f"{op} of dtypes {', '.join(dtypes)}: convert one with `to` first")
            return dtype
    if len(set(dtypes)) != 1:
        raise TypeError(f"{op} of dtypes {', '.join(dtypes)}: convert one with `to` first")
    return dtypes[0]


def to(value: Any, dtype: str) -> Any:
    """Conversion; float to integer drops the fraction.  A plain number stays a plain number."""
    have = _dtype(value)
    if have == dtype:
        return as_size(value) if type(value) is Expr else value
    if is_const(value):
        return meaning("to", dtype).compute(as_size(value))
    return make("to", dtype, (value,))


def build(op: str, *args: Any) -> Any:
    """`op` on plain numbers and Exprs of any dtype: folded, promoted as Python does, and simplified if integer."""
    args = tuple(as_size(arg) if type(arg) is Expr else arg for arg in args)
    if not any(type(arg) is Expr for arg in args):
        return meaning(op, "").compute(*args)
    exprs = [arg.dtype for arg in args if type(arg) is Expr]
    foreign = [dtype for dtype in exprs if dtype not in ("f64", "i64", "bool")]
    dtype = _common_dtype(op, exprs if foreign else [_dtype(arg) for arg in args])
    if dtype == "i64" or (dtype == "bool" and op not in ("eq", "ne")):
        return FREE.build(op, *[to(arg, "i64") for arg in args])
    if dtype == "bool":
        return FREE.build(op, *args)
    return make(op, "bool" if op in COMPARISONS else dtype, tuple(_as_dtype(arg, dtype) for arg in args))


def _as_dtype(value: Any, dtype: str) -> Expr:
    if type(value) is Expr:
        return value if value.dtype == dtype else make("to", dtype, (value,))
    return const(value if dtype[0] in "iu" else float(value), dtype)


def _binary(op: str, plain: Callable) -> Callable[[Any, Any], Any]:
    """The public function of a binary op: numbers are computed, repeated questions are one dict lookup."""
    def function(a, b):
        kind, other = type(a), type(b)
        if kind is not Expr and other is not Expr:
            return plain(a, b)
        if (kind is not Expr and kind is not int) or (other is not Expr and other is not int):
            return build(op, a, b)      # a float or bool equals an int as a key: not memoised
        key = (op, a, b)
        found = _memo.get(key)
        if found is None:
            whole = (kind is int or (a.dtype == "i64" and a.op != "const")) and (other is int or (b.dtype == "i64" and b.op != "const"))
            if len(_memo) > MEMO_LIMIT:
                _memo.clear()
            found = _memo[key] = FREE.apply(op, (a, b)) if whole else build(op, a, b)
        return found
    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"{plain.__name__}(a, b) on Sizes."
    return function


def _unary(op: str, plain: Callable) -> Callable[[Any], Any]:
    def function(a):
        return build(op, a) if type(a) is Expr else plain(a)
    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"{plain.__name__}(a) on a Size."
    return function


add = _binary("add", operator.add)
sub = _binary("sub", operator.sub)
mul = _binary("mul", operator.mul)
floordiv = _binary("floordiv", operator.floordiv)
mod = _binary("mod", operator.mod)
min_ = _binary("min", min)
max_ = _binary("max", max)
lshift = _binary("lshift", operator.lshift)
rshift = _binary("rshift", operator.rshift)
bitand = _binary("bitand", operator.and_)
bitor = _binary("bitor", operator.or_)
bitxor = _binary("bitxor", operator.xor)
eq = _binary("eq", operator.eq)
ne = _binary("ne", operator.ne)
lt = _binary("lt", operator.lt)
le = _binary("le", operator.le)
neg = _unary("neg", operator.neg)
abs_ = _unary("abs", abs)


def gt(a: Any, b: Any) -> Any:
    return lt(b, a)


def ge(a: Any, b: Any) -> Any:
    return le(b, a)


# ---------------------------------------------------------------- logic

def _truth(value: Any) -> Any:
    """A plain bool or a bool Expr."""
    value = as_size(value)
    if type(value) is not Expr:
        return bool(value)
    return value if value.dtype == "bool" else ne(value, 0)


def and_(a: Any, b: Any) -> Any:
    return FREE.build("and", _truth(a), _truth(b))


def or_(a: Any, b: Any) -> Any:
    return FREE.build("or", _truth(a), _truth(b))


def not_(a: Any) -> Any:
    return FREE.build("not", _truth(a))


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes if condition else no`."""
    condition = _truth(condition)
    if type(condition) is not Expr:
        return yes if condition else no
    dtype = _common_dtype("where", [_dtype(yes), _dtype(no)])
    if dtype == "i64":
        return FREE.build("where", condition, to(yes, "i64"), to(no, "i64"))
    if dtype == "bool":
        return or_(and_(condition, yes), and_(not_(condition), no))
    return make("where", dtype, (condition, _as_dtype(yes, dtype), _as_dtype(no, dtype)))


# ---------------------------------------------------------------- integers and floats

def to_float(a: Any) -> Any:
    return to(a, "f64")


def to_int(a: Any) -> Any:
    """int(a): drops the fraction."""
    return to(a, "i64")


def truediv(a: Any, b: Any) -> Any:
    if type(a) is not Expr and type(b) is not Expr:
        return a / b
    return build("truediv", *[a if _dtype(a) not in ("i64", "bool") else to_float(a) for a in (a, b)])


def pow_(a: Any, b: Any) -> Any:
    """a ** b; an integer power of an integer must not be negative."""
    return build("pow", a, b)


def ceildiv(a: Size, b: Size) -> Size:
    return neg(floordiv(neg(a), b))


def floor(a: Any) -> Any:
    """math.floor; of a quotient of integers, their floor division (exact below 2**53)."""
    return _round_float(a, "floor", math.floor, floordiv)


def ceil(a: Any) -> Any:
    return _round_float(a, "ceil", math.ceil, ceildiv)


def _round_float(a: Any, op: str, plain: Callable, of_quotient: Callable) -> Any:
    if type(a) is not Expr:
        return plain(a)
    if a.dtype in ("i64", "bool"):
        return to_int(a)
    if a.op == "truediv" and all(_integer_inside(arg) is not None for arg in a.args):
        return of_quotient(*[_integer_inside(arg) for arg in a.args])
    return to_int(make(op, a.dtype, (a,)))


def _integer_inside(node: Expr) -> Any:
    """The integer that a float expression was converted from."""
    if node.op == "to" and node.args[0].dtype == "i64":
        return node.args[0]
    return int(node.attr) if node.op == "const" and float(node.attr).is_integer() else None


def trunc(a: Any) -> Any:
    return math.trunc(a) if type(a) is not Expr else to_int(a)


def round_(a: Any, digits: int | None = None) -> Any:
    """Python's round: to even, an int without digits."""
    if type(a) is not Expr:
        return round(a, digits)
    if a.dtype != "f64":
        if digits is not None and digits < 0:
            raise TypeError(f"round({a!r}, {digits}): a symbolic integer is not rounded to tens")
        return a
    return to_int(make("round", "f64", (a,))) if digits is None else make("round_digits", "f64", (a, const(digits)))


def is_integer(a: Any) -> Any:
    """float.is_integer."""
    if type(a) is not Expr:
        return float(a).is_integer()
    return True if a.dtype != "f64" else make("is_integer", "bool", (a,))


def _math_function(op: str) -> Callable[[Any], Any]:
    plain = getattr(math, op)

    def function(a):
        return plain(a) if type(a) is not Expr else build(op, to_float(a) if a.dtype in ("i64", "bool") else a)
    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"math.{op} on a Size or float."
    return function


MATH: dict[str, Callable[[Any], Any]] = {op: _math_function(op) for op in MATH_FUNCTIONS if hasattr(math, op)}
sqrt, exp, log, sin, cos = (MATH[op] for op in ("sqrt", "exp", "log", "sin", "cos"))


# ---------------------------------------------------------------- many at once

def product(sizes: Iterable[Size]) -> Size:
    """The product; 1 for none (numel of a shape)."""
    result: Size = 1
    for size in sizes:
        result = mul(result, size)
    return result


def row_major(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a contiguous tensor; a size of 0 counts as 1, as in eager."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if type(size) is Expr else max(size, 1))
    return tuple(reversed(strides))


def sum_(sizes: Iterable[Size]) -> Size:
    """The sum; linear in the number of terms."""
    sizes = list(sizes)
    if not any(type(size) is Expr for size in sizes):
        return sum(sizes)
    if any(_dtype(size) != "i64" for size in sizes):
        result: Any = 0
        for size in sizes:
            result = add(result, size)
        return result
    total: dict = {}
    for size in sizes:
        accumulate(total, poly(size))
    return FREE.sum(total)


# ---------------------------------------------------------------- simplifying, substituting, evaluating

_contexts: dict[tuple, Context] = {}


def context_of(ranges: Mapping[Expr, tuple[Size | None, Size | None]]) -> Context:
    """The Context of some ranges (leaf -> inclusive (lo, hi), each an int, None or an Expr), with all it has learnt.

    With 0 <= i <= T-1 it simplifies (b*T + i) // T to b and (b*T + i) % T to i.  A leaf is an axis, a symbol, or any opaque node.  A leaf
    with bounds exists, so 0 <= i <= T-1 also implies T >= 1; other facts about symbols must be given."""
    key = tuple(ranges.items())
    context = _contexts.get(key)
    if context is None:
        if len(_contexts) >= 256:
            _contexts.clear()
        context = _contexts[key] = Context(ranges)
    return context


def _with_sizes(node: Expr, args: tuple) -> Any:
    """The node with other arguments (Sizes or Exprs), folded and simplified where that is ours to do."""
    if node.op == "where":
        return where(*args)
    if node.op == "to" and node.dtype in ("f64", "i64", "bool"):
        return to(args[0], node.dtype)
    if node.dtype == "bool" and node.op in _LOGIC:
        return _LOGIC[node.op](*args)
    if node.op in _OPS and node.dtype in ("i64", "bool", "f64"):
        return build(node.op, *args)
    return make(node.op, node.dtype, tuple(_as_dtype(arg, old.dtype) for arg, old in zip(args, node.args)), node.attr)


_LOGIC: dict[str, Callable] = {"and": and_, "or": or_, "not": not_}
_OPS = frozenset(MATH) | frozenset((
    "add", "sub", "mul", "neg", "floordiv", "mod", "truediv", "pow", "min", "max", "abs", "lshift", "rshift", "bitand", "bitor", "bitxor",
    "eq", "ne", "lt", "le", "floor", "ceil", "trunc", "round"))


def substitute(expr: Any, values: Mapping[Expr, Any]) -> Any:
    """The expression with nodes replaced by Sizes; linear in the number of different nodes."""
    if type(expr) is not Expr:
        return expr
    done: dict[Expr, Any] = dict(values)
    # a whole sum at once, unless a sum or product inside of one is itself to be replaced
    below = parts if not any(key.op in SUMS for key in values) else operator.attrgetter("args")
    for node in postorder(expr, known=done, below=below):
        done[node] = _replaced(node, done, below(node))
    return as_size(done[expr])


def _replaced(node: Expr, done: Mapping[Expr, Any], below: Iterable[Expr]) -> Any:
    if all(done[part] is part for part in below):
        return node
    if below is node.args:
        return _with_sizes(node, tuple(done[arg] for arg in node.args))
    return sum_([product([count, *[done[atom] for atom in monomial]]) for monomial, count in poly(node).items()])


def evaluate(expr: Any, values: Mapping[str, Number]) -> Any:
    """The number that an expression over named leaves (symbols, axes) has."""
    if type(expr) is not Expr:
        return expr
    done: dict[Expr, Any] = {}
    for node in postorder(expr):
        if node.op == "const":
            done[node] = node.attr
        elif node.op in ("symbol", "axis"):
            done[node] = values[node.attr]
        else:
            done[node] = meaning(node.op, node.dtype).compute(*[done[arg] for arg in node.args])
    return done[expr]


# ---------------------------------------------------------------- operators

for _name, _function in {"add": add, "sub": sub, "mul": mul, "floordiv": floordiv, "mod": mod, "truediv": truediv}.items():
    setattr(Expr, f"__{_name}__", _function)
    setattr(Expr, f"__r{_name}__", lambda self, other, function=_function: function(other, self))
for _name, _method in {"lt": lt, "le": le, "gt": gt, "ge": ge, "neg": neg, "repr": python_text, "str": python_text}.items():
    setattr(Expr, f"__{_name}__", _method)
