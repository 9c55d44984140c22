"""zs.long_context: train a language model on sequences that do not fit, in one call.

tokens of a sequence   cut over the ranks along sp               all activations of a rank: 1 / sp
inputs of blocks       kept on the host, all else recomputed     activations from forward to backward: none on the device
MLPs and the loss      computed in tiles of tokens               their activations while they compute: of one tile
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..activations.checkpoint import checkpoint_activations
from ..activations.token_tiles import tile_loss, tile_mlps, untile
from ..api import shard
from ..config import Offload
from ..errors import ConfigError
from ..seam import engine_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModelT = TypeVar("ModelT", bound=nn.Module)


def long_context(
    model: ModelT, optimizer: torch.optim.Optimizer | None = None, *, mesh: DeviceMesh | Mapping[str, int] | None = None,
    loss_tokens: int | None = 1024, mlp_tokens: int | None = 1024, checkpoints: Offload | str | None = "cpu",
    path: str | None = None, **options: Any,
) -> tuple[ModelT, torch.optim.Optimizer | None]:  # fmt: skip
    """Shard a model for long sequences; return model and optimizer, as zs.shard does (collective).

        model, optimizer = zs.long_context(model, optimizer, mesh={"dp": 2, "sp": 4}, stage=3, precision="bf16")
        for batch in zs.SequenceLoader(loader, model):
            loss = model(**batch).loss
            zs.backward(model, loss, weight=batch["num_items_in_batch"])

    Args:
        mesh: as for zs.shard; ranks along its axis sp have other tokens of the same sequences.
        loss_tokens: compute logits and loss for so many tokens of each sequence at a time (None: of all at once). The output's
            `logits` are then those of the last token.
        mlp_tokens: compute MLPs for so many tokens of each sequence at a time (None: of all at once).
        checkpoints: where the inputs of blocks rest between forward and backward, as `offload` of zs.checkpoint_activations:
            "cpu", "nvme" (in `path`), or None for the device.
        options: those of zs.shard.

    The notes of zs.report say what was done. Raises ConfigError if the model does not allow one of these changes, and names the
    argument that leaves it out; then nothing is changed. Source: Arctic Long Sequence Training, arXiv 2506.13996.
    """
    for name, value in (("loss_tokens", loss_tokens), ("mlp_tokens", mlp_tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: expected a positive number of tokens, or None, got {value!r}.")
    notes, checkpointed = [], False
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    try:
        if config is not None and cached is not None:
            config.use_cache = False  # a block that is computed again would append to the cache twice
        if mlp_tokens is not None:
            mlps = tile_mlps(model, mlp_tokens)
            if not mlps:
                raise ConfigError(
                    f"mlp_tokens: {type(model).__name__} has no module whose class is called ...MLP: pass mlp_tokens=None."
                )
            notes.append(f"long context: {len(mlps)} MLPs compute {mlp_tokens} tokens at a time")
        if loss_tokens is not None:
            notes.append(f"long context: {tile_loss(model, loss_tokens)} computes logits of {loss_tokens} tokens at a time")
        checkpoint_activations(model, offload=checkpoints, path=path)
        checkpointed = True
        where = (
            "the device" if checkpoints is None else f"{Offload.of(checkpoints, path, 'checkpoints', option='path').tier.value}"
        )
        notes.append(f"long context: inputs of blocks are checkpoints, on {where}")
        sharded = shard(model, optimizer, mesh=mesh, **options)
    except BaseException:
        if checkpointed:
            checkpoint_activations(model, off=True)
        untile(model)
        if config is not None and cached is not None:
            config.use_cache = cached
        raise
    for note in notes:
        engine_of(model).note(note)
    return sharded
