"""The engine's loop is that of one process: losses, norms, weights; accumulation by every route; what it refuses."""

import gc

import pytest
import torch
from engine_kit import ADAMW, BATCH, STEPS, WIDTH, batches, config, net, reference
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.testing import run_threads


def by_engine(engine, loss):
    engine.backward(loss)


def by_hand(engine, loss):
    loss.backward()


def by_scale(engine, loss):
    engine.scale(loss).backward()


def train(rank, world, stage, gas, clip, backward):
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=net(), config=config(stage, world, gas, clip))
    assert loader is None and scheduler is None
    losses, norms = [], []
    for step in batches(world, gas):
        for number, micro in enumerate(step):
            assert engine.is_gradient_accumulation_boundary() == (number == gas - 1)
            loss = engine(*micro[rank])
            backward(engine, loss)
            engine.step()
            assert engine.was_step_applied() == (number == gas - 1)
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * gas)
    assert engine.global_samples == STEPS * gas * BATCH * world
    assert all(param.grad is None for param in engine.parameters())
    weights = zs.full_state_dict(engine.module)
    engine.destroy()
    assert type(engine.module.first.weight) is nn.Parameter
    return losses, norms, weights


@pytest.mark.parametrize("backward", [by_engine, by_hand, by_scale])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_one_process(stage, gas, world, backward):
    clip = 0.05 if gas == 3 else 0.0
    losses, norms, weights = reference(world, gas, clip)
    runs = run_threads(world, train, world, stage, gas, clip, backward)
    for rank, (theirs, their_norms, their_weights) in enumerate(runs):
        torch.testing.assert_close(theirs, losses[rank::world], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(their_norms, norms, rtol=1e-5, atol=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(their_weights[name], value, rtol=1e-5, atol=1e-6)


def boundary_by_hand(rank, world, stage):
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage, world, 3, 0.05))
    for step in batches(world, 3):
        for number, micro in enumerate(step):
            engine.set_gradient_accumulation_boundary(number == 2)
            engine.backward(engine(*micro[rank]))
        engine.step()
    return zs.full_state_dict(engine.module)


def coalesced(rank, world, stage):
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage, world, 3, 0.05))
    for step in batches(world, 3):
        with engine.coalesce_grad_reduction():
            for micro in step:
                engine.backward(engine(*micro[rank]))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    return zs.full_state_dict(engine.module)


def unmanaged(rank, world, stage):
    given = config(stage, world, 3, 0.05, managed_gradient_accumulation=False)
    engine, *_ = deepspeed.initialize(model=net(), config=given)
    for step in batches(world, 3):
        for micro in step:
            engine.backward(engine(*micro[rank]))
        engine.step()
        assert engine.was_step_applied()
    assert engine.global_samples == STEPS * 3 * BATCH * world
    return zs.full_state_dict(engine.module)


@pytest.mark.parametrize("loop", [boundary_by_hand, coalesced, unmanaged])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_accumulations(stage, loop):
    if loop is coalesced and stage == 0:
        return
    _, _, weights = reference(2, 3, 0.05)
    for state in run_threads(2, loop, 2, stage):
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_summed_locally_is_shown_as_this_rank_has_it(stage):
    """Inside of coalesce_grad_reduction, without a message to other ranks; after it, it is the mean."""
    step = batches(2, 3)[0]

    def local(rank):
        model = net()
        for micro in step:
            (model(*micro[rank]) / 3).backward()
        return [param.grad for param in model.parameters()]

    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 3))
        params = list(engine.module.parameters())
        with engine.coalesce_grad_reduction():
            assert all(deepspeed.utils.safe_get_full_grad(param) is None for param in params)
            for micro in step:
                engine.backward(engine(*micro[rank]))
            inside = [deepspeed.utils.safe_get_full_grad(param) for param in params if rank == 0]  # the other rank is not asked
        return inside, [deepspeed.utils.safe_get_full_grad(param) for param in params]

    (inside, after), (_, other) = run_threads(2, body)
    sums = [local(rank) for rank in range(2)]
    torch.testing.assert_close(inside, sums[0], rtol=1e-5, atol=1e-7)
    means = [sum(each) / 2 for each in zip(*sums, strict=True)]
    torch.testing.assert_close(after, means, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(other, means, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_sums_locally(stage):
    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 1))
        micro = batches(2, 3)[0]
        with engine.no_sync():
            engine.backward(engine(*micro[0][rank]))
            engine.backward(engine(*micro[1][rank]))
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()
            with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
                pass
        engine.backward(engine(*micro[2][rank]))
        engine.step()
        return engine.get_global_grad_norm()

    model = net()
    for micro in batches(2, 3)[0]:
        for x, y in micro:
            (model(x, y) / 2).backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item()
    assert run_threads(2, body) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_refused_where_gradients_are_partitioned(stage):
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 1, 1))
    with pytest.raises(AssertionError, match="zs.accumulate"), engine.no_sync():
        pass


