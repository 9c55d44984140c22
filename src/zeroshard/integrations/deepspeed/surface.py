"""What DeepSpeed's interface has: module -> name -> where it is here, "module:attribute" of this package.

One line a module: names that frameworks and scripts touch. A module that is not listed is not there; a name that is not
listed says what to use instead (INSTEAD).
"""

from __future__ import annotations


def _all(module: str, *names: str) -> dict[str, str]:
    """Names that are what they are called in one module."""
    return {name: f"{module}:{name}" for name in names}


SURFACE: dict[str, dict[str, str]] = {
    "": {
        **_all("setup", "initialize", "add_config_arguments"),
        **_all("engine", "DeepSpeedEngine"),
        **_all("install", "install"),
        "__version__": "version:TEXT", "version": "version:TEXT",
        "__version_major__": "version:MAJOR", "__version_minor__": "version:MINOR", "__version_patch__": "version:PATCH",
        "__git_hash__": "version:UNKNOWN", "__git_branch__": "version:UNKNOWN", "git_hash": "version:UNKNOWN",
        **_all("ds_config", "DeepSpeedConfig", "DeepSpeedConfigError"),
    },
    "runtime.engine": {**_all("engine", "DeepSpeedEngine"), "MEMORY_OPT_ALLREDUCE_SIZE": "version:ALLREDUCE_NUMEL"},
    **dict.fromkeys(("checkpointing", "runtime.activation_checkpointing.checkpointing"), {
        **_all("activation", "configure", "is_configured", "checkpoint", "reset", "model_parallel_cuda_manual_seed", "get_cuda_rng_tracker"),
        "non_reentrant_checkpoint": "activation:checkpoint",
    }),
    "runtime.dataloader": _all("data_loader", "DeepSpeedDataLoader", "RepeatingLoader"),
    "utils.zero_to_fp32": _all(
        "zero_to_fp32", "get_fp32_state_dict_from_zero_checkpoint", "convert_zero_checkpoint_to_fp32_state_dict",
        "load_state_dict_from_zero_checkpoint", "get_model_state_file", "get_optim_files",
    ),
    "runtime.zero.stage_1_and_2": _all("engine_optimizer", "DeepSpeedZeroOptimizer"),
    "runtime.zero.stage3": _all("engine_optimizer", "DeepSpeedZeroOptimizer_Stage3"),
    "runtime.bf16_optimizer": _all("engine_optimizer", "BF16_Optimizer"),
    "runtime.fp16.fused_optimizer": _all("engine_optimizer", "FP16_Optimizer"),
}  # fmt: skip

INSTEAD: dict[str, str] = {
    "init_inference": "It trains: export weights with engine.save_16bit_model() and use an inference engine.",
    "inference": "It trains: export weights with engine.save_16bit_model() and use an inference engine.",
    "tp_model_init": "Use torch.distributed.tensor.parallel, and a data-parallel group by initialize(mpu=...).",
    "module_inject": "There are no fused kernels to put in: the model's own modules run, or torch.compile them.",
    "compression": "Quantize or prune exported weights with a tool of your own.",
    "autotuning": "zeroshard forecast says what a configuration takes before it runs.",
    "profiling": "Use torch.profiler and torch.utils.flop_counter.",
    "elasticity": "Checkpoints load at any number of ranks: start again with the ranks that there are.",
    "sequence": "Sequence parallelism is not served.",
}
