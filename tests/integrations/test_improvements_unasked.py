"""The drop-in does what DeepSpeed does, also where zeroshard has something better; that is an option."""

import copy
import datetime
import math

import pytest
import torch
from engine_kit import WIDTH, config, net
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

WANTED = {
    "zeroshard": {"shard": {"skip_nonfinite": True, "hold_schedulers": True, "max_skipped_steps": 3, "agree_buffers": True}}
}
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
FP32_GRADIENTS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
NO_NORM = {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}


def _engine(stage=0, clip=0.0, **more):
    return deepspeed.initialize(model=net(), config=config(stage, 1, 1, clip, **more))[0]


def _step(engine, factor=1.0):
    x = torch.ones(2, WIDTH, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x, torch.zeros(2, 3, dtype=x.dtype)) * factor)
    engine.step()


def _finite(engine):
    return all(torch.isfinite(value).all() for value in zs.full_state_dict(engine.module).values())


@pytest.mark.parametrize("stage, more, skips", [
    (0, {}, False), (1, {}, True), (2, {}, True), (3, {}, True), (2, NO_NORM, False), (0, BF16, True), (1, BF16, False), (2, BF16, False),
    (3, BF16, True), (1, FP32_GRADIENTS, True), (2, FP32_GRADIENTS, False), (2, {"bf16": {"enabled": True}}, True),
    (0, WANTED, True), (2, {**BF16, **WANTED}, True),
])  # fmt: skip
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_gradient_that_is_not_finite(stage, more, skips, clip):
    """Of which optimizer skips the step: read in DeepSpeed 0.19.8 (engine, stage_1_and_2, stage3, bf16_optimizer)."""
    engine = _engine(stage, 0.0 if more is NO_NORM else clip, **more)  # both are refused
    _step(engine, math.nan)
    assert engine.was_step_applied() is not skips and _finite(engine) is skips
    assert (engine.skipped_steps, engine.global_steps) == (int(skips), 1)
    if skips and stage:
        assert engine.get_global_grad_norm() == math.inf


def test_skipped_steps_go_on_without_end_but_at_the_smallest_scale():
    engine = _engine(2)
    for _ in range(60):
        _step(engine, math.nan)
    assert engine.skipped_steps == 60
    engine = _engine(2, **WANTED)
    with pytest.raises(zs.NonFiniteError, match="3 steps in a row"):
        for _ in range(3):
            _step(engine, math.nan)
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    engine = _engine(2, fp16=fp16)
    for scale in (2, 1):
        _step(engine, math.inf)
        assert engine.optimizer.loss_scale == scale
    with pytest.raises(zs.NonFiniteError, match="Current loss scale already at minimum"):
        _step(engine, math.inf)
    engine = _engine(0, fp16=fp16)  # whose optimizers go on
    for _ in range(5):
        _step(engine, math.inf)
    assert engine.skipped_steps == 5 and engine.optimizer.loss_scale == 1


def test_a_scheduler_that_the_program_steps_counts_skipped_steps():
    for more, counted in (({}, 2), (WANTED, 1)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config={**config(2, 1, 1, **more), "optimizer": None})[0]
        for factor in (1.0, math.nan):
            _step(engine, factor)
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5**counted


def test_ranks_wait_as_long_as_the_process_group_was_given(tmp_path):
    timeout = datetime.timedelta(seconds=77)
    deepspeed.init_distributed(init_method=f"file://{tmp_path}/group", rank=0, world_size=1, timeout=timeout)
    try:
        engine = _engine(2)
        assert runtime_of(engine.module).comm.stall_timeout_s == 77
    finally:
        torch.distributed.destroy_process_group()


def test_buffers_stay_each_ranks_own():
    def rank_main(rank):
        found = []
        for more in ({}, WANTED):
            model = net()
            model.register_buffer("own", torch.full((2,), float(rank)))
            engine = deepspeed.initialize(model=model, config=config(1, 2, 1, **more))[0]
            found.append(engine.module.own[0].item())
        return found

    assert run_threads(2, rank_main) == [[0, 0], [1, 0]]


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(WIDTH) + index, torch.zeros(3)


