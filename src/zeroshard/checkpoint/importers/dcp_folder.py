"""Folders of torch.distributed.checkpoint (DCP), as FSDP2 and others write them: `.metadata` and *.distcp.

    {"model": ..., "optim": ...} of torch.distributed.checkpoint.state_dict.get_state_dict   states by parameter name
    {"model": model.state_dict(), "optim": optimizer.state_dict()}                             states by number
    model.state_dict()                                                                       the model alone

and any of them one level deeper, as in {"app": {"model": ...}}. `.metadata` is a pickle, of which only torch's own classes for
such descriptions are unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from ...seam import Box
from ...state import StoredBoxes
from ..safetensors import is_extra_state
from ..source import Opened, load_object, read_value
from .torch_file import TensorBlob
from .torch_state_dict import MODEL_KEYS, OPTIMIZER_KEYS

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("torch.distributed._shard.sharded_tensor.metadata", name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "PurePath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    ("torch.serialization", "_get_layout"), ("torch", "Size"), ("torch", "device"), ("collections", "OrderedDict"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Return an allowed class of torch.distributed.checkpoint. Raises CheckpointError for any other."""
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata holds a {module}.{name}, which is not loaded: DCP writes none there.")


def open_distributed(path: Path, trusted: bool = False) -> Opened:
    """Open a folder of DCP. Raises CheckpointError, CheckpointCorrupt (a missing file). trusted: unpickle any class."""
    try:
        metadata = _Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointCorrupt(str(path / ".metadata"), 0, "a description of a checkpoint", repr(error)) from None
    described = metadata.state_dict_metadata
    if "zeroshard.state" in described:
        raise CheckpointIncomplete(f"{path}: a checkpoint of zs.save without its manifest.json: it is not complete.")
    places: dict[str, list[Any]] = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path}: {index.fqn} is stored compressed or transformed; save it without extensions.")
        places.setdefault(index.fqn, []).append((index, info))
    opened = Opened(path, "DCP", {})
    groups: dict[int, dict[str, Any]] = {}
    for name, entry in described.items():
        keys = (metadata.planner_data or {}).get(name) or _split(name, described)
        section, rest = _section(keys)
        stored = _tensor(path, entry, places[name]) if hasattr(entry, "chunks") else None
        read, short = partial(_object, path, name, places.get(name, []), trusted), ".".join(map(str, rest))
        if section == "model" and stored is not None:
            opened.model[short] = stored
        elif section == "model" and is_extra_state(str(rest[-1])):
            opened.module_readers[short] = read
        elif section == "optim" and rest and rest[0] == "state":
            value = stored if stored is not None else read()
            opened.states.setdefault(".".join(map(str, rest[1:-1])), {})[rest[-1]] = value
        elif section == "optim" and rest and rest[0] == "param_groups":
            option = read() if stored is None else read_value(stored)
            if len(rest) == 1:  # the list of groups
                groups.update(enumerate(option))
            elif len(rest) == 3:  # number, option
                groups.setdefault(int(rest[1]), {})[rest[2]] = option
            elif len(rest) == 4:  # number, option, number in a list
                groups.setdefault(int(rest[1]), {}).setdefault(rest[2], []).append(option)
    if not opened.model:
        raise CheckpointError(f"{path}: holds no tensors of a model; its first entries: {', '.join(list(described)[:5])}.")
    opened.groups = [groups[number] for number in sorted(groups)] or None
    members = [member for group in opened.groups or () for member in group.get("params", ())]
    if all(isinstance(member, int) for member in members):
        opened.states = {int(key) if key.isdecimal() else key: state for key, state in opened.states.items()}
    return opened


def _split(name: str, described: Iterable[str]) -> tuple[str, ...]:
    """Return a name's path in nested state dicts, for checkpoints that do not record it (planner_data)."""
    head, _, rest = name.partition(".")
    with_states = any(other.startswith(f"{key}.state.") for other in described for key in OPTIMIZER_KEYS)
    if not with_states or head not in (*MODEL_KEYS, *OPTIMIZER_KEYS):
        return (name,)
    if head in OPTIMIZER_KEYS and rest.startswith("state."):
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        return (head, "state", parameter, key)
    return (head, rest)


def _section(keys: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return ('model', 'optim' or '', the rest of the path). A path of one name is the model's."""
    for depth, key in enumerate(keys[:-1][:2]):
        if key in MODEL_KEYS:
            return "model", keys[depth + 1 :]
        if key in OPTIMIZER_KEYS:
            return "optim", keys[depth + 1 :]
    return ("model", keys) if len(keys) == 1 else ("", keys)


def _tensor(path: Path, entry: Any, chunks: list[Any]) -> StoredBoxes:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
    boxes = []
    for index, info in chunks:
        offsets = tuple(index.offset) if index.offset is not None else tuple(0 for _ in shape)
        file = path / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            found = f"{file.stat().st_size:,} bytes" if file.is_file() else "no file"
            raise CheckpointCorrupt(str(file), 0, f"at least {info.offset + info.length:,} bytes", found)
        box = Box(offsets, sizes.get(offsets, shape))
        boxes.append((box, TensorBlob(file, info.offset, info.length, dtype, box.sizes)))
    return StoredBoxes(dtype, shape, boxes)


def _object(path: Path, name: str, stored: list[Any], trusted: bool) -> Any:
    _, info = stored[0]
    return load_object(path / info.relative_path, info.offset, info.length, name, trusted)
