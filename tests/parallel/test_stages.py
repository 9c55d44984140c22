"""Cuts of a model into stages: by cost, as asked, with the names of the whole; what can not be cut is told."""

import copy
import gc
import weakref

import pipeline_kit as kit
import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.parallel.pipeline import stages_of
from zeroshard.parallel.stages import cut_by_cost, cut_stages


def test_the_costliest_stage_is_as_cheap_as_can_be():
    assert cut_by_cost([3, 1, 1, 1, 3], 3) == [range(1), range(1, 4), range(4, 5)]
    assert cut_by_cost([1] * 6, 4) == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert cut_by_cost([9, 1, 1], 3) == [range(1), range(1, 2), range(2, 3)]
    costs = [5, 1, 4, 2, 2, 7, 1, 1, 3]
    best = min(
        max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])) for a in range(1, len(costs) - 1) for b in range(a + 1, len(costs))
    )
    assert max(sum(costs[i] for i in part) for part in cut_by_cost(costs, 3)) == best


def test_a_large_head_makes_its_stage_shorter_unless_it_weighs_nothing():
    model = kit.model()
    model.head = nn.Linear(16, 4096, bias=False)
    blocks = [stage.pipeline_stage.blocks for stage in cut_stages(model, 2, [0, 1])]
    assert blocks == [range(3), range(3, 4)]
    blocks = [stage.pipeline_stage.blocks for stage in cut_stages(model, 2, [0, 1], head_weight=0, embedding_weight=0)]
    assert blocks == [range(2), range(2, 4)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_one_after_the_other_are_the_model_and_have_its_names(count):
    model = kit.model(tied=True)
    tokens = kit.batch(0, 0)[0]
    stages = [copy.deepcopy(stage) for stage in cut_stages(model, count, range(count))]
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden)
        assert isinstance(stage, type(model))
    assert torch.equal(hidden, model(tokens))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted({*dict(model.named_parameters()), *(["head.weight"] if count > 1 else [])})
    assert [len(stage.pipeline_stage.ties) for stage in stages] == ([0] if count == 1 else [1] + [0] * (count - 2) + [1])


def _transformers(name):
    transformers = pytest.importorskip("transformers")
    same = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = {
        "llama": lambda: transformers.LlamaConfig(**same, num_key_value_heads=2, intermediate_size=32),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=4, n_head=2, n_positions=16),
        "mixtral": lambda: transformers.MixtralConfig(**same, num_key_value_heads=2, intermediate_size=32, num_local_experts=4),
        "gemma3": lambda: transformers.Gemma3TextConfig(**same, num_key_value_heads=2, intermediate_size=32, head_dim=8),
        "bloom": lambda: transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=4, n_head=2),
    }[name]()
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3", "bloom"])
def test_models_of_transformers(name):
    model, tokens = _transformers(name), kit.batch(0, 0)[0]
    hidden = tokens
    for stage in cut_stages(model, 3, range(3)):
        hidden = stage(hidden)
    assert torch.equal(hidden, model(tokens).logits)


def test_stages_and_model_are_freed_without_the_garbage_collector():
    model = kit.model(tied=True)
    gc.collect()
    gc.disable()
    try:
        stages = cut_stages(model, 2, [0, 1])
        left = [weakref.ref(each) for each in (*stages, *stages[1].parameters(), model)]
        del stages, model
        assert [each() for each in left] == [None] * len(left)
    finally:
        gc.enable()


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = kit.model()
    (stage,) = cut_stages(model, 2, [1])
    assert {name.split(".")[0] for name, _ in stage.named_parameters()} == {"blocks", "norm", "head"}
    assert next(iter(stage.blocks.named_children()))[0] == "2"


class _Crossed(nn.Module):
    """Calls its second block first, or a shared module between blocks."""

    def __init__(self, order, shared=False):
        super().__init__()
        self.embedding, self.shared = nn.Embedding(32, 16), nn.Linear(16, 16) if shared else None
        self.blocks, self.order = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)), order

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number in self.order:
            x = self.blocks[number](x)
            x = x if self.shared is None else self.shared(x)
        return x @ self.embedding.weight.T if self.shared is None else x


