"""Programs on which compiled and eager once differed, reduced: for both sets of sizes, static and dynamic, forward and backward.

A row is the inputs and the program; `tensor` makes an input of a layout (program_inputs.py), `check_functions` compares all that a caller sees.
"""
import pytest
import torch
import torch.nn.functional as F
from found_programs import FOUND, MATRIX, bf16, f32, f64, found, i64
from program_check import check_functions
from program_inputs import Made, tensor

import firesteel as fs


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


@pytest.mark.parametrize("program", [lambda x: x.transpose(0, 1), lambda x: (x.add_(1), x.view(-1))[1], lambda x: (x + 1).t(), lambda x: x.split(1)[0]])
def test_a_view_may_be_written_with_a_gradient_though_no_input_had_one(program):
    seen = []
    for function in (program, fs.compile(program)):
        x, w = torch.arange(6.0).view(2, 3), torch.tensor(2.0, requires_grad=True)
        view = function(x)
        try:
            view.mul_(w)
            seen.append((type(view.grad_fn).__name__, type(x.grad_fn).__name__))
        except RuntimeError as error:
            seen.append(str(error))
    assert seen[1] == seen[0]


def test_strides_of_one_are_known_though_two_symbols_turn_out_to_be_one():
    def program(x, y, weight):
        return F.layer_norm(torch.fmin(x, y), y.shape[-1:], weight)
    args = torch.randn(6, 1).t(), torch.randn(1, 1, 6), torch.randn(6)
    assert fs.compile(program, dynamic=True)(*args).stride() == program(*args).stride()


@pytest.mark.parametrize("turned", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.conj()[1:]])
@pytest.mark.parametrize("leaf", [lambda x: x.detach().requires_grad_(), torch.nn.Parameter])
def test_a_leaf_in_the_memory_of_an_input_has_its_bit(turned, leaf):
    def program(x, z):
        x = x + 1 if x.sum() > 0 else x * 2
        w = leaf(turned(z))
        return x, torch.autograd.grad((w * w.sin()).abs().sum(), w)[0]

    def of_an_input(x, w):
        x = x + 1 if x.sum() > 0 else x * 2
        w = leaf(w)
        return x, torch.autograd.grad((w * w.sin()).abs().sum(), w)[0]
    z = torch.view_as_complex(torch.linspace(-1, 2, 8).view(4, 2))
    for function, given in ((program, z), (of_an_input, turned(z))):
        torch.testing.assert_close(fs.compile(function)(torch.ones(3), given), function(torch.ones(3), given))
