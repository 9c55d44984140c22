"""VERBS: what each public function needs of a model before it begins. `begin` checks it, in one order for all of them.

    usable        no load has failed half-way, and no forward has written values that stay: they are of one state
    every_rank    every rank has to make the call: inside zs.join it is refused once the data of some rank has ended, since that
                  rank is past the loop. `begin` also notes the call, so that reports of a stall tell which rank did not make it
    disk          no rank has had an I/O error
    at_home       the states, some of rest.PARTS, that zs.offload_states must not have moved away
    recovers      what a failed backward has left is cleared first
    sharded       modules hold the parameters at rest: whole ones, which a program's unshard() has put there, go back
    between_steps no forward, backward or zs.gathered is under way, so all states are at rest

All but zs.close raise for a model that was closed. docs/reference/errors.md shows the table. What comes after the beginning is
the verb's own: a writer calls the write gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ModelClosed, ZeroshardError
from .rest import PARTS

if TYPE_CHECKING:
    from .runtime import Runtime


@dataclass(frozen=True)
class Verb:
    """A row of VERBS: what a public function needs (see above). closed: what to do instead if the model was closed."""

    usable: bool = False
    every_rank: bool = True
    disk: bool = False
    at_home: tuple[str, ...] = ()
    recovers: bool = False
    sharded: bool = True
    between_steps: bool = False
    closed: str = "with restore=False its parameters are gone: make the model anew"


_AT_REST = Verb(disk=True, at_home=PARTS, recovers=True, between_steps=True)
_AVERAGE = replace(_AT_REST, closed="its averages went with it")

VERBS = {
    "model.forward": Verb(usable=True, every_rank=False, disk=True, at_home=("parameters",), recovers=True, sharded=False),
    "optimizer.step": Verb(every_rank=False, disk=True, at_home=PARTS, closed="make a new optimizer of its parameters"),
    "zs.full_state_dict": Verb(usable=True, disk=True, at_home=("parameters",)),
    "zs.stream_full_tensors": Verb(usable=True, disk=True, at_home=("parameters",), recovers=True),
    "zs.save_safetensors": Verb(usable=True, at_home=PARTS),
    "zs.full_gradients": Verb(),
    "zs.full_optimizer_state": Verb(),
    "zs.full_optimizer_state_dict": Verb(),
    "zs.gathered": Verb(recovers=True),
    "zs.save": replace(_AT_REST, usable=True),
    "zs.load": _AT_REST,
    "zs.offload_states": replace(_AT_REST, at_home=()),
    "zs.reload_states": Verb(disk=True),
    "zs.ema": Verb(at_home=PARTS),
    "AveragedModel.swapped": _AVERAGE,
    "AveragedModel.full_state_dict": _AVERAGE,
    "AveragedModel.load_state_dict": _AVERAGE,
    "zs.close": Verb(recovers=True),
}


def begin(runtime: Runtime, verb: str, *also: str, note: bool = True) -> None:
    """Raise unless the model is as `verb` needs it.

    also: states that this call needs at home beside those of its row. note: False where the call is noted already, and for
    zs.ema, which a rank may leave out.

    Raises:
        ModelClosed: after zs.close.
        CheckpointError: a load has failed half-way.
        ShardedWriteError: a forward has written parameters where the values stay, or whole ones were written after unshard().
        ZeroshardError: inside a forward, a backward or zs.gathered, or inside zs.join where the data of some rank has ended.
        OffloadIOError: a rank has had an I/O error.
        StatesAway: zs.offload_states has moved states that the verb needs.
    """
    needs = VERBS[verb]
    if runtime.closed:
        raise ModelClosed(f"{verb}() after zs.close(model): {needs.closed}.")
    if needs.usable and (why := runtime.gate.unusable):
        raise type(why)(*why.args)  # another object: each raise adds frames to it
    if needs.every_rank:
        runtime.attendance.refuse(f"{verb}()")
        if note:
            runtime.attendance.note(f"{verb}()")
    if needs.disk:
        runtime.tiers.check()
    if needs.at_home or also:
        runtime.moved.check(*needs.at_home, *also)
    if needs.recovers:
        runtime.recover()
    if needs.sharded:
        for unit in runtime.units:
            unit.give_back()
    if needs.between_steps:
        busy = [unit.name for unit in runtime.units if unit.in_use]
        # a compiled forward has no frame, by which one that was interrupted could be told
        if any(forward.frame is not None for forward in runtime.forwards) or runtime.in_backward:
            busy.append(type(runtime.model).__name__)  # between two units, or in ones that are whole at rest
        if busy:
            where = f"inside a forward, a backward or zs.gathered() ({busy[0]})"
            raise ZeroshardError(f"{verb}: called {where}; call it between steps.")
