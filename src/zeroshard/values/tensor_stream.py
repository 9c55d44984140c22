"""`zs.stream_full_tensors`: gather the whole tensors of a sharded model, some at a time, within a budget of bytes.

    flat buffer   | w0 . . | w1 . . . . . | b1 | w2 . . . . |      neighbours that fit the budget are one stretch,
                  '- batch 1 -'------ batch 2 -----'-- 3 ---'      gathered into memory of its own, of which tensors are views

A stretch is gathered chunk by chunk through staging buffers: each chunk has the next elements of every rank's piece. So only the
requested tensors are gathered, even of a unit that is larger than the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..config import Placement
from ..engine.ledger import GATHERED
from ..engine.rest import Rest
from ..engine.runtime import Runtime, runtime_of
from ..engine.unit import ParamGroup
from ..engine.verbs import begin
from ..errors import ConfigError, did_you_mean
from ..tensor.part import Part, Piece
from ..tensor.sharded_tensor import trace_of
from ..utils.dtypes import casts_to
from ..utils.module_names import own_name, own_state
from .chunked_gather import ChunkedGather

_CHUNK_NBYTES = 8 << 20  # largest staging buffer of one rank
_STAGING = 8  # all staging buffers together take at most 1/8 of the budget

Source = Callable[[ParamGroup], Rest]  # returns the resting place of a group's values: of its shard, or of the whole group


@dataclass(eq=False)
class _Item:
    """One tensor of the state dict. sources: (group, index, part or None) of each parameter in it; none for a buffer."""

    names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[tuple[ParamGroup, int, Part | None]] = field(default_factory=list)
    buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that gathering takes: the tensor, and its largest part where it is joined from parts."""
        numel = math.prod(self.shape)
        if self.distributed:
            numel *= 2  # not the part's real size, since batches must be the same on every rank of the mesh
        elif len(self.sources) > 1:
            numel += max(group.layout.slots[index].numel for group, index, _ in self.sources)
        return numel * self.dtype.itemsize

    @property
    def distributed(self) -> bool:
        """True if tensor-parallel ranks have parts of it."""
        return any(group.specs[index].distribution is not None for group, index, _ in self.sources)


