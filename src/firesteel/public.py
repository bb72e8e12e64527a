"""The public names that need the compiler; `__init__.py` loads this when the first of them is used."""
from firesteel import api, backends, dropin

compile, reset, set_stance = api.compile, api.reset, api.set_stance
compiled_autograd, disable_compiled_autograd = api.compiled_autograd, api.disable_compiled_autograd
checkpoint_budget, memory_report = api.checkpoint_budget, api.memory_report
list_backends, lookup_backend, register_backend = backends.list_backends, backends.lookup_backend, backends.register_backend
install, uninstall = dropin.install, dropin.uninstall
