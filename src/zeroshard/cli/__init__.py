"""The `zeroshard` command. Each subcommand is imported only when it is called."""

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata

from .arguments import UsageError, closest

COMMANDS = {  # name -> (module with main(argv) -> int, what it does)
    "train": ("zeroshard.cli.train", "train a byte-level GPT on a folder of text"),
    "export": ("zeroshard.cli.export", "write a checkpoint's model as safetensors or as a file of torch.save"),
    "plan": ("zeroshard.cli.plan", "tell what a run will hold and send, and whether it fits, before it runs"),
    "simulate": ("zeroshard.cli.simulate", "tell how long a step of a run will take, and what bounds it"),
    "inspect": ("zeroshard.cli.inspect", "show what is in a checkpoint, and verify its checksums"),
    "doctor": ("zeroshard.cli.doctor", "show what this machine and environment offer, and what would go wrong"),
    "papers": ("zeroshard.cli.papers", "compute the published tables and figures, beside what was printed"),
    "bench": ("zeroshard.bench", "measure zeroshard beside its peers"),
}
CLI_LIBRARIES = frozenset({"rich", "matplotlib", "psutil"})


def usage() -> str:
    """The text of `zeroshard --help`."""
    lines = ["usage: zeroshard COMMAND [options]", "", "ZeRO stages 0 to 3 in pure Python on PyTorch.", "", "commands:"]
    lines += [f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "zeroshard COMMAND --help lists the options of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for a mistake in the call)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"zeroshard {metadata.version('zeroshard')}")
        return 0
    try:
        code = _command(argv[0])(argv[1:])
        sys.stdout.flush()  # here, where it can be told that nobody reads
        return code
    except UsageError as error:
        return report_error(str(error))
    except ModuleNotFoundError as error:
        if error.name not in CLI_LIBRARIES:
            raise
        extra = "bench" if argv[0] == "bench" else "cli"
        return report_error(f"{argv[0]}: expected the library {error.name!r}; install it with: pip install 'zeroshard[{extra}]'")
    except BrokenPipeError:
        if not _unread():
            raise
        return 128 + signal.SIGPIPE


def _unread() -> bool:
    """Whether who read the output is gone (`zeroshard plan ... | head`); if so, what is left of it goes nowhere."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def report_error(message: str) -> int:
    """Print a mistake in the call on one line of stderr; returns its exit code."""
    print(f"zeroshard: error: {message}", file=sys.stderr, flush=True)
    return 2


def _command(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        raise UsageError(f"expected a command, got {name!r}{closest(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    return import_module(COMMANDS[name][0]).main
