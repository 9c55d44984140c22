"""Read and write weights as safetensors files: each rank reads and writes the bytes of its own slices and nothing else.

    file    | length | {name: {dtype, shape, data_offsets}} | w1 . . . . . . . | w2 . . . . . . . | b . |
    ranks       rank 0                                        rank 0 | rank 1    rank 0 | rank 1   rank 0

length is 8 bytes, little-endian; the header is JSON; raw bytes without gaps follow. A folder of several files has an index
`model.safetensors.index.json` {weight_map: {name: file}}. A file has a temporary name until it is complete. It is written by
`file_writer.write_ranges`, each rank its own ranges.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from errno import EIO, EISDIR
from pathlib import Path

import torch
from torch import Tensor, nn

from ..axes import whole_name
from ..errors import ConfigError, OffloadIOError, ZeroshardError
from ..guard import distinct
from ..seam import DirectComm, Engine, StateSlice, engine_of, exchange_values, stays_whole
from ..state import CHUNK_NBYTES, Bulk, Stored, StoredTensor
from ..utils.aligned import bytes_of, empty
from ..utils.dtypes import casts_to
from ..utils.module_names import own_name, own_state
from .directory import sync
from .file_writer import Elements, Range, write_ranges
from .heartbeat import raise_first, telling
from .state_map import HostCopy

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "U64": torch.uint64,
    "I32": torch.int32, "U32": torch.uint32, "I16": torch.int16, "U16": torch.uint16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
FOREIGN_DTYPES = {"F6_E2M3", "F6_E3M2"}  # dtypes of the format that torch does not have
EXTRA_STATE = "_extra_state"  # torch's name for the value of `get_extra_state` in state dicts
EXPANDED = "the model's is expanded, so that its rows share memory, and those stored differ; clone() it in the model"


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict is that of a module's extra state (not of a buffer whose name merely ends so)."""
    return name.rpartition(".")[2] == EXTRA_STATE


@dataclass(frozen=True)
class Buffer:
    """A buffer of a model. kept: its names in the state dict, which hooks may change; names: all names it may be stored under."""

    tensor: Tensor
    kept: list[str]
    names: list[str]

    def stored_in(self, stored: Mapping[str, Stored]) -> Stored | None:
        """Return the stored tensor under the first of its names that is there, or None."""
        return next((stored[name] for name in self.names if name in stored), None)

    @property
    def expanded(self) -> bool:
        """True if elements share memory, as those of `expand` do."""
        return not self.tensor.is_meta and distinct(self.tensor, self.tensor).shape != self.tensor.shape

    def refuses(self, at: Stored) -> bool:
        """Return whether it is expanded, and the stored values differ where the buffer's elements share memory."""
        if not self.expanded:
            return False
        value = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
        at.read(0, value.view(-1))
        return not torch.equal(distinct(value, self.tensor).expand_as(value), value)

    def put(self, given: Tensor) -> None:
        """Set the buffer to `given` (n,)."""
        distinct(self.tensor, self.tensor).copy_(distinct(given.view(self.tensor.shape), self.tensor))


def others_of(model: nn.Module) -> tuple[list[Buffer], dict[str, Tensor]]:
    """Return what a state dict has besides sharded parameters, and tensors that hooks compute for it, by name.

    That is every buffer once, and parameters that stay whole, which are saved and loaded as buffers are.
    """
    params, found = {id(param) for _, param in nn.Module.named_parameters(model)}, dict[int, tuple[Tensor, list[str]]]()
    whole = [each for each in nn.Module.named_parameters(model, remove_duplicate=False) if stays_whole(each[1])]
    for name, buffer in (*model.named_buffers(remove_duplicate=False), *whole):
        found.setdefault(id(buffer), (buffer.detach() if buffer.requires_grad else buffer, []))[1].append(own_name(model, name))
    kept: dict[int, list[str]] = {}
    computed = {}
    for name, value in own_state(model).items():  # compared by object, since hooks may rename entries
        if id(value) in found:
            kept.setdefault(id(value), []).append(name)
        elif isinstance(value, Tensor) and id(value) not in params and not is_extra_state(name):
            computed[name] = value
    taken = {name for names in kept.values() for name in names}
    buffers = []
    for key, (buffer, names) in found.items():
        own = kept.get(key, [])
        buffers.append(Buffer(buffer, own, own + [name for name in names if name not in taken]))
    return buffers, computed


