"""The snapshot of a rank: its sizes are those of the engine's buffers, and what was taken does not change with the engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import MLP, seeded
from torch import nn

import zeroshard as zs
from zeroshard.config import Tier
from zeroshard.engine.ledger import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from zeroshard.errors import ConfigError
from zeroshard.seam import engine_of
from zeroshard.testing import run_threads

WIDTH, RANKS = 64, 2
NUMEL = WIDTH * WIDTH  # of each unit


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def step(model, optimizer) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", range(4))
def test_groups_and_bytes_are_those_of_the_stage(stage):
    """By hand: bf16 values, fp32 gradients, masters and two states, of which a rank keeps its half where the stage shards them."""

    def rank_run(rank):
        model = layers()
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
        before = engine_of(model).snapshot()
        step(model, optimizer)
        after = engine_of(model).snapshot()
        zs.close(model, restore=False)
        return before, after

    for rank, (before, after) in enumerate(run_threads(RANKS, rank_run)):
        assert (after.rank, after.world_size, after.config.stage, before.steps, after.steps) == (rank, RANKS, stage, 0, 1)
        assert after.has_optimizer and not after.separate and after.input_dtype is torch.bfloat16
        numel = sum(group.numel for group in after.groups)
        assert numel == 3 * NUMEL and [name for name, _ in after.units] == ["0", "1", "2"]
        for group in after.groups:
            assert (group.numel, group.aligned_numel, group.shard_numel, group.ranks) == (NUMEL, NUMEL, NUMEL // RANKS, RANKS)
            assert (group.dtype, group.gradient, group.stepped) == (torch.bfloat16, torch.float32, torch.float32)
            assert (group.master_nbytes, group.states_nbytes, group.stepped_params) == (4, 8, (NUMEL,))
            assert group.sharded == (stage == 3) and not (group.coded or group.moved_by_pass or group.moved_by_step)
        assert {group.states_nbytes for group in before.groups} == {0}
        shares = {PARAMETERS: (2, stage == 3), GRADIENTS: (4, stage >= 2), MASTERS: (4, stage >= 1), OPTIMIZER: (8, stage >= 1)}
        for state, (nbytes, sharded) in shares.items():
            assert after.held[Tier.DEVICE][state] == nbytes * numel // (RANKS if sharded else 1), state
        assert sum(after.sent_by_axis.values()) == sum(entry.nbytes for entry in after.traffic.values())
        assert sum(after.sent_by_axis.values()) == sum(sum(group.sent) for group in after.groups)


def test_what_moves_between_tiers_is_told_by_link(tmp_path):
    """Masters and both states are read and written on disk; gradients and parameters stay in memory, which is the device's."""

    def rank_run(rank):
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zs.shard(
            model, optimizer, stage=3, precision="bf16", offload_optimizer="nvme", offload_path=str(tmp_path)
        )
        found = [engine_of(model).snapshot()]
        step(model, optimizer)
        found.append(engine_of(model).snapshot())
        zs.close(model, restore=False)
        return found

    for before, after in run_threads(RANKS, rank_run):
        links = {(Tier.DISK, Tier.HOST): 12, (Tier.HOST, Tier.DISK): 12}
        for group in (*before.groups, *after.groups):
            assert group.moved_by_step == links and group.moved_by_pass == {} and group.states_tier is Tier.DISK
        assert [(group.numel, numel) for group, numel in after.host_runs] == [(NUMEL, NUMEL // RANKS)] * 3
        assert after.held[Tier.DISK][OPTIMIZER] == 8 * 3 * NUMEL // RANKS
        assert after.moved[Tier.HOST, Tier.DISK] >= 12 * 3 * NUMEL // RANKS


def test_it_is_of_its_moment_and_can_not_be_written():
    model = layers()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    step(model, optimizer)
    taken = engine_of(model).snapshot()
    text = repr(taken)
    step(model, optimizer)
    assert repr(taken) == text != repr(engine_of(model).snapshot())
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.steps = 3
    zs.close(model)


def test_frozen_parameters_and_models_without_an_optimizer():
    model = seeded(MLP)
    model.layers[0].weight.requires_grad_(False)
    model, _ = zs.shard(model, None, stage=2)
    taken = engine_of(model).snapshot()
    assert not taken.has_optimizer and taken.host_runs == ()
    frozen = [group for group in taken.groups if group.gradient is None]
    assert sum(group.numel for group in frozen) == 45 and all(group.sent == (0, 0) for group in frozen)
    assert not any(group.stepped_params or group.moved_by_step for group in taken.groups)
    zs.close(model)


def test_an_optimizer_made_since_is_taken_over_or_refused():
    model, _ = zs.shard(layers(), None, stage=2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert engine_of(model).snapshot().has_optimizer
    step(model, optimizer)
    zs.close(model)
    model, _ = zs.shard(layers(), None, stage=2)
    second = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        engine_of(model).snapshot()
    del second
    zs.close(model)
