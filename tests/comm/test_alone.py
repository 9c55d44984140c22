"""A process group of one rank: nothing is sent, and everything is summed all the same."""

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs


def losses(**options) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if options:
        zs.shard(model, optimizer, **options)
    inputs, found = torch.randn(4, 6, generator=generator), []
    for _ in range(4):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("comm", ["auto", "dist"])
def test_every_stage_trains_alone_as_without(comm):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = losses()
        for stage in range(4):
            assert losses(stage=stage, comm=comm) == pytest.approx(expected, abs=1e-6), f"stage {stage}"
    finally:
        dist.destroy_process_group()
