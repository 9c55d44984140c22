"""The memory of a rank of a layout by formulas: bytes by tier and category at the fullest moment of the device.

Model states, gathered units and buffers are those of the runtime to the byte; activations are estimates from the profile.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace

from ...comm.mesh.topology import needed
from ...config import Config, Placement, Tier
from ...memory.estimate import BUFFERS, Group, needs, rests_away
from ...memory.ledger import GATHERED, GRADIENTS, PARTIAL, SECONDARY, STAGING
from ...zero.prefetch import most_gathered
from ..plan import ACTIVATIONS, Held, fullest, memories
from .layout import Layout, comms_of, packed_nbytes
from .profile import Profile, homes_of


def memory_of(profile: Profile, layout: Layout, stage: int = 0) -> dict[Tier, dict[str, int]]:
    """Return the bytes of a rank of a stage, by tier and category of memory/ledger.py, at the fullest moment of the device.

    Model states are those of the runtime to the byte where the profile knows single parameters (those of GPTs). Of other models
    it knows units alone: their norms and biases count as matrices where optimizer states are coded. Activations are estimates,
    without the allocator's holes and what the model's formulas leave out (buffers, masks). The context of the device is
    `Hardware.overhead_nbytes`.
    """
    # all that the states do not depend on is left out, so that the layouts of a search share them
    few = replace(layout, micro_batch=1, micro_batches=min(layout.micro_batches, 2), checkpointing="none")
    held = {tier: dict(found) for tier, found in _states_of(profile, few, stage).items()}
    (device, host), working = activations(profile, layout.pp, stage, layout.itemsize, layout.tp, layout.checkpointing)
    tokens = layout.micro_batch * profile.seq
    # micro-batches whose activations a stage keeps at once, by 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2)
    waiting = min(layout.micro_batches, layout.pp - stage) if layout.pp > 1 else 1
    for tier, nbytes in ((Tier.DEVICE, tokens * (device * waiting + working)), (Tier.HOST, tokens * host * waiting)):
        if nbytes:
            held[tier][ACTIVATIONS] = round(nbytes)
    return held


@functools.lru_cache(maxsize=4096)
def _states_of(profile: Profile, layout: Layout, stage: int) -> dict[Tier, dict[str, int]]:
    """Return the bytes of `memory_of` without activations: what the runtime counts before it allocates (zero/shard_model.py)."""
    config, form, away = Config(**layout.options(path="/")), layout.state_format, rests_away(layout.parameter, layout.separate)
    comms, gradient = comms_of(layout), layout.gradient_dtype
    units = profile.stages(layout.pp)[stage]
    held: dict[Tier, dict[str, int]] = {tier: defaultdict(int) for tier in Tier}
    homes = homes_of(units, layout.max_unit_numel)
    # elements of each buffer's shard and of the buffer without padding, and whether states are coded; once for homes that are alike
    alike = {(home.cut, home.whole, home.matrices): home for home in homes}
    shards = {
        key: (home.shards(layout.tp, layout.shards, form), home.shards(layout.tp, 1, form), home.buffers(layout.tp, form))
        for key, home in alike.items()
    }
    groups, values, slices = [], [], []
    for home in homes:
        for size, unpadded, (_, coded) in zip(*shards[home.cut, home.whole, home.matrices], strict=True):
            numel, states = size * layout.shards, (config.offload_optimizer, layout.master, layout.columns(coded))
            groups.append(Group(numel, size, config.compute_dtype, gradient, *states, unpadded=unpadded))
            values.append((comms.values_of(home.packs, numel), (size, config.compute_dtype)))
            slices.append((comms.gradients_of(home.packs, numel), (size, config.compute_dtype)))
    repeated = layout.micro_batches > 1 and not layout.held
    for (category, tier, _), nbytes in needs(config, layout.separate, groups, repeated).items():
        # published systems may keep gradients twice, as fp16 and fp32
        share = layout.gradient_itemsize / gradient.itemsize if category is GRADIENTS else 1
        held[tier][STAGING if category is BUFFERS else category] += round(nbytes * share)
    device, whole = held[Tier.DEVICE], sum(group.numel for group in groups)
    if layout.hpz > 1 and config.row.parameter is Placement.SHARDED:
        device[SECONDARY] = round(whole / layout.hpz * packed_nbytes(layout.quantized_weights, layout.itemsize))
    device[STAGING] += max(needed(values, slices) - device[SECONDARY], 0)
    if config.row.parameter is Placement.SHARDED and layout.shards > 1 and (away or not comms.shards.copies):
        sizes = {
            home.name: sum(shards[home.cut, home.whole, home.matrices][0]) * layout.shards * layout.itemsize for home in homes
        }
        apart: dict[str, list[str]] = defaultdict(list)  # of each home, or of a split one its parts: the names
        for home in (home for home in homes if not home.held):
            apart[home.origin or home.name].append(home.name)
        order = [part for unit in units for part in apart.get(unit.home or unit.name, ())]  # as forward gathers them
        at_rest = sum(sizes[name] for name in sizes.keys() - set(order))
        limit = 0 if away and layout.prefetch_nbytes else layout.prefetch_nbytes
        device[GATHERED] = at_rest + most_gathered(order, sizes, limit)
    if config.row.gradient is Placement.SHARDED and layout.held:
        device[PARTIAL] = whole * layout.gradient_itemsize
    return {tier: {name: nbytes for name, nbytes in found.items() if nbytes} for tier, found in held.items()}


def held_of(profile: Profile, layout: Layout) -> dict[Tier, Held]:
    """Return the bytes of each memory by category on the rank where it is fullest: one of the first stage, or of the last."""
    stages = sorted({0, layout.pp - 1})
    return fullest([memories(memory_of(profile, layout, stage), layout.separate) for stage in stages])


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
