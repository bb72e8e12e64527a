"""What a call of a callable means: `meaning(fn)`, the one place that decides it.

The questions stand in order in `meaning`; the first that has an answer decides.  What they ask are tables of one shape, something hashable ->
CallMeaning: the callable itself (`CALLABLES`), its type, its module, its class.  A callable without a row is inlined where it is written in Python,
and breaks where it is not.  Modules are compared part by part (`homes.py`), functions by identity and never by the look of their names.

    meaning(torch.relu)                     # CallMeaning(NODE)
    meaning(math.sqrt)                      # CallMeaning(PURE)
    meaning(torch.serialization.load)       # CallMeaning(BREAK, "outside")
"""
# boundary: recognises torch._functorch, whose functions keep a stack of levels while they run
from __future__ import annotations

import _thread
import builtins
import functools
import inspect
import os
import pickle
import re
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from firesteel.capture import marks
from firesteel.homes import home_of
from firesteel.records import dataclass
from firesteel.table import Table


class Sort(Enum):
    """What happens with a call; `CallMeaning.data` is what stands in brackets."""
    HANDLED = "a function of ours says what it gives (that function)"
    REPLACED = "another callable is called instead (that callable)"
    MADE = "an instance of a class is made"
    NODE = "it is one node of the graph"
    STATE = "it asks for a state of torch: executed while capturing, and asked again by a guard"
    PURE = "it is executed while capturing, if its arguments are known"
    NUMPY = "as PURE, unless an argument is an array"
    CACHED = "a functools.lru_cache of a function, which is executed"
    CONSTANT = "the user says that its result never changes: executed while capturing"
    BY_CODE = "all functions with this code mean the same (a function of ours that captures a call)"
    TRANSFORM = "a function that a transform of torch.func gave, or one of the parts of a transform"
    INLINED = "its frame is executed symbolically"
    BREAK = "it is called for real, between two graphs (the kind of break)"


@dataclass(frozen=True)
class CallMeaning:
    sort: Sort
    data: Any = None
    text: str = ""      # what the sentence of a break says besides


MADE, NODE, STATE, PURE, INLINED = (CallMeaning(sort) for sort in (Sort.MADE, Sort.NODE, Sort.STATE, Sort.PURE, Sort.INLINED))


def breaks(kind: str) -> CallMeaning:
    return CallMeaning(Sort.BREAK, kind)


# callable -> function(machine, args, kwargs) -> Value
CALLS: Table[Callable[..., Any]] = Table("known callable", "capture/values/ (beside the kind of value it works on)")
# full name -> the same, for Python functions that this package must not import
BY_NAME: Table[Callable[..., Any]] = Table("callable known by name", "capture/values/known_names.py")
# code of a Python function -> function(machine, FunctionValue, args, kwargs) -> Value
BY_CODE: Table[Callable[..., Any]] = Table("code of a known function", "capture/values/functions.py")

CALLABLES: Table[CallMeaning] = Table("meaning of a callable", "capture/meanings.py")
TYPES: Table[CallMeaning] = Table("meaning of callables of a type", "capture/meanings.py")
CLASSES: Table[CallMeaning] = Table("meaning of methods written in C", "capture/meanings.py")
NATIVE_MODULES: Table[CallMeaning] = Table("meaning of functions written in C", "capture/meanings.py")
PYTHON_MODULES: Table[CallMeaning] = Table("meaning of functions written in Python", "capture/meanings.py")
NAMES_IN_CODE: Table[CallMeaning] = Table("meaning of functions whose code uses a name", "capture/meanings.py")


def meaning(fn: Any) -> CallMeaning:
    """What a call of fn means: the first answer."""
    if (handler := handler_of(fn)) is not None:             # this project knows the very callable
        return CallMeaning(Sort.HANDLED, handler)
    if isinstance(fn, type):
        return MADE
    if (other := replacement(fn)) is not None:              # a wrapper of ours or of torch's, a substitute of the user's
        return CallMeaning(Sort.REPLACED, other)
    if marks.is_marked(fn, marks.FORBIDDEN):                # the user's marks
        return breaks("forbidden")
    if marks.is_marked(fn, marks.ALLOWED):
        return NODE
    if (row := CALLABLES.get(fn) or TYPES.get(type(fn))) is not None:
        return row
    if not isinstance(fn, types.FunctionType):
        # written in C: its class says it, or its module
        return CLASSES.get(owner_of(fn)) or by_module(NATIVE_MODULES, home_of(fn)) or breaks("call")
    return meaning_of_function(fn)


