"""Trainer and Accelerate save, rotate, load the best and go on, unchanged (tests/support/resume_programs).

Resume equals no interruption. One stage on one rank each; with ZEROSHARD_SLOW=1 all, on two; with DEEPSPEED_PYTHON also what the real DeepSpeed
says, and going on from what it saved.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.comm.launch import free_port, rank_environment

PROGRAMS = Path(__file__).parents[1] / "support" / "resume_programs"
SLOW, DEEPSPEED_PYTHON = os.environ.get("ZEROSHARD_SLOW") == "1", os.environ.get("DEEPSPEED_PYTHON")
for needed in ("accelerate", "transformers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}", allow_module_level=True)  # ./test installs both


def told_by(folder, stages, python=None):
    """What the programs say, by their name and stage. python: of an environment with the real DeepSpeed; else zeroshard takes its place."""
    port, world = free_port(), 2 if SLOW or DEEPSPEED_PYTHON else 1
    command = [python] if python else [sys.executable, "-m", "zeroshard.deepspeed"]
    command += [str(PROGRAMS / "both.py"), str(folder), *map(str, stages)]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    shared |= {} if python else {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            command, env={**shared, **rank_environment(rank, world, port)}, stdout=subprocess.PIPE, stderr=2, text=True
        )
        for rank in range(world)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, told
    found = [json.loads(line.removeprefix("TOLD ")) for line in told[0].splitlines() if line.startswith("TOLD ")]
    return {(each["program"], each["stage"]): each for each in found}


def check_trainer(told):
    assert told["left"] == ["checkpoint-4", "checkpoint-6"] and told["best"] in told["left"] and told["best_is_loaded"]
    assert told["evaluation"][0] == pytest.approx(told["evaluation"][1], abs=1e-5)
    assert list(told["losses"]) == list(told["resumed"]) == list("123456")
    assert list(told["resumed"].values()) == pytest.approx(list(told["losses"].values()), abs=1e-6)


def check_accelerate(told):
    whole, resumed = told["whole"], told["resumed"]
    assert whole["left"] == ["checkpoint_0", "checkpoint_1"] and len(whole["losses"]) > 4
    for what, before in (("losses", 4), ("rates", 4), ("weights", 0)):
        assert resumed[what] == pytest.approx(whole[what][before:], abs=1e-6), what


def check(told):
    for (program, _), each in told.items():
        (check_trainer if program == "trainer" else check_accelerate)(each)


@pytest.mark.processes
@pytest.mark.limit(900 if SLOW else 120)
def test_going_on(tmp_path):
    told = told_by(tmp_path, [1, 2, 3] if SLOW else [3])
    assert len(told) == (6 if SLOW else 2)
    check(told)


@pytest.mark.processes
# the real one is no requirement: what it gave is recorded, and compared with above (docs/testing.md)
@pytest.mark.skipif(DEEPSPEED_PYTHON is None, reason="DEEPSPEED_PYTHON names no environment with the real DeepSpeed")
@pytest.mark.limit(900)
def test_beside_the_real_one(tmp_path):
    theirs, ours = told_by(tmp_path / "theirs", [1, 3], DEEPSPEED_PYTHON), told_by(tmp_path / "ours", [1, 3])
    check(theirs)
    check(ours)
    for which in theirs:
        both = [each[which].get("whole", each[which])["losses"] for each in (theirs, ours)]
        losses = [list(each.values()) if isinstance(each, dict) else each for each in both]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5), which
