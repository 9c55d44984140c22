"""The entries of a unit's parameters in its modules' `_parameters`.

at rest            the sharded parameters (of a replicated unit: the parameters)
while it is used   the compute parameters, views of the flat buffer            swap_in  ... swap_out
                   where parameters were DTensors, DTensors over those         expose   ... hide
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import changed_late
from ..tensor.sharded_tensor import ShardedParameter
from ..utils import torch_compat
from ..utils.torch_compat import tree_map_only

if TYPE_CHECKING:
    from ..tensor.part import Distribution
    from .unit import ParamGroup


class ModuleEntries:
    """All entries of modules' `_parameters` that hold parameters of one unit. swapped: they hold its compute parameters."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.groups, self.swapped = groups, False
        self._gathered = [group for group in groups if group.values.sharded]
        self._seen_versions: list[int] = []  # version counters of the compute parameters at `swap_in`
        self._places: list[tuple[dict, str, list[nn.Parameter], list[nn.Parameter], int]] = []
        self._distributed: list[tuple[dict, str, Distribution]] = []
        for group in groups:
            for index, spec in enumerate(group.specs):
                for owner, attribute in spec.owners:
                    parameters = torch_compat.own_parameters(owner)
                    self._places.append((parameters, attribute, group.params, group.compute, index))
                    if spec.distribution is not None:
                        self._distributed.append((parameters, attribute, spec.distribution))
        self.distributed = bool(self._distributed)  # modules see some of the unit's parameters as DTensors
        # DTensors shown in modules: (own parameters, attribute, local, DTensor)
        self._shown: list[tuple[dict, str, Tensor, Tensor]] = []

    def swap_in(self) -> None:
        """Put the compute parameters into the modules. Raise ModelChanged if the user has replaced a parameter."""
        if self.swapped or not self._gathered:
            return
        with torch_compat.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            for parameters, attribute, params, compute, i in self._places:
                if parameters.get(attribute) is not params[i]:
                    self.swapped = True  # so that `swap_out` undoes the places before this one
                    self.swap_out()
                    self._complain(params[i])
                parameters[attribute] = compute[i]
        self._seen_versions = [torch_compat.version(param) for group in self._gathered for param in group.compute]
        self.swapped = True

    def swap_out(self) -> None:
        """Put the sharded parameters back; the inverse of `swap_in`."""
        if not self.swapped:
            return
        for parameters, attribute, params, compute, i in self._places:
            if parameters.get(attribute) is compute[i]:
                parameters[attribute] = params[i]
        self.swapped = False

    def expose(self) -> None:
        """Put DTensors over the local shards into modules whose parameters were DTensors, as a forward or backward begins."""
        if self._shown:  # a nested forward, or recomputation
            return
        made: dict[int, Tensor] = {}
        for parameters, attribute, distribution in self._distributed:
            local = parameters[attribute]
            if id(local) not in made:
                with torch.enable_grad():  # a forward under no_grad may enable gradients inside
                    made[id(local)] = distribution.wrap(local)
            self._shown.append((parameters, attribute, local, made[id(local)]))
            parameters[attribute] = made[id(local)]

    def hide(self) -> None:
        """Put the local shards back in place of the DTensors; the inverse of `expose`."""
        for parameters, attribute, local, shown in self._shown:
            if parameters.get(attribute) is shown:
                parameters[attribute] = local
        self._shown = []

    def written(self) -> list[str]:
        """Return the names of parameters that were written in place since `swap_in`, or since the last call."""
        if not self.swapped:
            return []
        seen, now = self._seen_versions, [torch_compat.version(param) for group in self._gathered for param in group.compute]
        if now == seen:
            return []
        self._seen_versions = now
        names = [spec.name for group in self._gathered for spec in group.specs]
        return [name for name, a, b in zip(names, now, seen, strict=True) if a != b]

    def set_to_itself(self, param: nn.Parameter) -> None:
        """Ignore that `p.set_(p)`, which gives a parameter the memory that it has, advances its version counter: no write."""
        begin = 0
        for group in self.groups:
            seen, first = (self._seen_versions, begin) if group.values.sharded else (group.masters.versions, 0)
            begin += len(group.compute) if group.values.sharded else 0
            for place, (compute, view) in enumerate(zip(group.compute, group.values.views, strict=True), first):
                if compute is param and seen[place:] and param.data_ptr() == view.data_ptr():
                    seen[place] += seen[place] + 1 == torch_compat.version(param)  # only if nothing else has written

    def as_computed(self, tree: Any) -> Any:
        """Return the nested arguments of an operation, with the unit's compute parameters in place of its sharded ones."""
        shown = {id(local): each for _, _, local, each in self._shown}
        pairs = [(param, compute) for g in self.groups for param, compute in zip(g.params, g.compute, strict=True)]
        mine = {id(param): shown.get(id(compute), compute) for param, compute in pairs}
        return tree_map_only(ShardedParameter, lambda param: mine.get(id(param), param), tree)

    def check_unchanged(self, in_use: bool = False) -> None:
        """Raise ModelChanged if a module does not hold the unit's parameter. in_use: it may hold the compute parameter."""
        for parameters, attribute, params, compute, i in self._places:
            held = parameters.get(attribute)
            if held is not params[i] and not (in_use and held is compute[i]):
                self._complain(params[i])

    def _complain(self, param: Tensor) -> None:
        name = next(s.name for g in self.groups for s, p in zip(g.specs, g.params, strict=True) if p is param)
        raise changed_late(
            f"parameter {name} was replaced", "change the model (resize, replace)", self.groups[0].runtime.shows_masters
        )
