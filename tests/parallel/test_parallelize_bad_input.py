"""What a mesh, a model or options can not be: one sentence, found before anything is changed. In one process, as rank 0 of a fake group."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers import seeding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig

adam = functools.partial(torch.optim.Adam, lr=1e-2)


@pytest.fixture
def mesh_of():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(shape, names):
        ranks = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def model() -> GPT:
    with seeding(0):
        return GPT(GPTConfig(vocab_size=64, seq_len=8, dim=24, layers=4, heads=6, tied=True))


class Net(nn.Linear):
    def forward(self, tokens):
        return super().forward(tokens)


MODELS = {"gpt": model, "without positions": lambda: Net(2, 2)}
THREE = ("pp", "dp", "tp")
CASES = [
    ((2, 2), ("data", "model"), {}, r"mesh: expected a DeviceMesh with axes named of .*'pp', 'dp'.*got \('data', 'model'\)"),
    ((2, 2), None, {}, "mesh: expected a DeviceMesh with axes named"),
    ((1, 1, 4), THREE, {}, r"tp=4 does not divide the 6 attention heads of GPT: tp=2 and tp=6 do|tp=4 does not divide"),
    ((1, 2, 5), THREE, {}, "tp=5 does not divide the 6 attention heads"),
    ((8, 1, 1), THREE, {"micro_batches": 8}, "8 pipeline stages for a GPT of 4 blocks .*the nearest is 4"),
    ((2, 2, 2), THREE, {"schedule": "2F2B"}, "schedule: expected one of .*got '2F2B'"),
    ((2, 1, 1), THREE, {"stages_per_rank": 2}, "2 stages a rank with schedule 1F1B, which has one"),
    ((2, 1, 1), THREE, {"cuts": [9], "micro_batches": 2}, "cuts: expected the 1 blocks with which stages"),
    ((1, 2, 2), THREE, {"micro_batches": 0}, "micro_batches: expected a whole number of at least 1, got 0"),
    ((1, 2, 2), THREE, {"styles": {"blocks.*.mlp.upp": "colwise"}}, "styles: 'blocks.*.mlp.upp' is no module"),
    ((1, 2, 2), THREE, {"stage": 4}, "stage"),
    (
        (2, 2),
        ("dp", "sp"),
        {"model": "without positions"},
        "the forward of Net takes no position_ids, by which a rank along sp would know",
    ),
]


@pytest.mark.parametrize("shape, names, options, sentence", CASES, ids=lambda value: str(value)[:30])
def test_a_sentence_and_nothing_changed(mesh_of, shape, names, options, sentence):
    mesh, given = mesh_of(shape, names), MODELS[options.get("model", "gpt")]()
    before = {name: (value, value.clone()) for name, value in given.named_parameters()}
    with pytest.raises(zs.ConfigError, match=sentence):
        zs.parallelize(given, mesh, optimizer=adam, **{name: value for name, value in options.items() if name != "model"})
    for name, value in given.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])


def test_no_mesh_at_all():
    with pytest.raises(zs.ConfigError, match="mesh: expected a DeviceMesh .*got NoneType"):
        zs.parallelize(model(), None)
