"""deepspeed.runtime.zero.linear and .tiling: a linear layer with its own autograd function, and one made of tiles.

With DeepSpeed, programs use these classes in place of torch.nn.Linear to save memory at stage 3. zeroshard saves the memory for
every module, so here they only compute the same values as torch's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .accelerator import get_accelerator
from .partition import GatheredParameters

_DEVICE = get_accelerator().device_name()
autocast_custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=_DEVICE)  # decorators that programs import from here
autocast_custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=_DEVICE)


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """Compute y = x @ weight.T + bias; backward runs under the autocast state of the forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        input, weight, *_ = inputs
        ctx.save_for_backward(input, weight)
        ctx._fwd_used_autocast = torch.is_autocast_enabled(input.device.type)
        ctx._dtype = torch.get_autocast_dtype(input.device.type)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(input.device.type, dtype=ctx._dtype, enabled=ctx._fwd_used_autocast):
            of_input = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            of_weight = rows.t().matmul(input.reshape(-1, input.shape[-1])) if ctx.needs_input_grad[1] else None
            of_bias = rows.sum(0) if len(ctx.needs_input_grad) > 2 and ctx.needs_input_grad[2] else None
        return (of_input, of_weight, of_bias)[: len(ctx.needs_input_grad)]


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch.nn.functional.linear with LinearFunctionForZeroStage3."""
    return LinearFunctionForZeroStage3.apply(input, weight, bias)


class LinearModuleForZeroStage3(nn.Linear):
    """torch.nn.Linear with `zero3_linear_wrap` as its forward."""

    def forward(self, input: Tensor) -> Tensor:
        return zero3_linear_wrap(input, self.weight, self.bias)


class TiledLinear(nn.Module):
    """Linear layer made of tiles: `linears[o][i]` maps part i of the features to part o of the outputs.

    `in_parts` and `out_parts` are the bounds of the parts. The tiles of the last part of the features hold the bias.

    Args:
        in_splits, out_splits: number of parts of the features, and of the outputs.
        input_is_already_split: forward takes the parts of its input as a list.
        combine_out_splits: if False, forward returns the parts of the output as a list.
        linear_cls: class of the tiles, called with (features, outputs, bias=..., **kwargs).
        init_linear: a layer of the same sizes, whose values are copied.

    Raises RuntimeError for less than one part, or more parts than features or outputs.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
        input_is_already_split: bool = False, combine_out_splits: bool = True, linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None, **kwargs: object,
    ) -> None:  # fmt: skip
        super().__init__()
        for what, parts, size in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= parts <= size:
                raise RuntimeError(f"TiledLinear: {what}: expected a number from 1 to {size}, got {parts}.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = [in_features * part // in_splits for part in range(in_splits + 1)]
        self.out_parts = [out_features * part // out_splits for part in range(out_splits + 1)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, rows, bias=bias and stop == in_features, **kwargs)
                for start, stop in itertools.pairwise(self.in_parts)
            )
            for rows in (stop - start for start, stop in itertools.pairwise(self.out_parts))
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        parts = input_
        if not self.input_is_already_split:
            parts = input_.split([stop - start for start, stop in itertools.pairwise(self.in_parts)], dim=-1)
        assert len(parts) == self.in_splits, f"TiledLinear: expected {self.in_splits} parts of the input, got {len(parts)}"
        outputs = []
        for row in self.linears:
            total = None
            for tile, part in zip(row.children(), parts, strict=True):
                total = self._add(total, tile(part))
            outputs.append(total)
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _add(self, total: Any, new: Any) -> Any:
        return new if total is None else total + new

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of a layer of the same sizes (at stage 3 collective)."""
        assert other.weight.shape == (self.out_features, self.in_features), (
            f"copy_params_from: expected a weight of shape {(self.out_features, self.in_features)}, got {other.weight.shape}"
        )
        assert (getattr(other, "bias", None) is not None) == self.use_bias, (
            f"copy_params_from: expected a layer {'with' if self.use_bias else 'without'} a bias, as this one is"
        )
        with GatheredParameters([*self.parameters(), *other.parameters()], modifier_rank=0):
            for row, (top, bottom) in zip(self.linears, itertools.pairwise(self.out_parts), strict=True):
                for tile, (start, stop) in zip(row.children(), itertools.pairwise(self.in_parts), strict=True):
                    tile.weight.copy_(other.weight[top:bottom, start:stop])  # type: ignore[operator,index]
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[top:bottom])  # type: ignore[operator,index]


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear of layers that return (output, bias), for the caller to add, as Megatron's do."""

    def _add(self, total: Any, new: Any) -> Any:
        assert isinstance(new, tuple) and len(new) == 2, (
            f"TiledLinearReturnBias: expected (output, bias) of a tile, got {type(new).__name__}"
        )
        output, bias = new
        return new if total is None else (total[0] + output, total[1] if bias is None else bias)

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([output for output, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None
