"""Names of DeepSpeed's inside that programs read: what they show here is true of what this engine does."""

import logging
import math
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from engine_kit import BATCH, batches, config, net
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.errors import ConfigError
from zeroshard.state.parameter_access import state_of, value_of
from zeroshard.testing import run_threads


def one_step(engine, rank):
    engine.backward(engine(*batches(2, 1)[0][0][rank]))
    engine.step()


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [(32, 16, 1, (32, 16, 1)), (32, 8, None, (32, 8, 2)), (32, None, 2, (32, 8, 2)), (None, 16, 2, (64, 16, 2)), (32, None, None, (32, 16, 1)),
     (33, 17, 2, None), (None, None, 2, None)],
)  # fmt: skip
def test_batch_sizes_are_solved_again_when_a_program_has_written_them(train, micro, steps, expected):
    read = deepspeed.DeepSpeedConfig({"train_batch_size": 4}, world_size=2)
    read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps = train, micro, steps
    if expected is None:
        with pytest.raises(AssertionError, match="train_batch_size"):
            read._configure_train_batch_size()
        return
    read._configure_train_batch_size()
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == expected


def test_the_flat_groups_of_stage_3_are_equal_parts_of_each_parameter():
    """Between _set_ and _clear_fp32_optimizer_param_groups `optimizer.optimizer` has a flat parameter a group; states lie like it."""

    def body(rank):
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(3, 2, 1))
        one_step(engine, rank)
        optimizer._set_fp32_optimizer_param_groups()
        shown = optimizer.optimizer.state_dict()
        (flat,) = optimizer.optimizer.param_groups[0]["params"]
        optimizer._clear_fp32_optimizer_param_groups()
        params = list(engine.module.parameters())
        assert list(optimizer.optimizer.param_groups[0]["params"]) == params  # the sharded one again
        assert shown["param_groups"][0]["lr"] == 0.01 and int(shown["state"][0]["step"]) == 1
        whole = [(value_of(param).full(), state_of(param, "exp_avg").full()) for param in params]
        return flat, shown["state"][0]["exp_avg"], whole

    runs = run_threads(2, body)
    place = 0
    for value, average in runs[0][2]:
        size = math.ceil(value.numel() / 2)
        for at, whole in ((0, value), (1, average)):
            joined = torch.cat([run[at][place : place + size] for run in runs])
            assert torch.equal(joined[: whole.numel()], whole.flatten()) and not joined[whole.numel() :].any()
        place += size
    assert place == runs[0][0].numel() == runs[0][1].numel()


def test_the_throughput_timer_shows_when_it_measures():
    engine, *_ = deepspeed.initialize(model=net(), config=config(1, 1, 1))
    timer = engine.tput_timer
    timer.stop()
    assert not timer.initialized and timer.start_time == timer.micro_step_count == 0
    for _ in range(timer.start_step):
        timer.start()
        timer.stop(global_step=True)
    assert timer.initialized and timer.start_time == timer.total_elapsed_time == 0 and timer.global_step_count == 2
    timer.start()
    timer.stop()
    assert timer.total_elapsed_time == timer.step_elapsed_time == timer.end_time - timer.start_time > 0


@pytest.mark.parametrize(
    ("stage", "name"), [(1, "single_partition_of_fp32_groups"), (2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")]
)
def test_the_state_dict_of_the_optimizer_tells_what_deepspeeds_does(stage, name, tmp_path):
    def body(rank):
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 1))
        one_step(engine, rank)
        state = optimizer.state_dict()
        assert (state["zero_stage"], state["partition_count"], state["overflow"]) == (stage, 2, False)
        torch.save(state, tmp_path / f"{rank}.pt")
        before = zs.full_optimizer_state(engine.module)
        one_step(engine, rank)
        optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        for param, entries in zs.full_optimizer_state(engine.module).items():
            assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(before[param][key])) for key, value in entries.items())
        with pytest.raises(ConfigError, match="of 3 ranks, and there are 2. engine.save_checkpoint"):
            optimizer.optimizer.load_state_dict({**state, "partition_count": 3})
        return state[name][0].numel(), state["state"], sum(param.numel() for param in engine.module.parameters())

    ((mine, state, numel), (other, theirs, _)) = run_threads(2, body)
    assert mine + other == numel
    for number, entries in state.items():
        sizes = {(type(each["exp_avg"]), each["exp_avg"].shape) for each in (entries, theirs[number])}
        assert len(sizes) == 1 and sizes.pop()[0] is torch.Tensor  # ordinary, and as long on every rank: programs gather them


