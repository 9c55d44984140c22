"""The plans on pages that take up to a minute of processor time each: each line that a page shows is printed."""

import re
import shlex
from pathlib import Path

import pytest

from zeroshard.cli import main

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```\n\$ zeroshard (plan .*?)\n(.*?)^```$", re.M | re.S)


def squeezed(line):
    return " ".join(line.split())


@pytest.mark.slow
@pytest.mark.parametrize("page", ["long-sequences.md", "experts.md"])
def test_plans_of_a_page_print_what_it_shows(page, capsys):
    blocks = BLOCK.findall((HOW_TO / page).read_text())
    assert blocks
    for command, shown in blocks:
        assert main(shlex.split(command)) == 0
        printed = iter(map(squeezed, capsys.readouterr().out.splitlines()))
        for line in map(squeezed, shown.splitlines()):
            assert line in ("", "...") or line in printed, f"{command!r} does not print {line!r}, or not in this order"
