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
from ...state import Stored
from ..safetensors import is_extra_state
from ..source import Opened, read_value
from .safetensors import is_index, merged, read_index
from .torch_file import is_tensor, open_torch_file, plain

MODEL_KEYS = ("model_state_dict", "state_dict", "model", "module")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optim")
WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STEP_KEYS = ("global_steps", "global_step", "step", "steps", "iteration")


def open_state_dict(path: Path) -> Opened:
    """Open a file, an index of files, or a folder of pytorch_model*.bin. Raises CheckpointError for a file without tensors."""
    several, index = path.is_dir() or is_index(path), path / INDEX if path.is_dir() else path
    wanted = read_index(index) if is_index(index) else {}
    tensors: dict[Path, dict[str, Stored]] = {}
    objects: dict[Path, dict[str, Callable[[], object]]] = {}
    for file in sorted(set(wanted.values())) or [path / WHOLE if several else path]:
        whole = state = open_torch_file(file)
        while isinstance(state, Mapping):  # out of the dictionaries that a training script put around it
            inner = next((state[key] for key in MODEL_KEYS if isinstance(state.get(key), Mapping)), None)
            if inner is None:
                break
            state = inner
        found = {name: value for name, value in state.items() if is_tensor(value)} if isinstance(state, Mapping) else {}
        if not found:
            what = f"keys {', '.join(map(str, list(state)[:8]))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
            keys = ", ".join(MODEL_KEYS)
            raise CheckpointError(f"{file}: expected a state dict of tensors by name, or one under {keys}; found {what}.")
        tensors[file], objects[file] = found, objects_of(state, file)
    opened = Opened(path, "torch", merged(tensors, wanted), module_readers=merged(objects, wanted))
    if several:
        return opened
    add_optimizer(opened, next((whole[key] for key in OPTIMIZER_KEYS if isinstance(whole.get(key), Mapping)), {}))
    opened.step = next((whole[key] for key in _STEP_KEYS if isinstance(whole.get(key), int)), 0)
    return opened


def add_optimizer(opened: Opened, saved: Mapping[str, Any]) -> None:
    """Add the states and groups of an `optimizer.state_dict()`, by the parameters' numbers, if it has both."""
    if isinstance(saved.get("state"), Mapping) and isinstance(saved.get("param_groups"), list):
        opened.states = {number: dict(state) for number, state in saved["state"].items()}
        opened.groups = [{option: read_value(value) for option, value in group.items()} for group in saved["param_groups"]]


def objects_of(state: Mapping[str, object], path: Path) -> dict[str, Callable[[], object]]:
    """Return functions that read modules' extra states that are no tensors (get_extra_state), by name."""
    return {
        name: partial(plain, value, f"{path}: {name}")
        for name, value in state.items()
        if isinstance(name, str) and is_extra_state(name) and not is_tensor(value)
    }
