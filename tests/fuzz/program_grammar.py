"""The grammar of random programs: one row a kind of statement, with what it needs.

A row's text has slots.  `{y}` is the new variable.  `{a}`, `{b}`, `{e}` are variables for which the row's needs hold.  `{p}`, `{q}` are new inputs,
whose shape is a function of `a` (and `b`).  `{d}`, `{d2}` are two dimensions of `a`, `{k}` is True or False, `{c}` a number, `{i}` a small int.
A statement that eager cannot do with what was drawn is drawn again, so that a need only says what would be useless or is not defined:
order among ties, comparisons within rounding errors, writes to where elements overlap.

    row("softmax", "{y} = torch.softmax({a}, {d})", a=FLOAT)
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Need = Callable[[Any], bool]        # of a variable (program_writer.Variable)


@dataclass(frozen=True)
class Row:
    name: str
    text: str
    needs: dict[str, Need]
    inputs: dict[str, Callable[..., Any]] = field(default_factory=dict)     # slot -> shape (or shape, dtype) of the variables in `needs`
    when: Callable[[dict[str, Any]], bool] | None = None                    # of all that was drawn
    writes: tuple[str, ...] = ()                                            # slots that are written
    weight: int = 2


ROWS: list[Row] = []


def row(name: str, text: str, *, inputs: dict | None = None, when: Any = None, writes: str = "", weight: int = 2, **needs: Need) -> None:
    ROWS.append(Row(name, text, needs, inputs or {}, when, tuple(writes), weight))


# ---------------------------------------------------------------- needs

def FLOAT(v): return v.dtype.is_floating_point
def WIDE(v): return v.dtype in (torch.float32, torch.float64)
def REAL(v): return not v.dtype.is_complex and v.dtype is not torch.bool
def NUMBER(v): return v.dtype is not torch.bool
def INT(v): return v.dtype is torch.int64
def BOOL(v): return v.dtype is torch.bool
def COMPLEX(v): return v.dtype.is_complex
def ANY(v): return True


def dims(*counts: int, of: Need = FLOAT) -> Need:
    return lambda v: v.dim in counts and of(v)


def at_least(n: int, of: Need = FLOAT) -> Need:
    return lambda v: v.dim >= n and of(v)


def full(of: Need = FLOAT) -> Need:
    """No size is 0."""
    return lambda v: of(v) and all(t.numel() for t in v.tensors)


def APART(drawn): return drawn["a"].apart(drawn["c"])
def APART_B(drawn): return drawn["b"].apart(drawn["c"])
def NO_TIES(drawn): return drawn["a"].distinct(drawn["d"])


def ATTENDS(drawn):
    """As many values as keys (eager does not ask, and its backward then writes behind its buffers), and on 16 bytes, which eager's CUDA kernels take for granted."""
    pairs = zip(drawn["a"].tensors, drawn["b"].tensors)
    return all(a.shape[-2] == b.shape[-2] and not any(t.storage_offset() * t.itemsize % 16 for t in (a, b)) for a, b in pairs)


def FRESH(drawn):
    """The source of a write lies in another storage than its target."""
    return not drawn["a"].shares(drawn["b"])


def last(n: int = 1) -> Callable: return lambda a: a.shape[-n:]
def channels(a): return a.shape[1:2]


# ---------------------------------------------------------------- pointwise

UNARY = ["sin", "cos", "tanh", "sigmoid", "exp", "abs", "neg", "square", "relu", "erf", "atan", "expm1", "sgn", "reciprocal", "rsqrt", "sqrt", "log1p", "log", "asinh",
         "softplus", "silu", "gelu", "elu", "hardswish", "mish", "logsigmoid", "leaky_relu", "hardtanh", "relu6", "celu", "selu", "tanhshrink", "softsign"]
for _name in UNARY:
    row(_name, f"{{y}} = {'torch' if hasattr(torch, _name) else 'F'}.{_name}({{a}})", a=FLOAT, weight=1)
for _name, _text in {"add": "{a} + {b}", "sub": "{a} - {b}", "mul": "{a} * {b}", "div": "{a} / ({b}.abs() + 1.5)", "maximum": "torch.maximum({a}, {b})",
                     "atan2": "torch.atan2({a}, {b})", "hypot": "torch.hypot({a}, {b})", "lerp": "torch.lerp({a}, {b}, 0.25)", "pow": "({a}.abs() + 0.5) ** {b}",
                     "addcmul": "torch.addcmul({a}, {a}, {b}, value=0.5)", "fmin": "torch.fmin({a}, {b})", "xlogy": "torch.xlogy({a}, {b}.abs() + 1)"}.items():
    row(_name, f"{{y}} = {_text}", a=FLOAT, b=REAL)
row("sub of itself", "{y} = {a} - {a}", a=FLOAT, weight=1)
row("add number", "{y} = {a} + {c}", a=NUMBER)
row("scale", "{y} = {c} * {a}", a=NUMBER)
row("rsub int", "{y} = {i} - {a}", a=NUMBER, weight=1)
row("clamp", "{y} = {a}.clamp(-1.25, {c})", a=FLOAT)
row("whole add", "{y} = {a} + {b}", a=INT, b=INT)
row("whole mul", "{y} = ({a} * {b}) % 7", a=INT, b=INT)
row("floor div", "{y} = {a} // 3", a=INT, weight=1)
row("shift", "{y} = ({a} & 7) << {i}", a=INT, weight=1)
row("and", "{y} = {a} & ~{b}", a=BOOL, b=BOOL)
row("compare", "{y} = {a} > {c}", a=REAL, when=APART, weight=4)
row("compare with its largest", "{y} = torch.where({a} == {a}.amax({d}, keepdim=True), {a}, 0)", a=lambda v: FLOAT(v) and v.dim and v.depth < 2)
row("compare whole", "{y} = {a} <= {b}", a=INT, b=INT)
row("eq", "{y} = {a} == {b}", a=BOOL, b=BOOL, weight=1)
row("where", "{y} = torch.where({a}, {b}, {e})", a=BOOL, b=NUMBER, e=NUMBER, weight=4)
row("where number", "{y} = torch.where({a}, {b}, {c})", a=BOOL, b=FLOAT)
row("masked_fill", "{y} = {a}.masked_fill({b}, {c})", a=NUMBER, b=BOOL)
row("masked attention", "{y} = torch.softmax({a}.masked_fill({b} > {c}, -1e4), -1) + 2 * {b}", a=at_least(1), b=FLOAT, when=APART_B)
row("logical_not", "{y} = ~{a}", a=BOOL, weight=1)
row("round through", "{y} = {a} + ({a}.round() - {a}).detach()", a=FLOAT, when=lambda drawn: drawn["a"].apart_from_halves(), weight=1)

