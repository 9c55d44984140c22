"""Reading a DeepSpeed configuration: its forms, the batch triangle, what contradicts itself, and what zs.shard gets."""

import base64
import copy
import json
import math
import sys

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed import sections
from zeroshard.integrations.deepspeed.cpu_optimizers import FusedAdam
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig, dtype_of, get_bfloat16_config, get_gradient_clipping
from zeroshard.integrations.deepspeed.sections import (
    DeepSpeedConfigError,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    ValidationError,
)
from zeroshard.integrations.deepspeed.shard_options import build_optimizer, cast_buffers, shard_options
from zeroshard.testing import run_threads

BASE = {"train_batch_size": 8}


def read(given=None, ranks=1, **more):
    return DeepSpeedConfig({**BASE, **more} if given is None else given, world_size=ranks)


# -- forms ---------------------------------------------------------------------------------------------------------


def test_a_dict_a_file_and_base64_are_the_same(tmp_path):
    given = {**BASE, "zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    coded = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    for form in (given, path, str(path), coded):
        assert DeepSpeedConfig(form).zero_optimization_stage == 2
    assert given == {**BASE, "zero_optimization": {"stage": 2}}


def test_a_key_that_a_file_has_twice_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match="'enabled' more than once"):
        DeepSpeedConfig(str(path))
    coded = base64.urlsafe_b64encode(path.read_bytes()).decode()
    with pytest.raises(ValueError, match="'enabled' more than once"):
        DeepSpeedConfig(coded)


@pytest.mark.parametrize("given", ["/nowhere/ds.json", "####", base64.urlsafe_b64encode(b"[1]").decode(), 5, None])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(ValueError, match="expected a dict, the path"):
        DeepSpeedConfig(given)


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": }')
    with pytest.raises(ValueError, match="ds.json"):
        DeepSpeedConfig(path)


# -- batch sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
        (32, 4, 2, (32, 4, 2)), (32, 4, None, (32, 4, 2)), (32, None, 2, (32, 4, 2)), (None, 4, 2, (32, 4, 2)),
        (32, None, None, (32, 8, 1)), (None, 4, None, (16, 4, 1)), ("auto", 4, "auto", (16, 4, 1)),
    ],
)  # fmt: skip
def test_two_batch_sizes_give_the_third(train, micro, steps, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: value for name, value in zip(names, (train, micro, steps), strict=True) if value is not None}
    config = read(given, ranks=4)
    assert tuple(getattr(config, name) for name in names) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "32 != 4 x 3 x 4"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "30 != 4 x 1 x 4"),
        ({"train_batch_size": 2}, "2 != 0 x 1 x 4"),
        (
            {"gradient_accumulation_steps": 2},
            "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks",
        ),
        ({}, "train_batch_size or train_micro_batch_size_per_gpu is needed"),
        ({"train_batch_size": -8}, "train_batch_size: expected a number above 0, got -8"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0},
            "train_micro_batch_size_per_gpu: expected a number above 0",
        ),
    ],
)
def test_batch_sizes_that_do_not_fit_show_the_equation(given, words):
    with pytest.raises(AssertionError) as caught:
        read(given, ranks=4)
    assert words in str(caught.value)


def test_ranks_are_those_of_a_model_parallel_unit():
    class Unit:
        def get_data_parallel_world_size(self):
            return 4

    assert DeepSpeedConfig(BASE, Unit()).train_micro_batch_size_per_gpu == 2


# -- typed sections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [(5e8, 500_000_000), ("500000000", 500_000_000), (7, 7)])
def test_whole_numbers_are_taken_in_any_writing(given, expected):
    assert DeepSpeedZeroConfig(reduce_bucket_size=given).reduce_bucket_size == expected


@pytest.mark.parametrize(
    "given",
    [
        {"reduce_bucket_size": "5e8"}, {"reduce_bucket_size": 980.1}, {"reduce_bucket_size": 0},
        {"allgather_bucket_size": -1}, {"stage": 4},
        {"stage": "three"}, {"grad_hooks": True}, {"offload_param": {"device": "gpu"}}, {"offload_optimizer": {"ratio": 2}},
        {"offload_optimizer": {"nvme": "/a"}}, {"offload_param": "cpu"}, {"overlap_comm": "maybe"}, {"stage": 2,
        "offload_optimizer": {"ratio": 0.5}},
        {"compute_grad_norm": False}, {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 2},
    ],
)  # fmt: skip
def test_what_a_typed_section_does_not_take_is_named(given):
    with pytest.raises(ValidationError, match=list(given)[-1].removeprefix("stage3_")):
        DeepSpeedZeroConfig(**given)
    with pytest.raises(ValueError):
        read(zero_optimization=given)


