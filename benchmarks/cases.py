"""The cases of the sections host, hostadam and disk: what one process does, beside memory copies and peers.

host      Host work, which is what a library does in Python: forward and backward of 32 units with 11 small parameters each, and
          clipping with a step of 300 small parameters. The world has two ranks of which only rank 0 exists (PyTorch's "fake"
          group, zeroshard's `FakeComm`), so nothing is sent; the time of the plain module is taken off.
hostadam  The Adam step of ZeRO-Offload: bf16 gradients to bf16 parameters, with fp32 masters and two fp32 states. It moves 28
          bytes a parameter (reads 2 + 4 + 8, writes 4 + 8 + 2). The copy of as large a working set moves 16. The peers step
          whole fp32 tensors: a cast of the gradients before, one of the parameters after, as DeepSpeed does
          (deepspeed/runtime/zero/stage_1_and_2.py). Each library works on the memory that it uses for offload: zeroshard and
          the copy on that of its host tier, in huge pages. tests/optim/test_cpu_kernels.py compares values.
disk      Direct writes and reads of one file, which is fully written before: the file engine beside dd and fio with several
          block sizes and queue depths, of which the fastest counts. The engine's memory is as large as the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.tiers import cpu_kernels
from zeroshard.tiers.io import Engine, SwapFolder
from zeroshard.utils.aligned import empty_aligned
from zeroshard.utils.sheets import PLAIN

from .micro import Case, measure, one_line
from .tables import BYTES, MIB, SPEED, Bound, Measured

UNITS, OPTIMIZER_UNITS, DIM = 32, 30, 32  # units of 11 parameters in forward and backward, of 10 in the step; their width
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
DD_BLOCKS_MIB = (1, 4, 16)
FIO_RUNS = (("libaio", 1, 8), ("libaio", 4, 4), ("psync", 4, 1))  # I/O engine, block in MiB, queue depth


# ----------------------------------------------------------------------------------------------------------- host work


class SmallUnit(nn.Module):
    """A module of 10 small parameters, 11 with a scale: two norms, three linear layers with biases."""

    def __init__(self, with_scale: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.maps = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("one", "two", "three")})
        self.scale = nn.Parameter(torch.ones(DIM)) if with_scale else 1.0

    def forward(self, x: Tensor) -> Tensor:  # (4, DIM)
        x = x + self.maps["one"](self.norms[0](x))
        return x + self.maps["three"](self.maps["two"](self.norms[1](x))) * self.scale


def host(rounds: int) -> list[Measured]:
    """Measure host work in a process of its own, since the fake group must not meet a real one."""
    from zeroshard.utils.torch_compat import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    passes = {name: (name, {"fused": True}) for name in ("plain", "fsdp2", "zeroshard")}
    steps = {**passes, **{f"fsdp2 {way}": ("fsdp2", {"foreach": way == "foreach"}) for way in ("foreach", "one by one")}}
    where = "world of 2, rank 0 only"
    work = Bound("host work per unit and step / FSDP2", "zeroshard", ("fsdp2",), 0.25, less="plain")
    step = Bound("optimizer step and clipping / FSDP2", "zeroshard", tuple(name for name in steps if "fsdp2" in name), 0.20)
    found = []
    for title, named, stepping, bound in (
        (f"Forward and backward of {UNITS} units, {where}", passes, False, work),
        (f"Clipping and AdamW step, 300 parameters, {where}", steps, True, step),
    ):
        cases, skipped = [], dict[str, str]()
        for name, (library, variant) in named.items():
            try:
                case = _host_case(name, library, stepping, variant)
                case.sample()
                cases.append(case)
            except Exception as error:
                skipped[name] = f"skipped: {one_line(error)}"
        measured = measure(title, cases, rounds, [bound], warmup=3)
        measured.skipped |= skipped
        if not stepping and (plain := measured.row("plain")):
            for row in measured.rows:
                row.facts["ms a unit, without plain"] = 1e3 * (median(row.seconds) - median(plain.seconds)) / UNITS
        found.append(measured)
    return found


def _host_case(name: str, library: str, stepping: bool, variant: dict[str, bool]) -> Case:
    """Return the case of one library: forward and backward, or (`stepping`) clipping and a step. variant: of AdamW."""
    model: nn.Module = nn.Sequential(*(SmallUnit(not stepping) for _ in range(OPTIMIZER_UNITS if stepping else UNITS)))
    if library == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)
    clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    if library == "zeroshard":
        model, optimizer = zs.shard(model, optimizer, stage=3, comm=FakeComm(rank=0, world_size=2))
        clip = functools.partial(zs.clip_grad_norm_, model, 1.0)
    x = torch.randn(4, DIM)

    def passes() -> None:
        model(x).sum().backward()

    if not stepping:
        return Case(name, passes, before=optimizer.zero_grad)

    def new_gradients() -> None:
        if library == "zeroshard":
            optimizer.zero_grad()
            passes()
        else:  # constant ones: the fake group reduces none
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)

    def step() -> None:
        clip()
        optimizer.step()

    return Case(name, step, before=new_gradients)


# ----------------------------------------------------------------------------------------------------------- host Adam


def hostadam(numel: int = 1 << 25, rounds: int = 5, deepspeed: bool = True) -> list[Measured]:
    """Measure Adam's step on one thread, and on as many as there are cores. By default a memory copy moves 512 MB."""
    return [adam(threads, numel, rounds, deepspeed) for threads in sorted({1, cpu_kernels.visible_cores()})]


