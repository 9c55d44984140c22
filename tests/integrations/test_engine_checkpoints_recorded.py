"""Checkpoints that the real DeepSpeed wrote (recorded/make_recorded.py): training goes on as there, at other stages and ranks.

Those recorded lie beside; where DEEPSPEED_PYTHON names the Python of an environment with DeepSpeed, all are written anew.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.checkpoint.importers import deepspeed as importer
from zeroshard.checkpoint.importers.torch_file import StandIn
from zeroshard.comm.launch import free_port
from zeroshard.errors import CheckpointMismatch
from zeroshard.integrations.deepspeed import zero_to_fp32
from zeroshard.integrations.deepspeed.zero_to_fp32 import convert_to_universal
from zeroshard.testing import run_threads

RECORDED = Path(__file__).parent / "recorded"
sys.path.insert(0, str(RECORDED))
import make_recorded as recorded  # noqa: E402

DEEPSPEED_PYTHON = os.environ.get("DEEPSPEED_PYTHON")
WEIGHTS = recorded.net().state_dict()
ELSEWHERE = [  # case, stage and number of ranks that go on
    ("stage0", 1, 2), ("stage1", 3, 4), ("stage2", 3, 1), ("stage3", 2, 4), ("stage3", 3, 2), ("stage2-bf16", 1, 4),
    ("stage3-offload", 0, 2), ("stage1-elastic", 2, 4), ("stage3-trained", 1, 2),
]  # fmt: skip


def engine_of(stage, world, precision="fp32", frozen_are_there=False, **more):
    """Threads share torch's generator, so weights are not drawn there; they differ from those that were saved."""
    model = recorded.Net()
    model.load_state_dict({name: value + (not frozen_are_there or "frozen" not in name) for name, value in WEIGHTS.items()})
    config = {**recorded.config(stage, precision, {}, world), **more}
    return deepspeed.initialize(model=model, model_parameters=recorded.groups_of(model), config=config)[0]


def check(folder, case, stage, world, **more):
    told, precision = json.loads((folder / f"{case}.json").read_text()), recorded.CASES[case][1]

    def go_on(rank):
        trained = case.endswith("-trained")
        engine = engine_of(stage, world, precision, frozen_are_there=trained, **more)
        engine.micro_steps = 1  # what is accumulated is dropped, and counting begins anew
        path, client_state = engine.load_checkpoint(str(folder / case), load_module_strict=not trained)
        assert Path(path).is_file() and path.endswith("mp_rank_00_model_states.pt")
        assert client_state["epoch"] == 3 and torch.equal(client_state["seen"], torch.arange(3))
        assert client_state["global_samples"] == 24 and client_state["ds_version"] == "0.19.8"
        assert client_state["ds_config"]["gradient_clipping"] == 0.5
        assert not {"lr_scheduler", "global_steps"} & client_state.keys()
        counted = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
        assert counted == (3, 24, 0, 0) and engine.get_lr() == [0.012, 0.012]
        losses = recorded.train(engine, range(recorded.BEFORE, recorded.BEFORE + recorded.AFTER), rank, world)
        assert (engine.get_lr(), engine.global_steps, engine.global_samples) == (
            told["rates"], told["global_steps"], told["global_samples"])  # fmt: skip
        return losses

    losses = torch.tensor(run_threads(world, go_on)).mean(0)
    limit = 1e-3 if precision == "bf16" else 1e-5  # DeepSpeed itself differs by 2e-4 between stages in bf16
    torch.testing.assert_close(losses, torch.tensor(told["losses"]), rtol=0, atol=limit)


@pytest.mark.parametrize(("case", "stage", "world"), ELSEWHERE)
def test_training_goes_on(case, stage, world):
    check(RECORDED, case, stage, world)


@pytest.mark.parametrize(("case", "stage", "world"), [("stage1", 3, 2), ("stage3", 1, 1)])
def test_a_universal_one(case, stage, world):
    check(RECORDED, case, stage, world, checkpoint={"load_universal": True})


@pytest.mark.processes
# the real one is no requirement: what it gave is recorded, and compared with above (docs/testing.md)
@pytest.mark.skipif(DEEPSPEED_PYTHON is None, reason="DEEPSPEED_PYTHON names no environment with the real DeepSpeed")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_those_written_anew(world, tmp_path):
    cases = [case for case, (*_, ranks) in recorded.CASES.items() if ranks == world]
    port = free_port()
    program = [DEEPSPEED_PYTHON, str(RECORDED / "make_recorded.py"), str(tmp_path), *cases]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [subprocess.Popen(program, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=2) for r in range(world)]
    assert [rank.wait(170) for rank in ranks] == [0] * world
    for case in cases:
        check(tmp_path, case, 3 - recorded.CASES[case][0] % 2, 4 if world == 2 else 2)


