"""Programs on which compiled and eager once differed, reduced: for both sets of sizes, static and dynamic, forward and backward.

A row is the inputs and the program; `tensor` makes an input of a layout (program_inputs.py), `check_functions` compares all that a caller sees.
"""
import pytest
import torch
import torch.nn.functional as F
from program_check import check_functions
from program_inputs import Made, tensor

import firesteel as fs

f64, f32, bf16, i64 = torch.float64, torch.float32, torch.bfloat16, torch.int64
FOUND = {}


def found(name, *inputs):
    """`inputs`: (shapes, dtype, layout, grad, part), or a function of the inputs before it that makes an argument."""
    def add(program):
        FOUND[name] = (inputs, program)
        return program
    return add


def test_a_result_may_be_overwritten_before_the_backward():
    """The backward reads it only to compute another value again; eager saved that one."""
    def program(x):
        y = x * 3 + 1
        return torch.sigmoid(y) * 2, y
    grads = []
    for function in (program, fs.compile(program)):
        x = torch.linspace(-1, 1, 12).requires_grad_()
        z, y = function(x)
        y.add_(1)
        (z + y).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_writes_to_detached_results_count_once():
    def of_a_result(x, w):
        y = x * 2
        z = y.detach()
        z.copy_(w * 3)
        return z, y.sin(), y

    def of_two(x, w):
        y = x * 2
        z, u = y.detach(), y.detach()
        z.copy_(w * 3)
        u[1:].mul_(2)
        return z, u, z[1:]

    def of_an_input(x, w):
        z, u = x.detach(), x.detach()
        z.copy_(w * 3)
        return z, u, x
    for program in (of_a_result, of_two, of_an_input):
        counts = []
        for function in (program, fs.compile(program)):
            counts.append([t._version for t in function(torch.ones(6, requires_grad=True), torch.ones(6, requires_grad=True))])
        assert counts[1] == counts[0], program.__name__


def test_a_negated_input_is_written_without_gradients():
    """The view of its memory that the graph is given tells its history after the write."""
    def program(x):
        x.flatten()[0] = 0
        with torch.enable_grad():
            return x * 2
    difference = check_functions(lambda i, device: make([(MATRIX, f32, "contiguous", "inner", "negated")], i, device), program, grad=False)
    assert difference is None, difference


def make(inputs, i, device):
    made = []
    for number, one in enumerate(inputs):
        made.append(Made(one(*made), None) if callable(one) else tensor(one[0][i], *one[1:], seed=number, device=device))
    return made


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


@found("zeros from a function without a derivative, no other gradient", (((0, 0), (7, 7)), bf16, "contiguous", "inner"))
def _sign(x):
    return x.index_add(1, torch.zeros(x.shape[1], dtype=i64, device=x.device), x * 0.5), torch.sgn(x.sum((-1, 0)))


@found("difference of a value and itself, of a written input", (((4, 5), (3, 7)), bf16, "stepped"), (((4, 5), (3, 7)), bf16, "contiguous", "inner"))
def _difference(x, m):
    x[..., 1:].add_(m.mean())
    y = x.tanh()
    count = x[x > 0].sum()
    return y - y, torch.sgn(count), m.round()


@found("windows over the storage of views with bits and of parts of complex tensors", (((3, 7), (4, 9)), f64, "contiguous", "leaf", "negated"),
       (((3, 7), (4, 9)), torch.complex128, "contiguous", "leaf"))
def _windows_with_bits(x, z):
    parts = torch.view_as_real(z), z.conj(), z.imag, z.conj().imag, x[0].expand(2, x.shape[1])
    return [F.batch_norm(x.as_strided((2, 2), (1, 1)), None, None, training=True), *[part.as_strided((2, 3), (2, 1)) * 2 for part in parts]]


@found("write to windows over the storage of views with bits", (((3, 7), (4, 9)), f64, "contiguous", "", "negated"), (((3, 7), (4, 9)), torch.complex128))
def _written_with_bits(x, z):
    x.as_strided((2, 2), (2, 1)).add_(1)
    z.conj().imag.as_strided((2, 2), (4, 2)).mul_(3)
    return x * 1, z * 1


@found("part of a conjugate of an input that begins inside of its storage, written", (((1, 4), (3, 4)), torch.complex64, "offset", "inner"),
       (((3,), (5,)), torch.complex64, "window"))
def _written_part_of_a_conjugate(z, w):
    z.conj().imag.add_(1)
    w.conj().imag.mul_(2)
    z.mul_(2)
    return z * 2, torch.view_as_real(w) + 1