@torch.no_grad()
def adam(threads: int, numel: int, rounds: int, deepspeed: bool = True) -> Measured:
    """Measure Adam's step of `numel` parameters on so many threads; memory is filled before anything is timed."""

    def states(new: Callable[[int, torch.dtype], Tensor]) -> dict[str, Tensor]:
        made = {name: new(numel, torch.float32) for name in ("master", "exp_avg", "exp_avg_sq", "grad32")}
        made |= {name: new(numel, torch.bfloat16) for name in ("grad", "out")}
        for tensor in made.values():
            tensor.zero_()
        made["master"].normal_()
        made["grad"].normal_(std=1e-3)
        return made

    def huge(numel: int, dtype: torch.dtype) -> Tensor:
        return empty_aligned(numel * dtype.itemsize).view(dtype)

    ours, theirs = states(huge), states(lambda numel, dtype: torch.empty(numel, dtype=dtype))
    source, target = (huge(2 * numel, torch.float32).zero_() for _ in range(2))
    options = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **OPTIONS).param_groups[0]
    kernel = cpu_kernels.kernel_for(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **OPTIONS), options)
    assert kernel is not None
    state = {"step": torch.zeros(()), "exp_avg": ours["exp_avg"], "exp_avg_sq": ours["exp_avg_sq"]}

    def whole(name: str, make: Callable[..., torch.optim.Optimizer], step: Any, nbytes: float | None, **variant: Any) -> Case:
        """Return the case whose optimizer steps the whole fp32 master, with casts before and after."""
        param = nn.Parameter(theirs["master"])
        param.grad = theirs["grad32"]
        optimizer = make([param], **OPTIONS, **variant)
        optimizer.state[param] = {"step": step, "exp_avg": theirs["exp_avg"], "exp_avg_sq": theirs["exp_avg_sq"]}

        def job() -> None:
            theirs["grad32"].copy_(theirs["grad"])
            optimizer.step()
            theirs["out"].copy_(theirs["master"])

        return Case(name, job, nbytes=nbytes)

    skipped = {}
    with closing(cpu_kernels.Team(threads)) as team, cpu_kernels.stepping_threads(threads):
        cases = [
            Case("zeroshard", lambda: cpu_kernels.step_stretch(
                kernel, ours["master"], ours["grad"], state, options, out=ours["out"], team=team), nbytes=28.0 * numel),
            Case("memory copy", lambda: target.copy_(source), nbytes=16.0 * numel),
            whole("torch fused", torch.optim.AdamW, torch.zeros(()), 40.0 * numel, fused=True),
            whole("torch foreach", torch.optim.AdamW, torch.zeros(()), None, foreach=True),  # its passes are not known
        ]  # fmt: skip
        if deepspeed:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # importing it prints a banner, and the output of its compiler
                    from deepspeed.ops.adam import DeepSpeedCPUAdam

                    cases.append(whole("deepspeed", DeepSpeedCPUAdam, 0, 40.0 * numel))
            except Exception as error:  # without the package, a compiler or ninja it raises errors of several types
                skipped["deepspeed"] = f"skipped: {one_line(error)}"
        many = f"{threads} thread{'s' * (threads > 1)}"
        bounds = [
            Bound(f"host Adam, {many}: {text}", "zeroshard", (peer,), limit, what)
            for peer, text, limit, what in (
                ("memory copy", "bytes/s of the update over bytes/s of a memory copy", 0.9, BYTES),
                ("deepspeed", "speed over DeepSpeed's CPUAdam, same job", 1.0, SPEED),
                ("torch foreach", "speed over torch's AdamW(foreach=True), same job", 4.0, SPEED),
            )
        ]
        title = f"Host Adam, {numel / 1e6:.1f}M parameters, bf16 gradients to bf16 parameters, {many}"
        found = measure(title, cases, rounds, bounds, threads=threads)
    found.skipped |= skipped
    return found


