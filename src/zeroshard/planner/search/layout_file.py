"""The file of a layout: one JSON that `zeroshard train --config`, `zs.shard(config=...)`, `zs.parallelize(config=...)` and
`zeroshard.deepspeed.initialize(config=...)` read.

    {"train_batch_size": ..., "bf16": ..., "zero_optimization": ...,        a DeepSpeed configuration, in its own words
     "zeroshard": {"shard": ..., "mesh": ..., "micro_batches": ..., ...}}   what the others read (config.py:read_layout)

DeepSpeed itself ignores the section "zeroshard", which it does not know.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...config import SECTION, Tier
from ...errors import ConfigError
from .layout import CHECKPOINTING, Layout
from .search import Found

_GRADIENTS = {2: "fp16", 4: "fp32"}


def write_config(found: Found, path: str | Path, *, offload_path: str | None = None) -> dict[str, Any]:
    """Write the best layout to a file; return what was written.

    offload_path: the folder on a local disk for states that rest there. Raises ConfigError if the layout needs one and has none.
    """
    best = found.best
    config = deepspeed_config(best.layout, offload_path)
    prediction = {
        "model": found.profile.name, "hardware": found.hardware.name, "step_s": best.step_s, "tflops_per_device": best.tflops,
        "tokens_per_s": best.tokens_per_s, "reason": found.reason,
        "nbytes": {tier.value: best.nbytes(tier) for tier in Tier if best.nbytes(tier)},
        "runner_up": None if found.runner_up is None else str(found.runner_up.layout),
    }  # fmt: skip
    config[SECTION] = section(best.layout, offload_path) | {"seq": found.profile.seq, "prediction": prediction}
    Path(path).write_text(json.dumps(config, indent=2) + "\n")
    return config


def section(layout: Layout, offload_path: str | None = None) -> dict[str, object]:
    """Return zeroshard's own section of the file."""
    _check(layout, offload_path)
    kept = CHECKPOINTING[layout.checkpointing]
    return {
        "shard": layout.options(offload_path), "mesh": layout.mesh, "node_size": min(layout.node_size, math.prod(layout.mesh.values())),
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.micro_batches, "global_batch": layout.sequences,
        "checkpoint_activations": {"offload": "none"} | (kept if isinstance(kept, dict) else {}) if kept else None,
    }  # fmt: skip


def deepspeed_config(layout: Layout, offload_path: str | None = None) -> dict[str, object]:
    """Return the layout as a DeepSpeed configuration, as far as it can say it: neither the mesh nor where gradients rest."""
    _check(layout, offload_path)
    zero: dict[str, object] = {"stage": layout.stage}
    for name, tier in (("offload_optimizer", layout.optimizer), ("offload_param", layout.parameter)):
        if tier is not Tier.DEVICE:
            zero[name] = {"device": "cpu"} if tier is Tier.HOST else {"device": "nvme", "nvme_path": offload_path}
    if layout.hpz > 1:
        zero["zero_hpz_partition_size"] = layout.hpz
    if layout.shard_size is not None and layout.stage == 3:
        zero["mics_shard_size"] = layout.shard_size
    for name in ("weights", "gradients"):
        if getattr(layout, f"quantized_{name}") is not None and layout.stage == 3:
            zero[f"zero_quantized_{name}"] = True
    config: dict[str, object] = {
        "train_batch_size": layout.sequences, "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches, "zero_optimization": zero,
    }  # fmt: skip
    if layout.precision != "fp32":
        config[layout.precision] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": _GRADIENTS[layout.gradient_itemsize]}
    return config


def _check(layout: Layout, offload_path: str | None) -> None:
    if offload_path is None and Tier.DISK in layout.tiers:
        raise ConfigError(f"offload_path: this layout keeps states on disk ({layout}): name a folder on a local disk.")
