"""Entries of a model's state dict that are no parameters: compare them with a checkpoint, and load them.

buffers       identified by object, since hooks may rename them in the state dict
computed      tensors that hooks, or a module's `_save_to_state_dict`, compute; the model's `load_state_dict` loads them
extra state   values of `get_extra_state`; `set_extra_state` loads them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..memory.io.tensor_reader import Stored
from . import safetensors
from .bulk_reader import Reading
from .source import Opened, Untrusted


def compare(
    model: nn.Module, stored: Mapping[str, Stored], missing: list[str], mismatched: list[str], used: set[str]
) -> list[str]:
    """Compare with stored tensors: append to `missing` and `mismatched`, add the names to `used`. Return other problems."""
    buffers, computed = safetensors.others_of(model)
    wanted = [(buffer.kept, buffer.names, buffer.tensor) for buffer in buffers if buffer.kept]
    for kept, names, value in [*wanted, *(([name], [name], value) for name, value in computed.items())]:
        shape = tuple(value.shape)
        found = [name for name in kept if name in stored] or [name for name in names if name in stored][:1]
        used.update(found)
        missing += [] if found else [f"{names[0]} {shape} (buffer)"]
        mismatched += [f"{n}: saved {stored[n].shape}, wanted {shape} (buffer)" for n in found if stored[n].shape != shape]
    # an extra state may be a tensor, whose shape may differ from the saved one
    used.update(name for name in model.state_dict(keep_vars=True) if safetensors.is_extra_state(name))
    fitting = [(buffer, at) for buffer in buffers if (at := buffer.stored_in(stored)) and at.shape == tuple(buffer.tensor.shape)]
    return [f"  {buffer.names[0]} (buffer): {safetensors.EXPANDED}" for buffer, at in fitting if buffer.refuses(at)]


def takers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name of an extra state -> module with `set_extra_state`, for each name of the module."""
    return {
        f"{prefix}.{safetensors.EXTRA_STATE}".removeprefix("."): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def read_objects(model: nn.Module, opened: Opened, rank: int) -> None:
    """Read a foreign checkpoint's extra states for modules with `set_extra_state`; rank 0 prints the names of the others."""
    modules, left = takers(model), []
    for name, reader in opened.module_readers.items():
        try:
            if name in modules:
                opened.module_objects[name] = reader()
                continue
        except Untrusted:
            pass
        left.append(name)
    if left and rank == 0:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        why = "which no module of the model takes, or which is of classes that are not loaded from files of others"
        print(f"zeroshard: {opened.path}: left {', '.join(left[:5])}{more} unread, {why}", file=sys.stderr)


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
        key = f"{prefix}.{safetensors.EXTRA_STATE}".removeprefix(".")
        if key in opened.model:
            (stored,) = reading.guard({key: opened.model[key]}).values()
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
            stored.read(0, tensor.view(-1))
            value: object = tensor
        elif key in opened.module_objects:
            value = opened.module_objects[key]
        else:
            continue
        attempt(f"{prefix or 'the model'} ({type(module).__name__}.set_extra_state)", partial(module.set_extra_state, value))
    return refused
