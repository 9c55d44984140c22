"""Parameters, gradients and optimizer states lie in files, and each block comes to memory for as long as it computes.

Run: python examples/offload_to_disk.py FOLDER, where FOLDER is on a local disk (without one, a temporary folder).
Prints the loss, which falls from 5.6 to below 2, and the report: how many bytes lie on the disk, and how many a step moves.
"""

import sys
import tempfile

import torch

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    torch.manual_seed(0)
    with torch.device("meta"):  # no memory yet, on any rank
        model = GPT(GPTConfig(vocab_size=256, seq_len=32, dim=64, layers=2, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zs.shard(model, optimizer, preset="zero-infinity", offload_path=folder)

    draw = torch.Generator().manual_seed(0)
    for step in range(15):
        first = torch.randint(256, (16, 1), generator=draw)
        tokens = (first + torch.arange(33)) % 256  # rows that count upwards, (16, 33)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or step % 5 == 4:
            print(f"step {step + 1:2}: loss {loss.item():.3f}")
    print(zs.report(model))
    zs.close(model, restore=False)  # removes the files


if __name__ == "__main__":
    main()