# ---------------------------------------------------------------- dtypes

for _name in ("f64", "f32", "bf16"):
    row(f"to {_name}", f"{{y}} = {{a}}.to({_name})", a=REAL)
row("bool to f32", "{y} = {a}.to(f32)", a=BOOL)
row("bool to i64", "{y} = {a}.to(i64)", a=BOOL)
row("to i64", "{y} = ({a} * 3).to(i64)", a=FLOAT, when=lambda drawn: drawn["a"].depth == 0, weight=1)
row("type_as", "{y} = {a}.type_as({b})", a=FLOAT, b=FLOAT)
row("float", "{y} = {a}.float()", a=REAL)
row("to bool", "{y} = {a}.bool()", a=INT, weight=1)

# ---------------------------------------------------------------- reductions

for _name in ("sum", "mean", "amax", "amin", "logsumexp"):
    row(_name, f"{{y}} = {{a}}.{_name}({{d}}, keepdim={{k}})", a=FLOAT)
    row(f"{_name} of two", f"{{y}} = {{a}}.{_name}(({{d}}, {{d2}}), keepdim={{k}})", a=at_least(2))
for _name in ("std", "var"):
    row(_name, f"{{y}} = {{a}}.{_name}({{d}}, keepdim={{k}}, correction={{k}} * 1)", a=FLOAT)
    row(f"{_name} of two", f"{{y}} = torch.{_name}({{a}}, ({{d}}, {{d2}}), unbiased=False)", a=at_least(2), weight=1)
row("sum of all", "{y} = {a}.sum()", a=NUMBER)
row("sum in f64", "{y} = {a}.sum({d}, dtype=f64)", a=REAL, weight=1)
row("mean of all", "{y} = {a}.mean()", a=full())
row("std of all", "{y} = {a}.std()", a=full(), weight=1)
row("norm", "{y} = torch.linalg.vector_norm({a}, 2, {d}, keepdim={k})", a=full(), weight=1)
row("prod", "{y} = {a}.prod({d})", a=FLOAT, weight=1)
row("count", "{y} = {a}.sum({d})", a=BOOL)
row("any", "{y} = {a}.any({d}, keepdim={k})", a=BOOL)
row("all", "{y} = {a}.all({d})", a=BOOL, weight=1)
row("max values", "{y} = {a}.max({d}).values", a=FLOAT, when=NO_TIES)
row("max indices", "{y} = {a}.max({d}, keepdim={k}).indices", a=REAL, when=NO_TIES)
row("argmax", "{y} = {a}.argmax({d}, keepdim={k})", a=REAL, when=NO_TIES)
row("argmin of all", "{y} = {a}.reshape(-1).argmin()", a=full(REAL), when=lambda drawn: drawn["a"].distinct(None), weight=1)
row("cumsum", "{y} = {a}.cumsum({d})", a=NUMBER)
row("cumprod", "{y} = torch.tanh({a}).cumprod({d})", a=FLOAT, weight=1)
row("cummax", "{y} = {a}.cummax({d}).values", a=FLOAT, when=NO_TIES, weight=1)
row("logcumsumexp", "{y} = {a}.logcumsumexp({d})", a=WIDE, weight=1)
row("diff", "{y} = {a}.diff(dim={d})", a=NUMBER, weight=1)

# ---------------------------------------------------------------- normalisation

for _name in ("softmax", "log_softmax"):
    row(_name, f"{{y}} = torch.{_name}({{a}}, {{d}})", a=FLOAT, weight=3)
row("softmax in f32", "{y} = torch.softmax({a}, {d}, dtype=f32)", a=FLOAT, weight=1)
row("rms_norm", "{y} = F.rms_norm({a}, {a}.shape[-1:])", a=at_least(1), weight=3)
row("rms_norm with weight", "{y} = F.rms_norm({a}, {a}.shape[-1:], {p}, 1e-5)", a=at_least(1), inputs={"p": last()})
row("layer_norm", "{y} = F.layer_norm({a}, {a}.shape[-1:], {p}, {q})", a=at_least(1), inputs={"p": last(), "q": last()})
row("layer_norm of two", "{y} = F.layer_norm({a}, {a}.shape[-2:])", a=at_least(2), weight=1)
row("group_norm", "{y} = F.group_norm({a}, 1)", a=at_least(2))
row("group_norm with weight", "{y} = F.group_norm({a}, {a}.shape[1], {p}, {q})", a=at_least(2), inputs={"p": channels, "q": channels}, weight=1)
# eager's gradient reads a batch_norm weight that is not contiguous in the wrong places
row("batch_norm", "{y} = F.batch_norm({a}, None, None, {p}.contiguous(), training=True)", a=at_least(2), inputs={"p": channels})
row("batch_norm with buffers", "{y} = F.batch_norm({a}, {p}, {q}, training=True, momentum=0.25)", a=at_least(2), weight=1,
    inputs={"p": lambda a: (a.shape[1:2], "buffer"), "q": lambda a: (a.shape[1:2], "buffer")})
