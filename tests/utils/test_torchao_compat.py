"""Each name of torchao that is no interface of it: the installed release has it; without it zs.shard refuses by name."""

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.utils import torchao_compat


class AdamW8bit(torch.optim.AdamW):
    """A stand-in, which is asked for nothing but its settings."""

    __module__ = "torchao.optim.adam"

    block_size, bf16_stochastic_round = 128, False


@pytest.mark.parametrize("name", torchao_compat.NAMES)
def test_without_it_the_optimizer_is_refused_and_another_one_is_not(name, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = AdamW8bit(model.parameters())
    monkeypatch.delattr(AdamW8bit, name)
    with pytest.raises(zs.ConfigError, match=rf"an optimizer of torchao.*torchao.* has no {name}.*pip install"):
        zs.shard(model, optimizer)
    zs.shard(model, torch.optim.AdamW(model.parameters()))


def test_torchao_has_them():
    optim = pytest.importorskip("torchao").optim
    model = nn.Linear(64, 128)
    optimizer = optim.AdamW8bit(model.parameters(), block_size=128)
    assert torchao_compat.settings_of(optimizer) == {"block_size": 128, "bf16_stochastic_round": False}
    zs.shard(model, optimizer)
    assert runtime_of(model).config.optimizer_states == zs.StateFormat("int8", block=128)
