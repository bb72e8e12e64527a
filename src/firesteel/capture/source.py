"""Source: where a value of the user's program comes from, said once.

A Source is a frozen chain from a root (an argument of the region, a fixed object) through attributes, items and calls.  The same
object gives the text that a guard checks, the text that re-creates the value in generated code, the name shown to people, and the
value itself.

    w = Local("self").attr("layers").item(0).attr("weight")
    w.name                      # "self.layers[0].weight"
    w.text()                    # "a_self.layers[0].weight"
    w.fetch({"self": model})    # the parameter

What always holds: equal sources are equal objects for dicts and sets; evaluating one has no effect on the program.  Names in
generated text carry their kind, so none collides with another: `a_` argument of the region, `c_` constant, `t_` temporary.
An `SourceWriter` assigns prefixes that several sources share once.
"""
from __future__ import annotations

import builtins
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

_set = object.__setattr__
_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis))


def identifier(name: str) -> str:
    """An argument name of the region as it is spelled in generated code (`.0` of a comprehension is no Python name)."""
    return "a_" + (name if name.isidentifier() else "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in name))


def literal(value: Any) -> str | None:
    """Text that evaluates to exactly this value, or None where there is none."""
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else None
    if kind is tuple:
        items = [text for item in value if (text := literal(item)) is not None]
        return None if len(items) < len(value) else f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return None


def shown(value: Any, limit: int = 80) -> str:
    """A value in a message: short, and without the elements of a tensor."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = f"[{', '.join(map(shown, value))}]" if type(value) is list else repr(value)
    return text if len(text) <= limit else text[:limit - 3] + "..."


class Constants:
    """Objects that generated code names: the globals of the generated function."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__builtins__": builtins, "math": math}    # the text of size expressions says math
        self._names: dict[int, str] = {}        # id -> name; the namespace keeps the objects alive

    def name(self, value: Any, hint: str = "") -> str:
        """Text for a value: a literal where that is exact, else a name bound to the object."""
        text = literal(value)
        return text if text is not None else self.bind(value, hint)

    def bind(self, value: Any, hint: str = "") -> str:
        """A name bound to this very object."""
        known = self._names.get(id(value))
        if known is None:
            hint = hint or getattr(value, "__name__", "") or type(value).__name__
            known = f"c_{''.join(c if c.isalnum() else '_' for c in str(hint))}_{len(self._names)}"
            self._names[id(value)] = known
            self.namespace[known] = value
        return known


class Source:
    """A step of a chain: `base` is where it starts from (None for a root), `key` which attribute, item, ..."""

    __slots__ = ("base", "key", "_hash")
    base: Any       # a Source; of which kind, the subclass says
    key: Any
    _hash: int
    form = ""       # the step as text over {base} and {key}, of kinds that are written, named and executed alike
    shown = ""      # as people are shown it, where that is another text

    def __init_subclass__(cls) -> None:
        if "form" in vars(cls):
            cls.step = eval(f"lambda self, base: {cls.form.format(base='base', key='self.key')}")       # type: ignore[method-assign]

    def __init__(self, base: Source | None, key: Any = None):
        _set(self, "base", base)
        _set(self, "key", key)
        _set(self, "_hash", hash((type(self), base, self._key_hash())))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Source is frozen")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._hash == other._hash
                                 and self._same_key(other) and self.base == other.base)

    def _key_hash(self) -> Any:
        return self.key

    def _same_key(self, other: Source) -> bool:
        return type(self.key) is type(other.key) and self.key == other.key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    # what each kind says

    def write(self, base: str, constants: Constants) -> str:
        """This step as text, given the base's text."""
        return self.form.format(base=base, key=self.key)

    def step(self, base: Any) -> Any:
        """This step on values: the base's value in, this one's out."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """For people: as the user would write it."""
        return (self.shown or self.form).format(base=self.base.name, key=self.key)

    # what follows from that

    def text(self, constants: Constants | None = None) -> str:
        """An expression for the value over the region's arguments and the names in `constants`."""
        constants = constants if constants is not None else Constants()
        return self.write(self.base.text(constants) if self.base is not None else "", constants)

    def fetch(self, arguments: Mapping[str, Any]) -> Any:
        """The value, given the region's arguments by name."""
        return self.step(self.base.fetch(arguments) if self.base is not None else arguments)

    def chain(self) -> list[Source]:
        """From the root to this."""
        found: list[Source] = [self]
        while found[-1].base is not None:
            found.append(found[-1].base)
        return found[::-1]

    @property
    def root(self) -> Source:
        return self.chain()[0]

    # one step further

    def attr(self, name: str) -> Attr:
        return Attr(self, name)

    def item(self, key: Any) -> Item:
        return Item(self, key)

    def type(self) -> Type:
        return Type(self)

    def size(self, dim: int) -> DimSize:
        return DimSize(self, dim)


