"""Every program of examples/ runs as its docstring says, on CPU ranks, and prints what the docstring promises."""

import difflib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def numbers(pattern: str, text: str) -> list[float]:
    """All numbers that a pattern with one group finds."""
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


def falls(losses: list[float], to: float) -> bool:
    return len(losses) > 1 and losses == sorted(losses, reverse=True) and losses[-1] < to


# -- of one process: ranks are threads, or there is one ------------------------------------------------------------


def check_plain_loop(text):
    first, *later = numbers(r"loss ([\d.]+)", text)  # of single batches of the README, which changes: they may rise between two
    assert first > 5 and len(later) == 3 and max(later) < 4 and later[-1] < 3.3
    assert all(0.3 < norm < 5 for norm in numbers(r"norm ([\d.]+)", text))
    assert "135,488 parameters trained" in text


def check_offload_to_disk(text):
    assert falls(numbers(r"loss ([\d.]+)", text), 2.0)
    assert "on disk: parameters 533,760, gradients 533,760, optimizer states 1,067,520" in text


def check_plan_in_python(text):
    peaks = numbers(r"peak +([\d.]+) GiB", text)
    assert len(peaks) == 4 and falls(peaks, 10)
    assert "stage 1 is the lowest that fits" in text and "optimizer states" in text


def check_resume_elsewhere(text):
    saved, loaded, trained = numbers(r"loss ([\d.]+)", text)
    assert saved == loaded > 2 * trained


def check_uneven_data(text):
    found = re.findall(r"(zs\.\w+): rank (\d) used (\d) of \d batches in (\d) steps, parameters add up to (\S+)", text)
    joined = sorted(each[1:4] for each in found if each[0] == "zs.join")
    assert joined == [("0", "2", "6"), ("1", "3", "6"), ("2", "6", "6")]
    assert sorted(each[1:4] for each in found if each[0] == "zs.stop_together") == [(rank, "2", "2") for rank in "012"]
    assert len({each[4] for each in found if each[0] == "zs.join"}) == 1


def check_averages(text):
    last, averaged, again = numbers(r"([\d.]+) by the", text)
    assert 1.0 < averaged < last == again
    assert "the average of weight, bias after 100 steps" in text


def check_muon(text):
    adamw, muon = (numbers(r"(\d\.\d+)[, ]", line) for line in text.splitlines())
    assert falls(adamw, 1.5) and falls(muon, 1.5) and adamw[0] == muon[0]
    states = numbers(r"([\d,]+) bytes of states", text)
    assert states[1] < 0.6 * states[0]


def check_experts(text):
    assert falls(numbers(r"loss ([\d.]+)", text), 0.1)
    assert re.search(r"rank 1: tokens by expert \[\d+, \d+, 0, 0\]", text)
    expert, gathered = numbers(r"([\d,]+) (?:bytes; at most|were gathered)", text)
    assert expert <= gathered < 1.1 * expert


def check_offload_between_steps(text):
    assert "away:   0 bytes on the device" in text and "the same as without a break" in text and "zs.StatesAway" in text
    before, _, after = numbers(r": +([\d,]+) bytes on the device", text)
    assert before == after > 0


def check_hsdp(text):
    over_all, in_groups = numbers(r"keeps +([\d,]+) bytes", text)
    assert 1.9 * over_all < in_groups < 2.1 * over_all
    ends = re.findall(r"loss (\S+) to (\S+)", text)
    assert ends[0] == ends[1] and falls([float(loss) for loss in ends[0]], 1.0)


def check_long_sequences(text):
    """The page shows what the program prints."""
    pages = (ROOT / "docs" / "how-to" / "long-sequences.md").read_text()
    assert f"```text\n{text}```" in pages
    assert len(set(numbers(r"loss ([\d.]+)", text))) == 1


HERE = {
    "plain_loop.py": check_plain_loop,
    "offload_to_disk.py": check_offload_to_disk,
    "plan_in_python.py": check_plan_in_python,
    "resume_elsewhere.py": check_resume_elsewhere,
    "uneven_data.py": check_uneven_data,
    "averages.py": check_averages,
    "muon.py": check_muon,
    "experts.py": check_experts,
    "offload_between_steps.py": check_offload_between_steps,
    "hsdp.py": check_hsdp,
    "long_sequences.py": check_long_sequences,
}


@pytest.mark.parametrize("program", sorted(HERE))
@pytest.mark.limit(120)
def test_example_of_one_process(program, tmp_path, monkeypatch, capsys):
    if program == "long_sequences.py":
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path)])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    HERE[program](capsys.readouterr().out)


