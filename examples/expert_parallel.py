"""A Mixtral whose experts are divided over the ranks: tokens travel to their experts and back, and ZeRO shards what is left.

    torchrun --nproc-per-node 4 examples/expert_parallel.py              # dp 2 x ep 2, on the CPU or on 4 GPUs
    torchrun --nproc-per-node 2 examples/expert_parallel.py --ep 2       # experts over both ranks

A tiny model learns to count, with the load-balancing loss of the tokens of all ranks. All that is particular is the mesh,
`zs.divide_experts` before the optimizer is made, and that every rank reads a batch of its own.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import zeroshard as zs

ROWS, SEQ, TOKENS, EXPERTS = 8, 32, 64, 8


def batch(step: int, rank: int) -> torch.Tensor:
    """Rows that count upwards from a random token: (rows, seq)."""
    first = torch.randint(0, TOKENS, (ROWS, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + torch.arange(SEQ)) % TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="ranks over which the experts are divided")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", default=None, help="a folder for a checkpoint, which any other mesh can load")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.ep, args.ep), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)  # the same model on every rank, which keeps its experts
    config = MixtralConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=EXPERTS, output_router_logits=True, router_aux_loss_coef=0.02, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = MixtralForCausalLM(config)
    zs.divide_experts(model, mesh["ep"])
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters(), lr=5e-3), mesh=mesh, stage=3, max_grad_norm=1.0)
    for step in range(args.steps):
        tokens = batch(step, dist.get_rank()).to(device)
        loss = model(tokens, labels=tokens).loss  # with the router's, of the tokens of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():.3f}  norm {optimizer.last_step.grad_norm:.3f}")
    if dist.get_rank() == 0:
        for name, value in zs.expert_imbalance(model).items():
            print(f"{name}: the busiest rank has computed {value:.3f} times the mean of tokens")
        print(zs.report(model))
    if args.save:
        zs.save(args.save, model, optimizer)
    zs.close(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
