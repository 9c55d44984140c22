"""scripts/gpu_day.sh: a dry run of all parts on the CPU; what becomes of a part that cannot run, fails, or takes too long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import PARTS, STEPPING, SUMMED, TUNING, Part

ROOT = Path(gpu_day.__file__).parents[1]
FIELDS = {"part", "status", "why", "dry_run", "device", "seconds", "facts", "rows"}
COLUMNS = {  # fields of the rows that ran
    "environment": {"version", "gpus"},
    "tests": {"tests"},
    "peaks": {"planned_nbytes", "measured_nbytes", "planned / measured", "by"},
    "steps": {"parameters", "ms", "tokens_per_s", "tflops", "peak_nbytes", "losses"},
    "offload": set(),  # links, and contenders
    "codecs": {"numel", "torch_ms", "torch_bytes_per_s", "triton_ms"},
    "finetune": {"parameters", "ms", "tokens_per_s", "peak_nbytes", "losses"},
}


def script(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([ROOT / "scripts/gpu_day.sh", *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.night  # 30 to 50 s; how a part is run, refused and told: below
@pytest.mark.processes
def test_all_parts_run_dry_on_the_cpu(tmp_path):
    done = script("--dry-run", str(tmp_path))
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    joined = json.loads((tmp_path / "results.json").read_text())
    assert list(joined) == list(PARTS) == list(COLUMNS)
    for name, part in joined.items():
        assert part == json.loads((tmp_path / f"{name}.json").read_text())
        assert part.keys() == FIELDS and part["status"] == "done" and part["dry_run"], part
        ran = [row for row in part["rows"] if row["status"] == "ran"]
        assert ran and all(row.keys() >= COLUMNS[name] for row in ran), part["rows"]
        assert all(row["status"].startswith("skipped: ") for row in part["rows"] if row not in ran)

    def rows(name: str) -> dict[str, dict]:
        return {row["name"]: row for row in joined[name]["rows"]}

    assert joined["environment"]["facts"]["python"] and "nvidia-smi" in joined["environment"]["facts"]
    assert len(rows("peaks")) == 6 and all(0.9 < row["planned / measured"] < 1.1 for row in rows("peaks").values())
    for name, contenders in (("steps", (*STEPPING, *SUMMED)), ("finetune", TUNING)):
        assert rows(name).keys() == {each.name for each in contenders}
        assert any(row.get("same") for row in rows(name).values())
    assert rows("offload")["copy to the device"]["bytes_per_s"] > 0
    assert rows("offload")["zs3-infinity-bf16"]["moved_bytes_per_s"]["disk -> host"] > 0
    page = (tmp_path / "results.md").read_text()
    assert re.findall(r"^\| (\w+) \| done \|", page, re.M) == list(PARTS)
    assert not list(tmp_path.glob("zeroshard-bench-*"))


def test_a_part_says_why_it_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: False)
    assert gpu_day.run(Part("codecs", tmp_path, dry=False)) == 0

    def fails(part: Part) -> None:
        part.add("first", number=1)
        raise RuntimeError("no luck")

    def late(part: Part) -> None:
        part.add("first", number=1)
        raise gpu_day.OutOfTime

    monkeypatch.setitem(PARTS, "steps", fails)
    monkeypatch.setitem(PARTS, "offload", late)
    assert gpu_day.run(Part("steps", tmp_path, dry=True)) == 1
    assert gpu_day.run(Part("offload", tmp_path, dry=True)) == 1
    Part("peaks", tmp_path, dry=True).add("first", number=1)  # then its process was killed
    assert gpu_day.page(tmp_path, ["codecs", "steps", "offload", "peaks", "tests"]) == 1
    joined = json.loads((tmp_path / "results.json").read_text())
    assert {name: (part["status"], part["why"]) for name, part in joined.items()} == {
        "codecs": ("skipped", "torch sees no CUDA device"),
        "steps": ("failed", "RuntimeError: no luck"),
        "offload": ("failed", "out of time; rows are those that it had measured"),
        "peaks": ("failed", "it was killed; see peaks.log"),
        "tests": ("failed", "it has not begun"),
    }
    assert [row["number"] for name in ("steps", "offload", "peaks") for row in joined[name]["rows"]] == [1, 1, 1]


def test_a_contender_without_memory_or_with_other_losses_is_told(tmp_path, monkeypatch):
    workload = gpu_day.Workload(gpu_day.EIGHT)
    assert gpu_day.short_of_memory(TUNING[0], workload, 1 << 30) == "83 GiB of host memory needed, 1 available"

    def compares(part: Part) -> None:
        part.add("zs3", same=False)
        part.add("ddp", same=True)
        part.add("ds3", "failed: no luck")

    monkeypatch.setitem(PARTS, "steps", compares)
    assert gpu_day.run(Part("steps", tmp_path, dry=True)) == 1
    told = json.loads((tmp_path / "steps.json").read_text())
    assert (told["status"], told["why"]) == ("failed", "zs3, ds3")


@pytest.mark.parametrize("arguments", [["--dry-run", "--parts", "speed"], ["--fast"]])
def test_a_mistake_in_the_call_is_told(arguments, tmp_path):
    done = script(*arguments, str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("usage: scripts/gpu_day.sh")
