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
_said: set[tuple[object, ...]] = set()  # messages of warning_once, with their arguments


def warning_once(message: str, *args: object) -> None:
    """Log a warning once per process for a message and its arguments."""
    if (message, args) not in _said:
        _said.add((message, args))  # before logging: ranks may be threads
        logger.warning(message, *args)


logger.warning_once = warning_once  # type: ignore[attr-defined]


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log the message with this rank's number on `ranks` ([-1]: on all; None: only if there is no process group)."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, "[Rank %s] %s", rank, message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (None: DeepSpeed's) and of its handlers. Raises ValueError for an unknown name."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level: expected one of {list(log_levels)}, got {log_level_str!r}")
    target, level = custom_logger or logger, log_levels[log_level_str.lower()]
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)