def stream_full_tensors(
    model: nn.Module,
    *,
    max_nbytes: int = 1 << 30,
    masters: bool = False,
    dtype: torch.dtype | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the model's state dict in parts: dictionaries of whole tensors, on every rank (collective: all ranks iterate alike).

    Args:
        max_nbytes: bytes of the tensors of one dictionary. A larger tensor comes alone. Staging buffers of at most an eighth of
            it, and the padding between neighbours, are needed beside it.
        masters: give fp32 master weights where there are any.
        dtype: dtype of floating-point parameters, except fp8 and fp4; None: as they are.
        names: the keys of `zs.full_state_dict(model)` to yield; None: all.

    Tensors of one dictionary may share memory and belong to the caller: drop them before the next one, or memory holds two.
    Tied names share one tensor. Tiles are joined, and so are parts cut by tensor parallelism (which count twice for
    `max_nbytes`). A stage of a pipeline yields its own tensors. The order is unit by unit, parameters before buffers.

    Raises:
        ConfigError: an option is wrong, or the model lacks a name.
    """
    runtime = runtime_of(model)
    if isinstance(max_nbytes, bool) or not isinstance(max_nbytes, int) or max_nbytes < 1:
        raise ConfigError(f"zs.stream_full_tensors: max_nbytes: expected an integer of at least 1, got {max_nbytes!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"zs.stream_full_tensors: dtype: expected a floating-point torch.dtype or None, got {dtype!r}.")
    begin(runtime, "zs.stream_full_tensors", *(["masters"] if masters else []))

    def source(group: ParamGroup) -> Rest:
        return group.masters.stepped if masters else group.values.rest

    items = _chosen(_items(runtime, source, dtype), names and [own_name(model, name) for name in names])
    return _Stream(runtime, source, masters, max_nbytes).run(items)


def full_tensors(model: nn.Module, source: Source) -> dict[str, Tensor]:
    """Return the full state dict with parameters' values taken from `source`, such as zs.ema's averages (collective)."""
    runtime, found = runtime_of(model), dict[str, Tensor]()
    for batch in _Stream(runtime, source, True, 1 << 30, "AveragedModel.full_state_dict").run(_items(runtime, source, None)):
        found |= batch
    return found


@torch.no_grad()
def put_full_tensors(
    model: nn.Module, target: Callable[[ParamGroup], Rest | None], given: Mapping[str, Tensor], verb: str
) -> None:
    """Write this rank's slices of whole tensors into `target(group)`, which holds its shard of the group; None: of a group left as
    it is (not collective; the next step refuses values that ranks give differently).

    Raise ConfigError, which begins with `verb`, if a tensor is missing or has another shape; nothing was written then.
    """
    writes: list[tuple[Rest, ParamGroup, int, Tensor]] = []
    for item in _items(runtime_of(model), lambda group: group.values.rest, None):
        taken = [(rest, group, index) for group, index, _ in item.sources if (rest := target(group)) is not None]
        value = next((given[name] for name in item.names if name in given), None)
        if taken and (not isinstance(value, Tensor) or tuple(value.shape) != item.shape):
            got = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else "nothing"
                if value is None
                else repr(value)
            )
            raise ConfigError(
                f"{verb}: {item.names[0]}: expected a tensor of shape {item.shape}, got {got}. Nothing was changed."
            )
        writes += [(rest, group, index, value) for rest, group, index in taken if value is not None]
    watch = runtime_of(model).values
    for rest, group, index, value in writes:
        spec, piece = group.specs[index], group.homes[index].piece
        if watch.watches(group):
            place = next((place for place, average in enumerate(group.averages) if average is rest), -1)
            group.masters.note(index, trace_of(value), True, f"average {place}")
        if not spec.absent:
            whole = value if spec.part is None else spec.part.of(value)
            rest.store(piece.shard_offset, whole.reshape(-1)[piece.start : piece.stop].to(rest.dtype))


def _items(runtime: Runtime, source: Source, dtype: torch.dtype | None) -> list[_Item]:
    """Return all tensors of the state dict, parameters in the order of units and then buffers."""
    state = own_state(runtime.model)  # names by object, since hooks may rename them
    known = dict[int, list[str]]()
    for name, value in state.items():
        known.setdefault(id(value), []).append(name)
    whole: dict[str, _Item] = {}
    items: list[_Item] = []
    for group, index in ((each, index) for each in runtime.groups for index in range(len(each.specs))):
        spec, names = group.specs[index], known.pop(id(group.params[index]), [])
        piece = next((owner for owner, _ in spec.owners if isinstance(owner, Piece)), None)
        names = [name if piece is None else piece.whole_name(name) for name in names]
        part = spec.part if spec.distribution is None else None
        if names and names[0] in whole:
            whole[names[0]].sources.append((group, index, part))
        elif names:
            items.append(_Item(names, spec.whole_shape, casts_to(source(group).dtype, dtype), [(group, index, part)]))
            whole[names[0]] = items[-1]
    for name, value in state.items():
        if id(value) in known and isinstance(value, Tensor):
            items.append(_Item([name], tuple(value.shape), value.dtype, buffer=value))
    return items


def _chosen(items: list[_Item], names: Iterable[str] | None) -> list[_Item]:
    """Return the items with a wanted name, each with only its wanted names. Raises ConfigError for unknown names."""
    if names is None:
        return items
    wanted, known = set(names), {name for item in items for name in item.names}
    for name in sorted(wanted - known):
        raise ConfigError(f"zs.stream_full_tensors: names: the model has no {name!r}.{did_you_mean(name, known)}")
    for item in items:
        item.names = [name for name in item.names if name in wanted]
    return [item for item in items if item.names]


class _Stream:
    """One iteration over batches of items."""

    def __init__(
        self, runtime: Runtime, source: Source, masters: bool, max_nbytes: int, verb: str = "zs.stream_full_tensors"
    ) -> None:
        self.verb, self.needed = verb, ("masters",) if masters else ()  # for the check before each batch
        self.runtime, self.source, self.masters, self.max_nbytes = runtime, source, masters, max_nbytes
        # two staging buffers of this size, and one chunk of every rank
        nbytes = min(_CHUNK_NBYTES, max_nbytes // (_STAGING * (runtime.topology.shards.world_size + 2)))
        comms = dict.fromkeys(group.topology.shards for group in runtime.groups)
        self.gathers = {comm: ChunkedGather(comm, runtime.tiers.ledger, nbytes // len(comms)) for comm in comms}

    def run(self, items: list[_Item]) -> Iterator[dict[str, Tensor]]:
        """Yield a dictionary of whole tensors for each batch (collective)."""
        ledger = self.runtime.tiers.ledger
        try:
            for batch in self._batches(items):
                begin(self.runtime, self.verb, *self.needed, note=False)
                nbytes = sum(item.nbytes for item in batch)
                ledger.enter(GATHERED, nbytes)
                try:
                    yield self._gather(batch)
                finally:
                    ledger.strike(GATHERED, nbytes)
        finally:
            for each in self.gathers.values():
                each.close()

    def _batches(self, items: list[_Item]) -> Iterator[list[_Item]]:
        batch: list[_Item] = []
        for item in items:
            if batch and sum(each.nbytes for each in batch) + item.nbytes > self.max_nbytes:
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    @torch.no_grad()
    def _gather(self, batch: list[_Item]) -> dict[str, Tensor]:
        self.runtime.comm.fence_read()  # peers have finished writing their shards
        if self.masters:
            self.runtime.gate.refresh({id(group): group for item in batch for group, _, _ in item.sources}.values())
        found: dict[str, Tensor] = {}
        for stretch in _stretches(batch):
            for item, value in zip(stretch, self._values(stretch), strict=True):
                found |= dict.fromkeys(item.names, value)
        return found

    def _values(self, stretch: list[_Item]) -> list[Tensor]:
        first = stretch[0]
        if first.buffer is not None:  # a buffer is whole on every rank
            return [first.buffer.detach().clone()]
        if len(first.sources) == 1:
            slots = [group.layout.slots[index] for item in stretch for group, index, _ in item.sources]
            flat = self._range(first.sources[0][0], slots[0].offset, slots[-1].stop, first.dtype)
            values = [flat[slot.offset - slots[0].offset : slot.stop - slots[0].offset].view(slot.shape) for slot in slots]
            specs = [group.specs[index] for item in stretch for group, index, _ in item.sources]
            return [spec.complete(value) for spec, value in zip(specs, values, strict=True)]
        whole = torch.empty(first.shape, dtype=first.dtype, device=self.runtime.comm.device)
        for group, index, part in first.sources:
            slot = group.layout.slots[index]
            assert part is not None
            part.of(whole).copy_(self._range(group, slot.offset, slot.stop, first.dtype).view(slot.shape))
        return [whole]

    def _range(self, group: ParamGroup, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Gather elements [start, stop) of a group's flat buffer into new memory (collective)."""
        comm, layout, rest = group.comm, group.layout, self.source(group)
        values = group.values
        if rest is values.rest and (values.mapped or (values.replicated and not values.behind)):
            return values.full[start:stop].to(dtype, copy=True)
        if rest.numel == layout.numel and self.runtime.config.row.optimizer is Placement.REPLICATED:  # unsharded masters
            if values.behind:
                group.gather().wait()
            return rest.load(start, stop).to(dtype, copy=True)
        out = torch.empty(stop - start, dtype=dtype, device=comm.device)
        bounds = [layout.shard_range(rank) for rank in range(comm.world_size)]
        pieces = [(max(start, begin), max(min(stop, end), start, begin)) for begin, end in bounds]
        size, content, first = dtype.itemsize, out.view(torch.uint8), pieces[comm.rank][0] - bounds[comm.rank][0]

        def mine(begin: int, end: int) -> Tensor:
            return rest.load(first + begin // size, first + end // size).to(dtype).contiguous().view(torch.uint8)

        def take(rank: int, begin: int, part: Tensor) -> None:
            at = (pieces[rank][0] - start) * size + begin
            content[at : at + part.numel()].copy_(part)

        self.gathers[comm].run([(end - begin) * size for begin, end in pieces], mine, take, group.values.label)
        return out


def _stretches(batch: list[_Item]) -> Iterator[list[_Item]]:
    """Yield the batch as stretches: items of one dtype whose slots are adjacent in one flat buffer."""
    stretch: list[_Item] = []
    following = None  # (dtype, group, index) of an item that continues the stretch; None: no item does
    for item in batch:
        ends = [(item.dtype, group, index) for group, index, _ in item.sources]
        if stretch and (len(ends) != 1 or ends[0] != following):
            yield stretch
            stretch = []
        stretch.append(item)
        following = (item.dtype, ends[0][1], ends[0][2] + 1) if len(ends) == 1 else None
    if stretch:
        yield stretch
