"""Which stored tensor is whose: files that an index names, buffers that hooks rename, what modules compute for the state dict,
states of parameters without dimensions. What has no name in a checkpoint, and what can not be put back, is told before."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_kit import MODELS, VOCAB, Saved, assert_equal, read_checkpoint, write_checkpoint
from helpers import MLP, differences, seeded, token_batches
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import run_threads

# -- several files -------------------------------------------------------------------------------------------------------

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def in_two_files(folder: Path, index: bool = True) -> dict[str, Tensor]:
    state = seeded(MLP).state_dict()
    names = list(state)
    parts = names[:3], names[3:]
    for file, part in zip(FILES, parts, strict=True):
        save_file({name: state[name] for name in part}, folder / file)
    if index:
        weight_map = {name: file for file, part in zip(FILES, parts, strict=True) for name in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return state


def loaded(path: Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    model, _ = zs.shard(seeded(MLP, 5) if model is None else model, stage=3)
    zs.load(path, model)
    return zs.close(model).state_dict()


def streamed(path: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = MLP()
    return zs.close(zs.shard(model, stage=3, weights=path)[0]).state_dict()


def exported(path: Path) -> dict[str, Tensor]:
    zs.export(path, out := path.parent / f"out {path.name} {len(list(path.parent.iterdir()))}")
    return load_file(out / "model.safetensors")


every_reader = pytest.mark.parametrize("read", [loaded, streamed, exported])


@every_reader
@pytest.mark.parametrize("beside", ["model-00001-of-00003.safetensors", "variant.safetensors", "a.safetensors"])
def test_the_index_says_which_files_count(read, beside, tmp_path):
    (folder := tmp_path / "model").mkdir()
    state = in_two_files(folder)
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, folder / beside)
    assert not differences(read(folder), state)


@every_reader
def test_an_index_may_be_named_itself(read, tmp_path):
    (folder := tmp_path / "model").mkdir()
    state = in_two_files(folder)
    save_file({"other": torch.zeros(2)}, folder / "other.safetensors")
    assert not differences(read(folder / INDEX), state)


@every_reader
def test_a_name_in_two_files_is_refused_where_no_index_decides(read, tmp_path):
    (folder := tmp_path / "model").mkdir()
    state = in_two_files(folder, index=False)
    assert not differences(read(folder), state)
    name = list(state)[4]
    save_file({name: torch.zeros_like(state[name])}, folder / "variant.safetensors")
    with pytest.raises(zs.CheckpointError, match=rf"{name} is in two files, .*{FILES[1]} and variant.safetensors, and no index"):
        read(folder)


@every_reader
def test_a_file_that_the_index_names_is_missing(read, tmp_path):
    (folder := tmp_path / "model").mkdir()
    in_two_files(folder)
    for file in reversed(FILES):  # at last there is the index alone
        (folder / file).unlink()
        with pytest.raises(zs.CheckpointCorrupt, match=r"of-00002.safetensors.*a file that .*index.json names, found no file"):
            read(folder)


@pytest.mark.parametrize("other", ["model.safetensors", "b.safetensors.index.json"])
def test_two_models_in_one_folder_are_refused(other, tmp_path):
    (folder := tmp_path / "model").mkdir()
    state = in_two_files(folder)
    if other == "model.safetensors":
        save_file({name: torch.zeros_like(value) for name, value in state.items()}, folder / other)
    else:
        (folder / INDEX).rename(folder / "a.safetensors.index.json")
        (folder / other).write_text((folder / "a.safetensors.index.json").read_text())
    with pytest.raises(zs.CheckpointError, match=f"{other}.* are two models: name"):
        run_threads(2, lambda rank: loaded(folder, seeded(MLP)))


# -- buffers -------------------------------------------------------------------------------------------------------------


def renamed(old: str, new: str):
    """A state-dict hook, and one for loading; torch calls them with different arguments."""

    def hook(*arguments) -> None:
        state, prefix = (arguments[1], arguments[2]) if isinstance(arguments[0], nn.Module) else arguments[:2]
        for name in [name for name in state if name.startswith(prefix + old)]:
            state[prefix + new + name.removeprefix(prefix + old)] = state.pop(name)

    return hook


class Renaming(nn.Module):
    """Its state dict says norm.running_mean where its module says bn.running_mean."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)
        self.register_state_dict_post_hook(renamed("bn.", "norm."))
        self._register_load_state_dict_pre_hook(renamed("norm.", "bn."))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.map(x)).square().mean()


