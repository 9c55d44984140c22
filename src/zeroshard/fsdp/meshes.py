"""Meshes of which a program says which axes are data-parallel (DataParallelMeshDims, since torch 2.13)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..utils.axes import MODEL_AXES

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


def data_parallel(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims, params: Iterable[nn.Parameter]
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh of all axes, named as zs.shard knows them, and its slice of the data-parallel ones (collective, once for a mesh).

    Raise ConfigError for names that the mesh has not, for other axes that zs.shard does not know, and for parameters that are cut
    along a data-parallel axis.
    """
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if mesh is None or names is None:
        raise ConfigError("fully_shard: mesh must have mesh_dim_names when dp_mesh_dims is provided.")
    shards, replicas = dims.shard_names, dims.replicate_names
    for name in (*replicas, *shards):
        if name not in names:
            raise ConfigError(f"fully_shard: dp_mesh_dims: Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}.")
    if not shards:
        raise ConfigError(
            f"fully_shard: dp_mesh_dims: replicate={replicas} without shard= shards nothing: name an axis to shard over, or use "
            "DistributedDataParallel; zeroshard.fsdp.configure(stage=0) keeps states whole on every rank."
        )
    if unknown := [name for name in names if name not in (*replicas, *shards, *MODEL_AXES)]:
        raise ConfigError(
            f"fully_shard: dp_mesh_dims: the other axes of the mesh cut parameters, and are named of {MODEL_AXES}; got {unknown}."
        )
    for param in params:
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            for name, placement in zip(names, param.placements, strict=True):
                if name in (*replicas, *shards) and not placement.is_replicate():
                    kind = "shard" if name in shards else "replicate"
                    raise ConfigError(
                        f"fully_shard: dp_mesh_dims: Expected Replicate() on DP {kind} dim '{name}' but got {placement}, for a parameter of shape "
                        f"{tuple(param.shape)}."
                    )
    return _named(mesh, shards, replicas)


@functools.lru_cache(maxsize=64)
def _named(mesh: DeviceMesh, shards: tuple[str, ...], replicas: tuple[str, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    names = mesh.mesh_dim_names
    assert names is not None
    others = [name for name in names if name not in (*shards, *replicas)]
    ranks = mesh.mesh.permute([names.index(name) for name in (*replicas, *shards, *others)])
    sizes = {"dp_replicate": replicas, "dp_shard": shards, **{name: (name,) for name in others}}
    sizes = {name: held for name, held in sizes.items() if held}
    shape = [math.prod(mesh.size(names.index(name)) for name in held) for held in sizes.values()]
    whole = DeviceMesh(mesh.device_type, ranks.reshape(shape), mesh_dim_names=tuple(sizes))
    data = tuple(name for name in sizes if name in ("dp_replicate", "dp_shard"))
    return whole, whole if len(data) == len(sizes) else whole[data if len(data) > 1 else data[0]]