def meaning_of_function(fn: types.FunctionType) -> CallMeaning:
    """Of a Python function without a row of its own."""
    if by_module(PYTHON_MODULES, home_of(fn)) is NODE:
        return NODE
    if (reason := marks.looks_disabled(fn)) is not None:
        return CallMeaning(Sort.BREAK, "disabled", f": {reason}" if reason else "")
    if fn.__code__ in BY_CODE:
        return CallMeaning(Sort.BY_CODE, BY_CODE[fn.__code__])
    if marks.is_marked(fn, marks.CONSTANT):
        return CallMeaning(Sort.CONSTANT)
    return meaning_of_code(fn.__code__, fn.__globals__)


def meaning_of_code(code: types.CodeType, scope: dict[str, Any]) -> CallMeaning:
    """Of a Python function of which only the code counts: one made inside of the program, or one node that is executed after all."""
    row = by_module(PYTHON_MODULES, str(scope.get("__name__", "")))
    if row is not None and row is not NODE:
        return row
    for name in code.co_names:
        if name in NAMES_IN_CODE:
            return NAMES_IN_CODE[name]
    return breaks("coroutine") if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR) else INLINED


def handler_of(fn: Any) -> Callable[..., Any] | None:
    try:
        found = CALLS.get(fn)
    except TypeError:       # unhashable callables have no row
        return None
    if found is None and type(fn) is types.FunctionType:
        found = BY_NAME.get(f"{fn.__module__}.{fn.__qualname__}")
    return found


def replacement(fn: Any) -> Any:
    """What is called in its place; None where it is called itself."""
    if not isinstance(fn, types.FunctionType):
        return None
    if (original := marks.compiled_of(fn)) is not None:
        return original
    if fn.__code__ is marks.TORCH_DISABLED:         # by which torch hides functions of its own from its compiler
        return fn.__wrapped__       # type: ignore[attr-defined]  # set by functools.wraps
    return marks.SUBSTITUTES.get(fn) or marks.before_the_peer(fn)


def owner_of(fn: Any) -> type:
    """The class that defines a method written in C; the type of its module where it is no method."""
    owner = getattr(fn, "__objclass__", None) or getattr(fn, "__self__", None)
    if not isinstance(owner, type):
        return type(owner)
    return next((base for base in owner.__mro__ if fn.__name__ in vars(base)), owner)


def by_module(table: Table[CallMeaning], name: str) -> CallMeaning | None:
    """The row of the module, or of the innermost package around it that has one."""
    while name and name not in table:
        name = name.rpartition(".")[0]
    return table.get(name)


# -- Python ---------------------------------------------------------------------------------------------------------------
NATIVE_MODULES.row("math", "cmath", "_operator", "operator", "itertools", "builtins")(PURE)
CLASSES.row(str, bytes, int, float, bool, complex, range, tuple, frozenset, re.Pattern, re.Match)(PURE)
_fn: Any
CALLABLES.row(sys.intern, os.fspath, str.maketrans, pickle.dumps)(PURE)
CALLABLES.add(_thread.get_ident, STATE)
CALLABLES.row(input, open, breakpoint)(breaks("outside"))
CALLABLES.row(exec, eval, compile, builtins.__import__)(breaks("code"))
CALLABLES.add(print, breaks("output"))
TYPES.add(functools._lru_cache_wrapper, CallMeaning(Sort.CACHED))
TYPES.row(*dict.fromkeys((np.ufunc, type(np.prod))))(CallMeaning(Sort.NUMPY))
for _module in ("numpy._core._ufunc_config", "numpy.core._ufunc_config"):       # np.errstate, and functions that are decorated with it
    PYTHON_MODULES.add(_module, breaks("call"))
