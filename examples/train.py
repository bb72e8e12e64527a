"""A training loop with a progress bar, evaluation and a checkpoint that is taken up again: only the line with fs.compile is new.

    python examples/train.py [--epochs 3] [--path model.pt]
"""
from __future__ import annotations

import argparse
import pathlib

import torch
from tqdm import tqdm

import firesteel as fs


def batches(count: int, generator: torch.Generator):
    """Points in the plane, labelled by the ring they lie in; the last batch is smaller."""
    for size in [64] * (count - 1) + [17]:
        points = torch.randn(size, 2, generator=generator)
        yield points, (points.norm(dim=1) > 1.2).long()


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--path", type=pathlib.Path, default=pathlib.Path("model.pt"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    if options.path.exists():
        saved = torch.load(options.path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    compiled = fs.compile(model)
    generator = torch.Generator().manual_seed(1)
    right = 0.0
    for epoch in range(start, start + options.epochs):
        compiled.train()
        bar = tqdm(list(batches(40, generator)), desc=f"epoch {epoch}", disable=None)
        for points, labels in bar:
            loss = torch.nn.functional.cross_entropy(compiled(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
        compiled.eval()
        with torch.no_grad():
            points, labels = next(batches(2, generator))
            right = (compiled(points).argmax(1) == labels).float().mean().item()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, options.path)
    print(f"{right:.0%} right; {fs.counters['stats']['unique_graphs']} graphs, {sum(fs.counters['recompiles'].values())} recompiles")
    return right


if __name__ == "__main__":
    main()
