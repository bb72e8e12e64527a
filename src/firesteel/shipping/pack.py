"""`fs.package(model, example_inputs, path)`: a compiled program as one file, for `fs.load` (load.py) in another process.

The model is captured whole, as under fullgraph=True, and goes through the stages of pipeline.py; what they make is written down: graphs and plans
as text for people (dumps.py), host functions as text with their scope as JSON (values.py), machine code as object files for each processor,
weights as bytes.  What capture guards on the model is part of the code from then on; what it guards on the arguments is checked at each call.

    fs.package(model, (x,), "model.fsp", dynamic={"x": {0: (1, 64)}})
"""
from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import inspect
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import firesteel
from firesteel import dumps, pipeline, stages
from firesteel.api import call_module, compile_callable
from firesteel.autograd import aot
from firesteel.autograd.function import TrainingGraph
from firesteel.autograd.joint import UNTRACEABLE, Undifferentiable, trace_program
from firesteel.autograd.partition import min_cut_partition
from firesteel.autograd.segments import has_seams
from firesteel.capture import marks
from firesteel.codegen import host, llvm
from firesteel.codegen.hosted import LAUNCHER, HostCode, cells
from firesteel.errors import PackageError, UserError
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.functional import Unfollowable
from firesteel.graph.layouts import channels_last
from firesteel.graph.tensor import AbstractTensor
from firesteel.loops.plan import Plan, plan
from firesteel.native_method import KERNEL, Word
from firesteel.records import dataclass
from firesteel.runtime import cpu, cuda, gpu, threads
from firesteel.shipping import archive
from firesteel.shipping.load import ANY, BYTE_CODE, torch_state, write_byte_code
from firesteel.shipping.processors import PROCESSORS, best_of, capability_of
from firesteel.shipping.values import encode
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, python_text
from firesteel.sym.node import free_symbols
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.targets import CPU, KINDS, on_host

ALIGNED = 64        # bytes between the beginnings of two weights
LAUNCH_ON_GPU = "fs_cuda_launch"
Dynamic = bool | None | Mapping[str | int, Any]


def package(model: Callable, example_inputs: Sequence[Any], path: str | os.PathLike, dynamic: Dynamic = None, *,
            example_keywords: Mapping[str, Any] | None = None, weights: bool = True, processors: Sequence[str] | None = None) -> None:
    """Writes a compiled model into one file, for calls like model(*example_inputs, **example_keywords).

    With grad mode on, and something that requires a gradient, the package has the backward too.  `dynamic` names the sizes that may differ:
    {"x": {0: (1, 64), 1: True}}, by an argument's name or place, with a range or without; True: all.  `processors` are rows of
    shipping/processors.py, and GPU architectures (`sm_90`); this machine's without.  `weights=False` leaves the parameters and buffers out."""
    if not callable(model):
        raise UserError(f"fs.package takes a function or a module, not {type(model).__name__}.", hint="Pass the callable itself.")
    if not isinstance(example_inputs, (tuple, list)):
        raise UserError("fs.package takes a tuple of example arguments.", hint="Pass (x,) for one argument.")
    wanted = checked_processors(processors)
    original = getattr(model, "_firesteel_original", marks.compiled_of(model) or model)
    call = ExampleCall(original, tuple(example_inputs), dict(example_keywords or {}))
    with marked(call, dynamic):
        taken = RecordedModel(original, call, dynamic is True)
    Package(taken, wanted, weights).write(path)


def checked_processors(names: Sequence[str] | None) -> list[str]:
    """With one for the host among them."""
    names = list(dict.fromkeys(names or ()))
    hosts = [name for name in names if capability_of(name) is None]
    if unknown := [name for name in hosts if name not in PROCESSORS]:
        raise UserError(f"There is no processor {unknown[0]!r}.", hint=f"Use some of {', '.join(PROCESSORS)}, or sm_90 for a GPU of capability 9.0.")
    if foreign := [name for name in hosts if PROCESSORS[name].machine != platform.machine()]:
        raise UserError(f"Machine code for {foreign[0]!r} is made on {PROCESSORS[foreign[0]].machine}, not on {platform.machine()}.",
                        hint="Make the package there.")
    return names if hosts else [best_of(list(PROCESSORS)), *names]


