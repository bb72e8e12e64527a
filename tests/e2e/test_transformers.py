"""Unmodified models of `transformers`: forward and training step as one graph, and no further graphs for further lengths."""
from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import firesteel as fs
from firesteel.artifacts import counters

transformers = pytest.importorskip("transformers")
WORDS = 97
Make = Callable[[int], dict[str, torch.Tensor]]


def words(length: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (2, length))


def bert() -> tuple[torch.nn.Module, Make]:
    config = transformers.BertConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                                     max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config), lambda n: {"input_ids": words(n), "attention_mask": torch.ones(2, n, dtype=torch.long),
                                                            "labels": words(n)}


def gpt2() -> tuple[torch.nn.Module, Make]:
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
                                     attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), lambda n: {"input_ids": words(n), "labels": words(n)}


def llama() -> tuple[torch.nn.Module, Make]:
    config = transformers.LlamaConfig(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config), lambda n: {"input_ids": words(n), "labels": words(n)}


def t5() -> tuple[torch.nn.Module, Make]:
    config = transformers.T5Config(vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
                                   decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config), lambda n: {"input_ids": words(n), "labels": words(n)}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Make]]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5}


def same_outputs(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        else:
            assert type(ours[name]) is type(value)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_graph(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model, make = MODELS[name]()
    twin = copy.deepcopy(model)
    counters.clear()
    compiled = fs.compile(model, fullgraph=True, backend=backend)
    for length in (8, 9, 12):
        batch = make(length)
        ours, theirs = compiled(**batch), twin(**batch)
        same_outputs(ours, theirs)
        ours.loss.backward()
        theirs.loss.backward()
        for (label, p), q in zip(model.named_parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda text: f"{label}: {text}")
        model.zero_grad()
        twin.zero_grad()
    assert counters["stats"]["unique_graphs"] == 2      # one for the first length, one for all lengths


@pytest.mark.parametrize("name", MODELS)
def test_evaluates_as_one_graph(name: str) -> None:
    torch.manual_seed(0)
    model, make = MODELS[name]()
    model.eval()
    counters.clear()
    compiled = fs.compile(model, fullgraph=True, backend="eager")
    batch = make(7)
    with torch.no_grad():
        same_outputs(compiled(**batch), model(**batch))
    assert counters["stats"]["unique_graphs"] == 1


def saved_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Bytes of what a forward saves beside the parameters, each storage once; and the loss."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    return sum(size for place, size in found.items() if place not in own), loss


def with_dropout(name: str) -> tuple:
    torch.manual_seed(0)
    model, make = MODELS[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model.train(), make


def assert_same_gradients(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    for (label, p), q in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda text: f"{label}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_as_one_graph(name: str) -> None:
    """Dropout included: the masks of a region are drawn again."""
    model, make = with_dropout(name)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    for each in (model, twin):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = make(32)
    counters.clear()
    losses, sizes = [], []
    for each in (fs.compile(model, fullgraph=True), twin, fs.compile(plain, fullgraph=True)):
        torch.manual_seed(1)
        size, loss = saved_bytes(each, batch)
        loss.backward()
        losses.append(loss.detach())
        sizes.append(size)
    torch.testing.assert_close(losses, [losses[1]] * 3, rtol=1e-4, atol=1e-5)
    assert_same_gradients(model, twin)
    assert counters["stats"]["unique_graphs"] == 2 and sizes[0] < sizes[2] / 2 and sizes[0] <= sizes[1] * 1.1


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_eager_in_one_captured_backward(name: str) -> None:
    """The forward is eager's; each region is recomputed inside of the captured graph, with the numbers that it drew."""
    model, make = with_dropout(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    twin, batch = copy.deepcopy(model), make(16)
    counters.clear()
    for each, captured in ((twin, contextlib.nullcontext()), (model, fs.compiled_autograd(functools.partial(fs.compile, fullgraph=True)))):
        torch.manual_seed(1)
        with captured:
            each(**batch).loss.backward()
    assert_same_gradients(model, twin)
    assert counters["stats"]["unique_graphs"] == 1 and counters["compiled_autograd"]["by_eager"] == 0
