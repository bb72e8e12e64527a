"""LlvmText: the lines of one function of LLVM text, in scopes, and the instructions that need no more than lines: shuffles and tests of lanes.

A function body is a stack of scopes (function entry, loop over points, lanes, a phase's loops); `level` is where `new` writes.  What a scope's values
are remembered by ends with it.  `LlvmFunction` (llvm_code.py) knows Exprs and memory on top of this.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from firesteel.records import dataclass


@dataclass(frozen=True, slots=True)
class LlvmValue:
    name: str       # a register or a literal
    lanes: int      # 0: scalar
    level: int      # index of the scope it stands in


@dataclass
class Scope:
    opening: list[str] = field(default_factory=list)    # text before the scope's own, written when it closes
    lines: list[str] = field(default_factory=list)
    keys: list[object] = field(default_factory=list)    # memo entries that end with the scope


class LlvmText:
    """Text under construction.  `begin` and `end` of scopes must be nested."""

    def __init__(self, declarations: dict[str, str]):
        self.declarations = declarations    # shared by the functions of a kernel
        self.scopes = [Scope()]
        self.level = 0
        self.allocas: list[str] = []
        self.memo: dict[object, LlvmValue] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def label(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def line(self, text: str) -> None:
        self.scopes[self.level].lines.append("  " + text)

    def new(self, text: str) -> str:
        name = self.name()
        self.scopes[self.level].lines.append(f"  {name} = {text}")
        return name

    def mark(self, label: str) -> None:
        self.scopes[self.level].lines.append(f"{label}:")

    def alloca(self, ty: str) -> str:
        name = self.name()
        self.allocas.append(f"  {name} = alloca {ty}")
        return name

    def begin(self) -> Scope:
        """Opens a scope inside the current ones."""
        self.scopes.append(Scope())
        self.level = len(self.scopes) - 1
        return self.scopes[-1]

    def end(self) -> None:
        scope = self.scopes.pop()
        for key in scope.keys:
            self.memo.pop(key, None)
        self.level = len(self.scopes) - 1
        self.scopes[-1].lines += scope.opening + scope.lines

    def remember(self, key: object, name: str, lanes: int, level: int) -> LlvmValue:
        val = self.memo[key] = LlvmValue(name, lanes, level)
        self.scopes[level].keys.append(key)
        return val

    def declare(self, name: str, text: str) -> str:
        self.declarations.setdefault(name, f"declare {text}")
        return name

    # ------------------------------------------------------------ types and constants

    def vector(self, element: str, lanes: int) -> str:
        return f"<{lanes} x {element}>" if lanes else element

    def zero(self, lanes: int) -> str:
        return "zeroinitializer" if lanes else "0"

    def integer(self, value: int, ty: str, lanes: int) -> str:
        return f"splat ({ty} {value})" if lanes else str(value)

    # ------------------------------------------------------------ lanes

    def any(self, test: str, lanes: int) -> str:
        """Does a test hold for one of the lanes?"""
        if not lanes:
            return test
        mask = self.vector("i1", lanes)
        full = self.declare(f"@llvm.vector.reduce.or.v{lanes}i1", f"i1 @llvm.vector.reduce.or.v{lanes}i1({mask})")
        return self.new(f"call i1 {full}({mask} {test})")

    def rarely(self, test: str, ty: str, lanes: int, usual: str, rare: Callable[[], str]) -> str:
        """`usual`; for a vector with a lane for which the test holds, what `rare` writes into a block beside the others in those lanes."""
        found, aside, done = self.alloca(ty), self.label("rare"), self.label("done")
        self.line(f"store {ty} {usual}, ptr {found}")
        self.line(f"br i1 {self.any(test, lanes)}, label %{aside}, label %{done}, !prof !0")
        self.mark(aside)
        chosen = self.new(f"select {self.vector('i1', lanes)} {test}, {ty} {rare()}, {ty} {usual}")
        self.line(f"store {ty} {chosen}, ptr {found}")
        self.line(f"br label %{done}")
        self.mark(done)
        return self.new(f"load {ty}, ptr {found}")

    def shuffle(self, value: str, scalar: str, lanes: int, picks: Iterable[int]) -> str:
        picks = list(picks)
        mask = ", ".join(f"i32 {p}" for p in picks)
        return self.new(f"shufflevector <{lanes} x {scalar}> {value}, <{lanes} x {scalar}> poison, <{len(picks)} x i32> <{mask}>")

    def join(self, a: str, b: str, scalar: str, lanes: int) -> str:
        mask = ", ".join(f"i32 {p}" for p in range(2 * lanes))
        return self.new(f"shufflevector <{lanes} x {scalar}> {a}, <{lanes} x {scalar}> {b}, <{2 * lanes} x i32> <{mask}>")

    def picked(self, rows: Sequence[str], element: str, homes: Sequence[tuple[int, int]]) -> str:
        """A vector whose lanes are (row, lane of it), of rows as long as it: a shuffle for each but the first."""
        lanes, used = len(homes), sorted({row for row, _ in homes})
        value, inside = rows[used[0]], used[:1]
        for row in used[1:] or used:
            picks = []
            for k, (home, lane) in enumerate(homes):
                kept = lane if len(inside) == 1 else k      # a shuffle before this one has put it into its place
                picks.append(f"i32 {kept if home in inside else lanes + lane}" if home in inside or home == row else "i32 poison")
            ty = f"<{lanes} x {element}>"
            value = self.new(f"shufflevector {ty} {value}, {ty} {rows[row]}, <{lanes} x i32> <{', '.join(picks)}>")
            inside = [*inside, row]
        return value

    def spread_mask(self, mask: str, owners: Sequence[int | None]) -> str:
        """The mask of elements, each of which belongs to a lane or to none."""
        lanes = len(owners)
        picks = ", ".join(f"i32 {lanes if owner is None else owner}" for owner in owners)
        return self.new(f"shufflevector <{lanes} x i1> {mask}, <{lanes} x i1> zeroinitializer, <{lanes} x i32> <{picks}>")

    def reversed(self, vector: str, element: str, lanes: int) -> str:
        ty = f"<{lanes} x {element}>"
        return self.new(f"shufflevector {ty} {vector}, {ty} poison, <{lanes} x i32> <{', '.join(f'i32 {k}' for k in reversed(range(lanes)))}>")
