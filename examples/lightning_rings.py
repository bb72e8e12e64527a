"""Lightning: the module is compiled as it is, the Trainer goes on as before.

    python examples/lightning_rings.py [--epochs 3]
"""
from __future__ import annotations

import argparse
import sys

import lightning as L
import torch

import firesteel as fs


class Rings(L.LightningModule):
    """Points in the plane, labelled by the ring they lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fs.compile(torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def points(count: int) -> torch.utils.data.DataLoader:
    found = torch.randn(count, 2)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(found, (found.norm(dim=1) > 1.2).long()), batch_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(max_epochs=options.epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
                        enable_progress_bar=sys.stderr.isatty())
    trainer.fit(Rings(), points(2500), points(500))
    print(f"{trainer.callback_metrics['right'].item():.0%} right; {fs.counters['stats']['unique_graphs']} graphs, "
          f"{sum(fs.counters['recompiles'].values())} recompiles")


if __name__ == "__main__":
    main()
