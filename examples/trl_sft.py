"""TRL's SFTTrainer with deepspeed=..., unchanged. Run: python -m zeroshard.deepspeed examples/trl_sft.py"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    lines = [line for line in Path(__file__).read_text().splitlines() if line.strip()]
    letters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=chr(0), eos_token=chr(3), unk_token="?")
    arguments = SFTConfig(
        folder, max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=4, save_strategy="no", max_length=64,
        report_to=[], bf16=False, use_cpu=not torch.cuda.is_available(), deepspeed=DEEPSPEED, disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, bos_token_id=2, eos_token_id=3, pad_token_id=0, **sizes))
    data = Dataset.from_list([{"text": line} for line in lines])
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    done = trainer.train()
    trainer.save_model(f"{folder}/final")
    if trainer.is_world_process_zero():
        saved = sorted(path.name for path in Path(folder, "final").glob("model*"))
        print(f"{done.global_step} steps, loss {done.training_loss:.3f}, saved {saved}")


if __name__ == "__main__":
    main()
