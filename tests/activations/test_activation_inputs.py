"""What activation checkpoints take out of a block's arguments: tensors in tuples, lists and dicts, whatever it does to these."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from activation_kit import DIM, LAYERS, activator, every_place, gradients
from torch import Tensor, nn
from zoo import Block, same, seeded

import zeroshard as zs
from zeroshard.testing import run_threads


@dataclass
class State:
    x: Tensor


class Carrier(nn.Module):
    """Blocks take {"x": ..., "skips": (mask, [...])}, write into the dict and append to the list."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carried(dim) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x, "skips": (torch.ones(x.shape[-1]), [x])}
        for block in self.blocks:
            state = block(state, seen=[])
        assert len(state["skips"][1]) == 1 + LAYERS  # appended by each forward, and by no computation in backward
        return state["x"] + state["skips"][1][1]


class Carried(Block):
    def forward(self, state: dict, seen: list) -> dict:
        mask, skips = state["skips"]
        assert not seen
        seen.append(state["x"])
        state["x"] = super().forward(state["x"] * mask) + skips[-1]
        skips.append(torch.tanh(state["x"]))
        return state


class Boxed(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x))


class Boxes(Carrier):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxed(dim) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.x


def input_of(seed: int = 3) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@every_place
@pytest.mark.parametrize("options", [None, {"stage": 3, "map_shared": False}], ids=["plain", "sharded"])
def test_tensors_in_dicts_and_lists_are_stored(tmp_path, place, options):
    plain = seeded(Carrier, DIM)
    x = input_of()
    wanted = gradients(plain, plain(x).square().sum())
    expected = x.grad

    def body(rank: int) -> tuple:
        model, x = copy.deepcopy(plain), input_of()
        if options is not None:
            zs.shard(model, None, **options)
        activator(tmp_path)(model, place)
        model(x).square().sum().backward()
        report = zs.activation_report(model)
        grads = zs.full_gradients(model) if options is not None else {name: p.grad for name, p in model.named_parameters()}
        return grads, x.grad, report

    for grads, grad, report in run_threads(2, body):
        for name in wanted:
            same(grads[name], wanted[name], name, 0.0)
        same(grad, expected, "x", 0.0)
        # the input, then each block's x and its skip
        assert report.packed == 1 + 2 * (LAYERS - 1) and report.formula == report.packed * 4 * DIM * 4


def test_what_is_not_stored_is_said_once(tmp_path, capsys):
    model = activator(tmp_path)(seeded(Boxes, DIM), "cpu")
    for _ in range(2):
        model(input_of()).sum().backward()
    said = [line for line in capsys.readouterr().err.splitlines() if "State" in line]
    assert len(said) == LAYERS and "blocks.0 takes tensors inside a State, which are not stored" in said[0]
