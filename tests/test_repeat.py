"""What the tests themselves are run by: `./test --repeat N`, and the limit of each test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.night  # 20 s: seven runs of pytest; of each push: the job `form` of test.yml

SCRIPT = Path(__file__).parents[1] / "scripts" / "repeat.py"

SOMETIMES = """
from pathlib import Path

def test_always():
    pass

def test_sometimes():
    count = Path(__file__).with_suffix(".count")
    runs = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(runs))
    assert runs != 2
"""


def repeated(*arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--command",
        f"{sys.executable} -m pytest -q -p no:cacheprovider -p no:xdist",
        *arguments,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


def test_a_test_that_fails_now_and_then_is_named_with_its_runs(tmp_path):
    file = tmp_path / "test_flaky.py"
    file.write_text(SOMETIMES)
    code, text = repeated("--repeat", "2", "--load", str(file))
    assert (
        code == 1
        and "1 of 2" in text
        and "test_flaky::test_sometimes  (runs 2)" in text
        and "test_always" not in text.split("did not pass:")[1]
    )


def test_what_passes_each_time_and_a_run_that_ends_otherwise(tmp_path):
    file = tmp_path / "test_fine.py"
    file.write_text("def test_fine():\n    pass\n")
    code, text = repeated("--repeat=2", str(file))
    assert code == 0 and text.endswith("each test passed in 2 of 2 runs\n")
    code, text = repeated("--repeat", "1", str(tmp_path / "nothing.py"))
    assert code == 1 and "(the run ended with code 4)  (runs 1)" in text
    assert repeated("--repeat", "0")[0] == 2


LIMITED = """
import subprocess, sys, time, pytest

@pytest.mark.limit(2)
def test_stands_still():
    time.sleep(60)

@pytest.mark.limit(2)
def test_works_too_long_in_a_child():
    subprocess.run([sys.executable, "-c", "while True: pass"], timeout=60)

@pytest.mark.limit(2)
def test_waits_for_a_busy_machine():
    begun = time.process_time()
    while time.process_time() - begun < 0.4:
        pass
    time.sleep(1.9)  # the limit passes here: it has worked meanwhile

@pytest.fixture(scope="module")
def never_made():
    time.sleep(60)

@pytest.mark.limit(2)
@pytest.mark.parametrize("number", [1, 2])
def test_needs_what_is_never_made(never_made, number):
    pass
"""


def test_the_limit_of_a_test_is_of_processor_time_and_of_standing_still(tmp_path):
    file = tmp_path / "test_limited.py"
    file.write_text(LIMITED)
    folders = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    command += ["-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true"]  # ./test has 180 s: neither ends a run
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert run.returncode == 1 and "2 failed, 1 passed, 2 errors" in run.stdout, run.stdout + run.stderr
    # in 2 s, or in 4: on a busy machine its thread waits for a core before it stands still
    assert re.search(r"test_stands_still: not finished: 0 s of processor time in \d+ s; its limit is 2 s", run.stdout)
    assert "test_works_too_long_in_a_child: not finished: " in run.stdout
    # a fixture is tried once
    assert "test_needs_what_is_never_made[1]: not finished: " in run.stdout
    assert "test_needs_what_is_never_made[2]: not finished: " not in run.stdout
