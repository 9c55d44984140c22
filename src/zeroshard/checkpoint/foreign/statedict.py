"""Files of torch.save(model.state_dict()), alone or in the dictionary of a training script; Hugging Face's pytorch_model.bin.

    {name: tensor}
    {"model" | "state_dict" | "model_state_dict" | "module": {name: tensor}, "optimizer": optimizer.state_dict(), "step": 100}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointCorrupt, CheckpointError
from ..opened import Opened
from .torchfile import is_tensor, open_torch_file, value_of

MODEL_KEYS = ("model_state_dict", "state_dict", "model", "module")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optim")
_STEP_KEYS = ("global_steps", "global_step", "step", "steps", "iteration")


def open_state_dict(path: Path) -> Opened:
    """A file, or a folder of pytorch_model*.bin."""
    if path.is_dir():
        model: dict[str, Any] = {}
        for file in bin_files(path):
            model |= _tensors_of(open_torch_file(file), file)
        return Opened(path, "torch", model)
    whole = open_torch_file(path)
    opened = Opened(path, "torch", _tensors_of(whole, path))
    saved = next((whole[key] for key in OPTIMIZER_KEYS if isinstance(whole.get(key), Mapping)), {})
    if isinstance(saved.get("state"), Mapping) and isinstance(saved.get("param_groups"), list):
        opened.states = {key: dict(state) for key, state in saved["state"].items()}
        opened.groups = [{key: value_of(value) for key, value in group.items()} for group in saved["param_groups"]]
    opened.step = next((whole[key] for key in _STEP_KEYS if isinstance(whole.get(key), int)), 0)
    return opened


def bin_files(folder: Path) -> list[Path]:
    """pytorch_model.bin, or the files that its index names; none where there is neither. Raises CheckpointCorrupt."""
    index = folder / "pytorch_model.bin.index.json"
    if not index.is_file():
        return [folder / "pytorch_model.bin"] if (folder / "pytorch_model.bin").is_file() else []
    files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointCorrupt(str(file), 0, f"a file that {index.name} names", "no file")
    return files


def _tensors_of(whole: Any, path: Path) -> dict[str, Any]:
    while isinstance(whole, Mapping):
        inner = next((whole[key] for key in MODEL_KEYS if isinstance(whole.get(key), Mapping)), None)
        if inner is None:
            break
        whole = inner
    found = {name: value for name, value in whole.items() if is_tensor(value)} if isinstance(whole, Mapping) else {}
    if not found:
        what = f"keys {', '.join(map(str, list(whole)[:8]))}" if isinstance(whole, Mapping) else f"a {type(whole).__name__}"
        raise CheckpointError(
            f"{path}: expected a state dict of tensors by name, or one under {', '.join(MODEL_KEYS)}; found {what}."
        )
    return found
