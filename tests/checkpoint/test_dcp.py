"""Sharded tensors in torch.distributed.checkpoint's own hands: dcp.save and dcp.load on state dicts of a sharded model."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import OddGPT, adamw, seeded, token_batches
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroshard as zs
from zeroshard import fsdp
from zeroshard.comm.launch import run_processes
from zeroshard.config import Offload
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import run_threads

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
    return {
        str(index): states for index, (_, states) in enumerate(sorted(optimizer.state.items(), key=lambda e: e[0]._home.name))
    }


def _save(rank: int, world_size: int, folder: str, options: dict):
    dist.init_process_group("gloo")
    model, optimizer = _model(**options)
    _train(model, optimizer, rank, range(2))
    dcp.save({"model": model.state_dict(), "states": _states(optimizer)}, checkpoint_id=folder)
    return zs.full_state_dict(model), zs.full_optimizer_state(model)


def _load(folder: str, **options):
    """By one process without a group."""
    model, optimizer = _model(seed=3, **options)
    _train(model, optimizer, 0, range(1))  # states to be loaded into
    dcp.load({"model": model.state_dict(), "states": _states(optimizer)}, checkpoint_id=folder, no_dist=True)
    found = zs.full_state_dict(model), zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model)
    _train(model, optimizer, 0, range(2, 3))
    later = zs.full_state_dict(model)
    zs.close(model)
    return *found, later


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, parameters, states) of what two ranks have saved."""
    folder = tmp_path_factory.mktemp("dcp") / "a"
    return folder, *run_processes(_save, 2, str(folder), {"stage": 3})[0]


@pytest.mark.processes
@pytest.mark.limit(120)
def test_dcp_saves_sharded_models_and_loads_them_at_another_world_size_and_tier(saved, tmp_path):
    folder, values, states = saved
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    for name, value in values.items():
        assert torch.equal(whole["model"][name], value), name
    disk = Offload("nvme", path=str(tmp_path), any_filesystem=True)
    loaded, _, loaded_states, later = _load(str(folder), stage=3, offload_param=disk, offload_optimizer=disk)
    for name, value in values.items():
        assert torch.equal(loaded[name], value), name
        assert not torch.equal(later[name], value), name  # training goes on from there
    for name, entries in states.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded_states[name][key], entries[key]), (name, key)


@pytest.mark.processes
@pytest.mark.limit(120)
def test_master_weights_follow_what_dcp_loads(saved):
    folder, values, _ = saved
    _, masters, _, _ = _load(str(folder), stage=3, precision="bf16")
    for name, value in values.items():
        assert torch.equal(masters[name], value.bfloat16().float()), name  # through the parameter, whose dtype it is


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_boxes_read_and_written_by_hand_are_those_of_the_parameter(stage):
    """Every rank's boxes together are the tensor; a slice of a box is one too."""

    def rank_run(rank: int) -> list:
        model, optimizer = _model(stage=stage)
        _train(model, optimizer, rank, range(1))
        found = []
        for param, states in optimizer.state.items():
            tensor = states["exp_avg"]
            boxes = [
                (tuple(c.offsets), tensor.__get_tensor_shard__(MetadataIndex("x", c.offsets)))
                for c in tensor.__create_chunk_list__()
            ]
            for _, box in boxes:
                if box.numel() > 1 and box.dim():
                    box.narrow(0, box.shape[0] - 1, 1).copy_(torch.tensor(7.0))
            found.append((tuple(param.shape), [(at, box.clone()) for at, box in boxes], tensor.full_tensor()))
        zs.close(model)
        return found

    ranks = run_threads(2, rank_run)
    for parts in zip(*ranks, strict=True):
        shape, whole = parts[0][0], parts[0][2]
        joined = torch.full(shape, torch.nan)
        for at, box in (each for part in parts for each in part[1]):
            place = joined
            for dim, begin in enumerate(at):
                place = place.narrow(dim, begin, box.shape[dim])
            assert place.isnan().all()
            place.copy_(box)
        assert torch.equal(joined, whole)
        assert whole.numel() < 2 or (whole == 7.0).any()


def _along_model_axes(rank: int, world_size: int, folder: str):
    """Two stages with a tied parameter, saved and loaded; then a matrix that tensor parallelism cuts, to be saved as safetensors."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = seeded(lambda: GPT(GPTConfig(vocab_size=32, seq_len=6, dim=16, layers=2, heads=2, tied=True)))
    run = zs.parallelize(model, mesh, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), micro_batches=2, stage=3)
    tokens = torch.arange(24).view(4, 6)
    run.step(tokens, tokens)
    tied = next(param for name, param in run.model.named_parameters() if name in ("embedding.weight", "head.weight"))
    state = {"model": run.model.state_dict(), "states": {rank: run.optimizer.state[tied]["exp_avg"]}}
    expected = zs.value_of(tied).full(), zs.state_of(tied, "exp_avg").full()
    dcp.save(state, checkpoint_id=folder)
    for part, value in zip((zs.value_of(tied), zs.state_of(tied, "exp_avg")), expected, strict=True):
        part.set_full(torch.zeros_like(value))
    dcp.load(state, checkpoint_id=folder)
    loaded = zs.value_of(tied).full(), zs.state_of(tied, "exp_avg").full()
    run.close()
    assert all(torch.equal(one, other) and other.any() for one, other in zip(loaded, expected, strict=True))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(6, 8)), mesh["tp"], {"0": ColwiseParallel()})
    model, _ = zs.shard(model, None, stage=3, mesh=mesh)
    fsdp.fully_shard(nn.Linear(2, 2))  # from here on torch saves safetensors in its way
    with pytest.raises(zs.CheckpointError, match="this rank's part of tensor parallelism for the whole"):
        dcp.save(dict(model.state_dict()), storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/safetensors"))


@pytest.mark.processes
def test_what_model_axes_divide_is_saved_whole_or_refused(tmp_path):
    """Each stage's copy of a tied parameter has a name of its own."""
    run_processes(_along_model_axes, 2, str(tmp_path))
