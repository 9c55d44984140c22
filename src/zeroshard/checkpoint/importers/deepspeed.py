"""Checkpoints of DeepSpeed, of ZeRO stages 0 to 3 and any number of data-parallel ranks.

    latest                                         the name of the newest checkpoint: global_step100
    global_step100/
      mp_rank_00_model_states.pt                   low-precision parameters (stages 0 to 2), shapes, names of buffers
      zero_pp_rank_R_mp_rank_00_model_states.pt    the same at stage 3, with this rank's parts of frozen parameters only
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's slices of flat fp32 values and optimizer states

Stages 1 and 2: the parameters of an optimizer group are concatenated, and the result is divided among ranks.
`param_slice_mappings` has the stretch of a rank's slice that belongs to each parameter.

    group 0   | embedding . . . . . . | hidden . . . . | out . . |
    ranks     rank 0                         | rank 1

Stage 3: each parameter is divided among ranks, ceil(numel / ranks) elements each; a rank's pieces are concatenated.

    rank 0    | embedding . . . | hidden . . | out . |          rank 1    | embedding . . . | hidden . . | out . |

A universal checkpoint, made by DeepSpeed's ds_to_universal, has a folder for each parameter:

    global_step100_universal/
      mp_rank_00_model_states.pt, or zero_pp_rank_R_...    copied from the original checkpoint
      zero/
        optimizer_state.pt            options of groups, the loss scale
        NAME/fp32.pt                  the value, in the parameter's shape; flat if the original is of stage 3
        NAME/exp_avg.pt, step.pt ...  optimizer states

Other entries of rank 0's model file (counters, scheduler, client state, configuration) become extras of the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ...memory.io.tensor_reader import Stored, StoredStretches, StoredTensor
from ..source import Opened, Untrusted, read_value
from .torch_file import StandIn, is_tensor, open_torch_file, plain
from .torch_state_dict import add_optimizer, objects_of

_RANK = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OF_THE_MODEL = {
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
}  # fmt: skip
_VALUE = "fp32"
Stretches = dict[str, list[tuple[int, int, int, int, int]]]  # name -> (first, count, rank, flat number, offset in it)


def tag_folder(path: Path) -> Path | None:
    """Return the folder of a checkpoint of DeepSpeed: `path`, or the one in it that `latest` names; None if neither is one."""
    if any(path.glob("*mp_rank_*_model_states.pt")):
        return path
    try:
        tagged = path / (path / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return tagged if any(tagged.glob("*mp_rank_*_model_states.pt")) else None


def open_deepspeed(path: Path) -> Opened:
    """Open a checkpoint of DeepSpeed. Raise CheckpointCorrupt, or CheckpointError (also for tensor or pipeline parallelism)."""
    folder = tag_folder(path)
    if folder is None:
        raise CheckpointNotFound(f"{path}: expected a checkpoint of DeepSpeed.")
    if any(folder.glob("*mp_rank_01_*")) or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder}: tensor-parallel, pipeline and expert checkpoints of DeepSpeed can not be read; merge them with its own "
            "tools first."
        )
    universal, optimizers = (folder / "zero").is_dir(), []
    if universal:
        rank_of = lambda file: int(file.name.split("_")[3]) if file.name.startswith("zero_pp_rank_") else 0  # noqa: E731
        files = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=rank_of)
        stage3 = (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    else:
        found = {int(match[1]): file for file in folder.glob("*_optim_states.pt") if (match := _RANK.fullmatch(file.name))}
        for rank in range(max(found, default=-1) + 1):
            if rank not in found:
                raise CheckpointCorrupt(str(folder), 0, f"the optimizer states of rank {rank}", "no file")
        optimizers = [open_torch_file(found[rank])["optimizer_state_dict"] for rank in range(len(found))]
        stage3 = bool(optimizers) and "fp32_flat_groups" in optimizers[0]
        files = [folder / "mp_rank_00_model_states.pt"]
        if stage3:
            files = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(found))]
    models = [open_torch_file(file) for file in files]
    first = models[0]
    opened = Opened(path, "DeepSpeed", _unsharded(first, models, stage3))
    _describe(opened, first, folder)
    if universal:
        _add_folders(opened, first, folder)
    elif optimizers:
        _add_flat(opened, first, folder, optimizers, stage3)
    elif isinstance(first.get("optimizer"), Mapping):
        # stage 0: states by the parameters' numbers; masters, saved without names, are not read
        add_optimizer(opened, first["optimizer"].get("optimizer_state_dict", first["optimizer"]))
    for alias, name in (first.get("shared_params") or {}).items():
        if name in opened.model:
            opened.model[alias] = opened.model[name]
    return opened


def _describe(opened: Opened, first: Any, folder: Path) -> None:
    """Add the facts in a rank's model file, and its other entries as extras; objects of other classes stay in `opened.unread`."""
    opened.step = int(first.get("global_steps") or 0)
    opened.module_readers = objects_of(first["module"], folder)
    opened.facts = {"step": opened.step, "deepspeed": first.get("ds_version"), "world_size": first.get("dp_world_size")}
    for name, value in first.items():
        if name in _OF_THE_MODEL or value is None:
            continue
        try:
            opened.extras[name] = plain(value, f"{folder}: {name}")
        except Untrusted as error:
            opened.unread[name] = error
    if first.get("param_shapes"):  # without it, frozen parameters cannot be told from trained ones
        told = {name for group in first["param_shapes"] for name in group} | set(first["buffer_names"])
        others = first["module"].keys() - told - (first.get("shared_params") or {}).keys()
        opened.facts["frozen"] = sorted(others)


