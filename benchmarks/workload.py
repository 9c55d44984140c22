"""The model, the optimizer and the stream of batches, which are the same for every contender.

Weights depend only on `seed`, batches on (seed, step, rank), so two contenders that compute correctly have the
same losses at each step.
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
    """Build the whole GPT in fp32 on the workload's device, with that device's weights of the seed; with `meta`, on the meta device."""
    torch.manual_seed(workload.seed)
    # not on the host: a GPU draws billions of numbers in a second, a core in minutes
    with torch.device("meta" if workload.meta else workload.device):
        model = GPT(GPTConfig(**dataclasses.asdict(workload.shape)))
    if workload.checkpoint:
        for block in blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def build_llama(vocab: int, dim: int, hidden: int, layers: int, heads: int, kv_heads: int, **options: Any) -> nn.Module:
    """Build a Llama of Transformers on the current device. hidden: width of its MLPs; options: others of LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, **options,
    ))  # fmt: skip


def build_optimizer(parameters: Iterable[Tensor], workload: Workload) -> torch.optim.Optimizer:
    """Build a fused AdamW; all contenders use it, so that they differ in the library only, not in the kernel."""
    return torch.optim.AdamW(parameters, **optimizer_options(workload))


def optimizer_options(workload: Workload) -> dict[str, Any]:
    """Return keyword arguments of AdamW, also for libraries that build the optimizer themselves."""
    return {"lr": workload.lr, "weight_decay": 0.1, "fused": True}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of the model; FSDP2's documentation advises to apply fully_shard to each."""
    return [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module.children()]


def batch(workload: Workload, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one rank and step, each (sequences, seq_len).

    Small token ids are likelier (u^3), so the loss falls within a few steps, and the final loss shows an
    optimizer that does not step, or steps with other settings.
    """
    s = workload.shape
    generator = torch.Generator().manual_seed(workload.seed + 1_000_003 * step + 7919 * rank)
    uniform = torch.rand(workload.sequences, s.seq_len + 1, generator=generator)
    tokens = (uniform**3 * s.vocab_size).long().clamp_(max=s.vocab_size - 1).to(workload.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
