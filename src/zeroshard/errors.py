"""The errors of zeroshard. Each message names the problem, the rank or parameter, and a remedy.

Some also derive from Python's error of the same kind (ValueError, MemoryError, ...), so that handlers of those catch them;
failures of the run (a lost peer, a stall) derive from `ZeroshardError` alone. The one that derives from torch's error,
DeviceMemoryError, is in guard/out_of_memory.py: this file is read before a command has parsed its options, without torch.
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
    """Base class of all errors that this library raises on purpose."""


class _OfFacts(ZeroshardError):
    """Base of errors that are made of facts, not of a text: ranks send them to each other, and make them anew of these."""

    _facts: tuple[str, ...]  # attributes that are the arguments of the constructor

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, name) for name in self._facts)


class ConfigError(ZeroshardError, ValueError):
    """An option has an unknown name or a value outside its range."""


class ModelMismatch(ZeroshardError, ValueError):
    """Ranks built different models, wrote different values to one parameter, or were given another model than was expected."""


class ModelChanged(ZeroshardError):
    """A program changed a sharded model directly: replaced a parameter, or unfroze one that was frozen at zs.shard."""


class ShardedAccessError(ZeroshardError):
    """An operation needs a whole parameter, and this rank holds only a slice of it."""


class ShardedWriteError(ShardedAccessError):
    """A write in place is impossible on slices, would be lost, or came between a forward and its backward."""


class TiledAccessError(ShardedAccessError, AttributeError):
    """A program read or assigned the weight of a tiled module, which has no weight: its tiles have the parts."""


class ModelClosed(ZeroshardError):
    """A model or optimizer was used after `zs.close`."""


class StatesAway(ZeroshardError):
    """A model was used while its states were moved away by `zs.offload_states`."""


class ThreadsMet(ZeroshardError):
    """Two threads used one object at the same time, which only one thread may use at a time."""


class CollectiveMismatch(ZeroshardError):
    """Ranks entered different collective operations."""


class MalformedMessage(ZeroshardError):
    """A message from another rank does not have the expected form."""


LEFT = "left at the end of its script, or by SystemExit"
SCRIPT_ENDED = "its script came to an end before those of the others"
_IN_LOOP = ("end of backward", "optimizer step", "reduce ", "gather ", "a staging buffer", "what comes next", "forward of ")


def left_loop(gone: Sequence[int], label: str, others: str) -> str:
    """Return ' Rank 0 left the training loop ...' if ranks wait for rank 0 in an operation of that loop (`label`); else ''."""
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


class PeerFailed(_OfFacts, ZeroshardError):
    """Another rank raised, exited or was killed; the message has its traceback if that rank could send it.

    rank: the number, in the world, of the rank that failed first. (The rank that reported it may have failed because of it.)
    reason: the last message of that rank, or how its process ended.
    """

    _facts = ("rank", "reason", "waiting_for")

    def __init__(self, rank: int, reason: str, waiting_for: str = "") -> None:
        self.rank, self.reason, self.waiting_for = rank, reason, waiting_for
        where = f" (this rank was waiting for: {waiting_for})" if waiting_for else ""
        hint = left_loop([rank], waiting_for, "this rank is") if reason == LEFT or SCRIPT_ENDED in reason else ""
        if reason.startswith("left "):  # it ended on purpose: no failure
            how, _, text = reason.partition("\n")
            super().__init__(f"rank {rank} {how}{where}" + (f".{hint}" if hint else "") + (f"\n{text}" if text else ""))
        else:
            super().__init__(f"rank {rank} failed{where}: {reason}" + (f".{hint}" if hint else ""))


class StallError(ZeroshardError):
    """A wait exceeded the stall timeout; the message names the ranks that wait and the ranks that are missing."""


class NonFiniteError(ZeroshardError):
    """Too many steps in a row had non-finite gradients."""


class SwapError(ConfigError):
    """A folder can not hold offloaded states; the message has the reason and a remedy."""


OUT_OF_MEMORY_PAGE = "docs/how-to/out-of-memory.md"


class HostMemoryError(ZeroshardError, MemoryError):
    """The ranks of a host need more memory than the host has.

    zs.shard raises it on all ranks before it allocates anything, if the states will not fit: the message is a table with the
    remedies. A forward, a backward or a step raises it on the rank whose allocation has failed: the message lists what the rank
    holds, and the changes that reduce it. How-to: docs/how-to/out-of-memory.md.
    """


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
    """Return a remedy for a system error on a file."""
    if errno != EFBIG:
        return _IO_REMEDIES.get(errno, "check that the folder still exists and may be written")
    import resource  # POSIX only, as this error is

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    filesystem = "the filesystem takes no file of that size: choose a folder on another one, or more ranks with smaller files"
    if limit == resource.RLIM_INFINITY:
        return filesystem
    own = f"this process may make no file larger than {limit:,} bytes (ulimit -f): raise that limit for all ranks"
    return f"{own}. Or, if it is not met, {filesystem}"


class OffloadIOError(_OfFacts, ZeroshardError):
    """A read or write of an offloaded tensor failed, at byte `offset` of `file`, with `errno`."""

    _facts = ("file", "offset", "errno", "what")

    def __init__(self, file: str, offset: int, errno: int, what: str = "access") -> None:
        self.file, self.offset, self.errno, self.what = str(file), offset, errno, what
        name = errorcode.get(errno, str(errno))
        failed = f"{what} of {self.file} failed at byte {offset}: {name} ({os.strerror(errno)})"
        super().__init__(f"{failed}; {io_remedy(errno)}")


class CheckpointError(ZeroshardError):
    """Saving or loading a checkpoint failed, on every rank; the message names the file or tensor, and a remedy."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the given path."""


