"""Recurrent layers over sequences of many lengths: one graph, eager's values and gradients; packed sequences too."""
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import firesteel as fs

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "dropped": lambda: nn.GRU(3, 4, 2, dropout=0.5),
}


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    torch.manual_seed(0)


def flat(out):
    return [t for part in out for t in (part if isinstance(part, tuple) else (part,))]


def step(fn, layer, *args):
    args = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    torch.manual_seed(1)
    results = flat(fn(*args))
    wanted = [a for a in args if a.requires_grad] + list(layer.parameters())
    return results, torch.autograd.grad(sum((t * t.sin()).sum() for t in results), wanted)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_for_all_lengths(name):
    layer = LAYERS[name]()
    compiled = fs.compile(lambda x: layer(x), dynamic=True, fullgraph=True)
    for n in (5, 7, 2, 1):
        x = torch.randn((2, n, 3) if name == "gru" else (n, 2, 3))
        torch.testing.assert_close(step(compiled, layer, x), step(layer, layer, x), rtol=1e-4, atol=1e-5)
    assert fs.counters["stats"]["unique_graphs"] == 1 and fs.counters["native"]["fallbacks"] == 0


def test_the_length_becomes_a_symbol():
    layer = nn.GRU(3, 4)
    compiled = fs.compile(lambda x: layer(x)[0], fullgraph=True)
    for n in (3, 5, 6, 8, 2):
        x = torch.randn(n, 2, 3)
        torch.testing.assert_close(compiled(x), layer(x)[0], rtol=1e-4, atol=1e-5)
    assert fs.counters["stats"]["unique_graphs"] == 2


def test_second_order():
    layer = nn.GRU(3, 4)
    fn = lambda x: layer(x)[0].square().sum()
    compiled = fs.compile(fn, dynamic=True, fullgraph=True)
    x = torch.randn(4, 2, 3, requires_grad=True)
    got, want = (torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0].square().sum(), x) for f in (compiled, fn))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_packed(kind):
    layer = kind(3, 4, batch_first=True)

    def run(x, lengths):
        outputs, _ = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return (pad_packed_sequence(outputs, batch_first=True)[0],)
    compiled = fs.compile(run)
    for n in (4, 5):
        args = torch.randn(3, n, 3), torch.tensor([n, 1, n - 1])
        torch.testing.assert_close(step(compiled, layer, *args), step(run, layer, *args), rtol=1e-4, atol=1e-5)


PACKED = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True), "projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, bias=False),
    "gru": lambda: nn.GRU(3, 4, 2, bidirectional=True), "gru without biases": lambda: nn.GRU(3, 4, bias=False),
    "tanh": lambda: nn.RNN(3, 4, 2, bidirectional=True), "relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 3, 1), (1, 1), (4, 4, 2, 2), (6,)], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_gradients_of_packed_layers(name, lengths):
    """All gradients, those of the first states too, twice over one forward."""
    layer = PACKED[name]().double()
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or 4, 4] if layer.mode == "LSTM" else [4]
    first = [torch.randn(directions, len(lengths), width, dtype=torch.float64, requires_grad=True) for width in widths]
    x = torch.randn(lengths[0], len(lengths), 3, dtype=torch.float64, requires_grad=True)

    def run(packed, *states):
        output, last = layer(packed, states if len(states) > 1 else states[0])
        return (output.data, *(last if isinstance(last, tuple) else (last,)))
    found = []
    for fn in (run, fs.compile(run)):
        results = fn(pack_padded_sequence(x, torch.tensor(lengths)), *first)
        of_all = [torch.autograd.grad(sum((t * t.sin()).sum() for t in results), [x, *first, *layer.parameters()], retain_graph=True)
                  for _ in range(2)]
        of_states = torch.autograd.grad(sum(t.sin().sum() for t in results[1:]), [x, *first])
        found.append((results, of_all, of_states))
    torch.testing.assert_close(found[1], found[0])
    assert fs.counters["native"]["fallbacks"] == 0


