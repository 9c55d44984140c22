"""TRL's trainers with deepspeed=config, unchanged: two ranks have the losses of plain TRL. Skipped where trl is not installed."""

import importlib.util
import warnings

import pytest
import torch

from zeroshard.comm import launch
from zeroshard.comm.launch import run_processes

missing = [name for name in ("trl", "datasets", "peft", "transformers") if importlib.util.find_spec(name) is None]
# no requirement: its programs take minutes; the calls that they make of the engine are in test_programs, test_peft, test_saving_whole
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install trl")
WORDS = "the cat dog sat ran on mat hill a big small red blue and then it saw one two three".split()


def text(count, draw):
    return " ".join(WORDS[int(word)] for word in torch.randint(len(WORDS), (count,), generator=draw))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    numbers = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": len(WORDS) + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    )


def options(folder, world, stage, batch=4, **more):
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True},
    }  # fmt: skip
    return {
        "output_dir": folder, "max_steps": 3, "per_device_train_batch_size": batch // world, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "deepspeed": None if stage is None else config, **more,
    }  # fmt: skip


def sft(**given):
    import trl
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)
    data = Dataset.from_list([{"text": text(12, draw)} for _ in range(12)])
    return trl.SFTTrainer(llama(), args=trl.SFTConfig(**options(**given)), train_dataset=data, processing_class=tokenizer())


def dpo(peft_config=None, model=None, **given):
    import trl
    from datasets import Dataset

    draw = torch.Generator().manual_seed(1)
    rows = [{"prompt": text(5, draw), "chosen": f" {text(4, draw)}", "rejected": f" {text(6, draw)}"} for _ in range(12)]
    arguments = trl.DPOConfig(**options(**given))
    reference = None if peft_config or model else llama(seed=1)
    return trl.DPOTrainer(
        model or llama(), ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip


def dpo_of_adapters(**given):
    from peft import LoraConfig

    return dpo(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"), **given)


def dpo_of_an_adapter_that_goes_on(**given):
    """Its reference is a frozen copy of the adapter, which the trainer switches on under no_grad."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(7)
    return dpo(model=get_peft_model(llama(), config), **given)


def grpo(**given):
    """Generates between steps: ranks draw by their own seeds, so what it is compared with has as many."""
    import trl
    from datasets import Dataset

    draw = torch.Generator().manual_seed(2)
    arguments = trl.GRPOConfig(**options(**given, batch=8, num_generations=4, max_completion_length=6))
    return trl.GRPOTrainer(
        llama(), reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions], args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text(4, draw)} for _ in range(12)]), processing_class=tokenizer(),
    )  # fmt: skip


def train(rank, world, folder, stages, makers):
    """[(trainer, stage): [loss, gradient norm, ...]], and the sum of what each has saved."""
    if stages != [None]:
        from zeroshard.deepspeed import install

        install()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if world > 1:
        PartialState(backend="gloo", cpu=True)
    found = {}
    for make in makers:
        for stage in stages:
            trainer = make(folder=folder, world=world, stage=stage)
            trainer.train()
            steps = [entry for entry in trainer.state.log_history if "loss" in entry]
            numbers = [value for entry in steps for value in (entry["loss"], entry["grad_norm"])]
            place = f"{folder}/{make.__name__}{stage}"
            trainer.save_model(place)
            trainer.accelerator.wait_for_everyone()
            name = "adapter_model" if make in (dpo_of_adapters, dpo_of_an_adapter_that_goes_on) else "model"
            numbers.append(sum(value.double().abs().sum().item() for value in load_file(f"{place}/{name}.safetensors").values()))
            found[make.__name__, stage] = numbers
            AcceleratorState._reset_state()
            unset_hf_deepspeed_config()
    return found


@pytest.mark.limit(300)
def test_losses_are_those_of_plain_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        launch, "_method", "spawn"
    )  # a fork may have imported transformers already, which install() is to precede
    folder, alone = str(tmp_path), (sft, dpo, dpo_of_adapters, dpo_of_an_adapter_that_goes_on)
    expected = run_processes(train, 1, folder, [None], alone)[0]
    expected |= run_processes(train, 2, folder, [None], (grpo,))[0]
    found = run_processes(train, 2, folder, [2, 3], (*alone, grpo))[0]
    assert len(found) == 10
    for (name, stage), numbers in found.items():
        losses = torch.tensor(expected[name, None])
        torch.testing.assert_close(
            torch.tensor(numbers), losses, rtol=2e-5, atol=1e-5, msg=lambda told, at=(name, stage): f"{at}: {told}"
        )
