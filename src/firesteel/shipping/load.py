"""`fs.load(path)`: a package as a module that runs, without tracing and without a compiler.

The archive is checked (archive.py), machine code is linked (runtime/elf.py), host functions are made of their text (codegen/hosted.py).  A
call checks its arguments against what was recorded; what does not fit is an error that names the argument and says what was.

    program = fs.load("model.fsp")
    program(x)                              # a torch.nn.Module: parameters(), state_dict(), load_state_dict() as the original's
"""
from __future__ import annotations

import importlib.util
import json
import marshal
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import firesteel
from firesteel.autograd import alias
from firesteel.autograd.alias import AliasPlan, overlaps
from firesteel.autograd.edges import Dense, Tangent, is_transformed
from firesteel.codegen import hosted
from firesteel.errors import PackageError
from firesteel.native_method import CONSTANT, KERNEL
from firesteel.runtime import cuda, elf, threads
from firesteel.shipping.archive import Archive
from firesteel.shipping.kinds import KINDS
from firesteel.shipping.processors import best_architecture, best_of
from firesteel.shipping.values import RECORDS, decode
from firesteel.targets import CUDA, in_use

for _cls in (alias.AliasPlan, alias.At, alias.AttachedView, alias.Constant, alias.DataOf, alias.Fresh, alias.InputItself, alias.RemadeView,
             alias.Replay, alias.Spending, alias.ViewCall, alias.Write, Dense, Tangent):
    RECORDS.add(_cls.__name__, _cls)

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
ANY = ".any"        # in the name of machine code for addresses that are not aligned
BYTE_CODE = f".{sys.implementation.cache_tag}.pyc"          # of host functions, for the Python that wrote the package


def load(path: str | os.PathLike, weights: Mapping[str, torch.Tensor] | None = None) -> LoadedProgram:
    """The program of a package.  `weights` is a state_dict that stands in for the package's own; a package without weights needs one."""
    with Archive(path) as archive:
        check_versions(archive.manifest)
        check_devices(archive.manifest)
        return LoadedProgram(archive, weights)


def check_versions(manifest: Mapping[str, Any]) -> None:
    """Operators of torch, and what host functions call of ours, may differ between releases.  Python may: host functions are text."""
    here = {"torch": torch.__version__, "firesteel": firesteel.__version__}
    for name, version in here.items():
        made = manifest["made_by"][name]
        if release(version) != release(made):
            raise PackageError(f"The package was made with {name} {made}; this is {name} {version}.",
                               hint=f"Rebuild it, or use {name} {release(made)}.")


def check_devices(manifest: Mapping[str, Any]) -> None:
    rows = [*manifest["inputs"], *manifest["weights"], *manifest["constants"]]
    for name in sorted({row["device"] for row in rows if "device" in row}):
        where = torch.device(name)
        count = torch.cuda.device_count() if where.type == CUDA else 1
        if (where.index or 0) >= count:
            raise PackageError(f"The package is for {name}, of which torch finds {count} here.", hint="Load it on a machine with that GPU.")


def release(version: str) -> str:
    """2.13 of 2.13.1+cpu."""
    return ".".join(version.split("+")[0].split(".")[:2])