row("instance_norm", "{y} = F.instance_norm({a})", a=at_least(3), weight=1)
row("normalize", "{y} = F.normalize({a}, dim={d})", a=full())
row("dropout", "{y} = F.dropout({a}, 0.25)", a=FLOAT, weight=1)

# ---------------------------------------------------------------- products

row("matmul", "{y} = {a} @ {b}", a=at_least(1), b=at_least(1), weight=4)
row("matmul of its transpose", "{y} = {a} @ {a}.mT", a=at_least(2))
row("bmm", "{y} = torch.bmm({a}, {b})", a=dims(3), b=dims(3))
row("linear", "{y} = F.linear({a}, {p})", a=at_least(1), inputs={"p": lambda a: (5, a.shape[-1])}, weight=3)
row("linear with bias", "{y} = F.linear({a}, {p}, {q})", a=at_least(1), inputs={"p": lambda a: (3, a.shape[-1]), "q": lambda a: (3,)})
row("addmm", "{y} = torch.addmm({a}, {a}, {p}, alpha=0.5)", a=dims(2), inputs={"p": lambda a: (a.shape[1], a.shape[1])})
row("einsum", "{y} = torch.einsum('ij,kj->ik', {a}, {p})", a=dims(2), inputs={"p": lambda a: (4, a.shape[1])})
row("outer", "{y} = torch.outer({a}, {b})", a=dims(1), b=dims(1), weight=1)
row("attention", "{y} = F.scaled_dot_product_attention({a}, {a}, {b}, is_causal={k})", a=full(dims(3, 4)), b=full(dims(3, 4)), when=ATTENDS)     # of no heads: torch 2.11 divides by 0
row("baddbmm", "{y} = torch.baddbmm({a}, {a}, {p}, beta=0.5)", a=dims(3), inputs={"p": lambda a: (a.shape[0], a.shape[2], a.shape[2])}, weight=1)

# ---------------------------------------------------------------- images

IMAGE = dims(4)
row("conv2d", "{y} = F.conv2d({a}, {p}, padding=1)", a=IMAGE, inputs={"p": lambda a: (3, a.shape[1], 3, 3)}, weight=6)
row("conv2d stride", "{y} = F.conv2d({a}, {p}, {q}, stride=2, padding=1)", a=IMAGE, inputs={"p": lambda a: (2, a.shape[1], 3, 3), "q": lambda a: (2,)}, weight=4)
row("conv2d depthwise", "{y} = F.conv2d({a}, {p}, groups={a}.shape[1])", a=IMAGE, inputs={"p": lambda a: (a.shape[1], 1, 1, 1)})
row("conv1d", "{y} = F.conv1d({a}, {p}, padding=1)", a=dims(3), inputs={"p": lambda a: (2, a.shape[1], 3)}, weight=3)
row("conv_transpose2d", "{y} = F.conv_transpose2d({a}, {p}, padding=1)", a=IMAGE, inputs={"p": lambda a: (a.shape[1], 2, 3, 3)}, weight=2)
row("max_pool2d", "{y} = F.max_pool2d({a}, 2)", a=IMAGE, weight=4)
row("max_pool2d overlapping", "{y} = F.max_pool2d({a}, 3, 1, 1)", a=IMAGE, weight=3)
row("avg_pool2d", "{y} = F.avg_pool2d({a}, 2, ceil_mode={k})", a=IMAGE, weight=3)
row("avg_pool1d", "{y} = F.avg_pool1d({a}, 2)", a=dims(3))
row("adaptive_avg_pool2d", "{y} = F.adaptive_avg_pool2d({a}, {i})", a=IMAGE)
row("adaptive_max_pool2d", "{y} = F.adaptive_max_pool2d({a}, 2)", a=IMAGE, weight=1)
row("interpolate nearest", "{y} = F.interpolate({a}, scale_factor=2)", a=dims(3, 4), weight=4)
row("interpolate bilinear", "{y} = F.interpolate({a}, size=(5, 7), mode='bilinear', align_corners={k})", a=IMAGE, weight=3)
row("interpolate to size", "{y} = F.interpolate({a}, size=({a}.shape[2] + 1, 3))", a=IMAGE)
row("pad", "{y} = F.pad({a}, (1, 2), value=0.5)", a=at_least(1))
row("pad reflect", "{y} = F.pad({a}, (1, 1), mode='reflect')", a=dims(2, 3))
row("pad circular", "{y} = F.pad({a}, (1, 0, 0, 1), mode='circular')", a=IMAGE, weight=1)
row("crop", "{y} = F.pad({a}, (-1, 1))", a=at_least(1), weight=1)
row("unfold", "{y} = F.unfold({a}, 2)", a=IMAGE)
row("pixel_shuffle", "{y} = F.pixel_unshuffle({a}, 2)", a=IMAGE, weight=1)

# ---------------------------------------------------------------- parts and wholes

row("cat", "{y} = torch.cat([{a}, {b}], {d})", a=at_least(1, NUMBER), b=NUMBER, weight=4)
row("cat of parts", "{y} = torch.cat([{a}[..., 1:], {a}[..., :1]], -1)", a=at_least(1, ANY))
row("stack", "{y} = torch.stack([{a}, {b}], {d})", a=ANY, b=ANY)
row("split", "{y} = {a}.split(2, {d})[-1]", a=at_least(1, ANY))
row("chunk", "{y} = {a}.chunk(2, {d})[0]", a=at_least(1, ANY))
row("unbind", "{y} = {a}.unbind({d})[-1]", a=at_least(1, ANY))
row("chunks swapped", "{y} = torch.cat({a}.chunk(3, {d})[::-1], {d})", a=at_least(1, NUMBER))
row("tensor_split", "{y} = sum(t.sum() for t in {a}.tensor_split(3, {d}))", a=at_least(1), weight=1)
row("repeat", "{y} = {a}.repeat(2, *[1] * ({a}.dim() - 1))", a=at_least(1, ANY))
row("repeat_interleave", "{y} = {a}.repeat_interleave(2, {d})", a=at_least(1, NUMBER), weight=1)
row("roll", "{y} = {a}.roll({i}, {d})", a=at_least(1, ANY))
row("flip", "{y} = {a}.flip({d})", a=at_least(1, ANY))
row("rot90", "{y} = torch.rot90({a}, 1, ({d}, {d2}))", a=at_least(2, ANY), weight=1)
row("triu", "{y} = {a}.triu({i} - 1)", a=at_least(2, NUMBER))
row("tril", "{y} = {a}.tril()", a=at_least(2, NUMBER))
row("diag_embed", "{y} = torch.diag_embed({a})", a=dims(1, 2), weight=1)

