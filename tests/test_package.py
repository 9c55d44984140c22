"""What a wheel would hold, without building one: every file below src, and what makes `import deepspeed` find zeroshard."""

import importlib
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
    pytest.importorskip("setuptools")  # comes with torch
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inside = set(done.stdout.split())
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "zeroshard").rglob("*") if path.is_file()]
    assert not {str(path) for path in files if path.suffix != ".pyc"} - inside
    site = "zeroshard/integrations/deepspeed/site"
    assert {f"{site}/deepspeed/__init__.py", f"{site}/deepspeed-0.19.8+zeroshard.dist-info/METADATA"} <= inside


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
