"""Machine: executes bytecode symbolically, on Values instead of objects.

In: frames to start from (a function's first instruction, or the suspended frames of a continuation).  Out: what the program
returned or raised, or the Break at which it cannot go on; and with it the recorded graph, the guards and the effects.
What always holds:

1. Handlers (`opcodes.py`) compute first and change the frame last.  On a Break every frame is as before the instruction.
2. A call of a Python function pushes a frame: a break inside it is a break of the whole stack of frames, one split.
3. Where a builtin needs the result of a user's function at once (`call_now`: a sort key, an `__eq__`), the call is a
   speculation: a Break inside undoes it and becomes a break of the instruction that called the builtin.
4. Nothing of the user's is changed; states of torch that were set are put back by `close`.
"""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from firesteel.autograd.regions import Tags, nested
from firesteel.capture import (  # noqa: F401  importing them registers their rows
    builder_rare,
    collectives,
    dtensors,
    flex,
    joins,
    opcodes_statements,
    polyfills,
    rounds,
    torch_objects,
)
from firesteel.capture.builder import is_trusted_scope
from firesteel.capture.effects import Effects
from firesteel.capture.frames import PROLOGUE, Discard, Frame, restore_frame, trace_line
from firesteel.capture.guards import Guard
from firesteel.capture.instr import Instr
from firesteel.capture.opcodes import OPCODES
from firesteel.capture.policy import SymbolPolicy
from firesteel.capture.python_operators import OPERATORS
from firesteel.capture.reader import Reader, is_variable
from firesteel.capture.record import Recorder
from firesteel.capture.services import Leaves, Modes, States
from firesteel.capture.values import (  # noqa: F401
    autograd,
    builtin_calls,
    checkpoints,
    classes,
    comparisons,
    copies,
    data,
    duals,
    engine_objects,
    gradients,
    hooks,
    jagged,
    known_names,
    leaves,
    made_tensors,
    math_calls,
    natives,
    nested_regions,
    overrides,
    saved_tensors,
    transforms,
)
from firesteel.capture.values.attributes import MISSING, attribute_of_opaque, mro_lookup
from firesteel.capture.values.attributes import bind as bind_attribute
from firesteel.capture.values.base import LASTI, NULL, PENDING, Undecided, UserRaise, Value
from firesteel.capture.values.class_objects import SuperValue
from firesteel.capture.values.const import NONE, ConstValue, fold, fresh, is_constant_object, run_for_program
from firesteel.capture.values.containers import Sequence, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import BoundBuiltin, CellValue, FunctionValue
from firesteel.capture.values.generators import AGAIN, GeneratorValue, exhausted
from firesteel.capture.values.iterators import SequenceIterator
from firesteel.capture.values.objects import BINARY_METHODS, COMPARE_METHODS, is_asked_first
from firesteel.capture.values.truths import asked
from firesteel.capture.world import MakeWorld
from firesteel.errors import Break, Location
from firesteel.sym.env import ShapeEnv
from firesteel.torchstate import leave_dual_levels
from firesteel.tracebacks import CodeLine

DEPTH_LIMIT = 150           # frames
LENGTH_LIMIT = 100_000      # items that an iterator may give at once

