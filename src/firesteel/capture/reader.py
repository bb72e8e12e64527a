"""Reader: the half of the machine that looks at the user's objects: Values from sources, guards, globals, sizes and numbers.

What always holds: an object is wrapped once a capture; every fact that was used is a guard; a guard states the program's objects as they
were at the region's start, so it is right whatever the capture does later.

    value = m.look(lazy)                    # wraps and guards
    m.guard(Guard(source, "equals", 3))
"""
from __future__ import annotations

import builtins
import types
from typing import Any

import torch

from firesteel.capture import builder
from firesteel.capture.class_reads import MISSING, ClassFacts, mro_lookup
from firesteel.capture.effects import DELETED, Effects
from firesteel.capture.guards import Guard, SizeQuestion, state_guard
from firesteel.capture.policy import SymbolPolicy
from firesteel.capture.protocols import Machine
from firesteel.capture.source import MODULE_TABLES, Attr, CellContents, Fixed, HiddenDict, Item, OwnDict, Source, Stride, global_source
from firesteel.capture.values.arrays import ArrayNumber
from firesteel.capture.values.attributes import instance_dict
from firesteel.capture.values.base import LazyValue, Undecided, Unjoinable, Value
from firesteel.capture.values.classes import LocalClass, stand_in
from firesteel.capture.values.const import ConstValue, fresh, is_constant_object, run_for_program
from firesteel.capture.values.containers import ListValue, NamedTupleValue, Sequence, SizeValue, TupleValue
from firesteel.capture.values.functions import BoundMethodValue, CellValue, FunctionValue, ScopeValue
from firesteel.capture.values.hooks import HandleValue
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.number import SymNumber, fits
from firesteel.capture.values.tensor import wrap_output
from firesteel.capture.world import STATIC, DimPolicy, TensorWorld
from firesteel.errors import Break, ConstraintViolation
from firesteel.homes import is_in_package
from firesteel.sym.expr import free_symbols

REPLACED = "torch.nn.modules", "torch.nn.functional", "torch.distributions"       # where programs put functions of their own


