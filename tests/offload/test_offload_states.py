"""zs.offload_states and zs.reload_states: the same bits afterwards, memory given back in between, and nobody uses what is away."""

import copy

import pytest
import torch
from helpers import MLP, OddGPT, seeded, token_batches, vector_batches
from offloading import tiers
from private_ranks import PostOffice, PrivateComm
from residence import in_own_process

import zeroshard as zs
from benchmarks.memory import field_nbytes
from zeroshard.comm.launch import run_processes
from zeroshard.config import Offload, Tier
from zeroshard.engine.comm import pool
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers import moved_states

DATA = token_batches(4, 1, 2)
MODEL = seeded(lambda: OddGPT(dim=24, layers=2))


def _steps(rank, model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(*DATA[step][0][rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _run(rank, away, options, disk=None):
    """Four steps, with everything away between the second and the third, and once with gradients before the last step."""
    torch.manual_seed(0)
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    losses = _steps(rank, model, optimizer, (0, 1))
    for include, device, pinned in away:
        zs.offload_states(model, include, device, pinned)
        zs.reload_states(model)
    losses += _steps(rank, model, optimizer, (2,))
    loss = model(*DATA[3][0][rank])
    loss.backward()
    for include, device, pinned in away:
        zs.offload_states(model, include, device, pinned)
        zs.reload_states(model)
    optimizer.step()
    states = zs.full_optimizer_state(model)
    return [*losses, loss.item()], zs.full_state_dict(model, masters=True), states


def _same(left, right):
    assert left[0] == right[0]
    for name, value in right[1].items():
        assert torch.equal(left[1][name], value), name
        for key, state in right[2].get(name, {}).items():
            assert torch.equal(left[2][name][key], state), (name, key)


def _compare(rank, away, options):
    _same(_run(rank, away, options), _run(rank, [], options))


def _folder(path):
    return Offload("nvme", path=str(path), any_filesystem=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_with_the_same_bits(stage, precision, tmp_path):
    away = [(None, "cpu", True), (None, _folder(tmp_path), True), (["optim_states", "lp_grads"], _folder(tmp_path), True)]
    run_threads(2, _compare, away, {"stage": stage, "precision": precision})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_with_memory_of_its_own(stage, precision, tmp_path, strict_device):
    """Copies go through streams; with states that rest on the host already, and without pinning."""

    def rank_main(rank, options, away):
        strict_device(rank)
        _same(_run(rank, away, options), _run(rank, [], options))

    away = [(None, "cpu", False), (["parameters"], "cpu", True), (None, _folder(tmp_path), True)]
    run_threads(2, rank_main, {"stage": stage, "precision": precision}, away)
    options = tiers("", optimizer="cpu", gradient="cpu" if stage == 3 else "none", parameter="cpu" if stage == 3 else "none")
    run_threads(2, rank_main, {"stage": stage, "precision": precision, **options}, away)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_allocator_that_gives_other_memory_back(stage, tmp_path, strict_device, monkeypatch):
    """As on a GPU: the storage is resized to nothing, and comes back elsewhere with any content."""
    returned = []

    def give_back(tensor):
        nbytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        returned.append(torch.full((nbytes,), 255, dtype=torch.uint8))  # somebody else has it now
        return nbytes

    monkeypatch.setattr(moved_states, "give_back", give_back)
    monkeypatch.setattr(pool, "give_back", give_back)

    def rank_main(rank):
        strict_device(rank)
        options = {"stage": stage, "precision": "bf16", "map_shared": False}
        _same(_run(rank, [(None, "cpu", True), (None, _folder(tmp_path), True)], options), _run(rank, [], options))

    run_threads(2, rank_main)
    assert returned


@pytest.mark.parametrize("options", [{"map_shared": False}, {"delayed_update": 1, "offload_optimizer": "cpu"}])
def test_other_ways_of_holding_states(options, tmp_path):
    run_threads(2, _compare, [(None, _folder(tmp_path), True)], {"stage": 3, "precision": "bf16", **options})


def test_ranks_that_share_no_memory(tmp_path):
    office = PostOffice()

    def rank_main(rank):
        for stage in (1, 3):
            options = {"stage": stage, "comm": PrivateComm(office, rank, 2, False)}
            _compare(rank, [(None, _folder(tmp_path), True)], options)

    run_threads(2, rank_main)


def test_states_that_rest_on_disk_already(tmp_path):
    options = {**tiers(str(tmp_path), "nvme", "nvme", "nvme"), "stage": 3, "precision": "bf16"}
    run_threads(2, _compare, [(None, "cpu", True), (None, "nvme", True)], options)


def _refusals(rank, stage, folder, precision):
    model = seeded(MLP)
    data = vector_batches(1, 1, 2)[0][0][rank]
    param = next(model.parameters())
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision=precision)
    param = next(model.parameters())
    model(*data).backward()
    zs.offload_states(model, device=folder)

    def uses():
        yield lambda: model(*data)
        yield lambda: model.layers[0](data[0])
        yield optimizer.step
        yield optimizer.zero_grad
        yield lambda: zs.full_state_dict(model)
        yield lambda: zs.full_gradients(model)
        yield lambda: zs.full_optimizer_state(model)
        yield lambda: zs.clip_grad_norm_(model, 1.0)
        yield lambda: zs.gathered(model).__enter__()
        yield lambda: zs.save(str(folder.path), model, optimizer)
        yield lambda: zs.load(str(folder.path), model, optimizer)
        yield lambda: zs.close(model)
        yield lambda: param.grad + 1
        yield lambda: param.add_(1)
        yield lambda: param.detach() + 1
        yield lambda: param.full_tensor() if stage == 3 else param.sum()
        yield lambda: optimizer.state[param]

    for number, use in enumerate(uses()):
        with (
            torch.no_grad() if number in (13, 14, 15) else torch.enable_grad(),
            pytest.raises(zs.StatesAway, match="zs.reload_states"),
        ):
            use()
            raise AssertionError(f"use {number} did not raise")
    zs.reload_states(model)
    zs.reload_states(model)  # nothing is away
    optimizer.step()
    model(*data).backward()
    zs.close(model)


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_what_is_away_is_refused_on_every_rank(stage, precision, tmp_path):
    run_threads(2, _refusals, stage, _folder(tmp_path), precision)


def _partly(rank, folder):
    model = seeded(MLP)
    data = vector_batches(1, 1, 2)[0][0][rank]
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model(*data).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = zs.full_state_dict(model)
    zs.offload_states(model, {"optimizer"}, folder)
    with torch.no_grad():
        model(*data)  # generation with the engine's own parameters
    assert zs.full_state_dict(model).keys() == before.keys()
    model(*data).backward()
    with pytest.raises(zs.StatesAway, match="the optimizer of this model"):
        optimizer.step()
    zs.offload_states(model, {"gradients", "lp_params"}, folder)  # a further call moves what is still there
    with pytest.raises(zs.StatesAway, match="optimizer, parameters, gradients|optimizer, gradients, parameters"):
        optimizer.step()
    zs.reload_states(model)
    optimizer.step()


def test_a_part_alone(tmp_path):
    run_threads(2, _partly, _folder(tmp_path))


def _wrong(rank, folder):
    model, _ = zs.shard(seeded(MLP), None, stage=3)
    with pytest.raises(zs.ConfigError, match="did_you|Did you mean 'optimizer'"):
        zs.offload_states(model, {"optimiser"})
    with pytest.raises(zs.ConfigError, match="an existing folder"):
        zs.offload_states(model, device="/no/such/folder")
    with pytest.raises(zs.ConfigError, match="needs a path"):
        zs.offload_states(model, device="nvme")
    with pytest.raises(zs.ConfigError, match="Did you mean"):
        zs.offload_states(model, {"buffer"} if rank else None)  # one rank is wrong: all hear of it
    with pytest.raises(zs.ConfigError, match="different arguments"):
        zs.offload_states(model, {"buffers"} if rank else None)
    with pytest.raises(zs.ZeroshardError, match="inside a forward"), zs.gathered(model):
        zs.offload_states(model)
    zs.offload_states(model)  # without an optimizer
    zs.reload_states(model)
    model(*vector_batches(1, 1, 2)[0][0][rank])


def test_what_is_wrong_is_said_on_every_rank(tmp_path):
    run_threads(2, _wrong, tmp_path)


def _save(rank, folder, checkpoints):
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3)
    _steps(rank, model, optimizer, (0, 1))
    saved = zs.save(checkpoints, model, optimizer, asynchronous=True)
    zs.offload_states(model, device=folder)  # waits until it is copied
    zs.reload_states(model)
    saved.wait()
    zs.save(checkpoints, model, optimizer, name="after")
    other = copy.deepcopy(MODEL)
    other, theirs = zs.shard(other, torch.optim.AdamW(other.parameters(), lr=1e-2), stage=1)
    for name in (None, "after"):
        zs.load(checkpoints, other, theirs, name=name)
        for key, value in zs.full_state_dict(model).items():
            assert torch.equal(zs.full_state_dict(other)[key], value)
    assert _steps(rank, other, theirs, (2,)) == _steps(rank, model, optimizer, (2,))


def test_checkpoints_around_it_are_right(tmp_path):
    (tmp_path / "disk").mkdir()
    run_threads(2, _save, _folder(tmp_path / "disk"), str(tmp_path / "run"))


class Wide(torch.nn.Module):
    """16 MiB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def _resident(model):
    """Bytes by the ledger: in memory, on disk."""
    ledger = runtime_of(model).tiers.ledger
    return sum(ledger.now.values()) + sum(ledger.elsewhere[Tier.HOST].values()), sum(ledger.elsewhere[Tier.DISK].values())


@in_own_process
@pytest.mark.parametrize("stage", [1])
def test_resident_memory_falls(stage, tmp_path):
    """States of 64 MiB (parameters, gradients, two moments) leave the process; gradients that were dropped need no copy."""
    model = Wide()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, map_shared=False)
    model(torch.ones(1, 1024)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zs.offload_states(model, device=_folder(tmp_path))  # buffers of the file engine are made
    zs.reload_states(model)
    before, held = field_nbytes("VmRSS"), _resident(model)[0]
    zs.offload_states(model, device=_folder(tmp_path))
    fallen = before - field_nbytes("VmRSS")
    assert _resident(model) == (0, 48 << 20), _resident(model)
    assert fallen > 60 << 20, f"{fallen:,} bytes fewer, of {held:,}"
    size = sum(file.stat().st_blocks for file in tmp_path.rglob("states-*")) * 512
    zs.reload_states(model)
    assert _resident(model)[1] == 0
    for _ in range(2):  # places in files are used again
        zs.offload_states(model, device=_folder(tmp_path))
        zs.reload_states(model)
    assert sum(file.stat().st_blocks for file in tmp_path.rglob("states-*")) * 512 == size
    zs.close(model)


def _shared(rank, world_size, folder):
    """Pages that ranks map together, where each writes its shard."""
    torch.distributed.init_process_group("gloo")
    model = Wide()
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    model(torch.ones(1, 1024)).backward()
    optimizer.step()
    optimizer.zero_grad()
    values = zs.full_state_dict(model)
    before = field_nbytes("VmRSS")
    zs.offload_states(model, device=_folder(folder))
    fallen = before - field_nbytes("VmRSS")
    zs.reload_states(model)
    assert all(torch.equal(value, values[name]) for name, value in zs.full_state_dict(model).items())
    model(torch.ones(1, 1024)).backward()
    optimizer.step()
    zs.close(model)
    return fallen


def test_memory_that_ranks_share_falls_in_all_of_them(tmp_path):
    fallen = run_processes(_shared, 2, tmp_path)
    assert min(fallen) > 14 << 20, fallen


def _drop_a_state(rank, include, folder):
    """Removing one parameter's state splits its run: the states that remain are views of memory that the removed one had, too."""
    torch.manual_seed(0)
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=1)
    _steps(rank, model, optimizer, (0, 1))
    optimizer.state.pop(next(model.parameters()))
    zs.offload_states(model, include, folder)
    zs.reload_states(model)
    _steps(rank, model, optimizer, (2, 3))
    return zs.full_state_dict(model)


def _compare_with_a_dropped_state(rank, folder):
    moved, stayed = _drop_a_state(rank, None, folder), _drop_a_state(rank, "buffers", folder)
    for name, value in stayed.items():
        assert torch.equal(moved[name], value), name


def test_a_state_that_was_dropped(tmp_path):
    run_threads(2, _compare_with_a_dropped_state, _folder(tmp_path))


def test_buffers_come_again_by_themselves():
    """device="cpu" where the device is the host: states stay, buffers go."""

    def rank_main(rank):
        model = copy.deepcopy(MODEL)
        zs.checkpoint_activations(model, blocks="auto", min_numel=1)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        expected = copy.deepcopy(MODEL)
        expected, other = zs.shard(expected, torch.optim.AdamW(expected.parameters()), stage=3)
        ledger = runtime_of(model).tiers.ledger
        for step in range(3):
            assert _steps(rank, model, optimizer, (step,)) == _steps(rank, expected, other, (step,))
            staging = ledger.now["staging"]
            zs.offload_states(model, {"buffers"})
            assert staging and not ledger.now["staging"]
            assert zs.activation_report(model).arena["device"] == 0

    run_threads(2, rank_main)
