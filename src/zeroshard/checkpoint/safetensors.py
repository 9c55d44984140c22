"""Read and write weights as safetensors files: each rank reads and writes the bytes of its own slices and nothing else.

    file    | length | {name: {dtype, shape, data_offsets}} | w1 . . . . . . . | w2 . . . . . . . | b . |
    ranks       rank 0                                        rank 0 | rank 1    rank 0 | rank 1   rank 0

length is 8 bytes, little-endian; the header is JSON; raw bytes without gaps follow. A folder of several files has an index
`model.safetensors.index.json` {weight_map: {name: file}}. A file has a temporary name until it is complete. It is written through
the page cache, unlike a rank's own file (rank_file.py): blocks of it belong to several ranks, and direct I/O needs one writer.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from errno import EIO, EISDIR
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm.base import DirectComm
from ..comm.codec import exchange_values
from ..errors import ConfigError, OffloadIOError
from ..memory.io.aligned import bytes_of, empty
from ..memory.io.tensor_reader import CHUNK_NBYTES, Bulk, Stored, StoredTensor
from ..tensor.tiled_parameter import Part, part_of, whole_name
from ..utils.dtypes import casts_to
from ..zero.parameter import ParamSpec
from ..zero.rank_consistency import distinct
from ..zero.runtime import Runtime, runtime_of
from ..zero.shard_model import write_value
from ..zero.unit import ParamGroup
from .directory import sync
from .heartbeat import raise_first

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


def prefixes_of(model: nn.Module) -> dict[int, list[str]]:
    """Return id of each module -> its names, in order; a module that is registered more than once has several."""
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(prefix)
    return found


def names_of(prefixes: dict[int, list[str]], spec: ParamSpec) -> list[str]:
    """Return all names of a parameter, those of its ties included. For a tile: the names of the whole parameter."""
    names = [(f"{prefix}.{a}" if prefix else a, part_of(o, a)) for o, a in spec.owners for prefix in prefixes.get(id(o), ())]
    return [name if part is None else whole_name(name) for name, part in names]  # a tensor-parallel shard has the whole's name


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
        value = _read_buffer(self.tensor, at)
        return not torch.equal(distinct(value, self.tensor).expand_as(value), value)


def others_of(model: nn.Module) -> tuple[list[Buffer], dict[str, Tensor]]:
    """Return what a state dict has besides parameters: every buffer once, and tensors that hooks compute for it, by name."""
    params, found = {id(param) for param in model.parameters()}, dict[int, tuple[Tensor, list[str]]]()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found.setdefault(id(buffer), (buffer, []))[1].append(name)
    kept: dict[int, list[str]] = {}
    computed, state = {}, model.state_dict(keep_vars=True)
    for name, value in state.items():  # compared by object, since hooks may rename entries
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
def stream(runtime: Runtime, found: dict[str, Stored], stored: dict[str, Stored], computed: bool = True) -> None:
    """Read this rank's slice of every found parameter (if replicated: all of it), and stored buffers. The rest keeps its values.

    computed: also load tensors that hooks compute for the state dict.
    """
    runtime.comm.fence_write()
    for group, index, at in _found(runtime, found):
        place = group.place(index) if group.values.sharded and group.masters.rest is None else None
        if place is None:
            value = _read(group, index, at)
            if not group.values.sharded:
                write_value(group, index, value.view(group.specs[index].shape))
                group.put_whole(index)
                continue
            group.set_local(index, value)
            if group.masters.rest is not None:
                group.masters.rest.store(group.homes[index].begin, value)
        else:
            at.read(group.homes[index].start, place)
    for buffer in others_of(runtime.model)[0]:
        if (found_at := buffer.stored_in(stored)) is not None:
            value = _read_buffer(buffer.tensor, found_at)
            distinct(buffer.tensor, buffer.tensor).copy_(distinct(value, buffer.tensor))
    runtime.comm.fence_read()
    if computed:
        give_computed(runtime.model, read_computed(runtime.model, stored))


def note(runtime: Runtime, found: dict[str, Stored], stored: dict[str, Stored], bulk: Bulk) -> None:
    """Tell `bulk` what `stream` and `read_computed` will read."""
    for group, index, at in _found(runtime, found):
        _read(group, index, at, bulk)
    for buffer in others_of(runtime.model)[0]:
        if (found_at := buffer.stored_in(stored)) is not None:
            _read_buffer(buffer.tensor, found_at, bulk)
    read_computed(runtime.model, stored, bulk)


def _found(runtime: Runtime, found: dict[str, Stored]) -> Iterator[tuple[ParamGroup, int, Stored]]:
    for group in runtime.groups:
        for index, spec in enumerate(group.specs):
            if spec.name in found:
                yield group, index, found[spec.name]


def _read(group: ParamGroup, index: int, at: Stored, bulk: Bulk | None = None) -> Tensor:
    """Return this rank's slice of a parameter, (n,); all of it if replicated. In fp32 if a master can hold what the file has."""
    home, spec = group.homes[index], group.specs[index]
    if not group.values.sharded:
        return _filled(math.prod(at.shape), at.dtype, at, 0, bulk)
    exact = group.masters.rest is not None and at.dtype != spec.dtype
    return _filled(home.stop - home.start, torch.float32 if exact else spec.dtype, at, home.start, bulk)


