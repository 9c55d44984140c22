"""What the tests of tiles share: models, modes, and the bound on gathered memory."""

import copy

import pytest
import torch.nn.functional as F
from helpers import OddGPT, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.axes.tiled_parameter import Tile
from zeroshard.engine.runtime import runtime_of

VOCAB, DIM = 257, 7
EPS, EPS_BF16 = 2.0**-23, 2.0**-8
STAGE3 = {"stage": 3, "map_shared": False}
MODES = [
    pytest.param({"stage": 0}, id="stage0"),
    pytest.param({"stage": 2}, id="stage2"),
    pytest.param({"stage": 3, "map_shared": True}, id="stage3-mapped"),
    pytest.param(STAGE3, id="stage3"),
]


class LossGPT(OddGPT):
    """An OddGPT whose loss never has all logits."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return zs.tiled_cross_entropy(self.norm(x), self.head, targets)


class Checkpointed(OddGPT):
    """Every block, and the head, is computed again in backward."""

    reentrant = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=self.reentrant)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def gpt(cls: type = OddGPT, tied: bool = True, vocab: int = VOCAB, dim: int = DIM) -> nn.Module:
    return seeded(lambda: cls(dim=dim, layers=2, vocab_size=vocab, tied=tied))


def tiled(model: nn.Module, tiles: int, rows: int = VOCAB, dim: int = DIM) -> nn.Module:
    """A tiled copy: weights of (rows, dim) in so many tiles."""
    return zs.tile(copy.deepcopy(model), max_bytes=-(-rows // tiles) * dim * 4)


def tiles_of(model: nn.Module) -> list[Tile]:
    return [module for module in model.modules() if isinstance(module, Tile)]


def peak_bound(model: nn.Module) -> int:
    """Root unit (gathered while the model runs) + the largest block + one tile: what may be gathered at one time."""
    units = runtime_of(model).units
    tiles = [u for u in units if isinstance(u.modules[0], Tile)]
    root = [u for u in units if model in u.modules]
    blocks = [u for u in units if u not in tiles and u not in root]
    assert len(tiles) > 2, "the bound says nothing without several tiles"
    return sum(max((u.gathered_nbytes for u in part), default=0) for part in (tiles, root, blocks))
