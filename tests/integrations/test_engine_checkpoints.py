"""Checkpoints of the engine: resume equals no interruption at any stage and world size; client_state; whole weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_kit import WEIGHTS, Net, batches, config, net, reference
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import BaseModelMismatch, CheckpointError, CheckpointMismatch, CheckpointNotFound
from zeroshard.integrations.deepspeed import checkpoints, zero_to_fp32
from zeroshard.integrations.deepspeed.zero_to_fp32 import convert_to_universal
from zeroshard.testing import run_threads

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}}


def steps(engine, rank, world, chosen):
    for step in chosen:
        for micro in step:
            engine.backward(engine(*micro[rank]))
            engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_equals_no_interruption(stage, tmp_path):
    data = batches(2, 1)

    def whole(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 1, 0.05, **WARMUP))
        steps(engine, rank, 2, data[:1])
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "rng": torch.arange(3)})
        steps(engine, rank, 2, data[1:])
        return zs.full_state_dict(engine.module), engine.get_lr()

    def resumed(rank):
        engine, *_ = deepspeed.initialize(model=Net(), config=config((stage + 1) % 4, 2, 1, 0.05, **WARMUP))
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path.endswith("global_step1/" + "zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt")
        assert client_state["epoch"] == 3 and torch.equal(client_state["rng"], torch.arange(3))
        assert (engine.global_steps, engine.global_samples) == (1, 4)
        steps(engine, rank, 2, data[1:])
        return zs.full_state_dict(engine.module), engine.get_lr()

    expected, got = run_threads(2, whole), run_threads(2, resumed)
    for (state, lr), (theirs, their_lr) in zip(expected, got, strict=True):
        assert lr == their_lr
        for name, value in state.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-6, atol=1e-7)


def test_tags_and_latest(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(2, 1, 1))
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, tag="first")
    (tmp_path / "latest").write_text("killed\nfirst\n")  # as a save leaves it that did not come to its end
    assert "first" in engine.load_checkpoint(tmp_path)[0]
    (tmp_path / "latest").write_text("first\n")
    engine.save_checkpoint(tmp_path, tag="second", save_latest=False)
    assert (tmp_path / "latest").read_text().strip() == "first"
    engine.save_checkpoint(tmp_path, tag="first", client_state={"again": True})  # a tag is overwritten
    path, client_state = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "first" / "mp_rank_00_model_states.pt") and client_state["again"] is True
    with pytest.raises(CheckpointNotFound, match="third"):
        engine.load_checkpoint(tmp_path, tag="third")
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint("")


def test_only_the_module(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(3, 1, 1))
    steps(engine, 0, 1, batches(1, 1))
    engine.save_checkpoint(tmp_path)
    expected = zs.full_state_dict(engine.module)
    other, *_ = deepspeed.initialize(model=net(), config=config(3, 1, 1))
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0 and not zs.full_optimizer_state(other.module)["last.bias"]
    state = zs.full_state_dict(other.module)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights(stage, tmp_path):
    _, _, weights = reference(2, 1, 0.0)

    def body(rank):
        given = config(stage, 2, 1)
        given["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine, *_ = deepspeed.initialize(model=net(), config=given)
        steps(engine, rank, 2, batches(2, 1))
        engine.save_checkpoint(tmp_path / "run")
        assert engine.save_16bit_model(tmp_path / "out")
        return engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module_state_dict()

    states = run_threads(2, body)
    assert (states[1] is None) == (stage == 3)
    found = [states[0], torch.load(tmp_path / "out" / "pytorch_model.bin"),
             zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")]  # fmt: skip
    for safe in (True, False):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / str(safe), safe_serialization=safe)
    found.append(torch.load(tmp_path / "False" / "pytorch_model.bin"))
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(net(), tmp_path / "run")
    found.append(model.state_dict())
    assert list((tmp_path / "True").glob("*.safetensors"))
    for state in found:
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_weights_are_not_gathered_unless_asked_for(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(3, 1, 1))
    assert not engine.save_16bit_model(tmp_path) and not list(tmp_path.iterdir())


def test_tags_that_differ(tmp_path):
    def body(rank, mode):
        given = config(1, 2, 1, checkpoint={"tag_validation": mode})
        engine, *_ = deepspeed.initialize(model=net(), config=given)
        engine.save_checkpoint(tmp_path, tag=f"rank{rank}")

    with pytest.raises(AssertionError, match="not consistent"):
        run_threads(2, body, "Fail")
    run_threads(2, body, "Warn")
    assert (tmp_path / "rank0").is_dir() and not (tmp_path / "rank1").exists()


class Tied(nn.Module):
    """A tied head, buffers of which one is not persistent, a frozen layer, extra state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape).sin() / (number + 2))

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(self.frozen(self.embedding(tokens)) * self.scale[0]), targets)


