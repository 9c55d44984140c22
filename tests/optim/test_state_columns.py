"""Optimizer states that do not rest as the optimizer has them: in bf16, and in 8 bits with one scale for 64 elements.

Compared with plain torch on one process, bit for bit, where each state is rounded after each step as it would be at rest, blocks
counted from the beginning of each parameter.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import MLP, differences, seeded, state_differences, vector_batches
from offloading import offload
from optimizers import backward

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.tensor.state_column import StateColumn
from zeroshard.testing import run_threads

BLOCK, RESTS = 64, 68  # elements of a block, and its bytes at rest: a code for each, and a scale
MODEL = seeded(lambda: MLP((5, 33, 31, 3)))
DATA = [*vector_batches(2, 1, 2), *vector_batches(2, 1, 4)]  # two steps on 2 ranks, then two on 4
CELLS = [(stage, device) for device in ("none", "cpu", "nvme") for stage in (0, 1, 2, 3) if stage or device == "none"]


def encode(values):
    """Powers of two as scales: then what is decoded is encoded to the same bytes."""
    blocks = values.view(-1, BLOCK)
    scales = torch.exp2(torch.frexp(blocks.abs().amax(1, keepdim=True) / 128).exponent.float())
    codes = (blocks / scales).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1).view(-1)


def decode(coded):
    blocks = coded.view(-1, RESTS)
    codes, scales = blocks[:, :BLOCK].contiguous(), blocks[:, BLOCK:].contiguous()
    return (codes.view(torch.int8).float() * scales.view(torch.float32)).view(-1)


class CodedAdam(torch.optim.Adam):
    state_columns = (
        StateColumn("exp_avg", torch.uint8, RESTS, BLOCK, encode, decode),
        StateColumn("exp_avg_sq", torch.bfloat16),
    )


@zs.whole_matrix(where=lambda param, options: param.dim() > 1)
class WholeCodedAdam(CodedAdam):
    """Steps each matrix as a whole, on one rank."""


def rounded(column, value):
    """A parameter's state after it has rested."""
    flat = F.pad(value.reshape(-1), (0, -value.numel() % column.elements))
    flat = column.decode(column.encode(flat).to(column.dtype)).float()
    return flat[: value.numel()].view(value.shape)


def plain_run(steps):
    """(weights, states) after so many steps in one process."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        backward(model, DATA[step][0])
        drop_one(model, step)
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            for column in CodedAdam.state_columns:
                optimizer.state[param][column.name] = rounded(column, optimizer.state[param][column.name])
    return model.state_dict(), {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


def drop_one(model, step):
    """A parameter misses one step: its run is split from its neighbours'."""
    if step == 1:
        model.layers[1].bias.grad = None


def sharded(stage, device, folder, optimizer=CodedAdam):
    """The host steps with the optimizer's own class, as plain torch does."""
    model = copy.deepcopy(MODEL)
    places = (
        {"offload_optimizer": offload(device, folder, buffer_nbytes=1 << 16, buffer_count=2, fused=False)}
        if device != "none"
        else {}
    )
    return zs.shard(model, optimizer(model.parameters(), lr=1e-2), stage=stage, **places)


def step(model, optimizer, rank, number):
    backward(model, [DATA[number][0][rank]])
    drop_one(model, number)
    optimizer.step()
    optimizer.zero_grad()


def assert_as_plain(model, steps):
    weights, states = plain_run(steps)
    assert not differences(zs.full_state_dict(model), weights)
    assert not state_differences(zs.full_optimizer_state(model), states)


