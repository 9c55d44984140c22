"""Calibration: a hardware file of this machine, for `zeroshard plan` and `zeroshard simulate`.

    zeroshard calibrate                                     2 ranks, a thread each; writes hardware.toml
    zeroshard calibrate --ranks 4 --path /mnt/nvme --out my.toml

Local ranks measure at the same time, as they share cores, memory and disks: products of matrices of several sizes (the efficiency
curve), the kernels between them (norms, activation functions, softmax: bytes per second, and the cost of a launch), gathers and
reductions, memory copies, the host's optimizer step, and files if a folder is named. One thread of a rank does all of these, so
that none is hidden behind another: the file says so (`shared_cores`). Computation counts by processor time, times the ranks that
share a core, so that other programs do not count; collectives, files and the step count by the clock. Files are written and read
again and again, as states are, since a first read is slower. If reading and writing at once is hardly faster than one after the
other, the file says that they take turns (`shared_disk`).
"""

from __future__ import annotations

import functools
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import backend_select
from ...comm.launch import run_processes
from ...errors import ConfigError, SwapError
from ...seam import DirectComm, engine_of
from ...tiers import visible_cores
from ...tiers.io import SwapFolder
from ...utils import torch_compat
from ...utils.host_memory import available_nbytes, keep_freed_memory
from ...utils.torch_compat import TorchDispatchMode
from .disk_bandwidth import PHASES, REQUEST_NBYTES, Burst, DiskBursts, DiskSpeed, bandwidth
from .hardware import Curve, Device, Hardware, Link
from .trace import Resource

SIDES = (32, 64, 128, 256, 512, 1024)  # of square matrices
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPPED_NUMEL, EXCHANGED_NUMEL, COPIED_NUMEL = 4 << 20, 2 << 20, 16 << 20  # of a rank: more than caches hold
SMALL_NBYTES = 4 << 20  # of a request, as those of an optimizer's slabs; the large ones are REQUEST_NBYTES
BLOCK_ROWS, BLOCK_DIM = 512, 1024  # tokens and hidden size of the kernels between products
LIMIT_S = 600.0


@dataclass(frozen=True)
class Amount:
    """The extent of measurements. turn_s: seconds of each. numel: the most of a tensor. rounds: of files, after a first one."""

    sides: tuple[int, ...] = SIDES
    turn_s: float = 0.3
    numel: int = COPIED_NUMEL
    rounds: int = 5


@dataclass(frozen=True)
class Found:
    """The rates that one rank measured. flops: flops/s by dtype, in the order of sides; stepped: parameters/s."""

    flops: dict[str, list[float]]
    launch_s: float
    between: float  # bytes/s that kernels between products read and write
    copied: float  # bytes/s that a copy reads and writes
    hop_s: float
    exchanged: float  # bytes/s that a gather or a reduction sends
    stepped: float
    bursts: dict[str, list[Burst]]  # by phase, of each round