# ---------------------------------------------------------------------------------------------------------------------
# Roots


class Local(Source):
    """An argument of the region: a parameter of the function, a live local or a stack item of a continuation."""

    __slots__ = ()

    def __init__(self, name: str):
        super().__init__(None, name)

    def write(self, base: str, constants: Constants) -> str:
        return identifier(self.key)

    def step(self, base: Mapping[str, Any]) -> Any:
        return base[self.key]

    @property
    def name(self) -> str:
        return self.key


def is_stack_item(source: Source) -> bool:
    """Of a frame in which the program was split, such as the iterator of a `for`?  It has no name that a program could use."""
    return isinstance(source, Local) and not source.key.isidentifier()


class Fixed(Source):
    """An object known when the code is generated: a globals dict, a function, a class, a cell; compared by identity."""

    __slots__ = ("label",)
    label: str

    def __init__(self, value: Any, label: str = ""):
        super().__init__(None, value)
        _set(self, "label", label or getattr(value, "__qualname__", "") or getattr(value, "__name__", "") or type(value).__name__)

    def _key_hash(self) -> Any:
        return id(self.key)

    def _same_key(self, other: Source) -> bool:
        return self.key is other.key

    def write(self, base: str, constants: Constants) -> str:
        return constants.bind(self.key, self.label)

    def step(self, base: Any) -> Any:
        return self.key

    @property
    def name(self) -> str:
        return self.label


def global_source(name: str, scope: dict[str, Any]) -> Item:
    """A global variable of the module whose namespace is `scope`."""
    return Item(Fixed(scope, str(scope.get("__name__", "globals"))), name)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


class Attr(Source):
    """base.key"""

    __slots__ = ()
    shown = "{base}.{key}"

    def write(self, base: str, constants: Constants) -> str:
        return f"{base}.{self.key}" if self.key.isidentifier() else f"getattr({base}, {self.key!r})"

    def step(self, base: Any) -> Any:
        return getattr(base, self.key)


MODULE_TABLES = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Item(Source):
    """base[key] with a key that is known; also how a module's parameters, buffers and children are reached without __getattr__."""

    __slots__ = ()

    def _key_hash(self) -> Any:
        # 1, 1.0 and True are one key of a dict, but not one index in a text shown to people
        return (type(self.key), self.key) if literal(self.key) is not None else id(self.key)

    def _same_key(self, other: Source) -> bool:
        return self.key is other.key or self._key_hash() == other._key_hash()

    def write(self, base: str, constants: Constants) -> str:
        return f"{base}[{constants.name(self.key)}]"

    def step(self, base: Any) -> Any:
        return base[self.key]

    @property
    def name(self) -> str:
        base = self.base
        if type(base) in (Attr, Item) and type(base.key) is str and base.key in MODULE_TABLES:
            return f"{base.base.name}[{self.key}]" if self.key.isdigit() else f"{base.base.name}.{self.key}"
        if isinstance(base, OwnDict):
            return f"{base.name}.{self.key}"
        if type(base) is Fixed and type(base.key) is dict:
            return self.key if isinstance(self.key, str) else f"{base.name}[{shown(self.key)}]"
        return f"{base.name}[{shown(self.key)}]"


class OwnDict(Source):
    """The attribute dictionary of an instance: read once, its entries cost a fifth of attributes of a class that has a __getattr__."""

    __slots__ = ()
    form = "{base}.__dict__"
    shown = "{base}"


class HiddenDict(OwnDict):
    """The same of an instance whose class has a __getattribute__ of its own, which is not run."""

    __slots__ = ()

    def write(self, base: str, constants: Constants) -> str:
        return f"{constants.bind(object.__getattribute__)}({base}, '__dict__')"

    def step(self, base: Any) -> Any:
        return object.__getattribute__(base, "__dict__")


