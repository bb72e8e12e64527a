"""Products of stages as Python text, and read back from it: graphs, Programs, Plans, kernels.  `firesteel replay` runs stages from these texts.

A graph is written as a function with a type for each value; what the ShapeEnv knows stands before it.  Strides, offset, device and the need
of a gradient follow the type where they are not the usual ones, and so do the tags of a node that later stages obey:

    s0 = backed(5, "L['x'].size()[0]", 0, None, 'i64')
    def forward(self, l_x: float32[s0, 8].grad()):
        relu: float32[s0, 8].grad() = torch.relu(l_x)
        return (relu,)

A Program or Plan is a row of assignments of its records: an Expr with arguments has a line of its own, so shared parts are written once.
What text cannot hold (functions of the user's that no import finds, data of large constants) is written as `unreadable(...)`: to dump is always
possible, and reading says what is missing.  Large constants are read as random numbers.
"""
from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from firesteel.autograd.backwards import ResultOfOperator
from firesteel.autograd.branches import MAKERS
from firesteel.autograd.custom import CustomFunction, ValueRef
from firesteel.autograd.regions import module_of
from firesteel.errors import UserError
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.spec import Spec, contiguous_strides, spec_of
from firesteel.graph.tensor import AbstractTensor
from firesteel.graph.wrappers import Pack, pack_of, parts_of
from firesteel.layouts import DeviceMesh, Placement, is_named_tuple, mesh_of, mesh_text, placement_parts
from firesteel.loops import ir
from firesteel.records import dataclass
from firesteel.shipping import values
from firesteel.shipping.values import home_of
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, as_expr, const, make, postorder, python_text, symbol
from firesteel.sym.symint import SYMBOLIC, from_sym, to_symint
from firesteel.table import Table
from firesteel.targets import HOST, on_host
from firesteel.torchstate import has_history

LARGE = 4096        # elements of a constant that is not written out
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
RECORD_HOMES = ("firesteel.loops.ir", "firesteel.loops.plan", "firesteel.codegen.printer")      # whose records are written by their bare names
SHARED = (ir.Nest, ir.Extern, ir.Program)       # records that others refer to
TAGS = ("exact", "recompute", "region", "late", "held", "frozen", "mutated", "unbacked", "state")     # meta of nodes that stages read


# ---------------------------------------------------------------- objects that have a name

SPELLED = {"torch": torch, "operator": operator, "math": math}      # modules whose names are written as they are


