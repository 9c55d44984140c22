"""`zeroshard train --resume`: a run that was interrupted goes on as if it had never been."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import zeroshard as zs
from zeroshard.checkpoint import directory as folder
from zeroshard.cli import main
from zeroshard.cli.artefacts import RunFolder
from zeroshard.cli.trainer import Trainer
from zeroshard.comm.launch import free_port, run_processes

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
    small = ["--layers", "1", "--dim", "16", "--heads", "1", "--seq", "16", "--global-batch", "4", "--eval-bytes", "200"]
    run = ["--data", str(text), "--steps", "10", "--eval-every", "5", "--sample-bytes", "0", "--ngram-rows", "0"]
    return main(["train", *small, *run, "--ranks", "1", "--save-every", "3", "--out", str(out), *arguments])


def _rows(out) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def _scalars(out, name: str) -> dict[int, float]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "events"))
    events.Reload()
    steps = [each.step for each in events.Scalars(name)]
    assert len(steps) == len(set(steps))
    return {each.step: each.value for each in events.Scalars(name)}


def _interrupt(monkeypatch, step: int) -> None:
    """End the run in the middle of a step."""
    plain = Trainer._micro_batch

    def micro_batch(self, number, micro):
        if number == step:
            raise Interrupted
        return plain(self, number, micro)

    monkeypatch.setattr(Trainer, "_micro_batch", micro_batch)


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.slow), ("--precision", "bf16", "--save-in-background", "--log", "tensorboard")],
    ids=["fp32", "bf16-background"],
)  # in fp32: killed runs, below
def test_an_interrupted_run_goes_on_bit_for_bit(text, tmp_path, monkeypatch, capsys, options):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert _train(text, whole, *options) == 0
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        _interrupt(patch, 8)
        publish = folder.Draft.publish  # slower than two steps: the run stops while the checkpoint of step 6 is being completed
        patch.setattr(folder.Draft, "publish", lambda *args: (time.sleep(0.5), publish(*args)))
        _train(text, parted, *options)
    assert not any(thread.name == "zeroshard-save" for thread in threading.enumerate())
    assert _rows(parted)[-1]["step"] == 8  # two steps beyond the last checkpoint: they are taken again
    stopped = (
        f"zeroshard: stopped after 8 steps; the same call with --resume {os.path.relpath(parted)} goes on from step-00000006"
    )
    assert capsys.readouterr().err.count(stopped) == 1
    assert _train(text, parted, "--resume", *options) == 0
    assert "resumed from step 6, after" in (said := capsys.readouterr().out) and "step-00000006" in said.replace("\n", "")
    assert _rows(parted) == _rows(whole)
    assert (parted / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert sorted(path.name for path in (parted / "checkpoints").iterdir()) == ["latest", "step-00000009", "step-00000010"]
    assert (parted / "events").exists() == ("--log" in options)
    for name in ("loss", "grad_norm", "held_out_bits_per_byte") if "--log" in options else ():
        told = {row["step"]: pytest.approx(row[name], rel=1e-6) for row in _rows(whole) if name in row}
        assert _scalars(parted, name) == _scalars(whole, name) == told  # each step once, as in metrics.jsonl


def test_what_cannot_be_resumed_is_one_line(text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert _train(text, out) == 0
    for arguments, words in (
        (("--resume",), "the run is complete"),
        (("--resume", "--seed", "3"), "seed: was 0, is 3"),
        (("--resume", "--dim", "8"), "does not fit the model; nothing was changed. of another shape"),
        (("--resume", "--layers", "3"), "and 10 more. Give the options that the run was started with"),
        (("--resume", str(tmp_path)), "which has none"),
    ):
        capsys.readouterr()
        assert _train(text, out, *arguments) != 0
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    shutil.copytree(out, tmp_path / "damaged")
    for name in ("step-00000009", "step-00000010"):
        manifest = tmp_path / "damaged" / "checkpoints" / name / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"step":', '"stop":'))
    assert _train(text, tmp_path / "damaged", "--resume") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-00000010 out of the way, --resume takes what was saved before" in error
    monkeypatch.chdir(tmp_path)
    for manifest in (tmp_path / "damaged" / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    capsys.readouterr()
    assert _train(text, tmp_path / "damaged", "--resume") == 2, "to begin again would lose what is there"
    assert "step-00000010 lacks its manifest.json" in capsys.readouterr().err
    assert main(["train", "--resume", "--ranks", "1", "--data", str(text), "--seq", "16"]) != 0
    assert "found none" in capsys.readouterr().err
    assert _train(text, out, "--resume", "--steps", "12") == 0  # more steps: it goes on
    assert _rows(out)[-1]["step"] == 12


# -- killed at other moments -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert _train(text, out, "--eval-every", "3") == 0
    return out


def _stop(monkeypatch, owner, name: str, number: int) -> None:
    """End the run at the call of that number, from 1."""
    plain, calls = getattr(owner, name), []

    def stopping(*args, **options):
        calls.append(1)
        if len(calls) == number:
            raise Interrupted
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, stopping)


@pytest.mark.parametrize(("owner", "name", "number"), [
    (zs, "save_safetensors", 1),  # after the last checkpoint
    (RunFolder, "write_plot", 1),  # with some results written
    (Trainer, "held_out_loss", 3),  # in the look at the text after the step of a checkpoint
    (Trainer, "save", 1),  # before the first checkpoint
    (folder.Draft, "publish", 1),  # within it
    (zs, "save", 3),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_killed_at_any_moment_it_ends_as_if_never_stopped(owner, name, number, text, whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        _stop(patch, owner, name, number)
        _train(text, out, "--eval-every", "3")
    capsys.readouterr()
    assert _train(text, out, "--eval-every", "3", "--resume") == 0
    said = capsys.readouterr().out
    assert ("nothing to resume from" in said) == (name in ("save", "publish") and number == 1)
    assert ("all steps have been taken" in said) == (name in ("save_safetensors", "write_plot"))
    assert _rows(out) == _rows(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    reports = [json.loads((run / "report.json").read_text()) for run in (out, whole)]
    same = ("training_step_traffic", "held_out_bits_per_byte")
    assert [reports[0][key] for key in same] == [reports[1][key] for key in same]
    assert reports[0]["last_step"]["loss"] == reports[1]["last_step"]["loss"]
    assert _train(text, out, "--eval-every", "3", "--resume") == 2 and "the run is complete" in capsys.readouterr().err


def test_only_a_run_is_begun_again(text, tmp_path, capsys):
    """A folder whose checkpoints are gone, or that never was a run's, is not written to."""
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    assert _train(text, tmp_path / "other", "--resume") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected an unfinished run or a complete checkpoint" in said
    assert os.listdir(tmp_path / "other") == ["checkpoints"]
    out = tmp_path / "finished"
    assert _train(text, out) == 0
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").mkdir()
    rows = (out / "metrics.jsonl").read_bytes()
    assert _train(text, out, "--resume") == 2 and (out / "metrics.jsonl").read_bytes() == rows


