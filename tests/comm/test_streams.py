"""How far the way of a parameter shard from disk to device is ahead of its use (ZeRO-Infinity, arXiv 2104.07857, 6.2).

disk   -> host      | r4 | r5 | r6 | r7 |            reads: as many units ahead as there are buffers
host   -> device              ^1 | ^2 | ^3 | ^4      copies: as soon as a read is over, at the latest in time for use
use                           U1 | U2 | U3 | U4
"""

import pytest
import torch
from offloading import offload
from torch import nn

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.config import Tier
from zeroshard.engine.runtime import runtime_of
from zeroshard.engine.unit import Unit
from zeroshard.testing import run_threads
from zeroshard.tiers import storage

LAYERS = 8


def way_of_parameters(monkeypatch, disk: str, strict_device, buffer_count: int, slow: bool) -> list[tuple[str, int]]:
    """("read" | "up" | "use", unit) of a recorded step, as they begin. slow: nobody sees a read end before waiting for it."""
    log, places = [], {}
    plain = storage.FileRest.read, storage.Tiers.copy, Unit.wait_for_unshard

    def read(self, start, out):
        if id(self) in places:
            places[out.data_ptr()] = places[id(self)]
            log.append(("read", places[id(self)]))
        return plain[0](self, start, out)

    def copy(self, target, source, begins, ends):
        if ends is Tier.DEVICE and source.data_ptr() in places:
            log.append(("up", places[source.data_ptr()]))
        return plain[1](self, target, source, begins, ends)

    def ready(self):
        log.append(("use", self.number))
        return plain[2](self)

    def seen(self) -> bool:
        if not slow:
            self.wait()
        return not slow

    def rank_run(rank: int) -> None:
        strict_device(rank)
        monkeypatch.setattr(backend_select._local.comm.streams.draw, "random", lambda: 0.0)  # a copy is over when somebody looks
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16)) for _ in range(LAYERS)])
        place = offload("nvme", disk, buffer_count=buffer_count)
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, offload_param=place)
        places.update({id(unit.groups[0].values.rest): unit.number for unit in runtime_of(model).units})
        for _ in range(3):
            log.clear()
            model(torch.ones(2, 16)).sum().backward()
        zs.close(model)

    monkeypatch.setattr(storage.Tiers, "copy", copy)
    monkeypatch.setattr(storage.FileRest, "read", read)
    monkeypatch.setattr(storage._Watched, "done", seen)
    monkeypatch.setattr(Unit, "wait_for_unshard", ready)
    run_threads(1, rank_run)
    return log


@pytest.mark.parametrize("buffer_count, ahead", [(8, 3), (6, 2), (4, 1)])
def test_reads_from_a_slow_disk_run_ahead_of_copies_to_the_device(monkeypatch, disk, strict_device, buffer_count, ahead):
    """By default (8 buffers, half of them for parameters) three more units are being read when one is copied."""
    log = way_of_parameters(monkeypatch, disk, strict_device, buffer_count, slow=True)
    for number in range(1, LAYERS - 3):
        before = log[: log.index(("up", number))]
        assert [n for n in range(number + 1, LAYERS) if ("read", n) in before] == list(range(number + 1, number + 1 + ahead)), log


@pytest.mark.parametrize("buffer_count, ahead", [(8, 3), (4, 1)])
def test_shards_from_a_fast_disk_are_on_the_device_ahead_of_use(monkeypatch, disk, strict_device, buffer_count, ahead):
    log = way_of_parameters(monkeypatch, disk, strict_device, buffer_count, slow=False)
    for number in range(1, LAYERS - 3):
        before = log[: log.index(("use", number))]
        up = [n for n in range(number, LAYERS) if ("up", n) in before]
        assert up[:ahead] == list(range(number, number + ahead)), log
