"""`python -m benchmarks`, the same as `zeroshard bench`."""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
