"""Units that are found, and modules whose parents compute with their parameters: equal to one process; what else is refused, with the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import Case, Stack, check, every_mode, normal_batches, run_threads, seeded, square

import zeroshard as zs
from zeroshard.config import Config
from zeroshard.policies import collect, partition


class Beside(Stack):
    """Blocks, and beside them attention whose projection is as large as a block."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__(dim, 2, Half)
        self.mix = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(x, x, x, need_weights=False)[0])


class Half(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 11, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def tiled() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True)
    return zs.tile(layer, max_bytes=600)  # the feed-forward maps, not the attention


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


CASES = {
    "beside blocks": (Beside, {}),
    "max_unit_numel": (Beside, {"max_unit_numel": 30}),
    "decoder layer": (Decoder, {"max_unit_numel": 30}),
    "tiled": (tiled, {}),
    "by class": (Beside, {"units": (nn.Linear,)}),
    "by function": (Beside, {"units": is_linear}),
}


@every_mode
@pytest.mark.parametrize("kind", CASES)
def test_attention_reads_its_projection_wherever_it_stands(mode, kind):
    build, options = CASES[kind]
    tolerance = 1e-6 if kind == "tiled" else 0.0
    check(Case(seeded(build), normal_batches(2, 2, 2, 4, 8), square, tolerance=tolerance), **options, **mode)


@pytest.mark.parametrize("kind", CASES)
def test_a_module_that_is_never_called_is_no_unit(kind):
    build, options = CASES[kind]
    model, config = build(), Config(**options)
    plans = partition(model, config, collect(model, config))
    entered = {id(plan.modules[0]) for plan in plans if len(plan.modules) == 1}
    names = {name for name, module in model.named_modules() if id(module) in entered}
    assert not any(name.endswith("out_proj") for name in names), names


# -- what is refused ----------------------------------------------------------------------------------------------


def test_other_operations_name_what_gives_whole_tensors():
    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters()))
        model(torch.ones(2, 7)).sum().backward()
        with pytest.raises(zs.ShardedAccessError, match=r"gradient of first\.weight.*full_tensor\(\).*zs\.full_gradients"):
            model.first.weight.grad.cumsum(0)
        with pytest.raises(zs.ShardedAccessError, match=r"of first\.weight.*p\.full_tensor\(\).*zs\.gathered\(module\)"):
            model.first.weight.cumsum(0)
        with torch.no_grad(), pytest.raises(zs.ShardedWriteError, match=r"first\.weight.*zs\.gathered\(module, write=True\)"):
            model.first.weight.index_fill_(0, torch.tensor([0]), 1.0)

    run_threads(2, run)