TIED = ["scale", "seen", "embedding.weight", "frozen.weight", "frozen.bias", "head.weight"]


def tied_engine(stage, world, gather=True, wrap=lambda model: model, **more):
    given = config(stage, world, 1, **more)
    given["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
    model = wrap(Tied())
    return deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=given)[0]


def tied_step(engine, rank=0):
    tokens = torch.arange(4) + rank
    engine.backward(engine(tokens, (tokens + 1) % 11))
    engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_weights_on_rank_0(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_STREAM_NBYTES", 200)
    if stage == 3:
        monkeypatch.setattr(checkpoints, "api", None)  # it would gather everything at once

    def body(rank):
        engine = tied_engine(stage, 2)
        tied_step(engine, rank)
        found = {}
        if stage == 3:
            found["whole"], found["trained"] = (engine._consolidated_16bit_state_dict(exclude) for exclude in (False, True))
            assert all((state is None) == (rank == 1) for state in found.values())
        else:
            with pytest.raises(ValueError, match="ZeRO-3"):
                engine._zero3_consolidated_16bit_state_dict()
        engine.save_16bit_model(tmp_path / "whole")
        engine.save_fp16_model(tmp_path / "trained", "some.bin", exclude_frozen_parameters=True)
        return found, zs.full_state_dict(engine.module)

    (found, expected), _ = run_threads(2, body)
    found["file"] = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    found["trained file"] = torch.load(tmp_path / "trained" / "some.bin")
    for which, state in found.items():
        wanted = [name for name in TIED if "trained" not in which or "frozen" not in name]
        assert list(state) == [name for name in Tied().state_dict() if name in wanted], which
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(wanted) - 1
        assert state["embedding.weight"].untyped_storage().nbytes() == 66 * 4


@pytest.mark.parametrize(("stage", "other"), [(1, 3), (3, 2)])
def test_without_frozen_parameters(stage, other, tmp_path):
    def saved(rank):
        engine = tied_engine(stage, 2)
        tied_step(engine, rank)
        engine.save_checkpoint(tmp_path / "whole")
        engine.save_checkpoint(tmp_path / "trained", exclude_frozen_parameters=True)
        return zs.full_state_dict(engine.module)

    expected = run_threads(2, saved)[0]
    for folder, strict in ((tmp_path / "whole", True), (tmp_path / "trained", True), (tmp_path / "trained", False)):
        engine = tied_engine(other, 1)
        engine.load_checkpoint(folder, load_module_strict=strict)
        state = zs.full_state_dict(engine.module)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    frozen = {"frozen.weight", "frozen.bias"}
    for folder, there in ((tmp_path / "whole", set(TIED)), (tmp_path / "trained", set(TIED) - frozen)):
        described = torch.load(folder / "global_step1" / ("zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt"))[
            "module"
        ]
        assert described.keys() == there
        for name, value in described.items():
            assert value.shape == expected[name].shape and (value.is_meta if stage == 3 else torch.equal(value, expected[name]))
        order = [name for name in Tied().state_dict() if name in there]
        assert list(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)) == order
        assert list(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)) == order
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "whole")
        assert list(torch.load(folder / "whole" / "pytorch_model.bin")) == order
        trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
        assert trained.keys() == set(TIED) - frozen and trained["seen"].dtype == torch.int64
    with torch.no_grad():
        engine = tied_engine(other, 1)
        engine.module.frozen.weight.data.mul_(2)
    with pytest.raises(BaseModelMismatch, match="frozen.weight"):
        engine.load_checkpoint(tmp_path / "trained", load_module_strict=False)


def test_in_the_background(tmp_path):
    given = config(2, 2, 1, checkpoint={"writer": {"type": "FAST", "decoupled": True}})
    data = batches(2, 1)

    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=given)
        steps(engine, rank, 2, data[:1])
        expected = zs.full_state_dict(engine.module)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        assert runtime_of(engine.module).gate.saver.last is not None  # not waited for
        steps(engine, rank, 2, data[1:2])
        engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)
        path, client_state = engine.load_checkpoint(tmp_path)
        assert "global_step1" in path and client_state["epoch"] == 1
        state = zs.full_state_dict(engine.module)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        engine.save_checkpoint(tmp_path, tag="last")
        engine.destroy()

    run_threads(2, body)
    assert (tmp_path / "latest").read_text().strip() == "last" and (tmp_path / "aside" / "manifest.json").exists()


