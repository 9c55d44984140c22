"""Mixed precision: which dtype each number is rounded to, masters, the dynamic loss scale. Bit for bit at every stage.

The plain cases (bf16 and fp16 with fp32 masters) are in test_equivalence.py; here is what a user may choose otherwise.
"""

import copy
import dataclasses
import math

import pytest
import torch
from helpers import (
    OddGPT,
    Outcome,
    Rounding,
    Task,
    adamw,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    token_batches,
    train,
)
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

WORLD = 2
STAGES = (0, 1, 2, 3)
MODEL = seeded(OddGPT)
ALL_STAGES = pytest.mark.parametrize("stage", STAGES)
MODES = pytest.mark.parametrize("micro, local_sums", [(1, False), (2, False), (3, True)])


def compare(task: Task, precision: str, rounding: Rounding, **options) -> list[list[Outcome]]:
    outcomes = run_threads(
        WORLD, lambda rank: [train(rank, task, stage=stage, precision=precision, **options) for stage in STAGES]
    )
    expected = reference(task, WORLD, precision, outcomes[0][0].coefficients, rounding=rounding)
    for rank in outcomes:
        for stage, got in zip(STAGES, rank, strict=True):
            got.gradients = [{n: g if g is None else g.float() for n, g in step.items()} for step in got.gradients]
            expected.gradients = [{n: g if g is None else g.float() for n, g in step.items()} for step in expected.gradients]
            assert_equal_runs(got, expected, f"stage {stage}:")
    return outcomes


def task(micro: int, local_sums: bool) -> Task:
    return Task(MODEL, token_batches(3, micro, WORLD), local_sums=local_sums)


@MODES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("send", [torch.float32, torch.bfloat16])
def test_gradients_are_sent_in_the_chosen_dtype_and_summed_in_fp32(precision, send, micro, local_sums):
    compare(task(micro, local_sums), precision, Rounding(send=send), reduce_dtype=send)


@MODES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_rest_in_the_chosen_dtype(precision, micro, local_sums):
    compare(task(micro, local_sums), precision, Rounding(rest=torch.bfloat16), gradient_dtype=torch.bfloat16)


@pytest.mark.parametrize("micro, local_sums", [(1, False), (2, False)])
def test_a_clip_in_the_step_does_not_round_gradients_again(micro, local_sums):
    """They rest in bf16 and are multiplied in fp32, where the optimizer steps, as DeepSpeed's are."""
    clipped = dataclasses.replace(task(micro, local_sums), states=True)
    options = {"precision": "bf16", "gradient_dtype": torch.bfloat16, "max_grad_norm": 0.05}
    outcomes = run_threads(WORLD, lambda rank: [train(rank, clipped, stage=stage, **options) for stage in STAGES])
    expected = reference(clipped, WORLD, "bf16", outcomes[0][0].coefficients, rounding=Rounding(rest=torch.bfloat16))
    assert max(outcomes[0][0].coefficients) < 0.5
    for rank in outcomes:
        for got in rank:
            assert got.losses == rank[0].losses and not differences(got.weights, expected.weights)
            assert all(torch.equal(got.states[n]["exp_avg"], state["exp_avg"]) for n, state in expected.states.items())


@pytest.mark.parametrize("stage, offloaded", [*((stage, "none") for stage in STAGES), (1, "cpu"), (3, "cpu")])
def test_what_the_loss_scale_has_kept_does_not_vanish_when_it_is_divided_out(stage, offloaded):
    """A gradient of 1.375 * 2**-24, which fp16 has no number for, rests there as 1.375 * 2**-8."""

    def rank_run(rank):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**24)
        options = {"gradient_dtype": torch.float16, "initial_loss_scale": 2.0**16, "offload_optimizer": offloaded}
        zs.shard(model, optimizer, stage=stage, precision="fp16", **options)
        (model(torch.tensor([[1.375 * 2.0**-12]])) * 2.0**-12).sum().backward()
        optimizer.step()
        return zs.full_state_dict(model, masters=True)["weight"].item()

    assert run_threads(WORLD, rank_run) == [-1.375] * WORLD


@MODES
def test_without_masters_the_model_itself_is_stepped(micro, local_sums):
    compare(task(micro, local_sums), "bf16", Rounding(masters=False), master_weights=False)


def norms_in_fp32(model: nn.Module) -> None:
    """What Config.dtypes does, by hand."""
    for norm in [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        norm.float()
        norm.register_forward_pre_hook(lambda _, args: tuple(a.float() for a in args))
        norm.register_forward_hook(lambda _, args, output: output.bfloat16())


@MODES
@pytest.mark.parametrize("units", ["auto", "leaf", "model"])
def test_some_modules_may_keep_a_dtype_of_their_own(micro, local_sums, units):
    compare(task(micro, local_sums), "bf16", Rounding(prepare=norms_in_fp32), dtypes={"LayerNorm": torch.float32}, units=units)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_rest_and_compute_in_the_precision_and_come_back_as_given(stage):
    def rank_run(rank):
        model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=stage, precision="bf16")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {t.dtype for t in zs.full_state_dict(model).values()} == {torch.bfloat16}
        masters = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return masters, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}

    for masters, closed in run_threads(WORLD, rank_run):
        assert not differences(masters, MODEL.state_dict())
        assert not differences(closed, MODEL.state_dict())


