"""Operators whose results depend on the exact dtype they are computed in, compiled natively, against eager."""
import pytest
import torch

import firesteel as fs

CASES = {
    "nextafter": (lambda x: torch.nextafter(x, torch.zeros_like(x)), (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    "addmv with a number": (lambda x: torch.addmv(x[0], x, x[0], beta=2, alpha=3), (torch.int64, torch.int32, torch.float64)),
    "a mask of truths": (lambda x: (x.float() + torch.where(torch.ones(5, 5, dtype=torch.bool).tril(), 0.0, -1.0)).sum(-1) == 1, (torch.float64, torch.int64)),
    "addr": (lambda x: torch.addr(x, x[0], x[1], beta=2, alpha=3), (torch.int64, torch.int32, torch.float64)),
}


@pytest.mark.parametrize("name, dtype", [(name, dtype) for name, (_, dtypes) in CASES.items() for dtype in dtypes], ids=str)
def test_equals_eager(name, dtype):
    fn = CASES[name][0]
    x = torch.linspace(-40, 40, 25).reshape(5, 5).to(dtype)
    got, want = fs.compile(fn, fullgraph=True)(x), fn(x)
    assert got.dtype is want.dtype and torch.equal(got, want)
