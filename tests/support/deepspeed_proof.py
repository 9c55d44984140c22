"""The same programs with the real DeepSpeed and with zeroshard in its place: numbers of both, and how they are recorded.

    python tests/support/deepspeed_proof.py PYTHON [PROGRAM ...]    # PYTHON: with deepspeed 0.19.8. Writes RECORDED anew

A cell (deepspeed_programs/cells.py) is one training of a program there, on two CPU ranks (RANKS: another number) in fp32. The
checkpoints that DeepSpeed writes in the cells of KEPT are kept as well.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deepspeed_programs.cells import CELLS, REFERENCE

from zeroshard.comm.launch import free_port, rank_environment

PROGRAMS = Path(__file__).parent / "deepspeed_programs"
RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_numbers.json"
CHECKPOINTS = Path(__file__).parents[1] / "integrations" / "recorded"
KEPT = ("pipeline/0/4/tied", "pipeline/1/4/tied", "pipeline/1/4/one_stage", "experts/0/2/ep2-k1", "experts/1/2/ep2-k1")
NEEDS = {  # program: packages besides torch and deepspeed
    "raw_engine": (), "options": (), "accelerate_loop": ("accelerate", "transformers"), "trainer": ("accelerate", "transformers"),
    "lora": ("accelerate", "transformers", "peft"), "lightning_strategy": ("lightning",), "fabric_loop": ("lightning",),
    "pipeline": (), "pipeline_of_four": (), "experts": (), "tensor_parallel": ("transformers",), "sequences": ("transformers",),
}  # fmt: skip
RANKS = {"pipeline_of_four": 4}
VERSIONS = ("deepspeed", "torch", "accelerate", "transformers", "lightning", "peft")
TOLERANCE, WEIGHTS_TOLERANCE = 1e-5, 5e-5  # a weight is told as the sum of its elements, each times at most 1


def numbers(cells: list[str], folder: Path, deepspeed_python: str | None = None, limit_s: float = 3600) -> dict:
    """{cell: {"whole": ..., "resumed": ...}} as zeroshard has them, or the real DeepSpeed of that Python. A process for each rank."""
    folder.mkdir(parents=True)
    count = RANKS.get(cells[0].partition("/")[0], 2)
    command = [deepspeed_python] if deepspeed_python else [sys.executable, "-m", "zeroshard.deepspeed"]
    command += [str(PROGRAMS / "run.py"), str(folder / "numbers.json"), *cells]
    path = {} if deepspeed_python else {"PYTHONPATH": os.pathsep.join(sys.path)}
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | path
    own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    port, deadline = free_port(), time.monotonic() + limit_s
    logs = [open(folder / f"rank{rank}.log", "w+") for rank in range(count)]  # noqa: SIM115  # closed below
    ranks = [
        subprocess.Popen(command, env=own | rank_environment(rank, count, port), cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(max(deadline - time.monotonic(), 0.1)) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            rank.wait()
            log.close()
    told = "\n".join(Path(log.name).read_text()[-3000:] for log in logs)
    assert codes == [0] * count, f"exit codes {codes} of {' '.join(command)}:\n{told}"
    return json.loads((folder / "numbers.json").read_text())


def differences(got: dict[str, list[float]], expected: dict[str, list[float]]) -> list[str]:
    """What is further apart than the tolerance, in words. Of `expected` the last values count, as many as there are in `got`."""
    found = []
    for name, values in got.items():
        wanted = expected[name][-len(values) :] if values else []
        tolerance = WEIGHTS_TOLERANCE if name == "weights" else TOLERANCE
        if len(wanted) != len(values):
            found.append(f"{name}: {len(values)} values, expected {len(wanted)}")
        elif (apart := max((abs(a - b) for a, b in zip(values, wanted, strict=True)), default=0.0)) > tolerance or apart != apart:
            found.append(f"{name}: {apart:.1e} apart: {values}, expected {wanted}")
    return found


def record(deepspeed_python: str, programs: list[str]) -> None:
    """Write RECORDED, of these programs anew; say where DeepSpeed itself does not resume as without an interruption."""
    ask = f"import importlib.metadata, json; print(json.dumps({{p: importlib.metadata.version(p) for p in {VERSIONS}}}))"
    versions = json.loads(subprocess.run([deepspeed_python, "-c", ask], capture_output=True, text=True, check=True).stdout)
    recorded = json.loads(RECORDED.read_text())["cells"] if RECORDED.exists() else {}
    for program in programs:
        cells = [cell for cell in CELLS if cell.startswith(program + "/") and cell not in REFERENCE]
        with tempfile.TemporaryDirectory() as folder:
            found = numbers(cells, Path(folder) / program, deepspeed_python)
            for name in (cell.replace("/", "-") for cell in cells if cell in KEPT):
                ignored = shutil.ignore_patterns("*.py")  # DeepSpeed's script
                shutil.rmtree(CHECKPOINTS / name, ignore_errors=True)
                shutil.copytree(Path(folder) / program / name, CHECKPOINTS / name, ignore=ignored)
        for cell, told in found.items():
            recorded[cell] = {name: [float(f"{value:.8g}") for value in values] for name, values in told["whole"].items()}
            for what in differences(told.get("resumed", {}), told["whole"]):
                print(f"{cell}: DeepSpeed resumes otherwise: {what}")
        rows = [f"  {json.dumps(cell)}: {json.dumps(recorded[cell])}" for cell in CELLS if cell in recorded]
        RECORDED.write_text(f'{{"versions": {json.dumps(versions)},\n "cells": {{\n' + ",\n".join(rows) + "\n }\n}\n")
        print(f"{program}: {len(cells)} cells", flush=True)


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2:] or list(NEEDS))
