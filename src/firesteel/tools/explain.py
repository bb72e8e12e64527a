"""fs.explain: what became of a program, for people.

    page = fs.explain(model)(x)         # compiles and runs it once
    print(page)                         # or let a notebook show it
    page.break_reasons, page.recompiles, page.kernels, ...

`firesteel explain SCRIPT` reports the same for everything that a script compiles.  In: the Compilations that were collected meanwhile.  What
always holds: guards, specialisations and sizes are called by the names of the user's program; a place is the user's line.
"""
from __future__ import annotations

import collections
import html
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel import api, artifacts, dumps, pipeline, stages
from firesteel.capture import marks
from firesteel.capture.guards import Guard
from firesteel.capture.source import Call, is_stack_item
from firesteel.homes import home_of, is_in_package
from firesteel.loops.plan import Run
from firesteel.records import dataclass
from firesteel.stages import Compilation, Record
from firesteel.sym.guard import RANGE
from firesteel.targets import on_host
from firesteel.testing import CALLS
from firesteel.tools.cases import location

UNNAMED = "the program's objects"
NO_GRADIENT = ".grad is None"
PRIVATE = re.compile(r"(^|\.)_(?!_main)|^pybind11")        # names that say nothing to the user
SHOWN = 12              # rows of a section; the rest is counted
EAGER = ("eager_calls", "suppressed", "recompile_limit")                # counters of calls that ran eagerly
QUIET = ("total", "ok", "kernels", "distinct_kernels", "library_calls", "cache_hits", "compiled", "fallbacks")        # no fall-backs


@dataclass(frozen=True)
class KernelRecord:
    """A kernel, or a library call, and the user's lines that it computes."""
    name: str
    phase: str                      # forward or backward
    origin: tuple[str, ...]         # nodes of the graph
    lines: tuple[str, ...]          # file:line in function

    def __str__(self) -> str:
        return f"{self.phase} {self.name}: {self.where}"

    @property
    def where(self) -> str:
        return ", ".join(self.lines) or ", ".join(self.origin)


@dataclass
class Explanation:
    """What `fs.explain` found out; prints as a page."""
    graphs: list[GraphModule]
    guards: list[str]
    break_reasons: list[artifacts.BreakRecord]
    compile_times: dict[str, float]
    op_count: int
    specializations: list[str] = field(default_factory=list)     # what the code was compiled for of the sizes and numbers, and why
    guard_words: list[str] = field(default_factory=list)         # the guards that matter, in words
    recompiles: list[str] = field(default_factory=list)          # with the value that changed
    fallbacks: list[str] = field(default_factory=list)
    kernels: list[KernelRecord] = field(default_factory=list)
    library_calls: list[KernelRecord] = field(default_factory=list)
    saved_bytes: int = 0                                         # kept for the backward, beyond inputs
    frozen: list[str] = field(default_factory=list)              # what was computed once of parameters and buffers (fs.config.freeze)

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        return len(self.break_reasons)

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Headings with their lines; the folded ones are short."""
        yield "breaks", counted(f"{b.reason}\n  at {b.location}\n  {b.source}\n  Hint: {b.hint}" for b in self.break_reasons)
        yield "recompiles", self.recompiles
        yield "specialised", by_index(self.specializations)
        yield "guards", self.guard_words
        yield "fall-backs", self.fallbacks
        yield "kernels", by_line(self.kernels)
        yield "library calls", counted(map(str, self.library_calls))
        yield "frozen", self.frozen
        times = sorted(self.compile_times.items(), key=lambda row: -row[1])
        yield f"time, {sum(self.compile_times.values()) * 1e3:.0f} ms in all", \
            [f"{stage} {seconds * 1e3:.1f} ms" for stage, seconds in times if seconds >= 5e-5]

    def headline(self) -> str:
        saved = f", {self.saved_bytes:,} bytes saved for the backward" if self.saved_bytes else ""
        return f"{self.graph_count} graph(s), {self.op_count} calls captured, {self.graph_break_count} break(s), {len(self.kernels)} kernel(s), " \
               f"{len(self.library_calls)} library call(s){saved}"

    def __str__(self) -> str:
        lines = [self.headline()]
        for name, rows in self.sections():
            lines += [f"{name}:", *(f"  {row}".replace("\n", "\n  ") for row in folded(rows))] if rows else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self.headline())}</b></p>"]
        for name, rows in self.sections():
            if rows:
                items = "".join(f"<li><pre style='margin:0'>{html.escape(row)}</pre></li>" for row in rows)
                shown = "open" if name in ("breaks", "recompiles") else ""
                parts.append(f"<details {shown}><summary>{name} ({len(rows)})</summary><ul>{items}</ul></details>")
        return "".join(parts)

    def to_html(self, path: str | pathlib.Path) -> None:
        """The page, and each graph's code, as an HTML file."""
        graphs = [f"<h2>graph {n}</h2><pre>{html.escape(graph.code)}</pre>" for n, graph in enumerate(self.graphs, 1)]
        pathlib.Path(path).write_text("<!doctype html><meta charset=utf-8><title>firesteel</title>" + self._repr_html_() + "".join(graphs),
                                      encoding="utf-8")


