"""Uneven data: ranks that have fewer batches than others.

    zs.join             rank 0  step 1 | step 2 | step 3          its data ends after two batches: it goes on as a peer
                        rank 1  step 1 | step 2 | step 3          with zero weight until all have ended
    zs.stop_together    both stop after step 2

A rank whose data has ended still owns a slice of every state: peers need it for their gathers, reductions, norms and steps. It
is told what comes next (zero/attendance.py), and does it without running the model: it gathers the units that they gather, reduces
zeros, and steps its slices with their options.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import ZeroshardError
from ..optim.sharded_optimizer import OptimizerCore, plain_options, take_options
from ..zero.runtime import Runtime, runtime_of


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Let ranks have unequally many batches (collective: every rank, around its training loop).

        with zs.join(model):
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loop ends goes on as a peer with zero weight, with the learning rates and other options of those that still have
    data, until all have ended; then all leave. Gradients are the mean over the batches that there are: with plain backwards those
    of a step count alike, on whichever rank and in whichever micro-batch, with `zs.backward` by their weights. A loader may be
    empty. Learning-rate schedulers of torch are brought to where those of the last rank are.

    Inside, once a rank has ended, the others can run forward, backward, zs.clip_grad_norm_, step and zero_grad of this model. What
    else needs every rank (zs.save, zs.full_state_dict, writes to parameters, ...) raises ZeroshardError: do it after the block.

    Cost: none until a rank has ended, then one small message for each event. Where a gather needs every rank (stage 3 over
    torch.distributed, parameters on another tier) one small message a forward, throughout. Cf. torch.distributed's Join, which adds
    a collective to every forward.
    """
    attendance = runtime_of(model).attendance
    if attendance.joined:
        raise ZeroshardError("zs.join inside zs.join of the same model: one around the training loop is enough.")
    attendance.joined = True
    try:
        yield
        if attendance.together:
            _Peer(runtime_of(model)).serve()
    finally:
        attendance.joined = attendance.serving = False
        attendance.ended = frozenset()


class _Peer:
    """A rank whose data has ended: does what the others do, until all have ended."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.attendance = runtime, runtime.attendance
        self.core: OptimizerCore | None = runtime.optimizer.core if runtime.optimizer is not None else None
        self.events: dict[str, Callable[[Any], None]] = {
            "gather": self._gather,
            "reduce": self._reduce,
            "clip": self._clip,
            "step": self._step,
        }

    def serve(self) -> None:
        """Return when all ranks have ended."""
        self.runtime.recover()
        self.runtime.settle()
        self.attendance.serving = True
        if not self.attendance.ended and not self.attendance.gathers_meet:
            self._await_backward()  # nobody knows yet: what all ranks do next is to end a backward, or their loops
        while not self.attendance.everyone_ended:
            self._follow()
        self._catch_up()

    def _await_backward(self) -> None:
        agreed = self.runtime.reductions.agree()
        if not self.attendance.everyone_ended:
            self._zero()
            self._reduce(agreed)

    def _follow(self) -> None:
        """One event."""
        event = self.attendance.ask(None)
        self._zero()
        if event is not None:
            what, values = event
            self.events[what](values)

    def _zero(self) -> None:
        """What zero_grad the others have called since."""
        drops, zeros = self.attendance.behind
        if drops > 0:
            self.runtime.drop_gradients()
        elif zeros > 0:
            self.runtime.zero_gradients()
        self.attendance.zeroed = [0, 0]

    def _gather(self, number: int) -> None:
        unit = self.runtime.units[number]
        unit.ready()
        unit.release()

    def _reduce(self, agreed: Any) -> None:
        self.runtime.before_gradients()
        self.runtime.reduce_all(agreed)

    def _clip(self, max_norm: float | None) -> None:
        assert self.core is not None
        self.core.clip(max_norm)

    def _step(self, options: list[dict[str, Any]]) -> None:
        assert self.core is not None
        take_options(self.core.outer, options)
        self.core.step()

    # -- at the end ------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Options and schedulers as on the ranks that ended last."""
        if len(self.attendance.latest) == self.runtime.comm.world_size:
            return
        self.runtime.schedule.restart()  # that of a rank which did not run the model is behind
        if self.core is None:
            return
        mine = self.core.tally.schedulers
        told = [[type(each).__name__, _position(each), _numbers(each)] for each in mine]
        payload = json.dumps([plain_options(self.core.outer), told]).encode()
        everyone = [json.loads(part) for part in self.runtime.comm.exchange(payload, "end of zs.join")]
        names = [[name for name, _, _ in theirs] for _, theirs in everyone]
        if any(other != names[0] for other in names):
            raise ZeroshardError(
                f"zs.join: ranks have different learning-rate schedulers ({'; '.join(f'rank {r}: {n}' for r, n in enumerate(names))}), "
                "as far as they were built after zs.shard() or stepped since, so those of ranks whose data ended early can not be "
                "brought to where the others are. Build them on every rank, after zs.shard()."
            )
        options, theirs = everyone[self.attendance.leader]
        if self.runtime.comm.rank not in self.attendance.latest:
            self.core.tally.scheduling = True  # as a part of another's step: skipped optimizer steps are not to stop it
            for scheduler, (_, position, numbers) in zip(mine, theirs, strict=True):
                _advance(scheduler, position, numbers)
            self.core.tally.scheduling = False
            take_options(self.core.outer, options)


def _position(scheduler: Any) -> int:
    """How often it was stepped."""
    inner = getattr(scheduler, "_schedulers", [])
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else max(map(_position, inner), default=0)


def _numbers(scheduler: Any) -> dict[str, Any]:
    """What a scheduler that goes by a measured value has found so far."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return {}
    return {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _advance(scheduler: Any, position: int, numbers: dict[str, Any]) -> None:
    if numbers:
        vars(scheduler).update(numbers)
        return
    for _ in range(position - _position(scheduler)):
        scheduler.step()


def stop_together(model: nn.Module, loader: Iterable[Any]) -> Iterable[Any]:
    """The batches of a loader, on every rank as many as the shortest loader has (collective, as an iteration).

        for batch in zs.stop_together(model, loader):
            ...

    Each rank takes one batch ahead and tells at the end of a backward whether there is another one: that costs no message. Where a
    batch had no backward with communication (an evaluation, zs.accumulate) one small message is sent. Where batches are left over,
    rank 0 says so on stderr.
    """
    return _Together(runtime_of(model), loader)


class _Together:
    """What `stop_together` returns; other attributes are the loader's."""

    def __init__(self, runtime: Runtime, loader: Iterable[Any]) -> None:
        self._runtime, self._loader = runtime, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        attendance = self._runtime.attendance
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
            without = attendance.lasts if attendance.meetings > meetings else self._agree(batch is _NONE)
        if self._runtime.comm.rank == 0 and len(without) < self._runtime.comm.world_size:
            ranks = ", ".join(map(str, sorted(without)))
            print(f"zeroshard: stopped after {count} batches, where the data of rank {ranks} ended", file=sys.stderr)

    def _agree(self, ended: bool) -> frozenset[int]:
        """Ranks that have no further batch."""
        comm = self._runtime.comm
        if comm.imagined:
            return frozenset([comm.rank] if ended else [])
        everyone = comm.exchange(bytes([ended]), "zs.stop_together: is there another batch")
        return frozenset(rank for rank, told in enumerate(everyone) if told[0])


_NONE = object()
