"""A model's own names: those of its modules and tensors as if no wrapper of torch stood between them.

    torch.compile(model)                       _orig_mod.blocks.0.weight                                 blocks.0.weight
    model.blocks[0] = checkpoint_wrapper(...)  blocks.0._checkpoint_wrapped_module.weight                blocks.0.weight
    DistributedDataParallel(model)             module.blocks.0.weight                                    blocks.0.weight

Whatever the library names (in files, messages, options) has its own name, so that a checkpoint does not depend on what is
compiled or recomputed, and other programs find the names that they know. torch.distributed.checkpoint.state_dict does the same.
`model.state_dict()`, `named_parameters()` and the other methods of the model itself stay torch's.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .torch_compat import WRAPPED_AS, own_buffers, own_modules, own_parameters

_IN_STATE_DICTS = (WRAPPED_AS[0], "module")  # steps in the names that a wrapped model's `load_state_dict` expects


def step_inside(module: nn.Module) -> str:
    """Return the attribute under which a wrapper of torch holds its module; "" for a module that is no wrapper."""
    inside = own_modules(module)
    if len(inside) != 1 or own_parameters(module) or own_buffers(module):
        return ""
    step = next(iter(inside))
    wraps = step in WRAPPED_AS or (step == "module" and isinstance(module, DistributedDataParallel))
    return step if wraps else ""


def own_name(model: nn.Module, name: str, to_load: bool = False) -> str:
    """Return the model's own name of a module, tensor or entry of its state dict.

    name: with all steps into wrappers, or without some of them. to_load: return the name that `model.load_state_dict` expects.
    """
    at, parts, path = model, name.split(".") if name else [], list[str]()
    while at is not None and (parts or step_inside(at)):
        if step := step_inside(at):
            there = parts[:1] == [step]
            parts = parts[there:]
            path += [step] if to_load and (there or step in _IN_STATE_DICTS) else []
        else:
            step = parts.pop(0)
            path.append(step)
        at = own_modules(at).get(step)  # None: of a tensor, or renamed by a hook
    return ".".join(path + parts)


def own_state(model: nn.Module) -> dict[str, Any]:
    """Return the entries of a model's state dict under the model's own names: its parameters and buffers themselves."""
    return {own_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}


def take_own_names(model: nn.Module, given: dict[str, Any], prefix: str, *_: object) -> None:
    """Let `model.load_state_dict` take the model's own names, as a hook before it. Names that torch expects stay as they are."""
    if any(map(step_inside, model.modules())):
        entries = [(own_name(model, name.removeprefix(prefix), to_load=True), value) for name, value in given.items()]
        given.clear()
        given.update((prefix + name, value) for name, value in entries)


def matches(model: nn.Module, name: str, pattern: str) -> bool:
    """Return whether a pattern of a user matches a name, as the model itself has it or without wrappers."""
    return any(fnmatchcase(each, pattern) for each in (name, own_name(model, name)))


def without_wrappers(name: str) -> str:
    """Return a name in a file without torch's private steps into wrappers, wherever they are."""
    return ".".join(step for step in name.split(".") if step not in WRAPPED_AS)