def scaler_of(saved: Any) -> dict[str, Any] | None:
    """Convert the state of DeepSpeed's dynamic loss scale to zeroshard's. Return None if there is none."""
    known = vars(saved) if isinstance(saved, StandIn) else {}
    if not {"cur_scale", "cur_iter", "last_overflow_iter", "scale_window"} <= known.keys():
        return None
    good = known["cur_iter"] - known["last_overflow_iter"] - 2  # the first step, and one after an overflow, do not count
    good = good % known["scale_window"] if good > 0 else good
    return {"scale": float(known["cur_scale"]), "good_steps": good, "patience": known.get("cur_hysteresis", 1)}


def _unsharded(first: Any, models: list[Any], stage3: bool) -> dict[str, Any]:
    """Return the tensors that the model files have by name: all at stages 0 to 2; buffers and frozen parameters at stage 3."""
    if not stage3:
        return {name: value for name, value in first["module"].items() if is_tensor(value)}
    found = {name: first["module"][name] for name in first["buffer_names"] if is_tensor(first["module"].get(name))}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        pieces = [model["frozen_param_fragments"][name] for model in models]
        length, numel = math.prod(pieces[0].shape), math.prod(shape)
        stretches = [
            (rank * length, 0, min(length, numel - rank * length), piece)
            for rank, piece in enumerate(pieces) if rank * length < numel
        ]  # fmt: skip
        found[name] = StoredStretches(pieces[0].dtype, tuple(shape), stretches)
    return found


def _add_flat(opened: Opened, first: Any, folder: Path, optimizers: list[Any], stage3: bool) -> None:
    """Add trained parameters, their optimizer states and groups, from the ranks' flat slices, and the loss scale."""
    count = optimizers[0].get("partition_count", len(optimizers))
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(optimizers):
        raise CheckpointCorrupt(str(folder), 0, f"optimizer states of {count} ranks", f"of {len(optimizers)}")
    opened.scaler = scaler_of(optimizers[0].get("loss_scaler"))
    key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
    flats = [optimizer[key] for optimizer in optimizers]
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"]]
    stretches = _stretches(shapes, flats, optimizers, stage3)
    by_name = {name: shape for group in shapes for name, shape in group.items()}
    for name, shape in by_name.items():
        opened.model[name] = _assemble(opened.path, name, shape, stretches[name], flats)
    inner = [optimizer.get("optimizer_state_dict" if stage3 else "base_optimizer_state") for optimizer in optimizers]
    if all(isinstance(state, list) for state in inner):  # "elastic" checkpoints have states by group, and no group options
        listed: list[Any] = inner
        groups = [{"params": [number]} for number in range(len(shapes))]
        inner = [{"state": dict(enumerate(states)), "param_groups": groups} for states in listed]
    if not all(isinstance(state, Mapping) and "state" in state for state in inner):
        return  # the optimizer keeps its states elsewhere: only the values are read
    opened.groups = []
    for group in inner[0]["param_groups"]:
        members = [name for number in group["params"] for name in shapes[number]]
        options = {option: read_value(value) for option, value in group.items() if option != "params"}
        step = options.pop("step", None)
        opened.groups.append({**options, "params": members})
        for number in group["params"]:
            for state_key, value in inner[0]["state"].get(number, {}).items():
                columns = [{number: state["state"][number][state_key]} for state in inner]
                for name in shapes[number]:
                    elementwise = is_tensor(value) and value.shape != ()
                    state = _assemble(opened.path, name, by_name[name], stretches[name], columns) if elementwise else value
                    opened.states.setdefault(name, {})[state_key] = state
            for name in shapes[number] if step is not None and number in inner[0]["state"] else ():
                opened.states.setdefault(name, {}).setdefault("step", step)


