"""One operator of torch's database, compiled once with symbolic sizes and called with tensors of several sizes, forward and backward.

`check(op, ...)` takes a sample and makes others of it: every size s above 1 becomes s + k, the same in all tensors, and the old data stands in the
corner of the new; where eager refuses that, one size alone grows.  Run as a script it sweeps the database and tells of each operator that is not
one graph for all sizes:

    python tests/autograd/opinfo_sizes.py [--backend native] [--samples 12] [--part 0/4] [names...]
"""
import argparse
import collections
import contextlib
import time
import warnings
from dataclasses import dataclass

import opinfo_checks as checks
import torch
from torch.utils import _pytree as pytree

import firesteel as fs

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
GROWTH = (1, 3, 2)

# Matrices: what is new stands on the diagonal, so that they stay regular, symmetric, positive, triangular.
MATRICES = {"cholesky", "cholesky_inverse", "cholesky_solve", "lu", "lu_solve", "lu_unpack", "inverse", "logdet", "qr", "svd", "pinverse", "matrix_exp",
            "triangular_solve", "ormqr", "geqrf", "svd_lowrank", "pca_lowrank"}


def grown(t, sizes, matrices):
    """The tensor with other sizes, in the same layout."""
    shape, new = [sizes.get(s, s) for s in t.shape], t.detach()
    for d, n in enumerate(shape):
        new = new.index_select(d, torch.arange(n) % t.shape[d]) if t.shape[d] else new
    if matrices and t.dim() >= 2 and t.is_floating_point():
        new = _larger_matrix(new.clone(), t.shape[-1]) if t.shape[-1] == t.shape[-2] else new + 0.01 * checks.random_like(new, 0)
    return _in_layout_of(t, new).requires_grad_(t.requires_grad)


def _larger_matrix(new, old):
    new[..., old:, :], new[..., :, old:] = 0, 0
    for i in range(old, new.shape[-1]):
        new[..., i, i] = 1 + 0.37 * (i - old + 1)
    return new


def _in_layout_of(t, new):
    """A copy with strides that follow from the sizes as those of t do; a contiguous one where they do not follow."""
    order, least = sorted(range(t.dim()), key=lambda d: (t.stride(d), t.shape[d], -d)), min(t.stride(), default=1)
    if least == 0 or _strides(t.shape, order, least) != list(t.stride()):
        return new.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(new.shape, _strides(new.shape, order, least), dtype=t.dtype).copy_(new)


def _strides(shape, order, step):
    strides = [0] * len(shape)
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


def resized(op, sample, sizes):
    """The sample's case with other sizes."""
    case = checks.Sample(op, sample, op)
    matrices = "linalg" in op.name or op.name in MATRICES
    case.flat = [grown(t, sizes, matrices) if isinstance(t, torch.Tensor) else t for t in case.flat]
    case.leaves = [t for t in case.flat if isinstance(t, torch.Tensor) and t.requires_grad]
    return case


def variants(op, sample, level, parts):
    """(case, eager's results) of other sizes that eager takes."""
    sizes = sorted({s for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor) for s in t.shape if s > 1})
    found = []

    def attempt(change):
        with contextlib.suppress(Exception):
            case = resized(op, sample, change)
            want = case.run(case.program, level)
            if len(want) == parts:
                found.append((case, want))
    for k in GROWTH:
        attempt({s: s + k for s in sizes})
    if len(found) < 2:
        for s in sizes:
            for k in GROWTH[:2]:
                attempt({s: s + k})
    return found


@dataclass
class Outcome:
    """Of one operator: what differed first, or ""; the most graphs that a sample took; how often sizes were fixed; how many samples had variants."""
    text: str = ""
    graphs: int = 0
    specialized: int = 0
    samples: int = 0


def check(op, *, samples=1, backend="aot_eager"):
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    outcome = Outcome()
    if dtype is None:
        return outcome
    with warnings.catch_warnings(), fs.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        warnings.simplefilter("ignore")
        for sample in checks.samples_of(op, dtype, samples):
            _check_sample(op, sample, backend, outcome)
            if outcome.text:
                break
    return outcome


def _check_sample(op, sample, backend, outcome):
    case = checks.Sample(op, sample, op)
    if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in case.flat):
        return
    try:
        level, want = checks.eager_result(case, checks.highest_level(op, 1))
    except checks.Refused:
        return
    others = variants(op, sample, level, len(want))
    if not others:
        return
    fs.reset()
    before = fs.counters["aot"]["specialized_by_op"]
    run = compiled(case, op, backend)
    try:
        for each, expected in ((case, want), *others):
            outcome.text = outcome.text or checks.difference(each.run(run, level), expected)
    except Exception as error:
        outcome.text = f"{type(error).__name__}: {str(error).strip()}"[:250]
    outcome.graphs = max(outcome.graphs, fs.counters["stats"]["unique_graphs"])
    outcome.specialized += fs.counters["aot"]["specialized_by_op"] - before
    outcome.samples += 1


def compiled(case, op, backend):
    """The compiled program of the sample's tensors: its numbers are a part of it."""
    places = [i for i, t in enumerate(case.flat) if isinstance(t, torch.Tensor)]
    numbers, structure = list(case.flat), case.structure

    def program(*tensors):
        flat = list(numbers)
        for i, t in zip(places, tensors):
            flat[i] = t
        args, kwargs = pytree.tree_unflatten(flat, structure)
        return op(*args, **kwargs)
    fn = fs.compile(program, dynamic=True, fullgraph=True, backend=backend)
    return lambda *flat: fn(*[flat[i] for i in places])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--part", default="0/1")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    counts, start = collections.Counter(), time.time()
    for op in checks.database.op_db:
        name = checks.name_of(op)
        if options.names and name not in options.names or not checks.in_part(name, parts, part):
            continue
        outcome = check(op, samples=options.samples, backend=options.backend)
        kind = ("wrong" if outcome.text else "specialised" if outcome.specialized else "not resized" if not outcome.samples
                else "one graph" if outcome.graphs == 1 else "two graphs" if outcome.graphs == 2 else "more graphs")
        counts[kind] += 1
        if kind not in ("one graph", "not resized"):
            print(f"{kind}: {name} ({outcome.graphs} graphs) {outcome.text}", flush=True)
    print(dict(counts), f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
