"""The file format of torch.distributed.checkpoint (DCP), so that its tools can read checkpoints of zs.save.

A data file is a sequence of *blobs*. Each is what torch.save writes for one tensor or object: a zip archive without
compression:

    | headers, data.pkl | the tensor's bytes | directory |
      prefix              data, 64-aligned     suffix

`frame` makes prefix and suffix, so that the bytes between can be written from anywhere, in bulk. `.metadata` is a pickled
`Metadata`: for each name the chunks, and for each chunk its file, offset and length.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..seam import Box
from ..state import StoredTensor
from ..utils import torch_compat

ALIGN = 64  # alignment of a blob and of the tensor's bytes in it; torch.save uses the same
MAX_BLOB_NBYTES = 1 << 30  # larger archives would need the 64-bit form of zip

_STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage, torch.complex128: torch.ComplexDoubleStorage,
}  # fmt: skip


def storable(dtype: torch.dtype) -> bool:
    """Return whether a data file can hold this dtype: all but torch's quantized ones, whose scales are not in the elements."""
    return not str(dtype).startswith("torch.q")


def archived(value: object) -> bytes:
    """Return what torch.save writes for a value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@dataclass
class _Described:
    """Stand-in that pickles as a contiguous tensor over the storage of the given key, without having the elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: str = "0"

    def __reduce__(self) -> tuple:
        stride, strides = 1, []
        for size in reversed(self.shape):
            strides.append(stride)
            stride *= max(size, 1)
        storage = _StorageOf(self.dtype, torch.Size(self.shape).numel(), self.key)
        hooks: OrderedDict[str, object] = OrderedDict()
        described = storage, 0, self.shape, tuple(reversed(strides)), False, hooks
        if self.dtype in _STORAGES:
            return torch_compat.rebuilder(), described
        # dtypes without a storage class are pickled with an explicit dtype, as torch.save does
        return torch_compat.rebuilder(by_dtype=True), (*described, self.dtype)


@dataclass
class _StorageOf:
    dtype: torch.dtype
    numel: int
    key: str


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        if isinstance(value, _StorageOf):
            if value.dtype not in _STORAGES:
                return ("storage", torch.UntypedStorage, value.key, "cpu", value.numel * value.dtype.itemsize)
            return ("storage", _STORAGES[value.dtype], value.key, "cpu", value.numel)
        return None


def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return (prefix, suffix) such that prefix + the bytes of a contiguous tensor + suffix is a file of torch.save.

    The length of the prefix is a multiple of ALIGN. The file is a zip archive; CRCs are left 0, since torch does not check them.
    """
    described, nbytes = io.BytesIO(), torch.Size(shape).numel() * dtype.itemsize
    _Pickler(described, protocol=2).dump(_Described(dtype, shape))
    entries = ("data.pkl", described.getvalue()), ("byteorder", b"little"), ("version", b"3\n"), ("data/0", None)
    prefix = directory = b""
    for name, content in entries:
        encoded, at, extra = f"archive/{name}".encode(), len(prefix), b""
        if content is None:  # the tensor's bytes, which the caller writes, begin aligned
            padding = -(at + 30 + len(encoded) + 4) % ALIGN
            extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        size = nbytes if content is None else len(content)
        sizes = struct.pack("<IIIHH", 0, size, size, len(encoded), len(extra))
        head = struct.pack("<HHHHH", 20, 0, 0, 0, 0x21)  # version, flags, stored, time, date (1980-01-01)
        prefix += b"PK\3\4" + head + sizes + encoded + extra + (content or b"")
        directory += b"PK\1\2" + struct.pack("<H", 20) + head + sizes[:-2] + struct.pack("<HHHHII", 0, 0, 0, 0, 0, at) + encoded
    counts = len(entries), len(entries)
    closing = struct.pack("<HHHHIIH", 0, 0, *counts, len(directory), len(prefix) + nbytes, 0)
    return prefix, directory + b"PK\5\6" + closing


class _StatePickler(_Pickler):
    """Pickler of a state dict: `_Described` tensors get no bytes; storages of real ones are collected in `storages`, by key."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[str, torch.UntypedStorage] = {}

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
            return super().persistent_id(value)
        storage = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
        key = f"object{torch_compat.storage_id(storage)}"
        self.storages[key] = storage
        if isinstance(value, torch.TypedStorage):
            return ("storage", getattr(torch, value._pickle_storage_type()), key, "cpu", value._size())
        return ("storage", torch.UntypedStorage, key, "cpu", storage.nbytes())


