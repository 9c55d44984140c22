"""Profiles: the formulas of a GPT are what the model itself has, computes and keeps."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.errors import ConfigError
from zeroshard.models import CASE_STUDIES, GPT, GPTConfig
from zeroshard.search.profile import ROOT, Profile, homes_of
from zeroshard.zero.runtime import runtime_of

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
    assert {home.name: sum(home.shards(1, 4)) for home in homes_of(profile.units)} == units
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
    assert kept == pytest.approx(count * sum(unit.saved_nbytes(dtype.itemsize) for unit in profile.units), rel=0.02)


def test_stages_share_all_units_and_both_ends_hold_what_is_tied():
    profile = Profile.of_shape(dataclasses.replace(SHAPE, layers=8, tied=True))
    stages = profile.stages(4)
    assert [unit.name for stage in stages for unit in stage] == [unit.name for unit in profile.units]
    names = [[home.name for home in homes_of(stage)] for stage in stages]
    assert names[0][:2] == [ROOT, "embedding"] and names[-1][0] == ROOT and "embedding" in names[-1] and ROOT not in names[1]
    with pytest.raises(ConfigError, match="pp=9: expected 1 to 8 stages"):
        profile.stages(9)
