"""The sharded optimizer: the user's optimizer object, which steps flat shards instead of parameters.

`zs.shard` changes the object's class, so that schedulers which refer to it keep working; its own class becomes an *inner*
optimizer over runs (engine/runs.py). The step is that of its core (engine/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..config import Placement, Tier
from ..engine.inner_optimizer import Options, inner_copy
from ..engine.optimizer import OptimizerCore, StepRecord
from ..engine.parameter import ParamHome
from ..engine.runtime import Runtime
from ..engine.steppers import Steppers
from ..errors import ConfigError, ShardedAccessError
from ..guard.out_of_memory import telling
from ..optim.validation import check_members
from ..optim.whole_matrix import whole_parameters
from ..state.state_storage import WholeState
from ..state.state_view import ParameterState, StateByParameter, load_state, state_by_param
from ..tensor.sharded_tensor import ShardedTensor
from ..tiers.cpu_kernels import matches
from ..tiers.host_step import DelayedStep, HostStepper
from ..tiers.slab_step import SlabStepper
from ..tiers.storage import FurtherTiers
from ..utils.torch_compat import OWN_UNSCALING
from ..values.whole_step import WholeStepper
from .lr_schedulers import respect_skipped_steps, rewrap_for_schedulers


def homes_of(groups: list[Options]) -> list[ParamHome]:
    """Return the homes of the parameters of sharded models in an optimizer's groups."""
    homes = [getattr(param, "_home", None) for group in groups for param in group["params"]]
    return [home for home in homes if isinstance(home, ParamHome) and home.group.runtime.built]


def runtimes_of(groups: list[Options]) -> list[Runtime]:
    """Return the runtimes of the sharded models whose parameters are in an optimizer's groups."""
    return list({id(home.group.runtime): home.group.runtime for home in homes_of(groups)}.values())


class OfShardedModel(torch.optim.Optimizer):
    """Last base class of an optimizer of sharded parameters: a `zero_grad` of the user's class reaches this one by super()."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; with set_to_none=False, set existing ones to zero, and a step then uses the zeros."""
        for runtime in self._runtimes():
            runtime.zero_grad(set_to_none)
        if not isinstance(self, ShardedOptimizer):  # it may hold other parameters, too
            super().zero_grad(set_to_none)

    def _runtimes(self) -> list[Runtime]:
        return [self.core.runtime] if isinstance(self, ShardedOptimizer) else runtimes_of(self.param_groups)

    def _leaves_scale_to_scaler(self) -> bool:
        """Return False: torch's GradScaler is to unscale gradients itself, also for classes whose fused kernels would.

        Raise ConfigError for a model whose loss zeroshard scales.
        """
        if any(runtime.progress.scaler is not None for runtime in self._runtimes()):
            raise ConfigError(
                "torch.amp.GradScaler beside precision='fp16', which scales the loss and skips steps by itself: leave the GradScaler "
                "out, or give precision='fp32' to zs.shard and keep it, with torch.autocast(..., dtype=torch.float16)."
            )
        return False


setattr(OfShardedModel, OWN_UNSCALING, property(OfShardedModel._leaves_scale_to_scaler, lambda self, value: None))


def derived(cls: type, mixin: type) -> type:
    """Return the subclass of an optimizer's class with a mixin: one for each class, under the class's name, which loggers show."""
    bases = (mixin, cls, OfShardedModel)
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    subclasses: list[type] = cls.__subclasses__()
    made = next((each for each in subclasses if each.__bases__ == bases), None)
    return made or type(cls.__name__, bases, names)


