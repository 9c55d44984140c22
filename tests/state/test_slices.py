"""Slices of states: over all ranks they are the whole tensor once, and what is written into them is what is read."""

import copy

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.seam import engine_of
from zeroshard.state.slices import loaded
from zeroshard.testing import run_threads

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11, bias=False))
MODEL[1].weight.requires_grad_(False)
OPTIONS = {
    "0": {"stage": 0},
    "1 bf16": {"stage": 1, "precision": "bf16"},
    "2 split": {"stage": 2, "precision": "bf16", "master_weights": "split"},
    "3 host": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "3 int8": {"stage": 3, "optimizer_states": zs.StateFormat("int8", block=32, min_numel=0)},
}


def stepped(rank, options, tile=False):
    model = copy.deepcopy(MODEL)
    if tile:
        zs.tile(model, max_bytes=150)
    model, optimizer = zs.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), **options)
    model(torch.arange(rank, rank + 4)).float().square().mean().backward()
    optimizer.step()
    return model, optimizer


def read(each):
    out = torch.empty(each.stop - each.start, dtype=each.dtype)
    each.read(0, out).wait()
    assert torch.equal(out, each.host(0, each.stop - each.start))
    return out


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world", [1, 3])
def test_the_slices_of_all_ranks_are_the_whole_tensors_once(world, options, tile):
    def run(rank):
        model, _ = stepped(rank, options, tile)
        found = [
            (each, None if each.single else read(each))
            for each in engine_of(model).slices("value", "master", "optimizer")
            if each.counted
        ]
        whole = {"value": zs.full_state_dict(model), "master": zs.full_state_dict(model, masters=True)}
        states = zs.full_optimizer_state(model)
        zs.close(model)
        return found, whole, states

    results = run_threads(world, run)
    _, whole, states = results[0]
    built, leaders = {}, {}
    for found, _, _ in results:
        for each, values in found:
            key = each.kind, each.name, each.own_name
            leaders[key] = leaders.get(key, 0) + each.leads
            if each.single:
                assert values is None and each.scalar == 1 and each.start == each.stop
                continue
            kept = built.setdefault(key, (each.part, each.shape, [], torch.zeros(each.extents, dtype=each.dtype).view(-1)))
            kept[2].append((each.start, each.stop))
            kept[3][each.start : each.stop] = values
    assert {kind for kind, *_ in built} == {"value", "master", "optimizer:exp_avg", "optimizer:exp_avg_sq"}
    for (kind, name, own), (part, shape, bounds, flat) in built.items():
        expected = whole[kind][name] if kind in whole else states.get(own)[kind.partition(":")[2]]
        if kind in whole:
            assert shape == expected.shape
            expected = expected if part is None else part.of(expected)
        assert torch.equal(flat.view(expected.shape), expected), (kind, own)
        ends = sorted(pair for pair in bounds if pair[0] < pair[1])
        assert [stop for _, stop in ends] == [start for start, _ in ends[1:]] + [flat.numel()], "every element once"
    # of a tiled tensor the rank with the first tile's first element leads
    tensors = {(kind, name) for kind, name, _ in leaders}
    assert all(sum(n for key, n in leaders.items() if key[:2] == each) == 1 for each in tensors)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_are_written_with_their_masters(options):
    whole = {name: torch.randn_like(value) for name, value in MODEL.state_dict().items()}

    def run(rank):
        model, _ = stepped(rank, options)
        engine = engine_of(model)
        model._zeroshard.comm.fence_write()
        values = engine.slices("value")
        for each in values:
            start, memory, put = each.receive(torch.float32, "cpu")
            shown = each.receive(torch.float32, "meta")
            assert (shown[0], shown[1].shape, shown[1].dtype) == (start, memory.shape, memory.dtype) and shown[1].is_meta
            memory.copy_(whole[each.name].view(-1)[start : start + memory.numel()])
            put(memory)
        loaded(values)
        model._zeroshard.comm.fence_read()
        found = zs.full_state_dict(model), zs.full_state_dict(model, masters=True)
        zs.close(model)
        return found

    for values, masters in run_threads(2, run):
        assert all(torch.equal(values[name], value.to(values[name].dtype)) for name, value in whole.items())
        for name, value in whole.items():
            assert torch.equal(masters[name], value.to(masters[name].dtype)), name


def test_encoded_states_rest_as_bytes_and_averages_are_a_kind():
    model, _ = stepped(0, OPTIONS["3 int8"])
    average = zs.ema(model)
    (state,) = [each for each in engine_of(model).slices("optimizer:exp_avg") if each.name == "3.weight"]
    coded = state.at_rest()
    assert (coded.dtype, coded.part, state.encoded) == (torch.uint8, None, "") and coded.encoded == "e3m4/32"
    assert coded.shape == (coded.stop - coded.start,) and read(coded).numel() < 4 * 11 * 13
    kept = engine_of(model).slices(average.kind_of_slices(model))
    assert [each.name for each in kept] == ["0.weight", "1.bias", "3.weight"] and all(each.guarded for each in kept)
    assert torch.equal(read(kept[2]).view(11, 13), average.full_state_dict()["3.weight"])
    with pytest.raises(zs.ConfigError, match="got 'moment'"):
        engine_of(model).slices("moment")
    zs.close(model)


def test_ties_are_names_of_one_slice_and_a_state_of_none_is_no_slice():
    model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 11))
    model[1].weight = model[0].weight
    model, _ = zs.shard(model, stage=3)
    assert [(each.name, each.names) for each in engine_of(model).slices("value")] == [
        ("0.weight", ("0.weight", "1.weight")),
        ("1.bias", ("1.bias",)),
    ]
    assert engine_of(model).slices("optimizer") == []
    zs.close(model)


def test_kinds_that_are_none_are_refused_and_an_optimizer_made_since_is_not_taken_over():
    model = zs.shard(torch.nn.Linear(4, 4), stage=3)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    engine = engine_of(model)
    assert engine.slices("optimizer") == [] and type(optimizer).__name__ != "ShardedOptimizer"
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    average = zs.ema(model, 0.9)
    assert len(engine.slices("average:0")) == len(engine.slices("value")) == 2
    for kind in ("average", "average:x", "average:1", "average:-1", "average:00", "optimizer:", "gradient", "values", ""):
        with pytest.raises(zs.ConfigError, match="engine.slices: kind"):
            engine.slices(kind)
    with pytest.raises(AssertionError):
        engine.slices("optimizer:exp_avg")[0].write(torch.zeros(1))
    average.close()