def _read_buffer(buffer: Tensor, at: Stored, bulk: Bulk | None = None) -> Tensor:
    return _filled(buffer.numel(), buffer.dtype, at, 0, bulk).view(buffer.shape)


def _filled(numel: int, dtype: torch.dtype, at: Stored, start: int, bulk: Bulk | None) -> Tensor:
    """Return elements [start, start + numel) of a stored tensor. If `bulk` is given, only tell it, and return a meta tensor."""
    value = empty(numel, dtype, "cpu" if bulk is None else "meta")
    if bulk is None:
        at.read(start, value)
    else:
        bulk.add(at, start, value)
    return value


def read_computed(model: nn.Module, stored: Mapping[str, Stored], bulk: Bulk | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of those that hooks compute for the state dict, by name. bulk: only tell it what will be read."""
    wanted = {name: stored[name] for name in others_of(model)[1] if name in stored}
    return {name: _read_buffer(torch.empty(at.shape, dtype=at.dtype, device="cpu"), at, bulk) for name, at in wanted.items()}


def give_computed(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Load tensors that hooks computed, through `load_state_dict` of the model, with its buffers and without its parameters."""
    if not values:
        return
    state = model.state_dict(keep_vars=True)
    given = OrderedDict((name, buffer.tensor) for buffer in others_of(model)[0] for name in buffer.kept)
    given.update((name, value.to(state[name].device)) for name, value in values.items() if name in state)
    given._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
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
    """
    runtime = runtime_of(model)
    runtime.attendance.refuse("zs.save_safetensors")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"zs.save_safetensors: dtype: expected one of floating-point numbers, or None, got {dtype}.")
    comm, target = runtime.topology.world, Path(path)
    tokens = comm.exchange(secrets.token_hex(4).encode(), "zs.save_safetensors: begin")
    scratch = target.with_name(f".{target.name}.{tokens[0].decode()}.tmp")
    mine, whole = _agree_on_listing(runtime, dtype)
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
        _write(runtime, file, mine)
        _agreed(comm, file, publish if comm.rank == 0 else lambda: None)
    except BaseException:
        if comm.rank == 0:
            scratch.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class _Listing:
    """Content of a model's state dict.

    tensors: dtype and shape of whole tensors by name. metadata: those of the file, with other names of tied tensors.
    sources: (name, part of the whole tensor, where it is: a parameter's group and index in it, or a tensor that is no parameter).
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[str, Part | None, tuple[ParamGroup, int] | Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, runtime: Runtime, dtype: torch.dtype | None) -> _Listing:
        """List the state dict of the runtime's model. Raises ConfigError where safetensors cannot store a value."""
        keys = {id(param): (group, index) for group in runtime.groups for index, param in enumerate(group.params)}
        listing, first_names = cls(metadata={"format": "pt"}), dict[int, str]()
        for own_name, value in runtime.model.state_dict(keep_vars=True).items():  # compared by object: wrappers rename
            name, key, part, shape = own_name, keys.get(id(value)), None, None
            if key is not None:
                spec = key[0].specs[key[1]]
                part, shape = spec.part, spec.whole_shape
                name = own_name if part is None or spec.distribution is not None else whole_name(own_name)
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
            listing.tensors[name] = (stored, tuple(value.shape) if shape is None else shape)
            listing.sources.append((name, part, value if key is None else key))
        return listing


def _agree_on_listing(runtime: Runtime, dtype: torch.dtype | None) -> tuple[_Listing, _Listing]:
    """Return what this rank's stage writes and what all pipeline stages write, of which each tells the others (collective)."""
    mine, problem, world, stages = _Listing(), None, runtime.topology.world, runtime.topology.stages
    try:
        mine = _Listing.of(runtime, dtype)
    except ConfigError as error:
        if world is runtime.comm:
            raise
        problem = error
    if world is runtime.comm:
        return mine, mine
    tells = world.rank == stages[runtime.topology.stage][0] and len(stages) > 1
    told = exchange_values(world, (problem, (mine.tensors, mine.metadata) if tells else None), "zs.save_safetensors: names")
    raise_first([failed for failed, _ in told], world.rank, problem)
    if len(stages) == 1:
        return mine, mine
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    metadata: dict[str, str] = {}
    for number, ranks in enumerate(stages):
        _, (names, ties) = told[ranks[0]]
        if number == runtime.topology.stage:
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
        """Make the file at its full length, with its header. Raises OSError, also where the disk is too small."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with open(fd, "wb", buffering=0) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, self.nbytes)
            file.write(self.header)
            file.truncate(self.nbytes)


def _agreed(comm: DirectComm, file: SafetensorsFile, action: Callable[[], None]) -> None:
    """Carry out an action; if it raises OSError on one rank, every rank raises OffloadIOError (collective)."""
    problem: Exception | None = None
    try:
        action()
    except OSError as error:
        what = f"rank {comm.rank}: saving {file.nbytes:,} bytes"
        problem = OffloadIOError(str(file.path), 0, error.errno or EIO, what)
    raise_first(exchange_values(comm, problem, "zs.save_safetensors"), comm.rank, problem)


def _write(runtime: Runtime, file: SafetensorsFile, listing: _Listing) -> None:
    """Write all tensors; ranks that do not see the file send their slices, and rank 0 writes them (collective)."""
    comm, sees = runtime.topology.world, file.path.exists()
    all_see = all(comm.exchange(b"1" if sees else b"", "zs.save_safetensors: who sees the file"))
    slices = _slices(runtime, file, listing, CHUNK_NBYTES if all_see else CHUNK_NBYTES // comm.world_size)

    def write() -> None:
        for name, part, start, values in slices if sees else ():
            file.places[name].cut(part).write(start, values)
        if sees:
            sync(file.path)

    def send() -> None:
        problem = None
        while True:
            found = None if sees else next(slices, None)
            mine = None
            if found is not None:
                name, part, start, values = found
                mine = name, None if part is None else part.plain(), start, values.dtype, bytes(bytes_of(values.contiguous()))
            sent = [each for each in exchange_values(comm, mine, "zs.save_safetensors: slices") if each is not None]
            if not sent:
                break
            try:
                for name, told, start, dtype, raw in sent if comm.rank == 0 and problem is None else ():
                    part = None if told is None else Part.of_plain(told)
                    file.places[name].cut(part).write(start, torch.frombuffer(bytearray(raw), dtype=dtype))
            except OSError as error:
                problem = error  # raised once all ranks have sent everything, so that they stay in step
        if problem is not None:
            raise problem

    _agreed(comm, file, write)
    if not all_see:
        _agreed(comm, file, send)


@torch.no_grad()
def _slices(
    runtime: Runtime, file: SafetensorsFile, listing: _Listing, nbytes: int
) -> Iterator[tuple[str, Part | None, int, Tensor]]:
    """Yield (name, part, first element in it, values (n,) on the host) of all that this rank writes, up to `nbytes` each."""
    core, topology = runtime.optimizer.core if runtime.optimizer is not None else None, runtime.topology
    runtime.gate.wait()
    for group in runtime.groups:
        if group.masters.rest is not None and core is not None:
            core.refresh_masters(group)
    for name, part, source in listing.sources:
        if isinstance(source, Tensor):
            if runtime.topology.world.rank == topology.stages[topology.stage][0]:
                yield name, part, 0, source.detach().to("cpu").reshape(-1)
            continue
        group, index = source
        home, rest = group.homes[index], group.values.rest
        begin = home.begin
        if file.places[name].dtype != rest.dtype:
            rest, begin = group.masters.slice(index)
        step = max(nbytes // rest.dtype.itemsize, 1)
        for done in range(0, home.stop - home.start if group.counts else 0, step):
            count = min(step, home.stop - home.start - done)
            yield name, part, home.start + done, rest.host(begin + done, begin + done + count)
