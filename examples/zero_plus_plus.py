"""ZeRO++ on two nodes of two ranks: bytes that cross the network are packed, or not sent again, until a quarter is left.

Run: torchrun --nproc-per-node 4 examples/zero_plus_plus.py. ZEROSHARD_NODE makes two nodes of this host; without it hosts are nodes.
Prints for each set of options the bytes that a rank sends to the other node in a step, and the loss, which falls alike in all.
"""

import os

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig

# Stage 3 alone sends parameters twice and gradients once, between nodes only to the same local rank.
PLAIN = {"stage": 3, "precision": "bf16"}
# hpZ: each node keeps a copy of the parameters that forward has gathered, and backward gathers inside of the node.
KEPT = PLAIN | {"zero_hpz_partition_size": 2}
# qwZ: parameters travel as 8-bit integers, in blocks with a scale each.
PACKED = KEPT | {"zero_quantized_weights": "int8"}
# qgZ: gradients travel as 4-bit integers, and are summed in fp32.
ALL = PACKED | {"zero_quantized_gradients": "int4"}


def train(rank: int) -> None:
    for name, options in (("stage 3", PLAIN), ("hpZ", KEPT), ("hpZ, qwZ", PACKED), ("hpZ, qwZ, qgZ", ALL)):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=64, seq_len=32, dim=128, layers=2, heads=4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = zs.shard(model, optimizer, **options)

        draw, losses = torch.Generator().manual_seed(rank), []
        for _ in range(16):
            tokens = (torch.randint(64, (8, 1), generator=draw) + torch.arange(33)) % 64  # rows that count upwards
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        # The report has what was measured beside what the formulas say.
        sent = zs.report(model).measured_between_nbytes_per_step
        if rank == 0:
            print(f"{name:<14} sends {sent:9,} bytes a step to the other node; loss {losses[0]:.2f} to {losses[-1]:.2f}")
        zs.close(model)


if __name__ == "__main__":
    os.environ["ZEROSHARD_NODE"] = f"node {int(os.environ['RANK']) // 2}"
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
