"""The errors of zeroshard: what went wrong, which rank or parameter, and what to do.

User mistakes are also ValueError or TypeError, so that ordinary handlers catch them; failures of the run
(a lost peer, a stall) derive from `ZeroshardError` alone.
"""

from __future__ import annotations

import difflib
import dis
import os
import re
from collections.abc import Iterable, Sequence
from errno import EBADMSG, EDQUOT, EFBIG, EINVAL, EIO, ENODATA, ENOSPC, EROFS, errorcode
from types import FrameType


class ZeroshardError(RuntimeError):
    """Base of every error that this library raises on purpose."""


class ConfigError(ZeroshardError, ValueError):
    """An option has an unknown name or a value outside its range."""


class ModelMismatch(ZeroshardError, ValueError):
    """Ranks built different models, or wrote different values into one; or another model was expected."""


class ModelChanged(ZeroshardError):
    """A sharded model was changed behind the library's back (a parameter replaced, or unfrozen that was frozen at zs.shard)."""


class ShardedAccessError(ZeroshardError):
    """An operation needs the whole of a parameter of which this rank holds a slice."""


class ShardedWriteError(ShardedAccessError):
    """An in-place write that cannot be carried out on slices."""


class TiledAccessError(ShardedAccessError, AttributeError):
    """The weight of a tiled module was read or assigned: it is in the tiles."""


class ModelClosed(ZeroshardError):
    """A model or optimizer is used after `zs.close`."""


class StatesAway(ZeroshardError):
    """A model is used whose states were moved by `zs.offload_states`."""


class ThreadsMet(ZeroshardError):
    """Two threads were in one object at the same time that only one at a time may use."""


class CollectiveMismatch(ZeroshardError):
    """Ranks entered different collective operations."""


class MalformedMessage(ZeroshardError):
    """Bytes that should be what a rank tells are not."""


LEFT = "left at the end of its script, or by SystemExit"
SCRIPT_ENDED = "its script came to an end before those of the others"
_IN_LOOP = ("end of backward", "optimizer step", "reduce ", "gather ", "a staging buffer", "what comes next", "forward of ")


def left_loop(gone: Sequence[int], label: str, others: str) -> str:
    """' Rank 0 left the training loop ...', for ranks that wait for it at `label`, a place in that loop; else ''."""
    if not gone or not label.startswith(_IN_LOOP):
        return ""
    ranks = f"Rank {gone[0]}" if len(gone) == 1 else f"Ranks {', '.join(map(str, gone))}"
    found = re.search(r"\[step (\d+)\]", label)
    after = f" after step {int(found[1]) - 1}" if found else ""
    there = f"in step {found[1]}" if found else "still inside"
    return (
        f" {ranks} left the training loop{after} (its data ended?) while {others} {there}. Where ranks have unequally many batches put "
        "`with zs.join(model):` around the loop, or iterate over zs.stop_together(model, loader)."
    )


class PeerFailed(ZeroshardError):
    """Another rank raised, exited or was killed; carries its traceback where it could send one.

    rank: of the world; the rank that failed first, also where this one was told by another that went down with it. reason: what
    that rank said last, or how its process ended.
    """

    def __init__(self, rank: int, reason: str, waiting_for: str = "") -> None:
        self.rank, self.reason, self.waiting_for = rank, reason, waiting_for
        where = f" (this rank was waiting for: {waiting_for})" if waiting_for else ""
        hint = left_loop([rank], waiting_for, "this rank is") if reason == LEFT or SCRIPT_ENDED in reason else ""
        if reason.startswith("left "):  # on purpose
            how, _, text = reason.partition("\n")
            super().__init__(f"rank {rank} {how}{where}" + (f".{hint}" if hint else "") + (f"\n{text}" if text else ""))
        else:
            super().__init__(f"rank {rank} failed{where}: {reason}" + (f".{hint}" if hint else ""))

    def __reduce__(self) -> tuple:
        return PeerFailed, (self.rank, self.reason, self.waiting_for)


class StallError(ZeroshardError):
    """No progress within the stall timeout; names who waits for whom."""


class NonFiniteError(ZeroshardError):
    """Too many steps in a row had non-finite gradients."""


class SwapError(ConfigError):
    """A folder cannot serve as swap space; the message says what it lacks and what to do."""


class HostMemoryError(ZeroshardError, MemoryError):
    """The ranks of a host need more of its memory than there is; the message is a table with the remedies."""


_IO_REMEDIES = {
    ENOSPC: "free space on that filesystem, or choose a folder with more room",
    EDQUOT: "the quota is used up: have it raised, or choose a folder on another filesystem",
    EINVAL: "the filesystem does not take direct I/O at multiples of 4096 bytes: choose a folder on another one",
    EROFS: "choose a folder on a filesystem that can be written",
    EIO: "the device failed: see the kernel's log (dmesg), and restart from the last checkpoint with another folder",
    ENODATA: "the file was cut while in use: nothing else may write in that folder; restart from the last checkpoint",
    EBADMSG: "what was read is not what was written: check the device, and restart from the last checkpoint",
}


