"""deepspeed.utils.logging: the logger named "DeepSpeed" and messages by rank.

As DeepSpeed's logger, it writes warnings and above to stdout and does not propagate; scripts and frameworks change its level
(`logger.setLevel`), and tests add their own handlers.
"""

from __future__ import annotations

import logging
import sys

from . import communication as dist

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


logger = logging.getLogger("DeepSpeed")
logger.setLevel(logging.WARNING)
logger.propagate = False
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
    logger.addHandler(_handler)
_said: set[tuple[object, ...]] = set()  # what has been logged once


def warning_once(message: str, *args: object) -> None:
    """Log a warning once per process for a message and its arguments."""
    if (message, args) not in _said:
        _said.add((message, args))  # before logging: ranks may be threads
        logger.warning(message, *args)


def get_dist_msg(message: str, ranks: list[int] | None = None) -> str | None:
    """Return the message with this rank's number, if the rank is in `ranks` ([-1]: all) or has no process group; else None."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    said = rank == -1 or (bool(ranks) and ranks is not None and (ranks[0] == -1 or rank in ranks))
    return f"[Rank {rank}] {message}" if said else None


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on `ranks` ([-1]: on all; None: only if there is no process group)."""
    said = get_dist_msg(message, ranks)
    if said is not None:
        logger.log(level, said)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Print on `ranks` as log_dist does, at any level of the logger."""
    said = get_dist_msg(message, ranks)
    if said is not None:
        print(said)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Call log_dist once per process for each message."""
    what = (message, None if ranks is None else tuple(ranks), level)
    if what not in _said:
        _said.add(what)
        log_dist(message, ranks, level)


logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the level of a name: 'info' -> logging.INFO. Raises ValueError for unknown names."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level: expected one of {list(log_levels)}, got {log_level_str!r}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (None: DeepSpeed's) and of its handlers."""
    target, level = custom_logger or logger, get_log_level_from_string(log_level_str)
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the logger's effective level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether messages of this level are logged."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