class Swapping(nn.Module):
    """Of two buffers of one shape each has the other's name in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.register_buffer("a", torch.rand(3)), self.register_buffer("b", torch.rand(3))
        self.register_state_dict_post_hook(self.swap)
        self._register_load_state_dict_pre_hook(self.swap)

    @staticmethod
    def swap(*arguments) -> None:
        state, prefix = (arguments[1], arguments[2]) if isinstance(arguments[0], nn.Module) else arguments[:2]
        if prefix + "a" in state:
            state[prefix + "a"], state[prefix + "b"] = state[prefix + "b"], state[prefix + "a"]


class Packing(nn.Module):
    """What it saves is computed, with a scale that is a buffer, and its own loading undoes it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.register_buffer("scale", torch.rand(()) + 1)
        self.register_buffer("table", torch.randn(3), persistent=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.table * 2

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        assert prefix + "scale" in state_dict
        self.table = state_dict.pop(prefix + "packed") / 2
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Inside(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.body = kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("source", ["ours", "before", "torch", "weights"])
@pytest.mark.parametrize("kind", [Renaming, Swapping, Packing])
def test_buffers_come_back_whatever_the_state_dict_calls_them(kind, source, tmp_path):
    make = lambda: Inside(kind)  # noqa: E731
    base = seeded(make, 1)
    for buffer in base.buffers():
        buffer.copy_(torch.rand(buffer.shape) * 9)
    state, others = base.state_dict(), [seeded(make, 2) for _ in range(2)]
    path = tmp_path / "x.pt"
    if source in ("torch", "weights"):
        torch.save(state, path)
    else:
        model, _ = zs.shard(base, stage=3)
        zs.save(path, model)
        zs.close(model)

    def run(rank: int) -> dict[str, Tensor]:
        model, _ = zs.shard(others[rank], stage=3, weights=path if source == "weights" else None)
        if source != "weights":
            zs.load(path, model, verify="before" if source == "before" else True)
        return {name: value.clone() for name, value in zs.close(model).state_dict().items()}

    for got in run_threads(2, run):
        assert not differences(got, state)


def test_a_module_that_refuses_what_it_computed_is_told(tmp_path, monkeypatch):
    model, _ = zs.shard(seeded(lambda: Inside(Packing)), stage=0)
    zs.save(tmp_path, model)

    def refuse(*arguments) -> None:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(model.body, "_load_from_state_dict", refuse)
        with pytest.raises(zs.CheckpointError, match=r"Inside.load_state_dict of body.packed\) on rank 0 did not take .* no"):
            zs.load(tmp_path, model)
    zs.load(tmp_path, model)
    zs.close(model)


class Expanded(nn.Module):
    def __init__(self, row: float = 1.0) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((1, 3), row).expand(4, 3))


@pytest.mark.parametrize("verb", ["load", "weights"])
def test_an_expanded_buffer_takes_rows_that_are_equal_and_no_others(verb, tmp_path):
    def take(path: Path) -> nn.Module:
        return zs.shard(model, weights=path)[0] if verb == "weights" else model if zs.load(path, model) else model

    zs.save(tmp_path / "same", zs.shard(Expanded(7.0))[0])
    save_file({**Expanded().map.state_dict(prefix="map."), "mask": torch.arange(12.0).view(4, 3)}, tmp_path / "x.safetensors")
    model = Expanded() if verb == "weights" else zs.shard(Expanded())[0]
    whole = lambda: model.map.weight.full_tensor() if verb == "load" else model.map.weight  # noqa: E731
    before = whole().detach().clone()
    with pytest.raises(zs.ModelMismatch if verb == "weights" else zs.CheckpointMismatch, match=r"mask \(buffer\): .* clone\(\)"):
        take(tmp_path / "x.safetensors")
    assert torch.equal(before, whole())
    assert torch.equal(take(tmp_path / "same").mask, torch.full((4, 3), 7.0))
    zs.close(model)


# -- what is no tensor ---------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    def __init__(self, note: object = None) -> None:
        super().__init__()
        self.map, self.note = nn.Linear(2, 2), note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


@pytest.mark.parametrize("how", ["torch", "module.", "index", "export"])
def test_extra_state_in_files_of_torch_save(how, tmp_path):
    note = {"calls": 7, "list": [1, (2, "x")], "tensor": torch.arange(3)}
    model, path = Noting(note), tmp_path / "x.pt"
    state = {f"module.{name}" if how == "module." else name: value for name, value in model.state_dict().items()}
    if how == "index":
        torch.save(state, tmp_path / "a.bin")
        path = tmp_path / "pytorch_model.bin.index.json"
        path.write_text(json.dumps({"weight_map": dict.fromkeys(state, "a.bin")}))
    elif how == "export":
        zs.save(tmp_path, zs.shard(model)[0], name="x")
        zs.export(tmp_path / "x", path, format="torch")
    else:
        torch.save(state, path)
    other, _ = zs.shard(Noting())
    zs.load(path, other)
    assert torch.equal(other.note.pop("tensor"), torch.arange(3)) and other.note == {"calls": 7, "list": [1, (2, "x")]}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_extra_state_in_folders_of_dcp(tmp_path):
    dcp.save({"model": Noting([7, "x"]).state_dict()}, checkpoint_id=tmp_path / "x")
    other, _ = zs.shard(Noting())
    zs.load(tmp_path / "x", other)
    assert other.note == [7, "x"]


def test_extra_state_that_nobody_may_read_or_take_is_said(tmp_path, capfd):
    for model, target in ((Noting(io.BytesIO(b"x")), Noting("before")), (Noting({}), nn.ModuleDict({"map": nn.Linear(2, 2)}))):
        torch.save(model.state_dict(), tmp_path / "x.pt")
        target, _ = zs.shard(target)
        zs.load(tmp_path / "x.pt", target)
        assert "x.pt: left _extra_state unread" in capfd.readouterr().err
        assert torch.equal(target.map.weight.full_tensor(), model.map.weight) and getattr(target, "note", "before") == "before"


# -- states that are one number a parameter ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Everything that is trained has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.temperature).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_goes_on_where_no_trained_parameter_has_dimensions(kind, stage, tmp_path):
    models = [seeded(Scaled) for _ in range(4)]

    def run(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for number in (2 * rank, 2 * rank + 1):
            model, optimizer = zs.shard(models[number], kind([models[number].temperature], lr=1e-2), stage=stage)
            if number % 2:
                zs.load(tmp_path, model, optimizer)
            for step in range(2 * (number % 2), 4):
                if step == 2 and number % 2 == 0:
                    zs.save(tmp_path, model, optimizer)
                model(torch.ones(2, 3) + step).backward()
                optimizer.step()
                optimizer.zero_grad()
            value = zs.full_state_dict(model)["temperature"].clone()
            found.append({"value": value, **zs.full_optimizer_state(model)["temperature"]})
            zs.close(model)
        return found

    for whole, resumed in run_threads(2, run):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(torch.as_tensor(whole[key]), torch.as_tensor(resumed[key])) for key in whole), (whole, resumed)


# -- what no checkpoint holds --------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """A table that is not persistent; `fill` says who makes it again for a model that was built on the meta device."""

    def __init__(self, fill: bool) -> None:
        super().__init__()
        self.map, self.table, self.fill = nn.Linear(3, 3), nn.Module(), fill
        self.table.register_buffer("angles", torch.arange(3.0), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(9.0)
        if module is self.table and self.fill:
            module.angles.copy_(torch.arange(3.0))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("fill", [True, False])
def test_buffers_that_are_not_persistent_of_a_model_that_was_built_on_meta(fill, weights, tmp_path):
    base = Rotary(fill)
    save_file(base.state_dict(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Rotary(fill)
    path = tmp_path / "x.safetensors" if weights else None
    if not fill:
        with pytest.raises(zs.ShardedAccessError, match=r"nothing initialises table.angles .*not persistent is in none.*zs.init"):
            zs.shard(model, stage=3, weights=path)
        with zs.init(stage=3):  # what it says helps
            model = Rotary(fill)
    model = zs.close(zs.shard(model, stage=3, weights=path)[0])
    assert model.table.angles.tolist() == [0, 1, 2]
    if weights:
        assert not differences(model.state_dict(), base.state_dict())


def test_states_of_some_tiles_alone_are_refused_by_name(tmp_path):
    """A tensor of which nobody has a part would be a checkpoint that nobody can load."""
    model = zs.tile(seeded(lambda: nn.Sequential(nn.Linear(32, 31))), max_bytes=1500)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model(torch.ones(2, 32)).sum().backward()
    model[0].tiles[1].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(zs.CheckpointError, match=r"optim.state.0.weight.exp_avg: \d+ elements of \(31, 32\).*gradients of all tiles"):
        zs.save(tmp_path, model, optimizer)
    assert not list(tmp_path.glob("step-*"))
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zs.load(zs.save(tmp_path, model, optimizer).path, model, optimizer)
    zs.close(model)


# -- names that a wrapper changes ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As torch.compile(model) is, but runs nothing of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, *args: Tensor) -> Tensor:
        return self._orig_mod(*args)


def bare(saved: Saved) -> Saved:
    """Under the names of the model in the wrapper."""
    weights, states, extra_state = (
        {name.removeprefix("_orig_mod."): value for name, value in part.items()}
        for part in (saved.weights, saved.states, saved.extra_state)
    )
    return Saved(weights, states, saved.groups, extra_state)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", ["odd", "tied", "columns"])
@pytest.mark.parametrize("wrapped", ["when saved", "when loaded"])
def test_one_of_ours_is_loaded_with_and_without_a_wrapper(kind, wrapped, world, tmp_path):
    """Values, states, what is left out since it is frozen, tiles and ties, extra states of modules."""
    models = [seeded(MODELS[kind]) for _ in range(2)]
    number = ["when saved", "when loaded"].index(wrapped)
    models[number] = Wrapped(models[number])
    batches = [step[0] for step in token_batches(3, 1, 4, VOCAB)]
    expected = write_checkpoint(tmp_path, 2, models[0], batches, groups=2)
    for got in read_checkpoint(tmp_path, world, models[1], groups=2):
        assert_equal(bare(got), bare(expected))
