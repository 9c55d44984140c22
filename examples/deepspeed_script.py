"""A DeepSpeed script, unchanged. Run: python -m zeroshard.deepspeed examples/deepspeed_script.py
(or on several ranks: zeroshard-deepspeed --num_gpus 2 examples/deepspeed_script.py --deepspeed_config examples/ds_config.json)
"""

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    args.deepspeed_config = args.deepspeed_config or str(Path(__file__).with_name("ds_config.json"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
    engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long().to(engine.device)
    draw = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(30):
        at = torch.randint(len(text) - 1, (engine.train_micro_batch_size_per_gpu(),), generator=draw)
        loss = nn.functional.cross_entropy(engine(text[at]), text[at + 1])
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"{engine.global_steps} steps, loss {loss.item():.3f}, lr {engine.get_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
