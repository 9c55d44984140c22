"""The ranks of a command: joining the process group, choosing the device, and small exchanges between ranks.

A command runs alone (no RANK in the environment, no process group), or as one of several ranks that torchrun or
`zeroshard.comm.launch.spawn` started. Ranks exchange errors and rank 0's clock, so that all of them do the same.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..utils.host import ranks_here
from .arguments import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # a rank that waits longer than this raises


def available_cores() -> int:
    """Return the number of cores that this process may use, within a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def launched() -> bool:
    """Return True if a launcher started this process as a rank. Raises UsageError if some of its variables are missing."""
    present = [name for name in VARIABLES if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return False
    missing = sorted(set(VARIABLES) - set(present))
    if missing:
        raise UsageError(f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}; unset them or start with torchrun")
    return True


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and exchanges with the other ranks of the command."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, *values: float) -> torch.Tensor:
        """Gather the values of all ranks: return float64, (world_size, len(values)), on the CPU."""
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size == 1:
            return row[None].cpu()
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()

    def agree(self, name: str, value: str | None, error: str | None = None) -> None:
        """Raise the same `UsageError` on all ranks if one has an error or their values differ."""
        answers: list[tuple[str | None, str | None]] = [(value, error)]
        if self.world_size > 1:
            answers = [(None, None)] * self.world_size
            dist.all_gather_object(answers, (value, error))
        for rank, (_, found) in enumerate(answers):
            if found is not None:
                everywhere = all(error is not None for _, error in answers)
                raise UsageError(found if everywhere else f"{found} [rank {rank}]")
        for rank, (other, _) in enumerate(answers):
            if other != answers[0][0]:
                raise UsageError(f"{name}: expected the same on all ranks, got {answers[0][0]} on rank 0, {other} on rank {rank}")

    def of_first(self, value: str | None) -> str:
        """Broadcast rank 0's value; return it on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, 0)
        assert values[0] is not None
        return values[0]

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def check_gpus(device: str, local_ranks: int) -> None:
    """Raise UsageError if --device asks for GPUs, and this machine has fewer of them than ranks."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < local_ranks:
        told = f"--device cuda: expected a GPU per rank, got {gpus} for {local_ranks} ranks"
        raise UsageError(f"{told}; use fewer --ranks or --device cpu")


def join(device: str, threads: int | None) -> Ranks:
    """Join the process group that the environment describes, or run alone."""
    together = launched()
    rank, world_size = (int(os.environ[name]) for name in VARIABLES[:2]) if together else (0, 1)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_ranks = ranks_here(world_size)
    check_gpus(device, local_ranks)
    few = torch.cuda.device_count() < local_ranks  # then "auto" chooses the CPU: each rank gets a GPU of its own, or none
    chosen = torch.device("cpu") if device == "cpu" or few else torch.device("cuda", local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(threads or max(1, available_cores() // local_ranks))
    if together:  # also for one rank: zs.shard requires a process group when RANK is set
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return Ranks(rank, world_size, chosen)
