"""python -m zeroshard.fsdp [options] script.py ... | -m module ...: run a program for FSDP2, not changed, on zeroshard.

Options are those of zs.shard, with hyphens: --offload-optimizer nvme --offload-path /scratch --optimizer-states int8 --stage 2. They hold
for every model that the program gives to fully_shard. --report prints rank 0's report of each model at the end. torchrun starts ranks:
torchrun --nproc-per-node 8 -m zeroshard.fsdp --offload-optimizer cpu train.py
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import os
import runpy
import sys
from typing import Any

from ..config import Config
from ..errors import ConfigError, did_you_mean

USAGE = (
    "usage: python -m zeroshard.fsdp [options of zs.shard: --offload-optimizer cpu, ...] [--report] script.py [arguments] | -m module "
    "[arguments]"
)


def parsed(arguments: list[str]) -> tuple[dict[str, Any], bool, list[str]]:
    """Return (options of zs.shard, whether to print reports, the script with its arguments). Raise ConfigError for another option."""
    known = {field.name for field in dataclasses.fields(Config)} | {"preset"}
    options: dict[str, Any] = {}
    report, rest = False, list(arguments)
    while rest and rest[0].startswith("--") and rest[0] != "--help":
        flag, equals, value = rest.pop(0).partition("=")
        name = flag[2:].replace("-", "_")
        if name == "report":
            report = True
            continue
        if name not in known:
            raise ConfigError(f"{flag}: no option of zs.shard.{did_you_mean(name, known)}")
        if not equals and not rest:
            raise ConfigError(f"{flag}: expected a value.")
        value = value if equals else rest.pop(0)
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a word: nvme, int8, a folder
            options[name] = value
    return options, report, rest


def main() -> None:
    """Run a script or a module in this process, with its own sys.argv, and its folder first on sys.path."""
    try:
        options, report, rest = parsed(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"python -m zeroshard.fsdp: {error}\n{USAGE}")
    asked = rest[:1] in (["-h"], ["--help"])
    if not rest or asked or rest == ["-m"]:
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    if rest[0] != "-m" and not os.path.isfile(rest[0]):
        sys.exit(f"python -m zeroshard.fsdp: no file {rest[0]!r}. {USAGE}")
    from . import calls
    from .configuration import configure
    from .torch_names import install

    install()
    configure(**options)
    if report:
        calls.kept = []
        atexit.register(_report)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
    runpy.run_path(rest[0], run_name="__main__")


def _report() -> None:
    from ..public import report
    from . import calls

    for model in (calls.kept or ()) if os.environ.get("RANK", "0") == "0" else ():
        print(report(model))


if __name__ == "__main__":
    main()