def counted(rows: Iterable[str]) -> list[str]:
    """Each row once, with how often it came: of a loop, or of layers."""
    return [row if count == 1 else f"{row}\n  {count} times" if "\n" in row else f"{row} ({count} times)"
            for row, count in collections.Counter(rows).items()]


def by_line(steps: Iterable[KernelRecord], most: int = 3) -> list[str]:
    """A row for the steps of one phase that compute the same lines: of layers."""
    found: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        found.setdefault((step.phase, step.where), []).append(step.name)
    return [f"{phase} {', '.join(names[:most])}{f' and {len(names) - most} more' if len(names) > most else ''}: {where}"
            f"{f' ({len(all_names)} times)' if len(all_names) > len(names) else ''}"
            for (phase, where), all_names in found.items() for names in [list(dict.fromkeys(all_names))]]


def by_index(rows: Iterable[str]) -> list[str]:
    """Each row once; those whose names differ in one index as one: blocks[0 to 11].size == 6."""
    for place in range(3):
        found: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            name = re.split(" == | is |: ", row, maxsplit=1)[0]
            index = next(itertools.islice(INDEX.finditer(name), place, None), None)
            start, end = index.span(1) if index else (len(row), len(row))
            found.setdefault((row[:start], row[end:]), []).append(row[start:end])
        rows = [before + ranges(dict.fromkeys(numbers)) + after for (before, after), numbers in found.items()]
    return list(rows)


INDEX = re.compile(r"\[(\d+(?:(?: to |, )\d+)*)\]")


def ranges(numbers: Iterable[str]) -> str:
    """0 to 3, 5"""
    runs: list[list[str]] = []
    for text in numbers:
        if runs and text.isdigit() and runs[-1][-1].isdigit() and int(text) == int(runs[-1][-1]) + 1:
            runs[-1].append(text)
        else:
            runs.append([text])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}{' to ' if len(run) > 2 else ', '}{run[-1]}" for run in runs)


