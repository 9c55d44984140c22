"""Bytes sent per mesh axis in a step: tensor parallelism's collectives, tokens to experts, activations between stages, ZeRO's own.

Only the second step is counted (the first may allocate buffers). A dispatch mode sees every functional collective of torch, and
adds the bytes that this rank would send in a ring (docs/learn/network.md): n (N - 1) / N for an all-gather or reduce-scatter of n
bytes over N ranks, and twice that for an all-reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..seam import engine_of
from ..utils.axes import role
from ..utils.torch_compat import TorchDispatchMode
from .pipeline import Pipeline

_COUNTED_STEP = 1
_PASSES = {  # collective -> how often its data goes once around the ring
    "all_reduce": 2.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "all_to_all_single": 1.0,
    "broadcast": 1.0,
}


def ring_nbytes(func: Any, given: Tensor, result: Tensor, size: int) -> float | None:
    """Return the bytes that one of `size` ranks sends in the ring of a functional collective; None for other functions."""
    passes = _PASSES.get(func._schema.name.partition("::")[2])
    return None if passes is None else passes * max(given.nbytes, result.nbytes) * (size - 1) / size


class _Count(TorchDispatchMode):
    """Dispatch mode that adds the bytes of functional collectives to `found`, by axis. axes: group name -> (axis, size)."""

    def __init__(self, axes: Mapping[str, tuple[str, int]], found: dict[str, float]) -> None:
        super().__init__()
        self.axes, self.found = axes, found

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor run first: its collectives then come here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            axis, size = self.axes.get(args[-1] if isinstance(args[-1], str) else "", ("", 1))
            if axis and isinstance(args[0], Tensor) and isinstance(result, Tensor):
                self.found[axis] = self.found.get(axis, 0.0) + (ring_nbytes(func, args[0], result, size) or 0.0)
        return result


class Traffic:
    """Counter of the bytes that this rank sends in a step, by axis, without control messages and losses."""

    def __init__(self, mesh: DeviceMesh, models: Sequence[nn.Module], pipeline: Pipeline | None = None) -> None:
        self.engines, self.pipeline = [engine_of(model) for model in models], pipeline
        names = [name for name in mesh.mesh_dim_names or () if role(name).cuts_parameters == "boxes" and mesh[name].size() > 1]
        self._axes: dict[str, tuple[str, int]] = {mesh[name].get_group().group_name: (name, mesh[name].size()) for name in names}
        self._found: dict[str, float] = {}
        self._steps = 0
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context around forward and backward of a step. The optimizer's traffic counts too, until the next step begins."""
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
        """Bytes by axis ("tp", "ep", "sp", "pp", "dp"); empty before the second step."""
        if not self._before:
            return {}
        after = self._after or self._totals()
        return self._found | {axis: total - self._before.get(axis, 0.0) for axis, total in after.items()}

    def _totals(self) -> dict[str, float]:
        sent = {} if self.pipeline is None else {"pp": float(self.pipeline.sent_nbytes)}
        for engine in self.engines:
            for axis, nbytes in engine.ledger.sent_by_axis().items():
                sent[axis] = sent.get(axis, 0.0) + nbytes
        return sent
