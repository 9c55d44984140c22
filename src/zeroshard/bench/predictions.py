"""Prediction against reality: what a dry run says of memory and time, beside what two ranks of this machine take.

    python -m zeroshard.bench.predictions                    memory: ten configurations, some four minutes
    python -m zeroshard.bench.predictions --only gpt-3       those whose names contain it
    python -m zeroshard.bench.predictions --time h.toml      and seconds a step, on hardware as `zeroshard bench --calibrate` wrote it

Of each configuration, three runs: the plan; two processes that train (resident memory, seconds); and the same once more,
looked at operator by operator (bytes by category). On a CPU device and host are one memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

import zeroshard as zs

from ..activation_checkpointing.checkpoint import checkpoint_activations
from ..config import Tier
from ..launch import run_processes, share_imports
from ..models import GPT, GPTConfig
from ..parallel.parallelize import next_token_loss
from ..planner.dry_run import observe
from ..planner.plan import PHASES, Plan
from . import memory
from .tables import make_console

RANKS = 2
STEPS = 3  # timed, after the first
LIMIT_S = 300.0


def gpt() -> nn.Module:
    """59M parameters."""
    return GPT(GPTConfig(vocab_size=4096, seq_len=256, dim=1024, layers=4, heads=16))


def llama() -> nn.Module:
    """56M parameters; grouped queries, a gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        max_position_embeddings=256, use_cache=False,
    ))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration. FOLDER in an option is a folder of this run."""

    name: str
    model: Callable[[], nn.Module]
    batch: tuple[int, int]
    options: Mapping[str, Any]
    micro_batches: int = 1
    checkpointing: bool = False
    whole: bool = False  # each rank makes the model with its values

    def shard_options(self, folder: str) -> dict[str, Any]:
        """Of zs.shard."""
        return {key: folder if value == FOLDER else value for key, value in self.options.items()}

    def settings(self, folder: str) -> dict[str, Any]:
        """Arguments of `plan` and `observe`."""
        return {
            "batch": self.batch, "micro_batches": self.micro_batches, "checkpointing": self.checkpointing, "name": self.name,
            "whole": self.whole, **self.shard_options(folder),
        }  # fmt: skip


FOLDER = "FOLDER"
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


def planned(case: Case, folder: str) -> Plan:
    """By the dry run."""
    return zs.plan(case.model, ranks=RANKS, separate=False, **case.settings(folder))


@dataclass(frozen=True)
class Run:
    """Of one rank of a real run. grown_nbytes: resident memory at its highest beyond that before the model, memory that both ranks see
    counted in equal parts; by phase. step_s: of each step but the first. load: runnable processes, on average of a minute."""

    grown_nbytes: dict[str, int]
    step_s: list[float]
    load: float
    parts: list[tuple[float, float, float]]  # of each step: seconds of forward and backward, of all, and of this process's cores


def measure(rank: int, world_size: int, case: Case, folder: str, steps: int) -> tuple[Run, Plan]:
    """A process that trains as a user would, and then once more, looked at operator by operator."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    _train(replace(case, micro_batches=1), folder, 1, None)  # torch and its libraries load, and keep, what they do once
    gc.collect()
    _trim()
    _meet()
    resident = Resident()
    step_s = _train(case, folder, 1 + steps, resident)
    plan = observe(case.model, ranks=world_size, rank=rank, **case.settings(folder))
    return Run(resident.grown, [s for _, s, _ in step_s[1:]], os.getloadavg()[0], step_s[1:]), plan


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _train(case: Case, folder: str, steps: int, resident: Resident | None) -> list[tuple[float, float, float]]:
    """As a user would."""
    model = case.model() if case.whole else _on_meta(case.model)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zs.shard(model, optimizer, **case.shard_options(folder))
    if case.checkpointing:
        checkpoint_activations(model)
    step_s = []
    if resident is not None:
        resident.note("load")
    for step in range(steps):
        _meet()
        begin, cpu = time.perf_counter(), time.process_time()
        for number in range(case.micro_batches):
            with zs.accumulate(model) if number + 1 < case.micro_batches else contextlib.nullcontext():
                _backward(model, torch.randint(0, 64, case.batch), case.micro_batches)
        middle = time.perf_counter()
        if resident is not None and step:
            resident.note("computed")
        optimizer.step()
        optimizer.zero_grad()
        step_s.append((middle - begin, time.perf_counter() - begin, time.process_time() - cpu))
        if resident is not None:
            resident.note("step" if step else "first step")
    if resident is not None:
        zs.save(f"{folder}/saved", model, optimizer)
        resident.note("save")
    zs.close(model, restore=False)
    return step_s


