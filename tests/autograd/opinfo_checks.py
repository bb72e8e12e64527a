"""One operator of torch's operator database, through ahead-of-time autograd and in eager: values, gradients and gradients of gradients.

`check(op, dtype, ...)` says what differed first, and which of these parts eager supports.  A sample that eager itself refuses (or whose
gradient it refuses) is skipped.  An operator is checked in one of three ways: "aot" calls ahead-of-time autograd and has every value of its graphs
compared with what they say of it; "decomposed" does that with decompositions and the partitioner of min-cuts; "compile" is
`fs.compile(backend="aot_eager")`.  Run as a script it sweeps the whole database, prints what failed, and how many operators passed:

    python tests/autograd/opinfo_checks.py [--way compile] [--inplace] [--samples 12] [--part 0/4] [names...]
"""
import argparse
import collections
import contextlib
import hashlib
import itertools
import time
import warnings
from dataclasses import dataclass

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import firesteel as fs
from firesteel.autograd import aot
from firesteel.graph.decomp import core_decompositions

# The database sets the seed inside of random operators, which a tracer would not see; `Sample.run` sets it outside.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

# Operators whose values nobody promises.
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

# Programs that ask for data: their result's shape, or whether they raise, depends on values.  They are checked through fs.compile, which splits them.
DATA_DEPENDENT = {
    "allclose", "equal", "nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount", "item", "tensor_split", "jiterator_unary",
    "nn.functional.ctc_loss", "repeat_interleave", "combinations", "to_sparse", "linalg.lstsq", "linalg.lstsq.grad_oriented", "multinomial", "corrcoef", "cov", "narrow", "index_put",
    "nn.functional.gaussian_nll_loss",
}


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators():
    """The operators that eager supports on float32 or float64 on the CPU."""
    return [op for op in database.op_db if op.supported_dtypes("cpu") & {torch.float32, torch.float64}]


def in_part(name, parts, part):
    """A fixed choice of about one in `parts` names."""
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % parts == part


