"""Host functions recorded as CUDA graphs: on a GPU where there is one, and by a made-up graph without."""
from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.loops.ir import Buffer, Extern, View
from firesteel.runtime import cuda, graphs

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---------------------------------------------------------------- without a GPU

class MadeUpGraph:
    """Runs what was called while it captured, again at each replay, into the same results."""
    capturing, pools = None, []

    def __init__(self, index, stream, pool=None):
        self.pools.append(pool)

    def capture(self, call):
        MadeUpGraph.capturing = self
        try:
            return call()
        finally:
            MadeUpGraph.capturing = None

    def replay(self):
        self.inputs[2].data.add_(self.inputs[0])        # a GPU raises no versions
        self.result.copy_(self.inputs[0] * self.inputs[1])


def host(x, w, cache):
    """y = x * w; cache += x"""
    if MadeUpGraph.capturing is not None:
        MadeUpGraph.capturing.inputs, MadeUpGraph.capturing.result = (x, w, cache), torch.empty_like(x)
        torch.autograd.graph.increment_version(cache)       # as a call that is captured does
        return (MadeUpGraph.capturing.result,)
    host.plain += 1
    cache.add_(x)
    return (x * w,)


def boxed_host(box):
    """y = x * w, w itself and as a column; the inputs are given away."""
    x, w, cache = box
    box.clear()
    return *host(x, w, cache), w, w[:, None]


def program_of(boxed: bool, outputs: tuple) -> SimpleNamespace:
    buffers = {name: Buffer(name, "f32", (3,), (1,), "input", "cuda") for name in "xwc"}
    return SimpleNamespace(program=SimpleNamespace(inputs=("x", "w", "c"), buffers=buffers, steps=[SimpleNamespace(writes=lambda: ("c", "y"))],
                                                   outputs=outputs, boxed=boxed))


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    monkeypatch.setattr(graphs, "CapturedCall", MadeUpGraph)
    monkeypatch.setattr(cuda, "flag", lambda: SimpleNamespace(word=SimpleNamespace(value=0)))
    monkeypatch.setattr(graphs, "on_gpu", lambda x: True)
    stream, host.plain = [7], 0
    made = graphs.Recording(graphs.RecordedFacts.of(program_of(False, (whole("y"),)), (), False), host)
    made.streams = stream
    return made


def whole(buffer):
    return View(buffer, (3,), (1,), 0, "f32")


@pytest.fixture
def lending(recording):
    """The same with a result that is lent, and two that are an input; it takes a list."""
    plan = program_of(True, (whole("y"), whole("w"), View("w", (3, 1), (1, 1), 0, "f32")))
    return graphs.Recording(graphs.RecordedFacts.read(json.loads(json.dumps(graphs.RecordedFacts.of(plan, frozenset({0, 1, 2}), True).words()))), boxed_host)


def lend(lending, x, w, cache):
    box, version = [x, w, cache], cache._version
    y, same, column = lending(box)
    assert not box and torch.equal(y, x * w) and same is w and torch.equal(column, w[:, None]) and column.data_ptr() == w.data_ptr()
    assert cache._version == version + 1
    return y


def check(recording, x, w, cache):
    want, version = cache + x, cache._version
    (y,) = recording(x, w, cache)
    assert torch.equal(y, x * w) and torch.equal(cache, want) and cache._version == version + 1
    return y


def test_what_moves_is_copied_and_what_stays_is_used_where_it_lies(recording):
    w, cache = torch.randn(3), torch.zeros(3)
    kept = [(x, check(recording, x, w, cache)) for x in (torch.randn(3) for _ in range(6))]
    assert host.plain == graphs.WARM_CALLS and recording.recordings == 1 and set(recording.moving) == {0}
    for x, y in kept:
        assert torch.equal(y, x * w)        # a later replay changed none


def test_a_parameter_that_lies_elsewhere_is_recorded_anew(recording):
    w, cache, x = torch.randn(3), torch.zeros(3), torch.randn(3)
    for _ in range(4):
        check(recording, x, w, cache)
    assert recording.recordings == 1 and not recording.moving
    other = torch.randn(3)
    check(recording, x, other, cache)
    assert recording.recordings == 2 and set(recording.moving) == {1}


