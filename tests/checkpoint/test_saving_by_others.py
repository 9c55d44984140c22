"""Saving a sharded model by others' means: safetensors, save_pretrained, torch.save, PEFT's. Right files, or an error with the remedy.

At stages 0-2 parameters are whole: files are those of one process, of the same size. At stage 3 each rank that saves is told,
whether all do so or rank 0 alone: nothing waits for a peer.
"""

from __future__ import annotations

import copy
import io
import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from zoo import adamw, run_threads, same, seeded

import zeroshard as zs
from zeroshard.comm.launch import run_processes

transformers = pytest.importorskip("transformers")
extract_model_from_parallel = pytest.importorskip("accelerate.utils").extract_model_from_parallel  # which save_pretrained calls


def tied_gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=2, n_positions=16))


def untied(state):
    return {name: value for name, value in state.items() if name != "lm_head.weight"}


def adapters(state):
    """As get_peft_model_state_dict does: some of the state dict, by name."""
    return {name: value for name, value in state.items() if "c_attn" in name}


# (model, state dict, path) -> a file there
WAYS = {
    "save_file": lambda model, state, path: safetensors.torch.save_file(untied(state), path),
    "save_file of copies": lambda model, state, path: safetensors.torch.save_file(
        {name: value.detach().cpu().contiguous() for name, value in untied(state).items()}, path
    ),
    "save": lambda model, state, path: path.write_bytes(safetensors.torch.save(untied(state))),
    "save_model": lambda model, state, path: safetensors.torch.save_model(model, path),
    "PEFT's": lambda model, state, path: safetensors.torch.save_file(adapters(state), path),
    "torch.save": lambda model, state, path: torch.save(state, path),
    "torch.save of some": lambda model, state, path: torch.save(adapters(state), path),
    "torch.save of parameters": lambda model, state, path: torch.save(dict(model.named_parameters()), path),
    "save_pretrained": lambda model, state, path: model.save_pretrained(path, max_shard_size="4KB"),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def nbytes_of(path):
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size


def read(path):
    """name -> tensor, of a file or folder."""
    if path.is_dir():
        return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in read(file).items()}
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError:
        return torch.load(path, weights_only=True)


def trained(base, **options):
    model = copy.deepcopy(base)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    tokens = torch.arange(8).view(2, 4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model, optimizer


@every_way
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_parameters_are_saved_as_on_one_process(tmp_path, stage, way):
    base = seeded(tied_gpt2)

    def run(rank):
        model, _ = trained(base, stage=stage)
        way(model, model.state_dict(), tmp_path / str(rank))
        return zs.full_state_dict(model)

    for rank, state in enumerate(run_threads(2, run)):
        plain = copy.deepcopy(base)
        plain.load_state_dict(state)
        alone = tmp_path / "alone" / str(rank)  # the name is in the file
        alone.parent.mkdir(exist_ok=True)
        way(plain, plain.state_dict(), alone)
        found, expected = read(tmp_path / str(rank)), read(alone)
        assert list(found) == list(expected) and nbytes_of(tmp_path / str(rank)) == nbytes_of(alone)
        for name, value in expected.items():
            same(found[name], value, name, 0.0)
            assert type(found[name]) is type(value), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_saved_model_is_loaded_with_its_ties(tmp_path, stage):
    base = seeded(tied_gpt2)
    model, _ = trained(base, stage=stage)
    safetensors.torch.save_model(model, tmp_path / "file")
    plain = copy.deepcopy(base)
    safetensors.torch.load_model(plain, tmp_path / "file")
    assert plain.lm_head.weight is plain.transformer.wte.weight
    for name, value in zs.full_state_dict(model).items():
        same(plain.state_dict()[name], value, name, 0.0)
    safetensors.torch.load_model(model, tmp_path / "file")


@every_way
@pytest.mark.parametrize("options", [{"map_shared": True}, {"map_shared": False}, {"offload_param": "cpu"}], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["all", "rank 0"])
def test_slices_are_refused_with_the_remedy(tmp_path, options, way, alone):
    base = seeded(tied_gpt2)

    def run(rank):
        model, _ = trained(base, stage=3, **options)
        if rank == 0 or not alone:
            with pytest.raises(zs.ShardedAccessError, match=r"zs.full_state_dict\(model\)") as caught:
                way(model, model.state_dict(), tmp_path / str(rank))
            assert "transformer." in str(caught.value) and "slice" in str(caught.value)
        tokens = torch.arange(8).view(2, 4)
        model(input_ids=tokens, labels=tokens).loss.backward()  # nothing has changed
        return zs.full_state_dict(model)

    run_threads(2, run)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_remedies_write_what_one_process_would(tmp_path):
    base = seeded(tied_gpt2)

    def run(rank):
        model, _ = trained(base, stage=3)
        state = zs.full_state_dict(model)
        model.save_pretrained(tmp_path / f"pretrained{rank}", state_dict=dict(state), max_shard_size="4KB")
        safetensors.torch.save_file(adapters(state), tmp_path / f"adapters{rank}")
        zs.save_safetensors(model, tmp_path / "whole")
        with zs.gathered(model):
            safetensors.torch.save_model(model, tmp_path / f"gathered{rank}")
        return state

    for rank, state in enumerate(run_threads(2, run)):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"pretrained{rank}").state_dict()
        for found in (loaded, read(tmp_path / f"adapters{rank}"), read(tmp_path / "whole"), read(tmp_path / f"gathered{rank}")):
            for name, value in found.items():
                same(value, state[name], name, 0.0)