@found("difference of a view and itself, summed with another gradient", (((17, 1), (17, 4)), f32, "stepped", "inner"))
def _difference_of_a_view(x):
    x.reshape(-1)[1:].add_(-0.75)
    t = x - x
    r = F.rms_norm(t, t.shape[-1:])
    x.reshape(-1)[1:].add_(1.5)
    return r


@found("pixels of an empty image", (((3, 2, 4, 4), (0, 2, 4, 4)), bf16, "offset", "leaf"), (((5, 2, 4, 4), (3, 2, 4, 4)), f32))
def _pixels(x, y):
    return F.pixel_unshuffle(x, 2), F.pixel_shuffle(x.reshape(-1, 8, 2, 2), 2), F.pixel_unshuffle(y[3:], 2)


@found("stack whose sizes a guard made equal, returned and read by a backward", (((4, 17), (3, 17)), bf16, "contiguous", "inner"), (((4, 17), (3, 17)), i64))
def _stack_of_equal_sizes(x, i):
    t = torch.stack([i, x], -2)
    return (t.abs() + 0.5) ** t, t


@found("branch on data of views with bits", (MATRIX, f64, "contiguous", "leaf", "negated"), (MATRIX, torch.complex128, "transposed", "inner", "conj"))
def _branch_of_bits(x, z):
    if x.sum() > 1:
        y, w = x + 1, z.mT * 2
    else:
        y, w = x[..., 1:] * 2, z.mT - 1
    return y, w


@found("logsigmoid of a permuted tensor, returned and gone on with", (((5, 16, 3), (4, 6, 3)), f64, "reversed", "leaf"))
def _logsigmoid_gone_on_with(x):
    t = F.logsigmoid(x)
    return F.interpolate(t.clamp(-1.25, 2), scale_factor=2), t


@found("nearest of an image whose format sizes of 1 leave open", (((6, 3, 8, 8), (9, 16, 6, 6)), f32, "contiguous", "inner"), (((3, 8, 4, 6), (2, 4, 6, 4)), f32, "channels_last", "leaf"))
def _ambiguous_format(x, y):
    t = torch.rot90(F.adaptive_avg_pool2d(x, 1), 1, (2, -4))
    return F.interpolate(t, scale_factor=2), t, F.pixel_unshuffle(y, 2), F.pixel_shuffle(y, 2), F.batch_norm(y[..., 1:-1], None, None, training=True)


@found("view of an expanded tensor with the negative bit", (((17, 2), (12, 2)), f32, "expanded", "inner", "negated"))
def _view_of_negated(x):
    with torch.no_grad():
        product = x @ x.unfold(0, 2, 1)
    flat = x.unfold(0, 2, 1).transpose(-1, -2).view(-1, x.shape[1])
    return product, flat * 2


@found("stride that a later stretch sees only doubled", (((8, 1, 4), (5, 1, 8)), torch.complex64, "channels_last", "inner"), (((4,), (8,)), f32))
def _doubled_stride(z, w):
    t = z.real
    return F.rms_norm(t, t.shape[-1:], w, 1e-5), t


@found("product in half precision whose sizes attention makes numbers", (((3, 16, 8, 8), (16, 17, 4, 4)), bf16), (((5, 4), (5, 2)), bf16))
def _half_product(x, w):
    t = F.max_pool2d(x, 2).sum((1, -2), keepdim=True)
    return F.scaled_dot_product_attention(t, t, F.linear(t, w))


@found("input whose size the backward asks, overwritten in a later stretch", (((2, 9), (6, 4)), i64), (((16, 16, 2), (16, 16, 6)), f64, "contiguous", "inner"))
def _size_asked(i, x):
    t = x[i % x.shape[0]].std(-2)
    x.index_fill_(-1, i.reshape(-1) % x.shape[-1], -0.75)
    return t, t.sum(1)


@found("input that got a history in an earlier stretch", (((4, 6), (5, 8)), bf16, "contiguous", "inner"), (((4, 6), (5, 8)), bf16, "contiguous", "leaf"), (((4, 6), (5, 8)), bf16))
def _history_from_before(x, w, y):
    y.view(-1)[: w.numel()] = w.reshape(-1)
    t = F.elu(x)
    u = y - t.float()
    return u, t, y.sin() + u


@found("masked_scatter_ of what it writes", (MATRIX, f32), (MATRIX, f32, "transposed"))
def _masked_scatter_of_itself(x, y):
    x.masked_scatter_(x > 0, x)
    t = y * 1
    t[1:].masked_scatter_(t[1:] > 0, t)
    return x * 1, t


