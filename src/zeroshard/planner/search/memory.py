"""The memory of a rank of a layout by formulas: bytes by tier and category at the fullest moment of the device.

Model states, gathered units and buffers are those of the runtime to the byte; activations are estimates from the profile.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace

import torch

from ...config import Config, Placement, Tier
from ...seam import (
    BUFFERS,
    GATHERED,
    GPU_CHUNK_NUMEL,
    GRADIENTS,
    PARTIAL,
    RECEIVED_NBYTES,
    SECONDARY,
    STAGING,
    Group,
    most_gathered,
    needed,
    rests_away,
)
from ...tiers import needs
from ..plan import ACTIVATIONS, Held, fullest, memories
from .layout import Layout, comms_of, packed_nbytes
from .profile import Profile, buckets_of


def memory_of(profile: Profile, layout: Layout, stage: int = 0, trained: float = 1.0) -> dict[Tier, dict[str, int]]:
    """Return the bytes of a rank of a stage, by tier and category of engine/ledger.py, at the fullest moment of the device.

    Model states are those of the runtime to the byte where the profile knows single parameters (those of GPTs). Of other models
    it knows layers alone: their norms and biases count as matrices where optimizer states are coded. Activations are estimates,
    without the allocator's holes and what the model's formulas leave out (buffers, masks). The context of the device is
    `Hardware.overhead_nbytes`. trained: the share of the parameters that are trained, for what reductions and the step take.
    """
    profile.check(layout.ep, layout.sp)
    profile, tokens = profile.over(layout.ep), layout.micro_batch * profile.seq // layout.sp
    # all that the states do not depend on is left out, so that the layouts of a search share them
    few = replace(
        layout, micro_batch=1, micro_batches=min(layout.micro_batches, 2), checkpointing="none", mlp_tokens=None, loss_tokens=None
    )  # fmt: skip
    states, received, stepping = _states_of(profile, few, stage)
    held = {tier: dict(found) for tier, found in states.items()}
    tiles = tuple(
        min(1.0, each * layout.micro_batch / tokens) if each else 1.0 for each in (layout.mlp_tokens, layout.loss_tokens)
    )
    (device, host), working = activations(
        profile, layout.pp, stage, layout.itemsize, layout.tp, layout.checkpointing, layout.sp, tiles
    )  # fmt: skip
    # micro-batches whose activations a stage keeps at once, by 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2)
    waiting = min(layout.micro_batches, layout.pp - stage) if layout.pp > 1 else 1
    kept, layers = tokens * device * waiting, len(profile.stages(layout.pp)[stage])
    # a bucket is reduced when its layer's activations are freed
    computing = kept + max(tokens * working, received * (trained > 0) - kept / layers)
    # gathered units and sums of gradients are given back before the step
    in_step = trained * stepping - sum(held[Tier.DEVICE].get(name, 0) for name in (GATHERED, PARTIAL))
    for tier, nbytes in ((Tier.DEVICE, max(computing, in_step)), (Tier.HOST, tokens * host * waiting)):
        if nbytes:
            held[tier][ACTIVATIONS] = round(nbytes)
    return held


@functools.lru_cache(maxsize=4096)
def _states_of(profile: Profile, layout: Layout, stage: int) -> tuple[dict[Tier, dict[str, int]], int, int]:
    """Return the bytes of `memory_of` without activations: what the runtime counts before it allocates (engine/shard_model.py).

    Also those of two moments of a GPU: what a reduction receives and adds up, and what a step of all tensors at once keeps beside
    them, one value for each element (Adam's denominator).
    """
    config, form, away = Config(**layout.options(path="/")), layout.state_format, rests_away(layout.parameter, layout.separate)
    comms, gradient = (comms_of(layout), comms_of(layout, divided=True)), layout.gradient_dtype  # by Bucket.divided
    layers = profile.stages(layout.pp)[stage]
    held: dict[Tier, dict[str, int]] = {tier: defaultdict(int) for tier in Tier}
    buckets = buckets_of(layers, layout.max_unit_numel, layout.ep)
    # elements of each buffer's shard and of the buffer without padding, whether states are coded; once for all alike
    alike = {(bucket.cut, bucket.whole, bucket.matrices, bucket.divided): bucket for bucket in buckets}
    shards = {
        key: (each.shards(layout.tp, layout.shards(each.divided), form), each.shards(layout.tp, 1, form), each.buffers(layout.tp, form))
        for key, each in alike.items()
    }  # fmt: skip
    groups: tuple[list[Group], list[Group]] = ([], [])  # by Bucket.divided
    gathers, reduces = [], []
    gathered: dict[str, int] = defaultdict(int)  # bytes by name
    for bucket in buckets:
        ranks, comm = layout.shards(bucket.divided), comms[bucket.divided]
        for size, unpadded, (_, coded) in zip(*shards[bucket.cut, bucket.whole, bucket.matrices, bucket.divided], strict=True):
            numel, states = size * ranks, (config.offload_optimizer, layout.master, layout.columns(coded))
            groups[bucket.divided].append(Group(numel, size, config.compute_dtype, gradient, *states, unpadded=unpadded))
            gathers.append((comm.values_of(bucket.packs, numel), (size, config.compute_dtype)))
            reduces.append((comm.gradients_of(bucket.packs, numel), (size, layout.sent_dtype)))
            gathered[bucket.name] += numel * layout.itemsize
    repeated = layout.micro_batches > 1 and not layout.held
    for some in filter(None, groups):  # each has staging buffers of its own
        for (category, tier, _), nbytes in needs(config, layout.separate, some, repeated).items():
            # published systems may keep gradients twice, as fp16 and fp32
            share = layout.gradient_itemsize / gradient.itemsize if category is GRADIENTS else 1
            held[tier][STAGING if category is BUFFERS else category] += round(nbytes * share)
    device, whole = held[Tier.DEVICE], sum(buffer.numel for some in groups for buffer in some)
    if layout.hpz > 1 and config.row.parameter is Placement.SHARDED:
        device[SECONDARY] = round(whole / layout.hpz * packed_nbytes(layout.quantized_weights, layout.itemsize))
    device[STAGING] += max(needed(gathers, reduces) - device[SECONDARY], 0)
    if config.row.parameter is Placement.SHARDED and layout.shards() > 1 and (away or not comms[0].shards.copies):
        apart: dict[str, dict[str, None]] = defaultdict(dict)  # of each unit, or of a split one its parts: the names
        for bucket in (bucket for bucket in buckets if not bucket.held):
            apart[bucket.origin or bucket.name][bucket.name] = None
        order = [part for layer in layers for part in apart.get(layer.bucket or layer.name, ())]  # as forward gathers them
        at_rest = sum(gathered[name] for name in gathered.keys() - set(order))
        limit = 0 if away and layout.prefetch_nbytes else layout.prefetch_nbytes
        device[GATHERED] = at_rest + most_gathered(order, gathered, limit)
    if config.row.gradient is Placement.SHARDED and layout.held:
        device[PARTIAL] = whole * layout.gradient_itemsize
    received = stepping = 0
    for buffer in (*groups[0], *groups[1]) if layout.separate else ():
        totals = min(buffer.shard_numel, GPU_CHUNK_NUMEL) * 4
        sent = buffer.numel * config.sent_dtype(buffer.dtype).itemsize
        sent = sent if sent <= RECEIVED_NBYTES else 2 * RECEIVED_NBYTES  # in pieces, of which a copy is sent
        if not layout.by_backend:
            received = max(received, totals + sent * (buffer.numel > buffer.shard_numel))
        plain = buffer.master is not torch.int16 and all(column.plain(buffer.stepped) for column in buffer.columns)
        own = buffer.shard_numel if config.row.optimizer is Placement.SHARDED else buffer.unpadded or buffer.numel
        stepping += own * buffer.stepped.itemsize if plain and buffer.states.tier is Tier.DEVICE else 0
    return {tier: {name: nbytes for name, nbytes in found.items() if nbytes} for tier, found in held.items()}, received, stepping


def held_of(profile: Profile, layout: Layout, trained: float = 1.0) -> dict[Tier, Held]:
    """Return the bytes of each memory by category on the rank where it is fullest: one of the first stage, or of the last."""
    stages = sorted({0, layout.pp - 1})
    return fullest([memories(memory_of(profile, layout, stage, trained), layout.separate) for stage in stages])


@functools.lru_cache(maxsize=4096)
def activations(
    profile: Profile, pp: int, stage: int, itemsize: int, tp: int, checkpointing: str, sp: int = 1,
    tiles: tuple[float, ...] = (1.0, 1.0),
) -> tuple[tuple[float, float], float]:  # fmt: skip
    """Return bytes per token of a stage: ((kept on the device, on the host) of a micro-batch, backward's most temporaries).

    tiles: share of its tokens that MLPs, and the loss, compute at a time.
    """
    device = host = working = 0.0
    boundary = 0
    for layer in profile.stages(pp)[stage]:
        saved, beside = layer.saved_nbytes(itemsize, tp), layer.working_nbytes(itemsize, tp)
        if sp > 1:  # the exchanged output of attention, and repeated keys and values
            saved += itemsize * (layer.exchanged[0] + 2 * (layer.keys(sp, profile.sp_heads[1]) - layer.exchanged[1]))
        for share, inside in zip(tiles, (itemsize * layer.mlp[0], 4 * layer.logits), strict=True):
            if share < 1:  # kept for a tile alone, while its backward runs
                saved, beside = max(saved - inside, 0), max(beside - 2 * (1 - share) * inside, 0) + share * inside
        if layer.block and checkpointing != "none":
            kept = (boundary or layer.boundary) * itemsize / (tp if checkpointing == "partitioned" else 1)
            host, device = (host + kept, device) if checkpointing == "host" else (host, device + kept)
            working = max(working, saved + beside)
        else:
            device += saved
            working = max(working, beside)
        boundary = layer.boundary or boundary
    return (device, host), working
