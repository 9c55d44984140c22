"""Changes that a program makes to a sharded model directly.

It finds parameters that were added, removed or converted, and different values that ranks wrote to a parameter.
"""

from __future__ import annotations

import operator
import struct
import zlib
from itertools import repeat

import torch
from torch import Tensor, nn

from ..engine import watch
from ..engine.comm.base import DirectComm
from ..engine.unit import ParamGroup
from ..errors import ModelChanged, ModelMismatch, changed_late
from ..tensor.attributes import stays_whole, whole_now
from ..utils import torch_compat


class ModelWatch(watch.ModelWatch):
    """Checks the parameters of a model before each forward, in microseconds if nothing has changed."""

    def __init__(self, model: nn.Module, groups: list[ParamGroup]) -> None:
        self.model = model
        self._params = [(param, spec.name) for group in groups for param, spec in zip(group.params, group.specs, strict=True)]
        self._dtypes = [param.dtype for param, _ in self._params]
        self._at_first_use = any(group.runtime.shows_masters for group in groups[:1])
        self._note_tree()

    def _note_tree(self) -> None:
        """Note the modules' children and their numbers of parameters, which are compared with the model in microseconds."""
        modules = list(self.model.modules())
        tables = map(torch_compat.own_modules, modules)
        self._children = [(table, dict(table)) for table in tables if table]
        self._tables = [torch_compat.own_parameters(module) for module in modules]
        self._counts = [*map(len, self._tables)]
        absent = [(table, name) for table in self._tables for name, param in table.items() if param is None]
        self._absent = [table for table, _ in absent], [name for _, name in absent]

    def check(self, gathered: bool, thoroughly: bool = False) -> None:
        """Raise ModelChanged if the model has other parameters than zs.shard() installed (wrapped submodules are no change).

        gathered: inside `zs.gathered`, where modules hold other tensors. thoroughly: also detect a parameter that replaced
            another one, in milliseconds; units detect it only when they are used.
        """
        with torch_compat.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            dtypes = [param.dtype for param, _ in self._params]
        if dtypes != self._dtypes:
            params = zip(self._params, self._dtypes, dtypes, strict=True)
            # inside `zs.gathered` a parameter that shows its master at rest is in the dtype of computation
            converted = ((name, known, now) for (p, name), known, now in params if now != known and id(p) not in whole_now)
            for name, known, now in converted:
                raise ModelChanged(
                    f"parameter {name} was converted from {known} to {now} after zs.shard(), by half(), to(dtype) or the like. Give "
                    "precision='bf16' or 'fp16' to zs.shard(), or convert the model before it."
                )
        if gathered:
            return
        if (
            not thoroughly
            and all(children == known for children, known in self._children)
            and [*map(len, self._tables)] == self._counts
            and all(map(operator.is_, map(dict.get, *self._absent), repeat(None)))
        ):
            return
        names = {id(param): name for param, name in self._params}
        present = {id(p): name for name, p in nn.Module.named_parameters(self.model)}  # torch's own: a program may hide some
        gone = [name for key, name in names.items() if key not in present]
        own = {name for name, param in nn.Module.named_parameters(self.model) if stays_whole(param)}
        new = [name for key, name in present.items() if key not in names and name not in own]
        if gone or new:
            what = f"parameter {(gone + new)[0]} was replaced, added or removed"
            raise changed_late(what, "change the model (resize, adapt)", self._at_first_use)
        self._note_tree()


