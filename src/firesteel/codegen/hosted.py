"""What host functions call, and how one is made of its text: all that a process needs which runs a program that was compiled elsewhere.

In: a `HostCode`, written by `host.py`.  Out: `made(code, compile_text)`, the callable.  Nothing here knows plans or loops.
"""
from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from firesteel import native_tensors
from firesteel.artifacts import counters
from firesteel.codegen.zones import Zones
from firesteel.native_method import CompileText, Word, native_method, spelled_out
from firesteel.native_tensors import ADDRESS_OF
from firesteel.records import dataclass
from firesteel.targets import CUDA


@dataclass(frozen=True)
class HostCode:
    """The text of a host function and what it names: objects, and the recipes of its launches.  What differs between processes is a
    `Word` among a recipe's words: addresses of kernels and of constants, and what belongs to a device."""
    source: str
    boxed: bool
    scope: dict[str, Any]
    recipes: dict[str, list[int]]


def compiled(source: str) -> types.CodeType:
    return compile(source, "<firesteel host>", "exec")


def made(code: HostCode, compile_text: CompileText | None, known: types.CodeType | None = None) -> Callable[..., tuple]:
    """The function of the text; `known` is the text compiled, if somebody kept that."""
    scope = {**SCOPE, **code.scope, **{name: launcher(recipe, compile_text) for name, recipe in code.recipes.items()}}
    exec(known or compiled(code.source), scope)
    call = scope["call"]
    call.source, call._boxed_call = code.source, code.boxed
    return call


# ---------------------------------------------------------------- traces

TITLES = "    # "         # between a launch and the titles of its kernels


class NoProfiler:
    _is_profiler_enabled = False


def traced(call: Any) -> Callable[..., tuple]:
    """The host function while torch.profiler records: the same code, whose launches are ranges of the trace."""
    if "traced" not in vars(call):
        scope = {**call.__globals__, "profiler": NoProfiler}
        for name, titles in re.findall(rf"\b(run_\d+)\(.*{TITLES}(.*)", call.source):
            scope[name] = in_ranges(scope[name], titles.split("; "))
        call.traced = scope["call"] = types.FunctionType(call.__code__, scope)
    return call.traced


def in_ranges(run: Any, titles: Sequence[str]) -> Callable[..., int]:
    """A launch whose kernels run one by one, each in a range of its title; all in one where a kernel has several launches."""
    words = getattr(getattr(run, "__self__", None), "words", (0,))
    parts = [(f"firesteel {title}", plain) for title, plain in zip(titles, _one_by_one(words))] if words[0] == len(titles) else \
        [(f"firesteel {'; '.join(titles)}", run)]

    def launch(*frame: int | torch.Tensor) -> int:
        for title, part in parts:
            with torch._C._profiler._RecordFunctionFast(title):
                code = part(*frame)
            if code:
                return code
        return 0
    return launch


def _one_by_one(words: Sequence[int]) -> Iterator[Callable[..., int]]:
    at = 2
    for _ in range(words[0]):
        end = at + 2 + 2 * words[at + 1]
        yield _plain_launcher([1, words[1], *words[at:end]])
        at = end


KEPT = (32 << 20) - (1 << 16)       # bytes: just below the largest block that counts for glibc


@functools.cache
def keep_freed_memory() -> None:
    """Has the C library keep freed memory instead of giving it back to the system, which would have to clear every page again for the next call.
    glibc learns from the largest block that was freed: blocks up to that size then come from its heap, of which it keeps twice as much.  This
    frees one that was never touched, and is what a process that once frees a tensor of 32 MB does; MALLOC_TRIM_THRESHOLD_ still decides otherwise."""
    bytes(KEPT)


# ---------------------------------------------------------------- fast doors of torch, with their plain twins

_doors = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
empty_cuda = getattr(_doors, "_empty_strided_cuda", None)       # on the current device
_empty = getattr(_doors, "_empty_strided_cpu",                  # 1.0 us against 1.4
                 lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
_reinterpret = getattr(_doors, "_reinterpret_tensor",           # 1.0 us against 1.7
                       lambda x, shape, strides, offset: torch.as_strided(x, shape, strides, x.storage_offset() + offset))


def memory_of_gpus() -> dict[str, Any]:
    """What `empty_cuda` means where a process has several GPUs and the program was compiled where there was one."""
    first = f"{CUDA}:0"
    several = torch.cuda.device_count() > 1
    return {"empty_cuda": lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=first)} if several else {}


