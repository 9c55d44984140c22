"""A proof that a model trains whose states exceed the memory: parameters, gradients and optimizer states are on disk.

    python -m benchmarks.larger_than_memory --parameters 2e9 --limit-gib 6 --path /folder/on/a/local/disk

Starts ranks below one enforced memory limit (`MemoryCage`), trains a GPT with all model states on disk, and prints the peak
of memory, the bytes moved, and the time of a step beside its bound: bytes moved / measured bandwidth of the disk.
See ZeRO-Infinity, arXiv 2104.07857.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.config import Offload
from zeroshard.memory.io.swap_folder import measure
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.zero.runtime import runtime_of

_ROOT = Path("/sys/fs/cgroup")


class CageUnavailable(RuntimeError):
    """Raised if this system does not let the process set a memory limit."""


class MemoryCage:
    """A cgroup (v1 or v2) with a memory limit. Processes that exceed it together are killed by the kernel.

    Each process calls `enter`; afterwards `peak_nbytes` says what they used. It needs the right to make a group below this
    process's own (root, or delegation).
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.old = (_ROOT / "memory").is_dir()
        root, lines = _ROOT, [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        if self.old:
            root = _ROOT / "memory"
            own = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), "/")
        else:
            own = next((path for number, _, path in lines if number == "0"), "/")
        parent = root / own.lstrip("/")  # this process's own group
        parent = parent if parent.is_dir() or not self.old else root
        self.folder = parent / f"zeroshard-{os.getpid()}-{secrets.token_hex(3)}"

    def __enter__(self) -> MemoryCage:
        name = "memory.limit_in_bytes" if self.old else "memory.max"
        try:
            self.folder.mkdir()
            (self.folder / name).write_text(str(self.limit_nbytes))
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


