"""fs.report: one self-contained HTML file about what was compiled.  report.html shows it; here is what it shows.

    fs.report("report.html")            # everything that is compiled and alive; its stages are run again to look at them
    FIRESTEEL_REPORT=folder python train.py     # everything that is compiled, as it is, written when the process ends

Timeline of stages; captured, joint, forward and backward graphs as pictures, whose nodes lead to source lines; kernels with their loops and
code; the memory plan; guards, breaks, recompiles.  Ranks of torch.distributed write a file each into the folder, and ranks.html, which shows
them side by side.
"""
from __future__ import annotations

import atexit
import base64
import functools
import gzip
import json
import linecache
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed
from torch.fx import GraphModule, Node

from firesteel import artifacts, dumps, pipeline, stages
from firesteel.backends import native
from firesteel.capture.entry import ROOTS
from firesteel.capture.guards import Guard
from firesteel.config import config
from firesteel.errors import FiresteelError
from firesteel.loops.plan import Alloc, Free, Plan, Run
from firesteel.stages import Compilation, Record
from firesteel.tools.explain import Explanation, compile_backwards, explanation_of, graph_of, in_words, lines_of, phase_of
from firesteel.tracebacks import places_of

try:
    import fcntl
except ImportError:     # another system: ranks do not wait for each other
    fcntl = None        # type: ignore[assignment]  # a module, or nothing

TEMPLATE = pathlib.Path(__file__).with_name("report.html")
TITLES = {"graph": "captured graph", "joint": "joint graph", "forward": "forward graph", "backward": "backward graph"}
TEXTS = {"captured": "run function", "host": "host function", "fuse": "fused program"}
OURS = str(pathlib.Path(__file__).parent.parent)
GAP = 0.02              # seconds between two compilations that the timeline leaves out


def report(path: str | pathlib.Path | None = None) -> pathlib.Path:
    """Writes the report of everything compiled so far, to firesteel-report.html where no path is given."""
    target = pathlib.Path(path or "firesteel-report.html")
    if target.is_dir():
        target /= file_name()
    if _collected is not None:
        return write(target, _collected, _events, artifacts.stage_times(), "Collected as it was compiled.")
    events: list[tuple[str, float, float, int]] = []
    compilations: list[Compilation] = []
    before = artifacts.stage_times()
    with watching(events):
        compilations += run_again()
    times = {stage: seconds - before.get(stage, 0.0) for stage, seconds in artifacts.stage_times().items()}
    return write(target, compilations, events, times, "The stages of what is alive were run again for this report; times are of that run.")


def file_name() -> str:
    """One of its own for each process of several."""
    return f"report-rank{_rank[0]}.html" if _rank else f"report-{os.getpid()}.html"


# ---------------------------------------------------------------- collecting

class watching:
    """Inside, the ends of timed stages are kept."""

    def __init__(self, events: list[tuple[str, float, float, int]]):
        self.keep = lambda stage, start, end, depth: events.append((stage, start, end, depth)) if end is not None else None

    def __enter__(self) -> None:
        artifacts.WATCHERS.append(self.keep)

    def __exit__(self, *error: Any) -> None:
        artifacts.WATCHERS.remove(self.keep)


_collected: list[Compilation] | None = None
_events: list[tuple[str, float, float, int]] = []
_rank: tuple[int, int] | None = None        # and how many there are, where something was compiled in a process group


def begin() -> None:
    """Collects from now on, and writes when the process ends: fs.config.report asks for it."""
    global _collected, _rank
    if distributed.is_available() and distributed.is_initialized():
        _rank = distributed.get_rank(), distributed.get_world_size()
    if _collected is None:
        _collected = []
        stages.COLLECTORS.append(_collected)
        watching(_events).__enter__()
        atexit.register(_write_at_exit)


