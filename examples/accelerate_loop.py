"""An Accelerate loop with its DeepSpeedPlugin, unchanged. Run: python -m zeroshard.deepspeed examples/accelerate_loop.py"""

from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin)  # cpu=True would leave DeepSpeed out
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    loader = DataLoader(TensorDataset(text[:-1], text[1:]), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for now, following in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(now), following)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}")
    whole = accelerator.get_state_dict(model)
    accelerator.print(f"{len(whole)} whole tensors, by {type(model).__name__}")


if __name__ == "__main__":
    main()
