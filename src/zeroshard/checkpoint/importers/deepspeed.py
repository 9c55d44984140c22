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

A pipeline has a file for each layer, by number, and the files of a rank for each stage S (mp_rank_0S). A tied layer's parameters
have their names in the module ("tied_modules.KEY.weight") among the optimizer's, and in each layer's file ("weight"):

    layer_03-model_states.pt                                 state dict of layer 3: of "3.norm.weight" under "norm.weight"
    mp_rank_01_model_states.pt, zero_pp_rank_R_mp_rank_01_optim_states.pt    counters and slices of stage 1

Layers of experts (deepspeed.moe) have a file for each expert. Ranks r, r + E, r + 2E ... hold the experts of place r among E, which
each of them numbers from 0 on, and divide their optimizer groups ("moe": True) among each other:

    layer_1_expert_5_mp_rank_00_model_states.pt              expert 5 of the second such layer
    expp_rank_E_mp_rank_00_optim_states.pt                   at stage 0, the optimizer of place E

Other entries of rank 0's model file (counters, scheduler, client state, configuration) become extras of the checkpoint.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ...state import Stored, StoredStretches, StoredTensor
from ..source import Opened, Untrusted, read_value
from .torch_file import StandIn, is_tensor, open_torch_file, plain
from .torch_state_dict import add_optimizer, objects_of

_RANK = re.compile(r".*zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_00)?-model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
_OF_THE_MODEL = {
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
}  # fmt: skip
_VALUE = "fp32"


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
    """Open a checkpoint of DeepSpeed. Raise CheckpointCorrupt, or CheckpointError (also for tensor parallelism)."""
    folder = tag_folder(path)
    if folder is None:
        raise CheckpointNotFound(f"{path}: expected a checkpoint of DeepSpeed.")
    layers = {int(match[1]): file for file in folder.glob("layer_*") if (match := _LAYER.fullmatch(file.name))}
    if (any(folder.glob("*mp_rank_01_*")) and not layers) or any(folder.glob("layer_*-model_01-*")):
        raise CheckpointError(
            f"{folder}: tensor-parallel checkpoints of DeepSpeed can not be read; merge them with its own tools first."
        )
    if (folder / "zero").is_dir():
        return _open_universal(path, folder)
    stages = len(list(folder.glob("mp_rank_*_model_states.pt"))) if layers else 1
    slices = [_optimizers(folder, stage) for stage in range(stages)]
    stage3 = bool(slices[0]) and "fp32_flat_groups" in slices[0][0]
    files = [folder / f"mp_rank_{stage:02d}_model_states.pt" for stage in range(stages)]
    if stage3:
        files = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(slices[0]))]
    models = [open_torch_file(file) for file in files]
    opened = Opened(path, "DeepSpeed", _unsharded(models[0], models, stage3) if not layers else {})
    for number, file in sorted(layers.items()):
        state = {f"{number}.{name}": value for name, value in open_torch_file(file).items()}
        opened.model |= {name: value for name, value in state.items() if is_tensor(value)}
        opened.module_readers |= objects_of(state, file)
    experts = {
        tuple(map(int, match.groups())): file for file in folder.glob("layer_*") if (match := _EXPERT_FILE.fullmatch(file.name))
    }
    for _, file in sorted(experts.items()):
        opened.model |= {name: value for name, value in open_torch_file(file).items() if is_tensor(value)}
    _describe(opened, models[:stages], folder)
    groups: dict[object, dict[str, Any]] = {}
    for model, optimizers in zip(models, slices, strict=False):
        if optimizers:
            _add_flat(opened, model, folder, optimizers, stage3, groups)
    if not slices[0]:
        _add_numbered(opened, models, folder, groups)
    opened.groups = list(groups.values()) or None
    _add_aliases(opened, models[0])
    return opened


def _open_universal(path: Path, folder: Path) -> Opened:
    rank_of = lambda file: int(file.name.split("_")[3]) if file.name.startswith("zero_pp_rank_") else 0  # noqa: E731
    files = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=rank_of)
    models = [open_torch_file(file) for file in files]
    opened = Opened(path, "DeepSpeed", _unsharded(models[0], models, files[0].name.startswith("zero_pp_rank_")))
    _describe(opened, models[:1], folder)
    _add_folders(opened, models[0], folder)
    _add_aliases(opened, models[0])
    return opened


