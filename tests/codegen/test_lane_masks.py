"""Comparisons of places along the lanes with a bound: as numbers of lanes they say what comparisons of 64-bit integers say."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

FAR = torch.tensor([-2**63, -2**63 + 1, -70, -1, 0, 1, 2, 33, 65, 69, 70, 71, 200, 2**31, 2**40, 2**63 - 2, 2**63 - 1])
COMPARISONS = [
    lambda i, n: i < n, lambda i, n: i <= n, lambda i, n: n < i, lambda i, n: n <= i, lambda i, n: i > n, lambda i, n: i >= n, lambda i, n: i == n,
    lambda i, n: i * 3 + 2 <= n, lambda i, n: 5 - i < n, lambda i, n: n <= i * 2 - 60, lambda i, n: i - n < 4, lambda i, n: 2**62 + i <= n,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compare", COMPARISONS, ids=range(len(COMPARISONS)))
def test_bounds_from_data(compare, dynamic):
    for size in (70, 64, 5):
        fn = lambda n: torch.where(compare(torch.arange(size), n[:, None]), 1.5, 0.5)       # noqa: B023  # called at once
        assert torch.equal(fs.compile(fn, dynamic=dynamic)(FAR), fn(FAR))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("by", [(3, 5), (-2, 4), (-3, -1)])
def test_padded_rows_and_every_other_element_of_them(dtype, by):
    for size in (9, 32, 67):
        x = (torch.randn(4, size) * 3).to(dtype)
        for fn in (lambda x: F.pad(x, by), lambda x: F.pad(x, by)[:, ::2].clone(), lambda x: F.pad(x, by)[:, 1::2] | 1 if dtype is torch.uint8 else x):
            torch.testing.assert_close(fs.compile(fn)(x), fn(x), rtol=0, atol=0)


def test_triangles():
    x = torch.randn(3, 37, 41)
    for diagonal in (-50, -3, 0, 2, 50):
        for part in (torch.tril, torch.triu):
            fn = lambda x: part(x * 2, diagonal)        # noqa: B023  # called at once
            assert torch.equal(fs.compile(fn)(x), fn(x))
