"""Programs on which compiled and eager once differed, reduced: the rows that test_found.py runs, with those of its own.

A row is the inputs and the program; an input is (shapes, dtype, layout, grad, part), and `tensor` (program_inputs.py) makes it.
"""
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

f64, f32, bf16, i64 = torch.float64, torch.float32, torch.bfloat16, torch.int64
FOUND = {}


def found(name, *inputs):
    """`inputs`: (shapes, dtype, layout, grad, part), or a function of the inputs before it that makes an argument."""
    def add(program):
        FOUND[name] = (inputs, program)
        return program
    return add


MATRIX = ((6, 7), (6, 9))


@found("write to a row of self-overlapping windows", (MATRIX, f64, "windows"), (MATRIX, f64))
def _windows(x, y):
    x[0] = y.std()
    return x * 1


@found("write to all of self-overlapping windows, with a gradient", (MATRIX, f64, "windows", "inner"))
def _all_windows(x):
    x.sin_()
    return torch.xlogy(x, x.abs() + 1)


@found("operator that takes an expanded target", (MATRIX, f32, "repeated"))
def _expanded(x):
    x.triu_()
    return x + 1


@found("saved copy of a written input with holes", (MATRIX, f64, "contiguous", "inner", "real"))
def _saved_with_holes(x):
    y = torch.atan2(x * 2, x * 2)
    x.sin_()
    return y * x


@found("saved copy of a written input that another is a part of", (((9, 6, 4, 4), (3, 5, 5, 5)), f32, "reversed", "inner"), lambda x: x.arg[1:])
def _saved_part(x, part):
    part.sin_()
    return x * 2


@found("reshape inside of a decomposition, written", (((4, 6, 3), (5, 6, 3)), f32))
def _reshaped(x):
    b = F.group_norm(x.cumsum(0), 1)
    b.view(-1)[0] = 1.5
    return b


@found("index that is one place for all points", (MATRIX, f32), (((3, 7), (3, 9)), f32))
def _one_place(x, v):
    y, z, w = x.clone(), x.clone(), x.clone()
    y[torch.arange(x.shape[0])[:, None].expand(x.shape[0], 3), 1] = 7.0
    z[torch.zeros(3, dtype=i64)] = v[0]
    w.index_fill_(1, torch.full((5,), 1), 4.0)
    return y, z, w, x.scatter(1, torch.full((x.shape[0], 3), 2), 0.5)


@found("results made before an input gets a history", (MATRIX, bf16, "stepped"), (((3,), (4,)), bf16, "contiguous", "inner"))
def _before_the_write(x, m):
    t, u = x.cumsum(1), x.sin()
    x[..., 1:].add_(m.mean())
    y = torch.tanh(x)
    return t, u, y - y


@found("size of a later stretch that an earlier one found to be another's half", (((6, 17, 8, 8), (7, 6, 5, 5)), bf16), (((5, 4), (5, 2)), bf16, "contiguous", "inner"))
def _half_of_another(x, w):
    t = F.linear(F.max_pool2d(x, 2), w)
    return t, F.normalize(w, dim=0), F.max_pool2d(t, 2)


@found("angle of complex numbers, permuted", (((5, 4, 7), (8, 6, 17)), torch.complex64, "reversed"))
def _angle(z):
    return (z + 9).angle()


@found("negated input read by a later stretch", (MATRIX, f32, "contiguous", "leaf", "negated"))
def _negated_later(x):
    t = F.elu(x)
    return x.reshape(-1) * 2, t, t.std()


@found("input written by a later stretch", (MATRIX, f64, "contiguous", "inner"))
def _written_by_a_later_stretch(x):
    t = torch.softmax(x, -1)
    x.sin_()
    return t, t.sum(-1)


@found("row of an overlapping view, written", (((8, 2), (7, 2)), f32))
def _overlapping_row(x):
    t = x.as_strided((2, 2), (1, 1))
    t[0].add_(-0.5)
    return t


