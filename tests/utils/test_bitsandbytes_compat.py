"""Each name of bitsandbytes that is no interface of it: the installed release has it; without it zs.shard refuses by name."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.utils import bitsandbytes_compat

SETTINGS = {"optim_bits": 8, "min_8bit_size": 4096}


class AdamW8bit(torch.optim.AdamW):
    """A stand-in, which is asked for nothing but its settings."""

    __module__ = "bitsandbytes.optim.adamw"

    mng = SimpleNamespace(index2config={}, pid2config={}, module_weight_config_triple=[])

    def get_config(self, gindex, pindex, group):
        return dict(SETTINGS)


@pytest.mark.parametrize("name", [*bitsandbytes_compat.NAMES, *SETTINGS])
def test_without_it_the_optimizer_is_refused_and_another_one_is_not(name, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = AdamW8bit(model.parameters())
    assert bitsandbytes_compat.settings_of(optimizer) == ([SETTINGS, SETTINGS], [{}, {}])
    if name in SETTINGS:
        monkeypatch.delitem(SETTINGS, name)
    else:
        monkeypatch.delattr(AdamW8bit if hasattr(AdamW8bit, name) else AdamW8bit.mng, name)
    with pytest.raises(zs.ConfigError, match=rf"an optimizer of bitsandbytes.*bitsandbytes.* has no {name}.*pip install"):
        zs.shard(model, optimizer)
    zs.shard(model, torch.optim.AdamW(model.parameters()))


def test_bitsandbytes_has_them(monkeypatch):
    optim = pytest.importorskip("bitsandbytes").optim
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    found, _ = bitsandbytes_compat.settings_of(optimizer)
    assert [(each["optim_bits"], each["min_8bit_size"], each["max_unorm"]) for each in found] == [(8, 4096, 0.0)] * 4
    manager = optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "__dict__", copy.deepcopy(vars(manager)))
    manager.register_module_override(model[1], "weight", {"optim_bits": 32})
    manager.override_config(model[0].bias, "lr", 0.5)
    before = copy.copy(manager.index2config), copy.copy(manager.pid2config)
    found, overrides = bitsandbytes_compat.settings_of(optimizer)
    assert (manager.index2config, manager.pid2config) == before  # which other models share
    assert overrides == [{}, {"lr": 0.5}, {"optim_bits": 32}, {}]
    assert [each["optim_bits"] for each in found] == [8, 8, 32, 8] and found[1]["lr"] == 0.5
    with pytest.raises(zs.ConfigError, match="GlobalOptimManager overrides {'lr': 0.5} for 0.bias"):
        zs.shard(model, optimizer)
    manager.override_config(model[0].bias, "lr", 1e-3)  # as now, but a scheduler does not change it
    with pytest.raises(zs.ConfigError, match="GlobalOptimManager overrides {'lr': 0.001} for 0.bias"):
        zs.shard(model, optimizer)
    manager.pid2config.clear()
    zs.shard(model, optimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert runtime_of(model).config.optimizer_states == zs.StateFormat("int8", exempt=("1.weight",))