# ---------------------------------------------------------------- views

for _name, _text in {"transpose": "{a}.transpose({d}, {d2})", "t": "{a}.mT", "permute": "{a}.permute(*range({a}.dim())[::-1])", "unsqueeze": "{a}.unsqueeze({d})",
                     "flatten": "{a}.flatten()", "reshape": "{a}.reshape(-1)", "view": "{a}.view(-1)", "reshape of two": "{a}.reshape({a}.shape[0], -1)",
                     "slice": "{a}[1:]", "step": "{a}[..., ::2]", "select": "{a}.select({d}, -1)", "row": "{a}[0]", "narrow": "{a}.narrow({d}, 0, 1)", "diagonal": "{a}.diagonal(0, {d}, {d2})",
                     "expand": "{a}.expand(2, *{a}.shape)", "squeeze": "{a}.squeeze()", "unfolded": "{a}.unfold({d}, 2, 1)", "new axis": "{a}[:, None]",
                     "windows": "{a}.as_strided((2, 2), (1, 1))", "split apart": "{a}.unflatten({d}, (-1, 2))", "movedim": "{a}.movedim({d}, {d2})", "middle": "{a}[..., 1:-1]"}.items():
    row(_name, f"{{y}} = {_text}", a=at_least(1, ANY))
row("clone", "{y} = {a}.clone()", a=ANY)
row("contiguous", "{y} = {a}.contiguous()", a=ANY)
row("channels_last", "{y} = {a}.contiguous(memory_format=torch.channels_last)", a=IMAGE)
row("detach", "{y} = {a}.detach()", a=FLOAT, weight=1)
row("expand_as", "{y} = {a}.expand_as({b})", a=ANY, b=ANY, weight=1)

# ---------------------------------------------------------------- indices

row("index", "{y} = {a}[{b} % {a}.shape[0]]", a=at_least(1, ANY), b=INT, weight=4)
row("index of two", "{y} = {a}[{b} % {a}.shape[0], {b} % {a}.shape[1]]", a=at_least(2, ANY), b=INT)
row("index_select", "{y} = {a}.index_select({d}, {b}.reshape(-1) % {a}.shape[{d}])", a=at_least(1, ANY), b=INT)
row("index by list", "{y} = {a}[..., [0, -1, 0]]", a=at_least(1, ANY))
row("gather", "{y} = {a}.gather({d}, {b} % {a}.shape[{d}])", a=at_least(1, NUMBER), b=INT, weight=3)
row("gather by order", "{y} = {a}.gather({d}, {a}.argsort({d}))", a=at_least(1), when=NO_TIES)
row("index_add", "{y} = {a}.index_add({d}, {b}.reshape(-1) % {a}.shape[{d}], {a}.index_select({d}, {b}.reshape(-1) % {a}.shape[{d}]) * 0.5)", a=at_least(1), b=INT, weight=3)
row("index_add to zeros", "{y} = torch.zeros_like({e}).index_add(0, {b}[: {a}.shape[0]] % {e}.shape[0], {a})", a=at_least(1), b=dims(1, of=INT), e=FLOAT)
row("index_put", "{y} = {a}.index_put(({b} % {a}.shape[0],), torch.tensor({c}, dtype={a}.dtype, device={a}.device), accumulate=True)", a=at_least(1), b=INT, weight=3)
row("index_put of values", "{y} = {a}.index_put(({b}.reshape(-1) % {a}.shape[0],), {a}[{b}.reshape(-1) % {a}.shape[0]], accumulate=True)", a=at_least(1), b=INT)
row("scatter_add", "{y} = {a}.scatter_add({d}, {b} % {a}.shape[{d}], {e})", a=at_least(1), b=INT, e=FLOAT, weight=3)
row("scatter_add of itself", "{y} = torch.zeros_like({a}).scatter_add({d}, {b} % {a}.shape[{d}], {a})", a=at_least(1), b=INT, weight=2)
row("scatter", "{y} = {a}.scatter({d}, {a}.argsort({d}), {c})", a=at_least(1), when=NO_TIES)
row("scatter of values", "{y} = {a}.scatter({d}, {a}.argsort({d}), {b})", a=at_least(1), b=FLOAT, when=NO_TIES)
for _name in ("amax", "mean", "sum"):
    row(f"scatter_reduce {_name}", f"{{y}} = {{a}}.scatter_reduce({{d}}, {{b}} % {{a}}.shape[{{d}}], {{e}}, '{_name}', include_self={{k}})", a=at_least(1), b=INT, e=FLOAT)
