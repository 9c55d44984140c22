"""deepspeed.utils.timer: a throughput timer of an engine's steps (`engine.tput_timer`), and named timers for scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from .accelerator import get_accelerator
from .logs import log_dist, logger
from .sections import Section


def _now(synchronized: bool) -> float:
    if synchronized:
        get_accelerator().synchronize()
    return time.perf_counter()


class ThroughputTimer:
    """Timer of samples per second between start() and stop(), after `start_step` warm-up steps.

    config: object with `enabled` and `synchronized` (wait for the device before reading the clock). batch_size: samples of a step
    over all ranks. steps_per_output: number of steps between two lines in the log; None: no lines.
    """

    def __init__(
        self, config: SimpleNamespace | Section, batch_size: int | None, start_step: int = 2, steps_per_output: float | None = None,
        monitor_memory: bool = False, logging_fn: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.logging = steps_per_output, logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0  # seconds
        self.initialized = self.started = False
        self.start_time = self.end_time = 0.0  # of the last measured micro-step

    def update_epoch_count(self) -> None:
        """Begin a new epoch, which counts micro-steps from 0."""
        self.epoch_count, self.micro_step_count = self.epoch_count + 1, 0

    def start(self) -> None:
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = _now(self.config.synchronized)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step, and with global_step also a step."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:  # still in the warm-up
            return
        self.end_time = _now(self.config.synchronized)
        seconds = self.end_time - self.start_time
        self.total_elapsed_time += seconds
        self.step_elapsed_time += seconds
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            now = self.batch_size / max(self.step_elapsed_time, 1e-6)
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all measured steps; -inf before there is one."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / max(self.total_elapsed_time, 1e-6) if steps > 0 else float("-inf")


class SynchronizedWallClockTimer:
    """Named timers: timers("step").start(), .stop(), .elapsed() in milliseconds, timers.log(["step"])."""

    class Timer:
        """One named timer. stop(record=True) records the time for mean()."""

        def __init__(self, name: str) -> None:
            self.name_, self.started_ = name, False
            self._since, self._sum_ms = 0.0, 0.0
            self.records: list[float] = []

        def start(self) -> None:
            assert not self.started_, f"{self.name_} timer has already been started"
            self.started_, self._since = True, _now(True)

        def stop(self, reset: bool = False, record: bool = False) -> None:
            assert self.started_, "timer is not started"
            ms = (_now(True) - self._since) * 1e3
            self._sum_ms = ms if reset else self._sum_ms + ms
            if record:
                self.records.append(ms)
            self.started_ = False

        def reset(self) -> None:
            self.started_, self._sum_ms = False, 0.0

        def elapsed(self, reset: bool = True) -> float:
            """Return the milliseconds so far; a running timer continues."""
            running = self.started_
            if running:
                self.stop()
            found = self._sum_ms
            if reset:
                self.reset()
            if running:
                self.start()
            return found

        def mean(self) -> float:
            return sum(self.records) / len(self.records) if self.records else 0.0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Log the milliseconds of existing timers, on `ranks` (None: rank 0)."""
        assert normalizer > 0.0, f"normalizer: expected a number above 0, got {normalizer}"
        shown = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        log_dist(f"time (ms) | {' | '.join(shown)}", ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the means of recorded times, in milliseconds."""
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
