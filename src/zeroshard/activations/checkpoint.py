"""zs.checkpoint_activations: keep only the inputs of blocks, partitioned and offloaded (ZeRO-R, arXiv 1910.02054, 6).

    zs.checkpoint_activations(model, offload="cpu")                   # before or after zs.shard, or without it
    zs.checkpoint_activations(model, partition=model_parallel_group, offload="nvme", path="/nvme")
    zs.checkpoint_activations(model, off=True)                        # the inverse

A block runs under `torch.utils.checkpoint` (non-reentrant): forward keeps its inputs, and backward runs its forward again,
with the same dropout. Saved-tensor hooks pack the inputs into a `Store`, in one of two ways:

    blocks given or found    `block.forward` becomes a `CheckpointedForward`, which packs the block's inputs only
    blocks=None              `model.forward` becomes a `ForwardOfCheckpoints`: the model itself calls torch's checkpoint

Both are set on the instance, so that names, hooks and the state dict stay as they are; the block's hooks (also those of
zs.shard) run once, around the checkpoint. The inputs of a block that runs inside another checkpoint, or in a backward, are not
packed: an outer checkpoint computes them again, and a backward uses them at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ..comm import backend_select
from ..comm.fake import Watcher
from ..config import Offload, Tier, Units
from ..errors import ConfigError, ZeroshardError
from ..seam import Ledger, Links, find_blocks, find_engine, streams_for
from ..tiers import Spare
from ..utils import torch_compat
from ..utils.saved_tensors import Outer
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import original
from ..utils.transformers_compat import recomputes
from .saved_tensors import InputHooks, Store
from .storage import Backing, DiskBacking, ImaginedDiskBacking, MemoryBacking

_MIN_NUMEL = 1 << 12
_STALL_TIMEOUT_S = 60.0
_ATTACHED = "_zeroshard_activations"  # in the model's __dict__


@dataclass(eq=False)
class Attached(Spare):
    """The changes that `checkpoint_activations` has made to a model.

    forwards: (module, `forward` in its instance's __dict__ before, or None, the new one). compiled: (module, its compiled call
    before, the new one).
    """

    store: Store
    blocks: list[str]
    forwards: list[tuple[nn.Module, Callable | None, _Forward]] = field(default_factory=list)
    compiled: list[tuple[nn.Module, Callable, _Forward]] = field(default_factory=list)
    handle: RemovableHandle | None = None

    def give_back(self) -> None:
        """Free the arena while no checkpoint is packed; the next step allocates it again."""
        if not self.store.alive():
            self.store.backing.give_back()


def checkpoint_activations(
    model: nn.Module,
    *,
    blocks: Units | None = "auto",
    partition: backend_select.Choice | None = None,
    offload: Offload | str | None = None,
    path: str | None = None,
    prefetch: int = 2,
    arena_nbytes: int | None = None,
    min_numel: int = _MIN_NUMEL,
    check_equal: bool = False,
    off: bool = False,
) -> nn.Module:
    """Run blocks under activation checkpointing, with their inputs partitioned or offloaded; return the same model.

    Losses, gradients and updated parameters are the same bits as without checkpointing.

    Args:
        model: any nn.Module, on its device already. zs.shard may be called before, afterwards or not at all.
        blocks: the modules that each become one checkpoint: "auto" (the classes that repeat in a container), classes or class
            names, a function (name, module) -> bool, or None for a model that calls torch.utils.checkpoint itself (also by
            gradient_checkpointing_enable() of transformers, which "auto" recognises).
        partition: ranks that compute with the same activations, as a 1-D DeviceMesh, a process group or a Comm (a model-parallel
            group). Each keeps 1/N of every checkpoint, and backward gathers it (Pa).
        offload: None (the device), "cpu" or "nvme" (files in a folder of this run below `path`), or an Offload, of which device,
            path, pin_memory, checksum and any_filesystem are used.
        path: folder on a local disk, for "nvme".
        prefetch: number of checkpoints that are copied back from host or disk ahead of use; 0: none.
        arena_nbytes: bytes of the arena that is allocated now. None or 0: as many as the first step needs. An arena in memory
            grows between steps only. A disk must have space for it; with None, for the inputs of all blocks if these are of one
            class and each input is as large as the first.
        min_numel: inputs of fewer elements are not packed.
        check_equal: compare the values that the ranks of `partition` pack, not only their shapes (for debugging: it is slow).
        off: undo an earlier call; the other options are ignored.

    Raises:
        ConfigError: an option is wrong, the process group was not started, or no block was found.
        ZeroshardError: the model is checkpointed already; or (off) it is not.

    Sources: ZeRO, arXiv 1910.02054, 6.1 (Pa, Pa+cpu) and 6.3 (MD); ZeRO-Infinity, arXiv 2104.07857, 5.1.2.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if off:
        return _detach(model)
    for name, module in model.named_modules():
        if _ATTACHED in module.__dict__ or isinstance(module.__dict__.get("forward"), _Forward):
            raise ZeroshardError(
                f"{name or type(model).__name__} has zs.checkpoint_activations already: call it once for a model, or first "
                "zs.checkpoint_activations(model, off=True)."
            )
    chosen = Offload.of(offload, path, "offload", option="path")
    if path is not None and chosen.tier is not Tier.DISK:
        raise ConfigError(f"path={path!r} is for offload='nvme', got offload={offload!r}.")
    numbers = {"prefetch": prefetch, "arena_nbytes": 0 if arena_nbytes is None else arena_nbytes, "min_numel": min_numel}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}: expected a whole number of at least 0, got {value!r}.")
    found = _blocks(model, blocks)
    store = _make_store(model, partition, chosen, check_equal, **numbers)
    attached = Attached(store, [name for name, _ in found])
    store.alike = attached.blocks if len({type(block) for _, block in found}) == 1 else []
    _replace_forwards(attached, model, found)
    attached.handle = model.register_forward_pre_hook(store.begin_forward, prepend=True)
    model.__dict__[_ATTACHED] = attached
    return model


