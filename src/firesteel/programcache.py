"""Compiled programs between processes: what the stages behind capture made of a graph, found again by the graph's text.

In: a captured graph and its example inputs.  Out: a `ProgramEntry` for `autograd.aot`: the outline of the traced program, its host functions and
their kernels, and the text of its backward graph, so that a second process traces, fuses, plans and prints nothing.  What always holds
 - The key holds all that decides: the graph's text, its inputs, the states of torch that tracing reads, settings, versions, the processor and
   the compiler's own sources.  No path, rank or address occurs in it.
 - What a program over DTensors cuts out may depend on the rank's place in a mesh.  Such a program is found by the text of what was traced of it, too:
   `TRACED` says for each place which that is, and ranks that trace the same make it once.
 - A program whose text does not say all of it is not kept: one that calls a user's function, holds a tensor or an object of its own, or has
   sizes that only run time knows.  `FIRESTEEL_LOGS=cache` says why.
 - Entries are files of `runtime/diskcache.py`, with its checks and digests.  What cannot be read is a miss, and is compiled.
 - Of a program whose parameters are frozen the cache has how values are computed of them, never the values: each process computes its own.
 - Processes that miss the same program at the same time make it once: one holds its lock, the others wait for it; ranks when they have compared it.
 - Nothing is kept or asked for while verifiers run, or while somebody wants to see the stages (dumps, logs): then all of them run.

An entry is a line of JSON, then bytes: the host function's code, and the kernels' object code or cubins.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import io
import json
import marshal
import math
import operator
import os
import platform
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

import firesteel
from firesteel import artifacts, stages, transaction
from firesteel.artifacts import counters, timed
from firesteel.autograd.frozen_call import FrozenCall
from firesteel.autograd.outline import Joint, Outline
from firesteel.capture.guards import STATES
from firesteel.codegen import hosted
from firesteel.config import config
from firesteel.homes import LIBRARY_OPERATORS, LaterModule, is_in_package
from firesteel.layouts import places_in
from firesteel.native_method import CONSTANT, KERNEL, Word
from firesteel.records import dataclass
from firesteel.runtime import cpu, cuda, diskcache
from firesteel.shipping import values
from firesteel.stages import STAGES
from firesteel.targets import CUDA, KINDS
from firesteel.torchstate import ATTENTION

if TYPE_CHECKING:
    from firesteel import dumps
    from firesteel.sym.env import ShapeEnv
else:
    dumps = LaterModule("firesteel.dumps")

SUFFIX = ".program"
OPERATORS = "torch.ops.firesteel."
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
INPUTS = "\n# inputs\n"      # between a graph's text and those of its inputs
TRACED = "traced at"        # a rank's place in the meshes of a graph -> the digest of the program that is traced there


class NotKept(Exception):
    """Why a program is not in the cache."""


def entry_of(gm: GraphModule, example_inputs: Sequence[Any], mode: str = "") -> DiskEntry | None:
    """The place of a captured graph, compiled for a mode (backends.py); None where it has none."""
    try:
        with timed("program_cache"):
            check_asked()
            key = gm.meta["program_key"] = key_of(gm, example_inputs, mode)
            return DiskEntry(key, env_of(gm))
    except NotKept as reason:
        text = str(reason)
        artifacts.log("cache", lambda: f"a graph of {len(gm.graph.nodes)} nodes is not kept: {text}")
        return None


def known_entry(graph: str, mode: str = "") -> DiskEntry:
    """The place of a captured graph without symbols, of which the text is known."""
    return DiskEntry(key_of_text(graph, mode), None)


def check_asked() -> None:
    if config.profile:
        raise NotKept("perf is told the names of kernels, which the cache does not know")
    if config.verify or stages.current() is not None or any(map(artifacts.logging_enabled, {stage.log for stage in STAGES.values()} - {""})):
        raise NotKept("verifiers, dumps or logs ask for every stage")


# ---------------------------------------------------------------- keys

@dataclass(frozen=True)
class ProgramKey:
    graph: str              # or what else is looked up (regioncache.py)
    facts: dict[str, str]

    def __str__(self) -> str:
        return f"{self.graph}\n{json.dumps(self.facts)}"

    def note(self) -> None:
        """Keeps the facts with which it was kept last, for `why_missed`."""
        diskcache.kernels(SUFFIX).put(f"last {self.graph}", json.dumps(self.facts).encode())

    def why_missed(self, what: str) -> str:
        """In words."""
        last = diskcache.kernels(SUFFIX).get(f"last {self.graph}")
        if last is None:
            return f"no such {what} was kept"
        then = json.loads(last)
        changed = [f"{name} was {then.get(name)!s:.80}, is {value:.80}" for name, value in self.facts.items() if then.get(name) != value]
        return "; ".join(changed) or "its entry was removed or damaged"


def is_kept(key: ProgramKey) -> bool:
    name = program_name(key, places_in(key.graph))
    return name is not None and diskcache.kernels(SUFFIX).has(f"forward {name}")


def program_name(key: ProgramKey, place: str) -> str | None:
    """Under what a program is kept; None where it has meshes and nobody at this place has traced it."""
    if not place:
        return str(key)
    traced = diskcache.kernels(SUFFIX).get(f"{TRACED} {place} {key}")
    return None if traced is None else f"{key} {traced.decode()}"


def env_of(gm: GraphModule) -> ShapeEnv | None:
    return next((env for node in gm.graph.find_nodes(op="placeholder") if (env := dumps.environment(node.meta.get("val"))) is not None), None)


def key_of(gm: GraphModule, example_inputs: Sequence[Any], mode: str = "") -> ProgramKey:
    if any(not node.op.startswith(("call_", "placeholder", "output")) for node in gm.graph.nodes):
        raise NotKept("it holds a tensor or a graph of its own")
    text = dumps.graph_text(gm, hands_on=bool(gm.meta.get("hands_on")))
    inputs = "\n".join(map(input_text, example_inputs))
    check_text(text + inputs)
    if re.search(r"\bunbacked\(", text):
        raise NotKept("it has sizes that only run time knows")
    return key_of_text(f"{text}{INPUTS}{inputs}", mode)


def key_of_text(graph: str, mode: str = "") -> ProgramKey:
    """With what GPUs decide, where the text names one."""
    return ProgramKey(graph, fact_texts() | (cuda.facts() if CUDA in graph else {}) | ({"mode": mode} if mode else {}))


def fact_texts() -> dict[str, str]:
    return {name: str(value) for name, value in facts().items()}


def input_text(value: Any) -> str:
    from firesteel.graph.abstract import AbstractTensor, is_bare_view
    from firesteel.graph.wrappers import is_wrapper, parts_of
    text = dumps.value_text(value)
    if not isinstance(value, torch.Tensor):
        return text
    if is_wrapper(value):
        return f"{text} of {', '.join(map(input_text, parts_of(value)))}"
    if type(value) is not AbstractTensor or value.bits or value.device.type not in KINDS:
        raise NotKept("an input is no plain tensor of the CPU or a GPU")
    text += f" that is {text_of(value.given)}" if value.given is not None else ""
    base = value._base if is_bare_view(value) else None
    return text if base is None else f"{text} a view of one that {'requires' if base.requires_grad else 'needs no'} grad"


def check_text(text: str) -> None:
    """Does it say all?  Strings of the program that look as if it did not are taken for that."""
    strangers = [home for home in re.findall(r"\bfind\('([^']*)'", text) if not is_in_package(home, "firesteel")]
    strangers += [name for name in re.findall(r"\btorch\.ops\.(\w+)", text) if name not in (*LIBRARY_OPERATORS, *COLLECTIVES)]
    if strangers or "unreadable(" in text:
        raise NotKept(f"it calls or holds what is the program's own: {', '.join(strangers) or 'an object without a name'}")
    if "constant(None" in text:
        raise NotKept("it holds a large constant")


def facts() -> dict[str, Any]:
    """What decides besides the graph, by name: states of torch that tracing and lowering may read, settings, versions, the processor."""
    states = {name: row.read() for name, row in STATES.items()} | {name: get() for name, (get, _) in ATTENTION.items()}
    libraries = {"matmul precision": torch.get_float32_matmul_precision(), "mkldnn": torch._C._get_mkldnn_enabled(),
                 "deterministic mkldnn": torch._C._get_mkldnn_deterministic()}
    return {**states, **libraries, **dict(config.code_key()), **versions()}


@functools.cache
def versions() -> dict[str, str]:
    return {"firesteel": firesteel.__version__, "the compiler's sources": sources(), "torch": f"{torch.__version__} {torch.version.git_version}",
            "Python": platform.python_version(), "the processor": cpu.machine_key()}


def sources() -> str:
    """A digest of the compiler's own files.  To look at their times is 5 ms faster than to read them."""
    folder = os.path.dirname(firesteel.__file__)
    files = sorted(_files(folder))
    seen = repr([(name, found.st_mtime_ns, found.st_size) for name, found in files])
    known = diskcache.kernels(SUFFIX).get(f"sources {seen}")
    if known is None:
        total = hashlib.sha256()
        for name, _ in files:
            with open(os.path.join(folder, name), "rb") as file:
                total.update(f"{name} {hashlib.sha256(file.read()).hexdigest()}\n".encode())
        known = total.hexdigest().encode()
        diskcache.kernels(SUFFIX).put(f"sources {seen}", known)
    return known.decode()


