"""deepspeed.checkpoint: what scripts call around checkpoints. Those of the engine are universal as they are."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.directory import MANIFEST, write_whole
from ...checkpoint.importers.deepspeed import tag_folder
from ...errors import CheckpointNotFound

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # the key under which Megatron's scripts keep theirs in client_state


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:
    """`item` with every tensor in lists, tuples and dictionaries a copy with storage of its own; what is tied stays so."""
    return _cloned(item, device, {})


def _cloned(item: Any, device: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(item, Tensor):
        place = (item.data_ptr(), item.shape, item.stride(), item.dtype, item.device) if item.numel() else id(item)
        if place not in copies:
            copy = item.detach().to(device)
            copies[place] = copy.clone() if copy.untyped_storage().data_ptr() == item.untyped_storage().data_ptr() else copy
        return copies[place]
    if isinstance(item, dict):
        return type(item)({key: _cloned(value, device, copies) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        return type(item)(_cloned(value, device, copies) for value in item)
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where the real DeepSpeed keeps a rank's model states."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def convert_to_universal(args: Any = None) -> None:
    """ds_to_universal.main: a checkpoint (also of the real DeepSpeed) loads at any number of ranks and stage as it is, so it gets
    the second name alone.

    args: an object, or the command line, with input_folder (folder/tag) and output_folder (folder/another tag). Files are linked where the
    file system can, else copied; `latest_universal` beside it names it.
    """
    if args is None:
        parser = argparse.ArgumentParser(prog="ds_to_universal", description=convert_to_universal.__doc__)
        parser.add_argument("--input_folder", required=True)
        parser.add_argument("--output_folder", required=True)
        args, _ = parser.parse_known_args()
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not (source / MANIFEST).is_file() and tag_folder(source) != source:
        raise CheckpointNotFound(f"ds_to_universal: no checkpoint {source}: give the folder of a tag.")
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.copytree(source, draft, copy_function=_link_or_copy)
    if target.exists():
        shutil.rmtree(target)
    os.replace(draft, target)
    write_whole(target.parent / "latest_universal", f"{target.name}\n".encode())


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
