"""Attention over more ranks along sp than the heads can be shared among: keys and values are gathered."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import seeding
from mesh_kit import on_ranks
from sequence_kit import (
    LAYERS,
    SMALL,
    VOCAB,
    Plain,
    adam,
    assert_equals_one_process,
    batches,
    compare,
    one_process,
    trained,
    transformers,
)
from torch import nn

import zeroshard as zs
from zeroshard.activations.causal import LAST_QUERIES
from zeroshard.activations.ulysses import SequenceParallel
from zeroshard.testing import run_threads
from zeroshard.zero.runtime import runtime_of

DIM = 8  # of a head


@functools.cache
def model_of(kind: str, heads: int, kv: int = 2) -> nn.Module:
    """kind: a model, or Llama with an attention function."""
    options = SMALL | {"hidden_size": heads * DIM, "num_attention_heads": heads, "num_key_value_heads": kv}
    with seeding(0):
        if kind == "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=VOCAB, n_embd=heads * DIM, n_layer=LAYERS, n_head=heads, n_positions=64, **off, **ends
                )
            )
        if kind == "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options, head_dim=DIM))
        if kind == "gpt_oss":  # attention sinks, windows in every other layer
            more = {"head_dim": DIM, "num_local_experts": 4, "sliding_window": 4}
            return transformers.GptOssForCausalLM(transformers.GptOssConfig(**options, **more))
        if kind == "mistral":
            return transformers.MistralForCausalLM(transformers.MistralConfig(**options, sliding_window=5))
        if kind == "bert":
            options |= {"num_key_value_heads": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertForMaskedLM(transformers.BertConfig(**options))
        chosen = {} if kind == "llama" else {"attn_implementation": kind}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, **chosen))


@pytest.mark.parametrize(
    "kind, heads, kv, size",
    [
        ("llama", 6, 2, 4),  # two exchange heads, two groups
        ("eager", 6, 6, 4),
        ("llama", 6, 3, 4),  # key and value heads are repeated
        ("gpt2", 3, 3, 2),  # no heads are exchanged
        ("gpt2", 3, 3, 4),
        ("qwen3", 8, 2, 4),
        ("qwen3", 8, 2, 16),
        ("qwen3", 6, 2, 9),  # three exchange heads, three groups
        ("gpt_oss", 6, 2, 4),
        ("mistral", 6, 2, 4),
    ],
)
def test_models_equal_one_process(kind, heads, kv, size):
    assert_equals_one_process(model_of(kind, heads, kv), batches(tokens=2 * size, steps=3), {"sp": size}, stage=3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dp_beside_sp_and_recomputed_blocks_equal_one_process(stage):
    model = copy.deepcopy(model_of("llama", 6))
    model.gradient_checkpointing_enable({"use_reentrant": stage == 0})
    model.enable_input_require_grads()
    assert_equals_one_process(model.train(), batches(rows=4), {"dp": 2, "sp": 4}, stage=stage, micro=2)
