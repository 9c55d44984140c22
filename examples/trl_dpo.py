"""TRL's DPOTrainer with a reference model, unchanged. Run: python -m zeroshard.deepspeed examples/trl_dpo.py"""

import copy
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},  # the reference model is sharded too, without an optimizer
}


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    rows = [{"prompt": f"is {a} below {a + b}?", "chosen": " yes", "rejected": " no"} for a in range(6) for b in range(1, 7)]
    letters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=chr(0), eos_token=chr(3), unk_token="?")
    arguments = DPOConfig(
        folder, max_steps=12, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=4, save_strategy="no", report_to=[],
        bf16=False, use_cpu=not torch.cuda.is_available(), deepspeed=DEEPSPEED, disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, bos_token_id=2, eos_token_id=3, pad_token_id=0, **sizes))
    reference = copy.deepcopy(model)
    trainer = DPOTrainer(
        model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    done = trainer.train()
    if trainer.is_world_process_zero():
        told = [entry["rewards/accuracies"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{done.global_step} steps, loss {done.training_loss:.3f}, rewards/accuracies {told[-1]:.2f}")


if __name__ == "__main__":
    main()
