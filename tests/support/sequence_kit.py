"""Tiny models of Transformers and a module of its own, trained in one process and over the ranks of an axis sp.

Adam has eps=1e-6: the bias of GPT-2's keys has no gradient but noise of 1e-9, which the default of 1e-8 would make a step.
"""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import seeding
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

transformers = pytest.importorskip("transformers")
VOCAB, WIDTH, HEADS, LAYERS, STEPS = 37, 32, 4, 2, 6
SMALL = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@functools.cache
def model_of(kind: str, heads: int = HEADS, kv: int = 2, **other) -> nn.Module:
    """kind: a model, or Llama with an attention function or an option. heads: of queries, each of 8 numbers; kv: of keys and values.

    other: entries of its configuration.
    """
    small = SMALL | {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv} | other
    with seeding(0):
        if kind == "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=small["vocab_size"],
                    n_embd=8 * heads,
                    n_layer=small["num_hidden_layers"],
                    n_head=heads,
                    n_positions=64,
                    **off,
                    **ends,
                )
            )
        if kind == "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, head_dim=8))
        if kind == "mixtral":
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=4))
        if kind == "qwen3moe":  # the first half of its layers has no experts
            dense = list(range(small["num_hidden_layers"] // 2))
            options = small | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options, mlp_only_layers=dense))
        if kind == "gpt_oss":  # attention sinks, windows in every other layer
            options = small | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4}
            return transformers.GptOssForCausalLM(transformers.GptOssConfig(**options))
        if kind == "afmoe":  # calls its attention function by names of arguments
            options = SMALL | {"head_dim": 8, "num_local_experts": 4, "moe_intermediate_size": 16, "sliding_window": 4}
            return transformers.AfmoeForCausalLM(transformers.AfmoeConfig(**options))
        if kind == "opt":
            options = {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0, "pad_token_id": 1}
            return transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL | options))
        if kind == "mistral":  # every layer has a sliding window
            return transformers.MistralForCausalLM(transformers.MistralConfig(**small, sliding_window=5))
        if kind == "bert":
            options = small | {"num_key_value_heads": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertForMaskedLM(transformers.BertConfig(**options))
        options = {"attn_implementation": "eager"} if kind == "eager" else {}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **options))


def batches(rows: int = 2, tokens: int = 16, steps: int = STEPS, **entries: torch.Tensor) -> list[dict]:
    """Batches of whole sequences. entries: what each has beside ids and labels."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCAB, (rows, tokens), generator=generator) for _ in range(steps)]
    return [{"input_ids": each, "labels": each.clone(), **entries} for each in ids]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)


def one_process(model: nn.Module, data: list[dict]) -> tuple[list[float], dict]:
    model, losses = copy.deepcopy(model), []
    optimizer = adam(model)
    for batch in data:
        loss = model(**batch, use_cache=False).loss if hasattr(model, "config") else model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def trained(rank: int, model: nn.Module, data: list[dict], mesh: dict, micro: int = 1, held: bool = False, on=None, **options):
    """(losses, weights) of one rank: of its rows along dp, in `micro` micro-batches, its tokens along sp.

    held: sums of micro-batches are held back. on: the mesh, where it is a DeviceMesh.
    """
    model, optimizer = zs.shard(model, adam(model), mesh=on or mesh, **options)
    losses, place = [], rank // mesh["sp"]
    for whole in data:
        rows = {name: value.chunk(mesh.get("dp", 1))[place] for name, value in whole.items()}
        for number in range(micro):
            batch = zs.shard_sequence({name: value.chunk(micro)[number] for name, value in rows.items()}, model)
            with zs.accumulate(model) if held and number < micro - 1 else contextlib.nullcontext():
                loss = model(**batch).loss if hasattr(model, "config") else model(**batch)
                zs.backward(model, loss, weight=batch["num_items_in_batch"])
            losses.append(loss.item() * batch["num_items_in_batch"])
        optimizer.step()
        optimizer.zero_grad()
    labels = sum((batch["labels"][:, 1:] != -100).sum().item() for batch in data) / len(data)
    weights = zs.full_state_dict(model)
    zs.close(model)
    return [sum(losses[i : i + micro]) / labels for i in range(0, len(losses), micro)], weights


def assert_equals_one_process(model: nn.Module, data: list[dict], mesh: dict, close: float = 1e-5, **options) -> None:
    world = math.prod(mesh.values())
    models = [copy.deepcopy(model) for _ in range(world)]
    results = run_threads(world, lambda rank: trained(rank, models[rank], data, mesh, **options))
    compare(results, one_process(model, data), close)


def compare(results: list, expected: tuple, close: float = 1e-5) -> None:
    losses = [sum(each) for each in zip(*(result[0] for result in results), strict=True)]
    assert losses == pytest.approx(expected[0], rel=max(1e-6, close / 10))
    for name, value in expected[1].items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=close, msg=lambda text, name=name: f"{name}: {text}")


class Block(nn.Module):
    """Attention of 4 query heads, and `kv` key and value heads."""

    def __init__(self, kv: int, mask: str) -> None:
        super().__init__()
        self.kv, self.mask = kv, mask
        self.into, self.out = nn.Linear(WIDTH, WIDTH + 2 * 8 * kv), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.into(x).split([WIDTH, 8 * self.kv, 8 * self.kv], -1)
        )
        if self.mask == "causal":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv < HEADS)
        else:  # of whole sequences, with a slope for each head
            slopes = torch.arange(1.0, 5.0).view(4, 1, 1) * -torch.arange(16).sub(torch.arange(16)[:, None]).abs()
            out = F.scaled_dot_product_attention(q, k, v, slopes[None], scale=0.3)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """`model(**batch)` is the loss; blocks are checkpointed."""

    def __init__(self, kv: int = 4, mask: str = "causal") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block(kv, mask) for _ in range(2)), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, labels, position_ids=None, shift_labels=None, num_items_in_batch=None):
        position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        total = F.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return total / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
