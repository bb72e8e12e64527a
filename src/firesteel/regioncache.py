"""Captured regions between processes: guards and run function of a call, found again where the program's code is unchanged.

In: a region (capture/entry.py) and the inputs of its first call.  Out: its code as capture would make it, without tracing anything; or None, and the
reason in the log (`FIRESTEEL_LOGS=cache`).  The compiled graph comes from `programcache.py`, by the text of the captured graph.  What always holds
 - Every guard that capture made is in the entry, and is checked on the call for which it is loaded, and on all later ones.
 - What capture took as fixed is compared by prints (capture/prints.py): all functions that it executed, the classes that it met, what code may
   have read of builtins and of modules of torch and the standard library, and the files in which the program's own code stands.
 - A region that relies on anything else is not kept: objects that are no code and that no source leads to, graphs that are not kept themselves, or
   are compiled in parts and have symbols.  Functions that are compiled on their own at a break are regions too.
 - Where torch.distributed runs, the rank is part of the key, and groups are found by their names and ranks; ranks compare the collectives of what
   they load as of what they capture.
 - Up to VARIANTS of a region are kept, and tried in turn.  What was seen to change, by which symbols are chosen, is part of their key: a variant
   is found where capture would make the same.  A region behind a break is one like others, its frames are part of its key.
 - Nothing is pickled.  Entries are files of `runtime/diskcache.py`; what cannot be read is a miss, and is captured again.

An entry is a line of JSON, then the code of the run function.
"""
from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import json
import marshal
import os
import sys
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from firesteel import artifacts, backends, programcache, torchstate
from firesteel.artifacts import counters, note_break, timed
from firesteel.autograd.ranks import RankPlace, compare_ranks, follow
from firesteel.capture import marks
from firesteel.capture.eager_errors import as_eager_says
from firesteel.capture.entry import code_of
from firesteel.capture.guard_function import GuardFunction, MachineCode, build_guards
from firesteel.capture.guards import Guard
from firesteel.capture.policy import SymbolPolicy
from firesteel.capture.prints import NATIVE, NoPrint, Prints, digest
from firesteel.capture.region_code import END, RegionCode
from firesteel.capture.region_text import Changed, RegionReader, RegionWriter, Unwritable, described, path_of, scope_name
from firesteel.capture.source import Constants, Fixed, Item, Local
from firesteel.capture.world import STATIC
from firesteel.config import KNOBS, STARTED, config
from firesteel.errors import Location
from firesteel.homes import LIBRARY_OPERATORS, LaterModule, is_in_package, is_library
from firesteel.layouts import is_layout
from firesteel.programcache import SUFFIX, NotKept, ProgramKey
from firesteel.runtime import diskcache

if TYPE_CHECKING:
    from firesteel import dumps
    from firesteel.autograd import aot
    from firesteel.capture.translate import Captured
else:
    aot, dumps = LaterModule("firesteel.autograd.aot"), LaterModule("firesteel.dumps")

FIXED = (type, types.FunctionType, types.ModuleType, types.MethodType, property, staticmethod, classmethod, types.CellType,
         functools._lru_cache_wrapper, typing._SpecialForm)
# native functions and operators, to which compared names lead; what is derived of functions, which are compared; layouts are derived of guarded ones
UNCHANGING = (*NATIVE, torch._ops.OpOverload, torch._ops.OpOverloadPacket, inspect.Signature, inspect.Parameter)
ALWAYS = (torch.Tensor, torch.nn.Parameter)
VARIANTS = 8            # of a region
OPERATORS = frozenset(f"torch.ops.{name}" for name in (*LIBRARY_OPERATORS, "_c10d_functional"))     # whose names nobody gives another meaning
# settings that change nothing in what is captured
SILENT = frozenset({"cache_dir", "compile_threads", "progress", "internal_frames", "profile", "report", "keep_stages", "dump_dir", "verify"})


def load(region: Any, inputs: Sequence[Any]) -> RegionCode | None:
    """The code of a region whose entry holds for these inputs."""
    try:
        with timed("region_cache"):
            check_asked(region)
            code = first_that_holds(region, inputs)
    except (Changed, NotKept) as reason:
        say(region, f"a miss ({reason})")
        return None
    counters["native"]["region_hits"] += 1
    say(region, "found")
    return code