@found("leaf that is written through another argument", (MATRIX, f32, "contiguous", "leaf"), lambda x: x.arg.detach())
def _leaf_written(x, same):
    t = torch.expm1(x)
    same.view(-1)[0] = 0.5
    return t, 1 - t


@fs.disable
def normalised(x):
    return F.rms_norm(x, x.shape[-1:])


@found("overwritten input of an operator whose result no gradient reaches", (((8, 6), (8, 8)), f64, "contiguous", "inner"))
def _dead_result(x):
    t = normalised(x)
    x[..., 1:].add_(-0.02)
    r = x.logsumexp(1, keepdim=True)
    t.clamp_(-1.5, 1.5)
    return r


@found("zeros like a result that the backward may not read", (((7, 7), (7, 7)), bf16, "contiguous", ""), (((2, 2), (2, 2)), bf16, "contiguous", "inner"))
def _zeros_of_a_result(x, weight):
    t = x.max(-2).values
    zeros = t.new_zeros(t.shape[0], 2)
    return torch.addmm(zeros, zeros, weight, alpha=0.5), t


@found("diagonal of an input that begins inside of its storage", (((1, 17), (1, 7)), f64, "offset", "inner"))
def _filled_diagonal(x):
    x.fill_diagonal_(1)


@found("window of an input that begins inside of its storage", (((4, 17), (4, 7)), f64, "offset", "inner"), (((3,), (3,)), f64, "contiguous", "inner"))
def _written_window(x, y):
    x[1:].as_strided((3,), (2,), 7).mul_(y)
    x.as_strided((2,), (3,), 6).mul_(3)


@found("window of an input between other writes", (((4, 17), (4, 7)), f64, "offset", "inner"))
def _window_between_writes(x):
    x.as_strided((3,), (2,), 7).mul_(2)
    x.mul_(3)
    return x + 1


@found("window of an input without a history", (((4, 17), (4, 7)), f64, "offset", ""), (((3,), (3,)), f64, "contiguous", "inner"))
def _window_that_gets_a_history(x, y):
    x.as_strided((3,), (2,), 7).mul_(y)


@found("window over memory between the elements of an input, which is written", (((6, 16), (6, 1)), f64, "window", "inner"), (((4, 3), (5, 6)), f64, "stepped"))
def _window_between_elements(x, y):
    t = y.as_strided((2, 2), (1, 1))[1]
    x.flatten()[0] = -0.75
    y.mul_(2)
    return x.as_strided((2, 2), (1, 1)) + 1, t + 1


@found("window over memory before an input, which is written", (((4, 6), (3, 5)), f64, "offset", "inner"), (((4, 6), (3, 5)), torch.complex128, "offset"))
def _window_before_an_input(x, z):
    x.add_(1)
    z.real.as_strided((2,), (1,), 0).mul_(2)
    return x.as_strided((2,), (1,), 0) * 2, z * 1


@found("window over memory between the elements of an input, written", (((4, 6), (3, 5)), f64, "stepped", "inner"),
       (((4, 6), (3, 5)), torch.complex128, "window", "inner"))
def _written_between_elements(x, z):
    x.add_(1)
    x.as_strided((2,), (1,)).mul_(2)
    z.imag.as_strided((2, 2), (2, 1))[1].mul_(2)
    return x * 2, z * 1


@found("neighbours in an input with holes, written", (((4, 6), (6, 4)), f64, "window", "inner"))
def _written_neighbours(x):
    x.unfold(1, 2, 2).mul_(2)
    return x * 2


@found("mask made of an input that is overwritten, beside a reader of it that no gradient reaches", (MATRIX, f64, "contiguous", "inner"))
def _mask_of_an_overwritten_input(x):
    t = torch.softmax(x.masked_fill(x > 1, -1e4), -1) + 2 * x
    largest = x.amax(-1)
    part = x[..., 1:]
    with torch.no_grad():
        part[..., :1].add_(F.pad(largest, (1, 2), value=0.5).mean())
    return t, part


@fs.disable
def seen(x):
    return x


@found("copy of a negated input that is overwritten behind a break", (MATRIX, f64, "contiguous", "inner"), (((3,), (3,)), f64, "contiguous", "", "negated"))
def _copy_of_an_overwritten_input(x, negated):
    t = seen(x * negated.contiguous()[0])
    negated[:1].mul_(0.25)
    return t


@found("leaf overwritten behind a result that the program continues with", (MATRIX, f64, "stepped", "leaf"))
def _overwritten_leaf(x):
    t = torch.tanh(x)
    with torch.no_grad():
        x.mul_(1.5)
    return t, t.mean()


