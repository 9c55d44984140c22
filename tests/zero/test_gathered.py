"""zs.gathered: whole parameters for a while; what is written inside is kept only if announced and equal on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import Block, Stack, adamw, run_threads, same, seeded, square

import zeroshard as zs

STAGES = [{"stage": 1}, {"stage": 3}, {"stage": 3, "map_shared": False}, {"stage": 3, "precision": "bf16"}]


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_b17_gathered_reads_computes_and_writes(options):
    base = seeded(Stack)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
        own = {n: id(p) for n, p in model.named_parameters()}
        with zs.gathered(model):
            assert all(isinstance(p, nn.Parameter) and not hasattr(p, "_home") for p in model.parameters())
            values = {n: p.detach().float().clone() for n, p in model.named_parameters()}
            out = model(torch.ones(2, 7))
        with zs.gathered(model.blocks[1], write=True) as block:
            nn.init.constant_(block.up.weight, 0.25)
            block.up.bias.data.copy_(torch.arange(14.0))
        assert own == {n: id(p) for n, p in model.named_parameters()}
        changed = zs.full_state_dict(model, masters=True)
        square(model, (torch.ones(2, 7),)).backward()
        optimizer.step()
        return values, out, changed

    tolerance = 0.01 if "precision" in options else 0.0
    for values, out, changed in run_threads(2, run):
        for name, value in base.state_dict().items():
            same(values[name], value, name, tolerance)
        assert torch.allclose(out.float(), base(torch.ones(2, 7)), atol=0.05)
        assert (changed["blocks.1.up.weight"] == 0.25).all() and changed["blocks.1.up.bias"].tolist() == list(range(14))
        same(changed["blocks.0.up.weight"].float(), base.state_dict()["blocks.0.up.weight"], "untouched", tolerance)


def set_first(model, rank):
    with torch.no_grad():
        model.blocks[0].up.weight[0, 0] = 5.0


def set_on_one_rank(model, rank):
    with torch.no_grad():
        model.blocks[0].up.weight[-1 if rank == 0 else 0, 0] = 5.0  # rank 0 writes what rank 1 holds


def replace(model, rank):
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(14, 7))


def run_backward(model, rank):
    square(model, (torch.ones(2, 7),)).backward()


MISUSES = {
    "undeclared": (set_first, False, "written inside zs.gathered.. without write=True.*blocks.0.up.weight.*rank"),
    "undeclared elsewhere": (set_on_one_rank, False, "without write=True.*blocks.0.up.weight"),
    "differing": (set_on_one_rank, True, r"blocks.0.up.weight: ranks \[1\] wrote other values than rank 0"),
    "replaced": (replace, True, "replaced inside zs.gathered.*blocks.0.up.weight"),
    "backward": (run_backward, False, "gradient inside zs.gathered"),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_b17_misuse_of_gathered_raises_on_every_rank_and_keeps_nothing(options, misuse):
    action, write, message = MISUSES[misuse]
    base = seeded(Stack)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, **options)
        before = zs.full_state_dict(model)
        with pytest.raises(zs.ShardedWriteError, match=message), zs.gathered(model, write=write):
            action(model, rank)
        after = zs.full_state_dict(model)
        square(model, (torch.ones(2, 7),)).backward()
        return before, after, zs.full_gradients(model)

    for before, after, grads in run_threads(2, run):
        for name in before:
            same(after[name], before[name], name, 0.0)
        assert all(g is not None for g in grads.values())


def test_an_exception_inside_gathered_passes_and_leaves_the_model_sharded():
    def run(rank):
        model, _ = zs.shard(seeded(Stack), None, stage=3, map_shared=False)
        with pytest.raises(KeyError), zs.gathered(model, write=True):
            model.first.weight.data.zero_()
            raise KeyError("mine")
        with pytest.raises(zs.ZeroshardError, match="gathered already"), zs.gathered(model), zs.gathered(model):
            pass
        return zs.full_state_dict(model)["first.weight"], zs.report(model).peak["gathered units"], model(torch.ones(1, 7))

    for weight, _, _ in run_threads(2, run):
        assert weight.abs().sum() > 0
    with pytest.raises(zs.ZeroshardError, match="zs.shard first"), zs.gathered(Block(3)):
        pass
