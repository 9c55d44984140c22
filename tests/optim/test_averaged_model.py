"""zs.ema: the numbers of torch's AveragedModel on one process, as slices, in checkpoints, and lent to the model."""

import copy
import math
import re

import pytest
import torch
from helpers import OddGPT, seeded, token_batches
from offloading import tiers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

DECAY = 0.9
MODEL = seeded(lambda: OddGPT(dim=24, layers=2))
DATA = token_batches(5, 1, 2)


def _reference(steps=5, model=MODEL):
    """Averages on one process, by step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first call copies
    for step in range(steps):
        for rank in range(2):
            model(*DATA[step][0][rank]).backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module


def _shard(model=MODEL, **options):
    model = copy.deepcopy(model)
    return zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def _step(rank, model, optimizer, step):
    model(*DATA[step][0][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _close(got, expected, tolerance=1e-7):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value.detach(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def _follow(rank, options, tolerance, expected, inputs):
    model, optimizer = _shard(**options)
    average = zs.ema(model, DECAY)
    for step in range(5):
        _step(rank, model, optimizer, step)
    assert average.updates == 5
    _close(average.full_state_dict(), expected.state_dict(), tolerance)
    before = zs.full_state_dict(model, masters=True)
    loss = model(*inputs)
    with average.swapped(model) as lent, torch.no_grad():
        assert lent is model
        assert abs(model(*inputs) - expected(*inputs)) < max(tolerance, 1e-2 if tolerance > 1e-3 else 1e-5)
        _close({k: v.float() for k, v in zs.full_state_dict(model).items()}, expected.state_dict(), max(tolerance, 1e-5))
        with pytest.raises(zs.ZeroshardError, match=r"inside AveragedModel.swapped\(\)"):
            optimizer.step()
    after = zs.full_state_dict(model, masters=True)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(model(*inputs), loss)
    _step(rank, model, optimizer, 0)
    assert average.updates == 6


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}])
def test_as_on_one_process(options):
    run_threads(2, _follow, options, 1e-7, _reference(), DATA[0][0][0])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_are_averaged(stage):
    """bf16 computes with other numbers, but the average is that of the masters, as exact as they are."""

    def rank_main(rank):
        model, optimizer = _shard(stage=stage, precision="bf16")
        average, expected = zs.ema(model, DECAY), zs.full_state_dict(model, masters=True)
        for step in range(4):
            _step(rank, model, optimizer, step)
            masters = zs.full_state_dict(model, masters=True)
            expected = {k: torch.lerp(v, masters[k], 1 - DECAY) for k, v in expected.items()}
        _close(average.full_state_dict(), expected, 1e-7)
        assert all(v.dtype == torch.float32 for v in average.full_state_dict().values())
        with average.swapped():
            _close(zs.full_state_dict(model), {k: v.to(torch.bfloat16) for k, v in expected.items()}, 1e-2)
        assert all(torch.equal(v, masters[k]) for k, v in zs.full_state_dict(model, masters=True).items())

    run_threads(2, rank_main)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_on_other_tiers(place, tmp_path, strict_device):
    def rank_main(rank, expected):
        strict_device(rank)
        options = {"stage": 3, **tiers(str(tmp_path), place, place, place, fused=False)}
        _follow(rank, options, 1e-7, expected, DATA[0][0][0])

    run_threads(2, rank_main, _reference())


def test_it_is_a_slice_on_each_rank():
    def rank_main(rank, stage):
        model, _ = _shard(stage=stage)
        zs.ema(model)
        runtime = runtime_of(model)
        held = runtime.tiers.ledger.now["averaged parameters"]
        assert held == sum(4 * group.layout.shard_numel for group in runtime.groups)
        zs.close(model)
        assert not runtime.tiers.ledger.now["averaged parameters"]

    for stage in range(4):
        run_threads(2, rank_main, stage)


def test_skipped_steps_do_not_count_and_all_ranks_follow():
    """Also ranks whose data has ended, which step without being called."""

    def rank_main(rank):
        model, optimizer = _shard(stage=3)
        average = zs.ema(model, DECAY)
        _step(rank, model, optimizer, 0)
        before = average.full_state_dict()
        (model(*DATA[1][0][rank]) * math.nan).backward()
        optimizer.step()
        assert optimizer.last_step.skipped and average.updates == 1
        assert all(torch.equal(v, before[k]) for k, v in average.full_state_dict().items())
        optimizer.zero_grad()
        with zs.join(model):
            for step in range(1, 2 + rank):
                _step(rank, model, optimizer, step)
        assert average.updates == 3
        average.close()
        _step(rank, model, optimizer, 3)
        assert average.updates == 3

    run_threads(2, rank_main)


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, "tiled", "nvme"], ids=str)
def test_it_goes_on_from_an_average_of_another_program(options, tmp_path):
    """Of a copy that the program averages itself, in DDP's names and in those of torch's AveragedModel, on 2 and 3 ranks."""
    theirs = _reference(2).state_dict()
    of_ddp = {f"module.{name}": value for name, value in theirs.items()}
    key = next(name for name in theirs if name.startswith("blocks"))
    wrong = {"nothing": {}, "a tensor of shape (3,)": {key: torch.zeros(3)}}

    def rank_main(rank):
        model, how = copy.deepcopy(MODEL), options
        if options == "nvme":
            how = {"stage": 3, **tiers(str(tmp_path), "nvme", "nvme", "nvme")}
        if options == "tiled":
            how = {"stage": 3}
            zs.tile(model, max_bytes=2000)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **how)
        average = zs.ema(model, DECAY)
        for given in (theirs, of_ddp, of_ddp | {"n_averaged": torch.tensor(2)}):
            average.load_state_dict({name: torch.zeros_like(value) for name, value in average.state_dict().items()})
            average.load_state_dict(given)
            found = average.full_state_dict()
            assert all(torch.equal(found[name], value) for name, value in theirs.items())
        assert average.updates == 2
        for got, entry in wrong.items():
            ones = {name: torch.ones_like(value) for name, value in found.items() if name != key}
            with pytest.raises(
                zs.ConfigError, match=f"load_state_dict: {key}: expected .* got {re.escape(got)}. Nothing was changed"
            ):
                average.load_state_dict(ones | entry)
        average.load_state_dict(average.full_state_dict())
        _step(rank % 2, model, optimizer, 0)
        now = zs.full_state_dict(model)
        _close(average.full_state_dict(), {name: torch.lerp(value, now[name], 1 - DECAY) for name, value in theirs.items()})

    for size in (2, 3):
        run_threads(size, rank_main)


def _save(rank, path, asynchronous):
    model, optimizer = _shard(stage=3, precision="bf16")
    average = zs.ema(model, DECAY)
    for step in range(3):
        _step(rank % 2, model, optimizer, step)
    saved = zs.save(path, model, optimizer, extra={"ema": average, "note": 1}, asynchronous=asynchronous)
    expected = average.full_state_dict()
    _step(rank % 2, model, optimizer, 3)
    saved.wait()
    following = average.full_state_dict()
    return expected, following


def _load(rank, path, expected, following, options):
    model, optimizer = _shard(**options)
    average = zs.ema(model, DECAY)
    zs.load(path, model, optimizer, extra={"ema": average, "note": None})
    got = average.full_state_dict()
    assert average.updates == 3 and all(torch.equal(got[name], value) for name, value in expected.items())
    if "precision" in options:
        _step(rank % 2, model, optimizer, 3)
        _close(average.full_state_dict(), following, 1e-4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_hold_it_by_slices(asynchronous, tmp_path):
    results = run_threads(2, _save, str(tmp_path), asynchronous)
    expected, following = results[0]
    for ranks, options in ((2, {"stage": 3, "precision": "bf16"}), (3, {"stage": 1}), (1, {"stage": 0}),
                           (2, {"stage": 3, **tiers(str(tmp_path), "nvme", "nvme", "nvme")})):  # fmt: skip
        run_threads(ranks, _load, str(tmp_path), expected, following, options)
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.distcp")]
    assert max(sizes) < 1.5 * min(sizes)
    zs.inspect_checkpoint(tmp_path, verify=True)

    def tiled(rank):
        model = copy.deepcopy(MODEL)
        zs.tile(model, max_bytes=2000)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3)
        average = zs.ema(model, DECAY)
        zs.load(tmp_path, model, optimizer, extra={"ema": average})
        assert all(torch.equal(average.full_state_dict()[name], value) for name, value in expected.items())

    run_threads(2, tiled)


def test_a_checkpoint_that_does_not_fit(tmp_path):
    def rank_main(rank):
        model, optimizer = _shard(stage=3)
        zs.save(tmp_path, model, optimizer, extra={"ema": {"decay": 0.9, "updates": 1}})
        average = zs.ema(model)
        with pytest.raises(zs.CheckpointMismatch, match="extra ema: embedding.weight: saved nothing"):
            zs.load(tmp_path, model, optimizer, extra={"ema": average})
        other, theirs = _shard(stage=3)
        with pytest.raises(zs.ConfigError, match="an average of another model"):
            zs.save(tmp_path, other, theirs, extra={"ema": average}, name="x")
        with pytest.raises(zs.ConfigError, match="decay"):
            zs.ema(model, 2.0)
        with pytest.raises(zs.ConfigError, match="the model that was given to zs.ema"), average.swapped(other):
            pass
        with pytest.raises(zs.ZeroshardError, match="this model has no optimizer"):
            zs.ema(zs.shard(copy.deepcopy(MODEL), None, stage=3)[0])
        zs.close(model)
        with pytest.raises(zs.ModelClosed):
            average.full_state_dict()

    run_threads(2, rank_main)


@pytest.mark.parametrize("another", [True, False], ids=["another average", "no average"])
def test_one_of_a_closed_model_is_not_taken_for_that_of_the_model_sharded_anew(another, tmp_path):
    def rank_main(rank):
        model, optimizer = _shard(stage=3)
        old = zs.ema(model, 0.5)
        zs.save(tmp_path, model, optimizer, extra={"ema": old}, name="before")
        zs.close(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zs.shard(model, optimizer, stage=3)
        new = zs.ema(model, DECAY) if another else None
        _step(rank, model, optimizer, 0)
        held = new.full_state_dict() if new is not None else {}
        with pytest.raises(zs.ModelClosed, match=r"extra: an average .* before zs.close\(model\).* zs.ema\(model\)"):
            zs.save(tmp_path, model, optimizer, extra={"ema": old}, name="after")
        with pytest.raises(zs.ModelClosed, match=r"extra: an average .* before zs.close\(model\)"):
            zs.load(tmp_path, model, optimizer, extra={"ema": old}, name="before")
        assert all(torch.equal(value, new.full_state_dict()[name]) for name, value in held.items())
        if new is not None:
            zs.load(tmp_path, model, optimizer, extra={"ema": new}, name="before")
            assert new.updates == old.updates == 0

    run_threads(2, rank_main)


def test_frozen_parameters_and_states_that_are_away(tmp_path):
    def rank_main(rank):
        model = copy.deepcopy(MODEL)
        model.blocks[0].requires_grad_(False)
        model, optimizer = zs.shard(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), stage=3)
        average, before = zs.ema(model, DECAY), zs.full_state_dict(model)
        _step(rank, model, optimizer, 0)
        expected, after = average.full_state_dict(), zs.full_state_dict(model)
        assert all(torch.equal(v, torch.lerp(before[k], after[k], 1 - DECAY)) for k, v in expected.items())
        zs.offload_states(model, device=zs.Offload("nvme", path=str(tmp_path), any_filesystem=True))
        with pytest.raises(zs.StatesAway):
            average.full_state_dict()
        zs.reload_states(model)
        assert all(torch.equal(v, average.full_state_dict()[k]) for k, v in expected.items())

    run_threads(2, rank_main)


def test_a_model_with_a_submodule_of_the_name_that_wrappers_have():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.module(x)

    def run(rank):
        model = Around()
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        average = zs.ema(model)
        average.load_state_dict(average.full_state_dict())
        average.load_state_dict({f"module.{name}": value * 0 for name, value in average.full_state_dict().items()})
        assert not any(value.any() for value in average.full_state_dict().values())
        with pytest.raises(zs.ConfigError, match=r"module\.weight: expected a tensor of shape \(4, 4\), got 3\.0"):
            average.load_state_dict({"module.weight": 3.0})

    run_threads(2, run)
