"""Out of memory inside of a sharded model: the error says what this rank holds, and which changes make it less.

    torch's error, or the host's  -->  Shortage (what holds what)  -->  DeviceMemoryError, or HostMemoryError, from that error

An error comes by here from a forward of the whole model, from a backward, from a step and from zs.shard. The message is made of the
ledger's numbers and of formulas on them: nothing is allocated on the device. The changes are the planner's (remedies/), whose
modules are above this one and take a second to import: the package says where they are, and they are imported with the first error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from ..comm.base import Comm
from ..config import Config, Tier
from ..errors import OUT_OF_MEMORY_PAGE, DeviceMemoryError, HostMemoryError
from ..memory.host_memory import limits, resident_nbytes
from ..memory.ledger import GATHERED, PARTIAL, STAGING, Ledger
from .auto_wrap import UnitPlan
from .parameter import ParamSpec

if TYPE_CHECKING:
    from .runtime import Runtime

FAILURES = (RuntimeError, MemoryError)  # what a failed allocation raises, among other errors
_ON_HOST = "DefaultCPUAllocator: can't allocate memory"  # torch's words, in a RuntimeError
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_COME_AND_GO = (GATHERED, STAGING, PARTIAL)  # some were given back while the error came here: of these the peak tells


@dataclass(frozen=True)
class Shortage:
    """What is known of a rank whose allocation has failed.

    model: its class. units: elements of each parameter, by unit. trained: the share of them that an optimizer steps.
    beyond: bytes that are allocated beside the ledger's: activations, and what the program keeps. asked: bytes of the allocation
    that failed; 0: not known. separate: the device has a memory of its own. checkpointed: blocks are computed again in backward.
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


advise: Callable[[Shortage], list[str]] = lambda shortage: []  # noqa: E731  # a line for each change; set by the package


def tell(error: BaseException, runtime: Runtime, where: str) -> None:
    """Raise what replaces an error that came from `where`. Returns where memory is not what was missing, or it was told before."""
    if _is_shortage(error):
        units = {unit.name: [spec for group in unit.groups for spec in group.specs] for unit in runtime.units}
        where = f"{where} of step {runtime.progress.steps + 1}"
        _raise(error, _told(error, runtime.model, runtime.config, runtime.ledger, runtime.comm, where, units))


def tell_of_building(
    error: BaseException, model: nn.Module, config: Config, ledger: Ledger, comm: Comm, plans: list[UnitPlan]
) -> None:
    """As `tell`, while zs.shard makes the buffers of the units."""
    if _is_shortage(error):
        _raise(error, _told(error, model, config, ledger, comm, "zs.shard", {plan.name: plan.specs for plan in plans}))


class Telling:
    """A context: an allocation that fails inside is told as one of `where`."""

    def __init__(self, runtime: Runtime, where: str) -> None:
        self.runtime, self.where = runtime, where

    def __enter__(self) -> None:
        """Nothing is done before an error comes."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            tell(error, self.runtime, self.where)


def _raise(error: BaseException, other: Exception) -> NoReturn:
    """`raise other from error`, after which no frame refers to `other`.

    Such a frame is in the traceback of `other`, and the ring would keep all that other frames there hold (activations, above all)
    until Python's collector finds it: a program that catches the error and goes on needs that memory at once.
    """
    try:
        raise other from error
    finally:
        del other, error


def _is_shortage(error: BaseException) -> bool:
    """Of the device or the host, and not told yet."""
    if isinstance(error, (DeviceMemoryError, HostMemoryError)):
        return False
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _ON_HOST in str(error)


def _told(
    error: BaseException, model: nn.Module, config: Config, ledger: Ledger, comm: Comm, where: str, units: dict[str, list[ParamSpec]]
) -> Exception:  # fmt: skip
    numels = {name: tuple(math.prod(spec.shape) for spec in specs) for name, specs in units.items()}
    trained = sum(math.prod(spec.shape) for specs in units.values() for spec in specs if spec.requires_grad)
    of_device = isinstance(error, torch.OutOfMemoryError)
    allocated = resident_nbytes()
    if comm.device.type == "cuda":
        allocated = max(torch.cuda.memory_allocated(comm.device), _amount(r"([\d.]+) (\w+) is allocated by PyTorch", error))
    shortage = Shortage(
        type(model).__name__, config, ledger, comm, where, numels, trained / max(sum(map(sum, numels.values())), 1),
        comm.streams.separate_host, max(allocated - sum(ledger.now.values()), 0),
        _amount(r"[Tt]ried to allocate ([\d.]+) (\w+)", error), _checkpointed(model),
    )  # fmt: skip
    text = "\n".join(
        [*_held(error, shortage), *_changes(shortage), f"{OUT_OF_MEMORY_PAGE} explains these changes and has others."]
    )
    return (DeviceMemoryError if of_device else HostMemoryError)(text)


def _amount(pattern: str, error: BaseException) -> int:
    """Bytes that the error's text names; 0 where it does not."""
    found = re.search(pattern, str(error))
    return round(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0


def _checkpointed(model: nn.Module) -> bool:
    """By zs.checkpoint_activations, by torch's wrapper or by Transformers' switch."""
    return any(
        "_zeroshard_activations" in module.__dict__
        or type(module).__name__ == "CheckpointWrapper"
        or getattr(module, "gradient_checkpointing", False) is True
        for module in model.modules()
    )


def _held(error: BaseException, shortage: Shortage) -> Iterator[str]:
    """What the rank holds, in lines."""
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
    """What would make it less, in lines."""
    try:
        found = advise(shortage)
    except Exception as error:  # whatever it is, what torch said must reach the program
        yield f"What would make it less could not be computed: {type(error).__name__}: {error}"
        return
    if found:
        yield "The cheapest changes that make it less, each by itself, by the planner's formulas:"
        yield from (f"  {number}. {text}" for number, text in enumerate(found, 1))


def size(nbytes: float) -> str:
    """In the largest unit of which there is one, in three digits."""
    unit = next((name for name in ("GiB", "MiB", "KiB") if nbytes >= _UNITS[name]), "")
    amount = nbytes / _UNITS[unit]
    return f"{amount:.3g} {unit or 'bytes'}" if amount < 1000 else f"{amount:,.0f} {unit or 'bytes'}"