class ShardedOptimizer:
    """Mixin that `shard_optimizer` adds to the class of the user's optimizer."""

    core: OptimizerCore

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Take one step (collective). `last_step` has its record: norm, clip coefficient, skipped or not."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with telling(self.core.runtime, "the optimizer's step"):
            self.core.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch then does not wrap it again, and runs hooks once

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"a sharded {type(self).__name__} can not be copied or pickled: this rank has slices of its states. Take "
            "zs.full_optimizer_state_dict(model), on all ranks, and save what rank 0 gets; or use zs.save."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as in torch. Writing into its dicts does not change the optimizer."""
        found = super().state_dict()  # type: ignore[misc]
        for key, entries in found["state"].items():
            if isinstance(entries, ParameterState):
                found["state"][key] = {k: _apart(v) for k, v in entries.items()}
        order = [key for group in found["param_groups"] for key in group["params"]]
        first = {key: found["state"].pop(key) for key in order if key in found["state"]}
        found["state"] = first | found["state"]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, as in torch: one of a plain optimizer, with whole tensors, or one of this sharded optimizer."""
        super().load_state_dict({**state_dict, "state": {}})  # type: ignore[misc]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]  # type: ignore[attr-defined]
        given = state_dict["state"]
        load_state(self.core, {id(p): given[n] for n, p in zip(names, params, strict=True) if n in given})

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, None before the first."""
        return self.core.last_step

    @property
    def state(self) -> StateByParameter:
        """Optimizer states by parameter, tensors sharded; state_view.py describes writes to them."""
        states = state_by_param(self.core, WholeState)
        found = {param: ParameterState(entries).bind(self.core, param) for param, entries in states.items()}
        return StateByParameter(found).bind(self.core)

    @state.setter
    def state(self, value: dict) -> None:
        load_state(self.core, {id(param): entries for param, entries in value.items()})

    def add_param_group(self, param_group: dict) -> None:
        """Raise ConfigError: the flat buffers are laid out already."""
        raise ConfigError(
            "add_param_group() after zs.shard(): add the group before, or zs.close() the model and shard it with a new optimizer."
        )


def _apart(value: object) -> object:
    """Return an entry of a state dict: a tensor that other parameters have as well (`step`) as a copy, since a plain optimizer that
    loads the dict would count each step once for each of them."""
    if isinstance(value, WholeState):
        return value.plain()
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) else value


def steppers_for(optimizer: torch.optim.Optimizer, runtime: Runtime) -> Steppers:
    """Make the steppers of an optimizer, each with a copy of it, as the options of its model say."""
    config, tiers, alone = runtime.config, runtime.tiers, whole_parameters(optimizer)
    assert isinstance(tiers, FurtherTiers)  # that zs.shard has made
    host: HostStepper | None = None
    if config.offload_optimizer.tier is not Tier.DEVICE:
        given = config.offload_optimizer.fused  # whether the host steps with fused kernels; None: where it is best
        fused = (tiers.separate or matches(optimizer)) if given is None else given
        host = HostStepper(inner_copy(optimizer), config.offload_optimizer, tiers, fused)
    return Steppers(
        alone,
        WholeStepper(inner_copy(optimizer), tiers, config.row.optimizer is Placement.REPLICATED),
        SlabStepper(inner_copy(optimizer), tiers, matches(optimizer)),
        host,
        DelayedStep(host) if host is not None and config.delayed_update is not None else None,
    )


def shard_optimizer(optimizer: torch.optim.Optimizer, runtime: Runtime) -> torch.optim.Optimizer:
    """Make the user's optimizer object a sharded one, in place. Existing state is sharded, too."""
    respect_skipped_steps()
    given = {id(param): entries for param, entries in optimizer.state.items()}
    core = OptimizerCore(optimizer, runtime, steppers_for(optimizer, runtime), _check_members)
    wrapped = optimizer.__dict__.pop("step", None)  # a scheduler's wrapper, which counts steps
    optimizer.__dict__.pop("state")
    optimizer.__class__ = derived(type(optimizer), ShardedOptimizer)
    optimizer.core = core  # type: ignore[attr-defined]
    if given:
        load_state(core, given)
    if wrapped is not None:
        rewrap_for_schedulers(optimizer)
    return optimizer


def _check_members(core: OptimizerCore) -> None:
    check_members(
        core.outer, core.members,
        lambda: {id(param): spec.name for group in core.runtime.groups for param, spec in zip(group.params, group.specs, strict=True)},
    )  # fmt: skip
