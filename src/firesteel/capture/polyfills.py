"""Functions of itertools, operator, functools, heapq, logging and torch written in Python: the machine inlines these where a program
calls the originals.

What always holds: they give what the original gives, element by element and just as lazily.

    POLYFILLS[itertools.pairwise]           # pairwise
"""
# ruff: noqa: A002  (names of parameters are the originals')
from __future__ import annotations

import bisect
import collections
import functools
import heapq
import importlib.util
import itertools
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from firesteel.capture import polyfills_optim
from firesteel.targets import CPU

UNSET: Any = object()


def chain(*iterables: Iterable[Any]) -> Iterator[Any]:
    for iterable in iterables:
        yield from iterable


def from_iterable(iterables: Iterable[Iterable[Any]]) -> Iterator[Any]:
    for iterable in iterables:
        yield from iterable


def count(start: Any = 0, step: Any = 1) -> Iterator[Any]:
    while True:
        yield start
        start = start + step


def cycle(iterable: Iterable[Any]) -> Iterator[Any]:
    saved = []
    for item in iterable:
        yield item
        saved.append(item)
    while saved:
        yield from saved


def repeat(object: Any, times: int | None = None) -> Iterator[Any]:
    if times is None:
        while True:
            yield object
    for _ in range(times):
        yield object


def accumulate(iterable: Iterable[Any], func: Callable[..., Any] | None = None, *, initial: Any = None) -> Iterator[Any]:
    iterator = iter(iterable)
    total = initial
    if initial is None:
        try:
            total = next(iterator)
        except StopIteration:
            return
    yield total
    for item in iterator:
        total = total + item if func is None else func(total, item)
        yield total


def islice(iterable: Iterable[Any], *bounds: int | None) -> Iterator[Any]:
    window = slice(*bounds)
    start, stop, step = window.start or 0, window.stop, window.step or 1
    index, wanted = 0, start
    iterator = iter(iterable)
    while stop is None or index < stop:
        try:
            item = next(iterator)
        except StopIteration:
            return
        if index == wanted:
            wanted += step
            yield item
        index += 1


def starmap(function: Callable[..., Any], iterable: Iterable[Any]) -> Iterator[Any]:
    for args in iterable:
        yield function(*args)


def takewhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        if not predicate(item):
            return
        yield item


def dropwhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    dropping = True
    for item in iterable:
        dropping = dropping and predicate(item)
        if not dropping:
            yield item


