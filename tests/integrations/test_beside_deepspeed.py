"""The same programs, unmodified, give the numbers of the real DeepSpeed: losses, norms, learning rates, evaluation, weights.

`./test` runs SAMPLE beside the numbers that were recorded of DeepSpeed. ZEROSHARD_SLOW=1: all cells. And with
DEEPSPEED_PYTHON, the Python of an environment that has deepspeed: the recorded numbers are what that one computes.
"""

import importlib.util
import json
import os

import pytest
from deepspeed_programs.cells import CELLS, REFERENCE
from deepspeed_proof import NEEDS, RECORDED, TOLERANCE, differences, numbers

SLOW, DEEPSPEED_PYTHON = os.environ.get("ZEROSHARD_SLOW") == "1", os.environ.get("DEEPSPEED_PYTHON")
SAMPLE = [  # one start of two processes: each stage, accumulation and offload (Lightning, slow to import, in test_programs)
    "raw_engine/1/4/none", "raw_engine/3/1/cpu", "options/1/2/coalesced", "options/2/2/unscaled", "options/3/2/born_sharded",
    "options/3/2/small_buckets", "accelerate_loop/2/1/cpu", "trainer/3/2/none", "lora/3/1/cpu",
    "pipeline/1/4/tied", "experts/1/2/ep2-k1", "tensor_parallel/1/2/key", "sequences/3/2/sgd",
]  # fmt: skip
WITHOUT_RESUMING = {"options", "tensor_parallel", "sequences"}  # programs
RECORD = json.loads(RECORDED.read_text())["cells"]


def runnable(cells):
    return [cell for cell in cells if all(importlib.util.find_spec(package) for package in NEEDS[cell.partition("/")[0]])]


def check(told):
    wrong = []
    for cell, runs in told.items():
        expected, whole, resumed = RECORD[REFERENCE.get(cell, cell)], runs["whole"], runs.get("resumed", {})
        wrong += [f"{cell}, not DeepSpeed's: {what}" for what in differences(whole, expected)]
        wrong += [f"{cell}, resumed: {what}" for what in differences(resumed, whole)]
        resumes = cell.partition("/")[0] not in WITHOUT_RESUMING
        if whole.keys() != expected.keys() or (resumes and not (all(resumed.values()) and resumed)):
            wrong.append(f"{cell}: numbers are missing: {runs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.processes
@pytest.mark.skipif(SLOW, reason="all cells are run below")
@pytest.mark.limit(240)
def test_a_sample_of_programs_gives_deepspeeds_numbers(tmp_path):
    check(numbers(runnable(SAMPLE), tmp_path / "sample"))


@pytest.mark.processes
@pytest.mark.slow  # all cells
@pytest.mark.parametrize("program", NEEDS)
@pytest.mark.limit(900)
def test_every_cell_gives_deepspeeds_numbers(program, tmp_path):
    cells = [cell for cell in CELLS if cell.startswith(program + "/")]
    if not runnable(cells):
        pytest.skip(f"needs {', '.join(NEEDS[program])}")  # which ./test installs
    check(numbers(cells, tmp_path / program))


@pytest.mark.processes
# the real one is no requirement: what it gave is recorded, and compared with above (docs/testing.md)
@pytest.mark.skipif(DEEPSPEED_PYTHON is None, reason="DEEPSPEED_PYTHON names no environment with the real DeepSpeed")
@pytest.mark.parametrize("program", NEEDS)
@pytest.mark.limit(900)
def test_deepspeed_gives_the_recorded_numbers(program, tmp_path):
    cells = [cell for cell in CELLS if cell.startswith(program + "/") and cell not in REFERENCE]
    check(numbers(cells, tmp_path / program, DEEPSPEED_PYTHON))


def test_every_cell_is_recorded():
    assert set(RECORD) == set(CELLS) - set(REFERENCE)
    assert set(SAMPLE) <= set(CELLS)


def test_a_difference_is_told():
    got = {"losses": [1.0, 2.0], "norms": [3.0], "weights": [float("nan")], "rates": [1.0, 2.0]}
    expected = {"losses": [0.0, 1.0, 2.0], "norms": [3.0 + 2 * TOLERANCE], "weights": [1.0], "rates": [2.0]}
    assert [what.partition(":")[0] for what in differences(got, expected)] == ["norms", "weights", "rates"]