def test_what_can_not_be_cut_is_told():
    with pytest.raises(zs.ConfigError, match="between 1 and 4 stages; the nearest is 4"):
        cut_stages(kit.model(), 5, [0])
    with pytest.raises(zs.ConfigError, match="cuts: expected the 1 blocks"):
        cut_stages(kit.model(), 2, [0], cuts=["blocks.9"])
    with pytest.raises(zs.ConfigError, match="no nn.ModuleList of blocks"):
        cut_stages(nn.Linear(2, 2), 2, [0])
    with pytest.raises(zs.ConfigError, match=r"calls the blocks \[1, 0\] in this order"):
        cut_stages(_Crossed((1, 0)), 2, [0])
    with pytest.raises(zs.ConfigError, match="embedding.weight of _Crossed is used outside of the forward of the module"):
        cut_stages(_Crossed((0, 1)), 2, [0])
    with pytest.raises(zs.ConfigError, match="shared.* is used between the blocks: several stages"):
        cut_stages(_Crossed((0, 1), shared=True), 2, [0])
    assert [stage.pipeline_stage.blocks for stage in cut_stages(kit.model(), 2, [0, 1], cuts=["blocks.1"])] == [
        range(1),
        range(1, 4),
    ]


class _OtherInputs(nn.Module):
    """Rows of five numbers -> blocks. more: what the first module returns beside its output. own: the blocks' owner has a parameter."""

    def __init__(self, more=False, own=False):
        super().__init__()
        self.first, self.norm, self.inner = _First(more), nn.BatchNorm1d(8), _Inner(own)

    def forward(self, x):
        x = self.first(x)
        return self.inner(self.norm(x[0] if isinstance(x, tuple) else x))


class _First(nn.Linear):
    def __init__(self, more):
        super().__init__(5, 8)
        self.more = more

    def forward(self, x):
        return (super().forward(x), x) if self.more else super().forward(x)


class _Inner(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8)) if own else 1.0

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def test_inputs_that_are_not_tokens_take_an_example():
    model, example = _OtherInputs(), torch.randn(3, 5)
    with pytest.raises(
        zs.ConfigError, match=r"failed on tokens, \(2, 3\) int64: RuntimeError: .*example=torch.zeros\(rows, ...\)"
    ):
        cut_stages(model, 2, [0])
    with pytest.raises(zs.ConfigError, match=r"_OtherInputs, .* failed on \(2, 4\) float32: .*Pass an input that it takes"):
        cut_stages(model, 2, [0], example=torch.zeros(2, 4))
    with pytest.raises(zs.ConfigError, match="example: expected an input of _OtherInputs, a tensor, got tuple"):
        cut_stages(model, 2, [0], example=(example,))
    first, second = cut_stages(model, 2, range(2), example=torch.zeros(2, 5))
    assert model.norm.num_batches_tracked == 0, "the forward that shows where to cut is none of the user's"
    assert second.first.weight.shape == (8, 5) and second.first.weight.is_meta and second.first.in_features == 5
    assert [name for name, _ in second.named_parameters()] == ["inner.blocks.1.0.weight", "inner.blocks.1.0.bias"]
    assert torch.equal(second.eval()(first.eval()(example)), model.eval()(example))


def test_modules_for_which_nothing_can_stand_in_are_told():
    with pytest.raises(zs.ConfigError, match="first of _OtherInputs has parameters and returns something other than one tensor"):
        cut_stages(_OtherInputs(more=True), 2, [0], example=torch.zeros(2, 5))
    with pytest.raises(zs.ConfigError, match="inner.scale of _OtherInputs belongs to the module that holds the blocks"):
        cut_stages(_OtherInputs(own=True), 2, [0], example=torch.zeros(2, 5))


def test_which_stages_a_rank_has():
    assert [stages_of(rank, 2, 2, "interleaved1f1b") for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stages_of(rank, 2, 2, "ZBVZeroBubble") for rank in range(2)] == [[0, 3], [1, 2]]
    with pytest.raises(zs.ConfigError, match="3 stages a rank with schedule ZBVZeroBubble"):
        stages_of(0, 2, 3, "ZBVZeroBubble")
