"""Tiled experts: the weights of a mixture of experts, (experts, ..., ...) each, cut between experts.

    experts.gate_up_proj (E, 2 I, H), down_proj (E, H, I)    ->    the same of tiles.k: experts [start_k, stop_k)

    choices (token, expert, weight), sorted by expert      | tile 0      | tile 1   | tile 2         |
    each tile computes its choices as tokens with one expert each; a token's output is the sum of its rows

Classes with Transformers' common interface of experts (`use_experts_implementation`, with any implementation) are supported:
forward(hidden (T, H), index (T, K), weights (T, K)) is the sum over k of weight * expert(hidden). The class of a tile derives from
the class of the experts (utils/joined_class.py), and so has its implementation, activations and `_init_weights`. All tiles run in
every forward, so that all ranks gather the same units; as without tiles, an expert without tokens gets zeros as gradient.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import Tile, Tiled
from ..seam import Part
from ..utils import torch_compat
from ..utils.joined_class import Joined, new_joined
from ..utils.torch_compat import is_distributed
from ..utils.transformers_compat import spread_experts


class ExpertsTile(Joined, Tile):
    """Tile with some of the experts. The class of each tile is joined with the experts' class, whose forward it runs."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return (S, H) for hidden (S, H), index (S, 1) relative to the tile's first expert, weights (S, 1)."""
        if not len(hidden):
            return Idle.apply(hidden, *torch_compat.own_parameters(self).values())
        return super().forward(hidden, index, weights)


class TiledExperts(Tiled):
    """A module of experts cut into tiles, with the same inputs, outputs and attributes."""

    stands_for: type[nn.Module]

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return (T, H) for hidden (T, H), index (T, K), weights (T, K), however the class names these arguments."""
        bound = inspect.signature(self.stands_for.forward).bind(self, *args, **kwargs).arguments
        hidden, index, weights = list(bound.values())[1:]
        experts, order = index.flatten().sort(stable=True)  # stable: an expert sees its tokens in the order of the batch
        parts = [next(iter(tile.parts.values())) for tile in self.tiles]
        starts = torch.tensor([part.start for part in parts], device=experts.device)
        begins = [*torch.searchsorted(experts, starts).tolist(), len(experts)]
        rows = []
        for tile, part, begin, stop in zip(self.tiles, parts, begins, begins[1:], strict=False):
            chosen = order[begin:stop]
            local, weight = experts[begin:stop] - part.start, weights.flatten()[chosen]
            rows.append(tile(hidden[chosen // index.shape[-1]], local.unsqueeze(-1), weight.unsqueeze(-1)))
        back = torch.empty_like(order)  # the inverse permutation of `order`
        back[order] = torch.arange(len(order), device=order.device)
        # back in the order of tokens; the sum is over the K choices
        return torch.cat(rows)[back].unflatten(0, index.shape).sum(dim=-2)

    def extra_repr(self) -> str:
        return f"{self.stands_for.__name__}, {self.num_experts} experts, cut into tiles"


class Idle(torch.autograd.Function):
    """Identity function in place of experts that have no tokens, in a tile or on a rank: their parameters get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.described = [(param.shape, param.dtype, param.device) for param in params]
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        zeros = []
        for (shape, dtype, device), wanted in zip(ctx.described, ctx.needs_input_grad[1:], strict=True):
            zeros.append(torch.zeros(shape, dtype=dtype, device=device) if wanted else None)
        return grad, *zeros


def why_not(module: nn.Module, name: str) -> str | None:
    """Return why a module of experts cannot be cut, or None. name: the module's name, for the message."""
    if spread_experts(module) or any(map(is_distributed, torch_compat.own_parameters(module).values())):
        return f"the experts of {name} are spread over ranks already"
    for attribute, param in torch_compat.own_parameters(module).items():
        if param is not None and (param.dim() == 0 or len(param) != module.num_experts):
            return f"{name}.{attribute} {tuple(param.shape)} is not divided by the {module.num_experts} experts"
    for kind, tensors in (("parameters", module.named_parameters()), ("buffers", module.named_buffers())):
        common = [each for each, _ in tensors if kind == "buffers" or "." in each]
        if common:
            return f"{name} has {kind} that its experts share: {', '.join(common)}"
    return None


def make_tiles(module: nn.Module, weights: dict[str, list[nn.Parameter]], parts: dict[str, list[Part]]) -> list[ExpertsTile]:
    """Return the tiles of a module of experts. weights, parts: attribute -> one for each tile."""
    tiles = []
    for number, part in enumerate(next(iter(parts.values()))):
        tile = new_joined(ExpertsTile, type(module))
        nn.Module.__init__(tile)
        tile.__dict__.update({key: value for key, value in module.__dict__.items() if key not in tile.__dict__})
        for name, child in torch_compat.own_modules(module).items():  # activations: no parameters
            tile.register_module(name, child)
        for attribute in torch_compat.own_parameters(module):
            tile.register_parameter(attribute, weights[attribute][number] if attribute in weights else None)
        tile.__dict__["num_experts"] = part.stop - part.start
        tile.parts = {a: each[number] for a, each in parts.items()}
        tiles.append(tile)
    return tiles