@found("leaf overwritten behind a break", (MATRIX, f64, "contiguous", "leaf"))
def _overwritten_leaf_behind_a_break(x):
    t = seen(torch.tanh(x))
    with torch.no_grad():
        x.mul_(1.5)
    return t


@found("leaf overwritten through its data", (MATRIX, f64, "contiguous", "leaf"))
def _overwritten_data_of_a_leaf(x):
    t = torch.tanh(x)
    x.data.mul_(1.5)
    return t, t.mean()


@found("one of many views, read by a branch before its base is written", (MATRIX, f64, "contiguous", "inner"))
def _stale_view(x):
    t = x.unbind(-1)[-1]
    t = t + 1 if t.sum() > 2 else t * 2
    x.diagonal(0, 1, 0).mul_(2)
    return t, x.roll(1, -2)


@found("product that is stored, less itself", (MATRIX, f64, "contiguous", "inner"))
def _product_less_itself(x):
    with torch.no_grad():
        x.mul_(1.1)
    return F.mse_loss(x, x)


@found("values of a view that was taken under no_grad", (MATRIX, f64, "contiguous", "leaf"), (MATRIX, f64, "contiguous", "inner"))
def _values_of_a_quiet_view(x, y):
    with torch.no_grad():
        t, u = x[..., 1:], y[..., 1:]
    return torch.cos(t), (t * u).sum()


@found("gradient taken inside beside an input that a write gives a history", (MATRIX, f64), (((1,), (1,)), f64, "contiguous", "leaf"))
def _gradient_beside_a_write(x, y):
    t = torch.tanh(x) * x
    x.addcmul_(y, y, value=0.5)
    k = t.detach().requires_grad_()
    return torch.autograd.grad((k.tanh() * 2).sum(), k)[0] + t


@found("result that a decomposition ends with a view, behind its detached part", (MATRIX, f64, "contiguous", "leaf"))
def _stacked_beside_detached(x):
    t = torch.stack([x.select(-1, i) for i in range(0, x.shape[-1], 2)])
    return t.detach(), t


@found("result that a decomposition ends with a view, before its detached part", (MATRIX, f64, "contiguous", "inner"))
def _stacked_before_detached(x):
    t = torch.stack([x, x * 2])
    return t, t[0], t.detach().mul_(2)


@found("detached tensor written with a history, behind one detached of it", (MATRIX, f64, "contiguous", "leaf"))
def _written_behind_detached(x):
    t = x.sin().detach()
    t.copy_(x * 2)
    return t.detach(), t


@found("view of a detached tensor written with a history, behind one detached of it", (MATRIX, f64, "contiguous", "leaf"))
def _view_behind_detached(x):
    y = x.sin()
    t = y.detach()
    t.copy_(y * 2)
    return t.detach()[0], t[0], y


@found("smallest of what the backward computes again, here in a lane and there as a scalar", (((5, 3, 3), (3, 17, 5)), f32, "expanded", "inner", "real"))
def _smallest_of_log_sigmoids(x):
    return F.logsigmoid(x).amin((-2, -3), keepdim=True)


def _window_under_no_grad(x):
    t = x.as_strided((2, 2), (1, 1))
    x.transpose(-3, 0)[0].add_(-0.75)
    pooled = F.avg_pool1d(x, 2)
    for i in range(t.shape[0] % 4):
        t[i] *= i - 0.25
    return pooled, t


def test_neighbours_in_inputs_that_begin_elsewhere():
    """One compiled program for all places at which an input may begin in its storage."""
    def program(z):
        x = z.imag
        x.unfold(1, 2, 2).mul_(2)
        return x * 1

    compiled = fs.compile(program)
    for start in (1, 0, 2):
        memories = [torch.complex(torch.arange(40.0), torch.arange(40.0)) for _ in range(2)]
        want, got = [function(memory[start:start + 36].view(6, 6)[:, :4]) for function, memory in zip((program, compiled), memories)]
        assert torch.equal(got, want)
        assert torch.equal(*memories)


@pytest.mark.parametrize("dynamic", [None, True])
def test_window_under_no_grad(dynamic):
    """A view without a history, whose base was written: eager does not ask for its history where nothing is recorded."""
    inputs = [(((16, 16, 3), (7, 7, 3)), f64, "transposed", "inner")]
    difference = check_functions(lambda i, where: make(inputs, i, where), _window_under_no_grad, dynamic=dynamic, grad=False)
    assert difference is None, difference


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", FOUND)
def test_equals_eager(name, dynamic, device):
    inputs, program = FOUND[name]
    difference = check_functions(lambda i, where: make(inputs, i, where), program, dynamic=dynamic, device=device)
    assert difference is None, difference
