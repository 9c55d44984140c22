"""`./test --repeat N`: which tests did not pass each time."""

import subprocess
import sys
from pathlib import Path

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
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, run.stdout + run.stderr


def test_a_test_that_fails_now_and_then_is_named_with_its_runs(tmp_path):
    file = tmp_path / "test_flaky.py"
    file.write_text(SOMETIMES)
    code, text = repeated("--repeat", "3", "--load", str(file))
    assert (
        code == 1
        and "1 of 3" in text
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
