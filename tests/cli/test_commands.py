"""All commands together: help, flags, exit codes, completion, spellings of other programs, and docs/commands.md, whose examples run."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.cli import COMMANDS, command_of, main
from zeroshard.cli.arguments import MEANINGS, ExitCode, parser_of
from zeroshard.utils.version import __version__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_cliping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 200_000_000},
}  # fmt: skip
LIMIT = 105  # lines of a help text at 80 columns


def help_of(command, capsys, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_in_groups(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch)
    lines = text.splitlines()
    assert len(lines) <= LIMIT and max(map(len, lines)) <= 80
    for flag in ("--quiet", "--verbose"):
        assert flag in text
    assert main([]) == ExitCode.USAGE and command in capsys.readouterr().out


def test_help_of_train_has_common_options_first(capsys, monkeypatch):
    text = help_of("train", capsys, monkeypatch)
    assert len(text.splitlines()) <= 100
    headings = re.findall(r"^(\S.*):$", text, re.M)
    assert headings[:3] == ["options", "common options", "model and text"] and "offload" in headings
    assert text.index("--global-batch") < text.index("--weight-decay") < text.index("--quantized-weights")


def test_version_names_what_a_report_of_a_fault_needs(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(rf"zeroshard {re.escape(__version__)} \(torch \S+, Python 3\.\S+\)\n", capsys.readouterr().out)


ELSEWHERE = {
    "train": {
        "--batch-size": "--global-batch",
        "--micro-batches": "--accumulate",
        "--learning-rate": "--lr",
        "--world-size": "--ranks",
    },
    "plan": {"--batch": "--micro-batch", "--device": "--hardware", "--config": "--write-config", "--gpus": "--ranks"},
    "simulate": {"--batch": "--micro-batch", "--device": "--hardware"},
    "export": {"--config": "--hf-config"},
    "bench": {"--precision": "--precisions", "--sequences": "--micro-batch"},
}


@pytest.mark.parametrize(("command", "theirs", "ours"), [(c, *pair) for c, names in ELSEWHERE.items() for pair in names.items()])
def test_options_of_other_programs_are_answered_with_the_one_here(command, theirs, ours, capsys):
    for argument in ([theirs, "x"], [f"{theirs}=x"]):
        assert main([command, *argument]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"zeroshard: error: unknown option {theirs}; did you mean {ours}?") and error.count("\n") == 1


AT_ONCE = """
import sys
from zeroshard.cli import COMMANDS, command_of, main

def told(*argv):
    try:
        return main(list(argv))
    except SystemExit as end:
        return end.code

assert [told("--help"), told("--version"), told(), told("tarin")] == [0, 0, 2, 2]
for name in COMMANDS:
    assert [told(name, "--help"), told(name, "--no-such-option"), told("completion", "bash")] == [0, 2, 0], name
    assert "torch" not in sys.modules, name
"""


def test_help_version_completion_and_typos_do_not_wait_for_torch():
    """Its import takes 2 to 3 s; without it these answer in 0.15 to 0.4 s of processor time."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_options_of_one_name_take_the_same_kind_of_value():
    """Except for --out, which is a file or a folder, and --json, which bench writes to a file."""
    types = {}
    for name in COMMANDS:
        for action in parser_of(command_of(name))._actions:
            for option in action.option_strings:
                types.setdefault(option, {}).setdefault(action.type, []).append(name)
    differing = {option: kinds for option, kinds in types.items() if len(kinds) > 1 and option != "--out"}
    assert differing == {}


@pytest.mark.parametrize("flags", [["-q"], pytest.param(["--quiet"], marks=pytest.mark.slow)])  # 5 s each; its parser: above
def test_quiet_leaves_the_result_and_may_stand_before_the_command(flags, capsys):
    for argv in ([*flags, "papers", "zero-volumes"], ["papers", "zero-volumes", *flags]):
        assert main(argv) == 0
        assert capsys.readouterr().out == ""
    assert main(["papers", "zero-volumes"]) == 0
    assert "zero-volumes: " in capsys.readouterr().out  # it does not last


