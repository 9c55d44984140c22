"""DeepSpeed's smaller modules: leaf modules, monitors, accelerator, logger, groups, builders and stand-ins."""

import csv
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed import accelerator as acc
from zeroshard.integrations.deepspeed import communication, leaf_modules, logs, monitor, sequence, stand_ins, utilities
from zeroshard.testing import run_threads

# -- leaf modules ------------------------------------------------------------------------------------------------


class Expert(nn.Linear):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert(2, 2) for _ in range(3))
        self.gate = nn.Linear(2, 3)


def test_leaf_modules_are_marked_by_class_name_and_base():
    model = nn.Sequential(Block(), Block())
    assert leaf_modules.get_z3_leaf_modules(model) == []
    for given in (Expert, "Expert", f"{__name__}.Expert"):
        marked = leaf_modules.set_z3_leaf_modules(model, [given])
        assert len(marked) == 6 and all(isinstance(module, Expert) and leaf_modules.z3_leaf_module(module) for module in marked)
        assert leaf_modules.get_z3_leaf_modules(model) == marked
        assert leaf_modules.unset_z3_leaf_modules(model, [given]) == marked and not leaf_modules.get_z3_leaf_modules(model)
    assert len(leaf_modules.set_z3_leaf_modules(model, [nn.Linear, Expert])) == 8  # derived ones too, each once


def test_leaf_modules_by_name_and_suffix():
    model = nn.Sequential(Block(), Block())
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["0", "1.gate"]) == ([model[0], model[1].gate], [])
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["0", "x"], flag=False, raise_if_not_found=False) == (
        [model[0]],
        ["x"],
    )
    assert leaf_modules.get_z3_leaf_modules(model) == [model[1].gate]
    found, missing = leaf_modules.set_z3_leaf_modules_by_suffix(model, ["gate", "experts.1", "none"], raise_if_not_found=False)
    assert found == [model[0].gate, model[1].gate, model[0].experts[1], model[1].experts[1]] and missing == ["none"]


def test_leaf_modules_that_are_not_there():
    model = Block()
    for setter in (leaf_modules.set_z3_leaf_modules, leaf_modules.unset_z3_leaf_modules):
        with pytest.raises(ValueError, match="Conv2d.*it has Block"):
            setter(model, [nn.Conv2d])
        assert setter(model, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="nowhere"):
        leaf_modules.set_z3_leaf_modules_by_name(model, ["nowhere"])
    with pytest.raises(ValueError, match="nowhere"):
        leaf_modules.set_z3_leaf_modules_by_suffix(model, ["nowhere"])
    with pytest.raises(AssertionError):
        leaf_modules.set_z3_leaf_modules(model, [model])


def test_leaf_modules_of_the_configuration(said):
    model = nn.Sequential(Block(), Block())
    section = SimpleNamespace(classes=["Expert"], names=["0.experts.0", "nowhere"], name_suffixes=["gate"])
    assert len(leaf_modules.apply_zero_leaf_module_config(model, section)) == 8 and "nowhere" in said[-1]
    default = SimpleNamespace(classes=list(leaf_modules.DEFAULT_LEAF_MODULE_CLASSES), names=[], name_suffixes=[])
    assert leaf_modules.apply_zero_leaf_module_config(model, default) == [] and len(said) == 1
    assert leaf_modules.apply_zero_leaf_module_config(model, None) == []