@ALL_STAGES
def test_masters_follow_what_is_written_into_parameters(stage):
    """Weights loaded, scaled or clamped between steps are what the next step starts from, for those parameters alone."""
    data = token_batches(2, 1, WORLD)

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage, precision="bf16")
        model(*data[0][0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = zs.full_state_dict(model, masters=True)
        with torch.no_grad():
            model.blocks[0].into.weight.mul_(0.5)
            model.norm.bias.fill_(0.3)
        model(*data[1][0][rank]).backward()
        optimizer.step()
        gradients = zs.full_gradients(model)
        after = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return before, gradients, after

    for before, gradients, after in run_threads(WORLD, rank_run):
        expected = dict(before)
        expected["blocks.0.into.weight"] = (before["blocks.0.into.weight"].bfloat16() * 0.5).float()
        expected["norm.bias"] = torch.full_like(before["norm.bias"], 0.3).bfloat16().float()
        tied = {"head.weight": "embedding.weight"}
        stepped = {name: value - 0.5 * gradients[tied.get(name, name)] for name, value in expected.items()}
        assert not differences(after, stepped)


# -- loss scale --------------------------------------------------------------------------------------------------


@ALL_STAGES
def test_the_dynamic_loss_scale_finds_its_place(stage):
    """Far too high at first: halved with every skipped step until gradients fit; then good steps count like plain ones."""
    data = token_batches(12, 1, WORLD)

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), stage=stage, precision="fp16",
            initial_loss_scale=2.0**19, loss_scale_window=3,
        )  # fmt: skip
        records = []
        for step in range(12):
            model(*data[step][0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            records.append(optimizer.last_step)
        weights = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return records, weights

    results = run_threads(WORLD, rank_run)
    records = results[0][0]
    scale, good = 2.0**19, 0
    for record in records:
        assert record.loss_scale == scale and record.skipped == (not math.isfinite(record.grad_norm))
        good = 0 if record.skipped else good + 1
        if record.skipped:
            assert record.nonfinite
            scale /= 2
        elif good == 3:
            scale, good = scale * 2, 0
    assert records[0].skipped and sum(not r.skipped for r in records) >= 4
    # the scales are powers of two, but what fp16 rounds away depends on them: replay the good steps one by one
    model = copy.deepcopy(MODEL).half()
    masters = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, weight_decay=0.1)
    for step, record in enumerate(records):
        grads = []
        for rank in range(WORLD):
            model.zero_grad()
            model(*data[step][0][rank]).float().backward(torch.tensor(record.loss_scale))
            grads.append([p.grad.float() for p in model.parameters()])
        total = [(a + b) * 0.5 for a, b in zip(*grads, strict=True)]
        assert record.skipped == (not all(t.isfinite().all() for t in total))
        if record.skipped:
            continue
        for master, grad in zip(masters.parameters(), total, strict=True):
            master.grad = grad * (1.0 / record.loss_scale)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                param.copy_(master)
    for other, weights in results:
        assert [(r.skipped, r.loss_scale, r.nonfinite) for r in other] == [
            (r.skipped, r.loss_scale, r.nonfinite) for r in records
        ]
        assert not differences(weights, masters.state_dict())


@ALL_STAGES
def test_a_run_that_overflows_for_ever_is_stopped(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters()), stage=stage, max_skipped_steps=3)
        tokens = token_batches(1, 1, 1)[0][0][0]
        for _ in range(2):
            (model(*tokens) * math.nan).backward()
            optimizer.step()
            optimizer.zero_grad()
        (model(*tokens) * math.nan).backward()
        with pytest.raises(zs.NonFiniteError, match="3 steps in a row"):
            optimizer.step()
        zs.close(model)

    run_threads(WORLD, rank_run)


@pytest.mark.parametrize(("given", "options", "numbers"), [
    ({}, {}, "fp32"),
    ({}, {"precision": "bf16"}, "bf16, floating-point inputs cast to bf16"),
    ({}, {"precision": "bf16", "cast_inputs": False}, "bf16"),
    ({}, {"precision": "bf16", "dtypes": {"OddGPT": "fp32"}, "cast_inputs": False}, "fp32"),
    ({}, {"precision": "bf16", "dtypes": {"LayerNorm": "fp32"}}, "bf16 and fp32, floating-point inputs cast to bf16"),
    ({"all": torch.bfloat16}, {}, "bf16 as the model was given"),
    ({"all": torch.bfloat16}, {"master_weights": False}, "bf16 as the model was given, without fp32 masters"),
    ({}, {"precision": "bf16", "master_weights": False}, "bf16, without fp32 masters, floating-point inputs cast to bf16"),
    ({"all": torch.bfloat16}, {"precision": "bf16", "cast_inputs": False}, "bf16"),
    ({"all": torch.float64}, {}, "float64 as the model was given"),
    ({"norm": torch.bfloat16}, {}, "fp32 and bf16 as the model was given"),
], ids=str)  # fmt: skip
def test_the_reports_header_says_in_what_the_parameters_are(given, options, numbers):
    """A precision of fp32 takes a model as it was given: one in bf16 trains in bf16, and is not called fp32."""
    for stage in (0, 3):
        model = seeded(OddGPT)
        model.to(given.get("all", torch.float32))
        model.norm.to(given.get("norm", given.get("all", torch.float32)))
        model, _ = zs.shard(model, adamw(model.parameters()), stage=stage, **options)
        report = zs.report(model)
        assert report.numbers == report.to_dict()["numbers"] == numbers
        assert str(report).splitlines()[0].startswith(f"stage {stage}, rank 0 of 1, {numbers}, ")
