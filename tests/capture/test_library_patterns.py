"""Patterns of library code: __getattribute__, instance dicts, signatures, subclasses of containers; each a reduced case."""
from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
import enum
import functools
import glob
import inspect
import logging
import os
import pprint
import unittest.mock
import warnings
from typing import Any

import pytest
import torch
from harness import capture, check

import firesteel as fs


class Settings:
    """Counts no reads: the program's own __getattribute__ runs only where the program reads."""

    aliases = {"width": "hidden"}

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def __getattribute__(self, name: str) -> Any:
        extra = super().__getattribute__("__dict__").get("_extra")
        if extra is not None and name in extra:
            return extra[name]
        return super().__getattribute__(super().__getattribute__("aliases").get(name, name))


def test_own_getattribute_is_followed_and_guarded() -> None:
    def fn(x: torch.Tensor, settings: Settings) -> torch.Tensor:
        return x * settings.width + getattr(settings, "bias", 5)

    compiled, backend = capture(fn, fullgraph=True)
    x, settings = torch.ones(3), Settings(hidden=2)
    assert torch.equal(compiled(x, settings), x * 2 + 5)
    settings.bias = 7
    assert torch.equal(compiled(x, settings), x * 2 + 7)
    settings._extra = {"width": 11}
    assert torch.equal(compiled(x, settings), x * 11 + 7)
    assert len(backend.graphs) == 3


def test_instance_dict_is_read_and_written() -> None:
    class Box:
        pass

    def fn(x: torch.Tensor, box: Box) -> tuple:
        box.__dict__["a"] = x + 1
        names = sorted(vars(box))
        return box.a, names, "b" in vars(box), vars(box).get("missing", 3)

    box = Box()
    box.b = 4
    check(fn, torch.ones(2), box)


def test_signature_of_functions_and_methods() -> None:
    class Model(torch.nn.Module):
        def chunk(self, a: Any, b: Any = 2) -> Any:
            return a * b

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chunk(x) + len(inspect.signature(self.chunk).parameters)

    check(Model(), torch.ones(2), fullgraph=True)


# -- classes over builtin containers ------------------------------------------------------------------------------------
class Output(collections.OrderedDict):
    """Items and attributes at once, as model outputs are."""

    def __init__(self, **values: Any):
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        return tuple(self[k] for k in self.keys())


@dataclasses.dataclass
class Result(collections.OrderedDict):
    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Stack(list):
    limit = 2

    def append(self, item: Any) -> None:
        if len(self) < self.limit:
            super().append(item)


def test_ordered_dict_subclass_made_inside() -> None:
    def fn(x: torch.Tensor) -> tuple:
        out = Output(loss=x.sum(), logits=x + 1)
        return out, out["loss"] + out[1] + out.logits, len(out), "loss" in out, list(out)

    check(fn, torch.ones(3), fullgraph=True)


def test_dataclass_over_ordered_dict() -> None:
    def fn(x: torch.Tensor) -> Any:
        result = Result(logits=x * 2)
        result["extra"] = x
        return result, {**result}

    check(fn, torch.ones(3), fullgraph=True)


def test_list_subclass_with_its_own_append() -> None:
    def fn(x: torch.Tensor, given: Stack) -> Any:
        mine = Stack([x])
        mine.append(x + 1)
        mine.append(x + 2)
        given.append(x)
        given.append(x)
        return mine, sum(mine), len(given)

    check(fn, torch.ones(3), Stack([torch.zeros(3)]), fullgraph=True)


def test_mapping_subclass_of_the_user() -> None:
    def fn(x: torch.Tensor, given: Output) -> Any:
        given["new"] = x + given.loss
        return given["loss"] * 2, given[0] + 1, given.new

    check(fn, torch.ones(3), Output(loss=torch.ones(3)), fullgraph=True)


def test_tuple_and_int_subclasses() -> None:
    class Pair(tuple):
        def total(self) -> Any:
            return self[0] + self[1]

    class Size(int):
        def double(self) -> int:
            return self * 2

    def fn(x: torch.Tensor) -> Any:
        pair = Pair((x, x + 1))
        return pair.total(), len(pair), x * Size(3).double()

    check(fn, torch.ones(3), fullgraph=True)


# -- copies -------------------------------------------------------------------------------------------------------------
def test_deepcopy_of_settings() -> None:
    class Plain:
        pass

    def fn(x: torch.Tensor, settings: Plain) -> Any:
        mine = copy.deepcopy(settings)
        mine.sizes.append(4)
        mine.width = 5
        return x * mine.width + sum(mine.sizes), settings.sizes, mine.again is mine.sizes, mine

    settings = Plain()
    settings.sizes, settings.width, settings.name = [1, 2], 3, "s"
    settings.again = settings.sizes
    check(fn, torch.ones(3), settings, fullgraph=True)


def test_copy_shares_the_parts() -> None:
    def fn(x: torch.Tensor, parts: dict) -> Any:
        mine = copy.copy(parts)
        mine["a"].append(x)
        mine["b"] = 2
        return x + len(parts["a"]), mine

    check(fn, torch.ones(3), {"a": []}, fullgraph=True)