def first_that_holds(region: Any, inputs: Sequence[Any]) -> RegionCode:
    reasons: dict[str, None] = {}
    key = key_of(region, inputs)
    for payload in variants(str(key)):
        try:
            return Loading(region, inputs, payload).code()
        except Changed as reason:
            reasons[str(reason)] = None
        except Exception as error:      # written by us, read by us: whatever is wrong with it, it is captured again
            reasons[f"it cannot be used: {type(error).__name__}: {error}"] = None
    raise Changed("; ".join(reasons) or key.why_missed("call"))


def variants(key: str) -> Iterator[bytes]:
    for number in range(VARIANTS):
        payload = diskcache.kernels(SUFFIX).get(f"{key} {number}")
        if payload is None:
            return
        yield payload


def place_for(key: str, payload: bytes) -> str:
    """The key of a new variant: one that is free, that says the same or whose program has changed; else one of all."""
    number = 0
    for number, known in enumerate(variants(key)):
        if known.partition(b"\n")[0] == payload.partition(b"\n")[0] or any(is_another(*file) for file in read_about(known)["files"].items()):
            return f"{key} {number}"
    free = number + 1 if diskcache.kernels(SUFFIX).has(f"{key} {number}") else number
    return f"{key} {free if free < VARIANTS else zlib.crc32(payload) % VARIANTS}"


def keep(region: Any, inputs: Sequence[Any], made: Captured) -> None:
    """Writes what was just captured, where all of it can be written."""
    try:
        with timed("region_cache"):
            check_asked(region)
            payload = Keeping(region, made).payload()
            key = key_of(region, inputs)
            diskcache.kernels(SUFFIX).put(place_for(str(key), payload), payload)
            key.note()
    except (NotKept, Unwritable, NoPrint) as reason:
        counters["regions_not_kept"][str(reason)] += 1
        say(region, f"is not kept: {reason}")


def say(region: Any, text: str) -> None:
    artifacts.log("cache", lambda: f"region {region.name}: {text}")


def check_asked(region: Any) -> None:
    programcache.check_asked()
    if not config.cache_dir:
        raise NotKept("there is no cache")
    if not region.can_be_kept:
        raise NotKept("it is a backward, runs under a torch function mode, or is compiled for one call")
    if marks.SUBSTITUTES:
        raise NotKept("functions are substituted")


# ---------------------------------------------------------------- keys

def key_of(region: Any, inputs: Sequence[Any]) -> ProgramKey:
    """Which call it is, as far as that is cheap to find out: the guards decide."""
    root = region.root
    fn = root.fn
    path = path_of(fn) or str(getattr(fn, "__qualname__", ""))
    about: dict[str, Any] = {
        "name": region.name, "function": path, "arguments": region.arg_names, "place": str(region.place()),
        "positional": getattr(region, "positional", None), "fullgraph": root.fullgraph, "dynamic": root.dynamic,
        "mode": backends.mode_of(root.backend), "learnt": region.policy.text(),
        "inputs": [input_text(value, Local(name), region.policy) for name, value in zip(region.arg_names, inputs)]}
    settings = {name: str(getattr(config, name)) for name in KNOBS if name not in SILENT}
    if groups():        # what the program asks of it, capture takes as constants
        about["rank"] = [torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend()]
    return ProgramKey(f"region {json.dumps(about)}", settings | programcache.fact_texts())


def groups() -> dict[str, Any]:
    """Process groups by name and ranks: what the program asks of them is in the key, or follows from these."""
    world: Any = torch.distributed.distributed_c10d if torch.distributed.is_available() and torch.distributed.is_initialized() else None
    if world is None:
        return {}
    return {f"group {name} {world.get_process_group_ranks(group)}": group for group, name in world._world.pg_names.items()
            if isinstance(group, world.ProcessGroup)}


def input_text(value: Any, source: Local, policy: SymbolPolicy) -> str:
    if isinstance(value, torch.nn.Module):
        parts = [f"{name} {type(part).__qualname__} {part.training}" for name, part in value.named_modules()]
        return digest(str([*parts, *[(name, tuple(p.shape)) for name, p in value.named_parameters()]]))
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        sizes = [size if how == STATIC else "" for size, how in zip(value.shape, policy.dimensions(value, source))]
        return f"{value.dtype} {sizes} {value.requires_grad} {value.device}"
    if type(value) in (bool, int, float, str) and (type(value) not in (int, float) or not policy.number_is_symbol(source, value)):
        return repr(value)
    return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


