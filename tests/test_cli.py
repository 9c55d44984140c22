"""The command: a run of two real ranks leaves all its results; a mistake is one line that names option and remedy."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from zeroshard.cli import main
from zeroshard.cli.options import TrainOptions, parse_train

from zeroshard.models import GPT, GPTConfig

SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--seq", "32", "--batch", "8", "--eval-bytes", "600"]

@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"{i}: the cat sat on the mat, and the dog ate the hat. " * 20)
    return folder

def _run(*arguments: str, limit_s: float = 90) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zeroshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)

@pytest.mark.processes
def test_two_ranks_train_and_leave_all_results(text, tmp_path):
    out = tmp_path / "run"
    call = ["train", "--ranks", "2", "--data", str(text), "--steps", "60", "--eval-every", "30", "--out", str(out)]
    done = _run(*call, *SMALL, "--sample-bytes", "20", "--lr", "0.01")
    assert done.returncode == 0, done.stderr
    names = ["config.json", "metrics.jsonl", "model.safetensors", "plot.png", "report.json", "sample.txt"]
    assert sorted(path.name for path in out.iterdir()) == names
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    looks = [row["held_out_bits_per_byte"] for row in rows if "held_out_bits_per_byte" in row]
    assert len(looks) == 3 and looks[-1] < 0.7 * looks[0]
    report = json.loads((out / "report.json").read_text())
    assert (report["stage"], report["world_size"]) == (3, 2)
    assert report["at_rest"] == pytest.approx(report["formula"], rel=0.02)
    for word in ("zlib", "plain DDP", "theory", "tokens/s" if "left" in done.stdout else "held-out"):
        assert word in done.stdout
    assert "Error" not in done.stderr
    _check_saved_model(out, looks[-1], text)

def _check_saved_model(out, held_out_bits, text):
    """The saved file is the trained model: plain PyTorch gets the same held-out loss from it."""
    from zeroshard.cli.ranks import Ranks
    from zeroshard.cli.trainer import Trainer
    from zeroshard.data import read_corpus

    config = json.loads((out / "config.json").read_text())
    model = GPT(GPTConfig(**config["model"]))
    model.load_state_dict(load_file(out / "model.safetensors"))
    trainer = Trainer.__new__(Trainer)  # only what held_out_loss() reads, without sharding
    trainer.options = TrainOptions(**config["training"])
    trainer.ranks, trainer.model = Ranks(0, 1, torch.device("cpu")), model
    trainer.held_out = read_corpus(text, held_out_nbytes=600).held_out[:600]
    assert trainer.held_out_loss() == pytest.approx(held_out_bits, rel=1e-4)

@pytest.mark.processes
def test_one_rank_and_two_train_the_same_model(text, tmp_path):
    losses = []
    for ranks, stage in ((1, 0), (2, 2)):
        out = tmp_path / f"run{ranks}"
        call = ["train", "--ranks", str(ranks), "--stage", str(stage), "--data", str(text), "--steps", "5", "--out", str(out)]
        done = _run(*call, *SMALL, "--sample-bytes", "0", "--accumulate", str(2 // ranks))
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line).get("loss") for line in (out / "metrics.jsonl").read_text().splitlines()])
    steps = [[loss for loss in run if loss is not None] for run in losses]
    assert len(steps[0]) == 5
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)

@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tarin"], ["'tarin'", "did you mean train?"]),
        (["train", "--stagee", "3"], ["--stagee", "did you mean --stage?"]),
        (["train", "--stage", "4"], ["--stage", "4"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--steps", "0"], ["--steps", "positive", "got 0"]),
        (["train", "--ranks", "3", "--batch", "8"], ["ranks x accumulate = 3 x 1 = 3", "got 8", "--batch 9"]),
        (["train", "--dim", "100", "--heads", "3"], ["--heads", "divisor of dim=100", "got 3"]),
        (["train", "--ranks", "1", "--data", "/no/such/place"], ["--data", "/no/such/place", "does not exist"]),
        (["train", "--ranks", "1", "--data", __file__, "--seq", "100000"], ["--data", "smaller --seq"]),
        (["train", "--precision", "fp8"], ["--precision", "fp8", "bf16"]),
        (["train", "--ranks", "1", "--device", "cuda"], ["--device cuda", "GPU per rank"]),
        (["train", "--ranks", "1", "--out", __file__], ["--out", "expected a folder"]),
    ],
)
def test_a_mistake_is_one_line_with_option_and_remedy(arguments, words, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("zeroshard: error: ") and captured.err.count("\n") == 1
    assert captured.out == ""
    for word in words:
        assert word in captured.err

@pytest.mark.processes
def test_an_error_on_all_ranks_is_printed_once_and_ends_all(tmp_path):
    done = _run("train", "--ranks", "2", "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("expected text files below") == 1
    assert "Traceback" not in done.stderr

def test_a_half_set_environment_is_an_error_not_a_run_alone(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "MASTER_ADDR" in capsys.readouterr().err

def test_help_and_version(capsys):
    assert main(["--help"]) == 0 and main(["--version"]) == 0 and main([]) == 2
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--max-grad-norm" in capsys.readouterr().out

def test_options_have_presets_that_can_be_overridden():
    config = parse_train(["--size", "small", "--layers", "3"]).model_config()
    assert (config.layers, config.dim, config.vocab_size) == (3, 384, 256)

def test_the_benchmark_model_has_34_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=8192, seq_len=128, dim=512, layers=8, heads=8))
    assert 33e6 < sum(parameter.numel() for parameter in model.parameters()) < 35e6

