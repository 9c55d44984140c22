"""The load-balancing loss of Transformers' mixtures, of the tokens of all data-parallel ranks.

    loss = E * sum over experts of f * P        f: choices of the expert / tokens        P: mean of its probability over tokens

It is no mean over tokens, so that the mean of the ranks' losses is not the loss of all tokens: an expert that is popular on one rank
and not on another is balanced. Inside the forward of a model with divided experts, the ranks therefore add up choices,
probabilities and tokens first. Each rank's gradient is that of its own probabilities, times the number of ranks: the mean over
ranks, which ZeRO takes of all gradients, is the gradient of one process with all tokens.

Source: Switch Transformers, arXiv 2101.03961, equations 4 to 6.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.autograd import Running
from ..zero.along_axis import AlongAxis, Line

_NAME = "load_balancing_loss_func"  # Transformers' function, in the module of each model that has the loss
_running = Running()  # the forwards of models with divided experts, each with its model


def over_all_ranks(model: nn.Module) -> None:
    """Let the load-balancing losses that a model's modules compute in their forwards be those of all data-parallel ranks."""
    for module in model.modules():
        source = sys.modules.get(type(module).__module__)
        if hasattr(source, _NAME) and any(isinstance(each, AlongAxis) for each in module.modules()):
            _replace(source)  # type: ignore[arg-type]  # it is there
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, args: object) -> None:
    _running.enter(module, module)


def _leave(module: nn.Module, args: object, output: object) -> None:
    _running.leave(module)


def _replace(source: ModuleType) -> None:
    """Replace the function in its module by one that, inside the forward of a model with divided experts, uses all tokens."""
    original: Callable = getattr(source, _NAME)
    if hasattr(original, "__wrapped__"):  # done for an earlier model
        return

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        models = _running.values()
        if not models:
            return original(*args, **kwargs)
        line = next(each.line for each in models[-1].modules() if isinstance(each, AlongAxis))
        return balance_loss(line, *args, **kwargs)

    setattr(source, _NAME, chosen)


def balance_loss(
    line: Line, gate_logits: object, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor | int:
    """Return the load-balancing loss of the tokens of all ranks (collective); 0 without logits.

    gate_logits: of each layer, (tokens, num_experts). attention_mask: (batch, seq), 0 for tokens that do not count.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    counts, mass = (torch.zeros(num_experts, device=device) for _ in range(2))
    tokens = torch.zeros((), device=device)
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    for logits in gate_logits:
        chances = logits.to(device).softmax(dim=-1)
        chosen = chances.topk(top_k, dim=-1).indices
        weights = torch.ones(len(chances), device=device) if mask is None else mask
        counts = counts.index_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        mass = mass + (chances.float() * weights.unsqueeze(-1)).sum(dim=0)
        tokens = tokens + weights.sum()
    mine = torch.cat([counts, mass.detach(), tokens.view(1)]).cpu().double()
    told = line.everyone.exchange(mine.numpy().tobytes(), "load-balancing loss: choices and probabilities")
    total = torch.stack([torch.frombuffer(bytearray(each), dtype=torch.float64) for each in told]).sum(0).to(device)
    share, chance = (part / total[-1] for part in total[:-1].split(num_experts))
    own = mass * (len(told) / total[-1]).float()
    return (share.float() * (own + (chance.float() - own).detach())).sum() * num_experts
