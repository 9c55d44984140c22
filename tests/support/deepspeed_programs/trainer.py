"""Transformers' Trainer with deepspeed=...: logs, evaluation, checkpoints, the saved model."""

from pathlib import Path

from accelerate.state import AcceleratorState
from common import RESUMED_AT, STEPS, directions, gpt2, tokens, zero_section
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments, set_seed


def config(stage: int, offload: str) -> dict:
    warmup = {"warmup_min_lr": 0, "warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"}
    return {
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": zero_section(stage, offload),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }  # fmt: skip


def make(folder: str, stage: int, accumulation: int, offload: str, model=gpt2) -> Trainer:
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, learning_rate=1e-2,
        warmup_steps=2, max_grad_norm=0.5, weight_decay=0.1, logging_steps=1, save_steps=RESUMED_AT, eval_strategy="steps",
        eval_steps=RESUMED_AT, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, deepspeed=config(stage, offload),
    )  # fmt: skip
    set_seed(0)
    data = [{"input_ids": row, "labels": row} for row in tokens(40)]
    return Trainer(model(), arguments, train_dataset=data[:32], eval_dataset=data[32:])


def told_by(trainer: Trainer, first: int) -> dict:
    """What it logged from step `first` on: a resumed one has the history of the first in its checkpoint."""
    log = [entry for entry in trainer.state.log_history if entry["step"] > first]
    steps = [entry for entry in log if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in steps], "norms": [float(entry["grad_norm"]) for entry in steps],
        "rates": [entry["learning_rate"] for entry in steps],
        "evaluations": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
    }  # fmt: skip


def run(stage: int, accumulation: int, offload: str, folder: str, model=gpt2, file: str = "model.safetensors") -> dict:
    told = {}
    for name, first in (("whole", 0), ("resumed", RESUMED_AT)):
        trainer = make(folder, stage, accumulation, offload, model)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{RESUMED_AT}" if first else None)
        trainer.save_model(f"{folder}/{name}")
        told[name] = told_by(trainer, first)
        if trainer.is_world_process_zero():
            saved = load_file(Path(folder) / name / file)
            keys = [key for key in sorted(saved) if not key.endswith("attn.bias")]  # whose gradients are rounding errors
            told[name]["weights"] = directions(saved[key] for key in keys)
        trainer.model_wrapped.destroy()
        AcceleratorState._reset_state(True)
    return told
