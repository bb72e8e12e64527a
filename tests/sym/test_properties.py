"""Random expressions against Python's own integers: building, simplifying under ranges, bounds, text, guards."""
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.sym import expr as E
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Context, Expr, context_of, evaluate, make, substitute, symbol

NAMES = ("a", "b", "c")
SYMBOLS = {name: symbol(name) for name in NAMES}
settings.register_profile("sym", max_examples=200, deadline=None, derandomize=True)
settings.load_profile("sym")

numbers = st.integers(-20, 20)
INT_OPS = {
    "add": (E.add, lambda x, y: x + y), "sub": (E.sub, lambda x, y: x - y), "mul": (E.mul, lambda x, y: x * y),
    "floordiv": (E.floordiv, lambda x, y: x // y), "mod": (E.mod, lambda x, y: x % y), "min": (E.min_, min), "max": (E.max_, max),
    "ceildiv": (E.ceildiv, lambda x, y: -(-x // y)),
}
TESTS = {"lt": (E.lt, lambda x, y: x < y), "le": (E.le, lambda x, y: x <= y), "gt": (E.gt, lambda x, y: x > y), "ge": (E.ge, lambda x, y: x >= y),
         "eq": (E.eq, lambda x, y: x == y), "ne": (E.ne, lambda x, y: x != y)}


def simplify(expr, ranges):
    return context_of(ranges).simplify(expr) if type(expr) is Expr else expr


def grow(children):
    """A tree: a name, a number, or (op, subtree, ...)."""
    return st.one_of(
        st.tuples(st.sampled_from(sorted(INT_OPS)), children, children),
        st.tuples(st.sampled_from(sorted(INT_OPS)), children, st.integers(1, 12)),      # mostly divide by small numbers
        st.tuples(st.just("abs"), children),
        st.tuples(st.just("where"), st.tuples(st.sampled_from(sorted(TESTS)), children, children), children, children),
    )


trees = st.recursive(st.one_of(st.sampled_from(NAMES), numbers), grow, max_leaves=12)


def as_sizes(tree):
    """The tree through our functions, with symbols."""
    if isinstance(tree, str):
        return SYMBOLS[tree]
    if isinstance(tree, int):
        return tree
    op, *args = tree
    args = [as_sizes(arg) for arg in args]
    if op == "abs":
        return E.abs_(*args)
    if op == "where":
        return E.where(*args)
    return (INT_OPS.get(op) or TESTS[op])[0](*args)


def as_number(tree, values):
    """The tree through Python."""
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, int):
        return tree
    op, *args = tree
    args = [as_number(arg, values) for arg in args]
    if op == "abs":
        return abs(*args)
    if op == "where":
        return args[1] if args[0] else args[2]
    return (INT_OPS.get(op) or TESTS[op])[1](*args)


def both(tree, values):
    """(Size, number); None where Python divides by zero."""
    try:
        return as_sizes(tree), as_number(tree, values)
    except ZeroDivisionError:
        return None


value_sets = st.fixed_dictionaries(dict.fromkeys(NAMES, numbers))


@given(trees, value_sets)
def test_building_keeps_the_value(tree, values):
    pair = both(tree, values)
    if pair is not None:
        size, number = pair
        assert evaluate(size, values) == number
        assert substitute(size, {SYMBOLS[name]: value for name, value in values.items()}) == number
        assert eval(E.python_text(size), {"math": math}, dict(values)) == number


@given(trees)
def test_building_is_canonical(tree):
    """Rebuilding an expression from its nodes gives the same node."""
    try:
        size = as_sizes(tree)
    except ZeroDivisionError:
        return
    if type(size) is Expr:
        stand_in = symbol("z")
        assert E.sub(E.add(size, stand_in), stand_in) is size
        assert E.sub(size, size) == 0 and E.eq(size, size) is True


@st.composite
def ranges_and_values(draw):
    ranges, values = {}, {}
    for name in NAMES:
        low, high = sorted((draw(numbers), draw(numbers)))
        values[name] = draw(st.integers(low, high))
        ranges[SYMBOLS[name]] = (draw(st.sampled_from([low, None])), draw(st.sampled_from([high, None])))
    return ranges, values


@given(trees, ranges_and_values())
def test_simplify_and_bounds_are_sound(tree, known):
    ranges, values = known
    pair = both(tree, values)
    if pair is None:
        return
    size, number = pair
    simple = simplify(size, ranges)
    assert evaluate(simple, values) == number
    low, high = Context(ranges).bounds.interval(simple)
    assert (low is None or low <= number) and (high is None or number <= high)
    divisor = Context(ranges).bounds.divisor(simple)
    assert number == 0 if divisor == 0 else number % divisor == 0


@given(st.sampled_from(sorted(TESTS)), trees, trees, ranges_and_values())
def test_comparisons_are_sound(op, left, right, known):
    ranges, values = known
    pair = both((op, left, right), values)
    if pair is not None:
        condition, truth = pair
        assert evaluate(condition, values) == truth
        assert evaluate(simplify(condition, ranges), values) == truth
        assert evaluate(E.not_(condition), values) == (not truth)


# ---------------------------------------------------------------- index expressions, as lowering of views makes them

AXES = tuple(make("axis", "i64", (), name) for name in ("i0", "i1", "i2"))


@st.composite
def index_problems(draw):
    """(expression, ranges, values): digits of a flat index over extents that are numbers or symbols."""
    extents, ranges, values = [], {}, {}
    for k, axis in enumerate(AXES):
        number = draw(st.integers(1, 6))
        if draw(st.booleans()):
            extent = symbol(f"n{k}")
            ranges[extent] = (1, None)
            values[f"n{k}"] = number
        else:
            extent = number
        extents.append(extent)
        ranges[axis] = (0, extent - 1)
        values[axis.attr] = draw(st.integers(0, number - 1))
    return draw(index_expression(extents)), ranges, values


@st.composite
def index_expression(draw, extents):
    n0, n1, n2 = extents
    i0, i1, i2 = AXES
    flat = (i0 * n1 + i1) * n2 + i2
    pieces = [i0, i1, i2, flat, i0 * n1 + i1, i1 * n2 + i2, n0 - 1 - i0, i2 + 1, i1 - 1]
    divisors = [n0, n1, n2, n1 * n2, n0 * n1, n0 * n1 * n2, 2 * n2, 2, 3, 4]
    expr = draw(st.sampled_from(pieces))
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from(("div", "mod", "add", "mul", "divmod")))
        d = draw(st.sampled_from(divisors))
        if step == "div":
            expr = expr // d
        elif step == "mod":
            expr = expr % d
        elif step == "add":
            expr = expr + draw(st.sampled_from(pieces)) * draw(st.integers(-2, 3))
        elif step == "mul":
            expr = expr * d
        else:
            expr = (expr // d) * d + expr % d
    return expr


@settings(max_examples=800)
@given(index_problems())
def test_index_simplification_is_sound(problem):
    expr, ranges, values = problem
    assert evaluate(simplify(expr, ranges), values) == evaluate(expr, values)


@given(index_problems())
def test_simplify_is_idempotent(problem):
    expr, ranges, _ = problem
    once = simplify(expr, ranges)
    assert E.eq(simplify(once, ranges), once) is True


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_flattening_and_splitting_is_the_identity(numbers, symbolic):
    """Digits of the flat index are the axes again; and the flat index of the digits of f is f."""
    extents = [symbol(f"n{k}") if symbolic[k] else number for k, number in enumerate(numbers)]
    axes = [make("axis", "i64", (), f"i{k}") for k in range(len(extents))]
    ranges = {axis: (0, extent - 1) for axis, extent in zip(axes, extents)}
    flat = 0
    for axis, extent in zip(axes, extents):
        flat = flat * extent + axis
    stride = 1
    for axis, extent in zip(reversed(axes), reversed(extents)):
        got = simplify(E.mod(E.floordiv(flat, stride), extent), ranges)
        assert got is simplify(axis, ranges) or got == simplify(axis, ranges), f"{flat} // {stride} % {extent} -> {got}"
        stride = E.mul(stride, extent)
    f = make("axis", "i64", (), "f")
    positive = {extent: (1, None) for extent in extents if type(extent) is Expr}
    total, rebuilt, stride = E.product(extents), 0, 1
    for extent in reversed(extents):
        rebuilt = E.add(rebuilt, E.mul(E.mod(E.floordiv(f, stride), extent), stride))
        stride = E.mul(stride, extent)
    got = simplify(rebuilt, {**positive, f: (0, E.sub(total, 1))})
    assert got is f or total == 1, f"{rebuilt} -> {got}"


# ---------------------------------------------------------------- questions

@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(sorted(TESTS)), trees, trees), min_size=1, max_size=5),
       st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 9))), st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 9))))
def test_guards_imply_the_answers(questions, hints, others):
    env = ShapeEnv()
    created = {SYMBOLS[name]: env.create_symbol(hints[name], name, lo=0) for name in NAMES}
    answers = {}
    for question in questions:
        pair = both(question, hints)
        if pair is None or both(question, others) is None:
            continue
        condition = substitute(pair[0], created)
        try:
            answer = env.decide(condition)
        except ZeroDivisionError:       # the hints make a branch that nobody takes divide by zero
            return
        assert answer == pair[1]
        answers[question] = answer
    values = {created[SYMBOLS[name]].attr: others[name] for name in NAMES}
    try:
        admitted = all(evaluate(guard.expr, values) for guard in env.guards())
    except ZeroDivisionError:
        return
    if admitted:
        assert all(as_number(question, others) == answer for question, answer in answers.items())