def _files(folder: str, inside: str = "") -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    for item in os.scandir(os.path.join(folder, inside)):
        name = os.path.join(inside, item.name)
        if item.is_dir():
            found += _files(folder, name)
        elif name.endswith(".py"):
            found.append((name, item.stat()))
    return found


# ---------------------------------------------------------------- entries

def between_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def written(joint: Joint) -> Joint:
    """What a text holds of it, beside its graph."""
    plan = dataclasses.replace(joint.plan, assemble=None)       # type: ignore[arg-type]
    return dataclasses.replace(joint, gm=None, example_inputs=[], plan=plan)        # type: ignore[arg-type]


class DiskEntry:
    """The two files of one captured graph: what its forward needs, and its backward, which is compiled later."""

    def __init__(self, key: ProgramKey, env: ShapeEnv | None):
        self.key, self.env = key, env
        self.place = places_in(key.graph)
        self.name = program_name(key, self.place)       # under which its files are
        self.asked = len(env.recorded) if env is not None else 0        # questions before the program is traced
        self.before = self._made()
        self.found: dict[str, Callable] = {}
        self.about: dict[str, Any] = {}     # of the forward
        self.kept = False                   # is its forward there?
        self.let_go: Callable[[], None] = lambda: None      # of the lock that who makes it holds

    def _made(self) -> tuple[int, ...]:
        """What a cached program cannot recompute: symbols, conditions on them, and specialised sizes, with the line to report.  Numbers that the
        program itself computes of its sizes (a factor of batch normalisation) are no symbols of its callers."""
        if self.env is None:
            return ()
        symbols = [info for info in self.env.symbols.values() if info.hint is not None or info.expr.dtype != "f64"]
        return len(symbols), len(self.env.asserts), counters["aot"]["specialized_by_op"]

    def outline(self) -> Outline | None:
        """The outline where all is there."""
        with timed("program_cache"):
            read = self._read("forward") or (None if between_ranks() else self._claim("forward"))
        if read is not None and self.env is not None:
            names = {**dumps.NAMES, **{info.expr.attr: info.expr for info in self.env.symbols.values()}}
            for text, why in self.about["guards"]:      # what tracing would ask; the hints, which are in the key, answer as they did
                self.env.decide(eval(text, names), why)
        return None if read is None else read[1]

    def traced(self, joint: Joint) -> Outline | None:
        """Of a program that was traced and compared here: what another rank made of it.  Before that, ranks wait for each other to compare it."""
        if not between_ranks():
            return None
        with timed("program_cache"):
            if self.place:
                self.name = self._traced_name(joint)
            read = self._claim("forward")
            if read is not None:
                self._point()
        return None if read is None else read[1]

    def _traced_name(self, joint: Joint) -> str | None:
        text = dumps.graph_text(joint.gm) + text_of(written(joint))
        try:
            check_text(text)
        except NotKept as reason:
            why = str(reason)
            artifacts.log("cache", lambda: f"forward: is not kept: {why}")
            return None
        return f"{self.key} {hashlib.sha256(text.encode()).hexdigest()}"

    def _point(self) -> None:
        """Says which program is traced at this rank's place."""
        if self.place and self.name is not None:
            diskcache.kernels(SUFFIX).put(f"{TRACED} {self.place} {self.key}", self.name.rpartition(" ")[2].encode())

    def _claim(self, part: str) -> tuple[Callable, Any] | None:
        """Before it is made here: what another process made meanwhile, if one was about to."""
        if self.name is None:
            return None
        self.let_go, made = diskcache.kernels(SUFFIX).claim(f"{part} {self.name}")
        transaction.on_failure(self.let_go)
        if not made:
            return None
        artifacts.log("cache", lambda: f"{part}: another process made it meanwhile")
        read = self._read(part)
        if read is not None:
            self.let_go()
        return read

    def __del__(self) -> None:
        self.let_go()

    def _read(self, part: str) -> tuple[Callable, Any] | None:
        cache = diskcache.kernels(SUFFIX)
        payload = cache.get(f"{part} {self.name}") if self.name is not None else None
        if payload is None:
            artifacts.log("cache", lambda: f"{part}: a miss ({self.key.why_missed('graph')})")
            return None
        try:
            about, call = read_host(payload)
            outline = read_text(about["outline"]) if "outline" in about else None
        except Exception as error:      # written by us, read by us: whatever is wrong with it, it is compiled
            reason = f"{type(error).__name__}: {error}"
            artifacts.log("cache", lambda: f"{part}: cannot be used ({reason}), and is compiled")
            cache.forget(f"{part} {self.name}")
            return None
        self.kept = True
        counters["native"]["program_hits"] += 1
        counters["native"].update(about["counts"])
        artifacts.log("cache", lambda: f"{part}: found")
        self.found[part], self.about = call, about if part == "forward" else self.about
        return call, outline

    def forward(self) -> Callable:
        return self.found["forward"]

    def backward(self) -> Callable | None:
        with timed("program_cache"):
            read = self._read("backward")
        return None if read is None else read[0]

    def claim_backward(self) -> Callable | None:
        read = self._claim("backward")
        return None if read is None else read[0]

    def backward_graph(self) -> GraphModule:
        read = dumps.read_graph(self.about["backward_graph"])
        read.env.freeze()       # the guards are made
        read.gm.meta["boxed"] = True
        return read.gm

    def keep(self, outline: Outline, forward: Callable, backward_graph: GraphModule | None) -> None:
        kept = dataclasses.replace(outline, joint=written(outline.joint))
        about: dict[str, Any] = {"outline": text_of(kept)}
        if backward_graph is not None:
            about["backward_graph"] = dumps.graph_text(backward_graph)
        if self.env is not None:
            about["guards"] = [(dumps.size_text(guard.expr), guard.why) for guard in self.env.recorded[self.asked:]]
        if self._made() != self.before:
            artifacts.log("cache", "forward: is not kept: tracing makes or fixes sizes")
            self.let_go()
            return
        self._keep("forward", forward, about)
        if self.kept:
            self._point()
            self.key.note()

    def keep_backward(self, backward: Callable) -> None:
        if self.kept:
            self._keep("backward", backward, {})

    def _keep(self, part: str, compiled: Callable, about: dict[str, Any]) -> None:
        try:
            with timed("program_cache"):
                check_text("\n".join(map(str, about.values())))
                if self.name is None:
                    raise NotKept("what was traced has no text")
                diskcache.kernels(SUFFIX).put(f"{part} {self.name}", host_payload(compiled, about))
            self.kept = True
        except NotKept as reason:
            why = str(reason)
            artifacts.log("cache", lambda: f"{part}: is not kept: {why}")
        finally:
            self.let_go()


