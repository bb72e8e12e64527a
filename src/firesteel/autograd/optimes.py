"""How long the operators of a graph take, measured on this machine: for choices between saving and recomputing.

A library call runs a few times on tensors of its real shapes; the time is kept for the process.  The time of fused kernels is estimated from their
bytes and the measured speed of memory; what they keep in registers counts for an eighth.  Symbolic sizes count as their hints.

    seconds(node)       # of running the operator once more
"""
from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from firesteel.artifacts import counters
from firesteel.autograd.recompute import POLICIES, UNKNOWN_SIZE, bytes_of, op_class
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.targets import CPU, HOST, KINDS, kind_of

RUNS = 7
ENOUGH = 0.3            # seconds: fewer runs where they take longer together
PROBE = 1 << 22         # elements copied to find the speed of memory
REGISTERS = 8           # a value that stays in a kernel takes this fraction of the time that memory would
_FREE = ("view", "create", "size")
_times: dict[Any, float] = {}


def seconds(node: Node) -> float:
    """Of computing the node once; an item of a tuple is free, its maker is not."""
    kind = op_class(node)
    if node.op != "call_function" or kind in _FREE or node.target is operator.getitem:
        return 0.0
    if kind == "heavy" and (found := measured(node)) is not None:
        return found
    read = sum(map(bytes_of, node.all_input_nodes)) if kind in ("reduce", "heavy") else 0
    written = bytes_of(node) / (REGISTERS if all(map(_in_kernel, node.users)) else 1)
    return (written + read) / bytes_a_second(_device(node))


def _in_kernel(reader: Node) -> bool:
    """Can a fused kernel read a value of its own there?  A view is read by its readers."""
    kind = op_class(reader)
    return all(map(_in_kernel, reader.users)) if kind == "view" else POLICIES[kind].fusible


def measured(node: Node) -> float | None:
    """The time of a library call on tensors like those of the graph; None, counted, where it cannot be made on them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: _described(a.meta.get("val")))
    key = (node.target, repr(args), repr(kwargs))
    if key not in _times:
        try:
            given: Any = map_arg((node.args, node.kwargs), lambda a: _example(a.meta.get("val")))
            _times[key] = timed(lambda: node.target(*given[0], **given[1]), _device(node))     # type: ignore[operator]
        except (RuntimeError, ValueError, IndexError, TypeError):      # its data must have a meaning, or it does not fit into memory
            counters["aot"]["unmeasured_operators"] += 1
            _times[key] = -1.0
    return _times[key] if _times[key] >= 0 else None


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """The least of a few runs after a first one, which sets the library up, with the user's modes out of the way.  What else the machine does
    makes a run slower, never faster."""
    wait = (kind_of(device) or KINDS[CPU]).wait
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        _once(call, wait)
        runs: list[float] = []
        while not runs or len(runs) < RUNS and sum(runs) < ENOUGH:
            runs.append(_once(call, wait))
        return min(runs)


def _once(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def bytes_a_second(device: torch.device) -> float:
    """What a kernel writes in a second, found by a copy."""
    key = ("copy", device)
    if key not in _times:
        source = torch.zeros(PROBE, device=device)
        result = torch.zeros(PROBE, device=device)
        _times[key] = max(timed(lambda: result.copy_(source), device), 1e-9)
    return 4 * PROBE / _times[key]


def _device(node: Node) -> torch.device:
    for read in (node, *node.all_input_nodes):
        if isinstance(value := read.meta.get("val"), torch.Tensor):
            return HOST if value.device.type == "meta" else value.device
    return HOST


def _known(size: Any, env: Any) -> Any:
    return size if isinstance(size, (int, float)) else env.hint(size) if env.has_hint(size) else UNKNOWN_SIZE


def _layout(tensor: torch.Tensor) -> tuple[tuple, tuple]:
    spec: Any = getattr(tensor, "spec", None)
    if spec is None:
        return tuple(tensor.shape), tensor.stride()
    env = getattr(getattr(tensor, "world", None), "env", None)
    return tuple(_known(n, env) for n in spec.shape), tuple(_known(n, env) for n in spec.strides)


def _described(value: Any) -> Any:
    return (*_layout(value), value.dtype, str(value.device)) if isinstance(value, torch.Tensor) else _number(value)


def _number(value: Any) -> Any:
    symbolic = isinstance(value, SYMBOLIC)
    return _known(from_sym(value), value.node.env) if symbolic else value


def _example(value: Any) -> Any:
    """A tensor of the real layout; integers are 0, so that they are good for an index."""
    if not isinstance(value, torch.Tensor):
        return _number(value)
    device = HOST if value.device.type == "meta" else value.device
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made = torch.empty_strided(*_layout(value), dtype=value.dtype, device=device)
        return made.fill_(0.5) if made.dtype.is_floating_point or made.dtype.is_complex else made.zero_()
