"""Source text: ruff finds nothing to say about it, neither to its rules nor to its form, and mypy no type that does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str) -> None:
    """A module of Python's that checks the repository. What it finds is the message of the failure."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_finds_nothing(command):
    run("ruff", *command.split())


@pytest.mark.night  # of each push: the job `form` of test.yml, and pre-commit
@pytest.mark.limit(270)  # 20 s of processor time where nothing is in its cache, .mypy_cache; else 5
def test_mypy_finds_nothing():
    run("mypy")
