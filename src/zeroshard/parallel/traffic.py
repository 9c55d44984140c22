"""What each axis of a mesh sends in a step, counted: tensor parallelism's collectives, activations between stages, ZeRO's own.

The second step is counted (the first one may make buffers): every collective of torch in it is looked at while it is dispatched.
Bytes are those that this rank hands to a collective's ring, as in docs/learn/network.md: an all-gather or reduce-scatter of n bytes
over N ranks sends n (N - 1) / N, an all-reduce twice that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..utils.torch_compat import TorchDispatchMode
from ..zero.runtime import runtime_of
from .pipeline import Pipeline

_COUNTED_STEP = 1
_PASSES = {
    "all_reduce": 2.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_to_all_single": 1.0,
    "broadcast": 1.0,
}


def ring_nbytes(func: Any, given: Tensor, result: Tensor, size: int) -> float | None:
    """Bytes that one of `size` ranks hands to the ring of a functional collective; None for what is not counted."""
    passes = _PASSES.get(func._schema.name.partition("::")[2])
    return None if passes is None else passes * max(given.nbytes, result.nbytes) * (size - 1) / size


class _Count(TorchDispatchMode):
    """Bytes of functional collectives, by the name of their group."""

    def __init__(self, axes: Mapping[Any, tuple[str, int]], found: dict[str, float]) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()
        self.axes, self.found, self.distributed = axes, found, DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, self.distributed) for kind in types):
            return NotImplemented  # first what a DTensor makes of it: else its collectives would not be seen
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            axis, size = self.axes.get(args[-1] if isinstance(args[-1], str) else "", ("", 1))
            if axis and isinstance(args[0], Tensor) and isinstance(result, Tensor):
                self.found[axis] = self.found.get(axis, 0.0) + (ring_nbytes(func, args[0], result, size) or 0.0)
        return result


class Traffic:
    """Bytes that this rank sends in a step, by axis. Messages that only say what comes next, and losses, are not among them."""

    def __init__(self, mesh: DeviceMesh, models: Sequence[nn.Module], pipeline: Pipeline | None = None) -> None:
        self.runtimes, self.pipeline = [runtime_of(model) for model in models], pipeline
        names = [name for name in mesh.mesh_dim_names or () if name in ("tp", "ep") and mesh[name].size() > 1]
        self._axes = {mesh[name].get_group().group_name: (name, mesh[name].size()) for name in names}
        self._found: dict[str, float] = {}
        self._steps = 0
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward of a step. What the optimizer sends counts until the next one begins."""
        counting = self._steps == _COUNTED_STEP
        if self._steps == _COUNTED_STEP + 1:
            self._after = self._totals()
        self._steps += 1
        if not counting:
            yield
            return
        self._before = self._totals()
        found: dict[str, float] = dict.fromkeys((axis for axis, _ in self._axes.values()), 0.0)
        with _Count(self._axes, found) if self._axes else contextlib.nullcontext():
            yield
        self._found = found

    @property
    def counted(self) -> dict[str, float]:
        """Bytes by axis, of "tp", "ep", "pp" and "dp"; before the second step nothing."""
        if not self._before:
            return {}
        after = self._after or self._totals()
        return self._found | {axis: after[axis] - before for axis, before in self._before.items()}

    def _totals(self) -> dict[str, float]:
        zero = sum(entry.nbytes for runtime in self.runtimes for entry in runtime.ledger.traffic.values())
        return ({} if self.pipeline is None else {"pp": float(self.pipeline.sent_nbytes)}) | {"dp": float(zero)}

    def text(self) -> str:
        """A line for each axis; before the second step, that nothing has been counted."""
        if not self.counted:
            return "what the axes send is counted in the second step"
        return "\n".join(
            f"{axis}: {nbytes / 2**20:,.2f} MiB sent by this rank in a step" for axis, nbytes in self.counted.items()
        )