# ---------------------------------------------------------------- the call

class ExampleCall:
    """Example arguments under the names of the parameters that take them, and their leaves."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs
        self.positional = positional_names(model.forward if isinstance(model, torch.nn.Module) else model, len(args))
        self.given = {**dict(zip(self.positional, args)), **kwargs}
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.structures: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        for name, value in self.given.items():
            found, self.structures[name] = pytree.tree_flatten_with_path(value)
            self.leaves += [leaf for _, leaf in found]
            self.names += [name + pytree.keystr(path) for path, _ in found]
            self.counts[name] = len(found)

    def place(self, value: Any) -> int | None:
        return next((k for k, leaf in enumerate(self.leaves) if leaf is value), None)


def positional_names(function: Any, count: int) -> list[str]:
    """Names of the parameters that positional arguments go to."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()     # type: ignore[assignment]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names, *(f"args[{k}]" for k in range(count - len(names)))]


@contextlib.contextmanager
def marked(call: ExampleCall, dynamic: Dynamic) -> Iterator[None]:
    """Inside, the example tensors bear the marks that `dynamic` asks for."""
    wishes = dict(wishes_of(call, dynamic)) if isinstance(dynamic, Mapping) else {}
    before = {place: vars(call.leaves[place]).get(marks.DIMENSIONS) for place in wishes}
    try:
        for place, dims in wishes.items():
            for dim, (least, most) in dims.items():
                marks.mark_dynamic(call.leaves[place], dim, min=least, max=most)
        yield
    finally:
        for place, old in before.items():
            vars(call.leaves[place]).pop(marks.DIMENSIONS, None)
            if old is not None:
                setattr(call.leaves[place], marks.DIMENSIONS, old)


def wishes_of(call: ExampleCall, dynamic: Mapping[str | int, Any]) -> Iterator[tuple[int, dict[int, tuple[int | None, int | None]]]]:
    """(leaf, dimension -> range)."""
    for key, dims in dynamic.items():
        name = call.positional[key] if isinstance(key, int) and key < len(call.positional) else key
        place = call.names.index(name) if name in call.names else None
        if place is None or not isinstance(call.leaves[place], torch.Tensor):
            raise UserError(f"dynamic names {key!r}, which is no tensor among {', '.join(call.names)}.")
        if not isinstance(dims, Mapping):
            raise UserError(f"dynamic says {dims!r} for {key!r}.", hint='Say which sizes: {"x": {0: True, 1: (1, 64)}}.')
        yield place, {dim: (None, None) if limits is True else tuple(limits) for dim, limits in dims.items()}


class EffectFound(BaseException):
    """Leaves the code behind a graph, which takes other exceptions for the program's own."""


def refuse_effects(source: str, names: Mapping[str, Any]) -> None:
    """Of the code behind the graph, in which `names` are known: it may put results together.  What changes objects of the caller's is refused, unless
    they are in the end as they were: a package keeps tensors alone."""
    body: Any = ast.parse(source).body[0]
    last: dict[str, tuple[ast.stmt, str | None]] = {}       # what is assigned to -> the last statement that does it, and the value
    for statement in body.body:
        builds = isinstance(statement, ast.Assign) and all(isinstance(target, (ast.Name, ast.Tuple)) for target in statement.targets)
        again = isinstance(statement, ast.If) and ast.unparse(statement.test) == "failed"       # the graph has raised: nothing has happened
        if not builds and not again and not isinstance(statement, (ast.Try, ast.Return)):
            target, value = assignment(statement)
            last[target] = statement, value
    for target, (statement, value) in last.items():
        if value is None or not is_so_already(target, value, names):
            raise EffectFound(f"The program changes more than tensors: {effect_words(statement, names)}.")