@torch.no_grad()
def stream(
    engine: Engine, values: list[StateSlice], found: dict[str, Stored], stored: dict[str, Stored], computed: bool = True
) -> None:
    """Read this rank's slice of every found parameter (if replicated: all of it), and stored buffers. The rest keeps its values.

    values: the slices of parameters. computed: also load tensors that hooks compute for the state dict.
    """
    model, comm = engine.model, engine.ranks
    comm.fence_write()
    for at, start, memory, put in _reads(model, values, found, stored, "cpu"):
        at.read(start, memory)
        put(memory)
    comm.fence_read()
    if computed:
        give_computed(model, read_computed(model, stored))


def note(model: nn.Module, values: list[StateSlice], found: dict[str, Stored], stored: dict[str, Stored], bulk: Bulk) -> None:
    """Tell `bulk` what `stream` and `read_computed` will read."""
    for at, start, memory, _ in _reads(model, values, found, stored, "meta"):
        bulk.add(at, start, memory)
    read_computed(model, stored, bulk)


def _reads(
    model: nn.Module, values: list[StateSlice], found: dict[str, Stored], stored: dict[str, Stored], device: str
) -> Iterator[tuple[Stored, int, Tensor, Callable[[Tensor], object]]]:
    """Yield what this rank loads: (stored tensor, first element, memory for the elements (n,), what puts them into place)."""
    for each in values:
        if (at := found.get(each.own_name)) is not None:
            yield at, *each.receive(at.dtype, device)
    for buffer in others_of(model)[0]:
        if (at := buffer.stored_in(stored)) is not None:
            yield at, 0, empty(buffer.tensor.numel(), buffer.tensor.dtype, device), buffer.put