def test_typed_sections_raise_what_programs_catch(monkeypatch):
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError, match="fp16.loss_scale: expected a finite number of at least 0.*got -1"):
        sections.DeepSpeedFP16Config(loss_scale=-1)
    # as where pydantic is not installed
    monkeypatch.setattr(sections, "ValidationError", type("ValidationError", (ValueError,), {}))
    with pytest.raises(sections.ValidationError, match="^fp16.min_loss_scale: expected a number above 0"):
        sections.DeepSpeedFP16Config(enabled=True, min_loss_scale=0)


def test_an_unknown_key_of_a_typed_section_is_given_its_neighbour():
    with pytest.raises(ValidationError, match="'overlap_com'. Did you mean 'overlap_comm'"):
        DeepSpeedZeroConfig(overlap_com=True)


def test_defaults_and_auto():
    config = DeepSpeedZeroConfig(
        stage="3", reduce_bucket_size="auto", offload_param={"device": "nvme", "nvme_path": "/a", "pin_memory": "auto"}
    )
    assert config.stage == 3 and config.overlap_comm and config.reduce_bucket_size == 500_000_000
    assert (
        isinstance(config.offload_param, DeepSpeedZeroOffloadParamConfig)
        and config.offload_param.device is OffloadDeviceEnum.nvme
    )
    assert config.offload_param.pin_memory and str(config.offload_param.nvme_path) == "/a" and config.offload_optimizer is None
    assert not DeepSpeedZeroConfig().overlap_comm


def test_deprecated_keys_are_forwarded():
    config = read(
        zero_optimization={
            "stage": 3,
            "cpu_offload": True,
            "cpu_offload_param": True,
            "stage3_gather_fp16_weights_on_model_save": True,
        }
    )
    zero = config.zero_config
    assert isinstance(zero.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig) and zero.offload_optimizer.device == "cpu"
    assert zero.offload_param.device == "cpu" and zero.gather_16bit_weights_on_model_save
    assert len(config.notes) == 3 and all("deprecated" in note for note in config.notes)
    off = read(
        zero_optimization={
            "stage": 3,
            "cpu_offload": False,
            "cpu_offload_param": False,
            "cpu_offload_use_pin_memory": False,
            "stage3_gather_fp16_weights_on_model_save": False,
        }
    )
    assert off.notes == [] and off.zero_config.offload_optimizer is None and off.zero_config.offload_param is None
    assert not off.zero_config.gather_16bit_weights_on_model_save
    with pytest.raises(AssertionError, match="cpu_offload is the old name of offload_optimizer"):
        DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "cpu"})
    assert read(zero_optimization=True).zero_optimization_stage == 1


def test_leaf_modules_are_texts_each_once():
    leaf = DeepSpeedZeroConfig(leaf_module={"classes": "a.B", "names": ["x", "x", "y"]}).leaf_module
    assert (leaf.classes, leaf.names, leaf.name_suffixes) == (["a.B"], ["x", "y"], [])
    with pytest.raises(ValidationError, match="leaf_module"):
        DeepSpeedZeroConfig(leaf_module=["a.B"])


# -- what is said, what is refused ---------------------------------------------------------------------------------


def test_unknown_keys_far_from_all_others_are_said_once(capfd):
    config = read({**BASE, "clip": 2.0, "zero_optimization.reduce_bucket_size": 5, "optimizer": {"name": "Adam"}})
    assert any(note == "clip is not a key, and is ignored." for note in config.notes)
    assert any("write reduce_bucket_size into the section zero_optimization" in note for note in config.notes)
    assert any("optimizer.name is not a key" in note for note in config.notes)
    config.say_notes(rank=1)
    assert capfd.readouterr().err == ""
    config.say_notes(rank=0)
    assert len(capfd.readouterr().err.splitlines()) == 3
    read({**BASE, "clip": 2.0}).say_notes(rank=0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "name", "meant"),
    [
        ({"zero_optimizaton": {"stage": 3}}, "zero_optimizaton", "zero_optimization"),
        ({"gradient_cliping": 2.0}, "gradient_cliping", "gradient_clipping"),
        ({"Gradient-Clipping": 2.0}, "Gradient-Clipping", "gradient_clipping"),
        ({"bfloat_16": {"enabled": True}}, "bfloat_16", "bfloat16"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ", "type"),
        ({"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}}, "optimizer.params.weigth_decay", "weight_decay"),
        ({"checkpoint": {"writer": {"decouple": True}}}, "checkpoint.writer.decouple", "decoupled"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "activation_checkpointing.cpu_checkpoint", "cpu_checkpointing"),
    ],
)
def test_unknown_keys_near_a_known_one_are_refused_at_any_depth(given, name, meant):
    with pytest.raises(
        DeepSpeedConfigError, match=rf"^{name} = .*not a key. Did you mean '{meant}'\? Rename it, or leave it out"
    ):
        read({**BASE, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": {"type": "Rprop", "params": {"etas": [0.5, 1.2]}}},  # near betas
        {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 9}}},  # near total_num_steps
    ],
)
def test_arguments_of_a_class_of_torch_are_no_unknown_keys(given):
    assert read({**BASE, **given}).notes == []


