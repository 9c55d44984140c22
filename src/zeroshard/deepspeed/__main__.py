"""python -m zeroshard.deepspeed script.py ... | -m module ...: run it with `import deepspeed` finding zeroshard.

Options before the script (--num_gpus 2 script.py ...) are those of `zeroshard-deepspeed`, which starts ranks.
"""

import importlib
import os
import runpy
import sys

from ..integrations.deepspeed.door import install

USAGE = (
    "usage: python -m zeroshard.deepspeed script.py [arguments]  |  python -m zeroshard.deepspeed -m module [arguments]  |  "
    "python -m zeroshard.deepspeed [options of zeroshard-deepspeed: --num_gpus 2, ...] script.py [arguments]"
)


def main() -> None:
    """Run a script or module in this process, with its own sys.argv, and its folder first on sys.path."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    if arguments[0].startswith("-") and arguments[0] != "-m":
        from ..integrations.deepspeed.launcher import command

        sys.exit(command())
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        if sys.argv[0].startswith("deepspeed."):  # one of the modules that are made from the table
            sys.exit(importlib.import_module(sys.argv[0]).main())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(arguments[0]):
        sys.exit(f"python -m zeroshard.deepspeed: no file {arguments[0]!r}. {USAGE}")
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
