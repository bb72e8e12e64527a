"""Tests run with every verifier on and without an on-disk cache, unless a test asks for one, and with no record of what changed in an earlier one.
What a file or a test draws is the same in every run: a test that compares two ways of rounding must not depend on the draw."""
import random

import pytest
import torch

import firesteel.ops
import firesteel.public  # noqa: F401  what a test imports of the compiler finds the rest loaded, as it is where programs run


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    if isinstance(collector, pytest.Module):
        seed()      # weights that are made where a file is imported
    return (yield)


@pytest.fixture(autouse=True)
def _verifiers_on(tmp_path_factory):
    from firesteel.capture.policy import SHARED
    from firesteel.config import config
    SHARED.clear()
    seed()
    with config.patch(verify=True, cache_dir=""):
        yield


@pytest.fixture
def cache(tmp_path):
    """A program cache of the test's own, as a new process finds one: its folder."""
    import firesteel as fs
    from firesteel import programcache
    programcache.versions.cache_clear()
    with fs.config.patch(verify=False, cache_dir=str(tmp_path / "cache")):
        fs.reset()
        yield tmp_path / "cache"
    programcache.versions.cache_clear()
    fs.reset()


@pytest.fixture
def library_products(monkeypatch):
    """Products are library calls, however small."""
    from firesteel.ops import matmul
    monkeypatch.setattr(matmul, "is_small_product", lambda *_: False)
