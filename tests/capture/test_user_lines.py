"""What is not captured yet breaks honestly: eager's results, and under fullgraph=True the user's own line, also where torch's code is between."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import firesteel as fs


def new_data(x: torch.Tensor) -> Any:
    y = torch.nn.Parameter(x + 1)
    y.data = torch.cat([x, x])  # here
    return y.detach() + 1


PROGRAMS = [new_data]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_breaks_at_the_users_line(program: Callable[..., Any], backend: str) -> None:
    x = torch.arange(4.0)
    torch.testing.assert_close(fs.compile(program, backend=backend)(x), program(x))
    with pytest.raises(fs.errors.Unsupported, match=r"test_user_lines\.py:\d+ in [\s\S]*# here"):
        fs.compile(program, backend=backend, fullgraph=True)(x)