def assignment(statement: ast.stmt) -> tuple[str, str | None]:
    """(target, value) of an assignment to an attribute or an item; no value: another statement."""
    match statement:
        case ast.Assign(targets=[target], value=value):
            return ast.unparse(target), ast.unparse(value)
        case ast.Expr(ast.Call(func=ast.Attribute(attr="__setattr__"), args=[owner, ast.Constant(str(name)), value])):
            return f"{ast.unparse(owner)}.{name}", ast.unparse(value)
    return ast.unparse(statement), None


def is_so_already(target: str, value: str, names: Mapping[str, Any]) -> bool:
    """Is what an assignment gives there already?"""
    try:
        now, new = (eval(text, dict(names)) for text in (target, value))
    except (NameError, AttributeError, LookupError):        # a result of the graph, or a new attribute
        return False
    return now is new or type(now) is type(new) and type(new) in (bool, int, float, str) and now == new


def effect_words(statement: ast.stmt, names: Mapping[str, Any]) -> str:
    owners = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id.startswith("s_") and node.id in names]
    said = ", ".join(f"{name} is a {type(names[name]).__name__}" for name in dict.fromkeys(owners))
    return f"{ast.unparse(statement)}{f', where {said}' if said else ''}"


# ---------------------------------------------------------------- capture and the stages

@dataclass(frozen=True)
class PackagePart:
    """A forward or backward graph and its plan."""
    name: str
    gm: GraphModule
    plan: Plan


class Number(int):
    """Stands for a number among a graph's results."""


