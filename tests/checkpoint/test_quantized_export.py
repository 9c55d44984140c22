"""zs.export(quantize=...): codes and scales of a plain quantization, whatever ranks trained, as Transformers loads them."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from helpers import adamw, seeded
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.cli import main
from zeroshard.testing import run_threads

LARGEST = {"int8": (torch.int8, 127), "fp8": (torch.float8_e4m3fn, 448)}
LINEARS = {"wide", "tall", "row", "column", "twin"}  # modules of Odd whose weights are quantized


class Odd(nn.Module):
    """Odd shapes; a module with two names, a router, a head tied to an embedding, a matrix that is no nn.Linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 7), nn.LayerNorm(7)
        self.wide, self.tall = nn.Linear(7, 5), nn.Linear(5, 13, bias=False)
        self.row, self.column = nn.Linear(13, 1), nn.Linear(1, 7)
        self.twin, self.free = self.wide, nn.Parameter(torch.randn(3, 3))
        self.gate, self.head = nn.Linear(7, 3), nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.tall.weight[2] = 0

    def forward(self, tokens):
        x = self.norm(self.table(tokens))
        x = x + self.column(self.row(self.tall(self.wide(x))) + self.tall(self.twin(x)).mean(-1, keepdim=True))
        return (self.head(x).logsumexp(-1) + (self.gate(x) @ self.free).sum(-1)).mean()