def test_a_usual_template_says_nothing():
    """Stage 3 as Transformers' documents have it, some of it filled in by Transformers."""
    config = read({
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
            "min_loss_scale": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10}},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none",
            "pin_memory": True},
            "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 900, "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": 2, "gradient_clipping": "auto", "steps_per_print": 1e5, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4, "wall_clock_breakdown": False, "elasticity": {"enabled": False},
        "amp": {"enabled": False},
    }, ranks=2)  # fmt: skip
    assert config.notes == [] and config.train_batch_size == 16 and config.gradient_clipping == 1.0
    options = shard_options(config)
    assert options["offload_optimizer"]["device"] == "cpu" and "offload_param" not in options and options["precision"] == "bf16"


def test_offload_below_its_stage_is_said():
    config = read(zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}})
    assert [note.split(" has")[0] for note in config.notes] == [
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    ]
    assert not {"offload_optimizer", "offload_param"} & shard_options(config).keys()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, AssertionError, "fp16.enabled and bf16.enabled"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, AssertionError, "stage 1, 2 or 3, got 0"),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"bf16_optimizer_states": True}},
            AssertionError,
            "needs bf16.bf16_master_weights_and_grads",
        ),
        (
            {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            AssertionError,
            "offload_optimizer with device cpu or nvme: add it, or set bf16.bf16_optimizer_states too",
        ),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, ValueError, 'gradient_allreduce_op "sum"'),
        ({"gradient_allreduce_op": "max"}, ValueError, "gradient_allreduce_op"),
        ({"communication_data_type": "int8"}, ValueError, "communication_data_type: expected fp32, fp16 or bf16"),
        ({"data_types": {"param_dtype": "fp16"}, "bf16": {"enabled": True}}, AssertionError, "param_dtype"),
        ({"data_types": {"keep_in_fp32_modules": "all"}}, DeepSpeedConfigError, "keep_in_fp32_modules"),
        ({"checkpoint": {"tag_validation": "maybe"}}, DeepSpeedConfigError, "tag_validation"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, ValidationError, "fp16.loss_scale: expected a finite number"),
        ({"fp16": {"enabled": True, "loss_scale": float("inf")}}, ValidationError, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ValidationError, "fp16.loss_scale_window"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, ValidationError, "fp16.min_loss_scale"),
        ({"fp16": True}, DeepSpeedConfigError, "fp16: expected a mapping"),
        ({"train_batch_size": "many"}, DeepSpeedConfigError, "train_batch_size: expected a whole number"),
    ],
)
def test_what_contradicts_itself_is_named(given, error, words):
    with pytest.raises(error) as caught:
        read(**given)
    assert words in str(caught.value)


def test_values_without_meaning_are_free():
    """A window of 0 says nothing with a fixed scale, or without fp16."""
    assert read(fp16={"enabled": True, "loss_scale": 8, "loss_scale_window": 0}).float16_config.loss_scale == 8
    assert read(fp16={"loss_scale_window": 0}).notes == []


def test_all_that_was_read_can_be_printed(capfd):
    read(gradient_clipping=0.25).print("ds_config")
    shown = capfd.readouterr().err
    assert "ds_config.gradient_clipping = 0.25" in shown and '"gradient_clipping": 0.25' in shown


def test_functions_that_read_one_section():
    assert get_gradient_clipping({}) == 1.0 and get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled and get_bfloat16_config({}).check_grad_overflow
    assert dtype_of("x", "torch.bfloat16") is torch.bfloat16 and dtype_of("x", None) is None


# -- zs.shard ------------------------------------------------------------------------------------------------------