def test_load_between_micro_steps(tmp_path):
    data = batches(1, 2)

    def made():
        return deepspeed.initialize(model=net(), config=config(1, 1, 2))[0]

    engine = made()
    steps(engine, 0, 1, data[:1])
    engine.save_checkpoint(tmp_path)
    steps(engine, 0, 1, data[1:])
    expected = zs.full_state_dict(engine.module)
    engine = made()
    steps(engine, 0, 1, [data[2][:1]])  # one of two
    engine.load_checkpoint(tmp_path)
    assert engine.micro_steps == 0
    steps(engine, 0, 1, data[1:])
    state = zs.full_state_dict(engine.module)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_by_a_function(stage, tmp_path):
    """Of another model, whose names it knows; and over what was loaded."""

    def saved(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(2, 2, 1))
        engine.save_checkpoint(tmp_path)

    run_threads(2, saved)

    def renamed(src, dst):
        with torch.no_grad():
            dst.embedding.weight.copy_(src["first.weight"][:11, :6])

    def doubled(src, dst):
        dst.load_state_dict({name: 2 * value for name, value in src.items()})

    def body(rank):
        engine = tied_engine(stage, 2)
        assert engine.load_checkpoint(tmp_path, custom_load_fn=renamed, load_module_only=True)[0]
        other, *_ = deepspeed.initialize(model=net(), config=config(stage, 2, 1))
        other.load_checkpoint(tmp_path, custom_load_fn=doubled)
        with pytest.raises(CheckpointMismatch, match="missing"):
            engine.load_checkpoint(tmp_path, custom_load_fn=renamed)
        return zs.full_state_dict(engine.module), zs.full_state_dict(other.module)

    for state, other in run_threads(2, body):
        assert torch.equal(state["head.weight"], WEIGHTS["first.weight"][:11, :6])
        assert all(torch.equal(other[name], 2 * value) for name, value in WEIGHTS.items())


def test_client_states(tmp_path, monkeypatch):
    """Of ranks that differ: each its own, rank 0's where there are others. Of classes of one's own: by one's word alone."""

    def saved(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=config(1, 2, 1))
        engine.save_checkpoint(tmp_path, tag="differ", client_state={"rank": rank})
        engine.save_checkpoint(tmp_path, tag="object", client_state={"where": Path("a")})

    def body(rank, world):
        engine, *_ = deepspeed.initialize(model=net(), config=config(3, world, 1))
        with pytest.raises(CheckpointError, match="trusted=True"):
            engine.load_checkpoint(tmp_path, tag="object")
        assert engine.load_checkpoint(tmp_path, tag="object", trusted=True)[1]["where"] == Path("a")
        return engine.load_checkpoint(tmp_path, tag="differ")[1]["rank"]

    told = []
    monkeypatch.setattr(checkpoints, "warning_once", told.append)
    run_threads(2, saved)
    assert len(told) == 1 and "pathlib" in told[0]  # when it is saved
    assert run_threads(2, body, 2) == [0, 1] and run_threads(1, body, 1) == [0]


def test_files_in_deepspeeds_names(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(3, 1, 1, **WARMUP))
    steps(engine, 0, 1, batches(1, 1)[:2])
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    folder = tmp_path / "global_step2"
    model = torch.load(zero_to_fp32.get_model_state_file(folder, 3))
    assert (model["epoch"], model["global_steps"], model["lr_scheduler"]) == (3, 2, {"last_batch_iteration": 1})
    shapes = {name: value.shape for name, value in WEIGHTS.items()}
    assert {name: value.shape for name, value in model["module"].items()} == shapes
    assert {name: shape for group in model["param_shapes"] for name, shape in group.items()} == shapes
    assert torch.load(zero_to_fp32.get_optim_files(folder)[0])["optimizer_state_dict"]["zero_stage"] == 3
    engine._change_recovery_script_permissions(tmp_path / "none")  # says so
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)


@pytest.mark.processes
def test_the_script(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(2, 1, 1))
    engine.save_checkpoint(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    options = ["--max_shard_size", "1KB", "--safe_serialization", "-t", "global_step0"]
    command = [sys.executable, tmp_path / "zero_to_fp32.py", ".", "out", *options]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == WEIGHTS.keys() and len(set(index["weight_map"].values())) > 1
    whole = net()
    whole.load_state_dict({name: value * 0 for name, value in WEIGHTS.items()})
    opened = zs.shard(whole)[0]
    zs.load(tmp_path / "out", opened)
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in zs.full_state_dict(opened).items())


