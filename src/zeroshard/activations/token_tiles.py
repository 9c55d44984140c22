"""MLPs and the loss of a language model in tiles of tokens: the widest activations exist for one tile at a time.

    MLP     (tokens, width) -> (tokens, 4 width) -> (tokens, width)     each tile is a checkpoint: computed again in backward
    loss    (tokens, width) -> (tokens, vocabulary) -> one number       likewise; logits of all tokens never exist

Both compute each token by itself. So outputs equal those without tiles, up to the choice of kernel; gradients of weights are sums
over tiles, with one rounding more for each tile. The methods are replaced in the instances' __dict__, so names and state dicts stay.
Source: Arctic Long Sequence Training, arXiv 2506.13996, section 3.1 (TiledMLP, tiled logits and loss).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError
from ..utils.torch_compat import disable_current_modes, faking
from ..utils.transformers_compat import is_own_loss
from .cross_entropy import tiled_cross_entropy

_IGNORED = -100
_LOGIT_OPTIONS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def tile_mlps(model: nn.Module, tokens: int) -> list[str]:
    """Compute the MLPs of a model, modules whose class is called ...MLP, `tokens` at a time; return their names."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("MLP")]
    for _, module in found:
        module.__dict__["forward"] = functools.partial(_mlp_forward, module, tokens)
    return [name for name, _ in found]


def tile_loss(model: nn.Module, tokens: int) -> str:
    """Compute the loss of Transformers' causal language model in `model` for `tokens` at a time; return the class's name.

    Where labels are given, the output's `logits` are then those of the last token alone. Raises ConfigError for other models.
    """
    causal = next((module for module in model.modules() if _is_causal_lm(module)), None)
    if causal is None:
        raise ConfigError(
            f"loss_tokens: {type(model).__name__} has no language model of Transformers whose loss is the cross-entropy of the next token: "
            "pass loss_tokens=None, and compute the loss by zs.tiled_cross_entropy of a head that zs.tile has cut."
        )
    changed = next((each for each in _LOGIT_OPTIONS if getattr(causal.config, each, None) not in (None, 1)), None)
    if changed is not None:
        raise ConfigError(_changed(f"{type(causal).__name__} (config.{changed})"))
    causal.__dict__["forward"] = functools.partial(_causal_forward, causal, tokens)
    return type(causal).__name__


def untile(model: nn.Module) -> None:
    """Undo `tile_mlps` and `tile_loss`."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, functools.partial) and forward.func in (_mlp_forward, _causal_forward):
            del module.__dict__["forward"]


def computes_loss_in_tiles(module: nn.Module) -> bool:
    """Return whether `tile_loss` has changed a module's forward."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _causal_forward


def _is_causal_lm(module: Any) -> bool:
    return (
        hasattr(type(module), "loss_function")
        and is_own_loss(module.loss_function)
        and _is_of_next_token(module.loss_function)
        and module.get_output_embeddings() is not None
        and "logits_to_keep" in inspect.signature(type(module).forward).parameters
    )


def _is_of_next_token(loss: Callable) -> bool:
    """Return whether a loss function of Transformers computes on three tokens what the cross-entropy of the next token is."""
    with disable_current_modes():  # a plan has tensors without values
        logits = torch.arange(15, dtype=torch.float32, device="cpu").sin().view(1, 3, 5)
        labels = torch.tensor([[0, 3, 1]], device="cpu")
        wanted = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        try:
            return torch.allclose(loss(logits=logits, labels=labels, vocab_size=5), wanted)
        except Exception:  # it takes other arguments
            return False


def _mlp_forward(module: nn.Module, tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Compute the forward of an MLP of one argument, (..., tokens, width), in tiles."""
    forward = functools.partial(type(module).forward, module)
    if kwargs or len(args) != 1 or args[0].ndim < 2 or args[0].shape[-2] <= tokens:
        return forward(*args, **kwargs)
    return torch.cat([_checkpointed(forward, part.contiguous()) for part in args[0].split(tokens, dim=-2)], dim=-2)


def _checkpointed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args), whose activations are not kept: backward computes them again."""
    return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)


def _causal_forward(model: Any, tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a causal language model. With labels it computes the loss by `_loss`, and logits of the last token only."""
    forward = type(model).forward
    given = {**dict(zip(list(inspect.signature(forward).parameters)[1:], args, strict=False)), **kwargs}
    if given.get("labels") is None or given.get("logits_to_keep"):
        return forward(model, *args, **kwargs)
    kept: list[Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _module, _args, output: kept.append(output[0]))
    own, before = set(model.__dict__), model.loss_function
    model.loss_function = functools.partial(_loss, model.get_output_embeddings(), tokens, kept)
    added = model.__dict__.keys() - own  # where the model keeps a loss that was set
    try:
        return forward(model, **(given | {"logits_to_keep": 1}))
    finally:
        handle.remove()
        model.loss_function = before
        for name in added:
            del model.__dict__[name]


def _loss(
    head: nn.Module, tokens: int, kept: list[Tensor], logits: Tensor, labels: Tensor, vocab_size: int,
    num_items_in_batch: Tensor | None = None, ignore_index: int = _IGNORED, shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Return the loss that Transformers' ForCausalLMLoss computes, from the hidden states (batch, tokens, width) in `kept`.

    logits: those of the last token, by which models are found that change the output of their head.
    """
    hidden = kept.pop()
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    with torch.no_grad():
        if not faking() and not torch.allclose(head(hidden[:, -1:]).float(), logits.float(), rtol=1e-2, atol=1e-3):
            raise ConfigError(_changed("the model"))
    part = functools.partial(_part, head, ignore_index)
    pairs = zip(hidden.split(tokens, dim=1), shift_labels.split(tokens, dim=1), strict=True)
    total = torch.stack([_checkpointed(part, *pair) for pair in pairs]).sum()
    return total / ((shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def _changed(what: str) -> str:
    return (
        f"loss_tokens: {what} changes the logits of its head (a soft cap, a scale), which a loss in tiles would leave out: pass "
        "loss_tokens=None."
    )


def _part(head: nn.Module, ignore_index: int, hidden: Tensor, labels: Tensor) -> Tensor:
    return tiled_cross_entropy(hidden, head, labels, ignore_index=ignore_index, reduction="sum")
