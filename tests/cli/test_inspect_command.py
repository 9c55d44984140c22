"""`zeroshard inspect` of a run: how far it came and what its checkpoints hold, finished or not."""

import json
import os
import shutil
from pathlib import Path

import pytest

from zeroshard.cli import inspect, main

SCORED = "held-out bits per byte before and after"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "a.txt").write_text("the cat sat on the mat, and the dog ate the hat. " * 200)
    small = (
        "--ranks 1 --threads 1 --steps 4 --layers 1 --dim 16 --heads 1 --seq 16 --ngram-rows 8 --eval-bytes 200 --save-every 2"
    )
    where = [
        "--data",
        str(folder),
        "--out",
        str(folder / "run"),
        "--sample-bytes",
        "0",
        "--stage",
        "1",
        "--precision",
        "bf16",
        "-q",
    ]
    assert main(["train", *small.split(), *where]) == 0
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def told(folder, capsys, *options, code=0):
    assert main(["inspect", str(folder), "--json", *options]) == code
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 100
    return json.loads(text)


def test_a_run_is_told_with_its_checkpoints(run, capsys):
    facts = told(run, capsys)
    about = {
        name: facts["run"][name] for name in ("finished", "steps", "steps asked for", "ranks", "stage", "precision", "model")
    }
    assert about == {
        "finished": True, "steps": 4, "steps asked for": 4, "ranks": 1, "stage": 1, "precision": "bf16",
        "model": "GPT: 1 layers, dim 16, 1 heads",
    }  # fmt: skip
    report = json.loads((run / "report.json").read_text())
    assert facts["run"][SCORED][1] == round(report["held_out_bits_per_byte"]["after_training"], 3)  # train's last line
    assert facts["run"]["model states of a rank, bytes"] == sum(report["at_rest"].values())
    assert [(each["step"], each["stage"], each["checksums"]) for each in facts["checkpoints"]] == [(2, 1, "hold"), (4, 1, "hold")]
    assert main(["inspect", str(run)]) == 0
    printed = capsys.readouterr().out
    for words in ("the run", SCORED, "step-00000002", "2 checkpoints, the newest of step 4"):
        assert words in printed
    assert "optimizer states" not in printed
    assert main(["inspect", str(run), "-v"]) == 0
    assert "optimizer states" in capsys.readouterr().out


def test_the_folder_of_runs_lists_them(run, copy, capsys, monkeypatch):
    shutil.copytree(copy, copy.parent / "other")
    (copy / "report.json").unlink()
    facts = told(copy.parent, capsys)
    assert [(Path(each["folder"]).name, each["finished"], each["steps"]) for each in facts["runs"]] == [
        ("copy", False, 4),
        ("other", True, 4),
    ]
    assert facts["runs"][1]["bits per byte"] == told(run, capsys)["run"][SCORED][1]
    monkeypatch.chdir(copy.parent.parent)  # a short path, which fits into a column
    assert main(["inspect", copy.parent.name]) == 0
    printed = capsys.readouterr().out
    assert "other" in printed and "2 runs; `zeroshard inspect` of one shows more" in printed


def test_checkpoints_come_before_measurements_beside_them(run, copy, capsys):
    """Also those of another program."""
    (logs := copy / "checkpoints" / "logs").mkdir()
    (logs / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    assert [each["step"] for each in told(copy / "checkpoints", capsys)] == [2, 4]
    (alone := copy / "alone" / "logs").mkdir(parents=True)
    (alone / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    assert told(copy / "alone", capsys)["runs"][0]["steps"] == 0


def test_of_many_runs_the_newest_are_listed(tmp_path, capsys):
    for number in range(inspect.MOST + 5):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "metrics.jsonl").write_text("")
        os.utime(folder / "metrics.jsonl", (number, number))
    names = {Path(each["folder"]).name for each in told(tmp_path, capsys)["runs"]}
    assert names == {str(number) for number in range(5, inspect.MOST + 5)}
    assert main(["inspect", str(tmp_path)]) == 0
    assert "the newest 90 of 95 runs" in capsys.readouterr().out


def test_a_folder_may_be_named_like_an_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "--", "--odd"]) == 2
    assert "unknown option" not in capsys.readouterr().err


def test_one_checkpoint_of_a_run_can_be_named(run, capsys):
    (one,) = told(run / "checkpoints", capsys, "--name", "step-00000002")
    assert one["step"] == 2 and one["files"]
    several = told(run / "checkpoints", capsys)
    assert [each["step"] for each in several] == [2, 4] and "files" not in several[0]


def test_a_run_that_was_not_finished_tells_what_it_has(copy, capsys):
    for name in ("report.json", "config.json", "model.safetensors"):
        (copy / name).unlink()
    facts = told(copy, capsys)
    assert (facts["run"]["finished"], facts["run"]["steps"], len(facts["checkpoints"])) == (False, 4, 2)
    assert SCORED not in facts["run"] and "bits per byte of part of the held-out text, first and last" in facts["run"]
    shutil.rmtree(copy / "checkpoints")
    assert told(copy, capsys)["checkpoints"] == []
    assert main(["inspect", str(copy)]) == 0
    assert "no checkpoint: train with --save-every" in capsys.readouterr().out


def test_damage_in_a_run_is_code_1_with_its_place(copy, capsys):
    path = next((copy / "checkpoints" / "step-00000002").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[700] ^= 255
    path.write_bytes(bytes(data))
    assert main(["inspect", str(copy), "-q"]) == 1
    assert f"{path.name} is damaged" in capsys.readouterr().err
    assert main(["inspect", str(copy), "--no-verify"]) == 0
