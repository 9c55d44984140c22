"""Parameters over one memory are refused by both names, before anything is changed; ties and views that do not overlap are served."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo import Case, check, normal_batches, run_threads, seeded, sgd, square

import zeroshard as zs
from zeroshard.comm.fake import FakeComm

STAGES = [0, 1, 2, 3]


class Two(nn.Module):
    """Two linear maps of equal size, whose weights `share` makes anew."""

    def __init__(self, share=None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if share is not None:
            share(self)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def of_its_data(model):
    model.b.weight = nn.Parameter(model.a.weight.data)


def of_its_detached_rows(model):
    model.b.weight = nn.Parameter(model.a.weight.detach()[:2])


def frozen(model):
    model.b.weight = nn.Parameter(model.a.weight.data, requires_grad=False)


def transposed(model):
    model.b.weight = nn.Parameter(model.a.weight.data.t())


def of_one_flat_tensor(model):
    flat = torch.randn(24)
    model.a.weight, model.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))


def of_one_array(model):
    array = np.zeros((4, 4), dtype=np.float32)
    model.a.weight, model.b.weight = (nn.Parameter(torch.from_numpy(array)) for _ in range(2))


def bits_of_another_dtype(model):
    model.b.weight = nn.Parameter(model.a.weight.data.view(torch.bfloat16))


SHARED = [of_its_data, of_its_detached_rows, frozen, transposed, of_one_flat_tensor, of_one_array, bits_of_another_dtype]
named = {"ids": lambda f: f.__name__}
MESSAGE = r"(a\.weight and b\.weight|b\.weight and a\.weight) are two parameters that share memory.*a tie\), or give one memory of its own"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("share", SHARED, **named)
def test_two_parameters_over_one_memory_are_refused(share, stage):
    def run(rank):
        model = Two(share)
        kinds = {name: type(param) for name, param in model.named_parameters()}
        with pytest.raises(zs.ShardedAccessError, match=MESSAGE):
            zs.shard(model, sgd(model.parameters()), stage=stage)
        assert kinds == {name: type(param) for name, param in model.named_parameters()} and "_zeroshard" not in vars(model)

    run_threads(2, run)


@pytest.mark.parametrize("share", [of_its_data, of_its_detached_rows, frozen, of_one_flat_tensor], **named)
def test_they_are_refused_under_init(share):
    for rank in range(3):
        with zs.init(stage=3, comm=FakeComm(rank, 3)):
            model = Two(share)
        with pytest.raises(zs.ShardedAccessError, match=MESSAGE):
            zs.shard(model, None, stage=3, comm=FakeComm(rank, 3))


@pytest.mark.parametrize("stage", [1, 3])
def test_they_are_refused_with_weights(tmp_path, stage):
    """On the meta device, and with values."""
    save_file(Two().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        metas = [Two(of_its_data) for _ in range(2)]

    def run(rank):
        for model in (metas[rank], Two(of_its_data)):
            with pytest.raises(zs.ShardedAccessError, match=MESSAGE):
                zs.shard(model, None, weights=tmp_path, stage=stage)

    run_threads(2, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_over_a_trained_parameter_is_refused(stage):
    class Buffered(Two):
        def __init__(self, trained):
            super().__init__()
            self.a.requires_grad_(trained)
            self.register_buffer("seen", self.a.weight.data[1:])

    with pytest.raises(zs.ShardedAccessError, match=r"a\.weight and the buffer seen share memory"):
        zs.shard(Buffered(True), None, stage=stage)
    zs.shard(Buffered(False), None, stage=stage)


def tied(model):
    model.b.weight = model.a.weight


def neighbours(model):
    flat = torch.randn(32, generator=torch.Generator().manual_seed(5))
    model.a.weight, model.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))


def columns(model):
    both = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    model.a.weight, model.b.weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


def cloned(model):
    model.b.weight = nn.Parameter(model.a.weight.detach().clone())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("share", [tied, neighbours, columns, cloned], **named)
def test_what_shares_nothing_is_served(share, stage):
    model = seeded(Two, share)
    if share in (neighbours, columns):
        assert model.a.weight.untyped_storage()._cdata == model.b.weight.untyped_storage()._cdata
    check(Case(copy.deepcopy(model), normal_batches(2, 2, 3, 4), square, sgd), stage=stage)
    run_threads(2, lambda rank: zs.shard(seeded(Two, share), None, stage=stage))


def taken_over(model):
    """As reparametrizations do: a parameter goes, another is made of its data."""
    model.a.renamed = nn.Parameter(model.a.weight.data)
    del model.a.weight


@pytest.mark.parametrize("share", [tied, neighbours, columns, cloned, taken_over], **named)
def test_what_shares_nothing_is_served_under_init(share):
    expected = seeded(Two, share).state_dict()

    def run(rank):
        with zs.init(stage=3):
            model = models[rank] = Two()
            model.load_state_dict(seeded_state)
            share(model)
        zs.shard(model, None, stage=3)
        return zs.full_state_dict(model)

    seeded_state, models = seeded(Two).state_dict(), {}
    for state in run_threads(2, run):
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