row("sort", "{y} = {a}.sort({d}).values", a=at_least(1, REAL), when=lambda drawn: INT(drawn["a"]) or NO_TIES(drawn))
row("stable argsort", "{y} = {a}.argsort({d}, stable=True)", a=at_least(1, REAL), when=lambda drawn: drawn["a"].depth == 0)
row("topk", "{y} = {a}.topk(1 + {k}, {d}).values", a=at_least(1), when=NO_TIES)
row("topk indices", "{y} = {a}.topk(1, {d}).indices", a=at_least(1), when=NO_TIES)
row("embedding", "{y} = F.embedding({b} % 4, {p})", b=INT, inputs={"p": lambda b: (4, 3)}, weight=2)
row("take_along", "{y} = torch.take_along_dim({a}, {b} % {a}.shape[{d}], {d})", a=at_least(1), b=INT, weight=1)
row("one_hot", "{y} = F.one_hot({b} % 5, 5)", b=INT, weight=1)
row("cross_entropy", "{y} = F.cross_entropy({a}, {b} % {a}.shape[1])", a=dims(2), b=dims(1, of=INT))
row("nll", "{y} = F.nll_loss(torch.log_softmax({a}, 1), {b} % {a}.shape[1], reduction='none')", a=dims(2), b=dims(1, of=INT))
row("mse", "{y} = F.mse_loss({a}, {b})", a=full(), b=FLOAT, weight=1)
row("searchsorted", "{y} = torch.bucketize({a}, torch.tensor([-0.5, 0.25, 0.75], dtype={a}.dtype, device={a}.device))", a=FLOAT,
    when=lambda drawn: all(drawn["a"].apart(c) for c in (-0.5, 0.25, 0.75)), weight=1)

# ---------------------------------------------------------------- sizes that depend on data

row("masked part", "{y} = {a}[{a} > {c}]", a=REAL, when=APART, weight=1)
row("masked_select", "{y} = {a}.masked_select({b})", a=NUMBER, b=BOOL, weight=1)
row("sum of a masked part", "{y} = {a}[{a} > {c}].sum()", a=FLOAT, when=APART, weight=1)
row("nonzero", "{y} = {a}.nonzero()", a=BOOL, weight=1)

# ---------------------------------------------------------------- factories

for _name, _text in {"zeros": "torch.zeros({a}.shape[{d}])", "ones": "torch.ones({a}.shape[{d}], 3)", "arange": "torch.arange({a}.shape[{d}])", "linspace": "torch.linspace(-1, 1, {a}.shape[{d}])",
                     "full": "torch.full(({a}.shape[{d}],), {c})", "eye": "torch.eye({a}.shape[{d}])", "float arange": "torch.arange(0, {a}.shape[{d}], dtype=f32) * 0.1",
                     "size": "torch.tensor({a}.shape[{d}] / 4)"}.items():
    row(_name, f"{{y}} = {_text}", a=at_least(1, ANY))
row("zeros_like", "{y} = torch.zeros_like({a})", a=ANY, weight=1)
row("new_zeros", "{y} = {a}.new_zeros({a}.shape[{d}], 2)", a=at_least(1), weight=1)
row("scaled by size", "{y} = {a} * ({a}.shape[{d}] ** -0.5)", a=full(lambda v: FLOAT(v) and v.dim))
row("arange mask", "{y} = torch.arange({a}.shape[{d}], device={a}.device) < {i}", a=at_least(1, ANY))
row("noise", "{y} = {a} + 0.1 * torch.randn_like({a})", a=FLOAT, weight=1)

# ---------------------------------------------------------------- writes

for _name, _text in {"mul_": "{a}.mul_({c})", "sin_": "{a}.sin_()", "zero_": "{a}.zero_()", "clamp_": "{a}.clamp_(-1.5, 1.5)", "relu_": "{a}.relu_()", "neg_": "{a}.neg_()",
                     "set first": "{a}[0] = {c}", "set last": "{a}[..., -1] = {c}", "add to a part": "{a}[..., 1:].add_({c})", "scale steps": "{a}[::2] *= {c}",
                     "select write": "{a}.select({d}, 0).add_({c})", "diagonal write": "{a}.diagonal(0, {d}, {d2}).mul_({c})", "transpose write": "{a}.transpose({d}, {d2})[0].add_({c})",
                     "view write": "{a}.view(-1)[0] = {c}", "reshape write": "{a}.reshape(-1)[1:].add_({c})", "flat write": "{a}.flatten()[0] = {c}", "write of two views": "{a}.unsqueeze(0)[:, ::2].mul_({c})",
                     "triu_": "{a}.triu_()", "cumsum_": "{a}.cumsum_({d})", "exp_ of a part": "{a}[:1].tanh_()", "fill diagonal": "{a}.fill_diagonal_({c})"}.items():
    row(_name, _text, a=at_least(1), writes="a")
row("whole add_", "{a}.add_({i})", a=INT, writes="a")
row("bool set", "{a}[..., 0] = False", a=at_least(1, BOOL), writes="a", weight=1)
for _name, _text in {"add_": "{a}.add_({b})", "copy_": "{a}.copy_({b})", "sub_": "{a}.sub_({b}, alpha=0.5)", "addcmul_": "{a}.addcmul_({b}, {b}, value=0.5)", "set row": "{a}[0] = {b}",
                     "set middle": "{a}[..., 1:-1] = {b}", "add mean": "{a}[..., 1:].add_({b}.mean())", "set reshaped": "{a}.view(-1)[: {b}.numel()] = {b}.reshape(-1)", "mul_ of a part": "{a}[1:] *= {b}[1:]",
                     "set sum": "{a}[..., 0] = {b}.sum(-1)"}.items():
    row(_name, _text, a=at_least(1), b=FLOAT, writes="a", when=FRESH)
