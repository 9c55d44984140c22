"""Trainer with deepspeed=...: rotation, the best model at the end, going on.

Told: losses of the uninterrupted run and of one that goes on from its middle; what is left of checkpoints; whether the best
model's weights were loaded at the end.
"""

from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

DATA = torch.randint(0, 61, (24, 9), generator=torch.Generator().manual_seed(0))
EXAMPLES = [{"input_ids": row, "labels": row} for row in DATA]


def deepspeed_config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }  # fmt: skip


def trainer_of(folder: str, stage: int) -> Trainer:
    AcceleratorState._reset_state(True)
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-2, warmup_steps=2,
        save_steps=2, eval_steps=2, eval_strategy="steps", load_best_model_at_end=True, save_total_limit=2, logging_steps=1,
        report_to=[], use_cpu=True, deepspeed=deepspeed_config(stage), disable_tqdm=True, seed=5,
    )  # fmt: skip
    set_seed(1)
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=EXAMPLES[:16], eval_dataset=EXAMPLES[16:])


def losses_of(trainer: Trainer) -> dict:
    return {str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def run(folder: str, stage: int) -> dict:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = trainer_of(folder, stage)
    whole.train()
    told = {"left": sorted(path.name for path in Path(folder).glob("checkpoint-*")), "losses": losses_of(whole)}
    best = whole.state.best_model_checkpoint
    told["best"] = Path(best).name
    told["evaluation"] = [whole.evaluate()["eval_loss"], whole.state.best_metric]
    expected = get_fp32_state_dict_from_zero_checkpoint(best)
    state = whole.accelerator.get_state_dict(whole.model_wrapped)
    if state is not None and whole.args.should_save:
        told["best_is_loaded"] = all(torch.allclose(value.float().cpu(), expected[name]) for name, value in state.items())
    again = trainer_of(folder, stage)
    again.train(resume_from_checkpoint=f"{folder}/{told['left'][0]}")
    told["resumed"] = losses_of(again)
    return told
