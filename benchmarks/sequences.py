"""The race over the length of sequences: zeroshard and DeepSpeed with the tokens of a sequence over all ranks, and ZeRO-3 without.

    zs3         zs.shard, stage 3: each rank has a sequence of its own; its blocks are checkpoints
    sp3         the same over mesh={"sp": ranks}: all ranks share the tokens of each sequence (DeepSpeed-Ulysses, arXiv 2309.14509)
    long3       zs.long_context: sp3, and MLPs, logits and loss in tiles
    ulysses3    DeepSpeed's ZeRO-3 with its UlyssesSPAttentionHF, as its tutorial on long sequences (ALST) sets it up

In a step every contender trains on the same sequences, as many as there are ranks, so that losses and tokens a second compare. Where
ranks share tokens the sequences follow each other, and their gradients are added up. The model is a small Llama of Transformers.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs

from .contenders import Trainer, at_rest
from .plan import Contender, Workload
from .workload import build_llama, build_optimizer, optimizer_options


def build(contender: Contender, workload: Workload) -> Trainer:
    """Build one contender; the process group exists already. `step` gets all sequences, on each rank."""
    ranks = workload.ranks
    model = llama(workload)
    if contender.kind == "ulysses":
        return Trainer(_deepspeed_step(model, workload), place=0)
    optimizer: Any = build_optimizer(model.parameters(), workload)
    if contender.kind == "long":
        model, optimizer = zs.long_context(model, optimizer, mesh={"sp": ranks}, stage=3)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = {"sp": ranks} if contender.kind == "sp" else {"dp": ranks}
        model, optimizer = zs.shard(model, optimizer, mesh=mesh, stage=3)

    def loss_of(batch: Mapping[str, Any]) -> Tensor:
        return model(**batch, use_cache=False).loss

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        if contender.kind == "zs":
            own = tokens[dist.get_rank()][None]
            losses = [loss_of({"input_ids": own, "labels": own})]
            losses[0].backward()
        else:
            losses = []
            for batch in zs.SequenceLoader([{"input_ids": each[None], "labels": each[None]} for each in tokens], model):
                losses.append(loss_of(batch) / len(tokens))
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).sum()

    return Trainer(step, at_rest=lambda: at_rest(model), place=0)


def llama(workload: Workload) -> Any:
    """Build a Llama of the workload's shape with the weights of the seed."""
    shape = workload.shape
    torch.manual_seed(workload.seed)
    sizes = (shape.vocab_size, shape.dim, 4 * shape.dim, shape.layers, shape.heads, shape.heads)
    return build_llama(*sizes, max_position_embeddings=shape.seq_len).train()


def _deepspeed_step(model: Any, workload: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the step of DeepSpeed's engine over sequences cut by its loader."""
    deepspeed: Any = importlib.import_module("deepspeed")
    ulysses: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    everyone: Any = importlib.import_module("torch.distributed.nn.functional")
    deepspeed.init_distributed(dist_backend="gloo")
    ranks, rank = workload.ranks, dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # what it takes: a name or a path
        mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=folder, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1,
            seq_length_is_variable=True,
        )  # fmt: skip
    model.config._attn_implementation = "sdpa"  # the name under which its attention is registered
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    zero = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": int(5e6)}
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": workload.sequences, "sequence_parallel_size": ranks,
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9, "zero_optimization": zero, "gradient_clipping": 0.0,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), **optimizer_options(workload))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=settings, mpu=mpu
    )
    group = mpu.get_sequence_parallel_group()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        own = tokens[rank][None]  # the loader yields the sequences of all ranks, one after the other, each cut
        loader = [{"input_ids": own, "labels": own, "position_ids": positions}]
        total = torch.zeros(())
        for batch in ulysses.UlyssesSPDataLoaderAdapter(
            loader, sp_rank=rank, sp_group=group, sp_world_size=ranks, device=torch.device(workload.device)
        ):
            labels = batch["shift_labels"]
            logits = engine(**batch, use_cache=False).logits
            mean = engine.module.loss_function(
                logits=logits, labels=None, shift_labels=labels, vocab_size=workload.shape.vocab_size
            )
            counted = everyone.all_gather((labels != -100).sum(), group=group)
            losses = everyone.all_gather(mean, group=group)
            loss = sum(each * count for each, count in zip(losses, counted, strict=True)) / sum(counted)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(tokens)
        return total

    return step