def calibrate(ranks: int = 2, path: str | None = None, amount: Amount = Amount(), name: str = "") -> Hardware:
    """Measure this machine with so many processes of one thread; this takes a minute at most.

    path: a folder on the disk that offloaded states go to; None: no disk is measured, and the hardware has no links to one.
    Raises ConfigError for a number of ranks below 1, SwapError for a folder that cannot be used.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks: expected at least 1, got {ranks}")
    if path is not None:
        SwapFolder(path, rank=0, needed_nbytes=0).close()
    found = run_processes(_measure, ranks, path, amount, timeout_s=LIMIT_S)
    return _hardware(found, ranks, path, amount, name or f"cpu of {platform.node()}")


def command(ranks: int, path: str | None, out: Path, say: Callable[[str], None]) -> int:
    """Measure this machine, report by `say`, write the hardware file; return the exit code of `zeroshard calibrate`."""
    say(f"calibration: {ranks} ranks of one thread each, at the same time")
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out: expected the path of a file in a folder that exists, got {out}")
    try:
        hardware = calibrate(ranks, path)
    except SwapError as error:
        raise ConfigError(f"--path: {str(error).removeprefix('rank 0: ')}") from None
    hardware.save(out)
    for line in report(hardware):
        say(line)
    say(f"written: {out}; use it with --hardware {out}")
    return 0


def report(hardware: Hardware) -> list[str]:
    """Return lines that show what was measured: the rates of each rank while all ranks work."""
    device, curve = hardware.device, hardware.device.efficiency
    peaks = ", ".join(f"{name} {flops / 1e9:,.1f}" for name, flops in device.peak_flops.items())
    shares = ", ".join(f"{share:.0%} at {flops:.0e}" for flops, share in zip(curve.flops, curve.fraction, strict=True))
    links = ", ".join(f"{r.value} {link.bandwidth / 1e9:.2f}" for r, link in hardware.links.items())
    return [
        f"matrix products, GFLOPS: {peaks}; of that by flops of a product: {shares}",
        f"other kernels: {device.memory_bandwidth / 1e9:.2f} GB/s, {1e6 * device.kernel_latency_s:.1f} us a launch",
        f"links, GB/s: {links}" if links else "links: none with one rank",
        f"optimizer step, all ranks: {hardware.host_step_rate / 1e6:,.0f} million parameters a second",
    ]


def _hardware(found: Sequence[Found], ranks: int, path: str | None, amount: Amount, name: str) -> Hardware:
    flops = {dtype: [fmean(each.flops[dtype][n] for each in found) for n in range(len(amount.sides))] for dtype in DTYPES}
    peaks = {dtype: max(values) for dtype, values in flops.items()}
    mean = {f.name: fmean(getattr(each, f.name) for each in found) for f in fields(Found) if f.name not in ("flops", "bursts")}
    links = dict.fromkeys((Resource.DOWN, Resource.UP), Link(mean["copied"] / 2, mean["launch_s"]))
    if ranks > 1:
        links[Resource.INSIDE] = Link(mean["exchanged"], mean["hop_s"])
    take_turns = False
    if path is not None:
        disk = DiskSpeed(**{phase: _speed(found, phase) for phase in PHASES})
        links |= {Resource.READ: _requests(found, "read"), Resource.WRITE: _requests(found, "write")}
        # whether reads and writes at once are nearer to one after the other than to both at full speed
        in_turn, at_full_speed = 2 / (1 / disk.read + 1 / disk.write), 2 * min(disk.read, disk.write)
        take_turns = disk.both < (in_turn + at_full_speed) / 2
    memory = available_nbytes() or 0
    shape = "fp32, square matrices, forward and both gradients"
    measured = f"zeroshard calibrate, {ranks} ranks of one thread at the same time, {time.strftime('%Y-%m-%d')}"
    device = Device(
        name=platform.processor() or platform.machine(), memory_nbytes=max(1, memory // ranks), memory_bandwidth=mean["between"],
        kernel_latency_s=mean["launch_s"], peak_flops=peaks,
        efficiency=Curve(tuple(2.0 * n**3 for n in amount.sides), tuple(value / peaks["fp32"] for value in flops["fp32"])),
    )  # fmt: skip
    return Hardware(
        name=name, device=device, devices_per_node=ranks, links=links, host_memory_nbytes=max(1, memory),
        disk_nbytes=shutil.disk_usage(path).free if path is not None else 0, host_step_rate=sum(each.stepped for each in found),
        host_memory_bandwidth=mean["copied"] * ranks, separate=False, shared_cores=True,
        shared_disk=take_turns,
        source={"all": measured, "memory": "what was free at that time", "efficiency": shape},
    )  # fmt: skip


def _speed(found: Sequence[Found], phase: str) -> float:
    """Return the bytes per second of all ranks together, the median of the rounds."""
    return median(bandwidth(list(bursts)) for bursts in zip(*(each.bursts[phase] for each in found), strict=True))


def _requests(found: Sequence[Found], phase: str) -> Link:
    """Return a rank's link to the disk, by requests of two sizes: the time of a byte, and the latency of a request."""
    large, small = (
        size / (_speed(found, which) / len(found)) for size, which in ((REQUEST_NBYTES, phase), (SMALL_NBYTES, f"small {phase}"))
    )
    per_byte = (large - small) / (REQUEST_NBYTES - SMALL_NBYTES)
    if not 0 < per_byte < small / SMALL_NBYTES:  # small requests are as fast per byte, or noise hides the difference
        return Link(REQUEST_NBYTES / large, 0.0)
    return Link(1 / per_byte, small - SMALL_NBYTES * per_byte)


# ------------------------------------------------------------------------------------------------------ a rank


