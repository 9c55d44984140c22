"""`engine.optimizer`: a wrapper of the sharded optimizer with the interface of DeepSpeed's optimizers.

It has internal attributes too that scripts read: slices of masters and gradients, groups, the loss scale. Each read of such an
attribute makes a copy; to write, use `deepspeed.utils.safe_set_*`. A slice is this rank's part of a parameter, flat, as
`safe_get_local_*` returns it.

Its state dicts have DeepSpeed's form: each tensor is an ordinary one with this rank's slice of a state. Programs save one per
rank (`torch.save(engine.optimizer.state_dict(), f"rank{rank}.pt")`) and load them with the same number of ranks.
`engine.save_checkpoint` works for any number.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ConfigError, NonFiniteError
from ...seam import ParameterInfo, ShardedTensor, engine_behind, exchange_values, info_of
from ...state import ParameterPart, gradient_of, state_of, value_of
from . import partition, stand_ins
from .accelerator import always
from .cpu_optimizers import FusedAdam
from .ds_config import DeepSpeedConfig
from .leaf_modules import get_z3_leaf_modules

M = TypeVar("M", bound=nn.Module)
COUNT = "partition_count"  # key in a state dict with the number of ranks

_INSTEAD = {
    **dict.fromkeys(
        ("parallel_partitioned_bit16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat", "bit16_groups_flat"),
        "zs.value_of(param).local(), or deepspeed.utils.safe_get_local_fp32_param",
    ),
    **dict.fromkeys(("grad_partitions_flat_buffer", "averaged_gradients_flat"), "zs.gradient_of(param).local()"),
    "nccl_start_alignment_factor": "zs.value_of(param).local(): what a rank holds begins at multiples of 32 elements",
    "get_hp_param_device": "zs.report(model), which tells where states rest",
}  # fmt: skip


def _passed_on(name: str) -> property:
    """Return a property that reads and sets an attribute of the sharded optimizer."""
    return property(lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value))


class EngineOptimizer:
    """Wrapper of a sharded optimizer, `.optimizer`, in which attributes are looked up that the wrapper lacks."""

    def __init__(self, optimizer: object, config: DeepSpeedConfig) -> None:
        self.optimizer: Any = optimizer
        self._config = config
        self._sharded: object = None  # the sharded optimizer while `.optimizer` is a flat copy (Stage3)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet (copying, unpickling): looking it up would recurse
            raise AttributeError(name)
        if name in _INSTEAD:
            told = f"engine.optimizer.{name} is of DeepSpeed's optimizers, which zeroshard does not have"
            raise AttributeError(f"{told}: use {_INSTEAD[name]}.")
        return getattr(self.optimizer, name)

    param_groups, state = _passed_on("param_groups"), _passed_on("state")

    def step(self, closure: object = None) -> object:
        scaler, at_end = self.loss_scaler, False
        if scaler is not None and scaler.dynamic and self._config.zero_enabled:  # DeepSpeed's stage 0 continues
            at_end = scaler.patience == 1 and scaler.scale == scaler.config.min_loss_scale
        loss = self.optimizer.step(closure)
        if at_end and self.overflow:
            raise NonFiniteError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. The latest gradients that are not finite: "
                f"{', '.join(self.optimizer.last_step.nonfinite[:5])}. A model that was trained in bf16 overflows in fp16: use bf16."
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Call loss.backward(). The runtime multiplies the gradients of the model's outputs by the loss scale."""
        loss.backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, object]:
        """Return the sharded optimizer's state dict and DeepSpeed's entries: this rank's master slices by group, stage, scale."""
        stage, slices = int(self._config.zero_optimization_stage), self.fp32_partitioned_groups_flat
        told = {
            "zero_stage": stage, "overflow": self.overflow, "dynamic_loss_scale": self.dynamic_loss_scale, "cur_scale": self.loss_scale,
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": slices,
        }  # fmt: skip
        return {**self.optimizer.state_dict(), **told}

    def load_state_dict(self, state_dict: Mapping[str, object], *unused: object, **options: object) -> None:
        self.optimizer.load_state_dict(state_dict)

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        record = self.optimizer.last_step
        return record is not None and record.skipped and not math.isfinite(record.grad_norm)

    loss_scale = cur_scale = property(lambda self: engine_behind(self.optimizer).progress.loss_scale)

    @property
    def loss_scaler(self) -> LossScalerView | None:
        """The loss scaler in fp16, else None."""
        return None if engine_behind(self.optimizer).progress.scaler is None else LossScalerView(self.optimizer)

    loss_scale_config = property(lambda self: LossScalerView(self.optimizer))  # without fp16: a static scale of 1
    dynamic_loss_scale = property(attrgetter("loss_scale_config.dynamic_loss_scale"))
    low_precision_dtype = property(attrgetter("_config.model_dtype"))  # of parameters in forward and backward

    def needs_scaler(self) -> bool:
        """Return whether there is a loss scale (fp16). A plain loss.backward() works too: the runtime applies the scale."""
        return self.loss_scaler is not None

    @property
    def _global_grad_norm(self) -> float | None:
        record = self.optimizer.last_step
        return None if record is None else record.grad_norm

    refresh_fp32_params = always(None)  # a step copies writes to parameters into the masters by itself
    empty_partition_cache = always(None)  # parameters are not kept gathered between steps
    destroy = always(None)  # `engine.destroy()` frees everything
    micro_step_id = property(attrgetter("optimizer.core.runtime.account.backwards"))  # number of backwards since the last step

    # -- slices of masters and gradients ------------------------------------------------------------------------------

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
        return {i: list(slices.values()) for i, slices in self._gradients().items() if slices}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return slices of the mean gradients in fp32, by optimizer group and index in it."""
        return {i: {j: each.float() for j, each in slices.items()} for i, slices in self._gradients().items()}

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
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(engine_behind(self.optimizer).model)}

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norm of the mean gradient of each optimizer group, over all ranks (collective)."""
        groups = self.get_fp32_grad_partitions()
        squares = [float(sum(each.square().sum() for each in groups.get(i, {}).values())) for i in range(len(self.bit16_groups))]
        ranks = engine_behind(self.optimizer).ranks
        everyone = [squares] if ranks.world_size == 1 else exchange_values(ranks, squares, "norms of gradients")
        return [torch.tensor(sum(theirs)).sqrt() for theirs in zip(*everyone, strict=True)]