def name_of(value: Any) -> str:
    """Python text that finds a function, an operator or a class again."""
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{value}"
    if isinstance(value, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{value.name()}"
    known = home_of(value)
    if known is None:
        own = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
        qualified = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
        return f"unreadable({f'{own}.{qualified}'!r})"
    home, name = known[0].lstrip("_"), known[1]
    return f"{home}.{name}" if home.split(".")[0] in SPELLED else f"find({home!r}, {name!r})"


def find(home: str, name: str) -> Any:
    """The object of this name in a module."""
    found = values.find(home, name)
    if found is None:
        raise UserError(f"The dump calls {home}.{name}, which cannot be imported.", hint="Replay it where the program's modules are.")
    return found


def unreadable(what: str) -> Any:
    raise UserError(f"The dump holds {what}, which has no text.", hint="Replay from a later stage.")


# ---------------------------------------------------------------- values as text

class TextWriter:
    """Values as Python expressions; `lines` are the assignments that these need."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[Any, str] = {}     # Expr, or id of a record -> its variable
        self.named: list[Any] = []          # keeps what ids were taken of

    def text(self, value: Any) -> str:
        for kind, write in LITERALS.items():
            if isinstance(value, kind):
                return write(self, value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.record(value)
        return name_of(value) if callable(value) else f"unreadable({type(value).__name__!r})"

    def items(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.text, values))

    def expr(self, value: Expr) -> str:
        for node in postorder(value):
            if node.args and node not in self.names:
                text = self._call(node)
                self.names[node] = f"e{len(self.names)}"
                self.lines.append(f"{self.names[node]} = {text}")
        return self.names[value] if value.args else self._call(value)

    def _call(self, node: Expr) -> str:
        if node.op == "const":
            return f"const({self.text(node.attr)}, {node.dtype!r})"
        if node.op in ("axis", "symbol") and node.dtype == "i64":
            return f"{node.op}({node.attr!r})"
        return f"make({node.op!r}, {node.dtype!r}, {self.text(node.args)}, {self.text(node.attr)})"

    def record(self, value: Any) -> str:
        if id(value) in self.names:
            return self.names[id(value)]
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
        given = [f"{field.name}={self.text(own)}" for field, own in fields if type(own) is not type(field.default) or own != field.default]
        text = f"{type(value).__name__ if type(value).__module__ in RECORD_HOMES else name_of(type(value))}({', '.join(given)})"
        if not isinstance(value, SHARED):
            return text
        self.named.append(value)
        self.names[id(value)] = name = f"r{len(self.names)}"
        self.lines.append(f"{name} = {text}")
        return name


def _tensor_text(writer: TextWriter, value: torch.Tensor) -> str:
    if isinstance(value, AbstractTensor) or value.layout is not torch.strided:
        return f"unreadable({type(value).__name__!r})"
    data = writer.text(value.detach().cpu().flatten().tolist()) if value.numel() <= LARGE else "None"
    return f"constant({data}, {value.dtype}, {tuple(value.shape)}, {tuple(value.stride())}, {str(value.device)!r})"


def _tuple_text(writer: TextWriter, value: Any) -> str:
    items = writer.items(value)
    return f"{name_of(type(value))}({items})" if is_named_tuple(value) else f"({items}{',' if len(value) == 1 else ''})"


def _placement_text(writer: TextWriter, value: Any) -> str:
    parts = placement_parts(value)
    if parts is None:
        return f"unreadable({type(value).__name__!r})"
    return f"{name_of(type(value))}({', '.join(f'{argument}={writer.text(part)}' for argument, part in parts[1].items())})"


def _float_text(writer: TextWriter, value: float) -> str:
    return repr(value) if math.isfinite(value) else f"float('{value}')"


LITERALS: Table[Callable[[TextWriter, Any], str]] = Table("kind of value in a dump", "dumps.py")     # asked in this order
LITERALS.rows({
    Node: lambda w, v: v.name,
    Expr: TextWriter.expr,
    (bool, int, str, type(None), type(...)): lambda w, v: "..." if v is ... else repr(v),
    float: _float_text,
    complex: lambda w, v: f"complex({_float_text(w, v.real)}, {_float_text(w, v.imag)})",
    list: lambda w, v: f"[{w.items(v)}]",
    (tuple, frozenset): _tuple_text,
    dict: lambda w, v: f"{{{', '.join(f'{w.text(key)}: {w.text(item)}' for key, item in v.items())}}}",
    slice: lambda w, v: f"slice({w.items((v.start, v.stop, v.step))})",
    (torch.dtype, torch.layout, torch.memory_format): lambda w, v: str(v),
    torch.device: lambda w, v: f"torch.device({str(v)!r})",
    torch.Generator: lambda w, v: f"torch.Generator({str(v.device)!r})",
    torch.Tensor: _tensor_text,
})
if DeviceMesh is not None:
    LITERALS.add(DeviceMesh, lambda w, v: f"mesh_of({mesh_text(v)!r})")
    LITERALS.add(Placement, _placement_text)


def constant(data: list | None, dtype: torch.dtype, shape: tuple, strides: tuple, device: str) -> torch.Tensor:
    """A constant of a program; one without data is random."""
    if data is None:
        return random_tensor(shape, strides, dtype, device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(torch.tensor(data, dtype=dtype).reshape(shape))


def expr(op: str, dtype: str, args: tuple, attr: Any) -> Expr:
    return make(op, dtype, tuple(map(as_expr, args)), attr)


NAMES: dict[str, Any] = {**SPELLED, "make": expr,
                         "axis": ir.axis, "symbol": symbol, "const": const, "find": find, "unreadable": unreadable, "constant": constant,
                         "mesh_of": mesh_of, **{name: getattr(builtins, name) for name in ("float", "complex", "slice")}}


def records_text(value: Any) -> str:
    """A Program or a Plan: as people read it, in comments, then its records."""
    writer = TextWriter()
    result = writer.text(value)
    shown = [f"# {line}" for line in str(value).splitlines()]
    return "\n".join([*shown, *writer.lines, f"result = {result}"])


def names_of_records() -> dict[str, Any]:
    """What the text of a Program, a Plan or a kernel may name."""
    homes = map(importlib.import_module, RECORD_HOMES)
    return {**NAMES, **{name: cls for home in homes for name, cls in vars(home).items() if dataclasses.is_dataclass(cls)}}


def read_records(text: str) -> Any:
    names = names_of_records()
    exec(text, names)
    return names["result"]


# ---------------------------------------------------------------- kernels

def kernels_text(kernels: Sequence[Any]) -> str:
    """Each kernel's text behind a line that says what else it is."""
    return "\n".join(f"# kernel {TextWriter().text(dataclasses.replace(kernel, text=''))}\n{kernel.text}" for kernel in kernels)


def read_kernels(text: str) -> list[Any]:
    parts, names = re.split(r"^# kernel (.*)\n", text, flags=re.MULTILINE)[1:], names_of_records()
    return [dataclasses.replace(eval(head, names), text=body.removesuffix("\n")) for head, body in zip(parts[::2], parts[1::2])]


# ---------------------------------------------------------------- graphs as text

def graph_text(gm: GraphModule, **settings: Any) -> str:
    """A graph, its symbols, constants and regions; `settings` are written as assignments before it."""
    nodes = list(all_nodes(gm))
    env = next((env for node in nodes if (env := environment(node.meta.get("val"))) is not None), None)
    settings = {"grad_mode": torch.is_grad_enabled(), **{key: True for key in ("boxed", "fullgraph") if gm.meta.get(key)}, **settings}
    assignments = [f"{name} = {TextWriter().text(value)}" for name, value in settings.items()]
    return "\n".join([*assignments, *symbol_lines(env), *function_lines(gm, "forward")])


def all_nodes(gm: GraphModule) -> Iterable[Node]:
    for node in gm.graph.nodes:
        yield node
        if node.op == "get_attr" and isinstance(body := attribute(gm, node), GraphModule):
            yield from all_nodes(body)
        if custom := custom_of(node):
            yield from (*all_nodes(custom.forward), *all_nodes(custom.backward))
        for body in bodies_of(node):
            yield from all_nodes(body)


def attribute(gm: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def environment(value: Any) -> ShapeEnv | None:
    if isinstance(value, (list, tuple)):
        return next((env for item in value if (env := environment(item)) is not None), None)
    return value.world.env if type(value) is AbstractTensor else value.node.env if isinstance(value, SYMBOLIC) else None


def symbol_lines(env: ShapeEnv | None) -> list[str]:
    """The symbols, as they were made, and the answers that the program relies on."""
    if env is None:
        return []
    made = [f"{info.expr.attr} = {'unbacked(' if info.hint is None else f'backed({info.hint!r}, '}{info.source!r}, {info.lo}, {info.hi}, "
            f"{info.expr.dtype!r})" for info in env.symbols.values()]
    return [*made, *(f"known({size_text(guard.expr)})" for guard in env.recorded), *(f"assumed({size_text(guard.expr)})" for guard in env.asserts)]


PLAIN = frozenset({"symbol", "const", "add", "mul", "floordiv", "mod"})      # Python's operators on Exprs give them back


def size_text(size: Any) -> str:
    if type(size) is not Expr:
        return TextWriter().text(size)
    if all(node.op in PLAIN and node.dtype == "i64" for node in postorder(size)) or size.op == "symbol":
        return python_text(size)
    if size.op == "const":
        return f"const({TextWriter().text(size.attr)}, {size.dtype!r})"
    args = "".join(f"{size_text(arg)}, " for arg in size.args)
    return f"make({size.op!r}, {size.dtype!r}, ({args}), {size.attr!r})"


def function_lines(gm: GraphModule, name: str) -> list[str]:
    """Regions and constants first, then the graph as a function of its placeholders."""
    lines: list[str] = []
    given = ["self"]
    body = []
    shared: dict[Any, str] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            given.append(f"{node.name}: {type_text(node)}")
        elif node.op == "output":
            body.append(f"    return {TextWriter().text(tuple(node.args[0]))}")
        elif node.op == "get_attr" and isinstance(value := attribute(gm, node), GraphModule):
            lines += function_lines(value, str(node.target))
            body.append(f"    {node.name}: None = self.{node.target}")
        else:
            if custom := custom_of(node):
                lines += custom_lines(custom, f"{name}_{node.name}")
            if bodies := bodies_of(node):       # several calls may share them
                lines += [] if node.target in shared else bodies_lines(str(node.target.__name__), bodies, f"{name}_{node.name}")
                shared.setdefault(node.target, f"{name}_{node.name}")
            if node.op == "get_attr":
                lines.append(f"{str(node.target).replace('.', '_')} = {TextWriter().text(attribute(gm, node))}")
            body.append(f"    {node.name}: {type_text(node)} = {call_text(node, shared.get(node.target, f'{name}_{node.name}'))}")
    region = [f"checkpoint_{name} = {TextWriter().text(gm.meta['checkpoint'])}"] if "checkpoint" in gm.meta else []
    return [*lines, *region, f"def {name}({', '.join(given)}):", *body]


def custom_of(node: Node) -> CustomFunction | None:
    """The user's autograd function that a node applies."""
    return getattr(node.target, "custom", None) if node.op == "call_function" else None


def bodies_of(node: Node) -> Sequence[GraphModule]:
    """The captured graphs of a branch or a loop on data (autograd/branches.py)."""
    return getattr(node.target, "bodies", ()) if node.op == "call_function" and getattr(node.target, "__name__", "") in MAKERS else ()


def bodies_lines(kind: str, bodies: Sequence[GraphModule], name: str) -> list[str]:
    graphs = [line for place, body in enumerate(bodies) for line in function_lines(body, f"{name}_{place}")]
    return [*graphs, f"{name} = with_bodies({kind!r}, {name!r}, {len(bodies)})"]


def custom_lines(custom: CustomFunction, name: str) -> list[str]:
    """Its two graphs, and what is known beside them."""
    facts = {field.name: getattr(custom, field.name) for field in dataclasses.fields(custom)}
    reads = [(ref.is_input, ref.number, ref.saved) for ref in facts.pop("reads")]
    graphs = [function_lines(facts.pop(part), f"{name}_{part}") for part in ("forward", "backward")]
    return [*graphs[0], *graphs[1], f"{name} = custom({name!r}, {TextWriter().text({**facts, 'reads': reads})})"]


def call_text(node: Node, custom: str = "") -> str:
    """`custom`: under what name an autograd function of the user's is known."""
    writer = TextWriter()
    if node.op == "get_attr":
        return f"self.{str(node.target).replace('.', '_')}"
    args = [writer.text(arg) for arg in node.args]
    named = [f"{key}={writer.text(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join([*args[1:], *named])})"
    called = writer.text(node.target) if node.op == "call_function" else f"unreadable({str(node.target)!r})"
    return f"{custom if custom and (custom_of(node) or bodies_of(node)) else called}({', '.join([*args, *named])})"


def type_text(node: Node) -> str:
    """The type of a node's value, with its tags."""
    tags = {key: node.meta[key] for key in TAGS if key in node.meta}
    if node.meta.get("phase") == "backward":
        tags["phase"] = "backward"
    text = value_text(node.meta.get("val"))
    if not tags:
        return text
    return f"tagged({text}, {', '.join(f'{key}={tag_text(value)}' for key, value in tags.items())})"


def tag_text(value: Any) -> str:
    """The value of a tag; symbols by their names."""
    return f"[{', '.join(map(size_text, value))}]" if isinstance(value, list) else TextWriter().text(value)


def value_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({''.join(f'{value_text(item)}, ' for item in value)})"
    if isinstance(value, SYMBOLIC):
        return size_text(from_sym(value))
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and type(value) in (AbstractTensor, torch.Tensor, torch.nn.Parameter):
            return tensor_type_text(value)
        pack = pack_of(value)
        return f"unreadable({type(value).__name__!r})" if pack is None else \
            f"wrapped({TextWriter().text(pack)}, {value_text(parts_of(value))}){autograd_text(value)}"
    return TextWriter().text(value)


def tensor_type_text(value: torch.Tensor) -> str:
    spec = value.spec if type(value) is AbstractTensor else spec_of(value)
    text = f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(size_text, spec.shape)) or '()'}]"
    if spec.strides != contiguous_strides(spec.shape):
        text += f".strided({', '.join(map(size_text, spec.strides))})"
    if spec.offset != 0:
        text += f".at({size_text(spec.offset)})"
    if not on_host(spec):
        text += f".on({str(spec.device)!r})"
    return text + autograd_text(value)


