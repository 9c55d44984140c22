"""A benchmark of zeroshard's file engine beside dd and fio: sequential direct writes and reads of one file, in turns.

    zeroshard bench --sections disk --path FOLDER

Each round runs every program once, each time in another order: it overwrites one file, which is fully written, then reads
it. Reported are medians in GB/s (1e9 bytes), and the ratio of the engine to the best of the others; the goal is GOAL. dd and
fio run with several block sizes and queue depths, of which the best counts; fio is left out where it is not installed.
The engine's memory (from `empty_aligned`, with huge pages) is as large as the file; dd and fio reuse one small buffer,
which stays in the processor's cache.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from statistics import median

from zeroshard.memory.io.aligned import empty_aligned
from zeroshard.memory.io.async_file import Engine
from zeroshard.memory.io.swap_folder import SwapFolder
from zeroshard.utils.sheets import PLAIN, WARNING, Sheet

from .micro_benchmark import seconds, take_turns
from .tables import Column, Goal, sheet_of

GOAL = 0.95  # least speed of the engine over that of the best other program
ENGINE = "engine"
MIB = 1 << 20
MODES = ("write", "read")
DD_BLOCKS_MIB = (1, 4, 16)
FIO_RUNS = (("libaio", 1, 8), ("libaio", 4, 4), ("psync", 4, 1))  # I/O engine, block in MiB, queue depth

Program = Callable[[str], float]  # "write" or "read" -> seconds


def run(path: str | os.PathLike, nbytes: int = 1 << 29, rounds: int = 4) -> dict:
    """Measure the engine, dd and fio on a new file below `path`, and remove the file.

    Args:
        path: a folder on the disk to measure.
        nbytes: size of the file; a multiple of 16 MiB.
        rounds: how often each program writes and reads all of it.

    Returns:
        {"path", "nbytes", "rounds", "direct", "write": result, "read": result} with result = {"gb_per_s": {program:
        [one number per round]}, "median": {program: number}, "best_other": program or None, "ratio": number or None}

    Raises:
        SwapError: the folder cannot be used; see `SwapFolder`.
    """
    largest = max(DD_BLOCKS_MIB) * MIB
    if nbytes < largest or nbytes % largest or rounds < 1:
        raise ValueError(f"expected nbytes as a multiple of {largest} and at least one round, got {nbytes}, {rounds}")
    with SwapFolder(path, rank=0, needed_nbytes=nbytes) as folder, Engine() as engine:
        file = folder.file("bench", nbytes)
        memory = empty_aligned(nbytes).random_(0, 256)  # random, since some disks do not store zeros
        ours = {"write": engine.write, "read": engine.read}
        programs: dict[str, Program] = {ENGINE: lambda mode: seconds(lambda: ours[mode](file, 0, memory).wait())}
        if shutil.which("dd"):
            for block_mib in DD_BLOCKS_MIB:
                programs[f"dd bs={block_mib}M"] = functools.partial(_dd_s, file.path, nbytes, block_mib)
        if shutil.which("fio"):
            for ioengine, block_mib, depth in FIO_RUNS:
                name = f"fio {ioengine} bs={block_mib}M depth={depth}"
                programs[name] = functools.partial(_fio_s, file.path, nbytes, ioengine, block_mib, depth)
        engine.write(file, 0, memory).wait()  # so that all measured writes overwrite, as those of training steps do
        turns: dict[str, Callable[[], list[float]]] = {
            name: functools.partial(_turn, program, nbytes) for name, program in programs.items()
        }
        turned = take_turns(turns, rounds)
        result = {"path": str(path), "nbytes": nbytes, "rounds": rounds, "direct": file.direct}
    for index, mode in enumerate(MODES):
        speeds = {name: [turn[index] for turn in of] for name, of in turned.items()}
        medians = {name: median(values) for name, values in speeds.items()}
        best = max(medians.keys() - {ENGINE}, key=medians.__getitem__, default=None)
        ratio = medians[ENGINE] / medians[best] if best else None
        result[mode] = {"gb_per_s": speeds, "median": medians, "best_other": best, "ratio": ratio}
    return result


def _turn(program: Program, nbytes: int) -> list[float]:
    """Run a program once; return its GB/s of writing, then of reading."""
    return [nbytes / program(mode) / 1e9 for mode in MODES]


def _dd_s(path: str, nbytes: int, block_mib: int, mode: str) -> float:
    """Run dd; return the seconds that it reports."""
    command = ["dd", f"bs={block_mib}M", f"count={nbytes // (block_mib * MIB)}"]
    if mode == "write":
        command += ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    else:
        command += [f"if={path}", "of=/dev/null", "iflag=direct"]
    told = _output(command).stderr
    found = re.search(r"([0-9.e-]+) s,", told)
    if found is None:
        raise RuntimeError(f"expected seconds in the output of dd, got {told!r}")
    return float(found[1])


def _fio_s(path: str, nbytes: int, ioengine: str, block_mib: int, depth: int, mode: str) -> float:
    """Run fio; return the seconds that it reports, which leave out its start."""
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={mode}", f"--bs={block_mib}M", f"--size={nbytes}"]
    command += [f"--ioengine={ioengine}", f"--iodepth={depth}", "--direct=1", "--thread", "--overwrite=1"]
    command += ["--scramble_buffers=0", "--output-format=json"]  # fio spends no time on changing its data
    job = json.loads(_output(command).stdout)["jobs"][0][mode]
    return job["runtime"] / 1e3 * nbytes / job["io_bytes"]


def _output(command: Sequence[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done


def goals(result: dict) -> list[Goal]:
    """Return the goals of writing and of reading with the values of a result of `run`."""
    what = "file engine / best of dd and fio"
    return [Goal(f"{what}, {mode}", result[mode]["ratio"], GOAL, "disk", at_least=True) for mode in MODES]


def sheet(result: dict) -> Sheet:
    """Return a result of `run` as a table."""

    def speed(mode: str, name: str) -> str:
        speeds = result[mode]["gb_per_s"][name]
        return f"{result[mode]['median'][name]:.2f} ({min(speeds):.2f}-{max(speeds):.2f})"

    how = "direct I/O" if result["direct"] else "BUFFERED: this filesystem has no direct I/O"
    notes = [(f"median (range) of {result['rounds']} rounds, GB/s; one file of {result['nbytes'] / 2**30:g} GiB, {how}", PLAIN)]
    if len(result["write"]["median"]) == 1:
        notes.append(("nothing to compare with; install dd or fio", WARNING))
    columns = [Column("", str), *(Column(mode, functools.partial(speed, mode)) for mode in MODES)]
    return sheet_of("File engine, dd and fio", columns, result["write"]["median"], notes)
