"""ShapeEnv: owns the symbols of one compilation, answers questions about them, and records each answer as a guard.

A symbol has a hint (its value in the example call), a range, and a source (text of where the number comes from).  A question
is a boolean Expr.  It is answered from what is known; failing that from the hints, and then the answer is recorded: the compiled
code is valid only for calls that give the same answer.  An unbacked symbol (`u0`) has no hint: a question about it that
bounds cannot answer is a DataDependentError, which `torch._check` (here `assume`) prevents.

    env = ShapeEnv()
    s0 = env.create_symbol(8, "L['x'].size()[0]")
    env.decide(s0 >= 2)             # True, from the range: no guard
    env.decide(sym.eq(s0, 8))       # True, from the hint: guard `s0 == 8`; s0 is 8 from now on
    env.simplify(s0 + 1)            # 9

What always holds
 1. Answers never change: facts only accumulate.
 2. `guards()` imply every answer given, for all values within the symbols' ranges.
 3. Every fact holds for the hints.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from firesteel import transaction
from firesteel.errors import DataDependentError, InternalError, Location
from firesteel.records import dataclass
from firesteel.sym.expr import (
    Expr,
    Size,
    as_size,
    eq,
    evaluate,
    floordiv,
    free_symbols,
    ge,
    le,
    make,
    ne,
    not_,
    postorder,
    substitute,
    symbol,
)
from firesteel.sym.guard import RANGE, SizeGuard, least
from firesteel.sym.poly import from_poly, plus, poly, scale
from firesteel.sym.rewrite import Context

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Symbol:
    """What the environment knows of a symbol from its creation."""
    expr: Expr
    hint: Number | None         # None: unbacked
    source: str
    lo: int | None
    hi: int | None
    number: int                 # order of creation


class LateQuestion(InternalError):
    """An answer is needed that the compiled guards do not imply.  Who compiles late must do without it, or run the graph as it is."""


class ShapeEnv:
    """Mutable: symbols and facts are added while a program is captured and traced."""

    def __init__(self, locate: Callable[[], Location | None] | None = None):
        self.locate = locate or (lambda: None)
        self.symbols: dict[Expr, Symbol] = {}
        self.asserts: list[SizeGuard] = []          # conditions on unbacked symbols, to be checked at run time
        self._replacements: dict[Expr, Any] = {}
        self._ranges: dict[Expr, tuple[int | None, int | None]] = {}
        self._relations: dict[Expr, tuple[Size | None, Size | None]] = {}      # bounds of a symbol by older symbols
        self._facts: dict[Expr, Any] = {}       # canonical node -> its known value
        self._answers: dict[Expr, bool] = {}
        self._recorded: list[SizeGuard] = []
        self._defining: set[SizeGuard] = set()      # the recorded equalities that replaced a symbol
        self._hints: dict[Expr, Number] = {}
        self._values: dict[str, Number] = {}    # hints by symbol name
        self.nodes: dict = {}                   # of sym.symint: value -> its node
        self.frozen = False
        self._general = self._by_hints = False
        self._hinted: dict[Expr, bool] = {}
        self._in_general: set[Expr] = set()     # questions that had a general answer
        self.generation = 0                     # grows with each replacement of a symbol
        self._counts = {"s": 0, "u": 0, "f": 0, "b": 0}
        self._lazy_context: Context | None = None
        self._replaced: dict[Expr, Any] = {}    # what `_replacements` make of an expression
        self._again: list[Expr] | None = None   # unbacked symbols that a second run of the same call gives again

    # ------------------------------------------------------------ symbols

    def create_symbol(self, hint: Number, source: str, lo: int | None = 2, hi: int | None = None, dtype: str = "i64") -> Expr:
        """A symbol whose value in this call is `hint`.  The range is checked by `guards()` like any other fact."""
        if dtype != "i64":
            lo = hi = None
        if (lo is not None and hint < lo) or (hi is not None and hint > hi):
            raise InternalError(f"the hint {hint} of {source} is outside of [{lo}, {hi}]")
        return self._create({"i64": "s", "f64": "f", "bool": "b"}[dtype], hint, source, lo, hi, dtype)

    def create_unbacked(self, lo: int | None = 0, hi: int | None = None, source: str = "", dtype: str = "i64") -> Expr:
        """A symbol whose value only run time knows, such as the number of nonzero elements."""
        if self._again:
            known = self._again.pop(0)
            if known in self.symbols and known.dtype == dtype:
                return known
        return self._create("u", None, source, lo if dtype == "i64" else None, hi, dtype)

    def unbacked_since(self, count: int) -> list[Expr]:
        """The unbacked symbols made since there were `count` symbols."""
        return [info.expr for info in list(self.symbols.values())[count:] if info.hint is None]

    def replay(self, symbols: Sequence[Expr] | None) -> None:
        """A call that made these symbols runs again, at another stage: it gets the same ones.  None: no such call."""
        self._again = list(symbols) if symbols else None

    @property
    def has_unbacked(self) -> bool:
        return self._counts["u"] > 0

    @property
    def replaying(self) -> bool:
        return self._again is not None

    def _create(self, prefix: str, hint: Number | None, source: str, lo: int | None, hi: int | None, dtype: str) -> Expr:
        expr = symbol(f"{prefix}{self._counts[prefix]}", dtype)
        self._counts[prefix] += 1
        self.symbols[expr] = Symbol(expr, hint, source, lo, hi, len(self.symbols))
        if hint is not None:
            self._values[expr.attr] = hint
        if dtype == "i64":
            self._ranges[expr] = (lo, hi)
            self._new_context()
        return expr

    def is_backed(self, size: Any) -> bool:
        """Does every symbol in it have a hint?"""
        return all(self.symbols[s].hint is not None for s in free_symbols(size))

    def ranges(self) -> dict[Expr, tuple[int | None, int | None]]:
        """What is known of each integer symbol, for a Context."""
        return dict(self._ranges)

    def sources(self) -> dict[str, str]:
        """Symbol name -> source text, as `SizeGuard.text` takes it."""
        return {info.expr.attr: info.source for info in self.symbols.values()}

    # ------------------------------------------------------------ questions

    def decide(self, condition: bool | Expr, why: str = "") -> bool:
        """The answer to a question; guarded if it came from the hints."""
        if type(condition) is not Expr:
            return bool(condition)
        found = self._answers.get(condition)
        if found is None:
            found = self._answers[condition] = self._decide(condition, why)
        return found

    def _decide(self, condition: Expr, why: str) -> bool:
        known = self.known(condition)
        if known is not None:
            return known
        simple = self.simplify(condition)
        if not self.is_backed(simple):
            raise self._data_dependent(simple)
        if simple.op in ("and", "or"):      # question by question: small facts are worth more than one large guard
            first, second = simple.args
            return self.decide(second, why) if self.decide(first, why) == (simple.op == "and") else simple.op == "or"
        answer = bool(evaluate(simple, self._values))
        factors = _factors_of_0(simple) if answer == (simple.op == "ne") else None
        if factors:
            return all(self.decide(ne(factor, 0), why) for factor in factors) == answer
        self._record(simple if answer else not_(simple), why)
        return answer

    def known(self, condition: bool | Expr) -> bool | None:
        """The answer where no guard is needed; None where it is not known."""
        if type(condition) is not Expr:
            return bool(condition)
        found = self._answers.get(condition)
        if found is not None:
            return found
        simple = self.simplify(condition)
        return self._answers.get(simple) if type(simple) is Expr else bool(simple)

    def known_of_elements(self, condition: bool | Expr, shape: Sequence[Size]) -> bool | None:
        """Like `known`, for a tensor of this shape that has elements: none of its sizes is 0."""
        simple = self.simplify(condition)
        ranges = dict(self._ranges)
        for size in map(self.simplify, shape):
            terms = poly(size)
            number = terms.get((), 0)
            factors = next((m for m, n in terms.items() if m and n == 1), ()) if len(terms) == 1 + (number != 0) else ()
            if len(factors) == 1 or not number:
                for factor in factors:
                    low, high = ranges.get(factor, (None, None))
                    ranges[factor] = (max(1 - number, low if low is not None else 1 - number), high)
        found = Context(ranges, self._facts, self._relations).simplify(simple)
        return bool(found) if type(found) is not Expr else None

    def decide_or(self, condition: bool | Expr, otherwise: bool) -> bool:
        """Like `decide`; `otherwise` where only run time knows."""
        if self._by_hints and condition in self._hinted:
            return self._hinted[condition]
        known = self.known(condition)
        if known is not None:
            return known
        if self._general and condition in self._in_general:
            return otherwise
        simple = self.simplify(condition)
        if not self.is_backed(simple):
            return otherwise
        if self._by_hints:
            answer = self._hinted[condition] = bool(evaluate(simple, self._values))     # type: ignore[index]
            return answer
        if self._general and (bool(evaluate(simple, self._values)) == otherwise or self._happens(simple)):
            self._in_general.add(condition)     # type: ignore[arg-type]  # what is known is no question
            return otherwise
        return self.decide(condition)

    def _happens(self, simple: Expr) -> bool:
        """Is it about a size that is 1 only as it happens, such as half of a size of 2?"""
        symbols = free_symbols(simple)
        return len(symbols) == 1 and all(self._values[s.attr] >= 2 for s in symbols)

    @transaction.context
    def in_general(self) -> Iterator[None]:
        """Inside, who asks `decide_or` gets its general answer without a guard where the hints agree.  For code of which nobody sees which
        way it took: torch's engine asks each gradient whether a size is 1."""
        before, self._general = self._general, True
        try:
            yield
        finally:
            self._general = before

    @property
    def is_general(self) -> bool:
        return self._general

    def by_hints(self, ask: Callable[[], Any]) -> None:
        """Has `ask` asked questions with `decide_or`, whose answers do not matter: they come from the hints."""
        before, self._by_hints = self._by_hints, True
        try:
            ask()
        finally:
            self._by_hints = before

    def evaluate_sym_node(self, node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> bool:
        """The door by which torch's own Python code asks (`guard_or_false` and the like)."""
        return self.decide(node.value) if fallback_value is None else self.decide_or(node.value, fallback_value)

    def decide_oblivious(self, condition: bool | Expr) -> bool:
        """Like `decide`; a size that only run time knows counts as neither 0 nor 1."""
        known = self.known(condition)
        return known if known is not None else self.decide(self._without_small_sizes(self.simplify(condition)))

    def decide_layout(self, condition: bool | Expr) -> bool:
        """Like `decide_oblivious`, for questions where "no" is never wrong: is it contiguous, is this stride the smaller one?"""
        known = self.known(condition)
        if known is not None:
            return known
        simple = self._without_small_sizes(self.simplify(condition))
        return self.decide(simple) if type(simple) is not Expr or self.is_backed(simple) else False

    def _without_small_sizes(self, simple: Any) -> Any:
        """Simplified as if unbacked sizes were 2 or more."""
        unbacked = [s for s in free_symbols(simple) if self.symbols[s].hint is None]
        sizes = {s: (max(low, 2), high) for s in unbacked for low, high in (self._ranges.get(s, (None, None)),) if low is not None and low >= 0}
        return Context({**self._ranges, **sizes}, self._facts).simplify(simple) if sizes else simple

    def assume(self, condition: bool | Expr, why: str = "torch._check") -> bool:
        """The program states that the condition holds.  Of backed symbols this is a question like any other; of unbacked ones
        it becomes a fact, and a check at run time.  False if it is known not to hold."""
        known = self.known(condition)
        if known is not None:
            return known
        simple = self.simplify(condition)
        if self.is_backed(simple):
            return self.decide(simple, why)
        self._ensure_open(simple)
        self.asserts.append(SizeGuard(simple, self.locate(), why))
        self._learn(simple)
        return True

    def specialize(self, size: Any, why: str = "its value is needed as a number") -> Any:
        """The value as a plain number; guards that it stays that."""
        simple = self.simplify(size)
        if type(simple) is not Expr:
            return simple
        if not self.is_backed(simple):
            raise self._data_dependent(simple)
        value = self.hint(simple)
        if type(value) is float and math.isnan(value):
            self.decide(make("ne", "bool", (simple, simple)), why)
        elif simple.dtype == "bool":
            self.decide(simple, why)
        else:
            self.decide(eq(simple, value), why)
        return value

    def hint(self, size: Any) -> Any:
        """The value in the example call; no guard."""
        if type(size) is not Expr:
            return size
        found = self._hints.get(size)
        if found is None:
            simple = size if self.is_backed(size) else self.simplify(size)
            if not self.is_backed(simple):
                raise self._data_dependent(simple)
            found = self._hints[size] = evaluate(simple, self._values)
        return found

    def has_hint(self, size: Any) -> bool:
        return type(size) is not Expr or size in self._hints or self.is_backed(size) or self.is_backed(self.simplify(size))

    def simplify(self, size: Any) -> Any:
        """The same value in fewer symbols, under all that is known."""
        if type(size) is not Expr:
            return size
        if self._replacements:
            found = self._replaced.get(size)
            if found is None:
                found = self._replaced[size] = substitute(size, self._replacements)
            size = found
        return self._context.simplify(size)

    def in_terms_of(self, size: Any, given: Collection[Expr]) -> Any:
        """The value over symbols that can be read: a symbol that was replaced stands for what it was replaced by, where run time reads
        it and not the other.  With s1 = 4*s0 and s1 given, 4*s0 is s1, and s0 is s1 // 4.  None where that is not possible."""
        known = [(s, value) for s, value in self._replacements.items() if s in given and type(value) is Expr]
        whole = {value: s for s, value in known if value not in given}
        if size in whole:
            return whole[size]
        size = _with_parts(size, whole)
        missing = {s for s in free_symbols(size) if s not in given}
        return substitute(size, found) if (found := self._solved(missing, known, given)) is not None else None

    def _solved(self, missing: set[Expr], known: list[tuple[Expr, Expr]], given: Collection[Expr]) -> dict[Expr, Any] | None:
        found: dict[Expr, Any] = {}
        for wanted in missing:
            for s, value in known:
                terms = poly(value)
                count = terms.get((wanted,))
                rest = from_poly({m: n for m, n in terms.items() if m != (wanted,)})
                if count and free_symbols(rest) <= set(given) and wanted not in free_symbols(rest):
                    found[wanted] = floordiv(s - rest, count) if count != 1 else s - rest
                    break
            else:
                return None
        return found

    def as_stated(self, condition: Expr) -> Any:
        """A condition in the symbols that run time reads, nothing of it decided by what was concluded about unbacked symbols."""
        backed = {s: value for s, value in self._replacements.items() if self.symbols[s].hint is not None}
        return substitute(condition, backed) if backed else condition

    def interval(self, size: Size) -> tuple[int | None, int | None]:
        """Bounds of an integer in plain ints."""
        return self._context.bounds.interval(self.simplify(size))

    # ------------------------------------------------------------ facts

    def freeze(self) -> None:
        """Its guards have been compiled: from now on a question that needs one more is a LateQuestion."""
        self.frozen = True

    def _ensure_open(self, fact: Expr) -> None:
        if self.frozen:
            raise LateQuestion(f"{fact} was asked after the guards had been made", self.locate())

    def _record(self, fact: Expr, why: str) -> None:
        self._ensure_open(fact)
        guard = SizeGuard(fact, self.locate(), why)
        self._recorded.append(guard)
        before = self._replacements
        self._learn(fact)
        if self._replacements is not before:
            self._defining.add(guard)

    def learn(self, fact: bool | Expr) -> None:
        """What holds by an operator's own meaning: no guard, no check."""
        self._learn(self.simplify(fact))

    def _learn(self, fact: bool | Expr) -> None:
        """Makes later answers follow from a true fact."""
        if type(fact) is not Expr:
            return
        if fact.op == "and":
            for part in fact.args:
                self._learn(part)
        self._facts[fact] = self._answers[fact] = True
        opposite = not_(fact)
        if type(opposite) is Expr:
            self._facts[opposite] = self._answers[opposite] = False
        teach = _TEACHERS.get(fact.op)
        if teach is not None:
            teach(self, *[as_size(arg) for arg in fact.args])

    def _learn_equal(self, a: Any, b: Any) -> None:
        if _dtype_of(a) == "f64" or _dtype_of(b) == "f64":
            return self._learn_equal_float(a, b)
        for side, value in ((a, b), (b, a)):
            if type(side) is Expr and side.op in ("mod", "floordiv") and type(value) is int:    # never brings in another symbol
                self._facts[side] = value
                self._new_context()     # forget what was derived without this fact
        solved = self._solve(from_poly(plus(poly(a), poly(b), -1)))
        if solved is not None:
            self._replace(*solved)
        return None

    def _learn_equal_float(self, a: Any, b: Any) -> None:
        for left, right in ((a, b), (b, a)):
            if type(left) is Expr and left.op == "symbol" and left not in free_symbols(right):
                self._new_replacements({**{s: substitute(v, {left: right}) for s, v in self._replacements.items()}, left: right})
                return

    def _solve(self, zero: Size) -> tuple[Expr, Size] | None:
        """(symbol, value) that makes `zero` 0: the newest symbol that stands alone, unbacked ones last to be kept."""
        terms = poly(zero)
        for candidate in sorted(free_symbols(zero), key=self._newness, reverse=True):
            count = terms.get((candidate,))
            if count not in (1, -1):
                continue
            rest = from_poly(scale({m: n for m, n in terms.items() if m != (candidate,)}, -count))
            if candidate not in free_symbols(rest) and (self.symbols[candidate].hint is None or self.is_backed(rest)):
                return candidate, rest
        return None

    def _newness(self, expr: Expr) -> tuple[bool, int]:
        info = self.symbols[expr]
        return info.hint is None, info.number

    def _replace(self, old: Expr, new: Size) -> None:
        low, high = self._ranges.pop(old, (None, None))
        self._relations = {}        # they may mention the old symbol; the facts remain
        self._new_replacements({**{s: substitute(value, {old: new}) for s, value in self._replacements.items()}, old: new})
        # what was known of the old symbol holds for its replacement
        for fact in ((le(low, new) if low is not None else True), (le(new, high) if high is not None else True)):
            self._learn(self.simplify(fact))

    def _learn_less_or_equal(self, a: Size, b: Size) -> None:
        """Narrows the range of the newest symbol that can be freed.  A bound between symbols is one of the newer by the older,
        so that bounds never go round in circles."""
        if _dtype_of(a) == "f64" or _dtype_of(b) == "f64":
            return
        gap = plus(poly(b), poly(a), -1)
        names = sorted(free_symbols(a, b), key=self._newness)
        count = gap.get((names[-1],)) if names else None
        if count in (1, -1):
            bound = from_poly(scale({m: n for m, n in gap.items() if m != (names[-1],)}, -count))
            if names[-1] not in free_symbols(bound):
                self._narrow(names[-1], bound, count == -1)

    def _narrow(self, leaf: Expr, bound: Size, upper: bool) -> None:
        """One number and one symbolic bound a side are used; further symbolic ones are only kept as facts."""
        table: dict = self._ranges if type(bound) is int else self._relations
        pair = list(table.get(leaf, (None, None)))
        have = pair[upper]
        if have is None or (type(bound) is int and (bound < have if upper else bound > have)):
            pair[upper] = bound
            table[leaf] = (pair[0], pair[1])
            self._new_context()

    def _learn_not_equal(self, a: Any, b: Any) -> None:
        """A value that is not the end of its range moves the end."""
        for leaf, value in ((a, b), (b, a)):
            if type(leaf) is Expr and leaf in self._ranges and type(value) is int:
                low, high = self._ranges[leaf]
                if value == low:
                    self._narrow(leaf, value + 1, False)
                elif value == high:
                    self._narrow(leaf, value - 1, True)

    def _new_context(self) -> None:
        """Ranges or facts have changed: derive from them afresh, at the next question."""
        self._lazy_context = None

    def _new_replacements(self, replacements: dict[Expr, Any]) -> None:
        self._replacements = replacements
        self._replaced = {}
        self.generation += 1
        self._lazy_context = None

    @property
    def _context(self) -> Context:
        if self._lazy_context is None:
            self._lazy_context = Context(self._ranges, self._facts, self._relations)
        return self._lazy_context

    # ------------------------------------------------------------ guards

    @property
    def recorded(self) -> list[SizeGuard]:
        """Every answer that came from hints, in the order of asking."""
        return list(self._recorded)

    def guards(self) -> list[SizeGuard]:
        """The least list that implies all answers, given the equalities that replaced a symbol: declared ranges and recorded
        answers, rewritten in the symbols that are left, merged, and without those that follow from the others."""
        equalities = [guard for guard in self._recorded if guard in self._defining]
        others = [self._rewrite(guard) for guard in self._recorded if guard not in self._defining]
        return [*equalities, *least(list(map(self._rewrite, self._declared_ranges())), others)]

    def _declared_ranges(self) -> Iterator[SizeGuard]:
        for info in self.symbols.values():
            for upper, bound in enumerate((info.lo, info.hi)):
                if info.hint is not None and bound is not None:
                    yield SizeGuard(le(info.expr, bound) if upper else ge(info.expr, bound), None, RANGE)

    def _rewrite(self, guard: SizeGuard) -> SizeGuard:
        return SizeGuard(substitute(guard.expr, self._replacements), guard.location, guard.why)

    def _data_dependent(self, question: Any) -> DataDependentError:
        unknown = sorted((s for s in free_symbols(question) if self.symbols[s].hint is None), key=self._newness)
        names = ", ".join(f"{s} ({self.symbols[s].source})" if self.symbols[s].source else str(s) for s in unknown)
        if question.dtype == "bool":
            text = f"Whether {question} holds is known only at run time: it depends on {names}."
            hint = f"State it before this line: torch._check({question}) or torch._check({not_(question)}), or set bounds on {names}."
        else:
            text = f"The number {question} is known only at run time: it depends on {names}."
            hint = f"Keep it symbolic, or state its value before this line: torch._check({question} == ...)."
        return DataDependentError(text, self.locate(), hint)

    def __repr__(self) -> str:
        return f"ShapeEnv({len(self.symbols)} symbols, {len(self._recorded)} guards)"


def _with_parts(size: Any, whole: Mapping[Expr, Expr]) -> Any:
    """The expression with each part that is a key replaced by its value."""
    made: dict[Expr, Any] = {}
    for node in postorder(size):
        args = tuple([made[arg] for arg in node.args])
        other = whole.get(node)
        made[node] = other if other is not None else node if args == node.args else make(node.op, node.dtype, args, node.attr)
    return made[size] if type(size) is Expr else size


def _factors_of_0(question: Expr) -> tuple[Expr, ...] | None:
    """The factors of a product that is compared with 0."""
    sides = [as_size(arg) for arg in question.args]
    if question.op not in ("eq", "ne") or _dtype_of(sides[0]) == "f64" or 0 not in sides:
        return None
    terms = list(poly(sides[0] if type(sides[0]) is Expr else sides[1]))
    return terms[0] if len(terms) == 1 and len(terms[0]) > 1 else None


def _dtype_of(value: Any) -> str:
    return value.dtype if type(value) is Expr else "f64" if type(value) is float else "i64"


_TEACHERS: dict[str, Callable[..., None]] = {
    "eq": ShapeEnv._learn_equal,
    "le": ShapeEnv._learn_less_or_equal,
    "ne": ShapeEnv._learn_not_equal,
}
