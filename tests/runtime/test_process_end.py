"""The end of a process that used firesteel: threads, exit functions and finalisers that compile or call compiled code still work, and nothing is printed."""
from __future__ import annotations

import _thread
import ctypes
import os
import subprocess
import sys
import threading

import pytest

from firesteel import native_method, transaction
from firesteel.sym import node

HEAD = """
import atexit, os, sys, threading, torch
import firesteel as fs
def f(a, b):
    return ((a + b * 1.5).relu().softmax(-1) * a).sum(-1) + b.mean()
def leaves(n):
    return torch.ones(n, 4, requires_grad=True), torch.ones(n, 4)
def checked(g, n):
    a, b = leaves(n)
    g(a, b).sum().backward()
    want, _ = leaves(n)
    f(want, b).sum().backward()
    torch.testing.assert_close(a.grad, want.grad)
    print("ok")
"""
ENDS = {
    "a thread that goes on": ("threading.Thread(target=lambda: (threading.main_thread().join(), checked(fs.compile(f), 3))).start()", 1),
    "an exit function": ("g = fs.compile(f)\natexit.register(checked, g, 3)", 1),
    "an exit function after a call": ("g = fs.compile(f)\natexit.register(checked, g, 3)\nchecked(g, 2)", 2),
    # without a gradient: torch aborts, eager's too, where a finaliser frees a tensor that its graph holds
    "a finaliser": ("class Held:\n    def __del__(self):\n        assert sys.is_finalizing()\n        print('ok' if self.g(self.x, self.x).equal(self.f(self.x, self.x)) else 'wrong')\n"
                    "held = Held()\nheld.f, held.g, held.x, held.me = f, fs.compile(f), torch.ones(3, 4), held\nchecked(held.g, 2)", 2),
    "a forked child": ("g = fs.compile(f)\nchecked(g, 2)\nsys.stdout.flush()\npid = os.fork()\nchecked(g, 3)\nif pid:\n    assert os.waitpid(pid, 0)[1] == 0", 3),
    "sys.exit inside": ("def h(a, b):\n    out = f(a, b)\n    print('ok')\n    sys.exit(0)\nfs.compile(h)(*leaves(2))", 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_quiet(end):
    text, count = ENDS[end]
    env = {**os.environ, "FIRESTEEL_CACHE_DIR": "", "OMP_NUM_THREADS": "1"}       # in a forked child, eager waits for its threads for ever
    done = subprocess.run([sys.executable, "-c", HEAD + text], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["ok"] * count)


def test_where_no_thread_can_be_started_the_caller_works(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading, "_start_new_thread", refused)
    here = _thread.get_ident()
    assert transaction.side_by_side(lambda n: (n, _thread.get_ident()), [1, 2, 3], 2) == [(n, here) for n in (1, 2, 3)]


def test_an_error_on_one_of_several_threads_is_the_callers():
    def failing(n):
        if n == 2:
            raise RuntimeError("two")
        return n
    with pytest.raises(RuntimeError, match="two"):
        transaction.side_by_side(failing, [1, 2, 3], 2)


def test_threads_that_make_a_native_method_at_once_share_its_definition(monkeypatch):
    """The definition that one of them would throw away is in use: a builtin reads it at every call."""
    monkeypatch.setattr(native_method, "_made", {})
    address = ctypes.cast(ctypes.pythonapi.PyObject_Repr, ctypes.c_void_p).value
    first: list = []

    def compile_text(text, name):
        if not first:       # the other thread comes to its end meanwhile
            first.append(None)
            first[0] = native_method.native_method(name, text, compile_text, 1)
        return address
    native_method.native_method("made_twice", "", compile_text, 2)
    definitions = {ctypes.c_void_p.from_address(id(one) + object.__basicsize__).value for one in first}
    assert definitions == {ctypes.addressof(native_method._made["made_twice"][0])}
    first.clear()       # before its definition goes


def test_threads_that_name_operators_at_once_get_bits_of_their_own(monkeypatch):
    monkeypatch.setattr(node, "_bits", {})
    wait, found = threading.Barrier(8), []

    def name(number):
        wait.wait()
        found.extend(node.bits(f"op{number}_{n}") for n in range(200))
    threads = [threading.Thread(target=name, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 1600
