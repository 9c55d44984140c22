"""The command `zeroshard doctor`: show the facts of this machine and environment, and problems that training would meet.

    zeroshard doctor
    zeroshard doctor --json

`findings` judges the facts of environment.py; each finding names its remedy. The exit code is 1 if one prevents training.
"""

import dataclasses
from collections.abc import Sequence

from ..utils.sheets import Sheet
from .arguments import ExitCode, Parser, quiet
from .sheets import print_json, show


def main(argv: Sequence[str]) -> int:
    """Print the facts and findings; return the exit code, 1 if something prevents training."""
    parser = Parser(
        prog="zeroshard doctor",
        description="Show what this machine and environment offer, and what would go wrong; "
        "exit code 1 if nothing can train here.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: an object with environment, findings and can_train")
    options = parser.parse(argv)
    from .environment import NOTE, PROBLEM, WARNING, facts_of, findings, look  # with torch, which --help does not wait for

    here = look()
    found = sorted(findings(here), key=lambda finding: (PROBLEM, WARNING, NOTE).index(finding.level))
    can_train = all(finding.level != PROBLEM for finding in found)
    if options.json:
        facts = {"environment": dataclasses.asdict(here), "findings": [dataclasses.asdict(each) for each in found]}
        print_json({**facts, "can_train": can_train})
    else:
        show(Sheet(f"zeroshard {here.zeroshard}", rows=list(facts_of(here))))
        if found:
            rows = [(each.level, each.what, each.remedy) for each in found]
            show(Sheet(header=("", "what would go wrong", "what to do"), rows=rows))
        for each in found:
            if quiet() and each.level != NOTE:
                print(f"{each.level}: {each.what}; {each.remedy}")
        print("This environment can train." if can_train else "Something prevents training: see the problems above.")
    return ExitCode.DONE if can_train else ExitCode.NO
