"""Command-line parsing whose errors are one line, name the option and suggest the remedy."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class UsageError(Exception):
    """A mistake of the person who called the command: shown as one line, without a traceback."""


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if `word` resembles one of `known`, else an empty text."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none or the help already tells it; short names for values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default in (None, argparse.SUPPRESS) or "default:" in (action.help or "")
        return action.help if told else super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type is int else "X" if action.type is float else "TEXT"


class Parser(argparse.ArgumentParser):
    """argparse that raises `UsageError` instead of leaving the process, and knows what was meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; the first argument that is not an option of this command is an error."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            word = unknown[0].split("=")[0]
            raise UsageError(f"unknown option {word}{closest(word, self._option_string_actions)}; see {self.prog} --help")
        return known