def folded(rows: Sequence[str]) -> list[str]:
    return [*rows[:SHOWN], f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN + 1 else list(rows)


# ---------------------------------------------------------------- asking

def explain(fn: Callable, **settings: Any) -> Callable[..., Explanation]:
    """`explain(fn)(*args, **kwargs)` compiles and runs `fn` once and reports what became of it; of what is compiled already, with its settings,
    and why it was compiled again so far."""
    root = root_region(fn)
    plain = getattr(fn, "_firesteel_original", marks.compiled_of(fn) or fn)
    own = {} if root is None else {"backend": root.backend.__wrapped__, "fullgraph": root.fullgraph, "dynamic": root.dynamic}

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        before = [f"{region.name}: {entry.reason}" for region in (root.all_regions() if root is not None else ())
                  for entry in region.entries[1:]]
        compiled = api.compile(plain, isolate_recompiles=True, **{**own, **settings})
        if root is not None:
            root_region(compiled).learn_from(root)
        with (collected := collecting()):
            compiled(*args, **kwargs)
            for compilation in collected.compilations:
                compile_backwards(compilation)
        page = collected.explanation()
        page.recompiles[:0] = before
        return page
    return explained


def root_region(fn: Any) -> Any:
    """Where the code of something compiled is kept; None of what is not."""
    return getattr(getattr(fn, "_firesteel_call", fn), "__firesteel_root__", None)


def compile_backwards(compilation: Compilation) -> None:
    """Kernels of backwards that nothing has run yet: they are compiled at their first use."""
    made = {id(record.made_of) for record in compilation.records if record.stage.name == "program"}
    if made:                        # by our backend, not by torch or another
        with stages.kept_by(compilation):
            for record in [r for r in compilation.records if r.stage.name == "backward" and id(r) not in made]:
                pipeline.compile_native(record.product, [node.meta["val"] for node in record.product.graph.find_nodes(op="placeholder")])


class collecting:
    """Inside, what is compiled is collected; then the function that it gave makes the Explanation."""

    def __enter__(self) -> Callable[[], Explanation]:
        self.breaks, self.times = list(artifacts.breaks), artifacts.stage_times()
        self.counts = {group: counter.copy() for group, counter in artifacts.counters.items()}
        self.compilations: list[Compilation] = []
        stages.COLLECTORS.append(self.compilations)
        return self.explanation

    def __exit__(self, *error: Any) -> None:
        stages.COLLECTORS[:] = [one for one in stages.COLLECTORS if one is not self.compilations]

    def explanation(self) -> Explanation:
        times = {stage: seconds - self.times.get(stage, 0.0) for stage, seconds in artifacts.stage_times().items()}
        counts = {group: counter - self.counts.get(group, collections.Counter()) for group, counter in artifacts.counters.items()}
        known = set(map(id, self.breaks))       # as many as are kept may be known already
        return explanation_of(self.compilations, [one for one in artifacts.breaks if id(one) not in known], times, counts)


def explanation_of(compilations: Sequence[Compilation], breaks: list[artifacts.BreakRecord], times: dict[str, float],
                   counts: Mapping[str, Mapping[str, int]]) -> Explanation:
    graphs = [r.product for c in compilations for r in c.records if r.stage.name == "graph" and r.made_of is None]
    guards = [guard for c in compilations for r in c.records if r.stage.name == "captured" for guard in r.product.guard.guards]
    special = [text for guard in guards if (text := guard.specialization()) and not is_parameter(guard)]
    steps = [step for c in compilations for step in steps_of(c)]
    return Explanation(graphs, list(map(str, guards)), breaks, times, sum(node.op in CALLS for gm in graphs for node in gm.graph.nodes), special,
                       in_words(guards),
                       [f"{c.name}: {c.reason}" for c in compilations if c.reason],
                       fallbacks_of(counts), [k for is_kernel, k in steps if is_kernel], [k for is_kernel, k in steps if not is_kernel],
                       sum(map(saved_bytes, compilations)), [f"{what}: {n}" for what, n in counts.get("frozen", {}).items() if n])


def fallbacks_of(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What did not run as compiled code, with how often."""
    by_eager = [f"{name} ({group.replace('_', ' ')}): {n}" for group in EAGER for name, n in counts.get(group, {}).items()]
    native = [f"{name.removeprefix('fallback:')} has no kernel, torch runs it: {n}" for name, n in counts.get("native", {}).items()
              if name.startswith("fallback:")]
    autograd = [f"{name.replace('_', ' ')}, run by eager: {n}" for name, n in counts.get("aot", {}).items() if name not in QUIET]
    return [*by_eager, *native, *autograd]


# ---------------------------------------------------------------- steps and memory

def graph_of(record: Record | None) -> GraphModule | None:
    """The forward or backward graph that a product was made of."""
    while record is not None and record.stage.name not in ("forward", "backward", "joint"):
        record = record.made_of
    return None if record is None else getattr(record.product, "gm", record.product)


def phase_of(record: Record | None) -> str:
    while record is not None and record.stage.name not in ("forward", "backward"):
        record = record.made_of
    return record.stage.name if record is not None else "forward"


def lines_of(gm: GraphModule | None, origin: Iterable[str]) -> tuple[str, ...]:
    """The user's lines behind nodes of a graph."""
    nodes = {node.name: node for node in gm.graph.nodes} if gm is not None else {}
    places = [str(place) for name in origin if name in nodes and (place := location(nodes[name])) is not None]
    return tuple(dict.fromkeys(re.sub(r"^.*/site-packages/", "", place) for place in places))


def steps_of(compilation: Compilation) -> Iterator[tuple[bool, KernelRecord]]:
    """(is it a kernel?, the step) of every plan."""
    for record in compilation.records:
        if record.stage.name == "plan":
            gm, phase = graph_of(record), phase_of(record)
            for step in (run.step for run in record.product.steps if isinstance(run, Run)):
                origin = tuple(getattr(step.nest or step.call, "origin", ()))
                name = step.nest.name if step.nest else dumps.name_of(step.call.target) if step.call else str(step)
                yield step.nest is not None, KernelRecord(name, phase, origin, lines_of(gm, origin))


def saved_bytes(compilation: Compilation) -> int:
    """What the forwards hand to their backwards, inputs left out."""
    total = 0
    for record in compilation.records:
        joint: Any = record.made_of.product if record.made_of is not None else None
        if record.stage.name == "forward" and hasattr(joint, "num_fwd_outputs"):
            results = record.product.graph.find_nodes(op="output")[0].args[0]
            saved = {node for node in results[joint.num_fwd_outputs:] if isinstance(node, Node) and node.op != "placeholder"}
            total += sum(bytes_of(node) for node in saved)
    return total


def bytes_of(node: Node) -> int:
    """Of a tensor, in the example call; 0 where only run time knows the sizes."""
    value = node.meta.get("val")
    env: Any = dumps.environment(value)
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [size if env is None else env.hint(size) if env.has_hint(size) else 0 for size in getattr(value, "spec", value).shape]
    count = 1
    for size in sizes:
        count *= size if isinstance(size, int) else 0
    return count * value.dtype.itemsize


# ---------------------------------------------------------------- guards in words

def is_parameter(guard: Guard) -> bool:
    return guard.kind == "tensor" and issubclass(guard.data.cls, torch.nn.Parameter)


def in_words(guards: Sequence[Guard]) -> list[str]:
    """The guards that a caller may run into, each a phrase, those on tensors first; the rest counted."""
    phrases = sorted([(guard, phrase_of(guard)) for guard in guards], key=lambda found: found[0].kind != "tensor")
    parameters = sum(map(is_parameter, guards))
    gradients = sum(phrase == NO_GRADIENT for _, phrase in phrases)
    rest = collections.Counter(root_of(guard) for guard, phrase in phrases if not phrase and not is_parameter(guard) and guard.source is not None)
    return [*by_index(phrase for _, phrase in phrases if phrase and phrase != NO_GRADIENT),
            *([f"{parameters} parameters keep their shapes, dtypes and devices"] if parameters else []),
            *([f"{gradients} parameters have no gradient yet (.grad is None)"] if gradients else []),
            *kept(rest)]


def phrase_of(guard: Guard) -> str:
    """What a guard says, in the user's words; empty where it is about something that has no name there."""
    return "" if is_internal(guard) else WORDS.get(guard.kind, lambda guard: "")(guard)


def is_internal(guard: Guard) -> bool:
    """Does it ask a function of ours, look at what Python calls private, or say again which numbers 64 bits hold?"""
    source = guard.source
    while source is not None and not (isinstance(source, Call) and is_ours(source.key)):
        source = source.base
    unnamed = guard.source is not None and is_stack_item(guard.source.root) and guard.source.root.name in guard.name
    return source is not None or unnamed or bool(PRIVATE.search(guard.name)) or guard.kind == "expr" and guard.data.why == RANGE


def is_ours(thing: Any) -> bool:
    return is_in_package(home_of(thing), "firesteel")


def root_of(guard: Guard) -> str:
    """The variable that a guard's source begins with."""
    source = guard.source.root
    return UNNAMED if is_ours(source.key) or is_stack_item(source) or PRIVATE.search(source.name) else re.split(r"[.\[]", source.name)[0]


def kept(counts: collections.Counter[str], limit: int = 6) -> Iterator[str]:
    """One phrase for what has no better one; names beyond the limit are counted."""
    names = [name for name in counts if name != UNNAMED] or [*counts]
    shown = ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
    if counts:
        yield f"{shown} {'keep their' if len(names) > 1 or names == [UNNAMED] else 'keeps its'} types, attributes and hooks " \
              f"({counts.total()} check{'s' * (counts.total() > 1)})"


def tensor_in_words(guard: Guard) -> str:
    if is_parameter(guard):
        return ""
    facts = guard.data
    shape = ", ".join("any" if size is None else str(size) for size in facts.sizes)
    return f"{guard.name} is {an(str(facts.dtype).removeprefix('torch.'))} tensor ({shape}){'' if on_host(facts) else f' on {facts.device}'}" \
           f"{' that needs a gradient' if facts.requires_grad else ''}"


def an(noun: str) -> str:
    return f"{'an' if noun.startswith('i') else 'a'} {noun}"


def state_in_words(guard: Guard) -> str:
    values = dict(guard.data.values)
    states = {"gradients are": values.get("grad"), "autocast is": values.get("autocast")}
    return ", ".join(f"{what} {'on' if on else 'off'}" for what, on in states.items()) + ", torch's other global settings are as they were"


# kind of guard -> what it says; an empty phrase is folded
WORDS: dict[str, Callable[[Guard], str]] = {
    "tensor": tensor_in_words,
    "equals": lambda guard: NO_GRADIENT if guard.data is None and guard.name.endswith(".grad") else f"{guard.name} == {guard.data!r}",
    "expr": lambda guard: guard.data.text(lambda source: source.name),
    "none": lambda guard: f"{guard.name} is None",
    "truth": lambda guard: f"{guard.name}: {'yes' if guard.data else 'no'}",
    "state": state_in_words,
}
