"""The layout file from which zs.shard takes its options, and its comparison with the ranks of this run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import read_layout
from ...errors import ConfigError
from ...utils.axes import DP, MODEL_AXES, cuts_model
from ...utils.planned_mesh import other_model_axes, planned_otherwise
from ..base import Comm
from .axes import model_axes


@dataclass(frozen=True)
class PlannedLayout:
    """The layout that gives the options. axes: ranks along each model axis of this run; all: zs.shard uses all ranks."""

    path: str | os.PathLike
    plan: Mapping[str, Any]
    axes: Mapping[str, int]
    all: bool

    @classmethod
    def read(cls, path: str | os.PathLike, mesh: Any, comm: Any) -> PlannedLayout:
        """Read a layout's file. Raise ConfigError if it cuts the model differently from this run."""
        plan = read_layout(path)
        if mesh is None and comm is None and cuts_model(plan["mesh"]):
            raise ConfigError(
                f"config: {path} was planned for the mesh {plan['mesh']}, which cuts the model: pass it to zs.parallelize, or pass that "
                "mesh to zs.shard as well (mesh=)."
            )
        axes = model_axes(mesh) if comm is None else {axis: size for axis, size in plan["mesh"].items() if axis in MODEL_AXES}
        if other_model_axes(plan, axes):
            raise ConfigError(planned_otherwise(path, plan, {DP: plan["mesh"][DP], **axes}))
        return cls(path, plan, axes, comm is None)

    def compare(self, group: Comm, world: Comm) -> None:
        """Print a note on rank 0 if the layout was made for another number or mesh of ranks."""
        node_size = world.nodes.count(world.nodes[0]) if self.all else None
        text = planned_otherwise(self.path, self.plan, {DP: group.world_size, **self.axes}, node_size)
        if text and world.rank == 0:
            print(f"zeroshard: {text}", file=sys.stderr)
