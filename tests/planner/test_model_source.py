"""What can be planned: presets count their published parameters, configurations and functions are built on meta, mistakes say so."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from zeroshard import ConfigError
from zeroshard.cli.options import parse_train
from zeroshard.config import Tier
from zeroshard.planner import model_source
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import QUICKSTART, group_experts, names, source_of
from zeroshard.planner.models import GPT
from zeroshard.planner.request import Request
from zeroshard.planner.simulator.hardware import Hardware

TINY_MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4,
}  # fmt: skip


def numel(source):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in source.build().parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-xl", 1.558), ("gpt-60b", 60.1), ("gpt-1t", 1008), ("turing-nlg", 17.179), ("bloom", 176.247), ("llama-2-13b", 13.016),
        ("llama-3-8b", 8.030), ("llama-3-405b", 405.853), ("mixtral-8x7b", 46.703), ("mixtral-8x22b", 140.621),
        ("deepseek-v3", 671.026),
    ],
)  # fmt: skip
def test_a_preset_has_the_published_number_of_parameters(name, billions):
    assert numel(source_of(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_sequence_may_be_longer_than_published_where_positions_are_computed():
    asked = Request(source_of("llama-3-8b"), Hardware.named("cpu"), {"pp": 1, "dp": 1, "tp": 1}, rows=1, seq=1 << 20)
    assert asked.source.max_seq is None and "is published for 131,072 tokens" in asked.notes[-1]
    assert replace(asked, seq=8192).notes == ()


def test_sizes_in_names_of_presets_are_those_of_their_models():
    for name, row in model_source._shapes().items():
        size = name.split("-")[1] if row["family"] == "gpt" and name.startswith("gpt-") else ""
        if size:
            billions = float(size[:-1]) * (1000 if size.endswith("t") else 1)
            assert 12 * row["layers"] * row["hidden"] ** 2 / 1e9 == pytest.approx(billions, rel=0.06), name
            assert row["source"] and row["hidden"] % row["heads"] == 0 and row["ffn"] == 4 * row["hidden"]


def test_the_quickstart_is_what_the_command_trains():
    assert parse_train(["--size", "tiny"]).model_config() == QUICKSTART
    assert "quickstart" in names()


def test_a_sequence_longer_than_the_model_can_read_is_a_sentence():
    asked = Request(source_of("quickstart"), Hardware.named("cpu"), {"pp": 1, "dp": 2, "tp": 1}, rows=2, seq=300)
    with pytest.raises(ConfigError, match="at most the 256 tokens that quickstart can read, got 300"):
        asked.plan()


@pytest.fixture
def mixtral(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_MIXTRAL))
    return tmp_path


def planned(folder, top_k, precision):
    (folder / "config.json").write_text(json.dumps(TINY_MIXTRAL | {"num_experts_per_tok": top_k}))
    source = source_of(str(folder))
    return plan(source.build, ranks=4, batch=(3, 16), precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_configuration_with_experts_is_planned_at_the_flops_of_the_chosen_ones(mixtral, precision):
    source = source_of(str(mixtral))
    assert (source.layers, source.hidden, source.vocab, source.default_seq) == (2, 32, 128, 4096)
    assert "however tokens are routed" in source.notes[0]
    one, two = (planned(mixtral, top_k, precision) for top_k in (1, 2))
    # three passes, 2 flops, 48 tokens, 3 matrices, 2 layers
    assert two.trace.model_flops - one.trace.model_flops == 3 * 2 * 48 * 3 * 32 * 64 * 2
    assert not two.report.deviations  # what the router computes in place keeps no unit gathered


def test_a_unit_whose_module_keeps_a_loss_is_released_in_a_plan_too():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 8)

        def forward(self, x):
            self.loss = self.out(x).sum() if keeps else None
            return self.out(x)

    def model():
        return nn.Sequential(nn.Embedding(16, 8), nn.ModuleList([Keeps()])[0], nn.Linear(8, 16))

    keeps = False
    without = plan(model, ranks=2, batch=(2, 4), units=("Keeps",)).report
    keeps = True
    with_one = plan(model, ranks=2, batch=(2, 4), units=("Keeps",)).report
    assert not with_one.deviations and with_one.communication == without.communication


def test_experts_alike_give_what_transformers_computes(mixtral):
    model = source_of(str(mixtral / "config.json")).make().double()
    with torch.no_grad():
        for layer in model.model.layers:
            for weights in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weights.copy_(weights[:1].expand_as(weights).clone())
    tokens = torch.arange(32).view(2, 16)
    results = []
    for implementation in ("eager", "zeroshard_planner"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model(tokens).logits.square().mean()
        loss.backward()
        results.append(
            (loss.detach(), model.model.layers[0].mlp.experts.down_proj.grad.sum(0), model.lm_head.weight.grad.clone())
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_experts_that_cannot_be_grouped_are_refused():
    class Other(nn.Module):
        def _can_set_experts_implementation(self):
            return False

    with pytest.raises(ConfigError, match="Other: its experts read the routing"):
        group_experts(Other())


MODULE = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = self.weight.sum().item()

class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.out = nn.Linear(8, 50)

    def forward(self, tokens):
        return self.out(self.embedding(tokens))

def good():
    return Good()

def reads():
    return nn.Sequential(Good(), Head())

def number():
    return 3

def elsewhere():
    return nn.Linear(2, 2, device="cpu")

def flat():
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten())
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_to_plan.py").write_text(MODULE)
    return "mine_to_plan"


def test_a_function_of_the_user_is_built(user_module):
    source = source_of(f"{user_module}:good")
    assert source.vocab == 50 and numel(source) == 50 * 8 + 8 * 50 + 50
    assert plan(source.make, ranks=2, batch=(2, 8)).num_parameters == numel(source)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reads", ["cannot be built on the meta device", "in Head (", "mine_to_plan.py:9)", "must not read values"]),
        ("number", ["expected a function that returns a torch.nn.Module, got int"]),
        ("elsewhere", ["weight is on cpu", "Leave out device="]),
        ("goood", ["mine_to_plan has no function 'goood'", "Did you mean 'good'?"]),
    ],
)
def test_a_function_that_fails_is_a_sentence_with_the_module_and_the_remedy(user_module, text, words):
    with pytest.raises(ConfigError) as caught:
        source_of(f"{user_module}:{text}")
    assert all(word in str(caught.value) for word in words), caught.value


def test_logits_of_another_shape_are_a_sentence(user_module):
    source = source_of(f"{user_module}:flat")
    with pytest.raises(ConfigError, match=r"expected logits \(rows, seq, tokens\).*got a tensor of shape \(2, 64\)"):
        plan(source.make, ranks=2, batch=(2, 8))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama-3-80b", ["Did you mean 'llama-3-8b'?", "gpt-1t"]),
        ("60b", ["Did you mean 'gpt-60b'?"]),
        ("no/such/config.json", ["is no file", "config.json or the folder"]),
        ("no_such_module:f", ["model: cannot import 'no_such_module'", "there is no such module"]),
    ],
)
def test_an_unknown_model_is_a_sentence_with_the_nearest(text, words):
    with pytest.raises(ConfigError) as caught:
        source_of(text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_without_a_configuration_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="there is no config.json in"):
        source_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ConfigError, match="expected a Hugging Face configuration in .*config.json"):
        source_of(str(tmp_path))


def test_checkpoints_are_kept_in_parts_over_tp_or_on_the_host_in_a_plan_too():
    source = source_of("gpt2-medium")
    shape = {"batch": (1, 64), "stage": 2}
    parts, away = (
        plan(lambda: GPT(replace(source.config, vocab_size=512, layers=3)), axes={"dp": 2, "tp": tp}, checkpointing=how, **shape)
        for tp, how in ((4, {"partition": True}), (1, {"offload": "cpu"}))
    )
    whole = 3 * 64 * 1024 * 4  # inputs of three blocks, in fp32
    forward = {each.name: each for each in parts.phases}["forward"]
    assert forward.held[Tier.DEVICE]["activation checkpoints"] == whole // 4
    assert sum(nbytes for unit, nbytes in parts.activations.items() if "blocks" in unit) < whole / 2
    assert {each.name: each for each in away.phases}["forward"].held[Tier.HOST]["activation checkpoints"] == whole


def test_a_configuration_without_a_causal_language_model_says_what_to_give(tmp_path):
    for model_type in ("t5", "vit"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match="no causal language model: give a function"):
            source_of(str(tmp_path))


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_is_torchs_own_whatever_a_configuration_names(attention, mixtral):
    (mixtral / "config.json").write_text(json.dumps(TINY_MIXTRAL | {"attn_implementation": attention}))
    with torch.device("meta"):
        assert source_of(str(mixtral)).build().config._attn_implementation == "sdpa"


def test_attention_without_torchs_kernels_is_built_plain(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 1, "n_head": 2})
    )
    with torch.device("meta"):
        assert source_of(str(tmp_path)).build().config._attn_implementation == "eager"