def test_a_resume_that_is_killed_keeps_the_metrics(text, tmp_path, monkeypatch):
    """The rows are in the file under its name at every moment."""
    out = tmp_path / "run"
    assert _train(text, out) == 0
    rows = (out / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(
        os, "replace", lambda source, target: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    )
    assert _train(text, out, "--resume", "--steps", "12") == 2
    assert (out / "metrics.jsonl").read_bytes() == rows and not list(out.glob(".metrics*"))


def _rank_of(arguments: list[str], out: str, port: int, dies_at: int | None = None) -> int:
    """Be a rank of the command; with `dies_at`, get SIGKILL in that step."""
    os.environ["MASTER_PORT"] = str(port)
    plain = Trainer._micro_batch

    def micro_batch(self, number, micro):
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, number, micro)

    Trainer._micro_batch = micro_batch
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["train", *arguments, "--out", out])
    Trainer._micro_batch = plain
    return code


def _whole_and_killed(rank: int, world: int, arguments: list[str], outs: list[str], ports: list[int]) -> None:
    assert _rank_of(arguments, outs[0], ports[0]) == 0
    _rank_of(arguments, outs[1], ports[1], dies_at=50)


def _resumed(rank: int, world: int, arguments: list[str], out: str, port: int) -> int:
    return _rank_of([*arguments, "--resume"], out, port)


@pytest.mark.processes
@pytest.mark.limit(120)
def test_two_ranks_that_are_killed_go_on_bit_for_bit(text, tmp_path):
    """SIGKILL for both, between two checkpoints."""
    small = ["--layers", "1", "--dim", "16", "--heads", "1", "--seq", "16", "--global-batch", "4", "--eval-bytes", "200"]
    run = ["--data", str(text), "--sample-bytes", "0", "--ngram-rows", "0", "--threads", "1"]
    arguments = [*small, *run, "--steps", "60", "--save-every", "20", "--eval-every", "30"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    ended = run_processes(_whole_and_killed, 2, arguments, [str(whole), str(parted)], [free_port(), free_port()], check=False)
    assert {result.exitcode for result in ended} == {-signal.SIGKILL}, ended
    assert (whole / "report.json").exists() and not (parted / "model.safetensors").exists() and _rows(parted)[-1]["step"] == 50
    assert (parted / "checkpoints" / "latest").read_text() == "step-00000040\n"
    assert run_processes(_resumed, 2, arguments, str(parted), free_port()) == [0, 0]
    assert _rows(parted) == _rows(whole)
    assert (parted / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.processes
@pytest.mark.limit(120)
def test_ctrl_c_of_two_ranks_says_once_how_to_go_on(text, tmp_path):
    """The launcher gets the signal, and hands it to its ranks."""
    small = ["--layers", "1", "--dim", "16", "--heads", "1", "--seq", "16", "--global-batch", "4", "--eval-bytes", "200"]
    run = ["--data", str(text), "--ngram-rows", "0", "--threads", "1", "--steps", "1000000"]
    saves = ["--save-every", "5", "--save-in-background"]
    command = [sys.executable, "-m", "zeroshard", "train", "--ranks", "2", "--out", str(tmp_path / "run"), *small, *run, *saves]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "checkpoints" / "latest").exists():
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate()
    assert running.returncode == 128 + signal.SIGINT, said
    assert said.count("--resume") == 1 and said.count("interrupted") <= 1 and "goes on from step-" in said, said
    assert "goes on from " + (tmp_path / "run" / "checkpoints" / "latest").read_text() in said, said
