"""Programs for test_resume: each is a function of one int, run whole, by concrete.py, and resumed at every instruction."""
import contextlib


def loops(n):
    total = 0
    for i in range(n):
        for j in range(i):
            if j % 2:
                continue
            total += i * j
        else:
            total -= 1
    while total > 10:
        total //= 2
    return total


def try_except(n):
    log = []
    for i in range(n):
        try:
            log.append(10 // (i - 1))
            if i == 2:
                raise KeyError(i)
        except ZeroDivisionError as error:
            log.append(str(error))
        except KeyError:
            try:
                raise
            except KeyError as again:
                log.append(again.args)
        else:
            log.append("else")
        finally:
            log.append(i)
    return log


def uncaught(n):
    try:
        return [1, 2][n]
    except IndexError as error:
        raise ValueError("far") from error
    finally:
        n = 0


class Manager:
    def __init__(self, log, swallow):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.append(("out", kind and kind.__name__))
        return self.swallow


def withs(n):
    log = []
    with Manager(log, False) as outer, Manager(log, True):
        log.append(outer.swallow)
        if n > 1:
            raise ValueError(n)
    with contextlib.suppress(KeyError):
        {}["x"]
    return log


def comprehensions(n):
    k = n + 1
    rows = [[i * j + k for j in range(i) if j != 1] for i in range(n)]
    names = {str(i): (i, *rows[i]) for i in range(n)}
    odd = {i % 3 for i in range(n)}
    i = 5
    return rows, names, sorted(odd), i, sum(x for row in rows for x in row)


def comprehension_cells(n):
    functions = [lambda: x + n for x in range(n)]
    x = 7
    return [f() for f in functions], x


def closures(n):
    count = 0

    def bump(by=2, *, extra=1):
        nonlocal count
        count += by + extra
        return count

    bump()
    count += n
    bump(extra=n, by=3)
    return count, bump(4)


def calls(n):
    parts = f"{n!r:>4}|{n}|{n:03d}|{str(n)!s}"
    a, *b, c = range(n + 3)
    args, kw = (1, 2), {"sep": "-"}
    joined = "{}{}{sep}".format(*args, **kw)
    box = dict(x=n, y=[n])    # noqa: C408
    box["y"][0:1] = [n, n + 1]
    low, high = min(b, default=0), max(a, c, key=lambda v: -v)
    return parts, joined, box, box["y"][:1], low, high, n and a or c, not n, n is None, 3 not in b, -n, +n, ~n


class Base:
    def size(self, n):
        return n + 1


class Derived(Base):
    def size(self, n):
        grown = super().size(n)
        return grown * 2

    def cell_size(self, n):
        also = lambda: self         # noqa: E731
        return super().size(n) + (also() is self)


def supers(n):
    return Derived.size(Derived(), n)


def many_locals(n):
    a = b = c = d = e = f = g = h = i = j = k = l = m = o = p = q = r = s = n
    t, u = a + b, c + d
    u, t = t, u
    return (a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r, s, t, u)


def branches(n):
    x = None if n < 2 else n
    if x is None:
        return "none"
    if not x == 3 and (x > 5 or x < 3):    # noqa: SIM201
        return "far"
    assert x == 3, x
    return "three" if x else "zero"


CASES = [loops, try_except, uncaught, withs, comprehensions, comprehension_cells, closures, calls, supers, many_locals, branches,
         ]
METHODS = [Derived.size, Derived.cell_size]