# ---------------------------------------------------------------- files of the program

@functools.cache
def file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def file_of(home: str) -> str | None:
    found = getattr(sys.modules.get(home), "__file__", None)
    return found if isinstance(found, str) and os.path.exists(found) else None


def is_another(home: str, then: str) -> bool:
    path = file_of(home)
    return path is None or file_digest(path) != then


def files_of(homes: Iterable[str]) -> dict[str, str]:
    """Digests of the files in which code of the user's stands."""
    found = {}
    for home in homes:
        if home.startswith("namedtuple_"):      # written by Python for a class, whose own module is one of these
            continue
        path = file_of(home)
        if path is None:
            raise NotKept(f"code of {home} stands in no file")
        if os.stat(path).st_mtime > STARTED:
            raise NotKept(f"{home} was written after the process began")
        found[home] = file_digest(path)
    return found


# ---------------------------------------------------------------- writing

class Keeping:
    """One region, as it is written."""

    def __init__(self, region: Any, made: Captured):
        self.region, self.made, self.prints = region, made, Prints()
        self.names = {name: value for name, value in made.run.__globals__.items() if name.startswith("c_")}
        told = next((value for value in self.names.values() if getattr(value, "func", None) is as_eager_says), None)
        self.groups = groups()
        own = {"graph": made.compiled, "told": told, "region": region, "function": region.root.fn, "code": code_of(region.root.fn), "end": END,
               **self.groups}
        self.guards = [guard for guard in made.guard.guards if not self._always_holds(guard)]
        homes = {code: str(scope.get("__name__", "")) for code, scope in made.executed.items()}
        self.writer = RegionWriter(self.guards, {name: value for name, value in own.items() if value is not None}, self.prints, homes)

    def payload(self) -> bytes:
        made, writer = self.made, self.writer
        fixed = self._fixed()
        about = {"guards": list(map(writer.guard, self.guards)), "returns": [writer.source(source) for source in made.returns],
                 "names": {name: self._name(value) for name, value in self.names.items()}, "frames": writer.value(getattr(self.region, "spec", None)),
                 "fixed": [writer.object(obj) for obj in fixed if writer.is_found(obj)],
                 "function": self.prints.of(self.region.root.fn), "text": made.run.__source__, "scope": made.run.__globals__.get("__name__"),
                 "asked": sorted(self._names()), "library": self._library(), "imported": self._imported(), "ranks": self.region.ranks,
                 **self._break(), **self._program()}
        self._check_executed(fixed)
        homes = {*self.prints.homes, *(str(scope.get("__name__", "")) for scope in made.executed.values())}
        files = files_of(sorted(home for home in homes if not is_library(home) and not is_in_package(home, "firesteel")))
        return json.dumps({**about, **writer.tables(), "files": files}).encode() + b"\n" + marshal.dumps(made.run.__code__)

    def _always_holds(self, guard: Guard) -> bool:
        """Is it about what nobody can change: a native function's own name, an operator of a namespace, a name in a module of ours, a layout that
        follows from others, or the parameters of a signature that capture made?"""
        root = guard.source.root if guard.source is not None else None
        if type(root) is not Fixed:
            return False
        home = str(root.key.get("__name__")) if type(root.key) is dict else ""
        own_name = is_in_package(home, "firesteel") and type(guard.source) is Item and guard.source.base is root
        return home in OPERATORS or own_name or isinstance(root.key, NATIVE) or is_layout(root.key) or self._is_of_signature(root.key)

    def _is_of_signature(self, obj: Any) -> bool:
        signatures = [one for one, _ in self.made.objects if isinstance(one, inspect.Signature)]
        return type(obj) is types.MappingProxyType and any(obj is one.parameters for one in signatures)

    def _program(self) -> dict[str, Any]:
        graph = self.made.graph
        if graph is None:
            return {"program": None}
        parts = graph.meta.get("part_keys", [])
        keys = parts or [graph.meta.get("program_key")]
        if any(key is None or not programcache.is_kept(key) for key in keys):
            raise NotKept(f"{'a part of ' if parts else ''}its graph is not kept")
        if parts and (env := programcache.env_of(graph)) is not None and env.symbols:
            raise NotKept("its graph has symbols, and is compiled in parts")
        key = programcache.key_of(graph, examples(graph)) if parts else keys[0]
        return {"program": key.graph, "mode": keys[0].facts.get("mode", ""), "parts": [part.graph for part in parts],
                "turns_on": aot.program_of(graph)[1],
                "calls": sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes), **traces(graph, self._homes())}

    def _break(self) -> dict[str, Any]:
        """The break that ended it, and the files whose names its code says where the program raises."""
        stop = self.made.stopped
        if stop is None:
            return {"broke": None, "says": {}}
        place = stop.location
        where = [place.file, place.line, place.function] if place is not None else None
        return {"broke": [stop.sentence, where, stop.hint], "says": self._homes()}

    def _name(self, value: Any) -> Any:
        """A name of the run function's: regions behind breaks by their frames, functions compiled on their own by those that they stand for."""
        if getattr(value, "resumes", False):
            return {"continuation": self.writer.value(value.spec)}
        whole, owner = next((key for key, part in self.region.root.parts.items() if part is not None and part is value), (None, None))
        if whole is None:
            return self.writer.value(value)
        return {"part": [self.writer.value(whole if owner is None else owner), None if owner is None else whole.__name__]}

    def _fixed(self) -> list[Any]:
        """Objects that capture took as they were, without a guard."""
        found: list[Any] = [*ALWAYS]
        for obj, value in self.made.objects:
            if isinstance(obj, types.FunctionType) and marks.is_marked(obj, marks.CONSTANT):
                raise NotKept(f"a result of {described(obj)} is a constant of this process")
            if value.source is not None and type(value.source) is not Fixed or is_ours(obj) or any(obj is group for group in self.groups.values()):
                continue
            if isinstance(obj, UNCHANGING) or is_layout(obj) or self._is_of_signature(obj) or type(obj) is dict and scope_name(obj) is not None:
                continue
            if not isinstance(obj, FIXED):
                raise NotKept(f"it relies on {described(obj)}, whose contents nothing guards")
            if not isinstance(obj, (types.CellType, types.ModuleType)) and obj is not self.region.root.fn:
                found.append(obj)
        return list({id(obj): obj for obj in found}.values())

    def _library(self) -> dict[str, dict[str, str]]:
        """What may have been read of modules of libraries, by whatever was executed."""
        names = self._names()
        loaded = [obj for obj, _ in self.made.objects if isinstance(obj, types.ModuleType) and not isinstance(obj, torch._ops._OpNamespace)]
        modules = [builtins, *loaded]
        scopes = [*map(vars, modules), *self.made.executed.values()]
        found = {module_name(scope): scope for scope in scopes if is_library(str(scope.get("__name__", "")))}
        return {home: {name: library_print(self.prints, scope[name]) for name in sorted(names & scope.keys())} for home, scope in found.items()}

    def _imported(self) -> dict[str, Any]:
        """Without torch's operators, which are there when they are asked for."""
        return {home: names for home, names in self.made.imported.items() if not is_in_package(home, "torch.ops")}

    def _names(self) -> set[str]:
        codes = list(self.made.executed)
        return {name for code in codes for name in (*code.co_names, *(text for text in code.co_consts if isinstance(text, str)))}

    def _check_executed(self, fixed: Sequence[Any]) -> None:
        """Is all code compared, if not by its own name then with what holds it?"""
        for obj in fixed:
            if not self.writer.is_found(obj) and id(obj) not in self.prints.functions:
                raise NotKept(f"no name and no guard leads to {described(obj)}")
        for code, scope in self.made.executed.items():
            home = str(scope.get("__name__", ""))
            if code not in self.prints.codes and not is_in_package(home, "firesteel"):
                raise NotKept(f"it executes {code.co_qualname} of {home}, which was found in a way that is not compared")

    def _homes(self) -> dict[str, str]:
        """Without ours, which may not be loaded where the region is."""
        homes = {str(scope.get("__name__", "")) for scope in self.made.executed.values()}
        return {home: path for home in homes if not is_in_package(home, "firesteel") and (path := file_of(home)) is not None}


