"""The sections of `zeroshard bench`: the measurements of each, and the folder on a disk that some of them need."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.cli.arguments import UsageError
from zeroshard.errors import SwapError
from zeroshard.tiers.io import SwapFolder

from . import cases, checkpoints, parallel, sequence_lengths, state_formats
from .micro import Unmeasured, apart
from .plan import MESH_CONTENDERS, PRECISIONS, SEQUENCE_CONTENDERS, TIER_CONTENDERS, TIERS_ROUNDS, Rounds, Workload, select
from .race import race, table
from .tables import Measured


@contextmanager
def swap_folder(given: str | None, out: Path) -> Iterator[str | None]:
    """Make a folder for all that this run offloads to disk, below `given` or else `out`, and remove it at the end.

    Yields its path; None where `out` is on no disk that can be used. Raises UsageError where `given` cannot be used.
    """
    try:
        SwapFolder(given or out, rank=0, needed_nbytes=0).close()
    except SwapError as error:
        if given:
            raise UsageError(f"--path: {str(error).removeprefix('rank 0: ')}") from None
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-", dir=given or out, ignore_cleanup_errors=True) as folder:
        yield folder


def measure(section: str, given: argparse.Namespace, workload: Workload, rounds: Rounds, out: Path) -> list[Measured]:
    """Return the tables of one section. Raises Unmeasured where the machine cannot run it."""
    path, logs = workload.swap_path, out / "logs"
    rarer = given.rounds or TIERS_ROUNDS
    if section in ("disk", "checkpoints") and path is None:
        raise Unmeasured("no folder on a local disk; name one with --path")
    if section == "cpu":
        heats = [select(given.only, (precision,), given.quick) for precision in PRECISIONS if precision in given.precisions]
        title = "Step time and memory"  # one race for each precision: the sleeping teams of both would need twice the memory
        return [table(section, title, workload, race(heat, workload, rounds, logs)) for heat in heats if heat]
    if section == "tiers":
        contenders = select(given.only, given.precisions, among=TIER_CONTENDERS)
        if not any(c.offload for c in contenders):
            raise Unmeasured("none of the chosen contenders offloads anything")
        rounds = dataclasses.replace(rounds, rounds=rarer, memory_steps=1, lead_in=1)
        return [table(section, "Tiers", workload, race(contenders, workload, rounds, out / "logs-tiers"))]
    if section == "parallel":
        contenders, workload = select(given.only, given.precisions, among=MESH_CONTENDERS), parallel.WORKLOAD
        outcomes = race(contenders, workload, dataclasses.replace(rounds, rounds=rarer), out / "logs-parallel")
        return [table(section, "A mesh, pipeline x data x tensor", workload, outcomes)]
    if section == "sequences":
        contenders = select(given.only, given.precisions, among=SEQUENCE_CONTENDERS)
        return sequence_lengths.run(contenders, workload.seed, dataclasses.replace(rounds, rounds=rarer), logs, given.lengths)
    if section == "host":
        return apart(cases.host, 20 if given.quick else 60, log_file=logs / "host.log")
    if section == "hostadam":
        return apart(cases.hostadam, log_file=logs / "hostadam.log")
    if section == "states":
        return apart(state_formats.section, path, log_file=logs / "states.log")
    if section == "disk":
        return apart(cases.disk, path, log_file=logs / "disk.log")
    if section == "checkpoints":
        return checkpoints.run(str(path), out / "logs-checkpoints")
    if not torch.cuda.is_available():
        raise Unmeasured("no CUDA device")
    from . import gpu_day  # it uses `swap_folder`

    return gpu_day.largest_models(workload.seed, path, out, given.largest_seconds)
