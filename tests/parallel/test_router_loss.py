"""The load-balancing loss of Transformers' mixtures over an axis sp is that of one process; over plain dp that of DDP."""

import copy

import pytest
import torch
from sequence_kit import STEPS, adam, assert_equals_one_process, batches, model_of

import zeroshard as zs
from zeroshard.testing import run_threads


def mixture(coefficient: float = 0.5) -> torch.nn.Module:
    """Routers that choose experts unevenly, so that the loss is far from its least value."""
    model = copy.deepcopy(model_of("mixtral"))
    model.config.output_router_logits, model.router_aux_loss_coef = True, coefficient
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(30)
    return model


MASKED = torch.ones(4, 16, dtype=torch.long)
MASKED[1, :6] = 0
PROMPTS = batches(rows=4)
for each in PROMPTS:  # the places along dp have 20 and 26 labels
    each["labels"][:2, :6] = -100
    each["labels"][2:, :3] = -100


@pytest.mark.parametrize("stage", range(4))
def test_over_sp_it_is_that_of_all_tokens(stage):
    assert_equals_one_process(mixture(), batches(rows=4), {"dp": 2, "sp": 2}, stage=stage)


@pytest.mark.parametrize(
    "data",
    [batches(rows=4, tokens=15), batches(rows=4, attention_mask=MASKED), PROMPTS],
    ids=["odd length", "padding", "prompts"],
)
def test_tokens_that_do_not_count_and_ranks_of_other_weights(data):
    assert_equals_one_process(mixture(), data, {"dp": 2, "sp": 2}, stage=2)


def test_over_plain_dp_it_is_the_mean_of_the_losses_of_ranks_as_ddp_has_it():
    models, data, single = [mixture() for _ in range(2)], batches(rows=4), mixture()
    optimizer, losses = adam(single), []
    for batch in data:
        both = [single(**{name: part.chunk(2)[rank] for name, part in batch.items()}).loss / 2 for rank in range(2)]
        sum(both).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(both).item())

    def on_rank(rank: int) -> tuple:
        model, optimizer = zs.shard(models[rank], adam(models[rank]), stage=3)
        found = []
        for batch in data:
            loss = model(**{name: part.chunk(2)[rank] for name, part in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item() / 2)
        return found, zs.full_state_dict(model)

    (first, weights), (second, _) = run_threads(2, on_rank, timeout_s=100)
    assert [sum(each) for each in zip(first, second, strict=True)] == pytest.approx(losses, rel=1e-6)
    assert len(losses) == STEPS
    for name, value in single.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
