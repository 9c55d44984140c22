"""DeepSpeed's names for sequence parallelism: a program of its kind, its key of a configuration, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from sequence_kit import VOCAB, batches, model_of

import zeroshard.deepspeed as deepspeed
from zeroshard.activations.ulysses import sequence_of
from zeroshard.comm.launch import run_processes
from zeroshard.integrations.deepspeed.sequence import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from zeroshard.testing import run_threads

STEPS = 3


def config(**more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "adam_w_mode": False}}, **more,
    }  # fmt: skip


def data() -> list[dict]:
    """Batches of one sequence; the program's loader on each rank reads every second one."""
    return batches(rows=1, steps=2 * STEPS)


def _train(rank: int, size: int):
    """The loop of DeepSpeed's documentation: each rank's loss is weighted by its labels, over the group along sp."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = copy.deepcopy(model_of("llama"))
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
        disable_in_eval=True,
    )
    engine, *_ = deepspeed.initialize(model=model, config=config(), mpu=mpu)
    assert engine.train_batch_size() == 1
    group = deepspeed.utils.groups._get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(data()[rank::2], mpu.get_sequence_parallel_rank(), group, 2, engine.device)
    losses = []
    for batch in loader:
        assert "labels" not in batch and len(loader) == 2 * STEPS
        logits = engine(**batch).logits
        loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=VOCAB)
        count = (batch["shift_labels"] != -100).sum()
        counts = dist.nn.functional.all_gather(count, group=group)
        parts = dist.nn.functional.all_gather(loss, group=group)
        loss = sum(part * number for part, number in zip(parts, counts, strict=True)) / sum(counts)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        alone = engine(input_ids=data()[rank]["input_ids"]).logits.shape  # in evaluation each rank attends to what it reads
    return losses, alone


@pytest.mark.processes
def test_a_program_for_deepspeed_equals_one_process():
    model, losses = copy.deepcopy(model_of("llama")), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    for batch in data():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found, alone in run_processes(_train, 2):
        assert found == pytest.approx(losses, rel=1e-6) and alone == (1, 16, VOCAB)


def test_the_key_of_a_configuration_makes_the_axis():
    models = [copy.deepcopy(model_of("llama")) for _ in range(4)]

    def on_rank(rank: int):
        engine, *_ = deepspeed.initialize(model=models[rank], config=config(sequence_parallel_size=2))
        sequence = sequence_of(engine.module)
        found = sequence.rank, sequence.size, engine.train_batch_size()
        engine.destroy()
        return found

    assert run_threads(4, on_rank) == [(0, 2, 2), (1, 2, 2), (0, 2, 2), (1, 2, 2)]


def test_sizes_and_attentions_that_do_not_fit_are_refused():
    assert UlyssesSPAttentionHF.register_with_transformers(model_of("llama"), "sdpa", 1) is None
    with pytest.raises(ValueError, match="configured for 'sdpa': give both the same"):
        UlyssesSPAttentionHF.register_with_transformers(model_of("llama"), "flash_attention_2", 2)
    around = torch.nn.Sequential(model_of("llama"))
    around.config = model_of("llama").config
    with pytest.raises(ValueError, match="configured for 'sdpa': give both the same"):
        UlyssesSPAttentionHF.register_with_transformers(around, "flash_attention_2", 2)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="sequence_parallel_size=2 does not divide the 1 ranks: 1 does"):
        UlyssesSPAttentionHF.register_with_transformers(model_of("llama"), "sdpa", 2)
    with pytest.raises(
        deepspeed.DeepSpeedConfigError, match="sequence_parallel_size: expected a number that divides the 1 ranks, got 2"
    ):
        deepspeed.initialize(model=copy.deepcopy(model_of("llama")), config=config(sequence_parallel_size=2))
