"""deepspeed.runtime.pipe.topology: ranks numbered along the axes pipe and data, and this rank's place among them."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...utils.axes import DP, PP, TP
from . import communication
from .accelerator import always, getter
from .sections import DeepSpeedConfigError

_AXES = {"pipe": PP, "data": DP, "model": TP}  # DeepSpeed's name of an axis -> that of a mesh


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks along axes of these sizes, outermost first (collective)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class ProcessTopology:
    """Ranks at the points of a grid with named axes, outermost first: of axes ["x", "y"], (x, y) and (x, y + 1) are neighbours."""

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # its fields are known at run time
        self.ProcessCoord = coord
        self.mapping: dict[Any, int] = {coord(*at): rank for rank, at in enumerate(product(*map(range, self.dims)))}

    get_axis_names = getter("axes")

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate. Raises TypeError if one of an axis is missing."""
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 for an axis that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return a rank's coordinate, with an attribute for each axis. Raises ValueError for a rank outside."""
        if not 0 <= rank < len(self.mapping):
            raise ValueError(f"rank {rank} not found in topology.")
        return list(self.mapping)[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of each line along an axis; [] for an axis that there is not."""
        lines: dict[Any, list[int]] = {}
        for at, rank in self.mapping.items() if axis in self.axes else ():
            lines.setdefault(at._replace(**{axis: 0}), []).append(rank)
        return list(lines.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates have these values."""
        return [rank for at, rank in self.mapping.items() if filter_kwargs.items() <= at._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines of `num_pp` stages, `num_dp` of them; the ranks of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data parallelism, and `num_mp` ranks that share a layer."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place in a topology of all ranks, with the interface of an mpu. mesh: the DeviceMesh of the same axes."""

    def __init__(self, topology: ProcessTopology) -> None:
        self._topo = topology
        axes = dict(zip(self._topo.axes, self._topo.dims, strict=True))
        if set(axes) - set(_AXES) or axes.get("model", 1) > 1 or not {"pipe", "data"} <= set(axes):
            raise DeepSpeedConfigError(
                f"topology: expected the axes pipe and data, got {axes}: ranks that share a layer (model) are not served beside a "
                'PipelineModule. Use num_stages=, or zs.parallelize with a mesh ("pp", "dp", "tp").'
            )
        self.world_size, self.global_rank = communication.get_world_size(), communication.get_rank()
        if math.prod(axes.values()) != self.world_size:
            raise RuntimeError(f"topology: {axes} has {math.prod(axes.values())} ranks, and there are {self.world_size}")
        self.mesh = mesh_of({_AXES[axis]: size for axis, size in axes.items()})
        communication.barrier()  # a rank that refuses its layers, and ends, may have the store by which others make their groups
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = axes["pipe"], axes["data"], 1
        here = self._topo.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = here.pipe, here.data

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage in this rank's pipeline, or at the coordinates given."""
        return self._topo.get_rank(**self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)._asdict())

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh[PP].get_group()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh[DP].get_group()

    get_global_rank = getter("global_rank")
    get_stage_id = get_pipe_parallel_rank = getter("stage_id")
    get_pipe_parallel_world_size, get_data_parallel_world_size = getter("pipe_parallel_size"), getter("data_parallel_size")
    get_data_parallel_id = get_data_parallel_rank = getter("data_parallel_id")
    get_slice_parallel_rank = get_tensor_model_parallel_rank = always(0)
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = always(1)