def attached_to(model: nn.Module) -> Attached:
    """Return the changes that `checkpoint_activations` made to a model. Raises ZeroshardError if it was not called."""
    attached = model.__dict__.get(_ATTACHED)
    if attached is None:
        raise ZeroshardError(f"this {type(model).__name__} has no zs.checkpoint_activations: call that first.")
    return attached


# -- reading the options -------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, units: Units | None) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the outermost blocks; none if the model itself calls torch.utils.checkpoint."""
    if units is None or (isinstance(units, str) and units == "auto" and recomputes(model)):
        return []
    if (isinstance(units, str) and units != "auto") or isinstance(units, type):
        units = (units,)
    found = find_blocks(model, units, "blocks")
    inside = {id(inner) for _, block in found for inner in block.modules() if inner is not block}
    found = [(name, block) for name, block in found if id(block) not in inside]
    without = [name for name, block in found if type(original(block)).forward is nn.Module.forward]
    if without:
        raise ConfigError(f"blocks: {without[0]} has no forward of its own; name the modules inside it.")
    if not found:
        raise ConfigError(
            f"blocks: nothing to checkpoint in this {type(model).__name__}: no class repeats in a ModuleList or "
            "Sequential. Name classes, pass a function (name, module) -> bool, or blocks=None if the model calls "
            "torch.utils.checkpoint."
        )
    return found