def train(rank, root, make=Odd, steps=1, **options):
    """Save a model after some steps; its whole values."""
    model = seeded(make)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    for _ in range(steps):
        model(torch.arange(4) + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    zs.save(root, model, optimizer)
    return {name: value.clone() for name, value in zs.full_state_dict(model, masters=True).items()}


@pytest.fixture
def run(tmp_path):
    """A checkpoint of `Odd` and its values."""
    return tmp_path / "run", run_threads(2, lambda rank: train(rank, tmp_path / "run", stage=3))[0]


def plain(weight, form, dtype=torch.float32):
    """The codes and scales of a whole matrix, in one process."""
    code, largest = LARGEST[form]
    scale = (weight.abs().max(dim=1).values / largest).to(dtype).unsqueeze(1)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = weight / scale.float()
    return (values.round() if form == "int8" else values).clamp(-largest, largest).to(code), scale


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.view(torch.uint8).equal(other.view(torch.uint8))


def read(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


# -- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_codes_and_scales_are_those_of_one_process_at_every_stage(stage, world, tmp_path, monkeypatch):
    state = run_threads(world, lambda rank: train(rank, tmp_path / "run", stage=stage))[0]
    monkeypatch.setattr(
        sys.modules[zs.export.__module__], "_CHUNK_NUMEL", 12
    )  # a row of `tall` at a time, none of `row` within it
    for form in LARGEST:
        done = zs.export(tmp_path / "run", tmp_path / form, quantize=form, model=Odd())
        got = read(tmp_path / form)
        for name in LINEARS - {"twin"}:
            code, scale = plain(state[f"{name}.weight"], form)
            assert equal(got.pop(f"{name}.weight"), code) and equal(got.pop(f"{name}.weight_scale"), scale)
        assert done.quantized == 4 and got.keys() == {name for name in state if name[:4] not in ("twin", "head")} - {
            f"{name}.weight" for name in LINEARS
        }
        assert all(equal(value, state[name]) for name, value in got.items())


def test_a_module_without_a_configuration_gets_a_file_that_says_how_it_is_stored(run, tmp_path):
    """Ties hold for scales as for weights; what is not quantized is named."""
    done = zs.export(run[0], tmp_path / "out", quantize="int8", model=Odd())
    assert done.files == ("model.safetensors", "quantization_config.json")
    ties = {"head.weight": "table.weight", "twin.bias": "wide.bias", "twin.weight": "wide.weight"}
    assert done.ties == {**ties, "twin.weight_scale": "wide.weight_scale"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert done.ties.items() <= file.metadata().items()
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    group["input_activations"] = {**weights, "strategy": "token", "dynamic": True}
    assert json.loads((tmp_path / "out" / "quantization_config.json").read_text()) == {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["gate", "head"], "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip
    zs.export(run[0], tmp_path / "fp8", quantize="fp8", model=Odd(), ignore=["row"])
    settings = json.loads((tmp_path / "fp8" / "quantization_config.json").read_text())
    group = settings["config_groups"]["group_0"]
    assert settings["format"] == "float-quantized" and settings["ignore"] == ["row", "head"]
    assert group["input_activations"] is None and group["weights"]["type"] == "float"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", list(LARGEST))
def test_a_weight_is_at_most_half_a_step_off(form, dtype, run, tmp_path):
    """An int8 step is the scale; that of fp8 an eighth of the number, or 2**-9 of the scale."""
    path, state = run
    zs.export(path, tmp_path / "out", quantize=form, model=Odd(), dtype=dtype)
    got = read(tmp_path / "out")
    assert got["table.weight"].dtype == got["row.weight_scale"].dtype == (dtype or torch.float32)
    for name in LINEARS - {"twin"}:
        weight, scale = state[f"{name}.weight"], got[f"{name}.weight_scale"].float()
        assert equal(got[f"{name}.weight"], plain(weight, form, dtype or torch.float32)[0])
        off = (got[f"{name}.weight"].float() * scale - weight).abs()
        half = scale / 2 if form == "int8" else torch.maximum(weight.abs() / 16, scale / 1024)
        assert (off <= half * (1 + 1e-5)).all()
        assert off.max() > 0 or name == "column"  # its rows are one number, which is exact


def test_several_files_hold_the_same_and_the_index_names_all(run, tmp_path):
    """Also where a weight and its scale lie in two files."""
    zs.export(run[0], tmp_path / "one", quantize="int8", model=Odd())
    done = zs.export(run[0], tmp_path / "many", quantize="int8", model=Odd(), max_shard_nbytes=1)
    whole, parts = read(tmp_path / "one"), read(tmp_path / "many")
    assert whole.keys() == parts.keys() and all(equal(whole[name], parts[name]) for name in whole)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    assert files.keys() == whole.keys() and len(set(files.values())) == done.tensors == len(whole)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Odd()

    def forward(self, tokens):
        return self.inner(tokens)


def test_a_part_of_the_model_is_quantized_under_its_own_names(tmp_path):
    run_threads(2, lambda rank: train(rank, tmp_path / "run", Wrapped, stage=2))
    done = zs.export(tmp_path / "run", tmp_path / "out", quantize="fp8", model=Odd(), prefix="inner.")
    assert done.quantized == 4 and "wide.weight_scale" in read(tmp_path / "out")
    names = ["inner.wide.weight", "inner.wide.bias"]
    done = zs.export(tmp_path / "run", tmp_path / "few", quantize="fp8", model=Wrapped(), names=names)
    assert read(tmp_path / "few").keys() == {*names, "inner.wide.weight_scale"}


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ({"quantize": "int4"}, "expected one of int8, fp8, or None, got 'int4'"),
    ({"quantize": True}, "got True"),
    ({"quantize": "int8", "format": "torch"}, "use format='safetensors'"),
    ({"quantize": "int8"}, "give config=, a Hugging Face configuration, or model="),
    ({"quantize": "int8", "model": Odd}, "expected a torch.nn.Module, or None, got type"),
    ({"quantize": "int8", "model": nn.Linear(2, 2)}, "has none of the weights .* nn.Linear modules of Linear, .*: weight"),
    ({"quantize": "int8", "model": nn.Embedding(2, 2)}, "there are none"),
    ({"quantize": "int8", "model": Odd(), "ignore": "gate"}, r"expected names of modules, as \['lm_head'\], got 'gate'"),
    ({"quantize": "int8", "model": Odd(), "ignore": ["talll"]}, "no nn.Linear module 'talll'. Did you mean 'tall'"),
    ({"quantize": "int8", "config": {"model_type": "none"}}, "Transformers cannot build the model of config= .* give model="),
    ({"model": Odd()}, "they say what to quantize; give quantize= too"),
], ids=str)  # fmt: skip
def test_mistakes_are_refused_before_anything_is_written(options, words, run, tmp_path):
    with pytest.raises(zs.ConfigError, match=words):
        zs.export(run[0], tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["run"]


def test_what_has_no_scale_or_has_one_already_is_refused_and_leaves_nothing(run, tmp_path):
    state = run[1]
    zs.export(run[0], tmp_path / "once", quantize="int8", model=Odd())
    state["tall.weight"][3, 1] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(zs.CheckpointError, match=r"tall.weight: row 3 has a value that is not finite.*without quantize="):
        zs.export(tmp_path / "nan.pt", tmp_path / "out", quantize="fp8", model=Odd())
    with pytest.raises(zs.ConfigError, match=r"column.weight \(torch.int8\) is quantized already; export it without quantize="):
        zs.export(tmp_path / "once", tmp_path / "out", quantize="int8", model=Odd())
    assert sorted(os.listdir(tmp_path)) == ["nan.pt", "once", "run"]


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_quantizes_a_model_of_ones_own(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef tall():\n    return torch.nn.ModuleDict({'tall': torch.nn.Linear(5, 13)})\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "out", "--quantize", "int8", "--model", "mine:tall", "--ignore", "lm_head,gate"]) == 0
    assert "tensors (1 of them in int8)" in capsys.readouterr().out
    assert read(tmp_path / "out")["tall.weight"].dtype is torch.int8
    assert main(["export", "run", "more", "--quantize", "int8"]) == 2
    assert "give config=, a Hugging Face configuration, or model=" in capsys.readouterr().err


# -- Hugging Face --------------------------------------------------------------------------------------------------

TEXT = torch.arange(24).view(2, 12)


def save_llama(root, tied):
    """A checkpoint of a small Llama with random weights, which trains nothing: only its values matter here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=41,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model, _ = zs.shard(seeded(lambda: transformers.LlamaForCausalLM(config)), None, stage=3)
    zs.save(root, model, extra={"hf_config": config.to_dict()})
    return transformers


def test_the_configuration_tells_the_modules_and_names_the_class(tmp_path):
    save_llama(tmp_path / "run", tied=False)
    done = zs.export(tmp_path / "run", tmp_path / "out", quantize="int8", dtype=torch.bfloat16)
    settings, got = json.loads((tmp_path / "out" / "config.json").read_text()), read(tmp_path / "out")
    assert done.quantized == 21 and settings["quantization_config"]["ignore"] == ["lm_head"]
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["dtype"] == "bfloat16"
    assert {value.dtype for name, value in got.items() if name.endswith("proj.weight")} == {torch.int8}
    assert {value.dtype for name, value in got.items() if not name.endswith("proj.weight")} == {torch.bfloat16}


def test_matrices_that_are_no_linear_modules_are_not_quantized(tmp_path):
    """GPT-2's are Conv1D modules, stored the other way round, which loaders would not take for quantized ones."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=37, n_positions=16)
    zs.save(tmp_path / "run", zs.shard(transformers.GPT2LMHeadModel(config), None)[0], extra={"hf_config": config.to_dict()})
    with pytest.raises(
        zs.ConfigError, match="nn.Linear modules of GPT2LMHeadModel, but for ignored and tied ones: there are none"
    ):
        zs.export(tmp_path / "run", tmp_path / "out", quantize="int8")


@pytest.mark.parametrize(("form", "tied", "most"), [("int8", False, 0.02), ("int8", True, 0.02), ("fp8", False, 0.05)])
def test_transformers_loads_it_and_logits_are_near(form, tied, most, tmp_path):
    from compressed_tensors.quantization import disable_quantization

    transformers = save_llama(tmp_path / "run", tied)
    zs.export(tmp_path / "run", tmp_path / "plain")
    zs.export(tmp_path / "run", tmp_path / "out", quantize=form)
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact, (model, info) = load(tmp_path / "plain"), load(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.model.layers[0].mlp.up_proj.weight.dtype is LARGEST[form][0]
    with torch.no_grad():
        logits = exact(TEXT).logits
        off = (model(TEXT).logits - logits).norm() / logits.norm()
        assert 0 < off < most, f"logits are {off:.2%} off"
        for name, linear in exact.named_modules():  # the same model with weights rounded here
            if isinstance(linear, nn.Linear) and name != "lm_head":
                code, scale = plain(linear.weight, form)
                linear.weight.copy_(code.float() * scale)
        whole = load(tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
        whole.apply(disable_quantization)  # in Transformers 5.20 its maps go on rounding their inputs
        torch.testing.assert_close(whole(TEXT).logits, exact(TEXT).logits, rtol=1e-6, atol=1e-7)