@pytest.mark.parametrize(
    "wrap", [torch.compile, lambda model: model.transformer.h.__setitem__(0, torch.compile(model.transformer.h[0])) or model]
)
def test_a_compiled_model_is_saved_as_the_model_that_it_is(tmp_path, wrap):
    """Whole or a block of it: from_pretrained finds every weight, and reads what zs.save_safetensors and zs.export write."""
    base = seeded(tied_gpt2)
    try:
        extract_model_from_parallel(wrap(copy.deepcopy(base)))
    except KeyError:
        # it fails without zeroshard, too; files of compiled blocks that Accelerate does not write are in test_wrapped_models
        pytest.skip("this Accelerate fails on a compiled block of any model")

    def run(rank):
        model, _ = zs.shard(wrap(copy.deepcopy(base)), stage=3)
        model.save_pretrained(tmp_path / "pretrained", state_dict=zs.full_state_dict(model), is_main_process=rank == 0)
        (tmp_path / "file").mkdir(exist_ok=True)
        zs.save_safetensors(model, tmp_path / "file" / "model.safetensors")
        zs.save(tmp_path / "run", model)

    run_threads(2, run)
    base.config.save_pretrained(tmp_path / "file")
    zs.export(tmp_path / "run", tmp_path / "exported", config=base.config)
    for folder in ("pretrained", "file", "exported"):
        loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        for name, value in base.state_dict().items():
            same(loaded.state_dict()[name], value, name, 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_and_states_are_refused_with_their_remedy(tmp_path, stage):
    base = seeded(tied_gpt2)

    def run(rank):
        model, optimizer = trained(base, stage=stage)
        grads = {name: param.grad for name, param in model.named_parameters()}
        states = {name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()}
        for tensors, remedy in ((grads, "zs.full_gradients"), (states, "zs.full_optimizer_state_dict")):
            saves = (
                lambda: safetensors.torch.save_file(tensors, tmp_path / "file"),
                lambda: torch.save(tensors, io.BytesIO()),
                lambda: next(iter(tensors.values())).untyped_storage(),
            )
            for save in saves:
                with pytest.raises(zs.ShardedAccessError, match=remedy):
                    save()
        safetensors.torch.save_file(zs.full_gradients(model), tmp_path / f"gradients{rank}")

    run_threads(2, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gradients0", "gradients1"]


def _save(rank, world_size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ended = {}
    for stage in (2, 3):
        model, _ = trained(seeded(tied_gpt2), stage=stage, comm="dist")
        state = zs.full_state_dict(model)
        for name, way in WAYS.items():
            path = os.path.join(folder, f"{stage}-{rank}-{len(ended)}")
            try:
                way(model, model.state_dict(), type(folder)(path))
                ended[stage, name] = all(torch.equal(value, state[key]) for key, value in read(type(folder)(path)).items())
            except zs.ShardedAccessError as error:
                ended[stage, name] = "zs.full_state_dict(model)" in str(error)
        zs.close(model)
    return ended


@pytest.mark.processes
def test_over_torch_distributed(tmp_path):
    for ended in run_processes(_save, 2, tmp_path):
        assert ended == {(stage, name): True for stage in (2, 3) for name in WAYS}


def test_a_parameter_that_stays_whole_is_pickled_alone():
    """It was pickled with all that the library keeps, or, as a tensor, with its unit's buffer."""
    model, _ = zs.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), None, stage=2)
    model[0].bias.tag = "kept"
    for tensor in (model[0].bias, model[0].bias.detach(), model.state_dict()["0.bias"]):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < 3000
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is (nn.Parameter if tensor is model[0].bias else torch.Tensor) and torch.equal(loaded, tensor)
    assert vars(copy.deepcopy(model[0].bias)) == {}