class RecordedModel:
    """What became of the model: a captured graph, compiled, and how calls lead to it.  It is the backend, too."""

    def __init__(self, model: Any, call: ExampleCall, dynamic: bool):
        self.model, self.call = model, call
        self.parts: list[PackagePart] = []
        self.gm: GraphModule | None = None
        self.guards: list[Any] = []
        self.results: list[Any] = []
        self.result_structure: Any = None
        self.backward: dict[str, Any] = {}
        is_module = isinstance(model, torch.nn.Module)
        compiled = compile_callable(call_module if is_module else model, {
            "backend": self, "fullgraph": True, "dynamic": dynamic, "backwards": False, "name": type(model).__name__ if is_module else None,
            "recompile_limit": None, "isolated": None})
        self.training_mode = is_module and model.training
        with firesteel.config.patch(automatic_dynamic_shapes=False):
            try:
                result = compiled(*([model] if is_module else []), *call.args, **call.kwargs)
            except EffectFound as refusal:
                raise PackageError(str(refusal), hint="Keep it in a tensor that is written in place, or do it outside.") from None
        if self.gm is None:
            raise PackageError("The program computes nothing with tensors: there is nothing to compile.")
        entries = [entry for region in compiled.__firesteel_root__.all_regions() for entry in region.variants()]
        self.guards = [guard for entry in entries for guard in entry.guard.guards]
        self.results, self.result_structure = pytree.tree_flatten(result)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        if self.gm is not None:
            raise PackageError("The program is more than one graph.")
        self.gm, self.examples = gm, example_inputs
        self.captured = dumps.graph_text(gm)
        if has_seams(gm):
            raise PackageError("The program calls code that stays Python (a hook, or a function of the user's that is not traced).",
                               hint="fs.explain(model)(...) shows the graph.")
        self._compile(gm)
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in gm.graph.output_node().args[0]]     # type: ignore[union-attr]
        self.markers = [torch.empty(0) if isinstance(value, torch.Tensor) else Number() for value in values]
        return self._receive

    def _receive(self, *inputs: Any) -> list[Any]:
        """The call of the graph by the code around it: nothing is computed."""
        self.inputs, caller = inputs, sys._getframe(1)
        refuse_effects(caller.f_globals[caller.f_code.co_name].__source__, {**caller.f_globals, **caller.f_locals})
        return self.markers

    def _compile(self, gm: GraphModule) -> None:
        program, turns_on, spends = aot.program_of(gm)
        compilers = aot.Compilers.of(self._compile_part, partition_fn=min_cut_partition, rewrite=channels_last, decompositions=core_decompositions())
        try:
            joint = trace_program(program, self.examples, decompositions=compilers.decompositions, turns_on=turns_on, spends=spends)
        except (Undifferentiable, Unfollowable, *UNTRACEABLE) as error:
            raise PackageError(f"The program cannot be traced: {error}.") from error
        if joint.refusal is not None or joint.packing is not None:
            raise PackageError(f"Only eager can run the program: {joint.refusal[1] if joint.refusal else 'tensor subclasses take part'}.")
        aot.tidy(joint, compilers.rewrite)
        stages.done("joint", joint, gm)
        self.plan, self.kind = joint.plan, "training" if joint.tangents else "inference"
        if joint.tangents:
            self._compile_training(aot.training_graph(joint, program, compilers, eager=program))
        else:
            stages.done("forward", joint.gm, joint)
            self._compile_part(joint.gm, joint.example_inputs)

    def _compile_training(self, graph: TrainingGraph) -> None:
        """The backward too, now: what it asks about sizes is then among the conditions."""
        assert graph.compile_backward is not None
        graph.compile_backward()
        self.backward = {"tangents": graph.tangents, "saved_tensors": graph.num_saved_tensors, "non_differentiable": graph.non_differentiable,
                         "gradients": graph.gradients, "reaches": graph.reaches, "severed": list(graph.severed)}

    def _compile_part(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        program = stages.run("program", gm, example_inputs)
        if pipeline.target_of(program) is None:
            raise PackageError("The program computes on several kinds of devices, or on one without kernels.", hint="Use fs.compile there.")
        program = stages.run("fuse", stages.run("simplify", program))
        self.parts.append(PackagePart("backward" if self.parts else "forward", gm, stages.done("plan", plan(program), program)))
        return NotImplemented       # never called: what runs is made by load.py


# ---------------------------------------------------------------- what is written

class Package:
    """The members of the file; a builder."""

    def __init__(self, taken: RecordedModel, processors: Sequence[str], store: bool):
        self.taken, self.call, self.store = taken, taken.call, store
        self.processors = [name for name in processors if capability_of(name) is None]
        self.architectures = [name for name in processors if capability_of(name) is not None]
        self.functions: dict[int, int] = {}         # of GPUs: number in this process -> place in the package
        self.members: dict[str, bytes] = {}
        self.constants: list[torch.Tensor] = []
        self.pieces: list[Any] = []         # of weights.bin
        self.offset = 0
        self._kept: list[torch.Tensor] = []         # whose memory the pieces are
        self.env: ShapeEnv | None = next((env for value in taken.examples if (env := dumps.environment(value)) is not None), None)
        self.states = states_of(taken.model)
        self.kept = taken.model.state_dict(keep_vars=True).keys() if self.states else set()

    def write(self, path: str | os.PathLike) -> None:
        taken = self.taken
        self.members["graphs/captured.py"] = taken.captured.encode()
        for part in taken.parts:
            self.members[f"graphs/{part.name}.py"] = dumps.graph_text(part.gm).encode()
            self.members[f"plans/{part.name}.plan"] = dumps.records_text(part.plan).encode()
        for name in self.processors:
            self._write_code(name)
        if self.functions:
            self._write_functions()
        weights, inputs = self._inputs()
        plan = encode(dataclasses.replace(taken.plan, assemble=None), self.constants)       # type: ignore[arg-type]
        arguments, results = self._arguments(inputs), self._results()
        manifest = {
            "made_by": {"firesteel": firesteel.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "of": type(taken.model).__qualname__ if isinstance(taken.model, torch.nn.Module) else getattr(taken.model, "__qualname__", "a function"),
            "kind": taken.kind, "training_mode": taken.training_mode, "processors": self.processors,
            "architectures": self.architectures if self.functions else [], "functions": [gpu.KNOWN[number][2].place for number in self.functions],
            "parts": [part.name for part in taken.parts],
            "positional": self.call.positional, "arguments": arguments, "results": results, "inputs": inputs, "symbols": self._symbols(inputs),
            "conditions": self._conditions(inputs), "torch_state": torch_state(),
            "guards": [without_paths(str(guard)) for guard in taken.guards],
            "plan": plan, "backward": encode(taken.backward, self.constants), "weights": weights,
            "constants": [self._stored([f"constant {k}"], t) for k, t in enumerate(self.constants)],
        }
        archive.write(path, manifest, self.members, self.pieces)

    # ------------------------------------------------------------ code

    def _write_code(self, processor: str) -> None:
        """Host functions and machine code for one processor."""
        target = PROCESSORS[processor].target(processor)
        texts = {"launch": threads.LAUNCH, "launch_serial": threads.LAUNCH_SERIAL, "call": LAUNCHER}
        for part in self.taken.parts:
            code_target = pipeline.target_of(part.plan.program)
            if code_target is pipeline.TARGETS[CPU]:
                kernels = [llvm.print_nest(nest, part.plan.program.buffers, target) for nest in pipeline.nests_of(part.plan)]
                texts |= {kernel.symbol: kernel.text for kernel in kernels}
                launches = {k.name: host.Launch(Word.of(0, KERNEL, k.symbol), k.buffers, k.symbols) for k in kernels}
                self._write_host(f"{processor}/{part.name}", host.write(part.plan, launches))
            else:
                texts[LAUNCH_ON_GPU] = cuda.LAUNCHER
                self._write_host_of_gpu(f"{processor}/{part.name}", part.plan)
        for name, code in cpu.object_code(texts, target).items():
            self.members[f"{processor}/{name}.o"] = code

    def _write_host(self, name: str, code: HostCode, given: Mapping[str, Any] | None = None) -> None:
        """`given`: what loading puts into the scope, for a GPU."""
        scope = {key: encode(value, self.constants) for key, value in code.scope.items() if key not in (given or {})}
        recipes = {key: cells(recipe, self.functions) for key, recipe in code.recipes.items()}
        self.members[f"{name}.py"], self.members[f"{name}{BYTE_CODE}"] = code.source.encode(), write_byte_code(code.source)
        self.members[f"{name}.json"] = json.dumps({"boxed": code.boxed, "scope": scope, "recipes": recipes, "on_gpu": bool(given)}).encode()

    def _write_host_of_gpu(self, name: str, plan: Plan) -> None:
        """Its launches are those of this process; all that differs in another is a `Word` of theirs."""
        target = pipeline.target_of(plan.program)
        assert target is not None
        launches, setup = target.load(plan, [target.print_nest(nest, plan.program.buffers) for nest in pipeline.nests_of(plan)])
        launcher = Word.of(0, KERNEL, LAUNCH_ON_GPU)
        moved = {nest: tuple(dataclasses.replace(launch, address=launcher) for launch in row) for nest, row in launches.items()}
        code = host.write(plan, moved, setup)
        numbers = (word.name for recipe in code.recipes.values() for word in recipe if isinstance(word, Word) and word.kind in cuda.FINDERS)
        for number in numbers:
            self.functions.setdefault(number, len(self.functions))
        self._write_host(name, code, setup.scope)

    def _write_functions(self) -> None:
        """Machine code for each architecture: of every function for aligned addresses, and for any."""
        known = [gpu.KNOWN[number] for number in self.functions]
        self.architectures = self.architectures or sorted({f"sm_{cuda.device(function.place).capability}" for _, _, function in known})
        for name, (aligned, end) in itertools.product(self.architectures, ((True, ""), (False, ANY))):
            for number, binary in enumerate(gpu.binaries([(kernel, one, aligned, capability_of(name) or 0) for kernel, one, _ in known])):
                self.members[f"{name}/{number}{end}.json"] = json.dumps([binary.name, binary.shared]).encode()
                self.members[f"{name}/{number}{end}.cubin"] = binary.cubin

    # ------------------------------------------------------------ tensors

    def _inputs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows of weights: all tensors of the model, then others that the program reads; rows of the graph's inputs)."""
        weights = [self._weight(names, tensor) for names, tensor in self.states.values()]
        places = {key: place for place, key in enumerate(self.states)}
        inputs = []
        for value, example in zip(self.taken.inputs, self.taken.examples):
            leaf = self._leaf(value, example)
            if leaf is not None:
                inputs.append({"leaf": leaf, "name": self.call.names[leaf], **facts(value, example)})
                continue
            if not isinstance(value, torch.Tensor):
                raise PackageError(f"The program reads a {type(value).__name__} that is neither an argument nor a tensor of the model.")
            if id(value) not in places:
                places[id(value)] = len(weights)
                weights.append(self._weight([f"constant_{len(weights)}"], value))
            place = places[id(value)]
            inputs.append({"weight": place, "name": weights[place]["names"][0], **facts(value, example)})
        return weights, inputs

    def _leaf(self, value: Any, example: Any) -> int | None:
        """The argument that an input is; numbers by the name under which capture knows them."""
        if isinstance(value, torch.Tensor):
            return self.call.place(value)
        symbol = from_sym(example) if isinstance(example, SYMBOLIC) else None
        source = self.env.symbols[symbol].source if self.env is not None and isinstance(symbol, Expr) else ""
        found = re.fullmatch(r"arg(\d+)", source)
        name = self.call.positional[int(found[1]) - 1] if found is not None else source
        return self.call.names.index(name) if name in self.call.names else None

    def _weight(self, names: list[str], tensor: torch.Tensor) -> dict[str, Any]:
        known = id(tensor) in self.states
        stored = self.store or not known
        persistent = known and names[0] in self.kept
        return {**self._stored(names, tensor, stored), "stored": stored, "parameter": isinstance(tensor, torch.nn.Parameter),
                "requires_grad": tensor.requires_grad and self.taken.kind == "training", "persistent": persistent}

    def _stored(self, names: list[str], tensor: torch.Tensor, stored: bool = True) -> dict[str, Any]:
        """The row of a tensor, whose bytes go behind those of the others."""
        device = tensor.device
        if device.type not in KINDS or tensor.layout is not torch.strided:
            raise PackageError(f"{names[0]} is a {tensor.layout} tensor on {device}; packages hold dense ones of the CPU or a GPU.")
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if not on_host(tensor) or tensor.storage_offset() or own.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            tensor = own.copy_(tensor.detach())
        size = own.untyped_storage().nbytes()
        row = {"names": names, "dtype": encode(tensor.dtype, []), "shape": list(tensor.shape), "strides": list(tensor.stride()),
               "offset": self.offset, "bytes": size, "device": str(device)}
        if stored:
            padding = -size % ALIGNED
            self.pieces += [memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else b"", bytes(padding)]
            self.offset += size + padding
            self._kept.append(tensor)
        return row

    # ------------------------------------------------------------ the call

    def _arguments(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        read, rows, place = {id(value) for value in self.taken.inputs}, [], 0
        for name, structure in self.call.structures.items():
            leaves = []
            for _ in range(self.call.counts[name]):
                leaf: dict[str, Any] = {"name": self.call.names[place]}
                value, first = self.call.leaves[place], self.call.place(self.call.leaves[place])
                if isinstance(value, torch.Tensor):
                    about = tensor_words(value) if id(value) in read else "a tensor, not read"
                    leaf |= {"same_as": first} if first != place else {"is": about}
                elif not any(row.get("leaf") == place for row in inputs):
                    leaf["value"] = encode(value, self.constants)
                leaves.append(leaf)
                place += 1
            rows.append({"name": name, "structure": structure_text(structure), "leaves": leaves})
        return rows

    def _results(self) -> dict[str, Any]:
        markers, given = {id(m): k for k, m in enumerate(self.taken.markers)}, {id(v): k for k, v in reversed(list(enumerate(self.taken.inputs)))}
        leaves: list[dict[str, Any]] = []
        for value in self.taken.results:
            if id(value) in markers:
                leaves.append({"result": markers[id(value)]})
            elif id(value) in given and isinstance(value, torch.Tensor):
                leaves.append({"input": given[id(value)]})
            elif isinstance(value, torch.Tensor):
                raise PackageError("The program returns a tensor that it does not compute with.", hint="Return it outside of the package.")
            else:
                leaves.append({"value": encode(value, self.constants)})
        return {"structure": structure_text(self.taken.result_structure), "leaves": leaves}

    def _symbols(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Where each symbol is read, of those that inputs bind."""
        found: dict[str, dict[str, Any]] = {}
        for number, (example, row) in enumerate(zip(self.taken.examples, inputs)):
            if isinstance(example, SYMBOLIC):
                found.setdefault(str(from_sym(example)), {"is": row["name"], "input": number, "kind": "value", "dim": 0})
            elif isinstance(example, AbstractTensor):
                for kind, text, sizes in (("size", "size", example.spec.shape), ("stride", "stride", example.spec.strides)):
                    for dim, size in enumerate(sizes):
                        if isinstance(size, Expr) and size.op == "symbol":
                            found.setdefault(str(size), {"is": f"{row['name']}.{text}({dim})", "input": number, "kind": kind, "dim": dim})
        return found

    def _conditions(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows, symbols = [], self._symbols(inputs)
        for guard in self.env.guards() if self.env is not None else ():
            reads = sorted(str(symbol) for symbol in free_symbols(guard.expr))
            if not set(reads) <= symbols.keys():
                raise PackageError(f"The program needs {guard.text()}, which does not follow from its arguments.")
            asked = guard.location is not None        # else it is a range that was declared
            why = f"{f' ({guard.why})' if guard.why else ''}, by {without_paths(str(guard.location))}" if asked else ""
            rows.append({"text": guard.text(), "reads": reads, "words": guard.text({name: row["is"] for name, row in symbols.items()}), "why": why})
        return rows


def states_of(model: Any) -> dict[int, tuple[list[str], torch.Tensor]]:
    """Parameters and buffers with all of their names, in the order of state_dict, by their ids."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False) if isinstance(model, torch.nn.Module) else ():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{path}.{name}".removeprefix("."))
    return found


def structure_text(structure: Any) -> str:
    try:
        return pytree.treespec_dumps(structure)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise PackageError(f"A structure of arguments or results has no text: {error}.",
                           hint="Register the class with a serialized_type_name.") from None


def facts(value: Any, example: Any) -> dict[str, Any]:
    """What a call checks of an input."""
    if not isinstance(value, torch.Tensor):
        return {"type": type(value).__name__}
    spec = example.spec if isinstance(example, AbstractTensor) else dumps.spec_of(value)
    return {"dtype": str(value.dtype), "device": str(value.device), "layout": str(value.layout), "dimensions": value.dim(),
            "requires_grad": value.requires_grad, "sizes": [python_text(s) for s in spec.shape], "strides": [python_text(s) for s in spec.strides],
            "words": f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(python_text, spec.shape))}]"}


def tensor_words(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def without_paths(text: str) -> str:
    """Files by their names, objects without their addresses: a package says nothing of the machine that made it."""
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"(?:/[^\s/:'\"]+)+/([^\s/:'\"]+)", r"\1", text))
