"""Models inside torch's wrappers: files have the model's own names, whatever is compiled or recomputed, and load into both.

Nothing runs a forward here, so nothing is compiled: what counts are the names.
"""

from __future__ import annotations

import copy
import io

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_kit import MODELS, OPTIMIZERS, read_checkpoint, snapshot, trained, write_checkpoint
from checkpoint_kit import assert_equal as assert_equal_saved
from helpers import differences, seeded, state_differences, token_batches
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads
from zeroshard.utils.module_names import own_name

BATCHES = [step[0] for step in token_batches(2, 1, 2)]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


class Held(nn.Module):
    """No wrapper of torch, though it holds its module under the same name: it has a buffer of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module
        self.register_buffer("own", torch.zeros(1), persistent=False)


def inner(wrap):
    """The wrapper around parts of the model: of the one with extra state, of a norm, and of both ends of a tie."""

    def change(model: nn.Module) -> nn.Module:
        for name in ("noted", "norm", "embedding", "head", "stamped"):
            setattr(model, name, wrap(getattr(model, name)))
        return model

    return change


WRAPS = {
    "compiled": compiled,
    "compiled parts": inner(compiled),
    "recomputed parts": inner(checkpoint_wrapper),
    "compiled and recomputed": lambda model: compiled(inner(lambda part: checkpoint_wrapper(compiled(part)))(model)),
    "recomputed": checkpoint_wrapper,
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))


def build(wrap, stage=3):
    model = wrap(seeded(MODELS["odd"], 0))  # the frozen parameters are those of the plain model
    return zs.shard(model, OPTIMIZERS["adamw"](trained(model)), stage=stage)


def tensors(state):
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@every_wrap
@pytest.mark.parametrize("stage", [1, 3])
def test_files_have_the_model_s_own_names_and_load_whatever_is_wrapped(wrap, stage, tmp_path):
    """A checkpoint of the plain model loads into the wrapped one, and one of that into the plain one: weights and states."""
    plain = seeded(MODELS["odd"], 0)
    expected = write_checkpoint(tmp_path / "plain", 2, "odd", BATCHES, stage=stage)
    keys = list(plain.state_dict())

    def rank_run(rank):
        model, optimizer = build(wrap, stage)
        names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
        zs.load(tmp_path / "plain", model, optimizer)
        whole, rounded = zs.full_state_dict(model, masters=True), zs.full_state_dict(model)
        streamed = {
            name: value for part in zs.stream_full_tensors(model, masters=True, max_nbytes=99) for name, value in part.items()
        }
        averaged = zs.ema(model).full_state_dict()
        states = zs.full_optimizer_state(model)
        for asked in ("prime", next(name for name in names[0] if name.endswith("prime"))):
            assert [list(part) for part in zs.stream_full_tensors(model, names=[asked])] == [["prime"]]
        assert names == (list(model.state_dict()), [name for name, _ in model.named_parameters()])  # the model's stay torch's
        assert list(states) == list(zs.full_gradients(model)) and set(states) <= set(names[1])
        zs.save(tmp_path / "wrapped", model, optimizer, trained_only=False)
        for given in (whole, dict(zip(names[0], whole.values(), strict=True))):  # its own names, and torch's
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            model.load_state_dict(given)
            assert not differences(tensors(zs.full_state_dict(model)), tensors(rounded))
        return whole, streamed, averaged, states

    for whole, streamed, averaged, states in run_threads(2, rank_run):
        assert list(whole) == keys
        assert not differences(tensors(whole), tensors(expected.weights))
        assert not differences(streamed, tensors(whole)) and not differences(averaged, tensors(whole))
        own = {own_name(wrap(copy.deepcopy(plain)), name): value for name, value in states.items()}
        assert not state_differences(own, expected.states)
    for loaded in read_checkpoint(tmp_path / "wrapped", 3, "odd", stage=3):
        assert_equal_saved(loaded, expected)
    for form in ("safetensors", "torch"):
        zs.export(tmp_path / "wrapped", tmp_path / form, format=form)
    stored = safetensors.torch.load_file(tmp_path / "safetensors" / "model.safetensors")
    assert stored.keys() == tensors(expected.weights).keys() - {"head.weight"}
    fresh = seeded(MODELS["odd"], 7).float()  # the file has fp32 masters
    fresh.load_state_dict(torch.load(tmp_path / "torch"))
    assert not differences(tensors(fresh.state_dict()), tensors(expected.weights))


@every_wrap
def test_one_safetensors_file(wrap, tmp_path):
    """Also where modules are compiled after zs.shard."""

    def rank_run(rank):
        model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), 3)
        if wrap in (compiled, checkpoint_wrapper):
            model, _ = zs.shard(wrap(model), stage=3)
        else:
            model, _ = zs.shard(model, stage=3)
            model[0], model[1] = compiled(model[0]), compiled(model[1])
        zs.save_safetensors(model, tmp_path / "x.safetensors")
        again, _ = zs.shard(
            compiled(seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), 4)), weights=tmp_path, stage=3
        )
        return zs.full_state_dict(model), zs.full_state_dict(again)

    for whole, again in run_threads(2, rank_run):
        stored = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert not differences(stored, whole) and not differences(again, whole)
        assert list(whole) == list(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).state_dict())


@pytest.mark.parametrize("tiled", [False, True])
def test_names_that_earlier_versions_wrote(tiled, tmp_path):
    """Checkpoints whose names have the steps into wrappers load into both models, and exports do not have these steps."""

    def build(wrap, seed=5):
        model = wrap(seeded(MODELS["columns" if tiled else "untied"], seed))
        return zs.shard(model, OPTIMIZERS["adamw"](trained(model)), stage=3)

    def rank_run(rank):
        model, optimizer = build(Held)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert "_orig_mod.norm.weight" in zs.full_state_dict(model)  # nobody knows that this one is a wrapper
        zs.save(tmp_path / "run", model, optimizer)
        found = snapshot(model, optimizer)
        for wrap in (compiled, lambda module: module):
            other, stepper = build(wrap, 6)
            zs.load(tmp_path / "run", other, stepper)
            whole = zs.full_state_dict(other, masters=True)
            assert not differences({f"_orig_mod.{name}": value for name, value in whole.items()}, found.weights)
            assert len(zs.full_optimizer_state(other)) == len(zs.full_optimizer_state(model)) > 0
        return found

    found = run_threads(2, rank_run)[0]
    zs.export(tmp_path / "run", tmp_path / "all")
    zs.export(tmp_path / "run", tmp_path / "some", prefix="_orig_mod.", names=["_orig_mod.norm.weight"])  # what programs did
    stored = safetensors.torch.load_file(tmp_path / "all" / "model.safetensors")
    assert not differences({f"_orig_mod.{name}": value for name, value in stored.items()}, tensors(found.weights))
    assert list(safetensors.torch.load_file(tmp_path / "some" / "model.safetensors")) == ["norm.weight"]


def test_options_name_what_the_model_names():
    """A pattern of an option finds parts of a compiled model by the model's names, as well as by torch's."""
    for key in ("noted.*", "_orig_mod.noted._orig_mod.*", "Noted", "noted.map.weight"):
        model = seeded(MODELS["odd"], 0)
        model.noted = compiled(model.noted)
        model, _ = zs.shard(compiled(model), precision="bf16", dtypes={key: torch.float32})
        whole = zs.full_state_dict(model)
        assert (whole["noted.map.weight"].dtype, whole["prime"].dtype) == (torch.float32, torch.bfloat16), key
        zs.close(model)
    with pytest.raises(zs.ConfigError, match=r"of Oddities has .* 'notde.map', .* Did you mean 'noted.map'\?"):
        zs.shard(compiled(seeded(MODELS["odd"], 0)), precision="bf16", dtypes={"notde.map": torch.float32})


def test_members_of_groups_keep_the_names_that_the_optimizer_has(tmp_path):
    """A checkpoint is of a compiled model, whose optimizer knows its parameters by other names."""
    for wrap in (compiled, lambda model: model):
        model = wrap(seeded(MODELS["untied"], 0))
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.named_parameters()), stage=2)
        names = list(optimizer.param_groups[0]["param_names"])
        if wrap is compiled:
            zs.save(tmp_path, model, optimizer)
        else:
            zs.load(tmp_path, model, optimizer)
        assert optimizer.param_groups[0]["param_names"] == names == [name for name, _ in model.named_parameters()]


def test_quantized_weights_of_a_compiled_model(tmp_path):
    model = compiled(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), compiled(nn.Linear(8, 4))), 0))
    model, _ = zs.shard(model, stage=1)
    zs.save(tmp_path / "run", model)
    result = zs.export(tmp_path / "run", tmp_path / "out", quantize="int8", model=model)
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert result.quantized == 2 and stored.keys() == {f"{n}.{k}" for n in (0, 2) for k in ("weight", "weight_scale", "bias")}


def _under_ddp(rank: int, size: int, root: str) -> dict[str, Tensor]:
    """DDP's own reduction is one too many, and changes nothing; torch's function for whole states gives the same names."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), 0))
    expected = get_model_state_dict(model)
    model, _ = zs.shard(model, stage=3)
    zs.save(root, model)
    zs.save_safetensors(model, f"{root}/x.safetensors")
    whole = zs.full_state_dict(model)
    assert not differences(whole, expected) and list(whole) == list(expected)
    model.load_state_dict(whole)
    state = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load({"model": state}, checkpoint_id=f"{root}/step-00000000")
    assert not differences(state, whole)
    dist.barrier()
    assert not differences(safetensors.torch.load_file(f"{root}/x.safetensors"), whole)
    return whole


@pytest.mark.processes
def test_a_model_inside_ddp(tmp_path):
    assert list(run_processes(_under_ddp, 2, str(tmp_path))[0]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_whole_weights_are_saved_by_torch_from_a_wrapped_model_too():
    """What `model.state_dict()` gives is torch's: a file of it loads into a model that is wrapped alike."""
    model, _ = zs.shard(compiled(seeded(MODELS["untied"], 0)), stage=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = compiled(seeded(MODELS["untied"], 3))
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert not differences(other.state_dict(), model.state_dict())
