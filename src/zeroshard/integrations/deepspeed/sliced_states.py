"""State dicts of an engine's optimizer in DeepSpeed's form: each tensor is an ordinary one with this rank's slice of a state.

Programs save one per rank (`torch.save(engine.optimizer.state_dict(), f"rank{rank}.pt")`) and load them with the same number of
ranks. `engine.save_checkpoint` works for any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...tensor.sharded_tensor import ShardedTensor
from ...zero.gathered_parameters import home_of

COUNT = "partition_count"  # key in a state dict with the number of ranks


class SlicedStates:
    """Mixin of an engine's sharded optimizer."""

    core: Any
    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch's, with flat slices of states, padded with zeros to the longest slice of any rank."""
        found = super().state_dict()  # type: ignore[misc]
        params = self._by_number(found)
        for number, entries in found["state"].items():
            found["state"][number] = {key: _slice(params[number], value) for key, value in entries.items()}
        return {**found, COUNT: self.core.runtime.comm.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict` from a run with as many ranks, or a state dict of a plain torch optimizer."""
        count, ranks, state = state_dict.get(COUNT), self.core.runtime.comm.world_size, state_dict["state"]
        if count not in (None, ranks):
            raise ConfigError(
                f"load_state_dict: the slices are those of {count} ranks, and there are {ranks}. engine.save_checkpoint and "
                "load_checkpoint are for any number of ranks."
            )
        if count is not None:
            params = self._by_number(state_dict)
            state = {n: {key: _unsliced(params[n], each) for key, each in entries.items()} for n, entries in state.items()}
        super().load_state_dict({**state_dict, "state": state})  # type: ignore[misc]

    def _by_number(self, state_dict: dict[str, Any]) -> dict[int, nn.Parameter]:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        return dict(zip(numbers, (param for group in self.param_groups for param in group["params"]), strict=False))


def show_slices(optimizer: torch.optim.Optimizer) -> None:
    """Add SlicedStates to the class of a sharded optimizer, unless its states are replicated."""
    if not optimizer.core.replicated:  # type: ignore[attr-defined]
        cls = type(optimizer)
        optimizer.__class__ = type(cls.__name__, (SlicedStates, cls), {"__qualname__": cls.__qualname__})


def _longest(home: Any) -> int:
    return max(stop - start for start, stop in map(home.cut, range(home.comm.world_size)))


def _slice(param: Tensor, value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    local = value._local.detach().reshape(-1)
    return nn.functional.pad(local, (0, _longest(home_of(param)) - local.numel())).clone()


def _unsliced(param: Tensor, value: Any) -> Any:
    home: Any = home_of(param)
    if not isinstance(value, Tensor) or not value.dim() or value.numel() != _longest(home):
        return value
    return home.wrap(value[: home.stop - home.start].to(home.comm.device), value.dtype)
