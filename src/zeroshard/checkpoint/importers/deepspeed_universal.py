"""Universal checkpoints of DeepSpeed, made by its ds_to_universal: a folder for each parameter.

global_step100_universal/
  mp_rank_00_model_states.pt, or zero_pp_rank_R_...    copied from the original checkpoint
  zero/
    optimizer_state.pt            options of groups, the loss scale
    NAME/fp32.pt                  the value, in the parameter's shape; flat if the original is of stage 3
    NAME/exp_avg.pt, step.pt ...  optimizer states
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...memory.io.tensor_reader import StoredTensor
from ..source import Opened
from .deepspeed import checked_folder, describe, scaler_of, tag_folder, unsharded
from .torch_file import is_tensor, open_torch_file, value_of

_VALUE = "fp32"


def is_universal(path: Path) -> bool:
    """Return whether a checkpoint of DeepSpeed is a universal one."""
    folder = tag_folder(path)
    return folder is not None and (folder / "zero").is_dir()


def open_universal(path: Path) -> Opened:
    """Open a universal checkpoint. Raises CheckpointError if a file is missing or has a wrong number of elements."""
    folder = checked_folder(path)
    models = [open_torch_file(file) for file in sorted(folder.glob("*mp_rank_00_model_states.pt"), key=_rank_of)]
    first, zero = models[0], folder / "zero"
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in first.get("param_shapes") or ()]
    stage3 = (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    opened = Opened(path, "DeepSpeed", unsharded(first, models, stage3))
    describe(opened, first, folder)
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        for file in sorted((zero / name).glob("*.pt")):
            value = _in_file(file, shape)
            if file.stem == _VALUE:
                opened.model[name] = value
            else:
                opened.states.setdefault(name, {})[file.stem] = value
        if not (zero / name / f"{_VALUE}.pt").is_file():
            raise CheckpointError(f"{folder}: {name}: expected its value in {zero / name / _VALUE}.pt, found no file.")
    if (zero / "optimizer_state.pt").is_file():
        _add_groups(opened, open_torch_file(zero / "optimizer_state.pt"), shapes)
    for alias, name in (first.get("shared_params") or {}).items():
        if name in opened.model:
            opened.model[alias] = opened.model[name]
    return opened


def _rank_of(file: Path) -> int:
    return int(file.name.split("_")[3]) if file.name.startswith("zero_pp_rank_") else 0


def _in_file(file: Path, shape: tuple[int, ...]) -> Any:
    """Return a file's tensor in the parameter's shape, or its scalar or plain value. Raises CheckpointError for other sizes."""
    found = open_torch_file(file)
    found = found["param"] if isinstance(found, Mapping) else found
    if isinstance(found, StoredTensor) and found.shape != () and math.prod(found.shape) == math.prod(shape):
        return replace(found, shape=shape)
    if is_tensor(found) and found.shape != ():
        raise CheckpointError(f"{file}: expected {math.prod(shape)} elements, found a tensor {found.shape}.")
    return found


def _add_groups(opened: Opened, saved: Any, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """Add the options of groups, and step counts for parameters whose folders have none."""
    inner = saved.get("optimizer_state_dict") or saved
    opened.scaler = scaler_of(saved.get("loss_scaler"))
    opened.groups = []
    for group in inner["param_groups"]:
        options = {option: value_of(value) for option, value in group.items() if option not in ("params", "step")}
        members = {name: number for number in group["params"] for name in shapes[number]}
        opened.groups.append({**options, "params": list(members)})
        for name, number in members.items():
            step = (inner.get("state") or {}).get(number, {}).get("step", group.get("step"))
            if step is not None and name in opened.states:
                opened.states[name].setdefault("step", step)