# ---------------------------------------------------------------- host functions

def host_payload(call: Any, about: dict[str, Any]) -> bytes:
    """A host function as bytes, and how it is recorded."""
    if isinstance(call, FrozenCall):
        check_text(call.once)
        about, call = {**about, "frozen": [call.once, call.places, call.layouts]}, call.call      # how values are computed, not the values
    if getattr(call, "measuring", False):
        raise NotKept("its kernels are measured meanwhile: the next process begins with the quickest")
    if (facts := getattr(call, "facts", None)) is not None:
        about, call = {**about, "recording": facts.words()}, call.call
    if not hasattr(call, "counts"):
        raise NotKept("torch runs it")
    own = {name: value for name, value in call.__globals__.items() if name not in hosted.SCOPE and name not in ("call", "__builtins__")}
    recipes = {name: value.__self__.recipe for name, value in own.items() if isinstance(getattr(value, "__self__", None), hosted.LaunchRecipe)}
    words = [word for recipe in recipes.values() for word in checked(recipe) if isinstance(word, Word)]
    given = cuda.scope() if "flag" in own else {}
    others = {name: value for name, value in own.items() if name not in recipes and name not in given and not isinstance(value, torch.dtype)}
    scope = text_of(others)
    check_text(scope)
    codes = cpu.kept_codes(dict.fromkeys(word.name for word in words if word.kind == KERNEL))
    places = {number: place for place, number in enumerate(dict.fromkeys(word.name for word in words if word.kind in cuda.FINDERS))}
    functions = importlib.import_module("firesteel.runtime.gpu").kept_functions(places) if places else []
    if codes is None or functions is None:
        raise NotKept("a kernel of it is not in the cache")
    code = marshal.dumps(call.__code__)
    head = {**about, "source": call.source, "boxed": call._boxed_call, "scope": scope, "counts": call.counts, "on_gpu": bool(given),
            "launches": {name: hosted.cells(recipe, places) for name, recipe in recipes.items()},
            "dtypes": {name: str(value).removeprefix("torch.") for name, value in own.items() if isinstance(value, torch.dtype)}, "code": len(code),
            "kernels": [(kept.symbol, kept.key.hex(), len(kept.code)) for kept in codes],
            "functions": [{**facts, "size": len(cubin)} for facts, cubin in functions]}
    return b"".join([json.dumps(head).encode(), b"\n", code, *(kept.code for kept in codes), *(cubin for _, cubin in functions)])