def _optimizers(folder: Path, place: int) -> list[Any]:
    """Return what the ranks' optimizer files of one stage of a pipeline hold. Raise CheckpointCorrupt if one is missing."""
    names = ((file, _RANK.fullmatch(file.name)) for file in folder.glob("*_optim_states.pt"))
    found = {int(match[1]): file for file, match in names if match and int(match[2]) == place}
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            raise CheckpointCorrupt(str(folder), 0, f"the optimizer states of rank {rank}", "no file")
    return [open_torch_file(found[rank])["optimizer_state_dict"] for rank in range(len(found))]


def _add_aliases(opened: Opened, first: Any) -> None:
    for alias, name in (first.get("shared_params") or {}).items():
        if name in opened.model:
            opened.model[alias] = opened.model[name]


def _add_numbered(opened: Opened, models: list[Any], folder: Path, groups: dict[object, dict[str, Any]]) -> None:
    """Add stage 0's states, by the parameters' numbers. Masters, saved without names, are not read.

    Of a pipeline, or several places along expert parallelism, the numbers are pairs (stage or place, number).
    """
    optimizers = [model.get("optimizer") for model in models]
    files = sorted(folder.glob("expp_rank_*_optim_states.pt"), key=lambda file: int(file.name.split("_")[2]))
    optimizers = [open_torch_file(file)["optimizer"] for file in files] or optimizers
    if not all(isinstance(saved, Mapping) for saved in optimizers):
        return
    parts = []
    for saved in optimizers:
        add_optimizer(part := Opened(opened.path, opened.kind, {}), saved.get("optimizer_state_dict", saved))
        for group in part.groups or ():
            # DeepSpeed's FusedAdam counts steps, as whole numbers, for a group's last parameter alone
            states = [part.states[number] for number in group["params"] if number in part.states]
            steps = [step for state in states if isinstance(step := state.get("step"), int)]
            for state in states if steps else ():
                state["step"] = max(steps)
        parts.append(part)
    if any(part.groups is None for part in parts):
        return
    experts, buffers = dict[str, dict[str, int]](), set(models[0]["buffer_names"])  # tensors of each expert, by layer
    for match in (_EXPERT.fullmatch(name) for name in opened.model if name not in buffers):
        if match is not None:
            layer = experts.setdefault(match[1], {})
            layer[match[2]] = layer.get(match[2], 0) + 1
    of_layers = [len(layer) // len(parts) * layer["0"] for layer in experts.values()]  # parameters of a layer at one place
    several = len(parts) > 1 or models[0]["module"] is None
    for place, part in enumerate(parts):
        opened.states |= {(place, number) if several else number: state for number, state in part.states.items()}
    for number, group in enumerate(parts[0].groups or ()):
        members = [
            [(place, n) if several else n for n in (part.groups or ())[number]["params"]] for place, part in enumerate(parts)
        ]
        if files and group.get("moe") and several:  # first all experts of the first layer, by place
            ends = list(itertools.accumulate(of_layers, initial=0))
            members = [own[first:stop] for first, stop in itertools.pairwise(ends) for own in members]
        elif files:
            members = members[:1]
        _add_group(groups, number, group, list(itertools.chain(*members)))


def _add_group(groups: dict[object, dict[str, Any]], number: int, options: Mapping[str, Any], members: list[Any]) -> None:
    """Add members to an optimizer group: of all stages to one of a number, of all experts to one of a name."""
    group = groups.setdefault(options.get("name", number) if options.get("moe") else number, {**options, "params": []})
    group["params"] += [member for member in members if member not in group["params"]]


def _describe(opened: Opened, models: list[Any], folder: Path) -> None:
    """Add the facts in model files, and the first's other entries as extras; objects of other classes stay in `opened.unread`."""
    first = models[0]
    opened.step = int(first.get("global_steps") or 0)
    opened.module_readers |= objects_of(first["module"] or {}, folder)
    opened.facts = {"step": opened.step, "deepspeed": first.get("ds_version"), "world_size": first.get("dp_world_size")}
    for name, value in first.items():
        if name in _OF_THE_MODEL or value is None:
            continue
        try:
            opened.extras[name] = plain(value, f"{folder}: {name}")
        except Untrusted as error:
            opened.unread[name] = error
    if first.get("param_shapes"):  # without it, frozen parameters cannot be told from trained ones
        told = {name for model in models for group in model["param_shapes"] for name in (*group, *model["buffer_names"])}
        others = (first["module"] or opened.model).keys() - told - (first.get("shared_params") or {}).keys()
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


def _add_flat(
    opened: Opened, model: Any, folder: Path, optimizers: list[Any], stage3: bool, groups: dict[object, dict[str, Any]]
) -> None:
    """Add trained parameters, their optimizer states and groups, from the ranks' flat slices, and the loss scale.

    What a pipeline's earlier stage has added, of tied layers, stays.
    """
    counts = optimizers[0].get("partition_count", len(optimizers))
    counts = counts if isinstance(counts, (list, tuple)) else [counts] * len(model["param_shapes"])
    if max(counts) != len(optimizers):
        raise CheckpointCorrupt(str(folder), 0, f"optimizer states of {max(counts)} ranks", f"of {len(optimizers)}")
    opened.scaler = scaler_of(optimizers[0].get("loss_scaler"))
    key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
    flats = [optimizer[key] for optimizer in optimizers]
    parts: list[dict[str, tuple[tuple[int, ...], list[Any]]]] = []  # by flat number: name -> shape and stretches
    for number, group in enumerate(model["param_shapes"]):
        shapes = {name: tuple(shape) for name, shape in group.items()}
        places = 1 if stage3 else len(optimizers) // counts[number]  # along expert parallelism
        parts.append({})
        for place in range(places):
            ranks = range(place, len(optimizers), places)
            for name, stretches in _stretches(shapes, number, ranks, flats, optimizers, stage3).items():
                whole_name = _of_all(name, place, shapes) if places > 1 else name
                if whole_name not in opened.states:
                    parts[number][whole_name] = shapes[name], stretches
                    opened.model[whole_name] = _assemble(opened.path, name, shapes[name], stretches, flats)
    inner = [optimizer.get("optimizer_state_dict" if stage3 else "base_optimizer_state") for optimizer in optimizers]
    if all(isinstance(state, list) for state in inner):  # "elastic" checkpoints have states by group, and no group options
        listed: list[Any] = inner
        numbered = [{"params": [number]} for number in range(len(parts))]
        inner = [{"state": dict(enumerate(states)), "param_groups": numbered} for states in listed]
    if not all(isinstance(state, Mapping) and "state" in state for state in inner):
        return  # the optimizer keeps its states elsewhere: only the values are read
    for place, group in enumerate(inner[0]["param_groups"]):
        members = [name for number in group["params"] for name in parts[number]]
        options = {option: read_value(value) for option, value in group.items() if option != "params"}
        step = options.pop("step", None)
        _add_group(groups, place, options, members)
        for number in group["params"]:
            for state_key, value in inner[0]["state"].get(number, {}).items():
                columns = [{number: state["state"][number][state_key]} for state in inner]
                for name, (shape, stretches) in parts[number].items():
                    elementwise = is_tensor(value) and value.shape != ()
                    state = _assemble(opened.path, name, shape, stretches, columns) if elementwise else value
                    opened.states.setdefault(name, {})[state_key] = state
            for name in parts[number] if step is not None and number in inner[0]["state"] else ():
                opened.states.setdefault(name, {}).setdefault("step", step)


def _of_all(name: str, place: int, names: Iterable[str]) -> str:
    """Return the name of an expert's parameter by its number among all, for that among the experts of a place."""
    match = _EXPERT.fullmatch(name)
    assert match is not None, name
    own = {other[2] for each in names if (other := _EXPERT.fullmatch(each)) is not None and other[1] == match[1]}
    return f"{match[1]}{place * len(own) + int(match[2])}{match[3]}"


def _stretches(
    shapes: dict[str, tuple[int, ...]], number: int, ranks: Sequence[int], flats: list[Any], optimizers: list[Any], stage3: bool
) -> dict[str, list[tuple[int, int, int, int, int]]]:
    """Return by name the stretches (first, count, rank, flat number, offset in it) of the parameters in one flat of these ranks.

    Those of stages 1 and 2: by `param_slice_mappings`, else by the order of parameters.
    """
    found: dict[str, list[tuple[int, int, int, int, int]]] = {name: [] for name in shapes}
    if stage3:
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            length = -(-numel // len(ranks))
            found[name] = [
                (rank * length, min(length, numel - rank * length), rank, number, offset)
                for rank in ranks if rank * length < numel
            ]  # fmt: skip
            offset += length
        return found
    if all("param_slice_mappings" in optimizer for optimizer in optimizers):
        done = dict.fromkeys(found, 0)
        for rank in ranks:
            for name, address in optimizers[rank]["param_slice_mappings"][number].items():
                found[name].append((done[name], address.numel, rank, number, address.start))
                done[name] += address.numel
        return found
    ends = list(itertools.accumulate(math.prod(flats[rank][number].shape) for rank in ranks))
    at = 0
    for name, shape in shapes.items():
        first, stop = at, at + math.prod(shape)
        for rank, begin, end in zip(ranks, [0, *ends], ends, strict=False):
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
