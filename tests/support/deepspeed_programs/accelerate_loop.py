"""A loop over Accelerate with its DeepSpeedPlugin: torch's optimizer and scheduler, or the configuration's optimizer."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DummyOptim, DummyScheduler, set_seed
from common import RESUMED_AT, STEPS, directions, llama, tokens
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def make(stage: int, accumulation: int, offload: str):
    """(accelerator, model, optimizer, loader, scheduler)."""
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.5, offload_optimizer_device=offload,
        zero3_save_16bit_model=True,
    )  # fmt: skip
    if offload != "none":  # DeepSpeed steps on the host by its own optimizer
        plugin.deepspeed_config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    PartialState(backend="gloo")  # else Accelerate counts one process where there is no GPU
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.DEEPSPEED, accelerator.distributed_type
    set_seed(0)
    model = llama()
    if offload == "none":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
        scheduler = StepLR(optimizer, 2, 0.5)
    else:
        optimizer = DummyOptim(model.parameters(), lr=0.03, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda of: StepLR(of, 2, 0.5))
    loader = DataLoader(tokens(2 * 4 * accumulation * STEPS), batch_size=4, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, save_in: str | None) -> dict:
    told = {"losses": [], "norms": [], "rates": []}
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                told["rates"].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        told["losses"].append(loss.item())
        if save_in and accelerator.sync_gradients and len(told["norms"]) == RESUMED_AT:
            accelerator.save_state(save_in)
    model.eval()
    with torch.no_grad():
        batch = tokens(6, seed=7 + accelerator.process_index)
        told["evaluations"] = [accelerator.gather(model(input_ids=batch, labels=batch).loss).mean().item()]
    whole = accelerator.get_state_dict(model)
    told["weights"] = directions(whole[name] for name in sorted(whole)) if accelerator.is_main_process else []
    return told


def run(stage: int, accumulation: int, offload: str, folder: str) -> dict:
    told = {}
    for name in ("whole", "resumed"):
        accelerator, model, optimizer, loader, scheduler = make(stage, accumulation, offload)
        if name == "resumed":
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, RESUMED_AT * accumulation)
        told[name] = train(accelerator, model, optimizer, loader, scheduler, folder if name == "whole" else None)
        model.destroy()
        AcceleratorState._reset_state(True)
    return told
