"""What does not fit, is not there, or is not what it says: refused by name on every rank, before anything changes."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import differences, seeded
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint.importers.safetensors import open_safetensors
from zeroshard.state.tensor_reader import StoredPart
from zeroshard.tensor.part import Part


class Buffered(nn.Module):
    """A buffer between others, so that what is read beyond it is a neighbour's."""

    def __init__(self, numel: int = 4) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        for number, name in enumerate(("before", "buffer", "behind")):
            self.register_buffer(name, torch.full((numel,), float(number)))
        self.register_buffer("scratch", torch.zeros(numel), persistent=False)


class Shared(nn.Module):
    """Modules that are registered under two names, with parameters and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b, self.c = self.a, nn.Sequential(nn.Linear(4, 4), self.a)
        self.n1 = self.n2 = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.n1(self.c(self.b(self.a(x)))).square().mean()


# -- zs.shard(weights=) --------------------------------------------------------------------------------------------------


def written(kind: str, folder, model: nn.Module):
    if kind == "ours":
        zs.save(folder, zs.shard(model)[0], name="x")
        return folder
    path = folder / f"model.{kind}"
    torch.save(model.state_dict(), path) if kind == "pt" else save_file(model.state_dict(), path)
    return path


@pytest.mark.parametrize("kind", ["pt", "safetensors", "ours"])
@pytest.mark.parametrize("numel", [2, 7])
def test_weights_refuse_a_buffer_of_another_shape(kind, numel, tmp_path):
    path = written(kind, tmp_path, Buffered(numel))
    model = Buffered()
    with pytest.raises(zs.ModelMismatch, match=rf"buffer: saved \({numel},\), wanted \(4,\) \(buffer\)") as caught:
        zs.shard(model, weights=path)
    assert "shape: before: saved" in str(caught.value) and "shape: behind: saved" in str(caught.value)
    assert model.buffer.tolist() == [1.0] * 4 and not hasattr(model, "_zeroshard")


def test_weights_without_a_persistent_buffer_are_refused(tmp_path):
    state = Buffered().state_dict()
    del state["buffer"]
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(zs.ModelMismatch, match=r"missing .*: buffer \(4,\) \(buffer\)"):
        zs.shard(Buffered(), weights=tmp_path / "x.pt")
    torch.save(Buffered().state_dict(), tmp_path / "x.pt")  # without `scratch`, which is not persistent
    zs.close(zs.shard(Buffered(), weights=tmp_path / "x.pt")[0])


@pytest.mark.parametrize(("start", "count"), [(2, 3), (-1, 2), (5, 1)])
def test_no_stored_tensor_is_read_beyond_its_end(start, count, tmp_path):
    save_file({"a": torch.arange(4.0), "b": torch.arange(16.0).view(2, 8)}, tmp_path / "x.safetensors")
    stored = open_safetensors(tmp_path).model
    with pytest.raises(OSError, match=f"expected elements {start} to {start + count} of a tensor, it has 4"):
        stored["a"].read(start, torch.empty(count))
    columns, values = stored["b"].cut(Part(1, 5, 8, (2, 8))), torch.empty(6)
    columns.read(0, values)
    assert values.tolist() == [5.0, 6.0, 7.0, 13.0, 14.0, 15.0]
    with pytest.raises(OSError, match="it has 6"):
        columns.read(start + 2 * (start > 0), torch.empty(count))
    with pytest.raises(OSError, match="it has 6"):  # of a tensor in pieces
        StoredPart(stored["b"], Part(1, 5, 8, (2, 8))).read(start + 2 * (start > 0), torch.empty(count))


# -- modules under two names ---------------------------------------------------------------------------------------------


def shared(seed: int = 0) -> nn.Module:
    return seeded(Shared, seed)


def test_a_module_under_two_names_is_exported_with_all_of_them(tmp_path):
    model, optimizer = zs.shard(shared())
    path = zs.save(tmp_path, model, optimizer, name="x").path
    zs.export(path, tmp_path / "x.pt", format="torch")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    restored = shared(1)
    restored.load_state_dict(state)
    assert not differences(restored.state_dict(), shared().state_dict())
    ties = json.loads((path / "manifest.json").read_bytes())["ties"]
    names = {"b": "a", "c.1": "a", "n2": "n1"}
    assert ties == {f"{alias}.{kind}": f"{name}.{kind}" for alias, name in names.items() for kind in ("weight", "bias")}
    zs.close(model)


@pytest.mark.parametrize("kind", ["pt", "safetensors", "ours", "save_safetensors"])
def test_a_module_under_two_names_is_loaded_from_any_file(kind, tmp_path):
    path = tmp_path / f"x.{kind}"
    if kind == "pt":
        torch.save(shared().state_dict(), path)
    elif kind == "safetensors":
        save_model(shared(), str(path))
    else:
        model = zs.shard(shared())[0]
        zs.save_safetensors(model, path := tmp_path / "x.safetensors") if kind != "ours" else zs.save(path, model)
    model = zs.shard(shared(1))[0]
    zs.load(path, model)
    born = zs.shard(shared(2), weights=path)[0]
    for each in (model, born):
        assert not differences(zs.close(each).state_dict(), shared().state_dict())


# -- names that look like another's --------------------------------------------------------------------------------------


class NearlyExtra(nn.Module):
    """A buffer that is called nearly as torch calls what get_extra_state returns."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.register_buffer("my_extra_state", torch.ones(numel))


