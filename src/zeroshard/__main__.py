"""`python -m zeroshard`: the same as the `zeroshard` command."""

import sys

from .comm.launch import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    from .cli import main

    sys.exit(main())