class CheckpointIncomplete(CheckpointNotFound):
    """A checkpoint has no manifest (the list of its tensors and files), and so can not be loaded."""


class CheckpointReadError(_OfFacts, CheckpointError, OSError):
    """A `file` could not be read, at byte `offset`, with `errno`, by `rank`; each is None if it is unknown."""

    _facts = ("file", "offset", "errno", "reason", "rank")

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


class CheckpointWriteError(_OfFacts, CheckpointError):
    """A checkpoint could not be written: `path`, `errno`, `needed` and `free` bytes (None: unknown). Earlier ones are intact."""

    _facts = ("path", "errno", "needed", "free", "what")

    def __init__(self, path: str, errno: int, needed: int, free: int | None, what: str = "") -> None:
        self.path, self.errno, self.needed, self.free, self.what = str(path), errno, needed, free, what
        name = errorcode.get(errno, str(errno))
        there = ", how many are free is unknown" if free is None else f", {free:,} are free"
        super().__init__(
            f"{what or 'saving a checkpoint'}: {self.path}: {name} ({os.strerror(errno)}); {needed:,} bytes are needed"
            f"{'' if errno == EFBIG else there}; {io_remedy(errno)}. Nothing was "
            "changed: earlier checkpoints and the training state are as they were"
        )


class CheckpointCorrupt(_OfFacts, CheckpointError):
    """A `file` has changed since it was written, at byte `offset`: `expected` and `actual` checksum or content."""

    _facts = ("file", "offset", "expected", "actual", "hint")

    def __init__(self, file: str, offset: int, expected: str, actual: str, hint: str = "") -> None:
        self.file, self.offset, self.expected, self.actual, self.hint = str(file), offset, expected, actual, hint
        super().__init__(f"{self.file} is damaged at byte {offset}: expected {expected}, found {actual}. {hint}".rstrip())


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is of another model or optimizer. The message lists all differences; nothing was changed."""


class BaseModelMismatch(CheckpointError, ValueError):
    """A checkpoint without the frozen parameters belongs to another base model. Nothing was changed."""


def changed_late(what: str, change: str, at_first_use: bool) -> ModelChanged:
    """Return the error for a change of a sharded model. at_first_use: zeroshard.fsdp has sharded it, at its first use."""
    if at_first_use:
        return ModelChanged(
            f"{what} after the model's first use (a forward, a state_dict, an optimizer), which shards it: do that before it."
        )
    return ModelChanged(f"{what} after zs.shard(). zs.close(model) first, {change}, then zs.shard() it again.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" with the known word most similar to `word`, or "" if none is similar."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def missing_name(text: str, frame: FrameType) -> Exception:
    """Return the error that a module's `__getattr__` raises for a name that it lacks. frame: the frame that asks for the name.

    For `from module import name` it is an ImportError, since Python would replace the message of an AttributeError.
    """
    code = frame.f_code.co_code
    imports = frame.f_lasti >= 0 and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"
    return ImportError(text) if imports else AttributeError(text)