@pytest.mark.parametrize("case", ["stage1", "stage2", "stage3", "stage3-offload", "stage1-elastic"])
def test_whole_weights(case, tmp_path):
    expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(RECORDED / "stage0")  # whole in one file there
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(RECORDED / case)
    assert state.keys() == expected.keys() == WEIGHTS.keys()
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(RECORDED / case, exclude_frozen_parameters=True)
    assert trained.keys() == WEIGHTS.keys() - {"frozen.weight", "frozen.bias"}
    zero_to_fp32.main([str(RECORDED / case), str(tmp_path), "--max_shard_size", "300", "--exclude_frozen_parameters"])
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    files = {name: torch.load(tmp_path / name) for name in sorted(set(index["weight_map"].values()))}
    assert len(files) > 1 and all(torch.equal(files[file][name], trained[name]) for name, file in index["weight_map"].items())
    assert index["weight_map"].keys() == trained.keys()
    assert zero_to_fp32.get_model_state_file(RECORDED / case / "global_step3", 3 if "3" in case else 1)
    assert len(zero_to_fp32.get_optim_files(RECORDED / case / "global_step3")) == recorded.CASES[case][3]


def test_parts_of_one():
    def states(engine):
        return {name for name, state in zs.full_optimizer_state(engine.module).items() if state}

    engine = engine_of(3, 1)
    path, client_state = engine.load_checkpoint(str(RECORDED / "stage2"), load_module_only=True)
    assert path and client_state["epoch"] == 3 and engine.global_steps == 0
    assert engine.get_lr() == [0.0, 0.0] and not states(engine)
    engine.load_checkpoint(str(RECORDED / "stage2"), load_optimizer_states=False)
    assert engine.global_steps == 3 and not states(engine) and engine.lr_scheduler.last_batch_iteration == 2
    engine = engine_of(1, 1)
    engine.load_checkpoint(str(RECORDED / "stage2"), load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration == -1 and "hidden.weight" in states(engine)


def test_objects_of_classes_by_ones_word_alone(capfd):
    engine = engine_of(2, 1)
    with pytest.raises(CheckpointMismatch, match="missing.*frozen.weight"):
        engine.load_checkpoint(str(RECORDED / "stage3-trained"))
    for trusted in (False, True):
        state = engine.load_checkpoint(str(RECORDED / "stage3-trained"), load_module_strict=False, trusted=trusted)[1]
        assert state.get("args") == (argparse.Namespace(lr=3) if trusted else None)
    assert "left extra args of rank 0 unread, of classes" in capfd.readouterr().err


def test_what_does_not_fit(tmp_path):
    shutil.copytree(RECORDED / "stage1", tmp_path / "run")
    torch.manual_seed(0)
    smaller = torch.nn.Module()
    smaller.hidden = torch.nn.Linear(5, 7)
    plain = {key: value for key, value in recorded.config(2, "fp32", {}, 1).items() if key != "scheduler"}
    engine, *_ = deepspeed.initialize(model=smaller, model_parameters=smaller.parameters(), config=plain)
    with pytest.raises(CheckpointMismatch, match="embedding.weight"):
        engine.load_checkpoint(tmp_path / "run", load_optimizer_states=False)
    engine.load_checkpoint(tmp_path / "run", load_optimizer_states=False, load_module_strict=False)
    saved = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(RECORDED / "stage1")
    assert torch.equal(zs.full_state_dict(engine.module)["hidden.weight"], saved["hidden.weight"])
    engine.save_checkpoint(tmp_path / "plain")
    other = engine_of(1, 1)
    with pytest.raises(CheckpointMismatch, match="load_lr_scheduler_states=False"):
        other.load_checkpoint(tmp_path / "plain")


def test_a_second_name_for_loading_at_other_sizes(tmp_path):
    """ds_to_universal over what DeepSpeed wrote."""
    shutil.copytree(RECORDED / "stage3-offload", tmp_path / "stage3-offload")
    shutil.copy(RECORDED / "stage3-offload.json", tmp_path)
    folder = tmp_path / "stage3-offload"

    class Arguments:
        input_folder, output_folder = str(folder / "global_step3"), str(folder / "global_step3_universal")

    convert_to_universal(Arguments)
    shutil.rmtree(folder / "global_step3")
    check(tmp_path, "stage3-offload", 1, 1, checkpoint={"load_universal": True})


def test_the_loss_scale_goes_on():
    """cur_iter steps, the last overflow at 4: of steps 5 to 9 four count, in windows of three."""
    saved = StandIn()
    saved.__setstate__({"cur_scale": 64.0, "cur_iter": 10, "last_overflow_iter": 4, "scale_window": 3, "cur_hysteresis": 2})
    assert importer.scaler_of(saved) == {"scale": 64.0, "good_steps": 1, "patience": 2}
    assert importer.scaler_of(None) is None
