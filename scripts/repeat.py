"""Run tests several times, beside busy processes if wanted, and tell which did not pass each time.

    ./test --repeat N [--load] [arguments of pytest]

A test that fails once in fifty runs is a fault; a busy machine shows it sooner than a quiet one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

_BUSY = [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]  # ends with this one


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute without a pause."""
    processes = [subprocess.Popen(_BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failed_in(report: Path) -> list[str]:
    """Names of the tests that a JUnit report tells as failed, or as ended by an error."""
    if not report.exists():
        return []
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}" for case in cases if {"failure", "error"} & {part.tag for part in case}
    ]


def repeat(command: list[str], times: int) -> dict[str, list[int]]:
    """Run a command that ends in pytest. Returns test -> numbers of the runs in which it did not pass.

    A run that tells of no failed test and ends with another code than 0 (a time limit, a crash) is an entry of its own.
    """
    found: dict[str, list[int]] = {}
    limit = {"TEST_LIMIT_S": "7200"}  # of a run: beside busy processes it takes two to four times as long
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, times + 1):
            report = Path(folder) / f"{number}.xml"
            options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junit-xml={report}"
            code = subprocess.run(command, env={**limit, **os.environ, "PYTEST_ADDOPTS": options}, check=False).returncode
            names = failed_in(report) or ([f"(the run ended with code {code})"] if code else [])
            for name in names:
                found.setdefault(name, []).append(number)
            print(f"run {number} of {times}: {len(names)} did not pass", flush=True)
    return found


def table(found: dict[str, list[int]], times: int) -> str:
    """A line for each test that did not pass each time, those that failed most often first."""
    if not found:
        return f"each test passed in {times} of {times} runs"
    rows = sorted(found.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"{len(runs):4} of {times}  {name}  (runs {', '.join(map(str, runs))})" for name, runs in rows]
    return "\n".join(["did not pass:", *lines])


def main(arguments: list[str]) -> int:
    """0: each test passed in each run; 1: the table names those that did not."""
    parser = argparse.ArgumentParser(prog="./test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, required=True, metavar="N", help="how many runs")
    parser.add_argument("--load", action="store_true", help="beside three busy processes, or one more than there are cores")
    parser.add_argument("--command", default="./test", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: expected at least 1, got {options.repeat}")
    with busy(max(3, (os.cpu_count() or 1) + 1) if options.load else 0):
        found = repeat([*shlex.split(options.command), *rest], options.repeat)
    print(table(found, options.repeat))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