def test_verbose_shows_where_a_mistake_was_found(capsys):
    assert main(["check", "/no/such.json", "-v"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("zeroshard: error: /no/such.json: no such file")
    assert main(["papers", "-q", "-v"]) == 2
    assert "--quiet and --verbose exclude each other" in capsys.readouterr().err


# -- exit codes ----------------------------------------------------------------------------------------------------


def test_an_error_of_the_program_is_code_3_with_its_traceback(monkeypatch, capsys):
    def break_off(argv):
        raise RuntimeError("a fault")

    monkeypatch.setattr("zeroshard.cli.doctor.main", break_off)
    assert main(["doctor"]) == ExitCode.FAILED
    error = capsys.readouterr().err
    assert "Traceback" in error and error.endswith("RuntimeError: a fault\n")


def test_an_interrupt_is_code_130(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("zeroshard.cli.doctor.main", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "zeroshard: interrupted\n"


@pytest.mark.processes
def test_a_rank_that_fails_gives_its_code_to_the_command(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 500)
    (tmp_path / "sitecustomize.py").write_text(
        "import zeroshard.data.text as text\n\n\ndef fail(*arguments, **options):\n    raise RuntimeError('a fault')\n\n\n"
        "text.Batches.part = fail\n"
    )
    command = [sys.executable, "-m", "zeroshard", "train", "--ranks", "2", "--data", str(tmp_path), "--eval-bytes", "200"]
    import os

    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "RuntimeError: a fault" in done.stderr


# -- docs/commands.md ----------------------------------------------------------------------------------------------


def cells(heading):
    """Rows of the first table below a heading, without its own."""
    section = PAGE.split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.M)[0].splitlines()[2:]
    return [tuple(cell.strip().strip("`").replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in table]


def test_the_page_has_every_command_with_its_purpose_and_an_example():
    assert cells("# Every command") == [(name, what) for name, (_, what) in COMMANDS.items()]
    for name in COMMANDS:
        section = PAGE.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
        assert re.search(rf"^(\$ )?(source <\()?zeroshard {name}\b", section, re.M), f"{name} has no example"


def test_the_page_has_every_exit_code():
    assert cells("## Exit codes") == [(str(int(code)), text) for code, text in MEANINGS.items()]
    assert set(MEANINGS) == set(ExitCode)


def test_the_page_has_only_options_that_some_command_has():
    known = {option for name in COMMANDS for option in parser_of(command_of(name))._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) | set(re.findall(r"`(-\w)`", PAGE))
    assert named <= known | {"--help"}, named - known


@pytest.mark.limit(120)
def test_the_examples_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat, and the dog ate the hat. " * 9000)
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    blocks = re.findall(r"^```console\n\$ zeroshard (.+)\n((?:.*\n)*?)```$", PAGE, re.M)
    assert len(blocks) == 8
    for command, shown in blocks:
        code = main(shlex.split(command))
        printed = " ".join(capsys.readouterr().out.split())
        parts = [re.escape(" ".join(part.split())) for part in re.split(r"^\.\.\.$", shown, flags=re.M)]
        assert re.fullmatch(r"\s*.*?\s*".join(parts), printed, re.S), f"{command} printed\n{printed}\nand the page shows\n{shown}"
        assert code == (ExitCode.NO if command.startswith("check") else ExitCode.DONE), command


# -- completion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_read_its_script(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--offload-optimizer" in script and "ds_config" not in script
    if shell == "bash":
        ask = 'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_zeroshard; echo "${COMPREPLY[@]}"; }\n'
        asked = "ask zeroshard tr\nask zeroshard train --offload-o\nask zeroshard train --stage ''\n"
        done = subprocess.run(["bash", "-c", script + ask + asked], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == ["train", "--offload-optimizer", "0 1 2 3"]
