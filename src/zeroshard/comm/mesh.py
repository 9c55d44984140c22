"""The axes of a mesh, by the rows of utils/axes.py: data-parallel axes, and model axes, which cut parameters.

A *place* is a position along the model axes: all ranks of a place have the same part of the model. In a mesh ("pp", "dp", "tp"):

control    the ranks of this rank's place (along dp)       gather, reduce, agree on the next operation
divided    of these, the ranks with the same experts       gather and reduce experts (in a mesh with ep: along dp, without ep)
peers      the ranks of its stage (along dp and tp)        hold parts of the same parameters: norms of tensors
world      all ranks of the mesh                           one optimizer step: norm, verdict, checkpoints, failures
"""

from __future__ import annotations

import math
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config import read_layout
from ..engine import Parts
from ..engine.comm import Comm, DirectComm
from ..errors import ConfigError
from ..tensor.part import Distribution
from ..utils.axes import AXES, DP, EP, MODEL_AXES, SP, cuts_model, other_model_axes, planned_otherwise, role
from ..utils.torch_compat import group_of_members, unset_fake_temporarily
from . import backend_select


@dataclass(frozen=True)
class Divided:
    """The data-parallel ranks grouped by the experts that they hold, as indices in a place (see `Axes`).

    axes: the axes that cut experts. groups: the ranks with the same experts. parts: as `Axes.parts`, in a group. summed: number of
    ranks over which a group's gradients are summed, not averaged; below 1 where they are sums over the tokens of all groups.
    """

    axes: frozenset[str]
    groups: Parts
    parts: Parts | None
    summed: float


@dataclass(frozen=True)
class Axes:
    """The ranks of a mesh grouped by the part of the model that they have, as indices among the ranks of `world`.

    places: the data-parallel ranks of each place. stages: all ranks of each pipeline stage. parts: where an axis of data
    parallelism replicates states, the groups over which states are sharded, as indices in a place. copies: names of model axes
    along which this rank is not the first: it has copies of parameters that are not cut along one of them, and another rank
    counts and saves these. summed: number of data-parallel ranks over which gradients are summed, not averaged.
    divided: the ranks that hold the same parameters where an axis of data parallelism cuts parameters (experts); None: no axis
    does. lines: by name of an axis, the ranks along each line of it, in order.
    """

    choice: backend_select.Choice | None
    places: Parts | None = None
    stages: Parts | None = None
    parts: Parts | None = None
    copies: frozenset[str] = frozenset()
    summed: float = 1
    divided: Divided | None = None
    lines: Mapping[str, Parts] = field(default_factory=dict)

    def open(self, device: torch.device, stall_timeout_s: float) -> tuple[DirectComm, DirectComm, DirectComm]:
        """Return (control, peers, world) of this rank (collective where there are model axes)."""
        world = backend_select.current(self.choice, device, stall_timeout_s)
        if self.places is None:
            return world, world, world
        control = world.subgroup(self.places, apart=True)
        peers = world if self.stages is None or len(self.stages) < 2 else world.subgroup(self.stages, apart=True)
        return control, peers, world

    @property
    def layout(self) -> str:
        """Return a text that is the same on ranks with the same mesh: the sizes of its axes, and a checksum of their ranks."""
        sizes = {name: self.size(name) for name in self.lines}
        return f"{sizes} (ranks {zlib.crc32(repr((self.lines, self.parts)).encode()):08x})"

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis; 1 for one that the mesh has not."""
        return len(self.lines[name][0]) if name in self.lines else 1

    def divides(self, distribution: Distribution | None) -> bool:
        """Return whether data-parallel ranks hold different parts of a parameter: see `Topology.divided`."""
        return self.divided is not None and distribution is not None and bool(self.divided.axes & set(distribution.axes))

    def counts(self, distribution: Distribution | None) -> bool:
        """Return True on exactly one of the ranks that have the same part of a parameter along the model axes."""
        return self.copies <= set(distribution.axes if distribution is not None else ())


def axes_of(mesh: object, comm: backend_select.Choice | None, distributed: dict[str, Any]) -> Axes:
    """Return the Axes that `zs.shard(mesh=)` or `zs.shard(comm=)` asks for. distributed: the model's DTensors by name.

    A mesh that is a mapping, {"dp": 2, "sp": 2}, names axes of the ranks of `comm`, outermost first.

    Raises ConfigError for anything but a mesh, for axes that can not be used, and for DTensors over axes that are not the
    mesh's model axes.
    """
    with unset_fake_temporarily():  # a mesh is a tensor of ranks, whose values are read
        if mesh is None and isinstance(comm, DeviceMesh) and distributed:
            mesh, comm = comm._get_root_mesh(), None
        if mesh is None:
            if distributed:
                name = next(iter(distributed))
                raise ConfigError(
                    f"{name} is a DTensor, so zs.shard() must be told which ranks hold the same shard of it (data parallelism). Pass the "
                    "whole mesh (mesh=mesh, with axes named dp and tp), or its axis of data parallelism (comm=mesh['dp'])."
                )
            return Axes(comm)
        if isinstance(mesh, Mapping):
            return _split(NamedRanks.of(mesh, comm), comm)
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh: expected a DeviceMesh of 1 or 2 data-parallel axes, any others named {' or '.join(MODEL_AXES)}; got "
                f"{type(mesh).__name__}."
            )
        if comm is not None:
            raise ConfigError("mesh and comm both say which ranks take part: give one of them.")
        if mesh.get_coordinate() is None:
            raise ConfigError("mesh: this rank is not in the mesh. Call zs.shard() on the ranks of the mesh only.")
        _check_distributed(mesh, distributed)
        return _split(mesh)


def _check_distributed(mesh: DeviceMesh, distributed: dict[str, Any]) -> None:
    model = [name for name in mesh.mesh_dim_names or () if role(name).cuts_parameters != "no"]
    for name, tensor in distributed.items():
        axes = tensor.device_mesh.mesh_dim_names or ()
        whole = {
            axis
            for axis, cut in zip(axes, tensor.placements, strict=False)
            if cut.is_replicate() and role(axis).cuts_parameters == "no"
        }
        if not axes or not set(axes) - whole <= set(model):
            wrong = [axis for axis in axes if axis not in model and axis not in whole]
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


@dataclass(frozen=True)
class NamedRanks:
    """Ranks along named axes, outermost first: what a DeviceMesh is, without process groups, for axes that cut no parameters."""

    mesh: torch.Tensor  # rank at each place
    mesh_dim_names: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], comm: object = None) -> NamedRanks:
        """Return the ranks of `comm` (by default all) along axes of these sizes. Raise ConfigError if they do not fit."""
        rank, world_size = (comm.rank, comm.world_size) if isinstance(comm, DirectComm) else backend_select.rank_and_size()
        known = [name for name, row in AXES.items() if row.cuts_parameters == "no"]
        for name, size in sizes.items():
            if name not in known:
                raise ConfigError(
                    f"mesh: expected axes named of {tuple(known)} in a mapping, got {name!r}. Axes that cut parameters need process groups: "
                    "torch.distributed.device_mesh.init_device_mesh."
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"mesh: expected a number of ranks for {name!r}, got {size!r}.")
        if math.prod(sizes.values()) != world_size:
            raise ConfigError(f"mesh: expected sizes whose product is the number of ranks, {world_size}, got {dict(sizes)}.")
        return cls(torch.arange(world_size, device="cpu").view(*sizes.values()), tuple(sizes), rank)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    def get_coordinate(self) -> list[int]:
        """Return this rank's index along each axis."""
        return (self.mesh == self.rank).nonzero()[0].tolist()