@found("scatter of nothing", (((0, 17), (0, 5)), f32), (((0,), (0,)), f32))
def _scatter_of_nothing(x, y):
    return x.scatter(0, x.argsort(0), y)


@found("logsigmoid of a transposed operand", (MATRIX, f32, "reversed", "leaf"))
def _logsigmoid(x):
    return F.logsigmoid(x)


@found("equal results have memories of their own", (((6, 3, 5, 5), (6, 3, 4, 4)), f32, "channels_last"))
def _equal_results(x):
    y = x * 2
    z = torch.zeros_like(y)
    z.movedim(0, 0).view(-1)[: y.numel()] = y.reshape(-1)
    return x.flatten(), x.reshape(-1), y, z, F.scaled_dot_product_attention(y, y, y), F.scaled_dot_product_attention(y, y, y)


@found("part that was just written, and what was written", (MATRIX, f32))
def _just_written(x):
    y = torch.where(x > 0, x, 0)[0]
    z = torch.zeros_like(y).movedim(0, 0)
    z.view(-1)[: y.numel()] = y.reshape(-1)
    return z, y


@found("result written behind a size that depends on data", (MATRIX, f32, "contiguous", "leaf"))
def _written_later(x):
    b = F.rms_norm(x, x.shape[-1:]).to(bf16) + 3
    r = torch.relu(b)
    s = x[x > 0].sum()
    b.add_(-0.02)
    return r, s, b


@found("local variable written two breaks later", (MATRIX, f32, "contiguous", "leaf"), (MATRIX, f32))
def _written_two_breaks_later(x, m):
    b, t = x * 2, m.exp()
    print(end="")
    r, u = torch.sigmoid(b + 1), x * (t + 1)
    print(end="")
    b.add_(1)
    t.zero_()
    return r, u, b


@found("store of no points along an axis of stride 0", (((5, 8), (4, 2)), f32))
def _no_points(x):
    t = (x + 1)[..., 1:-1]
    return torch.log_softmax(t, -2), t.is_contiguous()


@found("bitwise operators of an index", (((17, 6), (5, 6)), i64), (((4, 3), (4, 3)), f32), (((3,), (3,)), f32))
def _bitwise_index(x, table, weight):
    t = F.embedding(((x & 7) << 2) % 4, table)
    return F.rms_norm(t, t.shape[-1:], weight, 1e-5), table[((x | 4) & 6 & 3) % 4], table[~x % 4]


@found("negative bit in a later stretch", (MATRIX, f32, "contiguous", "leaf", "negated"), (MATRIX, f64, "contiguous", "inner", "negated"))
def _bit_in_a_later_stretch(x, z):
    t, part = x * 2, z[..., 1:]
    u, v = x / (x.abs() + t.exp()), torch.lerp(part, part * part, 0.25)
    return t, u, x.to(bf16), part, v.var()


@found("conjugate bit in a later stretch", (MATRIX, torch.complex64, "transposed", "inner", "conj"))
def _conjugate_in_a_later_stretch(z):
    t = z.abs()
    return t, z.t(), z.t() * (t.t() + 1), z * t


@found("input with the negative bit first seen under no_grad", (MATRIX, f32, "contiguous", "leaf", "negated"), (MATRIX, bf16))
def _bit_under_no_grad(x, y):
    with torch.no_grad():
        x[..., :1].add_(y.mean())
    return torch.sin(x) * 2, y.tanh()


@found("parts of a conjugate", (MATRIX, torch.complex64, "contiguous", "", "conj"))
def _parts_of_a_conjugate(z):
    z.imag[0].mul_(3)
    return z.real, z.imag, z.is_conj(), z.imag.is_neg(), z.conj().is_conj(), (z + 1).is_conj()


