"""A model whose states exceed the memory that its ranks may use, enforced by the kernel, trains with everything on disk.

    ZEROSHARD_SLOW=1 pytest tests/offload/test_larger_than_memory.py                  2 x 10^8 parameters below 640 MiB
    ZEROSHARD_BILLIONS=2 ZEROSHARD_LIMIT_GIB=6 ZEROSHARD_SLOW=1 ... -s --basetemp DIR   2 x 10^9 below 6 GiB, on another disk

It prints the peak of memory, and the time of a step beside its bound: bytes moved over the measured bandwidth of the disk.
See ZeRO-Infinity, arXiv 2104.07857.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.config import Offload
from zeroshard.engine.runtime import runtime_of
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.tiers.io.swap_folder import measure

RANKS = 2
ROOM_NBYTES = 640 << 20  # beside what two interpreters take; a run needs 0.1 GiB of it here, and page cache in passing
BILLIONS, LIMIT_GIB = (os.environ.get(name) for name in ("ZEROSHARD_BILLIONS", "ZEROSHARD_LIMIT_GIB"))
LAYERS, SEQ, BUFFER_NBYTES, STEPS = (24, 64, 16 << 20, 3) if BILLIONS else (40, 16, 4 << 20, 2)
LIMIT_S = 3600.0 if BILLIONS else 400.0
GROUPS = Path("/sys/fs/cgroup")


class CageUnavailable(RuntimeError):
    """Raised if this system does not let the process set a memory limit."""


class MemoryCage:
    """A cgroup (v1 or v2) with a memory limit. Processes that exceed it together are killed by the kernel.

    Each process calls `enter`; afterwards `peak_nbytes` says what they used. It needs the right to make a group below this
    process's own (root, or delegation).
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes, self.old = limit_nbytes, (GROUPS / "memory").is_dir()  # old: version 1
        root = GROUPS / "memory" if self.old else GROUPS
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = next((path for n, kinds, path in groups if ("memory" in kinds.split(",") if self.old else n == "0")), "/")
        parent = root / own.lstrip("/")  # this process's own group
        self.folder = (root if self.old and not parent.is_dir() else parent) / f"zeroshard-{os.getpid()}-{secrets.token_hex(3)}"

    def __enter__(self) -> MemoryCage:
        try:
            self.folder.mkdir()
            (self.folder / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(self.limit_nbytes))
        except OSError as error:
            self.__exit__()
            raise CageUnavailable(f"no memory limit can be set here: {error}") from None
        return self

    def enter(self) -> None:
        """Move the calling process into the group: memory that it allocates from now on counts against the limit."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_nbytes(self) -> int:
        """Return the most bytes that all processes inside have used together so far, page cache included."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self.old else "memory.peak")).read_text())

    def __exit__(self, *_: object) -> None:
        if self.folder.is_dir():
            self.folder.rmdir()  # works when the processes have ended


def interpreter_nbytes() -> int:
    """Of a process that has imported torch and zeroshard, shared by no other: 150-190 MiB of the CPU build, 280-480 of that for CUDA."""
    program = "import psutil, torch.distributed, zeroshard; print(psutil.Process().memory_full_info().uss)"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def train(rank: int, world_size: int, folder: str, numel: float, cage: MemoryCage | None):
    """Parameters, bytes of states, of the largest resident memory, and of the last step by link; losses, and seconds of each step."""
    if cage is not None:
        cage.enter()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tier = Offload("nvme", path=folder, buffer_nbytes=BUFFER_NBYTES, buffer_count=6)
    dim = round((numel / (12 * LAYERS)) ** 0.5 / 128) * 128  # most parameters are in the blocks
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=8192, seq_len=SEQ, dim=dim, layers=LAYERS, heads=dim // 128))
    model, optimizer = zs.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), stage=3, precision="bf16", prefetch_nbytes=0,
        max_grad_norm=1.0, stall_timeout_s=600.0, offload_param=tier, offload_gradient=tier, offload_optimizer=tier,
    )  # fmt: skip
    tokens = torch.randint(0, 8192, (1, SEQ), generator=torch.Generator().manual_seed(rank))
    seconds, losses, resident, total = [], [], 0, {}
    for _ in range(STEPS):
        begin = time.monotonic()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.monotonic() - begin)
        losses.append(loss.item())
        before, total = total, zs.report(model).moved
        moved = {link: nbytes - before.get(link, 0) for link, nbytes in total.items()}
        resident = max(resident, psutil.Process().memory_info().rss)
    report = zs.report(model)
    runtime_of(model).tiers.close()  # nobody needs the values: remove the files without reading them back
    return report.num_parameters, sum(report.at_rest.values()), resident, moved, losses, seconds


@pytest.mark.slow  # 50 s; states on disk that equal states in memory: tests/offload; the limit itself: test_host_memory
@pytest.mark.processes
@pytest.mark.limit(LIMIT_S)
def test_states_beyond_an_enforced_limit_train_on_disk(tmp_path):
    allowed = int(float(LIMIT_GIB) * 2**30) if LIMIT_GIB else ROOM_NBYTES + RANKS * interpreter_nbytes()
    read, write = measure(str(tmp_path))
    cage = MemoryCage(allowed)
    try:
        with cage:
            pass
    except CageUnavailable:
        cage = None  # nothing enforces it here: the resident memory is watched instead
    numel = float(BILLIONS or 0.2) * 1e9
    with cage or nullcontext():
        ranks = run_processes(train, RANKS, str(tmp_path), numel, cage)
        peak = None if cage is None else cage.peak_nbytes()
    parameters, _, _, _, losses, seconds = ranks[0]
    states, resident = (sum(rank[place] for rank in ranks) for place in (1, 2))
    moved = {link: sum(rank[3][link] for rank in ranks) for link in ranks[0][3]}
    bound = moved["disk -> host"] / read + moved["host -> disk"] / write
    print(
        f"{parameters:,} parameters, {states / 2**30:.2f} GiB of states; peak {(peak or resident) / 2**30:.2f} of "
        f"{allowed / 2**30:.2f} GiB; steps {seconds} s, bound {bound:.1f} s; read {read / 1e9:.2f}, write {write / 1e9:.2f} GB/s"
    )
    assert parameters >= numel and states > 2.5 * allowed  # bf16 parameters, fp32 gradients, masters, two moments: 18 bytes
    assert (peak or resident) <= allowed
    assert losses[1] < losses[0]  # the same batch again
    # a step reads parameters twice, gradients, masters and moments; it writes gradients, masters, moments and parameters
    assert moved["disk -> host"] == pytest.approx((2 * 2 + 4 + 12) * parameters, rel=0.01)
    assert moved["host -> disk"] == pytest.approx((4 + 12 + 2) * parameters, rel=0.01)
    assert not list(tmp_path.iterdir())  # nothing is left behind