def filterfalse(function: Callable[[Any], Any] | None, iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        if not (item if function is None else function(item)):
            yield item


def compress(data: Iterable[Any], selectors: Iterable[Any]) -> Iterator[Any]:
    for item, chosen in zip(data, selectors):
        if chosen:
            yield item


def pairwise(iterable: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(iterable)
    try:
        before = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield before, item
        before = item


def zip_longest(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    iterators = [iter(iterable) for iterable in iterables]
    active = [True] * len(iterators)
    while True:
        row = []
        for i, iterator in enumerate(iterators):
            item = fillvalue
            if active[i]:
                try:
                    item = next(iterator)
                except StopIteration:
                    active[i] = False
                    if not any(active):
                        return
            row.append(item)
        yield tuple(row)
        if not iterators:
            return


def groupby(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Groups are given whole: a program that does not look at a group before the next sees an empty one in the original."""
    found: Any = UNSET
    items: list[Any] = []
    for item in iterable:
        value = item if key is None else key(item)
        if found is not UNSET and not (found is value or found == value):
            yield found, iter(items)
            items = []
        found = value
        items.append(item)
    if found is not UNSET:
        yield found, iter(items)


def call_iterator(function: Callable[[], Any], sentinel: Any) -> Iterator[Any]:
    """iter(function, sentinel)"""
    while True:
        item = function()
        if item is sentinel or item == sentinel:
            return
        yield item


def items_by_index(obj: Any) -> Iterator[Any]:
    """Iteration over an object that has only __getitem__."""
    index = 0
    while True:
        try:
            item = obj[index]
        except IndexError:
            return
        yield item
        index += 1


def reduce(function: Callable[[Any, Any], Any], iterable: Iterable[Any], initial: Any = UNSET) -> Any:
    iterator = iter(iterable)
    total = initial
    if initial is UNSET:
        try:
            total = next(iterator)
        except StopIteration:
            raise TypeError("reduce() of empty iterable with no initial value") from None
    for item in iterator:
        total = function(total, item)
    return total


# -- builtins that call functions or run generators: used where something breaks inside of these --------------------------------------------
def zip_steps(*iterators: Iterator[Any]) -> Iterator[Any]:
    while True:
        row = []
        for iterator in iterators:
            for item in iterator:
                row.append(item)
                break
            else:
                return
        yield tuple(row)


def map_steps(function: Callable[..., Any], *iterators: Iterator[Any]) -> Iterator[Any]:
    for row in zip_steps(*iterators):
        yield function(*row)


def filter_steps(function: Callable[[Any], Any] | None, iterator: Iterator[Any]) -> Iterator[Any]:
    for item in iterator:
        if item if function is None else function(item):
            yield item


def enumerate_steps(iterator: Iterator[Any], place: int) -> Iterator[Any]:
    for item in iterator:
        yield place, item
        place += 1


def sum_steps(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    for item in iterable:
        start = start + item
    return start


def any_steps(iterable: Iterable[Any], /) -> bool:
    for item in iterable:       # noqa: SIM110  (this is any)
        if item:
            return True
    return False


def all_steps(iterable: Iterable[Any], /) -> bool:
    for item in iterable:       # noqa: SIM110  (this is all)
        if not item:
            return False
    return True


def list_steps(iterable: Iterable[Any], /) -> list[Any]:
    return [item for item in iterable]      # noqa: C416  (this is list)


def drained(function: Callable[..., Any], iterable: Iterable[Any], *rest: Any, **settings: Any) -> Any:
    """For functions that take all elements before they do anything else."""
    return function([item for item in iterable], *rest, **settings)      # noqa: C416  (elements that come step by step)


def extend_steps(items: list[Any], iterable: Iterable[Any]) -> None:
    for item in iterable:
        items.append(item)      # noqa: PERF402  (this is extend)


def next_steps(iterator: Iterator[Any], *default: Any) -> Any:
    for item in iterator:
        return item
    return default[0] if default else finished(iterator)


def finished(iterator: Iterator[Any]) -> Any:
    """Raises the StopIteration with which an iterator ended just now (generators.py)."""


def sorted_steps(iterable: Iterable[Any], /, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> list[Any]:
    items = [item for item in iterable]     # noqa: C416  (elements that come step by step)
    if key is None:
        return sorted(items, reverse=reverse)
    keys = [key(item) for item in items]
    return [items[place] for place in sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)]


def max_steps(best: Any, *items: Any) -> Any:
    for item in items:
        if item > best:
            best = item
    return best


def min_steps(best: Any, *items: Any) -> Any:
    for item in items:
        if item < best:
            best = item
    return best


EXTREMES = {max: max_steps, min: min_steps}
STEPWISE: dict[Any, Callable[..., Any]] = {sum: sum_steps, any: any_steps, all: all_steps, list: list_steps, sorted: sorted_steps, next: next_steps}
DRAINING = frozenset({tuple, set, frozenset, dict, min, max, collections.deque, collections.OrderedDict})


def itemgetter(item: Any, *items: Any) -> Callable[[Any], Any]:
    if not items:
        return lambda obj: obj[item]
    return lambda obj: (obj[item], *[obj[other] for other in items])


def attrgetter(attr: str, *attrs: str) -> Callable[[Any], Any]:
    def read(obj: Any, path: str) -> Any:
        for name in path.split("."):
            obj = getattr(obj, name)
        return obj
    if not attrs:
        return lambda obj: read(obj, attr)
    return lambda obj: (read(obj, attr), *[read(obj, other) for other in attrs])


def methodcaller(name: str, /, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda obj: getattr(obj, name)(*args, **kwargs)


class ComparisonKey:
    """What functools.cmp_to_key makes of an object."""

    def __init__(self, compare: Callable[[Any, Any], int], obj: Any):
        self.compare, self.obj = compare, obj

    def __lt__(self, other: ComparisonKey) -> bool:
        return self.compare(self.obj, other.obj) < 0


def cmp_to_key(mycmp: Callable[[Any, Any], int]) -> Callable[[Any], ComparisonKey]:
    return lambda obj: ComparisonKey(mycmp, obj)


def without_gradients(function: Callable[..., Any], *args: Any) -> Any:
    """A reentrant checkpoint none of whose arguments requires grad."""
    with torch.no_grad():
        return function(*args)


def run_again(function: Callable[..., Any], autocasts: Sequence[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """The recomputation of a checkpoint, without what restores the state of random numbers."""
    if autocasts:
        with torch.autocast(**autocasts[0]):
            return run_again(function, autocasts[1:], *args, **kwargs)
    with torch.enable_grad():
        return function(*args, **kwargs)


def reentrant_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """That of a reentrant checkpoint, without what restores the state of random numbers."""
    given = list(ctx.inputs)
    for place, tensor in zip(ctx.tensor_indices, ctx.saved_tensors):
        given[place] = tensor.detach()
        given[place].requires_grad = tensor.requires_grad
    settings = {ctx.device_type: ctx.device_autocast_kwargs, CPU: ctx.cpu_autocast_kwargs}
    autocasts = [{"device_type": device, **kwargs} for device, kwargs in settings.items() if kwargs is not None and kwargs["enabled"]]
    outputs = run_again(ctx.run_function, autocasts, *given)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    pairs = [(out, grad) for out, grad in zip(outputs, grads) if isinstance(out, torch.Tensor) and out.requires_grad]
    if not pairs:
        raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return (None, None, *[arg.grad if isinstance(arg, torch.Tensor) else None for arg in given])


# -- contexts -----------------------------------------------------------------------------------------------------------
def run_within(fn: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """A context manager of torch as a decorator."""
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)
    return run


def apply_forward(cls: Any, ctx: Any, *args: Any) -> Any:
    """torch.autograd.Function.apply without gradients."""
    with torch.no_grad():
        if cls.setup_context is SETUP_CONTEXT:
            return cls.forward(ctx, *args)
        out = cls.forward(*args)
        cls.setup_context(ctx, args, out)
        return out


SETUP_CONTEXT = torch.autograd.function._SingleLevelFunction.setup_context


# -- torch: operators that take functions --------------------------------------------------------------------------------
def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Iterable[Any] = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, additional: Iterable[Any], **settings: Any) -> Any:
    carried = tuple(carried)
    while cond_fn(*carried, *additional):
        carried = tuple(body_fn(*carried, *additional))
    return carried


def stacked(results: list[Any]) -> Any:
    """Results of the same structure as one, its tensors stacked."""
    return pytree.tree_map(lambda *tensors: torch.stack(tensors), *results)


def map_impl(f: Callable[..., Any], xs: Iterable[Any], args: Iterable[Any]) -> Any:
    return stacked([f(*row, *args) for row in zip(*xs)])


def scan(combine_fn: Callable[..., Any], init: Any, xs: Iterable[Any], additional_inputs: Iterable[Any] = ()) -> Any:
    carry, leaves, results = init, list(init), []
    for row in zip(*xs):
        carry, result = combine_fn(*leaves, *row, *additional_inputs)
        leaves = pytree.tree_leaves(carry)
        results.append(result)
    return carry, stacked(results)


def associative_scan(combine_fn: Callable[..., Any], xs: list[Any], additional_inputs: Iterable[Any] = ()) -> list[Any]:
    rows = [list(row) for row in zip(*xs)]
    for place in range(1, len(rows)):
        rows[place] = pytree.tree_leaves(combine_fn(*rows[place - 1], *rows[place], *additional_inputs))
    return [torch.stack(column) for column in zip(*rows)]


def wrap(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def wrap_with_set_grad_enabled(enable_grad: bool, wrapped_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(enable_grad):
        return wrapped_func(*args, **kwargs)


def wrap_with_autocast(device_type: str, dtype: Any, enabled: bool, cache_enabled: bool | None, wrapped_func: Callable[..., Any],
                       *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return wrapped_func(*args, **kwargs)


def invoke_subgraph(subgraph: Callable[..., Any], identifier: str | None, *operands: Any) -> Any:
    return subgraph(*operands)


def strict_mode(callable: Callable[..., Any], operands: Iterable[Any]) -> Any:
    return callable(*operands)


def tag_activation_checkpoint(gmod: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpointed region, of what the peer captured."""
    chosen = gmod.meta.get("_checkpoint_context_fn")
    settings = {**kwargs, "use_reentrant": False, **({} if chosen is None else {"context_fn": chosen})}
    return torch.utils.checkpoint.checkpoint(gmod, *args, **settings)


# name of the operator -> what it means; one whose condition is a tensor breaks there, and only there
HIGHER_ORDER: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in (
    cond, while_loop, map_impl, scan, associative_scan, wrap, wrap_with_set_grad_enabled, wrap_with_autocast, invoke_subgraph, strict_mode,
    tag_activation_checkpoint)}


# -- torch: blocks of autocast in graphs that were captured elsewhere -------------------------------------------------------------------------
def enter_autocast(*settings: Any) -> Any:
    block = torch.autocast(*settings)
    block.__enter__()
    return block


def exit_autocast(block: Any) -> None:
    block.__exit__(None, None, None)


# -- torch: functions whose C++ code reads data to check or to copy it; the arguments are those that it let pass until then -----------------------
def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Of numbers and of tensors that have one element."""
    if isinstance(data, (list, tuple)):
        made = torch.stack([tensor(item) for item in data])
    elif not isinstance(data, torch.Tensor):
        made = torch.tensor(data)
    elif data.numel() == 1:
        made = data.detach().reshape(())
    else:
        raise ValueError("only one element tensors can be converted to Python scalars")
    return made if dtype is None and device is None else made.to(dtype=dtype, device=device)


def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is not None:
            torch._assert_async((given >= 0).all(), f"cov(): {name} cannot be negative")
    if weights is None:
        total = rows.shape[1]
        freedom: Any = max(total - correction, 0)
    else:
        total = weights.sum()
        torch._assert_async(total != 0, "cov(): weights sum to zero, can't be normalized")
        freedom = (total - correction * ((weights * aweights).sum() / total if aweights is not None else 1)).clamp(min=0)
    scaled = rows if weights is None else rows * weights
    centred = rows - (scaled.sum(1) / total)[:, None]
    return (centred @ (centred if weights is None else centred * weights).t().conj() / freedom).squeeze()


def corrcoef(input: Any) -> Any:
    found = torch.cov(input)
    if found.dim() == 0:
        return found / found
    spread = torch.sqrt(found.diag().real if found.is_complex() else found.diag())
    found = found / spread[:, None] / spread[None]
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if found.is_complex() else found.clip(-1, 1)


def istft(input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Any = None, center: bool = True,
          normalized: bool = False, onesided: bool | None = None, length: int | None = None, return_complex: bool = False) -> Any:
    spectrum = input[None] if input.dim() == 2 else input
    hop, width, frames = hop_length or n_fft // 4, win_length or n_fft, spectrum.shape[-1]
    dtype = torch.empty(0, dtype=spectrum.dtype).real.dtype
    shape = torch.ones(width, dtype=dtype, device=spectrum.device) if window is None else window
    shape = torch.nn.functional.pad(shape, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    norm = "ortho" if normalized else "backward"
    spectrum = spectrum.transpose(1, 2)
    parts = torch.fft.ifft(spectrum, norm=norm) if return_complex else torch.fft.irfft(spectrum[..., :n_fft // 2 + 1], n_fft, norm=norm)
    whole = n_fft + hop * (frames - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    signal = torch.ops.aten.unfold_backward(parts * shape, [parts.shape[0], whole], 1, n_fft, hop)[:, start:end]
    weight = torch.ops.aten.unfold_backward(shape.pow(2).expand(1, frames, n_fft), [1, whole], 1, n_fft, hop)[:, start:end]
    torch._assert_async(weight.abs().min() >= 1e-11, "window overlap add min: 1")
    signal = signal / weight
    signal = torch.nn.functional.pad(signal, (0, end - start - signal.shape[1]))
    return signal[0] if input.dim() == 2 else signal


CHECKED: dict[Any, Callable[..., Any]] = {
    torch.tensor: tensor, torch.cov: cov, torch.Tensor.cov: cov, torch.corrcoef: corrcoef, torch.Tensor.corrcoef: corrcoef, torch.istft: istft}


# -- heapq, bisect: the standard library has these in Python too, hidden by those in C ------------------------------------
def without_c(module: Any) -> Any:
    """A second copy of a module of the standard library, made as where it has no part in C."""
    copy, native = importlib.util.module_from_spec(module.__spec__), f"_{module.__name__}"
    hidden = sys.modules[native]
    sys.modules[native] = None      # type: ignore[assignment]  # to import it is an ImportError
    try:
        module.__spec__.loader.exec_module(copy)
    finally:
        sys.modules[native] = hidden
    return copy


IN_PYTHON = {getattr(module, name): getattr(copy, name) for module, names in (
    (heapq, ("heapify", "heappush", "heappop", "heapreplace", "heappushpop")),
    (bisect, ("bisect_left", "bisect_right", "insort_left", "insort_right"))) for copy in [without_c(module)] for name in names}


# -- logging ------------------------------------------------------------------------------------------------------------
def is_enabled_for(logger: Any, level: int) -> bool:
    """Logger.isEnabledFor without its cache."""
    return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()


def group_tensors_by_device_and_dtype(tensorlistlist: list[list[Any]], with_indices: bool = False) -> dict[Any, tuple[list[list[Any]], list[int]]]:
    """What optimisers and the clipping of gradients sort their tensors by: lists of the same length, grouped by the tensors of the first."""
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for place, first in enumerate(tensorlistlist[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in tensorlistlist], [])
        lists, places = groups[key]
        for part, values in zip(lists, tensorlistlist):
            if values:
                part.append(values[place])
        if with_indices:
            places.append(place)
    return groups


def infer_size(first: Any, second: Any) -> Any:
    """torch._C._infer_size: two shapes, broadcast."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    start, sizes = len(longer) - len(shorter), list(longer)
    for d, size in enumerate(shorter):
        if sizes[start + d] == 1:
            sizes[start + d] = size
        elif size != 1 and size != sizes[start + d]:
            a, b = first[d - len(shorter)], second[d - len(shorter)]
            raise RuntimeError(f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension {start + d}")
    return torch.Size(sizes)


POLYFILLS: dict[Any, Callable[..., Any]] = {
    itertools.chain: chain, itertools.chain.from_iterable: from_iterable, itertools.count: count, itertools.cycle: cycle, itertools.repeat: repeat,
    itertools.accumulate: accumulate, itertools.islice: islice, itertools.starmap: starmap, itertools.takewhile: takewhile,
    itertools.dropwhile: dropwhile, itertools.filterfalse: filterfalse, itertools.compress: compress, itertools.pairwise: pairwise,
    itertools.zip_longest: zip_longest, itertools.groupby: groupby, functools.reduce: reduce, functools.cmp_to_key: cmp_to_key,
    **IN_PYTHON,
    logging.Logger.isEnabledFor: is_enabled_for, operator.itemgetter: itemgetter, operator.attrgetter: attrgetter,
    **polyfills_optim.STEPS, operator.methodcaller: methodcaller, torch._C._group_tensors_by_device_and_dtype: group_tensors_by_device_and_dtype,
    torch._C._infer_size: infer_size, torch.amp.autocast_mode._enter_autocast: enter_autocast, torch.amp.autocast_mode._exit_autocast: exit_autocast,
}