def _backward(model: nn.Module, tokens: torch.Tensor, micro_batches: int) -> None:
    output = model(tokens)
    (next_token_loss(getattr(output, "logits", output), tokens) / micro_batches).backward()


def _meet() -> None:
    dist.barrier()


def _trim() -> None:
    """Freed memory goes back to the system, as far as it is whole pages."""
    ctypes.CDLL(None).malloc_trim(0)


class Resident:
    """This process's resident memory since now."""

    def __init__(self) -> None:
        self.before, self.grown = _own_nbytes(_field("VmRSS")), {}
        memory.reset_peak_rss()

    def note(self, phase: str) -> None:
        """The highest since the last note."""
        self.grown[phase] = max(self.grown.get(phase, 0), _own_nbytes(_field("VmHWM")) - self.before)
        memory.reset_peak_rss()


def _field(name: str, path: str = "/proc/self/status") -> int:
    return int(re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)[1]) << 10  # type: ignore[index]


def _own_nbytes(resident: int) -> int:
    """Without the peer's part of what both see."""
    return resident - _field("RssShmem") + _field("Pss_Shmem", "/proc/self/smaps_rollup")


def main() -> int:
    """The tables."""
    parser = argparse.ArgumentParser(prog="python -m zeroshard.bench.predictions", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--time", metavar="HARDWARE", help="seconds a step, too: a name or a file of hardware")
    given = parser.parse_args()
    console = make_console()
    share_imports(["torch.distributed", "transformers", "zeroshard.bench.worker", "zeroshard.planner.dry_run"])
    for case in CASES:
        if given.only in case.name:
            with tempfile.TemporaryDirectory() as folder:
                plan = planned(case, folder)
                found = run_processes(measure, RANKS, case, folder, STEPS if given.time else 1, timeout_s=LIMIT_S)
            if os.environ.get("DUMP"):
                import pickle
                pickle.dump((plan, found), open(os.environ["DUMP"] + "/" + case.name, "wb"))
            console.print(_table(case, plan, [run for run, _ in found], found[0][1]))
    return 0


def _table(case: Case, plan: Plan, runs: list[Run], seen: Plan) -> Table:
    table = Table("phase", "of", "planned", "seen", "", title=case.name)
    for name in PHASES:
        mine, real = (next((p for p in each.phases if p.name == name), None) for each in (plan, seen))
        for tier in Tier:
            a, b = (p.held.get(tier, {}) if p else {} for p in (mine, real))
            for key in sorted({*a, *b}):
                if a.get(key, 0) or b.get(key, 0):
                    table.add_row(name, f"{tier.value} {key}", *_compared(a.get(key, 0), b.get(key, 0)))
    for phase in runs[0].grown_nbytes:
        grown = sum(run.grown_nbytes[phase] for run in runs) / len(runs)
        names = {"computed": ("forward", "backward"), "step": ("step",)}.get(phase, (phase,))
        both = sum(plan.peak(tier, names) for tier in (Tier.DEVICE, Tier.HOST))
        table.add_row(f"[b]{phase}", "resident", *_compared(both, grown))
    table.add_row("", "step", "", f"{median(runs[0].step_s):.2f} s", f"load {runs[0].load:.1f}")
    return table


def _compared(planned: float, seen: float) -> tuple[str, str, str]:
    return f"{planned:,.0f}", f"{seen:,.0f}", f"{planned / seen - 1:+.1%}" if seen else "none"


if __name__ == "__main__":
    raise SystemExit(main())
