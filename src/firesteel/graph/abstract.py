"""Abstract tensors: torch.Tensors without data, on which any torch function can be called.

An `AbstractTensor` wraps a `Spec`.  A call on it runs torch's C++ code (autograd, views, composite operators) and arrives here,
at dispatch, where a row of `RULES` computes the Spec of the result.  An operator without a row runs torch's own meta kernel (`meta.py`).

An `AbstractWorld` owns the ShapeEnv of its tensors.  While it is `active()`, factory functions make abstract tensors too.

    world = AbstractWorld()
    x = world.wrap(torch.randn(2, 3), "x", None)
    with world.active():
        y = torch.zeros(3) + x          # y.spec: float32[2, 3]@[3, 1]

What always holds
 1. `t.spec` agrees with what t.shape, t.stride(), t.dtype and t.device say.
 2. No data is ever read: asking for it raises DataAccess.
 3. requires_grad, grad_fn, is_leaf, views and version counters are those of eager, kept by torch's autograd itself.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch._library import fake_impl, simple_registry
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from firesteel import torchstate, transaction
from firesteel.autograd.backwards import ResultOfOperator
from firesteel.config import config
from firesteel.errors import ConstraintViolation, DataAccess
from firesteel.graph import composites, factories, float_arguments, fourier, products, recurrent, resampling  # noqa: F401  # their rows
from firesteel.graph.answers import every_way
from firesteel.graph.foreach import is_foreach, run_foreach
from firesteel.graph.functions import symbolic_form
from firesteel.graph.meta import count_specialized, is_symbolic, meta_specs
from firesteel.graph.rules.refusals import refuse_out
from firesteel.graph.schemas import Facts, drops_nothing, facts
from firesteel.graph.sizes import asking, current, fixed, must, product, same, unbacked
from firesteel.graph.spec import Spec, contiguous_strides, spec_of
from firesteel.graph.storage import within_storage
from firesteel.graph.tensor import BITS, DATA, AbstractTensor, memory_of, tensors_in, to_spec
from firesteel.graph.wrappers import has_wrapper, is_wrapper, rebuilt
from firesteel.sym.expr import Expr, Size, ge, le
from firesteel.sym.symint import from_sym, to_symint
from firesteel.targets import HOST, on_host
from firesteel.torchstate import has_history

aten = torch.ops.aten
_make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass     # sizes are also Exprs, and numbers torch takes for them


def call_rule(fact: Facts, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The Specs of the results, by rule or by meta kernel."""
    if fact.rule is None:
        return specs_without_rule(fact.op, args, kwargs)
    specs = [a.spec if type(a) is AbstractTensor else to_spec(a) for a in args]
    if kwargs:
        return fact.rule(*specs, **{k: to_spec(v) for k, v in kwargs.items()})
    return fact.rule(*specs)