PYTHON_MODULES.row("traceback", "linecache", "pdb", "pickle", "subprocess", "glob", "shutil", "concurrent.futures", "pprint", "unittest.mock",
                   "timeit", "cProfile", "profile", "zipfile", "tarfile", "urllib.request", "http", "socket", "sqlite3")(breaks("outside"))
WITHOUT_TENSORS = ("tqdm", "rich", "loguru", "pandas", "sklearn", "matplotlib", "PIL", "wandb", "mlflow")      # libraries of others
PYTHON_MODULES.row(*WITHOUT_TENSORS)(breaks("outside"))
NAMES_IN_CODE.row("_getframe", "_getframemodulename", "currentframe")(breaks("frames"))

# -- torch ----------------------------------------------------------------------------------------------------------------
TYPES.row(torch._ops.OpOverload, torch._ops.OpOverloadPacket)(NODE)
PYTHON_MODULES.row("torch.functional", "torch.nn.functional", "torch._jit_internal", "torch._tensor", "torch.special", "torch.linalg", "torch.fft",
                   "torch._VF", "torch.masked._ops")(NODE)       # Python functions that are one node each; those of other modules are inlined
CALLABLES.row(torch.is_tensor, torch.is_storage, torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not,
              torch._is_functional_tensor)(NODE)
PYTHON_MODULES.add("torch._functorch", CallMeaning(Sort.TRANSFORM))
PYTHON_MODULES.add("torch._functorch.functional_call", INLINED)     # calls a module and nothing more
PYTHON_MODULES.row("torch.cuda.random", "torch.serialization")(breaks("outside"))

NATIVE_MODULES.row("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse", "torch._C._nested")(NODE)
NATIVE_MODULES.add("torch", breaks("torch_state"))      # the core, except for STATE_QUERIES
CLASSES.add(torch._C.TensorBase, NODE)
CALLABLES.row(torch.from_file, torch.frombuffer)(breaks("outside"))
for _fn in vars(type(torch._C._VariableFunctions)).values():
    if isinstance(_fn, staticmethod) and _fn.__func__ not in CALLABLES:     # torch.add
        CALLABLES.add(_fn.__func__, NODE)
CLASSES.row(torch.Generator, torch._C._FunctionBase)(breaks("call"))       # the latter's is what torch.autograd.Function.apply calls

