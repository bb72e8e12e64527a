"""A small executable twin of the compiler: capture, differentiate, fuse, run.  Read it top to bottom, then `docs/README.md`; run it: `python docs/twin.py`.

Each part does in a page what a folder of `src/firesteel` does in full, with the same words:

    capture     bytecode of a function -> a graph of operators on tensors            capture/
    guards      what must still hold for the graph to be right                       capture/guards.py
    autograd    the graph -> one with the gradients of its inputs as results         autograd/
    fuse        neighbouring pointwise operators -> one loop                         loops/
    codegen     a loop -> text, compiled once                                        codegen/
    compile     all of it behind a cache of (guards, code)                           capture/entry.py
"""
from __future__ import annotations

import builtins
import dataclasses
import dis
import math
import operator
from collections.abc import Callable

# ---------------------------------------------------------------- values
# A tensor is a flat list of floats here: what matters is the program, not the data.


@dataclasses.dataclass(eq=False)
class Node:
    """An operator of the graph and its arguments: other nodes or numbers."""
    op: str
    args: tuple
    name: str

    def __str__(self):
        return f"{self.name} = {self.op}({', '.join(a.name if isinstance(a, Node) else str(a) for a in self.args)})"


@dataclasses.dataclass
class Graph:
    inputs: list[Node]
    nodes: list[Node]
    results: list[Node]

    def __str__(self):
        return "\n".join([*(f"input {n.name}" for n in self.inputs), *map(str, self.nodes), f"return {', '.join(n.name for n in self.results)}"])


class Builder:
    """Appends nodes."""

    def __init__(self):
        self.inputs, self.nodes = [], []

    def input(self, name):
        self.inputs.append(Node("input", (), name))
        return self.inputs[-1]

    def call(self, op, *args):
        self.nodes.append(Node(op, args, f"{op}_{len(self.nodes)}"))
        return self.nodes[-1]


# op -> (its meaning on one element, the gradients of its arguments).  To add an operator, add a row.
OPS: dict[str, tuple[str, Callable]] = {
    "add": ("{0} + {1}", lambda b, n, g: (g, g)),
    "sub": ("{0} - {1}", lambda b, n, g: (g, b.call("mul", g, -1.0))),
    "mul": ("{0} * {1}", lambda b, n, g: (b.call("mul", g, n.args[1]), b.call("mul", g, n.args[0]))),
    "exp": ("math.exp({0})", lambda b, n, g: (b.call("mul", g, n),)),
    "tanh": ("math.tanh({0})", lambda b, n, g: (b.call("mul", g, b.call("sub", 1.0, b.call("mul", n, n))),)),
}
FUNCTIONS = {math.exp: "exp", math.tanh: "tanh"}
BINARY = {"+": "add", "-": "sub", "*": "mul"}


# ---------------------------------------------------------------- capture
class Break(Exception):
    """What cannot be captured: the caller runs the function as it is."""


def capture(fn, args):
    """Executes the bytecode on symbolic values.  Arguments that are lists are tensors, and become inputs; the rest are constants, which the guards
    check.  `for` over a range, `if` on a constant: control flow happens now and leaves no trace in the graph."""
    builder, guards = Builder(), []
    local = {}
    for name, value in zip(fn.__code__.co_varnames, args):
        if isinstance(value, list):
            local[name] = builder.input(name)
            guards.append((name, "length", len(value)))
        else:
            local[name] = value
            guards.append((name, "equals", value))
    result = run_bytecode(fn, local, builder)
    return Graph(builder.inputs, builder.nodes, [result]), guards


def run_bytecode(fn, local, builder):
    program = [i for i in dis.get_instructions(fn) if i.opname not in ("CACHE", "RESUME", "PRECALL", "NOP", "PUSH_NULL", "TO_BOOL", "EXTENDED_ARG")]
    place = {i.offset: n for n, i in enumerate(program)}
    stack, pc = [], 0

    def jump(target):
        return min(place[o] for o in place if o >= target)      # a target may be an instruction that was left out
    while True:
        i = program[pc]
        pc += 1
        if i.opname == "RETURN_VALUE":
            return stack.pop()
        elif i.opname == "RETURN_CONST":
            return i.argval
        elif i.opname in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"):
            stack.append(local[i.argval])
        elif i.opname == "LOAD_FAST_LOAD_FAST":
            stack += [local[name] for name in i.argval]
        elif i.opname == "STORE_FAST":
            local[i.argval] = stack.pop()
        elif i.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            stack.append(i.argval)
        elif i.opname == "LOAD_GLOBAL":
            name = i.argval
            stack.append(fn.__globals__[name] if name in fn.__globals__ else getattr(builtins, name))
        elif i.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            stack.append(getattr(stack.pop(), i.argval))
        elif i.opname == "BINARY_OP":
            right, left = stack.pop(), stack.pop()
            stack.append(binary(builder, i.argrepr.rstrip("="), left, right))
        elif i.opname == "CALL":
            given = [stack.pop() for _ in range(i.arg)][::-1]
            stack.append(call(builder, stack.pop(), given))
        elif i.opname == "GET_ITER":
            stack.append(iter(stack.pop()))
        elif i.opname == "FOR_ITER":
            try:
                stack.append(next(stack[-1]))
            except StopIteration:
                stack.pop()
                pc = jump(i.argval)
                if program[pc].opname == "END_FOR":     # Python 3.12 on: the iterator is gone already
                    pc += 2 if program[pc + 1].opname == "POP_TOP" else 1
        elif i.opname.startswith("JUMP_BACKWARD"):
            pc = jump(i.argval)
        elif i.opname.startswith(("POP_JUMP_IF", "POP_JUMP_FORWARD_IF")):
            condition = stack.pop()
            if isinstance(condition, Node):
                raise Break(f"line {i.positions.lineno}: a branch depends on the data of a tensor")
            if bool(condition) == i.opname.endswith("TRUE"):
                pc = jump(i.argval)
        else:
            raise Break(f"line {i.positions.lineno}: the instruction {i.opname} is not captured")


