"""Errors for a rank that ran out of memory: they list what it holds, and the changes that make it hold less.

    torch's or the host's error  -->  Shortage (bytes by category)  -->  DeviceMemoryError or HostMemoryError, raised from it

The whole model's forward, a backward, a step and zs.shard pass their errors to this module. It makes the message from numbers of
the ledger and formulas on them, and allocates nothing on the device. The planner (remedies/) finds the changes. Its modules
import this one and take a second to load, so `advise` imports them at the first error.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import Config, Tier
from ..engine.comm.base import Comm
from ..engine.ledger import GATHERED, PARTIAL, STAGING, Ledger
from ..engine.parameter import ParamSpec
from ..engine.watch import FAILURES
from ..errors import OUT_OF_MEMORY_PAGE, HostMemoryError, ZeroshardError
from ..utils.host_memory import limits, resident_nbytes
from ..utils.transformers_compat import recomputes

if TYPE_CHECKING:
    from ..engine.runtime import Runtime

_ON_HOST = "DefaultCPUAllocator: can't allocate memory"  # torch's words, in a RuntimeError
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_COME_AND_GO = (GATHERED, STAGING, PARTIAL)  # partly released while the error propagated, so the message has their peak


class DeviceMemoryError(ZeroshardError, torch.OutOfMemoryError):
    """A device had no memory for an allocation inside of a sharded model: in zs.shard, a forward, a backward or a step.

    The message lists the bytes that this rank holds, by kind, and the cheapest changes that reduce them, with their costs.
    torch's error is the cause (`__cause__`), and `except torch.OutOfMemoryError` catches this error too. How-to:
    docs/how-to/out-of-memory.md.
    """


@dataclass(frozen=True)
class Shortage:
    """The facts of a rank whose allocation has failed.

    model: name of its class. units: elements of each parameter, by unit. trained: fraction of the elements that need gradients.
    beyond: allocated bytes that the ledger does not count: activations, and the program's own. asked: bytes of the allocation
    that failed; 0: unknown. separate: the device has memory of its own. checkpointed: activation checkpointing is used.
    """

    model: str
    config: Config
    ledger: Ledger
    comm: Comm
    where: str
    units: dict[str, tuple[int, ...]]
    trained: float
    separate: bool
    beyond: int
    asked: int
    checkpointed: bool


def advise(shortage: Shortage) -> list[str]:
    """Return a line for each of the planner's changes."""
    return import_module("zeroshard.planner.remedies.running").advise(shortage)


def tell(error: BaseException, runtime: Runtime, where: str) -> None:
    """Raise a DeviceMemoryError or HostMemoryError in place of an out-of-memory error. Return if `error` is any other one."""
    units = {unit.name: [spec for group in unit.groups for spec in group.specs] for unit in runtime.units}
    where = f"{where} of step {runtime.progress.steps + 1}"
    tell_shortage(error, runtime.model, runtime.config, runtime.tiers.ledger, runtime.comm, where, units)


@contextlib.contextmanager
def telling(runtime: Runtime, where: str) -> Iterator[None]:
    """Context that replaces an out-of-memory error raised inside by one that names `where`."""
    try:
        yield
    except FAILURES as error:
        tell(error, runtime, where)
        raise


@contextlib.contextmanager
def telling_shortage(
    model: nn.Module, config: Config, ledger: Ledger, comm: Comm, where: str, units: dict[str, list[ParamSpec]]
) -> Iterator[None]:
    """Context that does as `telling` does, for the time in which zs.shard makes the units' buffers."""
    try:
        yield
    except FAILURES as error:
        tell_shortage(error, model, config, ledger, comm, where, units)
        raise


