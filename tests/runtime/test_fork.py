"""A process that forks while its threads compile: the child compiles and runs."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKS = """
import faulthandler, os, threading, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""        # an engine with threads for devices refuses a forked child's backward, eager's too
import torch
import firesteel as fs

torch.set_num_threads(2)
fs.config.cache_dir = ""

def work(number, rows=5):
    def f(x):
        return torch.sin(x * float(number)).exp().sum(0) + torch.softmax(x, -1)
    x = torch.randn(rows, 300, requires_grad=rows < 500)
    out = fs.compile(f)(x)
    if x.requires_grad:
        out.sum().backward()
    return x, out, f

work(0, 500)                    # on several threads: OpenMP has a pool
work(0)                         # the autograd engine starts once in a process: a fork meanwhile leaves the child, eager's too, waiting for ever
running = True

def loop(number):
    while running:
        work(number)
        number += 2

threads = [threading.Thread(target=loop, args=(n,), daemon=True) for n in (1, 2)]
for thread in threads:
    thread.start()
for k in range(6):
    time.sleep(0.011 * k)
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)
        work(1000 + k, 500)     # eager would wait for the pool's threads
        torch.set_num_threads(1)
        x, out, f = work(2000 + k)
        torch.testing.assert_close(out, f(x))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
running = False
for thread in threads:
    thread.join()
print("whole")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_forked_while_threads_compile():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300)
    assert done.stdout == "whole\n", done.stderr
