"""A comparison of predictions with reality: memory and time by a dry run, and by two ranks of this machine.

    python -m benchmarks.predictions                              ten configurations, some three minutes
    python -m benchmarks.predictions --only gpt-3 --details       those whose names contain gpt-3, with categories of bytes
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
import ctypes
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

RANKS = 2
FOLDER, NOW = "FOLDER", "now"
STEPS = 7  # timed steps; one more comes before them
LIMIT_S = 300.0


def gpt() -> nn.Module:
    """Build a GPT of 59M parameters."""
    return GPT(GPTConfig(vocab_size=4096, seq_len=256, dim=1024, layers=4, heads=16))


def llama() -> nn.Module:
    """Build a Llama of 56M parameters, with grouped-query attention and a gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        max_position_embeddings=256, use_cache=False,
    ))  # fmt: skip


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

    def shard_options(self, folder: str) -> dict[str, Any]:
        """Return the options for zs.shard."""
        return {key: folder if value == FOLDER else value for key, value in self.options.items()}

    def settings(self, folder: str) -> dict[str, Any]:
        """Return the arguments for `zs.plan` and `observe`."""
        return {
            "batch": self.batch, "micro_batches": self.micro_batches, "hold": True, "checkpointing": self.checkpointing, "name": self.name,
            "whole": self.whole, **self.shard_options(folder),
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


@dataclass(frozen=True)
class Run:
    """The measurements of one rank of a real run.

    grown_nbytes: highest growth of resident memory, by phase. steps: of each step but the first (seconds, processor seconds).
    load: the machine's load average over the last minute.
    """

    grown_nbytes: dict[str, int]
    steps: list[tuple[float, float]]
    load: float


def measure(rank: int, world_size: int, case: Case, folder: str, steps: int) -> tuple[Run, Plan]:
    """Train in this process as a user would, then once more under `observe`; return the measurements of both."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(replace(case, micro_batches=1, batch=(1, 8)), folder, 1)  # so that torch has loaded, and allocated, all it keeps
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system
    dist.barrier()
    resident = Resident()
    taken = train(case, folder, 1 + steps, resident)
    load = os.getloadavg()[0]
    return Run(resident.grown, taken[1:], load), observe(case.model, ranks=world_size, rank=rank, **case.settings(folder))


def train(case: Case, folder: str, steps: int, resident: Resident | None = None) -> list[tuple[float, float]]:
    """Train some steps, and save if `resident` is given. Return of each step (seconds, processor seconds of this process)."""
    with contextlib.nullcontext() if case.whole else torch.device("meta"):
        model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zs.shard(model, optimizer, **case.shard_options(folder))
    if case.checkpointing:
        checkpoint_activations(model)
    note = resident.note if resident is not None else lambda phase: None
    note("load")
    taken = []
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
        note("step" if step else "first step")
    if resident is not None:
        zs.save(f"{folder}/saved", model, optimizer)
        note("save")
    zs.close(model, restore=False)
    return taken


class Resident:
    """The growth of this process's resident memory since the object was made, by phase."""

    def __init__(self) -> None:
        self.before, self.grown = _own_nbytes("VmRSS"), dict[str, int]()
        memory.reset_peak_rss()

    def note(self, phase: str) -> None:
        """Enter the highest growth since the last call for a phase."""
        self.grown[phase] = max(self.grown.get(phase, 0), _own_nbytes("VmHWM") - self.before)
        memory.reset_peak_rss()


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
    parser.add_argument("--details", action="store_true", help="each category of bytes in each phase")
    parser.add_argument("--time", metavar="HARDWARE", help=f"seconds a step, too: a name or a file of hardware, or {NOW!r}")
    given = parser.parse_args()
    share_imports(["torch.distributed", "transformers", "benchmarks.worker", "zeroshard.planner.dry_run"])
    rows: list[tuple[str, ...]] = []
    before = _hardware(given.time)
    for case in CASES:
        if given.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plan = zs.plan(case.model, ranks=RANKS, separate=False, **case.settings(folder))
            found = run_processes(measure, RANKS, case, folder, STEPS if before else 1, timeout_s=LIMIT_S)
        runs, seen = [run for run, _ in found], found[0][1]
        if given.details:
            show(_details(case.name, plan, seen, runs))
        phases = [[nbytes for phase, nbytes in run.grown_nbytes.items() if phase != "save"] for run in runs]
        saving = sum(plan.peak(tier, ("save",)) for tier in (Tier.DEVICE, Tier.HOST))
        for label, planned, real in (
            ("entered", _nbytes(plan, (ACTIVATIONS, KEPT)), _nbytes(seen, (ACTIVATIONS, KEPT))),
            ("live", _nbytes(plan, (KEPT,)), _nbytes(seen, (KEPT,))),
            ("resident", _nbytes(plan), fmean(map(max, phases))),
            ("resident, saving", saving, fmean(run.grown_nbytes["save"] for run in runs)),
        ):
            rows.append((case.name if label == "entered" else "", label, *_compared(planned, real)))
        if before is not None:
            after = (_hardware(NOW) if given.time == NOW else None) or before
            simulated = [simulate(plan.trace, each) for each in (before, after)]
            cores = before.lane(Resource.DEVICE)
            predicted = fmean(each.step_s for each in simulated), fmean(each.busy[cores] for each in simulated)
            before = after
            for which, name in enumerate(("wall", "processor")):
                seconds = median(step[which] for run in runs for step in run.steps)
                told = _compared(predicted[which], seconds, ".2f")
                rows.append(("", f"seconds, {name} (load {runs[0].load:.1f})", *told))
    show(Sheet("prediction and reality", ("configuration", "of", "predicted", "measured", ""), rows))
    return 0


def _hardware(name: str | None) -> Hardware | None:
    if name != NOW:
        return Hardware.named(name) if name else None
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(RANKS, folder)


def _nbytes(plan: Plan, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of device and host together in the fullest phase but the save, without categories in `without`."""
    phases = [phase.held for phase in plan.phases if phase.name != "save"]
    return max(
        sum(nbytes for tier in (Tier.DEVICE, Tier.HOST) for name, nbytes in held.get(tier, {}).items() if name not in without)
        for held in phases
    )


def _details(name: str, plan: Plan, seen: Plan, runs: list[Run]) -> Sheet:
    rows = []
    for mine, real in zip(plan.phases, seen.phases, strict=True):
        for tier in Tier:
            held, truly = (each.held.get(tier, {}) for each in (mine, real))
            pairs = {key: (held.get(key, 0), truly.get(key, 0)) for key in sorted({*held, *truly})}
            rows += [(mine.name, f"{tier.value} {key}", *_compared(*pair)) for key, pair in pairs.items() if any(pair)]
        if grown := [run.grown_nbytes[mine.name] for run in runs if mine.name in run.grown_nbytes]:
            rows.append((mine.name, "resident", *_compared(mine.nbytes(Tier.DEVICE) + mine.nbytes(Tier.HOST), fmean(grown))))
    return Sheet(name, ("phase", "of", "predicted", "measured", ""), rows)


def _compared(planned: float, seen: float, form: str = ",.0f") -> tuple[str, str, str]:
    return f"{planned:{form}}", f"{seen:{form}}", f"{planned / seen - 1:+.1%}" if seen else ""


if __name__ == "__main__":
    raise SystemExit(main())