row("masked_fill_", "{a}.masked_fill_({b}, {c})", a=at_least(1), b=BOOL, writes="a")
row("masked write", "{a}[{b}] = {c}", a=at_least(1), b=BOOL, writes="a")
row("index_add_", "{a}.index_add_({d}, {b}.reshape(-1) % {a}.shape[{d}], {a}.detach().index_select({d}, {b}.reshape(-1) % {a}.shape[{d}]) * 0.5)", a=at_least(1), b=INT, writes="a")
row("index_put_", "{a}.index_put_(({b} % {a}.shape[0],), torch.tensor({c}, dtype={a}.dtype, device={a}.device), accumulate=True)", a=at_least(1), b=INT, writes="a")
row("index_fill_", "{a}.index_fill_({d}, {b}.reshape(-1) % {a}.shape[{d}], {c})", a=at_least(1), b=INT, writes="a", weight=1)
row("scatter_add_", "{a}.scatter_add_({d}, {b} % {a}.shape[{d}], {e})", a=at_least(1), b=INT, e=FLOAT, writes="a", when=lambda drawn: not drawn["a"].shares(drawn["e"]))
row("set by index", "{a}[{b} % {a}.shape[0]] = {c}", a=at_least(1), b=INT, writes="a")
row("quiet write", "with torch.no_grad():\n    {a}.mul_({c})", a=at_least(1), writes="a", weight=1)
row("quiet write of a part", "with torch.no_grad():\n    {a}[..., :1].add_({b}.mean())", a=at_least(1), b=full(), writes="a", when=FRESH, weight=1)
row("writes in a loop", "for i in range({a}.shape[0] % 4):\n    {a}[i] *= i - {c}", a=at_least(1), writes="a")

# ---------------------------------------------------------------- complex

for _name, _text in {"times": "{a} * (0.5 + 1j)", "conj": "{a}.conj()", "real": "{a}.real", "imag": "{a}.imag", "abs": "{a}.abs()", "as real": "torch.view_as_real({a})", "imag of conj": "{a}.conj().imag",
                     "complex product": "{a} * {a}.conj()", "complex sum": "{a}.sum({d})", "resolved": "{a}.conj().resolve_conj()", "complex mul": "{a}.mul({a})", "angle": "({a} + 9).angle()"}.items():
    row(f"{_name} (complex)", f"{{y}} = {_text}", a=COMPLEX, weight=4)
row("complex of two", "{y} = torch.complex({a}, {b})", a=WIDE, b=WIDE, weight=1)
row("complex write", "{a}.real.mul_({c})", a=COMPLEX, writes="a")
row("imag write", "{a}.conj().imag.add_({c})", a=COMPLEX, writes="a")

# ---------------------------------------------------------------- control flow

for _name, _text in {
    "if on a size": "if {a}.shape[{d}] > 4:\n    {y} = torch.sin({a})\nelse:\n    {y} = {a}.abs() + 1",
    "if on parity": "{y} = {a} * 2 if {a}.shape[{d}] % 2 else {a}.mean({d}, keepdim=True) + {a}",
    "if on numel": "{y} = {a}.sum() if {a}.numel() < 12 else {a}.reshape(-1)[:12].sum()",
    "if on contiguity": "{y} = {a}.view(-1) if {a}.is_contiguous() else {a}.reshape(-1) * 2",
    "loop of sums": "{y} = {a}\nfor i in range(min({a}.shape[{d}], 3)):\n    {y} = {y} * 0.5 + i",
    "loop over rows": "{y} = sum([r * 0.5 for r in {a}.unbind(0)], {a}.new_zeros(()))",
    "loop over sizes": "{y} = {a}\nfor n in {a}.shape:\n    {y} = {y} + 1 / (n + 1)",
    "while": "{y}, k = {a}, {a}.shape[{d}]\nwhile k > 1:\n    {y}, k = torch.tanh({y}), k // 2",
    "comprehension": "{y} = torch.stack([{a}.select({d}, i) for i in range(0, {a}.shape[{d}], 2)])",
    "closure": "shifted = lambda t, by={a}.shape[{d}]: t + by\n{y} = shifted({a} * 0.25)",
}.items():
    row(_name, _text, a=at_least(1))
row("if on data", "{y} = {a} + 1 if ({a}.sum() > {c}) else {a} * 2", a=full(), when=lambda drawn: drawn["a"].sum_apart(drawn["c"]), weight=1)
row("item", "{y} = {a} * {b}.sum().item()", a=FLOAT, b=INT, weight=1)

# ---------------------------------------------------------------- grad modes, casts and transforms around parts

for _name, _text in {
    "no_grad island": "with torch.no_grad():\n    {y} = torch.tanh({a}) * {c}",
    "enable_grad island": "with torch.no_grad():\n    with torch.enable_grad():\n        {y} = {a}.sin() + {a}",
    "no_grad and back": "with torch.no_grad():\n    w = {a}.softmax(-1)\n{y} = {a} * w",
    "view under no_grad": "with torch.no_grad():\n    w = {a}[..., :1]\n{y} = w.expand_as({a}) * {a}",
    "set_grad_enabled": "was = torch.is_grad_enabled()\ntorch.set_grad_enabled(False)\nw = {a}.cos()\ntorch.set_grad_enabled(was)\n{y} = {a} + w",
    "func.grad": "{y} = torch.func.grad(lambda t: (t.sin() * {c} + t * t).sum())({a})",
    "func.grad of two": "{y} = torch.func.grad(lambda t, u: (t * u).tanh().sum(), argnums=1)({a}, {a}.detach())",
    "func.jvp": "{y} = torch.func.jvp(lambda t: t.sin() * t, ({a},), (torch.ones_like({a}),))[1]",
    "func.vjp": "w, back = torch.func.vjp(lambda t: t.tanh() * {c}, {a})\n{y} = back(w)[0]",
    "vmap": "{y} = torch.vmap(lambda t: (t * {c}).tanh() + t.sum())({a})",
    "vmap with dims": "{y} = torch.vmap(lambda t: t.cumsum(0) * 0.5 if t.dim() else t * 2, in_dims={d}, out_dims={d})({a})",
    "vmap of grad": "{y} = torch.vmap(torch.func.grad(lambda t: t.pow(2).sum() * {c}))({a})",
    "grad inside": "w = {a}.detach().requires_grad_()\n{y} = torch.autograd.grad((w * w.sin()).sum(), w)[0] * {a}",
}.items():
    row(_name, _text, a=full(at_least(1)), weight=2)
