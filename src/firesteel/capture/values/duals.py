"""Forward-mode AD entered inside: `with torch.autograd.forward_ad.dual_level():`.

torch's own forward mode runs on the abstract tensors, which carry tangents as real ones do; entering, leaving, making and unpacking are nodes.  A
trace runs them in order, so what is compiled has plain operators and no level.  While capturing, the level stays open from the first block to the
end: only metadata is asked.  A break inside a block is made where the block is entered.

    enter_dual_level(); d = make_dual(x, t); y = d.sin(); tangent = unpack_dual(y)[1]; exit_dual_level()
"""
from __future__ import annotations

import operator

from torch.autograd import forward_ad

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.values.base import CannotRebuild, Value
from firesteel.capture.values.const import FALSE, NONE, ConstValue
from firesteel.capture.values.containers import NamedTupleValue
from firesteel.capture.values.contexts import ContextValue, ExitValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.tensor import TensorValue, wrap_output
from firesteel.capture.values.torch_calls import call_graph, run_abstract
from firesteel.errors import Break
from firesteel.torchstate import leave_dual_levels


class DualContext(ContextValue):
    """dual_level()"""

    def __init__(self) -> None:
        super().__init__(forward_ad.dual_level, [], {}, [])

    def clone(self) -> ContextValue:
        return DualContext()

    def enter(self, m: Machine) -> tuple[Value, Value]:
        if m.modes.in_dual_level or m.modes.outer_level >= 0:
            raise Break("context", name="dual_level inside of dual_level")
        if forward_ad._current_level >= 0:      # an earlier block's tangents are gone, and do not come back where this is undone
            m.effects.on_undo(setattr, m.modes, "tangents_lost", True)
        leave_dual_levels(-1)
        forward_ad.enter_dual_level()
        m.effects.change(m.modes, "in_dual_level", True)
        m.record.call_function(forward_ad.enter_dual_level, (), {}, 0)
        return DualExit(m.steps), ConstValue(0)


class DualExit(ExitValue):
    """The exit function; a break inside is one where the block was entered."""

    def __init__(self, birth: int):
        super().__init__(())
        self.birth = birth

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        m.effects.change(m.modes, "in_dual_level", False)
        m.record.call_function(forward_ad.exit_dual_level, (), {}, None)
        return FALSE

    def rebuild(self, e: Emitter) -> str:
        raise CannotRebuild(self, self.birth)


CALLS.row(forward_ad.dual_level)(lambda m, args, kwargs: DualContext())


def known_to_be_inside(m: Machine, name: str, kwargs: Kwargs) -> None:
    if not m.modes.in_dual_level or m.modes.tangents_lost or kwargs:
        raise Break("transform", name=f"by {name}, outside of a dual_level that is captured,")


@CALLS.row(forward_ad.make_dual)
def call_make_dual(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    known_to_be_inside(m, "make_dual", kwargs)
    return call_graph(m, "call_function", forward_ad.make_dual, args, {})


@CALLS.row(forward_ad.unpack_dual)
def call_unpack_dual(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    known_to_be_inside(m, "unpack_dual", kwargs)
    tensor = m.look(args[0])
    if not isinstance(tensor, TensorValue):
        raise Break("argument", value=tensor.describe())
    out = run_abstract(m, forward_ad.unpack_dual, [tensor.abstract], {}, forward_ad.unpack_dual)
    node = m.record.call_function(forward_ad.unpack_dual, (tensor.node,), {}, out)
    parts = [NONE if part is None else wrap_output(m, part, m.record.call_function(operator.getitem, (node, place), {}, part))
             for place, part in enumerate(out)]
    return NamedTupleValue(forward_ad.UnpackedDualTensor, parts)
