"""The results of a run: tables on the terminal, results.md for documents, results.json for programs.

results.json (schema 3): `machine`, `versions`, `workload`, `rounds`; `sections`, by name the section's tables: each with its rows
(seconds by round, bytes, further columns), its `skipped` rows with the reason, and `details` (of a race, all that was measured of
each contender); `skipped`: why a section has nothing; `goals`. A value that was not measured is null.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from zeroshard.utils.sheets import WARNING, Sheet

from .plan import Rounds, Workload
from .tables import Goal, Measured, goals_sheet

SCHEMA = 3
NOT_ASKED = "not asked for"
SECTIONS = {  # in the order in which they are run
    "cpu": "step time and memory on CPU ranks",
    "tiers": "the same with states on the host and on disk",
    "host": "the host's work without communication",
    "hostadam": "the host's Adam beside memory copies and peers",
    "states": "AdamW's states in 16, 8 and 4 bits beside torchao and bitsandbytes",
    "disk": "the file engine beside dd and fio",
    "checkpoints": "saving and loading beside DCP with FSDP2 and DeepSpeed",
    "parallel": "8 ranks over a mesh (pp 2, dp 2, tp 2) beside FSDP2 with the same stages and styles",
    "sequences": "1,024 to 65,536 tokens over 4 and 8 ranks beside ZeRO-3 without sp and DeepSpeed's Ulysses",
    "gpu": "one GPU: the largest models",
}


@dataclass(frozen=True)
class Results:
    """All measurements of one run. found: the tables of each section; skipped: reason by section why there are none."""

    workload: Workload
    rounds: Rounds
    found: dict[str, list[Measured]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def tables(self) -> list[Measured]:
        """All tables, in the order in which the sections ran."""
        return [measured for name in SECTIONS for measured in self.found.get(name, ())]

    @property
    def goals(self) -> list[Goal]:
        """The goals of the sections that ran."""
        return [goal for measured in self.tables for goal in measured.goals]

    def sheets(self) -> Iterator[Sheet]:
        """Yield all tables and what has none, then the goals."""
        yield from (measured.sheet() for measured in self.tables)
        for name, why in self.skipped.items():
            if why != NOT_ASKED:
                yield Sheet(name, notes=[(f"{name}: not measured: {why}", WARNING)])
        if self.goals:
            yield goals_sheet(self.goals)


def write(results: Results, folder: Path) -> None:
    """Write results.json, whose schema is in the module's docstring, and results.md, all tables in Markdown."""
    load, versions = os.getloadavg() if hasattr(os, "getloadavg") else None, {"python": platform.python_version()}
    for package in ("torch", "zeroshard", "deepspeed"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    document = {
        "schema": SCHEMA,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "load_at_end": load},
        "versions": versions,
        "workload": asdict(results.workload),
        "rounds": asdict(results.rounds),
        "sections": {name: [asdict(measured) for measured in found] for name, found in results.found.items()},
        "skipped": results.skipped,
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in results.goals],
    }
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = f"{platform.platform()}, {os.cpu_count()} cores; {told}"
    head += f"; load at the end {load[0]:.1f}" if load else ""
    (folder / "results.md").write_text("\n".join([head, "", *(sheet.markdown() for sheet in results.sheets())]))
