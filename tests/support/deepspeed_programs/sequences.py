"""Ulysses: two ranks compute the tokens of one sequence of a Llama, by the loop of DeepSpeed's documentation."""

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # the name that the loop needs
from common import ADAMW, STEPS, WORDS, directions, tokens
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, _mpu = 8, []


def run(stage: int, accumulation: int, name: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    if not _mpu:  # DeepSpeed makes these groups once in a process
        _mpu.append(UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1,
            seq_length=LENGTH, seq_length_is_variable=True,
        ))  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}} if name == "sgd" else ADAMW
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=_mpu[0])[0]
    group = deepspeed.utils.groups._get_sequence_parallel_group()
    rank = deepspeed.utils.groups._get_sequence_parallel_rank()
    words = tokens(2 * STEPS * accumulation, seed=5)[:, :LENGTH]
    rows = [{"input_ids": row[None], "labels": row[None], "position_ids": torch.arange(LENGTH)[None]} for row in words[rank::2]]
    loader = UlyssesSPDataLoaderAdapter(rows, sp_rank=rank, sp_group=group, sp_world_size=2, device=engine.device)
    told = {"losses": [], "norms": []}
    for batch in loader:
        logits = engine(**batch).logits
        targets = batch["shift_labels"]
        loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=WORDS)
        parts = dist.nn.functional.all_gather(loss, group=group)
        counts = dist.nn.functional.all_gather((targets != -100).sum(), group=group)
        loss = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
        engine.backward(loss)
        engine.step()
        told["losses"].append(loss.item())
    told["norms"].append(float(engine.get_global_grad_norm()))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        told["weights"] = directions(engine.module.parameters())
    return {"whole": told}