@found("resolved bits are copies", (MATRIX, torch.complex64, "stepped"), (MATRIX, f32, "contiguous", "", "negated"))
def _resolved(z, x):
    return z.conj().resolve_conj(), z.resolve_conj(), x.resolve_neg(), (x * 1).resolve_neg().add_(1), torch.resolve_conj(z.conj()), torch.imag(z.conj()), torch.is_conj(z.conj())


@found("nothing, with the negative bit", (((0, 2), (0, 2)), f32, "transposed", "", "negated"))
def _nothing_negated(x):
    return F.rms_norm(x, x.shape[-1:]).sum(), x * x.exp()


@found("returned item of a tuple that the backward reads", (MATRIX, f64), (((3, 7), (3, 9)), f64, "rows", "leaf"))
def _returned_item(x, w):
    t = (x * 0.5 + 1).topk(2, 0).values
    return F.silu(F.linear(t, w)), t


@found("reshaped part of a complex matrix in a product", (((5, 4), (5, 0)), torch.complex128), (((4, 10), (0, 10)), f64))
def _reshaped_part(z, w):
    part = torch.cat(z.chunk(3, -2)[::-1], -2).real
    return part.t().reshape(-1, 10) @ w.t(), torch.einsum("ij,kj->ik", part, w.t())


@found("nearest of a permuted image is row-major", (((8, 7, 4, 4), (2, 3, 5, 5)), f64, "reversed"), (((8, 7, 4), (2, 3, 5)), f64, "reversed"))
def _nearest(x, y):
    image, wave = F.interpolate(x, size=(x.shape[2] + 1, 3)), F.interpolate(y, size=7)
    return image.view(-1) if image.is_contiguous() else image, wave


@found("loss of each pixel with a permuted target", (((2, 4, 3, 3), (2, 5, 4, 4)), f32), lambda x: (x.arg[:, 0] > 0).long().permute(2, 1, 0).contiguous().permute(2, 1, 0))
def _pixels(x, target):
    return F.nll_loss(x, target, reduction="none")


@found("norm whose order is a size", (((3, 4), (5, 4)), f32, "contiguous", "leaf"))
def _norm_order(x):
    return torch.linalg.vector_norm(x, x.shape[0]), x.norm(x.shape[0], 0)


@found("statistics of rows that begin between aligned addresses", (((7, 3), (2, 3)), f32, "windows", "inner"), (((2,), (2,)), f32, "window", "leaf"),
       (((5, 16, 6, 6), (5, 2, 6, 6)), f64, "window", "inner"))
def _unaligned(x, w, y):
    t = F.layer_norm(x.unfold(-1, 2, 1), (2,), w)
    return t.amin(-1), t, F.layer_norm(y, y.shape[-2:]), torch.softmax(y, 0)


@found("mask over an expanded matrix", (((4, 4), (6, 6)), bf16, "expanded"), (((4, 5, 4, 4), (3, 5, 6, 6)), bf16))
def _masked_expanded(a, m):
    return torch.softmax(a.masked_fill(m > 0.8, -1e4), -1) + 2 * m


@found("resampled, normalised and added to behind an offset", (((4, 5, 4, 4), (3, 5, 6, 6)), f32, "offset", "inner"), (((3, 5, 4, 4), (3, 5, 6, 6)), f32))
def _behind_an_offset(x, v):
    t = F.interpolate(x, scale_factor=2)
    return F.rms_norm(t, t.shape[-1:]), x.index_add(0, torch.tensor([0, 1, 0], device=x.device), v), x.std(1)


@found("resolved bits are copies", (((4, 7, 3), (1, 3, 5)), torch.complex128, "stepped"), (((2, 6, 4, 4), (2, 3, 5, 5)), torch.complex64, "channels_last", "leaf"))
def _resolved(x, y):
    parts = x.conj().imag.resolve_neg(), torch.resolve_conj(y.conj()), torch.imag(x.conj()).is_neg(), torch.is_conj(x.conj()), torch.is_neg(x.imag)
    return x.conj().resolve_conj(), x.mT.conj().resolve_conj(), y.mT.conj().resolve_conj(), x.resolve_conj(), y.conj().resolve_conj(), *parts, x.resolve_conj() is x


