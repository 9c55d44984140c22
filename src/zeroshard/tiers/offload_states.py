"""`zs.offload_states` and `zs.reload_states`: move a model's states off the device for a while, and back unchanged.

    train ...   zs.offload_states(model)   generate with another engine   zs.reload_states(model)   train ...

Using states that are away raises `StatesAway`; the others can be used. Buffers hold no state, so their memory is freed, and
allocated again at the next use.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from ..config import Offload, Tier
from ..engine.comm.messages import exchange_values
from ..engine.ledger import AVERAGES, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from ..engine.rest import PARTS, MemoryRest, Rest
from ..engine.runs import state_tensors
from ..engine.runtime import Runtime, runtime_of
from ..engine.verbs import begin
from ..errors import ConfigError, did_you_mean
from ..utils import torch_compat
from .forms import CodedRest
from .moved_states import Memory, MovedStates
from .room import check_disk

BUFFERS = "buffers"
_NAMES = {name: name for name in (*PARTS, BUFFERS)} | {  # and DeepSpeed's names
    "optim_states": "optimizer", "hp_params": "masters", "lp_params": "parameters", "lp_grads": "gradients",
    "contiguous_grad_buffer": BUFFERS,
}  # fmt: skip


class Spare(ABC):
    """An object that a model holds in its `__dict__`, with memory that it can do without between steps."""

    @abstractmethod
    def give_back(self) -> None:
        """Free that memory; it is allocated again when it is needed."""


def offload_states(
    model: nn.Module,
    include: Iterable[str] | None = None,
    device: str | os.PathLike | Offload = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move a sharded model's states off the device until `zs.reload_states` (collective, between steps).

    Args:
        include: which states: "optimizer", "masters", "parameters", "gradients", "buffers" (those of gathers, reductions, host
            steps, saves and activation checkpoints), or DeepSpeed's words "optim_states", "hp_params", "lp_params", "lp_grads"
            and "contiguous_grad_buffer". None: all.
        device: "cpu" copies into host memory (where the model computes on the CPU, it only frees buffers). "nvme", a folder on a
            local disk, or an Offload copies into files in a folder of this run; "nvme" means the folder that zs.shard was given.
            States that already rest off the device stay where they are.
        pin_memory: use page-locked copies on the host.
        non_blocking: return while copies to the host are under way; copies to files are always waited for.

    Using a state that is away raises StatesAway: a forward uses the parameters, a backward parameters and gradients, and a step,
    a save or a write all states. After `zero_grad` there are no gradients to copy. A further call moves states that are still
    on the device.

    Raises:
        ConfigError: an option is wrong, on any rank, or ranks call it differently. Nothing has changed.
        SwapError: the folder cannot be used. Nothing has changed.
        ZeroshardError: it was called inside a forward, a backward or zs.gathered(). Nothing has changed.
        OffloadIOError: the disk failed. The model cannot be used any more.
    """
    runtime = runtime_of(model)
    begin(runtime, "zs.offload_states")
    parts, offload = _agree(runtime, include, device, pin_memory)
    moved = runtime.moved
    assert isinstance(moved, MovedStates)
    parts = [part for part in parts if part not in moved]  # an earlier call has moved the others
    if not moved.any:  # `wait` would raise StatesAway; an earlier call has waited, and no state was written since
        runtime.gate.wait()
    if "gradients" not in moved:
        runtime.flush()
    runtime.gate.invalidate()
    memories, groups = _memories(runtime), runtime.groups
    rests: dict[str, list[Rest]] = {  # `moved` makes them raise StatesAway while they are away
        "optimizer": [rest for group in groups for rest in (*group.columns.values(), *group.averages)],
        "masters": [group.masters.rest for group in groups if group.masters.rest is not None],
        "parameters": [group.values.rest for group in groups],
        "gradients": [group.grads.rest for group in groups if group.grads is not None],
    }
    wanted = [part for part in parts if part != BUFFERS]
    if offload.tier is Tier.DISK and offload.path is not None:
        needed = moved.needed([memory for memory in memories if memory.part in wanted], offload)
        check_disk(runtime.tiers, {offload.path: needed}, "zs.offload_states")
    runtime.comm.exchange(b"", "zs.offload_states")  # a barrier: no rank reads peers' shards or buffers any more
    if BUFFERS in parts:
        _give_back_buffers(runtime)
    runtime.comm.fence_write(synchronised=True)
    moved.move(wanted, memories, rests, offload, wait=not non_blocking)
    if "parameters" in wanted:
        for unit in runtime.units:
            unit.move_away()
    if runtime.comm.device.type == "cuda":
        torch.cuda.empty_cache()  # another process may use the device meanwhile
    runtime.comm.fence_read()


def reload_states(model: nn.Module) -> None:
    """Move the states back that `zs.offload_states` has moved, bit for bit (collective). Do nothing if there are none."""
    runtime = runtime_of(model)
    begin(runtime, "zs.reload_states")
    moved = runtime.moved
    assert isinstance(moved, MovedStates)
    if not moved.any:
        return
    runtime.comm.fence_write()
    left = "parameters" in moved
    moved.bring_back()
    for unit in runtime.units if left else ():
        unit.move_back()
    runtime.comm.fence_read()


