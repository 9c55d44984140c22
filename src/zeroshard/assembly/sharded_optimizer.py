"""The sharded optimizer: the user's optimizer object, which steps flat shards instead of parameters.

`zs.shard` changes the object's class, so that schedulers which refer to it keep working; its own class becomes an *inner*
optimizer over runs (engine/runs.py). The step is that of its core (engine/optimizer.py).
"""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..config import Config, Placement, Tier
from ..engine.inner_optimizer import Options, inner_copy
from ..engine.ledger import OPTIMIZER
from ..engine.optimizer import OptimizerCore, StepRecord
from ..engine.parameter import ParamHome
from ..engine.runtime import Runtime
from ..engine.steppers import Steppers
from ..engine.unit import ParamGroup
from ..errors import ConfigError, ModelClosed, ShardedAccessError
from ..formats.state_plans import state_plans
from ..guard.out_of_memory import telling
from ..guard.rank_consistency import check_alike, described_optimizer
from ..optim.validation import check_members, check_optimizer
from ..optim.whole_matrix import whole_parameters
from ..state.state_storage import WholeState
from ..state.state_view import ParameterState, StateByParameter, load_state, outside_states, state_by_param
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.state_column import StatePlan
from ..tiers.cpu_kernels import matches
from ..tiers.estimate import Place
from ..tiers.host_step import DelayedStep, HostStepper
from ..tiers.room import check_room
from ..tiers.slab_step import SlabStepper
from ..tiers.storage import FurtherTiers
from ..utils.torch_compat import OWN_UNSCALING
from ..values.whole_step import WholeStepper
from .lr_schedulers import respect_skipped_steps, rewrap_for_schedulers