@found("stacked channels-last images", (((1, 16, 4, 4), (1, 16, 8, 8)), bf16, "channels_last"), (((3, 2, 4, 4), (3, 2, 5, 5)), f32, "channels_last", "leaf"))
def _stacked(x, y):
    return [torch.stack([t, t], d) for t in (x, y) for d in range(5)]


@found("a convolution of no channels has no channels", (((3, 4, 4, 4), (3, 0, 6, 6)), bf16, "expanded", "inner"), (((3, 4, 3, 3), (3, 0, 3, 3)), bf16, "contiguous", "inner"))
def _no_channels(x, w):
    return F.conv2d(x, w, padding=1).float(), F.adaptive_avg_pool2d(x, 2)


@found("draws in the layout of a transposed, negated input", (((6, 17), (16, 17)), f32, "expanded", "", "negated"))
def _negated_layout(x):
    return x.mT.clone(), torch.native_dropout(x.mT, 0.25, True)[0], torch.rand_like(x.mT)


@found("drawn in place with the layout of the input", (((5, 4), (7, 9)), f32, "stepped"), (((5, 4), (7, 9)), f32, "transposed"))
def _drawn_in_place(x, y):
    x.normal_()
    y.triu_()
    y.normal_()
    return x * 1, torch.rand_like(y), y.triu_().uniform_()


@found("product with an overwritten input of size 1", (((1, 1), (17, 1)), f64, "diagonal"), (((1,), (17,)), i64), (((4, 1), (4, 1)), f64))
def _overwritten_factor(x, i, y):
    x.triu_()
    product = torch.einsum("ij,kj->ik", x, y)
    return F.cross_entropy(product, i % product.shape[1])


@found("a quotient overwritten through its view", (((3, 4), (4, 4)), f32, "contiguous", "leaf"))
def _quotient(x):
    mean = (x - 0.75).mean(-2, keepdim=True)
    t = mean / (x.abs() + 1.5)
    t.flatten()[0] = 0.25
    return t, mean


@found("overwritten value of a branch without a gradient", (((17, 5), (3, 3)), f64, "contiguous", "leaf"))
def _dead_branch(x):
    t = x - x
    moved = torch.cat([t[..., 1:], t[..., :1]], -1)
    soft = torch.softmax(t.masked_fill(x > -0.02, -1e4), -1) + 2 * x
    x[x > 1.5].sum()
    soft.cumprod(0)
    with torch.no_grad():
        t.mul_(2)
    return moved


@found("a saved value that a later stretch overwrites through a view", (((3, 4), (4, 4)), f64, "contiguous", "leaf"))
def _overwritten_view(x):
    t = x * 2
    t.view(-1)[: x.numel()] = x.reshape(-1)
    shrunk = F.tanhshrink(t)
    norm = F.rms_norm(x, x.shape[-1:])
    t.select(-1, 0).add_(-0.75)
    return shrunk, norm.sort(-1).values, norm


PAIRS = (((6, 2), (9, 2)), f32, "contiguous", "inner")
PLAIN_MATRIX = (((6, 2), (9, 2)), f32, "contiguous", "")


@found("strides over a complex view", PAIRS)
def _strides_over_a_complex_view(x):
    z = torch.view_as_complex(x * 2)
    return z.as_strided((2,), (2,), 1) * 1j, torch.view_as_complex(x).conj().as_strided((3,), (1,), 2)


@found("write by strides to a complex view", PAIRS)
def _write_by_strides_to_a_complex_view(x):
    y = x * 1
    torch.view_as_complex(y).as_strided((2,), (2,), 1).mul_(2j)
    return y


