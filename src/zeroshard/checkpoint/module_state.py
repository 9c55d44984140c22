"""Compare a model's state dict with a checkpoint, and load the entries that are no parameters.

buffers       identified by object, since hooks may rename them in the state dict
computed      tensors that hooks, or a module's `_save_to_state_dict`, compute; the model's `load_state_dict` loads them
extra state   values of `get_extra_state`; `set_extra_state` loads them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from ..errors import CheckpointError, did_you_mean
from ..seam import DirectComm, NamedPart
from ..state import Stored, differ
from ..utils.module_names import own_name, own_state, step_inside
from . import safetensors
from .bulk_reader import Reading
from .source import Opened, first_of, read_value


@dataclass
class Fit:
    """A model's state dict compared with stored tensors.

    found: parameter -> where it is stored; of a tile or a tensor-parallel shard its part. used: stored names that the model takes.
    missing: what is not stored, by name. problems: a line for each other difference.
    """

    found: dict[str, Stored] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lines(self, unused: Iterable[str]) -> list[str]:
        """Return a line for each difference. unused: stored names, one of which may be meant where a similar one is missing."""
        told = "missing (the model has it, the checkpoint not)"
        absent = [f"{told}: {entry}{did_you_mean(entry.split(' ')[0], unused)}" for entry in self.missing.values()]
        return [*dict.fromkeys(absent + self.problems)]  # without repetition: all tiles of a parameter differ alike


def compare(
    model: nn.Module, parts: Iterable[NamedPart], stored: Mapping[str, Stored], comm: DirectComm, twice: bool = True,
    computes: bool = True,
) -> Fit:  # fmt: skip
    """Compare a model's parameters (`parts`), buffers and computed tensors with stored ones.

    comm: ranks with the same part of the model; each compares its share of the values of tied parameters. twice: tied parameters
    may be stored under several names; otherwise only the first counts. Buffers that are not persistent need not be stored.
    computes: compare what hooks compute; otherwise it may be missing, or of another shape.
    """
    fit = Fit()
    for part in parts:
        shape, names = part.shape, [name for name in part.names if name in stored]
        if not names:
            fit.missing[part.own_name] = f"{part.name} {shape}"
            continue
        fit.used.update(names if twice else names[:1])
        other = [name for name in names if stored[name].shape != shape]
        fit.problems += [f"of another shape: {name}: saved {stored[name].shape}, wanted {shape}" for name in other]
        for name in names[1:] if twice else ():
            if differ(stored[names[0]], stored[name], comm.rank, comm.world_size):
                untie = "to which the model ties it; build it without the tie"
                fit.problems.append(f"untied: {name}: saved with other values than {names[0]}, {untie}")
        if not other:
            fit.found[part.own_name] = stored[names[0]].cut(part.part)
    buffers, computed = safetensors.others_of(model)
    wanted = [(buffer.kept, buffer.names, buffer.tensor) for buffer in buffers]
    wanted += [([name], [name], value) for name, value in computed.items()] if computes else []
    for kept, names, value in wanted:
        shape = tuple(value.shape)
        found = [name for name in kept if name in stored] or [name for name in names if name in stored][:1]
        other = [name for name in found if stored[name].shape != shape]
        if not kept:  # a hook may store a buffer in another shape under its name: then it is read, and the hook puts it right
            other = [name for name in other if name not in computed or stored[name].numel < value.numel()]
        fit.problems += [f"of another shape: {name}: saved {stored[name].shape}, wanted {shape} (buffer)" for name in other]
        if kept:
            fit.used.update(found)
            fit.missing |= {} if found else {names[0]: f"{names[0]} {shape} (buffer)"}
    # an extra state may be a tensor, whose shape may differ from the saved one
    fit.used.update(name for name in own_state(model) if safetensors.is_extra_state(name))
    fitting = [(buffer, at) for buffer in buffers if (at := buffer.stored_in(stored)) and at.shape == tuple(buffer.tensor.shape)]
    fit.problems += [f"{buffer.names[0]} (buffer): {safetensors.EXPANDED}" for buffer, at in fitting if buffer.refuses(at)]
    return fit


def names_in(model: nn.Module, parts: Iterable[NamedPart]) -> set[str]:
    """Return the names in a model's state dict, with all names of tied parameters and of buffers."""
    buffers, computed = safetensors.others_of(model)
    found = {name for part in parts for name in part.names}
    found |= {name for buffer in buffers for name in buffer.names} | computed.keys()
    return found | takers(model).keys()


def takers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name of an extra state -> module with `set_extra_state`, for each name of the module."""
    return {
        own_name(model, f"{prefix}.{safetensors.EXTRA_STATE}".removeprefix(".")): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def read_objects(model: nn.Module, opened: Opened, rank: int) -> None:
    """Read a foreign checkpoint's extra states for modules with `set_extra_state`; rank 0 prints the names of the others."""
    opened.module_objects, left = opened.read_objects(takers(model))
    if left and rank == 0:
        why = "which no module of the model takes, or which is of classes that are not loaded from files of others"
        print(f"zeroshard: {opened.path}: left {first_of(left)} unread, {why}", file=sys.stderr)


def give_back(
    model: nn.Module, opened: Opened, computed: dict[str, Tensor], reading: Reading, rank: int
) -> CheckpointError | None:
    """Load computed tensors and extra states by the modules' own methods. Return the first error, or None.

    An error is returned, not raised, so that this rank stays in step with the others.
    """
    refused: CheckpointError | None = None

    def attempt(who: str, take: Callable[[], object]) -> None:
        nonlocal refused
        try:
            if reading.error is None:  # after a failed read the values are undefined
                take()
        except Exception as error:
            if refused is None:
                what = f"{who} on rank {rank} did not take its state: {type(error).__name__}: {error}"
                refused = CheckpointError(f"{opened.path}: {what}")
                refused.__cause__ = error

    if computed:
        names = ", ".join(list(computed)[:3]) + (", ..." if len(computed) > 3 else "")
        who = f"the model ({type(model).__name__}.load_state_dict of {names})"
        attempt(who, lambda: safetensors.give_computed(model, computed))
    for prefix, module in model.named_modules():
        key = own_name(model, f"{prefix}.{safetensors.EXTRA_STATE}".removeprefix("."))
        if step_inside(module):  # the state is that of the module inside, which has the same name
            continue
        if key in opened.model:
            value = read_value(reading.guard({key: opened.model[key]})[key])
        elif key in opened.module_objects:
            value = opened.module_objects[key]
        else:
            continue
        attempt(f"{prefix or 'the model'} ({type(module).__name__}.set_extra_state)", partial(module.set_extra_state, value))
    return refused
