"""Notices what was done to a model behind the library's back.

Parameters that came, went or got another dtype, and replicated ones into which ranks have written different values.
"""

from __future__ import annotations

import operator
import struct
import zlib
from itertools import repeat

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from ..errors import ModelChanged, ModelMismatch
from ..utils import torch_compat
from .unit import ParamGroup


class ModelWatch:
    """Looks at a model before each forward; microseconds where nothing has changed."""

    def __init__(self, model: nn.Module, groups: list[ParamGroup]) -> None:
        self.model = model
        self._tree = _Tree(model)
        self._params = [(param, spec.name) for group in groups for param, spec in zip(group.params, group.specs, strict=True)]
        self._dtypes = [param.dtype for param, _ in self._params]

    def check(self, gathered: bool, thoroughly: bool = False) -> None:
        """Raise ModelChanged where parameters are not those of zs.shard() (a submodule may be wrapped).

        gathered: inside `zs.gathered`, where other tensors stand in their places. thoroughly: see also one that stands in the place
            of another, which units notice when they are used; milliseconds.
        """
        with torch_compat.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            dtypes = [param.dtype for param, _ in self._params]
        if dtypes != self._dtypes:
            self._complain_dtype()
        if gathered or (not thoroughly and self._tree.stands()):
            return
        names = {id(param): name for param, name in self._params}
        present = {id(p): name for name, p in self.model.named_parameters()}
        gone = [name for key, name in names.items() if key not in present]
        new = [name for key, name in present.items() if key not in names]
        if gone or new:
            raise ModelChanged(
                f"parameter {(gone + new)[0]} was replaced, added or removed after zs.shard(). "
                "zs.close(model) first, change the model (resize, adapt), then zs.shard() it again."
            )
        self._tree = _Tree(self.model)

    def _complain_dtype(self) -> None:
        for (param, name), known in zip(self._params, self._dtypes, strict=True):
            if param.dtype != known:
                raise ModelChanged(
                    f"parameter {name} was converted from {known} to {param.dtype} after zs.shard(), by half(), "
                    "to(dtype) or the like. Give precision='bf16' or 'fp16' to zs.shard(), or convert the model before it."
                )


class _Tree:
    """The modules of a model and which parameters they have: seen in microseconds whether any came or went."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables = map(torch_compat.own_modules, modules)
        self._children = [(table, dict(table)) for table in tables if table]
        self._params = [torch_compat.own_parameters(module) for module in modules]
        self._counts = [*map(len, self._params)]
        absent = [(params, name) for params in self._params for name, param in params.items() if param is None]
        self._absent = [params for params, _ in absent], [name for _, name in absent]

    def stands(self) -> bool:
        """True if every module has the children and the number of parameters that it had."""
        return (
            all(modules == known for modules, known in self._children)
            and [*map(len, self._params)] == self._counts
            and all(map(operator.is_, map(dict.get, *self._absent), repeat(None)))
        )


class ValueWatch:
    """Notices where ranks have written different values into a replicated parameter at rest, when they next meet.

    A look at version counters, and a number in a message that is sent anyway. Values are read where something was written.
    """

    def __init__(self, comm: Comm, groups: list[ParamGroup]) -> None:
        self.comm = comm
        alone = comm.world_size == 1 or comm.imagined
        self._groups = [group for group in groups if not (group.values.sharded or alone)]
        self._written: list[tuple[ParamGroup, int]] = []

    def fingerprint(self) -> int:
        """Of what this rank has written since ranks last agreed; 0: nothing."""
        self._written = [(group, index) for group in self._groups for index in group.masters.unseen()]
        return zlib.crc32(_packed(self._sums())) + 1 if self._written else 0

    def agree(self, fingerprints: list[int] | None = None) -> None:
        """Raise ModelMismatch on every rank where values differ (collective).

        fingerprints: of all ranks, where they have been exchanged.
        """
        if not self._groups:
            return
        if fingerprints is None:
            mine = struct.pack("<Q", self.fingerprint())
            fingerprints = [struct.unpack("<Q", part)[0] for part in self.comm.exchange(mine, "values written at rest")]
        if len(set(fingerprints)) > 1:
            self._compare()
        for group, index in self._written:  # masters follow at the next step
            group.masters.seen(index)

    def _sums(self, numbers: set[int] = frozenset()) -> dict[int, int]:  # type: ignore[assignment]
        """By the parameter's number: of what was written, or of `numbers`."""
        wanted = numbers or {group.specs[index].number for group, index in self._written}
        named = [(s.number, p) for g in self._groups for s, p in zip(g.specs, g.params, strict=True)]
        return {number: _checksum(param) for number, param in named if number in wanted}

    def _compare(self) -> None:
        """What any rank has written, on all ranks: some may have written what the others had."""
        everyone = self.comm.exchange(_packed(self._sums()), "values written at rest: which")
        numbers = {number for part in everyone for number, _ in struct.iter_unpack("<II", part)}
        everyone = self.comm.exchange(_packed(self._sums(numbers)), "values written at rest: compare")
        columns = [dict(struct.iter_unpack("<II", part)) for part in everyone]
        names = {spec.number: spec.name for group in self._groups for spec in group.specs}
        found = []
        for number in sorted(numbers):
            others = [rank for rank, sums in enumerate(columns) if sums[number] != columns[0][number]]
            if others:
                found.append(f"{names[number]} (ranks {', '.join(map(str, others))} hold other values than rank 0)")
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ModelMismatch(
                "ranks have written different values into parameters that are the same on all of them: "
                f"{', '.join(found[:5])}{more}. Write the same on every rank (same seed, or broadcast first), or in `with "
                "zs.gathered(module, write=True):`, which compares at once. A forward that writes its parameters "
                "(nn.Embedding(max_norm=...)) writes what its rank's batch asks for."
            )


def _packed(sums: dict[int, int]) -> bytes:
    return b"".join(struct.pack("<II", number, value) for number, value in sorted(sums.items()))


_ROW_NBYTES = 256


def _checksum(tensor: Tensor) -> int:
    """Of a tensor's bits: sums of short rows at the speed of memory, and a CRC of these."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    head = data.numel() // _ROW_NBYTES * _ROW_NBYTES
    rows = data[:head].view(torch.int64).view(-1, _ROW_NBYTES // 8).sum(1)
    return zlib.crc32(data[head:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))
