"""Table of DeepSpeed's interface: the names that frameworks and scripts use, and the module of this folder that defines each.

An entry maps modules of DeepSpeed (several, if they have the same names; "." is the package itself) to "module of this folder:
names". "name=other": the module of this folder calls it `other`. Modules and names that are not listed do not exist.
"""

from __future__ import annotations

_SAFE = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)
_LEAF = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules z3_leaf_module"
)
_GROUPS = (
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group "
    "get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size initialize"
)
_INIT = (
    "DeepSpeedTensorOverride GatheredParameters Init ZeroParamStatus register_external_parameter unregister_external_parameter"
)
_TILED = "TiledLinear TiledLinearReturnBias"
_TABLE = {
    ".": "accelerator: get_accelerator; communication: TORCH_DISTRIBUTED_DEFAULT_PORT init_distributed; ds_config: "
    "DeepSpeedConfig; engine: DeepSpeedEngine; door: install; logs: log_dist logger; sections: DeepSpeedConfigError; setup: "
    "add_config_arguments initialize; pipe: PipelineModule; pipe_engine: PipelineEngine; stand_ins: DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedOptimizer "
    "DeepSpeedTransformerConfig DeepSpeedTransformerLayer InferenceEngine init_inference "
    "replace_transformer_layer set_autotp_mode; tensor_parallel: tp_model_init; utilities: OnDevice; door: __git_branch__=UNKNOWN __git_hash__=UNKNOWN "
    "__version__=VERSION "
    "__version_major__=MAJOR __version_minor__=MINOR __version_patch__=PATCH version=VERSION",
    "accelerator": "accelerator: DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator",
    "accelerator.real_accelerator": "accelerator: get_accelerator is_current_accelerator_supported set_accelerator",
    "checkpoint checkpoint.constants": "utilities: UNIVERSAL_CHECKPOINT_INFO",
    "checkpoint.ds_to_universal": "zero_to_fp32: main=convert_to_universal",
    "checkpoint.utils": "utilities: clone_tensors_for_torch_save get_model_ckpt_name_for_rank",
    "checkpointing runtime.activation_checkpointing.checkpointing": "activation: checkpoint configure is_configured "
    "model_parallel_cuda_manual_seed non_reentrant_checkpoint=checkpoint reset; stand_ins: get_cuda_rng_tracker",
    "comm comm.comm": "communication: ReduceOp __getattr__ all_gather all_gather_into_tensor all_gather_object all_reduce "
    "all_to_all all_to_all_single allgather_fn barrier broadcast broadcast_object_list configure destroy_process_group gather "
    "get_global_rank get_local_rank get_rank get_world_group get_world_size has_all_gather_into_tensor "
    "inference_all_reduce init_distributed is_available is_initialized log_summary monitored_barrier "
    "new_group recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor scatter send",
    "compression.helper": "utilities: recursive_getattr recursive_setattr",
    "constants": "communication: TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "git_version_info": "utilities: torch_info; door: version=VERSION",
    "inference.config": "stand_ins: DeepSpeedInferenceConfig",
    "launcher.runner": "launcher: DEEPSPEED_ENVIRONMENT_NAME main",
    "module_inject": "stand_ins: replace_transformer_layer set_autotp_mode",
    "moe.layer": "moe: MoE",
    "moe.utils": "moe: has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer",
    "monitor.config": "sections: CSVConfig TensorBoardConfig WandbConfig",
    "monitor.monitor": "monitor: Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor",
    "ops": "stand_ins: __compatible_ops__=compatible_ops DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    "ops.adagrad ops.adagrad.cpu_adagrad": "cpu_optimizers: DeepSpeedCPUAdagrad",
    "ops.adam": "cpu_optimizers: DeepSpeedCPUAdam FusedAdam",
    "ops.adam.cpu_adam": "cpu_optimizers: DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "cpu_optimizers: FusedAdam",
    "ops.aio": "stand_ins: AsyncIOBuilder",
    "ops.lamb ops.lamb.fused_lamb": "stand_ins: FusedLamb",
    "ops.lion": "cpu_optimizers: DeepSpeedCPULion FusedLion",
    "ops.lion.cpu_lion": "cpu_optimizers: DeepSpeedCPULion",
    "ops.lion.fused_lion": "cpu_optimizers: FusedLion",
    "ops.op_builder": "stand_ins: AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder EvoformerAttnBuilder "
    "FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder OpBuilder "
    "PinMemoryBuilder QuantizerBuilder SpatialInferenceBuilder TransformerBuilder UtilsBuilder",
    "ops.op_builder.builder": "stand_ins: OpBuilder",
    "ops.transformer": "stand_ins: DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    "pipe": "pipe: LayerSpec PipelineModule TiedLayerSpec",
    "profiling.flops_profiler": "stand_ins: FlopsProfiler",
    "runtime.base_optimizer": "stand_ins: DeepSpeedOptimizer ZeROOptimizer",
    "runtime.bf16_optimizer": "stand_ins: BF16_Optimizer",
    "runtime.config": "ds_config: ADAM_OPTIMIZER DeepSpeedConfig LAMB_OPTIMIZER get_gradient_clipping get_log_level; sections: "
    "DeepSpeedConfigError",
    "runtime.config_utils": "config_model: DeepSpeedConfigModel",
    "runtime.constants": "ds_config: GRADIENT_CLIPPING_DEFAULT LOG_LEVEL_DEFAULT",
    "runtime.dataloader": "setup: DeepSpeedDataLoader; utilities: RepeatingLoader",
    "runtime.engine": "engine: DeepSpeedEngine",
    "runtime.fp16.fused_optimizer": "stand_ins: FP16_Optimizer",
    "runtime.fp16.unfused_optimizer": "stand_ins: FP16_UnfusedOptimizer",
    "runtime.lr_schedules": "lr_schedules: COS_MIN_RATIO CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR "
    "CYCLE_MIN_MOM DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE LRRangeTest LR_RANGE_TEST LR_RANGE_TEST_MIN_LR "
    "LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE ONE_CYCLE OneCycle TOTAL_NUM_STEPS "
    "VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR "
    "WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE WarmupCosineLR WarmupDecayLR WarmupLR",
    "runtime.pipe": "pipe: LayerSpec PipelineModule TiedLayerSpec; topology: ProcessTopology",
    "runtime.pipe.engine": "pipe_engine: PipelineEngine",
    "runtime.pipe.module": "pipe: LayerSpec PipelineError PipelineModule TiedLayerSpec",
    "runtime.pipe.topology": "topology: PipeDataParallelTopology PipeModelDataParallelTopology "
    "PipelineParallelGrid ProcessTopology",
    "runtime.precision_config": "ds_config: get_bfloat16_config; sections: DeepSpeedBF16Config DeepSpeedFP16Config",
    "runtime.sequence_parallel.ulysses_sp": "sequence: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "runtime.swap_tensor": "stand_ins: MIN_SWAPPABLE_BYTES",
    "runtime.utils": "utilities: count_used_parameters_in_backward move_to_device required_torch_version see_memory_usage "
    "set_random_seed",
    "runtime.zero": f"partition: {_INIT}; engine_optimizer: unwrap_model_for_generation; linears: {_TILED}",
    "runtime.zero.config": "sections: DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
    "OffloadDeviceEnum",
    "runtime.zero.leaf_module_config": "leaf_modules: DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES "
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES; sections: DeepSpeedZeroLeafModuleConfig",
    "runtime.zero.linear": "linears: LinearFunctionForZeroStage3 LinearModuleForZeroStage3 autocast_custom_bwd autocast_custom_fwd "
    "zero3_linear_wrap",
    "runtime.zero.offload_config": "sections: DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
    "OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.zero.partition_parameters": f"accelerator: get_accelerator; linears: zero3_linear_wrap; partition: {_INIT} DEFAULT_TENSOR_OVERRIDES "
    "MultipleAllGatherHandles _contradicting_single_rank_pg_error _orig_torch_arange _orig_torch_empty is_zero_param partitioned_param_data_shape zero_wrapper_for_fp_tensor_constructor",
    "runtime.zero.stage3": "engine_optimizer: unwrap_model_for_generation; stand_ins: DeepSpeedZeroOptimizer_Stage3",
    "runtime.zero.stage_1_and_2": "stand_ins: DeepSpeedZeroOptimizer",
    "runtime.zero.tiling": f"linears: {_TILED}",
    "runtime.zero.utils": "partition: is_zero_param; stand_ins: ZeRORuntimeException",
    "sequence.layer": "stand_ins: DistributedAttention",
    "utils": f"fragments: {_SAFE}; leaf_modules: {_LEAF}; logs: log_dist logger set_log_level_from_string; "
    f"utilities: OnDevice RepeatingLoader instrument_w_nvtx {_GROUPS}",
    "utils.groups": "utilities: _get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
    f"{_GROUPS}; sequence: _get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size",
    "utils.init_on_device": "utilities: OnDevice",
    "utils.logging": "logs: log_dist log_levels logger set_log_level_from_string warning_once",
    "utils.nvtx": "utilities: instrument_w_nvtx",
    "utils.tensor_fragment": f"fragments: {_SAFE}",
    "utils.timer": "monitor: ThroughputTimer",
    "utils.torch": "utilities: required_torch_version",
    "utils.z3_leaf_module": f"leaf_modules: {_LEAF}",
    "utils.zero_to_fp32": "zero_to_fp32: convert_zero_checkpoint_to_fp32_state_dict "
    "get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint main",
    "zero": f"partition: {_INIT}; linears: {_TILED}",
}

