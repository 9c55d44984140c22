"""The trainings that are compared: PROGRAM/STAGE/ACCUMULATION/OFFLOAD, and of options.py PROGRAM/STAGE/ACCUMULATION/OPTION."""


def _optimizer(kind: str, **params) -> dict:
    return {"optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}


def _scheduler(kind: str, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


KEYS = {  # added to the configuration; "zero": to zero_optimization
    "adam": _optimizer("Adam", lr=0.01, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1, adam_w_mode=False),
    "adam_as_adamw": _optimizer("Adam", lr=0.01, weight_decay=0.3),
    "adamw_defaults": _optimizer("AdamW"),
    "torch_adam": _optimizer("AdamW", lr=0.01, torch_adam=True),
    "sgd": _optimizer("SGD", lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "rmsprop": _optimizer("RMSprop", lr=0.003),
    "clip_none": {"gradient_clipping": 0.0},
    "clip_tight": {"gradient_clipping": 0.05},
    "cosine": _scheduler("WarmupCosineLR", total_num_steps=7, warmup_num_steps=2, warmup_min_ratio=0.1, cos_min_ratio=0.01),
    "one_cycle": _scheduler("OneCycle", cycle_min_lr=0.001, cycle_max_lr=0.02, cycle_first_step_size=2, decay_lr_rate=0.1),
    "range_test": _scheduler("LRRangeTest", lr_range_test_min_lr=0.001, lr_range_test_step_size=2, lr_range_test_step_rate=1.0),
    "warmup": _scheduler("WarmupLR", warmup_min_lr=0.001, warmup_max_lr=0.02, warmup_num_steps=3, warmup_type="linear"),
    "predivide": {"gradient_predivide_factor": 2.0},
    "prescale": {"prescale_gradients": True},
    "comm_fp32": {"communication_data_type": "fp32"},
    "persistent": {"zero": {"stage3_param_persistence_threshold": 10**5}},
    "small_buckets": {
        "zero": {
            "reduce_bucket_size": 50, "allgather_bucket_size": 50,
            "stage3_prefetch_bucket_size": 30, "stage3_max_live_parameters": 200,
        }
    },
    "round_robin": {"zero": {"round_robin_gradients": True}},
    "allreduce": {"zero": {"reduce_scatter": False}},
    "plain_layout": {"zero": {"overlap_comm": False, "contiguous_gradients": False}},
    "offload_both": {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    "offload_part": {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
}  # fmt: skip
STAGE_OF = {  # of what is not for all
    "predivide": 1, "prescale": 1, "round_robin": 1, "offload_both": 3, "offload_part": 3, "persistent": 3, "small_buckets": 3,
}  # fmt: skip
CALLS = (
    "groups", "lambdas", "callables", "by_hand", "unscaled", "boundaries", "born_sharded", "tied", "loader", "two_losses",
    "no_sync", "coalesced", "recomputed", "read_states", "rates_by_hand", "sizes",
)  # fmt: skip
CELLS = [
    f"{program}/{stage}/{accumulation}/{offload}"
    for program in ("raw_engine", "accelerate_loop", "trainer", "lightning_strategy", "fabric_loop")
    for stage in (1, 2, 3) for accumulation in (1, 4 if program == "raw_engine" else 2) for offload in ("none", "cpu")
]  # fmt: skip
CELLS += ["lora/1/2/none", "lora/2/1/none", "lora/2/2/cpu", "lora/3/2/none", "lora/3/1/cpu"]
CELLS += [f"options/{STAGE_OF.get(name, 1 + number % 3)}/2/{name}" for number, name in enumerate(KEYS)]
CELLS += [f"options/{stage}/2/{name}" for name in CALLS for stage in (1, 2, 3)]
CELLS += [f"pipeline/{stage}/{accumulation}/{name}" for stage, accumulation, name in (
    (0, 4, "plain"), (1, 4, "plain"), (1, 1, "plain"), (0, 4, "tied"), (1, 4, "tied"), (1, 4, "uniform"), (1, 4, "types"), (1, 2, "recomputed"),
    (1, 4, "interval_key"), (0, 4, "one_stage"), (1, 4, "one_stage"), (1, 4, "tuples"), (1, 4, "functions"), (1, 4, "seeded"),
    (1, 4, "frozen"), (1, 4, "tied_frozen"), (1, 2, "loader"), (0, 4, "sgd"), (1, 4, "sgd"),
)]  # fmt: skip
CELLS += [f"pipeline_of_four/{stage}/4/{name}" for stage, name in (
    (1, "four_stages"), (1, "four_uniform"), (1, "four_tied"), (1, "plain"), (0, "plain"), (1, "recomputed"),
)]  # fmt: skip
CELLS += [f"experts/{stage}/2/{name}" for stage, name in (
    (0, "ep1-k1"), (1, "ep1-k1-residual-few"), (1, "ep1-k2-residual"), (0, "ep1-k2-all-first"), (0, "ep2-k1"), (1, "ep2-k1"),
    (2, "ep2-k1-few"), (0, "ep2-k2-first-residual"), (1, "ep2-k2-first"), (1, "ep2-k1-all-adamw"), (0, "ep2-k1-rsample"),
    (1, "ep2-k1-jitter"),
)]  # fmt: skip
CELLS += ["tensor_parallel/0/2/sgd", "tensor_parallel/1/2/key", "tensor_parallel/1/1/noted", "tensor_parallel/2/2/sgd"]
CELLS += ["sequences/1/1/adamw", "sequences/2/2/sgd", "sequences/3/1/adamw", "sequences/3/2/sgd"]
REFERENCE = {  # cell: whose numbers it has to give, where DeepSpeed does not give torch's, and at stage 3 does
    **{f"fabric_loop/{stage}/2/{offload}": f"fabric_loop/3/2/{offload}" for stage in (1, 2) for offload in ("none", "cpu")},
    "sequences/1/1/adamw": "sequences/3/1/adamw",
    "sequences/2/2/sgd": "sequences/3/2/sgd",
    **{f"options/{stage}/2/coalesced": "options/3/2/coalesced" for stage in (1, 2)},
}
