"""Sharded tensors in torch.distributed.checkpoint's own hands: dcp.save and dcp.load on state dicts of a sharded model."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import OddGPT, adamw, seeded, token_batches
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeroshard as zs
from zeroshard.config import Offload
from zeroshard.launch import run_processes

DATA = token_batches(4, 1, 3)


def _model(seed: int = 0, **options):
    model = seeded(lambda: OddGPT(), seed)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    return model, optimizer


def _train(model, optimizer, rank: int, steps: range) -> None:
    for step in steps:
        model(*DATA[step][0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _states(optimizer) -> dict:
    return {str(index): states for index, (_, states) in enumerate(sorted(optimizer.state.items(), key=lambda e: e[0]._home.name))}


def _save(rank: int, world_size: int, folder: str, options: dict):
    dist.init_process_group("gloo")
    model, optimizer = _model(**options)
    _train(model, optimizer, rank, range(2))
    dcp.save({"model": model.state_dict(), "states": _states(optimizer)}, checkpoint_id=folder)
    return zs.full_state_dict(model), zs.full_optimizer_state(model)


def _load(rank: int, world_size: int, folder: str, options: dict):
    dist.init_process_group("gloo")
    model, optimizer = _model(seed=3, **options)
    _train(model, optimizer, rank, range(1))  # states to be loaded into
    dcp.load({"model": model.state_dict(), "states": _states(optimizer)}, checkpoint_id=folder)
    found = zs.full_state_dict(model), zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model)
    _train(model, optimizer, rank, range(2, 3))
    return *found, zs.full_state_dict(model)


@pytest.mark.processes
@pytest.mark.limit(120)
def test_dcp_saves_and_loads_sharded_models_at_another_world_size(tmp_path):
    saved, states = run_processes(_save, 2, str(tmp_path / "a"), {"stage": 3}, timeout_s=60)[0]
    dcp_to_torch_save(tmp_path / "a", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    for name, value in saved.items():
        assert torch.equal(whole["model"][name], value), name
    disk = Offload("nvme", path=str(tmp_path), any_filesystem=True)
    options = {"stage": 3, "offload_param": disk, "offload_optimizer": disk}
    loaded, _, loaded_states, later = run_processes(_load, 3, str(tmp_path / "a"), options, timeout_s=60)[0]
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
        assert not torch.equal(later[name], value), name  # training goes on from there
    for name, entries in states.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded_states[name][key], entries[key]), (name, key)


@pytest.mark.processes
@pytest.mark.limit(120)
def test_master_weights_follow_what_dcp_loads(tmp_path):
    saved, _ = run_processes(_save, 1, str(tmp_path / "a"), {"stage": 3}, timeout_s=60)[0]
    _, masters, _, _ = run_processes(_load, 2, str(tmp_path / "a"), {"stage": 3, "precision": "bf16"}, timeout_s=60)[0]
    for name, value in saved.items():
        assert torch.equal(masters[name], value.bfloat16().float()), name  # through the parameter, whose dtype it is