row("vmap of two", "{y} = torch.vmap(lambda t, u: t * u.mean() + u, in_dims=(0, None))({a}, {b})", a=full(at_least(1)), b=full(), weight=1)
for _name, _text in {"matmul": "{a} @ {a}.mT", "linear": "F.linear({a}, {a}.reshape(-1, {a}.shape[-1])[:2])", "softmax": "torch.softmax({a} @ {a}.mT, -1)", "mixed": "({a} @ {a}.mT).float() + {a}.sum()"}.items():
    row(f"autocast {_name}", f"with torch.autocast({{a}}.device.type, dtype=bf16):\n    {{y}} = {_text}", a=full(lambda v: at_least(2)(v) and v.dtype is torch.float32), weight=2)
row("autocast off inside", "with torch.autocast({a}.device.type, dtype=bf16):\n    w = {a} @ {a}.mT\n    with torch.autocast({a}.device.type, enabled=False):\n        {y} = w.float() @ {a}",
    a=full(lambda v: at_least(2)(v) and v.dtype is torch.float32), weight=2)

# ---------------------------------------------------------------- writes to parts, and to views of views

for _name, _text in {
    "split write": "{a}.split(2, {d})[-1].mul_({c})",
    "chunk write": "w = {a}.chunk(2, {d})\nwith torch.no_grad():\n    w[0].add_({c})",
    "tensor_split write": "with torch.no_grad():\n    {a}.tensor_split(2, {d})[-1].mul_({c})",
    "unbind write": "with torch.no_grad():\n    {a}.unbind({d})[0].add_({c})",
    "narrow of transpose write": "{a}.mT.narrow(0, 0, 1).mul_({c})",
    "step of a slice write": "{a}[1:][..., ::2].add_({c})",
    "select of select write": "{a}.select({d}, 0).select(0, -1).fill_({c})",
    "flat part of a part": "{a}[:1].view(-1)[1:].mul_({c})",
    "diagonal of a part": "{a}[..., :2].diagonal(0, -2, -1).add_({c})",
    "unsqueezed and permuted": "{a}.unsqueeze(-1).movedim(-1, 0)[0][..., 0].mul_({c})",
    "write to a detached view": "{a}.detach()[..., 0].mul_({c})",
    "write through strides": "{a}.as_strided((1,), (1,), {a}.storage_offset()).add_({c})",
    "swap of parts": "w = {a}[..., 0].clone()\n{a}[..., 0] = {a}[..., -1]\n{a}[..., -1] = w",
    "write, read, write": "w = {a}[..., 0]\nw.mul_({c})\nu = {a}.sum(-1)\nw.add_(u.detach() * 0.1)",
}.items():
    row(_name, _text, a=at_least(1), writes="a", weight=1)

# ---------------------------------------------------------------- complex views

row("as complex", "{y} = torch.view_as_complex({a}[..., :2].contiguous())", a=lambda v: at_least(1, WIDE)(v) and all(t.shape[-1] > 1 for t in v.tensors), weight=2)
row("complex by strides", "{y} = torch.view_as_complex({a}[..., :2].contiguous()).as_strided((1,), (1,)) * 1j", a=full(lambda v: at_least(1, WIDE)(v) and all(t.shape[-1] > 1 for t in v.tensors)), weight=1)
row("bits of a float", "{y} = ({a}.contiguous().view(torch.int32) >> 8).to(i64) % 1000", a=lambda v: at_least(1)(v) and v.dtype is torch.float32 and v.depth == 0, weight=1)
for _name, _text in {"write to the real view": "torch.view_as_real({a})[..., 0].mul_({c})", "complex in place": "{a}.mul_(1j)", "write to a part of a conjugate": "{a}.conj()[..., :1].mul_({c})"}.items():
    row(_name, _text, a=at_least(1, COMPLEX), writes="a", weight=3)

# ---------------------------------------------------------------- dtype mixes, empty and aliased results

row("mixed sum", "{y} = {a} + {b} * 2 - ({a} > {c})", a=INT, b=FLOAT, when=APART, weight=2)
row("mixed cat", "{y} = torch.cat([{a}.reshape(-1), {b}.reshape(-1), {e}.reshape(-1)])", a=FLOAT, b=FLOAT, e=REAL, weight=2)
row("mixed in place", "{a}.add_({b}.sum())", a=at_least(1, lambda v: v.dtype is torch.bfloat16), b=full(REAL), writes="a", when=FRESH, weight=2)
row("bool times float", "{y} = {a} * {b}", a=BOOL, b=FLOAT, weight=2)
row("empty part", "{y} = {a}[..., :0].sum(-1) + {a}.sum(-1)", a=at_least(1), weight=1)
row("empty cat", "{y} = torch.cat([{a}[:0], {a} * 2], 0)", a=at_least(1), weight=1)
row("product with nothing", "{y} = {a}[..., :0] @ {a}[..., :0].mT + 1", a=at_least(2), weight=1)
row("itself", "{y} = {a}", a=ANY, weight=1)
row("all of itself", "{y} = {a}[:]", a=at_least(1, ANY), weight=1)
row("view_as", "{y} = {a}.view_as({a})", a=ANY, weight=1)
row("alias", "{y} = {a}.expand_as({a}).squeeze(0).unsqueeze(0)", a=at_least(1, ANY), weight=1)

# ---------------------------------------------------------------- cuts between what is saved and what is written

