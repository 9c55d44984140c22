"""`zeroshard plan --auto` and `zeroshard simulate` say the same seconds of the same layout."""

import json

import pytest

from zeroshard.cli import main

SMALL = ["quickstart", "--ranks", "8", "--node-size", "4", "--seq", "64", "--hardware", "a100-40gb", "--precision", "bf16"]
LAYOUTS = {
    "stage 1": ["--stage", "1"],
    "stage 2, checkpoints": ["--stage", "2", "--checkpoint-activations"],
    "stage 3": ["--stage", "3"],
    "stage 3, secondary shards": ["--stage", "3", "--hpz", "4"],
    "groups of 4": ["--stage", "3", "--shard-size", "4"],
    "tensor parallel": ["--stage", "1", "--mesh", "dp=4,tp=2"],
    "pipeline": ["--stage", "1", "--mesh", "dp=4,pp=2", "--checkpoint-activations"],
}


def told(capsys, *arguments):
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


_SHORT = ("stage 3, secondary shards", "tensor parallel", "pipeline")  # 5 s each: the others with ZEROSHARD_SLOW=1


@pytest.mark.parametrize("name", [name if name in _SHORT else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_search_and_simulation_say_the_same_seconds(name, capsys, tmp_path):
    path, given = tmp_path / "layout.json", [*SMALL, *LAYOUTS[name]]
    found = told(
        capsys,
        "plan",
        *given,
        "--auto",
        "--global-batch",
        "16",
        "--write-config",
        str(path),
        "--offload-path",
        str(tmp_path),
        "--json",
    )
    section = json.loads(path.read_text())["zeroshard"]
    shard, kept = section["shard"], section["checkpoint_activations"]
    known = ("offload_optimizer", "offload_gradient", "offload_param", "shard_size", "max_unit_numel", "zero_hpz_partition_size")
    flags = {key: f"--{key.replace('zero_hpz_partition_size', 'hpz').replace('_', '-')}" for key in known}
    assert set(shard) <= {"stage", "precision", "offload_path", "hierarchical", *known}
    same = [f"{flags[key]}={value}" for key, value in shard.items() if key in known and flags[key] not in given]
    same += ["--no-hierarchical"] * (shard.get("hierarchical") is False)
    same += ["--checkpoint-activations"] * (kept is not None and "--checkpoint-activations" not in given)
    same += ["--offload-activations=cpu"] * (kept is not None and kept["offload"] == "cpu")
    mesh = ",".join(f"{axis}={size}" for axis, size in section["mesh"].items())
    mesh = [] if "--mesh" in given else ["--mesh", mesh]
    batch = ["--micro-batch", str(section["micro_batch"]), "--accumulate", str(section["micro_batches"])]
    simulated = told(capsys, "simulate", *given, *mesh, *same, *batch, "--json")
    assert found["auto"]["step_s"] == simulated["step_s"] == section["prediction"]["step_s"]
    assert found["auto"]["tflops"] == simulated["tflops"]
