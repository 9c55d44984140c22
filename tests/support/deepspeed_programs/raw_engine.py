"""A loop over deepspeed's engine: optimizer and scheduler of the configuration, a client state in the checkpoint."""

import deepspeed
import torch
from common import ADAMW, RESUMED_AT, STEPS, Net, tokens, whole_weights, zero_section


def make(stage: int, accumulation: int, offload: str):
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.7,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.02}},
        "zero_optimization": zero_section(stage, offload), "optimizer": ADAMW, "steps_per_print": 1000,
    }  # fmt: skip
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, first: int, last: int) -> dict:
    told = {"losses": [], "norms": [], "rates": []}
    steps = engine.gradient_accumulation_steps()
    for micro in range(first * steps, last * steps):
        loss = engine(tokens(3, seed=100 * micro + engine.global_rank))
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
        if engine.was_step_applied():
            told["norms"].append(float(engine.get_global_grad_norm()))
            told["rates"].append(engine.get_lr()[0])
    engine.eval()
    with torch.no_grad():
        told["evaluations"] = [engine(tokens(5, seed=7)).item()]
    engine.train()
    return told


def counters(engine) -> list[int]:
    return [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]


def run(stage: int, accumulation: int, offload: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    engine = make(stage, accumulation, offload)
    whole = train(engine, 0, RESUMED_AT)
    engine.save_checkpoint(folder, client_state={"epoch": 5, "seen": torch.arange(3), "name": "run"})
    rest = train(engine, RESUMED_AT, STEPS)
    whole = {name: [*values, *rest[name]] for name, values in whole.items()}
    whole |= {"weights": whole_weights(engine.module), "counters": counters(engine)}
    engine.destroy()
    engine = make(stage, accumulation, offload)
    _, state = engine.load_checkpoint(folder)
    assert (state["epoch"], state["seen"].tolist(), state["name"]) == (5, [0, 1, 2], "run")
    whole["counters"] += counters(engine)
    resumed = train(engine, RESUMED_AT, STEPS) | {"weights": whole_weights(engine.module)}
    engine.destroy()
    return {"whole": whole, "resumed": resumed}
