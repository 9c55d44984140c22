"""No memory for a gather, on every rank: the error is the user's to catch, and training goes on as if that batch had not been."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from zoo import Block, Stack, normal_batches, same, seeded, sgd, square, trainable

import zeroshard as zs
from zeroshard.engine.flat_buffer import ParameterBuffer
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

DIM, BLOCKS = 6, 3
MODES = [
    pytest.param({}, id="plain"),
    pytest.param({"overlap": False}, id="no-overlap"),
    pytest.param({"offload_param": "cpu"}, id="parameters-on-host"),
    pytest.param({"precision": "bf16"}, id="bf16"),
]


class Shortage:
    """Lets each rank's n-th gather of a group fail; `late`: when its memory has been taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mine = threading.local()
        plain = ParameterBuffer.gather

        def gather(buffer: ParameterBuffer) -> object:
            left = getattr(self.mine, "left", None)
            if left is None:
                return plain(buffer)
            self.mine.left = left - 1
            if left == 0:
                if self.mine.late:
                    plain(buffer).wait()
                raise torch.OutOfMemoryError("no room")
            return plain(buffer)

        monkeypatch.setattr(ParameterBuffer, "gather", gather)

    def after(self, gathers: int | None, late: bool = False) -> None:
        self.mine.left, self.mine.late = gathers, late


def build(kind: str) -> nn.Module:
    model = Stack(DIM, BLOCKS, Block)
    if kind == "two-groups":  # a unit of a trained and a frozen group: the second may fail when the first is under way
        for block in model.blocks:
            block.up.requires_grad_(False)
    return model


def trained(model: nn.Module, batches: list, rank: int, shortage: Shortage | None, options: dict) -> tuple[dict, int]:
    """The state in the end, and how many gathers failed: in each step one more of the first batch's, until there are no more."""
    model, optimizer = zs.shard(model, sgd(trainable(model)), stage=3, units=(Block,), map_shared=False, **options)
    failed, failing = 0, shortage is not None
    for batch in batches:
        for late in (False, True) if failing else ():
            failing = _fails(model, batch[rank], shortage, failed, late)
            optimizer.zero_grad()
        failed += failing
        square(model, batch[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert runtime_of(model).tiers.ledger.now[GATHERED] == 0
    assert not failing, "more gathers than batches"
    return zs.full_state_dict(model), failed


def _fails(model: nn.Module, batch: tuple, shortage: Shortage, gathers: int, late: bool) -> bool:
    shortage.after(gathers, late)
    try:
        square(model, batch).backward()
        return False
    except torch.OutOfMemoryError:
        return True
    finally:
        shortage.after(None)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(("kind", "world"), [("plain", 2), ("two-groups", 2), ("two-groups", 1)])
def test_training_goes_on_after_a_gather_without_memory(monkeypatch, world, kind, options):
    """At any gather of forward or backward, before or after its memory was taken."""
    shortage = Shortage(monkeypatch)
    model = seeded(build, kind)
    units, groups = BLOCKS + 1, 4 * (BLOCKS + 1) - 4 * (kind == "plain")
    batches = normal_batches(2 * groups, world, 4, DIM)

    def run(rank: int) -> None:
        wanted, _ = trained(copy.deepcopy(model), batches, rank, None, options)
        got, failed = trained(copy.deepcopy(model), batches, rank, shortage, options)
        assert failed >= 2 * units - 2
        for name, value in wanted.items():
            same(got[name], value, name, 0.0)

    run_threads(world, run)
