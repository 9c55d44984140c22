"""The load-balancing loss of Transformers' mixtures over an axis sp is that of one process; over plain dp that of DDP. It crosses stages."""

import copy
import functools

import pytest
import torch
from sequence_kit import STEPS, adam, assert_equals_one_process, batches, model_of

import zeroshard as zs
from zeroshard.parallel.stages import cut_stages
from zeroshard.planner.model_source import group_experts
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


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
def test_its_sums_cross_stages_and_their_gradients_come_back(kind):
    """The first stages of qwen3moe have no experts. No rank: stages are called one after the other."""
    model = copy.deepcopy(model_of(kind, num_hidden_layers=4))
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    whole, tokens = copy.deepcopy(model), batches(steps=1)[0]["input_ids"]
    stages = cut_stages(model, 3, range(3))
    passed = (tokens,)
    for stage in stages:
        passed = stage(*passed, attention_mask=MASKED[:2])
    expected = whole(tokens, attention_mask=MASKED[:2], use_cache=False)
    assert passed[1].item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    passed[1].backward()
    expected.aux_loss.backward()
    gradients = {name: param.grad for stage in stages for name, param in stage.named_parameters()}
    for name, param in whole.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-4, atol=1e-7, msg=name)
    with pytest.raises(zs.ConfigError, match="set config.output_router_logits before the model is cut into stages"):
        stages[0](tokens, output_router_logits=False)


def test_a_plan_has_its_sums_between_stages_and_no_values():
    models, options = [copy.deepcopy(model_of("mixtral")), mixture()], {"batch": (2, 16), "micro_batches": 2, "stage": 1}
    for model in models:
        group_experts(model)  # whose meta kernels take fp32
    plain, summed = (zs.plan(functools.partial(copy.deepcopy, each), axes={"pp": 2, "ep": 2}, **options) for each in models)
    assert summed.sent["pp"] - plain.sent["pp"] == 2 * (2 * 4 + 1) * 8  # micro-batches, sums of 4 experts, fp64


def test_what_can_not_count_is_refused():
    base, other = mixture().model, mixture()
    with pytest.raises(zs.ConfigError, match="no router_aux_loss_coef"):
        cut_stages(base, 2, [0])
    other.forward = lambda tokens, **_: type(other).forward(other, tokens, use_cache=False, output_router_logits=False)
    with pytest.raises(zs.ConfigError, match="is not Transformers' load_balancing_loss_func, and can not cross stages"):
        cut_stages(other, 2, [0])
    models = [mixture() for _ in range(2)]

    def on_rank(rank: int) -> str:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 2})
        with pytest.raises(zs.ConfigError, match="zs.join: in each forward of this model all ranks add up its router's loss"):
            zs.join(model).__enter__()
        return "refused"

    assert run_threads(2, on_rank) == ["refused"] * 2
