"""zs.long_context: tiles of tokens, offloaded checkpoints and an axis sp together equal one process."""

import copy

import pytest
import torch
from sequence_kit import SMALL, VOCAB, Plain, adam, batches, compare, model_of, one_process, transformers
from torch import nn

import zeroshard as zs
from zeroshard.activations.token_tiles import tile_loss, tile_mlps, untile
from zeroshard.testing import run_threads


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_long_context_equals_one_process_and_reports_what_it_did(kind):
    """Tiles of 3 tokens, of 8 that a rank has."""
    data, models = batches(), [copy.deepcopy(model_of(kind)) for _ in range(2)]

    def on_rank(rank: int):
        tiles = {"loss_tokens": 3, "mlp_tokens": 3}
        model, optimizer = zs.long_context(models[rank], adam(models[rank]), mesh={"sp": 2}, stage=3, **tiles)
        losses = []
        for batch in zs.SequenceLoader(data, model):
            out = model(**batch)
            zs.backward(model, out.loss, weight=batch["num_items_in_batch"])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.item() / 2)
            assert out.logits.shape == (2, 1, VOCAB)
        return losses, zs.full_state_dict(model), str(zs.report(model))

    results = run_threads(2, on_rank)
    compare(results, one_process(model_of(kind), data))
    for line in (
        "2 MLPs compute 3 tokens",
        "logits of 3 tokens",
        "inputs of blocks are checkpoints, on host",
        "2 ranks along sp",
    ):
        assert line in results[0][2]


def test_an_mlp_in_tiles_takes_tokens_without_a_batch_and_other_calls_as_they_are():
    class OneMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x, gate=None):
            return torch.tanh(self.up(x)) * (1 if gate is None else gate)

    whole = nn.Sequential(OneMLP())
    tiled = copy.deepcopy(whole)
    assert tile_mlps(tiled, 4) == ["0"]
    again = copy.deepcopy(tiled)
    for x in (torch.randn(5, 6), torch.randn(2, 5, 6), torch.randn(3, 6)):
        torch.testing.assert_close(tiled(x), whole(x))
    torch.testing.assert_close(tiled[0](x, gate=2.0), whole[0](x, gate=2.0))
    with torch.no_grad():
        again[0].up.weight.zero_(), again[0].up.bias.zero_()
    assert not again(torch.randn(5, 6)).any() and tiled(x).any()  # a copy computes with its own weights


def test_a_loss_of_the_programs_own_is_neither_replaced_nor_called():
    """It is the cross-entropy of the next token for most tokens, and not for the one that has a weight."""
    called = []

    def weighted(logits, labels, vocab_size, **_):
        called.append(labels)
        weight = torch.ones(vocab_size).index_fill(0, torch.tensor([7]), 10.0)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weight[:vocab_size])

    model = copy.deepcopy(model_of("llama"))
    model.loss_function = weighted
    with pytest.raises(zs.ConfigError, match="loss_tokens: LlamaForCausalLM has no language model"):
        tile_loss(model, 4)
    assert not called


def test_a_model_whose_loss_was_in_tiles_is_as_before():
    model = copy.deepcopy(model_of("llama"))
    own = set(model.__dict__)
    (batch,) = batches(steps=1)
    tile_loss(model, 4)
    model(**batch).loss.backward()
    untile(model)
    assert set(model.__dict__) == own


def test_long_context_that_does_not_fit_changes_nothing():
    model = copy.deepcopy(model_of("llama"))
    with pytest.raises(zs.ConfigError, match="stage"):
        zs.long_context(model, stage=7)
    with pytest.raises(zs.ConfigError, match=r"loss_tokens: expected a positive number"):
        zs.long_context(model, loss_tokens=0)
    with pytest.raises(zs.ConfigError, match=r"mlp_tokens: Plain has no module .* pass mlp_tokens=None"):
        zs.long_context(Plain())
    with pytest.raises(zs.ConfigError, match=r"loss_tokens: Plain has no language model .* pass loss_tokens=None"):
        zs.long_context(Plain(), mlp_tokens=None)
    assert all("forward" not in module.__dict__ for module in model.modules())
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, head_dim=8)
    )  # a soft cap of 30, seen in large logits only
    with pytest.raises(
        zs.ConfigError, match=r"Gemma2ForCausalLM \(config.final_logit_softcapping\) changes the .* pass loss_tokens=None"
    ):
        zs.long_context(gemma)
    assert all("forward" not in module.__dict__ for module in gemma.modules())
    gemma.config.final_logit_softcapping = None
    model, _ = zs.long_context(gemma)
    gemma.config.final_logit_softcapping = 0.5  # as of a model whose option has another name
    with pytest.raises(zs.ConfigError, match="the model changes the logits of its head .* pass loss_tokens=None"):
        model(**zs.shard_sequence(batches(steps=1)[0], model))
