"""What a save may leave alone (`latest`) and add (files of others), what a load may pass over (strict), what an export may choose."""

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import CheckpointMismatch, ConfigError
from zeroshard.testing import run_threads


class Net(nn.Module):
    def __init__(self, more=False, width=5):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)
        if more:
            self.more = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(3))
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape).cos() + number)


def test_latest_stays(tmp_path):
    def body(rank):
        model, _ = zs.shard(Net(), stage=3)
        zs.save(tmp_path, model, name="aside", latest=False)
        assert not (tmp_path / "latest").exists()
        zs.save(tmp_path, model, name="one")
        zs.save(tmp_path, model, name="two", latest=False, asynchronous=rank >= 0).wait()
        zs.save(tmp_path, model, name="aside", latest=False, overwrite=True)
        return zs.load(tmp_path, model).path.name

    assert run_threads(2, body) == ["one", "one"]
    assert (tmp_path / "latest").read_text() == "one\n"
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "one", "two", "aside"}
    assert not (tmp_path / "two" / "latest").exists()


def test_files_beside(tmp_path):
    def body(rank):
        model, _ = zs.shard(Net(), stage=2)
        zs.save(tmp_path, model, name="here", files={} if rank else {"config.json": b"{}"})
        for name in ("manifest.json", "rank-00000.distcp", "../x", "lock"):
            with pytest.raises(ConfigError, match="files"):
                zs.save(tmp_path, model, name="other", files={name: b""})
        zs.load(tmp_path, model)

    run_threads(2, body)
    assert (tmp_path / "here" / "config.json").read_bytes() == b"{}" and not (tmp_path / "other").exists()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_checkpoint_lacks(stage, tmp_path):
    def body(rank):
        small, _ = zs.shard(Net(), stage=stage)
        large, _ = zs.shard(Net(more=True), stage=stage)
        zs.save(tmp_path / "small", small)
        zs.save(tmp_path / "large", large)
        before = zs.full_state_dict(large)
        with torch.no_grad():
            large.first.weight.data.mul_(2)
        for folder, model in (("small", large), ("large", small)):
            with pytest.raises(CheckpointMismatch, match="missing|unexpected"):
                zs.load(tmp_path / folder, model)
            zs.load(tmp_path / folder, model, strict=False)
        after = zs.full_state_dict(large)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        wide, _ = zs.shard(Net(width=6), stage=stage)
        with pytest.raises(CheckpointMismatch, match="another shape"):
            zs.load(tmp_path / "small", wide, strict=False)

    run_threads(2, body)


def test_some_names(tmp_path):
    model, _ = zs.shard(Net(), stage=1)
    zs.save(tmp_path / "run", model)
    zs.export(tmp_path / "run", tmp_path / "some.bin", format="torch", names=["last.weight", "norm.running_mean"])
    assert torch.load(tmp_path / "some.bin").keys() == {"last.weight", "norm.running_mean"}
    with pytest.raises(ConfigError, match="last.weight"):
        zs.export(tmp_path / "run", tmp_path / "none.bin", format="torch", names=["last.weigth"])
