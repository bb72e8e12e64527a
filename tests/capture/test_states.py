"""States of torch (grad mode, autocast, inference mode, random numbers) around breaks: values, dtypes and requires_grad as in eager, and
nothing left behind."""
import pytest
import torch
from harness import capture

import firesteel as fs

LAYER = torch.nn.Linear(4, 4)


def stop():
    print(end="")


def nested_modes(x):
    with torch.no_grad():
        y = LAYER(x)
        stop()
        with torch.enable_grad():
            z = LAYER(y)
            stop()
            w = z * 2
    return w, y, w[0], z.t()


def raised_inside_autocast(x):
    try:
        with torch.autocast("cpu"):
            y = LAYER(x)
            stop()
            raise ValueError("x")
    except ValueError:
        y = LAYER(x)
    finally:
        stop()
    return y


def set_for_good(x):
    torch.set_grad_enabled(False)
    y = LAYER(x)
    stop()
    torch.set_grad_enabled(True)
    return LAYER(y)


@torch.no_grad()
def decorated(x):
    y = LAYER(x)
    stop()
    return LAYER(y)


def inference(x):
    with torch.inference_mode():
        y = LAYER(x)
        stop()
        z = LAYER(y)
    return z.clone()


def switched_in_a_loop(x):
    for i in range(3):
        with torch.autocast("cpu", enabled=i % 2 == 0):
            x = LAYER(x).float()
            stop()
    return x


def forked_random_numbers(x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = torch.rand(4)
        stop()
        z = torch.rand(4)
    return x * y * z + torch.rand(4)


PROGRAMS = (nested_modes, raised_inside_autocast, set_for_good, decorated, inference, switched_in_a_loop, forked_random_numbers)


def facts(results):
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(sum(r.sum() for r in results if r.requires_grad), LAYER.weight, allow_unused=True) if any(
        r.requires_grad for r in results) else ()
    return results, [(r.dtype, r.requires_grad, r.is_inference()) for r in results], gradients


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_eager(program, backend):
    fs.reset()
    compiled = fs.compile(program, backend=backend)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        torch.manual_seed(5)
        want = facts(program(x))
        torch.manual_seed(5)
        got = facts(compiled(x))
        assert got[1] == want[1]
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2], want[2])
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_parameters_that_change_between_calls_are_cast_anew(backend):
    layer = torch.nn.Linear(4, 4)

    def f(x):
        with torch.autocast("cpu"):
            return layer(x)

    fs.reset()
    compiled, x, seen = fs.compile(f, backend=backend), torch.ones(2, 4), []
    for _ in range(3):
        seen.append(compiled(x).sum().item())
        with torch.no_grad():
            layer.weight.add_(1.0)
    assert len(set(seen)) == 3


# -- states that a program asks for ---------------------------------------------------------------------------------------
ASKED = {
    "anomaly": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, True, False),
    "threads": (torch.get_num_threads, torch.set_num_threads, 1, torch.get_num_threads()),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high", "highest"),
    "casting to": (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16),
    "cast weights kept": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False, True),
    "cudnn": (lambda: torch.backends.cudnn.enabled, torch._C._set_cudnn_enabled, False, True),
    "tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, torch._C._set_cublas_allow_tf32, True, False),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, True, False),
    "threads of backward": (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled, False, True),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_program_asks_for_is_guarded(name):
    ask, change, other, usual = ASKED[name]
    compiled, backend = capture(lambda x: (x + 1, ask()), fullgraph=True)
    try:
        for value in (usual, other, usual):
            change(value)
            assert compiled(torch.ones(2))[1] == value
    finally:
        change(usual)
    assert len(backend.graphs) <= 2


def test_an_answer_that_the_program_itself_has_changed():
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch._C._is_any_autocast_enabled()
            return x + 1, inside, torch.is_autocast_cpu_enabled()
    compiled, _ = capture(f, fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(2))[1:] == (True, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.ones(2))[1:] == (True, True)


def test_a_profiler_that_is_on_is_seen():
    compiled, _ = capture(lambda x: x + (1 if torch.autograd._profiler_enabled() else 2), fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2
    with torch.autograd.profiler.profile():
        assert compiled(torch.zeros(1)).item() == 1


def test_a_state_alone_is_no_graph():
    def f(x):
        with torch.no_grad():
            fs.graph_break()
            with torch.enable_grad():
                y = x * 2
                fs.graph_break()
                z = y + torch.is_grad_enabled()
        return z, torch.is_grad_enabled()
    compiled, backend = capture(f)
    x = torch.ones(2, requires_grad=True)
    assert compiled(x)[0].requires_grad and compiled(x)[1]
    assert len(backend.graphs) == 2


@pytest.mark.skipif(torch.backends.cudnn.is_available(), reason="there the flags decide what library calls do")
def test_flags_of_cudnn():
    flags = torch.backends.cudnn

    def f(x):
        with flags.flags(enabled=not flags.enabled, deterministic=True):
            y = x.sin() * (2 if flags.enabled else 3) * (5 if flags.deterministic else 7)
        return y * (2 if flags.enabled else 3)
    before = flags.enabled, flags.deterministic, flags.benchmark, flags.allow_tf32
    compiled, backend = capture(f, fullgraph=True)
    x = torch.ones(2)
    torch.testing.assert_close(compiled(x), f(x))
    with flags.flags(enabled=not before[0]):
        torch.testing.assert_close(compiled(x), f(x))
    assert len(backend.graphs) == 2 and (flags.enabled, flags.deterministic, flags.benchmark, flags.allow_tf32) == before