class Type(Source):
    """type(base)"""

    __slots__ = ()
    form = "type({base})"


class Call(Source):
    """key(base) for a function without effects, such as len, iter or list."""

    __slots__ = ()

    def __init__(self, base: Source, function: Callable[[Any], Any]):
        super().__init__(base, function)

    def write(self, base: str, constants: Constants) -> str:
        return f"{constants.bind(self.key)}({base})"

    def step(self, base: Any) -> Any:
        return self.key(base)

    @property
    def name(self) -> str:
        return f"{getattr(self.key, '__name__', self.key)}({self.base.name})"


class CellContents(Source):
    """The content of a closure cell: base.cell_contents."""

    __slots__ = ("label",)
    form = "{base}.cell_contents"
    label: str

    def __init__(self, base: Source, label: str = ""):
        super().__init__(base)
        _set(self, "label", label)

    @property
    def name(self) -> str:
        return self.label or super().name


def nth(iterable: Iterable[Any], n: int) -> Any:
    """The n-th of an iterable, IndexError where there are fewer."""
    for value in itertools.islice(iterable, n, None):
        return value
    raise IndexError(n)


class Applied(Source):
    """function(base, key), for a function without effects that a class names."""

    __slots__ = ()
    function: Callable[[Any, Any], Any]

    def write(self, base: str, constants: Constants) -> str:
        return f"{constants.bind(type(self).function)}({base}, {self.key})"

    def step(self, base: Any) -> Any:
        return type(self).function(base, self.key)


class Nth(Applied):
    """The key-th thing that iterating over base gives: a dict's key, a set's element, a deque's item."""

    __slots__ = ()
    function = staticmethod(nth)
    shown = "list({base})[{key}]"


class DimSize(Source):
    """A tensor's size in one dimension."""

    __slots__ = ()
    form = "{base}.size({key})"


class Stride(Source):
    """A tensor's stride in one dimension."""

    __slots__ = ()
    form = "{base}.stride({key})"


class StorageOffset(Source):
    """A tensor's offset in its storage."""

    __slots__ = ()
    form = "{base}.storage_offset()"


# ---------------------------------------------------------------------------------------------------------------------
# Writing many


class SourceWriter:
    """Builds the body of a generated function, computing what several sources share once.

        e = SourceWriter(Constants())
        e.share([a, b, c])          # all that will be loaded
        e.lines.append(f"f({e.load(a)}, {e.load(b)})")

    `share` may be called again for more sources; what was emitted stays.
    """

    def __init__(self, constants: Constants):
        self.constants = constants
        self.lines: list[str] = []
        self._uses: Counter[Source] = Counter()
        self._local: dict[Source, str] = {}
        self._text: dict[Source, str] = {}

    def share(self, sources: Iterable[Source]) -> None:
        """Says that each of these will be loaded once more."""
        for source in sources:
            step: Source | None = source
            while step is not None:
                self._uses[step] += 1
                if self._uses[step] > 1:
                    break           # its own base is already counted for it
                step = step.base

    def load(self, source: Source) -> str:
        """An expression for the source: a temporary where it is used more than once."""
        known = self._local.get(source) or self._text.get(source)
        if known is not None:
            return known
        text = source.write(self.load(source.base) if source.base is not None else "", self.constants)
        if source.base is None:
            self._text[source] = text
            return text
        return self.assign(source, text) if self._uses[source] > 1 else text

    def local(self, source: Source) -> str:
        """A name for the source."""
        text = self.load(source)
        return text if text.isidentifier() else self.assign(source, text)

    def assign(self, source: Source, text: str) -> str:
        """A name for the source, whose value this text has."""
        name = f"t_{len(self._local)}"
        self._local[source] = name
        self.lines.append(f"{name} = {text}")
        return name


def build_function(name: str, arguments: Iterable[str], lines: Iterable[str], constants: Constants, file: str = "<firesteel>") -> FunctionType:
    """Compiles generated lines into a function; its text is kept on it as `__source__`."""
    body = "\n".join(f"    {line}" for line in lines) or "    pass"
    text = f"def {name}({', '.join(arguments)}):\n{body}\n"
    space = dict(constants.namespace)
    exec(compile(text, file, "exec"), space)
    function = space[name]
    function.__source__ = text
    return function
