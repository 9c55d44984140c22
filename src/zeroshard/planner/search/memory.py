"""The memory of a rank of a layout by formulas: bytes by tier and category at the fullest moment of the device.

Model states, gathered units and buffers are those of the runtime to the byte; activations are estimates from the profile.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...config import STAGES, Config, Offload, Placement, Row, Tier
from ...memory.estimate import Group, arena_nbytes
from ...memory.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, SECONDARY, STAGING
from ...tensor.state_column import StateColumn
from ...zero.prefetch import most_gathered
from ...zero.shard_model import LANDINGS, STAGING_BUFFERS
from ..plan import ACTIVATIONS, Held, fullest, memories
from .layout import Layout, packed_nbytes, rests_away
from .profile import Home, Profile, UnitProfile, homes_of


def memory_of(profile: Profile, layout: Layout, stage: int = 0) -> dict[Tier, dict[str, int]]:
    """Return the bytes of a rank of a stage, by tier and category of memory/ledger.py, at the fullest moment of the device.

    Model states are those of the runtime to the byte (on disk: to the page). Activations are estimates, without the allocator's
    holes and what the model's formulas leave out (buffers, masks). The context of the device is `Hardware.overhead_nbytes`.
    """
    row, sizes = STAGES[layout.stage], Sizes.of(profile, layout.pp, stage, layout.tp, layout.shards, layout.max_unit_numel)
    own, whole = sizes.own, sizes.own * layout.shards
    held: dict[Tier, dict[str, int]] = {tier: defaultdict(int) for tier in Tier}

    def add(category: str, tier: Tier, nbytes: float) -> None:
        if nbytes:
            held[tier][category] += round(nbytes)

    sharded, away = row.parameter is Placement.SHARDED, rests_away(layout.parameter, layout.separate)
    replicated = row.optimizer is not Placement.SHARDED
    states = whole if replicated else own
    add(PARAMETERS, layout.parameter if sharded else Tier.DEVICE, (own if sharded else whole) * layout.itemsize)
    spread = row.gradient is Placement.SHARDED
    add(GRADIENTS, layout.gradient if spread else Tier.DEVICE, (own if spread else whole) * layout.gradient_itemsize)
    add(MASTERS, layout.optimizer, states * 4 * layout.has_masters)
    moments = sizes.stepped if replicated else own  # the padding at the end of a whole buffer is not stepped
    add(OPTIMIZER, layout.optimizer, moments * layout.state_itemsize)
    if sharded and layout.shards > 1:
        add(
            GATHERED,
            Tier.DEVICE,
            sizes.gathered(0 if away and layout.prefetch_nbytes else layout.prefetch_nbytes, layout.itemsize),
        )
    if sharded and layout.hpz > 1:
        add(SECONDARY, Tier.DEVICE, whole / layout.hpz * packed_nbytes(layout.quantized_weights, layout.itemsize))
    if spread and layout.held:
        add(PARTIAL, Tier.DEVICE, whole * layout.gradient_itemsize)
    _add_buffers(layout, row, sizes.shards, add)
    tokens = layout.micro_batch * profile.seq
    kept, working = activations(profile, layout.pp, stage, layout.itemsize, layout.tp, layout.checkpointing)
    add(ACTIVATIONS, Tier.DEVICE, tokens * (kept[0] * in_flight(layout, stage) + working))
    add(ACTIVATIONS, Tier.HOST, tokens * kept[1] * in_flight(layout, stage))
    return {tier: dict(found) for tier, found in held.items()}


def held_of(profile: Profile, layout: Layout) -> dict[Tier, Held]:
    """Return the bytes of each memory by category on the rank where it is fullest: one of the first stage, or of the last."""
    stages = sorted({0, layout.pp - 1})
    return fullest([memories(memory_of(profile, layout, stage), layout.separate) for stage in stages])


def in_flight(layout: Layout, stage: int) -> int:
    """Return how many micro-batches' activations a stage keeps at once, by 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    return min(layout.micro_batches, layout.pp - stage) if layout.pp > 1 else 1