def torch_state() -> dict[str, str]:
    """Settings of torch that change what a program computes."""
    casting = [f"{device} {torch.get_autocast_dtype(device)}" for device in in_use() if torch.is_autocast_enabled(device)]
    return {"default dtype": str(torch.get_default_dtype()), "automatic casting": ", ".join(casting) or "off",
            "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled())}


# ---------------------------------------------------------------- machine code and host functions

def read_parts(archive: Archive, constants: Sequence[torch.Tensor]) -> dict[str, Callable]:
    """The host functions, forward and backward, for this processor."""
    folder = best_of(archive.manifest["processors"])
    entry_points = threads.openmp()
    launch = "launch.o" if entry_points else "launch_serial.o"
    files = [name for name in archive.names(f"{folder}/") if name.endswith(".o") and not os.path.basename(name).startswith("launch")]
    imports = {**entry_points, "fs_wanted": threads.wanted_address()} if entry_points else {}
    code = elf.link([archive.data(name) for name in (f"{folder}/{launch}", *files)], imports)
    functions = read_functions(archive)
    return {part: read_host(archive, f"{folder}/{part}", code, constants, functions) for part in archive.manifest["parts"]}


def read_functions(archive: Archive) -> list[cuda.Function]:
    """The kernels of GPUs, out of the code for their architectures."""
    names = archive.manifest["architectures"]
    return [read_function(archive, f"{best_architecture(names, cuda.device(index).capability)}/{number}", index)
            for number, index in enumerate(archive.manifest["functions"])]


def read_function(archive: Archive, stem: str, index: int) -> cuda.Function:
    """With its twin, for addresses that are not aligned."""
    own = cuda.device(index)
    (key, binary), twin = (read_binary(archive, f"{stem}{end}") for end in ("", ANY))
    return cuda.loaded(own, key, binary, lambda: own.known(*twin))


def read_binary(archive: Archive, stem: str) -> tuple[tuple, cuda.Binary]:
    """Machine code, and what it is known by."""
    name, shared = json.loads(archive.data(f"{stem}.json"))
    return (archive.manifest["members"][f"{stem}.cubin"],), cuda.Binary(name, shared, archive.data(f"{stem}.cubin"))


def read_host(archive: Archive, name: str, code: Mapping[str, int], constants: Sequence[Any], functions: Sequence[cuda.Function]) -> Callable:
    about = json.loads(archive.data(f"{name}.json"))
    given = {**hosted.memory_of_gpus(), **cuda.scope()} if about["on_gpu"] else {}
    scope = {**given, **{key: decode(value, constants) for key, value in about["scope"].items()}}

    def word(value: Any) -> int:
        if isinstance(value, int):
            return value
        kind, key = value
        return code[key] if kind == KERNEL else scope[key].data_ptr() if kind == CONSTANT else cuda.found(value, functions)
    recipes = {key: [word(value) for value in recipe] for key, recipe in about["recipes"].items()}
    known = byte_code(archive, name)
    return hosted.made(hosted.HostCode(archive.text(f"{name}.py"), about["boxed"], scope, recipes), lambda text, function: code[function], known)


def write_byte_code(source: str) -> bytes:
    """Format 2 of marshal has no references, which differ from process to process."""
    return importlib.util.MAGIC_NUMBER + marshal.dumps(hosted.compiled(source), 2)


def byte_code(archive: Archive, name: str) -> types.CodeType | None:
    """The host function as this Python compiles it, which for a large one takes longer than all else; None: another Python wrote the package."""
    magic = importlib.util.MAGIC_NUMBER
    data = archive.data(name + BYTE_CODE) if name + BYTE_CODE in archive.manifest["members"] else b""
    return marshal.loads(data[len(magic):]) if data.startswith(magic) else None


# ---------------------------------------------------------------- weights

def read_tensor(archive: Archive, about: Mapping[str, Any]) -> torch.Tensor:
    made = torch.empty_strided(about["shape"], about["strides"], dtype=decode(about["dtype"], ()))
    if made.untyped_storage().nbytes() != about["bytes"]:
        raise PackageError(f"The package says {about['bytes']} bytes for {about['names'][0]}, which takes {made.untyped_storage().nbytes()}.")
    archive.read_into(made.data_ptr(), about["offset"], about["bytes"])
    return made.to(about["device"])


class Holder(torch.nn.Module):
    """Holds the parameters and buffers of a part of the original."""


# ---------------------------------------------------------------- the program

class LoadedProgram(torch.nn.Module):
    """A package that runs.  `manifest` is what it says of itself."""

    def __init__(self, archive: Archive, weights: Mapping[str, torch.Tensor] | None):
        super().__init__()
        about = self.manifest = archive.manifest
        self._places = [self._hold(archive, row, weights) for row in about["weights"]]
        self._constants = [read_tensor(archive, row) for row in about["constants"]]
        self._structures = {row["name"]: pytree.treespec_loads(row["structure"]) for row in about["arguments"]}
        self._leaves = [leaf for row in about["arguments"] for leaf in row["leaves"]]
        self._results = pytree.treespec_loads(about["results"]["structure"])
        self._values = [decode(leaf.get("value"), self._constants) for leaf in self._leaves]
        self._out = [(row.get("result"), row.get("input"), decode(row.get("value"), self._constants)) for row in about["results"]["leaves"]]
        self._conditions = [(eval(f"lambda {', '.join(about['symbols'])}: {row['text']}", {"math": math}), row) for row in about["conditions"]]
        self._layouts = [eval(f"lambda {', '.join(about['symbols'])}: ({', '.join(map(str, [*row['sizes'], *row['strides'], '']))})", {"math": math})
                         if "sizes" in row else None for row in about["inputs"]]
        plan: AliasPlan = decode(about["plan"], self._constants)
        self._run = KINDS[about["kind"]](plan, read_parts(archive, self._constants), decode(about["backward"], self._constants))
        self._written = [write.input for write in plan.writes]
        super().train(about["training_mode"])

    def _hold(self, archive: Archive, row: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None) -> tuple[dict[str, Any], str]:
        """Puts a tensor under all of its names; gives where it is read."""
        given = None if weights is None else next((weights[name] for name in row["names"] if name in weights), None)
        if given is None and (not row["stored"] or weights is not None and row["persistent"]):
            raise PackageError(f"There is no value for {row['names'][0]}: {'the package has no weights' if weights is None else 'weights lacks it'}.",
                               hint="Call fs.load(path, weights=model.state_dict()).")
        tensor: Any = read_tensor(archive, row) if given is None else given.detach()
        if row["parameter"]:
            tensor = torch.nn.Parameter(tensor, row["requires_grad"])
        places = [self._place(name, tensor, row) for name in row["names"]]
        return places[0]

    def _place(self, name: str, tensor: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        owner: torch.nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = Holder()
            owner = owner._modules[part]        # type: ignore[assignment]
        if not row["persistent"]:
            owner._non_persistent_buffers_set.add(last)
        held = owner._parameters if row["parameter"] else owner._buffers
        held[last] = tensor
        return held, last

    def train(self, mode: bool = True) -> LoadedProgram:
        if mode != self.training:
            raise PackageError(f"The package was made of a model in {'training' if self.training else 'evaluation'} mode, which its code is for.",
                               hint=f"Make one more after model.{'eval' if self.training else 'train'}().")
        return self

    # ------------------------------------------------------------ calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._flat(args, kwargs)
        inputs = [leaves[row["leaf"]] if "leaf" in row else (place := self._places[row["weight"]])[0][place[1]] for row in self.manifest["inputs"]]
        self._check(leaves, inputs)
        found = self._run(inputs)
        results = [found[place] if place is not None else value if source is None else inputs[source] for place, source, value in self._out]
        return pytree.tree_unflatten(results, self._results)

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names, about = self.manifest["positional"], self.manifest["arguments"]
        if len(args) > len(names):
            raise PackageError(f"{len(args)} positional arguments were passed; the package was recorded for {', '.join(names) or 'none'}.")
        given = dict(zip(names, args))
        if twice := given.keys() & kwargs.keys():
            raise PackageError(f"{', '.join(sorted(twice))} was passed twice.")
        given |= kwargs
        recorded = [row["name"] for row in about]
        if missing := [name for name in recorded if name not in given]:
            raise PackageError(f"The argument {missing[0]} is missing; the package was recorded with {', '.join(recorded)}.")
        if extra := [name for name in given if name not in self._structures]:
            raise PackageError(f"The argument {extra[0]} was passed, without which the package was recorded; it takes {', '.join(recorded)}.")
        found: list[Any] = []
        for name in recorded:
            leaves, structure = pytree.tree_flatten(given[name])
            if structure != self._structures[name]:
                raise PackageError(f"{name} is built as {structure}; the package was recorded for {self._structures[name]}.")
            found += leaves
        return found

    def _check(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> None:
        if is_transformed():
            raise PackageError("A package is called under a function transform (vmap, grad, jvp), for which it has no code.", hint="Use fs.compile.")
        for leaf, value, about in zip(leaves, self._values, self._leaves):
            if "value" in about and (type(leaf) is not type(value) or leaf != value and leaf == leaf):
                raise PackageError(f"{about['name']} is {leaf!r}; the package was recorded for {value!r}, which is part of its code.",
                                   hint="Make a package for each value, or pass a tensor.")
            if "same_as" in about and leaf is not leaves[about["same_as"]]:
                raise PackageError(f"{about['name']} is not the same tensor as {self._leaves[about['same_as']]['name']}, as it was when recorded.")
        for name, value in torch_state().items():
            if value != self.manifest["torch_state"][name]:
                raise PackageError(f"torch's {name} is {value}; the package was recorded with {self.manifest['torch_state'][name]}.")
        for about, value in zip(self.manifest["inputs"], inputs):
            check_input(about, value, self.manifest["kind"])
        self._check_sizes(inputs)
        if self._written and overlaps(inputs, self._written):
            raise PackageError("Arguments share memory with one that the program writes to, for which the package has no code.", hint="Pass a copy.")

    def _check_sizes(self, inputs: Sequence[Any]) -> None:
        symbols = [read_symbol(row, inputs) for row in self.manifest["symbols"].values()]
        for holds, row in self._conditions:
            if not holds(*symbols):
                said = ", ".join(f"{about['is']} is {value}" for (name, about), value in zip(self.manifest["symbols"].items(), symbols)
                                 if name in row["reads"])
                raise PackageError(f"{said}; the package was recorded for {row['words']}{row['why']}.")
        for about, layout, value in zip(self.manifest["inputs"], self._layouts, inputs):
            if layout is not None:
                check_layout(about, layout(*symbols), value)


def read_symbol(row: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
    value = inputs[row["input"]]
    return value if row["kind"] == "value" else value.shape[row["dim"]] if row["kind"] == "size" else value.stride(row["dim"])


def check_input(about: Mapping[str, Any], value: Any, kind: str) -> None:
    """The facts of one input but its sizes."""
    name = about["name"]
    if "sizes" not in about:
        if type(value).__name__ != about["type"]:
            raise PackageError(f"{name} is a {type(value).__name__}; the package was recorded for a {about['type']}.")
        return
    if type(value) not in PLAIN:
        raise PackageError(f"{name} is a {type(value).__name__}; the package was recorded for a plain tensor.")
    facts = {"dtype": str(value.dtype), "device": str(value.device), "layout": str(value.layout), "dimensions": value.dim()}
    for fact, found in facts.items():
        if found != about[fact]:
            raise PackageError(f"{name} has the {fact} {found}; the package was recorded for {about[fact]}.", hint=f"It was {about['words']}.")
    if value.is_conj() or value.is_neg():
        raise PackageError(f"{name} has its conjugate or negative bit set, for which the package has no code.",
                           hint="Call resolve_conj().resolve_neg().")
    if value.requires_grad and not about["requires_grad"] and torch.is_grad_enabled():
        said = "without gradients" if kind == "inference" else f"for {name} without a gradient"
        raise PackageError(f"{name} requires a gradient; the package was recorded {said}.",
                           hint="Call it under torch.no_grad(), or make another package.")


def check_layout(about: Mapping[str, Any], layout: Sequence[int], value: torch.Tensor) -> None:
    sizes, strides = tuple(layout[:value.dim()]), tuple(layout[value.dim():])
    if tuple(value.shape) != sizes:
        raise PackageError(f"{about['name']} has the sizes {tuple(value.shape)}; the package was recorded for {about['words']}.",
                           hint="Make the package with dynamic= for sizes that change.")
    if any(a != b and n > 1 for a, b, n in zip(value.stride(), strides, sizes)) and value.numel():
        raise PackageError(f"{about['name']} has the strides {value.stride()}; the package was recorded for {strides}.",
                           hint=f"Pass {about['name']}.contiguous()." if strides == tuple(torch.empty(sizes, device="meta").stride()) else "")
