"""deepspeed.monitor: write events (name, value, step), on rank 0, to TensorBoard, CSV files or Weights & Biases; a throughput timer.

    csv_monitor     <output_path>/<job_name>/<name with _ for / and blanks>.csv    "step,<last part of name>", a row per event
    tensorboard     <output_path>/<job_name>/                                       torch.utils.tensorboard
    wandb           a run of the project, in the group, of the team

A configuration has sections `tensorboard`, `csv_monitor`, `wandb` and `comet`, each None or with `enabled` and DeepSpeed's other
names, as attributes or keys. A monitor that is enabled but not installed raises on all ranks.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ...errors import ConfigError
from . import communication as dist
from .accelerator import get_accelerator
from .logs import logger
from .sections import Section

Event = tuple[str, float | Tensor, int]  # name, a number or a tensor of one element, step


def _of(section: object, name: str, otherwise: object = None) -> Any:
    """Return an entry of a configuration, by key or attribute."""
    found = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return otherwise if found is None else found


def _folder(section: object, kind: str) -> Path:
    """Return the folder of a monitor: output_path/job_name. An output_path of None: a folder in the home folder."""
    given = section.get("output_path", "") if isinstance(section, Mapping) else getattr(section, "output_path", "")
    if given is None:
        job = os.environ.get("DLWS_JOB_ID") or os.environ.get("DLTS_JOB_ID") or "unknown-job-id"
        given = Path.home() / kind / job / "logs"
    return Path(given) / _of(section, "job_name", "DeepSpeedJobName")


class Monitor:
    """Base class of monitors, which write events on rank 0. Raises ConfigError if `package` is not installed."""

    package: str | None = None

    def __init__(self, monitor_config: object) -> None:
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"{self.package}.enabled: the package {self.package!r} is not installed. Install it, or use csv_monitor."
            )
        self.monitor_config = monitor_config
        self.enabled = bool(_of(monitor_config, "enabled", False))
        self.writes = self.enabled and (not dist.is_initialized() or dist.get_rank() == 0)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write each event on rank 0; do nothing on others."""
        if self.writes:
            for name, value, step in event_list:
                self.write(name, value.item() if isinstance(value, Tensor) else value, step)
            self.flush()

    def write(self, name: str, value: float, step: int) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Make readers see what is written."""


class csvMonitor(Monitor):
    """Monitor with a CSV file for each name. Files of an earlier run are continued."""

    def __init__(self, csv_config: object) -> None:
        super().__init__(csv_config)
        self.log_dir = str(_folder(csv_config, "csv_monitor"))
        if self.writes:
            os.makedirs(self.log_dir, exist_ok=True)

    def write(self, name: str, value: float, step: int) -> None:
        path = Path(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            csv.writer(file).writerows(([["step", name.split("/")[-1]]] if fresh else []) + [[step, value]])


class TensorBoardMonitor(Monitor):
    """Monitor with a TensorBoard scalar for each name."""

    package = "tensorboard"
    summary_writer: Any = None

    def __init__(self, tensorboard_config: object) -> None:
        super().__init__(tensorboard_config)
        if self.writes:
            from torch.utils.tensorboard import SummaryWriter

            self.summary_writer = SummaryWriter(log_dir=str(_folder(tensorboard_config, "tensorboard")))

    def write(self, name: str, value: float, step: int) -> None:
        self.summary_writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self.summary_writer is not None:  # rank 0
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    """Monitor with a run of Weights & Biases, which begins when this is made."""

    package = "wandb"

    def __init__(self, wandb_config: object) -> None:
        super().__init__(wandb_config)
        if self.writes:
            import wandb

            self.wandb = wandb
            project = _of(wandb_config, "project", "deepspeed")
            wandb.init(project=project, group=_of(wandb_config, "group"), entity=_of(wandb_config, "team"))

    def write(self, name: str, value: float, step: int) -> None:
        self.wandb.log({name: value}, step=step)


_KINDS = {"tensorboard": TensorBoardMonitor, "csv_monitor": csvMonitor, "wandb": WandbMonitor}


class MonitorMaster(Monitor):
    """All monitors that a configuration enables; `tb_monitor`, `csv_monitor` and `wandb_monitor` are a monitor or None.

    Raises ConfigError for a monitor that is not installed, and for comet.
    """

    def __init__(self, monitor_config: object) -> None:
        sections = {name: section for name in (*_KINDS, "comet") if _of(section := _of(monitor_config, name), "enabled", False)}
        super().__init__({"enabled": bool(sections)})
        self.monitor_config = monitor_config
        if "comet" in sections:
            raise ConfigError("comet.enabled: there is no Comet monitor here. Use tensorboard, csv_monitor or wandb.")
        self._monitors = {name: _KINDS[name](section) for name, section in sections.items()}
        self.tb_monitor = self._monitors.get("tensorboard")
        self.csv_monitor, self.wandb_monitor = self._monitors.get("csv_monitor"), self._monitors.get("wandb")

    def write_events(self, event_list: Sequence[Event]) -> None:
        for monitor in self._monitors.values():
            monitor.write_events(event_list)


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
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step, and with global_step also a step."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:  # still in the warm-up
            return
        self.end_time = self._now()
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

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all measured steps; -inf before there is one."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / max(self.total_elapsed_time, 1e-6) if steps > 0 else float("-inf")