def _make_store(
    model: nn.Module, partition: backend_select.Choice | None, offload: Offload, check_equal: bool, prefetch: int, arena_nbytes: int,
    min_numel: int,
) -> Store:  # fmt: skip
    first = next(iter(model.parameters()), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    ledger = Ledger()
    comm = None if partition is None else backend_select.current(partition, device, _STALL_TIMEOUT_S, "partition")
    engine = find_engine(model)
    ranks = comm if comm is not None or engine is None else engine.ranks
    streams = streams_for(device) if ranks is None else ranks.streams  # so that a sharded model's copies and these are ordered
    links = Links(device, streams, ledger)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0 if comm is None else comm.rank
    backing: Backing
    if offload.tier is not Tier.DISK:
        backing = MemoryBacking(offload.tier, links, arena_nbytes, offload.pin_memory)
    elif isinstance(streams, Watcher):
        backing = ImaginedDiskBacking(links, False, prefetch)
    else:
        backing = DiskBacking(offload, links, arena_nbytes, prefetch, rank)
    return Store(model, backing, comm, ledger, prefetch, min_numel, check_equal, speaks=rank == 0)


# -- forwards ------------------------------------------------------------------------------------------------------


class _Forward:
    """A callable in place of a module's forward. As an object, not a closure, it is copied with the model by copy.deepcopy."""

    def __init__(self, store: Store, name: str, inner: Callable) -> None:
        functools.update_wrapper(self, inner)  # type: ignore[arg-type]  # tools read the signature and docstring of forward
        self.store, self.name, self.inner = store, name, inner
        self.active = True


class CheckpointedForward(_Forward):
    """A block's forward under torch's checkpoint, whose inputs are packed into the store."""

    looked = False  # whether the inputs have been searched for tensors that cannot be packed

    @torch_compat.disable_dynamo  # a block that is compiled afterwards runs uncompiled inside: torch.compile cannot see the store
    def __call__(self, *args: object, **kwargs: object) -> object:
        if not (self.active and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if type(value).__name__.endswith("Cache"):
                raise ConfigError(
                    f"{self.name} was given a {type(value).__name__}: computing the block again would append to it twice. Call "
                    "the model with use_cache=False (model.config.use_cache = False) while it is trained."
                )
        tensors, inputs = _take_out((args, kwargs))
        opaque = None if self.looked else _opaque(inputs, self.store.min_numel)  # searching is slow: at the first call only
        self.looked = True
        if opaque is not None:
            self.store.say(
                f"{self.name} takes tensors inside a {opaque}, which are not stored: pass them as arguments, or in tuples, lists and "
                "dicts."
            )
        hooks: contextlib.AbstractContextManager = contextlib.nullcontext()
        if _computed_again():
            self.store.say(
                f"{self.name} runs inside a torch.utils.checkpoint of the model's own, so its input is not stored: pass blocks=None "
                "to store what the model's own checkpoints keep."
            )
        else:
            # every tensor that autograd saves: inside of torch's `checkpoint`, these are the inputs
            store, name = self.store, self.name  # so that hooks, which a graph may keep, do not refer to the block
            hooks = saved_tensors_hooks(lambda tensor: store.pack(tensor, name), store.unpack)
        given = [(args, kwargs)]  # forward gets the caller's own containers, which a block may change; recomputing gets copies

        def run(*tensors: Tensor) -> object:
            args, kwargs = given.pop() if given else _put_back(inputs, iter(tensors))
            return self.inner(*args, **kwargs)

        with hooks:
            # each tensor is an argument of its own, so that checkpoint saves it as an input, where the hooks see it
            return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=True)


class ForwardOfCheckpoints(_Forward):
    """The forward of a model that itself calls torch.utils.checkpoint, whose inputs are packed into the store."""

    @torch_compat.disable_dynamo
    def __call__(self, *args: object, **kwargs: object) -> object:
        if not (self.active and torch.is_grad_enabled()) or _computed_again():
            return self.inner(*args, **kwargs)
        before = self.store.packed  # number of tensors packed so far
        with saved_tensors_hooks(InputHooks(self.store).pack, lambda packed: packed()):
            output = self.inner(*args, **kwargs)
        if self.store.packed == before:
            self.store.say(
                "this forward stored nothing: it called no torch.utils.checkpoint with an input of at least "
                f"{self.store.min_numel} elements that requires a gradient. Leave out blocks=None, so that blocks are found."
            )
        return output


def _replace_forwards(attached: Attached, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    """Put the forwards of checkpoints in place of those of the blocks, or if there are none, in place of the model's."""
    replaced: list[tuple[nn.Module, _Forward]] = []
    for name, block in blocks:
        compiled = torch_compat.compiled_call(block)  # None for a torch.compile wrapper, whose `forward` is the compiled function
        if compiled is None:
            replaced.append((block, CheckpointedForward(attached.store, name, block.forward)))
        else:  # module.compile(): the checkpoint goes around the compiled call, and around what zs.shard has put there
            forward = CheckpointedForward(attached.store, name, compiled)
            torch_compat.set_compiled_call(block, forward)
            attached.compiled.append((block, compiled, forward))
    if not blocks:
        replaced.append((model, ForwardOfCheckpoints(attached.store, "", model.forward)))
    for module, new in replaced:
        attached.forwards.append((module, module.__dict__.get("forward"), new))
        module.__dict__["forward"] = new  # setattr on torch.compile's wrapper would set it on the wrapped module


def _detach(model: nn.Module) -> nn.Module:
    """Undo `checkpoint_activations`."""
    attached = attached_to(model)
    if attached.store.alive():
        raise ZeroshardError(
            f"{attached.store.alive()} activation checkpoints wait for their backward: run it, or drop the losses and outputs "
            "that refer to them, before zs.checkpoint_activations(model, off=True)."
        )
    for module, before, forward in attached.forwards:
        forward.active = False  # so that it has no effect if somebody has wrapped it meanwhile and still calls it
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before
    for module, compiled, forward in attached.compiled:
        forward.active = False
        if torch_compat.compiled_call(module) is forward:
            torch_compat.set_compiled_call(module, compiled)
    if attached.handle is not None:
        attached.handle.remove()
    attached.store.close()
    del model.__dict__[_ATTACHED]
    return model


# -- arguments -----------------------------------------------------------------------------------------------------


_HERE = object()  # placeholder for a tensor that was taken out of arguments


def _take_out(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors in nested tuples, lists and dicts, and the containers with placeholders; objects are not searched."""
    if isinstance(value, Tensor):
        return [value], _HERE
    if type(value) not in (tuple, list, dict):
        return [], value
    parts = [_take_out(item) for item in (value.values() if type(value) is dict else value)]
    rests = [rest for _, rest in parts]
    rest = dict(zip(value, rests, strict=True)) if type(value) is dict else type(value)(rests)
    return [tensor for tensors, _ in parts for tensor in tensors], rest


def _put_back(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return containers with tensors in place of `_take_out`'s placeholders, in order."""
    if value is _HERE:
        return next(tensors)
    if type(value) is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    return type(value)(_put_back(item, tensors) for item in value) if type(value) in (tuple, list) else value


def _opaque(value: Any, min_numel: int) -> str | None:
    """Return the class name of an object in which `_take_out` did not look and which holds tensors worth packing, or None."""
    if type(value) in (tuple, list, dict):
        items = value.values() if type(value) is dict else value
        return next((found for item in items if (found := _opaque(item, min_numel))), None)
    held = any(tensor.requires_grad and tensor.numel() >= min_numel for tensor in find_tensors(value))
    return type(value).__name__ if held else None


def _computed_again() -> bool:
    """Return whether a forward runs in another checkpoint, which computes its inputs again, or in a backward, which uses them now."""
    return Outer().checkpoint is not None or torch_compat.graph_task() != -1