GIVE = "zs.shard(model, optimizer, ...)"
CLASSES = threading.RLock()  # held to look at optimizers' classes and change them: ranks may be threads, and meet those of all


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
        """Drop all gradients but those of the model's other optimizers (under FSDP2's door: those of its own parameters).

        With set_to_none=False, set existing ones to zero, and a step then uses the zeros.
        """
        for runtime in self._runtimes():
            runtime.zero_grad(set_to_none, runtime.optimizers.left_alone(self))
        for param in (param for params in self._outside() for param in params):
            if (grad := param.grad) is not None and not set_to_none:  # in place, as torch does
                grad.detach_() if grad.grad_fn is not None else grad.requires_grad_(False)
                grad.zero_()
            elif grad is not None:
                param.grad = None

    def _outside(self) -> list[list[Tensor]]:
        """Return, for each group, the parameters that are no sharded model's."""
        if isinstance(self, ShardedOptimizer):
            return self.core.outside
        own = {id(home.group.params[home.index]) for home in homes_of(self.param_groups)}
        return [[param for param in group["params"] if id(param) not in own] for group in self.param_groups]

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
    with CLASSES:
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
        return StateByParameter({**found, **outside_states(self.core)}).bind(self.core)

    @state.setter
    def state(self, value: dict) -> None:
        load_state(self.core, {id(param): entries for param, entries in value.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, of parameters of the model that no optimizer steps yet, or of others; the same on every rank.

        Raise ConfigError, with nothing changed, for what an optimizer made after zs.shard(model) may not have.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        core = self.core
        plain = inner_copy(core.inner)  # of the user's class: a trial of it must not write into the states
        plain.param_groups = core.outer.param_groups
        try:
            if core.runtime.closed:
                raise ModelClosed("add_param_group() after zs.close(model): make a new optimizer of its parameters.")
            suit(plain, type(plain).__name__, core.runtime, core.runtime.config, core)
        except BaseException:
            self.param_groups.pop()  # type: ignore[attr-defined]
            raise
        core.take_group(whole_parameters(plain))
        core.runtime.optimizers.sort()
        core.agree = functools.partial(agree, core)


def _apart(value: object) -> object:
    """Return an entry of a state dict: a tensor that other parameters have as well (`step`) as a copy, since a plain optimizer that
    loads the dict would count each step once for each of them."""
    if isinstance(value, WholeState):
        return value.plain()
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) else value


def suit(
    optimizer: torch.optim.Optimizer, name: str, runtime: Runtime, config: Config, core: OptimizerCore | None = None
) -> None:
    """Let the forms in which a model's states rest suit an optimizer, beside the optimizers that the model has.

    name: of the program's class. core: the optimizer's, if it is one of these. Raise ConfigError, with nothing changed, if they
    cannot, or if it cannot step these parameters beside the others.
    """
    others = [each for each in runtime.optimizers.sharded if each.core is not core]
    stepped = {key: type(each).__name__ for each in others for key in each.core.group_of}
    for home in homes_of(optimizer.param_groups):
        group = home.group
        if group.runtime is not runtime:
            raise ConfigError(
                f"optimizer: this {name} has parameters of two sharded models, {type(runtime.model).__name__} and "
                f"{type(group.runtime.model).__name__}. Make one for each, or call zs.shard on a module that holds both."
            )
        if other := stepped.get(id(group.params[home.index])):
            raise ConfigError(
                f"optimizer: {home.name} is a parameter of this {name} and of another optimizer of the model, {other}, and each parameter has "
                f"one. To replace that one, drop all references to it, its schedulers' too (del), before this {name} is used first."
            )
    options = (
        ("precision='fp16'", runtime.progress.scaler is not None), ("delayed_update", config.delayed_update is not None),
        ("zs.join", runtime.attendance.joined), ("zs.ema", bool(runtime.optimizers.after_step)),
    )  # fmt: skip
    if found := [what for what, asked in options if asked and others]:
        raise ConfigError(
            f"optimizer: {found[0]} serves one optimizer, and beside this {name} the model has {', '.join(sorted(set(stepped.values())))}. Leave "
            f"it out; or write {GIVE} with one optimizer that has a parameter group for each set of options (for Muon beside AdamW: zs.Muon)."
        )
    specs = [spec for group in runtime.groups for spec in group.specs]
    check_optimizer(optimizer, specs, config.delayed_update is not None, others, outside=True)
    plans, suited = state_plans(config, optimizer, specs), dict[ParamGroup, StatePlan]()
    for group in runtime.groups:
        own = [plans[id(param)] for param in group.params if group.trainable and id(param) in plans]
        had = [group.plan] if any(group in each.core.indices for each in runtime.optimizers.sharded) else []
        blocks = math.lcm(*(column.elements for plan in own for column in plan.columns))
        if (own and len({plan.make for plan in (*own, *had)}) > 1) or group.layout.alignment % blocks:
            raise ConfigError(
                f"optimizer: this {name} keeps states encoded, for which zs.shard(model) has not laid out parameters: write "
                f"{GIVE}, or give zs.shard(model) the optimizer_states."
            )
        if own:
            columns = dict.fromkeys(column for plan in (*had, own[0]) for column in plan.columns) if had else own[0].columns
            suited[group] = StatePlan(tuple(columns), own[0].make)
    for group, plan in suited.items():
        group.plan = plan


def agree(core: OptimizerCore) -> None:
    """Raise, on every rank, ModelMismatch if ranks have made different optimizers; HostMemoryError or SwapError if states have no
    room (collective; before the first step)."""
    runtime = core.runtime
    specs = [spec for group in runtime.groups for spec in group.specs]
    check_alike(runtime.comm, described_optimizer(specs, core.outer), f"optimizer step{core.remark}", "optimizers")

    def find() -> dict[Place, int]:
        found: dict[Place, int] = defaultdict(int)
        for group in runtime.groups if not any(run.states.load() for run in core.all_runs) else ():  # else they were loaded
            numel = group.layout.numel if group.masters.whole else group.layout.shard_numel
            own = sum(run.numel for run in core.all_runs if run.group is group)
            if own == 0 or (
                group.offload.tier is Tier.DEVICE and not group.plan.coded and len(core.indices[group]) < len(group.params)
            ):
                numel = own  # else columns of the whole shard are made
            place = OPTIMIZER, group.offload.tier, group.offload.path if group.offload.tier is Tier.DISK else None
            found[place] += sum(column.nbytes(numel, group.masters.stepped.dtype) for column in group.plan.columns)
        return found

    check_room(runtime.config, runtime.tiers, find, "optimizer's first step")


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