def _write_at_exit() -> None:
    try:
        folder = pathlib.Path(config.report)
        folder.mkdir(parents=True, exist_ok=True)
        path = report(folder / file_name())
        told = f"is {write_ranks(folder) if _rank else path}"
    except OSError as error:
        told = f"could not be written: {error}"
    if sys.stderr is not None:          # else print would write to the program's output
        print(f"firesteel: the report {told}", file=sys.stderr)


def write_ranks(folder: pathlib.Path) -> pathlib.Path:
    """The reports of all ranks that are there, in one; the last rank to end finds all."""
    with open(folder / "ranks.lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)        # given back as the file is closed
        found = [read(path) for path in folder.glob("report-rank*.html")]
        ranks = sorted((data for data in found if data["rank"][1] == found[0]["rank"][1]), key=lambda data: data["rank"])
        compilations = [{**c, "name": f"rank {data['rank'][0]}: {c['name']}"} for data in ranks for c in data["compilations"]]
        sources: dict[str, dict[str, str]] = {}
        for data in ranks:
            for file, lines in data["sources"].items():
                sources.setdefault(file, {}).update(lines)
        fill(folder / "ranks.html", {
            "title": f"firesteel report: {len(ranks)} of {ranks[0]['rank'][1]} ranks", "headline": "", "note": "", "events": [], "sections": [],
            "compilations": compilations, "sources": sources,
            "ranks": [{"rank": data["rank"][0], "events": data["events"], "facts": data["facts"]} for data in ranks]})
    return folder / "ranks.html"


def run_again() -> Iterator[Compilation]:
    """Each graph that is compiled and alive, read from its text so that nothing of it changes, through all stages."""
    for root in list(ROOTS):
        for region in root.all_regions():
            for entry in region.variants():
                made = Compilation(region.name, reason="" if entry.reason == "first call" else entry.reason)
                made.guards = entry.guard.guards
                if entry.graph is not None:
                    with stages.kept_by(made), torch.set_grad_enabled(records_gradients(made.guards)):
                        _compile_again(entry.graph)
                yield made


def records_gradients(guards: Sequence[Guard]) -> bool:
    """Was grad mode on in the call that it was compiled for?"""
    return all(dict(guard.data.values).get("grad", True) for guard in guards if guard.kind == "state")


def _compile_again(graph: GraphModule) -> None:
    stages.done("graph", graph)
    try:
        read = dumps.read_graph(dumps.graph_text(graph))
    except FiresteelError:          # it calls what no import finds: there is its picture
        return
    with_lines(graph, read.gm)
    native(read.gm, read.example_inputs)
    compilation = stages.current()
    assert compilation is not None
    compile_backwards(compilation)


def with_lines(graph: GraphModule, again: GraphModule) -> None:
    """What text does not hold: the places of nodes."""
    metas = {node.name: node.meta for node in graph.graph.nodes}
    for node in again.graph.nodes:
        node.meta.update({key: value for key, value in metas.get(node.name, {}).items() if key in ("stack_trace", "nn_module_stack")})


# ---------------------------------------------------------------- what is shown

def write(path: pathlib.Path, compilations: Sequence[Compilation], events: Sequence[tuple[str, float, float, int]], times: dict[str, float],
          note: str) -> pathlib.Path:
    page = explanation_of(compilations, list(artifacts.breaks), times, artifacts.counters)
    shown: dict[str, Any] = {
        "title": f"firesteel report: {len(compilations)} compilation(s)", "headline": page.headline(), "note": note,
        "events": timeline(events), "sections": [[name, rows] for name, rows in page.sections() if rows],
        "compilations": [compilation_data(c) for c in compilations], "rank": _rank,
    }
    shown["sources"] = source_lines(shown)
    shown["facts"] = facts(page, shown)
    return fill(path, shown)


def fill(path: pathlib.Path, shown: dict[str, Any]) -> pathlib.Path:
    text = base64.b64encode(gzip.compress(json.dumps(shared(shown), default=str).encode(), mtime=0)).decode()
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        written.write_text(TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", text), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        written.unlink(missing_ok=True)         # half a report on a full disk
    return path


def read(path: pathlib.Path) -> dict[str, Any]:
    """What a report shows."""
    before, after = TEMPLATE.read_text(encoding="utf-8").split("/*DATA*/")
    data = json.loads(gzip.decompress(base64.b64decode(path.read_text(encoding="utf-8").removeprefix(before).removesuffix(after))))
    for thing in things(data["compilations"]):
        thing.update({key: data["shared"][thing[key]] for key in SHARED if key in thing})
    return data


SHARED = ("places", "text")         # layers have the same lines and kernels: each value is written once, and things have its number


def shared(shown: dict[str, Any]) -> dict[str, Any]:
    """With the values of SHARED in a list of their own."""
    numbers: dict[str, int] = {}

    def with_numbers(thing: dict[str, Any]) -> dict[str, Any]:
        return {key: numbers.setdefault(json.dumps(value), len(numbers)) if key in SHARED else value for key, value in thing.items()}

    compilations = [{**c, "kernels": [*map(with_numbers, c["kernels"])],
                     "graphs": [{**g, "nodes": [*map(with_numbers, g["nodes"])]} for g in c["graphs"]]} for c in shown["compilations"]]
    return {**shown, "compilations": compilations, "shared": [json.loads(text) for text in numbers]}


def things(compilations: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Nodes and kernels."""
    for compilation in compilations:
        for group in (*(graph["nodes"] for graph in compilation["graphs"]), compilation["kernels"]):
            yield from group


def facts(page: Explanation, shown: dict[str, Any]) -> dict[str, str]:
    """What is compared between ranks."""
    graphs = [g for c in shown["compilations"] for g in c["graphs"] if g["title"] in ("forward graph", "backward graph")]
    collectives = [node["target"].split(".")[1] for g in graphs for node in g["nodes"] if "c10d_functional" in node["target"]]
    counts = {"graphs": page.graph_count, "breaks": page.graph_break_count, "recompiles": len(page.recompiles), "kernels": len(page.kernels),
              "library calls": len(page.library_calls), "bytes saved for the backward": page.saved_bytes,
              "collectives": ", ".join(collectives) or "none"}
    times = {f"{stage}, ms": f"{s * 1e3:.1f}" for stage, s in sorted(page.compile_times.items(), key=lambda row: -row[1]) if s >= 1e-3}
    return {name: str(value) for name, value in {**counts, **times}.items()}


def timeline(events: Sequence[tuple[str, float, float, int]]) -> list[dict[str, Any]]:
    """Starts from 0, without the pauses between compilations."""
    shown, taken, last = [], 0.0, None
    for stage, start, end, depth in sorted(events, key=lambda event: event[1]):
        if last is None or start - last > GAP:
            taken += start - (last or 0.0)
        last = max(last or 0.0, end)
        shown.append({"stage": stage, "start": start - taken, "end": end - taken, "depth": depth, "what": "with the stages inside of it"})
    return shown


def compilation_data(compilation: Compilation) -> dict[str, Any]:
    records = compilation.records
    guards = compilation.guards or [guard for r in records if r.stage.name == "captured" for guard in r.product.guard.guards]
    return {
        "name": compilation.name, "reason": compilation.reason, "guards": list(map(str, guards)), "words": in_words(guards),
        "graphs": [graph_data(TITLES[r.stage.name], getattr(r.product, "gm", r.product)) for r in records if r.stage.name in TITLES],
        "kernels": [kernel for r in records if r.stage.name == "kernels" for kernel in kernels_data(r)],
        "plans": [plan_data(phase_of(r), r.product) for r in records if r.stage.name == "plan"],
        "texts": [{"title": f"{TEXTS[r.stage.name]}{f' ({phase_of(r)})' if r.stage.name != 'captured' else ''}", "text": readable(r)}
                  for r in records if r.stage.name in TEXTS],
    }


def readable(record: Record) -> str:
    return str(record.product) if record.stage.name == "fuse" else str(record)


def graph_data(title: str, gm: GraphModule) -> dict[str, Any]:
    return {"title": title, "nodes": [node_data(node) for node in gm.graph.nodes]}


def node_data(node: Node) -> dict[str, Any]:
    modules = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return {"name": node.name, "op": node.op, "phase": str(node.meta.get("phase", "")), "target": str(node.target), "code": code_of(node),
            "type": dumps.value_text(node.meta.get("val")) if "val" in node.meta else "", "module": modules[-1] if modules else "",
            "inputs": [other.name for other in node.all_input_nodes], "users": [user.name for user in node.users], "places": places(node)}


def code_of(node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return f"{node.op} {dumps.TextWriter().text(node.args[0]) if node.op == 'output' else node.name}"
    return f"{node.name} = {dumps.call_text(node)}"


def places(node: Node) -> list[dict[str, Any]]:
    return _places(node.meta.get("stack_trace"))


@functools.cache
def _places(trace: str | None) -> list[dict[str, Any]]:
    """Where a node comes from, the innermost place first; no place of ours."""
    found = [place for place in places_of(trace) if not place[0].startswith(OURS)]
    return [{"file": file, "line": line, "function": name} for file, line, name in reversed(found)]


def kernels_data(record: Record) -> Iterator[dict[str, Any]]:
    assert record.made_of is not None
    gm, nests = graph_of(record), pipeline.nests_of(record.made_of.product)
    nodes = {node.name: node for node in gm.graph.nodes} if gm is not None else {}
    for nest, kernel in zip(nests, record.product):
        found = {str(place): place for name in nest.origin if name in nodes for place in places(nodes[name])}
        yield {"name": nest.name, "phase": phase_of(record), "origin": list(lines_of(gm, nest.origin)) or list(nest.origin), "loops": str(nest),
               "text": kernel.text, "places": [*found.values()]}


def plan_data(phase: str, plan: Plan) -> dict[str, Any]:
    """Buffers with the steps between which they live."""
    starts = {step.buffer: (n, step) for n, step in enumerate(plan.steps) if isinstance(step, Alloc)}
    ends = {step.buffer: n for n, step in enumerate(plan.steps) if isinstance(step, Free)}
    buffers = [{"name": name, "start": n, "end": ends.get(name, len(plan.steps)), "row": row, "bytes": buffer_bytes(plan, name),
                "kind": plan.program.buffers[name].kind, "place": place_of(step)}
               for row, (name, (n, step)) in enumerate(starts.items())]
    return {"phase": phase, "arena": str(plan.arena), "buffers": buffers,
            "steps": [str(step.step) if isinstance(step, Run) else str(step) for step in plan.steps]}


def place_of(step: Alloc) -> str:
    if step.reuse:
        return f"in the memory of {step.reuse}"
    return f"at {step.at} of the arena" if step.at is not None else "allocated by itself"


def buffer_bytes(plan: Plan, name: str) -> int:
    """0 where a size is a symbol."""
    buffer, count = plan.program.buffers[name], 1
    for size in buffer.shape:
        count *= size if isinstance(size, int) else 0
    return count * ITEMSIZE.get(buffer.dtype, 4)


ITEMSIZE = {"f64": 8, "i64": 8, "c64": 8, "c128": 16, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1, "bool": 1}


def source_lines(shown: dict[str, Any]) -> dict[str, dict[int, str]]:
    """The lines around every place, by file."""
    found: dict[str, dict[int, str]] = {}
    for place in (place for thing in things(shown["compilations"]) for place in thing["places"]):
        lines = found.setdefault(place["file"], {})
        for n in range(place["line"] - 2, place["line"] + 3):
            if n not in lines and (text := linecache.getline(place["file"], n)):
                lines[n] = text.rstrip("\n")
    return found