def test_whole_weights_beside_the_checkpoint(tmp_path):
    engine = tied_engine(1, 1)
    engine.save_checkpoint(tmp_path)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == set(TIED) and state["seen"].dtype == torch.int64 and state["head.weight"] is state["embedding.weight"]
    assert all(torch.equal(state[name], value) for name, value in zs.full_state_dict(engine.module).items())
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "torch")
    whole = torch.load(tmp_path / "torch" / "pytorch_model.bin")
    assert whole["head.weight"] is whole["embedding.weight"] and list(whole) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in whole.items())
    for _ in range(2):  # what is there is replaced
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path, safe_serialization=True)
    assert (tmp_path / "model.safetensors").exists() and not list(tmp_path.glob(".zero_to_fp32*"))
    for bad in ("5QB", "-1", 0):
        with pytest.raises(ValueError, match="max_shard_size"):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "x", bad)
    with pytest.raises(ValueError, match="latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="none")


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_a_compiled_model_have_its_own_names(stage, tmp_path):
    """And load into models that are compiled or not; what the module itself gives has the names of torch."""

    def body(rank):
        engine = tied_engine(stage, 2, wrap=lambda model: torch.compile(model, backend="eager"))
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=False)
        engine.save_16bit_model(tmp_path)
        assert (
            list(engine.module_state_dict())
            == list(engine.module.state_dict())
            == [f"_orig_mod.{name}" for name in Tied().state_dict()]
        )
        left = engine.module_state_dict(exclude_frozen_parameters=True)
        assert [name for name in engine.module.state_dict() if name not in left] == [
            "_orig_mod.frozen.weight",
            "_orig_mod.frozen.bias",
        ]
        other = tied_engine(stage, 2)
        other.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: dst.load_state_dict(src), load_optimizer_states=False)
        engine.load_checkpoint(tmp_path)
        return zs.full_state_dict(engine.module)

    expected, _ = run_threads(2, body)
    whole = torch.load(tmp_path / "pytorch_model.bin")
    described = torch.load(zero_to_fp32.get_model_state_file(tmp_path / "global_step0", stage))
    converted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    shapes = [name for group in described["param_shapes"] for name in group]
    assert list(whole) == list(described["module"]) == list(converted) == list(expected) == list(Tied().state_dict())
    assert list(trained) == [name for name in converted if "frozen" not in name] and shapes == ["embedding.weight"]
    assert described["buffer_names"] == ["scale", "seen"]
    for wrap in (torch.compile, lambda model: model):
        model = Tied()
        with torch.no_grad():
            model.embedding.weight.zero_()
        zero_to_fp32.load_state_dict_from_zero_checkpoint(wrap(model), tmp_path)
        assert torch.equal(model.embedding.weight, expected["embedding.weight"])


def test_a_universal_name(tmp_path):
    engine, *_ = deepspeed.initialize(model=net(), config=config(3, 1, 1))
    steps(engine, 0, 1, batches(1, 1)[:1])
    engine.save_checkpoint(tmp_path, tag="here")
    expected = zs.full_state_dict(engine.module)
    given = config(1, 2, 1, checkpoint={"load_universal": True})

    def body(rank):
        engine, *_ = deepspeed.initialize(model=net(), config=given)
        if not (tmp_path / "latest_universal").exists():
            with pytest.raises(ValueError, match="latest_universal does not exist"):
                engine.load_checkpoint(tmp_path)
            return None
        assert "here_universal" in engine.load_checkpoint(tmp_path)[0]
        return zs.full_state_dict(engine.module), engine.global_steps

    run_threads(2, body)
    with pytest.raises(CheckpointNotFound, match="folder of a tag"):
        convert_to_universal(SimpleNamespace(input_folder=str(tmp_path), output_folder=str(tmp_path / "here_universal")))
    folders = {"input_folder": str(tmp_path / "here"), "output_folder": str(tmp_path / "here_universal")}
    convert_to_universal(SimpleNamespace(**folders, strict=True))
    for state, count in run_threads(2, body):
        assert count == 1 and all(torch.equal(state[name], value) for name, value in expected.items())


def test_without_an_optimizer(tmp_path):
    def made(given):
        return deepspeed.initialize(model=net(), config=given)[0]

    bare = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    made(bare).save_checkpoint(tmp_path)
    assert made(bare).load_checkpoint(tmp_path)[0]
    engine = made(config(2, 1, 1))
    with pytest.raises(CheckpointMismatch, match="no optimizer states: load it with load_optimizer_states=False"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[0]


@pytest.mark.processes
def test_ds_to_universal_as_a_command(tmp_path):
    made = deepspeed.initialize(model=net(), config=config(2, 1, 1))[0]
    made.save_checkpoint(tmp_path, tag="here")
    command = [
        sys.executable,
        "-m",
        "zeroshard.deepspeed",
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--num_extract_workers",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    folders = ["--input_folder", str(tmp_path / "here"), "--output_folder", str(tmp_path / "there")]
    subprocess.run([*command, *folders], env=environment, check=True)
    assert (tmp_path / "latest_universal").read_text().strip() == "there" and (tmp_path / "there" / "manifest.json").exists()
