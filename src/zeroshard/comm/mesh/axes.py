"""The axes of a mesh: axes of data parallelism, over which states are sharded, and model axes (tp, ep, pp).

A *place* is what a rank holds of the model: its position along the model axes. In a mesh ("pp", "dp", "tp"):

control    the ranks of this rank's place (along dp)       gather, reduce, agree on what comes next
peers      the ranks of its stage (along dp and tp)        hold parts of the same parameters: norms of tensors
world      all ranks of the mesh                           one optimizer step: norm, verdict, checkpoints, failures
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ConfigError
from ...tensor.distributed import Distribution
from ...utils.torch_compat import unset_fake_temporarily
from .. import backend_select
from ..base import Comm

MODEL_AXES = ("tp", "ep", "pp")  # tensor, expert and pipeline parallelism
Parts = list[list[int]]


@dataclass(frozen=True)
class Axes:
    """The ranks of a mesh grouped by what they hold of the model, as indices among the ranks of `world`.

    places: the data-parallel ranks of each place. stages: all ranks of each pipeline stage. parts: for two axes of data
    parallelism, the groups along the inner one, as indices in a place. copies: names of model axes along which this rank is
    not the first; another rank counts and saves what is not cut along one of them.
    """

    choice: backend_select.Choice | None
    places: Parts | None = None
    stages: Parts | None = None
    parts: Parts | None = None
    copies: frozenset[str] = frozenset()

    def open(self, device: torch.device, stall_timeout_s: float) -> tuple[Comm, Comm, Comm]:
        """Return (control, peers, world) of this rank (collective where there are model axes)."""
        world = backend_select.current(self.choice, device, stall_timeout_s)
        if self.places is None:
            return world, world, world
        control = world.subgroup(self.places, apart=True)
        peers = world if self.stages is None or len(self.stages) < 2 else world.subgroup(self.stages, apart=True)
        return control, peers, world

    def counts(self, distribution: Distribution | None) -> bool:
        """Return True if this rank is the one to count among those that hold the same part along the model axes."""
        return self.copies <= set(distribution.axes if distribution is not None else ())


def model_axes(mesh: Any) -> dict[str, int]:
    """Return the number of ranks along "pp" and "tp" of a mesh; {} for anything that is not a mesh with named axes."""
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        return {}
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return {axis: sizes.get(axis, 1) for axis in ("pp", "tp")}


def axes_of(mesh: Any, comm: backend_select.Choice | None, distributed: dict[str, Any]) -> Axes:
    """Return the Axes that `zs.shard(mesh=)` or `zs.shard(comm=)` asks for. distributed: the model's DTensors by name.

    Raises ConfigError for anything but a mesh, for axes that can not be used, and for DTensors over axes that are not the
    mesh's model axes.
    """
    with unset_fake_temporarily():  # a mesh is a tensor of ranks, whose values are read
        return _axes_of(mesh, comm, distributed)


def _axes_of(mesh: Any, comm: backend_select.Choice | None, distributed: dict[str, Any]) -> Axes:
    if mesh is None and isinstance(comm, DeviceMesh) and distributed:
        mesh, comm = comm._get_root_mesh(), None
    if mesh is None:
        if distributed:
            name = next(iter(distributed))
            raise ConfigError(
                f"{name} is a DTensor, so zs.shard() must be told which ranks hold the same shard of it (data parallelism). Pass the whole "
                "mesh (mesh=mesh, with axes named dp and tp), or its axis of data parallelism (comm=mesh['dp'])."
            )
        return Axes(comm)
    _check(mesh, comm)
    names = mesh.mesh_dim_names or ()
    model = [name for name in names if name in MODEL_AXES]
    _check_distributed(mesh, model, distributed)
    if not model:
        choice, parts = backend_select.of_mesh(mesh, comm)
        return Axes(choice, parts=parts)
    return _split(mesh, model)


def _check(mesh: Any, comm: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh: expected a DeviceMesh of 1 or 2 data-parallel axes, any others named {' or '.join(MODEL_AXES)}; got {type(mesh).__name__}."
        )
    if comm is not None:
        raise ConfigError("mesh and comm both say which ranks take part: give one of them.")
    names = mesh.mesh_dim_names or ()
    data = [name for name in names if name not in MODEL_AXES]
    if len(data) > 2:
        raise ConfigError(
            f"mesh: every axis of {names} not named {' or '.join(MODEL_AXES)} is data-parallel, and there may be two of these (replicas and "
            f"shards); got {len(data)}: {data}. Join some with mesh[...]._flatten(), or rename those that are not data-parallel."
        )
    if mesh.get_coordinate() is None:
        raise ConfigError("mesh: this rank is not in the mesh. Call zs.shard() on the ranks of the mesh only.")


def _check_distributed(mesh: DeviceMesh, model: list[str], distributed: dict[str, Any]) -> None:
    for name, tensor in distributed.items():
        axes = tensor.device_mesh.mesh_dim_names or ()
        if not axes or not set(axes) <= set(model):
            wrong = [axis for axis in axes if axis not in model]
            known = f"the axes {tuple(model)} of the mesh" if model else f"an axis named one of {MODEL_AXES}; the mesh has none"
            raise ConfigError(
                f"{name} is a DTensor over {f'the axes {wrong}' if wrong else 'a mesh without axis names'}: expected {known}. Name the axes of "
                "model parallelism so (mesh_dim_names=); zs.shard() takes no model that fully_shard has sharded over data-parallel ranks."
            )
        places = torch.isin(tensor.device_mesh.mesh, mesh.mesh)
        if not bool(places.all()):
            raise ConfigError(
                f"{name} is a DTensor over ranks {tensor.device_mesh.mesh.tolist()}, which are not all in the mesh. Pass the mesh from which "
                "the DTensor's mesh was sliced."
            )


def _split(mesh: DeviceMesh, model: list[str]) -> Axes:
    """Return the Axes of a mesh that has model axes."""
    names, ranks = list(mesh.mesh_dim_names or ()), mesh.mesh.cpu()
    everyone = sorted(ranks.flatten().tolist())
    choice: backend_select.Choice | None = None
    if everyone != list(range(dist.get_world_size())):
        choice = dist.new_group(everyone, use_local_synchronization=True)
    ranks = torch.searchsorted(torch.tensor(everyone), ranks.flatten()).view(ranks.shape)
    data = [name for name in names if name not in model]
    by_place = ranks.permute(*[names.index(name) for name in (*model, *data)]).flatten(0, len(model) - 1)
    places = by_place.reshape(by_place.shape[0], -1).tolist()
    parts = None
    if len(data) == 2:
        inner = by_place.shape[2]
        parts = [list(range(first, first + inner)) for first in range(0, len(places[0]), inner)]
    stages = None
    if "pp" in model:
        others = [names.index(name) for name in names if name != "pp"]
        stages = ranks.permute(names.index("pp"), *others).reshape(ranks.shape[names.index("pp")], -1).sort(dim=1).values.tolist()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    copies = frozenset(name for name in model if name != "pp" and coordinate[names.index(name)] > 0)
    return Axes(choice, places, stages, parts, copies)