class SymbolicMachine(Reader):
    """One capture.  Mutable; used by one thread; see the module's text."""

    def __init__(self, make_world: MakeWorld, policy: SymbolPolicy, break_at: frozenset[int] = frozenset()):
        super().__init__(make_world(ShapeEnv(self.location)), policy)
        self.break_at = break_at
        self.frames: list[Frame] = []
        self.record = Recorder(self.place)
        self.steps = 0
        self.handling: Value = NONE             # the exception being handled
        self.returned: Value = NONE             # by the frame at the base of the innermost `run`
        self.base = 0
        self.states = States(self.guard, self.record, self.effects)
        self.modes, self.leaves = Modes(), Leaves()
        self.draws: tuple[Any, ...] = ()                # see values/python_random.py
        self.bodies = 0                                 # functions that become one node each, which are executed now; see values/transforms.py
        self.part: Callable[[Any], Any] | None = None   # see parts.py; None: the graph is not to be split
        self.unjoined: frozenset[int] = frozenset()     # steps at which branches are not joined (joins.py)
        self.joining = 0                                # how many branches are being joined
        self.answers: tuple[tuple[Value, int | None, bool], ...] = ()     # of branches whose ways are followed now: condition, writes to it, truth
        self.regions: dict[Any, Any] = {}               # nested ones by their prints (values/nested_regions.py)
        self.round: Any = None                          # of a loop, while it is followed (rounds.py)
        self.aliases: list[Any] = []                    # (step, tensors with their versions) of branches whose results may be inputs
        self.undecided: list[tuple[int, Value, int]] = []   # (step, condition, writes to it) of branches that the run function decides
        self.exit: Callable[[int], Any] | None = None   # writes how the program leaves the graph (translate.py)
        self.executed: dict[types.CodeType, dict[str, Any]] = {}    # with the globals
        self.imported: dict[str, tuple[str, ...]] = {}      # modules, and which names of them
        self._traces: dict[Any, str] = {}

    # -- running ---------------------------------------------------------------------------------------------------
    def run(self, base: int = 0, until: tuple[Frame, frozenset[int]] | None = None, moving: bool = False) -> Value:
        """Executes until the frame at `base` has returned, or a frame has come to one of some instructions (`moving`: from one of these); the result
        of the frame at `base`."""
        outer, self.base = self.base, base
        try:
            frames = self.frames
            while len(frames) > base:
                frame = frames[-1]
                if until is not None and frame is until[0] and frame.pc in until[1] and not moving:
                    break
                moving = False
                instr = frame.program[frame.pc]
                frame.pc += 1
                self.steps += 1
                mark = self.checkpoint()
                try:
                    if self.steps in self.break_at and instr.opname not in PROLOGUE:
                        raise Break("object", name="an object that cannot be handed over at a break")
                    handler = OPCODES.get(instr.opname)
                    if handler is None:
                        raise Break("opcode", name=instr.opname)
                    handler(self, frame, instr)
                except UserRaise as raised:
                    self.unwind(raised, base)
                except Break as stop:
                    self.rollback(mark)         # an iterator may have been advanced, say, before the trouble came
                    frame.pc = instr.index
                    if stop.inside and instr.opname in AGAIN and AGAIN[instr.opname](self, frame):
                        continue
                    if stop.location is None:
                        stop.location = self.location()
                    raise
            return self.returned
        finally:
            self.base = outer

    def give(self, frame: Frame, value: Value) -> None:
        """`frame`, which was just popped, returned `value`."""
        if len(self.frames) == self.base:
            self.returned = frame.returns if isinstance(frame.returns, Value) else value
        elif frame.returns is None:
            self.frames[-1].stack.append(self.look(value) if type(value) is Undecided else value)
        elif frame.returns is not Discard:
            self.frames[-1].stack.append(frame.returns)

    def unwind(self, raised: UserRaise, base: int) -> None:
        """Goes to the innermost handler of the frames above `base`; raises on where there is none."""
        while len(self.frames) > base:
            frame = self.frames[-1]
            self._note_place(raised.value, frame)
            handler = frame.instr().handler
            if handler is not None:
                del frame.stack[handler.depth:]
                if handler.lasti:
                    frame.stack.append(LASTI)
                frame.stack.append(raised.value)
                frame.pc = handler.target.index
                return
            self.frames.pop()
            if frame.generator is not None:
                self.finish_generator(frame.generator)
                raised = UserRaise(self.generator_error(raised.value))
        raise raised

    def _note_place(self, error: Value, frame: Frame) -> None:
        """The error passes through this frame: a line of its traceback."""
        if not isinstance(error, ExceptionValue) or frame.code.co_filename == polyfills.__file__:
            return
        if not error.passed or error.passed[0][0] is not frame:
            error.passed.insert(0, (frame, frame.place(frame.pc - 1)))

    def enter(self, fn: FunctionValue, slots: dict[str, Value]) -> Value:
        """Calls a Python function whose arguments are bound."""
        if len(self.frames) >= DEPTH_LIMIT:
            raise Break("depth", limit=DEPTH_LIMIT)
        self.executed[fn.code] = fn.scope
        self.frames.append(Frame(fn.code, fn.scope, slots, fn.closure, birth=self.steps))
        return PENDING

    # -- results that are needed now (rule 3) ----------------------------------------------------------------------
    def run_whole(self, fn: FunctionValue, slots: dict[str, Value]) -> Value:
        """The result of a function that is not split: a break inside is one of the call."""
        mark = self.checkpoint()
        try:
            return self._finish(self.enter(fn, slots))
        except Break:
            self.rollback(mark)
            raise

    def call_now(self, fn: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        mark = self.checkpoint()
        try:
            return self._finish(fn.call(self, args, kwargs))
        except Break as stop:
            stop.inside = True
            self.rollback(mark)
            raise

    def finish_now(self, result: Value) -> Value:
        """The result of an operation that may be PENDING."""
        if result is not PENDING:
            return result
        mark = self.checkpoint()
        mark = (*mark[:2], mark[2] - 1, *mark[3:])
        try:
            return self._finish(result)
        except Break:
            self.rollback(mark)
            raise

    def _finish(self, result: Value) -> Value:
        return self.run(len(self.frames) - 1) if result is PENDING else result

    def checkpoint(self) -> tuple[Any, ...]:
        return self.record.mark(), self.effects.mark(), len(self.frames), self.handling

    def rollback(self, mark: tuple[Any, ...]) -> None:
        record, effects, depth, self.handling = mark
        del self.frames[depth:]
        self.effects.rollback(effects)
        self.record.rollback(record)

    # -- generators ------------------------------------------------------------------------------------------------
    def push_generator(self, generator: GeneratorValue, sent: Value) -> bool:
        """Lets the running frame wait for the generator's next element; False where it is finished."""
        frame = generator.frame
        if frame is None:
            return False
        if frame in self.frames:
            raise self.raise_real(ValueError("generator already executing"))
        self.effects.on_undo(restore_frame, frame, (frame.pc, list(frame.stack), dict(frame.slots)))
        self.effects.change(generator, "touched", True)
        frame.stack[-1] = sent
        self.frames.append(frame)
        return True

    def resume_generator(self, generator: GeneratorValue, sent: Value, error: Value | None = None, after: Value | None = None) -> Value | None:
        """Runs a generator to its next yield; None when it has returned.  With `error` that is raised where it stands, with `after` its
        `yield from` is over, with that result."""
        mark = self.checkpoint()
        if not self.push_generator(generator, sent):
            if error is not None:
                raise UserRaise(error)
            return None
        base = len(self.frames) - 1
        try:
            if after is not None:
                generator.end_delegation(after)
            if error is not None:
                self.unwind(UserRaise(error), base)
            value = self.run(base)
        except Break as stop:
            stop.inside = True
            self.rollback(mark)
            raise
        return value if generator.frame is not None else None

    def finish_generator(self, generator: GeneratorValue, result: Value | None = None) -> None:
        self.effects.change(generator, "frame", None)
        self.effects.change(generator, "touched", True)
        if result is not None:
            self.effects.change(generator, "result", result)

    def generator_returns(self, frame: Frame, result: Value) -> None:
        """A generator's frame, which was just popped, has returned."""
        self.finish_generator(frame.generator, result)
        if len(self.frames) == self.base:
            self.returned = result
        else:
            exhausted(self.frames[-1], result)

    def generator_error(self, error: Value) -> Value:
        """A StopIteration that leaves a generator is a RuntimeError."""
        if error.python_type() is not StopIteration:
            return error
        made = ExceptionValue(RuntimeError, [ConstValue("generator raised StopIteration")])
        self.effects.store_attr(made, "__cause__", error)
        return made

    def run_class_body(self, body: FunctionValue, namespace: Value) -> None:
        mark = self.checkpoint()
        try:
            self.enter(body, {})
            self.frames[-1].namespace = namespace
            self.run(len(self.frames) - 1)
        except Break:
            self.rollback(mark)
            raise

    def join(self, frame: Frame, instr: Instr) -> bool:
        condition = frame.stack[-1].decided_by(self)
        return rounds.join_loop(self, frame, instr, condition) or joins.join(self, frame, instr, condition)

    def next_now(self, iterator: Value) -> Value | None:
        item = iterator.next(self)
        return None if item is None else self.look(item)

    def call_returning(self, fn: Value, args: list[Value], kwargs: dict[str, Value], result: Value) -> Value:
        """Calls fn, whose own result is dropped: the result is `result` (an object whose __init__ this is)."""
        if fn.call(self, args, kwargs) is not PENDING:
            return result
        self.frames[-1].returns = result
        return PENDING

    def call_in_module(self, module: Any, fn: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """A module's forward; its frame carries the module's name."""
        result = fn.call(self, args, kwargs)
        if result is PENDING and self.frames[-1].module is None:
            name = module.source.name
            self.frames[-1].module = (f"{name}@{id(module.obj):x}", name, module.cls)
        return result

    # -- operators -------------------------------------------------------------------------------------------------
    def binary(self, op: str, a: Value, b: Value) -> Value:
        result, first = None, is_asked_first(b, a, f"__r{BINARY_METHODS[op]}__")
        if first:
            result = b.binary(self, op, a, reflected=True)
        if result is None:
            result = a.binary(self, op, b)
        if result is None and not first:
            result = b.binary(self, op, a, reflected=True)
        if result is None:
            raise Break("operator", name=op, value=f"{a.describe()} and {b.describe()}")
        return result

    def inplace(self, op: str, a: Value, b: Value) -> Value:
        result = a.inplace(self, op, b)
        return self.binary(op, a, b) if result is None else result

    def compare(self, op: str, a: Value, b: Value) -> Value:
        result, first = None, is_asked_first(b, a, COMPARE_METHODS[MIRRORED[op]])
        if first:
            result = b.compare(self, MIRRORED[op], a)
        if result is None:
            result = a.compare(self, op, b)
        if result is None and not first:
            result = b.compare(self, MIRRORED[op], a)
        if result is None and {type(a), type(b)} == {ConstValue, TupleValue} and all(item.is_constant() for item in (*all_items(a), *all_items(b))):
            return fold(self, OPERATORS[op], self.known(a), self.known(b))      # a version of torch and a tuple, say
        if result is None and op in ("==", "!="):
            return ConstValue(self.identical(a, b) == (op == "=="))
        if result is None:
            raise Break("operator", name=op, value=f"{a.describe()} and {b.describe()}")
        return result

    def unary(self, op: str, a: Value) -> Value:
        return asked(self, a, negated=True) if op == "not" else a.unary(self, op)

    def identical(self, a: Value, b: Value) -> bool:
        """a is b"""
        if a is b:
            return True
        a.use(self)
        b.use(self)
        one, two = a.identity(), b.identity()
        if isinstance(a, ConstValue) and isinstance(b, ConstValue):
            return one is two or (type(one) is type(two) and type(one) in (int, str, float, bytes) and one == two)
        if one is not None and one is two:
            return True
        if type(one) is type(two) and is_variable(a) and is_variable(b):
            self.guard(Guard(a.source, "distinct", b.source))
        return False

    def equal(self, a: Value, b: Value) -> bool:
        """a == b as list.index and `in` ask it."""
        return self.identical(a, b) or self.compare("==", a, b).truth(self)

    def iterate_over(self, owner: Value) -> Value:
        if isinstance(owner, Sequence):
            return SequenceIterator(owner)
        return SequenceIterator(owner, 0, owner.iterate(self))

    def drain(self, iterator: Value) -> list[Value]:
        """All that an iterator still gives."""
        items = []
        while (item := iterator.next(self)) is not None:
            items.append(item)
            if len(items) > LENGTH_LIMIT:
                raise Break("iterate", value=f"an iterator of more than {LENGTH_LIMIT} items")
        return items

    def bound_builtin(self, fn: Callable[..., Any], first: Value) -> Value:
        return BoundBuiltin(fn, first)

    def run_real(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_for_program(self, fn, *args, **kwargs)

    def class_attribute(self, cls: type, name: str) -> Any:
        found = mro_lookup(cls, name)
        return None if found is MISSING or not isinstance(found, (types.FunctionType, property, classmethod, staticmethod)) else found

    def bind(self, attribute: Any, owner: Value, cls: type, name: str) -> Value:
        return bind_attribute(self, attribute, owner, cls, name)

    def attribute_of_opaque(self, owner: Value, name: str) -> Value | None:
        return attribute_of_opaque(self, owner, name)

    def raise_real(self, error: BaseException) -> UserRaise:
        """The program meets this error here."""
        args = [fresh(self, a) if is_constant_object(a) else ConstValue(str(a)) for a in error.args]
        return UserRaise(ExceptionValue(type(error), args))

    def implicit_super(self) -> Value:
        """super() without arguments."""
        frame = self.frames[-1]
        cell = frame.slots.get("__class__")
        first = frame.slots.get(frame.code.co_varnames[0]) if frame.code.co_argcount else None
        if isinstance(first, CellValue):
            first = first.get(self)
        if not isinstance(cell, CellValue) or first is None:
            raise Break("introspection", name="super")
        return SuperValue(cell.get(self).constant(), self.look(first))      # type: ignore[union-attr]  # bound when the class was made

    def local_variables(self) -> dict[str, Value]:
        """What locals() holds: the bound ones, cells by their content."""
        frame = self.frames[-1]
        if frame.namespace is not None:
            raise Break("introspection", name="locals in a class body")
        names = dict.fromkeys((*frame.code.co_varnames, *frame.code.co_cellvars, *frame.code.co_freevars))
        found = {name: frame.slots.get(name) for name in names}
        read = {name: slot.get(self) if isinstance(slot, CellValue) else slot for name, slot in found.items()}
        return {name: value for name, value in read.items() if value is not None and value is not NULL}

    def overridden(self, kind: str, target: Any, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
        found = jagged.called(self, kind, target, args, kwargs)
        return overrides.overridden(self, kind, target, args, kwargs) if found is None else found

    def new_leaf(self, made: Any, name: str) -> Value:
        return leaves.new_leaf(self, made, leaves.requiring_grad, name)

    def override_attribute(self, tensor: Value, name: str) -> Value | None:
        return overrides.attribute(self, tensor, name)

    # -- the end ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Puts the states of torch back."""
        self.states.restore()
        leave_dual_levels(self.modes.outer_level)
        leaves.put_back_flags(self)

    def release(self) -> None:
        """Lets go of the user's objects: graphs outlive the machine, and reach it through the environment's `locate`."""
        self._objects.clear()
        self.frames.clear()
        self.record.release()
        self.effects = Effects()
        self.states = States(self.guard, self.record, self.effects)
        if self.world.env is not None:
            self.world.env.locate = lambda: None

    # -- places ----------------------------------------------------------------------------------------------------
    def location(self) -> Location | None:
        """The user's line that is being executed: the innermost one outside of torch and the standard library, if there is one."""
        ours = [f for f in reversed(self.frames) if f.code.co_filename != polyfills.__file__]
        frames = [f for f in ours if not f.code.co_filename.startswith("<")] or ours      # code that was typed in has no file
        frame = next((f for f in frames if not is_trusted_scope(f.scope)), frames[0] if frames else None)
        if frame is None:
            return None
        instr = frame.program[min(max(frame.pc - 1, 0), len(frame.program) - 1)]
        return Location(frame.code.co_filename, instr.lineno or frame.code.co_firstlineno, frame.code.co_qualname)

    def places(self) -> tuple[CodeLine, ...]:
        """Where the frames are: the innermost one stands at its instruction, the others behind theirs."""
        return tuple(f.place(f.pc if f is self.frames[-1] else f.pc - 1) for f in self.frames if f.code.co_filename != polyfills.__file__)

    def place(self) -> dict[str, Any]:
        """stack_trace and nn_module_stack of a node made now."""
        lines = tuple((frame.code, frame.instr().lineno) for frame in self.frames)
        text = self._traces.get(lines)
        if text is None:
            text = self._traces[lines] = "".join(trace_line(code, line) for code, line in lines)
        modules = {f.module[0]: (f.module[1], f.module[2]) for f in self.frames if f.module is not None}
        return {"stack_trace": text, "nn_module_stack": modules, **self.region_tags()}

    def region_tags(self) -> Tags:
        """The tags of the checkpointed regions that are inlined now."""
        tags: Tags = {}
        for region in (f.tags for f in self.frames if f.tags):
            tags = nested(tags, region) if tags else region
        return tags


def all_items(value: Value) -> list[Value]:
    return value.items if isinstance(value, TupleValue) else []


MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
