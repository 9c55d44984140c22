"""The report on activation checkpoints: measured bytes of one rank by tier, and the closed formula.

2 b s h nl / ci     bytes of all checkpoints in 16 bit (ZeRO-Infinity, arXiv 2104.07857, section 3): batch b, sequence s,
                    hidden h, nl layers, one checkpoint every ci of them; 1/N of it on each of N ranks (Pa)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from torch import nn

from ..config import Tier
from ..seam import STAGING, Traffic
from .checkpoint import attached_to
from .partition import GATHERS
from .storage import CHECKPOINTS


def checkpoint_nbytes(
    batch: int, seq: int, hidden: int, layers: int, *, interval: int = 1, itemsize: int = 2, world_size: int = 1
) -> int:
    """Return the bytes of activation checkpoints on each rank: itemsize b s h nl / ci / N. Source: ZeRO-Infinity, section 3."""
    return itemsize * batch * seq * hidden * layers // interval // world_size


@dataclass(frozen=True)
class ActivationReport:
    """The memory of a model's activation checkpoints on this rank. Sizes are bytes; tiers are "device", "host" and "disk".

    Attributes:
        held: bytes of slices that are kept now, by tier.
        peak: the most bytes that were kept at one moment, by tier.
        staging: bytes of buffers in addition, by tier: on the device, for gathers; on the host, between device and files.
        arena: memory or files that are reserved, by tier.
        whole_peak: the peak that the same checkpoints would have without partitioning.
        formula: the largest number of checkpoints at one moment x bytes of the largest / N.
        gathers: collectives that gathered slices in backward.
        allocations: how often memory or files were taken from the system; constant once training is steady.
    """

    blocks: tuple[str, ...]
    offload: str
    rank: int
    world_size: int
    held: dict[str, int]
    peak: dict[str, int]
    staging: dict[str, int]
    arena: dict[str, int]
    whole_peak: int
    formula: int
    packed: int
    unpacked: int
    gathers: Traffic
    moved: dict[str, int]
    allocations: int
    messages: tuple[str, ...]

    def to_dict(self) -> dict:
        """Return the fields in types that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"{len(self.blocks)} blocks" if self.blocks else "the model's own checkpoints"
        lines = [
            f"activation checkpoints of {where}, rank {self.rank} of {self.world_size}, kept on {self.offload}",
            f"{'bytes per rank':<20}{'held':>16}{'peak':>16}{'arena':>16}{'staging':>16}",
        ]
        for tier, peak in self.peak.items():
            if peak or self.staging[tier] or self.arena[tier]:
                lines.append(f"{tier:<20}{self.held[tier]:>16,}{peak:>16,}{self.arena[tier]:>16,}{self.staging[tier]:>16,}")
        lines.append(f"formula {self.formula:,}; whole, on one rank {self.whole_peak:,}")
        lines.append(f"gathered {self.gathers.count} times, {self.gathers.nbytes:,} bytes sent")
        lines += [f"moved {link}: {nbytes:,}" for link, nbytes in self.moved.items()]
        lines += [f"note: {message}" for message in self.messages]
        return "\n".join(lines)


def activation_report(model: nn.Module) -> ActivationReport:
    """Return the report of a model with `zs.checkpoint_activations` on this rank (not collective)."""
    attached = attached_to(model)
    store = attached.store
    store.alive()  # first releases the slots of tensors that autograd has freed
    ledger, backing, slices = store.ledger, store.backing, store.slices
    peaks = {Tier.DEVICE: ledger.peak[CHECKPOINTS], Tier.HOST: 0, Tier.DISK: 0}
    if backing.tier is not Tier.DEVICE:
        peaks[backing.tier] = ledger.elsewhere_peak[backing.tier]
    staging = {Tier.DEVICE: ledger.peak[STAGING], Tier.HOST: 0, Tier.DISK: 0}
    if backing.tier is Tier.DISK:
        staging[Tier.HOST] = ledger.elsewhere_peak[Tier.HOST]
    held = {Tier.DEVICE: ledger.now, **ledger.elsewhere}
    traffic = ledger.traffic[GATHERS]
    return ActivationReport(
        blocks=tuple(attached.blocks),
        offload=backing.tier.value,
        rank=slices.rank,
        world_size=slices.world_size,
        held={tier.value: held[tier][CHECKPOINTS] for tier in Tier},
        peak={tier.value: peaks[tier] for tier in Tier},
        staging={tier.value: staging[tier] for tier in Tier},
        arena={tier.value: backing.arena_nbytes if tier is backing.tier else 0 for tier in Tier},
        whole_peak=store.whole_peak,
        formula=store.largest_nbytes * store.most // slices.world_size,
        packed=store.packed,
        unpacked=store.unpacked,
        gathers=replace(traffic, units=dict(traffic.units)),
        moved={f"{begins.value} -> {ends.value}": nbytes for (begins, ends), nbytes in ledger.moved.items()},
        allocations=backing.allocations,
        messages=tuple(store.messages),
    )
