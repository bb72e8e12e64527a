"""Tests run with every verifier on and without an on-disk cache, unless a test asks for one."""
import pytest


@pytest.fixture(autouse=True)
def _verifiers_on(tmp_path_factory):
    from firesteel.config import config
    with config.patch(verify=True, cache_dir=""):
        yield
