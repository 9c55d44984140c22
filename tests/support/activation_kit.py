"""What the tests of activation checkpoints share: tiny options, models that checkpoint by themselves, gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Stack

import zeroshard as zs
from zeroshard.activations.checkpoint import attached_to

DIM, LAYERS = 8, 3
PLACES = ["none", "cpu", "nvme"]
every_place = pytest.mark.parametrize("place", PLACES)


def activator(folder: Path) -> Callable[..., nn.Module]:
    """zs.checkpoint_activations for models whose activations are tiny, with a folder for its files."""

    def activate(model, place="none", **options):
        path = str(folder) if place == "nvme" else None
        options = {"min_numel": 1, **options}
        return zs.checkpoint_activations(model, offload=place, path=path, **options)

    return activate


def store_of(model):
    return attached_to(model).store


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class Own(Stack):
    """Calls checkpoint by itself, with a parameter and a mask among the inputs; saves tensors outside of it too."""

    reentrant = False

    def forward(self, x):
        mask = torch.ones(x.shape[-1])
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            run = lambda x, mask, weight, block=block: block(x * mask) * weight.mean()  # noqa: E731
            x = checkpoint(run, x, mask, self.first.weight, use_reentrant=self.reentrant)
        return self.last(torch.tanh(x))


class OwnReentrant(Own):
    reentrant = True


class Nested(Stack):
    def forward(self, x):
        def pair(x):
            return checkpoint(self.blocks[1], checkpoint(self.blocks[0], x, use_reentrant=False), use_reentrant=False)

        return self.last(self.blocks[2](checkpoint(pair, self.first(x), use_reentrant=False)))
