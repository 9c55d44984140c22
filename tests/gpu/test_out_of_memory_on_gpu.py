"""A device that has no memory: the allocator's own error in forward, backward, step and zs.shard, told without memory of the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.guard import out_of_memory

pytestmark = pytest.mark.gpu
WIDTH = 128


def too_much() -> torch.Tensor:
    """More than the device has."""
    return torch.empty(torch.cuda.get_device_properties(0).total_memory + 1, dtype=torch.uint8, device="cuda")


class Grad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        too_much()
        return grad


class Hungry(nn.Module):
    meal = ""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.meal == "forward":
            too_much()
        return Grad.apply(x) if self.meal == "backward" else x


class HungrySGD(torch.optim.SGD):
    hungry = False

    def step(self, closure=None):
        if HungrySGD.hungry:
            too_much()
        return super().step(closure)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", [1, 3])
def test_told_on_a_device(stage, where, monkeypatch):
    model = Hungry().cuda()
    model, optimizer = zs.shard(model, HungrySGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage)
    batch = torch.ones(64, WIDTH, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    tell, grown = out_of_memory.tell_shortage, []

    def watched(*args):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            tell(*args)
        finally:
            grown.append(torch.cuda.max_memory_allocated() - before)

    monkeypatch.setattr(out_of_memory, "tell_shortage", watched)
    step()
    Hungry.meal, HungrySGD.hungry = where, where == "step"
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step()
    finally:
        Hungry.meal, HungrySGD.hungry = "", False
    assert type(caught.value) is zs.DeviceMemoryError and type(caught.value.__cause__) is torch.OutOfMemoryError
    text = str(caught.value)
    for words in ("of step 2", "parameters", "optimizer states", "activations, and what else torch has", "  1. "):
        assert words in text, text
    assert "could not be computed" not in text and grown and not any(grown)
    optimizer.zero_grad()
    step()
    zs.close(model)


def test_a_model_that_does_not_fit_is_told_by_shard():
    numel = torch.cuda.get_device_properties(0).total_memory // 4
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, numel // WIDTH // 4, bias=False) for _ in range(5)))
    with pytest.raises(zs.DeviceMemoryError, match=r"had no memory for this in zs\.shard \(stage 2, bf16\)"):
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2, precision="bf16", units="leaf")