def autograd_text(value: torch.Tensor) -> str:
    with torch.no_grad():
        return "" if not value.requires_grad else ".result()" if has_history(value) else ".grad()"


# ---------------------------------------------------------------- graphs from text

@dataclass(frozen=True)
class ValueType:
    """What a graph's text says of a tensor besides its making."""
    requires_grad: bool = False
    is_leaf: bool = True

    def abstract(self, world: AbstractWorld) -> torch.Tensor:
        raise NotImplementedError

    def grad(self) -> Any:
        return dataclasses.replace(self, requires_grad=True)

    def result(self) -> Any:
        return dataclasses.replace(self, requires_grad=True, is_leaf=False)


@dataclass(frozen=True)
class WrapperType(ValueType):
    """A tensor subclass, put together of parts."""
    pack: Pack | None = None
    parts: tuple[Any, ...] = ()

    def abstract(self, world: AbstractWorld) -> torch.Tensor:
        assert self.pack is not None
        make = lambda: self.pack.build(part.abstract(world) for part in self.parts).detach()
        return as_autograd_knows(make(), self, make)


@dataclass(frozen=True)
class TensorType(ValueType):
    """A tensor as a graph's text describes it."""
    spec: Spec = Spec((), (), 0, torch.float32, HOST)

    def __getitem__(self, sizes: Any) -> TensorType:
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        return self._with(shape=shape, strides=contiguous_strides(shape))

    def _with(self, **changes: Any) -> TensorType:
        return dataclasses.replace(self, spec=self.spec._replace(**changes))

    def strided(self, *strides: Any) -> TensorType:
        return self._with(strides=strides)

    def at(self, offset: Any) -> TensorType:
        return self._with(offset=offset)

    def on(self, device: str) -> TensorType:
        return self._with(device=torch.device(device))

    def abstract(self, world: AbstractWorld) -> torch.Tensor:
        made: torch.Tensor = world.make(self.spec)
        return as_autograd_knows(made, self, lambda: world.make(self.spec))


