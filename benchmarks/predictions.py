"""A comparison of predictions with reality: memory and time by a dry run, and by two ranks of this machine.

    python -m benchmarks.predictions                              ten configurations, some three minutes
    python -m benchmarks.predictions --only gpt-3                 those whose names contain gpt-3
    python -m benchmarks.predictions --time hardware.toml         seconds too, by a file that `zeroshard calibrate` wrote
    python -m benchmarks.predictions --time now                   the same, calibrated before and after each; six minutes

Each configuration runs three times: on imagined ranks; by two processes that train (resident memory, seconds); and by these
once more under `observe`, which sees each operator. *Entered*: bytes that the runtime allocates, from its ledger. *Live*: those
and the bytes of all other tensors. *Resident*: growth of a rank's resident memory since before the model; shared memory counts
half for each rank. *Processor*: processor time of a rank, which other programs do not lengthen. On a CPU, device is host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.activations.checkpoint import checkpoint_activations
from zeroshard.cli.sheets import show
from zeroshard.comm.launch import run_processes, share_imports
from zeroshard.config import Tier
from zeroshard.parallel.parallelize import next_token_loss
from zeroshard.planner.dry_run import observe
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.planner.plan import ACTIVATIONS, KEPT, Plan
from zeroshard.planner.simulator.calibrate import calibrate
from zeroshard.planner.simulator.hardware import Hardware
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.trace import Resource
from zeroshard.utils.sheets import Sheet

from . import memory
from .workload import build_llama

RANKS = 2
FOLDER, NOW = "FOLDER", "now"
STEPS = 7  # timed steps; one more comes before them
LIMIT_S = 300.0


def gpt() -> nn.Module:
    """Build a GPT of 59M parameters."""
    return GPT(GPTConfig(vocab_size=4096, seq_len=256, dim=1024, layers=4, heads=16))


def llama() -> nn.Module:
    """Build a Llama of 56M parameters, with grouped-query attention and a gated MLP."""
    return build_llama(4096, 1024, 2816, 4, 16, 8, max_position_embeddings=256, use_cache=False)


@dataclass(frozen=True)
class Case:
    """One configuration. The value FOLDER in `options` stands for a temporary folder of the run."""

    name: str
    model: Callable[[], nn.Module]
    batch: tuple[int, int]
    options: Mapping[str, Any]
    micro_batches: int = 1
    checkpointing: bool = False
    whole: bool = False  # True: each rank builds the model with values; False: on the meta device

    def settings(self, folder: str) -> dict[str, Any]:
        """Return the arguments for `zs.plan` and `observe`."""
        options = {key: folder if value == FOLDER else value for key, value in self.options.items()}
        return {
            "batch": self.batch, "micro_batches": self.micro_batches, "hold": True, "checkpointing": self.checkpointing, "name": self.name,
            "whole": self.whole, **options,
        }  # fmt: skip


_DISK = {"offload_path": FOLDER}
CASES = (
    Case("gpt-0", gpt, (1, 128), {"stage": 0}),
    Case("gpt-1-accumulate", gpt, (1, 64), {"stage": 1}, micro_batches=3),
    Case("gpt-2-bf16", gpt, (1, 128), {"stage": 2, "precision": "bf16"}),
    Case("gpt-3", gpt, (1, 128), {"stage": 3}),
    Case("gpt-3-checkpoints-accumulate", gpt, (1, 128), {"stage": 3}, micro_batches=3, checkpointing=True),
    Case("gpt-3-host", gpt, (1, 128), {"stage": 3, "precision": "bf16", "offload_optimizer": "cpu", "offload_param": "cpu"}),
    Case("gpt-3-disk", gpt, (1, 128), {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme", **_DISK}),
    Case("llama-1", llama, (1, 128), {"stage": 1}, whole=True),
    Case("llama-2-disk", llama, (1, 128), {"stage": 2, "precision": "bf16", "offload_optimizer": "nvme", **_DISK}),
    Case("llama-3-checkpoints", llama, (4, 128), {"stage": 3}, checkpointing=True),
)


# a rank's growth of resident memory by phase; seconds and processor seconds of each step but the first; the machine's load over the last minute
Run = tuple[dict[str, int], list[tuple[float, float]], float]


def warm_device() -> None:
    """Let libraries take what they take once on the current CUDA device, e.g. cuBLAS's workspaces, forward and backward."""
    matrix = torch.ones(256, 256, device="cuda", requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        (matrix.to(dtype) @ matrix.to(dtype)).sum().backward()
    torch.cuda.synchronize()


def measure_device(case: Case, folder: str, steps: int) -> tuple[int, int]:
    """Train on the current CUDA device; return the bytes by which its allocated memory grew at the peak, and those that stayed."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        train(case, folder, steps)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    gc.collect()
    return grown, torch.cuda.memory_allocated() - before


def measure(rank: int, world_size: int, case: Case, folder: str, steps: int) -> tuple[Run, Plan]:
    """Train in this process as a user would, then once more under `observe`; return the measurements of both."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(replace(case, micro_batches=1, batch=(1, 8)), folder, 1)  # so that torch has loaded, and allocated, all it keeps
    gc.collect()
    memory.trim()
    dist.barrier()
    before, grown = _own_nbytes("VmRSS"), dict[str, int]()
    memory.reset_peak_rss()

    def note(phase: str) -> None:
        """Enter the highest growth since the last call for a phase."""
        grown[phase] = max(grown.get(phase, 0), _own_nbytes("VmHWM") - before)
        memory.reset_peak_rss()

    taken = train(case, folder, 1 + steps, note)
    run = grown, taken[1:], os.getloadavg()[0]
    return run, observe(case.model, ranks=world_size, rank=rank, **case.settings(folder))


def train(case: Case, folder: str, steps: int, note: Callable[[str], None] | None = None) -> list[tuple[float, float]]:
    """Train some steps; return of each (seconds, processor seconds of this process). note: called after each phase, a save too."""
    with contextlib.nullcontext() if case.whole else torch.device("meta"):
        model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {key: folder if value == FOLDER else value for key, value in case.options.items()}
    model, optimizer = zs.shard(model, optimizer, **options)
    if case.checkpointing:
        checkpoint_activations(model)
    taken = []
    if note is not None:
        note("load")
    for step in range(steps):
        dist.barrier()
        begin, cores = time.perf_counter(), time.process_time()
        for number in range(case.micro_batches):
            with zs.accumulate(model) if number + 1 < case.micro_batches else contextlib.nullcontext():
                tokens = torch.randint(0, 64, case.batch)
                output = model(tokens)
                (next_token_loss(getattr(output, "logits", output), tokens) / case.micro_batches).backward()
                del output  # else the logits of this micro-batch are resident in the next one, and in the step
        optimizer.step()
        optimizer.zero_grad()
        taken.append((time.perf_counter() - begin, time.process_time() - cores))
        if note is not None:
            note("step" if step else "first step")
    if note is not None:
        zs.save(f"{folder}/saved", model, optimizer)
        note("save")
    zs.close(model, restore=False)
    return taken


def _own_nbytes(resident: str) -> int:
    """Return a field of resident bytes with shared memory divided by the number of processes that map it."""
    here, shared = memory.field_nbytes(resident), memory.field_nbytes("RssShmem")
    part = memory.field_nbytes("Pss_Shmem", "/proc/self/smaps_rollup")
    assert here is not None and shared is not None and part is not None, "this benchmark needs Linux"
    return here - shared + part


def main() -> int:
    """Run the command line and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="configurations whose names contain this")
    parser.add_argument("--time", metavar="HARDWARE", help=f"seconds a step, too: a name or a file of hardware, or {NOW!r}")
    given = parser.parse_args()
    share_imports(["torch.distributed", "transformers", "benchmarks.worker", "zeroshard.planner.dry_run"])
    rows: list[tuple[str, ...]] = []

    def hardware() -> Hardware | None:
        if given.time != NOW:
            return Hardware.named(given.time) if given.time else None
        with tempfile.TemporaryDirectory() as folder:
            return calibrate(RANKS, folder)

    def compare(case: Case, label: str, planned: float, seen: float, form: str = ",.0f") -> None:
        first = not rows or all(row[0] != case.name for row in rows)
        error = f"{planned / seen - 1:+.1%}" if seen else ""
        rows.append((case.name if first else "", label, f"{planned:{form}}", f"{seen:{form}}", error))

    before = hardware()
    for case in (case for case in CASES if given.only in case.name):
        with tempfile.TemporaryDirectory() as folder:
            plan = zs.plan(case.model, ranks=RANKS, separate=False, **case.settings(folder))
            found = run_processes(measure, RANKS, case, folder, STEPS if before else 1, timeout_s=LIMIT_S)
        runs, seen = [run for run, _ in found], found[0][1]
        grown = [[nbytes for phase, nbytes in run[0].items() if phase != "save"] for run in runs]
        saving = sum(plan.peak(tier, ("save",)) for tier in (Tier.DEVICE, Tier.HOST))
        compare(case, "entered", held_nbytes(plan, (ACTIVATIONS, KEPT)), held_nbytes(seen, (ACTIVATIONS, KEPT)))
        compare(case, "live", held_nbytes(plan, (KEPT,)), held_nbytes(seen, (KEPT,)))
        compare(case, "resident", held_nbytes(plan), fmean(map(max, grown)))
        compare(case, "resident, saving", saving, fmean(run[0]["save"] for run in runs))
        if before is not None:
            after = (hardware() if given.time == NOW else None) or before
            simulated = [simulate(plan.trace, each) for each in (before, after)]
            cores = before.lane(Resource.DEVICE)
            predicted = fmean(each.step_s for each in simulated), fmean(each.busy[cores] for each in simulated)
            before = after
            for which, name in enumerate(("wall", "processor")):
                seconds = median(step[which] for _, steps, _ in runs for step in steps)
                compare(case, f"seconds, {name} (load {runs[0][2]:.1f})", predicted[which], seconds, ".2f")
    show(Sheet("prediction and reality", ("configuration", "of", "predicted", "measured", ""), rows))
    return 0


def held_nbytes(plan: Plan, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of device and host together in the fullest phase but the save, without categories in `without`."""
    phases = [phase.held for phase in plan.phases if phase.name != "save"]
    return max(
        sum(nbytes for tier in (Tier.DEVICE, Tier.HOST) for name, nbytes in held.get(tier, {}).items() if name not in without)
        for held in phases
    )


if __name__ == "__main__":
    raise SystemExit(main())
