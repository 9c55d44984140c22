"""Parameters that are DTensors (torch.distributed.tensor): tensor and expert parallelism.

    given     DTensor (4096, 512), Shard(0) over mesh["tp"]      the model has it before zs.shard
    at rest   its local shard (2048, 512), in the flat buffer    ZeRO cuts it further, over the data-parallel ranks
    in use    a DTensor over the gathered local shard            the modules compute with it

So the flat buffer, the optimizer and the tiers contain no DTensors. Autograd leads from the DTensor back to the local tensor,
and converts a gradient of other placements (a partial sum, with sequence parallelism) to the parameter's placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError
from ..tensor.attributes import stays_whole
from ..tensor.home import Home
from ..tensor.part import Distribution, Part, distribution_of
from ..utils import torch_compat
from ..utils.axes import role
from ..utils.module_names import own_name
from ..utils.torch_compat import is_distributed

if TYPE_CHECKING:  # the import takes seconds; a program that has DTensors has done it
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True, eq=False)
class OverMesh(Distribution):
    """Distribution of a parameter of `shape` over the model axes of a mesh, as a DTensor has it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor, name: str) -> OverMesh:
        """Return the distribution of a DTensor. Raise ConfigError for Partial placements: expected Shard or Replicate."""
        for placement in tensor.placements:
            if placement.is_partial():
                raise ConfigError(
                    f"{name} is a DTensor with placement {placement}, whose sum over ranks is still to be taken: expected Shard or "
                    "Replicate. Make the parameter of tensor.redistribute(...)."
                )
        return cls(tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.stride())

    @cached_property
    def axes(self) -> tuple[str, ...]:
        names = self.mesh.mesh_dim_names or ()
        return tuple(name for name, placement in zip(names, self.placements, strict=True) if not placement.is_replicate())

    @cached_property
    def part(self) -> Part | None:
        place = self.mesh.get_coordinate()
        part: Part | None = None
        assert place is not None
        extents = list(self.shape)
        for size, number, placement in zip(self.mesh.shape, place, self.placements, strict=True):
            if placement.is_replicate():  # this axis does not cut the parameter
                continue
            maps = getattr(placement, "split_factor", 1)  # the weight may pack several matrices (q, k, v), each of which is cut
            dim = placement.dim  # type: ignore[attr-defined]  # it shards
            extent = extents[dim] // maps
            step = -(-extent // size)  # equal to torch.chunk's sizes
            start, stop = min(step * number, extent), min(step * (number + 1), extent)
            part = Part(dim, start, stop, tuple(extents), maps, part)  # the part of earlier axes is around it
            extents[dim] = maps * (stop - start)  # further axes cut this shard
        return part

    @cached_property
    def stretch(self) -> int:
        cut = [(size, at) for size, at in zip(self.mesh.shape, self.placements, strict=True) if not at.is_replicate()]
        if len(cut) != 1 or cut[0][1].dim != 0 or getattr(cut[0][1], "split_factor", 1) != 1:  # type: ignore[attr-defined]
            return 0
        return -(-self.shape[0] // cut[0][0]) * math.prod(self.shape[1:])

    @cached_property
    def data(self) -> frozenset[int]:
        """The dimensions of the mesh along which ranks are data-parallel: ZeRO averages gradients along them, not the DTensor."""
        return frozenset(dim for dim, name in enumerate(self.mesh.mesh_dim_names or ()) if role(name).cuts_parameters == "no")

    def wrap(self, local: Tensor) -> DTensor:
        return _Wrapped.apply(local, self) if self.data else self.over(local)

    def over(self, local: Tensor) -> DTensor:
        """Return the DTensor over a local tensor, to whose placements autograd brings a gradient."""
        from torch.distributed.tensor import DTensor

        # run_check would be a collective
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def whole(self, local: Tensor) -> Tensor:
        with torch.no_grad():
            return self.wrap(local.detach().contiguous()).full_tensor()

    def local(self, value: Tensor) -> Tensor:
        if is_distributed(value) and value.device_mesh == self.mesh and self.placements:  # of `Owned` there are none
            return value.redistribute(self.mesh, self.placements).to_local()
        value = value.full_tensor() if is_distributed(value) else value
        return self.part.of(value) if self.part is not None and tuple(value.shape) == self.shape else value


class _Wrapped(torch.autograd.Function):
    """DTensor over a local tensor whose gradient stays a sum of this rank's own batch along the data-parallel dimensions."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, distribution: OverMesh) -> DTensor:
        ctx.distribution = distribution
        return distribution.over(local)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        data, given = ctx.distribution.data, enumerate(zip(grad.placements, ctx.distribution.placements, strict=True))
        wanted = [has if dim in data and not has.is_shard() else wants for dim, (has, wants) in given]
        return grad.redistribute(placements=wanted).to_local(), None


@dataclass(frozen=True, eq=False)
class Owned(OverMesh):
    """Distribution of a parameter that one rank of a mesh of one axis has whole, and the others without elements: (0, ...)."""

    owner: int

    @property
    def absent(self) -> bool:
        return self.mesh.get_local_rank() != self.owner

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names or ())

    @cached_property
    def part(self) -> Part | None:
        return Part(0, self.shape[0] if self.absent else 0, self.shape[0], self.shape)

    @cached_property
    def stretch(self) -> int:
        return 0

    def wrap(self, local: Tensor) -> Tensor:  # type: ignore[override]  # torch has no DTensor that is cut so
        return local

    def whole(self, local: Tensor) -> Tensor:
        value = local.detach().new_empty(self.shape) if self.absent else local.detach().clone()
        torch.distributed.broadcast(value, group=self.mesh.get_group(), group_src=self.owner)
        return value


def in_state_dicts(model: nn.Module) -> list[RemovableHandle]:
    """Let model.state_dict() return DTensors for local shards, and let load_state_dict accept DTensors or whole tensors.

    Return the hooks' handles. Without them torch.save, save_pretrained and torch.distributed.checkpoint would store a local shard
    as if it were the whole parameter. Sharded tensors (ZeRO stage 3) need no hook: they raise when such code reads them; where
    they show the whole (`Home.hidden_cut`), they give and take it themselves.
    """
    known: dict[str, Distribution] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if (found := distribution_of(param)) is not None and getattr(param, "_home", Home).hidden_cut is None:
            known[own_name(model, name)] = found

    def entries(state: dict, prefix: str) -> Iterator[tuple[str, Any, Distribution]]:
        for name, value in state.items():
            if (distribution := known.get(own_name(model, name.removeprefix(prefix)))) is not None:
                yield name, value, distribution

    def show(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        for name, value, distribution in entries(state, prefix):
            if type(value) is Tensor:  # neither the parameter itself (keep_vars) nor a sharded tensor
                state[name] = distribution.wrap(value)

    def take(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
        for name, value, distribution in entries(state, prefix):
            if isinstance(value, Tensor):
                state[name] = distribution.local(value)

    return [model.register_state_dict_post_hook(show), model.register_load_state_dict_pre_hook(take)] if known else []


def find(model: nn.Module) -> dict[str, DTensor]:
    """Return the model's parameters to shard that are DTensors, by name, each once."""
    return {name: param for name, param in model.named_parameters() if is_distributed(param) and not stays_whole(param)}


class Localised:
    """Replacement of a model's DTensor parameters by their local shards; `undo` is the inverse.

    The optimizer gets the new parameters as well. The old objects lose their memory when `keep` is called.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Replace the parameters. Raise ConfigError, with nothing changed, for Partial placements."""
        self.optimizer = optimizer
        known = {id(param): OverMesh.of(param, name) for name, param in find(model).items()}
        self._made: dict[int, tuple[DTensor, nn.Parameter]] = {}
        self._places: list[tuple[dict, str, DTensor]] = []
        for module in model.modules():
            parameters = torch_compat.own_parameters(module)
            for attribute, param in parameters.items():
                if id(param) not in known:
                    continue
                self._places.append((parameters, attribute, param))
                if id(param) in self._made:  # tied
                    continue
                if torch_compat.has_hooks(param):
                    raise ConfigError(
                        "a hook was registered on a parameter that is a DTensor: register it after zs.shard(), as p.register_hook(hook)."
                    )
                local = nn.Parameter(torch_compat.local_part(param).detach(), requires_grad=param.requires_grad)
                local.__dict__.update(param.__dict__, _distribution=known[id(param)])
                self._made[id(param)] = param, local
        for parameters, attribute, param in self._places:
            parameters[attribute] = self._made[id(param)][1]
        self._replace({key: local for key, (_, local) in self._made.items()})

    def undo(self) -> None:
        """Put the DTensors back into the model and its optimizer."""
        for parameters, attribute, param in self._places:
            parameters[attribute] = param
        self._replace({id(local): param for param, local in self._made.values()})

    def _replace(self, others: Mapping[int, Tensor]) -> None:
        if self.optimizer is None or not others:
            return
        for group in self.optimizer.param_groups:
            group["params"] = [others.get(id(param), param) for param in group["params"]]
        states = [(others.get(id(param), param), state) for param, state in self.optimizer.state.items()]
        self.optimizer.state.clear()
        for param, state in states:
            self.optimizer.state[param] = {key: _turned(value, param) for key, value in state.items()}

    def keep(self) -> None:
        """Make the replacement final: release the memory of the old objects."""
        for param, _ in self._made.values():
            torch_compat.set_local_part(param, torch_compat.local_part(param).new_empty(0))


def _turned(state: object, param: Tensor) -> object:
    """Return an optimizer state as the parameter is: local for a local parameter, a DTensor for a DTensor."""
    distribution = distribution_of(param)
    if is_distributed(state) and distribution is not None:  # made by the optimizer for a DTensor parameter
        return torch_compat.local_part(state)
    if (
        is_distributed(param)
        and isinstance(state, Tensor)
        and state.shape == torch_compat.local_part(param).shape
        and state.dim()  # a scalar (`step`) stays an ordinary tensor
    ):
        return OverMesh.of(param, "").wrap(state)
    return state