row("cut by a break", "fs.graph_break()\n{y} = {a}[..., :1]", a=at_least(1, ANY), weight=16)
row("cut by a print", "print(float({a}.detach().sum()), file=SINK)\n{y} = {b} * 2", a=REAL, b=FLOAT, weight=8)
row("cut by a number", "n = int({a}.sum())\n{y} = {b} + n % 3", a=INT, b=FLOAT, weight=8)
row("cut by a list", "n = len({a}.nonzero().tolist())\n{y} = {b} * (n % 3)", a=BOOL, b=FLOAT, weight=5)
for _name, _text in {"branch on data that writes": "if {b}.sum() > {c}:\n    {a}.mul_(0.5)\nelse:\n    {a}[0] = 1.5",
                     "branch on data that writes once": "if {b}.sum() > {c}:\n    {a}[..., 0] = {b}.detach().mean()",
                     "branch on data with a break": "if {b}.sum() > {c}:\n    {a}.add_(0.25)\n    fs.graph_break()\n    {a}.mul_(0.5)"}.items():
    row(_name, _text, a=at_least(1), b=full(), writes="a", when=lambda drawn: FRESH(drawn) and drawn["b"].sum_apart(drawn["c"]), weight=4)
row("write between two cuts", "fs.graph_break()\n{a}.mul_({c})\nfs.graph_break()", a=FLOAT, writes="a", weight=8)

# ---------------------------------------------------------------- pieces with a backward of their own

for _name, _text in {
    "function that saves": "{y} = Cubed.apply({a})",
    "function that saves its result": "{y} = Squashed.apply({a}, {c})",
    "function of two results": "w, {y} = Parts.apply({a}, {a} * 0.5)\n{y} = w * {y}",
    "function, break": "w = Cubed.apply({a})\nfs.graph_break()\n{y} = w + {a}",
    "checkpoint": "{y} = checkpoint(lambda t: torch.tanh(t) * t.sin(), {a}, use_reentrant=False)",
    "reentrant checkpoint": "{y} = checkpoint(lambda t: torch.tanh(t) * t.exp(), {a}, use_reentrant=True)",
    "checkpoint that draws": "{y} = checkpoint(lambda t: F.dropout(t.sin(), 0.25) * t, {a}, use_reentrant=False)",
    "checkpoint of a function": "{y} = checkpoint(lambda t: Cubed.apply(t.sin()) + t.mean(), {a}, use_reentrant=False)",
    "func.jacrev": "{y} = torch.func.jacrev(lambda t: (t * t).sin().sum())({a}) * {a}",
    "func.grad, then a write": "w = torch.func.grad(lambda t: (t * t).sin().sum())({a})\nw.mul_({c})\n{y} = w + {a}",
    "vmap that writes": "{y} = torch.vmap(lambda t: t.clone().mul_({c}).add_(t))({a})",
    "vmap, break": "w = torch.vmap(lambda t: t.softmax(-1) if t.dim() else t)({a})\nfs.graph_break()\n{y} = w * {a}",
    "inference island": "with torch.inference_mode():\n    w = torch.tanh({a}.detach()).sum()\n{y} = {a} * float(w > 0)",
    "inference result": "with torch.inference_mode():\n    w = torch.tanh({a}.detach())\n{y} = {a} * w.clone()",
    "step of gradient descent": "w = {a}.detach().clone().requires_grad_()\n(w.sin() * w).sum().backward()\nwith torch.no_grad():\n    w -= 0.1 * w.grad\n{y} = w.detach() + {a}",
    "step of an optimiser": "w = {a}.detach().clone().requires_grad_()\no = torch.optim.SGD([w], 0.1, momentum=0.5)\nfor _ in range(2):\n    o.zero_grad()\n"
                            "    (w.tanh() * w).sum().backward()\n    o.step()\n{y} = w.detach() * {a}",
}.items():
    row(_name, _text, a=full(at_least(1)), weight=5)
row("function that writes", "Doubled.apply({a})", a=FLOAT, writes="a", weight=8)
row("checkpoint of two", "{y} = checkpoint(lambda t, u: (t * u).softmax(-1), {a}, {b}, use_reentrant=False)", a=full(at_least(1)), b=full(), weight=2)
row("moving average", "with torch.no_grad():\n    {a}.mul_(0.9).add_({b}.detach(), alpha=0.1)", a=at_least(1), b=FLOAT, writes="a", when=FRESH, weight=2)
row("moving average by lerp_", "{a}.detach().lerp_({b}.detach(), 0.25)", a=at_least(1), b=FLOAT, writes="a", when=FRESH, weight=1)

# ---------------------------------------------------------------- more of complex numbers

for _name, _text in {"exp": "({a} * 0.5).exp()", "product of transposes": "{a}.unsqueeze(-1) @ {a}.unsqueeze(-1).mH", "vdot": "torch.vdot({a}.reshape(-1), {a}.reshape(-1) * 2)",
                     "dot": "torch.dot({a}.conj().reshape(-1), {a}.reshape(-1))", "where": "torch.where({a}.real > 9, {a}, {a}.conj())", "sum of conj": "{a}.conj().sum()",
                     "mean": "{a}.mean({d})", "prod": "{a}.prod({d})", "fft": "torch.fft.fft({a}).real", "squared": "{a}.square()", "polar": "torch.polar({a}.abs() + 0.5, {a}.real)",
                     "scaled by real": "{a} * {a}.imag", "row of conj": "{a}.conj()[0] * 2", "to pairs": "torch.view_as_real({a}.conj().resolve_conj()).sum(-1)"}.items():
    row(f"{_name} (complex)", f"{{y}} = {_text}", a=full(at_least(1, COMPLEX)), weight=5)
row("real to complex", "{y} = {a} + 1j * {b}", a=WIDE, b=WIDE, weight=1)
row("real fft", "{y} = torch.fft.rfft({a})", a=full(at_least(1, WIDE)), weight=1)
row("complex added in place", "{a}.add_({b})", a=at_least(1, COMPLEX), b=COMPLEX, writes="a", when=FRESH, weight=3)
