"""zs.stream_full_tensors: the state dict in parts, never more than the budget at once."""

import copy

import pytest
import torch
from helpers import MLP, OddGPT, seeded, token_batches
from offloading import tiers
from private_ranks import PostOffice, PrivateComm

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

MODEL = seeded(lambda: OddGPT(dim=24, layers=2))


def _shard(model, **options):
    model = copy.deepcopy(model)
    return zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def _step(rank, model, optimizer):
    model(*token_batches(1, 1, 3)[0][0][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _equal(rank, budget, masters, dtype, options):
    model, optimizer = _shard(MODEL, **options)
    model.register_buffer("table", torch.arange(5))
    _step(rank, model, optimizer)
    expected = zs.full_state_dict(model, masters=masters)
    got, largest = {}, max(value.nbytes for value in expected.values())
    for batch in zs.stream_full_tensors(model, max_nbytes=budget, masters=masters, dtype=dtype):
        distinct = {value.data_ptr(): value.nbytes for value in batch.values()}
        assert sum(distinct.values()) <= budget or len(distinct) == 1
        assert not got.keys() & batch.keys()
        got |= batch
    assert got.keys() == expected.keys() and largest
    for name, stored in expected.items():
        value = stored.to(dtype) if dtype is not None and stored.is_floating_point() else stored
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name
    assert got["head.weight"] is got["embedding.weight"]  # tied
    _step(rank, model, optimizer)  # the loop goes on
    assert not runtime_of(model).tiers.ledger.now["gathered units"]


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}])
@pytest.mark.parametrize(
    "precision, masters, dtype", [("fp32", False, None), ("bf16", True, None), ("bf16", True, torch.float16)]
)
def test_all_of_it_under_any_budget(options, precision, masters, dtype):
    for budget in (1, 5000, 1 << 20):
        run_threads(3, _equal, budget, masters, dtype, {**options, "precision": precision})


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_from_other_tiers(place, tmp_path, strict_device):
    def rank_main(rank):
        strict_device(rank)
        options = tiers(str(tmp_path), place, place, place)
        _equal(rank, 5000, True, None, {"stage": 3, "precision": "bf16", **options})

    run_threads(2, rank_main)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
def test_ranks_that_share_no_memory(ordered):
    office = PostOffice()

    def rank_main(rank):
        for stage in (1, 3):
            _equal(rank, 5000, True, None, {"stage": stage, "precision": "bf16", "comm": PrivateComm(office, rank, 2, ordered)})

    run_threads(2, rank_main)


def _peak(rank):
    """One unit of 1.2 MB, on three ranks that share no buffer: the budget and its staging are all that is held."""
    model = torch.nn.Sequential(torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(30))))
    model, _ = zs.shard(model, None, stage=3, map_shared=False, units=("Sequential",))
    ledger = runtime_of(model).tiers.ledger
    unit = max(u.gathered_nbytes for u in runtime_of(model).units)
    ledger.peak["gathered units"] = ledger.peak["staging"] = 0
    budget = 100_000
    count = sum(1 for _ in zs.stream_full_tensors(model, max_nbytes=budget))
    assert unit > 10 * budget and count >= unit // budget
    assert ledger.peak["gathered units"] <= budget, ledger.peak
    assert ledger.peak["staging"] <= budget // 8, ledger.peak


def test_a_unit_larger_than_the_budget_is_never_gathered():
    run_threads(3, _peak)


def _tiled(rank):
    model = copy.deepcopy(MODEL)
    zs.tile(model, max_bytes=2000)
    model, _ = zs.shard(model, None, stage=3)
    expected, got = zs.full_state_dict(model), {}
    for batch in zs.stream_full_tensors(model, max_nbytes=4000):
        got |= batch
    assert got.keys() == expected.keys() == MODEL.state_dict().keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_tiles_are_joined():
    run_threads(2, _tiled)


def _chosen(rank):
    model, _ = zs.shard(seeded(MLP), None, stage=3)
    names = ["gain", "layers.1.weight"]
    (batch,) = zs.stream_full_tensors(model, names=names)
    assert sorted(batch) == names
    iterator = zs.stream_full_tensors(model, max_nbytes=1)
    next(iterator)
    iterator.close()  # given up by all ranks
    with pytest.raises(zs.ConfigError, match="Did you mean 'gain'"):
        zs.stream_full_tensors(model, names=["gian"])
    with pytest.raises(zs.ConfigError, match="max_nbytes"):
        zs.stream_full_tensors(model, max_nbytes=0)
    with pytest.raises(zs.ConfigError, match="dtype"):
        zs.stream_full_tensors(model, dtype=torch.int8)
    zs.offload_states(model)
    with pytest.raises(zs.StatesAway):
        zs.stream_full_tensors(model)


def test_some_of_it_and_what_is_refused():
    run_threads(2, _chosen)
