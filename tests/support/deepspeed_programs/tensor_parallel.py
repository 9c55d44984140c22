"""AutoTP: two ranks share each layer of a Llama and read the same batches; "noted": by tp_model_init."""

import deepspeed
import torch
from common import ADAMW, STEPS, llama, tokens


def run(stage: int, accumulation: int, name: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}} if name == "sgd" else ADAMW, "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True, "tensor_parallel": {"autotp_size": 2},
    }  # fmt: skip
    model = llama()
    if name == "noted":
        model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    told = {"losses": [], "rates": []}
    for micro in range(STEPS * accumulation):
        words = tokens(3, seed=100 * micro)
        loss = engine(input_ids=words, labels=words, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
        told["rates"] += engine.get_lr()
    engine.eval()
    with torch.no_grad():
        told["evaluations"] = [engine(input_ids=tokens(5, seed=7), labels=tokens(5, seed=7), use_cache=False).loss.item()]
    return {"whole": told}