def is_ours(obj: Any) -> bool:
    return is_in_package(str(getattr(obj, "__module__", "")), "firesteel")


def module_name(scope: dict[str, Any]) -> str:
    """Of a module of a library, by its globals: some say another name than theirs (_collections_abc)."""
    known = scope_name(scope) or next((name for name, module in list(sys.modules.items()) if getattr(module, "__dict__", None) is scope), None)
    if known is None:
        raise NotKept(f"the globals of {scope.get('__name__')} are those of no module")
    return known


def library_print(prints: Prints, value: Any) -> str:
    return digest(prints.part(value))


def traces(graph: torch.fx.GraphModule, files: Mapping[str, str]) -> dict[str, Any]:
    """The program's lines, for errors; the names of modules stand in the place of their files."""
    table: dict[str, int] = {}
    nodes = {node.name: table.setdefault(node.stack_trace, len(table)) for node in graph.graph.nodes if node.stack_trace}
    texts = list(table)
    for home, path in files.items():
        texts = [text.replace(f'"{path}"', f'"<{home}>"') for text in texts]
    return {"lines": nodes, "traces": texts, "homes": list(files)}


def examples(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


# ---------------------------------------------------------------- reading

def part_entry(known: Iterator[str], mode: str, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """The place of the next part of a graph.  The texts of its inputs may differ: a graph that was read does not know what they are views of."""
    text = next(known, "")
    if dumps.graph_text(graph, hands_on=bool(graph.meta.get("hands_on"))) != text.rpartition(programcache.INPUTS)[0]:
        raise Changed("its graph is cut at other places")
    entry = programcache.known_entry(text, mode)
    found = entry.outline()
    if found is None:
        raise Changed("a part of its program is not in the cache")
    vars(entry)["outline"] = lambda: found
    return entry


def read_about(payload: bytes) -> dict[str, Any]:
    return json.loads(payload[:payload.index(b"\n")])


class Loading:
    """One entry, as it is read for a call."""

    def __init__(self, region: Any, inputs: Sequence[Any], payload: bytes):
        self.region, self.inputs, self.about = region, inputs, read_about(payload)
        self.run_code = marshal.loads(payload[payload.index(b"\n") + 1:])
        self.prints = Prints()
        self.read_graph: Callable[[], Any] = functools.cache(self._graph)
        self.own: dict[str, Any] = {"region": region, "function": region.root.fn, "code": code_of(region.root.fn), "told": self._told, "end": END,
                                    **groups()}
        self.reader = RegionReader(self.about, dict(zip(region.arg_names, inputs)), self.own, self.prints)

    def code(self) -> RegionCode:
        self._compare()
        guards = list(map(self.reader.guard, self.about["guards"]))
        if self.about["program"] is not None:
            self.own["graph"] = self._compiled()
        elif self.about["ranks"]:
            compare_ranks({"": []}, self.about["ranks"])
        guard = self._guards(guards)        # with machine code, where the kernels brought a compiler
        made = RegionCode(guard, self._run(), self.read_graph, self._broke(), True, False)
        if self.about["ranks"]:
            self.region.ranks = RankPlace(*self.about["ranks"])
            follow(self.region.ranks, made.run.__globals__.values())
        if self.about["program"] is not None:
            counters["stats"].update(unique_graphs=1, calls_captured=self.about["calls"])       # as if it were captured
        return made

    def _compare(self) -> None:
        """Is the program's code what it was?"""
        for home, names in self.about["imported"].items():
            if not all(hasattr(sys.modules.get(home), name) for name in names):     # modules that load lazily do so now, as in eager
                raise Changed(f"the module {home} is not loaded")
        for home, then in self.about["files"].items():
            if is_another(home, then):
                raise Changed(f"the file of {home} is another one")
        for home, then in self.about["says"].items():
            if file_of(home) != then:
                raise Changed(f"the file of {home} is at another place, which its code says")
        if self.prints.of(self.region.root.fn) != self.about["function"]:
            raise Changed(f"the code of {self.region.name}, its defaults or its closure are others")
        if self.reader.value(self.about["frames"]) != getattr(self.region, "spec", None):
            raise Changed(f"the frames of {self.region.name} are others")
        asked = set(self.about["asked"])
        for home, names in self.about["library"].items():
            scope = getattr(sys.modules.get(home), "__dict__", {})
            now = {name: library_print(self.prints, scope[name]) for name in asked & scope.keys()}
            if now != names:
                changed = sorted(name for name in {*now, *names} if now.get(name) != names.get(name))
                raise Changed(f"{home}.{changed[0]} is another one")
        for number in self.about["fixed"]:
            self.reader.object(number)

    def _guards(self, guards: list[Guard]) -> GuardFunction:
        reader = self.reader
        tensors: dict[int, str] = {}
        for guard in guards:
            if guard.kind == "tensor" and tensors.setdefault(id(guard.data.example()), guard.name) != guard.name:
                raise Changed(f"{guard.name} and {tensors[id(guard.data.example())]} are the same tensor")
        compile_text = self.region.root.native_compiler()
        returns = [reader.source(place) for place in self.about["returns"]]
        machine_code = MachineCode(compile_text, reader.arguments) if compile_text is not None else None
        try:
            made = build_guards(guards, self.region.arg_names, returns, machine_code)
        except Exception as error:      # machine code is written for arguments of which the guards hold
            say(self.region, f"its guards are checked in Python ({type(error).__name__}: {error})")
            made = build_guards(guards, self.region.arg_names, returns)
        if made.check(*self.inputs) is None:
            raise Changed(made.explain(self.inputs))
        return made

    def _compiled(self) -> Callable[..., Any]:
        with torchstate.outside_inference():
            if self.about["parts"]:
                return self._parts()
            entry = programcache.known_entry(self.about["program"], self.about["mode"])
            compiled = backends.kept(entry, self.read_graph, self.region.root.fullgraph, self.about["turns_on"], self.about["ranks"],
                                     self.about["mode"])
        if compiled is None:
            raise Changed("its program is not in the cache")
        return compiled

    def _parts(self) -> Callable[..., Any]:
        graph = self.read_graph()
        for node in graph.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta["val"], torch.Tensor) and "held" not in node.meta:     # as all are but parameters, when a graph is cut
                node.meta["val"]._is_param = True
        entries = functools.partial(part_entry, iter(self.about["parts"]), self.about["mode"])
        return backends.kept_parts(graph, examples(graph), entries, self.about["mode"])

    def _run(self) -> Callable[..., Any]:
        names = {name: self._name(data) for name, data in self.about["names"].items()}
        scope = {"__name__": self.about["scope"]} if self.about["scope"] is not None else {}
        run: Any = types.FunctionType(self.run_code, {**Constants().namespace, **scope, **names})
        run.__source__ = self.about["text"]
        return run

    def _name(self, data: Any) -> Any:
        if type(data) is dict and "continuation" in data:
            return self.region.root.continuation(self.reader.value(data["continuation"]))
        if type(data) is dict and "part" in data:
            owner, name = data["part"]
            found = self.reader.value(owner)
            return self.region.root.part(found if name is None else getattr(found, name))
        return self.reader.value(data)

    def _broke(self) -> str:
        """The break that ended it, noted as if it were captured."""
        if self.about["broke"] is None:
            return ""
        sentence, where, hint = self.about["broke"]
        note_break(sentence, Location(*where) if where is not None else None, hint)
        return sentence

    def _graph(self) -> torch.fx.GraphModule | None:
        """The captured graph, with the program's lines."""
        if self.about["program"] is None:
            return None
        graph = dumps.read_graph(self.about["program"].rpartition(programcache.INPUTS)[0]).gm
        graph.meta["fullgraph"] = self.region.root.fullgraph
        texts = self.about["traces"]
        for home in self.about["homes"]:
            texts = [text.replace(f'"<{home}>"', f'"{file_of(home)}"') for text in texts]
        for node in graph.graph.nodes:
            if node.name in self.about["lines"]:
                node.stack_trace = texts[self.about["lines"][node.name]]
        return graph

    def _told(self, error: Exception, inputs: Sequence[Any]) -> Exception:
        return as_eager_says(self.read_graph(), error, inputs)
