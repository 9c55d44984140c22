"""deepspeed.checkpoint: functions that scripts call. Engines load each other's checkpoints at any stage and number of ranks."""

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

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # key in client_state that Megatron's scripts use


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:
    """Return `item` with every tensor in lists, tuples and dicts copied to its own storage; tied tensors get one copy."""
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
    """Return the path of a rank's model states in DeepSpeed's checkpoints."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def convert_to_universal(args: Any = None) -> None:
    """Give a checkpoint a second tag, in the place of ds_to_universal.main.

    No conversion is needed: checkpoints, DeepSpeed's own too, load at any stage and number of ranks. args: an object, or None for
    the command line, with input_folder (folder/tag) and output_folder (folder/another tag). Files are hard links, or copies if
    the file system has no links; the new tag is written to `latest_universal` in the folder.
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
    os.replace(draft, target)  # one rename: the new tag is complete or not there
    write_whole(target.parent / "latest_universal", f"{target.name}\n".encode())


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