# ---------------------------------------------------------------------------------------------------------------- disk


def disk(path: str | os.PathLike, nbytes: int = 1 << 29, rounds: int = 4) -> list[Measured]:
    """Measure the engine, dd and fio on a new file of `nbytes` (a multiple of 16 MiB) below `path`, and remove the file.

    Raises SwapError where the folder cannot be used; see `SwapFolder`.
    """
    with SwapFolder(path, rank=0, needed_nbytes=nbytes) as folder, Engine() as engine:
        file = folder.file("bench", nbytes)
        memory = empty_aligned(nbytes).random_(0, 256)  # random, since some disks do not store zeros
        engine.write(file, 0, memory).wait()  # so that all measured writes overwrite, as those of training steps do
        how = "direct I/O" if file.direct else "BUFFERED: this filesystem has no direct I/O"
        found = []
        for mode, transfer in (("write", engine.write), ("read", engine.read)):
            cases = [Case("engine", lambda transfer=transfer: transfer(file, 0, memory).wait(), nbytes=nbytes)]
            for block_mib in DD_BLOCKS_MIB if shutil.which("dd") else ():
                run = functools.partial(_dd_s, file.path, nbytes, block_mib, mode)
                cases.append(Case(f"dd bs={block_mib}M", run, nbytes=nbytes, own_clock=True))
            for ioengine, block_mib, depth in FIO_RUNS if shutil.which("fio") else ():
                run = functools.partial(_fio_s, file.path, nbytes, ioengine, block_mib, depth, mode)
                cases.append(Case(f"fio {ioengine} bs={block_mib}M depth={depth}", run, nbytes=nbytes, own_clock=True))
            bound = Bound(
                f"file engine / best of dd and fio, {mode}", "engine", tuple(case.name for case in cases[1:]), 0.95, SPEED
            )
            title = f"File engine, dd and fio: {mode} a file of {nbytes / 2**30:g} GiB"
            found.append(measure(title, cases, rounds, [bound], warmup=0))
            found[-1].notes.append((how, PLAIN))
        return found


def _dd_s(path: str, nbytes: int, block_mib: int, mode: str) -> float:
    """Run dd; return the seconds that it reports."""
    command = ["dd", f"bs={block_mib}M", f"count={nbytes // (block_mib * MIB)}"]
    if mode == "write":
        command += ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    else:
        command += [f"if={path}", "of=/dev/null", "iflag=direct"]
    told = _run(command).stderr
    found = re.search(r"([0-9.e-]+) s,", told)
    if found is None:
        raise RuntimeError(f"expected seconds in the output of dd, got {told!r}")
    return float(found[1])


def _fio_s(path: str, nbytes: int, ioengine: str, block_mib: int, depth: int, mode: str) -> float:
    """Run fio; return the seconds that it reports, which leave out its start."""
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={mode}", f"--bs={block_mib}M", f"--size={nbytes}"]
    command += [f"--ioengine={ioengine}", f"--iodepth={depth}", "--direct=1", "--thread", "--overwrite=1"]
    command += ["--scramble_buffers=0", "--output-format=json"]  # fio spends no time on changing its data
    job = json.loads(_run(command).stdout)["jobs"][0][mode]
    return job["runtime"] / 1e3 * nbytes / job["io_bytes"]


def _run(command: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done
