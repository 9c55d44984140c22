"""Sizes of a model's states on a rank: of each flat buffer, and of the buffers of constant size that all units share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import Config, Offload, Placement, Tier
from ..tensor.state_column import StateColumn

BUFFERS = "buffers"  # the category of buffers of constant size in estimates
STAGING_BUFFERS = 2  # of gradients: one is being filled while the other is being reduced


@dataclass(frozen=True)
class Group:
    """A flat buffer to be made: `numel` elements of `dtype`, `shard_numel` of them on each rank.

    gradient: dtype in which its gradient rests (None: frozen). states: the tier of masters and optimizer states. master: dtype of
    a master copy, or None; int16: the lower halves of masters whose upper halves are the values. columns: the optimizer states.
    whole: every rank has all values, at any stage.
    unpadded: elements without the padding at the end: what is stepped where each rank steps all (stage 0). 0: as `numel`.
    """

    numel: int
    shard_numel: int
    dtype: torch.dtype
    gradient: torch.dtype | None = None
    states: Offload = Offload()
    master: torch.dtype | None = None
    columns: Sequence[StateColumn] = ()
    whole: bool = False
    unpadded: int = 0

    @property
    def stepped(self) -> torch.dtype:
        """Dtype of the values that the optimizer steps, and of its states."""
        return torch.float32 if self.master is torch.int16 else self.master or self.dtype


def rests_away(tier: Tier, separate: bool) -> bool:
    """Return True where computation can not use states of this tier in place. separate: the device has a memory of its own."""
    return tier is Tier.DISK or (tier is Tier.HOST and separate)


@dataclass
class Buffers:
    """Sizes of buffers of constant size, through which gradients are sent and shards pass between tiers.

    sent: (bytes of a buffer, buffers normally in use, most) of the pool that gradients are reduced from; fetched: of the pool
    that shards from another tier are gathered from. landed: (bytes, buffers) for reduced gradients about to leave the device.
    """

    sent: tuple[int, int, int] = (0, 0, 0)
    fetched: tuple[int, int, int] | None = None
    landed: tuple[int, int] = (0, 0)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device that all these buffers take."""
        return math.prod(self.sent[:2]) + math.prod(self.landed) + (math.prod(self.fetched[:2]) if self.fetched else 0)

    @classmethod
    def of(cls, config: Config, separate: bool, groups: Sequence[Group]) -> Buffers:
        row, sizes = config.row, cls()
        sent = []
        for group in groups:
            send = config.sent_dtype(group.dtype)
            if group.gradient is not None and (row.gradient is Placement.SHARDED or send != group.gradient):
                sent.append(group.numel * send.itemsize)
        limit = min(len(sent), 64)
        forms = {frozenset((c.dtype, c.values) for c in group.columns) for group in groups if group.gradient is not None}
        buffers = STAGING_BUFFERS + (len(forms) > 1)  # units then have two groups (coded states apart), filled at the same time
        sizes.sent = (max(sent, default=0), min(buffers, limit), limit)
        fetched = [group.shard_numel * group.dtype.itemsize for group in groups if not group.whole]
        if row.parameter is Placement.SHARDED and fetched and rests_away(config.offload_param.tier, separate):
            count = min(max(config.offload_param.buffer_count // 2, 2), len(fetched))
            sizes.fetched = (max(fetched), count, min(len(fetched), 64))
        if row.gradient is Placement.SHARDED and rests_away(config.offload_gradient.tier, separate):
            landed = (each.shard_numel * max(4, (each.gradient or each.dtype).itemsize) for each in groups)
            sizes.landed = max(landed, default=0), buffers + 1
        return sizes
