"""The command: a run of two real ranks leaves all its results; a mistake is one line that names option and remedy."""

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import zeroshard as zs
from zeroshard.cli import main
from zeroshard.cli.options import TrainOptions, parse_train
from zeroshard.cli.ranks import Ranks
from zeroshard.cli.trainer import Trainer
from zeroshard.config import PRESETS
from zeroshard.data.text import read_corpus
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.tiers import rehearsal


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i}: the cat sat on the mat, and the dog ate the hat. " * 20)
    return folder


def _zeroshard(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zeroshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _train(text, out, *arguments: str) -> list[str]:
    small = ["--layers", "2", "--dim", "32", "--heads", "2", "--seq", "32", "--global-batch", "8", "--eval-bytes", "600"]
    run = ["--data", str(text), "--steps", "60", "--eval-every", "30", "--lr", "0.01", "--sample-bytes", "20"]
    return ["train", *small, *run, "--ngram-rows", "64", "--out", str(out), *arguments]


def _rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(text, tmp_path_factory):
    """The folder of a run of two real ranks at stage 3, and what it printed."""
    out = tmp_path_factory.mktemp("two") / "run"
    done = _zeroshard(*_train(text, out, "--ranks", "2"))
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return out, done.stdout


@pytest.mark.processes
def test_two_ranks_train_and_leave_all_results(two_ranks):
    out, printed = two_ranks
    names = ["config.json", "metrics.jsonl", "model.safetensors", "plot.png", "report.json", "sample.txt"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [row["step"] for row in _rows(out) if "loss" in row] == list(range(1, 61))
    looks = [row["held_out_bits_per_byte"] for row in _rows(out) if "held_out_bits_per_byte" in row]
    assert len(looks) == 3 and looks[-1] < 0.7 * looks[0]
    for word in ("stage 3", "zlib", "plain DDP", "one step, theory", "a sample of the model", str(out)):
        assert word in printed.replace("\n", "")


@pytest.mark.processes
def test_the_report_agrees_with_the_formulas(two_ranks):
    report = json.loads((two_ranks[0] / "report.json").read_text())
    assert (report["stage"], report["world_size"]) == (3, 2)
    assert report["at_rest"] == pytest.approx(report["formula"], rel=0.02)  # padding
    assert sum(report["at_rest"].values()) == pytest.approx(sum(report["ddp"].values()) / 2, rel=0.02)
    sent = sum(nbytes for _, nbytes in report["training_step_traffic"].values())
    assert sent == pytest.approx(report["theory_nbytes_per_step"], rel=0.02)


@pytest.mark.processes
def test_the_saved_model_is_the_trained_one_to_plain_pytorch(two_ranks, text):
    out, _ = two_ranks
    config = json.loads((out / "config.json").read_text())
    model = GPT(GPTConfig(**config["model"]))
    model.load_state_dict(load_file(out / "model.safetensors"))
    trainer = Trainer.__new__(Trainer)  # only what held_out_loss() reads, without sharding
    trainer.options, trainer.model = TrainOptions(**config["training"]), model
    trainer.ranks = Ranks(0, 1, torch.device("cpu"))
    trainer.held_out = read_corpus(text, held_out_nbytes=600).held_out[:600]
    last = [row["held_out_bits_per_byte"] for row in _rows(out) if "held_out_bits_per_byte" in row][-1]
    assert trainer.held_out_loss() == pytest.approx(last, rel=1e-4)


@pytest.mark.processes
def test_one_rank_with_two_micro_batches_trains_the_same_model(two_ranks, text, tmp_path):
    assert main(_train(text, tmp_path, "--ranks", "1", "--stage", "0", "--accumulate", "2", "--threads", "1")) == 0
    losses = [[row["loss"] for row in _rows(out) if "loss" in row] for out in (tmp_path, two_ranks[0])]
    assert losses[0][:20] == pytest.approx(losses[1][:20], rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tarin"], ["'tarin'", "did you mean train?"]),
        (["train", "--stagee", "3"], ["--stagee", "did you mean --stage?"]),
        (["train", "--stage", "4"], ["--stage", "4"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--steps", "0"], ["--steps", "positive", "got 0"]),
        (["train", "--ranks", "3", "--global-batch", "8"], ["ranks x accumulate = 3 x 1 = 3", "got 8", "--global-batch 9"]),
        (["train", "--dim", "100", "--heads", "3"], ["--heads", "divisor of dim=100", "got 3"]),
        (["train", "--ranks", "1", "--data", "/no/such/place"], ["--data", "/no/such/place", "does not exist"]),
        (["train", "--ranks", "1", "--data", __file__, "--seq", "100000"], ["--data", "smaller --seq"]),
        (["train", "--precision", "fp8"], ["--precision", "fp8", "bf16"]),
        (["train", "--ranks", "1", "--device", "cuda"], ["--device cuda", "GPU per rank"]),
        (["train", "--ranks", "2", "--device", "cuda"], ["--device cuda", "got 0 for 2 ranks; use fewer --ranks"]),
        (["train", "--ranks", "1", "--out", __file__], ["--out", "expected a folder"]),
        (["train", "--stage", "2", "--offload-param", "nvme"], ["offload_param='nvme' needs stage 3", "Raise the stage"]),
        (["train", "--delayed-update", "5"], ["delayed_update needs offload_optimizer"]),
        (["train", "--offload-optimizer", "disk"], ["--offload-optimizer", "'disk'", "nvme"]),
        (["train", "--offload-optimizer", "cpu", "--buffer-count", "1"], ["buffer_count of at least 2", "got 1"]),
        (["train", "--offload-optimizer", "cpu", "--offload-path", "x"], ["--offload-path", "only with nvme", "got x"]),
        (["train", "--offload-ratio", "0.5"], ["--offload-ratio", "only with --offload-optimizer", "got 0.5"]),
        (["train", "--buffer-mib", "8"], ["--buffer-mib", "only with an --offload option"]),
        (["train", "--tile-max-bytes", "0"], ["--tile-max-bytes", "positive"]),
        (["train", "--preset", "zero3"], ["--preset", "zero3", "zero-3"]),
        (["train", "--preset", "zero-2", "--offload-param", "cpu"], ["offload_param='cpu' needs stage 3"]),
        (["train", "--no-pin-memory"], ["--no-pin-memory", "only with an --offload option"]),
    ],
)
def test_a_mistake_is_one_line_with_option_and_remedy(arguments, words, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU, so asking for one is no mistake")  # and the call would train; all other mistakes remain
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("zeroshard: error: ") and captured.err.count("\n") == 1
    assert captured.out == ""
    for word in words:
        assert word in captured.err


def test_a_log_whose_package_is_missing_is_one_line(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else found(name, *rest))
    assert main(["train", "--log", "tensorboard"]) == 2
    said = "zeroshard: error: --log: tensorboard is not installed: pip install tensorboard, or leave --log out\n"
    assert capsys.readouterr().err == said


def test_a_folder_that_cannot_serve_is_one_line(text, tmp_path, capsys):
    missing = ["--ranks", "1", "--offload-optimizer", "nvme", "--offload-path", str(tmp_path / "none")]
    assert main(_train(text, tmp_path / "run", *missing)) == 2
    *_, error = capsys.readouterr().err.splitlines()  # before it may stand, once a process, that there is no process group
    assert error.startswith("zeroshard: error: ") and "does not exist; create it on a local disk" in error


FAR = "--offload-optimizer nvme --offload-gradient nvme --offload-param nvme --offload-activations nvme".split()


def test_what_rests_on_disk_trains_and_saves_the_same_bits(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--ranks", "1", "--threads", "1", "--steps", "4", "--sample-bytes", "0"]
    assert main([*_train(text, "near"), *short]) == 0
    printed = capsys.readouterr().out
    assert "forecast" not in printed and "Where they rest" not in printed and "Moved" not in printed
    assert main([*_train(text, "far"), *short, *FAR, "--prefetch-bucket-size", "0"]) == 0
    printed = capsys.readouterr().out
    for words in ("forecast: measured on each rank: disk", "bound by", "one step: predicted", "Where they rest", "Moved between"):
        assert words in printed
    near, far = (load_file(tmp_path / run / "model.safetensors") for run in ("near", "far"))
    assert near.keys() == far.keys()
    assert all(torch.equal(value, far[name]) for name, value in near.items())
    assert [row["loss"] for row in _rows(tmp_path / "far") if "loss" in row] == [
        row["loss"] for row in _rows(tmp_path / "near") if "loss" in row
    ]
    report = json.loads((tmp_path / "far" / "report.json").read_text())
    assert sum(report["elsewhere"]["disk"].values()) == sum(report["at_rest"].values())
    assert report["training_step_moved"] == report["theory_moved_per_step"]
    assert report["forecast"]["step_seconds"] > 0 and report["activations"]["peak"]["disk"] > 0
    assert list((tmp_path / "runs").iterdir()) == []  # what was on disk is gone


def test_tiles_and_a_late_update_train_too(text, tmp_path):
    options = ["--ranks", "1", "--threads", "1", "--steps", "4", "--sample-bytes", "0", "--precision", "bf16"]
    options += ["--offload-optimizer", "cpu", "--offload-ratio", "0.5", "--delayed-update", "2", "--tile-max-bytes", "2048"]
    options += ["--offload-param", "cpu", "--max-live-parameters", "100000", "--checkpoint-activations"]
    assert main([*_train(text, tmp_path), *options]) == 0
    model = GPT(GPTConfig(**json.loads((tmp_path / "config.json").read_text())["model"]))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.processes
def test_an_error_on_all_ranks_is_printed_once_and_ends_all(tmp_path, capfd):
    assert main(["train", "--ranks", "2", "--data", str(tmp_path)]) == 2  # it starts the ranks
    said = capfd.readouterr().err
    assert said.count("expected text files below") == 1
    assert "Traceback" not in said


def test_a_half_set_environment_is_an_error_not_a_run_alone(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "MASTER_ADDR" in capsys.readouterr().err


def test_help_and_version(capsys):
    assert main(["--help"]) == 0 and main(["--version"]) == 0 and main([]) == 2
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--max-grad-norm" in capsys.readouterr().out


def test_who_reads_only_the_beginning_is_no_error():
    command = f"{sys.executable} -m zeroshard plan quickstart --ranks 2 --json -q | head -c 0; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.stdout.split() == [str(128 + 13)] and not found.stderr  # as of a program that SIGPIPE has ended


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_of_the_library_have_the_same_names(name):
    expected = zs.Config.preset(name, **({"offload_path": "runs"} if name == "zero-infinity" else {}))
    config = parse_train(["--preset", name]).sharding()
    states = ("offload_optimizer", "offload_gradient", "offload_param")
    assert config.stage == expected.stage
    assert [getattr(config, state).device for state in states] == [getattr(expected, state).device for state in states]
    options = parse_train(["--stage", "3", "--preset", "zero-offload", "--no-pin-memory"])
    assert (options.stage, options.offload_optimizer, options.sharding().offload_optimizer.pin_memory) == (3, "cpu", False)
    assert TrainOptions(**dataclasses.asdict(options)) == options


def test_activations_alone_have_a_forecast(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "_PROBE_S", 0.02)
    monkeypatch.setattr(rehearsal, "_NUMEL", 1 << 16)
    short = ["--ranks", "1", "--threads", "1", "--steps", "2", "--eval-every", "2", "--sample-bytes", "0"]
    assert main([*_train(text, tmp_path / "run"), *short, "--offload-activations", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "forecast: measured on each rank: host step" in printed and "one step: predicted" in printed


def test_options_have_presets_that_can_be_overridden():
    config = parse_train(["--size", "small", "--layers", "3"]).model_config()
    assert (config.layers, config.dim, config.vocab_size) == (3, 384, 256)


def test_precision_is_bf16_on_gpus_and_fp32_on_cpus_where_none_is_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for arguments, precision in (
        (["--ranks", "2"], "bf16"),
        (["--mesh", "dp=2"], "bf16"),
        (["--ranks", "3"], "fp32"),  # no GPU for each: the ranks compute on CPUs
        (["--ranks", "2", "--device", "cpu"], "fp32"),
        (["--ranks", "2", "--precision", "fp32"], "fp32"),
    ):
        assert parse_train(arguments).precision == precision
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert parse_train([]).precision == "fp32"


def test_quiet_and_verbose_change_what_training_prints(text, tmp_path, capsys):
    short = ["--ranks", "1", "--threads", "1", "--steps", "3", "--sample-bytes", "0"]
    assert main([*_train(text, tmp_path / "q"), *short, "-q"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and f"after 3 steps; results in {tmp_path}/q/" in printed
    assert main([*_train(text, tmp_path / "v"), *short, "-v"]) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1", "2", "3"]


def test_the_last_line_says_what_was_lost_to_the_time_limit(text, tmp_path, capsys):
    assert main([*_train(text, tmp_path / "run"), "--ranks", "1", "--steps", "100000", "--time-limit", "0.5", "-q"]) == 0
    told = r"after (\S+) of 100,000 steps \(the others were lost to --time-limit 0\.5: all take (\S+) s\); results in "
    taken, needed = (int(each.replace(",", "")) for each in re.search(told, capsys.readouterr().out).groups())
    last = json.loads((tmp_path / "run" / "report.json").read_text())["last_step"]
    assert taken == last["step"] and needed == math.ceil(100_000 * last["seconds"] / taken)


def test_the_benchmark_model_has_34_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=8192, seq_len=128, dim=512, layers=8, heads=8))
    assert 33e6 < sum(parameter.numel() for parameter in model.parameters()) < 35e6
