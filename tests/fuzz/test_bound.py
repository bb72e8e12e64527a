"""The bound of random programs: what it explains are orders of addition, what it finds are wrong values, in programs where rounding errors are large too."""
import pytest
import torch
import torch.nn.functional as F
from program_check import compare, observe
from program_inputs import tensor
from program_rounding import Explained

f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16


def difference(right, wrong, *inputs):
    """What is found where `wrong` is the compiled program and `right` eager's."""
    made = lambda: [tensor(*one) for one in inputs]
    again = lambda change=list: observe(right, change(made()))
    return compare(observe(wrong, made()), again(), Explained(again))


def in_pairs(x):
    """The sum, in another order."""
    while x.numel() > 1:
        x = F.pad(x, (0, x.numel() % 2))
        x = x[::2] + x[1::2]
    return x[0]


def in_turn(x):
    total = x[0]
    for one in x[1:]:
        total = total * one
    return total


def added(x):
    """One and a half, two hundred times, to each element."""
    return x.index_put((torch.arange(1200) % 6,), torch.tensor(1.5, dtype=x.dtype), accumulate=True)


def normalised(x, weight, bias):
    """layer_norm whose gradient leaves rounding errors of its terms where they cancel."""
    y = F.layer_norm(x, x.shape[-1:], weight, bias)
    return y + (x * 1e-13 - (x * 1e-13).detach())


# name -> (eager's program, another that is as right, inputs)
EXPLAINED = {
    "sum that cancels": (lambda x: F.gelu(x.sum() - x.sum().round()), lambda x: F.gelu(in_pairs(x.flip(0)) - x.sum().round()), ((700,), f32, "contiguous", "leaf")),
    "product among denormals": (lambda x: (x * 0.2).prod(), lambda x: in_turn((x * 0.2).flip(0)), ((42,), f32, "contiguous", "leaf", "", 4)),
    "deviation": (lambda x: torch.diag_embed(x).std(), lambda x: torch.diag_embed(x).flatten().flip(0).std(), ((8, 9), f64)),
    "deviation of equal elements": (lambda x: x.var(), lambda x: (x - x[0]).var(), ((17,), f64, "repeated", "", "", 522)),
    "tail of gelu": (lambda x: F.gelu(x - 4), lambda x: (x - 4) / 2 * torch.erfc((4 - x) / 2 ** 0.5), ((50,), f32, "contiguous", "leaf")),
    "many additions in bfloat16": (added, lambda x: added(x.float()).bfloat16(), ((6,), bf16)),
    "weight of a norm of many rows": (lambda x, w, b: F.layer_norm(x, (4,), w, b) * 7, lambda x, w, b: F.layer_norm(x, (4,), w.float(), b.float()).bfloat16() * 7,
                                      ((512, 4), bf16), ((4,), bf16, "contiguous", "leaf"), ((4,), bf16, "contiguous", "leaf")),
    "norm of one element": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), normalised, ((17, 1), f64, "contiguous", "inner"), ((1,), f64), ((1,), f64)),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explains(name):
    right, other, *inputs = EXPLAINED[name]
    assert (found := difference(right, other, *inputs)) is None, found


def index(x): return torch.arange(x.numel(), device=x.device) % 5


# name -> (eager's program, a wrong one, shape of the input); in bfloat16, of which five roundings are a tenth, some are too small
TOO_SMALL = {"a deviation of one element fewer", "a deviation by n", "another eps", "another gelu", "a gradient that is lost"}
WRONG = {
    "a term of a sum": (lambda x: x.sum(), lambda x: x[:-1].sum(), (72,)),
    "a term of a sum that cancels": (lambda x: (x - x.mean()).sum() + x.sum(), lambda x: (x - x.mean()).sum() + x[1:].sum(), (72,)),
    "a row of a mean": (lambda x: x.mean(0), lambda x: torch.cat([x[:-1], x[:1]]).mean(0), (9, 8)),
    "a term of a product": (lambda x: x @ x.mT, lambda x: x[:, :-1] @ x[:, :-1].mT, (6, 40)),
    "a neighbour's element": (lambda x: x.sigmoid(), lambda x: torch.cat([x[:5], x[4:5], x[6:]]).sigmoid(), (32,)),
    "a neighbour in a sum": (lambda x: x.sin().sum(-1), lambda x: torch.cat([x[:, :1], x[:, :-1]], 1).sin().sum(-1), (4, 24)),
    "a repeated index that is added once": (lambda x: torch.zeros_like(x).index_add(0, index(x), x), lambda x: torch.zeros_like(x).index_copy(0, index(x), x), (20,)),
    "a deviation of one element fewer": (lambda x: x.std(), lambda x: x[1:].std(), (48,)),
    "a deviation by n": (lambda x: x.std(), lambda x: x.std(correction=0), (48,)),
    "another eps": (lambda x: F.layer_norm(x, (16,)), lambda x: F.layer_norm(x, (16,), eps=0.05), (4, 16)),
    "another gelu": (lambda x: F.gelu(x.sum()), lambda x: F.gelu(x.sum(), approximate="tanh"), (2,)),
    "a gradient that is lost": (lambda x: x * x.sigmoid(), lambda x: x * x.sigmoid().detach(), (12,)),
    "a mask of the gradient": (lambda x: x.relu() * x, lambda x: x.abs().add(x).div(2) * x.roll(0).detach(), (12,)),
}


@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_finds(name, dtype):
    right, wrong, shape = WRONG[name]
    if dtype is bf16 and name in TOO_SMALL:
        pytest.skip("roundings explain it")
    assert difference(right, wrong, (shape, dtype, "contiguous", "inner")) is not None


NARROWED = {
    "a value": (lambda x: x.exp() + 1, lambda x: x.bfloat16().float().exp() + 1),
    "what a sum adds up": (lambda x: x.exp().sum(), lambda x: x.exp().bfloat16().float().sum()),
    "a norm": (lambda x: F.layer_norm(x, (24,)), lambda x: F.layer_norm(x.bfloat16().float(), (24,))),
    "a softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1).bfloat16().float()),
}


@pytest.mark.parametrize("name", NARROWED)
def test_finds_a_rounding_that_is_not_the_programs(name):
    assert difference(*NARROWED[name], ((5, 24), f32, "contiguous", "inner")) is not None
