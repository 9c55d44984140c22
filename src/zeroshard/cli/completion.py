"""The command `zeroshard completion`: print a shell script, made by shtab, that completes commands and their options.

source <(zeroshard completion bash)                              in bash, for this session
zeroshard completion zsh > "${fpath[1]}/_zeroshard"              in zsh, for all sessions to come
"""

import argparse
from collections.abc import Sequence

from . import COMMANDS, command_of
from .arguments import ExitCode, Parser, UsageError, parser_of

SHELLS = ("bash", "zsh")


def main(argv: Sequence[str]) -> int:
    """Print the script; return the exit code."""
    parser = Parser(
        prog="zeroshard completion", usage="%(prog)s [options] SHELL",
        description="Print the script by which a shell completes these commands: source <(zeroshard completion bash)",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
    options = parser.parse(argv)
    import shtab  # if it is not installed, `main` of this package prints how to install it

    whole = argparse.ArgumentParser(prog="zeroshard")
    commands = whole.add_subparsers()
    for name, (_, what) in COMMANDS.items():
        try:
            made = parser_of(command_of(name))
        except UsageError:
            continue  # bench and papers, which are not in an installed wheel
        for action in made._actions:
            places = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "OUT": shtab.FILE}
            if action.metavar in places:
                action.complete = places[action.metavar]  # type: ignore[attr-defined]  # shtab reads it
        commands.add_parser(name, parents=[made], add_help=False, help=what)
    print(shtab.complete(whole, shell=options.shell))
    return ExitCode.DONE
