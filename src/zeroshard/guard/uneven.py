"""Part of `zs.join` and `zs.stop_together` (data/uneven.py) that a rank takes whose data has ended.

A rank whose data has ended still has a shard of every state, which the other ranks need for their all-gathers, reduce-scatters,
norms and steps. They announce to it each event (guard/attendance.py), and it takes part without running the model: it gathers the
same units, reduces zeros, and steps its shards with the other ranks' options.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..engine.optimizer import OptimizerCore, plain_options, take_options
from ..engine.runtime import Runtime
from ..errors import ConfigError, ZeroshardError
from .attendance import AttendanceRecord

Batch = TypeVar("Batch")


@contextlib.contextmanager
def joining(runtime: Runtime) -> Iterator[None]:
    """Run a training loop inside, then take part in the other ranks' loops until all have ended (collective)."""
    attendance = record_of(runtime)
    if len(optimizers := list(runtime.optimizers)) > 1:
        names = ", ".join(type(each).__name__ for each in optimizers)
        raise ConfigError(
            f"zs.join serves a model with one optimizer, and this one has {names}: use zs.stop_together(model, loader), or one optimizer "
            "with a parameter group for each set of options."
        )
    if attendance.joined:
        raise ZeroshardError("zs.join inside zs.join of the same model: one around the training loop is enough.")
    attendance.joined = True
    try:
        yield
        if attendance.together:
            _take_part(runtime, attendance)
    finally:
        attendance.joined = attendance.serving = False
        attendance.ended = frozenset()


def record_of(runtime: Runtime) -> AttendanceRecord:
    """Return the record of which ranks have data; zs.shard gives one to each model."""
    assert isinstance(runtime.attendance, AttendanceRecord)
    return runtime.attendance


def _take_part(runtime: Runtime, attendance: AttendanceRecord) -> None:
    """Take part, as a rank whose data has ended, in the other ranks' collectives until all ranks' data has ended (collective).

    For each event that they announce this rank does the same.
    """
    core = runtime.optimizers.one.core if runtime.optimizers.one is not None else None

    def follow_zero_grad() -> None:
        """Drop or zero gradients if the other ranks have called zero_grad since the last event."""
        drops, zeros = attendance.behind
        if drops > 0:
            runtime.zero_grad()
        elif zeros > 0:
            runtime.zero_grad(set_to_none=False)
        attendance.zeroed = [0, 0]  # these calls followed the other ranks', so peers need not hear of them

    runtime.gate.invalidate()
    runtime.catch_up()  # as the others do in their next forward
    attendance.serving = True
    if not attendance.ended and not attendance.gathers_meet:
        # the others learn of this in the exchange at the end of a backward, or of their own loops
        agreed = runtime.reductions.agree()
        if not attendance.everyone_ended:
            follow_zero_grad()
            runtime.reduce_all(agreed)
    while not attendance.everyone_ended:
        event: tuple[str, Any] = attendance.ask(None) or ("", None)  # None: all have ended
        follow_zero_grad()
        what, values = event
        if what == "gather":
            number: int = values
            runtime.units[number].wait_for_unshard()
            runtime.units[number].reshard()
        elif what == "reduce":
            runtime.reduce_all()
        elif what == "clip":
            assert core is not None  # only optimizers clip and step
            core.clip(values)
        elif what == "step":
            assert core is not None
            take_options(core.outer, values)
            core.step()
    if len(attendance.latest) < runtime.comm.world_size:  # else all ended in the same step
        runtime.schedule.restart()  # this rank has not seen the last forwards
        if core is not None:
            _catch_up(core, runtime, attendance)


def _catch_up(core: OptimizerCore, runtime: Runtime, attendance: AttendanceRecord) -> None:
    """Set options and schedulers to those of the ranks that ended last (collective)."""
    mine = core.tally.schedulers
    told = [[type(each).__name__, _position(each), _numbers(each)] for each in mine]
    payload = json.dumps([plain_options(core.outer), told]).encode()
    everyone = [json.loads(part) for part in runtime.comm.exchange(payload, "end of zs.join")]
    names = [[name for name, _, _ in theirs] for _, theirs in everyone]
    if any(other != names[0] for other in names):
        raise ZeroshardError(
            f"zs.join: ranks have different learning-rate schedulers ({'; '.join(f'rank {r}: {n}' for r, n in enumerate(names))}), "
            "so those of ranks whose data ended early can not follow the others. Build the same ones on every rank, after zs.shard()."
        )
    options, theirs = everyone[attendance.leader]
    if runtime.comm.rank not in attendance.latest:
        core.tally.scheduling = True  # advance them even after skipped optimizer steps
        for scheduler, (_, position, numbers) in zip(mine, theirs, strict=True):
            if numbers:
                vars(scheduler).update(numbers)
            for _ in range(0 if numbers else position - _position(scheduler)):
                scheduler.step()
        core.tally.scheduling = False
        take_options(core.outer, options)


def _position(scheduler: Any) -> int:
    """Return the number of times that a scheduler, or the most advanced one inside it, was stepped."""
    inner = getattr(scheduler, "_schedulers", [])
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else max(map(_position, inner), default=0)


def _numbers(scheduler: Any) -> dict[str, Any]:
    """Return the numbers that a ReduceLROnPlateau keeps of its metric; {} for schedulers that depend on the step count only."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return {}
    return {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


class Together(Generic[Batch]):
    """Iterable that `stop_together` returns; other attributes are the loader's."""

    def __init__(self, runtime: Runtime, loader: Iterable[Batch]) -> None:
        self._runtime, self._loader = runtime, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        attendance = record_of(self._runtime)
        batches, count = iter(self._loader), 0
        batch = next(batches, _NONE)
        without = self._agree(batch is _NONE)
        while not without:
            following = next(batches, _NONE)
            attendance.last, meetings = following is _NONE, attendance.meetings
            try:
                yield batch
            finally:
                attendance.last = False
            batch, count = following, count + 1
            # a backward since then has exchanged `last`
            without = attendance.lasts if attendance.meetings > meetings else self._agree(batch is _NONE)
        if self._runtime.comm.rank == 0 and len(without) < self._runtime.comm.world_size:
            ranks = ", ".join(map(str, sorted(without)))
            print(f"zeroshard: stopped after {count} batches, where the data of rank {ranks} ended", file=sys.stderr)

    def _agree(self, ended: bool) -> frozenset[int]:
        """Return the ranks that have no further batch (collective)."""
        comm = self._runtime.comm
        if comm.imagined:
            return frozenset([comm.rank] if ended else [])
        _, told = comm.compare(bytes([ended]), "zs.stop_together: is there another batch")
        if told is None:
            return frozenset(range(comm.world_size) if ended else [])
        return frozenset(rank for rank, part in enumerate(told) if part[0])


_NONE: Any = object()
