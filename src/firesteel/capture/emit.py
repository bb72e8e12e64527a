"""Emitter: writes the Python function that runs a captured region.

The function takes the values that the guard function has read (`sources`), calls the compiled graph, replays the effects, and
returns the rebuilt result, or a `Jump` to a continuation.  What always holds: an object is written once (`expr` remembers
it); an object of the user's is written as what its source gives; a tensor of the graph is one of its outputs.

    def run(s_0, s_1):
        (g_0,) = c_graph(s_0, s_1)
        s_1.steps = 4
        return (g_0, )
"""
from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.eager_errors import as_eager_says
from firesteel.capture.effects import DELETED
from firesteel.capture.protocols import Machine
from firesteel.capture.record import GraphInput
from firesteel.capture.source import Constants, Local, Source, build_function
from firesteel.capture.values.base import LazyValue, Value
from firesteel.capture.values.const import ConstValue
from firesteel.table import Table

NO_NAME = (ConstValue,)

# kind of value -> function(emitter, value) -> text, for what is written by modules above this one
WRITERS: Table[Callable[[Any, Any], str]] = Table("writer of a value", "capture/")


class RunEmitter:
    """Mutable; one a capture."""

    def __init__(self, m: Machine):
        self.m = m
        self.constants = Constants()
        self.lines: list[str] = []
        self.before: list[str] = []                     # lines before the graph is called
        self.sources: dict[Source, str] = {}            # read by the guard function, handed to run
        self.outputs: list[torch.fx.Node] = []          # of the graph
        self._written: dict[int, tuple[Value, str]] = {}
        self._output_of: dict[torch.fx.Node, str] = {}
        self._names = 0

    # -- pieces ----------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.lines.append(text)

    def name(self) -> str:
        self._names += 1
        return f"v_{self._names}"

    def constant(self, obj: Any) -> str:
        """Text for a fixed object, or for a function that generated code calls."""
        return self.constants.bind(obj)

    def source(self, source: Source) -> str:
        """Text for what a source gives at the region's start."""
        if source.base is None and type(source) is not Local:       # the guard function does not read it
            return source.text(self.constants)
        return self.sources.setdefault(source, f"s_{len(self.sources)}")

    def expr(self, value: Value) -> str:
        """Text for a value; the same for the same object."""
        known = self._written.get(id(value))
        if known is not None:
            return known[1]
        if type(value) is LazyValue:
            return self.source(value.source)
        if value.holder is not None:        # the builtin part of an object
            return self.expr(value.holder)
        if value.source is not None:
            text = self.source(value.source)
        else:
            text = value.rebuild(self)
            if (again := self.written(value)) is not None:      # an object that is part of itself names itself first
                return again
            if not isinstance(value, NO_NAME) and not text.isidentifier():
                text = self.assign(text)
        self._written[id(value)] = (value, text)
        return text

    def written(self, value: Value) -> str | None:
        """The text of a value that has one already."""
        known = self._written.get(id(value))
        return None if known is None else known[1]

    def assign(self, text: str) -> str:
        name = self.name()
        self.line(f"{name} = {text}")
        return name

    def write_as(self, value: Value, text: str) -> str:
        """From now on `value` is written as `text`."""
        self._written[id(value)] = (value, text)
        return text

    # -- objects ---------------------------------------------------------------------------------------------------
    def graph_output(self, value: Any) -> str:
        node = value.as_output(self.m)
        if node not in self._output_of:
            self._output_of[node] = f"g_{len(self.outputs)}"
            self.outputs.append(node)
        return self._output_of[node]

    def with_attributes(self, value: Value, name: str) -> str:
        """An object under its name, on which the program put attributes."""
        stored = self.m.effects.attributes(value)
        if stored:
            self.write_as(value, name)
        for attribute, content in stored.items():
            if content is not DELETED:
                self.line(f"setattr({name}, {attribute!r}, {self.expr(content)})")
        return name

    def new_generator(self, generator: Any) -> str:
        return WRITERS["generator"](self, generator)

    def class_text(self, cls: type) -> str:
        """A class; one made inside of the region is written like other objects."""
        return self.expr(self.m.same_object(cls)) if self.is_made_here(cls) else self.constant(cls)

    def is_made_here(self, cls: type) -> bool:
        return getattr(self.m.same_object(cls), "is_local", False)

    # -- the function ----------------------------------------------------------------------------------------------
    def build(self, name: str, graph_call: list[str], boxed: bool = False) -> types.FunctionType:
        """The function of the sources' values; `boxed`: of one list of them, which it empties."""
        names, lines = list(self.sources.values()), [*self.before, *graph_call, *self.lines]
        if boxed:
            names, lines = ["box"], [f"{', '.join(names)}, = box", "box.clear()", *lines]
        return build_function(name, names, lines, self.constants, f"<firesteel {name}>")


def boxed_graph_call(e: RunEmitter, callable_: Any, inputs: list[GraphInput], stolen: Source | None) -> list[str]:
    """The same for a graph that takes its inputs in one list and frees them: nothing else holds those that are not needed later."""
    names = [e.source(i.source) for i in inputs]
    later = set(re.findall(r"\w+", "\n".join(e.lines)))
    unused = [name for name in dict.fromkeys(names) if name not in later]
    emptied = [f"{e.source(stolen)}.clear()"] if stolen is not None else []
    return [f"graph_inputs = [{', '.join(names)}]", *emptied, *([f"del {', '.join(unused)}"] if unused else []),
            f"{results_text(e)}{e.constants.bind(callable_, 'graph')}(graph_inputs)"]


def careful_graph_call(e: RunEmitter, callable_: Any, captured: Any, inputs: list[GraphInput], region: Any) -> list[str]:
    """The same for a graph that may raise in its midst, after calls whose effects eager would have made: nothing has happened yet, so the
    region runs again for real, effect by effect, up to the error.  Where its inputs are there still, eager is asked first whether there is one."""
    everything = ", ".join([*(e.source(Local(name)) for name in region.arg_names), ""])
    arguments = ", ".join(e.source(i.source) for i in inputs)
    asked = e.constants.bind(functools.partial(as_eager_says, captured), "as_eager_says")
    handler = ["except Exception:", "    failed = True"] if region.owns_inputs else \
        ["except (IndexError, RuntimeError) as error:", f"    if {asked}(error, [{arguments}]) is error: raise", "    failed = True"]
    return ["failed = False", "try:", f"    {results_text(e)}{e.constants.bind(callable_, 'graph')}({arguments})", *handler,
            "if failed:", f"    return {e.constants.bind(region, 'region')}.eager(({everything}))"]


def results_text(e: RunEmitter) -> str:
    return f"({', '.join(f'g_{n}' for n in range(len(e.outputs)))},) = " if e.outputs else ""


def graph_call(e: RunEmitter, callable_: Any, captured: Any, inputs: list[GraphInput]) -> list[str]:
    """The lines that call the compiled graph: its errors are raised as eager raises them."""
    arguments = ", ".join(e.source(i.source) for i in inputs)
    results = results_text(e)
    asked = e.constants.bind(functools.partial(as_eager_says, captured), "as_eager_says")
    return ["try:", f"    {results}{e.constants.bind(callable_, 'graph')}({arguments})",
            "except (IndexError, RuntimeError) as error:", f"    raise {asked}(error, [{arguments}]) from None"]