def make_state_dict_file(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], ties: Mapping[str, str], objects: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Make a file of torch.save for a state dict, without the tensors' bytes. Return where each tensor lies by name.

    tensors: name -> (dtype, shape). ties: other name -> name, of the same tensor. objects: values that are no tensors, by name.
    """
    keys = {name: str(number) for number, name in enumerate(tensors)}
    state: dict[str, object] = {name: _Described(*tensors[name], keys[name]) for name in tensors}
    state |= {alias: state[name] for alias, name in ties.items()}  # one object, so that a load gives one tensor
    pickled = io.BytesIO()
    pickler = _StatePickler(pickled)
    pickler.dump(state | dict(objects))
    writer = torch_compat.file_writer(str(path))
    writer.write_record("data.pkl", pickled.getvalue(), len(pickled.getvalue()))
    writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
    for name, (dtype, shape) in tensors.items():
        writer.write_record_metadata(f"data/{keys[name]}", torch.Size(shape).numel() * dtype.itemsize)
    for key, storage in pickler.storages.items():
        writer.write_record(f"data/{key}", storage, storage.nbytes())
    writer.write_end_of_file()
    reader = torch_compat.file_reader(str(path))
    return {
        name: StoredTensor(
            path, reader.get_record_offset(f"data/{keys[name]}"), torch.Size(shape).numel() * dtype.itemsize, dtype, shape
        )
        for name, (dtype, shape) in tensors.items()
    }


class Window(io.RawIOBase):
    """File object over bytes [offset, offset + nbytes) of another file."""

    def __init__(self, file: io.BufferedReader, offset: int, nbytes: int) -> None:
        self.file, self.offset, self.nbytes, self.at = file, offset, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.nbytes)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self.nbytes - self.at), 0)
        self.file.seek(self.offset + self.at)
        got = self.file.readinto(memoryview(buffer)[:count])
        self.at += got
        return got


def metadata_of(
    tensors: Iterable[tuple[str, tuple[str, ...], torch.dtype, tuple[int, ...], list[tuple[Box, str, int, int]]]],
    objects: Iterable[tuple[str, tuple[str, ...], str, int, int]],
) -> bytes:
    """Return the content of DCP's `.metadata`.

    tensors: (name, path in the nested state dict, dtype, shape, [(box, file, offset and length of its blob)]).
    objects: (name, path, file, offset, length).
    """
    # imported here: it imports torch's distributed tensors and sympy, which takes as long as torch itself
    from torch.distributed.checkpoint import metadata as dcp

    from ..utils.torch_compat import StorageInfo

    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    stored: dict[dcp.MetadataIndex, StorageInfo] = {}
    for name, keys, dtype, shape, boxes in tensors:
        chunks = [dcp.ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b, *_ in boxes]
        described[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        paths[name] = keys
        for number, (box, file, offset, nbytes) in enumerate(boxes):
            stored[dcp.MetadataIndex(name, box.offsets, number)] = StorageInfo(file, offset, nbytes)
    for name, keys, file, offset, nbytes in objects:
        described[name], paths[name] = dcp.BytesStorageMetadata(), keys
        stored[dcp.MetadataIndex(name)] = StorageInfo(file, offset, nbytes)
    return pickle.dumps(dcp.Metadata(described, paths, stored, dcp.StorageMeta()))