def test_two_engines_and_a_shared_loss():
    def body(rank):
        first, *_ = deepspeed.initialize(model=net(), config=config(1, 2, 2))
        second, *_ = deepspeed.initialize(model=net(), config=config(1, 2, 2))
        for micro in batches(2, 2)[0]:
            x, y = micro[rank]
            loss = nn.functional.mse_loss(first(x) + second(x), y)
            (loss / 1).backward()  # each divides what enters it
            first.step(), second.step()
        return first.get_global_grad_norm(), second.get_global_grad_norm()

    one, two = net(), net()
    for micro in batches(2, 2)[0]:
        for x, y in micro:
            (nn.functional.mse_loss(one(x) + two(x), y) / 4).backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in one.parameters()]).item()
    for norms in run_threads(2, body):
        assert norms == pytest.approx((expected, expected), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(precision, stage):
    """The engine is `zs.shard` of the rounded model, with gradients in its dtype: the same bits."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def body(rank):
        section = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 1, 0.05, **{precision: section}))
        assert next(engine.parameters()).dtype is dtype
        other = net().to(dtype)
        plain = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        options = {"max_grad_norm": 0.05, "initial_loss_scale": 256.0, "gradient_dtype": dtype, "cast_inputs": False}
        other, plain = zs.shard(other, plain, stage=stage, precision=precision, **options)
        for (micro,) in batches(2, 1):
            engine.backward(engine(*micro[rank]))
            engine.step()
            other(*micro[rank]).backward()
            plain.step()
            plain.zero_grad()
        assert optimizer.loss_scale == (256 if precision == "fp16" else 1) and not optimizer.overflow
        return zs.full_state_dict(engine.module, masters=True), zs.full_state_dict(other, masters=True)

    for mine, theirs in run_threads(2, body):
        for name in theirs:
            assert torch.equal(mine[name], theirs[name]), name


def test_overflow_is_a_skipped_step():
    class Counted:
        steps = 0

        def step(self):
            self.steps += 1

    scheduler = Counted()
    given = config(2, 1, 1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, _, mine = deepspeed.initialize(model=net(), config=given, lr_scheduler=scheduler)
    assert mine is scheduler
    (x, y) = batches(1, 1)[0][0][0]
    engine.backward(engine(x, y) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.global_steps, scheduler.steps) == (1, 1, 0)
    assert not engine.was_step_applied() and optimizer.overflow and optimizer.loss_scale == 8
    engine.backward(engine(x, y))
    engine.step()
    assert engine.was_step_applied() and scheduler.steps == 1 and engine.skipped_steps == 1


def test_an_optimizer_of_ones_own():
    model = net()
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"train_batch_size": BATCH, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=mine, config=given)
    assert engine.basic_optimizer is mine and isinstance(mine, torch.optim.SGD) and optimizer.optimizer is mine
    assert engine.get_lr() == [0.1] and optimizer.param_groups is mine.param_groups
    (x, y) = batches(1, 1)[0][0][0]
    engine.backward(engine(x, y))
    engine.step()
    assert optimizer.state[engine.module.last.bias]["momentum_buffer"].shape == (3,)


def test_a_callable_for_optimizer_and_scheduler():
    given = {"train_batch_size": BATCH, "zero_optimization": {"stage": 1}}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=net(), config=given, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )  # fmt: skip
    (x, y) = batches(1, 1)[0][0][0]
    engine.backward(engine(x, y))
    engine.step()
    assert engine.get_lr() == [0.05] and scheduler.get_last_lr() == [0.05]


def test_inference_without_an_optimizer():
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    assert optimizer is None and engine.optimizer is None
    x, _ = batches(1, 1)[0][0][0]
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(x), net()(x))
    with pytest.raises(AssertionError, match="must provide optimizer"):
        engine.backward(engine(x).sum())
    with pytest.raises(AssertionError, match="must provide optimizer"):
        engine.step()


def test_the_same_model_again():
    """trl initialises a model twice: the first engine lets go of it."""
    model = net()
    for _ in range(2):
        engine, *_ = deepspeed.initialize(model=model, config=config(3, 1, 1))
        (x, y) = batches(1, 1)[0][0][0]
        engine.backward(engine(x, y))
        engine.step()
        assert engine.was_step_applied()


def test_attributes_are_the_modules():
    engine, *_ = deepspeed.initialize(model=net(), config=config(2, 1, 1))
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.blocks is engine.module.blocks
    engine.colour = "red"
    assert engine.colour == "red"
    with pytest.raises(AttributeError, match="nothing_such"):
        engine.nothing_such  # noqa: B018


def test_what_initialize_refuses():
    with pytest.raises(AssertionError, match="requires a model"):
        deepspeed.initialize(config=config(1, 1, 1))
    with pytest.raises(AssertionError, match="deepspeed_config"):
        deepspeed.initialize(model=net())
    with pytest.raises(AssertionError, match="two"):
        deepspeed.initialize(args=type("Args", (), {"deepspeed_config": "x.json"})(), model=net(), config=config(1, 1, 1))
    engine, *_ = deepspeed.initialize(model=net(), config=config(1, 1, 1))
    with pytest.raises(AssertionError, match="scalar"):
        engine.backward(engine(torch.zeros(2, WIDTH)))


def test_batch_sizes_change():
    engine, *_ = deepspeed.initialize(model=net(), config=config(1, 1, 2))
    engine.set_train_batch_size(BATCH * 4)
    assert engine.gradient_accumulation_steps() == 4
    with pytest.raises(ValueError, match="divisible"):
        engine.set_train_batch_size(BATCH * 4 + 1)


def test_training_data():
    data = torch.utils.data.TensorDataset(torch.arange(20).float().view(10, 2), torch.arange(10))

    def body(rank):
        engine, _, loader, _ = deepspeed.initialize(
            model=nn.Linear(2, 2), training_data=data, config={"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
        )
        return [label for _, labels in loader for label in labels.tolist()]

    seen = run_threads(2, body)
    assert len(seen[0]) == 5 and sorted(seen[0] + seen[1]) == list(range(10))


def test_unused_parameters():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x).sum()

    for ignore in (True, False):
        given = config(2, 1, 1)
        given["zero_optimization"]["ignore_unused_parameters"] = ignore
        engine, *_ = deepspeed.initialize(model=Two(), config=given)
        engine.backward(engine(torch.ones(1, 4)))
        if ignore:
            engine.step()
            continue
        with pytest.raises(AssertionError, match=r"other.weight, other.bias \(2 in all\)"):
            engine.step()


def test_no_collection_of_garbage():
    assert gc.isenabled()
    engine, *_ = deepspeed.initialize(model=net(), config=config(1, 1, 1, disable_python_gc=True))
    assert not gc.isenabled()
    engine.destroy()
    assert gc.isenabled()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_gradient_of_the_whole_loss(stage):
    """scale_wrt_gas=False divides by nothing, also where the loss is what the model returns."""

    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 1, 2))
        model, (x, y) = net(), batches(1, 2)[0][0][0]
        model(x, y).backward()
        engine.backward(engine(x, y), scale_wrt_gas=False)
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()
        for mine, theirs in zip(engine.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(mine), theirs.grad)

    run_threads(1, body)


@pytest.mark.parametrize("backward", [by_engine, by_hand])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_can_be_summed_over_ranks(stage, backward):
    """gradient_allreduce_op "sum" is the mean times the number of ranks; the loss stays what it is."""

    def body(rank):
        norms = []
        for op in ("mean", "sum"):
            engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 2, gradient_allreduce_op=op))
            for micro in batches(2, 2)[0]:
                backward(engine, engine(*micro[rank]))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        torch.testing.assert_close(norms[1], 2 * norms[0])

    run_threads(2, body)


@pytest.mark.parametrize("include", [None, ["optim_states"], ["hp_params", "lp_params"]])
def test_states_go_and_come_back(include):
    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(3, 2, 1, bf16={"enabled": True}))
        engine.backward(engine(*batches(2, 1)[0][0][rank]))
        engine.step()
        before = zs.full_state_dict(engine.module, masters=True)
        engine.offload_states(include, device="cpu", pin_memory=False, non_blocking=True)
        engine.reload_states()
        after = zs.full_state_dict(engine.module, masters=True)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_threads(2, body)


def test_what_scripts_read_of_the_optimizer():
    def body(rank):
        model = net()
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Sequential])
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config(3, 2, 1, bf16={"enabled": True}))
        assert optimizer.averaged_gradients == {} and optimizer.micro_step_id == 0
        engine.backward(engine.scale(engine(*batches(2, 1)[0][0][rank]), retain_graph=True))
        params = list(engine.module.parameters())
        slices = [deepspeed.utils.safe_get_local_grad(p) for p in params]
        assert optimizer.micro_step_id == 1
        assert all(
            torch.equal(mine.float(), theirs) for mine, theirs in zip(optimizer.averaged_gradients[0], slices, strict=True)
        )
        assert list(optimizer.get_fp32_grad_partitions()[0]) == list(range(len(params)))
        assert optimizer.fp32_groups_gradients_flat[0].numel() == sum(p.numel() for p in params)
        masters = torch.cat([deepspeed.utils.safe_get_local_fp32_param(p) for p in params])
        assert torch.equal(optimizer.fp32_partitioned_groups_flat[0], masters)
        assert list(optimizer.leaf_parameters) == [model.blocks] and len(optimizer.leaf_parameters[model.blocks]) == 4
        assert (optimizer.dynamic_loss_scale, optimizer.cur_scale) == (False, 1.0)

    run_threads(2, body)


def test_the_classes_that_scripts_ask_for():
    from zeroshard.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from zeroshard.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from zeroshard.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from zeroshard.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    def shown(stage, client=None, offload=None, **more):
        given = config(stage, 1, 1, **more)
        if offload:
            given["zero_optimization"]["offload_optimizer"] = {"device": offload}
        engine, *_ = deepspeed.initialize(model=net(), optimizer=client, config=given)
        return engine

    def body(rank):
        bf16 = {"bf16": {"enabled": True}}
        assert isinstance(shown(0).optimizer, FusedAdam)
        assert isinstance(shown(1, offload="cpu").optimizer.optimizer, DeepSpeedCPUAdam)
        assert isinstance(shown(0, **bf16).optimizer, FP16_Optimizer)
        assert isinstance(shown(0, lambda params: torch.optim.SGD(params, lr=0.1), **bf16).optimizer, FP16_UnfusedOptimizer)
        assert isinstance(shown(1, **bf16, data_types={"grad_accum_dtype": "fp32"}).optimizer, BF16_Optimizer)
        assert not isinstance(shown(1, **bf16).optimizer, BF16_Optimizer)

    run_threads(1, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_muon_of_the_configuration(stage):
    """The mark of each parameter says who steps it: hidden matrices Muon, the others AdamW."""

    def body(rank):
        given = config(stage, 2, 1)
        given["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.001, "momentum": 0.9}}
        engine, *_ = deepspeed.initialize(model=net(), config=given)
        groups = engine.optimizer.param_groups
        assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.02), (False, 0.001)]
        for (micro,) in batches(2, 1):
            engine.backward(engine(*micro[rank]))
            engine.step()
        return zs.full_state_dict(engine.module)

    mine, theirs = run_threads(2, body)
    plain, parameters = net(), {}
    for name, param in plain.named_parameters():
        parameters.setdefault(param.dim() == 2, []).append(param)
    muon = zs.Muon([
        {"params": parameters[True], "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0},
        {"params": parameters[False], "use_muon": False, "lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    ])  # fmt: skip
    for (micro,) in batches(2, 1):
        for x, y in micro:
            (plain(x, y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        muon.step()
        muon.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-4, msg=name)
        assert torch.equal(mine[name], theirs[name])
