"""`zs.gathered`: for a while the modules hold ordinary, whole parameters.

They are copies. On exit the sharded parameters return to their places, and ranks compare, in one exchange, what was
done to the copies; values are taken over only where that was announced (write=True) and is the same on every rank.
Anything else raises on every rank, with the model as it was before.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from ..comm.codec import exchange_values
from ..errors import ShardedWriteError, ZeroshardError
from ..memory.ledger import GATHERED
from ..tensor.attributes import attributes_of
from .shard_model import write_value
from .unit import ParamGroup, ParamHome, Unit


@contextlib.contextmanager
def gathered(module: nn.Module, *, write: bool = False) -> Iterator[nn.Module]:
    """The whole module as ordinary tensors (collective), on every rank.

    write=True: what is written inside is kept; every rank must write the same values, else ShardedWriteError names
    parameter and ranks. Without it, a write raises on exit and is undone. Stages with replicated parameters included.
    """
    if any(isinstance(param, _Copy) for param in module.parameters()):
        raise ZeroshardError("zs.gathered inside zs.gathered: this module, or a part of it, is gathered already.")
    wanted = {id(param) for param in module.parameters()}
    runtimes = {id(home.group.runtime): home.group.runtime for home in map(_home_of, module.parameters()) if home}
    if not runtimes:
        raise ZeroshardError("zs.gathered: no parameter of this module is sharded; call zs.shard first.")
    for runtime in runtimes.values():
        runtime.attendance.refuse("zs.gathered")
        runtime.recover()
    views = [
        _View(unit)
        for runtime in runtimes.values()
        for unit in runtime.units
        if any(id(param) in wanted for group in unit.groups for param in group.params)
    ]
    for view in views:
        view.open()
    try:
        yield module
    except BaseException:
        for view in views:
            view.close()
        raise
    problems = [problem for view in views for problem in view.close()]
    _settle([copy for view in views for copy in view.copies], problems, write)


def _home_of(param: nn.Parameter) -> ParamHome | None:
    home = getattr(param, "_home", None)
    return home if isinstance(home, ParamHome) else None


class _Copy(nn.Parameter):
    """An ordinary parameter that stands in for a sharded one."""


class _View:
    """One unit inside `zs.gathered`: whole copies in the modules."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.copies: list[tuple[ParamGroup, int, _Copy]] = []
        self._versions: list[int] = []
        self.nbytes = 0  # of the copies

    def open(self) -> None:
        """Put copies into the modules; `close` is the inverse."""
        self.unit.swap_out()
        self.unit.ready()
        for group in self.unit.groups:
            for index, spec in enumerate(group.specs):
                param = group.params[index]
                copy = _Copy(group.values.views[index].detach().clone(), requires_grad=param.requires_grad)
                copy.__dict__.update(attributes_of(param))
                self.copies.append((group, index, copy))
                self._versions.append(_version(copy))
                for owner, attribute in spec.owners:
                    owner._parameters[attribute] = copy
        self.unit.release()
        self.unit.pinned = True
        self.nbytes = sum(copy.nbytes for _, _, copy in self.copies)
        self.unit.groups[0].values.ledger.enter(GATHERED, self.nbytes)  # beside what the unit takes when it is gathered

    def close(self) -> list[tuple[str, str]]:
        """Put the parameters back; what befell the copies: (what, parameter)."""
        self.unit.pinned = False
        self.unit.groups[0].values.ledger.strike(GATHERED, self.nbytes)
        problems = []
        for (group, index, copy), version in zip(self.copies, self._versions, strict=True):
            spec, home = group.specs[index], group.homes[index]
            if any(owner._parameters.get(attribute) is not copy for owner, attribute in spec.owners):
                problems.append(("replaced", spec.name))
            elif tuple(copy.shape) != spec.shape:
                problems.append(("resized", spec.name))
            elif copy.grad is not None:
                problems.append(("given a gradient", spec.name))
            elif _version(copy) != version or not _same(copy.detach().reshape(-1)[home.start : home.stop], group.local(index)):
                problems.append(("written", spec.name))
            param = group.params[index]
            for key, value in attributes_of(copy).items():
                setattr(param, key, value)
            if param.requires_grad is not copy.requires_grad:
                param.requires_grad_(copy.requires_grad)
            for owner, attribute in spec.owners:
                owner._parameters[attribute] = param
        return problems


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_REMEDIES = {
    "written": "Announce it: zs.gathered(module, write=True).",
    "replaced": "Write in place (p.copy_(...)); to exchange parameters zs.close(model) first.",
    "resized": "zs.close(model) first, resize, then zs.shard() it again.",
    "given a gradient": "Run backward() outside: here it reaches copies, not the model's parameters.",
}


def _settle(copies: list[tuple[ParamGroup, int, _Copy]], problems: list[tuple[str, str]], write: bool) -> None:
    """Agree on what was done inside; take it over or raise, on every rank alike."""
    if write:
        problems = [(what, name) for what, name in problems if what != "written"]
    sums = [zlib.crc32(_raw(copy)) for _, _, copy in copies] if write else []
    comm: Comm = copies[0][0].comm
    everyone = exchange_values(comm, (problems, sums), f"end of gathered({write=})")
    named: dict[str, list[str]] = {}
    for rank, (theirs, _) in enumerate(everyone):
        for what, name in theirs:
            named.setdefault(what, []).append(f"{name} (on rank {rank})")
    for what, names in named.items():
        how = "without write=True" if what == "written" else ""
        raise ShardedWriteError(
            f"{what} inside zs.gathered() {how}: {', '.join(names[:6])}. Nothing was kept. {_REMEDIES[what]}"
        )
    for (group, index, _), given in zip(copies if write else (), zip(*(sums for _, sums in everyone), strict=True), strict=True):
        if len(set(given)) > 1:
            ranks = [rank for rank, value in enumerate(given) if value != given[0]]
            raise ShardedWriteError(
                f"{group.specs[index].name}: ranks {ranks} wrote other values than rank 0 inside zs.gathered("
                "write=True). Write the same on every rank (same seed), or broadcast first. Nothing was kept."
            )
    if write:
        comm.fence_write()
        with torch.no_grad():
            for group, index, copy in copies:
                write_value(group, index, copy)
                if not group.values.sharded:
                    group.put_whole(index)
        comm.fence_read()


def _same(left: Tensor, right: Tensor) -> bool:
    return left.numel() == 0 or bytes(_raw(left)) == bytes(_raw(right))


def _raw(tensor: Tensor) -> Any:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
