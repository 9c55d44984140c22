"""The folder of a run: metrics.jsonl, plot.png, report.json, model.safetensors, config.json, sample.txt."""

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


class RunFolder:
    """Writes the results of rank 0. A run folder never overwrites another run's."""

    path: Path  # of the folder
    records: list[dict[str, Any]]  # what metrics.jsonl holds: one row per step or look at the held-out text

    def __init__(self, out: str | None) -> None:
        self.records = []
        self.path = self._create(out)
        self._metrics = open(self.path / "metrics.jsonl", "w", buffering=1)

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
    for rank in range(len(steps[0]["memory_nbytes"]) if steps else 0):
        right.plot(times, [row["memory_nbytes"][rank] / 1e6 for row in steps], lw=1.2, label=f"rank {rank}")
    right.set(xlabel="seconds of training", ylabel="MB", title="Memory of each process")
    right.set_ylim(0, 1.1 * right.get_ylim()[1])
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure
