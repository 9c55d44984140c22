"""`zeroshard doctor`: what it sees is so, what would go wrong is named with its remedy; commands without extras."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import OddGPT, adamw, seeded

import zeroshard as zs
from zeroshard.cli import COMMANDS, environment, main
from zeroshard.cli.arguments import EXTRAS
from zeroshard.cli.environment import NOTE, PROBLEM, WARNING, DeepSpeed, Disk, Environment, Gpu, Host, facts_of, findings
from zeroshard.cli.sheets import show
from zeroshard.testing import run_threads
from zeroshard.utils.sheets import Sheet
from zeroshard.utils.version import TESTED_TORCH

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HOST = Host(8, 8, 64 << 30, {"RAM": 32 << 30}, None, True, 8 << 30, 8 << 30)
DISK = Disk("current folder", "/work", "ext4", 100 << 30, True, None)
GPU = Gpu("H100", 80 << 30, "9.0", None)
HEALTHY = Environment(
    python="3.11.7", executable="python", platform="Linux", zeroshard="0.1.0", torch="2.13.0+cu130", build="CUDA 13.0",
    backends={"gloo": True, "nccl": True, "mpi": False}, gpus=[GPU], driver="580.1", host=HOST, disks=[DISK],
    packages={"rich": "15", "matplotlib": "3"}, deepspeed=DeepSpeed("nothing"), compiler="/usr/bin/c++",
    trials={"gloo": None, "a step of two ranks": None},
)  # fmt: skip


def but(**changes):
    return dataclasses.replace(HEALTHY, **changes)


def on_host(**changes):
    return but(host=dataclasses.replace(HOST, **changes))


def on_disk(**changes):
    return but(disks=[dataclasses.replace(DISK, **changes)])


def test_nothing_goes_wrong_in_a_healthy_environment():
    assert list(findings(HEALTHY)) == []


WRONG = {
    "old torch": (but(torch="2.9.1"), PROBLEM, "older than 2.11", "pip install 'torch>=2.11'"),
    "a torch of tomorrow": (but(torch="2.99.0"), NOTE, "2.14.1 (2026-11-25)", "pip install torch=="),
    "no step": (but(trials={"a step of two ranks": "OSError: x"}), PROBLEM, "OSError: x", "--force-reinstall"),
    "gloo, with GPUs": (but(trials={"gloo": "unresolved"}), WARNING, "unresolved", "GLOO_SOCKET_IFNAME"),
    "gloo alone": (but(trials={"gloo": "unresolved"}, gpus=[], driver=None), PROBLEM, "unresolved", "/etc/hosts"),
    "no backend": (but(backends=dict.fromkeys(("gloo", "nccl"), False)), WARNING, "no backend", "gloo"),
    "half a launcher": (but(variables={"RANK": "0"}), PROBLEM, "MASTER_ADDR", "torchrun"),
    "a GPU too new": (but(gpus=[dataclasses.replace(GPU, problem="no kernel image")]), PROBLEM, "no kernel image", "9.0"),
    "no nccl": (but(backends={"gloo": True, "nccl": False}), WARNING, "nccl", "nccl"),
    "CPU build beside a driver": (but(gpus=[], build="CPU"), WARNING, "built without CUDA", "CUDA build"),
    "driver without a GPU": (but(gpus=[]), WARNING, "finds no GPU", "nvidia-smi"),
    "locked memory": (on_host(locked_nbytes=8 << 20), NOTE, "8192 KiB", "ulimit -l"),
    "little memory": (on_host(memory_left={"cgroup /x": 1 << 30}), WARNING, "cgroup /x", "raise the limit"),
    "a container's /dev/shm": (on_host(shared_memory_nbytes=64 << 20), WARNING, "/dev/shm has 0.1 GB", "--shm-size"),
    "no memfd": (on_host(memfd=False), NOTE, "memfd_create", "Linux"),
    "no folder": (on_disk(problem="PermissionError"), WARNING, "PermissionError", "that you can write"),
    "memory as a disk": (on_disk(filesystem="tmpfs"), WARNING, "which is memory", "offload_path"),
    "a network as a disk": (on_disk(filesystem="nfs4"), NOTE, "a network", "offload_path"),
    "no direct I/O": (on_disk(direct=False, filesystem="zfs"), WARNING, "no direct I/O", "ext4"),
    "a full disk": (on_disk(free_nbytes=1 << 30), WARNING, "1.1 GB free", "free some"),
    "no extras": (but(packages={"rich": "15"}), NOTE, "matplotlib (pictures)", "pip install -e '.[cli]'"),
    "no deepspeed": (but(packages={**HEALTHY.packages, "lightning": "2.6"}), NOTE, "lightning", "zeroshard.deepspeed"),
    "the real deepspeed": (but(deepspeed=DeepSpeed("deepspeed")), NOTE, "the real one", "zeroshard.deepspeed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_go_wrong_is_named_with_its_remedy(name):
    here, level, what, remedy = WRONG[name]
    (found,) = findings(here)
    assert found.level == level and what in found.what and remedy in found.remedy


def test_the_release_of_torch_is_said_to_be_tested_or_not():
    told = {release: dict(facts_of(but(torch=release)))["torch"] for release in ("2.13.0+cu130", "2.99.0")}
    assert told == {
        "2.13.0+cu130": f"2.13.0+cu130, built for CUDA 13.0; zeroshard's tests passed with it on {TESTED_TORCH['2.13.0']}",
        "2.99.0": "2.99.0, built for CUDA 13.0; zeroshard was not tested with it",
    }


def test_the_readme_names_the_tested_releases_and_the_requirements_pin_one_of_them():
    root = Path(__file__).parents[2]
    status = next(line for line in (root / "README.md").read_text().splitlines() if line.startswith("| torch |"))
    assert all(release in status for release in TESTED_TORCH) and min(TESTED_TORCH.values()) in status
    pinned = [line for line in (root / "requirements/torch.txt").read_text().splitlines() if not line.startswith("#")]
    assert pinned[0].removeprefix("torch==") in TESTED_TORCH


def test_without_a_compiler_deepspeed_is_a_warning():
    levels = [found.level for found in findings(but(compiler=None, deepspeed=DeepSpeed("deepspeed")))]
    assert levels == [WARNING, NOTE]


def test_a_hidden_gpu_is_nobodys_fault():
    assert list(findings(but(gpus=[], variables={"CUDA_VISIBLE_DEVICES": ""}))) == []


def test_what_it_sees_here_is_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    assert "initial values" not in said.err  # its two ranks begin with the same weights
    told = json.loads(said.out)
    here = told["environment"]
    assert told["can_train"] and here["trials"] == {"a step of two ranks": None, "gloo": None}
    assert (here["torch"], len(here["gpus"])) == (torch.__version__, torch.cuda.device_count())
    assert here["disks"][1]["path"] == str(tmp_path) and here["disks"][1]["problem"] is None
    assert 0 < here["host"]["cores"] <= here["host"]["machine_cores"]
    assert os.listdir(tmp_path) == []


def test_a_problem_is_the_exit_code_and_one_screen_shows_it(monkeypatch, capsys):
    monkeypatch.setattr("zeroshard.cli.environment.look", lambda: but(torch="2.9.1"))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "older than 2.11" in printed and "prevents training" in printed
    assert printed.count("\n") < 50


@pytest.mark.parametrize(
    ("place", "resolves_to"), [(None, "nothing"), ("site", "deepspeed"), ("integrations/deepspeed/site", "zeroshard")]
)
def test_what_deepspeed_resolves_to(place, resolves_to, tmp_path, monkeypatch):
    base = Path(zs.__file__).parent if place != "site" else tmp_path
    spec = importlib.util.spec_from_file_location("deepspeed", base / place / "deepspeed/__init__.py") if place else None
    monkeypatch.setattr(environment.util, "find_spec", lambda name: spec)
    assert environment._deepspeed().resolves_to == resolves_to


def test_a_trial_that_fails_is_one_line():
    def fails():
        raise OSError("first\nsecond")

    assert environment._problem(fails) == "OSError: first"


def test_a_driver_that_cannot_be_read_is_no_driver(monkeypatch):
    def read_text(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", read_text)
    for name, found in (("run_threads", None), ("_gloo", None), ("_host", HOST), ("_disk", DISK), ("filesystem_of", "")):
        monkeypatch.setattr(environment, name, lambda *_, found=found, **__: found)
    monkeypatch.setattr(environment.metadata, "version", lambda name: "1")
    assert environment.look().driver is None


# -- commands where only torch and what comes with it is installed ---------------------------------------------------


class _Absent:
    """A finder for which some libraries are not installed."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def bare(monkeypatch):
    """The command, imported anew after `pip install -e .` alone: no optional library is there."""
    absent, before = ("rich", "rich_argparse", "matplotlib", "shtab"), dict(sys.modules)
    for name in list(sys.modules):
        if name.split(".")[0] in absent or name.startswith(("zeroshard.cli", "benchmarks")):
            del sys.modules[name]
    monkeypatch.setitem(sys.modules, "transformers", None)  # its modules, once imported, do not bear to be imported again
    monkeypatch.setattr(sys, "meta_path", [_Absent(absent), *sys.meta_path])
    import zeroshard.cli

    yield zeroshard.cli.main
    for name in [name for name in sys.modules if name.startswith(("zeroshard.cli", "benchmarks"))]:
        del sys.modules[name]
    sys.modules.update(before)
    zs.cli, zs.bench = before.get("zeroshard.cli"), before.get("benchmarks")


def _save(rank, root):
    model = seeded(OddGPT)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
    zs.save(root, model, optimizer)


def test_inspect_and_export_need_no_extra(bare, tmp_path, capsys):
    run_threads(2, _save, tmp_path / "run")
    assert bare(["inspect", str(tmp_path / "run")]) == 0
    assert "optimizer states" in capsys.readouterr().out
    assert bare(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert "model.safetensors" in capsys.readouterr().out


def test_the_doctor_needs_no_extra(bare, capsys):
    assert bare(["doctor"]) == 0
    assert "can train" in capsys.readouterr().out


def test_help_of_every_command_needs_no_extra(bare, capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            bare([name, "--help"])
        assert ended.value.code == 0 and "--quiet" in capsys.readouterr().out


def test_training_needs_no_extra_and_a_picture_that_cannot_be_drawn_is_a_line(bare, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, and the dog ate the hat. " * 200)
    small = "--ranks 1 --steps 2 --layers 1 --dim 16 --heads 1 --seq 16 --ngram-rows 8 --eval-bytes 200 --sample-bytes 4".split()
    assert bare(["train", *small, "--threads", "1", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    line = f"{tmp_path}/run/plot.png is not drawn: matplotlib is not installed; install it with: pip install -e '.[cli]'"
    assert line in said.err.splitlines()
    for words in ("stage 3", "Held-out text", "Memory of model states per rank", "results in"):
        assert words in said.out
    assert (tmp_path / "run" / "report.json").exists() and not (tmp_path / "run" / "plot.png").exists()


def test_plans_and_papers_write_everything_but_their_pictures(bare, tmp_path, capsys):
    assert bare(["plan", "quickstart", "--ranks", "2", "--seq", "64", "--out", str(tmp_path / "plan"), "-q"]) == 0
    assert (tmp_path / "plan" / "report.json").exists() and (tmp_path / "plan" / "plan.html").exists()
    assert bare(["papers", "zero-fig6", "--out", str(tmp_path / "papers"), "-q"]) == 0
    said = capsys.readouterr()
    assert "zero-fig6.csv" in said.out and ".png" not in said.out
    assert said.err.count("is not drawn: matplotlib is not installed") == 3


@pytest.mark.parametrize(
    ("arguments", "library"),
    [(["completion", "bash"], "shtab"), (["plan", "llama-3-8b"], "transformers")],
)
def test_a_command_that_needs_an_extra_says_which_in_one_line(bare, arguments, library, capsys):
    assert bare(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and library in said and "pip install -e '.[cli]'" in said


@pytest.mark.parametrize("columns", [60, 100])
def test_the_doctor_keeps_to_the_width_of_the_terminal(bare, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert bare(["doctor"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


@pytest.mark.parametrize("columns", [60, 100])
def test_tables_in_frames_keep_to_the_width_of_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    show(Sheet("", ("name", "value"), [("a fact", "/a/long/path" * 20), ("another", "words and words " * 20)]))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


def test_a_file_has_no_colours(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(Sheet("a title", ("name", "goal"), [("one", "met")], notes=[("a note", "bold red")]))
    assert "met" in (printed := capsys.readouterr().out) and "\x1b" not in printed


def test_json_of_the_doctor_is_a_screen(capsys):
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 100 and json.loads(text)["can_train"] is True


def test_every_extra_that_a_message_names_is_there():
    """In pyproject.toml, with the library; and what the environment of ./quickstart and ./test installs is pinned."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = {
        extra: [each.partition(">=")[0] for each in libraries] for extra, libraries in project["optional-dependencies"].items()
    }
    for library, extra in EXTRAS.items():
        assert library.replace("_", "-") in extras[extra]
    pinned = {line.split("==")[0] for name in ("cli", "docs", "test") for line in (root / "requirements" / f"{name}.txt").open()}
    assert set(extras["cli"]) <= pinned
