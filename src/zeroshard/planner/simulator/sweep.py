"""Sweeps: how a step scales with ranks, batch, achieved bandwidth and latency, and where communication cancels the gain.

Words, for rows that differ in ranks alone: *speed-up*: the throughput over that of the fewest ranks; *ideal*: the ratio of ranks;
*efficiency*: speed-up over ideal, at most 1. The *limit* is the fewest ranks at which the throughput of all ranks together no
longer grows, or efficiency is below one half: from there on, added ranks mostly pay for communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .hardware import Hardware
from .simulate import simulate
from .spread import two_digits
from .trace import Trace

# (ranks, micro-batch) -> the trace of one rank, or of one rank of each stage
Maker = Callable[[int, int], Trace | Sequence[Trace]]
HALF = 0.5
_US = 1e6


@dataclass(frozen=True)
class Setting:
    """The values that are the same along a curve. micro_batch: sequences of a rank; latency_s: of a hop, None: the hardware's.

    mesh: ranks along the axes that a sweep varies, "tp=2,sp=1"; "": it varies none.
    """

    micro_batch: int
    utilisation: float
    latency_s: float | None
    mesh: str = ""

    def __str__(self) -> str:
        latency = "" if self.latency_s is None else f", {_US * self.latency_s:g} us a hop"
        return f"{self.mesh}{', ' * bool(self.mesh)}micro-batch {self.micro_batch}, {100 * self.utilisation:g}% of bandwidth{latency}"


@dataclass(frozen=True)
class Row:
    """One simulated step. tflops: of a device. throughput: of all ranks, in flops/s of the model."""

    setting: Setting
    ranks: int
    step_s: float
    tflops: float
    tokens_per_s: float
    throughput: float
    speedup: float
    ideal: float
    bound: str

    @property
    def efficiency(self) -> float:
        """Speed-up over ideal, at most 1: it could be more, since each of more ranks steps fewer optimizer states."""
        return min(self.speedup / self.ideal, 1.0)


@dataclass(frozen=True)
class Limit:
    """The ranks at which communication cancels the gain along one curve; None: it does not in this sweep."""

    setting: Setting
    ranks: int | None
    why: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}"


@dataclass(frozen=True)
class Sweep:
    """The rows of a sweep, ordered by setting, then by ranks."""

    rows: tuple[Row, ...]
    hardware: Hardware

    @property
    def curves(self) -> dict[Setting, list[Row]]:
        return {setting: list(rows) for setting, rows in itertools.groupby(self.rows, key=lambda row: row.setting)}

    @property
    def limits(self) -> list[Limit]:
        """The limits of all curves that have more than one number of ranks."""
        return [_limit(setting, rows) for setting, rows in self.curves.items() if len(rows) > 1]

    def grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the header and the rows of a table."""
        mesh = ("mesh",) * any(setting.mesh for setting in self.curves)
        of_runs = "ranks", "micro-batch", "bandwidth", "latency", "step", "TFLOPS a device", "tokens/s", "speed-up", "efficiency"
        header = (*mesh, *of_runs)
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            s = row.setting
            latency = "" if s.latency_s is None else f"{_US * s.latency_s:g} us"
            rows.append((
                *(s.mesh for _ in mesh), f"{row.ranks:,}", str(s.micro_batch), f"{s.utilisation:.0%}", latency, f"{two_digits(1e3 * row.step_s)} ms",
                two_digits(row.tflops), two_digits(row.tokens_per_s), f"{two_digits(row.speedup)} of {row.ideal:,.4g}",
                f"{row.efficiency:.0%}",
            ))  # fmt: skip
        return header, rows

    def draw(self, path: str | Path, title: str = "") -> None:
        """Draw a PNG: throughput over ranks on logarithmic axes with the ideal and the limits, and TFLOPS a device."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for setting, rows in self.curves.items():
            limit = _limit(setting, rows)
            ranks = [row.ranks for row in rows]
            (line,) = left.plot(ranks, [row.throughput / 1e12 for row in rows], marker="o", ms=3, label=str(setting))
            first = rows[0].throughput / 1e12
            left.plot(ranks, [first * row.ideal for row in rows], ls=":", lw=0.8, color=line.get_color())
            right.plot(ranks, [row.tflops for row in rows], marker="o", ms=3, color=line.get_color())
            for row in rows:
                if row.ranks == limit.ranks:
                    left.plot([row.ranks], [row.throughput / 1e12], marker="x", ms=11, mew=2, color=line.get_color())
        left.set(
            xscale="log", yscale="log", xlabel="ranks", ylabel="TFLOPS of all ranks (dotted: ideal; x: the gain is cancelled)"
        )
        right.set(xscale="log", ylim=(0, None), xlabel="ranks", ylabel="TFLOPS a device")
        ticks = sorted({row.ranks for row in self.rows})
        for axis in (left, right):
            axis.set_xticks(ticks, [f"{each:,}" for each in ticks], minor=False)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        figure.suptitle(title or f"Scaling on {self.hardware.name}")
        figure.savefig(path, dpi=130)


def sweep(
    make: Maker, hardware: Hardware, ranks: Iterable[int], micro_batches: Iterable[int] = (1,),
    utilisations: Iterable[float] = (0.5, 0.75, 1.0), latencies_s: Iterable[float | None] = (None,),
) -> Sweep:  # fmt: skip
    """Simulate each of ranks x micro-batch x utilisation x latency.

    make: a function (ranks, micro-batch) that returns the traces; it is called once for each pair. Raises ConfigError for an
    empty list or a number below 1.
    """
    ranks, micro_batches = sorted(set(ranks)), sorted(set(micro_batches))
    utilisations, latencies = tuple(utilisations), tuple(latencies_s)
    for name, values in (("ranks", ranks), ("micro_batches", micro_batches)):
        if not values or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in values):
            raise ConfigError(f"sweep: {name}: expected whole numbers of at least 1, got {values}")
    for name, given in (("utilisations", utilisations), ("latencies_s", latencies)):
        if not given:
            raise ConfigError(f"sweep: {name}: expected at least one value, got none")
    rows: list[Row] = []
    for micro_batch in micro_batches:
        made = [(number, make(number, micro_batch)) for number in ranks]
        for utilisation, latency_s in itertools.product(utilisations, latencies):
            setting = Setting(micro_batch, utilisation, latency_s)
            first: tuple[float, int] | None = None
            for number, traces in made:
                done = simulate(traces, hardware, utilisation, latency_s)
                throughput = 1e12 * done.tflops * number
                first = first or (throughput, number)
                speedup, ideal = throughput / first[0] if first[0] else math.nan, number / first[1]
                rows.append(
                    Row(setting, number, done.step_s, done.tflops, done.tokens_per_s, throughput, speedup, ideal, done.bound)
                )
    return Sweep(tuple(rows), hardware)


def _limit(setting: Setting, rows: Sequence[Row]) -> Limit:
    for before, row in itertools.pairwise(rows):
        cause = f"with {row.ranks:,} ranks a step is {row.bound}"
        if row.throughput <= before.throughput:
            return Limit(setting, row.ranks, f"{row.ranks:,} ranks do no more than {before.ranks:,}; {cause}")
        if row.efficiency < HALF:
            return Limit(setting, row.ranks, f"{row.ranks:,} ranks do {100 * row.efficiency:.0f}% of the ideal; {cause}")
    return Limit(
        setting, None, f"up to {rows[-1].ranks:,} ranks communication does not cancel the gain ({100 * rows[-1].efficiency:.0f}%)"
    )