def read_computed(model: nn.Module, stored: Mapping[str, Stored], bulk: Bulk | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of those that hooks compute for the state dict, by name. bulk: only tell it what will be read."""
    wanted, device = {name: stored[name] for name in others_of(model)[1] if name in stored}, "cpu" if bulk is None else "meta"
    found = {name: torch.empty(at.shape, dtype=at.dtype, device=device) for name, at in wanted.items()}
    for name, at in wanted.items():
        at.read(0, found[name].view(-1)) if bulk is None else bulk.add(at, 0, found[name].view(-1))
    return found


def give_computed(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Load tensors that hooks computed, through `load_state_dict` of the model, with its buffers and without its parameters."""
    if not values:
        return
    known = model.state_dict(keep_vars=True)
    state = {own_name(model, name): value for name, value in known.items()}
    given = OrderedDict((name, buffer.tensor) for buffer in others_of(model)[0] for name in buffer.kept)
    given.update((name, value.to(state[name].device)) for name, value in values.items() if name in state)
    given._metadata = getattr(known, "_metadata", None)  # type: ignore[attr-defined]
    model.load_state_dict(given, strict=False)


# -- writing -------------------------------------------------------------------------------------------------------


def save_safetensors(model: nn.Module, path: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
    """Write a sharded model's state dict to one safetensors file, without gathering anything (collective).

    Each rank writes its own slices, from wherever they rest, some MiB at a time. Rank 0 also writes buffers, and what comes from
    ranks that do not see the file. Names, shapes and bits are those of `zs.full_state_dict(model)`. Tied tensors are written
    once, under their first name, with the other names in the metadata, as `safetensors.torch.save_model` does. On a mesh with
    model axes parameters are whole, and the file has all stages of a pipeline. The file has another name until it is complete.

    Args:
        path: the file; rank 0's argument counts. A file that exists is replaced.
        dtype: dtype of floating-point tensors in the file, except fp8 and fp4; None: as they rest. torch.float32 takes fp32
            masters where there are any.

    Raises:
        ConfigError: the state dict holds what safetensors has no place for, or dtype is not one of floating-point numbers.
        OffloadIOError: on every rank, if one could not write: the disk is full (found before anything is written), or the folder
            is missing or not writable. Nothing is kept.
        CheckpointError: on every rank, if anything else ended the writing on one (no memory, no thread). Nothing is kept.
    """
    engine = engine_of(model)
    engine.begin("zs.save_safetensors")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"zs.save_safetensors: dtype: expected one of floating-point numbers, or None, got {dtype}.")
    comm, target = engine.world, Path(path)
    tokens = comm.exchange(secrets.token_hex(4).encode(), "zs.save_safetensors: begin")
    scratch = target.with_name(f".{target.name}.{tokens[0].decode()}.tmp")
    mine, whole = _agree_on_listing(engine, dtype)
    file = SafetensorsFile.of(scratch, whole.tensors, whole.metadata)

    def create() -> None:
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "")
        file.create()

    def publish() -> None:
        sync(scratch)
        os.replace(scratch, target)
        sync(target.parent)

    try:
        _agreed(comm, file, create if comm.rank == 0 else lambda: None)
        _write(engine, file, mine)
        _agreed(comm, file, publish if comm.rank == 0 else lambda: None)
    except BaseException:
        if comm.rank == 0:
            scratch.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class _Listing:
    """Content of a model's state dict.

    tensors: dtype and shape of whole tensors by name. metadata: those of the file, with other names of tied tensors.
    sources: (name, where its elements are: a parameter's value and its master, or a tensor that is no parameter).
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[str, tuple[StateSlice, StateSlice] | Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype | None) -> _Listing:
        """List the state dict of a model. Raises ConfigError where safetensors cannot store a value."""
        engine = engine_of(model)
        slices = {id(each.param): (each, master) for each, master in zip(*map(engine.slices, ("value", "master")), strict=True)}
        listing, first_names = cls(metadata={"format": "pt"}), dict[int, str]()
        for own, value in own_state(model).items():  # compared by object: hooks may rename
            held = slices.get(id(value))
            name = whole_name(own) if held is not None and held[0].tile else own
            if first_names.setdefault(id(value), name) != name:
                listing.metadata[name] = first_names[id(value)]
                continue
            if not isinstance(value, Tensor):
                raise ConfigError(f"zs.save_safetensors: {name} is a {type(value).__name__}, and safetensors holds tensors only.")
            if name == "__metadata__":
                raise ConfigError("zs.save_safetensors: __metadata__ is a name that safetensors itself uses; rename the tensor.")
            stored = casts_to(value.dtype, dtype)
            if stored not in SAFETENSORS_NAMES:
                expected = ", ".join(map(str, SAFETENSORS_NAMES))
                raise ConfigError(
                    f"zs.save_safetensors: {name} is {stored}; expected one of {expected}. zs.save takes all dtypes."
                )
            listing.tensors[name] = (stored, tuple(value.shape) if held is None else held[0].shape)
            listing.sources.append((name, value if held is None else held))
        return listing


def _agree_on_listing(engine: Engine, dtype: torch.dtype | None) -> tuple[_Listing, _Listing]:
    """Return what this rank's stage writes and what all pipeline stages write, of which each tells the others (collective)."""
    mine, problem, world, stages = _Listing(), None, engine.world, engine.topology.stages
    try:
        mine = _Listing.of(engine.model, dtype)
    except ConfigError as error:
        if world is engine.ranks:
            raise
        problem = error
    if world is engine.ranks:
        return mine, mine
    tells = engine.topology.leads and len(stages) > 1
    told = exchange_values(world, (problem, (mine.tensors, mine.metadata) if tells else None), "zs.save_safetensors: names")
    raise_first([failed for failed, _ in told], world.rank, problem)
    if len(stages) == 1:
        return mine, mine
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    metadata: dict[str, str] = {}
    for number, ranks in enumerate(stages):
        _, (names, ties) = told[ranks[0]]
        if number == engine.topology.stage:
            mine = replace(mine, sources=[each for each in mine.sources if each[0] not in tensors])  # earlier stages write those
        for name, (kind, shape) in names.items():
            kept = tensors.setdefault(name, (kind, tuple(shape)))
            if kept != (kind, tuple(shape)):
                raise ConfigError(
                    f"zs.save_safetensors: {name} is {kept} at one stage of the pipeline and {kind, tuple(shape)} at another: rename one."
                )
        metadata |= {name: first for name, first in ties.items() if name not in tensors}
    return mine, _Listing(tensors, metadata)


def elements_of(kind: str, shape: tuple[int, ...], times: float) -> tuple[int, ...]:
    """Convert an F4 shape: the format counts half bytes (times=2), torch's dtype counts pairs of them (times=0.5)."""
    return (*shape[:-1], int(shape[-1] * times)) if kind == "F4" and shape else shape


