"""Accelerate's save_state and load_state with its DeepSpeedPlugin.

Told: losses, rates and weights of the uninterrupted run and of one that goes on from its middle.
"""

from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Counter:
    """Something of one's own that is saved along."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


def train(folder: str, stage: int, go_on: bool) -> dict:
    AcceleratorState._reset_state(True)
    PartialState(backend="gloo")
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=True)
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, project_config=naming)
    set_seed(0)
    model = nn.Sequential(nn.Embedding(19, 7), nn.Flatten(), nn.Linear(35, 13), nn.GELU(), nn.Linear(13, 19))
    if go_on:
        nn.init.zeros_(model[4].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    tokens = torch.randint(19, (48, 6), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens[:, :5], tokens[:, 5]), batch_size=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if go_on:
        accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
    losses, rates = [], []
    for number, (now, following) in enumerate(loader):
        if number < counter.count:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(now), following)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.count += 1
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        if counter.count % 2 == 0 and counter.count <= 4 and not go_on:
            accelerator.save_state()
    whole = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    told = {"losses": losses, "rates": rates, "left": sorted(path.name for path in Path(folder, "checkpoints").iterdir())}
    return {**told, "weights": [float(value.double().norm()) for value in (whole or {}).values()]}


def run(folder: str, stage: int) -> dict:
    return {"whole": train(folder, stage, False), "resumed": train(folder, stage, True)}