def test_what_is_not_said_is_left_to_zeroshard():
    as_deepspeed = {"skip_nonfinite": False, "max_skipped_steps": math.inf, "hold_schedulers": False}
    as_deepspeed |= {"agree_buffers": False, "cast_inputs": False}
    said = {"stage": 0, "precision": "fp32", "gradient_dtype": torch.float32, **as_deepspeed}
    assert shard_options(read()) == {**said, "max_grad_norm": 1.0}
    assert shard_options(read(gradient_clipping=0)) == said


def test_gradients_accumulate_in_the_dtype_of_the_model_unless_it_is_said():
    assert shard_options(read(bf16={"enabled": True}))["gradient_dtype"] is torch.bfloat16
    options = shard_options(read(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))
    assert options["gradient_dtype"] is torch.float32


def test_the_options_of_shard():
    tier = {"device": "nvme", "nvme_path": "/fast", "buffer_count": 9}
    options = shard_options(read(
        zero_optimization={"stage": 3, "offload_optimizer": {**tier, "ratio": 0.5}, "offload_param": {**tier,
        "pin_memory": False},
                           "stage3_max_live_parameters": 1e6, "stage3_max_reuse_distance": 1e5,
                           "stage3_prefetch_bucket_size": 10},
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 3}, communication_data_type="fp32",
        data_types={"grad_accum_dtype": "fp16"},
    ))  # fmt: skip
    assert options == {
        "skip_nonfinite": True, "max_skipped_steps": math.inf, "hold_schedulers": False, "agree_buffers": False,
        "cast_inputs": False, "stage": 3, "precision": "fp16", "max_grad_norm": 1.0, "reduce_dtype": torch.float32, "gradient_dtype": torch.float16,
        "offload_optimizer": {"device": "nvme", "path": "/fast", "pin_memory": True, "ratio": 0.5},
        "offload_param": {"device": "nvme", "path": "/fast", "pin_memory": False},
        "max_live_parameters": 100_000, "prefetch_bucket_size": 10, "loss_scale": "dynamic", "initial_loss_scale": 16.0,
        "loss_scale_window": 1000, "loss_scale_delay": 1, "loss_scale_hysteresis": 3, "consecutive_hysteresis": False,
        "min_loss_scale": 1.0, "param_persistence_threshold": 100_000, "model_persistence_threshold": sys.maxsize,
    }  # fmt: skip
    assert zs.Config(**options).offload_optimizer.path == "/fast"
    assert shard_options(read(fp16={"enabled": True}))["loss_scale_hysteresis"] == 1  # stage 0
    assert shard_options(read(fp16={"enabled": True, "loss_scale": 8}))["loss_scale"] == 8


@pytest.mark.parametrize("more", [{}, {"gradient_clipping": 0, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}])
def test_a_norm_that_is_needed_cannot_be_switched_off(more):
    zero = {"stage": 2, "compute_grad_norm": False, **more.get("zero_optimization", {})}
    with pytest.raises(ValueError, match="compute_grad_norm false: clipping and offload_optimizer need the norm"):
        shard_options(read(**{**more, "zero_optimization": zero}))
    without = read(zero_optimization={"stage": 2, "compute_grad_norm": False}, gradient_clipping=0)
    assert "max_grad_norm" not in shard_options(without)


def test_a_disk_without_a_folder_is_refused():
    with pytest.raises(DeepSpeedConfigError, match="offload_optimizer: device nvme needs nvme_path"):
        shard_options(read(zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme"}}))


@pytest.mark.parametrize(
    "given",
    [
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
        {
            "zero_optimization": {"stage": 2, "cpu_offload": True},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                "stage3_max_live_parameters": 1e9,
            }
        },
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        },
    ],
    ids=["fp16", "offload", "ratio", "no masters"],
)
def test_configurations_train(given):
    config = read(**given, optimizer={"type": "Adam", "params": {"lr": 1e-2}})
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def rank_run(rank):
        model = copy.deepcopy(whole)
        model, optimizer = zs.shard(model, build_optimizer(config, model.parameters()), **shard_options(config))
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 8, dtype=config.model_dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        zs.close(model)
        return losses

    first, second = run_threads(2, rank_run)
    assert first == second and first == sorted(first, reverse=True) and len(set(first)) == 3


# -- the optimizer -------------------------------------------------------------------------------------------------


def built(kind, **params):
    weight = nn.Parameter(torch.ones(2))
    return build_optimizer(read(optimizer={"type": kind, "params": params}), [{"params": [weight], "weight_decay": 0.25}])


