"""Tests run with every verifier on and without an on-disk cache, unless a test asks for one, and with no record of what changed in an earlier one."""
import pytest

import firesteel.ops
import firesteel.public  # noqa: F401  what a test imports of the compiler finds the rest loaded, as it is where programs run


@pytest.fixture(autouse=True)
def _verifiers_on(tmp_path_factory):
    from firesteel.capture.policy import SHARED
    from firesteel.config import config
    SHARED.clear()
    with config.patch(verify=True, cache_dir=""):
        yield
