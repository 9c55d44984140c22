"""torch.amp.GradScaler, as programs for DDP use it: parameters, scale and skipped steps are those of one process.

In one step a rank's loss is not finite, and at stages 1 to 3 the gradient of one parameter, of which one rank may hold all, shows it.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from helpers import differences
from offloading import tiers
from optimizers import ALL_STAGES, DATA, MODEL, STAGES, WORLD
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads
from zeroshard.utils.torch_compat import OWN_UNSCALING

adamw = functools.partial(torch.optim.AdamW, lr=0.05)
SPOILT = {1: (1, 0), 3: (0, 2)}  # step -> the rank that spoils it, and the layer whose gradient is not finite then


def loop(model, optimizer, ranks, clip=None, micro=1, make_scaler=torch.amp.GradScaler):
    """Train as a program for DDP does; return the scale after each step. ranks: whose batches this process sees."""
    scaler, scales = make_scaler("cpu", init_scale=256.0, growth_interval=2), []
    for step in range(6):
        optimizer.zero_grad()
        for number in range(micro):
            with zs.accumulate(model) if number < micro - 1 and len(ranks) == 1 else torch.enable_grad():
                for rank in ranks:
                    loss = model(*DATA[(step + number) % 4][0][rank]) / len(ranks) / micro
                    spoils, layer = SPOILT.get(step, (None, 0))
                    hook = model.layers[layer].bias.register_hook(_spoil) if spoils == rank else None
                    scaler.scale(loss).backward()
                    if hook is not None:
                        hook.remove()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _spoil(grad):
    return torch.cat([grad[:-1], grad[-1:] * float("inf")])


def torchs_clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def zs_clip(model):
    zs.clip_grad_norm_(model, 0.5)


@functools.cache
def expected(clips=False, micro=1, make=adamw):
    model = copy.deepcopy(MODEL)
    scales = loop(model, make(model.parameters()), [0, 1], torchs_clip if clips else None, micro)
    assert scales == [256.0, 128.0, 128.0, 64.0, 64.0, 128.0]
    return scales, model.state_dict()


def run(rank, clip=None, micro=1, make=adamw, late=False, comm=None, make_scaler=torch.amp.GradScaler, **options):
    model = copy.deepcopy(MODEL)
    optimizer = None if late else make(model.parameters())
    zs.shard(model, optimizer, comm=comm, **options)
    scales = loop(model, optimizer or make(model.parameters()), [rank], clip, micro, make_scaler)
    result = scales, zs.full_state_dict(model, masters=True)
    zs.close(model)
    return result


def check(outcomes, of_one, where=""):
    """The same bits."""
    for scales, weights in outcomes:
        assert scales == of_one[0], where
        assert not differences(weights, of_one[1]), where


def check_nearly(outcomes, of_one, where=""):
    """The same but for the last bits: sums (norms, micro-batches) are added in another order."""
    for scales, weights in outcomes:
        assert scales == of_one[0], where
        for name, value in of_one[1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=f"{where} {name}")


def of_vectors(params):
    return torch.optim.SGD([param for param in params if param.dim() < 2], lr=0.05)


# -- equality --------------------------------------------------------------------------------------------------------


@ALL_STAGES
@pytest.mark.parametrize("late", [False, True])
def test_every_stage_equals_one_process(stage, late):
    check(run_threads(WORLD, functools.partial(run, stage=stage, late=late)), expected())
    check_nearly(run_threads(WORLD, functools.partial(run, stage=stage, late=late, clip=torchs_clip)), expected(clips=True))


PLACES = [
    {"optimizer": "cpu"}, {"gradient": "cpu", "optimizer": "cpu"}, {"gradient": "nvme", "optimizer": "nvme"},
    {"parameter": "nvme", "gradient": "nvme", "optimizer": "nvme"},
]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True], ids=["host", "device with memory of its own"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_every_tier_equals_one_process(places, strict, tmp_path, strict_device):
    """Offloaded gradients are multiplied when they are next read, so unscaling moves nothing."""

    def rank_run(rank):
        strict_device(rank, strict)
        return run(rank, stage=3, **tiers(str(tmp_path), **places, fused=False))

    check(run_threads(WORLD, rank_run), expected(), str(places))


MORE = [
    {"map_shared": False, "units": "leaf"}, {"param_persistence_threshold": 20}, {"units": "model", "overlap": False},
    {"master_weights": True, "gradient_dtype": torch.float32},
]  # fmt: skip


@pytest.mark.parametrize("options", MORE, ids=str)
def test_other_layouts(options):
    for stage in (1, 2, 3):
        check(run_threads(WORLD, functools.partial(run, stage=stage, **options)), expected(), f"{stage}, {options}")


@ALL_STAGES
def test_accumulation_equals_one_process(stage):
    check_nearly(run_threads(WORLD, functools.partial(run, stage=stage, micro=2)), expected(micro=2))


@ALL_STAGES
def test_zs_clip_grad_norm_(stage):
    check_nearly(run_threads(WORLD, functools.partial(run, stage=stage, clip=zs_clip)), expected(clips=True))


def test_fused_kernels_leave_the_scale_to_the_scaler():
    make = functools.partial(torch.optim.AdamW, lr=0.05, fused=True)
    assert getattr(make(copy.deepcopy(MODEL).parameters()), OWN_UNSCALING) is True
    for stage in STAGES:
        for late in (False, True):
            check_nearly(run_threads(WORLD, functools.partial(run, stage=stage, late=late, make=make)), expected())


@ALL_STAGES
def test_an_optimizer_of_some_parameters(stage):
    """Gradients of the others stay scaled, as in one process, also where they share a buffer with those of the optimizer."""

    check(run_threads(WORLD, functools.partial(run, stage=stage, make=of_vectors)), expected(make=of_vectors))


def test_a_delayed_update_is_not_started_by_a_skipped_step():
    options = {"stage": 2, "offload_optimizer": "cpu", "delayed_update": 100}  # the first 100 updates are not delayed
    check(run_threads(WORLD, functools.partial(run, **options)), expected())
    delayed = run_threads(WORLD, functools.partial(run, **options | {"delayed_update": 0}))
    for scales, weights in delayed:
        assert scales == expected()[0] and all(value.isfinite().all() for value in weights.values())


def test_a_mesh_with_replicas():
    """Shards on two ranks, each twice: all four skip what one of them has met."""

    def rank_run(rank):
        return run(rank % 2, stage=3, shard_size=2)

    check_nearly(run_threads(4, rank_run), expected())


def _over_torch_distributed(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scalers = torch.amp.GradScaler, ShardedGradScaler
    return [run(rank, stage=stage, comm="dist", late=True, make_scaler=each) for stage in STAGES for each in scalers]


@pytest.mark.processes
def test_over_torch_distributed():
    for outcomes in run_processes(_over_torch_distributed, WORLD):
        check(outcomes, expected())


@ALL_STAGES
def test_autocast_in_fp16(stage):
    """Scales and skipped steps: 2**24 overflows, and is halved until it does not."""

    def train(model, optimizer, ranks):
        """ranks: whose batches this process sees; it divides gradients, as ranks do, and not losses, which would overflow later."""
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**24), []
        for step in range(14):
            optimizer.zero_grad()
            for rank in ranks:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(*DATA[step % 4][0][rank])
                scaler.scale(loss).backward()
            for param in model.parameters() if len(ranks) > 1 else ():
                param.grad /= len(ranks)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        return seen

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage)
        return train(model, optimizer, [rank]), zs.full_state_dict(model)

    plain = copy.deepcopy(MODEL)
    seen = train(plain, adamw(plain.parameters()), [0, 1])
    assert seen[0] < 2.0**24 and seen[-1] == seen[-3]  # it overflows, and then trains
    for got, weights in run_threads(WORLD, rank_run):
        assert got == seen
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-2, atol=1e-3)


def test_one_scaler_for_two_models():
    """Each model skips the steps that its own gradients spoil; the scale follows both."""

    def loop_of_two(models, ranks):
        scaler, optimizers = torch.amp.GradScaler("cpu", init_scale=256.0), [adamw(model.parameters()) for model in models]
        for step in range(4):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                hook = model.layers[0].bias.register_hook(_spoil) if number == step == 1 else None
                for rank in ranks:
                    scaler.scale(model(*DATA[step][0][rank]) / len(ranks)).backward()
                if hook is not None:
                    hook.remove()
            scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    def rank_run(rank):
        models = [copy.deepcopy(MODEL), copy.deepcopy(MODEL)]
        for model, stage in zip(models, (2, 3), strict=True):
            zs.shard(model, stage=stage)
        return loop_of_two(models, [rank]), [zs.full_state_dict(model) for model in models]

    plain = [copy.deepcopy(MODEL), copy.deepcopy(MODEL)]
    assert loop_of_two(plain, [0, 1]) == 128.0
    for scale, weights in run_threads(WORLD, rank_run):
        assert scale == 128.0
        for got, model in zip(weights, plain, strict=True):
            assert not differences(got, model.state_dict())


# -- norms, refusals -------------------------------------------------------------------------------------------------


@ALL_STAGES
def test_the_step_takes_the_norm_of_what_was_unscaled(stage):
    """max_grad_norm bounds that norm, also where the program has clipped scaled gradients before (stage 0: torch does not tell)."""

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, max_grad_norm=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(*DATA[0][0][rank])).backward()
        if stage > 0:
            zs.clip_grad_norm_(model, 1e9)
        scaler.step(optimizer)
        scaler.update()
        return optimizer.last_step

    plain = copy.deepcopy(MODEL)
    for batch in DATA[0][0]:
        (plain(*batch) / 2).backward()
    norm = torch.cat([p.grad.view(-1) for p in plain.parameters()]).norm().item()
    for record in run_threads(WORLD, rank_run):
        assert record.grad_norm == pytest.approx(norm, rel=1e-5)
        assert record.clipped_norm == pytest.approx(1e-3, rel=1e-2)


@ALL_STAGES
def test_squares_that_overflow_before_they_are_unscaled(stage):
    def rank_run(rank):
        model = nn.Linear(64, 1, bias=False)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1e-15), stage=stage)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        scaler.scale(model(torch.full((1, 64), 3e15)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536.0 and not optimizer.last_step.skipped
        assert optimizer.last_step.grad_norm == pytest.approx(8 * 3e15, rel=1e-5)

    run_threads(WORLD, rank_run)


@ALL_STAGES
def test_beside_a_loss_scale_of_zeroshard_it_is_refused(stage):
    """What the refusal says trains: fp32 under autocast, as above; or without a GradScaler, as here."""

    def rank_run(rank, late):
        model = copy.deepcopy(MODEL)
        optimizer = None if late else adamw(model.parameters())
        zs.shard(model, optimizer, stage=stage, precision="fp16", initial_loss_scale=8.0)
        optimizer = optimizer or adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(model(*DATA[0][0][rank])).backward()
        with pytest.raises(
            zs.ConfigError, match=r"GradScaler beside precision='fp16'.*leave the GradScaler out, or give precision='fp32'"
        ):
            scaler.step(optimizer)
        optimizer.zero_grad()
        switched_off = torch.amp.GradScaler("cpu", enabled=False)
        switched_off.scale(model(*DATA[0][0][rank])).backward()
        switched_off.step(optimizer)
        assert not optimizer.last_step.skipped

    for late in (False, True):
        run_threads(WORLD, rank_run, late)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_gradients_and_ranks_without_data_are_refused(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage)
        scaler = torch.amp.GradScaler("cpu")
        with zs.join(model):
            for step in range(1 + rank):
                scaler.scale(model(*DATA[step][0][rank])).backward()
                grad = model.layers[0].weight.grad
                flags = torch.zeros(1), torch.ones(1)
                with pytest.raises(zs.ShardedWriteError, match="unscales the gradients of parameters, not parts of them"):
                    torch._amp_foreach_non_finite_check_and_unscale_([grad[1:3]], *flags)
                if stage == 3:
                    with pytest.raises(zs.ShardedAccessError, match="needs the whole of"):
                        torch._amp_foreach_non_finite_check_and_unscale_([model.layers[0].weight.data], *flags)
                if step == 0:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    with pytest.raises(zs.ZeroshardError, match=r"GradScaler.unscale_\(\) inside zs.join"):
                        scaler.step(optimizer)
                optimizer.zero_grad()

    run_threads(WORLD, rank_run)