def _agree(
    runtime: Runtime, include: Iterable[str] | None, device: str | os.PathLike | Offload, pin_memory: bool
) -> tuple[list[str], Offload]:
    """Return the parts to move and their destination, after a check that every rank asks for the same (collective)."""
    comm, parts, offload = runtime.comm, [*PARTS, BUFFERS], Offload()
    problem: Exception | None = None
    try:
        if include is not None:
            wanted = [include] if isinstance(include, str) else list(include)
            for name in wanted:
                if name not in _NAMES:
                    raise ConfigError(
                        f"zs.offload_states: include: expected some of {', '.join(_NAMES)}, got {name!r}.{did_you_mean(name, _NAMES)}"
                    )
            parts = [part for part in parts if part in {_NAMES[name] for name in wanted}]
        offload = _offload(runtime, device, pin_memory)
        runtime.tiers.open_folder(offload)
    except (ConfigError, OSError) as error:
        problem = error
    everyone = exchange_values(comm, (problem, parts, offload.device), "zs.offload_states: begin")
    for told, theirs, where in everyone:
        if told is not None:
            raise told
        if (theirs, where) != everyone[0][1:]:
            raise ConfigError(f"zs.offload_states: ranks passed different arguments: {everyone[0][1:]} and {(theirs, where)}.")
    return parts, offload


def _offload(runtime: Runtime, device: str | os.PathLike | Offload, pin_memory: bool) -> Offload:
    if isinstance(device, Offload):
        offload = device
        offload.check_use("zs.offload_states: device")
    elif device in ("cpu", "nvme"):
        config = runtime.config
        used = [o for o in (config.offload_optimizer, config.offload_param, config.offload_gradient) if o.tier is Tier.DISK]
        offload = used[0] if used and device == "nvme" else Offload.of(
            Offload(str(device.value if hasattr(device, "value") else device), pin_memory=pin_memory), config.offload_path,
            "zs.offload_states: device",
        )  # fmt: skip
    elif isinstance(device, (str, os.PathLike)) and os.path.isdir(device):
        offload = Offload("nvme", path=os.fspath(device))
    else:
        raise ConfigError(
            f"zs.offload_states: device: expected 'cpu', 'nvme', an existing folder or a zs.Offload, got {device!r}."
        )
    if offload.tier is Tier.DEVICE:
        raise ConfigError("zs.offload_states: device: expected 'cpu', 'nvme', a folder or a zs.Offload of these, got 'none'.")
    return offload


# -- the states ----------------------------------------------------------------------------------------------------


def _memories(runtime: Runtime) -> list[Memory]:
    """Return the tensors on the device that hold states."""
    found: list[Memory] = []
    for group in runtime.groups:
        values, grads = group.values, group.grads
        if values.region is not None:
            tensor = values.full if values.replicated else values.rest.tensor  # type: ignore[attr-defined]
            found.append(Memory("parameters", PARAMETERS, tensor, values.tier))
        found += _resting("masters", MASTERS, group.masters.rest)
        for column in group.columns.values():
            found += _resting("optimizer", OPTIMIZER, column.inner if isinstance(column, CodedRest) else column)
        for average in group.averages:
            found += _resting("optimizer", AVERAGES, average)
        if grads is not None and grads.region is not None:
            found.append(Memory("gradients", GRADIENTS, grads.full, Tier.DEVICE, grads.reduced))
        elif grads is not None:
            found += _resting("gradients", GRADIENTS, grads.rest, grads.reduced)
            found += _resting("gradients", GRADIENTS, grads.twin, kept=False)
    whole: dict[int, Memory] = {}  # by storage: the states of split runs are views of one, and some of these may be dropped
    for state in (state for each in runtime.optimizers for state in state_tensors(each.core.inner.state)):
        storage = state.untyped_storage()
        flat = state.new_empty(0).set_(storage)
        unused = Memory("optimizer", OPTIMIZER, flat, Tier.DEVICE, unused_nbytes=flat.nbytes)
        whole.setdefault(torch_compat.storage_id(storage), unused).unused_nbytes -= state.nbytes
    return found + [memory for memory in whole.values() if memory.tensor.numel()]


def _resting(part: str, category: str, rest: Rest | None, kept: bool = True) -> list[Memory]:
    return [Memory(part, category, rest.tensor, rest.tier, kept)] if isinstance(rest, MemoryRest) and rest.resident else []


def _give_back_buffers(runtime: Runtime) -> None:
    tiers = runtime.tiers
    for pool in tiers.every_pool:
        pool.give_back()
    for stepper in runtime.gate.steppers:
        stepper.give_back()
    if runtime.gate.saver is not None and (runtime.gate.saver.last is None or runtime.gate.saver.last.done()):
        runtime.gate.saver.pool.give_back()
    for held in vars(runtime.model).values():  # such as activation checkpoints, attached before or after zs.shard
        if isinstance(held, Spare):
            held.give_back()
