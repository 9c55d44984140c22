"""The section "sequences": races over lengths of sequences (sequences.py) on 4 and 8 ranks, and a table for each number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import median

from zeroshard.cli.sheets import show

from .plan import Contender, ModelShape, Rounds, Workload
from .race import Outcome, race, table
from .tables import MIB, Measured, Row, median_ratio

RANKS = (4, 8)
SHAPE = ModelShape(vocab_size=1024, dim=128, layers=2, heads=8)
# tokens; of longer sequences, whose steps take minutes, one round of one step; beyond the first number of ranks, of one sequence only,
# which zeroshard's contenders share (DeepSpeed's loader wants as many as there are ranks)
LONG = 32768


def run(
    contenders: list[Contender], seed: int, rounds: Rounds, log_dir: Path, lengths: tuple[int, ...], shape: ModelShape = SHAPE,
    ranks: tuple[int, ...] = RANKS,
) -> list[Measured]:  # fmt: skip
    """Race sequences of all lengths on each number of ranks; return a table for each number of ranks."""
    found = []
    for size in ranks:
        title = f"Sequences of a Llama (dim {shape.dim}, {shape.layers} layers) on {size} ranks"
        raced: list[tuple[Workload, list[Outcome], Measured]] = []
        for length in lengths:
            warmup, turns = (1, rounds.rounds) if length < LONG else (0, 1)
            alone = length >= LONG and size != ranks[0]
            racing = [each for each in contenders if each.kind in ("sp", "long")] if alone else contenders
            workload = Workload(dataclasses.replace(shape, seq_len=length), 1 if alone else size, size, seed, long=True)
            outcomes = race(racing, workload, Rounds(warmup, turns, steps=1, memory_steps=1), log_dir / f"{size}-{length}")
            raced.append((workload, outcomes, table("sequences", "", workload, outcomes)))
            show(_joined(title, raced[-1:]).sheet())  # long races follow, which a user may end
        found.append(_joined(title, raced))
    return found


def _joined(title: str, raced: list[tuple[Workload, list[Outcome], Measured]]) -> Measured:
    """Return one table of all lengths: tokens a second, memory that a step adds, and times over those of zs3 and of DeepSpeed."""
    rows, notes, skipped = [], [], dict[str, str]()
    for workload, outcomes, measured in raced:
        length = workload.shape.seq_len
        ran = {o.contender.kind: o for o in outcomes if o.ran and o.rounds_step_s}
        for outcome in ran.values():
            facts = {"tokens/s": workload.sequences * length / median(outcome.round_s)}
            facts |= {
                f"/ {name}": median_ratio(outcome.round_s, ran[kind].round_s)
                for name, kind in (("zs3", "zs"), ("ulysses3", "ulysses"))
                if kind in ran
            }
            if outcome.peak_rss is not None and outcome.rss_before is not None:
                added = outcome.peak_rss - outcome.rss_before
                facts |= {"added MiB": added / MIB, "KiB/token": added / 1024 / length}
            facts["loss"] = outcome.losses[-1]
            rows.append(Row(f"{length:6d} tokens  {outcome.contender.label}", outcome.round_s, facts=facts))
        notes += [(f"{length} tokens: {text}", kind) for text, kind in measured.notes if text.startswith("losses")]
        skipped |= {f"{length} tokens {name}": why for name, why in measured.skipped.items()}
    joined = Measured(title, rows, notes=notes, skipped=skipped)
    joined.broken = any(each.broken for *_, each in raced)
    joined.details = {str(workload.shape.seq_len): each.details for workload, _, each in raced}
    return joined
