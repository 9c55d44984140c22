"""Profiles: the formulas of a GPT are what the model itself has, computes and keeps."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import ConfigError
from zeroshard.planner.model_source import source_of
from zeroshard.planner.models import CASE_STUDIES, GPT, GPTConfig
from zeroshard.planner.request import Request
from zeroshard.planner.search.profile import ROOT, Profile, buckets_of
from zeroshard.planner.search.requested import profile_of
from zeroshard.planner.search.search import by_formula
from zeroshard.planner.simulator.hardware import Hardware

SHAPE = GPTConfig(vocab_size=3000, seq_len=64, dim=128, layers=3, heads=4)
SHAPES = {
    "plain": SHAPE, "bias, tied": dataclasses.replace(SHAPE, bias=True, tied=True), "small vocabulary": dataclasses.replace(SHAPE, vocab_size=50),
    "tied, small vocabulary": dataclasses.replace(SHAPE, vocab_size=50, tied=True), "n-grams": dataclasses.replace(SHAPE, ngram_rows=512),
    "BLOOM": CASE_STUDIES["bloom"].tiny, "Turing-NLG": CASE_STUDIES["turing-nlg"].tiny,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_units_are_those_of_the_runtime(name):
    shape, profile = SHAPES[name], Profile.of_shape(SHAPES[name])
    with FakeTensorMode():
        model = GPT(shape)
        zs.shard(model, comm=FakeComm(0, 4), stage=3)
        units = {unit.name: sum(group.layout.shard_numel for group in unit.groups) for unit in runtime_of(model).units}
    assert {bucket.name: sum(bucket.shards(1, 4)) for bucket in buckets_of(profile.layers)} == units
    assert profile.numel == sum(p.numel() for p in GPT(shape).parameters())


def kept_nbytes(model, tokens):
    """Bytes of distinct storages that autograd keeps, parameters and tokens apart."""
    own = {p.untyped_storage()._cdata for p in model.parameters()} | {tokens.untyped_storage()._cdata}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_what_a_forward_keeps_and_computes(dtype, bias):
    shape = dataclasses.replace(SHAPE, bias=bias, tied=True)
    profile, rows = Profile.of_shape(shape), 2
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            model, tokens = GPT(shape), torch.zeros(rows, shape.seq_len, dtype=torch.long)
        finally:
            torch.set_default_dtype(torch.float32)
        kept = kept_nbytes(model, tokens)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others are not counted on a CPU
            model(tokens, tokens)
    count = rows * shape.seq_len
    assert counter.get_total_flops() == profile.flops * count
    assert kept == pytest.approx(count * sum(unit.saved_nbytes(dtype.itemsize) for unit in profile.layers), rel=0.02)


def test_stages_share_all_units_and_both_ends_hold_what_is_tied():
    profile = Profile.of_shape(dataclasses.replace(SHAPE, layers=8, tied=True))
    stages = profile.stages(4)
    assert [unit.name for stage in stages for unit in stage] == [unit.name for unit in profile.layers]
    names = [[bucket.name for bucket in buckets_of(stage)] for stage in stages]
    assert names[0][:2] == [ROOT, "embedding"] and names[-1][0] == ROOT and "embedding" in names[-1] and ROOT not in names[1]
    with pytest.raises(ConfigError, match="pp=9: expected 1 to 8 stages"):
        profile.stages(9)


def test_what_tensor_parallelism_divides_of_a_model_that_is_no_gpt_of_ours_is_found_by_dry_runs(tmp_path):
    """A small Llama: its profile by dry runs with one and with two ranks of tp, beside a dry run of four."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    asked = Request(
        source_of(str(tmp_path)), Hardware.named("a100-40gb"), {"pp": 1, "dp": 8, "tp": 1}, 1, 64, options={"stage": 1}
    )
    profile = profile_of(asked)
    assert profile.heads == 4 and len(profile.blocks) == 4 and all(unit.tp_reduces == 2 for unit in profile.blocks)
    planned = replace(asked, axes={"pp": 1, "dp": 2, "tp": 4}).plan()
    units = {unit.name: unit for unit in profile.layers}
    for name, numel in planned.units.items():
        assert sum(units[name].cut) / 4 + sum(units[name].whole) == pytest.approx(numel, rel=0.01, abs=512)
    meshes = {(layout.tp, layout.pp) for layout in by_formula(profile, asked.hardware, 8, 16)}
    assert {(1, 1), (4, 1), (1, 2), (2, 2)} <= meshes
