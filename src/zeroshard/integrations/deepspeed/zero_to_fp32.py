"""Convert a checkpoint, of the engine or of DeepSpeed itself, to whole fp32 weights, in one process without a device.

python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER [--max_shard_size 5GB] [--safe_serialization] [--tag TAG] [...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from ...checkpoint.directory import MANIFEST, write_whole
from ...checkpoint.export import divide, export
from ...checkpoint.importers.deepspeed import tag_folder
from ...checkpoint.resolver import Alone, open_any
from ...checkpoint.source import Opened
from ...errors import CheckpointError, CheckpointNotFound
from ...utils.dtypes import casts_to
from ...utils.module_names import own_name, without_wrappers
from .checkpoints import latest_tag, model_file, read_whole
from .logs import warning_once

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _folder(checkpoint_dir: str | os.PathLike, tag: object) -> Path:
    root = Path(checkpoint_dir)
    tag = latest_tag(root) if tag is None else str(tag)
    if tag is None:
        raise ValueError(f"Unable to find 'latest' file at {root / 'latest'}: pass a tag")
    return _existing(root / tag)


def _existing(folder: str | os.PathLike) -> Path:
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return Path(folder)


def _open(folder: Path, exclude_frozen: bool) -> tuple[Opened, list[str]]:
    """Open a checkpoint; return it, and the names of the tensors to convert."""
    opened = open_any(Alone(), folder, values=False)
    told = opened.shared_extras["engine"]() if "engine" in opened.shared_extras else opened.facts
    if exclude_frozen and "frozen" not in told:
        raise CheckpointError(f"{folder} does not say which parameters are frozen: leave exclude_frozen_parameters out.")
    place = {without_wrappers(name): number for number, name in enumerate(told.get("names", ()))}
    frozen = set(map(without_wrappers, told["frozen"])) if exclude_frozen else set()
    return opened, [name for name in sorted(opened.model, key=lambda name: place.get(name, len(place))) if name not in frozen]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike, tag: object = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Return whole tensors by name, on the host; floating-point ones in fp32. Tied tensors share memory.

    exclude_frozen_parameters: leave out frozen parameters. lazy_mode: no effect, tensors are read at once.
    """
    if lazy_mode:
        warning_once("zero_to_fp32: lazy_mode has no effect: use zs.export, or convert_zero_checkpoint_to_fp32_state_dict.")
    opened, names = _open(_folder(checkpoint_dir, tag), exclude_frozen_parameters)
    state = read_whole(opened, torch.float32, set(names).__contains__)
    return {name: state[name] for name in names if name in state}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike, output_dir: str | os.PathLike, max_shard_size: object = "5GB", safe_serialization: bool = False,
    tag: object = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write whole fp32 weights to output_dir: model*.safetensors or pytorch_model*.bin, with an index if there are several files.

    Weights are read and written some MiB at a time. Existing files of these names are replaced.

    max_shard_size: largest size of a file: 5GB, 500MiB or a number of bytes; None: one file. Raises as zs.export.
    """
    source, out, most = _folder(checkpoint_dir, tag), Path(output_dir), nbytes_of(max_shard_size)
    opened, names = _open(source, exclude_frozen_parameters)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".zero_to_fp32.", suffix=".tmp", dir=out))
    try:
        if safe_serialization:
            export(source, scratch / "made", dtype=torch.float32, max_shard_nbytes=most, names=names, verify=False)
        else:
            _write_torch(opened, source, scratch / "made", most, names)
        # the index last: it names files that exist
        for file in sorted((scratch / "made").iterdir(), key=lambda path: path.suffix == ".json"):
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_torch(opened: Opened, source: Path, folder: Path, most: int, names: list[str]) -> None:
    """Write files of torch.save, and their index if there are several."""
    folder.mkdir()
    ties, placed = opened.tied(), dict[str, str]()
    dtypes = {name: casts_to(opened.model[name].dtype, torch.float32) for name in names if name not in ties}
    sizes = {name: opened.model[name].numel * dtype.itemsize for name, dtype in dtypes.items()}
    shards = divide(sizes, most, "pytorch_model", ".bin")
    for file, shard in shards.items():
        whole = [name for name in names if ties.get(name, name) in shard]
        export(source, folder / file, dtype=torch.float32, format="torch", names=whole, verify=False)
        placed |= dict.fromkeys(whole, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(placed.items()))}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")


def nbytes_of(size: object) -> int:
    """Return the bytes of '5GB', '500MiB' or a number; None: no bound."""
    if size is None:
        return 2**62
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    nbytes = float(found[1]) * _UNITS.get(found[2].upper(), math.nan) if found else math.nan
    if not nbytes >= 1:
        raise ValueError(f"max_shard_size: expected a number of bytes or a text like '5GB', got {size!r}")
    return int(nbytes)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | os.PathLike, tag: object = None) -> nn.Module:
    """Move a model to the host, load the checkpoint's weights into it, and return it."""
    model = model.cpu()
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict({own_name(model, name, to_load=True): value for name, value in state.items()}, strict=False)
    return model


def get_model_state_file(checkpoint_dir: str | os.PathLike, zero_stage: int) -> str:
    """Return a checkpoint's file with counters and client_state. checkpoint_dir: the folder of a tag."""
    found = model_file(_existing(checkpoint_dir))
    if found is None:
        raise FileNotFoundError(f"can't find model states file at '{checkpoint_dir}'")
    return str(found)


def get_optim_files(checkpoint_dir: str | os.PathLike) -> list[str]:
    """Return the *_optim_states.pt files in rank order; those of the engine have only the stage and the number of ranks."""
    files = _existing(checkpoint_dir).glob("*_optim_states.pt")
    found = sorted(files, key=lambda path: ([*map(int, re.findall(r"\d+", path.name))], path.name))
    if not found:
        raise FileNotFoundError(f"can't find *_optim_states.pt files in directory '{checkpoint_dir}'")
    return [str(path) for path in found]


def convert_to_universal(args: argparse.Namespace | None = None) -> None:
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

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(source, draft, copy_function=link_or_copy)
    if target.exists():
        shutil.rmtree(target)
    os.replace(draft, target)  # one rename: the new tag is complete or not there
    write_whole(target.parent / "latest_universal", f"{target.name}\n".encode())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="From a ZeRO checkpoint to whole fp32 weights.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the folder of the tag, as path/checkpoint-12")
    parser.add_argument("output_dir", help="the folder that the weights are written into")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not files of torch.save")
    parser.add_argument("-t", "--tag", help="of the checkpoint, as global_step14; without: what the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters that are not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = vars(parser.parse_args(arguments))
    del given["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**given)