@dataclass(frozen=True)
class SafetensorsFile:
    """A file that is to be written. places: where each tensor lies in it."""

    path: Path
    header: bytes
    nbytes: int
    places: dict[str, StoredTensor]

    @classmethod
    def of(cls, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> SafetensorsFile:
        """Lay out the file: tensors of large elements first, so that all are aligned; then by name."""
        entries: dict[str, object] = {"__metadata__": metadata}
        begins, end = {}, 0
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            begins[name], end = end, end + math.prod(shape) * dtype.itemsize
            kind = SAFETENSORS_NAMES[dtype]
            entries[name] = {"dtype": kind, "shape": elements_of(kind, shape, 2), "data_offsets": (begins[name], end)}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(path, header, len(header) + end, {
            name: StoredTensor(path, len(header) + begins[name], math.prod(shape) * dtype.itemsize, dtype, shape)
            for name, (dtype, shape) in tensors.items()
        })  # fmt: skip

    def create(self) -> None:
        """Make the file at its full length. Raises OSError, also where the disk is too small."""
        with open(self.path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, self.nbytes)


def _agreed(comm: DirectComm, file: SafetensorsFile, action: Callable[[], None]) -> None:
    """Carry out an action; what ends it on one rank, every rank raises, for the disk as OffloadIOError (collective)."""
    problem: Exception | None = None
    try:
        action()
    except Exception as error:
        if isinstance(error, OSError) or (isinstance(error, OffloadIOError) and error.file == str(file.path)):
            what = f"rank {comm.rank}: saving {file.nbytes:,} bytes"
            problem = OffloadIOError(str(file.path), 0, error.errno or EIO, what)
        elif isinstance(error, ZeroshardError):
            raise  # of a peer, or of a swap file: all ranks know it already
        else:  # no memory, no thread, ...
            problem = telling(error, "zs.save_safetensors", comm.rank)
    raise_first(exchange_values(comm, problem, "zs.save_safetensors"), comm.rank, problem)


def _write(engine: Engine, file: SafetensorsFile, listing: _Listing) -> None:
    """Write all tensors; ranks that do not see the file send their ranges, and rank 0 writes them (collective)."""
    comm, sees = engine.world, file.path.exists()
    all_see = all(comm.exchange(b"1" if sees else b"", "zs.save_safetensors: who sees the file"))
    ranges = _ranges(engine, file, listing)

    def exchanged() -> Iterator[Range]:
        """Yield the ranges of ranks that do not see the file, until no rank has more (collective)."""
        mine = iter(()) if sees else _in_bytes(ranges, CHUNK_NBYTES // comm.world_size)
        while sent := [each for each in exchange_values(comm, next(mine, None), "zs.save_safetensors: slices") if each]:
            yield from sent

    def receive() -> None:
        sent = exchanged()
        try:
            if comm.rank == 0:
                write_ranges(file.path, sent)
        finally:
            deque(sent, maxlen=0)  # all that other ranks send, so that they stay in step

    _agreed(comm, file, lambda: write_ranges(file.path, ranges) if sees else None)
    if not all_see:
        _agreed(comm, file, receive)


@torch.no_grad()
def _ranges(engine: Engine, file: SafetensorsFile, listing: _Listing) -> Iterator[Range]:
    """Yield the ranges of the file that this rank writes; rank 0 writes the header."""
    engine.states.wait()
    if engine.world.rank == 0:
        yield 0, file.header
    for name, source in listing.sources:
        if isinstance(source, Tensor):
            if engine.topology.leads:
                yield from _placed(file.places[name], HostCopy(source), 0, source.numel())
            continue
        each, master = source
        if file.places[name].dtype != each.dtype:
            master.refresh()  # of other parameters nobody reads masters, which may not have taken memory yet
            each = master
        if each.counted:
            yield from _placed(file.places[name].cut(each.part), each, each.start, each.stop)


def _placed(target: Stored, source: StateSlice | HostCopy, start: int, stop: int) -> Iterator[Range]:
    """Yield the ranges of a file for elements [start, stop) of a tensor in it, which are those of `source`."""
    for at, first, place in target.parts(start, torch.empty(stop - start, device="meta")):
        begin = int(place.storage_offset())
        read = lambda number, out, begin=begin: source.read(begin + number, out)  # noqa: E731
        yield at.offset + first * at.dtype.itemsize, Elements(at.dtype, place.numel(), read)


def _in_bytes(ranges: Iterable[Range], nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield ranges as bytes, to be sent to another rank, up to about `nbytes` at a time."""
    for offset, content in ranges:
        if isinstance(content, bytes):
            yield offset, content
            continue
        size = content.dtype.itemsize
        step = max(nbytes // size, 1)
        for first in range(0, content.numel, step):
            values = torch.empty(min(step, content.numel - first), dtype=content.dtype, device="cpu")
            content.read(first, values).wait()
            yield offset + first * size, bytes(bytes_of(values))
