"""Attention over more ranks along sp than the heads can be shared among: keys and values are gathered."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import seeding
from mesh_kit import on_ranks
from sequence_kit import (
    LAYERS,
    Plain,
    adam,
    assert_equals_one_process,
    batches,
    compare,
    model_of,
    one_process,
    trained,
    transformers,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from zeroshard.activations.causal import LAST_QUERIES
from zeroshard.activations.ulysses import SequenceParallel
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

DIM = 8  # of a head


@pytest.mark.parametrize(
    "kind, heads, kv, size",
    [
        ("llama", 6, 2, 4),  # two exchange heads, two groups
        ("eager", 6, 6, 4),
        ("llama", 6, 3, 4),  # key and value heads are repeated
        ("gpt2", 3, 3, 2),  # no heads are exchanged
        ("gpt2", 3, 3, 4),
        ("qwen3", 8, 2, 4),
        ("qwen3", 8, 2, 16),
        ("qwen3", 6, 2, 9),  # three exchange heads, three groups
        ("gpt_oss", 6, 2, 4),
        ("mistral", 6, 2, 4),
    ],
)
def test_models_equal_one_process(kind, heads, kv, size):
    assert_equals_one_process(model_of(kind, heads, kv), batches(tokens=2 * size, steps=3), {"sp": size}, stage=3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dp_beside_sp_and_recomputed_blocks_equal_one_process(stage):
    model = copy.deepcopy(model_of("llama", 6))
    model.gradient_checkpointing_enable({"use_reentrant": stage == 0})
    model.enable_input_require_grads()
    assert_equals_one_process(model.train(), batches(rows=4), {"dp": 2, "sp": 4}, stage=stage, micro=2)


# -- masks -----------------------------------------------------------------------------------------------------------

PACKED = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).repeat(2, 1)
LEFT = torch.ones(2, 16, dtype=torch.long)
LEFT[0, :6] = 0


@pytest.mark.parametrize("kind", ["llama", "eager", "mistral"])
@pytest.mark.parametrize(
    "data",
    [batches(tokens=15), batches(tokens=15, position_ids=PACKED[:, :15]), batches(attention_mask=LEFT)],
    ids=["odd length", "packed", "padding"],
)
def test_masks_are_the_rows_of_whole_sequences(kind, data):
    """Mistral's window of 5 tokens reaches over the borders between runs of queries."""
    assert_equals_one_process(model_of(kind, 6), data[:3], {"sp": 4}, stage=2)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_that_is_not_causal_equals_one_process(padded):
    data = batches(steps=3, **({"attention_mask": LEFT} if padded else {}))
    model, models = model_of("bert", 6), [copy.deepcopy(model_of("bert", 6)) for _ in range(4)]

    def on_rank(rank: int):
        model, optimizer = zs.shard(models[rank], adam(models[rank]), mesh={"sp": 4}, stage=2)
        losses = []
        for whole in data:
            batch = zs.shard_sequence(whole, model, shift_labels=False)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item() / 4)
        return losses, zs.full_state_dict(model)

    compare(run_threads(4, on_rank, timeout_s=100), one_process(model, data))


