"""Tiled nn.Linear and nn.Embedding: their tiles, and the modules that run these one after another.

    Linear, rows       y = [x W_0^T + b_0, x W_1^T + b_1, ...]      every output as before; dx is a sum over tiles
    Linear, columns    y = ((x_0 W_0^T + b) + x_1 W_1^T) + ...      every dx as before; y is a sum over tiles
    Embedding          y[i] = W_k[token_i - start_k], k the tile that has the row: selected, no sums

Each tile is gathered before its forward and released after it, and again in backward, where its gradient is reduced at once.
Tiles derive from nn.Linear and nn.Embedding, so that initialisation by class (`_init_weights`) reaches their weights.
ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..axes import Tile, Tiled
from ..seam import Part
from .cross_entropy import LogitStatistics

_NORMAL_CHUNK = 16  # number of normal values that torch draws as a group on the CPU


def _no_reset(tile: Tile) -> None:
    raise AttributeError("a tile has no reset_parameters: call that of the tiled layer, which initialises all its tiles")


class LinearTile(Tile, nn.Linear):
    """Tile of a Linear: rows (outputs, with their biases) or columns (inputs; the first tile has the bias)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, parts: dict[str, Part]) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.parts = weight, parts
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, labels: Tensor | None = None, with_total: bool = False) -> Any:
        """Return (..., out_features) for x (..., in_features). With labels (N,): the `LogitStatistics` of the logits."""
        if labels is not None:
            return LogitStatistics.apply(x, self.weight, self.bias, labels, with_total)
        return F.linear(x, self.weight, self.bias)

    reset_parameters = property(_no_reset)


class EmbeddingTile(Tile, nn.Embedding):
    """Tile of an Embedding: rows. padding_idx is relative to the tile's first row, and None in the other tiles."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None, parts: dict[str, Part]) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight, self.padding_idx, self.parts = weight, padding_idx, parts
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    reset_parameters = property(_no_reset)


class TiledLinear(Tiled):
    """A Linear cut into tiles, with the same inputs and outputs."""

    stands_for = nn.Linear
    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features) for x (..., in_features)."""
        if self.dim == 0:
            return torch.cat([tile(x) for tile in self.tiles], dim=-1)
        total: Any = None
        for tile in self.tiles:
            part = tile.parts["weight"]
            partial = tile(x[..., part.start : part.stop])
            total = partial if total is None else total + partial
        return total

    def reset_parameters(self) -> None:
        """Initialise as nn.Linear does: the same draws in the same order (on the CPU the same values)."""
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bound = math.sqrt(3.0) * (gain / math.sqrt(self.in_features))  # kaiming_uniform_(a=sqrt(5))
        with torch.no_grad():
            if self.dim == 0:
                for tile in self.tiles:
                    tile.weight.uniform_(-bound, bound)
            else:
                for row in range(self.out_features):  # nn.Linear draws row by row, and each tile has a part of every row
                    for tile in self.tiles:
                        tile.weight.data[row].uniform_(-bound, bound)
            for tile in self.tiles:
                if tile.bias is not None:
                    tile.bias.uniform_(-1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))

    def extra_repr(self) -> str:
        kind = "rows" if self.dim == 0 else "columns"
        return f"in_features={self.in_features}, out_features={self.out_features}, in tiles of {kind}"


class TiledEmbedding(Tiled):
    """An Embedding cut into tiles, with the same inputs and outputs."""

    stands_for = nn.Embedding
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (..., embedding_dim) for tokens (...). Every tile looks up every token, and the result of the owner is used."""
        out: Any = None
        last = len(self.tiles) - 1
        for number, tile in enumerate(self.tiles):
            start, rows = tile.parts["weight"].start, tile.num_embeddings
            # the first tile is not clamped from below nor the last from above: tokens outside the vocabulary raise, as in torch
            local = (tokens - start).clamp(min=0 if number else None, max=rows - 1 if number < last else None)
            found = tile(local)
            out = found if out is None else torch.where((tokens >= start).unsqueeze(-1), found, out)
        return out

    def reset_parameters(self) -> None:
        """Initialise as nn.Embedding does: the same draws in the same order (on the CPU the same values)."""
        with torch.no_grad():
            _draw_normal([tile.weight for tile in self.tiles])
            for tile in self.tiles:
                if tile.padding_idx is not None:
                    tile.weight[tile.padding_idx].fill_(0)

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, in tiles of rows"


def _draw_normal(tensors: list[Tensor]) -> None:
    """Fill tensors one after another with the values that one normal_() over their concatenation would give.

    On the CPU torch draws groups of 16 values, and draws the last 16 again if the length is no multiple of 16. So every draw
    here ends at a multiple of 16, and the last one has at least 16 values; values past a tensor's end go to the next tensor.
    """
    total, drawn, end = sum(tensor.numel() for tensor in tensors), 0, 0
    pending = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor in tensors:
        end += tensor.numel()
        stop = -(-end // _NORMAL_CHUNK) * _NORMAL_CHUNK
        stop = total if total - stop < _NORMAL_CHUNK else stop
        fresh = torch.empty(stop - drawn, dtype=pending.dtype, device=pending.device).normal_()
        pending, drawn = torch.cat([pending, fresh]), stop
        tensor.copy_(pending[: tensor.numel()].view(tensor.shape))
        pending = pending[tensor.numel() :]