def samples_of(op, dtype, count):
    """Up to `count` samples: the first, and others spread over the first twelve."""
    torch.manual_seed(0)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 12))
    if len(found) <= count:
        return found
    return [found[k * (len(found) - 1) // max(1, count - 1)] for k in range(count)]


class Refused(Exception):
    """Eager does not support this."""


class Sample:
    """A sample as a function of its tensors that require grad, run by eager and compiled."""

    def __init__(self, op, sample, call):
        self.call, self.process, self.blank = call, sample.output_process_fn_grad, name_of(op) in UNINITIALIZED
        flat, self.structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.flat = flat
        self.leaves = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]

    def program(self, *flat):
        args, kwargs = pytree.tree_unflatten(list(flat), self.structure)
        return self.call(*args, **kwargs)

    def run(self, fn, level):
        """[outputs, gradients, second gradients], as far as `level` asks."""
        torch.manual_seed(1)
        outputs = fn(*self.flat)
        found = [[torch.zeros_like(t) if self.blank else t for t in pytree.tree_leaves(outputs)]]
        if level == 0 or not self.leaves:
            return found
        processed = self.process(outputs) if self.process is not None else outputs
        starts = [t for t in pytree.tree_leaves(processed) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not starts:
            return found
        tangents = [random_like(t, k) for k, t in enumerate(starts)]
        if level == 1:
            found.append(torch.autograd.grad(starts, self.leaves, tangents, allow_unused=True))
            return found
        for t in tangents:
            t.requires_grad_()
        first = torch.autograd.grad(starts, self.leaves, tangents, create_graph=True, allow_unused=True)
        found.append([g.detach() if g is not None else None for g in first])
        again = [g for g in first if g is not None and g.requires_grad]
        if again:
            found.append(torch.autograd.grad(again, [*self.leaves, *tangents], [random_like(t, 7 + k) for k, t in enumerate(again)], allow_unused=True))
        return found


def random_like(t, seed):
    return torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(seed))


PARTS = ("outputs", "gradients", "second gradients")


def difference(got, want):
    """What differs first between two runs, or ''."""
    for part, g, w in zip(PARTS, got, want):
        if len(g) != len(w):
            return f"{part}: {len(g)} instead of {len(w)}"
        for k, (a, b) in enumerate(zip(g, w)):
            if (text := _difference(a, b, part)) != "":
                return f"{part}[{k}]: {text}"
    return "" if len(got) == len(want) else f"{len(got)} parts instead of {len(want)}"


def _difference(a, b, part):
    if not isinstance(b, torch.Tensor):
        same = a == b or a != a and b != b
        return "" if same and type(a) is type(b) else f"{a!r} instead of {b!r}"[:200]
    if not isinstance(a, torch.Tensor):
        if a is None and b.numel() == 0:
            return ""       # an empty gradient is as good as none
        return f"{a!r} instead of a tensor"[:200]
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return f"{a.dtype}{list(a.shape)}{a.layout} instead of {b.dtype}{list(b.shape)}{b.layout}"
    if a.requires_grad != b.requires_grad:
        return f"requires_grad {a.requires_grad} instead of {b.requires_grad}"
    if part == "outputs" and a.layout == torch.strided and a.stride() != b.stride() and b.numel() > 1:
        return f"strides {a.stride()} instead of {b.stride()} of {list(b.shape)}"
    try:
        torch.testing.assert_close(a, b, equal_nan=True, **tolerances(b, part))
    except AssertionError as error:
        return str(error).replace("\n", " ")[:200]
    return ""


def tolerances(want, part):
    """Relative to the largest element: sums of large terms that cancel differ by the terms' rounding."""
    if want.layout != torch.strided or not (want.is_floating_point() or want.is_complex()):
        return {}
    finite = want.detach().abs().nan_to_num(0, 0, 0)
    scale = max(1.0, float(finite.max()) if finite.numel() else 1.0) * (1 if part == "outputs" else 10)
    return {"rtol": 1e-4, "atol": 1e-5 * scale} if want.dtype in (torch.float32, torch.complex64) else {"rtol": 1e-7, "atol": 1e-7 * scale}


def highest_level(op, level):
    """2 where gradients of gradients are supported, 1 where gradients are, 0 else."""
    return min(level, 2 if op.supports_gradgrad else 1) if op.supports_autograd else 0


def eager_result(case, level):
    """(level that eager supports, its results)."""
    for tried in range(level, -1, -1):
        with contextlib.suppress(Exception):
            return tried, case.run(case.program, tried)
    raise Refused


class Audit(torch.fx.Interpreter):
    """Runs a graph by PyTorch and compares the metadata of each value with what the graph says of it."""

    def run_node(self, node):
        result = super().run_node(node)
        if node.op == "call_function":
            self.compare(node, result, node.meta["val"])
        return result

    def compare(self, node, real, said):
        if isinstance(said, (list, tuple)):
            for r, s in zip(real, said):
                self.compare(node, r, s)
        elif isinstance(said, torch.Tensor):
            spec = said.spec
            assert real.dtype == spec.dtype and len(real.shape) == len(spec.shape) and all(
                a == b for a, b in zip(real.shape, spec.shape) if type(b) is int), f"{node.target} gives {real.dtype}{list(real.shape)}, not {spec}"
            strides = [(a, b) for n, a, b in zip(real.shape, real.stride(), spec.strides) if n > 1 and real.numel() and type(b) is int]
            assert all(a == b for a, b in strides), f"{node.target} gives strides {real.stride()}, not {spec}"


def audited(gm, example_inputs):
    """A graph compiler: PyTorch runs the graph, and each value is compared with what was said of it."""
    return Audit(gm).run


WAYS = {
    "aot": lambda program: aot.function(program, audited),
    "decomposed": lambda program: aot.function(program, audited, partition_fn=aot.min_cut_partition, decompositions=core_decompositions()),
    "compile": lambda program: fs.compile(program, backend="aot_eager"),
}


def compiled(op, case, way):
    if name_of(op) in DATA_DEPENDENT:
        return fs.compile(case.program, backend="aot_eager_partitioned" if way == "decomposed" else "aot_eager")
    return WAYS[way](case.program)


LEFT_TO_EAGER = ("sparse_inputs", "untraceable_backwards", "untraceable_gradients", "reshaped_inputs", "requires_grad_changes", "unfollowed_aliases",
                 "leaves_made_inside", "inference_inside", "overlapping_writes", "strided_writes")


def left_to_eager():
    """How often eager ran a program that could not be compiled."""
    return sum(fs.counters["aot"][name] for name in LEFT_TO_EAGER)


def variant_of(op, inplace):
    """The function to check; the in-place variant writes a copy."""
    if not inplace:
        return op
    write = op.inplace_variant
    return None if write is None else lambda x, *args, **kwargs: write(x.clone(), *args, **kwargs)


@dataclass
class Outcome:
    """Of one operator and dtype: what differed first, or ""; how many of PARTS eager supports; how many of them agree."""
    text: str = ""
    supported: int = 0
    passed: int = 0


def check(op, dtype, *, samples=1, level=1, way="aot", inplace=False):
    """The Outcome; raises Refused where eager supports no sample."""
    call = variant_of(op, inplace)
    if call is None or dtype not in op.supported_dtypes("cpu"):
        raise Refused
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples_of(op, dtype, samples)):
            case = Sample(op, sample, call)
            try:
                supported, want = eager_result(case, highest_level(op, level))
            except Refused:
                continue
            outcome.supported = max(outcome.supported, len(want))
            text = check_sample(op, case, supported, want, way)
            if text:
                outcome.text, outcome.passed = f"sample {number}: {text}", agreeing_parts(op, case, supported - 1, way)
                return outcome
    if not outcome.supported:
        raise Refused
    outcome.passed = outcome.supported
    return outcome


def check_sample(op, case, level, want, way):
    """What differed first, or ''."""
    before = left_to_eager()
    try:
        text = difference(case.run(compiled(op, case, way), level), want)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:250]
    return text or ("run by eager" if left_to_eager() != before else "")


def agreeing_parts(op, case, level, way):
    """How many parts agree where no more than `level` are asked for."""
    for tried in range(level, -1, -1):
        if not check_sample(op, case, tried, case.run(case.program, tried), way):
            return tried + 1
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--way", default="aot", choices=list(WAYS))
    parser.add_argument("--inplace", action="store_true")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--dtype", default="float32,float64")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    supported, passed, start = collections.Counter(), collections.Counter(), time.time()
    for op, dtype in itertools.product(operators(), options.dtype.split(",")):
        name = name_of(op)
        if options.names and name not in options.names or not in_part(name, parts, part):
            continue
        fs.reset()
        with contextlib.suppress(Refused):
            outcome = check(op, getattr(torch, dtype), samples=options.samples, level=options.level, way=options.way, inplace=options.inplace)
            supported.update((dtype, p) for p in PARTS[:outcome.supported])
            passed.update((dtype, p) for p in PARTS[:outcome.passed])
            if outcome.text:
                print(f"{name} {dtype}: {outcome.text}", flush=True)
    for (dtype, name), count in supported.items():
        print(f"{dtype} {name}: {passed[dtype, name]} of {count} operators")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