def as_autograd_knows(made: torch.Tensor, wanted: Any, fresh: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor as a leaf or as a result, as `wanted` is."""
    if not wanted.requires_grad:
        return made
    made.requires_grad_()
    with torch.enable_grad():
        return made if wanted.is_leaf else ResultOfOperator.apply(made, fresh)


@dataclass
class ReadGraph:
    """A graph from its text: `settings` are the assignments before it."""
    gm: GraphModule
    settings: dict[str, Any]
    env: ShapeEnv

    @property
    def example_inputs(self) -> list[Any]:
        return [node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder")]


def read_graph(text: str) -> ReadGraph:
    return GraphReader().read(text)


class GraphReader:
    """Builds what the text describes: symbols, then constants, regions and the graph."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.world = AbstractWorld(self.env)
        self.names: dict[str, Any] = {
            **NAMES, "backed": self.backed, "unbacked": lambda *about: self.backed(None, *about), "known": self.env.decide,
            "assumed": self.env.assume, "tagged": self.tagged, "custom": self.custom, "with_bodies": self.with_bodies,
            "wrapped": lambda pack, parts: WrapperType(pack=pack, parts=parts),
            **{name: TensorType(spec=Spec((), (), 0, dtype, HOST)) for name, dtype in DTYPES.items()}}
        self.symbol = ""                    # the one being assigned
        self.settings: dict[str, Any] = {}

    def read(self, text: str) -> ReadGraph:
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.FunctionDef):
                self.settings[statement.name] = self.function(statement)
            elif isinstance(statement, ast.Assign):
                self.symbol = ast.unparse(statement.targets[0])
                self.settings[self.symbol] = self.names[self.symbol] = self.value(statement.value)
            else:
                self.value(statement.value)     # type: ignore[attr-defined]  # an expression: known(...)
        gm = self.settings.pop("forward")
        gm.meta.update({key: self.settings[key] for key in ("boxed", "fullgraph") if key in self.settings})
        return ReadGraph(gm, self.settings, self.env)

    def value(self, tree: ast.expr, nodes: dict[str, Node] | None = None) -> Any:
        return eval(compile(ast.Expression(tree), "<dump>", "eval"), {**self.names, **(nodes or {})})

    def backed(self, hint: Any, source: str, lo: int | None, hi: int | None, dtype: str) -> Expr:
        prefix, number = self.symbol[0], int(self.symbol[1:])
        self.env._counts[prefix] = number       # names as they were: speculation leaves gaps between them
        made = self.env.create_unbacked(lo, hi, source, dtype) if hint is None else self.env.create_symbol(hint, source, lo, hi, dtype)
        assert made is symbol(self.symbol, dtype), made
        return made

    def custom(self, name: str, facts: dict[str, Any]) -> Callable[..., Any]:
        reads = [ValueRef(*ref) for ref in facts.pop("reads")]
        graphs = {part: self.settings[f"{name}_{part}"] for part in ("forward", "backward")}
        return CustomFunction(**facts, **graphs, reads=reads).applied()

    def with_bodies(self, kind: str, name: str, count: int) -> Callable[..., Any]:
        return MAKERS[kind](*(self.settings[f"{name}_{place}"] for place in range(count)))

    def tagged(self, kind: Any, **tags: Any) -> Tagged:
        return Tagged(kind, tags)

    # ------------------------------------------------------------ functions

    def function(self, definition: ast.FunctionDef) -> GraphModule:
        graph = Graph()
        nodes: dict[str, Node] = {}
        constants: dict[str, Any] = {}
        for argument in definition.args.args[1:]:
            nodes[argument.arg] = self.described(graph.placeholder(argument.arg), argument.annotation)
        for statement in definition.body:
            if isinstance(statement, ast.Return):
                graph.output(self.value(statement.value, nodes))        # type: ignore[arg-type]  # graphs return tuples
                continue
            assert isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
            name = statement.target.id
            node = self.node(graph, name, statement.value, nodes)
            nodes[name] = self.described(node, statement.annotation)
            if node.op == "get_attr":
                constants[str(node.target)] = self.settings[str(node.target)]
                if isinstance(constants[str(node.target)], GraphModule):
                    node.meta["val"] = constants[str(node.target)]
        gm = module_of(graph, "Replayed") if any(isinstance(value, GraphModule) for value in constants.values()) else GraphModule(constants, graph)
        if f"checkpoint_{definition.name}" in self.settings:
            gm.meta["checkpoint"] = self.settings[f"checkpoint_{definition.name}"]
        return gm

    def node(self, graph: Graph, name: str, value: ast.expr, nodes: dict[str, Node]) -> Node:
        if isinstance(value, ast.Attribute):
            return graph.create_node("get_attr", value.attr, name=name)
        assert isinstance(value, ast.Call)
        args = [self.value(arg, nodes) for arg in value.args]
        named = {str(keyword.arg): self.value(keyword.value, nodes) for keyword in value.keywords}
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Name) and value.func.value.id in nodes:
            return graph.create_node("call_method", value.func.attr, (nodes[value.func.value.id], *args), named, name)
        return graph.create_node("call_function", self.value(value.func), tuple(args), named, name)

    def described(self, node: Node, annotation: ast.expr | None) -> Node:
        assert annotation is not None
        kind = self.value(annotation)
        node.meta["phase"] = "forward"
        if isinstance(kind, Tagged):
            node.meta.update(kind.tags)
            kind = kind.kind
        node.meta["val"] = self.abstract(kind)
        return node

    def abstract(self, kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(self.abstract, kind))
        return kind.abstract(self.world) if isinstance(kind, ValueType) else to_symint(kind, self.env)


@dataclass(frozen=True)
class Tagged:
    kind: Any
    tags: dict[str, Any]


def example_of(value: Any, env: ShapeEnv) -> Any:
    """What a graph can be called with in the place of an abstract value: random data, sizes as the hints say."""
    if isinstance(value, SYMBOLIC):
        return env.hint(from_sym(value))
    if not isinstance(value, AbstractTensor):
        return value
    sizes: Any = [env.hint(size) for size in (*value.spec.shape, *value.spec.strides)]
    shape, strides, offset = sizes[:value.dim()], sizes[value.dim():], env.hint(value.spec.offset)
    return as_autograd_knows(random_tensor(shape, strides, value.dtype, value.device, offset), value,
                             lambda: random_tensor(shape, strides, value.dtype, value.device, offset))


def random_tensor(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device | str, offset: int = 0) -> torch.Tensor:
    """Random numbers in a storage of their own; integers are 0 and 1, so that they can be indices."""
    count = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if all(shape) else offset
    data = torch.randn(count, device=device) if dtype.is_floating_point or dtype.is_complex else torch.randint(0, 2, (count,), device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(data.to(dtype).untyped_storage(), offset, tuple(shape), tuple(strides))
