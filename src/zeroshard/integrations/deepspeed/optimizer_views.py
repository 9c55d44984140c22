"""What scripts read of the inside of DeepSpeed's optimizers: slices of masters and gradients, groups, the loss scale.

All are pictures, made when they are asked for: who writes uses `deepspeed.utils.safe_set_*`. A slice is what this rank holds of a
parameter, flat, as `safe_get_local_*` cuts it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.codec import exchange_values
from ...optim.parameter_access import OptimizerStatePart, ParameterPart, gradient_of, state_of, value_of
from .leaf_modules import get_z3_leaf_modules


class OptimizerViews:
    """Mixed into the engine's optimizer, which has `.optimizer`, the sharded one, and `_config`."""

    optimizer: Any
    _config: Any

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each optimizer group."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    fp16_groups = fp32_groups = bit16_groups

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Slices of the mean gradients, by optimizer group; of parameters that have none there are none."""
        slices = {i: [gradient_of(param).local() for param in group] for i, group in enumerate(self.bit16_groups)}
        found = {i: [each for each in group if each is not None] for i, group in slices.items()}
        return {i: group for i, group in found.items() if group}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Slices of the mean gradients in fp32, by optimizer group and place in it."""
        slices = {i: [gradient_of(param).local() for param in group] for i, group in enumerate(self.bit16_groups)}
        return {i: {j: each.float() for j, each in enumerate(group) if each is not None} for i, group in slices.items()}

    @property
    def fp32_groups_gradients_flat(self) -> list[Tensor]:
        """The whole mean gradients of each optimizer group, one behind the other, in fp32 (collective)."""
        whole = [[gradient_of(param).full() for param in group] for group in self.bit16_groups]
        return [torch.cat([each.float().reshape(-1) for each in group if each is not None]) for group in whole]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Slices of the masters of each optimizer group, one behind the other, in fp32."""
        return [torch.cat([value_of(param).local().float() for param in group]) for group in self.bit16_groups]

    single_partition_of_fp32_groups = fp32_groups_flat = fp32_partitioned_groups_flat

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, Tensor]:
        """Empty: gradients that rest on the host are accumulated where they rest."""
        return {}

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each leaf module (`set_z3_leaf_modules`)."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self.optimizer.core.runtime.model)}

    def _get_norm_groups(self) -> list[Tensor]:
        """The norm of the mean gradient of each optimizer group, over all ranks (collective)."""
        groups = self.get_fp32_grad_partitions()
        squares = [float(sum(each.square().sum() for each in groups.get(i, {}).values())) for i in range(len(self.bit16_groups))]
        comm = self.optimizer.core.runtime.comm
        everyone = [squares] if comm.world_size == 1 else exchange_values(comm, squares, "norms of gradients")
        return [torch.tensor(sum(theirs)).sqrt() for theirs in zip(*everyone, strict=True)]

    def flat_picture(self) -> torch.optim.Optimizer:
        """A torch optimizer whose groups each have one parameter, as DeepSpeed's at stage 3 (collective): this rank's slices of the
        masters and of the states, one behind the other, each parameter cut into equal parts that are padded with zeros.

        A copy: what is written into it is not kept.
        """
        picture = torch.optim.Optimizer([{**group, "params": [torch.empty(0)]} for group in self.optimizer.param_groups], {})
        for group, params in zip(picture.param_groups, self.bit16_groups, strict=True):
            group["params"] = [_flat([value_of(param) for param in params])]
            parts = [OptimizerStatePart(param, "") for param in params]
            for key in dict.fromkeys(name for part in parts for name in part.names()):
                picture.state[group["params"][0]][key] = _flat([state_of(param, key) for param in params])
        return picture

    @property
    def micro_step_id(self) -> int:
        """Backwards since the last step."""
        return self.optimizer.core.runtime.account.backwards

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """Of parameters in forward and backward."""
        return self._config.model_dtype

    @property
    def loss_scale_config(self) -> SimpleNamespace:
        """Of a loss scale: whether it is dynamic, its value, steps asked for, and by which rules it changes."""
        core, fp16 = self.optimizer.core, self._config.float16_config
        scaler = core.runtime.progress.scaler
        dynamic = scaler is not None and scaler.dynamic
        rules = {"scale_window": fp16.loss_scale_window, "min_loss_scale": fp16.min_loss_scale, "scale_factor": 2.0}
        return SimpleNamespace(
            dynamic_loss_scale=dynamic, cur_scale=1.0 if scaler is None else scaler.scale, cur_iter=core.tally.asked,
            cur_hysteresis=scaler.patience if dynamic else 1, low_precision_dtype=self.low_precision_dtype,
            **(rules if dynamic else {}),
        )  # fmt: skip


class LossScalerView:
    """The loss scaler under DeepSpeed's names: what it is now, also in later steps. The rest is zeroshard's own."""

    scale_factor = 2.0

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core.runtime.progress.scaler, name)

    @property
    def cur_scale(self) -> float:
        return self.scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps asked for, those that were skipped among them."""
        return self._core.tally.asked

    @property
    def cur_hysteresis(self) -> int:
        return self.patience

    @property
    def scale_window(self) -> int:
        """Steps without an overflow after which the scale is doubled."""
        return self.config.loss_scale_window

    @property
    def min_scale(self) -> float:
        return self.config.min_loss_scale


def _flat(parts: list[ParameterPart]) -> Any:
    """This rank's slices of whole tensors in fp32, padded to equal ones, one behind the other; of plain values the first (collective)."""
    found = []
    for part in parts:
        whole, comm = part.full(), part.group.comm
        if whole is None:  # of a parameter without a gradient
            whole = torch.zeros(part.shape)
        if not isinstance(whole, Tensor) or (not whole.dim() and part.shape):  # a count of steps
            return whole
        size = -(-whole.numel() // comm.world_size)
        slice_ = whole.reshape(-1)[comm.rank * size : (comm.rank + 1) * size].float()
        found.append(nn.functional.pad(slice_, (0, size - slice_.numel())))
    return torch.cat(found)
