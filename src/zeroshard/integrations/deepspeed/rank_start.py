"""The program that zeroshard-deepspeed starts for each rank: it sets the rank up and executes the user's program.

    python rank_start.py '{"position": 2, "cores": [0, 1], "log": "folder/20260101120000"}' python -u script.py --steps 3

torchrun gives every rank the same arguments, so this program makes the differences between ranks: it inserts `--local_rank=N` at
`position` of the command (null: nowhere), binds the rank to its part of `cores` (null: all cores), and writes the output to
<log>_rank<RANK>.log (null: to the launcher's output). It imports nothing of zeroshard.
"""

import json
import os
import sys


def main() -> None:
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["LOCAL_SIZE"] = str(ranks)  # DeepSpeed's name for it
    if plan["position"] is not None:
        command.insert(plan["position"], f"--local_rank={rank}")
    if plan["cores"] is not None:
        each = len(plan["cores"]) // ranks
        mine = plan["cores"][rank * each : (rank + 1) * each]
        try:
            os.sched_setaffinity(0, mine)
        except OSError as error:
            sys.exit(f"zeroshard-deepspeed: --bind_core_list: rank {rank} can not have the cores {mine}: {error.strerror}")
        os.environ["OMP_NUM_THREADS"] = str(each)
    if plan["log"] is not None:
        log = os.open(f"{plan['log']}_rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