def test_written_inputs_that_move_are_not_recorded(recording):
    for _ in range(4):
        check(recording, torch.randn(3), torch.randn(3), torch.zeros(3))
    assert recording.graph is None and host.plain == 4


def test_a_written_input_that_lies_elsewhere_for_a_while_is_recorded_anew(recording):
    w, moving = torch.randn(3), [torch.randn(3) for _ in range(2)]
    for text in range(2 * graphs.MOST_RECORDINGS):
        cache, plain = torch.zeros(3), host.plain
        for number in range(graphs.PAYS + 4):
            check(recording, moving[number % 2], w, cache)
        assert recording.graph is not None and recording.recordings == text + 1
        assert host.plain == plain + (1 if text else graphs.WARM_CALLS)


def test_recordings_that_do_not_pay_end(recording):
    w, moving, caches = torch.randn(3), [torch.randn(3) for _ in range(3)], []
    for _ in range(2 * graphs.MOST_RECORDINGS):
        caches.append(torch.zeros(3))       # kept: each lies elsewhere
        for x in moving:
            check(recording, x, w, caches[-1])
    assert recording.graph is None and recording.recordings == graphs.MOST_RECORDINGS


def test_a_program_whose_written_inputs_never_stay_is_left_alone(recording):
    w, caches = torch.randn(3), [torch.zeros(3), torch.zeros(3)]
    for step in range(graphs.MOST_WAITED + 3):
        check(recording, torch.randn(3), w, caches[step % 2])
    assert recording.waited < 0 and not recording.recordings


def test_expanded_inputs_that_move_are_not_recorded(recording):
    w, cache, inputs = torch.randn(3), torch.zeros(3), [torch.randn(1) for _ in range(4)]      # all kept: each has its own address
    for x in inputs:
        check(recording, x.expand(3), w, cache)
    assert recording.graph is None and host.plain == 4


def test_another_stream_runs_the_host_function(recording):
    w, cache, x = torch.randn(3), torch.zeros(3), torch.randn(3)
    for _ in range(4):
        check(recording, x, w, cache)
    before, recording.streams[0] = host.plain, 8
    check(recording, x, w, cache)
    assert host.plain == before + 1


def test_other_settings_of_the_library_run_the_host_function(recording, monkeypatch):
    w, cache, x = torch.randn(3), torch.zeros(3), torch.randn(3)
    for _ in range(4):
        check(recording, x, w, cache)
    before = host.plain
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        check(recording, x, w, cache)
    check(recording, x, w, cache)
    assert host.plain == before + 1


def test_graphs_that_lend_nothing_share_memory_on_one_stream(recording, monkeypatch):
    pools = iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools), raising=False)
    monkeypatch.setattr(graphs, "_shared", functools.cache(lambda index: graphs._Shared()))
    plan = program_of(False, (whole("y"),))
    monkeypatch.setattr(MadeUpGraph, "pools", [])
    w, cache, x, alive = torch.randn(3), torch.zeros(3), torch.randn(3), []
    for stream, shares in ((7, True), (7, True), (8, True), (7, False)):
        alive.append(graphs.Recording(graphs.RecordedFacts.of(plan, (), shares), host))
        recording.streams[0] = stream
        for _ in range(4):
            check(alive[-1], x, w, cache)
    assert MadeUpGraph.pools == [1, 1, None, None]
    alive.clear()
    gc.collect()
    again = graphs.Recording(graphs.RecordedFacts.of(plan, (), True), host)
    for _ in range(4):
        check(again, x, w, cache)
    assert MadeUpGraph.pools[-1] == 2       # nobody held the first pool any more
    assert not graphs.RecordedFacts.of(plan, (0,), True).shares


class CapturingDriver:
    """A driver that captures nothing; `asked` says what it was asked for."""

    def __init__(self):
        self.asked, self.refuses = [], ""

    def call(self, name, *args):
        self.asked.append(name)
        if name == self.refuses:
            raise RuntimeError(f"{name} failed: CUDA driver error 901")
        for out in args:
            if hasattr(out, "_obj"):
                out._obj.value = 7