INSTEAD: dict[str, str] = {  # module or name of DeepSpeed that does not exist here -> what to use instead
    "inference": "It trains: export weights with engine.save_16bit_model() and use an inference engine.",
    "module_inject": "There are no fused kernels to put in: the model's own modules run, or torch.compile them.",
    "compression": "Quantize or prune exported weights with a tool of your own.",
    "autotuning": "zs.report(model) tells what a rank holds, zs.forecast(model, ...) what a step takes.",
    "profiling": "Use torch.profiler and torch.utils.flop_counter.",
    "elasticity": "Checkpoints load at any number of ranks: start again with the ranks that there are.",
    "sequence": "Sequence parallelism is not served; zs.tile and zs.tiled_cross_entropy serve long sequences.",
    "linear": "Use PEFT for LoRA and quantized linear layers.",
    "checkpoint.DeepSpeedCheckpoint": "engine.load_checkpoint and zs.load read DeepSpeed's checkpoints, zeroshard export writes files.",
    "comm": "deepspeed.comm's functions are those of torch.distributed, which has the backends.",
    "compile": "There is no DeepCompile: engine.compile() takes torch.compile's backends.",
    "env_report": "`zeroshard doctor` says what a machine offers.",
    "launcher.multinode_runner": "Start nodes with torchrun, or zeroshard-deepspeed on each of them.",
    "moe": "deepspeed.moe.layer.MoE is here; its experts are a zs.Experts, which zs.divide_experts divides.",
    "monitor.comet": "Use tensorboard, csv_monitor or wandb.",
    "nebula": 'engine.save_checkpoint saves in the background with {"checkpoint": {"writer": {"decoupled": true}}}.',
    "ops.adam": "zs.shard steps torch.optim's classes on any tier; DeepSpeedCPUAdam and FusedAdam are here.",
    "ops.muon": "Use zs.Muon, or torch.optim.Muon.",
    "ops.sparse_attention": "Use torch.nn.attention.flex_attention.",
    "ops.op_builder": "Nothing is compiled: leave out what asks for it.",
    "runtime.activation_checkpointing": "deepspeed.checkpointing.checkpoint and zs.checkpoint_activations recompute activations.",
    "runtime.checkpoint_engine": "engine.save_checkpoint and load_checkpoint write and read by themselves, in the background as well.",
    "runtime.comm": "zs.shard reduces and gathers by itself; torch.distributed has collectives for code of one's own.",
    "runtime.data_pipeline": "Use a sampler or data set of torch.utils.data.",
    "runtime.fp16.loss_scaler": 'engine.optimizer.loss_scale and loss_scaler tell the scale; {"fp16": ...} says how it changes.',
    "runtime.fp16.onebit": "Use FusedAdam: momenta are not compressed.",
    "runtime.sparse_tensor": "Gradients of embeddings are dense: nn.Embedding(sparse=False).",
    "runtime.pipe": "PipelineModule and its engine run schedules by zs.Pipeline, which has DualPipeV, zero-bubble and interleaved ones.",
    "runtime.superoffload": "offload_optimizer with device cpu steps on the host; zs.shard(delayed_update=...) beside training.",
    "runtime.torch_autocast": "Gradients of all parameters are sent in communication_data_type.",
    "runtime.utils": "Norms and clipping: engine.get_global_grad_norm(), gradient_clipping, zs.clip_grad_norm_.",
    "runtime.zero.offload_states": "engine.offload_states() and reload_states() move states; zs.report(model) tells where they rest.",
    "utils.bwc": "deepspeed.utils.groups has the groups of ranks that share layers.",
    "runtime.sequence_parallel.ulysses_sp": "MLPs and losses in tiles of tokens: zs.long_context(model).",
    "utils.groups": "There are groups of data parallelism and of ranks that share layers; all others have one rank.",
    "utils.logging": "deepspeed.utils.logger is a logger of Python's logging.",
    "utils.module_utils": "model.get_submodule(name) and model.set_submodule(name, module) are torch's.",
    "utils.numa": "Start ranks under numactl, or with zeroshard-deepspeed --bind_cores_to_rank.",
    "utils.mixed_precision_linkage": "safe_get_full_fp32_param and zs.value_of read masters.",
    "utils.tensor_fragment": "safe_get_* and safe_set_* of deepspeed.utils, or zs.value_of, zs.gradient_of and zs.state_of.",
    "utils.timer": "ThroughputTimer is here; torch.profiler times what is inside of a step.",
    "utils.torch": "param.register_post_accumulate_grad_hook(hook) is torch's.",
}


def _read(table: dict[str, str]) -> dict[str, dict[str, str]]:
    """Parse the table into module of DeepSpeed -> name -> "module of this folder:attribute"."""
    surface: dict[str, dict[str, str]] = {}
    for paths, shown in table.items():
        names = {}
        for source in shown.split(";"):
            module, _, listed = source.partition(":")
            for entry in listed.split():
                name, _, attribute = entry.partition("=")
                names[name] = f"{module.strip()}:{attribute or name}"
        for path in paths.split():
            surface["" if path == "." else path] = dict(names)
    return surface


SURFACE = _read(_TABLE)
