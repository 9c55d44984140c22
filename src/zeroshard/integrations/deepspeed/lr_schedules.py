"""DeepSpeed's five learning-rate schedules, with its names, defaults and formulas.

An *iteration* counts calls of `step`, from 0; before the first it is -1. The rate of iteration k is

    LRRangeTest     min * (1 + rate * (k + 1) / step_size)          staircase: the quotient rounded down
    OneCycle        min -> max -> min, linear, then min / (1 + decay_rate * n / decay_size), n iterations after the cycle
    WarmupLR        min + (max - min) * w(k),  w = log(k + 1) / log(warmup) or k / warmup, then 1
    WarmupDecayLR   the same, and after the warm-up (total - k) / (total - warmup) in the place of 1, never below 0
    WarmupCosineLR  the optimizer's own rate * ratio: min_ratio -> 1 by w(k), then a half cosine to cos_min_ratio

A schedule uses only `param_groups` of its optimizer, so that it works with a sharded optimizer. If last_batch_iteration is -1,
the constructor writes the first rate, which get_last_lr then returns (not for OneCycle); else it writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, did_you_mean
from .logs import logger

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
_KEYS = (  # names of parameters in a configuration: LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr", ...
    "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE "
    "CYCLE_MIN_LR CYCLE_MAX_LR CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE WARMUP_MIN_LR "
    "WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS"
)
globals().update({name: name.lower() for name in _KEYS.split()})
_BETA2 = 0.99  # second beta that OneCycle sets with the cycled momentum
Rates = float | list[float]  # one for all parameter groups, or one for each


def schedule_from_config(name: str, params: Mapping[str, object] | None, optimizer: object) -> Any:
    """Make the schedule of `"scheduler": {"type": name, "params": params}`: one of the five, or of torch.optim.lr_scheduler.

    `"warmup_num_steps": 0`, which frameworks write for no warm-up, is the shortest one. Raises ConfigError for an unknown name, and
    for parameters that the schedule does not have.
    """
    given = dict(params or {})
    if given.get("warmup_num_steps") == 0:
        given["warmup_num_steps"] = 1
    known = [n for n, v in vars(torch.optim.lr_scheduler).items() if isinstance(v, type) and not n.startswith("_")]
    cls = globals()[name] if name in VALID_LR_SCHEDULES else getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(cls, type):
        raise ConfigError(
            f"scheduler.type: expected one of {VALID_LR_SCHEDULES} or a class of torch.optim.lr_scheduler, got {name!r}."
            f"{did_you_mean(name, [*VALID_LR_SCHEDULES, *known])}"
        )
    try:
        return cls(_torch_optimizer(optimizer), **given)
    except TypeError as error:
        raise ConfigError(f"scheduler.params of {name}: {error}") from error


def _torch_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer, or the one in its `.optimizer`. Raises TypeError if neither is a torch.optim.Optimizer."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"expected a torch.optim.Optimizer, or one in .optimizer, got {type(optimizer).__name__}")


def _positive_int(name: str, value: object) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: expected a positive integer (it counts steps), got {value!r}")
    return value


class _Schedule:
    """Base class. A state dict is {"last_batch_iteration": int}; loading one writes nothing to the optimizer."""

    _last_lr: list | None = None

    def __init__(self, optimizer: object, last_batch_iteration: int) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def _write(self, rates: list) -> list:
        """Write a rate to each group, in place if its lr is a tensor. Return the groups' lr."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
            else:
                group["lr"] = rate
        return [group["lr"] for group in self.optimizer.param_groups]

    def _start(self, rates: list) -> None:
        """Write the rates of the first iteration, unless the schedule starts at a later one (last_batch_iteration)."""
        if self.last_batch_iteration == -1:
            self._last_lr = self._write(rates)

    def _per_group(self, name: str, value: object) -> list:
        """Return one value for each parameter group. Raises ValueError for a list of another length."""
        count = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * count
        if len(values) != count:
            raise ValueError(f"{name}: expected {count} values, one for each parameter group, got {len(values)}")
        return values

    def get_lr(self) -> list:
        """Return the rates of the current iteration, one for each group."""
        raise NotImplementedError

    def get_last_lr(self) -> list:
        """Return the rates that were written last."""
        assert self._last_lr is not None, "no rate was written yet: call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and write its rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._last_lr = self._write(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        self.last_batch_iteration = sd["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """Range test: the rate grows until training diverges, to find the largest usable rate. Smith, arXiv:1803.09820, section 3."""

    def __init__(
        self, optimizer: object, lr_range_test_min_lr: Rates = 1e-3, lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive_int("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._start(self.min_lr)

    def get_lr(self) -> list:
        intervals = float(self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [rate * growth for rate in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(_Schedule):
    """One cycle of the rate, with momentum (the first of `betas`) in the opposite direction, then decay. Smith, arXiv:1803.09820.

    A stair count of n makes half of the cycle n levels. decay_step_size or decay_lr_rate 0: no decay.
    """

    def __init__(
        self, optimizer: object, cycle_min_lr: Rates, cycle_max_lr: Rates, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8, cycle_max_mom: Rates = 0.9, decay_mom_rate: float = 0.0, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0:
            raise ValueError(f"cycle_first_step_size: expected a positive number of steps, got {cycle_first_step_size}")
        if second < 0:
            raise ValueError(f"cycle_second_step_size: expected at least 0 steps, got {cycle_second_step_size}")
        self.rise = first, cycle_first_stair_count
        self.fall = second, cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.total_size, self.step_ratio = first + second, first / (first + second)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(f"OneCycle: {type(self.optimizer).__name__} has no betas, so that cycle_momentum is off")
        if self.cycle_momentum:
            self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
            self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        if last_batch_iteration == -1:  # as in DeepSpeed, get_last_lr raises until the first step
            self._write(self.min_lrs)
            self._write_momentum([(mom, _BETA2) for mom in self.min_moms] if self.cycle_momentum else None)

    def _write_momentum(self, betas: list[tuple[float, float]] | None) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas or [], strict=False):
            group["betas"] = pair

    def _height(self) -> float:
        """Return the position in the cycle between its lower end, 0, and its upper end, 1."""
        done = (self.last_batch_iteration + 1) % self.total_size
        rising = done <= self.rise[0]
        steps, stairs = self.rise if rising else self.fall
        climbed = done if rising else self.total_size - done
        # multiply before dividing: a quotient rounded to just below 1 would lose the highest level
        return math.floor(climbed * stairs / steps) / stairs if stairs > 0 else climbed / steps

    def _decay(self, rate: float) -> float | None:
        """Return 1 + rate * intervals after the cycle, or 1 if decay is off; None within the cycle."""
        if self.last_batch_iteration < self.total_size:
            return None
        off = math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0)
        return 1.0 if off else 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def get_lr(self) -> list:
        decay = self._decay(self.decay_lr_rate)
        if decay is not None:
            return [low / decay for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the current iteration, a pair for each group; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        decay = self._decay(self.decay_mom_rate)
        if decay is not None:
            return [(high * decay, _BETA2) for high in self.max_moms]
        height = self._height()
        return [(high - (high - low) * height, _BETA2) for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        self._write_momentum(self.get_mom())


class _Warmup(_Schedule):
    """Base class of the three schedules with a warm-up w(k) from 0 to 1."""

    total_num_steps: int | None = None  # subclasses that end set it before they call the constructor

    def __init__(self, optimizer: object, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        # log(1) is 0, by which `_warmth` would divide
        self.warmup_num_steps = max(2, _positive_int("warmup_num_steps", warmup_num_steps))
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning(f"warmup_type: expected 'log' or 'linear', got {warmup_type!r}: log it is, as in DeepSpeed")
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)
        # copies, since `_write` writes into rates that are tensors
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.org_lrs = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        total, warmup = self.total_num_steps, self.warmup_num_steps
        if total is not None and total < warmup:
            logger.warning(f"total_num_steps {total} is below warmup_num_steps {warmup}: training ends within the warm-up")

    def _warmth(self) -> float:
        """Return w(k) for the current iteration k of the warm-up."""
        if self.warmup_type == WARMUP_LOG_RATE:
            return self.inverse_log_warm_up * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """Warm-up from warmup_min_lr to warmup_max_lr (None: the optimizer's own rates), then constant."""

    def __init__(
        self, optimizer: object, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates | None = None, warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.min_lrs = self._per_group("min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("max_lr", self.org_lrs if warmup_max_lr is None else warmup_max_lr)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._start(self.min_lrs)

    def get_lr(self) -> list:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        warmed = self.last_batch_iteration >= self.warmup_num_steps
        gamma = self._after_warmup() if warmed else self._warmth()
        return [low + delta * gamma for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linear decay to 0 at total_num_steps."""

    total_num_steps: int

    def __init__(
        self, optimizer: object, total_num_steps: int, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """Ratio of the optimizer's own rates: warm-up from warmup_min_ratio to 1, a half cosine to cos_min_ratio, then constant."""

    total_num_steps: int

    def __init__(
        self, optimizer: object, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._start(self.get_lr())

    def get_lr_ratio(self) -> float:
        """Return the factor for the optimizer's own rates; 0 before the first step."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warmth() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)

    def get_lr(self) -> list:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]
