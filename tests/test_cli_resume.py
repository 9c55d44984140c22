"""`zeroshard train --resume`: a run that was interrupted goes on as if it had never been."""

import json

import pytest

from zeroshard.cli import main
from zeroshard.cli.trainer import Trainer

CLOCKS = ("seconds", "step_seconds", "memory_nbytes")


class Interrupted(BaseException):
    """Stands for whatever ends a run."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i}: the cat sat on the mat, and the dog ate the hat. " * 20)
    return folder


def _train(text, out, *arguments: str) -> int:
    small = ["--layers", "1", "--dim", "16", "--heads", "1", "--seq", "16", "--batch", "4", "--eval-bytes", "200"]
    run = ["--data", str(text), "--steps", "10", "--eval-every", "5", "--sample-bytes", "0", "--ngram-rows", "0"]
    return main(["train", *small, *run, "--ranks", "1", "--save-every", "3", "--out", str(out), *arguments])


def _rows(out) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def _interrupt(monkeypatch, step: int) -> None:
    """End the run in the middle of a step."""
    plain = Trainer._micro_batch

    def micro_batch(self, number, micro):
        if number == step:
            raise Interrupted
        return plain(self, number, micro)

    monkeypatch.setattr(Trainer, "_micro_batch", micro_batch)


@pytest.mark.parametrize("options", [(), ("--precision", "bf16", "--save-in-background")], ids=["fp32", "bf16-background"])
def test_an_interrupted_run_goes_on_bit_for_bit(text, tmp_path, monkeypatch, capsys, options):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert _train(text, whole, *options) == 0
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        _interrupt(patch, 8)
        _train(text, parted, *options)
    assert _rows(parted)[-1]["step"] == 8  # two steps beyond the last checkpoint: they are taken again
    capsys.readouterr()
    assert _train(text, parted, "--resume", *options) == 0
    assert "resumed from" in (said := capsys.readouterr().out) and "step-00000006" in said.replace("\n", "")
    assert _rows(parted) == _rows(whole)
    assert (parted / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert sorted(path.name for path in (parted / "checkpoints").iterdir()) == ["latest", "step-00000009", "step-00000010"]


def test_what_cannot_be_resumed_is_one_line(text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert _train(text, out) == 0
    for arguments, words in (
        (("--resume",), "the run is complete"),
        (("--resume", "--seed", "3"), "seed: was 0, is 3"),
        (("--resume", str(tmp_path)), "which has none"),
    ):
        capsys.readouterr()
        assert _train(text, out, *arguments) != 0
        error = capsys.readouterr().err
        assert words in error.replace("\n", " ") and "Traceback" not in error
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--ranks", "1", "--data", str(text), "--seq", "16"]) != 0
    assert "found none" in capsys.readouterr().err
    assert _train(text, out, "--resume", "--steps", "12") == 0  # more steps: it goes on
    assert _rows(out)[-1]["step"] == 12
