"""Machine code reads what Python's methods say of a tensor, and knows when tensors lie apart."""
import ctypes

import numpy as np
import pytest
import torch

from firesteel import native_tensors
from firesteel.native_method import native_method
from firesteel.runtime import cpu

PROBE = native_tensors.ADDRESS_OF + """
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyErr_Occurred()

define ptr @firesteel_probe(ptr %self, ptr %objects, i64 %count) {
  %words = call ptr @PyLong_AsVoidPtr(ptr %self)
  %object = load ptr, ptr %objects
  %value = call i64 @firesteel_address(ptr %words, ptr %object)
  %raised = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %raised, null
  br i1 %fine, label %give, label %raise
give:
  %result = call ptr @PyLong_FromLongLong(i64 %value)
  ret ptr %result
raise:
  ret ptr null
}
"""


class Mine(torch.Tensor):
    pass


class Elsewhere(torch.Tensor):
    def data_ptr(self):
        return 12345


@pytest.fixture(autouse=True, scope="module")
def _compiler():
    cpu.jit()


@pytest.fixture(params=["read", "asked"])
def address(request):
    """Where torch's functions read tensors, and where only their methods do."""
    words = native_tensors.words() if request.param == "read" else (ctypes.c_int64 * 8)(native_tensors.words()[0], 0, 0, native_tensors.words()[3])
    probe = native_method("firesteel_probe", PROBE, cpu.compile_text, ctypes.addressof(words))
    return lambda value: (probe(value), words)[0]


def test_addresses(address):
    base = torch.randn(4, 5)
    for tensor in (base, base[2:, 1], torch.nn.Parameter(base), base.double(), torch.empty(0), torch.empty(3, device="meta"), base.as_subclass(Mine)):
        assert address(tensor) == tensor.data_ptr()
    assert address(base.as_subclass(Elsewhere)) == 12345
    assert [address(n) for n in (0, 7, -1, 2**62, True)] == [0, 7, -1, 2**62, 1]


def test_errors_are_raised(address):
    with pytest.raises(OverflowError):
        address(2**70)
    with pytest.raises(TypeError):
        address("a")


def apart():
    made = native_tensors.apart(64)
    assert made is not None
    return made


def test_tensors_that_lie_apart():
    check, tensors = apart(), [torch.randn(n) for n in range(20)]
    assert check(*tensors) and check(*tensors) and check(*tensors[::-1]) and check(*tensors[:3], 5, None, "a", 2.5) and check()
    assert not check(*tensors, tensors[3]) and not check(tensors[4], *tensors)
    assert check(*tensors)
    tensors[7] = tensors[2].view(1, -1)
    assert not check(*tensors)
    assert check(torch.empty(0), torch.empty(0), torch.nn.Parameter(torch.ones(2)))


def test_no_is_said_where_it_is_not_known():
    check, base = apart(), torch.randn(4, 4)
    assert not check(base[1:], torch.randn(3))                  # it begins inside of its storage
    assert not check(base.to_sparse(), torch.randn(3)) and not check(base.as_subclass(Mine))
    assert not check(*[torch.ones(1) for _ in range(65)])       # more than there is room for


def test_memory_that_is_not_torchs_may_have_two_storages():
    array = np.zeros(10, dtype=np.float32)
    check, left, right = apart(), torch.from_numpy(array[:5]), torch.from_numpy(array[5:])
    assert check(left, right) and check(right, left)
    assert not check(left, torch.from_numpy(array[4:])) and not check(torch.from_numpy(array), right)


def test_memory_that_moves_is_seen():
    check, a, b = apart(), torch.randn(8), torch.randn(8)
    assert check(a, b)
    b.set_(a.untyped_storage(), 0, (8,), (1,))
    assert not check(a, b)
    b.set_(torch.randn(8).untyped_storage(), 0, (8,), (1,))
    assert check(a, b)


@pytest.fixture(params=["read", "asked"])
def unchanged(request, monkeypatch):
    """With machine code, and without."""
    if request.param == "asked":
        monkeypatch.setattr(native_tensors, "_has_counters", lambda: False)
    else:
        assert native_tensors._has_counters()
    return native_tensors.unchanged


def test_tensors_are_as_they_were(unchanged):
    a, b, c = torch.randn(3, 4), torch.nn.Parameter(torch.randn(5)), torch.randn(6)
    same = unchanged([a, b, c])
    assert same(a, b, c) and not same(a, b) and not same(b, a, c) and not same(a, b, c, c)
    assert not same(a.clone(), b, c)
    for write in (lambda: a.add_(0), lambda: a[0].zero_(), lambda: a.set_(torch.randn(3, 4)), lambda: b.detach().mul_(2)):
        same = unchanged([a, b, c])
        with torch.no_grad():
            write()
        assert not same(a, b, c)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_another_memory_is_seen_wherever_it_lies(unchanged, times):
    a = torch.nn.Parameter(torch.randn(300))
    same = unchanged([a])
    for _ in range(times):
        a.data = a.data * 2
    assert not same(a)


def test_another_tensor_in_the_same_memory_is_another(unchanged):
    """It counts its own writes: as many as the first had."""
    a = torch.nn.Parameter(torch.randn(30))
    with torch.no_grad():
        a.mul_(2)
    same = unchanged([a])
    b = torch.nn.Parameter(a.data)
    del a
    with torch.no_grad():
        b.mul_(2)
    assert b._version == 1 and not same(b)


def test_statistics_are_compared_themselves(unchanged):
    """Eager writes them without a version."""
    norm = torch.nn.BatchNorm2d(3)
    same = unchanged([norm.running_mean, norm.running_var])
    version = norm.running_mean._version
    norm(torch.randn(2, 3, 4, 4))
    assert norm.running_mean._version == version and not same(norm.running_mean, norm.running_var)
    norm.running_var[0] = torch.nan
    scalar = torch.tensor(2.0)
    same = unchanged([norm.running_var, scalar])
    assert same(norm.running_var, scalar)       # NaN for NaN
    scalar.data.fill_(3)
    assert not same(norm.running_var, scalar)


def test_of_what_inference_mode_made_nothing_is_said(unchanged):
    with torch.inference_mode():
        a = torch.randn(3)
    assert not unchanged([a])(a)
    b = torch.randn(3)
    with torch.inference_mode():
        same = unchanged([b])
        assert same(b)
        b.add_(1)
    assert not same(b)
