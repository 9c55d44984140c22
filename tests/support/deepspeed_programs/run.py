"""Training told in numbers, by the real DeepSpeed or by zeroshard in its place: run.py FILE CELL ...

    python run.py numbers.json raw_engine/3/2/none                           # where deepspeed is installed
    python -m zeroshard.deepspeed run.py numbers.json raw_engine/3/2/none    # zeroshard in its place

Each rank is started so, with the variables of torchrun.

A cell (cells.py) begins with the name of a module beside this file. Its `run(stage, accumulation, offload, folder)` trains
STEPS steps, saves a checkpoint after RESUMED_AT of them, trains the rest, and trains that again from the checkpoint. It returns
lists of numbers by name, of both: {"whole": ..., "resumed": ...}. Rank 0 writes them to FILE, {cell: numbers}; checkpoints go
beside it.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    told, file = {}, Path(sys.argv[1])
    for cell in sys.argv[2:]:
        program, stage, accumulation, offload = cell.split("/")
        folder = file.parent / cell.replace("/", "-")
        told[cell] = importlib.import_module(program).run(int(stage), int(accumulation), offload, str(folder))
    if int(os.environ.get("RANK", "0")) == 0:
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
