"""Sequence parallelism (an axis "sp"): models of Transformers equal one process; masks, bytes, memory, and what is refused.

Adam has eps=1e-6 here: the bias of GPT-2's keys has no gradient but noise of 1e-9, which the default of 1e-8 would make a step.
"""

import copy
import functools
import math

import pytest
import torch
from helpers import seeding
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads
from zeroshard.zero.runtime import runtime_of

transformers = pytest.importorskip("transformers")
VOCAB, WIDTH, HEADS, LAYERS, STEPS = 37, 32, 4, 2, 6
SMALL = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@functools.cache
def model_of(kind: str) -> nn.Module:
    """kind: a model, or Llama with an attention function or an option."""
    with seeding(0):
        if kind == "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, **off, **ends
                )
            )
        if kind == "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8))
        if kind == "mixtral":
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))
        if kind == "mistral":  # every layer has a sliding window
            return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=5))
        if kind == "bert":
            options = SMALL | {"num_key_value_heads": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertForMaskedLM(transformers.BertConfig(**options))
        options = {"attn_implementation": "eager"} if kind == "eager" else {}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def batches(rows: int = 2, tokens: int = 16, steps: int = STEPS, **entries: torch.Tensor) -> list[dict]:
    """Batches of whole sequences. entries: what each has beside ids and labels."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCAB, (rows, tokens), generator=generator) for _ in range(steps)]
    return [{"input_ids": each, "labels": each.clone(), **entries} for each in ids]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)


def one_process(model: nn.Module, data: list[dict]) -> tuple[list[float], dict]:
    model, losses = copy.deepcopy(model), []
    optimizer = adam(model)
    for batch in data:
        loss = model(**batch, use_cache=False).loss if hasattr(model, "config") else model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def trained(rank: int, model: nn.Module, data: list[dict], mesh: dict, micro: int = 1, **options) -> tuple[list[float], dict]:
    """One rank: its rows along dp, in `micro` micro-batches, and of these its tokens along sp."""
    comm = options.get("comm")
    model, optimizer = zs.shard(model, adam(model), mesh=mesh, **options)
    assert comm is None or runtime_of(model).comm is not None
    losses, place = [], rank // mesh["sp"]
    for whole in data:
        rows = {name: value.chunk(mesh.get("dp", 1))[place] for name, value in whole.items()}
        for number in range(micro):
            batch = zs.shard_sequence({name: value.chunk(micro)[number] for name, value in rows.items()}, model)
            loss = model(**batch).loss if hasattr(model, "config") else model(**batch)
            zs.backward(model, loss, weight=batch["num_items_in_batch"])
            losses.append(loss.item() * batch["num_items_in_batch"].item())
        optimizer.step()
        optimizer.zero_grad()
    labels = sum((batch["labels"][:, 1:] != -100).sum().item() for batch in data) / len(data)
    weights = zs.full_state_dict(model)
    zs.close(model)
    return [sum(losses[i : i + micro]) / labels for i in range(0, len(losses), micro)], weights


def assert_equals_one_process(model: nn.Module, data: list[dict], mesh: dict, close: float = 1e-5, **options) -> None:
    world = math.prod(mesh.values())
    models = [copy.deepcopy(model) for _ in range(world)]
    results = run_threads(world, lambda rank: trained(rank, models[rank], data, mesh, **options), timeout_s=100)
    compare(results, one_process(model, data), close)


def compare(results: list, expected: tuple, close: float = 1e-5) -> None:
    losses = [sum(each) for each in zip(*(result[0] for result in results), strict=True)]
    assert losses == pytest.approx(expected[0], rel=max(1e-6, close / 10))
    for name, value in expected[1].items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mesh", [{"sp": 2}, {"sp": 4}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "eager", "qwen3", "gpt2", "mixtral"])
def test_models_equal_one_process(kind, mesh):
    """At sp=4 the two key and value heads are repeated."""
    assert_equals_one_process(model_of(kind), batches(), mesh, stage=3)


@pytest.mark.parametrize("stage", range(4))
def test_dp_beside_sp_equals_one_process_at_every_stage(stage):
    assert_equals_one_process(model_of("llama"), batches(rows=4), {"dp": 2, "sp": 2}, stage=stage, micro=2)


PACKED = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).repeat(2, 1)
LEFT = torch.ones(2, 16, dtype=torch.long)
LEFT[0, :6] = 0
PROMPT = batches(tokens=16)
for each in PROMPT:
    each["labels"][:, :9] = -100  # the first rank along sp has no label at all


@pytest.mark.parametrize("kind", ["llama", "eager", "mistral"])
@pytest.mark.parametrize(
    "data",
    [batches(tokens=15), batches(position_ids=PACKED), batches(tokens=15, position_ids=PACKED[:, :15]), PROMPT, batches(attention_mask=LEFT)],
    ids=["odd length", "packed", "packed and odd", "labels of one rank only", "padding"],
)  # fmt: skip
def test_masks_are_those_of_whole_sequences(kind, data):
    """Mistral's window of 5 tokens reaches over the border between ranks."""
    assert_equals_one_process(model_of(kind), data[:3], {"sp": 2}, stage=2)
