"""Every key of a DeepSpeed configuration: honoured ones change what they should, noted ones say one sentence, refused ones raise.

NAMES is written down from DeepSpeed's documents and from 0.19.8 itself, apart from the table that is tested.
"""

import copy
from pathlib import Path

import pytest
import torch

from scripts import config_page
from zeroshard.integrations.deepspeed import sections
from zeroshard.integrations.deepspeed.config_keys import ALIASES, KEYS, Treatment, keys_of
from zeroshard.integrations.deepspeed.ds_config import DeepSpeedConfig
from zeroshard.integrations.deepspeed.shard_options import build_optimizer, shard_options

# section: names, section(.section): names
NAMES = """
: train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
  scheduler gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type
  seq_parallel_communication_data_type data_types zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
  wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc dataloader_drop_last log_level
  vocabulary_size sequence_parallel_size data_parallel_size use_data_before_expert_parallelism zero_optimization fp16 bf16
  torch_autocast activation_checkpointing aio checkpoint timers flops_profiler comms_logger tensorboard wandb csv_monitor
  comet pipeline tensor_parallel expert_parallel compile hybrid_engine autotuning data_efficiency datastates_ckpt
  weight_quantization nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention
  elasticity graph_harvesting curriculum_learning progressive_layer_drop
optimizer: type params legacy_fusion
optimizer.params: lr betas eps weight_decay momentum amsgrad bias_correction torch_adam adam_w_mode fp32_optimizer_states
  max_grad_norm muon_lr adam_lr ns_method per_head_muon foreach set_grad_none
scheduler: type params
scheduler.params: last_batch_iteration lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate
  lr_range_test_staircase cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
  cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate
  warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio
data_types: grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules
zero_optimization: stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size allgather_partitions
  use_multi_rank_bucket_allreduce overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_optimizer
  offload_param zenflow sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory prefetch_bucket_size
  param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
  gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
  stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
  zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights
  memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
  save_muon_momentum_buffer_in_memory leaf_module mics_shard_size mics_hierarchical_params_gather zeropp_loco_param
zero_optimization.leaf_module: classes names name_suffixes
zero_optimization.offload_param: device nvme_path buffer_count buffer_size max_in_cpu pin_memory
zero_optimization.offload_optimizer: device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio
  super_offload cpuadam_cores_perc
fp16: enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale auto_cast
  fp16_master_weights_and_grads
bf16: enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
torch_autocast: enabled dtype lower_precision_safe_modules
activation_checkpointing: partition_activations cpu_checkpointing number_checkpoints contiguous_memory_optimization
  synchronize_checkpoint_boundary profile
checkpoint: tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer
checkpoint.parallel_write: pipeline_stage
checkpoint.writer: type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled
tensor_parallel: autotp_size tp_overlap_comm dtype partition_config preset_model injection_policy_tuple tensor_parallel tp
  keep_module_on_host replace_with_kernel_inject
pipeline: activation_checkpoint_interval stages partition seed_layers pipe_partitioned grad_partitioned use_reentrant
aio: block_size queue_depth intra_op_parallelism single_submit overlap_events thread_count use_gds
tensorboard: enabled output_path job_name
csv_monitor: enabled output_path job_name
wandb: enabled group team project
timers: throughput
timers.throughput: enabled synchronized
comms_logger: enabled prof_all prof_ops verbose debug
"""


def names_of(text):
    found, section = set(), ""
    for word in text.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            found.add(f"{section}.{word}".removeprefix("."))
    return found


