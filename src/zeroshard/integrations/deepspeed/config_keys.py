"""Every key of a DeepSpeed configuration (0.19.8, and older templates), with its treatment here, as data.

    honoured   the key changes the computation, the storage, checkpoints or reports
    noted      the key is accepted and has no effect: results do not depend on it. A value other than the default gets a warning
               with the reason
    refused    the key is not supported: it raises an error with the remedy, unless its value is the default or switches it off.
               A section that is refused has no rows for its keys

`KEYS` maps the full name ("zero_optimization.stage") to its row. ds_config.py reads configurations by these rows, sections.py
makes typed sections from them, and scripts/config_page.py a document.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

Values = Mapping[str, Any]  # a configuration, or a section of it: name of a key -> its value, of any JSON type


class Treatment(Enum):
    """Treatment of a key; the docstring of this module defines the three."""

    HONOURED = "honoured"
    NOTED = "noted"
    REFUSED = "refused"


def is_on(value: object) -> bool:
    """Return whether a section or switch is on; templates write `"enabled": false`, {} or None for 'off'."""
    if not isinstance(value, Mapping):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return is_on(value["enabled"])
    parts = [is_on(part) for part in value.values() if isinstance(part, Mapping)]
    return any(parts) if parts else bool(value)


def _several(value: object) -> bool:
    """Return whether a value is a number of ranks above one."""
    return isinstance(value, (int, float)) and value > 1


@dataclass(frozen=True)
class Key:
    """One key of a configuration.

    name:    full name, with dots. aliases: other names in the same section.
    default: default in DeepSpeed 0.19.8, or None if it has none, or is in a section that is refused as a whole.
    text:    honoured: its effect; noted: the reason why it has none; refused: the remedy.
    kind:    how a typed section reads a value (sections.READERS); "any" in other sections, which DeepSpeed does not check.
    option:  honoured: the option of zs.shard that it sets, if any.
    is_on:   refused: function that returns whether a value switches the key on.
    fits:    noted: further values that get no warning, since they describe zeroshard's behaviour.
    """

    treatment: Treatment
    name: str
    default: Any
    text: str
    kind: str = "any"
    option: str | None = None
    aliases: tuple[str, ...] = ()
    is_on: Callable[[object], bool] = is_on
    fits: tuple[object, ...] = ()

    @property
    def field(self) -> str:
        """Name of the key in its section."""
        return self.name.rpartition(".")[2]


_H, _N, _R = (functools.partial(Key, treatment) for treatment in Treatment)  # in a table, a row's first column


def _stage3(key: Key) -> Key:
    """Return a key that may also be written with the prefix "stage3_"."""
    return replace(key, aliases=("stage3_" + key.name,))


_SAME = "results are the same"
_TOP = (
    _H("train_batch_size", None, "samples a step on all ranks: micro batch x accumulation x ranks"),
    _H("train_micro_batch_size_per_gpu", None, "samples a rank and micro batch"),
    _H("gradient_accumulation_steps", None, "micro batches a step"),
    _H("managed_gradient_accumulation", True, "false: every step() updates, the caller scales the loss"),
    _H("optimizer", None, "built where initialize() is given none"),
    _H("optimizer.type", None,
        "Adam (AdamW unless adam_w_mode is false), AdamW, Adagrad, Lion, Muon, or a class of torch.optim; others are refused by name"),
    _H("optimizer.params", None, "arguments of the class"),
    *(_H(f"optimizer.params.{name}", value, "argument of the class") for name, value in {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "amsgrad": False}.items()),
    _H("optimizer.params.adam_w_mode", True, "Adam: decoupled weight decay"),
    _H("optimizer.params.bias_correction", True, "Adam: only true is taken"),
    _N("optimizer.params.torch_adam", False, "Adam is torch's in any case"),
    _N("optimizer.params.foreach", None, "shards are stepped as flat stretches, whichever loop that is"),
    _N("optimizer.params.set_grad_none", True, "zero_grad() decides"),
    _H("optimizer.params.fp32_optimizer_states", True,
        "false, with bf16_master_weights_and_grads: states in bf16; fp32 masters have fp32 states in any case"),
    _R("optimizer.params.max_grad_norm", None, "set gradient_clipping at the top level instead"),
    _H("optimizer.params.muon_lr", None, "Muon: lr of the matrices that it steps"),
    _H("optimizer.params.adam_lr", None, "Muon: lr of the others, which AdamW steps"),
    _N("optimizer.params.ns_method", "gram", "Muon orthogonalizes by the Newton-Schulz iteration of torch.optim.Muon"),
    _R("optimizer.params.per_head_muon", None, "leave it out: Muon orthogonalizes whole matrices"),
    _N("optimizer.legacy_fusion", False, "there are no fused kernels to choose from"),
    _H("scheduler", None, "built where initialize() is given none"),
    _H("scheduler.type", None,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler"),
    _H("scheduler.params", None, "arguments of the class"),
    *(_H(f"scheduler.params.{name}", value, "argument of the class") for name, value in {
        "last_batch_iteration": -1, "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False, "cycle_min_lr": None, "cycle_max_lr": None, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
        "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0, "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log", "total_num_steps": None, "warmup_min_ratio": 0.0,
        "cos_min_ratio": 1e-4}.items()),
    _H("gradient_clipping", 1.0, "bound of the global norm; 0: none", option="max_grad_norm"),
    _N("prescale_gradients", False, f"gradients are summed in fp32, where the order of division is no matter: {_SAME}"),
    _N("gradient_predivide_factor", 1.0, f"gradients are summed in fp32, where the order of division is no matter: {_SAME}"),
    _H("gradient_allreduce_op", "mean", '"sum": gradients are added up over ranks, stages 0 to 2'),
    _H("communication_data_type", None, "fp32, fp16 or bf16: dtype in which gradients are sent (sums are fp32)",
        option="reduce_dtype"),
    _N("seq_parallel_communication_data_type", "fp32", "there is no sequence parallelism"),
    _H("data_types", None, "below"),
    _H("data_types.grad_accum_dtype", None, "dtype in which gradients rest and accumulate; that of the enabled precision where it is not given",
        option="gradient_dtype"),
    _H("data_types.param_dtype", None, "must be that of the enabled precision"),
    _H("data_types.buffer_dtype", None, "floating-point buffers are cast to it; they stay as they are where it is not given"),
    _H("data_types.keep_in_fp32_modules", "auto", "patterns of buffers that stay fp32 where others are cast"),
    _H("zero_allow_untested_optimizer", False, "false: a class that DeepSpeed does not list is not taken"),
    _H("zero_force_ds_cpu_optimizer", True, "true: with offload, a torch optimizer of the script's own is not taken"),
    _H("steps_per_print", None, "a line in the log every so many steps; inf: never"),
    _N("wall_clock_breakdown", False, "no timers are printed: see zs.report and torch.profiler"),
    _N("memory_breakdown", False, "memory is not printed step by step: zs.report(model) gives bytes by category"),
    _H("dump_state", False, "logs the configuration once"),
    _N("disable_allgather", False, "DeepSpeed does not read it either"),
    _H("disable_python_gc", False, "true: no automatic collection of garbage until engine.destroy()"),
    _H("dataloader_drop_last", False, "of training_data="),
    _H("log_level", None, "level of the package's logger"),
    _N("vocabulary_size", None, "a hint about alignment"),
    _N("flops_profiler", None, "operations are not counted: torch.utils.flop_counter does that"),
    _H("sequence_parallel_size", 1, "ranks along sp: so many neighbouring ranks have other tokens of the same sequences (Ulysses)"),
    _N("data_parallel_size", None, "it is the number of ranks divided by sequence_parallel_size"),
    _R("use_data_before_expert_parallelism", False, "leave it out: the ranks that divide experts (ep_size) are neighbours"),
)  # fmt: skip

_ZERO = (
    _H("stage", 0, "0: replicated, 1: optimizer states, 2: gradients, 3: parameters are sharded", "stage", "stage"),
    _N("contiguous_gradients", True, f"gradients are always in flat buffers: {_SAME}", "bool"),
    _N("reduce_scatter", True, f"each rank always gets its own shard: {_SAME}", "bool"),
    _N("reduce_bucket_size", 500_000_000, f"units (blocks of the model) are reduced, not buckets: {_SAME}", "positive"),
    _N("allgather_bucket_size", 500_000_000, f"units are gathered, not buckets: {_SAME}", "count"),
    _N("allgather_partitions", True, f"parameters are always gathered at once: {_SAME}", "bool"),
    _N("use_multi_rank_bucket_allreduce", True, f"there are no buckets: {_SAME}", "bool"),
    _N("overlap_comm", None, f"communication runs beside the computation at every stage: {_SAME}", "bool", fits=(True,)),
    _H("compute_grad_norm", True, "false (stages 1, 2): no global norm is shown, and in fp32 none makes a step be skipped", "bool", "skip_nonfinite"),
    _N("load_from_fp32_weights", True, "the fp32 masters of a checkpoint are always taken", "bool"),
    _N("elastic_checkpoint", False, "every checkpoint loads at any number of ranks", "bool"),
    _H("offload_optimizer", None, "below", "offload_optimizer", "offload_optimizer"),
    _H("offload_param", None, "below", "offload_param", "offload_param"),
    _R("zenflow", None, "leave it out, and keep offload_optimizer; zs.shard(delayed_update=...) hides the host's update"),
    _N("sub_group_size", 1_000_000_000, f"the host steps in pieces of its own size: {_SAME}", "count"),
    _H("cpu_offload", None, 'deprecated: offload_optimizer {"device": "cpu"}', "bool", "offload_optimizer"),
    _H("cpu_offload_param", None, 'deprecated: offload_param {"device": "cpu"}', "bool", "offload_param"),
    _N("cpu_offload_use_pin_memory", None, "deprecated: give pin_memory to offload_optimizer and offload_param", "bool", fits=(False,)),
    _stage3(_H("prefetch_bucket_size", 50_000_000, "elements gathered ahead of use, where it is given; 0: one unit", "count",
        "prefetch_bucket_size")),
    _stage3(_H("param_persistence_threshold", 100_000, "parameters of at most so many elements stay whole on every rank", "count",
        "param_persistence_threshold")),
    _stage3(_H("model_persistence_threshold", sys.maxsize, "at most so many elements in all stay whole so", "count",
        "model_persistence_threshold")),
    _stage3(_H("max_live_parameters", 1_000_000_000, "bounds the next one", "count", "max_live_parameters")),
    _stage3(_H("max_reuse_distance", 1_000_000_000,
        "a unit stays gathered from forward to backward if at most so many elements are gathered in "
               "between, where one of the two is given", "count", "max_live_parameters")),
    _stage3(_H("gather_16bit_weights_on_model_save", False, "save_16bit_model writes whole weights at stage 3", "bool")),
    _stage3(_N("module_granularity_threshold", 0, f"units are the blocks that repeat in the model: {_SAME}", "whole")),
    _stage3(_N("use_all_reduce_for_fetch_params", False, f"a choice of traffic: {_SAME}", "bool")),
    _stage3(_N("allgather_sequential", False, f"a choice of traffic: {_SAME}", "bool")),
    _H("stage3_gather_fp16_weights_on_model_save", None, "deprecated: gather_16bit_weights_on_model_save", "bool"),
    _H("ignore_unused_parameters", True, "false (stage 2): a parameter without a gradient is an error", "bool"),
    _R("legacy_stage1", False, "leave it out: stage 1 is one thing here", "bool"),
    _N("round_robin_gradients", False, f"ownership of gradients follows the flat layout: {_SAME}", "bool"),
    _N("parameter_alignment", False, f"flat buffers are aligned already: {_SAME}", "bool"),
    _H("zero_hpz_partition_size", 1, "stage 3: so many ranks are a node, which keeps a secondary shard of the parameters", "count",
        "zero_hpz_partition_size"),
    _H("zero_quantized_weights", False, "stage 3: parameters travel as int8 between ranks that do not share memory", "bool",
        "zero_quantized_weights"),
    _H("zero_quantized_gradients", False, "stage 3: gradients travel as int4 between ranks that do not share memory", "bool",
        "zero_quantized_gradients"),
    _R("zero_quantized_nontrainable_weights", False,
       "frozen parameters rest in their dtype: set zero_quantized_weights, which sends them as int8 too", "bool"),
    _N("memory_efficient_linear", True, f"torch.nn.functional.linear is left alone: {_SAME}", "bool"),
    _N("pipeline_loading_checkpoint", False, "ranks read only what they keep, so they need not take turns", "bool"),
    _N("override_module_apply", True, "Module.apply under zero.Init sees whole parameters in any case", "bool"),
    _N("log_trace_cache_warnings", False, "there is no trace cache to warn about", "bool"),
    _H("enable_sanity_checks", False, "what is written in GatheredParameters without modifier_rank raises; all other checks are always on", "bool"),
    _N("save_muon_momentum_buffer_in_memory", False, "states rest where offload_optimizer says", "bool"),
    _H("leaf_module", None, "below", "leaf_module"),
    _H("leaf_module.classes", ("transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                               "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                               "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"),
                               "classes gathered whole", "texts"),
    _H("leaf_module.names", (), "modules gathered whole, by name", "texts"),
    _H("leaf_module.name_suffixes", (), "modules gathered whole, by the end of their name", "texts"),
    _H("mics_shard_size", -1, "stage 3: states are sharded over groups of so many ranks, alike in all; -1: over all ranks",
        "whole", "shard_size"),
    _N("mics_hierarchical_params_gather", False, f"a choice of traffic inside of a group: {_SAME}", "bool"),
    _H("zeropp_loco_param", None, "with zero_quantized_gradients: error feedback, of the whole error, and never reset: err_beta "
       "and reset_T change nothing", "any", "zero_quantized_gradients"),
)  # fmt: skip

_PIN = "page-locked host memory where there is a GPU"
_WRITTEN = (
    _H("enabled", False, "writes loss, learning rate and loss scale", "bool"),
    _H("output_path", "", "folder", "text"),
    _H("job_name", "DeepSpeedJobName", "folder in that folder", "text"),
)
_SECTIONS: dict[str, tuple[Key, ...]] = {
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": (
        _H("device", "none", '"none", "cpu" or "nvme" (stage 3)', "device", "offload_param"),
        _H("nvme_path", None, "folder on a local disk", "path", "offload_param"),
        _N("buffer_count", 5, f"buffers have a size of their own: {_SAME}", "count"),
        _N("buffer_size", 100_000_000, f"buffers have a size of their own: {_SAME}", "count"),
        _N("max_in_cpu", 1_000_000_000, f"parameters on disk pass through the host in buffers: {_SAME}", "count"),
        _H("pin_memory", True, _PIN, "bool", "offload_param"),
    ),
    "zero_optimization.offload_optimizer": (
        _H("device", "none", '"none", "cpu" or "nvme" (stages 1 to 3)', "device", "offload_optimizer"),
        _H("nvme_path", None, "folder on a local disk", "path", "offload_optimizer"),
        _N("buffer_count", 4, f"buffers have a number of their own: {_SAME}", "count"),
        _H("pin_memory", True, _PIN, "bool", "offload_optimizer"),
        _N("pipeline_read", False, f"reads always run beside the update: {_SAME}", "bool"),
        _N("pipeline_write", False, f"writes always run beside the update: {_SAME}", "bool"),
        _N("fast_init", False, "states are made where they rest", "bool"),
        _H("ratio", 1.0, "stage 3: this share of the states is offloaded", "fraction", "offload_optimizer"),
        _R("super_offload", False, "leave it out: device cpu steps with all cores", "bool"),
        _N("cpuadam_cores_perc", 0.8, "torch.set_num_threads says how many threads step", "fraction"),
    ),
    "fp16": (
        _H("enabled", False, "parameters and activations in fp16", "bool", "precision"),
        _H("loss_scale", 0.0, "a fixed scale; 0: dynamic", "scale", "loss_scale"),
        _H("initial_scale_power", 16, "dynamic: begins with 2 to this power", "power", "initial_loss_scale"),
        _H("loss_scale_window", 1000, "dynamic: good steps before it doubles", "whole", "loss_scale_window"),
        _H("hysteresis", 2, "dynamic: this many-th overflow halves it (stages 1 to 3)", "whole", "loss_scale_hysteresis"),
        _H("consecutive_hysteresis", False, "dynamic: a good step makes overflows count from the start", "bool", "consecutive_hysteresis"),
        _H("min_loss_scale", 1, "dynamic: never below", "whole", "min_loss_scale"),
        _H("auto_cast", False, "positional inputs are cast to fp16", "bool"),
        _R("fp16_master_weights_and_grads", False, "leave it out: masters and states are fp32 then; or use bf16, and bf16.bf16_master_weights_and_grads", "bool"),
    ),
    "bf16": (
        _H("enabled", False, "parameters and activations in bf16", "bool", "precision"),
        _N("immediate_grad_update", False, "gradients are added as backward makes them in any case", "bool"),
        _H("check_grad_overflow", True, "false (stages 1 and 2, gradients not in fp32 at stage 1): a step is taken with non-finite gradients", "bool", "skip_nonfinite"),
        _H("bf16_master_weights_and_grads", False, "bf16 masters, gradients rest in bf16. Alone it needs offload_optimizer: states are fp32, and masters the "
            "parameters and 16 bits more, DeepSpeed's bytes without its rounding", "bool", "master_weights"),
        _H("bf16_optimizer_states", False, "needs the one above: bf16 parameters are stepped directly, with bf16 states, on the device or offloaded",
            "bool", "master_weights"),
    ),
    "torch_autocast": (
        _H("enabled", False, "forward under torch.autocast, parameters in fp32"),
        _H("dtype", None, "of torch.autocast"),
        _N("lower_precision_safe_modules", None, "it affects only what is sent: gradients of all modules are sent in communication_data_type"),
    ),
    "activation_checkpointing": (
        _N("partition_activations", False, "activations are partitioned over model-parallel ranks, of which there are none"),
        _H("cpu_checkpointing", False, "deepspeed.checkpointing keeps its inputs in host memory"),
        _N("number_checkpoints", None, "nothing is laid out in advance"),
        _N("contiguous_memory_optimization", False, f"a layout of buffers: {_SAME}"),
        _N("synchronize_checkpoint_boundary", False, f"nothing has to wait there: {_SAME}"),
        _N("profile", False, "no timers are printed: see torch.profiler"),
    ),
    "tensor_parallel": (
        _H("autotp_size", 0, "number of neighbouring ranks that share each layer, and read the same data; 0 and 1: none"),
        _N("tp_overlap_comm", False, f"a choice of traffic: {_SAME}"),
        _N("dtype", None, "the enabled precision says it"),
        _R("partition_config", None, "leave it out: zs.parallelize(styles=) takes styles by name"),
        *(_N(name, None, "a model is cut by the plan that it brings, or by its family's") for name in (
            "preset_model", "injection_policy_tuple")),
        *(_N(name, None, "autotp_size says how many ranks share a layer") for name in ("tensor_parallel", "tp")),
        *(_N(name, False, "it is about inference") for name in ("keep_module_on_host", "replace_with_kernel_inject")),
    ),
    "pipeline": (
        _H("activation_checkpoint_interval", 0, "of a PipelineModule: layers that are recomputed together; 0: the module's own"),
        *(_N(name, value, "DeepSpeed does not read it either: PipelineModule has arguments") for name, value in {
            "stages": "auto", "partition": "best", "seed_layers": False}.items()),
        *(_N(name, True, f"ranks that share a layer send whole activations: {_SAME}") for name in ("pipe_partitioned", "grad_partitioned")),
        _N("use_reentrant", None, f"layers are recomputed without reentrant autograd: {_SAME}"),
    ),
    "aio": (
        *(_N(name, value, f"zs.io has depths and sizes of its own: {_SAME}") for name, value in {
            "block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
            "thread_count": 1}.items()),
        _R("use_gds", False, "leave it out: files are read through host memory"),
    ),
    "checkpoint": (
        _H("tag_validation", "Warn", "Ignore, Warn or Fail where tags differ between ranks"),
        _H("load_universal", False, "load_checkpoint without a tag takes what latest_universal names"),
        _N("use_node_local_storage", False, "ranks write into one folder that all of them see"),
        _H("parallel_write", None, "below"),
        _N("parallel_write.pipeline_stage", False, "all ranks always write at the same time"),
        _N("checkpoint_serialization", True, "the format is zeroshard's own"),
        _H("writer", None, "below"),
        *(_N(f"writer.{name}", value, "all checkpoints are written by zs.io") for name, value in {
            "type": "FAST", "io_buffer_size": 64 << 20, "io_buffer_double": True, "io_multiplier": 1, "show_statistics": False,
            "data_parallel": None}.items()),
        _H("writer.decoupled", False, "save_checkpoint returns when all is copied to host memory, and a thread writes it"),
    ),
    "tensorboard": _WRITTEN,
    "csv_monitor": _WRITTEN,
    "wandb": (
        _H("enabled", False, "writes loss, learning rate and loss scale where wandb is installed, else refused", "bool"),
        _H("group", None, "of wandb.init", "text"),
        _H("team", None, "entity of wandb.init", "text"),
        _H("project", "deepspeed", "of wandb.init", "text"),
    ),
    "timers": (_H("throughput", None, "below"),),
    "timers.throughput": (
        _H("enabled", True, "engine.tput_timer measures samples a second, and logs them every steps_per_print", "bool"),
        _N("synchronized", True, "engine.tput_timer reads clocks without waiting for the device: averages are the same", "bool"),
    ),
    "comms_logger": (
        _N("enabled", False, "zs.report(model) gives bytes and calls", "bool"),
        _N("prof_all", True, "of comms_logger", "bool"),
        _N("prof_ops", (), "of comms_logger", "texts"),
        *(_N(name, False, "of comms_logger", "bool") for name in ("verbose", "debug")),
    ),
}  # fmt: skip

_GONE = "DeepSpeed has removed it as well: leave it out"
_REFUSED = (  # sections are refused as a whole, with all their keys
    _R("expert_parallel", None, "leave it out, and give ep_size to deepspeed.moe.layer.MoE; zs.divide_experts divides the experts of Transformers"),
    _R("compile", None, "leave it out; engine.compile() and torch.compile work",
        is_on=lambda section: is_on(section.get("deepcompile")) if isinstance(section, Mapping) else is_on(section)),
    _R("hybrid_engine", None, "leave it out, and generate with an inference engine or the model itself under zs.gathered"),
    _R("autotuning", None, "leave it out; `zeroshard plan` says what fits"),
    _R("data_efficiency", None, "leave it out, and give the DataLoader a sampler of your own"),
    _R("datastates_ckpt", None, "leave it out: checkpoints are written by zs.io"),
    _R("weight_quantization", None, "leave it out: quantise the trained weights"),
    _R("comet", None, "leave it out; tensorboard, csv_monitor and wandb are there"),
    _R("compression_training", None, _GONE),
    _R("amp", None, 'use "bf16", "fp16" or "torch_autocast"'),
    _R("nebula", None, _GONE),
    *(_R(name, None, _GONE) for name in (
        "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention", "graph_harvesting", "progressive_layer_drop")),
    _R("elasticity", None, "leave it out, and set the batch sizes; checkpoints load at any number of ranks"),
    _R("curriculum_learning", None, "leave it out, and order the data in a sampler of your own"),
)  # fmt: skip


KEYS: dict[str, Key] = {key.name: key for key in _TOP}
for _section, _keys in _SECTIONS.items():
    if "." not in _section:  # the rows of inner sections are among their section's keys
        KEYS[_section] = _H(_section, None, "below", aliases=("bfloat16",) if _section == "bf16" else ())
    KEYS |= {f"{_section}.{key.name}": replace(key, name=f"{_section}.{key.name}") for key in _keys}
KEYS |= {key.name: key for key in _REFUSED}
ALIASES: dict[str, str] = {  # full name of an alias -> full name of its key
    f"{key.name.rpartition('.')[0]}.{alias}".removeprefix("."): key.name for key in KEYS.values() for alias in key.aliases
}


@functools.cache
def keys_of(section: str) -> tuple[Key, ...]:
    """Return the rows of the keys directly in a section; "" for the top level."""
    return tuple(key for key in KEYS.values() if key.name.rpartition(".")[0] == section)