def test_elements_of_a_part_are_counted_for_each_parameter():
    def body(rank):
        with deepspeed.zero.Init(config_dict_or_path=config(3, 2, 1)):
            model = nn.Linear(32, 2)
        before = [param.partition_numel() for param in model.parameters()]
        engine, *_ = deepspeed.initialize(model=model, config=config(3, 2, 1))
        return before, [param.partition_numel() for param in engine.module.parameters()]

    assert run_threads(2, body) == [([32, 1], [32, 1])] * 2


def test_the_optimizer_has_the_name_of_the_users_class():
    """By which monitors call the learning rate: lr-SGD."""
    model = net()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 1)
    given = {"train_batch_size": BATCH, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=mine, config=given, lr_scheduler=scheduler)
    assert type(scheduler.optimizer).__name__ == type(engine.optimizer.optimizer).__name__ == "SGD" and repr(mine).startswith(
        "SGD ("
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_again_whose_parameters_were_listed_before_and_a_graph_still_holds(stage):
    model = net()
    engine, *_ = deepspeed.initialize(model=model, config=config(stage, 1, 1))
    loss = engine(*batches(1, 1)[0][0][0])
    engine.backward(loss)
    listed = [{"params": list(model.parameters()), "name": "parameters"}]
    again, optimizer, *_ = deepspeed.initialize(model=model, config=config(stage, 1, 1), model_parameters=listed)
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in model.parameters()]
    before = zs.full_state_dict(model)
    again.backward(again(*batches(1, 1)[0][0][0]))
    again.step()
    assert not any(torch.equal(value, before[name]) for name, value in zs.full_state_dict(model).items()) and loss.requires_grad


def test_initialize_says_its_version():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel(logging.INFO)
    deepspeed.utils.logger.addHandler(handler)
    try:
        deepspeed.initialize(model=net(), config=config(1, 1, 1))
    finally:
        deepspeed.utils.logger.removeHandler(handler)
        deepspeed.utils.logger.setLevel(level)
    assert any(f"DeepSpeed info: version={deepspeed.__version__}, git-hash=None, git-branch=None" in text for text in said)


def test_the_configuration_of_old_scripts_arguments():
    engine, *_ = deepspeed.initialize(args=SimpleNamespace(deepscale_config=config(1, 1, 1), local_rank=0), model=net())
    assert engine.zero_optimization_stage() == 1


@pytest.mark.parametrize(
    ("stage", "model"), [(1, "mp_rank_00_model_states.pt"), (3, "zero_pp_rank_0_mp_rank_00_model_states.pt")]
)
def test_names_of_checkpoint_files(stage, model, tmp_path):
    def body(rank):
        engine, *_ = deepspeed.initialize(model=net().bfloat16(), config=config(stage, 2, 1, bf16={"enabled": True}))
        engine.save_checkpoint(tmp_path, tag="here")

    run_threads(2, body)
    optimizers = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    assert {path.name for path in (tmp_path / "here").glob("*.pt")} == {model, *optimizers}


