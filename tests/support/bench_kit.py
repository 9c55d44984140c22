"""What tests of benchmarks share: a tiny shape, and outcomes of races that never ran."""

from __future__ import annotations

from benchmarks import plan
from benchmarks.plan import ModelShape
from benchmarks.race import Outcome

TINY = ModelShape(vocab_size=64, seq_len=8, dim=16, layers=2, heads=2)


def outcome(name: str, rounds_step_s: list[list[float]], **fields) -> Outcome:
    contender = next(c for c in plan.CONTENDERS if c.name == name)
    defaults = {"cpu_s": [1.0], "losses": [2.0, 1.0], "peak_rss": 100 << 20, "numel": 10}
    return Outcome(contender, rounds_step_s=rounds_step_s, **(defaults | fields))