@found("strides over a view of another dtype", PLAIN_MATRIX)
def _strides_over_a_view_of_another_dtype(x):
    return (x.view(torch.int32).as_strided((2,), (3,), 1) + 1, x.view(torch.int16).as_strided((3,), (3,), 1) + 1, x.view(torch.int64).as_strided((2, 2), (1, 2), 1) + 1)


@found("write by strides to a view of another dtype", PLAIN_MATRIX)
def _write_by_strides_to_a_view_of_another_dtype(x):
    x.view(torch.int32).as_strided((2,), (2,), 1).fill_(5)
    x.view(torch.int16).as_strided((2,), (3,), 7).fill_(6)
    x.view(torch.int64).as_strided((2,), (1,), 4).fill_(7)
    return x * 1


@found("gradient behind a view that has no history any more", (((7, 9), (7, 2)), f32, "contiguous", "leaf"), (((7, 9), (7, 2)), f32, "contiguous", ""))
def _gradient_behind_a_stale_view(x, y):
    with torch.no_grad():
        x.unbind(0)[0].add_(2)
    w = y.detach().requires_grad_()
    return torch.autograd.grad((w * w.sin()).sum(), w)[0] * y


@found("what a gradient inside of the forward computes too, computed again without one", (((9, 7), (3, 7)), f32, "contiguous", "inner"))
def _gradient_inside_then_equal(x):
    w = x.detach().requires_grad_()
    inside = torch.autograd.grad((w * w.sin()).sum(), w)[0] * x
    with torch.no_grad():
        equal = x.cos()
    return inside, x + equal


@found("no results of an empty list of views", (((2, 17, 4, 4), (17, 0, 5, 5)), bf16, "contiguous", ""))
def _no_views(x):
    flat = x.sum(3).flatten()
    return sum([row * 0.5 for row in flat.unbind(0)], flat.new_zeros(())), flat


@found("view of an input that a later stretch gives a history", (((5, 16), (5, 16)), f32, "contiguous", ""), (((5, 16), (5, 16)), f64, "contiguous", "inner"))
def _view_that_gets_a_history(x, y):
    t = y * 2
    turned = x.transpose(1, 1)
    turned[..., 1:].add_(t.mean())
    with torch.no_grad():
        t[..., :1].add_(turned.mean())
    return turned / t, turned, t


@found("value without a history that the next stretch reads, then writes with one", (((4, 2), (4, 2)), f32, "contiguous", "leaf"), PLAIN_MATRIX)
def _history_that_comes_later(x, y):
    plain = y[:4] + 1
    cut = x * 2
    cut[0].add_(1)
    early = plain * 2
    plain.add_(x)
    return early, cut, plain


@found("the same through a view", (((4, 2), (4, 2)), f32, "contiguous", "leaf"), PLAIN_MATRIX)
def _history_that_comes_later_through_a_view(x, y):
    plain = y[:4] + 1
    part = plain[1:]
    cut = x * 2
    cut[0].add_(1)
    early = plain * 2
    part.add_(x[1:])
    cut[1].mul_(3)
    return early, cut, plain * 3, part


@found("absolute values of complex numbers of a stride that no element depends on", (((1, 16), (1, 5)), f32, "expanded", "inner"))
def _absolute_values_of_one(x):
    size = torch.view_as_complex(x[..., :2].contiguous()).abs()
    size.cumsum_(0)
    return size.to(bf16), size


@found("mean of no rows, added to them", (((4, 9, 4, 4), (0, 9, 6, 6)), bf16, "reversed", "inner"))
def _mean_of_no_rows(x):
    return x.mean(-4, keepdim=True) + x


@found("an overwritten operand of a value that is written behind a cut and not returned", (((5, 4, 4), (4, 6, 6)), bf16, "window", "inner"),
       lambda x: x.arg[1:], (((4,), (3,)), torch.bool))