class AbstractWorld:
    """Makes abstract tensors and runs operators on them; lasts for one compilation.  `env` may be None: all sizes static."""

    def __init__(self, env: Any = None):
        self.env = env
        self._mode = AbstractMode(self)
        self._ways: dict[int, tuple[OperatorHandler, Facts]] = {}
        self.leaves_made = 0        # how many tensors became leaves that require grad: by requires_grad_, or as views taken under no_grad
        self.draws = 0      # how often random numbers were drawn
        self.has_bits = False       # was a conjugate or negative view made?

    def make(self, spec: Spec) -> AbstractTensor:
        """A fresh abstract tensor."""
        if self.env is not None and self.env.symbols and is_symbolic(spec):
            tensor = self._make_symbolic(spec)
        else:
            tensor = _make(AbstractTensor, spec.shape, spec.strides, spec.offset, None, spec.dtype, torch.strided, spec.device)
        tensor.spec, tensor.world, tensor.value, tensor.record, tensor.born = spec, self, None, None, None
        return tensor

    def _make_symbolic(self, spec: Spec) -> AbstractTensor:
        env = self.env
        shape, strides = ([to_symint(s, env) if type(s) is Expr else s for s in sizes] for sizes in (spec.shape, spec.strides))
        offset = to_symint(spec.offset, env) if type(spec.offset) is Expr else spec.offset
        # a storage size of 0: nobody reads it, and torch would compute the real one in symbols, which costs 35 us
        tensor = _make(AbstractTensor, shape, strides, offset, None, spec.dtype, torch.strided, spec.device,
                       False, False, None, False, False, None, 0)
        if not env.is_general and spec.strides == contiguous_strides(spec.shape):
            env.by_hints(tensor.is_contiguous)      # torch remembers that it is, and asks for no size of 0 or 1 later
        return tensor

    def from_specs(self, result: Any) -> Any:
        """A rule's result as the operator's: tensors for Specs, SymInts for Exprs."""
        kind = type(result)
        if kind is Spec:
            return self.make(result)
        if kind is tuple or kind is list:
            return kind(self.from_specs(r) for r in result)
        return to_symint(result, self.env) if kind is Expr else result

    def run(self, op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operator on abstract tensors: the results' metadata, and changed metadata of what it changes in place."""
        current.env = self.env
        way = self._ways.get(id(op))
        if way is None:
            way = self._ways[id(op)] = (self._find_way(facts(op)), facts(op))
        if way[1].random:
            self.draws += not drops_nothing(op, args, kwargs)
        if self.has_bits and way[1].kind == "pure" and not way[1].composite:
            args, kwargs = self._resolved(way[1], args), {name: self._resolved(way[1], value) for name, value in kwargs.items()}
        return way[0](self, way[1], args, kwargs)

    def _resolved(self, fact: Facts, value: Any) -> Any:
        """An argument as eager's operator gets it: as a copy, which has a layout of its own, where it has a bit that the operator does not know."""
        if type(value) in (tuple, list):
            return type(value)([self._resolved(fact, part) for part in value])
        if type(value) is AbstractTensor and value.bits and not all(knows_bit(fact.op, bit) for bit in value.bits):
            return self.run(aten.clone.default, (value,), {})
        return value

    def _find_way(self, fact: Facts) -> OperatorHandler:
        """How an operator is run here."""
        if fact.composite:
            return lambda world, fact, args, kwargs: fact.op.decompose(*args, **kwargs)
        if is_foreach(fact):
            return run_foreach
        way = HANDLERS.get(fact.op) or KINDS[fact.kind]
        return partial(_in_storage, way, IN_STORAGE[fact.op]) if fact.op in IN_STORAGE else way

    def set_data(self, tensor: AbstractTensor, value: Any) -> None:
        """tensor.data = value"""
        set_spec(tensor, value.spec if type(value) is AbstractTensor else spec_of(value))

    # ------------------------------------------------------------ what capture needs

    def wrap(self, tensor: torch.Tensor, source_text: str, dims: tuple[Any, ...] | None = None, strides: Collection[int] = ()) -> AbstractTensor:
        """An abstract tensor with the metadata of a real one.  Dimension d is a symbol where dims[d] is not "static"; a stride that
        does not follow from the sizes is one where its dimension is in `strides`."""
        wrapped: Any
        if is_wrapper(tensor):
            wrapped = rebuilt(tensor, lambda name, part: self.wrap(part, f"{source_text}.{name}"))
            fresh = lambda: rebuilt(wrapped, lambda name, part: part.clone())
        else:
            with asking(self.env):
                spec = self._spec_with_symbols(tensor, source_text, dims, strides)
            wrapped, fresh = self.make(spec), lambda: self.make(spec)
        return self._with_history(wrapped, fresh, tensor)

    def unwritten(self, wrapped: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """What `wrap` gave for a tensor that got a history since, by a write, or another shape."""
        if type(wrapped) is not AbstractTensor or wrapped.first_spec is None and wrapped.requires_grad == tensor.requires_grad:
            return wrapped
        spec = wrapped.first_spec or wrapped.spec
        return self._with_history(self.make(spec), lambda: self.make(spec), tensor)

    def _with_history(self, wrapped: Any, fresh: Callable[[], Any], tensor: torch.Tensor) -> AbstractTensor:
        """The abstract tensor as a leaf, a result of an operator or a view, as the real one is for autograd."""
        if type(wrapped) is AbstractTensor and is_bare_view(tensor):
            wrapped = bare_view(wrapped, tensor)
        elif tensor.requires_grad:
            wrapped.requires_grad_(True)
            if has_history(tensor):      # a result of an operator, which may be written in place
                with torch.enable_grad():
                    wrapped = ResultOfOperator.apply(wrapped, fresh)
        for mark in ("_is_param", "_is_buffer"):
            if getattr(tensor, mark, False) or (mark == "_is_param" and type(tensor) is torch.nn.Parameter):
                setattr(wrapped, mark, True)
        return wrapped

    def literal(self, value: Any) -> torch.Tensor | None:
        return value.value if type(value) is AbstractTensor else None

    def memory(self, tensor: torch.Tensor) -> int:
        """The same number for tensors that share memory."""
        return id(memory_of(tensor))

    def _spec_with_symbols(self, tensor: torch.Tensor, source: str, dims: tuple[Any, ...] | None, strides: Collection[int]) -> Spec:
        spec = spec_of(tensor)
        if dims is None or not strides and all(d in (None, "static") for d in dims):
            return spec
        shape = tuple(self._size(size, f"{source}.size()[{d}]", kind) for d, (size, kind) in enumerate(zip(spec.shape, dims)))
        found = symbolic_strides(spec, shape)
        for d in strides:
            if type(found[d]) is int and found[d] > 1 and found[d] == spec.strides[d]:
                found = (*found[:d], self.env.create_symbol(found[d], f"{source}.stride()[{d}]", LEAST_SIZE), *found[d + 1:])
        return spec._replace(shape=shape, strides=found)

    def _size(self, size: Any, source: str, kind: Any) -> Size:
        """A symbol for a dynamic dimension.  Sizes 0 and 1 stay numbers, since they vanish and broadcast, but for a 1 that the user
        marked: then the program has to be right for other sizes too."""
        if kind == "unbacked":
            return self.env.create_unbacked(source=source)
        if type(kind) is tuple:
            return self._marked(size, source, *kind[1:])
        return self.env.create_symbol(size, source, LEAST_SIZE) if kind == "dynamic" and size >= 2 else size

    def _marked(self, size: int, source: str, least: int | None, greatest: int | None) -> Size:
        if not (least or 0) <= size <= (size if greatest is None else greatest):
            raise ConstraintViolation(f"{source} is {size}, but was marked as dynamic from {least} to {greatest}.",
                                      hint="Change the mark's min and max, or remove it.")
        if size == 0:
            return size
        return self.env.create_symbol(size, source, max(least or 0, 1), greatest)

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What to call instead of a function of torch, or of one that capture made."""
        if getattr(fn, "branches_on_data", False):
            return partial(every_way, fn)
        if (given := getattr(fn, "on_abstract", None)) is not None:
            return given
        return symbolic_form(fn, self.env is not None and bool(self.env.symbols))

    @transaction.context
    def active(self) -> Iterator[None]:
        """Inside, torch calls work on abstract tensors, and factory functions make abstract tensors.  The user's hooks on saved tensors
        are for tensors with data."""
        hooks = torchstate.take_saved_tensor_hooks()
        try:
            with asking(self.env), torch.autograd.grad_mode._force_original_view_tracking(True), self._mode:
                yield
        finally:
            hooks.put_back()


def is_bare_view(tensor: torch.Tensor) -> bool:
    """Is it a view without a history?  Eager has sentences of its own for writes to such a tensor."""
    return tensor._is_view() and not (tensor.requires_grad and has_history(tensor))


def bare_view(plain: AbstractTensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor, which requires no grad, as a view like the example: taken under no_grad of one that requires grad, or of one that does not."""
    with torch._C.DisableTorchFunctionSubclass():       # the base may be of a class of the user's that refuses functions
        quiet = example.requires_grad and example._base.requires_grad       # type: ignore[union-attr]  # a view has a base
    with torch.set_grad_enabled(not quiet), plain.world._mode:      # outside of a mode, torch loads its distributed tensors
        view = aten.alias.default(plain.requires_grad_(quiet))
    return view.requires_grad_(example.requires_grad)


LEAST_SIZE = 0      # of a symbol; where a program depends on a size not being 1, it asks, and then that is a guard


def symbolic_strides(spec: Spec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides over symbolic sizes.  A stride that is the product of the faster dimensions stays so for other sizes; any
    other stride is a constant."""
    order = sorted(range(len(shape)), key=lambda d: (spec.strides[d], -d))
    strides: list[Size] = list(spec.strides)
    step: Size = 1
    symbolic: Size = 1
    for dim in order:
        if spec.strides[dim] == step:
            strides[dim] = symbolic
        if spec.strides[dim] == 0:
            continue
        step, symbolic = spec.strides[dim] * max(spec.shape[dim], 1), strides[dim] * (1 if shape[dim] == 0 else shape[dim])
    return tuple(strides)


class AbstractMode(TorchDispatchMode):
    """Sends every operator, factories included, to its world."""

    def __init__(self, world: AbstractWorld):
        super().__init__()
        self.world = world

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False        # else torch wraps the method below in a function that imports its compiler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return NotImplemented if has_wrapper(types) else self.world.run(op, args, kwargs or {})


def is_abstract() -> bool:
    """Do torch calls made now work on abstract tensors?"""
    return any(isinstance(mode, AbstractMode) for mode in _get_current_dispatch_mode_stack())


# ---------------------------------------------------------------- operators that are not pure

OperatorHandler = Callable[[Any, Facts, tuple, dict[str, Any]], Any]        # the first is the world whose way it is


def _run_pure(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    specs = call_rule(fact, args, kwargs)
    if type(specs) is not Spec:
        return world.from_specs(specs)
    for size in specs.shape:
        if type(size) is int and size > LARGE:
            refuse_unallocatable(specs)
    return world.make(specs)


LARGE = 1 << 20
MOST_BYTES = 1 << 47        # what a process has addresses for


def refuse_unallocatable(spec: Spec) -> None:
    """Eager allocates each result.  Where that must fail, a kernel that needs no memory for it would run for years instead."""
    least = product([size for size in spec.shape if type(size) is int]) * spec.dtype.itemsize
    if least >= MOST_BYTES and spec.device.type != "meta":
        raise RuntimeError(f"{spec} is too large for any memory")


def _run_view(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    base = args[0]
    if type(base) is AbstractTensor:
        base.value = None       # a write through the view would change it unseen
    made = world.from_specs(call_rule(fact, args, kwargs))
    bits = bits_of_view(world, fact, base)
    if UNRESOLVED.get(fact.op) in getattr(base, "bits", ()):
        raise RuntimeError(f"{fact.op} doesn't work on tensors whose bit is not resolved")
    for view in tensors_in(made):
        view.memory = memory_of(base)
        if bits:
            view.bits = bits
    return made


def bits_of_view(world: AbstractWorld, fact: Facts, base: Any) -> frozenset[Any]:
    """The bits that eager's view of a tensor has."""
    bits: frozenset[Any] = getattr(base, "bits", frozenset())
    if fact.op in BITS:
        bits = bits ^ {fact.op}
        world.has_bits = True
    return bits - {UNRESOLVED.get(fact.op)}


BIT_KEYS = {aten._conj.default: "Conjugate", aten._neg_view.default: "Negative"}       # torch's dispatch keys


@cache
def knows_bit(op: OpOverload, bit: OpOverload) -> bool:
    """Does eager hand a tensor with the bit to the operator as it is?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), BIT_KEYS[bit])


# views that eager refuses of tensors with this bit; in a trace, where such a tensor is a copy, the engine takes real parts by them
UNRESOLVED = {aten.view_as_real.default: aten._conj.default}

# Operators that name places of the storage of their first argument by sizes, strides and an offset, which begin at this argument.
IN_STORAGE = {aten.as_strided.default: 1, aten.as_strided_.default: 1, aten.as_strided_copy.default: 1, aten.as_strided_scatter.default: 2}


def _in_storage(way: OperatorHandler, begin: int, world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    names: dict[str, Any] = {**dict(zip(("size", "stride", "storage_offset"), args[begin:])), **kwargs}
    sizes, strides, offset = (to_spec(names.get(name)) for name in ("size", "stride", "storage_offset"))
    x, base = to_spec(args[0]), to_spec(memory_of(args[0]))
    within_storage((base, x), x.dtype, sizes, strides, x.offset if offset is None else offset)
    return way(world, fact, args, kwargs)


def _run_inplace(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    target = args[fact.writes[0]]       # type: ignore[index]  # a name only where the kind is "out"
    if fact.twin is not None:
        check_written(target, call_rule(facts(fact.twin), args, kwargs))
    for place in fact.writes:
        drop_value(args[place] if type(place) is int else kwargs.get(place))
    return returned(fact, args, kwargs)


def drop_value(target: Any) -> None:
    for tensor in target if isinstance(target, (list, tuple)) else (target,):
        if type(tensor) is AbstractTensor:
            tensor.value = None


def returned(fact: Facts, args: tuple, kwargs: dict) -> Any:
    """What a writing operator returns: the arguments it wrote, where its schema says so."""
    if not fact.op._schema.returns:
        return None
    written = tuple(args[p] if type(p) is int else kwargs[p] for p in fact.writes)
    return written[0] if len(fact.op._schema.returns) == 1 else written


def check_written(target: Any, result: Any) -> None:
    """An in-place operator may not change the shape of what it writes, nor its kind of dtype."""
    if type(result) is not Spec or type(target) is not AbstractTensor:
        return
    spec = target.spec
    if len(result.shape) != len(spec.shape) or not all(map(same, result.shape, spec.shape)):
        raise RuntimeError(f"output with shape {list(spec.shape)} doesn't match the broadcast shape {list(result.shape)}")
    if result.dtype is not spec.dtype and not torch.can_cast(result.dtype, spec.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {spec.dtype}")


def _run_out(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    rest = {k: v for k, v in kwargs.items() if k not in fact.writes}
    results = call_rule(facts(fact.twin), args, rest) if fact.twin is not None else specs_without_rule(fact.op, args, kwargs)
    results = (results,) if type(results) is Spec else results
    if any(kwargs[place].dtype is not spec.dtype for place, spec in zip(fact.writes, results)):
        refuse_out(fact.op, tuple(map(to_spec, args)), {k: to_spec(v) for k, v in kwargs.items()})
    for place, spec in zip(fact.writes, results):
        resize_out(kwargs[place], spec)
    return returned(fact, args, kwargs)


def resize_out(out: AbstractTensor, result: Spec) -> None:
    """As eager: an out= tensor of another shape is resized, one of another kind of dtype or device is refused."""
    if not torch.can_cast(result.dtype, out.spec.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.spec.dtype}")
    if out.spec.device != result.device and (result.shape or not on_host(result)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but got out on {out.spec.device}, the result on {result.device}")
    out.value = None
    if len(out.spec.shape) != len(result.shape) or not all(map(same, out.spec.shape, result.shape)):
        set_spec(out, result._replace(dtype=out.spec.dtype, device=out.spec.device))


def _run_reshape(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    target = args[0]
    set_spec(target, reshaped_spec(fact, args, kwargs))
    return target


def reshaped_spec(fact: Facts, args: tuple, kwargs: dict) -> Spec:
    """The Spec of the argument after an operator that changes its metadata (transpose_, resize_, set_, ...)."""
    target = args[0].spec
    handler = RESHAPES.get(fact.op)
    if handler is not None:
        return handler(target, *(to_spec(a) for a in args[1:]), **{k: to_spec(v) for k, v in kwargs.items()})
    if fact.twin is None:
        raise NotImplementedError(f"no rule for {fact.op}, which changes the metadata of its argument")
    return call_rule(facts(fact.twin), args, kwargs)


def set_spec(tensor: AbstractTensor, spec: Spec) -> None:
    """Changes the metadata of a tensor in place, below autograd."""
    value = tensor.world.make(spec)
    with tensor.world._mode:        # outside of a mode, torch loads its distributed tensors, and with them much else, to ask for their class
        DATA.__set__(tensor, value)
    tensor.first_spec = tensor.first_spec or tensor.spec
    tensor.spec, tensor.value = spec, None


def _resize(x: Spec, size: Any, *, memory_format: Any = None) -> Spec:
    shape = tuple(size)
    return x if shape == x.shape else Spec(shape, contiguous_strides(shape), x.offset, x.dtype, x.device)


RESHAPES: dict[OpOverload, Callable[..., Spec]] = {
    aten.resize_.default: _resize,
    aten.resize_as_.default: lambda x, template, *, memory_format=None: _resize(x, template.shape),
    aten.set_.source_Tensor: lambda x, source, *rest: source,
    aten.detach_.default: lambda x: x,
}

def _run_update(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """Fresh results, and arguments written beside: only the results have new metadata."""
    for place in fact.writes:
        drop_value(args[place] if type(place) is int else kwargs.get(place))
    return _run_pure(world, fact, args, kwargs)


KINDS: dict[str, OperatorHandler] = {
    "pure": _run_pure, "update": _run_update, "view": _run_view, "inplace": _run_inplace, "out": _run_out, "reshape": _run_reshape}


# ---------------------------------------------------------------- operators that read data, and literals

def _local_scalar(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """A number that is read from data: known for a literal of the program, else a symbol that run time fills in."""
    tensor = args[0]
    if type(tensor) is not AbstractTensor:
        return fact.op(*args)
    if tensor.value is not None:
        return tensor.value.item()
    return to_symint(scalar_symbol(world.env, tensor.spec.dtype), world.env)


INTEGER_RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-2**15, 2**15 - 1), torch.int32: (-2**31, 2**31 - 1)}


def scalar_symbol(env: Any, dtype: torch.dtype) -> Expr:
    if env is None or not (env.replaying or config.capture_scalar_outputs) or dtype.is_complex:
        raise DataAccess("Tensor.item")
    if dtype.is_floating_point or dtype is torch.bool:
        return env.create_unbacked(None, None, "Tensor.item", "bool" if dtype is torch.bool else "f64")
    return env.create_unbacked(*INTEGER_RANGES.get(dtype, (None, None)), "Tensor.item")


def _no_data(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    raise DataAccess(str(fact.op).removeprefix("aten."))


def _as_numbers(read: Callable[[Spec], Any], world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """C++ code that cannot compute with symbols asks for a size: it is fixed to its hint by a guard."""
    why, value = "the C++ code of the operator takes it as a number", read(args[0].spec)
    sizes = value if isinstance(value, tuple) else (value,)
    if any(type(s) is Expr for s in sizes):
        count_specialized(fact.op)
    plain = [fixed(s, why) for s in sizes]
    return plain if isinstance(value, tuple) else plain[0]


def _assert_scalar(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> None:
    """The program states a condition."""
    condition, message = from_sym(args[0]), args[1]
    if not (world.env.assume(condition, message) if type(condition) is Expr else condition):
        raise RuntimeError(message)


def _constrain_range(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> None:
    size, (low, high) = from_sym(args[0]), (kwargs.get("min"), kwargs.get("max"))
    for condition in ((ge(size, low) if low is not None else True), (le(size, high) if high is not None else True)):
        must(condition, f"{size} is outside of [{low}, {high}]")


def _lift(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """A literal of the program, such as torch.tensor(3): abstract, but its data is known."""
    if type(args[0]) is AbstractTensor:
        return world.make(args[0].spec)
    tensor = world.make(spec_of(args[0]))
    tensor.value = args[0]
    return tensor


def number_as_tensor(world: AbstractWorld, number: Any, kwargs: dict[str, Any]) -> Any:
    """Dispatch gives a tensor that stands for a number of the program as the number; function transforms convert such tensors."""
    with world._mode:
        return aten.scalar_tensor.default(number, dtype=kwargs.get("dtype"), device=kwargs.get("device"))


def _convert(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    return (_run_pure(world, fact, args, kwargs) if isinstance(args[0], torch.Tensor) else number_as_tensor(world, args[0], kwargs))


def _sdp_choice(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> int:
    """Which attention kernel eager would choose: its own function reads metadata only, so it may see our tensors."""
    with torch._C._DisableTorchDispatch():
        return fact.op(*args, **kwargs)


def zero_tangent(plain: OperatorHandler) -> OperatorHandler:
    """The tangent of a number or a tensor that is not dual.  That of a number stands for a number too, which dispatch reads: it has data."""
    def tangent(world: AbstractWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
        if len(args[0]) == 0 and torch.device(kwargs.get("device") or HOST).type == HOST.type:
            return torch.zeros((), dtype=kwargs.get("dtype"), device=HOST)
        return plain(world, fact, args, kwargs)
    return tangent


HANDLERS: dict[OpOverload, OperatorHandler] = {
    aten._efficientzerotensor.default: zero_tangent(_run_pure),
    aten._local_scalar_dense.default: _local_scalar,
    aten.equal.default: _no_data,
    aten.allclose.default: _no_data,
    aten.is_nonzero.default: _no_data,
    aten.size.default: partial(_as_numbers, lambda spec: spec.shape),
    aten.stride.default: partial(_as_numbers, lambda spec: spec.strides),
    aten.numel.default: partial(_as_numbers, lambda spec: product(spec.shape)),
    aten.storage_offset.default: partial(_as_numbers, lambda spec: spec.offset),
    aten._assert_scalar.default: _assert_scalar,
    aten.sym_constrain_range.default: _constrain_range,
    aten.sym_constrain_range_for_size.default: _constrain_range,
    aten.lift_fresh.default: _lift,
    aten._fused_sdp_choice.default: _sdp_choice,
    aten._to_copy.default: _convert,
}


# ---------------------------------------------------------------- operators without a rule

class FakeContext:
    """What `torch.library.get_ctx()` gives in the fake of a custom operator."""

    def __init__(self, op: OpOverload, env: Any):
        self.op, self.env = op, env

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        return to_symint(unbacked(str(self.op), min, max), self.env)

    create_unbacked_symint = new_dynamic_size


def fake_specs(fake: Callable, op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """The Specs of the results by the function that the user registered for that: it sees symbolic sizes."""
    env = current.env
    world = AbstractWorld(env)
    inner = [_in_world(world, v) for v in (args, kwargs)]
    with fake_impl.set_ctx_getter(lambda: FakeContext(op, env)), world.active(), torch._C._AutoDispatchBelowAutograd():
        return to_spec(fake(*inner[0], **inner[1]))


def _in_world(world: AbstractWorld, value: Any) -> Any:
    """Arguments as tensors of another world, which records nothing."""
    if type(value) is AbstractTensor:
        return world.make(value.spec)
    if isinstance(value, dict):
        return {k: _in_world(world, v) for k, v in value.items()}
    return type(value)(_in_world(world, v) for v in value) if type(value) in (list, tuple) else value


def registered_fake(op: OpOverload) -> Callable | None:
    entry = simple_registry.singleton.find(op.name().split(".")[0]) if op.namespace != "aten" else None
    return entry.fake_impl.kernel.func if entry is not None and entry.fake_impl.kernel is not None else None


def specs_without_rule(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """The Specs of the results by the fake that is registered for the operator, or by torch's meta kernel."""
    fake = registered_fake(op)
    return meta_specs(op, args, kwargs) if fake is None else fake_specs(fake, op, args, kwargs)