def place_along(mesh: DeviceMesh | NamedRanks, named: Callable[[str], bool]) -> tuple[int, int]:
    """Return this rank's index, and the number of ranks, along the axes of a mesh whose name fulfils `named`, outermost first."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("mesh: this rank is not in the mesh.")
    index, count = 0, 1
    for name, place, size in zip(mesh.mesh_dim_names or (), coordinate, mesh.shape, strict=False):
        if named(name):
            index, count = index * size + place, count * size
    return index, count


def _split(mesh: DeviceMesh | NamedRanks, given: backend_select.Choice | None = None) -> Axes:
    """Return the Axes of a mesh. The row of each axis (utils/axes.py) says whether it cuts parameters and shards states.

    given: the Comm of the ranks that NamedRanks are about; None: all ranks.
    """
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    rows = [role(name) for name in names]
    data = [dim for dim, row in enumerate(rows) if row.is_data]
    model = [dim for dim in range(mesh.ndim) if dim not in data]
    cuts = [dim for dim in data if rows[dim].cuts_parameters != "no"]  # experts
    shards = [dim for dim in data if rows[dim].shards_states] or data
    if any(names[dim] not in AXES for dim in data):
        shards = data[-1:]  # by their order: the outer one replicates
        if len(data) > 2:
            raise ConfigError(
                f"mesh: expected a DeviceMesh of 1 or 2 axes, got one of shape {tuple(mesh.shape)}, axes {names}. Axes not named "
                f"of {tuple(AXES)} are of data parallelism, of which there may then be two (replicas and shards), got "
                f"{len(data)}. Join them with mesh[...]._flatten(), or name them for what they are."
            )

    def size(dims: list[int]) -> int:
        return math.prod(mesh.shape[dim] for dim in dims)

    summed = size([dim for dim in data if rows[dim].gradient == "sum"])
    if len(data) == mesh.ndim == 1 and not cuts and isinstance(mesh, DeviceMesh):  # `backend_select` makes the Comm of a 1-D mesh
        return Axes(mesh, summed=summed, lines={names[0]: [list(range(mesh.size()))]})
    everyone = sorted(mesh.mesh.flatten().tolist())
    choice: Any = given
    if isinstance(mesh, DeviceMesh) and everyone != list(range(dist.get_world_size())):
        choice = group_of_members(everyone)
    ranks = torch.searchsorted(torch.tensor(everyone), mesh.mesh.cpu().flatten()).view(mesh.shape)
    replicas = [dim for dim in data if dim not in shards]
    by_place = ranks.permute(*model, *replicas, *shards).reshape(-1, size(data))
    parts, stages = None, None
    if replicas:  # without model axes the place is the world, whose ranks are in order
        parts = (torch.arange(size(data)) if model else by_place).reshape(-1, size(shards)).tolist()
    if whole := [dim for dim in model if rows[dim].cuts_parameters == "whole"]:
        others = [dim for dim in range(mesh.ndim) if dim not in whole]
        stages = torch.sort(ranks.permute(*whole, *others).reshape(size(whole), -1), dim=1)[0].tolist()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    copies = frozenset(names[dim] for dim in model if dim not in whole and coordinate[dim] > 0)
    divided = None
    if cuts:
        order = [*replicas, *shards]  # of a place's ranks
        place = (torch.arange(size(data)) if model else by_place).view([mesh.shape[dim] for dim in order])
        others = [dim for dim in order if dim not in cuts]
        groups = place.permute([order.index(dim) for dim in (*cuts, *others)]).reshape(size(cuts), -1)
        shares = size([dim for dim in shards if dim not in cuts])
        inside = torch.arange(size(others)).view(-1, shares).tolist() if replicas else None
        mean = size([dim for dim in cuts if rows[dim].gradient == "mean"])
        divided = Divided(frozenset(names[dim] for dim in cuts), groups.tolist(), inside, summed / mean)
    lines = {name: ranks.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist() for dim, name in enumerate(names)}
    return Axes(choice, by_place.tolist() if model else None, stages, parts, copies, summed, divided, lines)


@dataclass(frozen=True)
class PlannedLayout:
    """The layout that gives the options. axes: ranks along each model axis of this run, and along sp; all: zs.shard uses all ranks."""

    path: str | os.PathLike
    plan: Mapping[str, Any]
    axes: Mapping[str, int]
    all: bool

    @classmethod
    def read(cls, path: str | os.PathLike, mesh: object, comm: object) -> PlannedLayout:
        """Read a layout's file. Raise ConfigError if it cuts the model differently from this run."""
        plan = read_layout(path)
        if mesh is None and comm is None and cuts_model(plan["mesh"]):
            raise ConfigError(
                f"config: {path} was planned for the mesh {plan['mesh']}, which cuts the model: pass it to zs.parallelize, or pass that "
                "mesh to zs.shard as well (mesh=)."
            )
        sizes: Mapping[str, int] = plan["mesh"]
        if comm is None:  # anything but a mesh with named axes has no model axes
            named: Mapping[str, int] = mesh if isinstance(mesh, Mapping) else {}
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) if isinstance(mesh, DeviceMesh) else named
        axes = {axis: sizes.get(axis, 1) for axis in (*MODEL_AXES, SP)}
        if other_model_axes(plan, axes):
            raise ConfigError(planned_otherwise(path, plan, {DP: plan["mesh"][DP], **axes}))
        return cls(path, plan, axes, comm is None)

    def compare(self, data: Comm, world: Comm) -> None:
        """Print a note on rank 0 if the layout was made for another number or mesh of ranks."""
        node_size = world.nodes.count(world.nodes[0]) if self.all else None
        text = planned_otherwise(
            self.path, self.plan, {**self.axes, DP: data.world_size // self.axes[EP] // self.axes[SP]}, node_size
        )
        if text and world.rank == 0:
            print(f"zeroshard: {text}", file=sys.stderr)


def attachments(axes: Axes) -> list[Any]:
    """Return the modules of activations/ that the rows of a mesh's axes attach to a model, in the order in which to attach them.

    Each has `attach(engine, axes)`, and may have `check(model)`, which raises ConfigError before anything is changed.
    """
    # an axis that divides experts attaches even if it has one rank
    cuts = frozenset() if axes.divided is None else axes.divided.axes
    # attention along sp is attached before the router's loss, which ep attaches as well
    rows = [row for row in reversed(AXES.values()) if axes.size(row.name) > 1 or row.name in cuts]
    names = dict.fromkeys(name for row in rows for name in row.attaches)
    return [import_module(f"..activations.{name}", __package__) for name in names]  # above this module: they use the seam