@dataclass(frozen=True)
class Plan:
    """The settings of a run. path: folder of the disk tier. limit_nbytes: memory limit of all ranks together; 0: no limit."""

    parameters: float
    path: str
    ranks: int = 2
    limit_nbytes: int = 0
    steps: int = 3
    seq: int = 64
    layers: int = 24
    buffer_nbytes: int = 16 << 20
    buffer_count: int = 6
    timeout_s: float = 3600.0

    def shape(self) -> GPTConfig:
        """Return the shape of a GPT of about `parameters` parameters, most of them in its blocks."""
        dim = round((self.parameters / (12 * self.layers)) ** 0.5 / 128) * 128
        return GPTConfig(vocab_size=8192, seq_len=self.seq, dim=max(dim, 128), layers=self.layers, heads=max(dim // 128, 1))


@dataclass
class Result:
    """The measurements of one rank, or, from `run`, of all ranks. moved_nbytes: bytes moved in the last step, by link."""

    parameters: int = 0
    states_nbytes: int = 0
    limit_nbytes: int = 0
    peak_nbytes: int | None = None  # memory that counts against the limit, all ranks together
    rss_peak_nbytes: int = 0  # sum of resident memory over ranks: shared pages count once for each rank
    start_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    moved_nbytes: dict[str, int] = field(default_factory=dict)
    read_nbytes_per_s: float = 0.0
    write_nbytes_per_s: float = 0.0
    bound_seconds: float = 0.0


def _rank(rank: int, world_size: int, plan: Plan, cage: MemoryCage | None) -> Result:
    if cage is not None:
        cage.enter()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin = time.monotonic()
    tier = Offload("nvme", path=plan.path, buffer_nbytes=plan.buffer_nbytes, buffer_count=plan.buffer_count)
    with torch.device("meta"):
        model = GPT(plan.shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = zs.shard(
        model, optimizer, stage=3, precision="bf16", prefetch_nbytes=0, max_grad_norm=1.0, stall_timeout_s=600.0,
        offload_param=tier, offload_gradient=tier, offload_optimizer=tier,
    )  # fmt: skip
    out = Result(start_seconds=time.monotonic() - begin)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, plan.shape().vocab_size, (1, plan.seq), generator=generator)
    process = psutil.Process()
    before: dict = {}
    for _ in range(plan.steps):
        begin = time.monotonic()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.step_seconds.append(time.monotonic() - begin)
        out.losses.append(loss.item())
        moved = zs.report(model).moved
        out.moved_nbytes = {link: nbytes - before.get(link, 0) for link, nbytes in moved.items()}
        before = moved
        out.rss_peak_nbytes = max(out.rss_peak_nbytes, process.memory_info().rss)
        if rank == 0:
            print(f"step {len(out.step_seconds)}: {out.step_seconds[-1]:.1f} s, loss {out.losses[-1]:.3f}", flush=True)
    report = zs.report(model)
    out.parameters, out.states_nbytes = report.num_parameters, sum(report.at_rest.values())
    runtime_of(model).tiers.close()  # nobody needs the values: remove the files without reading them back
    return out


def run(plan: Plan) -> Result:
    """Train as `plan` says; return the measurements of all ranks. Raises where a rank fails, also by exceeding the limit."""
    read, write = measure(plan.path)
    with MemoryCage(plan.limit_nbytes) if plan.limit_nbytes else nullcontext() as cage:
        ranks = run_processes(_rank, plan.ranks, plan, cage, timeout_s=plan.timeout_s)
        peak = None if cage is None else cage.peak_nbytes()
    moved = {link: sum(r.moved_nbytes[link] for r in ranks) for link in ranks[0].moved_nbytes}
    return replace(
        ranks[0],
        states_nbytes=sum(r.states_nbytes for r in ranks),
        limit_nbytes=plan.limit_nbytes,
        peak_nbytes=peak,
        rss_peak_nbytes=sum(r.rss_peak_nbytes for r in ranks),
        start_seconds=max(r.start_seconds for r in ranks),
        moved_nbytes=moved,
        read_nbytes_per_s=read,
        write_nbytes_per_s=write,
        bound_seconds=moved.get("disk -> host", 0) / read + moved.get("host -> disk", 0) / write,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.larger_than_memory", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parameters", type=float, default=2e9)
    add("--limit-gib", type=float, default=6.0, help="enforced on all ranks together; 0: none")
    add("--path", required=True, help="folder on a local disk with some 20 bytes a parameter of room")
    for name in ("ranks", "steps", "seq", "layers"):
        add(f"--{name}", type=int, default=getattr(Plan, name))
    given = parser.parse_args(argv)
    plan = Plan(given.parameters, given.path, given.ranks, int(given.limit_gib * 2**30), given.steps, given.seq, given.layers)
    try:
        result = run(plan)
    except CageUnavailable as error:
        print(f"zeroshard: {error}. Use --limit-gib 0 to run without a limit.", file=sys.stderr)
        return 2
    gib = lambda nbytes: "not limited" if not nbytes else f"{nbytes / 2**30:.2f} GiB"  # noqa: E731
    per_parameter, reached = result.states_nbytes / result.parameters, result.step_seconds[-1] / result.bound_seconds
    steps, losses = (
        ", ".join(f"{each:{form}}" for each in of) for of, form in ((result.step_seconds, ".1f"), (result.losses, ".3f"))
    )
    rows = {
        "parameters": f"{result.parameters:,}",
        "model states": f"{gib(result.states_nbytes)} ({per_parameter:.1f} bytes a parameter), on disk",
        "memory limit": f"{gib(result.limit_nbytes)}, all ranks together",
        "memory at peak": f"{gib(result.peak_nbytes or 0)} (resident, summed over ranks: {gib(result.rss_peak_nbytes)})",
        "start": f"{result.start_seconds:.1f} s",
        "steps": f"{steps} s, losses {losses}",
        "moved in a step": ", ".join(f"{link} {nbytes / 1e9:.1f} GB" for link, nbytes in result.moved_nbytes.items()),
        "disk": f"read {result.read_nbytes_per_s / 1e9:.2f}, write {result.write_nbytes_per_s / 1e9:.2f} GB/s",
        "bound of a step": f"{result.bound_seconds:.1f} s (bytes / bandwidth): {reached:.2f} x reached",
    }
    print("\n".join(f"{name:19s} {text}" for name, text in rows.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