def flash(module, query, key, value, mask, scaling=None, sliding_window=None, dropout=0.0, is_causal=None, **_):
    """As flash attention computes: the last query sees all keys; mask: (B, keys), of padding."""
    (queries, keys), heads = (query.shape[2], key.shape[2]), query.shape[1] // key.shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if sliding_window is not None:
        seen = seen.triu(keys - queries - sliding_window + 1)
    if mask is not None:
        own = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]  # what is padded sees itself
        seen = seen & mask[:, None, None, :] | own
    key, value = (each.repeat_interleave(heads, dim=1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling).transpose(1, 2), None


@pytest.fixture
def flash_model():
    """Function of (kind, heads) that makes a model whose attention is `flash`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register("standin_flash", flash)
    AttentionMaskInterface.register("standin_flash", flash_attention_mask)

    def make(kind: str, heads: int) -> nn.Module:
        model = copy.deepcopy(model_of(kind, heads))
        model.config._attn_implementation = "standin_flash"
        return model

    return make


@pytest.mark.parametrize("kind, padded", [("llama", False), ("llama", True), ("mistral", False)])
def test_flash_attention_sees_the_keys_before_the_end_of_each_run(flash_model, kind, padded):
    data = batches(steps=3, **({"attention_mask": LEFT} if padded else {}))
    for batch in data if padded else []:  # rows of padding are whatever the kernel writes
        batch["labels"] = batch["labels"].masked_fill(LEFT.roll(1) * LEFT == 0, -100)
    assert_equals_one_process(flash_model(kind, 6), data, {"sp": 4}, stage=3)


def test_what_a_function_can_not_compute_is_refused_and_the_remedy_works(flash_model):
    (packed,) = batches(rows=1, steps=1, position_ids=PACKED[:1])
    models = [flash_model("llama", 6) for _ in range(4)]
    unknown = [copy.deepcopy(model_of("llama", 6)) for _ in range(4)]

    def on_rank(rank: int) -> float:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 4})
        batch = zs.shard_sequence(packed, model)
        with pytest.raises(
            zs.ConfigError, match=r"standin_flash has no attention over packed.*set_attn_implementation\('sdpa'\)"
        ):
            model(**batch)
        zs.close(model)
        model.set_attn_implementation("sdpa")
        model, _ = zs.shard(model, None, mesh={"sp": 4})
        loss = model(**batch).loss.item()
        zs.close(model)
        transformers.AttentionInterface.register("of_the_user", flash)
        unknown[rank].config._attn_implementation = "of_the_user"
        model, _ = zs.shard(unknown[rank], None, mesh={"sp": 4})
        with pytest.raises(zs.ConfigError, match="functions other than those of Transformers have no causal one"):
            model(**zs.shard_sequence(batches(steps=1)[0], model))
        return loss

    expected = model_of("llama", 6)(**packed, use_cache=False).loss.item()
    assert sum(run_threads(4, on_rank, timeout_s=60)) / 4 == pytest.approx(expected, rel=1e-5)


# -- modules that call F.scaled_dot_product_attention ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kv, mask, network",
    [
        (4, "causal", "shared"),
        (1, "causal", "shared"),
        (4, "slopes", "shared"),
        (4, "causal", "tagged"),
        (4, "causal", "ordered"),
    ],
)
def test_any_module_attends_to_whole_sequences_over_every_network(kv, mask, network):
    """Eight ranks: four exchange heads, two groups."""
    with seeding(0):
        model = Plain(kv, mask)
    data, models = batches(rows=2, steps=3), [copy.deepcopy(model) for _ in range(8)]
    run = functools.partial(trained, data=data, mesh={"sp": 8}, stage=3)
    compare(on_ranks(8, network, lambda rank, options: run(rank, models[rank], **options)), one_process(model, data))


def test_bf16_equals_one_rank():
    """bf16 rounds sums over the tokens of each rank, and each group's gradients of keys: losses are equal to 3 digits."""
    data, runs = batches(rows=2), []
    for mesh in ({"sp": 1}, {"sp": 4}):
        models = [copy.deepcopy(model_of("llama", 6)) for _ in range(mesh["sp"])]
        run = functools.partial(trained, data=data, mesh=mesh, stage=3, precision="bf16")
        results = run_threads(mesh["sp"], lambda rank, run=run, models=models: run(rank, models[rank]), timeout_s=100)
        runs.append([sum(each) for each in zip(*(result[0] for result in results), strict=True)])
    assert runs[1] == pytest.approx(runs[0], rel=2e-3)


# -- the attention of the last queries -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, keys", [(5, 12), (1, 12), (12, 12), (300, 777)])
def test_the_last_queries_see_what_a_mask_would_show_them(queries, keys, dtype):
    with seeding(0):
        inputs = [torch.randn(2, h, n, 16, dtype=dtype, requires_grad=True) for h, n in ((4, queries), (2, keys), (2, keys))]
        grad = torch.randn(2, 4, queries, 16, dtype=dtype)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    found, expected = (
        F.scaled_dot_product_attention(*inputs, given, scale=0.3, enable_gqa=True) for given in (LAST_QUERIES, mask)
    )
    close = {"rtol": 0, "atol": 2e-2 if dtype == torch.bfloat16 else 2e-6}
    torch.testing.assert_close(found, expected, **close)
    pairs = (torch.autograd.grad(out, inputs, grad) for out in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_dropout_is_that_of_a_mask():
    with seeding(0):
        query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    with seeding(1):
        found = F.scaled_dot_product_attention(query, key, key, LAST_QUERIES, 0.5)
    with seeding(1):
        torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, key, mask, 0.5))


