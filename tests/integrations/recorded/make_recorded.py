"""Train with DeepSpeed's interface, save in the middle, go on: what the checkpoints beside this file are, and what has to follow.

    deepspeed --num_gpus 2 make_recorded.py OUT CASE ...     (CPU: torchrun, or RANK, WORLD_SIZE and DS_ACCELERATOR=cpu by hand)

OUT/CASE is the checkpoint that DeepSpeed writes after BEFORE steps, OUT/CASE.json the losses (means over all ranks) of the steps
after it. A step's samples do not depend on the number of ranks, so it can be gone on with at any.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "checkpoint" / "data" / "deepspeed"))
from make_deepspeed import Net

WORDS, SAMPLES, ACCUMULATION, BEFORE, AFTER = 11, 4, 2, 3, 3
CASES = {  # name: stage, precision, options of zero_optimization, world size
    "stage0": (0, "fp32", {}, 2),
    "stage1": (1, "fp32", {}, 2),
    "stage2": (2, "fp32", {"round_robin_gradients": True}, 4),
    "stage3": (3, "fp32", {"sub_group_size": 40}, 2),
    "alone": (3, "fp32", {}, 1),
    "stage1-bf16": (1, "bf16", {}, 2),
    "stage2-bf16": (2, "bf16", {}, 2),
    "stage3-bf16": (3, "bf16", {}, 4),
    "stage2-offload": (2, "fp32", {"offload_optimizer": {"device": "cpu"}}, 2),
    "stage3-offload": (3, "fp32", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 2),
    "stage1-elastic": (1, "fp32", {"elastic_checkpoint": True}, 2),
    "stage3-trained": (3, "fp32", {}, 2),  # saved without frozen parameters, and with an object of a class in client_state
}  # fmt: skip


def groups_of(model: nn.Module) -> list[dict]:
    """Weights and biases as two groups of an optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, biases = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]


def config(stage: int, precision: str, zero: dict, world: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world, "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.03, "warmup_num_steps": 5, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}, "steps_per_print": 10**6,
        "bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"}, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def batch(step: int, micro: int, rank: int, world: int) -> list[torch.Tensor]:
    """Tokens and targets (SAMPLES / world, 4) of one rank."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, WORDS, (2, SAMPLES, 4), generator=generator)
    return list(tokens[:, rank * (SAMPLES // world) : (rank + 1) * (SAMPLES // world)])


def train(engine, steps: range, rank: int, world: int) -> list[float]:
    """The mean loss of this rank's micro-batches, of each step."""
    losses = []
    for step in steps:
        mine = []
        for micro in range(ACCUMULATION):
            loss = engine(*batch(step, micro, rank, world))
            engine.backward(loss)
            with torch.no_grad():  # torch 2.13 refuses to gather into views that were made by split where gradients are on
                engine.step()
            mine.append(loss.item())
        losses.append(sum(mine) / len(mine))
    return losses


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def record(out: Path, case: str) -> None:
    """Collective."""
    import deepspeed
    import torch.distributed as dist

    stage, precision, zero, _ = CASES[case]
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=config(stage, precision, zero, world)
    )
    train(engine, range(BEFORE), rank, world)
    state, trained = {"epoch": 3, "seen": torch.arange(3)}, case.endswith("-trained")
    state |= {"args": argparse.Namespace(lr=3)} if trained else {}
    engine.save_checkpoint(str(out / case), client_state=state, exclude_frozen_parameters=trained)
    losses = torch.tensor(train(engine, range(BEFORE, BEFORE + AFTER), rank, world))
    dist.all_reduce(losses)
    if rank == 0:
        told = {"losses": (losses / world).tolist(), "rates": engine.get_lr(), "global_steps": engine.global_steps}
        (out / f"{case}.json").write_text(json.dumps({**told, "global_samples": engine.global_samples}) + "\n")


if __name__ == "__main__":
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    for name in sys.argv[2:]:
        record(Path(sys.argv[1]), name)
