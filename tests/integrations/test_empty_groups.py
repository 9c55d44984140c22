"""A parameter group without parameters keeps its place: schedulers with a value per group, and checkpoints."""

import pytest
import torch
from engine_kit import BATCH, batches, net
from torch.optim.lr_scheduler import LambdaLR

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.testing import run_threads

WORLD = 2
LAMBDAS = [lambda step: 1.0, lambda step: 0.5**step, lambda step: 0.1**step]


def parts(model):
    """(an optimizer of first, nothing and the rest, a scheduler with a lambda for each)."""
    first = list(model.first.parameters())
    rest = [param for name, param in model.named_parameters() if not name.startswith("first")]
    optimizer = torch.optim.AdamW([{"params": each, "lr": lr} for each, lr in ((first, 0.01), ([], 0.02), (rest, 0.03))])
    return optimizer, LambdaLR(optimizer, LAMBDAS)


def config(stage):
    return {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}


def steps(model, rank, chosen, backward, step):
    for (micro,) in chosen:
        backward(model(*micro[rank]))
        step()


def plain():
    """What one process and torch make of it."""
    model = net()
    optimizer, scheduler = parts(model)
    for (micro,) in batches(WORLD, 1):
        for x, y in micro:
            (model(x, y) / WORLD).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict(), [group["lr"] for group in optimizer.param_groups]


def same(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def engine_of(stage):
    model = net()
    optimizer, scheduler = parts(model)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(stage))[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_lambda_of_each_group_stays_with_its_group_through_a_checkpoint(stage, tmp_path):
    weights, rates = plain()

    def begun(rank):
        engine = engine_of(stage)
        steps(engine, rank, batches(WORLD, 1)[:1], engine.backward, engine.step)
        engine.save_checkpoint(tmp_path)
        steps(engine, rank, batches(WORLD, 1)[1:], engine.backward, engine.step)
        return zs.full_state_dict(engine.module), [group["lr"] for group in engine.optimizer.param_groups]

    def resumed(rank):
        engine = engine_of((stage + 1) % 4)
        engine.load_checkpoint(tmp_path)
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [2, 0, 6]
        steps(engine, rank, batches(WORLD, 1)[1:], engine.backward, engine.step)
        return zs.full_state_dict(engine.module), [group["lr"] for group in engine.optimizer.param_groups]

    for run in (begun, resumed):
        for state, got in run_threads(WORLD, run):
            assert got == pytest.approx(rates)
            same(state, weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zs_save_and_load_keep_an_empty_group(stage, tmp_path):
    weights, rates = plain()

    def run(rank, stage, saves):
        model = net()
        optimizer, scheduler = parts(model)
        zs.shard(model, optimizer, stage=stage)

        def step():
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        if saves:
            steps(model, rank, batches(WORLD, 1)[:1], torch.Tensor.backward, step)
            zs.save(tmp_path / "at", model, optimizer, step=1, extra={"scheduler": scheduler})
        else:
            zs.load(tmp_path / "at", model, optimizer, extra={"scheduler": scheduler})
        steps(model, rank, batches(WORLD, 1)[1:], torch.Tensor.backward, step)
        return zs.full_state_dict(model), [group["lr"] for group in optimizer.param_groups]

    for stage_now, saves in ((stage, True), ((stage + 1) % 4, False)):
        for state, got in run_threads(WORLD, run, stage_now, saves):
            assert got == pytest.approx(rates)
            same(state, weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_schedules_of_the_configuration_meet_an_empty_group(stage):
    def run(rank):
        model = net()
        optimizer, _ = parts(model)
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config(stage), "scheduler": schedule})
        steps(engine, rank, batches(WORLD, 1), engine.backward, engine.step)
        return engine.get_lr()

    assert run_threads(WORLD, run)[0] == pytest.approx([0.005] * 3)