@pytest.fixture
def said():
    """What the logger writes; it does not propagate, so caplog sees nothing."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logs.logger.addHandler(handler)
    yield messages
    logs.logger.removeHandler(handler)


# -- monitors ----------------------------------------------------------------------------------------------------


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files_are_laid_out_as_deepspeeds(tmp_path):
    config = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "tensorboard": {"enabled": False},
    }
    for first in (1, 2):  # a run, and one that goes on
        master = monitor.MonitorMaster(config)
        assert master.enabled and master.tb_monitor is None and master.csv_monitor.log_dir == str(tmp_path / "job")
        master.write_events([("Train/Samples/lr", 0.5, first), ("Train/Samples/train_loss", torch.tensor(2.0), first)])
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["1", "0.5"], ["2", "0.5"]]
    assert rows(tmp_path / "job" / "Train_Samples_train_loss.csv")[:2] == [["step", "train_loss"], ["1", "2.0"]]


def test_only_rank_0_writes(tmp_path):
    def work(rank):
        section = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name=f"rank{rank}")
        master = monitor.MonitorMaster(SimpleNamespace(csv_monitor=section, enabled=True))
        master.write_events([("a b", rank, 1)])
        return master.enabled

    assert run_threads(2, work) == [True, True]
    assert [path.name for path in tmp_path.rglob("*.csv")] == ["a_b.csv"] and (tmp_path / "rank0").exists()


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "comet"])
def test_monitors_that_are_not_installed_are_refused_by_name(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(zs.ConfigError, match=f"{name}.enabled.*csv_monitor"):
        monitor.MonitorMaster({name: {"enabled": True}})
    assert not monitor.MonitorMaster({name: {"enabled": False}}).enabled


def test_tensorboard_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    master = monitor.MonitorMaster({"tensorboard": {"enabled": True, "output_path": str(tmp_path)}})
    master.write_events([("loss", 1.0, 1)])
    assert list((tmp_path / "DeepSpeedJobName").glob("events.*"))


def test_every_rank_may_flush_tensorboard(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: True)
    monkeypatch.setattr(monitor.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 1)
    master = monitor.MonitorMaster({"tensorboard": {"enabled": True}})
    assert master.tb_monitor.summary_writer is None and master.tb_monitor.flush() is None


def test_wandb_where_it_is_installed(monkeypatch):
    calls = []
    fake = SimpleNamespace(init=lambda **given: calls.append(given), log=lambda data, step: calls.append((data, step)))
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: fake)
    monitor.MonitorMaster({"wandb": {"enabled": True, "team": "t"}}).write_events([("loss", 1.0, 7)])
    assert calls == [{"project": "deepspeed", "group": None, "entity": "t"}, ({"loss": 1.0}, 7)]


# -- accelerator -------------------------------------------------------------------------------------------------


@pytest.fixture
def afresh(monkeypatch):
    monkeypatch.setattr(acc, "_chosen", None)


def test_the_cpu_as_an_accelerator(afresh, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    device = acc.get_accelerator()
    assert device is acc.get_accelerator() and acc.is_current_accelerator_supported()
    assert (device._name, device.device_name(), device.device_name(1), device.current_device_name()) == ("cpu",) * 4
    assert device.communication_backend_name() == "gloo" and device.is_available() and device.device_count() >= 1
    monkeypatch.setenv("LOCAL_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device.device_count() == 3 and torch.ones(1, device=device.current_device()).device.type == "cpu"
    fast = torch.ops.mkldnn._is_mkldnn_fp16_supported()  # training in fp16 works without, slowly
    assert device.supported_dtypes() == [torch.float, *([torch.half] if fast else []), torch.bfloat16]
    assert (
        0 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory() and device.available_memory() > 0
    )
    assert device.Stream is None and device.Event is None and device.on_accelerator(torch.zeros(1))
    assert torch.equal(device.FloatTensor([1.0]), torch.ones(1)) and device.LongTensor([1]).dtype == torch.long
    state = device.get_rng_state()
    device.manual_seed_all(3)
    device.set_rng_state(state)
    assert torch.equal(state, device.get_rng_state())
    with device.stream(device.current_stream()):
        device.synchronize()
    with pytest.raises(AttributeError, match="zeroshard.deepspeed has no frobnicate"):
        device.frobnicate  # noqa: B018


def test_accelerators_that_are_not_served(afresh, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(zs.ConfigError, match="DS_ACCELERATOR.*npu"):
        acc.get_accelerator()
    with pytest.raises(TypeError):
        acc.set_accelerator("cpu")
    mine = acc.CPU_Accelerator()
    acc.set_accelerator(mine)
    assert acc.get_accelerator() is mine


def test_cuda_by_name_without_a_device():
    device = acc.CUDA_Accelerator()
    assert device.device_name() == "cuda" and device.device_name(1) == "cuda:1" and device.communication_backend_name() == "nccl"
    assert device.Stream is torch.cuda.Stream and device.device_count is torch.cuda.device_count
    assert not device.on_accelerator(torch.zeros(1))
    with pytest.raises(AttributeError, match="the cuda accelerator of zeroshard.deepspeed has no frobnicate"):
        device.frobnicate  # noqa: B018


@pytest.mark.gpu
def test_cuda_as_an_accelerator():
    device = acc.CUDA_Accelerator()
    assert device.is_available() and device.current_device_name() == "cuda:0" and device.device_count() >= 1
    tensor = device.FloatTensor([1.0] * 1000)
    device.synchronize()
    assert device.on_accelerator(tensor) and 4000 <= device.memory_allocated() <= device.max_memory_allocated()
    assert device.memory_cached() == device.memory_reserved() <= device.total_memory() and device.available_memory() > 0
    assert device.is_bf16_supported() and torch.bfloat16 in device.supported_dtypes()
    state = device.get_rng_state()
    device.manual_seed(1)
    device.set_rng_state(state)
    assert torch.equal(state, device.get_rng_state())
    with device.stream(device.Stream()):
        device.Event().record()
    device.reset_peak_memory_stats()
    assert device.is_pinned(device.pin_memory(torch.zeros(3)))


# -- logger, groups, helpers -------------------------------------------------------------------------------------


def test_messages_by_rank(said):
    def work(rank):
        logs.log_dist(f"all from {rank}", [-1], logging.WARNING)
        logs.log_dist(f"one from {rank}", [1], logging.WARNING)
        logs.log_dist(f"none from {rank}", None, logging.WARNING)

    run_threads(2, work)
    logs.log_dist("alone", None, logging.WARNING)
    logs.logger.warning_once("once")
    logs.logger.warning_once("once")
    assert sorted(said[:3]) == ["[Rank 0] all from 0", "[Rank 1] all from 1", "[Rank 1] one from 1"]
    assert said[3:] == ["[Rank -1] alone", "once"]
    with pytest.raises(ValueError, match="loud"):
        logs.set_log_level_from_string("loud")


def test_groups_are_those_of_data_parallelism():
    def work(rank):
        communication.barrier()
        assert communication.is_initialized() and communication.get_rank() == rank
        return (
            utilities.get_data_parallel_world_size(),
            utilities.get_data_parallel_rank(),
            sequence._get_sequence_parallel_world_size(),
        )

    assert run_threads(2, work) == [(2, 0, 1), (2, 1, 1)]
    assert sequence._get_sequence_parallel_group() is None and sequence._get_sequence_parallel_rank() == 0
    with pytest.raises(stand_ins.NotSupported, match="ep_size=2"):
        utilities.initialize(ep_size=2)


def test_versions_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0a1+cpu")
    for minimum, served in ((2.0, True), ("2.9", True), ("2.13", True), ("2.13.0", True), ("2.13.1", False), (3, False)):
        assert utilities.required_torch_version(min_version=minimum) is served, minimum
    assert utilities.required_torch_version(max_version="2.13") and not utilities.required_torch_version(max_version=2.5)
    with pytest.raises(AssertionError):
        utilities.required_torch_version()


def test_parameters_of_a_running_backward_are_counted():
    used, unused, frozen = (nn.Parameter(torch.ones(2), requires_grad=n < 2) for n in range(3))
    counts = []
    used.register_hook(lambda grad: counts.append(utilities.count_used_parameters_in_backward([used, unused, frozen])))
    (used * 2).sum().backward()
    assert counts == [1]
    with pytest.raises(RuntimeError, match="during backward execution"):
        utilities.count_used_parameters_in_backward([used])


def test_small_helpers(capsys, tmp_path):
    loader = utilities.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with utilities.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    utilities.see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    utilities.see_memory_usage("here", force=True)
    assert "here\nMA " in (out := capsys.readouterr().out) and "percent" in out
    from zeroshard.deepspeed.compression.helper import recursive_getattr, recursive_setattr

    recursive_setattr(model := nn.Sequential(nn.Sequential(layer)), "0.0", new := nn.Identity())
    assert recursive_getattr(model, "0.0") is new
    recursive_setattr(model, "1", new)
    assert model[1] is new


# -- builders and stand-ins --------------------------------------------------------------------------------------


def test_builders_tell_what_pure_python_does():
    for name in (
        "CPUAdamBuilder",
        "CPUAdagradBuilder",
        "CPULionBuilder",
        "FusedAdamBuilder",
        "FusedLionBuilder",
        "AsyncIOBuilder",
        "PinMemoryBuilder",
    ):
        builder = getattr(stand_ins, name)
        assert builder().is_compatible() and builder().load() and stand_ins.compatible_ops[builder.NAME]
    assert hasattr(stand_ins.CPUAdamBuilder().load(), "DeepSpeedCPUAdam")
    assert not stand_ins.compatible_ops[stand_ins.FusedLambBuilder.NAME]
    with pytest.raises(zs.ConfigError, match="InferenceBuilder.*is_compatible"):
        stand_ins.InferenceBuilder().load()
    info = utilities.torch_info
    assert torch.__version__.startswith(info["version"]) and int(info["cuda_version"].split(".")[0]) >= 0


def test_stand_ins_can_be_imported_and_derived_from_and_say_what_to_use():
    class Attention(stand_ins.DistributedAttention):
        def __init__(self):
            super().__init__(None, None)

    for build in (Attention, stand_ins.init_inference, stand_ins.set_autotp_mode):
        with pytest.raises(stand_ins.NotSupported, match="zeroshard.deepspeed has no .*: "):
            build()
    assert issubclass(stand_ins.DistributedAttention, nn.Module) and issubclass(
        stand_ins.NotSupported, (NotImplementedError, zs.ZeroshardError)
    )


def test_optimizer_bases_can_be_inherited_beside_torchs():
    class Mine(stand_ins.DeepSpeedZeroOptimizer_Stage3, torch.optim.SGD):
        pass

    mine = Mine([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert isinstance(mine, stand_ins.DeepSpeedOptimizer) and isinstance(mine, stand_ins.ZeROOptimizer)
    assert not isinstance(mine, stand_ins.FP16_Optimizer)
    stand_ins.BF16_Optimizer.register(other := type("Other", (), {}))
    assert isinstance(other(), stand_ins.DeepSpeedOptimizer)
