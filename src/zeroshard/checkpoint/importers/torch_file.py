"""Files of torch.save: find the place of each tensor in the file, without reading tensors and without running code from the file.

Such a file is a zip archive of a pickle and one uncompressed entry for each storage. torch's restricted unpickler reads the
pickle, with fake tensors. An inert stand-in replaces every class that the unpickler does not allow, so that files of other
libraries can be read if these are not installed, and none of their code runs.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...state import Stored, StoredRange, StoredTensor
from ...utils import torch_compat
from ...utils.torch_compat import FakeTensorMode
from ..dcp import Window
from ..source import Untrusted, read_value

_LOCK = threading.Lock()  # torch's list of allowed classes is one for all threads


class StandIn:
    """Inert replacement for an object of another library; it keeps the constructor's `arguments` and the object's attributes."""

    def __new__(cls, *arguments: object, **options: object) -> StandIn:
        """Make a stand-in; any arguments are accepted and kept."""
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)


@dataclass(frozen=True)
class StridedTensor(Stored):
    """A stored tensor that is not contiguous: a transpose, a column. Each read loads the whole range of its elements."""

    extent: StoredTensor  # (n,): the storage from the first to the last element
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def fill(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of the flattened tensor, converted to the dtype of `out`."""
        whole = torch.empty(self.extent.shape, dtype=self.dtype, device="cpu")
        self.extent.read(0, whole)
        out.copy_(whole.as_strided(self.shape, self.strides).reshape(-1)[start : start + out.numel()])


@dataclass(frozen=True)
class TensorBlob(Stored):
    """A tensor in a range of bytes of a file that is itself a file of torch.save. The first read opens it."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def _at(self) -> StoredTensor | StridedTensor:
        found = open_torch_file(self.path, self.offset, self.nbytes)
        if not isinstance(found, (StoredTensor, StridedTensor)) or (found.dtype, found.shape) != (self.dtype, self.shape):
            wanted = f"a tensor {self.shape} of {self.dtype} at byte {self.offset}"
            raise OSError(f"{self.path}: expected {wanted}, found {found!r:.80}")
        return found

    def parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        """Yield the stretches of the tensor in the blob."""
        return self._at.parts(start, out)


def open_torch_file(path: Path, offset: int = 0, nbytes: int | None = None) -> Any:
    """Return the saved value, with a StoredTensor or StridedTensor (location in the file) in the place of each tensor.

    Raises CheckpointError if the file is not of torch.save, or cannot be read without running code.
    """
    nbytes = path.stat().st_size - offset if nbytes is None else nbytes
    with open(path, "rb") as file, _LOCK:
        window = io.BufferedReader(Window(file, offset, nbytes))
        try:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(window)
            window.seek(0)
            with torch.serialization.safe_globals([(StandIn, name) for name in unknown]), FakeTensorMode():
                found = torch.load(window, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: expected a file of torch.save (torch 1.6 or later) of tensors, dictionaries and lists; it can not be "
                f"read: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from None
    return _located(found, path, offset)


def _located(value: object, path: Path, base: int) -> Any:
    """Return a value with the location in the file in the place of each (fake) tensor."""
    if isinstance(value, Mapping):
        return {key: _located(entry, path, base) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_located(entry, path, base) for entry in value)
    if not isinstance(value, Tensor):
        return value
    shape, dtype = tuple(value.shape), value.dtype
    if value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(f"{path}: a tensor {shape} is {value.layout} or quantised; expected dense tensors.")
    at = base + (torch_compat.checkpoint_offset(value.untyped_storage()) or 0) + int(value.storage_offset()) * dtype.itemsize
    if value.is_contiguous():
        return StoredTensor(path, at, value.numel() * dtype.itemsize, dtype, shape)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, value.stride(), strict=True))
    return StridedTensor(StoredTensor(path, at, extent * dtype.itemsize, dtype, (extent,)), dtype, shape, value.stride())


def is_tensor(value: object) -> bool:
    """Return whether a value in an opened file is a tensor, of which only the place is known."""
    return isinstance(value, Stored)


def plain(value: object, where: str) -> Any:
    """Return a value with all its tensors read. Raise Untrusted if it contains a StandIn for an object of another library."""
    if isinstance(value, Mapping):
        return {key: plain(entry, where) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(plain(entry, where) for entry in value)
    if isinstance(value, StandIn) or (isinstance(value, type) and issubclass(value, StandIn)):
        raise Untrusted(f"{where}: an object of a class that torch does not load by itself, which is not read from such files.")
    return read_value(value)