@pytest.mark.parametrize(
    ("kind", "params", "cls", "options"),
    [
        ("Adam", {}, FusedAdam, {"lr": 1e-3, "decoupled_weight_decay": True}),
        ("Adam", {"adam_w_mode": False}, FusedAdam, {"decoupled_weight_decay": False}),
        ("Adam", {"amsgrad": True}, torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
        ("adamw", {"adam_w_mode": False, "betas": [0.8, 0.9], "lr": "auto"}, FusedAdam, {"betas": (0.8, 0.9), "lr": 1e-3}),
        ("AdamW", {"torch_adam": True, "bias_correction": True, "fp32_optimizer_states": True}, torch.optim.AdamW, {}),
        ("Lion", {"lr": 1e-5}, zs.Lion, {"lr": 1e-5, "betas": (0.9, 0.999)}),
        ("Adagrad", {"eps": 1e-4}, torch.optim.Adagrad, {"eps": 1e-4}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
        ("sgd", {"lr": 0.5}, torch.optim.SGD, {}),
        ("RMSprop", {}, torch.optim.RMSprop, {}),
    ],
)
def test_the_optimizer_of_a_configuration(kind, params, cls, options):
    optimizer = built(kind, **params)
    assert type(optimizer) is cls and optimizer.param_groups[0]["weight_decay"] == 0.25
    assert {name: optimizer.param_groups[0][name] for name in options} == options


def test_the_default_decay_is_that_of_deepspeed():
    """0, where torch's AdamW has 0.01."""
    config = read(optimizer={"type": "AdamW"})
    assert build_optimizer(config, [nn.Parameter(torch.ones(1))]).param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["Lamb", "MuAdam", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_optimizers_that_are_refused_are_named_with_the_remedy(kind):
    with pytest.raises(DeepSpeedConfigError, match=f"(?i){kind}' is not supported.*initialize"):
        built(kind)


def test_muon_needs_to_know_what_is_a_hidden_matrix():
    with pytest.raises(ValueError, match="use_muon"):
        built("Muon")


def test_autocast_in_fp16_is_refused():
    with pytest.raises(DeepSpeedConfigError, match="bfloat16, or fp16.enabled"):
        read(torch_autocast={"enabled": True, "dtype": "fp16"})


def test_other_errors_of_an_optimizer():
    with pytest.raises(ValueError, match="gradient_clipping"):
        built("Adam", max_grad_norm=1.0)
    with pytest.raises(DeepSpeedConfigError, match="Did you mean 'AdamW'"):
        built("AdamWW")
    with pytest.raises(DeepSpeedConfigError, match="bias_correction"):
        built("Adam", bias_correction=False)
    with pytest.raises(DeepSpeedConfigError, match="optimizer.type is missing"):
        build_optimizer(read(), [])


# -- buffers -------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    _keep_in_fp32_modules_strict = ("bias*",)

    def __init__(self):
        super().__init__()
        for name in ("table", "bias_of_router"):
            self.register_buffer(name, torch.ones(2))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("types", "table", "bias"),
    [
        ({}, torch.float32, torch.float32),
        ({"buffer_dtype": "bf16"}, torch.bfloat16, torch.float32),
        ({"buffer_dtype": "bf16", "keep_in_fp32_modules": []}, torch.bfloat16, torch.bfloat16),
        ({"buffer_dtype": "bf16", "keep_in_fp32_modules": ["rope.t*le"]}, torch.float32, torch.bfloat16),
    ],
)
def test_buffers_take_the_dtype_that_is_asked_for(types, table, bias):
    model = nn.ModuleDict({"rope": Rotary()})
    cast_buffers(read(data_types=types, bf16={"enabled": True}), model)
    assert (model["rope"].table.dtype, model["rope"].bias_of_router.dtype, model["rope"].count.dtype) == (
        table,
        bias,
        torch.int64,
    )


def test_zero_plus_plus_and_mics_are_options_of_stage_3():
    keys = {"zero_hpz_partition_size": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True}

    def options(stage, **given):
        return shard_options(read(ranks=8, zero_optimization={"stage": stage, **given}))

    config = zs.Config.build(None, **options(3, **keys))
    assert config.zero_hpz_partition_size == 4 and config.zero_quantized_weights.codec == "int8"
    assert config.zero_quantized_gradients == zs.Compression("int4")
    assert options(2, **keys) == options(2) and options(3, mics_shard_size=-1, zero_hpz_partition_size=0) == options(3)
    assert zs.Config.build(None, **options(3, mics_shard_size=4)).shard_size == 4
    loco = options(3, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024})
    assert zs.Config.build(None, **loco).zero_quantized_gradients == zs.Compression("int4", error_feedback=True)