def check_number(condition: bool, message: str) -> None:
    """A condition that the program stated, or that a shape relies on."""
    if not condition:
        raise RuntimeError(message)


def draw_normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Drawn in the strides of its argument, which a clone would lose: eager fills contiguous memory by an algorithm of its own."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).normal_(mean, std, generator=generator)


def laid_out(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The result of a library call in the strides that its readers were compiled for."""
    actual = result.stride()
    if actual == strides or all(a == s or n <= 1 for a, s, n in zip(actual, strides, result.shape)) or result.numel() == 0:
        return result
    counters["native"]["restrided"] += 1
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def as_dtype(x: torch.Tensor, dtype: torch.dtype, shape: tuple, strides: tuple, distance: int) -> torch.Tensor:
    """The same storage read as another dtype, from `distance` bytes behind the start of x on."""
    start = (x.storage_offset() * x.itemsize + distance) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), start, shape, strides)


def flat(results: Iterable[Any]) -> list[Any]:
    return [item for result in results for item in (result if isinstance(result, (list, tuple)) else (result,))]


def was_written(*tensors: torch.Tensor) -> None:
    """Raises versions; inference tensors have none."""
    kept = [tensor for tensor in tensors if not tensor.is_inference()]
    if kept:
        torch.autograd.graph.increment_version(kept)


def index_error() -> IndexError:
    return IndexError("index out of range in self")


def launch_error(code: int) -> RuntimeError:
    return RuntimeError(f"a kernel could not be launched: CUDA driver error {code}")


def as_word(value: int | float) -> int:
    """A number among the inputs as the i64 that kernels take: a float by its bits."""
    return struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)


# ---------------------------------------------------------------- the launcher

# What a launch runs is a row of i64: number of kernels, most arguments of one; then for each kernel its address, its number
# of arguments, and for each argument (slot, addend): slot >= 0 is frame[slot] + addend, -1 the error slot, -2 the addend itself.
# Behind a kernel that found an error none runs: it might write an input.
LAUNCHER = ADDRESS_OF + spelled_out(r"""
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyErr_Occurred()

define i64 @firesteel_run(ptr %recipe, ptr %frame) {
entry:
  %error = alloca i64
  store i64 0, ptr %error
  %kernels = load i64, ptr %recipe
  %most = fetch i64, i64, ptr %recipe, i64 1
  %args = alloca i64, i64 %most
  %first = getelementptr i64, ptr %recipe, i64 2
  %error_address = ptrtoint ptr %error to i64
  br label %kernel
kernel:
  %k = phi i64 [0, %entry], [%k_next, %launched]
  %at = phi ptr [%first, %entry], [%slot_at, %launched]
  %left = icmp slt i64 %k, %kernels
  %so_far = load i64, ptr %error
  %right = icmp eq i64 %so_far, 0
  %more = and i1 %left, %right
  br i1 %more, label %arguments, label %done
arguments:
  %address = load ptr, ptr %at
  %count = fetch i64, i64, ptr %at, i64 1
  %slots = getelementptr i64, ptr %at, i64 2
  br label %argument
argument:
  %a = phi i64 [0, %arguments], [%a_next, %stored]
  %slot_at = phi ptr [%slots, %arguments], [%slot_next, %stored]
  if slt i64 %a, %count then %one else %launched
one:
  %slot = load i64, ptr %slot_at
  %addend = fetch i64, i64, ptr %slot_at, i64 1
  switch i64 %slot, label %framed [ i64 -1, label %error_slot
                                    i64 -2, label %literal ]
framed:
  %value = fetch i64, i64, ptr %frame, i64 %slot
  %sum = add i64 %value, %addend
  br label %stored
error_slot:
  br label %stored
literal:
  br label %stored
stored:
  %argument_value = phi i64 [%sum, %framed], [%error_address, %error_slot], [%addend, %literal]
  %place = getelementptr i64, ptr %args, i64 %a
  store i64 %argument_value, ptr %place
  %a_next = add i64 %a, 1
  %slot_next = getelementptr i64, ptr %slot_at, i64 2
  br label %argument
launched:
  call void %address(ptr %args)
  %k_next = add i64 %k, 1
  br label %kernel
done:
  %result = load i64, ptr %error
  ret i64 %result
}

define ptr @firesteel_launch(ptr %self, ptr %objects, i64 %count) {
entry:
  %own = call ptr @PyLong_AsVoidPtr(ptr %self)
  %recipe = load ptr, ptr %own
  %words = fetch ptr, ptr, ptr %own, i64 1
  %frame = alloca i64, i64 %count
  br label %next
next:
  %i = phi i64 [0, %entry], [%i_next, %converted]
  if slt i64 %i, %count then %convert else %ready
convert:
  %object = fetch ptr, ptr, ptr %objects, i64 %i
  %value = call i64 @firesteel_address(ptr %words, ptr %object)
  if eq i64 %value, -1 then %ask else %converted                 ; the number -1, or one that does not fit
ask:
  %raised = call ptr @PyErr_Occurred()
  if eq ptr %raised, null then %converted else %raise
raise:
  ret ptr null
converted:
  %place = getelementptr i64, ptr %frame, i64 %i
  store i64 %value, ptr %place
  %i_next = add i64 %i, 1
  br label %next
ready:
  %thread = call ptr @PyEval_SaveThread()
  %error = call i64 @firesteel_run(ptr %recipe, ptr %frame)
  call void @PyEval_RestoreThread(ptr %thread)
  %result = call ptr @PyLong_FromLongLong(i64 %error)
  ret ptr %result
}
""")


class LaunchRecipe(int):
    """The address of `own`, which has those of the recipe and of what is known of tensors: the `self` of a launcher, so that what machine code
    points to lives as long as that."""

    own: ctypes.Array
    words: ctypes.Array     # the recipe
    recipe: list[int]       # the kernels' addresses are objects that keep their code loaded


def launcher(recipe: list[int], compile_text: CompileText | None) -> Callable[..., int]:
    """A function of the frame's values that runs the recipe's kernels; its result is not 0 where an index was out of range."""
    keep_freed_memory()
    if compile_text is None:
        return _plain_launcher(recipe)
    words = (ctypes.c_int64 * len(recipe))(*recipe)
    head = (ctypes.c_int64 * 2)(ctypes.addressof(words), ctypes.addressof(native_tensors.words()))
    own = LaunchRecipe(ctypes.addressof(head))
    own.own, own.words, own.recipe = head, words, recipe
    return native_method("firesteel_launch", LAUNCHER, compile_text, own)


def kernels_of(recipe: Sequence[int]) -> Iterator[int]:
    """The addresses of its kernels."""
    at = 2
    for _ in range(recipe[0]):
        yield recipe[at]
        at += 2 + 2 * recipe[at + 1]


def cells(recipe: Sequence[int], places: Mapping[Any, int]) -> list[Any]:
    """A recipe as JSON, for other processes: a `Word` by its kind and its name, or the place that stands for the name."""
    return [[word.kind, places.get(word.name, word.name)] if isinstance(word, Word) else word for word in recipe]


def _plain_launcher(recipe: list[int]) -> Callable[..., int]:
    """The launcher without machine code: one call through ctypes a kernel."""
    kernels, at = [], 2
    for _ in range(recipe[0]):
        address, count = recipe[at:at + 2]
        slots = [tuple(recipe[i:i + 2]) for i in range(at + 2, at + 2 + 2 * count, 2)]
        kernels.append((ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), slots))
        at += 2 + 2 * count

    def run(*given: int | torch.Tensor) -> int:
        error, frame = ctypes.c_int64(0), [value if isinstance(value, int) else value.data_ptr() for value in given]
        for function, slots in kernels:
            values = [ctypes.addressof(error) if slot == -1 else addend if slot == -2 else frame[slot] + addend for slot, addend in slots]
            function((ctypes.c_int64 * len(values))(*values))
            if error.value:
                break
        return error.value
    return run


# ---------------------------------------------------------------- the scope

SCOPE: dict[str, Any] = {   # what every host function may name
    "empty": _empty, "empty_cuda": empty_cuda, "empty_strided": torch.empty_strided, "view": _reinterpret,
    "Tensor": torch.Tensor, "laid_out": laid_out, "as_dtype": as_dtype, "index_error": index_error, "launch_error": launch_error,
    "as_word": as_word, "was_written": was_written, "math": math, "grad_on": torch.is_grad_enabled, "no_grad": torch.no_grad, "Zones": Zones,
    "profiler": torch.autograd.profiler, "traced": traced,
}
