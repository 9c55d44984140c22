"""LoRA by PEFT in a plain loop at stage 3: train the adapter, save it alone. Run: python examples/lora.py"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import zeroshard as zs


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = zs.shard(model, optimizer, stage=3)

    batch = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=batch, labels=batch).loss
    adapter = get_peft_model_state_dict(model, state_dict=zs.full_state_dict(model))
    save_file(adapter, f"{folder}/adapter_model.safetensors")
    print(f"loss {loss.item():.3f} with the adapter, {base.item():.3f} without; {len(adapter)} tensors saved")


if __name__ == "__main__":
    main()
