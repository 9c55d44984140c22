"""The largest model that each contender trains on one GPU in bf16, and what gpu_day.py shares with that search.

Each trial of the search, for the number of layers at which a contender stops fitting, is a process of its own that builds the model
on the meta device, makes two steps and ends.

Floating-point operations of a step (PaLM, arXiv 2204.02311, appendix B, with only the computed half of causal attention):
for each token 6 for each weight of a matrix, and 6 x layers x dim x seq for attention.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zeroshard.cli.sheets import say
from zeroshard.memory.host_memory import available_nbytes
from zeroshard.utils.sheets import PLAIN

from .plan import Contender, ModelShape, Workload
from .race import missing_reason
from .tables import Measured, Row
from .worker import parameter_count
from .worker_group import Team, TeamFailed

# Some 320M parameters, so that model states (18 bytes a parameter) outweigh activations.
SHAPE = ModelShape(vocab_size=32768, seq_len=1024, dim=1024, layers=20, heads=16)
# In the search for the largest model: 50M parameters a layer.
WIDE_SHAPE = ModelShape(vocab_size=32768, seq_len=1024, dim=2048, layers=1, heads=16)

TIERS = tuple(Contender("zs", 3, "bf16", offload) for offload in ("", "opthost", "host", "disk", "infinity"))
PEERS = (Contender("fsdp2", None, "bf16", "offload"), Contender("ds", 3, "bf16", "offload"))

# Bytes a parameter on device, host and disk, rounded up, by offload: for a search's first size, and its limit on the host.
STATE_NBYTES = {
    "": (18, 0, 0),  # bf16 parameter; fp32 gradient, master, two moments
    "backend": (18, 0, 0),
    "opthost": (2, 16, 0),
    "host": (0, 18, 0),
    "host8": (0, 11, 0),  # split masters 4, gradient 4, moments 2, and their scales
    "disk": (2, 4, 12),
    "infinity": (0, 0, 18),
    "offload": (0, 20, 0),
}
HOST_SHARE = 0.9  # of the host's free memory that states may take: the kernel would kill a process, perhaps not ours
USABLE = 0.8  # share of each memory that model states may fill in the first trial of a search


@dataclass(frozen=True)
class Largest:
    """The result of a search. fits: layers of the largest model that was trained; fails: layers of the smallest that was not.

    complete: fits and fails differ by at most an eighth; False where the time was over. why: message of the last failure.
    """

    fits: int | None = None
    fails: int | None = None
    complete: bool = False
    why: str = ""
    trials: int = 0

    @property
    def numel(self) -> int | None:
        return None if self.fits is None else parameter_count(Workload(dataclasses.replace(WIDE_SHAPE, layers=self.fits)))


def search(
    attempt: Callable[[int], str | None], first: int, time_s: float, clock: Callable[[], float] = time.monotonic
) -> Largest:
    """Search for the largest number of layers that fits, to an eighth: double or halve it from `first`, then bisect.

    Args:
        attempt: layers -> None where they fit, else the reason why not.
        first: layers of the first trial, at least 1.
        time_s: seconds after which no trial is begun.
    """
    end, found = clock() + time_s, Largest()
    while clock() < end:
        if found.fits is None:
            layers = first if found.fails is None else found.fails // 2
        elif found.fails is None:
            layers = 2 * found.fits
        else:
            known = found.fails - found.fits <= max(1, found.fits // 8)
            layers = 0 if known else (found.fits + found.fails) // 2
        if not layers:
            return dataclasses.replace(found, complete=True)
        why = attempt(layers)
        news = {"fits": layers} if why is None else {"fails": layers, "why": why}
        found = dataclasses.replace(found, **news, trials=found.trials + 1)
    return found


def step_flops(workload: Workload) -> float:
    """Return the floating-point operations of one rank's step; see the head of this file."""
    s = workload.shape
    weights = 12 * s.layers * s.dim**2 + s.vocab_size * s.dim
    return workload.sequences * s.seq_len * (6.0 * weights + 6.0 * s.layers * s.dim * s.seq_len)


def first_layers(contender: Contender, room: tuple[int, int, int]) -> int:
    """Return about as many layers as the tiers of a contender hold. room: bytes on device, host and disk."""
    per_layer = 12 * WIDE_SHAPE.dim**2
    limits = [
        USABLE * have / (need * per_layer) for have, need in zip(room, STATE_NBYTES[contender.offload], strict=True) if need
    ]
    return max(1, int(min(limits)))


def measure(seed: int, swap_path: str | None, out: Path, search_s: float) -> list[Measured]:
    """Search for the largest model of each contender that offloads or is zeroshard's; return the table. search_s: seconds for each."""
    device_nbytes = torch.cuda.mem_get_info()[1]
    wide = Workload(WIDE_SHAPE, sequences=1, ranks=1, seed=seed, device="cuda", swap_path=swap_path, meta=True, checkpoint=True)
    largest = dict[str, Largest]()
    for contender in (*TIERS, *PEERS):
        if missing := missing_reason(contender, wide):
            largest[contender.label] = Largest(why=missing)
            continue
        disk_nbytes = shutil.disk_usage(swap_path).free if swap_path else 0
        room = (device_nbytes, available_nbytes() or 0, disk_nbytes)
        attempt = partial(trial, contender, wide, room[1], out / "logs-largest")
        largest[contender.label] = search(attempt, first_layers(contender, room), search_s)
        say(f"  {contender.name:18s} {describe(largest[contender.label])}")
    return [largest_table(largest)]


def short_of_memory(contender: Contender, workload: Workload, host_nbytes: int) -> str | None:
    """Return why a host with so many free bytes cannot hold a contender's states; None if it can."""
    needed = STATE_NBYTES[contender.offload][1] * parameter_count(workload)
    if needed <= HOST_SHARE * host_nbytes:
        return None
    return f"{needed / 2**30:.0f} GiB of host memory needed, {host_nbytes / 2**30:.0f} available"


def largest_table(largest: dict[str, Largest]) -> Measured:
    """Return the table of the largest models, by contender."""
    rows = [
        Row(name, [], facts={"G parameters": round(each.numel / 1e9, 2), "layers": each.fits} if each.fits and each.numel else {})
        for name, each in largest.items()
    ]
    title = f"GPU: largest model trained (dim {WIDE_SHAPE.dim}, {WIDE_SHAPE.seq_len} tokens, checkpointed blocks, 2 steps)"
    return Measured(title, rows, notes=[(f"{name}: {describe(each)}", PLAIN) for name, each in largest.items()])


def trial(contender: Contender, workload: Workload, host_nbytes: int, log_dir: Path, layers: int) -> str | None:
    """Try so many layers in a process of its own; return None if they train, else the reason why not."""
    shape = dataclasses.replace(workload.shape, layers=layers)
    if why := short_of_memory(contender, Workload(shape), host_nbytes):
        return why
    team = Team(contender, dataclasses.replace(workload, shape=shape), log_dir)
    try:
        team.wait_ready()
        team.ask("turn", 0, 2)
    except TeamFailed as error:
        return str(error)
    finally:
        team.close()
    return None


def describe(largest: Largest) -> str:
    """Return a result as one line of text."""
    if largest.fits is None or largest.numel is None:
        return f"none trained: {largest.why or 'no time'}"
    size = f"{largest.numel / 1e9:.2f}G parameters ({largest.fits} layers)"
    if largest.fails is None:
        return f"at least {size}: the time was over"
    return f"{size}; not {largest.fails} layers: {largest.why}" + ("" if largest.complete else " (the time was over)")
