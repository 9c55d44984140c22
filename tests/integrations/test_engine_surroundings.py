"""What scripts do around an engine's step: loaders, autocast, timers, threads, and a start that fails on one rank."""

import json
import threading
import warnings

import pytest
import torch
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.testing import run_threads

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "steps_per_print": 3}


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def start(model=None, stage=3, **changes):
    given = {name: changes.pop(name) for name in ("training_data", "optimizer", "lr_scheduler", "collate_fn") if name in changes}
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **changes}
    if "optimizer" in given:
        config.pop("optimizer")
    return deepspeed.initialize(model=model or net(), config=config, **given)


# -- ranks of which one fails before anything is sharded ------------------------------------------------------------


@pytest.mark.parametrize("what", ["json", "optimizer", "scheduler"])
def test_a_start_that_fails_on_one_rank_fails_on_all(what, tmp_path):
    (tmp_path / "bad.json").write_text('{"train_micro_batch_size_per_gpu": 2,')
    (tmp_path / "good.json").write_text(json.dumps(CONFIG))

    def run(rank):
        def broken(*args):
            raise OSError("no space") if rank else None

        model, given = net(), {"config": CONFIG}
        if what == "json":
            given = {"config": str(tmp_path / ("bad.json" if rank else "good.json"))}
        if what == "optimizer":
            given = {"config": {"train_micro_batch_size_per_gpu": 2}}
            given["optimizer"] = broken if rank else lambda params: torch.optim.SGD(params, lr=0.1)
        if what == "scheduler":
            given["lr_scheduler"] = broken if rank else lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(Exception) as error:
            deepspeed.initialize(model=model, **given)
        deepspeed.initialize(model=model, config=CONFIG)[0].destroy()  # ranks have not lost each other
        return error.type, str(error.value)

    (kind, told), (its_kind, its) = run_threads(2, run)
    assert kind is deepspeed.DeepSpeedConfigError and "rank 1 failed" in told and its.splitlines()[0] in told
    assert its_kind is (ValueError if what == "json" else OSError)


def test_other_configurations_are_told_before_anything_changes():
    def run(rank):
        first = start(stage=1)[0]
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="gradient_accumulation_steps differs: rank 0: 1, rank 1: 2"):
            start(first.module, gradient_accumulation_steps=1 + rank)
        first.backward(first(torch.ones(2, 4)).sum())  # the engine before goes on
        first.step()
        return first.global_steps

    assert run_threads(2, run) == [1, 1]


# -- threads of one rank -------------------------------------------------------------------------------------------


def test_two_threads_in_one_engine_are_told():
    inside, go, told = threading.Event(), threading.Event(), []

    class Waits(nn.Linear):
        def forward(self, x):
            inside.set()
            go.wait(30)
            return super().forward(x)

    engine = start(Waits(4, 1))[0]
    worker = threading.Thread(target=lambda: told.append(engine(torch.ones(2, 4)).sum()))
    worker.start()
    inside.wait(30)
    for call in (lambda: engine(torch.ones(2, 4)), engine.step):
        with pytest.raises(
            zs.ZeroshardError, match=r"engine\.(forward|step): another thread is inside of this engine. Train from one"
        ):
            call()
    go.set()
    worker.join()
    engine.backward(told[0])  # one after the other they may
    engine.step()
    assert engine.was_step_applied()


# -- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "expected"), [({}, torch.float32), ({"enabled": True, "dtype": "bfloat16"}, torch.bfloat16)])
def test_the_configuration_says_whether_forward_is_under_autocast(section, expected):
    engine = start(nn.Linear(4, 1), torch_autocast=section)[0]
    for outside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            assert engine(torch.ones(2, 4)).dtype is expected
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is (torch.bfloat16 if outside else torch.float32)


# -- timers --------------------------------------------------------------------------------------------------------


def test_samples_a_second_are_measured():
    engine = start(stage=1, gradient_accumulation_steps=2)[0]
    lines = []
    engine.tput_timer.logging = lines.append
    for _ in range(12):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    timer = engine.tput_timer
    assert (timer.global_step_count, timer.micro_step_count, len(lines)) == (6, 12, 2)
    assert (
        timer.avg_samples_per_sec() == pytest.approx(4 * 4 / timer.total_elapsed_time)
        and "micro_step=12/global_step=6" in lines[-1]
    )
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
    engine.eval()
    engine(torch.ones(2, 4))
    assert not timer.started

    off = start(stage=1, timers={"throughput": {"enabled": False}})[0].tput_timer
    off.start()
    off.stop(global_step=True)
    assert off.global_step_count == 0 and off.avg_samples_per_sec() == float("-inf")


