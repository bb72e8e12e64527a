"""A Llama of transformers, unmodified: tokens a second of greedy generation, first and later training steps, each in fresh processes.

    python bench/llama.py [--impl eager,torch,firesteel] [--modes generate,train] [--tokens 256] [--layers 22] [--device cuda] [--json OUT]

The weights are random, of the shape of the 1.1B model (bfloat16).  `generate` writes --tokens tokens after a prompt of 16, batch 1, with transformers' static
cache and the model's forward compiled with mode="reduce-overhead"; the third call counts, so that no compiling is in it.  `train` is a step of batch 4 over
1024 tokens: the first call with empty caches, then the median.  transformers must be installed.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from reference import fresh

IMPLS, MODES = ("eager", "torch", "firesteel"), ("generate", "train")
PROMPT, BATCH, CONTEXT = 16, 4, 1024


def model(layers: int, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
                         num_key_value_heads=4, max_position_embeddings=2048, dtype=torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def compiled(fn: Any, impl: str, **options: Any) -> Any:
    if impl == "eager":
        return fn
    if impl == "torch":
        return torch.compile(fn, **options)
    import firesteel
    return firesteel.compile(fn, **options)


def generate(impl: str, layers: int, tokens: int, device: str) -> dict:
    llama = model(layers, device).eval()
    ids = torch.randint(0, 32000, (1, PROMPT), device=device)
    options = {"attention_mask": torch.ones_like(ids), "min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0,
               "cache_implementation": "static", "disable_compile": True}
    llama.forward = compiled(llama.forward, impl, mode="reduce-overhead")
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        written = llama.generate(ids, **options)
        _wait(device)
        spent.append(time.perf_counter() - start)
    return {"first": spent[0], "tokens_a_second": tokens / spent[-1], "written": written[0, PROMPT:PROMPT + 8].tolist()}


def train(impl: str, layers: int, tokens: int, device: str) -> dict:
    llama = model(layers, device).train()
    ids = torch.randint(0, 32000, (BATCH, CONTEXT), device=device)
    forward = compiled(llama, impl)
    spent = []
    for _ in range(8):
        llama.zero_grad()
        start = time.perf_counter()
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        _wait(device)
        spent.append(time.perf_counter() - start)
    return {"first": spent[0], "step_ms": statistics.median(spent[3:]) * 1e3, "loss": loss.item()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("impl", ",".join(IMPLS)), ("modes", ",".join(MODES)), ("device", "cuda"), ("json", ""), ("worker", "")):
        parser.add_argument(f"--{name}", default=default)
    for name, default in (("tokens", 256), ("layers", 22)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.worker:
        mode, *arguments = json.loads(options.worker)
        print(json.dumps({"generate": generate, "train": train}[mode](*arguments)))
        return 0
    rows = {}
    for mode in options.modes.split(","):
        for impl in options.impl.split(","):
            with tempfile.TemporaryDirectory() as cache:
                rows[f"{mode} {impl}"] = row = fresh(__file__, [mode, impl, options.layers, options.tokens, options.device], cache)
            print(mode, impl, *(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