def _unreturned_behind_a_cut(x, part, mask):
    dead = F.logsigmoid(part)
    part[..., :2].diagonal(0, -2, -1).add_(-0.02)
    places = mask.nonzero()
    dead[..., 0] = part.sum(-1)
    alive = part * 0.25
    dead[::2] *= 1.5
    return places, alive, x


@found("product of complex views of symbolic sizes", (((4, 1, 5), (8, 1, 5)), torch.complex128, "channels_last"))
def _complex_product(z):
    return z.unsqueeze(-1) @ z.unsqueeze(-1).mH, z.mT.reshape(-1) * 2


@found("result of a checkpoint, overwritten", (((3, 3), (3, 8)), f32, "contiguous", "leaf"))
def _overwritten_checkpoint(x):
    y = torch.utils.checkpoint.checkpoint(lambda t: (t * 2).softmax(-1), x, use_reentrant=False)
    y.mul_(2)
    return y.sin()


@found("out= of another shape", (MATRIX, f32), (((1,), (2,)), f32), (((0,), (3,)), f32))
def _resized_out(x, out, empty):
    made = torch.empty(0)
    return torch.add(x, 1, out=out), torch.cat([x, x], out=empty), torch.mul(x, 2, out=made), out.sum()


@found("sizes of an input changed in place", (((2, 6), (2, 9)), f32))
def _resized(x):
    made = torch.resize_as_(x.clone(), x[0])
    return x.resize_(x.shape[1], 2) * 2, made


@found("out= a view of another shape", (((2, 6), (2, 9)), f32), (((2, 6), (2, 9)), f32))
def _resized_view(x, y):
    return torch.add(y, 1, out=x[0]), x


@found("truth over no dimensions", (MATRIX, f32), (MATRIX, torch.bool))
def _no_dimensions(x, mask):
    return torch.all(x > 0, dim=()), torch.any(mask.t(), dim=(), keepdim=True), torch.any(x, (0, 1))


@found("one element copied to a place", (((5,), (7,)), f32, "contiguous", "inner"), (((), ()), f32, "contiguous", "inner"))
def _copied_element(x, y):
    return x.index_copy(0, torch.tensor([1], device=x.device), y) * 2


@found("overlap-add of a complex window", (((10, 10), (10, 12)), torch.complex64), (((8,), (8,)), torch.complex64))
def _complex_window(z, window):
    return torch.istft(z, 10, window=window + 2, win_length=8, return_complex=True)


@found("truncated quotient of bf16", (((40, 41), (17, 30)), bf16))
def _truncated(x):
    return torch.div(x * 64, x.flip(0) + 0.125, rounding_mode="trunc"), torch.div(x * 64, 3, rounding_mode="trunc")


@found("written input that only a dead value's gradient reads itself", (((4, 2), (17, 7)), f64, "rows", "inner"))
def _read_for_a_dead_value(x):
    alive = x.contiguous().sin()
    dead = (x * x).cos() * x
    places = (x.detach() > 0).nonzero()
    x.mul_(0.5 + dead.detach().mean())
    return alive, places


@found("input with a bit, read behind a cut within no_grad", (MATRIX, f64, "contiguous", "leaf"), (MATRIX, torch.complex128, "contiguous", "leaf", "conj"))
def _bit_behind_a_cut(x, z):
    with torch.no_grad():
        alike = torch.equal(x, x * 1)
        y = x * 2
    return z.expand(2, *z.shape), y.exp() * x, alike


@found("inputs with a bit that only the ways of a branch on data look at", (((4,), (6,)), f64), (((4,), (6,)), f64, "contiguous", "inner", "negated"),
       (((4,), (6,)), torch.complex128, "contiguous", "inner", "conj"))
def _bits_in_arms(x, y, z):
    if x.sum() > 0.5:
        y.mul_(0.5)
    else:
        z.mul_(0.5)
    return y.unfold(-1, 2, 1), z * 2


