"""The reference GPT: names that must not change, and the parts that the case studies add: ALiBi, biases, an embedding's norm."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.models.gpt import Attention, alibi_slopes
from zeroshard.testing import run_threads

PLAIN = GPTConfig(vocab_size=31, seq_len=16, dim=24, layers=2, heads=4, ngram_rows=8)
BLOOM = GPTConfig(
    vocab_size=31, seq_len=16, dim=24, layers=2, heads=6, positions="alibi", embedding_norm=True, bias=True, tied=True
)  # fmt: skip
TOKENS = torch.arange(32).view(2, 16) % 31


def _seeded(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def test_the_plain_model_has_the_names_it_always_had():
    model = _seeded(PLAIN)
    names = [name for name, _ in model.named_parameters()]
    block = ["attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.out"]
    expected = ["embedding", "position", *(f"ngrams.{i}" for i in range(3))]
    expected += [*(f"blocks.{i}.{name}" for i in range(2) for name in block), "norm", "head"]
    assert names == [f"{name}.weight" for name in expected]


def test_slopes_are_those_of_the_paper():
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8) and twelve[8:] == alibi_slopes(16)[::2][:4]
    assert len(alibi_slopes(112)) == 112 and alibi_slopes(1) == [2.0**-8]


def test_alibi_is_a_penalty_for_distance():
    """Against the definition, score by score."""
    torch.manual_seed(1)
    attention, x = Attention(BLOOM), torch.randn(2, 5, 24)
    q, k, v = attention.qkv(x).view(2, 5, 3, 6, 4).permute(2, 0, 3, 1, 4)
    mixed = torch.zeros(2, 6, 5, 4)
    for head, slope in enumerate(alibi_slopes(6)):
        for i in range(5):
            scores = [q[:, head, i] @ k[:, head, j].T / 2 for j in range(i + 1)]  # sqrt(head_dim) = 2
            row = torch.stack([score.diagonal() - slope * (i - j) for j, score in enumerate(scores)], -1).softmax(-1)
            mixed[:, head, i] = torch.einsum("bj,bjd->bd", row, v[:, head, : i + 1])
    expected = attention.out(mixed.transpose(1, 2).reshape(2, 5, 24))
    torch.testing.assert_close(attention(x), expected)


def test_alibi_and_transformers_bloom_compute_the_same():
    """The whole model, with weights put where Bloom has them (its qkv is interleaved head by head)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=31, hidden_size=24, n_layer=2, n_head=6)
    config._attn_implementation = "eager"
    ours, theirs = _seeded(BLOOM).eval(), transformers.BloomForCausalLM(config).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    inside = {
        "attention_norm": "input_layernorm", "attention.out": "self_attention.dense", "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.out": "mlp.dense_4h_to_h",
    }  # fmt: skip
    pairs = {"embedding": "word_embeddings", "embedding_norm": "word_embeddings_layernorm", "norm": "ln_f"}
    pairs |= {f"blocks.{i}.{a}": f"h.{i}.{b}" for i in range(2) for a, b in inside.items()}
    for mine, other in pairs.items():
        theirs.transformer.get_submodule(other).load_state_dict(ours.get_submodule(mine).state_dict())
    for block, other in zip(ours.blocks, theirs.transformer.h, strict=True):
        for name, value in block.attention.qkv.named_parameters():
            interleaved = value.detach().unflatten(0, (3, 6, 4)).transpose(0, 1).flatten(0, 2)
            other.self_attention.query_key_value.get_parameter(name).data.copy_(interleaved)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [PLAIN, BLOOM], ids=["plain", "bloom"])
def test_attention_computes_some_of_its_heads(config):
    """As its docstring tells those who cut it: the parts of all heads add up to the whole."""
    torch.manual_seed(2)
    whole, x = Attention(config), torch.randn(2, 5, 24)
    for name, value in whole.named_parameters():
        nn.init.normal_(value) if name != "out.bias" else nn.init.zeros_(value)
    total, half, width = 0, config.heads // 2, 24 // config.heads
    for first in (0, half):
        part, columns = copy.deepcopy(whole), slice(first * width, (first + half) * width)
        part.heads, part.first_head = half, first
        for name, value in whole.qkv.named_parameters():
            kept = torch.cat([rows[columns] for rows in value.detach().chunk(3)])
            part.qkv.register_parameter(name, nn.Parameter(kept))
        part.out.weight = nn.Parameter(whole.out.weight.detach()[:, columns])
        total = total + part(x)
    torch.testing.assert_close(total, whole(x))


def test_initial_values_of_biases_and_the_width_of_weights():
    model = _seeded(GPTConfig(vocab_size=256, dim=64, layers=2, heads=4, bias=True, init_std=0.1))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" not in name:
            assert float(value.detach().std()) == pytest.approx(0.1 / (2 if name.endswith("out.weight") else 1), rel=0.1), name
    assert model.head.bias is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_alibi_trains_in_each_precision(precision):
    base = _seeded(BLOOM)

    def rank(_):
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zs.shard(model, optimizer, stage=1, precision=precision)
        losses = []
        for _ in range(8):
            loss = model(TOKENS, TOKENS.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    (losses, *_) = run_threads(2, rank)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"positions": "rotary"}, "positions: expected one of learned, alibi, got 'rotary'"),
        ({"init_std": 0.0}, "init_std: expected a positive"),
    ],
)
def test_a_wrong_option_is_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**wrong)


def test_future_tokens_are_not_seen():
    model, changed = _seeded(BLOOM).eval(), TOKENS.clone()
    changed[:, -1] = 7
    assert torch.equal(model(TOKENS)[:, :-1], model(changed)[:, :-1]) and F.mse_loss(model(TOKENS), model(changed)) != 0
