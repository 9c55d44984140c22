"""A model over a mesh of three axes: tensor parallelism inside of blocks, a pipeline of two stages, ZeRO over what is left.

    torchrun --nproc-per-node 8 examples/three_axes.py                   # pp 2 x dp 2 x tp 2, on the CPU or on 8 GPUs
    torchrun --nproc-per-node 4 examples/three_axes.py --mesh 1,2,2      # no pipeline

A tiny Llama learns to count. All that is particular is the mesh, `zs.parallelize`, and that ranks of one dp place read one batch.
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs

ROWS, SEQ, TOKENS = 8, 32, 64


def batch(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that count upwards from a random token: (rows, seq) each."""
    first = torch.randint(0, TOKENS, (ROWS, 1), generator=torch.Generator().manual_seed(1000 * step + place))
    tokens = (first + torch.arange(SEQ + 1)) % TOKENS
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2,2,2", help="ranks along pp, dp and tp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", default=None, help="a folder for a checkpoint, which any other mesh can load")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, tuple(map(int, args.mesh.split(","))), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)  # the same model on every rank, which keeps its part
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, use_cache=False
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    run = zs.parallelize(
        model,
        mesh,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        micro_batches=4,
        stage=1,
        max_grad_norm=1.0,
        sequence_parallel=mesh["tp"].size() > 1,
    )
    for step in range(args.steps):
        tokens, targets = batch(step, mesh["dp"].get_local_rank())
        loss = run.step(tokens.to(device), targets.to(device))
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:3}  loss {loss.item():.3f}  norm {run.optimizer.last_step.grad_norm:.3f}")
    if dist.get_rank() == 0:
        print(run.report())
    if args.save:
        zs.save(args.save, run.model, run.optimizer)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
