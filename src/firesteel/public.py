"""The public names that need the compiler; `__init__.py` loads this when the first of them is used."""
from firesteel import testing  # noqa: F401
from firesteel.api import (  # noqa: F401
    checkpoint_budget,
    compile,
    compiled_autograd,
    disable_compiled_autograd,
    explain,
    memory_report,
    reset,
    set_stance,
)
from firesteel.autograd import aot  # noqa: F401
from firesteel.autograd.engine import in_compiled_autograd_region  # noqa: F401
from firesteel.backends import list_backends, lookup_backend, register_backend  # noqa: F401
from firesteel.dropin import install, uninstall  # noqa: F401
