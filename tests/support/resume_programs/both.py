"""both.py FOLDER STAGE ...: on rank 0 a line of JSON for each stage of the programs beside this file."""

import json
import os
import sys

import accelerate_loop
import trainer

if __name__ == "__main__":
    for stage in map(int, sys.argv[2:]):
        for program in (trainer, accelerate_loop):
            told = program.run(f"{sys.argv[1]}/{program.__name__}/{stage}", stage)
            if int(os.environ.get("RANK", "0")) == 0:
                print("TOLD " + json.dumps({"program": program.__name__, "stage": stage, **told}), flush=True)
