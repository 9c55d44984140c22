"""Train a Transformers model at stage 3, save, export, and read it back with from_pretrained. Run: python examples/export_to_hugging_face.py"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zeroshard as zs


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    with zs.init(stage=3):  # born sharded
        model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zs.shard(model, optimizer, stage=3)
    batch = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    zs.save(folder / "checkpoints", model, optimizer, extra={"hf_config": config.to_dict()})
    exported = zs.export(folder / "checkpoints", folder / "exported")  # also: zeroshard export
    again = GPT2LMHeadModel.from_pretrained(exported.path)
    print(f"loss {loss.item():.3f}; {again.num_parameters():,} parameters read from {', '.join(exported.files)}")


if __name__ == "__main__":
    main()
