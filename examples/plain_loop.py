"""A plain training loop, sharded: the one changed line is marked.

Run: torchrun --nproc-per-node 2 examples/plain_loop.py, or python examples/plain_loop.py for one process.
Prints the loss of a small GPT that reads this project's README byte by byte (5.5 is what knowing nothing costs), which falls to about 3,
and the gradient norm before clipping, which is near 1; then how many parameters were trained.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig


def main():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, seq_len=64, dim=64, layers=2, heads=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = zs.shard(model, optimizer, stage=3, max_grad_norm=1.0)  # the one line

    text = torch.frombuffer(bytearray((Path(__file__).parents[1] / "README.md").read_bytes()), dtype=torch.uint8).long()
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(rank)
    for step in range(60):
        starts = torch.randint(len(text) - 65, (8,), generator=draw).tolist()
        batch = torch.stack([text[start : start + 65] for start in starts]).to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 0 or step % 20 == 19):
            print(f"step {step + 1:2}: loss {loss.item():.3f}, gradient norm {optimizer.last_step.grad_norm:.3f}")
    state = zs.full_state_dict(model)  # whole tensors, on every rank
    if rank == 0:
        print(f"{sum(value.numel() for value in state.values()):,} parameters trained")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