class ValueWatch(watch.ValueWatch):
    """Detects, at the next exchange of ranks, that they have written different values to a parameter at rest.

    Of replicated parameters it compares version counters, then values. Where each rank writes a slice it compares how the whole
    was computed (`traces`). It adds a number to a message that is sent in any case. Values are read only if written.
    """

    def __init__(self, comm: DirectComm, groups: list[ParamGroup]) -> None:
        self.comm = comm
        # of experts data-parallel ranks hold different ones
        self._groups = [group for group in groups if not (comm.alone or group.topology.cut)]
        self._written: list[tuple[ParamGroup, int]] = []

    def watches(self, group: ParamGroup) -> bool:
        """Return whether ranks compare what they write to the group's parameters and states."""
        return group in self._groups

    def fingerprint(self) -> int:
        """Return a checksum of the parameters that this rank has written since the last `agree`; 0 if it has written none."""
        self._written = [(group, index) for group in self._groups for index in group.masters.unseen()]
        return zlib.crc32(_packed(self._sums())) + 1 if self._written or any(g.masters.traces for g in self._groups) else 0

    def agree(self, fingerprints: list[int] | None = None) -> None:
        """Raise ModelMismatch on every rank if written values differ between ranks (collective).

        fingerprints: the fingerprint of each rank, if they were exchanged already.
        """
        if not self._groups:  # a world of one
            return
        if fingerprints is None:
            _, told = self.comm.compare(struct.pack("<Q", self.fingerprint()), "values written at rest")
            fingerprints = [struct.unpack("<Q", part)[0] for part in told or ()]
        found = []
        if len(set(fingerprints)) > 1:  # compare, on all ranks, every parameter that any rank has written
            everyone = self.comm.exchange(_packed(self._sums()), "values written at rest: which")
            numbers = {number for part in everyone for number, _ in struct.iter_unpack("<II", part)}
            everyone = self.comm.exchange(_packed(self._sums(numbers)), "values written at rest: compare")
            columns = [dict(struct.iter_unpack("<II", part)) for part in everyone]
            names = {spec.number: (spec.name, group) for group in self._groups for spec in group.specs}
            for number in sorted(numbers):
                others = [rank for rank, sums in enumerate(columns) if sums[number] != columns[0][number]]
                if others:
                    name, group = names[number]
                    how = "have written it otherwise than" if group.values.sharded else "hold other values than"
                    found.append(f"{name} (ranks {', '.join(map(str, others))} {how} rank 0)")
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ModelMismatch(
                "ranks have written different values into parameters, their optimizer states or averages: "
                f"{', '.join(found[:5])}{more}. Write the same on every rank (same seed, or broadcast first), or in `with "
                "zs.gathered(module, modifier_rank=0):`, which keeps what rank 0 writes. A forward that writes its parameters "
                "(nn.Embedding(max_norm=...)) writes what its rank's batch asks for."
            )
        for group in self._groups:
            group.masters.traces.clear()
        for group, index in self._written:  # masters follow at the next step
            group.masters.seen(index)

    def _sums(self, numbers: set[int] = frozenset()) -> dict[int, int]:  # type: ignore[assignment]
        """Return number -> checksum of the parameters in `numbers`; if it is empty, of parameters that this rank has written."""
        traced = [(group, index) for group in self._groups for index, _ in group.masters.traces]
        wanted = numbers or {group.specs[index].number for group, index in [*self._written, *traced]}
        places = [(group, index) for group in self._groups for index in range(len(group.specs))]
        return {spec.number: _state_of(group, index) for group, index in places if (spec := group.specs[index]).number in wanted}


def _state_of(group: ParamGroup, index: int) -> int:
    """Return a checksum of a replicated parameter, and of the traces of what was written."""
    traces = sorted((what, trace) for (each, what), trace in group.masters.traces.items() if each == index)
    return zlib.crc32(repr(traces).encode()) ^ (0 if group.values.sharded else _checksum(group.params[index]))


def _packed(sums: dict[int, int]) -> bytes:
    return b"".join(struct.pack("<II", number, value) for number, value in sorted(sums.items()))


_ROW_NBYTES = 256  # 32 sums of int64 in a row


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits: the CRC of int64 sums of rows of _ROW_NBYTES, which run at memory bandwidth."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    head = data.numel() // _ROW_NBYTES * _ROW_NBYTES
    rows = data[:head].view(torch.int64).view(-1, _ROW_NBYTES // 8).sum(1)
    return zlib.crc32(data[head:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))
