"""The work that every contender does: one model, one optimizer, one stream of batches.

Weights come from `seed` alone, batches from (seed, step, rank), so two contenders at the same step hold the
same numbers and their losses can be compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.models.gpt import GPT, GPTConfig

from .plan import Workload


def build_model(workload: Workload) -> nn.Module:
    """The GPT with the weights of the seed, whole, on the workload's device, in fp32 (meta: no weights, nowhere)."""
    torch.manual_seed(workload.seed)
    with torch.device("meta" if workload.meta else "cpu"):
        model = GPT(GPTConfig(**dataclasses.asdict(workload.shape)))
    if not workload.meta:
        model.to(workload.device)
    if workload.checkpoint:
        for block in blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def build_optimizer(parameters: Iterable[Tensor], workload: Workload) -> torch.optim.Optimizer:
    """Fused AdamW, for every contender: the kernel must not decide between libraries."""
    return torch.optim.AdamW(parameters, **optimizer_options(workload))


def optimizer_options(workload: Workload) -> dict[str, Any]:
    """Keyword arguments of AdamW, for wrappers that build the optimizer themselves."""
    return {"lr": workload.lr, "weight_decay": 0.1, "fused": True}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, which FSDP2's documentation says to shard one by one."""
    return [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module.children()]


def batch(workload: Workload, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank and step, each (sequences, seq_len).

    Small tokens are likelier (u^3), so the loss falls within a few steps, and an optimizer that does not
    step, or steps with other settings, shows in the final loss.
    """
    s = workload.shape
    generator = torch.Generator().manual_seed(workload.seed + 1_000_003 * step + 7919 * rank)
    uniform = torch.rand(workload.sequences, s.seq_len + 1, generator=generator)
    tokens = (uniform**3 * s.vocab_size).long().clamp_(max=s.vocab_size - 1).to(workload.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
