"""transformers' Trainer, unchanged: fs.install() makes its `torch_compile=True` firesteel's.

    python examples/trainer.py [--steps 20]
"""
from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import firesteel as fs


class Counting(torch.utils.data.Dataset):
    """Sequences that count on from a random start."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + at * 7) % 32
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    transformers.set_seed(0)
    fs.install()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=1e-2,
                                                  logging_steps=5, torch_compile=True, report_to=[],
                                                  use_cpu=True, disable_tqdm=True, save_strategy="no")
        trainer = transformers.Trainer(model, settings, train_dataset=Counting())
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(losses[0]):.2f} to {float(losses[-1]):.2f}, {fs.counters['stats']['unique_graphs']} graphs, "
          f"{sum(fs.counters['recompiles'].values())} recompiles")


if __name__ == "__main__":
    main()
