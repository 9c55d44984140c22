"""Fabric with its DeepSpeedStrategy: a loop that accumulates by itself, and the optimizer's own step."""

import lightning as L
import torch
from common import RESUMED_AT, STEPS, Net, adamw, tokens, whole_weights, zero_section
from lightning.fabric.strategies import DeepSpeedStrategy


class OnCPU(DeepSpeedStrategy):
    """Without the refusal of CPUs, and with numbers for devices, which they lack."""

    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", number) for number in range(len(self.parallel_devices))]
        super(DeepSpeedStrategy, self).setup_environment()


def make(stage: int, offload: str):
    config = {"zero_optimization": zero_section(stage, offload), "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=OnCPU(config=config | {"zero_allow_untested_optimizer": True}))
    fabric.launch()
    torch.manual_seed(0)
    model = Net()
    return fabric, *fabric.setup(model, adamw(model, offload, lr=0.02))


def train(fabric, model, optimizer, accumulation: int, first: int, last: int) -> dict:
    told = {"losses": []}
    for micro in range(first * accumulation, last * accumulation):
        loss = model(tokens(3, seed=100 * micro + fabric.global_rank))
        fabric.backward(loss / accumulation)
        told["losses"].append(loss.item())
        if (micro + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        told["evaluations"] = [model(tokens(5, seed=7)).item()]
    model.train()
    return told


def run(stage: int, accumulation: int, offload: str, folder: str) -> dict:
    fabric, model, optimizer = make(stage, offload)
    whole = train(fabric, model, optimizer, accumulation, 0, RESUMED_AT)
    fabric.save(folder, {"model": model, "optimizer": optimizer, "seen": 5})
    rest = train(fabric, model, optimizer, accumulation, RESUMED_AT, STEPS)
    whole = {name: [*values, *rest[name]] for name, values in whole.items()} | {"weights": whole_weights(model)}
    model._forward_module.destroy()
    fabric, model, optimizer = make(stage, offload)
    assert fabric.load(folder, {"model": model, "optimizer": optimizer})["seen"] == 5
    resumed = train(fabric, model, optimizer, accumulation, RESUMED_AT, STEPS) | {"weights": whole_weights(model)}
    model._forward_module.destroy()
    return {"whole": whole, "resumed": resumed}
