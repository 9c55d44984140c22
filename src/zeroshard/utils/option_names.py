"""Names of options, and of values that options take, as the commands list them before torch is imported."""

PRESETS: dict[str, dict[str, object]] = {
    "ddp": {"stage": 0},
    "zero-1": {"stage": 1},
    "zero-2": {"stage": 2},
    "zero-3": {"stage": 3},
    "zero-offload": {"stage": 2, "offload_optimizer": "cpu"},  # arXiv 2101.06840
    "zero-3-offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    # arXiv 2104.07857; needs offload_path
    "zero-infinity": {"stage": 3, "offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"},
}

FLAGS = {  # options of zs.shard that have another name on the command line
    "zero_hpz_partition_size": "hpz", "zero_quantized_weights": "quantized_weights", "zero_quantized_gradients": "quantized_gradients",
}  # fmt: skip
TILES = ("mlp_tokens", "loss_tokens")  # arguments of zs.long_context
