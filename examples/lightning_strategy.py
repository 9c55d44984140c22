"""Lightning's Trainer with a model that is never whole on a rank. Run: python examples/lightning_strategy.py [RANKS] [FOLDER]"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

import zeroshard.integrations.lightning  # noqa: F401  # registers the strategies
from zeroshard.planner.models import GPT, GPTConfig


class Bytes(torch.utils.data.Dataset):
    """Windows of a text: 64 bytes, and the byte that follows each."""

    def __init__(self):
        text = (Path(__file__).parents[1] / "README.md").read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self):
        return (len(self.text) - 1) // 64

    def __getitem__(self, number):
        window = self.text[number * 64 : number * 64 + 65]
        return window[:-1], window[1:]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = None

    def configure_model(self):
        if self.gpt is None:  # at stage 3 each parameter is cut as soon as it is made
            self.gpt = GPT(GPTConfig(vocab_size=256, seq_len=64, dim=64, layers=2, heads=4))

    def training_step(self, batch, _):
        loss = self.gpt(*batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(ranks=2, folder="runs/lightning"):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="zeroshard_stage_3",
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(ranks),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(Bytes(), batch_size=4))
    trainer.save_checkpoint(f"{folder}/last.ckpt")  # a folder: zeroshard inspect, zeroshard export; fit(ckpt_path=...) resumes
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps of {trainer.world_size} ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
