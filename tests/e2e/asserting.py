"""Programs with assert statements, in a file whose asserts pytest does not rewrite."""


def number(x, n):
    y = x * 2
    assert n < 3, f"n is {n}"
    return y


def data(x):
    y = x * 2
    assert (x > -100).all(), "too small"
    return y


def caught(x, n):
    y = x * 2
    try:
        assert n < 3, f"n is {n}"
    except AssertionError as error:
        return y + 1, error.args
    return y, ()
