"""The ways in which each library saves and loads checkpoints, as its own documentation tells a user to.

    zeroshard   zs.save, zs.load
    FSDP2       torch.distributed.checkpoint with get_state_dict and set_state_dict
    DeepSpeed   engine.save_checkpoint, engine.load_checkpoint

DeepSpeed does not sync its files to the disk, so whoever times it must; checkpoints.py does so for all contenders alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint.stages import Stages
from zeroshard.checkpoint.state_map import collect
from zeroshard.zero.runtime import runtime_of

Background = tuple[Callable[[], float], Callable[[], object]]


@dataclass(frozen=True)
class Keeper:
    """The functions by which a contender saves and loads. save, load: path -> None. in_background: starts a save to a path and
    returns two functions: one returns the seconds that training has been held up so far, the other waits until the save ends."""

    save: Callable[[str], object]
    load: Callable[[str], object]
    in_background: Callable[[str], Background] | None = None
    states: Callable[[], list[Tensor]] | None = None  # returns this rank's saved states, as they lie in memory between steps


def zeroshard_keeper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Keeper:
    """Return the Keeper of a model that `zs.shard` has sharded."""

    def in_background(path: str) -> Background:
        saving = zs.save(path, model, optimizer, asynchronous=True, overwrite=True)
        return lambda: saving.stall_seconds, saving.wait

    def states() -> list[Tensor]:
        runtime, core = runtime_of(model), optimizer.core  # type: ignore[attr-defined]
        contents = collect(runtime, core, frozen=True, names=Stages(runtime, core, [None] * runtime.topology.world.world_size))
        ends = [begin + place.stop - place.start for begin, place in zip(contents.begins, contents.places, strict=True)]
        return [s.host(b, e) for s, b, e in zip(contents.sources, contents.begins, ends, strict=True)]

    return Keeper(
        save=lambda path: zs.save(path, model, optimizer, overwrite=True),
        load=lambda path: zs.load(path, model, optimizer),
        in_background=in_background,
        states=states,
    )


def fsdp2_keeper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Keeper:
    """Return the Keeper of a model that `fully_shard` has sharded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    beside = torch.distributed.new_group(backend="gloo")  # async_save's thread must not mix with training's collectives

    def state() -> dict[str, Any]:
        values, states = get_state_dict(model, optimizer)
        return {"model": values, "optim": states}

    def load(path: str) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def in_background(path: str) -> Background:
        begin = time.monotonic()
        future: Any = dcp.async_save(state(), checkpoint_id=path, process_group=beside)
        stall_s = time.monotonic() - begin
        return lambda: stall_s, getattr(future, "upload_completion", future).result

    return Keeper(lambda path: dcp.save(state(), checkpoint_id=path), load, in_background)


def deepspeed_keeper(engine: Any) -> Keeper:
    """Return the Keeper of a DeepSpeed engine."""

    def load(path: str) -> None:
        found, _ = engine.load_checkpoint(path, tag="bench")
        assert found is not None, f"DeepSpeed found no checkpoint in {path}"

    return Keeper(lambda path: engine.save_checkpoint(path, tag="bench"), load)