def _measure(rank: int, world_size: int, path: str | None, amount: Amount) -> Found:
    dist.init_process_group("gloo")
    comm = backend_select.current("auto", torch.device("cpu"), LIMIT_S)
    keep_freed_memory()  # as zs.shard does: else the system clears the pages of every large result
    torch.manual_seed(0)
    launch_s, _ = _between(comm, 4, 8, amount.turn_s)
    rows = min(BLOCK_ROWS, max(1, amount.numel // BLOCK_DIM))
    kernel_s, kernel_nbytes = _between(comm, rows, BLOCK_DIM, amount.turn_s)
    hop_s, _ = _exchanged(comm, 16, amount.turn_s)
    exchange_s, sent = _exchanged(comm, min(EXCHANGED_NUMEL, amount.numel), amount.turn_s)
    source = torch.ones(amount.numel)
    copy_s = _turn(comm, functools.partial(torch.empty_like(source).copy_, source), amount.turn_s)
    found = Found(
        flops={name: [_product(comm, n, dtype, amount.turn_s) for n in amount.sides] for name, dtype in DTYPES.items()},
        launch_s=launch_s,
        between=kernel_nbytes / max(kernel_s - launch_s, 0.1 * kernel_s),
        copied=2 * source.nbytes / copy_s,
        hop_s=hop_s,
        exchanged=sent / max(exchange_s - hop_s, 0.1 * exchange_s),
        stepped=_step_rate(comm, min(STEPPED_NUMEL, amount.numel)),
        bursts={},
    )
    if path is not None:
        probe = DiskBursts(path, 16 * amount.numel)
        kinds = {phase: (phase, REQUEST_NBYTES) for phase in PHASES}
        kinds |= {f"small {phase}": (phase, SMALL_NBYTES) for phase in ("write", "read")}
        for number in range(1 + amount.rounds):
            for name, kind in kinds.items():
                comm.exchange(b"", f"calibrate: {name}")
                burst = probe.burst(*kind)
                if number:  # the first round warms up
                    found.bursts.setdefault(name, []).append(burst)
        probe.file.close()
    comm.exchange(b"", "calibrate: end")
    return found


def _turn(comm: DirectComm, action: Callable[[], object], turn_s: float) -> float:
    """Return the seconds of one call: the median over a turn that all ranks begin together, after one call to warm up."""
    action()
    comm.exchange(b"", "calibrate: turn")
    samples, begin = list[float](), time.perf_counter()
    while not samples or time.perf_counter() - begin < turn_s:
        started = time.process_time()
        action()
        samples.append(time.process_time() - started)
    return median(samples) * max(1.0, comm.world_size / visible_cores())


def _product(comm: DirectComm, side: int, dtype: torch.dtype, turn_s: float) -> float:
    """Return the flops/s of a linear layer's three products (forward, gradients of input and weight), without their launches."""

    def three(side: int) -> float:
        given, weight = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
        return _turn(comm, lambda: (given @ weight.t(), given @ weight, given.t() @ given), turn_s)

    all_s, launches_s = three(side), three(2)
    return 3 * 2.0 * side**3 / max(all_s - launches_s, 0.1 * all_s)


def _between(comm: DirectComm, rows: int, dim: int, turn_s: float) -> tuple[float, float]:
    """Return (seconds, bytes) of a kernel between a block's products, the mean over forward and backward."""
    norm, given = nn.LayerNorm(dim), torch.randn(rows, dim, requires_grad=True)

    def block() -> None:
        hidden = nn.functional.gelu(norm(given)) + given
        torch.softmax(hidden, -1).backward(torch.ones_like(hidden))
        given.grad = norm.weight.grad = norm.bias.grad = None

    block()
    with _Counter() as counted:
        block()
    return _turn(comm, block, turn_s) / counted.kernels, counted.nbytes / counted.kernels


class _Counter(TorchDispatchMode):
    """A dispatch mode that counts kernels, and the bytes of the tensors that they read and make."""

    kernels = nbytes = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        known = {torch_compat.storage_id(each.untyped_storage()) for each in given}
        results = [each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, Tensor)]
        fresh = [each for each in results if torch_compat.storage_id(each.untyped_storage()) not in known]
        if fresh and given:
            self.kernels += 1
            self.nbytes += sum(each.nbytes for each in (*given, *fresh))
        return result


def _exchanged(comm: DirectComm, numel: int, turn_s: float) -> tuple[float, float]:
    """Return (seconds, bytes sent) of a gather or reduction of `numel` elements, the mean of both."""
    shard = max(1, numel // comm.world_size)
    full = torch.empty(shard * comm.world_size)
    mine, whole = comm.allocate(shard, torch.float32, whole=False), comm.allocate(full.numel(), torch.float32, whole=True)
    mine.tensor.fill_(1.0)
    whole.tensor.fill_(1.0)
    samples = []
    for number in range(max(3, round(turn_s / 0.01))):  # equally often on every rank, since all take part in each
        begin = time.perf_counter()
        comm.fence_write()
        comm.gather(full, mine, "calibrate: gather").wait()
        work = comm.reduce(whole, mine.tensor, scale=0.5, accumulate=False, tag=number, label="calibrate: reduce")
        work.wait()
        work.drain()
        samples.append(time.perf_counter() - begin)
    return median(samples[1:]) / 2, comm.volume("gather", shard, torch.float32).inside


def _step_rate(comm: DirectComm, numel: int) -> float:
    """Measure the parameters per second of the host's AdamW over states that are offloaded to it."""
    from ...public import close, shard

    model = nn.Linear(1024, max(1, numel * comm.world_size // 1024), bias=False)
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=1, offload_optimizer="cpu", comm=comm)
    comm.exchange(b"", "calibrate: host step")
    rate = engine_of(model).rehearse_step().rate()
    close(model)
    return rate