def _stretches(shapes: list[dict[str, tuple[int, ...]]], flats: list[Any], optimizers: list[Any], stage3: bool) -> Stretches:
    """Return each parameter's stretches. Those of stages 1 and 2: by `param_slice_mappings`, else by the order of parameters."""
    found: Stretches = {name: [] for group in shapes for name in group}
    for number, group in enumerate(shapes if stage3 else ()):
        offset = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            length = -(-numel // len(flats))
            found[name] = [
                (rank * length, min(length, numel - rank * length), rank, number, offset)
                for rank in range(len(flats)) if rank * length < numel
            ]  # fmt: skip
            offset += length
    if stage3:
        return found
    if all("param_slice_mappings" in optimizer for optimizer in optimizers):
        done = dict.fromkeys(found, 0)
        for number in range(len(shapes)):
            for rank, optimizer in enumerate(optimizers):
                for name, address in optimizer["param_slice_mappings"][number].items():
                    found[name].append((done[name], address.numel, rank, number, address.start))
                    done[name] += address.numel
        return found
    for number, group in enumerate(shapes):
        ends, total = [], 0
        for flat in flats:
            total += math.prod(flat[number].shape)
            ends.append(total)
        at = 0
        for name, shape in group.items():
            first, stop = at, at + math.prod(shape)
            for rank, end in enumerate(ends):
                begin = ends[rank - 1] if rank else 0
                low, high = max(begin, first), min(end, stop)
                if low < high:
                    found[name].append((low - first, high - low, rank, number, low - begin))
            at = stop
    return found


def _assemble(path: Path, name: str, shape: tuple[int, ...], stretches: list[Any], flats: list[Any]) -> StoredStretches:
    """Return one tensor joined from its stretches. flats: rank -> flat number -> flat tensor. Raises CheckpointError."""
    pieces: list[tuple[int, int, int, Stored]] = []
    for start, count, rank, number, offset in stretches:
        flat = flats[rank][number]
        if not isinstance(flat, StoredTensor) or offset + count > flat.shape[0]:
            raise CheckpointError(f"{path}: {name}: expected {count} elements from {offset} on in rank {rank}'s group {number}.")
        pieces.append((start, offset, count, flat))
    if sum(count for _, _, count, _ in pieces) != math.prod(shape):
        raise CheckpointError(f"{path}: {name}: expected {math.prod(shape)} elements, found {sum(p[2] for p in pieces)}.")
    return StoredStretches(pieces[0][3].dtype, shape, pieces)


def _add_folders(opened: Opened, first: Any, folder: Path) -> None:
    """Add trained parameters, their optimizer states and groups, from a universal checkpoint's folders, and the loss scale.

    Raises CheckpointError if a file is missing or has a wrong number of elements.
    """
    zero = folder / "zero"
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in first.get("param_shapes") or ()]
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        for file in sorted((zero / name).glob("*.pt")):
            value = open_torch_file(file)
            value = value["param"] if isinstance(value, Mapping) else value
            if isinstance(value, StoredTensor) and value.shape != () and math.prod(value.shape) == math.prod(shape):
                value = replace(value, shape=shape)
            elif is_tensor(value) and value.shape != ():
                raise CheckpointError(f"{file}: expected {math.prod(shape)} elements, found a tensor {value.shape}.")
            if file.stem == _VALUE:
                opened.model[name] = value
            else:
                opened.states.setdefault(name, {})[file.stem] = value
        if not (zero / name / f"{_VALUE}.pt").is_file():
            raise CheckpointError(f"{folder}: {name}: expected its value in {zero / name / _VALUE}.pt, found no file.")
    if not (zero / "optimizer_state.pt").is_file():
        return
    saved = open_torch_file(zero / "optimizer_state.pt")
    inner = saved.get("optimizer_state_dict") or saved
    opened.scaler, opened.groups = scaler_of(saved.get("loss_scaler")), []
    for group in inner["param_groups"]:
        options = {option: read_value(value) for option, value in group.items() if option not in ("params", "step")}
        members = {name: number for number in group["params"] for name in shapes[number]}
        opened.groups.append({**options, "params": list(members)})
        for name, number in members.items():  # parameters whose folders have no step count
            step = (inner.get("state") or {}).get(number, {}).get("step", group.get("step"))
            if step is not None and name in opened.states:
                opened.states[name].setdefault("step", step)