ABSENT = "absent"
BASE = {"train_batch_size": 8}
# section, or key: what else stands in the configuration so that it matters
AROUND = {
    "fp16": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16.enabled": {}, "bf16.enabled": {},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16.bf16_master_weights_and_grads": {"bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "bf16.bf16_optimizer_states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "optimizer": {"optimizer": {"type": "Adam", "params": {}}},
    "optimizer.type": {},
    "scheduler": {"scheduler": {"type": "WarmupLR", "params": {}}},
    "scheduler.type": {},
    "zero_optimization": {"zero_optimization": {"stage": 3}},
    "zero_optimization.stage": {},
    "zero_optimization.zeropp_loco_param": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    "zero_optimization.compute_grad_norm": {"zero_optimization": {"stage": 2}, "gradient_clipping": 0},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
        "nvme_path": "/a"}}},
    "zero_optimization.offload_optimizer": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
        "nvme_path": "/a"}}},
    "data_types.param_dtype": {"bf16": {"enabled": True}},
    "train_batch_size": {"train_batch_size": ABSENT, "train_micro_batch_size_per_gpu": 2},
}  # fmt: skip
SAMPLES = {
    "optimizer.type": "Lion", "optimizer.params.betas": [0.8, 0.9], "scheduler.type": "OneCycle",
    "gradient_allreduce_op": "sum", "communication_data_type": "bf16", "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2, "data_types.grad_accum_dtype": "fp16", "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16", "data_types.keep_in_fp32_modules": ["rotary"], "torch_autocast.dtype": "bfloat16",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"], "checkpoint.tag_validation": "fail",
    "zero_optimization.stage": 2, "zero_optimization.zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
    "zero_optimization.overlap_comm": False, "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
    "fp16.loss_scale": 128, "timers.throughput.enabled": False,
}  # fmt: skip
ATTRIBUTES = {  # section: where its keys are found
    "fp16": "float16_config.", "bf16": "bfloat16_config.", "zero_optimization": "zero_config.", "data_types": "",
        "torch_autocast": "torch_autocast_",
    "tensorboard": "monitor_config.tensorboard.", "csv_monitor": "monitor_config.csv_monitor.", "wandb": "monitor_config.wandb.",
    "optimizer": "optimizer_name", "scheduler": "scheduler_name", "activation_checkpointing": "activation_checkpointing_config.",
    "pipeline": "pipeline.", "tensor_parallel": "tensor_parallel_config.",
}  # fmt: skip
MOVED = {  # keys whose value is found elsewhere
    "optimizer.type": "optimizer_name", "scheduler.type": "scheduler_name",
        "checkpoint.tag_validation": "checkpoint_tag_validation_fail", "checkpoint.load_universal": "load_universal_checkpoint",
        "checkpoint.writer.decoupled": "checkpoint_writer_decoupled",
        "timers.throughput.enabled": "timers_config.enabled",
    "zero_optimization.cpu_offload": "zero_config.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_config.offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
}  # fmt: skip


def sample(key):
    """A value of the key that is not its default."""
    if key.name in SAMPLES:
        return SAMPLES[key.name]
    by_kind = {
        "text": "x",
        "texts": ["a.B"],
        "path": "/b",
        "fraction": 0.5,
        "count": 7,
        "positive": 7,
        "whole": 7,
        "bool": key.default is not True,
    }
    if key.kind in by_kind:
        return by_kind[key.kind]
    default = key.default
    return (
        not default
        if isinstance(default, bool)
        else f"{default}x"
        if isinstance(default, str)
        else 3
        if default is None
        else default + 1
    )


def config_with(name, value=ABSENT):
    section = name.rpartition(".")[0]
    around = next((AROUND[near] for near in (name, section, section.partition(".")[0]) if near in AROUND), {})
    given = copy.deepcopy({**BASE, **around})
    inside = given
    if value != ABSENT:
        for part in section.split(".") if section else ():
            inside = inside.setdefault(part, {})
        inside[name.rpartition(".")[2]] = value
    return {key: item for key, item in given.items() if item != ABSENT}


def read(given):
    return DeepSpeedConfig(given, world_size=2)


def found_at(config, key):
    """Where the library reads the key's value."""
    section, _, field = key.name.rpartition(".")
    if section in ("optimizer.params", "scheduler.params"):
        return getattr(config, section.replace(".", "_")).get(field)
    top, _, rest = key.name.partition(".")
    path = MOVED.get(key.name) or (ATTRIBUTES.get(top, top) + rest if rest else top)
    for part in path.split("."):
        config = getattr(config, part)
    return config


def those(treatment):
    return [pytest.param(key, id=key.name) for key in KEYS.values() if key.treatment is treatment and not keys_of(key.name)]


def test_the_table_has_every_key_and_no_other():
    assert set(KEYS) == names_of(NAMES)


