"""What tests of offload share: where states rest, what is trained, and a device with a memory of its own without a GPU.

`StrictStreams` is as unfriendly as streams may be: a copy happens when somebody waits for it and not before, until then
its target is NaN, a copy to the host is there only when the *host* has waited, and what is being copied from the host must
stay as it is until the host has waited (that a stream has joined the copy says nothing about when it runs). So a missing
join, a missing wait or memory that is written too early is a wrong number or an error here, as it would be on a GPU, but
every time.
"""

import contextlib
import copy
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import OddGPT, Outcome, Task, assert_equal_runs, differences, seeded, state_differences, token_batches

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.config import Offload, Tier
from zeroshard.engine.comm.streams import Streams

DEVICES = ("none", "cpu", "nvme")
MODEL = seeded(lambda: OddGPT(dim=24, layers=2))
DATA = token_batches(3, 1, 2)
TASK = Task(MODEL, token_batches(2, 2, 2), clip={1: 0.05})
TINY = {"buffer_nbytes": 1 << 16, "buffer_count": 2}
LARGE = {"buffer_nbytes": 1 << 20, "buffer_count": 4}  # every shard of the models here fits one


@contextlib.contextmanager
def emptied(path: Path) -> Iterator[str]:
    """A folder for swap files in which nothing may remain."""
    yield str(path)
    assert not list(path.iterdir()), "a swap folder was left behind"


def offload(device: str, disk: str, **options) -> Offload:
    return Offload(device, path=disk if device == "nvme" else None, any_filesystem=True, **options)


def tiers(disk: str, parameter: str = "none", gradient: str = "none", optimizer: str = "none", **options) -> dict:
    """Options of zs.shard."""
    places = {"param": parameter, "gradient": gradient, "optimizer": optimizer}
    return {f"offload_{state}": offload(device, disk, **options) for state, device in places.items()}


@dataclass(eq=False)
class Ticket:
    """One copy between host and device."""

    direction: Tier  # where it ends
    target: torch.Tensor
    source: torch.Tensor
    given: torch.Tensor  # what the source held at the start
    taken: torch.Tensor | None = None  # what the copy has read, once it has run
    over: bool = False  # the host knows


def _one_at_a_time(method):
    """A save copies in a thread of its own."""

    def locked(self, *args, **named):
        with self.lock:
            return method(self, *args, **named)

    return locked


class StrictStreams(Streams):
    """See above. Copies of one direction run in order, as on one stream."""

    separate_host = True

    def __init__(self, seed: int = 0) -> None:
        self.queues = {Tier.DEVICE: deque(), Tier.HOST: deque()}
        self.uploads: list[Ticket] = []  # of which the host does not know that they are over
        self.downloads: list[Ticket] = []
        self.draw = random.Random(seed)
        self.lock = threading.RLock()

    @_one_at_a_time
    def copy(self, target: torch.Tensor, source: torch.Tensor, *, up: bool) -> Ticket:
        assert target.data_ptr() != source.data_ptr()
        self.check()
        direction = Tier.DEVICE if up else Tier.HOST
        self._chain(target, source, direction)
        ticket = Ticket(direction, target, source, source.clone())
        self.queues[ticket.direction].append(ticket)
        (self.uploads if ticket.direction is Tier.DEVICE else self.downloads).append(ticket)
        target.fill_(math.nan if target.is_floating_point() else 99)
        return ticket

    def _chain(self, target: torch.Tensor, source: torch.Tensor, direction: Tier) -> None:
        """The device's own order: what it has joined is before this copy, also in host memory of which the host knows nothing."""
        if direction is Tier.HOST:
            for upload in [other for other in self.uploads if _overlap(other.source, target)]:
                assert upload.taken is not None, "host memory is to be written before its copy to the device"
                self.uploads.remove(upload)
            self.downloads = [other for other in self.downloads if not _overlap(other.target, target)]
        else:
            for download in [other for other in self.downloads if other.taken is not None and _overlap(other.target, source)]:
                self.finish(download)

    def check(self) -> None:
        """What the host has not waited for may still be read."""
        for ticket in self.uploads:
            same = torch.equal(ticket.source.view(torch.uint8), ticket.given.view(torch.uint8))
            assert same, "host memory was written before its copy to the device was over"

    @_one_at_a_time
    def join(self, ticket: Ticket) -> None:
        self.check()
        queue = self.queues[ticket.direction]
        while ticket.taken is None:
            due = queue.popleft()
            due.taken = due.source.clone()
            if due.direction is Tier.DEVICE:
                due.target.copy_(due.taken)

    @_one_at_a_time
    def finish(self, ticket: Ticket) -> None:
        self.join(ticket)
        if ticket.over:
            return
        ticket.over = True
        if ticket.direction is Tier.HOST:
            ticket.target.copy_(ticket.taken)
            self.downloads = [other for other in self.downloads if other is not ticket]
        elif ticket in self.uploads:  # those before it are over too: one stream
            del self.uploads[: self.uploads.index(ticket) + 1]

    def finished(self, ticket: Ticket) -> bool:
        """Now and then a copy is over by itself."""
        if not ticket.over and self.draw.random() < 0.3:
            self.finish(ticket)
        return ticket.over


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() < right.data_ptr() + right.nbytes and right.data_ptr() < left.data_ptr() + left.nbytes


def strict_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function to be called on a rank: from then on its device has a memory of its own (strict=False: no more)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1024")  # steps on one thread: the ranks here share the cores

    def use(rank: int, strict: bool = True) -> None:
        backend_select._local.comm.streams = StrictStreams(rank) if strict else Streams()

    return use


# -- what is trained, and what must be the same ----------------------------------------------------------------------


def assert_same(got: Outcome, expected: Outcome, where: str) -> None:
    assert_equal_runs(got, expected, where)
    assert got.losses == expected.losses, f"{where} losses"
    assert got.norms == expected.norms, f"{where} norms"
    assert got.coefficients == expected.coefficients, f"{where} clip coefficients"


def assert_same_log(got: list, expected: list, where: str) -> None:
    for number, (left, right) in enumerate(zip(got, expected, strict=True)):
        if isinstance(left, dict):
            nested = isinstance(next(iter(left.values())), dict)
            bad = state_differences(left, right) if nested else differences(left, right)
        else:
            bad = [] if torch.equal(torch.as_tensor(left), torch.as_tensor(right)) else [f"{left}, expected {right}"]
        assert not bad, f"{where} entry {number}: {bad[:4]}"


def plain_loop(rank: int, task: Task, states: bool = True, **options) -> Outcome:
    """As `train`, but nothing is looked at before the end: reading a gradient waits for what is under way."""
    model = copy.deepcopy(task.model)
    model, optimizer = zs.shard(model, task.make_optimizer(model), **options)
    out = Outcome()
    for step, micros in enumerate(task.data):
        for ranks in micros:
            loss = model(*ranks[rank])
            loss.backward()
            out.losses.append(loss.item())
        if step in task.clip:
            zs.clip_grad_norm_(model, task.clip[step])
        optimizer.step()
        out.norms.append(optimizer.last_step.grad_norm)
        out.coefficients.append(optimizer.last_step.clip_coefficient)
        optimizer.zero_grad()
    if states:
        out.states = zs.full_optimizer_state(model)
    zs.close(model)
    out.weights = model.state_dict()
    return out