@pytest.mark.parametrize(
    ("stage", "device", "separate"), [(*cell, False) for cell in CELLS] + [(*cell, True) for cell in CELLS[3::3]]
)
def test_states_rest_encoded_and_go_on_at_another_world_size(stage, device, separate, strict_device, tmp_path):
    """The second world steps at the next stage, from other shards. separate: the device has a memory of its own."""

    def first(rank):
        strict_device(rank, separate)
        model, optimizer = sharded(stage, device, str(tmp_path))
        for number in (0, 1):
            step(model, optimizer, rank, number)
        assert_as_plain(model, 2)
        groups = runtime_of(model).groups
        assert any(home.stop % BLOCK and home.start > 0 for group in groups for home in group.homes) == rank  # a shard's boundary
        for group in groups:
            numel = group.layout.numel if stage == 0 else group.layout.shard_numel
            assert sum(column.nbytes for column in group.columns.values()) == numel * 2 + numel // BLOCK * RESTS
        assert not any(optimizer.core.inner.state.values())
        zs.save(tmp_path / "saved", model, optimizer).wait()
        zs.close(model)

    def second(rank):
        strict_device(rank, separate)
        model, optimizer = sharded(stage % 3 + 1, device, str(tmp_path))
        zs.load(tmp_path / "saved", model, optimizer)
        assert_as_plain(model, 2)
        for number in (2, 3):
            step(model, optimizer, rank, number)
        assert_as_plain(model, 4)
        zs.close(model)

    run_threads(2, first)
    run_threads(4, second)


def test_a_checkpoint_tells_nothing_of_how_states_rest(tmp_path):
    """They are in it as the optimizer has them: what encodes them loads what does not, and the reverse."""
    plain = type("CodedAdam", (torch.optim.Adam,), {})

    def first(rank):
        model, optimizer = sharded(3, "none", None)
        for number in (0, 1):
            step(model, optimizer, rank, number)
        zs.save(tmp_path / "coded", model, optimizer).wait()
        zs.close(model)

    def second(rank):
        model, optimizer = sharded(2, "none", None, plain)
        zs.load(tmp_path / "coded", model, optimizer)
        assert_as_plain(model, 2)
        zs.save(tmp_path / "plain", model, optimizer).wait()
        zs.close(model)

    def third(rank):
        model, optimizer = sharded(1, "cpu", None)
        zs.load(tmp_path / "plain", model, optimizer)
        assert_as_plain(model, 2)
        zs.close(model)

    for world, rank_run in ((2, first), (3, second), (1, third)):
        run_threads(world, rank_run)


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (3, "none"), (2, "cpu")])
def test_a_written_state_is_encoded(stage, device, tmp_path):
    """Blocks of a parameter are apart from those of its neighbours."""

    def rank_run(rank):
        model, optimizer = sharded(stage, device, str(tmp_path))
        step(model, optimizer, rank, 0)
        before = zs.full_optimizer_state(model)
        name, param = list(model.named_parameters())[2]
        value = torch.linspace(-1.0, 3.0, param.numel()).view(param.shape)
        optimizer.state[param]["exp_avg"] = value
        after = zs.full_optimizer_state(model)
        assert torch.equal(after[name]["exp_avg"], rounded(CodedAdam.state_columns[0], value))
        for other in (other for other in before if other != name):
            assert torch.equal(after[other]["exp_avg"], before[other]["exp_avg"])
        step(model, optimizer, rank, 1)
        zs.close(model)

    run_threads(2, rank_run)


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (3, "none"), (2, "cpu")])
def test_encoded_states_of_parameters_that_are_stepped_whole(stage, device):
    def rank_run(rank):
        model, optimizer = sharded(stage, device, None, WholeCodedAdam)
        for number in (0, 1):
            step(model, optimizer, rank, number)
        assert_as_plain(model, 2)
        zs.close(model)

    run_threads(2, rank_run)


def test_encoded_states_are_moved_away_and_back(tmp_path):
    def rank_run(rank):
        model, optimizer = sharded(3, "none", None)
        step(model, optimizer, rank, 0)
        zs.offload_states(model, device=offload("nvme", str(tmp_path)))
        with pytest.raises(zs.StatesAway):
            zs.full_optimizer_state(model)
        zs.reload_states(model)
        step(model, optimizer, rank, 1)
        assert_as_plain(model, 2)
        zs.close(model)

    run_threads(2, rank_run)


def test_blocks_are_cut_where_a_range_begins_or_ends_within():
    column = CodedAdam.state_columns[0]
    assert column.blocks(70, 130) == (64, 192) and column.count(128) == 136
    assert column.nbytes(65, torch.float32) == 2 * RESTS
    values = torch.randn(4 * BLOCK)
    coded = encode(values)
    assert torch.equal(encode(decode(coded)), coded)
