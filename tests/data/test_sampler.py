"""zs.ShardedSampler: every sample once an epoch, at any number of ranks, also when it changes on the way."""

import itertools

import numpy
import pytest
from checkpoint_kit import build
from torch.utils.data import DataLoader

import zeroshard as zs
from zeroshard.testing import run_threads


def _ranks(world_size: int, **options) -> list[zs.ShardedSampler]:
    return [zs.ShardedSampler(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_reads_every_sample_once(world_size, drop_last):
    samplers = _ranks(world_size, numel=23, drop_last=drop_last)
    read = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in read}) == 1
    together = [index for row in zip(*read, strict=True) for index in row]
    if drop_last:
        assert len(together) == 23 // world_size * world_size == len(set(together))
    else:
        assert set(together) == set(range(23)) and len(together) < 23 + world_size
    assert [(sampler.epoch, sampler.samples) for sampler in samplers] == [(1, 0)] * world_size
    assert list(samplers[0]) != read[0]  # the next epoch has an order of its own


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again, other = (zs.ShardedSampler(50, seed=seed) for seed in (7, 7, 8))
    orders = [list(sampler) for sampler in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    again.set_epoch(0)
    assert list(again) == orders[0]
    assert list(zs.ShardedSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before,after", [(4, 3), (3, 1), (1, 4), (2, 2)])
def test_another_number_of_ranks_goes_on_without_loss_or_repetition(before, after):
    samplers = _ranks(before, numel=48, seed=1)
    read = [index for sampler in samplers for index in itertools.islice(sampler, 12 // before)]
    state = {"numel": 48, "seed": 1, "shuffle": True, "epoch": 0, "samples": 12}
    resumed = _ranks(after, numel=48, seed=1)
    for sampler in resumed:
        sampler.load_state_dict(state)
        assert len(sampler) == 36 // after
        read += list(sampler)
    assert sorted(read) == list(range(48))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loop_was_given_counts_not_what_workers_read_ahead(workers):
    sampler = zs.ShardedSampler(40, rank=0, world_size=2)
    loader = DataLoader(list(range(40)), batch_size=4, sampler=sampler, num_workers=workers)
    seen = []
    for number, batch in enumerate(sampler.follow(loader), 1):
        seen += batch.tolist()
        assert sampler.state_dict()["samples"] == number * 4 * 2
        if number == 3:
            break
    resumed = zs.ShardedSampler(40, rank=0, world_size=2)
    resumed.load_state_dict(sampler.state_dict())
    seen += list(resumed)
    assert seen == list(zs.ShardedSampler(40, rank=0, world_size=2))
    assert (resumed.epoch, resumed.samples) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2, None], ids=["no workers", "two workers", "the sampler itself"])
def test_a_position_that_nobody_followed_is_not_saved(workers):
    """Workers draw ahead, to the end of the epoch while the loop has had 12 of 24 samples. What a loop was stopped at is not known either."""
    sampler = zs.ShardedSampler(24, rank=0, world_size=1)
    loader = sampler if workers is None else DataLoader(list(range(24)), batch_size=4, sampler=sampler, num_workers=workers)
    batch_size = 1 if workers is None else 4
    begin = sampler.state_dict()
    for number, _ in enumerate(loader, 1):
        if number == 3:
            with pytest.raises(zs.ConfigError, match=r"after a plain loop .*Loop over sampler.follow\(loader\)"):
                sampler.state_dict()
            break
    with pytest.raises(zs.ConfigError, match="lose or repeat some"):
        sampler.state_dict()
    sampler.load_state_dict(begin)
    assert sampler.state_dict() == begin
    assert len(list(loader)) == 24 // batch_size and sampler.epoch == 1
    for number, _ in enumerate(sampler.follow(loader, batch_size), 1):
        assert sampler.state_dict() == {**begin, "epoch": 1, "samples": number * batch_size}
    assert sampler.state_dict() == {**begin, "epoch": 2}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("left", ["dropped", "used", "loaded"])
def test_of_two_loops_the_later_is_counted(left, workers):
    """A prefetcher may hold one that was given up; a position may be loaded inside of one. What is counted is what was given."""
    sampler = zs.ShardedSampler(32, rank=0, world_size=1)
    loader = DataLoader(list(range(32)), batch_size=4, sampler=sampler, num_workers=workers)
    order = list(zs.ShardedSampler(32, rank=0, world_size=1))
    first = sampler.follow(loader)
    assert next(first).tolist() == order[:4]
    if left == "loaded":
        sampler.load_state_dict({**sampler.state_dict(), "samples": 8})
    begin, second = sampler.samples, sampler.follow(loader)
    read = next(second).tolist()
    if left == "dropped":
        first.close()
    else:
        with pytest.raises(zs.ConfigError, match="while this loop was running"):
            next(first)
    for batch in second:
        read += batch.tolist()
        assert sampler.epoch == 0 and sampler.samples == begin + len(read)
    assert read == order[begin:] and (sampler.epoch, sampler.samples) == (1, 0)


@pytest.mark.parametrize(("name", "value"), [("epoch", -1), ("epoch", "a"), ("samples", 41), ("samples", -1), ("samples", 1.5)])
def test_a_position_that_cannot_be_is_refused(name, value):
    sampler = zs.ShardedSampler(40, rank=0, world_size=1)
    begin = sampler.state_dict()
    with pytest.raises(zs.ConfigError, match=f"{name}: expected 0 to .*, got {value!r}"):
        sampler.load_state_dict({**begin, name: value})
    assert sampler.state_dict() == begin


def test_an_iterator_that_has_drawn_ahead_can_not_be_followed():
    sampler = zs.ShardedSampler(32, rank=0, world_size=1)
    drawn = iter(DataLoader(list(range(32)), batch_size=4, sampler=sampler, num_workers=2))
    with pytest.raises(zs.ConfigError, match="expected a loader, got an iterator"):
        next(sampler.follow(drawn, batch_size=4))
    sampler.set_epoch(numpy.int64(3))
    state = sampler.state_dict()
    assert type(state["epoch"]) is int and len(list(sampler.follow(iter(DataLoader(range(32), 4, sampler=sampler)), 4))) == 8
    sampler.load_state_dict({**state, "samples": numpy.int64(8)})
    assert sampler.state_dict() == {**state, "samples": 8}


def test_a_save_behind_a_loop_that_nobody_followed_is_refused_on_every_rank(tmp_path):
    def rank_run(rank: int) -> None:
        sampler, (model, optimizer) = zs.ShardedSampler(8), build("tied")
        next(iter(sampler))
        with pytest.raises(zs.ConfigError, match=r"follow\(loader\)"):
            zs.save(tmp_path, model, optimizer, extra={"sampler": sampler})
        sampler.set_epoch(1)
        zs.save(tmp_path, model, optimizer, extra={"sampler": sampler})
        zs.close(model)

    run_threads(2, rank_run)


def test_ranks_come_from_the_world():
    def body(rank):
        sampler = zs.ShardedSampler(6, shuffle=False)
        return list(sampler)

    assert run_threads(2, body) == [[0, 2, 4], [1, 3, 5]]


def test_b11_a_position_in_other_data_is_refused_by_name(monkeypatch):
    state = zs.ShardedSampler(40, seed=1).state_dict()
    with pytest.raises(zs.ConfigError, match="numel: the saved position is of 40, this sampler has 41"):
        zs.ShardedSampler(41, seed=1).load_state_dict(state)
    with pytest.raises(zs.ConfigError, match="seed"):
        zs.ShardedSampler(40, seed=2).load_state_dict(state)
    with pytest.raises(zs.ConfigError, match="at least one"):
        zs.ShardedSampler(0)
    with pytest.raises(zs.ConfigError, match="both"):
        zs.ShardedSampler(4, rank=0)
    with pytest.raises(zs.ConfigError, match="batch_size"):
        next(iter(zs.ShardedSampler(4).follow([1])))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(zs.ConfigError, match="no process group"):
        zs.ShardedSampler(4)
