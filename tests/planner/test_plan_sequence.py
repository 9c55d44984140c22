"""Plans of an axis sp: activations of 1 / sp, and the bytes of the all-to-alls by formula."""

import functools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.utils.option_names import TILES

LAYERS, HEADS, DIM, TOKENS, ROWS, VOCAB = 2, 4, 64, 128, 2, 64
LLAMA = LlamaConfig(
    use_cache=False,
    vocab_size=VOCAB,
    hidden_size=DIM,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
)
MODELS = {
    "gpt": (functools.partial(GPT, GPTConfig(64, TOKENS, DIM, LAYERS, HEADS, ngram_rows=16)), HEADS, 0),
    "llama": (functools.partial(LlamaForCausalLM, LLAMA), 2, 8),  # positions are exchanged: 8 bytes a token
}


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("name", MODELS)
def test_activations_and_bytes_of_a_plan(name, size):
    """From 8 ranks on keys and values are gathered, of which each rank then keeps those of all tokens for its heads."""
    make, kv, positions = MODELS[name]
    one, many = (zs.plan(make, axes={"dp": 2, **along}, batch=(ROWS, TOKENS), stage=3) for along in ({}, {"sp": size}))
    tokens = ROWS * TOKENS // size
    among = math.gcd(HEADS, size)
    of_head = 2 * LAYERS * 2 * (DIM // HEADS) * tokens * 4 // among  # forward and backward, two tensors
    of_keys = of_head * max(kv, among) * (size - 1)
    assert many.sent["sp"] == of_head * HEADS * (among - 1) + of_keys + positions * tokens * (size - 1)
    assert many.tokens == tokens and many.ranks == 2 * size
    kept = [sum(nbytes for unit, nbytes in plan.activations.items() if unit) for plan in (one, many)]
    gathered = 2 * LAYERS * max(kv, among) // among * ROWS * TOKENS * (DIM // HEADS) * 4 if among < size else 0
    # the exchanged output of attention, and repeated keys and values
    assert 0.95 / size <= (kept[1] - gathered) / kept[0] < 1.6 / size
    assert f"dp=2, sp={size}" in str(many) and "all-to-all" in many.table()


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_beside_tp_and_pp_a_rank_exchanges_the_heads_and_layers_that_it_has(name, axes):
    make, kv, positions = MODELS[name]
    tp, pp = axes.get("tp", 1), axes.get("pp", 1)
    found = zs.plan(make, axes={**axes, "sp": 2}, batch=(ROWS, TOKENS), stage=1, micro_batches=2)
    tokens = 2 * ROWS * TOKENS // 2  # two micro-batches over two ranks
    exchanged = 4 * 2 * (LAYERS // pp) * (2 * HEADS // tp + 2 * max(kv // tp, 2)) * (DIM // HEADS) * tokens
    assert found.sent["sp"] == exchanged // 2 + positions * tokens
    assert found.tokens == tokens
    hidden = ROWS * TOKENS // 2 * DIM * 4  # bytes between stages, for each micro-batch
    assert pp == 1 or found.sent["pp"] == 2 * hidden


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 1, "sp": 2}], ids=str)
def test_attention_of_transformers_is_planned_without_a_mask(axes):
    """One of tokens x tokens would be made for packed sequences, of which fake tensors can not tell whether there are any."""
    plans = [zs.plan(MODELS["llama"][0], axes=axes, batch=(1, tokens), stage=3) for tokens in (256, 1024)]
    kept = [sum(plan.activations.values()) for plan in plans]
    assert kept[1] / kept[0] < 4.5
    works = [task.attention for task in plans[1].trace.tasks if task.attention is not None]
    assert works and all(work.causal for work in works)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 1, "sp": 2}], ids=str)
def test_tiles_hold_less_and_compute_again_what_long_context_does(axes):
    make, tokens, tile = MODELS["llama"][0], 1024, 64
    options = {"axes": axes, "batch": (1, tokens), "stage": 3, "checkpointing": True}
    whole, tiled = (zs.plan(make, **options, tiles=each) for each in ({}, dict.fromkeys(TILES, tile)))
    own = tokens // axes.get("sp", 1)
    # the block's repeated forward ends before the last tile of its MLP; the logits of the last token are those that are returned
    again = LAYERS * 3 * DIM * LLAMA.intermediate_size * (own - tile) + own * DIM * VOCAB
    assert tiled.trace.flops - whole.trace.flops == 2 * (again + DIM * VOCAB)
    assert tiled.peak("device", "backward") < 0.8 * whole.peak("device", "backward")
    assert tiled.sent == whole.sent
    with pytest.raises(zs.ConfigError, match="tiles: expected whole numbers.*'tokens'"):
        zs.plan(make, **options, tiles={"tokens": 8})
    with pytest.raises(zs.ConfigError, match="tiles: mlp_tokens are of zs.long_context, for axes dp and sp"):
        zs.plan(make, **(options | {"axes": {"tp": 2}}), tiles={"mlp_tokens": 8})


def test_what_does_not_go_with_sp_is_refused():
    with pytest.raises(zs.ConfigError, match="loss: with an axis sp"):
        zs.plan(MODELS["gpt"][0], axes={"sp": 2}, batch=(1, TOKENS), loss=lambda model, tokens: torch.zeros(()))
