"""What ranks must have in common before anything is laid out, and what each may have for itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import Stack, adamw, run_threads, same, seeded

import zeroshard as zs

X = torch.ones(2, 7)


def refused(make, **options) -> str:
    """The error of zs.shard where make(rank) -> (model, optimizer) differs: the same on both ranks, and nothing was changed."""

    def run(rank):
        model, optimizer = make(rank)
        with pytest.raises(zs.ModelMismatch) as caught:
            zs.shard(model, optimizer, **options)
        assert "_zeroshard" not in model.__dict__ and all(type(p) is nn.Parameter for p in model.parameters())
        return str(caught.value)

    first, second = run_threads(2, run)
    assert first == second
    return first


# -- optimizers ----------------------------------------------------------------------------------------------------


def by_dim(model, swapped):
    """Vectors and matrices in two groups, in either order."""
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2]}
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1]}
    return adamw([matrices, vectors] if swapped else [vectors, matrices])


OPTIMIZERS = {
    "group order": (by_dim, "rank 0: first.weight in group 1; rank 1: first.weight in group 0"),
    "group count": (
        lambda model, rank: by_dim(model, False) if rank else adamw(model.parameters()),
        "rank 0: AdamW with 1 parameter groups; rank 1: AdamW with 2 parameter groups",
    ),
    "class": (
        lambda model, rank: (torch.optim.Adam if rank else adamw)(model.parameters(), lr=0.1),
        "in optimizer options: rank 0: AdamW with 1 parameter groups; rank 1: Adam with 1 parameter groups",
    ),
    "lr": (
        lambda model, rank: adamw(model.parameters(), lr=0.1 * (1 + rank)),
        "rank 0: group 0: lr=0.1; rank 1: group 0: lr=0.2",
    ),
    "tensor lr": (
        lambda model, rank: adamw(model.parameters(), lr=torch.tensor(1.0 + rank)),
        "rank 0: group 0: lr=1.0; rank 1: group 0: lr=2.0",
    ),
    "betas": (
        lambda model, rank: adamw(model.parameters(), betas=(0.9, 0.99 - rank / 4)),
        "rank 0: group 0: betas=(0.9, 0.99); rank 1: group 0: betas=(0.9, 0.74)",
    ),
    "fewer parameters": (
        lambda model, rank: adamw(list(model.parameters())[: 3 if rank else None]),
        "rank 0: blocks.0.norm.bias in group 0; rank 1: blocks.0.norm.bias in no group",
    ),
    "none": (lambda model, rank: None if rank else adamw(model.parameters()), "parameter groups; rank 1: no optimizer"),
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_different_optimizers_are_refused(name, stage):
    make, message = OPTIMIZERS[name]

    def build(rank):
        model = seeded(Stack)
        return model, make(model, rank)

    found = refused(build, stage=stage)
    assert message in found and "in the same order, with the same options on every rank" in found


def test_optimizers_that_differ_in_nothing_that_can_be_compared_are_taken():
    def run(rank):
        model = seeded(Stack)
        optimizer = adamw([{"params": list(model.parameters()), "made_by": object(), "names": [object()]}])
        zs.shard(model, optimizer)
        model(X).sum().backward()
        optimizer.step()
        return zs.full_state_dict(model)

    first, second = run_threads(2, run)
    for name, value in first.items():
        same(second[name], value, name, 0.0)


# -- buffers -------------------------------------------------------------------------------------------------------


BUFFERS = {
    "one more": ({"mask": (3,)}, {}, "at buffer 0: rank 0: mask (3,) torch.float32; rank 1: no such buffer"),
    "shape": ({"mask": (3,)}, {"mask": (5,)}, "rank 0: mask (3,) torch.float32; rank 1: mask (5,) torch.float32"),
    "name": ({"mask": (3,)}, {"bias": (3,)}, "rank 0: mask (3,) torch.float32; rank 1: bias (3,) torch.float32"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_different_buffers_are_refused(name):
    *given, message = BUFFERS[name]

    def build(rank):
        model = seeded(Stack)
        for key, shape in given[rank].items():
            model.register_buffer(key, torch.zeros(shape))
        return model, None

    assert message in refused(build)


def test_a_model_on_meta_on_one_rank_alone_is_refused():
    def build(rank):
        model = seeded(Stack)
        return model.to("meta") if rank else model, None

    what = "first.weight (7, 7) torch.float32"
    assert f"at parameter 0: rank 0: {what}; rank 1: {what} on meta. Build" in refused(build)


# -- options -------------------------------------------------------------------------------------------------------


def test_options_that_differ_are_named_and_no_others():
    def run(rank):
        model = seeded(Stack)
        with pytest.raises(zs.ModelMismatch) as caught:
            zs.shard(model, None, stage=2 + rank, min_unit_numel=5 * rank, max_grad_norm=1.0)
        return str(caught.value)

    for message in run_threads(2, run):
        assert "in options: rank 0: stage=2, min_unit_numel=0; rank 1: stage=3, min_unit_numel=5. Build" in message


def test_fields_of_an_offload_are_named():
    def run(rank):
        model = seeded(Stack)
        with pytest.raises(zs.ModelMismatch, match=r"rank 0: offload_optimizer.ratio=0.5; rank 1: offload_optimizer.ratio=1.0"):
            zs.shard(model, adamw(model.parameters()), offload_optimizer=zs.Offload("cpu", ratio=(1 + rank) / 2))

    run_threads(2, run)


def test_a_function_that_chooses_units_is_another_object_on_each_rank():
    def run(rank):
        model = seeded(Stack)
        zs.shard(model, None, units=lambda name, module: name in ("blocks.0", "last"))
        return [unit.name for unit in model._zeroshard.units]

    first, second = run_threads(2, run)
    assert first == second and "blocks.0" in first


def test_functions_that_choose_different_units_are_refused():
    def run(rank):
        model = seeded(Stack)
        with pytest.raises(zs.ModelMismatch, match=r"rank 0: units=\['blocks.0'\]; rank 1: units=\['blocks.1'\]"):
            zs.shard(model, None, units=lambda name, module: name == f"blocks.{rank}")

    run_threads(2, run)


@pytest.mark.parametrize("own", ["path", "offload_path"])
def test_each_rank_may_have_a_swap_folder_of_its_own(tmp_path, own):
    plain = seeded(Stack)
    models = [copy.deepcopy(plain) for _ in range(2)]

    def run(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        offload, options = {"device": "nvme", "any_filesystem": True}, {}
        (offload if own == "path" else options)[own] = str(folder)
        model, optimizer = models[rank], adamw(models[rank].parameters())
        zs.shard(model, optimizer, offload_optimizer=offload, **options)
        assert list(folder.iterdir())
        model(X).sum().backward()
        optimizer.step()
        state = zs.full_state_dict(model)
        zs.close(model)
        return state

    reference = adamw(plain.parameters())
    plain(X).sum().backward()
    reference.step()
    for state in run_threads(2, run):
        for name, value in plain.state_dict().items():
            same(state[name], value, name, 1e-6)


def test_an_expanded_buffer_takes_rank_0s_value():
    """Its rows share memory: it is written once."""

    def run(rank):
        model = nn.Linear(3, 3)
        model.register_buffer("mask", torch.full((1, 3), float(rank)).expand(4, 3))
        model, _ = zs.shard(model, None, stage=2)
        assert torch.equal(model.mask, torch.zeros(4, 3)) and model.mask.stride() == (0, 1)

    run_threads(2, run)
