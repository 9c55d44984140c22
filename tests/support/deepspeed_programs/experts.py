"""A layer of experts (deepspeed.moe), whose options the cell names at its end: ep2-k1-residual has use_residual=True.

Optimizers are SGD, in whose steps a factor in a gradient shows, and AdamW where the cell says so.
"""

import deepspeed
import torch
from common import RESUMED_AT, STEPS, WORDS, directions, tokens
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

WIDTH, ROWS, EXPERTS = 9, 3, 4
OPTIONS = {
    "residual": {"use_residual": True}, "all": {"drop_tokens": False}, "few": {"capacity_factor": 0.5, "min_capacity": 1},
    "ordered": {"use_rts": False}, "jitter": {"noisy_gate_policy": "Jitter"}, "rsample": {"noisy_gate_policy": "RSample"},
    "first": {"top2_2nd_expert_sampling": False},
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.layers = nn.ModuleList(MoE(WIDTH, expert, num_experts=EXPERTS, **options) for _ in range(2))

    def forward(self, words: Tensor) -> tuple[Tensor, list[int]]:
        x, extra, chosen = self.embedding(words[:, :-1]), 0, []
        for layer in self.layers:
            out, loss, counts = layer(self.norm(x))
            x, extra = x + out, extra + loss
            chosen += counts.tolist()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten()) + 0.05 * extra, chosen


def make(stage: int, accumulation: int, name: str):
    size, k, *words = name.split("-")
    options = {key: value for word in words if word in OPTIONS for key, value in OPTIONS[word].items()}
    torch.manual_seed(3)
    model = Net(ep_size=int(size[2:]), k=int(k[1:]), **options)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=0.01) if "adamw" in words else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulation, "steps_per_print": 1000,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, first: int, last: int) -> dict:
    told = {"losses": [], "chosen": []}
    steps = engine.gradient_accumulation_steps()
    for micro in range(first * steps, last * steps):
        torch.manual_seed(1000 + 2 * micro + engine.global_rank)  # for what is drawn at random
        loss, chosen = engine(tokens(ROWS, seed=100 * micro + engine.global_rank))
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
        told["chosen"] += chosen
    engine.eval()
    with torch.no_grad():
        told["evaluations"] = [engine(tokens(5, seed=7))[0].item()]
    engine.train()
    return told


def run(stage: int, accumulation: int, name: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    engine = make(stage, accumulation, name)
    whole = train(engine, 0, RESUMED_AT)
    engine.save_checkpoint(folder)
    rest = train(engine, RESUMED_AT, STEPS)
    whole = {key: [*values, *rest[key]] for key, values in whole.items()}
    whole["weights"] = (
        directions(param for key, param in engine.module.named_parameters() if ".experts." not in key) if stage < 3 else []
    )
    engine = make(stage, accumulation, name)
    engine.load_checkpoint(folder)
    return {"whole": whole, "resumed": train(engine, RESUMED_AT, STEPS)}
