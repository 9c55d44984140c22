"""The folder of a run: metrics.jsonl, checkpoints/, plot.png, report.json, model.safetensors, config.json, sample.txt."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from .arguments import UsageError

matplotlib.use("Agg")
BITS_PER_NAT = 1 / math.log(2)
CHECKPOINTS = "checkpoints"


class RunFolder:
    """Writes the results of rank 0. A run folder never overwrites another run's."""

    path: Path  # of the folder
    records: list[dict[str, Any]]  # what metrics.jsonl holds: one row per step or look at the held-out text

    def __init__(self, path: Path, records: list[dict[str, Any]]) -> None:
        """records: rows that are there already, of a run that is resumed."""
        self.path, self.records = path, []
        self._metrics = open(self.path / "metrics.jsonl", "w", buffering=1)
        for row in records:
            self.record(**row)

    @classmethod
    def create(cls, out: str | None) -> "RunFolder":
        """A new run's. Raises UsageError."""
        return cls(cls._create(out), [])

    @classmethod
    def reopen(cls, path: Path, step: int) -> "RunFolder":
        """That of a run which goes on after `step`: rows of later steps, which were not saved, are dropped."""
        records = []
        for line in (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").exists() else ():
            try:
                row = json.loads(line)
            except ValueError:  # the run ended in the middle of a line
                break
            if row.get("step", 0) <= step:
                records.append(row)
        return cls(path, records)

    @staticmethod
    def with_checkpoints(out: str | None, resume: str) -> Path:
        """The folder of the run to resume: `resume`, --out, or the newest run that has checkpoints. Raises UsageError."""
        named = resume or out
        if named is not None:
            if not (Path(named) / CHECKPOINTS).is_dir():
                raise UsageError(f"--resume: expected the folder of a run with checkpoints, got {named}, which has none")
            return Path(named)
        runs = [path.parent for path in Path("runs").glob(f"*/{CHECKPOINTS}")]
        if not runs:
            raise UsageError("--resume: expected a run with checkpoints in runs/, found none; train with --save-every first")
        return max(runs, key=lambda path: (path / CHECKPOINTS).stat().st_mtime_ns)

    @staticmethod
    def _create(out: str | None) -> Path:
        stamp = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        candidates = [Path(out)] if out else [stamp, *(stamp.with_name(f"{stamp.name}-{n}") for n in range(2, 100))]
        for path in candidates:
            try:
                path.mkdir(parents=True, exist_ok=out is not None)
            except FileExistsError:
                if out is None:
                    continue  # another run began in this second
                raise UsageError(f"--out: expected a folder, got the file {out}") from None
            except OSError as error:
                raise UsageError(f"--out: cannot create {path}: {error.strerror}") from None
            if (path / "metrics.jsonl").exists():
                raise UsageError(f"--out: expected a folder without a run, got {path}, which holds one; name another")
            if not os.access(path, os.W_OK):
                raise UsageError(f"--out: expected a folder that can be written, got {path}")
            return path
        raise UsageError(f"--out: expected a free name like {stamp}, found none; name a folder")

    def record(self, **values: Any) -> None:
        """Append a row to metrics.jsonl."""
        self.records.append(values)
        self._metrics.write(json.dumps(values) + "\n")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(values, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def write_plot(self, baselines: Mapping[str, float]) -> None:
        """Draw loss (bits per byte) and resident memory over time; `baselines` are compressors in bits per byte."""
        figure = plot(self.records, baselines)
        figure.savefig(self.path / "plot.png", dpi=120)

    def close(self) -> None:
        self._metrics.close()


def plot(records: list[dict[str, Any]], baselines: Mapping[str, float]) -> "matplotlib.figure.Figure":
    """The figure of a run, from the rows of metrics.jsonl."""
    from matplotlib.figure import Figure

    steps = [row for row in records if "loss" in row]
    looks = [row for row in records if "held_out_bits_per_byte" in row]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    times = [row["seconds"] for row in steps]
    left.plot(times, [row["loss"] * BITS_PER_NAT for row in steps], lw=0.7, alpha=0.5, label="training batch")
    left.plot(
        [row["seconds"] for row in looks],
        [row["held_out_bits_per_byte"] for row in looks],
        "o-",
        ms=4,
        label="held-out",
    )
    for color, (name, bits) in zip(("tab:red", "tab:purple", "tab:brown"), baselines.items(), strict=False):
        left.axhline(bits, ls="--", lw=1, color=color, label=name)
    left.set(xlabel="seconds of training", ylabel="bits per byte", title="Loss")
    for rank in range(max((len(row["memory_nbytes"]) for row in steps), default=0)):  # a resumed run may have other ranks
        seen = [row for row in steps if rank < len(row["memory_nbytes"])]
        megabytes = [row["memory_nbytes"][rank] / 1e6 for row in seen]
        right.plot([row["seconds"] for row in seen], megabytes, lw=1.2, label=f"rank {rank}")
    right.set(xlabel="seconds of training", ylabel="MB", title="Memory of each process")
    right.set_ylim(0, 1.1 * right.get_ylim()[1])
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure
