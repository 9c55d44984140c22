"""What each axis of a mesh sends in a step, counted: tensor parallelism's collectives, activations between stages, ZeRO's own.

The second step is counted (the first one may make buffers), and each after which it is asked for: to count, every collective of
torch is looked at while it is dispatched. Bytes are those that this rank hands to a collective's ring, as in docs/communication.md: an
all-gather or reduce-scatter of n bytes over N ranks sends n (N - 1) / N, an all-reduce twice that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from ..zero.runtime import runtime_of

_COUNTED_STEP = 1
_PASSES = {"all_reduce": 2.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 1.0, "all_to_all_single": 1.0, "broadcast": 1.0}


class _Count(TorchDispatchMode):
    """Bytes of functional collectives, by the name of their group."""

    def __init__(self, axes: dict[str, tuple[str, int]], found: dict[str, float]) -> None:
        super().__init__()
        self.axes, self.found = axes, found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            passes = _PASSES.get(func._schema.name.partition("::")[2])
            axis, size = self.axes.get(args[-1] if isinstance(args[-1], str) else "", ("", 1))
            if passes is not None and axis and isinstance(args[0], Tensor):
                whole = max(args[0].nbytes, result.nbytes if isinstance(result, Tensor) else 0)
                self.found[axis] = self.found.get(axis, 0.0) + passes * whole * (size - 1) / size
        return result


class Traffic:
    """Bytes that this rank sends in a step, by axis."""

    def __init__(self, mesh: DeviceMesh, models: Sequence[nn.Module]) -> None:
        self.runtimes = [runtime_of(model) for model in models]
        names = [name for name in mesh.mesh_dim_names or () if name in ("tp", "ep") and mesh[name].size() > 1]
        self._axes = {mesh[name].get_group().group_name: (name, mesh[name].size()) for name in names}
        self.counted: dict[str, float] = {}
        self._steps, self._sent_before = 0, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward of a step."""
        counting = self._steps == _COUNTED_STEP
        self._steps += 1
        if not counting:
            yield
            return
        self._sent_before = self._zero_sent()
        found: dict[str, float] = dict.fromkeys((axis for axis, _ in self._axes.values()), 0.0)
        with _Count(self._axes, found) if self._axes else contextlib.nullcontext():
            yield
        found["dp"] = float(self._zero_sent() - self._sent_before)
        self.counted = found

    def _zero_sent(self) -> int:
        return sum(entry.nbytes for runtime in self.runtimes for entry in runtime.ledger.traffic.values())

    def text(self) -> str:
        """A line for each axis; before the second step, that nothing has been counted."""
        if not self.counted:
            return "what the axes send is counted in the second step"
        return "\n".join(f"{axis}: {nbytes / 2**20:,.2f} MiB sent by this rank in a forward and backward" for axis, nbytes in self.counted.items())