def test_a_buffer_is_no_extra_state_for_its_name(tmp_path):
    zs.save(tmp_path / "of 7", zs.shard(NearlyExtra(7))[0])
    zs.save(tmp_path / "without", zs.shard(nn.ModuleDict({"map": nn.Linear(4, 4)}))[0])
    model = zs.shard(NearlyExtra(4))[0]
    with pytest.raises(zs.CheckpointMismatch, match=r"my_extra_state: saved \(7,\), wanted \(4,\)"):
        zs.load(tmp_path / "of 7", model)
    with pytest.raises(zs.CheckpointMismatch, match=r"my_extra_state \(4,\) \(buffer\)"):
        zs.load(tmp_path / "without", model)
    assert torch.equal(zs.close(model).my_extra_state, torch.ones(4))


def test_the_name_that_safetensors_itself_uses(tmp_path):
    model = nn.Linear(4, 4)
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(3)))
    model = zs.shard(model)[0]
    with pytest.raises(zs.ConfigError, match="__metadata__ is a name that safetensors itself uses"):
        zs.save_safetensors(model, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


# -- what was trained alone ------------------------------------------------------------------------------------------------


def test_a_base_that_was_frozen_when_it_was_saved(tmp_path):
    """The message says why names are missing, and what to do with model and optimizer."""

    def built(frozen: bool) -> tuple:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[0].requires_grad_(not frozen)
        return zs.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))

    zs.save(tmp_path, *built(frozen=True))
    with pytest.raises(
        zs.CheckpointMismatch, match="The checkpoint holds trained parameters only, and the model trains more now"
    ) as caught:
        zs.load(tmp_path, *built(frozen=False))
    assert "0.weight (4, 4)" in str(caught.value) and "optimizer=None to take the model alone" in str(caught.value)


# -- what hooks make of a state dict is no misfit ------------------------------------------------------------------------


class Packed(nn.Module):
    """Its state dict has the buffer in another shape, under its name, and a tensor of any length; the module takes both back."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.map, self.seen = nn.Linear(4, 4), torch.arange(float(seen))
        self.register_buffer("scale", torch.arange(8.0))

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale.view(2, 4).clone()
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state, prefix, *args) -> None:
        state[f"{prefix}scale"] = state[f"{prefix}scale"].view(8)
        self.seen = state.pop(f"{prefix}seen")
        super()._load_from_state_dict(state, prefix, *args)


def test_what_modules_store_in_shapes_of_their_own_is_taken_back(tmp_path):
    model, _ = zs.shard(Packed(3), None, stage=3)
    zs.save(tmp_path, model)
    model.scale.zero_(), model.seen.zero_()
    zs.load(tmp_path, model)
    assert (model.scale.tolist(), model.seen.tolist()) == (list(range(8)), [0, 1, 2])
    zs.close(model)
    model = Packed(5)
    model.scale.zero_()
    model, _ = zs.shard(model, None, stage=3, weights=tmp_path)
    assert (model.scale.tolist(), model.seen.tolist()) == (list(range(8)), [0, 1, 2])
    zs.close(model)
