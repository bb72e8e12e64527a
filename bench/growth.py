"""How the time of a first call grows with the program: a straight line of operators, 625 and 5,000 of them.

    python bench/growth.py

Processor time of the first call in one process, without a cache on disk, behind a small program that loads the compiler; inference, then a forward with
its backward.  The last column is how many times as long the eightfold program takes.
"""
import os
import time

os.environ["FIRESTEEL_CACHE_DIR"] = ""

import torch  # noqa: E402

import firesteel as fs  # noqa: E402

COUNTS = (625, 5000)


def line(count):
    """A function of `count` operators: sine, product and sum in turn."""
    body = "\n".join(f"    x = {('x.sin()', 'x * 1.01', 'x + 0.5')[n % 3]}" for n in range(count))
    scope = {}
    exec(f"def straight(x):\n{body}\n    return x\n", scope)
    return scope["straight"]


def first_call(count, grad):
    compiled, x = fs.compile(line(count)), torch.ones(64, requires_grad=grad)
    start = time.process_time()
    out = compiled(x)
    if grad:
        out.sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    first_call(9, True)
    for name, grad in (("inference", False), ("training", True)):
        few, many = (first_call(count, grad) for count in COUNTS)
        print(f"{name}: {COUNTS[0]} operators {few:.2f} s, {COUNTS[1]} operators {many:.2f} s, {many / few:.1f} times")
