"""From a checkpoint, of the engine or of the real DeepSpeed, to whole fp32 weights: one process, no ranks, no device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.export import export
from ...checkpoint.resolver import Alone, open_any
from ...errors import ConfigError
from .checkpoints import _latest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _folder(checkpoint_dir: str, tag: Any) -> Path:
    root = Path(checkpoint_dir)
    tag = _latest(root) if tag is None else str(tag)
    if tag is None:
        raise ValueError(f"Unable to find 'latest' file at {root / 'latest'}: pass a tag")
    if not (root / tag).is_dir():
        raise FileNotFoundError(f"Directory '{root / tag}' doesn't exist")
    return root / tag


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: Any = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Whole tensors by name, on the host; floating-point ones in fp32. lazy_mode has no effect: each is read once, alone."""
    opened = open_any(Alone(), _folder(checkpoint_dir, tag), None, verify=True, values=False)
    ties = opened.tied()
    state = {}
    for name, stored in opened.model.items():
        if name not in ties and not (exclude_frozen_parameters and name not in opened.states and opened.states):
            dtype = torch.float32 if stored.dtype.is_floating_point else stored.dtype
            flat = torch.empty(stored.numel, dtype=dtype)
            stored.read(0, flat)
            state[name] = flat.view(stored.shape)
    state.update({alias: state[name] for alias, name in ties.items() if name in state})
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str, output_dir: str, max_shard_size: Any = "5GB", safe_serialization: bool = False, tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write whole fp32 weights into output_dir: safetensors of at most max_shard_size, or one pytorch_model.bin."""
    if exclude_frozen_parameters:
        raise ConfigError("convert_zero_checkpoint_to_fp32_state_dict: save with exclude_frozen_parameters=True, then convert.")
    source, out = _folder(checkpoint_dir, tag), Path(output_dir)
    if safe_serialization:
        export(source, out, dtype=torch.float32, max_shard_nbytes=nbytes_of(max_shard_size))
        return
    out.mkdir(parents=True, exist_ok=True)
    export(source, out / "pytorch_model.bin", dtype=torch.float32, format="torch")


def nbytes_of(size: Any) -> int:
    """'5GB', '500MiB' or a number as bytes; None: no bound."""
    if size is None:
        return 2**62
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size: expected a number of bytes or a text like '5GB', got {size!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: Any = None) -> nn.Module:
    """The model, on the host, with the checkpoint's weights; it is none of `initialize` any more."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """A file of the checkpoint that holds parameters."""
    return get_optim_files(checkpoint_dir)[0]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The files of the ranks: parameters and optimizer states lie in the same ones."""
    if not Path(checkpoint_dir).is_dir():
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    found = sorted(str(path) for pattern in ("*.distcp", "*_optim_states.pt") for path in Path(checkpoint_dir).glob(pattern))
    if not found:
        raise FileNotFoundError(f"can't find files of ranks in directory '{checkpoint_dir}'")
    return found
