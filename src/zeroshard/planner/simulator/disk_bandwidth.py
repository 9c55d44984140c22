"""The bandwidth of a disk that several processes use at once: it bounds a step that reads and writes states there.

All ranks are told to begin at the same time, and each moves NBYTES in requests of REQUEST_NBYTES, all handed to the engine
at once: writes, reads, or both side by side. Bandwidth is the bytes of all ranks over the time from the first rank's begin
to the last rank's end.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...tiers.io import Engine, File, open_file
from ...utils.aligned import empty_aligned

PHASES = ("write", "read", "both")
NBYTES, REQUEST_NBYTES = 192 << 20, 16 << 20


@dataclass(frozen=True)
class Burst:
    """The transfers of one rank; begin and end are seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class DiskSpeed:
    """The bytes per second of all ranks together: writing alone, reading alone, half of each at the same time."""

    write: float
    read: float
    both: float

    def seconds(self, read_nbytes: float, write_nbytes: float) -> float:
        """Return the least seconds for so many bytes: reads and writes one after the other, or side by side if that is faster."""
        return min(read_nbytes / self.read + write_nbytes / self.write, (read_nbytes + write_nbytes) / self.both)


def bandwidth(bursts: list[Burst]) -> float:
    """Return the bytes per second of all ranks together."""
    return sum(b.nbytes for b in bursts) / (max(b.end for b in bursts) - min(b.begin for b in bursts))


class DiskBursts:
    """A hidden file of this process, which `burst` writes and reads."""

    def __init__(self, folder: str, nbytes: int = NBYTES) -> None:
        self.file = hidden_file(folder, 2 * nbytes)  # the first half is written, the second read
        self.nbytes = nbytes
        self.burst("write", at=nbytes)  # blocks that were never written would be read without the disk

    def burst(self, phase: str, request_nbytes: int = REQUEST_NBYTES, at: int = 0) -> Burst:
        """Run one of PHASES over the file; return its begin, end and bytes. at: the byte at which writes begin."""
        writes, reads = phase != "read", phase != "write"
        size = min(request_nbytes, self.nbytes)
        # buffers that are freed at once, so that they do not count in a measurement of memory
        source, target, handles = noise(size), empty_aligned(size).zero_(), []
        with Engine() as engine:
            begin = time.monotonic()
            for offset in range(0, self.nbytes - size + 1, size):
                if writes:
                    handles.append(engine.write(self.file, at + offset, source))
                if reads:
                    handles.append(engine.read(self.file, self.nbytes + offset, target))
            for handle in handles:
                handle.wait()
            return Burst(begin, time.monotonic(), len(handles) * size)


def write_bulk(folder: str, nbytes: int) -> Burst:
    """Write a new file of so many bytes through the engine alone, with its space reserved beforehand, and sync it."""
    source, begin = noise(REQUEST_NBYTES), time.monotonic()
    file = hidden_file(folder, nbytes, reserve=True)
    with Engine() as engine:
        for handle in [engine.write(file, at, source[: nbytes - at]) for at in range(0, nbytes, REQUEST_NBYTES)]:
            handle.wait()
    file.sync()
    end = time.monotonic()
    file.close()
    return Burst(begin, end, nbytes)


def hidden_file(folder: str | os.PathLike, nbytes: int, reserve: bool = False) -> File:
    """Create a file and remove its name, so that it disappears with the process."""
    name = Path(folder) / f".zeroshard-probe-{os.getpid()}-{secrets.token_hex(4)}"
    file = open_file(name, nbytes, create=True, reserve=reserve)
    os.unlink(name)
    return file


def noise(nbytes: int) -> Tensor:
    """Return bytes that no disk can skip or compress: a random MiB, again and again."""
    memory, begin = empty_aligned(nbytes), min(nbytes, 1 << 20)
    memory[:begin].random_(0, 256, generator=torch.Generator())  # the global one is the program's
    for part in memory[begin:].split(begin):
        part.copy_(memory[: part.numel()])
    return memory
