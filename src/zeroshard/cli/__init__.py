"""The `zeroshard` command. Each subcommand is imported only when it is called."""

import os
import platform
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from ..errors import ConfigError, ZeroshardError
from ..utils.version import __version__
from .arguments import EXTRAS, ExitCode, UsageError, closest, how_to_install, verbose

COMMANDS = {  # name -> (module with main(argv) -> int or, for those of _OPTIONS, main(options, argv); its description in `zeroshard --help`)
    "train": ("zeroshard.cli.train", "train a byte-level GPT on a folder of text"),
    "plan": ("zeroshard.cli.plan", "tell what a run will hold and send, and whether it fits, before it runs"),
    "simulate": ("zeroshard.cli.simulate", "tell how long a step of a run will take, and what bounds it"),
    "calibrate": ("zeroshard.cli.calibrate", "measure this machine for plan and simulate"),
    "check": ("zeroshard.cli.check", "tell what becomes of each key of a DeepSpeed configuration"),
    "inspect": ("zeroshard.cli.inspect", "show what is in a run or a checkpoint, and verify its checksums"),
    "export": ("zeroshard.cli.export", "write a checkpoint's model as safetensors or as a file of torch.save"),
    "doctor": ("zeroshard.cli.doctor", "show what this machine and environment offer, and what would go wrong"),
    "papers": ("benchmarks.papers.command", "compute the published tables and figures, beside what was printed"),
    "bench": ("benchmarks.command", "measure zeroshard beside its peers"),
    "completion": ("zeroshard.cli.completion", "print what bash or zsh needs to complete these commands"),
}
_OPTIONS = {  # what reads the options of a command whose module imports torch, so that a mistake in the call is told at once
    "train": ("zeroshard.cli.options", "parse_train"),
    "plan": ("zeroshard.cli.plan_options", "parse_plan"),
    "simulate": ("zeroshard.cli.plan_options", "parse_simulate"),
}
_FLAGS = ("-q", "--quiet", "-v", "--verbose")  # options of every command, which may also stand before its name


def usage() -> str:
    """Return the text of `zeroshard --help`."""
    lines = ["usage: zeroshard COMMAND [options]", "", "ZeRO stages 0 to 3 in pure Python on PyTorch.", "", "commands:"]
    lines += [f"  {name:12}{what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "options of every command:", "  -q, --quiet    print the result alone", "  -v, --verbose  print more"]
    codes = "exit code: 0 done; 1 the answer is no; 2 a mistake in the call; 3 an error"
    return "\n".join([*lines, "", "zeroshard COMMAND --help lists the options of a command. zeroshard --version", codes])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = [argv.pop(0) for _ in range(len(argv)) if argv[0] in _FLAGS]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return ExitCode.DONE if argv else ExitCode.USAGE
    if argv[0] == "--version":
        from importlib import metadata

        print(f"zeroshard {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})")
        return ExitCode.DONE
    try:
        code = command_of(argv[0])([*flags, *argv[1:]])
        sys.stdout.flush()  # a BrokenPipeError must be raised here, where it is handled
        return int(code)
    except (UsageError, ConfigError) as error:
        return report_error(str(error))
    except ZeroshardError as error:  # of ranks the traceback says where
        return _broke_off() if argv[0] in ("train", "bench") else report_error(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            return _broke_off()
        remedy = how_to_install(error.name)
        return report_error(f"{argv[0]} needs {error.name}, which is not installed; install it with: {remedy}")
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # once, if the signal came to all ranks
            print("zeroshard: interrupted", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.UNREAD if _unread() else _broke_off()
    except Exception:
        return _broke_off()


def _broke_off() -> int:
    traceback.print_exc()
    return ExitCode.FAILED


def _unread() -> bool:
    """Return True if the reader of stdout has ended (`zeroshard plan ... | head`), and then discard the rest of the output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def report_error(message: str) -> int:
    """Print the message of a usage error on one line of stderr, with --verbose after its traceback; return ExitCode.USAGE."""
    if verbose() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"zeroshard: error: {message}", file=sys.stderr, flush=True)
    return ExitCode.USAGE


def command_of(name: str) -> Callable[[list[str]], int]:
    """Return the function that runs a subcommand. Raises UsageError for an unknown one, and for one that is not installed."""
    if name not in COMMANDS:
        raise UsageError(f"expected a command, got {name!r}{closest(name, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    module = COMMANDS[name][0]
    if module.startswith("benchmarks"):  # a package of the repository, which is not in an installed wheel
        root = Path(__file__).parents[3]
        if not (root / "benchmarks" / "__init__.py").is_file():
            raise UsageError(
                f"{name}: races against peers and the papers' tables are in the repository, not in the installed package. "
                "Clone it, install it from there with pip install -e '.[bench]', and call the command again"
            )
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    if name not in _OPTIONS:
        return import_module(module).main
    place, parse = _OPTIONS[name]

    def main_of(argv: list[str]) -> int:
        options = getattr(import_module(place), parse)(argv)
        return import_module(module).main(options, argv)

    return main_of
