"""Parameters, gradients and optimizer states in files: the model is never whole in memory. Run: python examples/offload_to_disk.py FOLDER"""

import sys
import tempfile

import torch

import zeroshard as zs
from zeroshard.models import GPT, GPTConfig


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    with torch.device("meta"):  # no memory yet, on any rank
        model = GPT(GPTConfig(vocab_size=256, seq_len=64, dim=128, layers=4, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zs.shard(model, optimizer, preset="zero-infinity", offload_path=folder)

    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        batch = torch.randint(256, (2, 65), generator=draw)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}")
    print(zs.report(model))
    zs.close(model, restore=False)  # removes the files


if __name__ == "__main__":
    main()
