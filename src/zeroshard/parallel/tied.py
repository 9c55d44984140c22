"""Parameters that two pipeline stages hold, such as an embedding that is also the head: keep their values equal.

    stage 0   embedding.weight   gradient from the lookup  --+
                                                              sum, the lower stage's first -> both step alike
    stage 3   head.weight        gradient from the head    --+

In both stages such a parameter is a unit of its own (`unit_of_its_own`), so that both cut it into the same shards. Each rank adds
to its slice of the gradient the slice of the rank with the other stage in the same pipeline, so no gradient is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.backend_select import is_imagined
from ..errors import ModelMismatch
from ..seam import TiedCopy, engine_of

T = TypeVar("T")


class TiedParameters:
    """The parameters of which this rank's stages and other stages of its pipeline each hold a copy."""

    def __init__(
        self, stages: Sequence[nn.Module], own: Sequence[int], group: dist.ProcessGroup, rank_of: Mapping[int, int]
    ) -> None:
        """Set all copies to the value of the lowest stage's copy (collective). rank_of: number of a stage -> its rank."""
        self.group, self.sent_nbytes = group, 0
        self.copies: dict[tuple, dict[int, TiedCopy]] = {}  # sorted names of a tie -> stage -> this rank's copy
        layout_of: dict[tuple, dict[int, tuple]] = {}  # the same for dtype, begin and end of this rank's slice, trained or not
        for number, stage in zip(own, stages, strict=True):
            place = getattr(stage, "pipeline_stage", None)
            for names in place.ties if place is not None else ():
                wanted = stage.get_parameter(names[number])
                copy, tie = engine_of(stage).tied_copy(wanted, counted=number == min(names)), tuple(sorted(names.items()))
                self.copies.setdefault(tie, {})[number] = copy
                layout_of.setdefault(tie, {})[number] = copy.layout()
        mine = exchange_objects(layout_of, group)
        self._before: dict[tuple, Tensor] = {}  # tie -> gradient of earlier steps, already summed over copies
        self.holders = {key: {number: rank_of[number] for number, _ in key} for told in mine for key in told}
        for key in sorted(self.holders):
            layouts = {
                f"{name} of stage {number}": told[key][number]
                for told in mine if key in told for number, name in key if number in told[key]
            }  # fmt: skip
            if len(set(layouts.values())) > 1:
                raise ModelMismatch(
                    f"{' and '.join(layouts)} are tied across pipeline stages, which hold them differently: {layouts} (dtype, begin and end of the "
                    "elements, trained or frozen). Give the stages the same options (data-parallel ranks, ZeRO stage, dtypes), and freeze all "
                    "copies or none."
                )
            if not is_imagined():
                self._equalise(key)
            if not all(trained for _, _, trained in layouts.values()):  # frozen copies have no gradients to add
                del self.holders[key]
                self.copies.pop(key, None)

    def _equalise(self, key: tuple) -> None:
        """Send the whole value of the lowest stage's copy to the other stages (collective)."""
        (lowest, source), *others = sorted(self.holders[key].items())
        held = self.copies.get(key, {})
        for number, rank in others:
            value = None
            if lowest in held:
                value = held[lowest].full()
                if rank != source:
                    dist.send(value.contiguous(), group=self.group, group_dst=rank)
            elif number in held:
                value = held[number].empty()
                dist.recv(value, group=self.group, group_src=source)
            if number in held and value is not None:
                held[number].set_full(value)

    def set_aside(self) -> None:
        """Keep gradients of earlier steps, which are summed over the copies already; called before the backwards of a step."""
        self._before = {}
        for key, held in self.copies.items():
            first = next(iter(held.values()))
            if first.reduced:
                self._before[key] = first.gradient().clone()
                for copy in held.values():
                    copy.set_gradient(torch.zeros_like(self._before[key]))

    def add(self) -> None:
        """Set each copy's gradient, after the reductions, to the sum over copies in the order of stages, plus earlier steps'."""
        for key in sorted(self.holders):
            held = self.copies.get(key)
            if held is None:
                continue
            me = dist.get_rank(self.group)
            parts: dict[int, Tensor] = {number: copy.gradient() for number, copy in held.items()}
            mine = next(iter(parts.values()))
            works: list[dist.Work | None] = []
            for number, rank in sorted(self.holders[key].items()) if mine.numel() else ():  # if this rank has a slice of it
                if rank == me:
                    others = {other for other in self.holders[key].values() if other != me}
                    works += [dist.isend(parts[number], group=self.group, group_dst=other, tag=number) for other in others]
                    self.sent_nbytes += len(others) * parts[number].nbytes
                else:
                    parts[number] = torch.empty_like(mine)
                    works.append(dist.irecv(parts[number], group=self.group, group_src=rank, tag=number))
            for work in works:
                if work is not None:
                    work.wait()
            total = parts[min(parts)].clone()  # the same order on all ranks: all copies get the same bits
            for number in sorted(parts)[1:]:
                total += parts[number]
            if key in self._before:
                total += self._before[key]
            for copy in held.values():
                copy.set_gradient(total)


def exchange_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks of a group (collective). On an imagined rank, all have this rank's value."""
    told = [value] * dist.get_world_size(group)
    if not is_imagined():
        dist.all_gather_object(told, value, group=group)
    return told