def test_samples_draw_from_numbers_of_their_own():
    """Two processes fetch them, so that what the model draws (dropout) does not depend on what samples do."""
    engine, _, loader, _ = deepspeed.initialize(model=net(), config=config(0, 1, 1), training_data=Augmented())
    assert loader.num_local_io_workers == 2
    drawn = []
    for dataset in (loader, engine.deepspeed_io([(torch.zeros(WIDTH), torch.zeros(3))] * 4)):
        torch.manual_seed(5)
        list(dataset)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert engine.deepspeed_io(Augmented(), num_local_io_workers=0).num_local_io_workers == 0
    assert run_threads(2, lambda rank: engine.deepspeed_io(Augmented()).num_local_io_workers) == [0, 0]


def test_a_share_is_filled_up_before_the_last_batch_is_left_out():
    """Of 7 samples each of 2 ranks has 4, two batches of 2: DeepSpeed's sampler drops none."""

    def rank_main(rank):
        told = {**config(0, 2, 1), "dataloader_drop_last": True}
        loader = deepspeed.initialize(model=net(), config=told, training_data=list(range(7)))[2]
        return len(loader), [number for batch in loader for number in batch.tolist()]

    shares = run_threads(2, rank_main)
    assert [length for length, _ in shares] == [2, 2]
    assert sorted(set(shares[0][1] + shares[1][1])) == list(range(7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_zs_shard_steps_with_what_is_not_finite_as_torch_does(bad, max_norm):
    def train(model, optimizer, clip):
        model(torch.tensor([[1.0, bad, 0.0]])).sum().backward()
        clip()
        optimizer.step()
        return model

    base = nn.Linear(3, 2)
    plain = copy.deepcopy(base)
    clip = (lambda: nn.utils.clip_grad_norm_(plain.parameters(), max_norm)) if max_norm else lambda: None
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), clip).state_dict()

    def rank_main(rank, stage):
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = zs.shard(model, optimizer, stage=stage, skip_nonfinite=False, max_grad_norm=max_norm)
        return zs.full_state_dict(train(model, optimizer, lambda: None)), optimizer.last_step.skipped

    for stage in (0, 3):
        for got, skipped in run_threads(2, rank_main, stage):
            assert not skipped
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, equal_nan=True)


class Takes(nn.Module):
    """`met` are the inputs that its forward gets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, *, times):
        self.met = (x, times["t"][0])
        return self.linear(x.to(self.linear.weight.dtype)).float().sum()


AUTO = {"fp16": {"enabled": True, "auto_cast": True}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("more", "dtypes"), [
    (BF16, (torch.float32, torch.float32)), ({"fp16": {"enabled": True}}, (torch.float32, torch.float32)),
    (AUTO, (torch.float16, torch.float32)), ({**BF16, "zeroshard": {"shard": {"cast_inputs": True}}}, (torch.bfloat16, torch.bfloat16)),
], ids=["bf16", "fp16", "auto_cast", "asked for"])  # fmt: skip
def test_inputs_are_handed_over_as_they_are(more, dtypes, stage):
    """Read in DeepSpeed 0.19.6 (engine._forward_prologue): auto_cast, of positional arguments, is all that casts."""
    engine = deepspeed.initialize(model=Takes(), config=config(stage, 1, 1, **more))[0]
    for call in (engine, engine.module):
        given = torch.tensor([[2049.0, 1.0]]), torch.tensor([2049.0])
        loss = call(given[0], times={"t": [given[1]]})
        met = engine.module.met
        assert tuple(tensor.dtype for tensor in met) == dtypes
        assert [tensor.flatten()[0].item() for tensor in met] == [
            2049.0 if dtype == torch.float32 else 2048.0 for dtype in dtypes
        ]
    engine.backward(loss)
    engine.step()