# -- data ----------------------------------------------------------------------------------------------------------


def test_a_loader_is_an_iterator_as_well():
    rows = torch.utils.data.TensorDataset(torch.arange(5.0))
    engine, _, loader, _ = start(training_data=rows, collate_fn=lambda items: torch.stack([item for (item,) in items]))
    assert len(loader) == 3 and loader.collate_fn is engine.collate_fn and loader.data_sampler is loader.sampler
    passes = [[], []]
    for found in passes:
        found.append(next(loader))
        while True:
            try:
                found.append(next(loader))
            except StopIteration:
                break
    for found in (*passes, list(loader)):
        assert [len(batch) for batch in found] == [2, 2, 1] and sorted(torch.cat(found).tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(torch.cat(passes[0]), torch.cat(passes[1]))  # the program alone says the epoch
    assert [len(batch) for (batch,) in start(training_data=rows, dataloader_drop_last=True)[2]] == [2, 2]
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="curriculum_learning"):
        start(training_data=rows, curriculum_learning={"enabled": True})


# -- what is asked of an engine ------------------------------------------------------------------------------------


def test_what_an_engine_says_of_itself():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    engine, shown, _, _ = start(model, optimizer=optimizer, lr_scheduler=scheduler)
    assert engine.client_optimizer is optimizer and engine.client_lr_scheduler is scheduler
    assert engine.optimizer_name() == "SGD" and engine.get_mom() == [0.5]
    assert engine.param_names[model[0].weight] == "0.weight"
    shown.param_groups[0]["lr"] = 0.25
    assert engine.get_lr() == [0.25] and optimizer.param_groups[0]["lr"] == 0.25
    assert not engine.amp_enabled() and not engine.random_ltd_enabled() and engine.mp_world_size == 1
    with pytest.raises(TypeError, match="load_dir: expected the folder that save_checkpoint was given, got None"):
        engine.load_checkpoint(None)
    other = start()[0]
    assert other.client_optimizer is None and other.optimizer_name() == "adamw" and other.get_mom() == [(0.9, 0.999)]


@pytest.mark.parametrize("name", [
    "runtime.zero.offload_states.get_state_devices", "runtime.fp16.loss_scaler.LossScaler", "runtime.utils.clip_grad_norm_",
    "checkpoint.DeepSpeedCheckpoint", "ops.muon.MuonWithAuxAdam", "runtime.comm.coalesced_collectives.reduce_scatter_coalesced",
    "env_report.main", "moe.mappings.gather_tokens", "utils.tensor_fragment.fragment_address", "comm.reset_log",
    "utils.timer.SynchronizedWallClockTimer", "utils.logging.print_dist",
    "utils.module_utils.recursive_getattr", "runtime.utils.copy_to_device",
    "ops.op_builder.RandomLTDBuilder", "runtime.pipe.dualpipev.DualPipeVModule", "runtime.torch_autocast.get_comm_dtype",
    "utils.groups._get_expert_parallel_group_dict", "moe.sharded_moe.TopKGate",
])  # fmt: skip
def test_names_that_are_absent_say_what_to_use(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError) as error:
        exec(f"from zeroshard.deepspeed.{module} import {attribute}")
    assert "zeroshard.deepspeed has no" in str(error.value) and "See docs" not in str(error.value)


def test_insides_of_an_optimizer_say_what_to_use():
    shown = start(stage=1)[1]
    for name in ("parallel_partitioned_bit16_groups", "nccl_start_alignment_factor"):
        with pytest.raises(AttributeError, match=rf"engine.optimizer.{name} .*use zs\.value_of\(param\)\.local"):
            getattr(shown, name)


def test_a_model_that_is_not_saved_says_why(caplog, tmp_path):
    engine = start()[0]
    deepspeed.logger.addHandler(caplog.handler)
    try:
        assert engine.save_16bit_model(str(tmp_path)) is False
    finally:
        deepspeed.logger.removeHandler(caplog.handler)
    assert "stage3_gather_16bit_weights_on_model_save is False: say true" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_set_before_any_backward_is_stepped_with(stage):
    from zeroshard.deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    def run(rank):
        model = nn.Linear(4, 3)
        with torch.no_grad():
            model.weight.fill_(1.0)
        engine = start(model, stage, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), gradient_clipping=0.0)[0]
        assert safe_get_full_grad(model.weight) is None
        safe_set_full_grad(model.weight, torch.full((3, 4), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step()
        return zs.full_state_dict(model)["weight"]

    for weight in run_threads(2, run):
        assert torch.equal(weight, torch.zeros(3, 4))
