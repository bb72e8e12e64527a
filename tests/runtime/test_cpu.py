"""The JIT: one text is compiled once, object code survives in the disk cache, threads may compile at the same time."""
from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import os
import platform
import subprocess
import sys
import time

import pytest
import torch
from native_nests import contiguous, pointwise

import firesteel as fs
from firesteel.artifacts import counters
from firesteel.codegen.llvm import print_nest
from firesteel.config import config
from firesteel.loops.scalars import S
from firesteel.runtime import cpu, diskcache, threads


def kernel(constant: float):
    return print_nest(*pointwise(lambda v: S.add(v, constant), contiguous("y", (40,)), contiguous("x", (40,))))


def run(address: int, *tensors: torch.Tensor) -> None:
    error = ctypes.c_int64(0)
    words = (ctypes.c_int64 * (len(tensors) + 1))(*(t.data_ptr() for t in tensors), ctypes.addressof(error))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(words))


def test_equal_text_is_compiled_once():
    first = kernel(101.5)
    cpu.jit()
    before = counters["native"]["compiled"]
    a, b = cpu.load([first, first])
    (c,) = cpu.load([kernel(101.5)])
    assert a == b == c and counters["native"]["compiled"] == before + 1


def test_many_kernels_at_once_keep_their_order():
    addresses = cpu.load([kernel(float(200 + i)) for i in range(6)])
    x = torch.zeros(40)
    for i, address in enumerate(addresses):
        y = torch.empty(40)
        run(address, x, y)
        assert torch.equal(y, torch.full((40,), 200.0 + i))


def test_nothing_to_load():
    assert cpu.load([]) == []


