"""Sweeps of few rows are spread over the cores: what is taken apart, and that the meaning stays."""
from dataclasses import replace
from textwrap import dedent

import interp
import pytest
import torch
import torch.nn.functional as F
from traced import check, nests, text

import firesteel as fs
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Program, Reduce, Store, View, acc, load
from firesteel.loops.scalars import S
from firesteel.loops.spread import spread
from firesteel.loops.verify import verify_program
from firesteel.sym.expr import make, row_major

BATCH = torch.randn(32, 20, 32, 32).to(memory_format=torch.channels_last)


def test_a_sum_over_all_but_channels():
    assert text(check(lambda x: x.sum((0, 2, 3)), BATCH)) == dedent("""
        nest sum_1_1 [r0 < 32, i1 < 20]
          reduce [r2 < 32, r3 < 32]
            a0 = sum(load(arg0_1, r0, i1, r2, r3))
          map []
            sum_1_a0_parts[r0, i1] = acc(a0)
        nest sum_1 [i1 < 20]
          reduce [r0 < 32]
            a0 = sum(float(load(sum_1_a0_parts, r0, i1)))
          map []
            sum_1[i1] = to(acc(a0))
        return sum_1""").strip()


def test_a_long_axis_is_cut():
    assert text(check(lambda x: x.amax(0), torch.randn(65536, 8))) == dedent("""
        nest amax_1 [r0_part < 64, i1 < 8]
          reduce [r0 < 1024]
            a0 = max(load(arg0_1, r0 + 1024*r0_part, i1))
          map []
            amax_a0_parts[r0_part, i1] = acc(a0)
        nest amax [i1 < 8]
          reduce [r0_part < 64]
            a0 = max(load(amax_a0_parts, r0_part, i1))
          map []
            amax[i1] = acc(a0)
        return amax""").strip()


def normalised(x):
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + 1e-5)).relu(), mean


SPREAD = {
    "moments": (lambda x: torch.var_mean(x, (0, 2, 3)), BATCH, 4),
    "normalised": (normalised, BATCH, 5),
    "beside what is stored": (lambda x: ((y := x.exp()), y.sum((0, 2, 3))), BATCH, 3),
    "softmax of columns": (lambda x: torch.softmax(x, 0), torch.randn(65536, 8), 5),
    "argmax": (lambda x: x.argmax(0), torch.randn(65536, 8), 4),
    "bool": (lambda x: (x > 3.5).any(0), torch.randn(65536, 8), 2),
    "bfloat16": (lambda x: x.sum(0), torch.randn(65536, 8).bfloat16(), 2),
    "integers": (lambda x: x.sum(0), torch.arange(65536 * 8).view(65536, 8), 2),
    "few planes": (lambda x: x.sum((0, 2)), torch.randn(16, 3, 16384), 2),
}


@pytest.mark.parametrize("name", SPREAD)
def test_meaning_stays(name):
    function, x, count = SPREAD[name]
    assert len(nests(check(function, x))) == count


LEFT = {
    "many rows": (lambda x: x.sum(1), torch.randn(64, 16384)),
    "little work": (lambda x: x.sum((0, 2, 3)), torch.randn(32, 8, 16, 16).to(memory_format=torch.channels_last)),
    "no factor": (lambda x: x.sum(0), torch.randn(65537, 8)),
    "scan": (lambda x: x.cumsum(0), torch.randn(65536, 8)),
    "one number": (lambda x: x.sum(), torch.randn(65536, 8)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name):
    function, x = LEFT[name]
    assert len(nests(check(function, x))) == 1


def test_results_do_not_depend_on_threads():
    compiled = fs.compile(lambda x: (F.batch_norm(x, None, None, training=True).relu(), x.sum((0, 2, 3)), x.logsumexp((0, 2, 3))))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(compiled(BATCH))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_sweep_that_stores_and_one_that_reads_it():
    """By hand: fusion leaves it to larger programs."""
    shape = (32, 8, 4096)
    x, y, s = (Buffer(name, "f32", size, row_major(size), kind) for name, size, kind in
               (("x", shape, "input"), ("y", shape, "output"), ("s", (8,), "output")))
    c, n, k, n2, k2 = (Axis(name, size) for name, size in (("c", 8), ("n", 32), ("k", 4096), ("n2", 32), ("k2", 4096)))
    first, second = (Reduce(name, "sum", value, "f32") for name, value in (
        ("a", load(x, (n.value, c.value, k.value))), ("b", S.mul(load(y, (n2.value, c.value, k2.value)), make("acc", "f32", (), "a")))))
    nest = Nest("s", (c,), (
        Phase("reduce", (n, k), (first,), (Store("y", (n.value, c.value, k.value), S.neg(load(x, (n.value, c.value, k.value)))),)),
        Phase("reduce", (n2, k2), (second,)), Phase("map", (), (), (Store("s", (c.value,), S.add(acc(first), acc(second))),))))
    views = tuple(View(b.name, b.shape, b.strides, 0, "f32") for b in (y, s))
    program = Program({b.name: b for b in (x, y, s)}, (nest,), ("x",), views, {})
    verify_program(program)
    apart = spread(replace(program, buffers={**program.buffers, "x": replace(x, strides=(8 * 4096, 1, 8))}))
    verify_program(apart)
    assert len(apart.steps) == 4
    given = torch.randn(32, 4096, 8).transpose(1, 2)
    torch.testing.assert_close(interp.run(apart, [given]), interp.run(program, [given.contiguous()]), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("shape,dims", [((65536, 8), (0,)), ((64, 8, 128, 128), (0, 2, 3))])
def test_sums_of_parts_are_accurate(shape, dims):
    x = torch.randn(shape) + 1e7
    exact = x.double().sum(dims)
    assert ((fs.compile(lambda x: x.sum(dims))(x).double() - exact) / exact).abs().max() <= 2 ** -23
