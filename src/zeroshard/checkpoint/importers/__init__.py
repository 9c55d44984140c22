"""Checkpoints of other libraries: recognise the format by the files of a path, and open them without reading tensors.

*.safetensors, their index, folders         Hugging Face
*.pt, *.bin, ...; pytorch_model*.bin        torch.save
latest, *_model_states.pt                   DeepSpeed; if there is also a folder zero, a universal checkpoint of DeepSpeed
.metadata                                   torch.distributed.checkpoint (FSDP2)
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...errors import CheckpointError, CheckpointNotFound
from ..source import Opened
from .dcp_folder import open_distributed
from .deepspeed import open_deepspeed, tag_folder
from .safetensors import open_safetensors
from .torch_state_dict import INDEX, WHOLE, open_state_dict

RECOGNISED = "safetensors files, files of torch.save, folders of pytorch_model.bin, DeepSpeed and torch.distributed.checkpoint"


def recognise(path: Path, trusted: bool = False) -> Callable[[Path], Opened] | None:
    """Return the function that opens a path's format; None if no format is recognised. trusted: it may unpickle any class."""
    if path.is_file():
        if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
            return open_safetensors
        torchs = (
            path.name.endswith(".bin.index.json") or path.suffix in (".pt", ".pth", ".bin", ".ckpt") or zipfile.is_zipfile(path)
        )
        return open_state_dict if torchs else None
    if not path.is_dir():
        return None
    if tag_folder(path) is not None:
        return open_deepspeed
    if (path / ".metadata").is_file():
        return partial(open_distributed, trusted=trusted)
    if any(path.glob("*.safetensors")):
        return open_safetensors
    if (path / INDEX).is_file() or (path / WHOLE).is_file():
        return open_state_dict
    return open_safetensors if any(path.glob("*.safetensors.index.json")) else None  # an index without its files


def open_foreign(path: Path, trusted: bool = False) -> Opened:
    """Open a checkpoint of a format that `recognise` knows. Raises CheckpointError if it does not follow its format."""
    opener = recognise(path, trusted)
    if opener is None:
        raise CheckpointNotFound(f"{path}: expected a checkpoint of zs.save, or {RECOGNISED}.")
    try:
        return opener(path)
    except (KeyError, IndexError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} does not follow the format that its files' names suggest ({error!r}): it is damaged, incomplete, or of another kind. "
            f"Expected {RECOGNISED}."
        ) from error
