"""Conversions from a request of the planner to a layout and a profile of the search, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...parallel.experts import experts_of
from ...parallel.styles import most_ranks
from ...utils.axes import DP, TP, planned_sizes
from ...utils.option_names import TILES
from ..model_source import ModelSource
from ..plan import Plan
from ..request import Request
from .layout import CHECKPOINTING, Layout
from .profile import LayerProfile, Profile

_OTHER_UNITS = {"max_unit_numel", "zero_quantized_weights"}  # with these a plan's units are others, or keep other tensors


def of_layout(request: Request, layout: Layout) -> Request:
    """Return the same run in another layout."""
    return replace(
        request, axes=layout.mesh, rows=layout.micro_batch, micro_batches=layout.micro_batches, options=layout.options("."),
        checkpointing=CHECKPOINTING[layout.checkpointing],
        tiles={name: getattr(layout, name) for name in TILES if getattr(layout, name) is not None},
    )  # fmt: skip


def layout_of(request: Request) -> Layout:
    """Return the layout of a request, as far as formulas know its options; they ignore the others."""
    config, kept = request.config, request.checkpointing
    named = kept if isinstance(kept, Mapping) else {}
    checkpointing = "host" if "offload" in named else "partitioned" if "partition" in named else "blocks" if kept else "none"
    packed: dict[str, Any] = {name: getattr(config, f"zero_{name}") for name in ("quantized_weights", "quantized_gradients")}
    sizes: dict[str, Any] = {**request.axes, **request.tiles}
    return Layout(
        **sizes, stage=config.stage, optimizer=config.offload_optimizer.tier, gradient=config.offload_gradient.tier,
        parameter=config.offload_param.tier, micro_batch=request.rows, micro_batches=request.micro_batches, checkpointing=checkpointing,
        precision=config.precision, shard_size=config.shard_size, hpz=config.zero_hpz_partition_size, node_size=request.ranks_of_node,
        sums=config.sums, hops="one" if config.hierarchical is False else "two", prefetch_nbytes=config.prefetch_limit_nbytes, max_unit_numel=config.max_unit_numel,
        gradient_itemsize=config.gradient_dtype.itemsize, separate=request.hardware.separate,
        optimizer_states=getattr(config.optimizer_states, "format", None), master_weights=config.master_weights, **packed,
    )  # fmt: skip


def profile_of(request: Request, plans: Sequence[Plan] = ()) -> Profile:
    """Return the model's profile: of this library's GPT by formulas, else by dry runs over dp, with checkpoints, and with tp = 2.

    Its `heads` are the ranks of tp that the runtime divides the model over: they divide its vocabulary, too.

    plans: of the request, made already: if its ranks are those of data parallelism alone, one of them replaces the first dry run.
    """
    source = request.source
    if (shape := source.config) is not None:
        profile = Profile.of_shape(replace(shape, seq_len=request.seq), source.name)
        return replace(profile, heads=math.gcd(shape.heads, shape.vocab_size))
    alone = request.axes[DP] == request.ranks > 1
    if plans and alone and not request.checkpointing and not request.tiles and not _OTHER_UNITS & set(request.options):
        whole, known = request, plans[0]
    else:
        ranks = max(request.ranks_of_node, 2)  # one node, so that a unit is gathered in one hop
        whole = replace(
            request, axes=planned_sizes({DP: ranks}), node_size=ranks, rows=1, micro_batches=1, checkpointing=False, parallel={}, tiles={},
            options={"stage": 3, "precision": request.config.precision},
        )  # fmt: skip
        known = whole.plan()
    try:
        checkpointed = replace(whole, checkpointing=True).plan()
    except ConfigError:  # the model has no blocks
        checkpointed = None
    halved, ranks, model = None, 1, None
    if source.example is None:
        with torch.device("meta"):
            model = source.build()
        ranks = most_ranks(model)
    if ranks % 2 == 0:
        whole = replace(whole, axes={**whole.axes, TP: 2}, node_size=2 * whole.axes[DP])
        try:
            halved = whole.plan()
        except ConfigError:  # this model cannot be divided over tp
            halved = None
    profile = Profile.of_plan(known, request.seq, checkpointed, halved, ranks)
    return profile if model is None else _with_parts(profile, model, source)


def _with_parts(profile: Profile, model: nn.Module, source: ModelSource) -> Profile:
    """Return a profile that knows what ep, sp and tiles of tokens divide, by the modules of a model of Transformers."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    if text is None:
        return profile
    heads, keys = source.heads or 1, getattr(text, "num_key_value_heads", None) or source.heads or 1
    experts, choices = experts_of(model), getattr(text, "num_experts_per_tok", 0) or 0
    layers = []
    for layer in profile.layers:

        def inside(name: str, layer: LayerProfile = layer) -> bool:
            return layer.block and name.startswith(f"{layer.name}.")

        own = sum(p.numel() for name, each in experts.items() if inside(name) for p in each.parameters())
        mlps = [each for name, each in model.named_modules() if inside(name) and type(each).__name__.endswith("MLP")]
        maps = [[each for each in mlp.modules() if isinstance(each, nn.Linear)] for mlp in mlps]
        # each map keeps its input or output, a gated MLP their product as well
        kept = sum((len(each) + (len(each) == 3)) * max(m.out_features for m in each) for each in maps if each)
        queries = layer.attention / 4 / profile.seq
        layers.append(replace(
            layer, experts=(own,) * bool(own), routed=choices * (source.hidden or 0) * bool(own),
            exchanged=(queries, queries * keys / heads), mlp=(kept, sum(p.numel() for mlp in mlps for p in mlp.parameters())),
        ))  # fmt: skip
    layers[-1] = replace(layers[-1], logits=source.vocab)  # the loss follows the last layer
    return replace(profile, layers=tuple(layers), experts=source.experts if experts else 0, sp_heads=(heads, keys))