# -- bytes, memory, work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads, kv, size, among", [(6, 2, 4, 2), (6, 6, 4, 2), (3, 3, 2, 1), (6, 2, 9, 3), (8, 2, 4, 4)])
def test_bytes_sent_are_those_of_the_formula(heads, kv, size, among):
    """2 L D c (s / n) (2 H (u - 1) + 2 K' (n - 1)) / u, and 8 bytes a position to each other rank."""
    (batch,) = batches(tokens=4 * size, steps=1)
    models = [copy.deepcopy(model_of("llama", heads, kv)) for _ in range(size)]

    def on_rank(rank: int) -> int:
        model, _ = zs.shard(models[rank], None, mesh={"sp": size}, stage=3)
        model(**zs.shard_sequence(batch, model)).loss.backward()
        assert (f"groups of {among} exchange heads" in str(zs.report(model))) == (among < size)
        return runtime_of(model).tiers.ledger.traffic["all-to-all along sp"].nbytes

    tokens = batch["input_ids"].numel() // size
    repeated = kv * among // math.gcd(kv, among)
    activations = 4 * 2 * LAYERS * DIM * tokens * (2 * heads * (among - 1) + 2 * repeated * (size - 1)) // among
    assert run_threads(size, on_rank) == [activations + 8 * tokens * (size - 1)] * size


def test_no_tensor_is_as_large_as_the_scores_of_two_ranks():
    """A causal attention makes no mask: of 2 x 4 ranks x 64 tokens the largest tensor is that of the keys."""
    models = [copy.deepcopy(model_of("llama", 6)) for _ in range(4)]
    (batch,) = batches(rows=1, tokens=256, steps=1)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple) else (out,):
                self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
            return out

    def on_rank(rank: int) -> int:
        model, _ = zs.shard(models[rank], None, mesh={"sp": 4}, stage=0)
        part = zs.shard_sequence(batch, model)
        with Largest() as largest:
            model(**part).loss.backward()
        return largest.numel

    for numel in run_threads(4, on_rank, timeout_s=60):
        assert numel < 2 * 64 * 256  # queries of a rank x keys


@pytest.mark.parametrize("heads, size", [(6, 4), (4, 8), (8, 12), (3, 2), (1, 6), (9, 6), (4, 4), (25, 10)])
def test_groups_compute_equally_much_of_a_causal_attention(heads, size):
    """Each token is a query of each head once. With u ranks in a group the busiest of g computes 1 + (g - 1) / (g u^2) of the
    mean if u is odd; else all the same, but for the diagonal."""
    length, work, seen = 64, [], torch.zeros(size * 64, heads)
    for rank in range(size):
        sequence = SequenceParallel.__new__(SequenceParallel)
        sequence.rank, sequence.size = rank, size
        share = sequence.share(heads)
        assert rank == share.ranks[share.number] and share.ranks == sorted(share.ranks)
        rows = [row for run in share.runs(length) for row in range(*run)]
        assert rows == [share.row(query, length) for query in range(len(rows))]
        seen[rows, share.heads(heads)] += 1
        work.append(sum(row + 1 for row in rows) * heads // share.among)
    assert (seen == 1).all()
    among, groups = share.among, share.groups
    uneven = (groups - 1) / (groups * among**2) if among % 2 else 0
    assert max(work) / (sum(work) / size) == pytest.approx(1 + uneven, abs=0.01)
