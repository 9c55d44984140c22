"""Checkpoints of the engine: resume equals no interruption at any stage and world size; client_state; whole weights."""

import pytest
import torch
from test_engine import Net, batches, config, net, reference

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.errors import CheckpointNotFound
from zeroshard.integrations.deepspeed import zero_to_fp32
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
        assert path.endswith("global_step1/mp_rank_00_model_states.pt") and client_state["epoch"] == 3 and torch.equal(client_state["rng"], torch.arange(3))
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
