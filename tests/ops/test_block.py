"""What the blocks of `ops/` lack.  Every operator that is computed here has a rule, refusals or a reason, and samples; all its rows stand in one file."""
from collections import defaultdict

import pytest
import torch
from optable import DECOMPOSED, SAMPLES
from torch.utils import _pytree as pytree

from firesteel.graph.abstract import IN_STORAGE
from firesteel.graph.decomp import DECOMPOSITIONS, core_decompositions
from firesteel.graph.meta import SHAPES
from firesteel.graph.rules.base import PROBED, RULES
from firesteel.graph.rules.refusals import REFUSALS
from firesteel.loops.lower import LOWERINGS
from firesteel.operators import FACETS

COMPOSITE = "made of operators that have rows"
ITS_RULE = "its shape rule cannot be computed of wrong arguments, and refuses them"
ANYTHING = "takes any tensor"
SIZES = "its rule refuses negative sizes, the only wrong ones"
BROADCAST = "pointwise over what its rule broadcasts"
NO_REFUSAL = {
    COMPOSITE: """chunk contiguous fix flatten.using_ints isfinite mT narrow numpy_T real resolve_conj resolve_neg split.sizes tensor_split.sections
        true_divide.Tensor view_as""",
    ITS_RULE: """arange arange.start linspace mm bmm addmm tril triu cat embedding stack copy diag_embed diagonal diagonal_copy expand expand_copy permute
        permute_copy select.int select_copy.int slice.Tensor slice_copy.Tensor split.Tensor split_copy.Tensor unsafe_split.Tensor squeeze squeeze.dim
        squeeze.dims squeeze_copy squeeze_copy.dim squeeze_copy.dims t t_copy transpose.int transpose_copy.int unbind.int unbind_copy.int unsqueeze
        unsqueeze_copy view.dtype view_as_complex view_as_real""",
    ANYTHING: "alias alias_copy detach detach_copy lift_fresh _conj _neg_view empty_like ones_like zeros_like",
    SIZES: "empty.memory_format new_empty new_ones new_zeros ones zeros _efficientzerotensor",
    BROADCAST: "huber_loss_backward mse_loss_backward smooth_l1_loss_backward soft_margin_loss_backward",
    "called by torch's own code for the GPU, which has checked": """cudnn_batch_norm cudnn_batch_norm_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention""",
    "called by autograd, behind a forward that has checked": "convolution_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    "called by optimisers, which have made the lists": """_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr
        _fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr""",
}


# operators without samples in tests/optable.py
NO_SAMPLES = {
    "any values will do": "empty.memory_format empty_like empty_strided empty_permuted new_empty new_empty_strided",
    "a tensor without memory": "_efficientzerotensor",
    "complex numbers": "_conj view_as_real view_as_complex",
    "called by decompositions of other packages": "prims::iota",
    "the library computes it on this device": "scatter_add convolution convolution_backward",
    "takes places that its forward gives: tests/ops/test_pooling.py": "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    "loops only where nobody reads the places: tests/ops/test_pooling.py": "adaptive_max_pool2d adaptive_max_pool3d",
    "numbers are drawn": "bernoulli.p uniform normal_functional exponential geometric cauchy log_normal",
    "on a GPU only": """cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm_backward _scaled_dot_product_cudnn_attention
        _scaled_dot_product_efficient_attention""",
}
COMPUTED = [op for op in {**dict.fromkeys(LOWERINGS), **core_decompositions()} if op.namespace != "_c10d_functional"]     # tests/distributed has collectives


def named(op):
    space, _, name = op._schema.name.rpartition("::")
    return ("" if space == "aten" else f"{space}::") + name + (f".{op._overloadname}" if op._overloadname not in ("", "default") else "")


def listed(reasons):
    return {name for names in reasons.values() for name in names.split()}


def is_composite(op):
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def test_all_rows_of_an_operator_stand_in_one_file():
    """Its overloads too; beginnings of names are for operators that have no rows of their own.  Operators of ours are defined at their first use,
    with their rule."""
    homes = defaultdict(set)
    for facet in FACETS:
        for key, home in facet.homes.items():
            homes[key.partition(".")[0]].add(home)
    assert {name: files for name, files in homes.items() if len(files) > 1 and not name.startswith("firesteel::")} == {}


def test_what_is_computed_has_a_rule():
    """But for what torch makes of other operators before it gets here."""
    without = {named(op) for op in COMPUTED if op not in RULES and not is_composite(op)}
    assert without == {"_efficientzerotensor", "prims::iota"}


def test_refusals_and_shapes():
    assert not [op for op in REFUSALS if op not in RULES], "a refusal runs before a rule"
    assert not [op for op in SHAPES if op in RULES], "a rule tells the shape"


def test_an_operator_has_a_refusal_or_a_reason():
    """Operators that are not computed here are called, and refuse themselves."""
    ours = {op for op in COMPUTED if op.namespace == "aten"}
    bare = {named(op) for op in ours if op not in REFUSALS and op not in IN_STORAGE and op not in PROBED}
    reasons = listed(NO_REFUSAL)
    assert bare <= reasons, f"give these a row in ops/, or a reason here: {sorted(bare - reasons)}"
    assert reasons <= bare | {named(op) for op in RULES if op not in ours}, f"these have a row, or are gone: {sorted(reasons - bare)}"


def test_an_operator_has_samples_or_a_reason():
    bare = {named(op) for op in COMPUTED if op not in SAMPLES and op not in DECOMPOSED}
    assert bare == listed(NO_SAMPLES)


@pytest.mark.parametrize("op", [op for op in DECOMPOSITIONS if op in SAMPLES or op in DECOMPOSED], ids=str)
def test_a_decomposition_agrees_with_eager(op):
    for sample in (SAMPLES if op in SAMPLES else DECOMPOSED)[op]:
        (args, kwargs), (again, named) = sample.make(), sample.make()
        result = DECOMPOSITIONS[op](*args, **kwargs)
        if result is NotImplemented:
            assert op in LOWERINGS, "an operator of which only some calls are decomposed"
            continue
        for got, want in zip(pytree.tree_leaves(result), pytree.tree_leaves(op(*again, **named)), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
            assert want is None or want.numel() < 2 or got.stride() == want.stride()
