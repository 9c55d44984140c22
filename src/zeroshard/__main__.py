"""`python -m zeroshard`: the same as the `zeroshard` command."""

import os
import sys

if __name__ == "__main__":
    if "ZEROSHARD_PARENT_PID" in os.environ:  # a rank, whose launcher has set it; other calls do not wait for this import
        from .comm.launch import end_with_parent

        end_with_parent()
    from .cli import main

    sys.exit(main())