@pytest.mark.parametrize("key", those(Treatment.HONOURED))
def test_honoured_keys_change_what_they_should(key, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # wandb
    plain, changed = read(config_with(key.name)), read(config_with(key.name, sample(key)))
    assert found_at(plain, key) != found_at(changed, key)
    assert all("deprecated" in note for note in changed.notes) and plain.notes == []
    before, after = shard_options(plain), shard_options(changed)
    differing = {name for name in before.keys() | after.keys() if before.get(name, ABSENT) != after.get(name, ABSENT)}
    assert key.option in differing if key.option else not differing


@pytest.mark.parametrize("key", those(Treatment.NOTED))
def test_noted_keys_say_one_sentence_and_change_nothing(key):
    plain, changed = read(config_with(key.name)), read(config_with(key.name, sample(key)))
    assert [key.name in note for note in changed.notes] == [True], changed.notes
    assert shard_options(plain) == shard_options(changed)
    for harmless in (key.default, "auto", *key.fits):
        assert read(config_with(key.name, harmless)).notes == []


SWITCHES = {"compile": {"deepcompile": True}}


def switched_on(key):
    """A configuration in which a refused key asks for something."""
    return config_with(key.name, SWITCHES.get(key.name, True if key.is_on(True) else 2))


REFUSED = [key for key in KEYS.values() if key.treatment is Treatment.REFUSED and not key.name.startswith("optimizer.")]


@pytest.mark.parametrize("key", [pytest.param(key, id=key.name) for key in REFUSED])
def test_refused_keys_raise_by_name_with_the_remedy(key):
    with pytest.raises(sections.DeepSpeedConfigError) as caught:
        read(switched_on(key))
    assert f"{key.name} = " in str(caught.value) and f"not supported: {key.text}" in str(caught.value)


@pytest.mark.parametrize("key", [pytest.param(key, id=key.name) for key in REFUSED])
def test_refused_keys_are_taken_where_they_ask_for_nothing(key):
    for value in (key.default, None, False, {}, {"enabled": False}) if key.kind == "any" else (key.default,):
        assert read(config_with(key.name, value)).notes == []


@pytest.mark.parametrize("name", ["max_grad_norm", "per_head_muon"])
def test_refused_params_of_an_optimizer_raise_when_it_is_built(name):
    config = read(config_with(f"optimizer.params.{name}", 1))  # a script may pass another optimizer
    with pytest.raises((ValueError, sections.DeepSpeedConfigError), match=name):
        build_optimizer(config, [torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("alias", ALIASES)
def test_keys_are_known_by_their_other_names(alias):
    key = KEYS[ALIASES[alias]]
    given = {**BASE, "bfloat16": {"enabled": True}} if alias == "bfloat16" else config_with(alias, sample(key))
    if alias == "bfloat16":
        assert read(given).bfloat16_config.enabled
    else:
        assert getattr(read(given).zero_config, key.field) == sample(key)


def real_models():
    # the real one is no requirement; the table's own facts are tested above
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import precision_config as precision
    from deepspeed.runtime.zero import offload_config as offload

    return [(zero.DeepSpeedZeroConfig, sections.DeepSpeedZeroConfig), (offload.DeepSpeedZeroOffloadParamConfig,
        sections.DeepSpeedZeroOffloadParamConfig),
            (offload.DeepSpeedZeroOffloadOptimizerConfig, sections.DeepSpeedZeroOffloadOptimizerConfig),
            (precision.DeepSpeedFP16Config, sections.DeepSpeedFP16Config), (precision.DeepSpeedBF16Config,
                sections.DeepSpeedBF16Config),
            (monitor.TensorBoardConfig, sections.TensorBoardConfig), (monitor.CSVConfig, sections.CSVConfig),
                (monitor.WandbConfig, sections.WandbConfig),
            (zero.DeepSpeedZeroLeafModuleConfig, sections.DeepSpeedZeroLeafModuleConfig)]  # fmt: skip


def plain(section):
    values = {key.field: getattr(section, key.field) for key in keys_of(section.prefix)}
    return {name: plain(value) if isinstance(value, sections.Section) else value for name, value in values.items()}


def test_typed_sections_have_the_fields_and_defaults_of_deepspeed_itself():
    """Where the real one is installed."""
    for real, ours in real_models():
        theirs, mine = real().model_dump(), plain(ours())
        removed = (
            {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
            if ours is sections.DeepSpeedZeroConfig
            else set()
        )
        assert mine.keys() - removed == theirs.keys()
        forwarded = {"stage3_gather_fp16_weights_on_model_save"}
        assert {n: v for n, v in theirs.items() if n not in forwarded} == {n: mine[n] for n in theirs if n not in forwarded}


def test_the_document_has_every_key():
    """Made anew: python scripts/config_page.py > docs/deepspeed-config.md."""
    document = Path(__file__).parents[2] / "docs" / "deepspeed-config.md"
    assert document.read_text() == config_page.markdown()
