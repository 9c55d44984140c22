"""Internal attributes of DeepSpeed's optimizers that scripts read: slices of masters and gradients, groups, the loss scale.

Each read of such an attribute makes a copy; to write, use `deepspeed.utils.safe_set_*`. A slice is this rank's part of a
parameter, flat, as `safe_get_local_*` returns it.
"""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.codec import exchange_values
from ...optim.parameter_access import OptimizerStatePart, ParameterPart, gradient_of, state_of, value_of
from ...optim.sharded_optimizer import OptimizerCore
from .accelerator import always
from .ds_config import DeepSpeedConfig
from .leaf_modules import get_z3_leaf_modules


class OptimizerViews:
    """Mixin of the engine's optimizer, which has `.optimizer` (the sharded one) and `_config`."""

    optimizer: Any
    _config: DeepSpeedConfig

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """Parameters of each optimizer group."""
        return [list(group["params"]) for group in self.optimizer.param_groups]

    fp16_groups = fp32_groups = bit16_groups

    def _gradients(self) -> dict[int, dict[int, Tensor]]:
        """Return slices of the mean gradients that there are, by optimizer group and index in it."""
        slices = {i: [gradient_of(param).local() for param in group] for i, group in enumerate(self.bit16_groups)}
        return {i: {j: each for j, each in enumerate(group) if each is not None} for i, group in slices.items()}

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Slices of the mean gradients, by optimizer group, without parameters that have no gradient."""
        return {i: list(group.values()) for i, group in self._gradients().items() if group}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return slices of the mean gradients in fp32, by optimizer group and index in it."""
        return {i: {j: each.float() for j, each in group.items()} for i, group in self._gradients().items()}

    @property
    def fp32_groups_gradients_flat(self) -> list[Tensor]:
        """Whole mean gradients of each optimizer group, concatenated, in fp32 (collective)."""
        whole = [[gradient_of(param).full() for param in group] for group in self.bit16_groups]
        return [torch.cat([each.float().reshape(-1) for each in group if each is not None]) for group in whole]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Slices of the masters of each optimizer group, concatenated, in fp32."""
        return [torch.cat([value_of(param).local().float() for param in group]) for group in self.bit16_groups]

    single_partition_of_fp32_groups = fp32_groups_flat = fp32_partitioned_groups_flat

    # zeroshard accumulates offloaded gradients in their shards, without buffers of their own
    accumulated_grads_in_cpu = property(always({}))

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Parameters of each leaf module (`set_z3_leaf_modules`)."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self.optimizer.core.runtime.model)}

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of the mean gradient of each optimizer group, over all ranks (collective)."""
        groups = self.get_fp32_grad_partitions()
        squares = [float(sum(each.square().sum() for each in groups.get(i, {}).values())) for i in range(len(self.bit16_groups))]
        comm = self.optimizer.core.runtime.comm
        everyone = [squares] if comm.world_size == 1 else exchange_values(comm, squares, "norms of gradients")
        return [torch.tensor(sum(theirs)).sqrt() for theirs in zip(*everyone, strict=True)]

    def flat_picture(self) -> torch.optim.Optimizer:
        """Return a torch optimizer with one flat parameter for each group, as in DeepSpeed at stage 3 (collective).

        The parameter, and its states, are this rank's slices of masters and states, concatenated; each parameter is divided into
        equal slices, padded with zeros. It is a copy: writes to it have no effect.
        """
        picture = torch.optim.Optimizer([{**group, "params": [torch.empty(0)]} for group in self.optimizer.param_groups], {})
        for group, params in zip(picture.param_groups, self.bit16_groups, strict=True):
            group["params"] = [_flat([value_of(param) for param in params])]
            parts = [OptimizerStatePart(param, "") for param in params]
            for key in dict.fromkeys(name for part in parts for name in part.names()):
                picture.state[group["params"][0]][key] = _flat([state_of(param, key) for param in params])
        return picture

    micro_step_id = property(attrgetter("optimizer.core.runtime.account.backwards"))  # number of backwards since the last step
    low_precision_dtype = property(attrgetter("_config.model_dtype"))  # dtype of parameters in forward and backward

    @property
    def loss_scale_config(self) -> SimpleNamespace:
        """Settings of the loss scale: whether it is dynamic, its value, number of steps, and how it grows and shrinks."""
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
    """Live view of the loss scaler with DeepSpeed's names. Other attributes are those of zeroshard's scaler."""

    scale_factor = 2.0

    def __init__(self, core: OptimizerCore) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core.runtime.progress.scaler, name)

    cur_scale = loss_scale = property(attrgetter("scale"))
    cur_iter = property(attrgetter("_core.tally.asked"))  # number of steps, skipped ones included
    cur_hysteresis = property(attrgetter("patience"))
    scale_window = property(attrgetter("config.loss_scale_window"))  # steps without an overflow after which the scale doubles
    min_scale = property(attrgetter("config.min_loss_scale"))


def _flat(parts: list[ParameterPart]) -> object:
    """Return this rank's slices of whole tensors in fp32, padded to equal sizes and concatenated (collective).

    If a part is a plain value or one number, such as a step count, return that part's value.
    """
    found = []
    for part in parts:
        whole, comm = part.full(), part.group.comm
        if whole is None:  # the parameter has no state, since it never had a gradient
            whole = torch.zeros(part.shape)
        if not isinstance(whole, Tensor) or (not whole.dim() and part.shape):  # as a step count
            return whole
        size = -(-whole.numel() // comm.world_size)
        slice_ = whole.reshape(-1)[comm.rank * size : (comm.rank + 1) * size].float()
        found.append(nn.functional.pad(slice_, (0, size - slice_.numel())))
    return torch.cat(found)