def test_cells_of_the_notebook_print_what_they_show(capsys):
    names = {"__name__": "notebook"}
    for cell in json.loads((EXAMPLES / "first_run.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"first_run.ipynb, cell {cell['execution_count']}", "exec"), names)
            assert capsys.readouterr().out == "".join(line for output in cell["outputs"] for line in output["text"])


# -- of processes of their own -------------------------------------------------------------------------------------

RUNS = {  # program: (what has to be installed, how it is started, what its last line says)
    "export_to_hugging_face.py": (("transformers",), (), "parameters read from"),
    "lora.py": (("peft",), (), "tensors saved"),
    "deepspeed_script.py": ((), ("-m", "zeroshard.deepspeed"), "15 steps"),
    "transformers_trainer.py": (("transformers", "accelerate"), ("-m", "zeroshard.deepspeed"), "model.safetensors"),
    "accelerate_loop.py": (("accelerate",), ("-m", "zeroshard.deepspeed"), "whole tensors, by DeepSpeedEngine"),
    "trl_sft.py": (("trl", "datasets"), ("-m", "zeroshard.deepspeed"), "model.safetensors"),
    "trl_dpo.py": (("trl", "datasets"), ("-m", "zeroshard.deepspeed"), "rewards/accuracies 1.00"),
    "three_axes.py": (("transformers",), ("-m", "torch.distributed.run", "--nproc-per-node", "1"), "sent by this rank"),
    "expert_parallel.py": (("transformers",), ("-m", "torch.distributed.run", "--nproc-per-node", "2"), "sent along ep per step"),
}
ELSEWHERE = {"lightning_strategy.py", "fine_tune.py"}  # in tests/integrations/test_lightning.py: it starts two ranks; below
INTO_A_FOLDER = {"export_to_hugging_face.py", "lora.py", "transformers_trainer.py", "trl_sft.py", "trl_dpo.py"}

# what they do is done in tests/integrations, tests/checkpoint and tests/parallel as well
SLOW = {
    "transformers_trainer.py", "accelerate_loop.py", "lora.py", "three_axes.py", "expert_parallel.py", "export_to_hugging_face.py",
}  # fmt: skip


def started(command: list[str], folder: Path, **variables: str) -> str:
    """What a program prints that must end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment | variables, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("program", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in sorted(RUNS)])
@pytest.mark.limit(120)
def test_example_of_another_tool(program, tmp_path):
    needed, start, says = RUNS[program]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")  # ./test installs all but trl, which test_trl explains
    more = [str(tmp_path)] if program in INTO_A_FOLDER else ["--mesh", "1,1,1", "--steps", "5"] if "axes" in program else []
    text = started([sys.executable, *start, str(EXAMPLES / program), *more], tmp_path)
    assert says in text.strip().split("\n")[-1], text


@pytest.mark.slow  # four processes; what crosses between nodes is counted in tests/comm/mesh
@pytest.mark.limit(120)
def test_zero_plus_plus_sends_a_quarter_between_its_two_nodes(tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    text = started([*start, str(EXAMPLES / "zero_plus_plus.py")], tmp_path)
    sent = numbers(r"sends +([\d,]+) bytes", text)
    assert falls(sent, 0.3 * sent[0]) and len(sent) == 4
    assert all(float(last) < 1 < float(first) for first, last in re.findall(r"loss (\S+) to (\S+)", text))


@pytest.mark.limit(180)
def test_a_program_of_ddp_and_the_same_with_zeroshard(tmp_path):
    """They print the same numbers, also where a run goes on from a checkpoint of the other; the page shows what differs."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

    def run(name: str, folder: str, steps: int) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        program = str(EXAMPLES / f"ddp_{name}.py")
        return started([*start, program, folder, "--steps", str(steps)], tmp_path).splitlines()

    expected = run("before", "theirs", 10)
    assert len(expected) == 3 and expected == [*run("before", "ours", 5)[:1], *run("after", "ours", 10)]
    texts = [(EXAMPLES / f"ddp_{name}.py").read_text().split('"""\n', 1)[1].splitlines() for name in ("before", "after")]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]
    shown = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    assert f"```diff\n{shown}\n```" in (ROOT / "docs" / "how-to" / "from-ddp.md").read_text()


@pytest.mark.slow  # two processes; files of weights are read in tests/checkpoint as well
@pytest.mark.limit(240)
def test_a_fine_tuning_begins_with_the_weights_of_the_file_and_writes_what_it_has_learned(tmp_path):
    transformers = pytest.importorskip("transformers")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    text = started([*start, str(EXAMPLES / "fine_tune.py"), "--steps", "10", "--out", str(tmp_path)], tmp_path)
    assert falls(numbers(r"([\d.]+) (?:nats a token before|after)", text), 3.5) and "stage 3, rank 0 of 2" in text
    told = json.loads((tmp_path / "losses.json").read_text())
    assert len(told["losses"]) == 10 and (tmp_path / "curve.png").exists()
    program = runpy.run_path(str(EXAMPLES / "fine_tune.py"))
    _, held_out = program["read"](None, transformers.AutoTokenizer.from_pretrained(tmp_path / "made"))
    for folder, loss in zip(("made", "tuned"), told["held_out"], strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        parts = [program["windows"](held_out, rows=16, seq=64, seed=seed) for seed in range(8)]
        with torch.no_grad():
            whole = [model(input_ids=part, labels=part).loss.item() for part in parts]
        assert abs(sum(whole) / 8 - loss) < 1e-4


@pytest.mark.limit(120)
def test_the_slurm_script_starts_a_program(tmp_path):
    """With a scontrol that names this host and an srun that runs the command here, as on a node of a job."""
    for name, body in (("scontrol", "echo localhost"), ("srun", '[ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_NODELIST": "node[1-1]", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid())}
    check_plain_loop(started(["bash", str(EXAMPLES / "slurm.sh")], ROOT, PATH=path, **job))


# -- the gallery ---------------------------------------------------------------------------------------------------


def test_every_example_is_in_the_gallery_and_is_run():
    gallery = (EXAMPLES / "README.md").read_text()
    programs = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"\]\(([\w.]+)\)", gallery)) == programs
    assert programs == {
        *HERE,
        *RUNS,
        *ELSEWHERE,
        "zero_plus_plus.py",
        "ddp_before.py",
        "ddp_after.py",
        "slurm.sh",
        "ds_config.json",
        "first_run.ipynb",
    }
