"""The Trainer over a LoRA of PEFT: only the adapter is trained, saved and told."""

import torch
import trainer
from common import llama
from peft import LoraConfig, get_peft_model


def adapted():
    """LoRA's B begins with zeros, which would leave A without gradients in the first step."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(llama(), config)
    draw = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.1, generator=draw)
    return model


def run(stage: int, accumulation: int, offload: str, folder: str) -> dict:
    return trainer.run(stage, accumulation, offload, folder, adapted, "adapter_model.safetensors")