@found("input with a bit that only the rounds of a loop on data look at", (((4,), (6,)), f64), (((4,), (6,)), f64, "contiguous", "", "negated"))
def _bit_in_rounds(x, y):
    while x.sum() < 20:
        y.mul_(0.5)
        x = x + y.abs() + 1
    return x, y * 2


@found("view taken without gradients that the ways of a branch on data write", (((4,), (6,)), f64, "contiguous", "inner"))
def _untracked_view_in_arms(x):
    with torch.no_grad():
        part = x[..., :1]
        if x.sum() > 0.5:
            part.mul_(0.5)
        else:
            part[0] = 1.5
    return x * 2


@found("places of a mask that is known while capturing", (((9,), (7,)), f64, "contiguous", "inner"))
def _known_places(x):
    places = (torch.arange(x.shape[0], device=x.device) < 3).nonzero()
    pairs = (torch.arange(4, device=x.device).view(2, 2) > 2).nonzero()
    return torch.zeros_like(places), places, pairs, x[places.view(-1)]


@found("written input that dead results were computed from", (MATRIX, f64, "contiguous", "inner"))
def _computed_for_dead_results(x):
    results = [x.scatter(0, x.argsort(0), x), x.exp() * 2, x.sort(0).values]
    for dead in results:
        dead.zero_()
    alive = [dead.tanh() for dead in results]
    moved = x + int((x.detach() > 0).sum()) % 3
    with torch.no_grad():
        x.add_(1)
    return *alive, moved


@found("backward inside that shares a graph with results", (MATRIX, f64, "contiguous", "leaf"), (((), ()), f64, "contiguous", "leaf"))
def _backward_beside_results(x, y):
    if y.sum() > 9:
        x = x * 2
    z = torch.tanh(x)
    w = x.detach().clone().requires_grad_()
    (w.sin() * w).sum().backward()
    return z * z, w.grad


@found("view of an input with a bit and holes, written with a gradient", (((5, 4, 6), (3, 7, 2)), f64, "stepped", "", "negated"),
       (((5, 4, 6), (3, 7, 2)), torch.complex128, "stepped", "", "conj"))
def _views_with_a_bit(x, z):
    return x.transpose(0, 1), x[1], x[:, 1:3], z[1], z.transpose(0, 1), x.abs()


@found("operands of several dtypes, one of them repeated", (((5, 7), (8, 4)), f32, "repeated"), (((5, 5, 7), (8, 8, 4)), f32, "transposed"))
def _joined_dtypes(x, y):
    wide = y.to(f64)
    return torch.addcmul(x, x, wide, value=0.5), torch.addcdiv(x, x, wide + 9), torch.clamp(x, wide, wide + 1)


@found("memory of symbolic sizes that nothing fills", (((5, 6, 7), (8, 3, 4)), f32, "contiguous", "leaf"))
def _unfilled(x):
    return torch.empty_strided(x.shape, x.transpose(0, 2).stride()).fill_(2) * x, x.transpose(0, 2).new_empty(x.shape).zero_() + x


@found("written result of a checkpoint beside a backward inside", (((4, 3), (2, 5)), f32, "contiguous", "inner"))
def _written_behind_a_checkpoint(x):
    y = torch.utils.checkpoint.checkpoint(lambda t: (t * 2).softmax(-1), x, use_reentrant=False)
    w = x.detach().clone().requires_grad_()
    (w.sin() * w).sum().backward()
    z = torch.reciprocal(y)
    y[1:].add_(1.5)
    return w.grad + x, z


@found("layout of a conjugate's part with a dimension of one", (((4, 1, 8, 8), (3, 1, 6, 6)), torch.complex64, "channels_last", "leaf"))
def _conjugate_with_one(x):
    return x.conj()[0] * 2, x.conj()[0].clone(), x.conj()[0].resolve_conj(), x.conj_physical()