class LossScalerView:
    """Live view of the loss scale with DeepSpeed's names. Other attributes are those of zeroshard's scaler (fp16 only)."""

    scale_factor = 2.0

    def __init__(self, optimizer: Any) -> None:
        """Raise AttributeError for an optimizer that is not sharded: Stage3 shows one for a moment."""
        self._engine, self._core = engine_behind(optimizer), optimizer.core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.progress.scaler, name)

    dynamic_loss_scale = property(lambda self: getattr(self._engine.progress.scaler, "dynamic", False))
    cur_scale = loss_scale = property(attrgetter("_engine.progress.loss_scale"))
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
        whole, comm = part.full(), part.ranks
        if whole is None:  # the parameter has no state, since it never had a gradient
            whole = torch.zeros(part.shape)
        if not isinstance(whole, Tensor) or (not whole.dim() and part.shape):  # as a step count
            return whole
        size = -(-whole.numel() // comm.world_size)
        slice_ = whole.reshape(-1)[comm.rank * size : (comm.rank + 1) * size].float()
        found.append(nn.functional.pad(slice_, (0, size - slice_.numel())))
    return torch.cat(found)


class Stage3(EngineOptimizer, stand_ins.DeepSpeedZeroOptimizer_Stage3):
    """Optimizer of stage 3."""

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Make `.optimizer` a copy in DeepSpeed's flat layout until `_clear_fp32_optimizer_param_groups` (collective).

        The copy is a torch optimizer with one flat parameter for each group. The parameter, and its states, are this rank's slices
        of masters and states, concatenated; each parameter is divided into equal slices, padded with zeros. Writes to the copy have
        no effect.
        """
        self._clear_fp32_optimizer_param_groups()
        picture = torch.optim.Optimizer([{**group, "params": [torch.empty(0)]} for group in self.optimizer.param_groups], {})
        for group, params in zip(picture.param_groups, self.bit16_groups, strict=True):
            group["params"] = [_flat([value_of(param) for param in params])]
            parts = [state_of(param, "") for param in params]
            for key in dict.fromkeys(name for part in parts for name in part.names()):
                picture.state[group["params"][0]][key] = _flat([state_of(param, key) for param in params])
        self._sharded, self.optimizer = self.optimizer, picture

    def _clear_fp32_optimizer_param_groups(self) -> None:
        self.optimizer, self._sharded = self._sharded or self.optimizer, None

    @functools.cached_property
    def parameter_offload(self) -> ParameterOffload:
        """The model's hooks, for programs that generate during training."""
        return ParameterOffload(engine_behind(self.optimizer).model)


_HERE = {"__module__": __name__}
# an instance is one of DeepSpeed's class for the stage and precision
Stages1And2 = type("Stages1And2", (EngineOptimizer, stand_ins.DeepSpeedZeroOptimizer), _HERE)
InBF16 = type("InBF16", (EngineOptimizer, stand_ins.BF16_Optimizer), _HERE)  # stage 1 in bf16 with fp32 gradients
Fused = type("Fused", (EngineOptimizer, stand_ins.FP16_Optimizer), _HERE)  # stage 0 in fp16 or bf16 with FusedAdam
Unfused = type("Unfused", (EngineOptimizer, stand_ins.FP16_UnfusedOptimizer), _HERE)  # with another class


def wrap(optimizer: Any, config: DeepSpeedConfig) -> Any:
    """Return the optimizer in the wrapper whose class DeepSpeed would use; at stage 0 in fp32 the optimizer itself."""
    stage, dtype = int(config.zero_optimization_stage), config.model_dtype
    if optimizer is None:
        return None
    if not engine_behind(optimizer).replicated:
        cls = type(optimizer)
        optimizer.__class__ = type(cls.__name__, (SlicedStates, cls), {"__qualname__": cls.__qualname__})
    if not stage:
        if dtype is torch.float32:
            return optimizer
        return (Fused if isinstance(optimizer, FusedAdam) else Unfused)(optimizer, config)
    if (
        stage == 1
        and not config.offloads("offload_optimizer")
        and (dtype, config.gradient_dtype) == (torch.bfloat16, torch.float32)
    ):
        return InBF16(optimizer, config)
    return (Stage3 if stage == 3 else Stages1And2)(optimizer, config)


# -- state dicts ---------------------------------------------------------------------------------------------------


class SlicedStates:
    """Mixin of an engine's sharded optimizer, unless its states are replicated."""

    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, object]:
        """Return a state dict as torch's, with flat slices of states, padded with zeros to the longest slice of any rank."""
        found, engine = super().state_dict(), engine_behind(self)  # type: ignore[misc]
        return {**found, "state": self._changed(found, _slice), COUNT: engine.ranks.world_size}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load this rank's `state_dict` from a run with as many ranks, or a state dict of a plain torch optimizer."""
        count, ranks = state_dict.get(COUNT), engine_behind(self).ranks.world_size
        if count not in (None, ranks):
            raise ConfigError(
                f"load_state_dict: the slices are those of {count} ranks, and there are {ranks}. engine.save_checkpoint and "
                "load_checkpoint are for any number of ranks."
            )
        state = state_dict["state"] if count is None else self._changed(state_dict, _unsliced)
        super().load_state_dict({**state_dict, "state": state})  # type: ignore[misc]

    def _changed(self, state_dict: Mapping[str, Any], change: Callable[[Tensor, object], object]) -> dict[int, dict[str, object]]:
        """Return a state dict's states with each value replaced by change(its parameter, value)."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = dict(zip(numbers, (param for group in self.param_groups for param in group["params"]), strict=False))
        states = state_dict["state"].items()
        return {number: {key: change(params[number], value) for key, value in each.items()} for number, each in states}


def _longest(info: ParameterInfo) -> int:
    return max(stop - start for start, stop in map(info.bounds, range(info.ranks.world_size)))


def _slice(param: Tensor, value: object) -> object:
    if not isinstance(value, ShardedTensor):
        return value
    local, info = value._local.detach().reshape(-1), info_of(param)
    assert info is not None
    return nn.functional.pad(local, (0, _longest(info) - local.numel())).clone()


def _unsliced(param: Tensor, value: object) -> object:
    info = info_of(param)
    if info is None or not isinstance(value, Tensor) or not value.dim() or value.numel() != _longest(info):
        return value
    start, stop = info.bounds()
    return info.wrap(value[: stop - start])


# -- the model's hooks at stage 3 ----------------------------------------------------------------------------------


class ParameterOffload:
    """`engine.optimizer.parameter_offload`: handles of hooks that programs remove while they generate, and add again afterwards.

        with GatheredParameters(model.parameters()): remove_hooks(engine); model.generate(...); add_hooks(engine)       in trl

    forward_hooks and backward_hooks have a handle for each module with parameters. zeroshard's own hooks stay registered, since
    they do nothing for gathered parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._remove_module_hooks()
        partition.show_external_parameters(module)
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, count: object = None) -> None:
        """Add handles for a module and those in it."""
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                self.forward_hooks.append(SimpleNamespace(remove=always(None)))
                self.backward_hooks.append(SimpleNamespace(remove=always(None)))

    def _remove_module_hooks(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []


@contextlib.contextmanager
def unwrap_model_for_generation(model: M) -> Iterator[M]:
    """Context with all parameters gathered, for many forwards without a gather (collective). Writes are dropped."""
    offload = getattr(model.optimizer, "parameter_offload", None)
    with partition.GatheredParameters(model.parameters()):
        if offload is not None:
            offload._remove_module_hooks()
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