def io_remedy(errno: int) -> str:
    """What to do about an error of the system that met a file."""
    if errno == EFBIG:
        return _file_limit()
    return _IO_REMEDIES.get(errno, "check that the folder still exists and may be written")


def _file_limit() -> str:
    """Which limit a file has met: the process's own, or the filesystem's."""
    import resource  # POSIX only, as this error is

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    filesystem = "the filesystem takes no file of that size: choose a folder on another one, or more ranks with smaller files"
    if limit == resource.RLIM_INFINITY:
        return filesystem
    own = f"this process may make no file larger than {limit:,} bytes (ulimit -f): raise that limit for all ranks"
    return f"{own}. Or, if it is not met, {filesystem}"


class OffloadIOError(ZeroshardError):
    """A read or write of an offloaded tensor failed: `file` (path), `offset` (bytes), `errno`."""

    def __init__(self, file: str, offset: int, errno: int, what: str = "access") -> None:
        self.file, self.offset, self.errno, self.what = str(file), offset, errno, what
        name = errorcode.get(errno, str(errno))
        failed = f"{what} of {self.file} failed at byte {offset}: {name} ({os.strerror(errno)})"
        super().__init__(f"{failed}; {io_remedy(errno)}")

    def __reduce__(self) -> tuple:
        return OffloadIOError, (self.file, self.offset, self.errno, self.what)


class CheckpointError(ZeroshardError):
    """Saving or loading a checkpoint failed, on every rank; the message names the thing and the remedy."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint where one was asked for."""


class CheckpointIncomplete(CheckpointNotFound):
    """What was asked for is there, but without its manifest, which says what lies where: it can not be loaded."""


class CheckpointReadError(CheckpointError, OSError):
    """A file could not be read: `file`, `offset` (bytes), `errno`, `rank` that read; None: not known."""

    def __init__(
        self, file: str | os.PathLike, offset: int | None, errno: int | None, reason: str, rank: int | None = None
    ) -> None:
        self.file, self.offset, self.reason, self.rank = str(file), offset, reason, rank
        where = "" if offset is None else f" at byte {offset}"
        who = "" if rank is None else f" by rank {rank}"
        name = "" if errno is None else f"{errorcode.get(errno, errno)}: "
        super().__init__(
            f"{self.file} could not be read{where}{who}: {name}{reason}; nothing was changed. Check that it is there and may be "
            "read; of a device that fails the kernel's log (dmesg) tells more."
        )
        self.errno = errno

    def __reduce__(self) -> tuple:
        return CheckpointReadError, (self.file, self.offset, self.errno, self.reason, self.rank)


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written: `path`, `errno`, `needed` and `free` bytes (None: unknown). Earlier ones stand."""

    def __init__(self, path: str, errno: int, needed: int, free: int | None, what: str = "") -> None:
        self.path, self.errno, self.needed, self.free, self.what = str(path), errno, needed, free, what
        name = errorcode.get(errno, str(errno))
        there = ", how many are free is unknown" if free is None else f", {free:,} are free"
        super().__init__(
            f"{what or 'saving a checkpoint'}: {self.path}: {name} ({os.strerror(errno)}); {needed:,} bytes are needed"
            f"{'' if errno == EFBIG else there}; {io_remedy(errno)}. Nothing was "
            "changed: earlier checkpoints and the training state are as they were"
        )

    def __reduce__(self) -> tuple:
        return CheckpointWriteError, (self.path, self.errno, self.needed, self.free, self.what)


class CheckpointCorrupt(CheckpointError):
    """A file is not what was written: `file`, `offset` (bytes), `expected` and `actual` (checksum, or what was found)."""

    def __init__(self, file: str, offset: int, expected: str, actual: str, hint: str = "") -> None:
        self.file, self.offset, self.expected, self.actual, self.hint = str(file), offset, expected, actual, hint
        super().__init__(f"{self.file} is damaged at byte {offset}: expected {expected}, found {actual}. {hint}".rstrip())

    def __reduce__(self) -> tuple:
        return CheckpointCorrupt, (self.file, self.offset, self.expected, self.actual, self.hint)


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is of another model or optimizer. All differences are listed; nothing was changed."""


class BaseModelMismatch(CheckpointError, ValueError):
    """A checkpoint of trained parameters alone belongs to another base model. Nothing was changed."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the known word nearest to `word`, or ''."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def missing_name(text: str, frame: FrameType) -> Exception:
    """The error of a module that has no such name. frame: of whoever asks.

    Where `from module import name` asks it is an ImportError: Python would put a message of its own in the place of an
    AttributeError's.
    """
    code = frame.f_code.co_code
    imports = frame.f_lasti >= 0 and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"
    return ImportError(text) if imports else AttributeError(text)