def test_missing_attribute_of_a_tensor() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if hasattr(x, "jitted") else x - getattr(x + 1, "jitted", 2)

    compiled, backend = capture(fn, fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), x - 2)
    x.jitted = True
    assert torch.equal(compiled(x), x + 1)


# -- messages -----------------------------------------------------------------------------------------------------------
logger = logging.getLogger("library")


@functools.lru_cache(None)
def warning_once(self: logging.Logger, *args: Any) -> None:
    self.warning(*args)


@functools.lru_cache(None)
def table_of(n: int) -> tuple:
    return tuple(range(n))


def test_messages_are_replayed_in_order(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: torch.Tensor, log: list) -> torch.Tensor:
        logger.warning("shape %s", tuple(x.shape))
        log.append(len(log))
        warning_once(logger, "once")
        with_warning = x + 1
        warnings.warn("careful", stacklevel=1)
        return with_warning * len(table_of(3))

    compiled, backend = capture(fn, fullgraph=True)
    log: list = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2), log), torch.ones(2) * 6)
    assert [r.getMessage() for r in caplog.records] == ["shape (2,)", "once", "shape (2,)"]
    assert [str(w.message) for w in seen] == ["careful", "careful"]
    assert log == [0, 1]


# -- odds and ends of attributes ----------------------------------------------------------------------------------------
class Mode(enum.Enum):
    ADD = "+"

    def apply(self, x: torch.Tensor) -> tuple:
        return self is Mode.ADD, x + 1

    @property
    def sign(self) -> int:
        return 1


def test_methods_of_enum_members_take_tensors() -> None:
    def fn(x: torch.Tensor, mode: Mode) -> Any:
        return mode.apply(x), mode.sign, mode.value

    check(fn, torch.ones(2), Mode.ADD, fullgraph=True)


def test_attributes_that_a_partial_has_not() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x + 1, hasattr(functools.partial(len), "__name__")

    check(fn, torch.ones(2), fullgraph=True)


def test_structures_of_torch_made_by_hand() -> None:
    def fn(x: torch.Tensor) -> Any:
        pair = torch.return_types.max((x * 2, x))
        return pair.values + pair[1]

    check(fn, torch.ones(2), fullgraph=True)


def test_annotations_of_a_base_class() -> None:
    class Base:
        width: int = 3

    class Derived(Base):
        pass

    def fn(x: torch.Tensor, obj: Derived) -> Any:
        return x + len(obj.__annotations__)

    check(fn, torch.ones(2), Derived(), fullgraph=True)


def test_tolist_as_symbols() -> None:
    with fs.config.patch(capture_scalar_outputs=True):
        compiled, backend = capture(lambda x, n: sum(x * i for i in n.tolist()), fullgraph=True)
        assert torch.equal(compiled(torch.ones(2), torch.tensor([2, 3])), torch.full((2,), 5.0))
        assert torch.equal(compiled(torch.ones(2), torch.tensor([4, 3])), torch.full((2,), 7.0))
        assert len(backend.graphs) == 1


BAR = """
import time

class bar:
    def __new__(cls, items):
        return object.__new__(cls)

    def __init__(self, items):
        self.items, self.begun = items, time.time()

    def __iter__(self):
        for item in self.items:
            self.seconds = time.time() - self.begun
            yield item
"""


def test_a_progress_bar_is_run_for_real() -> None:
    scope: dict[str, Any] = {"__name__": "tqdm.std"}
    exec(BAR, scope)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for k in scope["bar"](range(20)):
            x = x.sin() + k
        return x.cos()

    compiled, backend = capture(fn)
    assert torch.equal(compiled(torch.ones(2)), fn(torch.ones(2)))
    assert len(backend.graphs) <= 4         # not one for each line of the library


@pytest.mark.parametrize("ask", [lambda: len(glob.glob("/*")) > 0, lambda: pprint.pformat({"a": 1}), lambda: unittest.mock.Mock() is None,
                                 lambda: list(concurrent.futures.ThreadPoolExecutor(1).map(abs, [-1]))], ids=["glob", "pprint", "mock", "futures"])
def test_libraries_that_work_outside_of_the_program_break_once_a_call(ask: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * 2, ask()

    fs.counters.clear()
    found, wanted = fs.compile(fn, backend="eager")(torch.ones(2)), fn(torch.ones(2))
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
    assert sum(fs.counters["graph_break"].values()) <= 3


def test_the_capture_compares_callables_of_the_user_by_identity() -> None:
    class Equal:
        asked = 0

        def __eq__(self, other: Any) -> bool:
            Equal.asked += 1
            return True

        __hash__ = None         # type: ignore[assignment]

        def __call__(self) -> int:
            return os.getpid() * 0

    thing = Equal()
    assert fs.compile(lambda x: x + thing() + os.getpid() * 0, backend="eager")(torch.ones(2)).tolist() == [1, 1]
    assert Equal.asked == 0
