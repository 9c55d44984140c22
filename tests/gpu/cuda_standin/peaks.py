"""Plans beside ranks on the stand-in: `tests/gpu/cuda_standin/run peaks.py [world] [case ...]` (2 ranks, all cases unless given).

Prints, for each case of benchmarks/predictions.py, the peak of a device's memory by a dry run and as rank 0 allocated it. Exits with 1
where they differ by more than 5%, or memory stays behind. tests/gpu/test_predictions_on_gpu.py is the same for a world of 1.
"""

from __future__ import annotations

import cuda_standin  # isort: skip  (before torch; processes that are started import this file first)

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import zeroshard as zs
from benchmarks import predictions
from zeroshard.config import Tier

STEPS, LIMIT_S, TOLERANCE = 3, 1500, 0.05


def _rank(rank: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    predictions.warm_device()
    differ = False
    for case in predictions.CASES:
        if names and case.name not in names:
            continue
        plan = zs.plan(case.model, ranks=world, rank=rank, separate=True, **case.settings(str(folder)))
        grown, left = predictions.measure_device(case, str(folder), STEPS)
        planned, faults = plan.peak(Tier.DEVICE), cuda_standin.errors()
        good = abs(planned / grown - 1) <= TOLERANCE and left < TOLERANCE * grown and not faults
        differ |= not good
        if rank == 0:
            print(
                f"{'ok  ' if good else 'BAD '} {case.name:30s} plan {planned:>13,} allocated {grown:>13,} {planned / grown:.3f}"
            )
            print("".join(f"    {fault}\n" for fault in dict.fromkeys(faults[:3])), end="", flush=True)
    dist.barrier()
    os._exit(differ)  # destructors of a process group may wait for a rank that has ended


if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as name:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, world, Path(name), sys.argv[2:])) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
        for process in ranks:
            process.kill()
        sys.exit(any(process.exitcode != 0 for process in ranks))
