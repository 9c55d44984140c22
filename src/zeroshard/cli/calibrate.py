"""The command `zeroshard calibrate`: measure this machine, and write a hardware file for `zeroshard plan` and `simulate`."""

from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser, UsageError
from .sheets import say


def main(argv: Sequence[str]) -> int:
    """Measure, print the results and write the file; return the exit code."""
    parser = Parser(prog="zeroshard calibrate", description="Measure this machine for zeroshard plan and zeroshard simulate.")
    parser.add_argument("--ranks", type=int, default=2, help="processes that measure at the same time")
    parser.add_argument("--path", metavar="DIR", help="a folder on the local disk to measure (default: no disk)")
    parser.add_argument("--out", type=Path, default=Path("hardware.toml"), metavar="OUT", help="the file to write")
    options = parser.parse(argv)
    from ..planner.simulator.calibrate import command  # importing torch takes a second, and --help does not need it

    try:
        return command(options.ranks, options.path, options.out, say)
    except ValueError as error:
        raise UsageError(f"{error}; see zeroshard calibrate --help") from None