def test_the_output_of_a_packed_layer_may_be_written_to():
    """The backward needs the values from before."""
    layer, packed = nn.GRU(3, 4), pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    run = lambda packed, state: layer(packed, state)[0].data * 2
    got = fs.compile(lambda packed, state: run(packed, state).mul_(3))(packed, torch.ones(1, 2, 4))
    torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), layer.weight_hh_l0),
                               torch.autograd.grad((run(packed, torch.ones(1, 2, 4)) * 3).sin().sum(), layer.weight_hh_l0))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_layers_run_once_for_a_step(frozen, monkeypatch):
    """The backward of a dense LSTM goes on from what oneDNN kept, as often as it is asked; where the token was copied the layers run again."""
    from firesteel.graph import recurrent_library, recurrent_onednn
    layer = nn.LSTM(3, 4, 2)
    if frozen:
        layer.weight_ih_l0.requires_grad_(False)
    runs, run = [], recurrent_onednn._forward
    monkeypatch.setattr(recurrent_onednn, "_forward", lambda *args: runs.append(1) or run(*args))
    fn = lambda x: layer(x)[0]
    compiled, x = fs.compile(fn, dynamic=True), torch.randn(5, 3, 3)
    wanted = [p for p in layer.parameters() if p.requires_grad]
    expected = torch.autograd.grad(fn(x).sin().sum(), wanted)
    for runs_of_backward in (0, 1):
        runs.clear()
        result = compiled(x).sin().sum()
        for asked in range(2):
            torch.testing.assert_close(torch.autograd.grad(result, wanted, retain_graph=True), expected)
            assert len(runs) == 1 + runs_of_backward * (asked + 1)
        monkeypatch.setattr(recurrent_library, "_token", lambda kept: torch.zeros(1, dtype=torch.uint8))


DENSE = {"plain": {}, "two directions": {"num_layers": 2, "bidirectional": True}, "no biases": {"bias": False}, "batch first": {"batch_first": True},
         "bfloat16": {"dtype": torch.bfloat16}, "float64": {"dtype": torch.float64}}


@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_a_dense_lstm(name):
    """All gradients, those of the first states too, of all results, of the states alone, and where the batch is empty."""
    layer = nn.LSTM(3, 4, **DENSE[name])
    dtype = layer.weight_ih_l0.dtype
    close = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}

    def run(x, h, c):
        output, last = layer(x, (h, c))
        return (output, *last)
    compiled = fs.compile(run, dynamic=True, fullgraph=True)
    for length, batch in ((5, 2), (2, 3), (4, 0)):
        x = torch.randn((batch, length, 3) if layer.batch_first else (length, batch, 3), dtype=dtype)
        states = [torch.randn(layer.num_layers * (2 if layer.bidirectional else 1), batch, 4, dtype=dtype) for _ in range(2)]
        torch.testing.assert_close(step(compiled, layer, x, *states), step(run, layer, x, *states), **close)
        last = [step(lambda *args, fn=fn: fn(*args)[1:], layer, x, *states) for fn in (compiled, run)]
        torch.testing.assert_close(last[0], last[1], **close)
    assert fs.counters["native"]["fallbacks"] == 0


def test_an_empty_batch():
    layer = nn.GRU(3, 4)
    compiled = fs.compile(lambda x: layer(x), dynamic=True, fullgraph=True)
    for batch in (2, 0):
        x = torch.randn(5, batch, 3)
        torch.testing.assert_close(step(compiled, layer, x), step(layer, layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"c": torch.zeros(1, 2, 4, dtype=torch.float64)}, {"x": torch.randn(5, 2, 3).double()}])
def test_what_does_not_fit_is_refused_as_eager_does(wrong):
    params = [p.detach().requires_grad_() for p in nn.LSTM(3, 4).parameters()]
    fn = lambda x, h, c: torch.lstm(x, (h, c), params, True, 1, 0.0, True, False, False)[0]
    args = {"x": torch.randn(5, 2, 3), "h": torch.zeros(1, 2, 4), "c": torch.zeros(1, 2, 4)} | wrong
    for run in (fn, fs.compile(fn, dynamic=True)):
        with pytest.raises(RuntimeError):
            run(**args)
