"""`zeroshard bench`: zeroshard beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, in one run.

The package reads from top to bottom:

    plan.py         what is run: contenders, model, rounds (frozen dataclasses)
    workload.py     the model, its optimizer and the batches, equal for every contender
    contenders.py   each library, set up as its own documentation tells a user to
    memory.py       resident memory of a process, as the kernel counts it
    worker.py       one rank of one contender: a process that sleeps until it is told to step
    team.py         all ranks of one contender, seen from the controller
    diskprobe.py    what a disk gives all ranks at once
    overlap.py      how much copying lay beside computation, by CUDA events
    race.py         the interleaved rounds
    hostwork.py     two micro-benchmarks without communication: host work, optimizer step
    hostadam.py     the host's Adam beside memory copies and peers; a program of its own
    disk.py         the file engine beside dd and fio; a program of its own
    programs.py     these two as sections
    gpu.py          one GPU: speed on each tier, and the largest models
    figures.py      medians, ratios per round, bounds, goals and verdicts
    sheets.py       tables as cells, for the terminal and in Markdown
    planner/report.py       results.json, results.md; plot.py draws the PNG
    command.py      the command line
    beyond.py       a proof, not a comparison: training beyond memory, in a cage (cage.py)

Words used here: a *contender* is a library with a stage and a precision; its *team* is one process per
rank; a *turn* is a few consecutive steps of one contender; a *round* is one turn of each contender.
"""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the command line is described by `zeroshard bench --help`."""
    from .command import main as command_main

    return command_main(argv)


__all__ = ["main"]
