"""Options of groups, nodes and packing that can not be: one sentence on every rank, nothing changed."""

import copy

import pytest
import torch
from helpers import OddGPT, adamw, differences, seeded
from mesh_kit import on_ranks

import zeroshard as zs
from zeroshard import ConfigError, ModelMismatch
from zeroshard.engine.runtime import runtime_of

MODEL = seeded(OddGPT)

WRONG = {
    "shard_size=3 does not divide the 4 ranks: 2 does": {"shard_size": 3},
    "shard_size=7 does not divide the 4 ranks: 4 does": {"mics_shard_size": 7},
    "zero_hpz_partition_size=3 does not divide the 4 ranks: 2 does": {"zero_hpz_partition_size": 3},
    "shard_size=2 and mics_shard_size=4 mean the same": {"shard_size": 2, "mics_shard_size": 4},
    "shard_size: expected a whole number of at least 1, got 0": {"shard_size": 0},
    "zero_hpz_partition_size: expected a whole number of at least 1, got 2.5": {"zero_hpz_partition_size": 2.5},
    "zero_hpz_partition_size needs stage 3: at stage 2 parameters are replicated": {"zero_hpz_partition_size": 2, "stage": 2},
    "zero_hpz_partition_size shards parameters over all ranks": {"zero_hpz_partition_size": 2, "shard_size": 2},
    "hierarchical=False with zero_hpz_partition_size": {"zero_hpz_partition_size": 2, "hierarchical": False},
    "replicate_optimizer=False needs groups of ranks": {"replicate_optimizer": False},
    "hierarchical=True: the ranks are on one host": {"hierarchical": True},
    "hierarchical: expected True or False, got 'yes'": {"hierarchical": "yes"},
    "zero_quantized_weights needs stage 1, 2 or 3": {"zero_quantized_weights": True, "stage": 0},
    "one of int8, int4, fp8, none, or a zs.Compression, got 'int9'. Did you mean": {"zero_quantized_weights": "int9"},
    "zero_quantized_weights: expected True, one of int8, int4, fp8, none": {"zero_quantized_weights": "top_k"},
    "zero_quantized_gradients: expected True, one of int8": {"zero_quantized_gradients": 8},
    "zero_quantized_gradients: unknown field 'blok'. Did you mean": {"zero_quantized_gradients": {"codec": "int4", "blok": 64}},
    "compression block: expected a power of two": {"zero_quantized_gradients": {"codec": "int4", "block": 48}},
    "mesh: expected a DeviceMesh of 1 or 2 data-parallel axes, any others named tp or ep or pp; got list": {"mesh": [[0, 1], [2, 3]]},
}  # fmt: skip


@pytest.mark.parametrize("network", ["shared", "tagged"])
def test_one_sentence_on_every_rank(network):
    def on_rank(rank, more):
        for sentence, options in WRONG.items():
            model = copy.deepcopy(MODEL)
            optimizer = adamw(model.parameters())
            with pytest.raises(ConfigError) as caught:
                zs.shard(model, optimizer, **{**({} if "mesh" in options else more), "stage": 3, **options})
            assert sentence in str(caught.value), str(caught.value)
            assert type(optimizer) is torch.optim.AdamW and not differences(dict(model.state_dict()), dict(MODEL.state_dict()))
            model, optimizer = zs.shard(model, optimizer, stage=3, **more)  # nothing stands in the way
        runtime_of(model)

    on_ranks(4, network, on_rank)


@pytest.mark.parametrize("one, other", [
    ({"shard_size": 2}, {}), ({"shard_size": 2}, {"shard_size": 3}), ({"shard_size": 2}, {"shard_size": 2, "replicate_optimizer": False}),
    ({"zero_hpz_partition_size": 2}, {"zero_hpz_partition_size": 4}), ({"zero_quantized_gradients": "int8"}, {"zero_quantized_gradients": "int4"}),
])  # fmt: skip
def test_options_that_differ_between_ranks(one, other):
    def on_rank(rank, more):
        model = copy.deepcopy(MODEL)
        with pytest.raises(ModelMismatch, match="gave different options"):
            zs.shard(model, None, stage=3, **(other if rank == 2 else one), **more)
        assert not differences(dict(model.state_dict()), dict(MODEL.state_dict()))

    on_ranks(4, "shared", on_rank)


def test_a_writer_is_named_by_its_number_in_the_world():
    def on_rank(rank, more):
        model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3, shard_size=2)
        with pytest.raises(ConfigError, match="a rank from 0 to 3, got 4"), zs.gathered(model, modifier_rank=4):
            pass
        with pytest.raises(zs.ShardedWriteError, match=r"ranks \[2, 3\] wrote other values"):
            with zs.gathered(model.norm, write=True), torch.no_grad():
                model.norm.weight.fill_(rank // 2)  # alike inside of each group

    on_ranks(4, "shared", on_rank)
