"""Recurrent layers over packed sequences: milliseconds of processor time of a call, eager and firesteel taking turns in one process.

    OMP_NUM_THREADS=1 python bench/packed.py [dense]        (dense: plain sequences of a symbolic length)
"""
from __future__ import annotations

import statistics
import sys
import time

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import firesteel as fs

SIZES = ((4, 10, 16, 16, 1, False), (16, 40, 64, 64, 1, False), (32, 40, 128, 256, 2, True))      # batch, steps, inside, hidden, layers, bidirectional


def row(kind: str, batch: int, steps: int, inside: int, hidden: int, layers: int, bidirectional: bool, train: bool, dense: bool) -> str:
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(inside, hidden, layers, bidirectional=bidirectional)
    lengths = torch.tensor([steps - n * steps // (2 * batch) for n in range(batch)])
    x = torch.randn(steps, batch, inside)
    given = [x[:steps - cut].clone() for cut in range(3)] if dense else [pack_padded_sequence(x, lengths)]

    def run(given):
        return layer(given)[0] if dense else layer(given)[0].data

    def call(fn, number):
        layer.zero_grad()
        with torch.set_grad_enabled(train):
            result = fn(given[number % len(given)])
        if train:
            result.sum().backward()

    fns = (run, fs.compile(run, dynamic=dense or None))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(12 if hidden > 64 else 80):
        for fn, found in zip(fns, times):
            start = time.process_time()
            call(fn, number)
            if number >= 3:
                found.append(time.process_time() - start)
    eager, ours = (statistics.quantiles(found, n=4)[0] * 1e3 for found in times)
    size = f"{batch} x {steps}, {inside} to {hidden}, {layers * (2 if bidirectional else 1)}"
    return f"| {kind} {'train' if train else 'infer'} | {size} | {eager:.2f} / {ours:.2f} | {eager / ours:.2f} |"


if __name__ == "__main__":
    print("| layer | sequences x steps, widths, layers and directions | ms: eager / firesteel | of eager |\n|---|---|---|---|")
    for train in (False, True):
        for kind in ("LSTM", "GRU"):
            for sizes in SIZES:
                print(row(kind, *sizes, train, "dense" in sys.argv), flush=True)
