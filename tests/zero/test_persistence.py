"""Stage 3 with small parameters whole at rest (`param_persistence_threshold`): the same bits, read like any tensor, counted."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, Task, adamw, assert_equal_runs, reference, seeded, token_batches, train
from recording_streams import RecordingStreams

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine.comm.process_group import DistComm
from zeroshard.testing import run_threads

SMALL = 31  # of OddGPT: norms, gains and biases; its matrices have 77 elements and more
MODEL = seeded(OddGPT)  # made once: threads share the generator
WORLD = 2
WAYS = [
    {}, {"map_shared": False}, {"map_shared": False, "units": "leaf"}, {"map_shared": False, "units": "model", "overlap": False},
    {"map_shared": False, "max_live_parameters": 10**6}, {"offload_param": "cpu"}, {"offload_optimizer": "cpu"},
    {"offload_param": "nvme", "offload_gradient": "nvme", "offload_optimizer": "nvme"}, {"model_persistence_threshold": 40},
    {"param_persistence_threshold": float("inf")},
]  # fmt: skip


def _options(way, tmp_path, **more):
    path = {"offload_path": str(tmp_path)} if "nvme" in way.values() else {}
    return {"stage": 3, "param_persistence_threshold": SMALL, **path, **way, **more}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bits_are_those_of_one_process(way, precision, tmp_path):
    task = Task(MODEL, token_batches(3, 2, WORLD), local_sums=True, clip={1: 0.05})
    scale = {"loss_scale": 1024.0} if precision == "fp16" else {}
    options = _options(way, tmp_path, precision=precision, **scale)
    for got in run_threads(WORLD, lambda rank: train(rank, task, **options)):
        expected = reference(task, WORLD, precision, got.coefficients, scale.get("loss_scale", 1.0))
        assert_equal_runs(got, expected, str(way))


def _with_frozen(rank, threshold, comm=None):
    model = copy.deepcopy(MODEL)
    model.norm.requires_grad_(False)
    model.blocks[0].into.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    options = {"stage": 3, "map_shared": False, "param_persistence_threshold": threshold}
    model, optimizer = zs.shard(model, optimizer, comm=comm, **options)
    for micros in token_batches(3, 1, WORLD):
        model(*micros[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zs.full_state_dict(model)


def _over_torch_distributed(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comms = [
        DistComm(None, torch.device("cpu"), 30.0, ordered=o, streams=RecordingStreams() if o else None, desk=JudgingDesk())
        for o in (False, True)
    ]
    return [_with_frozen(rank, SMALL, comm) for comm in comms]


@pytest.mark.processes
def test_frozen_parameters_on_shared_memory_and_over_torch_distributed():
    expected = run_threads(WORLD, _with_frozen, 0)[0]
    everyone = [*run_threads(WORLD, _with_frozen, SMALL), *sum(run_processes(_over_torch_distributed, WORLD), [])]
    for got in everyone:
        assert all(torch.equal(value, expected[name]) for name, value in got.items())


@pytest.mark.parametrize("more", [{"zero_hpz_partition_size": 2}, {"zero_quantized_weights": "int8"}, {"shard_size": 2}], ids=str)
def test_small_parameters_beside_secondary_shards_and_packed_ones(more):
    """What travels for the large ones is as ever, and all ranks have the same small ones."""

    def run(rank, threshold):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            stage=3,
            map_shared=False,
            param_persistence_threshold=threshold,
            **more,
        )
        for micros in token_batches(2, 1, 4):
            model(*micros[0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    expected = run_threads(4, run, 0)[0]
    first, *others = run_threads(4, run, SMALL)
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0.02 if "zero_quantized_weights" in more else 0)


def test_small_parameters_are_read_at_rest_as_on_one_process():
    def run(rank):
        plain = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(copy.deepcopy(plain), stage=3, map_shared=False, param_persistence_threshold=SMALL)
        norm, block, other = model.norm, model.blocks[0], plain.blocks[0]
        assert block.gain.item() == other.gain.item() and norm.weight.max() == 1 and torch.equal(norm.weight, plain.norm.weight)
        assert torch.equal(block.into.bias.view(31, 1), other.into.bias.view(31, 1))
        assert bool((block.into.bias == other.into.bias).all())
        assert torch.equal(copy.deepcopy(block.norm.bias), other.norm.bias)
        file = io.BytesIO()
        torch.save(norm.state_dict(), file)
        file.seek(0)
        assert torch.equal(torch.load(file)["weight"], plain.norm.weight)
        with zs.gathered(model.blocks[0]):
            assert torch.equal(block.into.weight, other.into.weight) and block.gain.item() == other.gain.item()
        with zs.gathered(model.blocks[0], write=True), torch.no_grad():
            block.gain.fill_(0.25)
            block.into.weight.fill_(0.5)
        assert block.gain.item() == 0.25
        state = zs.full_state_dict(model)
        assert state["blocks.0.gain"] == 0.25 and bool((state["blocks.0.into.weight"] == 0.5).all())
        assert not isinstance(block.gain, type(block.into.weight))

    run_threads(WORLD, run)


def test_they_are_counted(tmp_path):
    def run(rank, threshold):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(
            model, torch.optim.AdamW(model.parameters()), stage=3, map_shared=False, param_persistence_threshold=threshold
        )
        for micros in token_batches(2, 1, WORLD):
            model(*micros[0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.report(model), [unit.gathered_numel for unit in model._zeroshard.units]

    (report, gathered), (without, all_gathered) = run_threads(WORLD, run, SMALL)[0], run_threads(WORLD, run, 0)[0]
    small = [p.numel() for p in MODEL.parameters() if p.numel() <= SMALL]
    total = sum(p.numel() for p in MODEL.parameters())
    told = f"{len(small)} of 15 parameters ({sum(small)} elements) stay whole on every rank"
    assert any(note.startswith(told) for note in report.deviations) and not any(
        "stay whole" in note for note in without.deviations
    )
    whole, cut = 4 * sum(small), 4 * (total - sum(small))
    assert report.formula["parameters"] == whole + cut // WORLD and without.formula["parameters"] == 4 * total // WORLD
    assert sum(gathered) < sum(all_gathered)
    # sent in a step to the other rank: parameters that are cut twice, whole ones once, the gradients of all; halves, rounded up by group
    assert 0 <= report.theory_nbytes_per_step - (2 * cut + whole + whole + cut) // WORLD <= 16


@pytest.mark.parametrize("before, after", [(0, SMALL), (SMALL, 0)])
def test_checkpoints_know_no_threshold(before, after, tmp_path):
    def run(rank, threshold, steps, load):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(
            model, adamw(model.parameters()), stage=3, map_shared=False, param_persistence_threshold=threshold
        )
        if load:
            zs.load(str(tmp_path / "saved"), model, optimizer)
        for micros in token_batches(4, 1, 1)[steps]:
            model(*micros[0][0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not load:
            zs.save(str(tmp_path / "saved"), model, optimizer)
        return zs.full_state_dict(model)

    run_threads(2, run, before, slice(0, 2), False)
    resumed, expected = (run_threads(3, run, threshold, slice(2, 4), True)[0] for threshold in (after, before))
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())


def test_closing_leaves_the_user_the_parameters():
    def run(rank):
        model = copy.deepcopy(MODEL)
        given = model.norm.weight
        model, _ = zs.shard(model, stage=3, map_shared=False, param_persistence_threshold=SMALL)
        assert model.norm.weight is given
        zs.close(model)
        assert type(model.norm.weight) is torch.nn.Parameter and model.norm.weight is given
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), MODEL.parameters(), strict=True))

    run_threads(WORLD, run)
