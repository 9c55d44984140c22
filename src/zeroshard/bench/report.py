"""Results as tables for people, as results.md for documents, and as results.json for programs.

results.json (schema 2): `machine`, `versions`, `workload`, `rounds`; `contenders`, one entry per contender with
`status` ("ran", "skipped: why", "failed: why"), seconds per step, ratios, processor time, memory in bytes,
losses; `core_share`, the part of a core that a rank got (near 1 on a quiet machine); `tiers`, the same as `contenders`
with bytes moved, disk speeds and bounds by round; `host_work`; `hostadam`, `disk`, `checkpoints`: what these programs give; `gpu`
(contenders and the largest models, or why there is none); `goals`. What was not measured is null, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console

from . import checkpoints, gpu, statistics, tables
from .checkpoints import Kepts
from .host_overhead import HostWork
from .plan import Rounds, Workload
from .programs import Measured
from .race import Outcome
from .tables import PLAIN, Sheet

SCHEMA = 2
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Results:
    """Everything that one run measured; `gpu_skipped` says why there are no GPU outcomes."""

    workload: Workload
    rounds: Rounds
    outcomes: list[Outcome]
    host: HostWork | None
    gpu_workload: Workload | None
    gpu_outcomes: list[Outcome]
    gpu_skipped: str | None
    gpu_largest: dict[str, gpu.Largest] = field(default_factory=dict)
    tiers: list[Outcome] = field(default_factory=list)
    tiers_rounds: Rounds | None = None
    programs: Measured = field(default_factory=Measured)
    checkpoints: list[Kepts] = field(default_factory=list)

    @property
    def races(self) -> tuple[list[Outcome], ...]:
        """Outcomes of each race; losses are compared within one."""
        return self.outcomes, self.tiers, self.gpu_outcomes

    @property
    def goals(self) -> list[statistics.Goal]:
        """Those of the sections that ran."""
        found = statistics.goals(self.outcomes, self.host)
        found = [g for g in found if (self.outcomes if g.section == "race" else self.host)]
        return found + (statistics.tier_goals(self.tiers) if self.tiers else []) + self.programs.goals + [
            goal for kepts in self.checkpoints for goal in kepts.goals
        ]

    def sheets(self) -> list[Sheet]:
        """All tables, in the order in which the work was done."""
        found = [tables.outcomes_sheet("Step time and memory", self.workload, self.outcomes)] if self.outcomes else []
        found += [tables.tiers_sheet(self.workload, self.tiers)] if self.tiers else []
        found += [tables.host_sheet(self.host)] if self.host else []
        found += tables.program_sheets(self.programs)
        found += [checkpoints.sheet(kepts) for kepts in self.checkpoints]
        if self.gpu_skipped and self.gpu_skipped != NOT_ASKED:
            found.append(Sheet("GPU", notes=[(f"GPU section skipped: {self.gpu_skipped}", PLAIN)]))
        elif self.gpu_workload is not None:
            found += tables.gpu_sheets(self.gpu_workload, self.gpu_outcomes, self.gpu_largest)
        if self.goals:
            found.append(tables.goals_sheet(self.goals, self.workload, [*self.outcomes, *self.tiers]))
        return found


def print_results(results: Results, console: Console) -> None:
    """All tables."""
    for sheet in results.sheets():
        sheet.show(console)


def write_markdown(results: Results, path: Path) -> None:
    """Write results.md: all tables, ready to be pasted."""
    machine, versions = _machine(), _versions()
    head = f"{machine['system']}, {machine['cores']} cores; " + ", ".join(f"{n} {v}" for n, v in versions.items() if v)
    load = machine["load_at_end"]
    head += f"; load at the end {load[0]:.1f}" if load else ""
    path.write_text("\n".join([head, "", *(sheet.markdown() for sheet in results.sheets())]))


def write_json(results: Results, path: Path) -> None:
    """Write results.json; the schema is in the module's docstring."""
    document = {
        "schema": SCHEMA,
        "machine": _machine(),
        "versions": _versions(),
        "workload": dataclasses.asdict(results.workload),
        "rounds": dataclasses.asdict(results.rounds),
        "contenders": _entries(results.outcomes),
        "core_share": statistics.core_share([*results.outcomes, *results.tiers], results.workload.ranks),
        "losses_agree": statistics.losses_agree(results.outcomes),
        "tiers": _tiers_entry(results),
        "host_work": _host_entry(results.host),
        "hostadam": results.programs.hostadam or results.programs.skipped.get("hostadam"),
        "disk": results.programs.disk or results.programs.skipped.get("disk"),
        "checkpoints": {kepts.size: dataclasses.asdict(kepts) for kepts in results.checkpoints},
        "gpu": results.gpu_skipped or _gpu_entry(results),
        "goals": [dataclasses.asdict(g) | {"verdict": g.verdict} for g in results.goals],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _entries(outcomes: list[Outcome]) -> dict[str, dict[str, object]]:
    return {o.contender.name: _entry(o, outcomes) for o in outcomes}


def _entry(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, object]:
    entry = dataclasses.asdict(outcome)
    entry |= {"contender": outcome.contender.name, "label": outcome.contender.label, "status": tables.status(outcome)}
    del entry["skipped"], entry["failed"]
    if outcome.ran and outcome.rounds_step_s:
        entry["step_s"] = dataclasses.asdict(statistics.step_spread(outcome))
        entry["step_time_ratio"] = tables.ratios_to_peers(outcome, outcomes)
        entry["loss_difference"] = statistics.loss_difference(outcome, outcomes)
        if outcome.disk:
            entry |= {"bound_s": statistics.bounds_s(outcome), "bound_ratio": statistics.bound_ratio(outcome)}
    return entry


def _tiers_entry(results: Results) -> dict[str, object] | None:
    if not results.tiers:
        return None
    return {
        "rounds": dataclasses.asdict(results.tiers_rounds) if results.tiers_rounds else None,
        "contenders": _entries(results.tiers),
        "losses_agree": statistics.losses_agree(results.tiers),
    }


def _gpu_entry(results: Results) -> dict[str, object] | None:
    if results.gpu_workload is None:
        return None
    return {
        "workload": dataclasses.asdict(results.gpu_workload),
        "step_flops": gpu.step_flops(results.gpu_workload),
        "contenders": _entries(results.gpu_outcomes),
        "largest": {n: dataclasses.asdict(found) | {"numel": found.numel} for n, found in results.gpu_largest.items()},
    }


def _host_entry(host: HostWork | None) -> dict[str, object] | None:
    if host is None:
        return None
    units = {name: host.unit_ms(name) for name in host.step_ms if name != "plain"}
    return dataclasses.asdict(host) | {"unit_ms": units}


def _machine() -> dict[str, object]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"system": platform.platform(), "cores": os.cpu_count(), "load_at_end": load}


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version()} | {p: version(p) for p in ("torch", "zeroshard", "deepspeed")}
