"""`firesteel replay DUMP`: runs stages again from their dumps, in a process without the user's program.

A folder written with fs.config.dump_dir has a folder for each captured graph, with a text for each stage (dumps.py).  `replay` reads the texts of
one stage, runs the stages behind it, prints what they make, and compares the result, on random inputs of the recorded types, with eager's
run of the nearest dumped graph.

    firesteel replay /tmp/dump                              # from the captured graphs to the host functions
    firesteel replay /tmp/dump/001-step --from plan         # plans as they were dumped, perhaps edited by hand
    firesteel replay /tmp/dump --from joint --to fuse
"""
from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel import dumps, stages
from firesteel.autograd.facts import keep_gradients
from firesteel.autograd.partition import min_cut_partition
from firesteel.backends import native
from firesteel.config import config
from firesteel.errors import UserError
from firesteel.loops.plan import Plan
from firesteel.pipeline import LOOP_STAGES, compile_native
from firesteel.records import dataclass
from firesteel.stages import STAGES, Compilation, StageReached
from firesteel.table import Table
from firesteel.tools.cases import Values, first_difference, outcome

Run = Callable[[list[Any]], Sequence[Any]]      # a function of a list of inputs
LAST = "host"


# ---------------------------------------------------------------- dumps on disk

@dataclass(frozen=True)
class Dump:
    """A file: the text of a stage's product."""
    path: pathlib.Path
    stage: str
    made_of: str            # name of a file
    text: str

    @classmethod
    def of(cls, path: pathlib.Path) -> Dump:
        head, _, text = path.read_text(encoding="utf-8").partition("\n")
        found = re.fullmatch(r"[#;] (\w+) from (\S+)", head)
        if found is None or found[1] not in STAGES:
            raise UserError(f"{path} is no dump of a stage.", hint="Dumps are written with FIRESTEEL_DUMP_DIR.")
        return cls(path, found[1], found[2], text)

    def read(self) -> Any:
        read = STAGES[self.stage].read
        if read is None:
            raise UserError(f"The dump of {self.stage} cannot be read back.", hint=f"Start from one of {', '.join(STARTS)}.")
        return read(self.text)

    def parent(self) -> Dump:
        return Dump.of(self.path.parent / self.made_of)

    def graph(self) -> dumps.ReadGraph:
        """The nearest graph that it was made of: what it computes."""
        stage = STAGES[self.stage]
        return self.read() if stage.read is not None and stage.extension == "py" else self.parent().graph()


def dumps_in(folder: pathlib.Path) -> list[Dump]:
    """The files of a folder, or of the folders in it."""
    return [Dump.of(path) for path in sorted(folder.rglob("[0-9]*-*.*")) if path.is_file()]


# ---------------------------------------------------------------- where a replay starts

STARTS: Table[Callable[[Dump], Run]] = Table("stage to replay from", "replay.py")


@STARTS.row("graph")
def from_graph(dump: Dump) -> Run:
    read = dump.graph()
    with torch.set_grad_enabled(read.settings["grad_mode"]):
        return called(native(stages.done("graph", read.gm), read.example_inputs))


@STARTS.row("joint")
def from_joint(dump: Dump) -> Run:
    """The partition, and both of its graphs."""
    read = dump.graph()
    inputs = read.example_inputs
    count, values = read.settings["num_primals"], read.settings["num_fwd_outputs"]
    if count == len(inputs):
        return from_aten(stages.done("forward", read.gm), inputs)
    forward, backward = min_cut_partition(read.gm, [inputs[:count], inputs[count:]], num_fwd_outputs=values)
    places = keep_gradients(backward)
    backward.meta["boxed"] = True
    run_forward = from_aten(stages.done("forward", forward), inputs[:count])
    run_backward = from_aten(stages.done("backward", backward), [])

    def run(args: list[Any]) -> list[Any]:
        results = list(run_forward(args[:count]))
        found = run_backward([*results[values:], *args[count:]])
        return [*results[:values], *(None if place is None else found[place] for place in places)]
    return run


@STARTS.row("forward", "backward")
def from_half(dump: Dump) -> Run:
    read = dump.graph()
    return from_aten(stages.done(dump.stage, read.gm), read.example_inputs)


