"""Train a small model with DeepSpeed on two CPU processes and save it: the recorded checkpoints beside this file.

    python tests/checkpoint/data/deepspeed/make_deepspeed.py tests/checkpoint/data/deepspeed        (needs: pip install deepspeed)

OUT/CASE is what DeepSpeed writes, without its copy of its own script, and OUT/CASE.pt the whole fp32 values that this script
makes of it. Sizes are such that there are paddings, parameters that lie on both ranks, and several subgroups at stage 3.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from zeroshard.comm.launch import run_processes

CASES = {
    "stage1": (1, "fp32"), "stage2": (2, "fp32"), "stage2-bf16": (2, "bf16"), "stage3": (3, "fp32"), "stage3-bf16": (3, "bf16"),
}  # fmt: skip
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95)}
STEPS = 3


class Net(nn.Module):
    """Odd sizes, a tied head, a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5)
        self.hidden = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.out(torch.tanh(self.hidden(self.frozen(x)))) * self.scale[0].to(x.dtype)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def groups_of(model: nn.Module) -> list[dict]:
    """Weights and biases as two groups of an optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, biases = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (2, 4)."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 11, (2, 2, 4), generator=generator)
    return tokens[0], tokens[1]


def train(rank: int, world: int, folder: str, stage: int, precision: str) -> None:
    """One rank: train and save."""
    import deepspeed

    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {**OPTIONS, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    for step in range(STEPS):
        engine.backward(engine(*batch(rank, step)))
        with torch.no_grad():  # torch 2.13 refuses to gather into views that were made by split where gradients are on
            engine.step()
    engine.save_checkpoint(folder)


def reference() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The same steps on one process of plain torch, in fp32: (values by name, optimizer states by name)."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(*batch(rank, step)) for rank in range(2)) / 2).backward()
        optimizer.step()
    return model.state_dict(), {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p.requires_grad}


def make(folder: Path, case: str) -> dict[str, torch.Tensor]:
    """Write one checkpoint; the whole fp32 values that DeepSpeed's own tool finds in it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run_processes(train, 2, str(folder), *CASES[case], timeout_s=120)
    (folder / "zero_to_fp32.py").unlink(missing_ok=True)
    return {name: value.clone() for name, value in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in CASES:
        shutil.rmtree(out / name, ignore_errors=True)
        torch.save(make(out / name, name), out / f"{name}.pt")
