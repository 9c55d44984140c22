"""`python -m zeroshard.bench`, the same as `zeroshard bench`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