def tell_shortage(
    error: BaseException, model: nn.Module, config: Config, ledger: Ledger, comm: Comm, where: str, units: dict[str, list[ParamSpec]]
) -> None:  # fmt: skip
    """Do as `tell` does, for the time in which zs.shard makes the units' buffers: `runtime.units` is still empty then."""
    replaced_already = isinstance(error, (DeviceMemoryError, HostMemoryError))
    if replaced_already or not (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _ON_HOST in str(error)):
        return
    numels = {name: tuple(math.prod(spec.shape) for spec in specs) for name, specs in units.items()}
    trained = sum(math.prod(spec.shape) for specs in units.values() for spec in specs if spec.requires_grad)
    allocated = resident_nbytes()
    if comm.device.type == "cuda":
        allocated = max(torch.cuda.memory_allocated(comm.device), _amount(r"([\d.]+) (\w+) is allocated by PyTorch", error))
    checkpointed = recomputes(model) or any("_zeroshard_activations" in module.__dict__ for module in model.modules())
    shortage = Shortage(
        type(model).__name__, config, ledger, comm, where, numels, trained / max(sum(map(sum, numels.values())), 1),
        comm.streams.separate_host, max(allocated - sum(ledger.now.values()), 0),
        _amount(r"[Tt]ried to allocate ([\d.]+) (\w+)", error), checkpointed,
    )  # fmt: skip
    lines = [*_held(error, shortage), *_changes(shortage), f"{OUT_OF_MEMORY_PAGE} explains these changes and has others."]
    other = (DeviceMemoryError if isinstance(error, torch.OutOfMemoryError) else HostMemoryError)("\n".join(lines))
    # The traceback of `other` has this frame: a reference would make a cycle, which keeps the variables of every frame in the
    # traceback (above all activations) until Python's garbage collector runs. A program that goes on needs their memory at once.
    try:
        raise other from error
    finally:
        del other, error


def _amount(pattern: str, error: BaseException) -> int:
    """Return the bytes that the error's message names; 0 if it names none."""
    found = re.search(pattern, str(error))
    return round(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0


def _held(error: BaseException, shortage: Shortage) -> Iterator[str]:
    """Yield the lines with the bytes that the rank holds, by category."""
    ledger, config, comm = shortage.ledger, shortage.config, shortage.comm
    yield str(error).split("\n")[0] or type(error).__name__
    yield (
        f"rank {comm.rank} of {comm.world_size} had no memory for this in {shortage.where} (stage {config.stage}, {config.precision}). "
        f"On {comm.device} it holds:"
    )
    held = {name: nbytes for name, nbytes in ledger.now.items() if name not in _COME_AND_GO}
    held |= {f"{name}, at most": ledger.peak[name] for name in _COME_AND_GO}
    if comm.device.type == "cuda":
        held["activations, and what else torch has"] = shortage.beyond
    else:
        held["activations, and all else of the process"] = shortage.beyond
    yield from (f"  {name:<42}{size(nbytes):>12}" for name, nbytes in sorted(held.items(), key=lambda item: -item[1]) if nbytes)
    for tier in (Tier.HOST, Tier.DISK):
        away = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in ledger.elsewhere[tier].items() if nbytes)
        yield from [f"  on {tier.value}: {away}"] if away else []
    if not isinstance(error, torch.OutOfMemoryError):
        tightest = min(limits(), key=lambda limit: limit.nbytes, default=None)
        yield from [f"  {tightest.name} leaves {size(tightest.nbytes)}"] if tightest is not None else []


def _changes(shortage: Shortage) -> Iterator[str]:
    """Yield the lines with changes that reduce memory."""
    try:
        found = advise(shortage)
    except Exception as error:  # torch's message must reach the program in any case
        yield f"What would make it less could not be computed: {type(error).__name__}: {error}"
        return
    if found:
        yield "The cheapest changes that make it less, each by itself, by the planner's formulas:"
        yield from (f"  {number}. {text}" for number, text in enumerate(found, 1))


def size(nbytes: float) -> str:
    """Return bytes as text with three digits, in the largest unit that is at most `nbytes`."""
    unit = next((name for name in ("GiB", "MiB", "KiB") if nbytes >= _UNITS[name]), "")
    amount = nbytes / _UNITS[unit]
    return f"{amount:.3g} {unit or 'bytes'}" if amount < 1000 else f"{amount:,.0f} {unit or 'bytes'}"