# functions of the core that only ask: the same question has the same answer until the state changes, which a guard sees
STATE_QUERIES = {torch._C: """
    get_autocast_cpu_dtype get_autocast_dtype get_autocast_gpu_dtype get_autocast_ipu_dtype get_autocast_xla_dtype get_default_dtype
    get_num_interop_threads get_num_threads is_anomaly_check_nan_enabled is_anomaly_enabled is_autocast_cache_enabled is_autocast_cpu_enabled
    is_autocast_enabled is_autocast_ipu_enabled is_autocast_xla_enabled is_grad_enabled is_inference_mode_enabled _is_any_autocast_enabled
    _is_autocast_available _is_fwd_grad_enabled _is_grad_layout_enforcement_enabled _is_multithreading_enabled _is_torch_function_all_disabled
    _is_torch_function_enabled _is_torch_function_mode_enabled _is_tracing _is_view_replay_enabled _is_xnnpack_enabled _is_alias_of
    _is_cached_tensor _is_cow_tensor _is_key_in_tls _is_opaque_type_registered _is_flash_attention_available _is_ck_sdpa_available
    _has_distributed _has_storage _has_torch_function _has_torch_function_unary _has_torch_function_variadic
    _any_output_is_alias_to_input_or_output _are_functorch_transforms_active _can_use_cudnn_attention _can_use_flash_attention
    _can_use_mem_efficient_attention _debug_only_are_vmap_fallback_warnings_enabled _len_torch_dispatch_stack _len_torch_function_stack
    _get_autograd_fallback_mode _get_backcompat_broadcast_warn _get_backcompat_keepdim_warn _get_blas_default_backend
    _get_blas_preferred_backend _get_cpu_allow_fp16_reduced_precision_reduction _get_cpu_capability
    _get_cublas_allow_bf16_reduced_precision_reduction _get_cublas_allow_fp16_accumulation _get_cublas_allow_fp16_reduced_precision_reduction
    _get_cublas_allow_tf32 _get_cudnn_allow_tf32 _get_cudnn_batch_norm_reserve_space_size _get_cudnn_benchmark _get_cudnn_depthwise_kernel
    _get_cudnn_deterministic _get_cudnn_enabled _get_cudnn_sdp_enabled _get_default_device _get_deterministic_algorithms
    _get_deterministic_algorithms_warn_only _get_deterministic_fill_uninitialized_memory _get_dtensor_allow_implicit_replication
    _get_fa3_sdp_enabled _get_flash_sdp_enabled _get_float32_matmul_precision _get_fp32_precision_getter _get_graph_executor_optimize
    _get_linalg_preferred_backend _get_math_sdp_allow_fp16_bf16_reduction _get_math_sdp_enabled _get_max_operator_version
    _get_mem_efficient_sdp_enabled _get_miopen_immediate _get_mkldnn_deterministic _get_mkldnn_enabled _get_nnpack_enabled
    _get_onednn_allow_tf32 _get_overrideable_sdp_enabled _get_privateuse1_backend_name _get_qengine _get_rocm_fa_preferred_backend
    _get_sdp_priority_order _get_sm_carveout_experimental _get_torch_function_state _get_tracing_state _get_warnAlways
    _dispatch_has_backend_fallback _dispatch_has_computed_kernel_for_dispatch_key _dispatch_has_kernel _dispatch_has_kernel_for_any_dispatch_key
    _dispatch_has_kernel_for_dispatch_key _dispatch_isTensorSubclassLike _dispatch_is_alias_key _dispatch_is_included_in_alias
    _dispatch_kernel_for_dispatch_key_is_fallthrough _dispatch_num_backends _dispatch_tls_is_dispatch_key_excluded
    _dispatch_tls_is_dispatch_key_included _jit_assert_is_instance _jit_is_script_object _accelerator_getAccelerator
    _accelerator_getDeviceCapability _accelerator_getDeviceIndex _accelerator_hooks_device_count _accelerator_hooks_get_current_device
    _accelerator_isAllocatorInitialized _cuda_canDeviceAccessPeer _cuda_cudaCachingAllocator_is_enabled _cuda_getAllocatorBackend
    _cuda_getArchFlags _cuda_getCompiledVersion _cuda_getCurrentRawStream _cuda_getCurrentStream _cuda_getDefaultStream _cuda_getDevice
    _cuda_getDeviceCount _cuda_get_conv_benchmark_empty_cache _cuda_get_cudnn_benchmark_limit _cuda_get_sync_debug_mode _cuda_hasPrimaryContext
    _cuda_isCurrentStreamCapturing _cuda_isHistoryEnabled _cuda_isInBadFork _cuda_tunableop_is_enabled _cuda_tunableop_tuning_is_enabled
    _mps_get_core_count _mps_get_name _mps_is_available _mps_is_in_bad_fork _mps_is_on_macos_or_newer _mtia_getDevice _mtia_getDeviceCapability
    _mtia_getDeviceCount _mtia_isBuilt _mtia_isInBadFork _nccl_version _nccl_version_suffix _rocm_is_backward_pass _xpu_getArchFlags
    _xpu_getCurrentStream _xpu_getDevice _xpu_getDeviceCount _xpu_isInBadFork""",
          torch._C._autograd: """_get_creation_meta _get_data_attr _get_sequence_nr _is_kineto_stopped _profiler_enabled kineto_available
    _saved_tensors_hooks_get_disabled_error_message _saved_tensors_hooks_is_enabled""",
          torch._C._cpu: "_get_cpu_capability", torch._C._itt: "is_available"}
for _home, _names in STATE_QUERIES.items():
    for _fn in dict.fromkeys(getattr(_home, _name) for _name in _names.split() if hasattr(_home, _name)):     # a build has those of its devices
        CALLABLES.add(_fn, STATE)
