"""Streaming weights from safetensors: each rank reads the bytes of its own slices and nothing else.

A safetensors file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and
the raw bytes; a folder has an index `model.safetensors.index.json` {weight_map: {name: file}} where there are several.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .build import write_value
from .errors import ModelMismatch, did_you_mean
from .runtime import Runtime
from .unit import ParamGroup, ParamSpec

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_READ_NBYTES = 16 << 20  # bytes read and converted at a time


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file: bytes [offset, offset + nbytes)."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of the flattened tensor, converted to its dtype."""
        step = max(_READ_NBYTES // self.dtype.itemsize, 1)
        with open(self.path, "rb", buffering=0) as file:
            for begin in range(0, out.numel(), step):
                part = out[begin : begin + step]
                raw = bytearray(part.numel() * self.dtype.itemsize)
                got = os.preadv(file.fileno(), [raw], self.offset + (start + begin) * self.dtype.itemsize)
                if got != len(raw):
                    raise OSError(f"{self.path}: expected {len(raw)} bytes at {self.offset}, got {got}: truncated file")
                part.copy_(torch.frombuffer(raw, dtype=self.dtype))


def index_folder(path: str | os.PathLike) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, or of all safetensors files of a folder, by name."""
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"weights={str(path)!r}: expected a .safetensors file or a folder of them.")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
        ends = [8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if file.stat().st_size < max(ends, default=0):
            raise OSError(f"{file}: expected {max(ends)} bytes, got {file.stat().st_size}: truncated file")
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            stored[name] = StoredTensor(file, 8 + length + begin, end - begin, _DTYPES[entry["dtype"]], shape)
    return stored


def names_of(model: nn.Module, spec: ParamSpec) -> list[str]:
    """All names of a parameter, its ties included."""
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    return [f"{prefixes[id(o)]}.{a}" if prefixes[id(o)] else a for o, a in spec.owners]


def check(model: nn.Module, specs: list[ParamSpec], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Parameter name -> where it is stored. Raises ModelMismatch naming all that is missing or of another shape."""
    found: dict[str, StoredTensor] = {}
    problems = []
    for spec in specs:
        at = next((stored[name] for name in names_of(model, spec) if name in stored), None)
        if at is None:
            problems.append(f"{spec.name} is missing.{did_you_mean(spec.name, stored)}")
        elif at.shape != spec.shape:
            problems.append(f"{spec.name}: the file has {at.shape}, the model {spec.shape}")
        else:
            found[spec.name] = at
    if problems:
        raise ModelMismatch(f"weights do not fit the model ({len(problems)} problems): " + "; ".join(problems[:10]))
    return found


@torch.no_grad()
def stream(runtime: Runtime, found: dict[str, StoredTensor], stored: dict[str, StoredTensor]) -> None:
    """Read every parameter's slice (replicated: the whole) into its buffers, and buffers by name."""
    runtime.comm.fence_write()
    for group in runtime.groups:
        for index, spec in enumerate(group.specs):
            _stream_parameter(group, index, found[spec.name])
    for name, buffer in runtime.model.named_buffers():
        if name in stored:
            whole = torch.empty(buffer.numel(), dtype=buffer.dtype)
            stored[name].read(0, whole)
            buffer.copy_(whole.view(buffer.shape))
    runtime.comm.fence_read()


def _stream_parameter(group: ParamGroup, index: int, at: StoredTensor) -> None:
    home, spec = group.homes[index], group.specs[index]
    if not group.values.sharded:
        whole = torch.empty(at.shape, dtype=at.dtype)
        at.read(0, whole.view(-1))
        write_value(group, index, whole)
        return
    exact = group.master is not None and at.dtype != spec.dtype
    local = torch.empty(home.stop - home.start, dtype=torch.float32 if exact else spec.dtype)
    at.read(home.start, local)
    group.local(index).copy_(local)
    if group.master is not None:
        home.cut(group.master).copy_(local)