def test_compiling_from_several_threads():
    def work(i):
        return cpu.load([kernel(300.0 + i % 3)])[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        addresses = list(pool.map(work, range(9)))
    assert len(set(addresses)) == 3
    for i, address in enumerate(addresses):
        y = torch.empty(40)
        run(address, torch.zeros(40), y)
        assert y[0] == 300.0 + i % 3


def test_text_of_others():
    text = "define i64 @twice(i64 %x) {\n  %y = add i64 %x, %x\n  ret i64 %y\n}\n"
    address = cpu.compile_text(text, "twice")
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(21) == 42
    assert cpu.compile_text(text, "twice") == address


def test_wrong_text_is_an_error_and_leaves_the_engine_whole():
    with pytest.raises(RuntimeError):
        cpu.compile_text("define nonsense", "nonsense")
    assert cpu.load([kernel(400.0)])


PROCESS = """
import sys
import time
sys.path.insert(0, sys.argv[1])
import torch
from native_nests import Runner, softmax
import firesteel as fs
from firesteel.artifacts import counters
r = Runner(*softmax(33, 70))
x, y = torch.randn(33, 70), torch.empty(33, 70)
r({"x": x, "y": y})
torch.testing.assert_close(y, torch.softmax(x, 1))
print(counters["native"]["compiled"], counters["native"]["cache_hits"])
"""


def in_a_process(folder, helpers) -> list[int]:
    import os
    done = subprocess.run([sys.executable, "-c", PROCESS, helpers], env={**os.environ, "FIRESTEEL_CACHE_DIR": str(folder)},
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


def test_a_second_process_compiles_nothing(tmp_path):
    helpers = next(p for p in sys.path if p.endswith("tests/codegen"))
    assert in_a_process(tmp_path, helpers) == [2, 0]        # the kernel and fs_launch
    assert in_a_process(tmp_path, helpers) == [0, 2]
    for path in tmp_path.rglob("*.o"):
        path.write_bytes(path.read_bytes()[:100])           # a crash, or a full disk
    assert in_a_process(tmp_path, helpers) == [2, 0]


@pytest.mark.parametrize("content", [b"", b"no object code", bytes(5000), b"another function"])
def test_code_in_the_cache_that_does_not_fit_is_made_again(tmp_path, content):
    wanted = kernel(600.0 + len(content))
    if content == b"another function":
        content = cpu.jit()._compile("define void @somebody() {\n  ret void\n}\n")
    with config.patch(cache_dir=str(tmp_path)):
        diskcache.kernels().put(cpu._key(wanted.text), content)
        (address,) = cpu.load([wanted])
        assert diskcache.kernels().get(cpu._key(wanted.text)) not in (None, content)
    y = torch.empty(40)
    run(address, torch.zeros(40), y)
    assert y[0] >= 600.0


def test_the_key_has_the_settings_that_change_code():
    before = cpu._key("text")
    with config.patch(eager_rounding=not config.eager_rounding):
        assert cpu._key("text") != before
    assert cpu._key("text") == before and cpu._key("other") != before


def chunks(work: int, total: int = 1000) -> int:
    """In how many slices fs_launch runs so much work; checks that they cover everything once."""
    seen = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(
        lambda args, begin, end, chunk, extra: seen.append((begin, end, chunk)))
    launch = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(cpu.jit().imports["fs_launch"])
    count = launch(ctypes.cast(body, ctypes.c_void_p), None, total, work, None)
    seen.sort()
    assert [c for _, _, c in seen] == list(range(count))
    assert [b for b, _, _ in seen] == [0, *(e for _, e, _ in seen)][:len(seen)] and (not seen or seen[-1][1] == total)
    return count


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_are_those_of_torch(torch_threads):
    for count in (1, 2, 3):
        torch_threads(count)
        assert chunks(10**9) == count


def test_the_setting_overrides_the_number_of_threads(torch_threads):
    torch_threads(2)
    with config.patch(cpu_threads=1):
        assert chunks(10**9) == 1
    with config.patch(cpu_threads=3):
        assert chunks(10**9) == 3
    assert chunks(10**9) == 2


def test_slices_are_worth_their_threads(torch_threads):
    torch_threads(3)
    assert chunks(threads.GRAIN) == 1
    assert chunks(2 * threads.GRAIN) == 2
    assert chunks(10**9, total=2) == 2
    assert chunks(10**9, total=0) == 0


FAR_APART = """
import ctypes
import gc
from firesteel.runtime import cpu

PAGE, FAR = 4096, 8 << 30
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(size):
    return libc.mmap(None, size, 0, 0x4022, -1, 0)      # no access, private, anonymous, takes no memory

cpu.jit()
base = reserve(FAR)
while reserve(PAGE) > base:     # no hole is left above
    pass
for hole in range(200):         # but holes of a page: constants fit, code does not
    libc.munmap(base + FAR - 2 * (hole + 1) * PAGE, PAGE)
stores = "store volatile i64 %x, ptr %slot\\n" * 2000
text = "@c = private constant [2 x i64] [i64 5, i64 7]\\ndefine i64 @f(i64 %x) {\\n%slot = alloca i64\\n" + stores
text += "%at = getelementptr i64, ptr @c, i64 %x\\n%v = load i64, ptr %at\\nret i64 %v\\n}\\n"
address = cpu.compile_text(text, "f")
assert address < base
print(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lays out memory as Linux does")
def test_constants_may_be_far_from_the_code():
    """In a process full of libraries they are; a distance of 2 GB must not end it."""
    done = subprocess.run([sys.executable, "-c", FAR_APART], capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def test_reset_gives_code_back_that_nobody_holds():
    def scaled(x):
        return torch.softmax(x * 1.25, -1)
    x = torch.randn(4, 40)
    expected, engine = scaled(x), cpu.jit()
    fs.compile(scaled)(x)       # and what is made once in a process
    fs.reset()
    gc.collect()
    fs.reset()
    before = set(engine.loaded)     # what other tests in this process still hold; some of it may go meanwhile
    for _ in range(3):
        compiled = fs.compile(scaled)
        torch.testing.assert_close(compiled(x), expected)
        assert set(engine.loaded) - before
        fs.reset()
        gc.collect()
        fs.reset()
        assert not set(engine.loaded) - before
        torch.testing.assert_close(compiled(x), expected)       # compiled again


def test_code_that_is_held_outlives_a_reset():
    w = torch.randn(40, requires_grad=True)
    out = fs.compile(lambda w: torch.sin(w).exp())(w)
    backward = out.grad_fn
    (address,) = cpu.load([kernel(500.5)])
    fs.reset()
    gc.collect()
    cpu.load([kernel(501.5)])       # unloads what is dead
    y = torch.empty(40)
    run(address, torch.zeros(40), y)
    assert y[0] == 500.5 and backward is not None
    out.sum().backward()
    torch.testing.assert_close(w.grad, torch.cos(w.detach()) * out.detach())


FREED = """
import ctypes
import resource
import torch
import firesteel as fs

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
held = []

def from_system():
    '''Is a block of 24 MB one that goes back to the system when it is freed?'''
    before = libc.mallinfo2().hblkhd
    held.append(torch.empty(6 << 20))       # not freed here: glibc would learn from it
    return libc.mallinfo2().hblkhd > before

def faults():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    [torch.empty(3 << 20).fill_(1.0) for _ in range(3)]     # 36 MB, freed at once
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

before = from_system()
fs.compile(torch.sin)(torch.ones(3))
print(before, from_system(), min(faults() for _ in range(6)) < 100)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="other C libraries have other rules")
def test_freed_memory_is_kept_for_the_next_call():
    """The system clears each page that it gives out again, which took longer than the kernels that wrote them.  Where the environment decides, it does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    for decided, answers in {"": "True False True", "MALLOC_MMAP_THRESHOLD_": "True True False"}.items():
        run_with = environment | ({decided: "131072"} if decided else {})
        done = subprocess.run([sys.executable, "-c", FREED], env=run_with, capture_output=True, text=True)
        assert done.stdout.split() == answers.split(), (decided, done.stdout, done.stderr)


def test_the_end_of_a_compiling_thread_frees_nothing_of_llvm(monkeypatch):
    """Freeing is Python code, which may meet the end of the process there."""
    from llvmlite.binding import targets
    cpu.jit()       # has a machine of its own, which it frees
    closed = []
    monkeypatch.setattr(targets.TargetMachine, "_dispose", lambda self: closed.append(self))
    cpu.load([kernel(311.25), kernel(312.25), kernel(313.25)])
    time.sleep(0.2)         # for the thread's end; a failure that comes later is not seen
    assert not closed and cpu.jit().machines