@pytest.fixture
def capturing(monkeypatch):
    made = CapturingDriver()
    monkeypatch.setattr(cuda, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1), raising=False)
    monkeypatch.setattr(graphs, "_capture_stream", functools.cache(graphs._capture_stream.__wrapped__))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 9, raising=False)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: made.asked.append(name), raising=False)
    return made


def test_a_call_is_captured_replayed_and_let_go(capturing):
    graph = graphs.CapturedCall(0, 7)
    assert graph.capture(lambda: capturing.asked.append("the call") or (1, 2)) == (1, 2)
    graph.replay()
    del graph
    assert capturing.asked == ["_cuda_beginAllocateCurrentThreadToPool", "cuStreamBeginCapture_v2", "the call", "cuStreamEndCapture",
                               "cuGraphInstantiateWithFlags", "cuGraphDestroy", "_cuda_endAllocateToPool", "cuGraphLaunch", "cuGraphExecDestroy",
                               "_cuda_releasePool"]


@pytest.mark.parametrize("failing", ["the call", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_a_capture_that_fails_leaves_nothing_behind(capturing, failing):
    def call():
        capturing.call("the call")
        return ()
    capturing.refuses, graph = failing, graphs.CapturedCall(0, 7)
    with pytest.raises(RuntimeError, match="901"):
        graph.capture(call)
    del graph
    asked = capturing.asked
    assert ("cuStreamBeginCapture_v2" in asked[:-1]) and ("cuStreamEndCapture" in asked) is (failing != "cuStreamBeginCapture_v2")
    assert asked[-2:] == ["_cuda_endAllocateToPool", "_cuda_releasePool"]


def test_a_program_that_cannot_be_captured_is_left_alone(recording, monkeypatch):
    def failing(self, call):
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(MadeUpGraph, "capture", failing)
    w, cache, x = torch.randn(3), torch.zeros(3), torch.randn(3)
    for _ in range(graphs.WARM_CALLS + 2):
        check(recording, x, w, cache)
    assert recording.waited < 0 and host.plain == graphs.WARM_CALLS + 2


def sized_program(steps, each, target="aten.convolution.default", **more):
    """A made-up program of library calls that write `each` bytes."""
    buffers = {f"b{k}": Buffer(f"b{k}", "u8", (each,), (1,), "temp", "cuda") for k in range(steps)}
    call = SimpleNamespace(target=target)
    return SimpleNamespace(program=SimpleNamespace(buffers=buffers, steps=[SimpleNamespace(call=call)] * steps))


@pytest.mark.parametrize("program,why", [
    (sized_program(20, 1 << 20), ""), (sized_program(4, 1 << 20), "few steps"), (sized_program(20, 1 << 25), "longer than their launches"),
    (sized_program(100, 12 << 20), "much memory"), (sized_program(20, 1 << 20, "aten.nonzero.default"), "aten.nonzero")])
def test_what_is_recorded_by_default(program, why):
    found = graphs.default_refusal(program)
    assert why in found and bool(why) == bool(found)


def test_by_default_no_memory_is_lent_to_the_user(recording, monkeypatch):
    monkeypatch.setattr(graphs, "refusal", lambda plan, lent: "")
    monkeypatch.setattr(graphs, "default_refusal", lambda plan: "")
    alone, shown = (program_of(False, outputs) for outputs in ((whole("y"), whole("z")), (whole("y"), whole("y"))))
    assert isinstance(graphs.recorded(alone, host, {0: 2}, True, None), graphs.Recording)
    assert graphs.recorded(shown, host, {0: 2}, True, None) is host and isinstance(graphs.recorded(shown, host, {0: 2}, True), graphs.Recording)
    assert graphs.recorded(alone, host, {0: 2}, False, None) is host        # training


def test_a_lent_result_lies_in_the_graphs_memory(lending):
    w, cache, places, inputs = torch.randn(3), torch.zeros(3), set(), [torch.randn(3) for _ in range(6)]      # all kept: each has its own address
    for x in inputs:
        y = lend(lending, x, w, cache)
        places.add(y.data_ptr())
        assert y._version == 0
        y.add_(1)
        del y
    assert lending.replays == 4 and host.plain == graphs.WARM_CALLS and lending.results[0].data_ptr() in places


def test_what_is_lent_and_in_use_is_not_overwritten(lending):
    w, cache, kept = torch.randn(3), torch.zeros(3), []
    for x in [torch.randn(3) for _ in range(6)]:
        kept.append((x, lend(lending, x, w, cache)[1:]))        # a view holds it too
    assert lending.replays == 1
    for x, y in kept:
        assert torch.equal(y, (x * w)[1:])
    kept.clear()
    lend(lending, x, w, cache)
    assert lending.replays == 2


def test_inputs_that_lie_elsewhere_for_a_call_leave_the_graph(lending):
    x, w, caches = torch.randn(3), torch.randn(3), [torch.zeros(3), torch.zeros(3)]
    for _ in range(4):
        lend(lending, x, w, caches[0])
    for _ in range(graphs.MOST_WAITED + 3):
        lend(lending, x, w, caches[1])
        lend(lending, x, w, caches[0])
    assert lending.recordings == 1 and lending.replays == 2 + graphs.MOST_WAITED + 3


def test_results_that_share_memory_are_lent_together():
    plan = program_of(True, (whole("y"), None, whole("z"), View("y", (1,), (1,), 0, "f32")))
    assert graphs._with_aliases(plan, [3]) == {0, 3}


@pytest.mark.parametrize("dropout,nothing", [((), True), ((0.0,), True), ((0.1,), False)])
def test_attention_thatdrops_nothing_is_not_random(dropout, nothing):
    tensors = [View(name, (2, 4, 8, 64), (2048, 512, 64, 1), 0, "bf16") for name in "qkv"]
    target = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    assert graphs.drops_nothing(Extern("attention", ("y",), target, (*tensors, None, False, *dropout))) is nothing
    assert not graphs.drops_nothing(Extern("draw", ("y",), torch.ops.aten.rand_like.default, tuple(tensors[:1])))


# ---------------------------------------------------------------- on a GPU

class Step(torch.nn.Module):
    """One token against a cache that is written in place."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x, at, keys, values):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys.index_copy_(1, at, k)
        values.index_copy_(1, at, v)
        seen = (torch.arange(keys.shape[1], device=x.device) <= at)[None]
        return self.out(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)).relu()


@gpu_only
def test_decoding_with_a_cache_equals_eager():
    fs.reset()
    torch.manual_seed(0)
    model = Step().cuda()
    ours, theirs = ([torch.zeros(2, 16, 64, device="cuda") for _ in range(2)] for _ in range(2))
    compiled = fs.compile(model, mode="reduce-overhead", fullgraph=True)
    kept = []
    with torch.no_grad():
        for step in range(8):
            x, at = torch.randn(2, 1, 64, device="cuda"), torch.tensor([step], device="cuda")
            got, want = compiled(x, at, *ours), model(x, at, *theirs)
            kept.append((got, want))
            assert [c._version for c in ours] == [c._version for c in theirs]
    assert fs.counters["native"]["replays"] >= 5 and fs.counters["native"]["recorded_graphs"] == 1
    for got, want in (*kept, *zip(ours, theirs)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@gpu_only
def test_random_numbers_are_not_recorded():
    fs.reset()
    compiled = fs.compile(lambda x: F.dropout(x, 0.5), mode="reduce-overhead")
    x = torch.ones(1000, device="cuda")
    results = [compiled(x) for _ in range(5)]
    assert not fs.counters["native"]["replays"] and not torch.equal(results[-1], results[-2])


def layers(width=8, depth=3):
    """Enough steps to be recorded; normalisation writes its statistics."""
    parts = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.GELU())]
    return torch.nn.Sequential(*parts, torch.nn.Linear(width, width)).cuda()


def twins():
    torch.manual_seed(0)
    ours = layers()
    theirs = copy.deepcopy(ours)
    return ours, theirs, fs.compile(ours, mode="reduce-overhead")


def same(ours, theirs):
    for a, b in zip((*ours.parameters(), *ours.buffers()), (*theirs.parameters(), *theirs.buffers())):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def replayed():
    return fs.counters["native"]["replays"]


@gpu_only
@pytest.mark.parametrize("to_none", [True, False])
def test_training_in_this_mode_equals_eager(to_none):
    fs.reset()
    ours, theirs, compiled = twins()
    optimisers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in (ours, theirs)]
    outs = []
    for _ in range(12):
        x = torch.randn(4, 8, device="cuda")
        for fn, optimiser in zip((compiled, theirs), optimisers):
            optimiser.zero_grad(set_to_none=to_none)
            out = fn(x)
            outs.append(out.detach())
            out.square().sum().backward()
            optimiser.step()
        same(ours, theirs)
    for got, want in zip(outs[::2], outs[1::2]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert replayed() >= (12 if to_none else 6), replayed()


@gpu_only
def test_two_forwards_before_their_backwards_keep_what_each_saved():
    fs.reset()
    ours, theirs, compiled = twins()
    for _ in range(8):
        batches = [torch.randn(4, 8, device="cuda") for _ in range(2)]
        for model, fn in ((ours, compiled), (theirs, theirs)):
            model.zero_grad()
            first, second = [fn(x).square().sum() for x in batches]
            second.backward()
            first.backward(retain_graph=True)
            first.backward()
        same(ours, theirs)
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], rtol=1e-3, atol=1e-3)
    assert replayed()


@gpu_only
def test_gradients_that_are_kept_stay_what_they_are():
    fs.reset()
    ours, theirs, compiled = twins()
    kept = []
    for _ in range(8):
        x = torch.randn(4, 8, device="cuda")
        for model, fn in ((ours, compiled), (theirs, theirs)):
            model.zero_grad()
            fn(x).square().sum().backward()
            kept.append([p.grad for p in model.parameters()])
    for got, want in zip(kept[::2], kept[1::2]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@gpu_only
@pytest.mark.parametrize("training", [True, False])
def test_inference_of_many_small_steps_is_recorded_by_default(training):
    fs.reset()
    torch.manual_seed(0)
    ours = layers(depth=8).train(training)
    theirs, compiled, kept = copy.deepcopy(ours), fs.compile(ours), []
    before = [b._version for model in (ours, theirs) for b in model.buffers()]
    for step in range(12):
        x = torch.randn(4, 8, device="cuda")
        with torch.inference_mode() if step % 3 == 1 else torch.no_grad():
            kept.append((compiled(x), theirs(x)))
        same(ours, theirs)
    raised = [b._version - old for b, old in zip((b for model in (ours, theirs) for b in model.buffers()), before)]
    assert raised[:len(raised) // 2] == raised[len(raised) // 2:]
    for got, want in kept:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert replayed()
    count = replayed()
    off = fs.compile(theirs, options={"triton.cudagraphs": False})
    with torch.no_grad():
        for _ in range(5):
            off(x)
    assert replayed() == count


@gpu_only
def test_random_numbers_are_drawn_behind_a_capture_that_failed():
    fs.reset()

    @torch.library.custom_op("firesteel_tests::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item() == x.sum().item())

    @waits.register_fake
    def _(x):
        return torch.empty_like(x)
    compiled = fs.compile(lambda x, w: waits(waits(x @ w) @ w) @ w, mode="reduce-overhead")
    w = torch.eye(8, device="cuda")
    for _ in range(5):
        x = torch.randn(4, 8, device="cuda")
        torch.testing.assert_close(compiled(x, w), x)
    assert not replayed()


@gpu_only
def test_other_threads_draw_random_numbers_while_a_call_is_captured():
    fs.reset()
    ours, ends, failed = layers(), threading.Event(), []

    def draw():
        try:
            while not ends.is_set():
                torch.randn(16, device="cuda")
        except RuntimeError as error:
            failed.append(error)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(4):
            compiled = fs.compile(copy.deepcopy(ours), mode="reduce-overhead")
            with torch.no_grad():
                for _ in range(5):
                    compiled(torch.ones(4, 8, device="cuda"))
    finally:
        ends.set()
        thread.join()
    assert not failed and replayed()
