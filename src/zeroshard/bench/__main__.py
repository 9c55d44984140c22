"""`python -m zeroshard.bench`, the same as `zeroshard bench`."""

import sys

from zeroshard.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
