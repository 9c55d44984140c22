"""The folder of a run: metrics.jsonl, checkpoints/, model.safetensors, config.json, sample.txt, plot.png, report.json, events/.

metrics.jsonl is written first and report.json last: the first shows that there is a run, the last that it is finished.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .arguments import UsageError
from .sheets import drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS_PER_NAT = 1 / math.log(2)
CHECKPOINTS, METRICS, MODEL, REPORT = "checkpoints", "metrics.jsonl", "model.safetensors", "report.json"
CONFIG, PLOT, EVENTS = "config.json", "plot.png", "events"


class RunFolder:
    """The folder of a run, into which rank 0 writes its results. It never overwrites the results of another run."""

    path: Path
    records: list[dict[str, Any]]  # rows of metrics.jsonl: one per step or evaluation on the held-out text
    events: Any = None  # a SummaryWriter of TensorBoard, if rows become its scalars too

    def __init__(self, path: Path, records: list[dict[str, Any]]) -> None:
        """Open a folder, and write metrics.jsonl anew. records: its first rows, those of a run that is resumed."""
        self.path, self.records = path, records
        self.write_text(METRICS, "".join(json.dumps(row) + "\n" for row in records))
        self._metrics = open(self.path / METRICS, "a", buffering=1)  # noqa: SIM115  # open for the whole run

    @classmethod
    def create(cls, out: str | None) -> "RunFolder":
        """Make the folder of a new run (None: below runs/). Raises UsageError."""
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
            if (path / METRICS).exists():
                raise UsageError(f"--out: expected a folder without a run, got {path}, which holds one; name another")
            if not os.access(path, os.W_OK):
                raise UsageError(f"--out: expected a folder that can be written, got {path}")
            return cls(path, [])
        raise UsageError(f"--out: expected a free name like {stamp}, found none; name a folder")

    @staticmethod
    def recorded(path: Path, step: int) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl up to `step`, that of the checkpoint from which the run is resumed."""
        records = []
        for line in (path / METRICS).read_text().splitlines() if (path / METRICS).exists() else ():
            try:
                row = json.loads(line)
            except ValueError:  # the run ended in the middle of a line
                break
            if row.get("step", 0) <= step:
                records.append(row)
        return records

    @staticmethod
    def with_checkpoints(out: str | None, resume: str) -> Path:
        """Return the folder of the run to resume: `resume`, --out, or the newest run that has checkpoints. Raises UsageError.

        A folder that is named may also hold an unfinished run without checkpoints.
        """
        named = resume or out
        if named is not None:
            if not (Path(named) / CHECKPOINTS).is_dir() and not RunFolder.unfinished(Path(named)):
                raise UsageError(f"--resume: expected the folder of a run with checkpoints, got {named}, which has none")
            return Path(named)
        runs = [path.parent for path in Path("runs").glob(f"*/{CHECKPOINTS}")]
        if not runs:
            raise UsageError("--resume: expected a run with checkpoints in runs/, found none; train with --save-every first")
        return max(runs, key=lambda path: (path / CHECKPOINTS).stat().st_mtime_ns)

    @staticmethod
    def unfinished(path: Path) -> bool:
        """Return True if a folder holds a run that ended before all its results were written."""
        return (path / METRICS).is_file() and not (path / REPORT).exists()

    @staticmethod
    def finished(path: Path, step: int) -> bool:
        """Return True if a folder holds all results of a run of `step` steps."""
        try:
            reported = json.loads((path / REPORT).read_text())["last_step"]["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return reported == step and (path / MODEL).exists()

    def record(self, **values: Any) -> None:
        """Append a row to metrics.jsonl."""
        self.records.append(values)
        self._metrics.write(json.dumps(values) + "\n")
        self._write_events(values)

    def write_events(self) -> None:
        """Write all rows as scalars for TensorBoard, below events/ and anew, as metrics.jsonl is; `record` adds the next ones."""
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(self.path / EVENTS, ignore_errors=True)  # steps after the checkpoint of a resumed run may be there
        self.events = SummaryWriter(str(self.path / EVENTS))
        for row in self.records:
            self._write_events(row)

    def _write_events(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items() if self.events is not None else ():
            of_ranks = isinstance(value, Sequence)
            for rank, each in enumerate(value if of_ranks else [value]):
                self.events.add_scalar(f"{name}/rank {rank}" if of_ranks else name, each, row["step"])

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically: it replaces an old one only once all its content is written."""
        from ..checkpoint.directory import write_whole  # the package imports torch: a mistake in a call is told at once

        write_whole(self.path / name, text.encode())

    def write_plot(self, baselines: Mapping[str, float]) -> None:
        """Draw loss (bits per byte) and resident memory over time; `baselines` are compressors in bits per byte.

        Prints how to install matplotlib if it is not installed.
        """
        drawn(self.path / PLOT, lambda: plot(self.records, baselines).savefig(self.path / PLOT, dpi=120))

    def close(self) -> None:
        self._metrics.close()
        if self.events is not None:
            self.events.close()


def plot(records: list[dict[str, Any]], baselines: Mapping[str, float]) -> "Figure":
    """Return the figure of a run, drawn from the rows of metrics.jsonl."""
    from matplotlib.figure import Figure

    steps = [row for row in records if "loss" in row]
    looks = [row for row in records if "held_out_bits_per_byte" in row]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = cast(Any, figure.subplots(1, 2))
    times = [row["seconds"] for row in steps]
    left.plot(times, [row["loss"] * BITS_PER_NAT for row in steps], lw=0.7, alpha=0.5, label="training batch")
    held_out = [row["held_out_bits_per_byte"] for row in looks]
    left.plot([row["seconds"] for row in looks], held_out, "o-", ms=4, label="held-out")
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
