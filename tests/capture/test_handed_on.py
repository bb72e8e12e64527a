"""What is only handed on is not guarded by its value; what is used is."""
import pytest
import torch
from harness import capture

import firesteel as fs


class Named:
    pass


@pytest.mark.parametrize("values", [["a", "b", "c"], [1, 2, 3], [1.5, 2.5, 3.5], [True, False], [torch.float32, torch.int64], [b"a", b"b"]],
                         ids=["str", "int", "float", "bool", "dtype", "bytes"])
def test_constants_that_are_only_handed_on_are_not_guarded(values):
    def inner(x, label=None):
        return {"out": x + 1, "labels": [label]}

    def f(x, label, obj):
        obj.label = obj.given
        return inner(x, label=label), label, obj

    compiled, backend = capture(f, fullgraph=True)
    for value in values:
        obj = Named()
        obj.given = value
        out = compiled(torch.ones(2), value, obj)
        assert out[1] is value and out[0]["labels"] == [value] and obj.label is value
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("use", [lambda s: 2 if s == "b" else 1, len, lambda s: {"a": 1, "b": 2, "cc": 3}[s], lambda s: hash(s) % 7, lambda s: ord(s[0]),
                                 lambda s: len(f"{s:>4}{s}"), lambda s: 2 if s in ("a", "cc") else 3, lambda s: 5 if s else 6],
                         ids=["equal", "len", "key", "hash", "item", "format", "in", "truth"])
def test_constants_that_are_used_are_guarded(use):
    def f(x, s):
        t = s
        return x * use(t), t

    compiled, _ = capture(f, fullgraph=True)
    for s in ("a", "b", "cc", "a"):
        out, back = compiled(torch.ones(2), s)
        assert out[0] == use(s) and back == s


def test_type_of_what_is_handed_on_is_guarded():
    def f(x, s):
        return (x + 1 if isinstance(s, str) else x - 1), s

    compiled, _ = capture(f, fullgraph=True)
    for s, expected in (("a", 2.0), (1, 0.0), ("b", 2.0), (None, 0.0)):
        out, back = compiled(torch.ones(2), s)
        assert out[0] == expected and back is s


def test_result_of_a_break_that_is_only_handed_on_is_not_guarded():
    names = iter("abcd")

    @fs.disable
    def fetch():
        return next(names)

    def f(x):
        y = x + 1
        name = fetch()
        return y * 2, name

    compiled, backend = capture(f)
    assert [compiled(torch.ones(2))[1] for _ in range(4)] == list("abcd")
    assert len(backend.graphs) == 2