def test_programs_call_and_replace_steps_of_deepspeeds(tmp_path, monkeypatch):
    """Those that write checkpoints themselves, put the script elsewhere, or take off the hooks of stage 3."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config(3, 1, 1))
    engine._copy_recovery_script(tmp_path)
    assert (tmp_path / "zero_to_fp32.py").is_file()
    copied = []
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "_copy_recovery_script", lambda self, save_path: copied.append(save_path))
    engine.save_checkpoint(tmp_path / "run")
    assert copied == [tmp_path / "run"] and not (tmp_path / "run" / "zero_to_fp32.py").exists()
    optimizer.parameter_offload._remove_module_hooks()
    assert optimizer.parameter_offload.forward_hooks == optimizer.parameter_offload.backward_hooks == []


def test_zero_init_refuses_a_group_that_contradicts_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="the process group has one rank"):
        run_threads(1, lambda rank: deepspeed.zero.Init(config_dict_or_path=config(3, 1, 1)))


def test_the_log_level_of_the_configuration():
    from zeroshard.deepspeed.runtime.config import get_log_level

    assert get_log_level({}) is None and get_log_level({"log_level": "ERROR"}) == "ERROR"
    level = deepspeed.utils.logger.level
    try:
        engine, *_ = deepspeed.initialize(model=net(), config=config(1, 1, 1, log_level="ERROR"))
        assert engine.log_level() == "ERROR" and deepspeed.utils.logger.level == logging.ERROR
    finally:
        deepspeed.utils.logger.setLevel(level)
        for handler in deepspeed.utils.logger.handlers:
            handler.setLevel(logging.NOTSET)


def test_files_of_optimizer_states_come_in_the_order_of_ranks(tmp_path):
    from zeroshard.deepspeed.utils.zero_to_fp32 import get_optim_files

    names = [
        f"{before}{rank}_mp_rank_00_optim_states.pt" for before in ("bf16_zero_pp_rank_", "zero_pp_rank_") for rank in range(12)
    ]
    for kind in (names[:12], names[12:], [f"zero_{number}_optim_states.pt" for number in range(11)]):
        for path in tmp_path.glob("*"):
            path.unlink()
        for name in kind:
            (tmp_path / name).touch()
        assert get_optim_files(tmp_path) == [str(tmp_path / name) for name in kind]


def test_the_norms_of_the_groups_follow_what_is_written_into_gradients():
    def body(rank):
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(3, 2, 1))
        engine.backward(engine(*batches(2, 1)[0][0][rank]))
        before, norms = optimizer._get_norm_groups(), []
        for param in engine.module.parameters():
            norms.append(deepspeed.utils.safe_get_full_grad(param).norm())
            deepspeed.utils.safe_set_full_grad(param, deepspeed.utils.safe_get_full_grad(param) / 2)
        after = optimizer._get_norm_groups()
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(after[0].item(), rel=1e-5)
        return before[0].item(), after[0].item(), torch.stack(norms).norm().item()

    for before, after, expected in run_threads(2, body):
        assert (before, after) == pytest.approx((expected, expected / 2), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "group", "said", "refused"),
    [(1, None, "8", True), (8, None, "8", False), (1, None, "1", False), (1, None, None, False), (1, None, "some", False), (1, "mine", "8", False)],
)  # fmt: skip
def test_a_group_of_one_rank_that_nobody_chose(ranks, group, said, refused):
    from zeroshard.deepspeed.runtime.zero.partition_parameters import _contradicting_single_rank_pg_error as contradiction

    told = contradiction(ranks, group, {} if said is None else {"WORLD_SIZE": said})
    assert (told is not None) == refused and (told is None or ("WORLD_SIZE=8" in told and "init_distributed" in told))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_scaler_is_read_as_it_changes(stage):
    """Held from the start on, it tells scale and steps: doubled by the good one after a window of them, halved by an overflow."""
    given = config(
        stage,
        1,
        1,
        fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4},
    )
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=given)
    scaler, told = optimizer.loss_scaler, []
    rules = scaler.scale_window, scaler.min_scale, scaler.scale_factor, scaler.dynamic, scaler.cur_hysteresis
    assert rules == (2, 4.0, 2.0, True, 1) and optimizer.dynamic_loss_scale and optimizer.needs_scaler()
    x, y = batches(1, 1)[0][0][0]
    for factor in (1.0, 1.0, 1.0, float("inf")):
        told.append((scaler.cur_iter, scaler.cur_scale, optimizer.loss_scale_config.cur_scale))
        engine.backward(engine(x.half(), y.half()) * factor)
        engine.step()
    assert told == [(0, 256, 256), (1, 256, 256), (2, 256, 256), (3, 512, 512)]
    assert (scaler.cur_iter, scaler.cur_scale, optimizer.loss_scale) == (4, 256, 256)
    plain = deepspeed.initialize(model=net(), config=config(stage, 1, 1))[1]
    static = plain.loss_scale_config
    assert plain.loss_scaler is None and (static.dynamic_loss_scale, static.cur_scale, static.cur_iter) == (False, 1, 0)
    assert plain.low_precision_dtype is torch.float32


@pytest.mark.parametrize(("daemonic", "workers"), [(True, 0), (False, 2)])
def test_ranks_that_may_have_no_children_fetch_samples_themselves(daemonic, workers, monkeypatch):
    """As those of a multiprocessing.Pool, in which DeepSpeed's own tests run."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", daemonic)
    data = torch.utils.data.TensorDataset(torch.zeros(4, 12), torch.zeros(4, 3))
    *_, loader, _ = deepspeed.initialize(model=net(), config=config(1, 1, 1), training_data=data)
    assert loader.num_local_io_workers == workers and len(list(loader)) == 2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_derivative_of_torch_func_is_that_of_the_module(stage):
    """The mean over micro-batches is of training: torch.func asks for a plain derivative."""
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 1, 4))
    x, y = batches(1, 1)[0][0][0]
    torch.testing.assert_close(torch.func.grad(lambda x: engine(x, y))(x), torch.func.grad(lambda x: net()(x, y))(x))


def test_checkpointed_functions_take_keywords():
    x, scale = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = deepspeed.checkpointing.checkpoint(lambda x, *, scale, offset: x * scale + offset, x, scale=scale, offset=1.5)
    out.sum().backward()
    assert torch.equal(out, x * scale + 1.5) and torch.equal(x.grad, scale) and torch.equal(scale.grad, x)