def binary(builder, sign, left, right):
    if not isinstance(left, Node) and not isinstance(right, Node):
        return getattr(operator, BINARY[sign])(left, right)         # constants: computed now
    return builder.call(BINARY[sign], left, right)


def call(builder, function, given):
    if not any(isinstance(value, Node) for value in given):
        return function(*given)
    if function in FUNCTIONS:
        return builder.call(FUNCTIONS[function], *given)
    if hasattr(function, "__code__"):                           # a function of the user: its body is part of the graph
        return run_bytecode(function, dict(zip(function.__code__.co_varnames, given)), builder)
    raise Break(f"a call of {function} is not captured")


def guards_hold(fn, guards, args):
    values = dict(zip(fn.__code__.co_varnames, args))
    return all(len(values[name]) == data if kind == "length" else type(values[name]) is type(data) and values[name] == data
               for name, kind, data in guards)


# ---------------------------------------------------------------- autograd
def differentiate(graph):
    """The joint graph: results are the graph's own, then the gradient of their sum for each input.  Walks backwards; a node that several read gets
    the sum of what they send."""
    b = Builder()
    b.inputs, b.nodes = list(graph.inputs), list(graph.nodes)
    arrived = {graph.results[0]: 1.0}
    for node in reversed(graph.nodes):
        if node in arrived:
            for arg, gradient in zip(node.args, OPS[node.op][1](b, node, arrived[node])):
                if isinstance(arg, Node):
                    arrived[arg] = b.call("add", arrived[arg], gradient) if arg in arrived else gradient
    gradients = [g if isinstance(g := arrived.get(x, 0.0), Node) else b.call("mul", 0.0 if g == 0.0 else g, b.call("sub", b.call("add", x, 1.0), x))
                 for x in graph.inputs]
    return dead_code_removed(Graph(b.inputs, b.nodes, [*graph.results, *gradients]))


def dead_code_removed(graph):
    needed, waiting = set(), list(graph.results)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [a for a in node.args if isinstance(a, Node)]
    return Graph(graph.inputs, [n for n in graph.nodes if n in needed], graph.results)


# ---------------------------------------------------------------- fuse, codegen
def code(graph):
    """Every operator here is pointwise, so all are one loop, and no value between is stored."""
    spell = lambda a: a.name if isinstance(a, Node) else repr(a)
    body = [f"        {n.name} = {OPS[n.op][0].format(*map(spell, n.args))}" for n in graph.nodes]
    each = ", ".join(n.name for n in graph.inputs)
    stores = [f"        out[{k}].append({n.name})" for k, n in enumerate(graph.results)]
    rows = ", ".join(f"all_{n.name}" for n in graph.inputs)
    return "\n".join([f"def kernel({rows}):", f"    out = [{', '.join('[]' for _ in graph.results)}]",
                      f"    for {each}, in zip({rows}):", *body, *stores, "    return out"])


def build(graph):
    scope = {"math": math}
    exec(code(graph), scope)
    return scope["kernel"]


# ---------------------------------------------------------------- compile
def compile(fn):
    """A function that returns (value, gradient of each tensor argument).  `entries`: what was compiled so far, tried in order."""
    entries = []

    def compiled(*args):
        for guards, kernel in entries:
            if guards_hold(fn, guards, args):
                return kernel(*[a for a in args if isinstance(a, list)])
        graph, guards = capture(fn, args)
        entries.append((guards, build(differentiate(graph))))
        return compiled(*args)
    compiled.entries = entries
    return compiled


# ---------------------------------------------------------------- a run
def layer(x, scale):
    return math.tanh(x * scale)


def program(x, y, steps):
    for k in range(steps):
        x = layer(x, k + 1.0) + y
    return x * math.exp(y)


if __name__ == "__main__":
    x, y = [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]
    captured, what_holds = capture(program, (x, y, 2))
    print("captured:", captured, "", "guards:", *what_holds, "", "joint:", differentiate(captured), "", "code:", code(differentiate(captured)), "", sep="\n")
    run = compile(program)
    value, dx, dy = run(x, y, 2)
    print("value", value, "dx", dx, "dy", dy)
    nudge = 1e-6
    for k in range(3):          # finite differences agree
        moved = run([v + nudge * (j == k) for j, v in enumerate(x)], y, 2)[0][k]
        assert abs((moved - value[k]) / nudge - dx[k]) < 1e-3
    run(x, y, 3)                # another constant: compiled again
    run([*x, 0.5], [*y, 4.0], 3)        # another length too
    assert len(run.entries) == 3
    try:
        capture(lambda x: x if x else 1.0, (x,))
    except Break as stop:
        print("break:", stop)
