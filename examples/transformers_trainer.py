"""Transformers' Trainer with deepspeed=..., unchanged. Run: python -m zeroshard.deepspeed examples/transformers_trainer.py"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    data = [{"input_ids": part, "labels": part} for part in text.split(32) if len(part) == 32]
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, warmup_steps=2,
        save_steps=3, logging_steps=3, report_to=[], use_cpu=not torch.cuda.is_available(), deepspeed=DEEPSPEED, disable_tqdm=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=data)
    done = trainer.train()
    trainer.save_model(f"{folder}/final")
    print(
        f"{done.global_step} steps, loss {done.training_loss:.3f}, saved {sorted(path.name for path in Path(folder, 'final').iterdir())}"
    )


if __name__ == "__main__":
    main()
