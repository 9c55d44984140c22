"""Advice for a running model that is out of memory: the planner's changes that would make it fit, by formulas alone.

    Shortage (units of the live model, what it holds)  -->  a request and a profile  -->  the cheapest change of each kind  -->  lines

No dry run: the error must be raised within seconds, and the function that made the model is not known. Bytes of model states are
those of the runtime. Activations are measured, and divided equally among the blocks; that a block keeps 16 times its input is a
GPT's ratio (planner/search/profile.py). Seconds are those of similar hardware; they only rank changes, and are not shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...config import Tier
from ...errors import ConfigError
from ...guard import Shortage, size
from ...seam import GRADIENTS, MASTERS, OPTIMIZER, PARTIAL, ROOT
from ...utils.axes import DP, cuts_model, planned_sizes
from ..model_source import ModelSource
from ..plan import ACTIVATIONS
from ..request import Request
from ..search.layout import Layout
from ..search.memory import held_of
from ..search.profile import LayerProfile, Profile
from ..search.requested import layout_of
from ..simulator.hardware import Hardware
from .changes import CHANGES, sums_up
from .remedy import ENOUGH, Step, burdens, cheapest_first

# assumed for a micro-batch, whose size is not known: what half of it would free does not depend on that, seconds do
_SEQUENCES, _TOKENS = 16, 1024
_BLOCK_KEEPS = 16  # times its input, which a block keeps for backward
_OPTIONS = (
    "stage", "precision", "offload_optimizer", "offload_gradient", "offload_param", "offload_path", "shard_size",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "prefetch_nbytes",
    "prefetch_bucket_size", "overlap", "max_unit_numel",
)  # fmt: skip
_SMALL = 0.01  # share of what the device holds: a change that frees less is no remedy


@dataclass(frozen=True)
class _Advice:
    """A change as a line. enough: it frees as much as was asked. frees: bytes of the device. seconds: of a step."""

    text: str
    enough: bool
    frees: int
    seconds: float
    request: Request


def advise(shortage: Shortage) -> list[str]:
    """Return the cheapest changes, at most ENOUGH, one of a row of CHANGES, as lines: what to write, what it frees, what it costs."""
    request, profile = _request(shortage), _profile(shortage)
    before = _layout(request)
    held, old = sum(_held(profile, before, shortage).values()), Step.by_formula(profile, before, request.hardware)
    chosen: list[_Advice] = []
    for row in CHANGES:
        found: list[_Advice] = []
        for changed in row.offers(request):
            if cuts_model(changed.axes):  # another program
                continue
            try:
                after = _layout(changed)
                frees = round(held - sum(_held(profile, after, shortage).values()))
            except ConfigError:  # not for this model or these ranks
                continue
            if frees < max(_SMALL * held, 1.0):
                continue
            new = Step.by_formula(profile, after, changed.hardware)
            costs = "; ".join(burdens(old, new)) or "nothing more is sent or computed"
            text = f"{row.words(request, changed)[1]}: {'up to' if row.frees == ACTIVATIONS else 'about'} {size(frees)} less; {costs}"
            text += "; not enough alone" * (frees < shortage.asked)
            found.append(_Advice(text, frees >= shortage.asked, frees, new.seconds, changed))
        if enough := [each for each in found if each.enough]:
            chosen.append(cheapest_first(enough)[0])
        elif found:
            chosen.append(max(found, key=lambda each: each.frees))
    ordered = sorted(chosen, key=lambda each: (not each.enough, each.request.ranks, each.seconds))
    return [each.text for each in ordered[:ENOUGH]]


def _request(shortage: Shortage) -> Request:
    """Return the running job as a request, on the known hardware that is most like this device."""
    if shortage.comm.device.type != "cuda":
        hardware = replace(Hardware.named("cpu"), separate=shortage.separate)
    else:
        name = torch.cuda.get_device_name(shortage.comm.device).lower()
        known = ("v100-32gb", "h100-80gb", "h200-141gb", "gh200-96gb", "a100-80gb")
        hardware = Hardware.named(next((each for each in known if each.partition("-")[0] in name), "a100-80gb"))
    layers = sum(name != ROOT for name in shortage.units)
    source = ModelSource(shortage.model, torch.nn.Identity, _TOKENS, 0, layers)
    given = {name: getattr(shortage.config, name) for name in _OPTIONS}
    comm = shortage.comm
    return Request(
        source, hardware, planned_sizes({DP: comm.world_size}), _SEQUENCES, _TOKENS, options=given,
        node_size=comm.nodes.count(comm.nodes[comm.rank]), checkpointing=shortage.checkpointed,
    )  # fmt: skip


def _profile(shortage: Shortage) -> Profile:
    """Return the live model's profile, with the measured activations divided equally among the blocks."""
    sizes = {name: sum(numels) for name, numels in shortage.units.items()}
    blocks = [name for name in sizes if name != ROOT] or [*sizes]
    itemsize = shortage.config.compute_dtype.itemsize
    kept = shortage.beyond / itemsize / (_SEQUENCES * _TOKENS) / len(blocks)  # elements a token and block
    layers = [
        LayerProfile(
            name, whole=numels, flops=2 * sizes[name], block=name in blocks and name != ROOT, packs=name != ROOT,
            saved_whole=kept * (_BLOCK_KEEPS if shortage.checkpointed else 1) * (name in blocks),
            boundary=round(kept if shortage.checkpointed else kept / _BLOCK_KEEPS),
        )
        for name, numels in shortage.units.items()
    ]  # fmt: skip
    return Profile(shortage.model, tuple(layers), _TOKENS)


def _held(profile: Profile, layout: Layout, shortage: Shortage) -> dict[str, float]:
    """Return bytes of the device by category. Frozen parameters have no gradients and no optimizer states."""
    trained = dict.fromkeys((GRADIENTS, MASTERS, OPTIMIZER, PARTIAL), shortage.trained)
    held = held_of(profile, layout, shortage.trained)[Tier.DEVICE]
    return {name: nbytes * trained.get(name, 1.0) for name, nbytes in held.items()}


def _layout(request: Request) -> Layout:
    """Return the layout of a request, in which a rank adds up micro-batches where it holds whole gradients anyway."""
    return replace(layout_of(request), hold=request.micro_batches > 1 and sums_up(request))