@functools.lru_cache(maxsize=4096)
def activations(
    profile: Profile, pp: int, stage: int, itemsize: int, tp: int, checkpointing: str
) -> tuple[tuple[float, float], float]:  # fmt: skip
    """Return bytes per token of a stage: ((kept on the device, on the host) of a micro-batch, backward's most temporaries)."""
    device = host = working = 0.0
    boundary = 0
    for unit in profile.stages(pp)[stage]:
        saved = unit.saved_nbytes(itemsize, tp)
        if unit.block and checkpointing != "none":
            kept = (boundary or unit.boundary) * itemsize / (tp if checkpointing == "partitioned" else 1)
            host, device = (host + kept, device) if checkpointing == "host" else (host, device + kept)
            working = max(working, saved + unit.working_nbytes(itemsize, tp))
        else:
            device += saved
            working = max(working, unit.working_nbytes(itemsize, tp))
        boundary = unit.boundary or boundary
    return (device, host), working


@dataclass(frozen=True, eq=False)
class Sizes:
    """The elements of a stage's flat buffers on one rank. shards: of each buffer. stepped: of all, whole, without dp's padding.

    whole: of each home when it is gathered, by name. visits: the homes' names in the order of forward.
    """

    shards: tuple[int, ...]
    stepped: int
    whole: Mapping[str, int]
    visits: tuple[str, ...]

    @property
    def own(self) -> int:
        return sum(self.shards)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(profile: Profile, pp: int, stage: int, tp: int, shards: int, max_unit_numel: int | None = None) -> Sizes:
        """Return the sizes of a stage. shards: number of ranks over which a buffer is cut."""
        units = profile.stages(pp)[stage]
        homes = homes_of(units, max_unit_numel)
        each = [home.shards(tp, shards) for home in homes]
        return Sizes(
            tuple(size for sizes in each for size in sizes), sum(sum(home.shards(tp, 1)) for home in homes),
            {home.name: sum(sizes) * shards for home, sizes in zip(homes, each, strict=True)}, tuple(_visits(units, homes)),
        )  # fmt: skip

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def gathered(self, prefetch_nbytes: int | None, itemsize: int) -> int:
        """Return the gathered bytes at the fullest moment of stage 3: the root, the unit in use, and those gathered ahead."""
        nbytes = {name: numel * itemsize for name, numel in self.whole.items()}
        held = sum(nbytes[name] for name in nbytes.keys() - set(self.visits))
        return held + most_gathered(self.visits, nbytes, prefetch_nbytes)


def _visits(units: Sequence[UnitProfile], homes: list[Home]) -> list[str]:
    """Return the names of the homes that forward gathers, in its order; of a split home, those of its parts."""
    apart: dict[str, list[str]] = defaultdict(list)
    for home in (home for home in homes if not home.held):
        apart[home.origin or home.name].append(home.name)
    return [part for unit in units for part in apart.get(unit.home or unit.name, ())]


def _add_buffers(layout: Layout, row: Row, sizes: tuple[int, ...], add: Callable[[str, Tier, float], None]) -> None:
    """Add buffers of constant size (zero/shard_model.py): for gradients to send, shards to gather, states of the host's step."""
    resting = row.gradient is not Placement.SHARDED and layout.itemsize == layout.gradient_itemsize
    sent = [] if resting else [size * layout.shards * layout.itemsize for size in sizes]
    add(STAGING, Tier.DEVICE, max(sent, default=0) * min(STAGING_BUFFERS, len(sent)))
    largest, offload = max(sizes), Offload()
    if rests_away(layout.parameter, layout.separate):
        count = min(max(offload.buffer_count // 2, 2), len(sizes))
        add(STAGING, Tier.DEVICE, largest * layout.itemsize * count)
        add(STAGING, Tier.HOST, largest * layout.itemsize * count * (layout.separate and layout.parameter is Tier.DISK))
    if rests_away(layout.gradient, layout.separate):
        repeated = layout.micro_batches > 1 and not layout.held
        add(STAGING, Tier.DEVICE, largest * 4 * LANDINGS)
        add(STAGING, Tier.HOST, largest * 4 * LANDINGS * repeated)
    if layout.optimizer is not Tier.DEVICE:
        add(STAGING, Tier.HOST, _arena_nbytes(layout, sizes))


def _arena_nbytes(layout: Layout, sizes: tuple[int, ...]) -> int:
    """Return the bytes of the arena through which the host's step brings states that it cannot reach (memory/estimate.py)."""
    config = Config(**layout.options(path="/"))
    columns, master = (StateColumn(""),) * (layout.state_itemsize // 4), torch.float32 if layout.has_masters else None
    groups = [Group(0, size, config.compute_dtype, torch.float32, config.offload_optimizer, master, columns) for size in sizes]
    return arena_nbytes(config, layout.separate, groups)