class Reader(Machine):
    """Mutable; the base of SymbolicMachine."""

    def __init__(self, world: TensorWorld, policy: SymbolPolicy):
        self.world, self.policy = world, policy
        self.guards: list[Guard] = [state_guard()]
        self.effects = Effects()
        self._guard_keys: set[Any] = set()
        self.class_reads: dict[type, dict[str, Any]] = {}       # what was found in classes, by name
        self._objects: dict[int, tuple[Any, Value]] = {}
        self._size_sources: dict[str, Source] = {}
        self.number_symbols: dict[Source, Any] = {}     # numbers that are symbols, each met once or more
        self.wished: list[tuple[str, Source, int, Any]] = []    # sizes that must stay symbols, and the user's mark
        self._names: set[str] = set()
        self._scopes: dict[int, ScopeValue] = {}

    # -- looking at objects ----------------------------------------------------------------------------------------
    def look(self, value: Value) -> Value:
        """The value, wrapped and guarded if nobody has looked at it yet."""
        return self._looked_at(value) if isinstance(value, LazyValue) else value

    def _looked_at(self, value: LazyValue) -> Value:
        if isinstance(value, Undecided):
            raise Unjoinable(value.step)
        return builder.build(self, value.obj, value.source)

    def read(self, obj: Any, source: Source) -> Value:
        return builder.build(self, obj, source)

    def read_attribute(self, owner: Value, name: str, obj: Any = MISSING) -> Value:
        real = getattr(owner.identity(), name) if obj is MISSING else obj
        return builder.build(self, real, Attr(owner.source, name))

    def read_own(self, owner: Any, name: str, obj: Any) -> Value:
        """An attribute in the instance's own dict; generated code does not run a __getattribute__ of the class."""
        return builder.build(self, obj, own_source(owner, name))

    def read_table(self, module: Any, table: str, name: str, obj: Any) -> Value:
        """A parameter, buffer or child of a module."""
        return builder.build(self, obj, Item(own_source(module, table), name))

    def lazy_own(self, owner: Any, name: str, obj: Any) -> Value:
        return LazyValue(obj, own_source(owner, name))

    def read_class_attribute(self, cls: type, name: str, obj: Any) -> Value:
        base = next((base for base in cls.__mro__ if name in vars(base)), cls)
        local = self.same_object(base)
        if isinstance(local, LocalClass) and name in local.namespace:
            return self.look(local.namespace[name])
        if hasattr(mro_lookup(type(cls), name), "__set__"):     # cls.__annotations__ is type's, an instance sees the class's
            return builder.build(self, obj, Item(Attr(Fixed(base), "__dict__"), name))
        return builder.build(self, obj, Attr(Fixed(cls), name))

    def class_constant(self, cls: type, name: str, obj: Any) -> Value:
        """A class attribute as an instance sees it."""
        return self.constant_object(obj) if is_of_torch(cls) else self.read_class_attribute(cls, name, obj)

    def static_attribute(self, obj: Any, name: str) -> Value:
        """An attribute of a fixed object."""
        return self.constant_object(run_for_program(self, getattr, obj, name))

    def constant_object(self, obj: Any) -> Value:
        """The Value of an object that is fixed: a class attribute, a function of a library."""
        return ConstValue(obj) if is_constant_object(obj) else builder.build(self, obj, Fixed(obj))

    def cell(self, obj: types.CellType, source: Source, name: str = "") -> CellValue:
        """A closure cell of the user's, of a variable of this name; one Value a cell."""
        known = self.same_object(obj)
        if known is not None:
            return known
        try:
            content = LazyValue(obj.cell_contents, CellContents(source, name))
        except ValueError:
            content = None
        value = CellValue(content, source, obj)
        self.remember(obj, value)
        return value

    def same_object(self, obj: Any) -> Any:
        found = self._objects.get(id(obj))
        return found[1] if found is not None else None

    def known_objects(self) -> list[tuple[Any, Value]]:
        """All that was looked at."""
        return list(self._objects.values())

    def known_values(self, kind: type) -> list[Any]:
        """The Values of this kind that stand for objects of the user's."""
        return [value for _, value in self._objects.values() if isinstance(value, kind)]

    def remember(self, obj: Any, value: Value) -> None:
        if not is_constant_object(obj):
            self._objects[id(obj)] = (obj, value)

    def fresh(self, obj: Any) -> Value:
        return fresh(self, obj)

    def wrap_output(self, out: Any, node: torch.fx.Node) -> Value:
        return wrap_output(self, out, node)

    def sequence_like(self, out: Any, items: list[Value]) -> Value:
        """The Value of a tuple or list that a torch function gave."""
        if type(out) is list:
            return ListValue(items)
        if type(out) is torch.Size:
            return SizeValue(items)
        return TupleValue(items) if type(out) is tuple else NamedTupleValue(type(out), items)

    # -- globals ---------------------------------------------------------------------------------------------------
    def scope_value(self, scope: dict[str, Any]) -> ScopeValue:
        found = self._scopes.get(id(scope))
        if found is None:
            found = self._scopes[id(scope)] = ScopeValue(scope)
        return found

    def read_global(self, scope: dict[str, Any], name: str) -> Value:
        written = self.effects.written(self.scope_value(scope), name) if self._scopes else None
        if written is not None and written is not DELETED:
            return written
        if name in scope and written is None:
            obj = scope[name]
            if builder.is_trusted_scope(scope) and not isinstance(obj, (list, dict, set)):
                return self.constant_object(obj)
            return builder.build(self, obj, global_source(name, scope))
        if hasattr(builtins, name):
            if written is None and not builder.is_trusted_scope(scope):
                self.guard(Guard(Fixed(scope, str(scope.get("__name__", "globals"))), "no_key", name))
            return self.constant_object(getattr(builtins, name))
        raise self.raise_real(NameError(f"name {name!r} is not defined"))

    def guard_library(self, scope: dict[str, Any], name: str, reader: dict[str, Any]) -> None:
        """What the user's code reads in a module of torch or of the standard library is fixed unless it is replaced there (a patched
        torch.nn.functional.relu).  What those modules read themselves is not looked at, but for torch.nn.functional."""
        read = not builder.is_trusted_scope(reader) or is_in_package(scope.get("__name__", ""), *REPLACED)
        if read and builder.is_trusted_scope(scope) and callable(scope[name]):
            self.guard(Guard(global_source(name, scope), "identity", scope[name]))

    def has_global(self, scope: dict[str, Any], name: str) -> bool:
        written = self.effects.written(self.scope_value(scope), name)
        if written is not None:
            return written is not DELETED
        if name not in scope:
            self.guard(Guard(Fixed(scope, str(scope.get("__name__", "globals"))), "no_key", name))
        return name in scope

    def store_global(self, scope: dict[str, Any], name: str, value: Value | None) -> None:
        if isinstance(value, HandleValue):      # torch's own suite counts on the rest of such a program running eagerly
            raise Break("store", name=f"the handle of a hook as {name}", value="the module's globals")
        target = self.scope_value(scope)
        self.effects.shadow(target, name, DELETED if value is None else value)
        if value is None:
            self.effects.log("delitem", target, ConstValue(name))
        else:
            self.effects.log("setitem", target, ConstValue(name), value)

    # -- guards ----------------------------------------------------------------------------------------------------
    def guard(self, guard: Guard) -> None:
        key = guard.key()
        if key not in self._guard_keys:
            self._guard_keys.add(key)
            self.guards.append(guard)

    def guard_key(self, owner: Any, key: Value, hashed: Any, present: bool) -> None:
        """A question about one key of the user's dict, as it was at the start."""
        if owner.source is None:
            return
        if not key.is_constant():
            if is_variable(key) and (key.identity() in owner.obj) == present:
                self.guard(Guard(owner.source, "has_object" if present else "no_object", key.source))
            return
        if (hashed in owner.obj) != present:
            return
        self.guard(Guard(owner.source, "has_key" if present else "no_key", key.constant()))

    def guard_keys(self, owner: Any) -> None:
        if owner.source is None:
            return
        if all(is_constant_object(key) for key in owner.obj):
            self.guard(Guard(owner.source, "keys", tuple(owner.obj)))
        else:
            self.guard(Guard(owner.source, "length", len(owner.obj)))

    def guard_no_attribute(self, owner: Any, name: str) -> None:
        """Nothing of that name was found; a class's own __getattr__, which is inlined, may find it elsewhere."""
        fallback, plain = mro_lookup(owner.cls, "__getattr__"), not has_custom_getattribute(owner.cls)
        if plain and fallback is MISSING:
            self.guard(Guard(owner.source, "no_attr", name))
            return
        self.guard_not_own(owner, name)
        if plain and fallback is torch.nn.Module.__getattr__:       # asked of the module, it would raise and drop an error each time
            self._guard_not_in_tables(owner, name)

    def _guard_not_in_tables(self, module: Any, name: str) -> None:
        if not hasattr(module.cls, name):
            self.guard(Guard(Fixed(module.cls), "no_attr", name))
        own = instance_dict(module.obj) or {}
        for table in [table for table in MODULE_TABLES if name not in own.get(table, ())]:
            self.guard(Guard(own_source(module, table), "no_key", name))

    def guard_not_own(self, owner: Any, name: str) -> None:
        """A class attribute was read: the instance has none of that name."""
        own = instance_dict(owner.obj) if owner.source is not None and owner.obj is not None else None
        if own is not None and name not in own:
            self.guard(Guard(dict_source(owner), "no_key", name))

    def guard_own_names(self, owner: Any, names: tuple[str, ...]) -> None:
        """All attributes of the instance were asked for."""
        self.guard(Guard(dict_source(owner), "keys", names))

    def guard_class_attribute(self, cls: type, name: str, attribute: Any) -> None:
        """A method was found through a class, or through super() behind it: nobody has put another one there.  Classes of torch and
        the standard library are fixed, but for modules and distributions."""
        if mro_lookup(cls, name) is not attribute:
            cls = next(c for c in cls.__mro__ if vars(c).get(name) is attribute)
        base = next((c for c in cls.__mro__ if name in vars(c)), cls)
        if not isinstance(self.same_object(base), LocalClass) and not is_of_torch(cls):
            source: Source = Attr(Fixed(base if isinstance(self.same_object(cls), LocalClass) else cls), name)
            if isinstance(attribute, classmethod):          # a read makes a new bound method
                source = Attr(source, "__func__")
            found = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
            self.guard(Guard(source, "identity", found))

    def guard_class_names(self, cls: type) -> None:
        """All attributes of a class were asked for."""
        for base in filter(self._is_changeable, cls.__mro__):
            self.guard(Guard(Attr(Fixed(base), "__dict__"), "keys", tuple(vars(base))))

    def guard_descriptor(self, cls: type, name: str, attribute: Any) -> None:
        """The same of an object with a `__get__` of the user's, which a read through the class would call."""
        for base in cls.__mro__:
            if isinstance(self.same_object(base), LocalClass) or builder.is_trusted_scope({"__name__": base.__module__}):
                return
            own = Attr(Fixed(base), "__dict__")
            if name in vars(base):
                self.guard(Guard(Item(own, name), "identity", attribute))
                return
            self.guard(Guard(own, "no_key", name))

    def all_guards(self) -> list[Guard]:
        """The guards, and the questions about sizes that were answered with this call's sizes."""
        exact = {guard.source for guard in self.guards if guard.kind == "equals"}       # of these the type needs no look
        own = [guard for guard in self.guards if guard.kind != "type" or guard.source not in exact]
        return own + self._class_guards() + self._distinct_guards() + self._questions()

    def _class_guards(self) -> list[Guard]:
        """What was found in the program's classes is still there."""
        return [Guard(Fixed(cls), "class", ClassFacts(cls, found)) for cls, found in self.class_reads.items() if self._is_changeable(cls)]

    def _is_changeable(self, cls: type) -> bool:
        return not is_of_torch(cls) and not isinstance(self.same_object(cls), LocalClass)

    def _distinct_guards(self) -> list[Guard]:
        """An object that the program changed is none of the other objects of its type that it read."""
        changed = {type(effect.target.identity()) for effect in self.effects.entries if is_variable(effect.target)}
        groups: dict[type, list[Source]] = {}
        for obj, value in self._objects.values():
            if type(obj) in changed and not isinstance(obj, torch.Tensor) and is_variable(value):
                groups.setdefault(type(obj), []).append(value.source)
        return [Guard(None, "all_distinct", tuple(sources)) for sources in groups.values() if len(sources) > 1]

    def _questions(self) -> list[Guard]:
        """What the environment was asked about sizes, over the sources that the sizes come from."""
        env = self.world.env
        if env is None:
            return []
        sources = {info.expr: self._size_sources[info.source] for info in env.symbols.values() if info.source in self._size_sources}
        return [Guard(None, "expr", SizeQuestion(g.expr, tuple((s.attr, sources[s]) for s in free_symbols(g.expr)), str(g.location or ""), g.why))
                for g in env.guards()]

    # -- sizes and numbers -----------------------------------------------------------------------------------------
    def dimension_policy(self, tensor: torch.Tensor, source: Source) -> tuple[DimPolicy, ...]:
        if self.world.env is None:
            return (STATIC,) * tensor.dim()
        return self.policy.dimensions(tensor, source)

    def note_sizes(self, name: str, source: Source, policy: tuple[DimPolicy, ...]) -> None:
        for dim, kind in enumerate(policy):
            if kind != STATIC:
                self._size_sources[f"{name}.size()[{dim}]"] = source.size(dim)
        for dim in self.policy.strides(source, len(policy)):
            self._size_sources[f"{name}.stride()[{dim}]"] = Stride(source, dim)

    def check_wishes(self) -> None:
        """A size that the user marked as dynamic must still be a symbol."""
        env = self.world.env
        for name, source, dim, (_, least, greatest) in self.wished:
            symbol = next((info.expr for info in env.symbols.values() if info.source == f"{name}.size()[{dim}]"), None)
            asked = [g for g in env.recorded if symbol in free_symbols(g.expr)]
            fixed = env.simplify(symbol) if symbol is not None else None
            where = source.size(dim).name
            if isinstance(fixed, int):
                raise self._violation(f"{where} was marked as dynamic, but the program fixes it to {fixed}", asked, where, symbol)
            if least is not None or greatest is not None:
                narrower = [g for g in asked if free_symbols(g.expr) == {symbol}]
                if narrower:
                    raise self._violation(f"{where} was marked as dynamic from {least} to {greatest}, but the program is captured for fewer sizes",
                                          narrower, where, symbol)

    def _violation(self, text: str, asked: list[Any], where: str, symbol: Any) -> ConstraintViolation:
        first = asked[0] if asked else None
        facts = f": {first.text({symbol.attr: where, **self._names_of(first.expr, symbol)})}" if first is not None else ""
        return ConstraintViolation(f"{text}{facts}.", first.location if first is not None else None,
                                   "Remove what depends on this number, or the mark (fs.maybe_mark_dynamic allows both).")

    def _names_of(self, expr: Any, but: Any) -> dict[str, str]:
        """How the symbols of a fact are spelled in the user's program."""
        sources = {info.expr: info.source for info in self.world.env.symbols.values()}
        return {s.attr: self._size_sources[sources[s]].name for s in free_symbols(expr) if s is not but and sources[s] in self._size_sources}

    def becomes_symbol(self, source: Source, number: int | float) -> bool:
        return self.world.env is not None and fits(number) and self.policy.number_is_symbol(source, number)

    def symbol_name(self, source: Source) -> str:
        name = self.input_name(source)
        self._size_sources[name] = source
        return name

    def input_name(self, source: Source) -> str:
        """A fresh name for a placeholder."""
        wanted = "l_" + "".join(c if c.isalnum() else "_" for c in source.name).strip("_")
        name, count = wanted, 0
        while name in self._names:
            count += 1
            name = f"{wanted}_{count}"
        self._names.add(name)
        return name

    def known(self, value: Value) -> Any:
        """The Python object behind a value that must be known; a symbol is fixed under a guard."""
        value = self.look(value)
        if isinstance(value, (SymNumber, ArrayNumber)):
            return value.specialize(self).value
        if isinstance(value, Sequence):
            return value.make([self.known(item) for item in value.items])
        return value.builtin_alone().constant()

    def known_items(self, value: Value) -> Any:
        """As `known`; of an iterator, all that is left of it."""
        return [self.known(item) for item in value.iterate(self)] if isinstance(value, IteratorValue) else self.known(value)

    def real_object(self, value: Value) -> Any:
        """The object itself, under a guard that it is this one; a Break where it was made inside."""
        value = self.look(value)
        if value.is_constant() or isinstance(value, (SymNumber, Sequence)):
            return self.known(value)
        if isinstance(value, BoundMethodValue):     # of a method only the function is looked at
            return types.MethodType(self.real_object(value.fn), value.owner.identity() or object())
        obj = value.identity()
        if obj is None and isinstance(value, FunctionValue):
            return stand_in(self, value)
        if obj is None:
            raise Break("operator", name="a look at the object itself", value=value.describe())
        if is_variable(value):
            self.guard(Guard(value.source, "identity", obj))
        return obj

    def known_index(self, value: Any) -> int:
        value = self.look(value)
        if hasattr(value, "plain_getattr") and value.method(self, "__index__") is not None:
            value = self.call_now(value.method(self, "__index__"), [], {})
        elif isinstance(getattr(value, "abstract", None), torch.Tensor):
            value = value.getattr(self, "__index__").call(self, [], {})
        known = self.known(value)
        if not hasattr(known, "__index__"):
            raise Break("operator", name="[]", value=value.describe())
        return known.__index__()


def is_of_torch(cls: type) -> bool:
    """Classes of torch and the standard library are taken as fixed, but for modules and distributions."""
    return builder.is_trusted_scope({"__name__": cls.__module__}) and not is_in_package(cls.__module__, *REPLACED)


def has_custom_getattribute(cls: type) -> bool:
    return isinstance(mro_lookup(cls, "__getattribute__"), types.FunctionType)


def dict_source(owner: Any) -> Source:
    """Where the instance's own dict is found."""
    return HiddenDict(owner.source) if has_custom_getattribute(owner.cls) else OwnDict(owner.source)


def own_source(owner: Any, name: str) -> Source:
    past_class = has_custom_getattribute(owner.cls) or mro_lookup(owner.cls, "__getattr__") is not MISSING
    return Item(dict_source(owner), name) if past_class else Attr(owner.source, name)


def is_variable(value: Value) -> bool:
    """Is it an object of the user's that may be another one at the next call?"""
    return value.source is not None and not builder.is_fixed(value.source)
