"""The parser of all commands, and their exit codes. Its errors are one line, name the option and suggest the remedy.

Every command parses with `Parser`, which adds the two options that all of them have: with `--quiet` a command prints
its result only, with `--verbose` more than usual. `quiet()` and `verbose()` return whether they were given.
"""

import argparse
import contextlib
import difflib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from typing import Any, NoReturn

EXTRAS = {  # library -> the extra of pyproject.toml that installs it
    "rich": "cli", "rich_argparse": "cli", "matplotlib": "cli", "transformers": "cli", "shtab": "cli", "deepspeed": "bench",
    "psutil": "bench",
}  # fmt: skip
_ELSEWHERE = {  # an option as other programs call it -> those that may stand for it here; the first that a command has is suggested
    **dict.fromkeys(("--batch", "--batch-size"), ("--micro-batch", "--global-batch")), "--device": ("--hardware",),
    **dict.fromkeys(("--gpus", "--nproc-per-node", "--world-size"), ("--ranks",)), "--learning-rate": ("--lr",),
    "--micro-batches": ("--accumulate",), "--sequences": ("--micro-batch",),
}  # fmt: skip
_chosen = {"quiet": False, "verbose": False}
_asked: list[bool] = []  # not empty while `parser_of` calls a command to get its parser


class ExitCode(IntEnum):
    """The exit code of a command; docs/commands.md shows MEANINGS. If signal n ended the command, it is 128 + n, as in shells."""

    DONE = 0
    NO = 1
    USAGE = 2
    FAILED = 3
    INTERRUPTED = 130  # 128 + SIGINT
    UNREAD = 141  # 128 + SIGPIPE


MEANINGS = {
    ExitCode.DONE: "the command did what it was asked, and its answer is yes where it gives one",
    ExitCode.NO: "the command worked, and its answer is no: a plan does not fit, a checkpoint is damaged, a key is refused, "
    "a value differs from the published one, this machine cannot train",
    ExitCode.USAGE: "the call is wrong: an unknown option or value, a file that is missing or cannot be read",
    ExitCode.FAILED: "the command broke off with an error, whose traceback is on stderr",
    ExitCode.INTERRUPTED: "the user interrupted it (Ctrl-C)",
    ExitCode.UNREAD: "the program that read its output ended first (`zeroshard plan ... | head`)",
}


def quiet() -> bool:
    """Return True if --quiet was given: the command prints its result only."""
    return _chosen["quiet"]


def verbose() -> bool:
    """Return True if --verbose was given: the command prints more than usual."""
    return _chosen["verbose"]


class UsageError(Exception):
    """A mistake in the call of a command; it is shown as one line, without a traceback."""


def closest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" if `word` resembles one of `known`, else ""."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def how_to_install(library: str) -> str:
    """Return the shell command that installs an optional library, in a clone of this repository."""
    return f"pip install -e '.[{EXTRAS[library]}]'"


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter that shows short names for values, and defaults unless the help text already has them.

    It is that of rich-argparse if this is installed and stdout a terminal, else argparse's.
    """
    base: type[argparse.HelpFormatter] = argparse.ArgumentDefaultsHelpFormatter
    if sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            from rich_argparse import ArgumentDefaultsRichHelpFormatter as base

    class _Help(base):  # type: ignore[misc, valid-type]
        group_name_formatter = str

        def _get_help_string(self, action: argparse.Action) -> str | None:
            told = any(action.default is each for each in (None, False, (), argparse.SUPPRESS))
            return action.help if told or "default:" in (action.help or "") else super()._get_help_string(action)

        def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
            return "N" if action.type is int else "X" if action.type is float else "TEXT"

    return _Help(prog, max_help_position=30)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` instead of ending the process, and suggests names for unknown options."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("usage", "%(prog)s [options]")
        super().__init__(allow_abbrev=False, formatter_class=_help_formatter, **settings)
        self.add_argument("-q", "--quiet", action="store_true", help="print the result alone: no tables, no progress")
        self.add_argument("-v", "--verbose", action="store_true", help="print more; tracebacks of mistakes in the call")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`. Raises UsageError for an unknown option."""
        if _asked:
            raise _Answer(self)
        names, known = self._option_string_actions, argparse.Namespace()
        options = itertools.takewhile(lambda word: word != "--", argv)
        unknown = [word for word in options if word.startswith("--") and word.split("=")[0] not in names]
        if not unknown:  # what is misspelt is told before what is missing
            known, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=")[0]
            ours = next((each for each in _ELSEWHERE.get(word, ()) if each in names), None)
            meant = f"; did you mean {ours}?" if ours else closest(word, names)
            raise UsageError(f"unknown option {word}{meant}; see {self.prog} --help")
        _chosen.update(quiet=known.quiet, verbose=known.verbose)
        del known.quiet, known.verbose
        if quiet() and verbose():
            raise UsageError(f"--quiet and --verbose exclude each other; see {self.prog} --help")
        return known


class _Answer(Exception):
    """The exception by which a command's `parse` hands its parser to `parser_of`."""


def parser_of(main: Callable[[list[str]], int]) -> Parser:
    """Return the parser of a command: call its `main`, which makes the parser first, and leave it when it parses."""
    _asked.append(True)
    try:
        main([])
    except _Answer as answer:
        return answer.args[0]
    finally:
        _asked.clear()
    raise AssertionError(f"{main.__module__}.main parses by no Parser")


_LONG = 20  # choices of more characters are listed in the help text, not in place of the value


def add_options(parser: Parser, kind: type) -> None:
    """Add an option for each field of a dataclass with metadata: help, group (heading in --help), and argparse's settings.

    A field without metadata changes the default of the field of that name in a base class. kind.HEADINGS: the first groups.
    """
    described = {option.name: option.metadata for base in reversed(kind.__mro__) if is_dataclass(base) for option in fields(base)
                 if option.metadata}  # fmt: skip
    groups = {name: parser.add_argument_group(name) for name in getattr(kind, "HEADINGS", ())}
    for option in fields(kind):
        if option.name not in described:
            continue
        settings = dict(described[option.name])
        choices = settings.get("choices", ())
        if len(",".join(map(str, choices))) > _LONG and "metavar" not in settings:
            settings |= {"metavar": "NAME", "help": f"{settings['help']}: {', '.join(map(str, choices))}"}
        group, names = settings.pop("group"), (f"--{option.name.replace('_', '-')}", *settings.pop("also", ()))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        default = None if option.default is MISSING else option.default
        groups[group].add_argument(*names, default=default, **settings)
