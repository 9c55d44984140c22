"""The engine with one thing unusual, which the cell names at its end: a key of the configuration, or a way to call it."""

import contextlib
from collections.abc import Iterator

import deepspeed
import torch
from cells import KEYS
from common import ADAMW, STEPS, Net, tokens, whole_weights, zero_section
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

BATCH = 3


def make(stage: int, accumulation: int, name: str) -> tuple:
    """What deepspeed.initialize returns."""
    own = dict(KEYS.get(name, {}))
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.7,
        "zero_optimization": zero_section(stage, "none") | own.pop("zero", {}), "optimizer": ADAMW, "steps_per_print": 1000,
    } | own  # fmt: skip
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if name == "born_sharded" and stage == 3 else contextlib.nullcontext():
        model = Net()
    if name == "tied":
        model.head.weight = model.embedding.weight
    trained = [param for param in model.parameters() if param.requires_grad]
    given = {"model_parameters": trained}
    if name == "callables":
        given |= {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.02), "lr_scheduler": lambda of: StepLR(of, 2, 0.5)}
    if name in ("groups", "lambdas"):
        matrices = {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.3, "lr": 0.02}
        given = {"optimizer": torch.optim.AdamW([matrices, {"params": [param for param in trained if param.ndim == 1]}], lr=0.01)}
    if name == "lambdas":
        given["lr_scheduler"] = LambdaLR(given["optimizer"], [lambda step: 1 / (1 + step), lambda step: 0.9**step])
    if name == "loader":
        given["training_data"] = TensorDataset(tokens(STEPS * accumulation * 2 * BATCH))
    if "optimizer" in given:
        config.pop("optimizer")
    return deepspeed.initialize(model=model, config=config, **given)


def micro_step(engine, name: str, batch: Tensor, last: bool) -> Tensor:
    """Forward and backward; the loss."""
    if name == "boundaries":
        engine.set_gradient_accumulation_boundary(last)
    if name == "no_sync" and not last and engine.zero_optimization_stage() < 2:
        with engine.no_sync():
            loss = engine(batch)
            engine.backward(loss)
    elif name == "coalesced":
        with engine.coalesce_grad_reduction():
            for part in batch.split(1):
                loss = engine(part)
                engine.backward(loss / BATCH)
    else:
        loss = checkpoint(engine, batch, use_reentrant=False) if name == "recomputed" else engine(batch)
        if name == "by_hand":
            loss.backward()
        else:
            engine.backward(loss * 2 + loss**2 if name == "two_losses" else loss, scale_wrt_gas=name != "unscaled")
    return loss


def batches(engine, loader, name: str, accumulation: int) -> Iterator[Tensor]:
    """A batch for each micro-step: (BATCH, LENGTH), of changing sizes for "sizes"."""
    if loader is not None:
        yield from (batch for (batch,) in loader)
    for number in range(STEPS * accumulation):
        yield tokens(1 + number % 3 if name == "sizes" else BATCH, seed=100 * number + engine.global_rank)


def read(params: list[nn.Parameter], what) -> list[float]:
    return [what(param).norm().item() for param in params]


def run(stage: int, accumulation: int, name: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    engine, _, loader, _ = make(stage, accumulation, name)
    some = [param for param in engine.module.parameters() if param.requires_grad][:3]
    source = batches(engine, loader, name, accumulation)
    told = {"losses": [], "norms": [], "rates": [], "read": []}
    for step in range(STEPS):
        if name == "rates_by_hand":
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
        for micro in range(accumulation):
            told["losses"].append(micro_step(engine, name, next(source), micro == accumulation - 1).item())
            if name == "read_states" and micro == accumulation - 1:
                told["read"] += read(some, safe_get_full_grad)
            engine.step()
        told["norms"].append(float(engine.get_global_grad_norm()))
        told["rates"] += engine.get_lr()
        if name == "read_states":
            told["read"] += read(some, safe_get_full_fp32_param)
            told["read"] += read(some, lambda param: safe_get_full_optimizer_state(param, "exp_avg"))
    engine.eval()
    with torch.no_grad():
        told["evaluations"] = [engine(tokens(5, seed=7)).item()]
    told["weights"] = [sum(whole_weights(engine.module))]
    told["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]
    engine.destroy()
    return {"whole": told}