def from_aten(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Run:
    return called(compile_native(gm, example_inputs))


@STARTS.row("program", "simplify", "fuse", "plan")
def from_program(dump: Dump) -> Run:
    product = stages.done(dump.stage, dump.read())
    for name in LOOP_STAGES[LOOP_STAGES.index(dump.stage) + 1 if dump.stage in LOOP_STAGES else 0:]:
        product = stages.run(name, product)
    return on_copies(stages.run("host", product, stages.run("kernels", product)), product)


@STARTS.row("kernels")
def from_kernels(dump: Dump) -> Run:
    plan = dump.parent().read()
    return on_copies(stages.run("host", plan, stages.done("kernels", dump.read())), plan)


def on_copies(fn: Callable[..., Sequence[Any]], plan: Plan) -> Run:
    """The function, with copies of the inputs that it may write its results to: the graph that it is compared with leaves all inputs alone."""
    written = {plan.program.inputs.index(name) for _, name in plan.program.into}
    run = called(fn)
    return lambda args: run([torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a) if place in written else a
                             for place, a in enumerate(args)])


def called(fn: Callable[..., Sequence[Any]]) -> Run:
    return fn if getattr(fn, "_boxed_call", False) else lambda args: fn(*args)


# ---------------------------------------------------------------- comparing

def differences(run: Run, dump: Dump) -> list[str]:
    """What differs between the compiled function and eager's run of the dumped graph, on random inputs that are the same each time."""
    read = dump.graph()
    grad_mode = read.settings["grad_mode"] and dump.stage == "graph"        # in later stages gradients are results
    names = [node.name for node in read.gm.graph.find_nodes(op="placeholder")]

    def values(run: Run) -> Values:
        torch.manual_seed(0)
        inputs = [dumps.example_of(value, read.env) for value in read.example_inputs]
        with torch.set_grad_enabled(grad_mode):
            return outcome(lambda *args: run(list(args)), dict(zip(names, inputs)))
    found = first_difference(values(run), values(called(read.gm.forward)))
    return [f"{found.what}: {found.text}"] if found is not None else []


# ---------------------------------------------------------------- the command

def replay(folder: pathlib.Path, start: str = "graph", end: str = LAST, write: Callable[[str], None] = print) -> bool:
    """Runs the stages from `start` to `end` for every dump of `start` in the folder.  Is everything as eager says?"""
    for name in (start, end):
        if name not in STAGES:
            raise UserError(f"There is no stage {name!r}.", hint=f"Stages are {', '.join(STAGES)}.")
    if start not in STARTS:
        raise UserError(f"A replay cannot start from {start}.", hint=f"It can from {', '.join(STARTS)}.")
    dumped = dumps_in(folder)
    found = [dump for dump in dumped if dump.stage == start and (start != "graph" or dump.made_of == "-")]
    if not found:
        raise UserError(f"There is no dump of {start} in {str(folder)!r}.", hint="Dumps are written with FIRESTEEL_DUMP_DIR.")
    good = [replay_one(dump, end, {other.text for other in dumped if other.path.parent == dump.path.parent}, write) for dump in found]
    return all(good)


def replay_one(dump: Dump, end: str, dumped: set[str], write: Callable[[str], None]) -> bool:
    write(f"== {dump.path.parent.name}/{dump.path.name}")
    with tempfile.TemporaryDirectory() as folder, config.patch(dump_dir=folder):
        wrong = wrong_values(dump, end)
        for again in dumps_in(pathlib.Path(folder)):
            write(f"-- {again.path.name} ({'as dumped' if again.text in dumped else 'differs from the dump'})\n{again.text}")
    if end == LAST:
        write("equal to eager: yes" if not wrong else "\n".join(["equal to eager: no", *wrong]))
    return not wrong


def wrong_values(dump: Dump, end: str) -> list[str]:
    """Runs the stages; then what they made, where none is left out."""
    try:
        with stages.kept_by(Compilation("replay", end if end != LAST else "")):
            run = STARTS[dump.stage](dump)
    except StageReached:
        return []
    return differences(run, dump)
