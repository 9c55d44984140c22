"""The exit codes of every `zeroshard` command, in one place; docs/commands.md shows this table."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command. If signal n ended the command, it is 128 + n, as in shells."""

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