def checked(recipe: list[int]) -> list[int]:
    """A recipe whose kernels can be found again."""
    if not all(isinstance(address, Word) for address in hosted.kernels_of(recipe)):
        raise NotKept("a kernel of it was loaded otherwise")
    return recipe


def text_of(value: Any) -> str:
    """One expression."""
    writer = dumps.TextWriter()
    text = writer.text(value)
    return text if not writer.lines else f"unreadable({writer.lines[0]!r})"


class Names(dict):
    """Names in a text: common ones; all others are those of dumps.py, which is loaded for them."""

    def __missing__(self, name: str) -> Any:
        if name not in dumps.NAMES:
            raise KeyError(name)
        return dumps.NAMES[name]


COMMON = {"torch": torch, "operator": operator, "math": math, "find": values.find}


def read_text(text: str) -> Any:
    return eval(text, {}, Names(COMMON))


def read_host(payload: bytes) -> tuple[dict[str, Any], Callable]:
    """What is known beside a host function, and the function."""
    if OPERATORS.encode() in payload:
        importlib.import_module("firesteel.ops")        # with what defines operators of ours
    end = payload.index(b"\n")
    about = json.loads(payload[:end])
    pieces = io.BytesIO(payload[end + 1:])
    code = marshal.loads(pieces.read(about["code"]))
    addresses = cpu.load_codes([cpu.KeptCode(symbol, bytes.fromhex(key), pieces.read(size)) for symbol, key, size in about["kernels"]])
    functions = [kept_function(facts, pieces.read(facts["size"])) for facts in about["functions"]]
    scope = {**hosted.SCOPE, **(cuda.scope() if about["on_gpu"] else {}), **read_text(about["scope"]),
             **{name: getattr(torch, text) for name, text in about["dtypes"].items()}}

    def word(cell: Any) -> int:
        if isinstance(cell, int):
            return cell
        kind, name = cell
        return addresses[name] if kind == KERNEL else scope[name].data_ptr() if kind == CONSTANT else cuda.found(cell, functions)
    for name, cells in about["launches"].items():
        scope[name] = hosted.launcher(list(map(word, cells)), cpu.compile_text)
    call = scope["call"] = types.FunctionType(code, scope)
    vars(call).update(source=about["source"], _boxed_call=about["boxed"], counts=about["counts"])
    if "recording" in about:
        graphs = importlib.import_module("firesteel.runtime.graphs")
        call = graphs.Recording(graphs.RecordedFacts.read(about["recording"]), call)
    return about, FrozenCall(call, *about["frozen"]) if "frozen" in about else call


def kept_function(facts: Mapping[str, Any], cubin: bytes) -> cuda.Function:
    """A function of a GPU; its twin is compiled, or found in the cache, where it is needed."""
    key = cuda.key_of(facts["function"], facts["warps"], True)
    twin = lambda: importlib.import_module("firesteel.runtime.gpu").kept_twin(facts)
    return cuda.loaded(cuda.device(facts["index"]), key, cuda.Binary(facts["name"], facts["shared"], cubin), twin)
