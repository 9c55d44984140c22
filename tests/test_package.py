"""The wheel holds every file below src, is built from the files that the Dockerfile copies, and trains where no clone is."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ASK = """
from setuptools import Distribution
wheel = Distribution({"script_name": "setup.py"})
wheel.parse_config_files()
wheel.include_package_data = False  # what version control knows does not count
build = wheel.get_command_obj("build_py")
build.ensure_finalized()
build.build_lib = ""
print(*build.get_outputs(include_bytecode=False), sep="\\n")
"""


@pytest.mark.limit(60)
def test_a_wheel_has_every_file():
    pytest.importorskip("setuptools", minversion="77")  # comes with torch; as pyproject.toml says
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inside = set(done.stdout.split())
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "zeroshard").rglob("*") if path.is_file()]
    assert not {str(path) for path in files if path.suffix != ".pyc"} - inside
    site = "zeroshard/integrations/deepspeed/site"
    assert {f"{site}/deepspeed/__init__.py", f"{site}/deepspeed-0.19.8+zeroshard.dist-info/METADATA"} <= inside


def copied() -> list[str]:
    """What the Dockerfile copies from the clone into the image."""
    return [name for line in re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M) for name in line.split()]


def test_the_dockerfile_copies_what_docker_is_sent_and_installs_what_is_there():
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied()) == sorted(sent) and all((ROOT / name).exists() for name in sent)
    steps = (ROOT / "Dockerfile").read_text()
    lists = re.findall(r"-r (\S+)", steps)
    assert lists == ["requirements/torch.txt", "requirements/cli.txt"] and all((ROOT / name).exists() for name in lists)
    assert "USER zeroshard" in steps and 'ENTRYPOINT ["zeroshard"]' in steps


@pytest.mark.night  # of each push: the job `form` of test.yml
@pytest.mark.processes
def test_a_wheel_of_the_dockerfiles_files_trains_where_no_clone_is(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    clone, wheels, installed, elsewhere = (tmp_path / name for name in ("clone", "wheels", "installed", "elsewhere"))
    elsewhere.mkdir()
    clone.mkdir()
    for name in copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels), str(clone))
    [wheel] = wheels.iterdir()
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", str(installed), str(wheel))
    found = run(sys.executable, "-c", "from importlib.util import find_spec; print(find_spec('zeroshard').origin)")
    assert Path(found.strip()) == installed / "zeroshard" / "__init__.py"
    (elsewhere / "text.txt").write_text("the cat sat on the mat, and the dog ate the hat. " * 50)
    small = "--layers 1 --dim 16 --heads 2 --seq 16 --ngram-rows 0 --sample-bytes 0 --eval-bytes 100 --ranks 1 --steps 2"
    printed = run(str(installed / "bin" / "zeroshard"), "train", *small.split(), "--data", "text.txt", "--out", "run", "-q")
    assert "after 2 steps" in printed and (elsewhere / "run" / "model.safetensors").exists()


def test_its_commands_are_there():
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n\n")[0].splitlines()
    assert len(scripts) == 2
    for line in scripts:
        module, _, function = line.split(" = ")[1].strip('"').partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(("code", "ends"), [(0, ""), (1, "error: pip install six failed (its message is above)\n")])
def test_the_installation_shows_that_it_lives(code, ends, tmp_path):
    """Where stderr is a file: without escape codes, a line for each file that pip fetches."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho Collecting six\necho '  Downloading six.whl (11 kB)'\nexit {code}\n")
    fake.chmod(0o755)
    lines = ["set -euo pipefail", "source scripts/setup.sh", f"PYTHON={fake}", 'say "installing six"', "pip_install six"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, f"installing six\n  Downloading six.whl (11 kB)\n{ends}")
