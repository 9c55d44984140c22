"""Files of torch.save with a model's state dict, alone or in a training script's dictionary; Hugging Face's pytorch_model.bin.

{name: tensor}
{"model" | "state_dict" | "model_state_dict" | "module": {name: tensor}, "optimizer": optimizer.state_dict(), "step": 100}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..safetensors import is_extra_state
from ..source import Opened
from .safetensors import is_index, merged, read_index
from .torch_file import is_tensor, open_torch_file, plain, value_of

MODEL_KEYS = ("model_state_dict", "state_dict", "model", "module")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optim")
WHOLE = "pytorch_model.bin"
_STEP_KEYS = ("global_steps", "global_step", "step", "steps", "iteration")


def open_state_dict(path: Path) -> Opened:
    """Open a file, an index of files, or a folder of pytorch_model*.bin."""
    if path.is_dir() or is_index(path):
        index = path if is_index(path) else bin_index(path)
        wanted = {} if index is None else read_index(index)
        files = sorted(set(wanted.values())) or [path / WHOLE]
        states = {file: state_in(open_torch_file(file)) for file in files}
        opened = Opened(path, "torch", merged({file: _tensors_of(state, file) for file, state in states.items()}, wanted))
        opened.module_readers = merged({file: objects_of(state, file) for file, state in states.items()}, wanted)
        return opened
    whole = open_torch_file(path)
    state = state_in(whole)
    opened = Opened(path, "torch", _tensors_of(state, path), module_readers=objects_of(state, path))
    saved: Mapping[str, Any] = next((whole[key] for key in OPTIMIZER_KEYS if isinstance(whole.get(key), Mapping)), {})
    if isinstance(saved.get("state"), Mapping) and isinstance(saved.get("param_groups"), list):
        opened.states = {key: dict(state) for key, state in saved["state"].items()}
        opened.groups = [{key: value_of(value) for key, value in group.items()} for group in saved["param_groups"]]
    opened.step = next((whole[key] for key in _STEP_KEYS if isinstance(whole.get(key), int)), 0)
    return opened


def bin_index(folder: Path) -> Path | None:
    """Return a folder's index of pytorch_model.bin files, or None."""
    index = folder / f"{WHOLE}.index.json"
    return index if index.is_file() else None


def state_in(whole: Any) -> Any:
    """Return the model's state dict out of the dictionaries that a training script put around it."""
    while isinstance(whole, Mapping):
        inner = next((whole[key] for key in MODEL_KEYS if isinstance(whole.get(key), Mapping)), None)
        if inner is None:
            break
        whole = inner
    return whole


def _tensors_of(state: Any, path: Path) -> dict[str, Any]:
    found = {name: value for name, value in state.items() if is_tensor(value)} if isinstance(state, Mapping) else {}
    if not found:
        what = f"keys {', '.join(map(str, list(state)[:8]))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise CheckpointError(
            f"{path}: expected a state dict of tensors by name, or one under {', '.join(MODEL_KEYS)}; found {what}."
        )
    return found


def objects_of(state: Mapping[str, Any], path: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that read modules' extra states that are no tensors (get_extra_state), by name."""
    return {
        name: partial(plain, value, f"{path}: {name}")
        for name, value in state.items()
        if isinstance(name, str) and is_extra_state(name) and not is_tensor(value)
    }
