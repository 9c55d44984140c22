"""One save on one rank: the rank's data file, and on rank 0 the step that makes one checkpoint of all files.

    foreground   open, copy, write, sync, list | publish                      ranks meet after each (see `together`)
    background   open | copy some | . copy, write, sync, list . publish .     and `Save.wait` meets them again

Tensors that only the library writes (parameters at stage 3, masters, sharded states in memory) are copied while forward and
backward run; whoever is about to write them, mainly an optimizer step, waits until they are copied (`Saver.await_copy`).
Tensors on disk and tensors that users may write at any time are copied before the save returns.

During a background save ranks must not use `comm`, which belongs to the training loop. A rank that has written its file
leaves `rank-00000.json` in the draft (or `rank-00000.failed`), and rank 0 waits for all of them. A rank holds a lock on its
file as a sign of life; on a filesystem without locks that all ranks see, it renews the file's modification time instead.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from ..errors import CheckpointError, CheckpointWriteError, ConfigError, MalformedMessage, OffloadIOError, ZeroshardError
from ..seam import Engine, StateSlice, decode, encode, kind_of
from ..tiers.io import Engine as FileEngine
from ..tiers.io import open_file
from ..utils.version import __version__
from . import directory
from . import manifest as listing
from . import state_map as holding
from .file_writer import BUFFER_NBYTES, ROTATING, FileWriter
from .fingerprint import identities
from .heartbeat import telling, together
from .rank_file import FileLayout
from .stages import Stages
from .state_map import Contents

_MOST_REASON_NBYTES = 1 << 20  # most that is read of a failed rank's `rank-00000.failed`
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.25
# a rank's part of the manifest is exchanged up to this size, and as long as all ranks' are this large, since every rank receives
# them; a larger one goes through a file
_SMALL_NBYTES, _TOGETHER_NBYTES = 1 << 16, 1 << 24
_SIGN_S = 1.0  # seconds between two signs of life where there are no locks
T = TypeVar("T")
Opening = tuple[str, str | None]  # the digest of a rank's layout; on rank 0 that of all layouts of the last save


@dataclass(frozen=True)
class Plan:
    """Checked arguments of a call of `zs.save`; the same on every rank."""

    root: str
    name: str
    step: int
    overwrite: bool
    asynchronous: bool
    if_busy: str
    keep_last: int | None
    keep_every: int | None
    trained_only: bool | None
    latest: bool


class Save:
    """Handle of one save, in progress or done.

    Threads: the rank's main thread calls the methods; a background save's thread sets the events and `_error`; `wait` joins it.

    Attributes:
        path: where the checkpoint is when it is complete.
        nbytes: bytes of this rank's file.
        snapshot_nbytes: host memory that holds the copy while it is written; it is kept for the next asynchronous save.
        stall_seconds: for how long training has been held up so far, by the call and by waiting for the copy before a state changed.
        seconds: from the call until the checkpoint was complete.
    """

    def __init__(self, path: Path, nbytes: int, snapshot_nbytes: int) -> None:
        self.path, self.nbytes, self.snapshot_nbytes = path, nbytes, snapshot_nbytes
        self.stall_seconds = self.seconds = 0.0
        self.told = False  # whether `wait` has returned or raised: the user knows how the save ended
        self._copied = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._settle: Callable[[], None] | None = None

    def done(self) -> bool:
        """Return whether this rank's part of the save has ended, so that `wait` would only wait for other ranks."""
        return self._thread is None or not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Wait until nothing is read from the model any more. Everything in zeroshard that changes states calls this first."""
        if not self._copied.is_set():
            begin = time.monotonic()
            self._copied.wait()
            self.stall_seconds += time.monotonic() - begin

    def wait_part(self, timeout_s: float | None = None) -> None:
        """Wait until this rank has written its part, and on rank 0 until the checkpoint is complete or has failed.

        It is for a process that ends after an error: it is not collective, and does not raise what failed.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its path (collective). Raises what failed (CheckpointWriteError, ...)."""
        if self._settle is not None:
            self._settle()
            self._settle = None
        self.told = True
        if self._error is not None:
            raise self._error
        return self.path


class Saver:
    """State shared by all saves of one model (`Engine.saver`): buffers, the I/O engine, the last save, its layout.

    Threads: the rank's main thread. A background save reads shards in memory until `await_copy` returns (those on disk it has
    read before), and afterwards only writes files: it never uses the Comm or the pools.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.io = engine, FileEngine()
        self.pool = engine.staging_pool(BUFFER_NBYTES)
        self.last: Save | None = None
        self.listed = listing.Listed()
        self.tensors, self.digest = b"", ""  # JSON of the layout's tensors (`tensors_of`), and its XXH3-64
        self._layout: FileLayout | None = None

    def layout(self, contents: Contents, extras: dict[str, bytes]) -> FileLayout:
        """Return the layout of this rank's file. The last save's is used again if every tensor has kept its place."""
        if self._layout is None or self._layout.entries != contents.entries:
            layout = FileLayout.of(contents)
            self.tensors = listing.tensors_of(layout, self.engine.world.rank)
            self.digest = xxhash.xxh3_64_hexdigest(self.tensors)
            self._layout = layout  # last: if something above raises, the next save makes all three again
        return self._layout.with_objects(contents.objects, extras)

    def await_copy(self) -> None:
        """Wait until the last save has copied the states. Called before they are changed."""
        if self.last is not None:
            self.last.wait_copied()

    def close(self) -> None:
        """Wait for a save in progress, print on rank 0 if it failed, and close the engine (collective)."""
        last, self.last = self.last, None
        try:
            if last is not None and not last.told:
                last.wait()
        except ZeroshardError as error:
            if last is not None and self.engine.world.rank == 0:
                print(f"zeroshard: {last.path} was not saved: {error}", file=sys.stderr)
        finally:
            self.io.close()


def write_error(path: Path | str, errno: int, needed: int, what: str) -> CheckpointWriteError:
    """Return a CheckpointWriteError with the free space of the filesystem, if that can be determined."""
    free, existing = None, Path(path)
    for folder in (existing, *existing.parents):  # the path may not exist, or not be readable
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            break
    return CheckpointWriteError(str(path), errno, needed, free, what)


@contextmanager
def write_errors(where: Path, needed: int, what: str) -> Iterator[None]:
    """Raise OSError and OffloadIOError as CheckpointWriteError. where: the file or folder, if an error does not name one."""
    try:
        yield
    except OffloadIOError as error:
        raise write_error(error.file, error.errno, needed, what) from error
    except OSError as error:
        raise write_error(error.filename or where, error.errno or EIO, needed, what) from error


class Writing:
    """One save on one rank: `run` carries it out, or starts the thread that does."""

    def __init__(
        self, saver: Saver, plan: Plan, draft: Path | directory.Draft, stages: Stages, extras: dict[str, bytes],
        slices: dict[str, list[StateSlice]], shared: set[str], files: dict[str, bytes], begin: float,
    ) -> None:  # fmt: skip
        self.saver, self.plan, self.stages, self.begin = saver, plan, stages, begin
        self.engine, self.comm = saver.engine, stages.world
        self.draft = draft if isinstance(draft, directory.Draft) else None
        self.folder = draft.path if isinstance(draft, directory.Draft) else draft
        rank, self.per_rank = self.comm.rank, sorted(extras.keys() - shared)
        self.extras = {  # those that this rank writes: of shared ones rank 0 writes all
            f"{holding.EXTRA}{name}" + ("" if name in shared else f".{rank}"): value
            for name, value in extras.items()
            if rank == 0 or name not in shared
        }
        self.slices, self.files, self.file = slices, files, self._file_of(rank)
        self.held: int | None = None  # descriptor of the lock that shows that this rank is alive
        self.in_vain = False  # another rank failed: this rank's file will not be used
        self.locked = True  # whether rank 0 sees the locks of all ranks
        self.signs: dict[int, tuple[int, float]] = {}  # rank -> (modification time of its file, when rank 0 first saw that)
        self.contents = Contents()
        self.layout: FileLayout | None = None
        self.writer: FileWriter | None = None
        self.extra: dict[str, object] = {}
        self.digests: list[str] = []  # XXH3-64 of each rank's layout
        self.metadata = b""  # content of `.metadata` that has been written ahead
        self.mark: object = None  # event on the device's stream at which the state is the one to save

    def run(self) -> Save:
        """Carry out the save, or (asynchronous) its foreground part, and start the thread that does the rest (collective)."""
        try:
            self.engine.states.finish_updates()
            if self.plan.asynchronous:
                self._compare(self._together("making the files", self._open))
                self.locked = self._together("copying", lambda: self._copy(self.layout.at_once))[0]  # type: ignore[union-attr]
            else:
                written = self._together("writing", self._open_and_write)
                self._compare([opened for opened, _ in written])
                parts = [part for _, part in written]
                self._together("completing", (lambda: self._publish(parts)) if self.draft is not None else lambda: None)
        except BaseException:
            self._give_up()
            raise
        finally:
            self.saver.io.rest()
        assert self.layout is not None
        snapshot_nbytes = self.saver.pool.made_nbytes if self.plan.asynchronous else 0
        save = Save(Path(self.plan.root) / self.plan.name, self.layout.nbytes, snapshot_nbytes)
        save.seconds = save.stall_seconds = time.monotonic() - self.begin
        if not self.plan.asynchronous:
            save._copied.set()
            return save
        self.saver.last = save
        save._settle = lambda: self._settle(save)
        self.mark = self.comm.streams.mark()
        thread = threading.Thread(target=self._background, args=(save,), name="zeroshard-save", daemon=False)
        try:
            thread.start()
            save._thread = thread
        except RuntimeError as error:  # no more threads: `wait` raises it
            save._copied.set()
            self._fail(save, error)
            self._give_up()
        return save

    def _together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do work that does not use `comm` on all ranks. A swap file that cannot be read fails this save, as other errors do."""

        def quiet() -> T:
            with self.engine.beside_comm():
                return work()

        return together(self.comm, f"zs.save: {what}", quiet, self._stop)

    def _stop(self) -> None:
        self.in_vain = True
        if self.writer is not None:
            self.writer.stop()

    def _give_up(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            os.close(held)
        if self.writer is not None:
            self.writer.abandon()

    def _open(self) -> Opening:
        """Collect what is written and create the file at full size. Return the layout's digest, and that of all that rank 0 has."""
        if not os.path.isdir(self.folder):
            if self.comm.rank == 0:  # it made the folder, so somebody has removed it
                with self._write_errors():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            raise ConfigError(
                f"zs.save: {self.plan.root}: rank {self.comm.rank} does not see the folder of rank 0; name a shared filesystem."
            )
        self.contents = holding.collect(self.stages, frozen=not self.plan.trained_only, slices=self.slices)
        self.layout = layout = self.saver.layout(self.contents, self.extras)
        asynchronous = self.plan.asynchronous
        with self._write_errors():
            file = open_file(self.file, layout.nbytes, create=True, reserve=True)
            ranges, pool = layout.ranges(self.contents), self.saver.pool
            self.writer = FileWriter(file, ranges, self.saver.io, pool, eager=not asynchronous, digested=True)
            self.held = directory.hold(self.file) if asynchronous else None
        if self.in_vain:  # another rank failed before there was a writer that `_stop` could stop
            self.writer.stop()
        ahead = -(-self.contents.nbytes(on_disk=False) // BUFFER_NBYTES) + 1 if asynchronous else 0
        self.saver.pool.grow(ROTATING + ahead if self.contents.nbytes(on_disk=True) else max(ROTATING, ahead))
        # not the digests themselves: every rank would receive as many from every rank, since frames are as long as the longest
        return self.saver.digest, _whole_digest(self.saver.listed.digests) if self.draft is not None else None

    def _compare(self, opened: list[Opening]) -> None:
        """Send the layouts to rank 0 if they differ from the last save's (collective). opened: results of `_open`, by rank."""
        self.digests = [digest for digest, _ in opened]

        def tell_tensors() -> None:
            with self._write_errors():
                directory.write_whole(self._file_of(self.comm.rank, "tensors.json"), self.saver.tensors)

        if opened[0][1] != _whole_digest(self.digests):
            self._together("telling what is in the files", tell_tensors)

    def _write_errors(self) -> AbstractContextManager[None]:
        nbytes = self.layout.nbytes if self.layout is not None else 0
        return write_errors(self.folder, nbytes, f"rank {self.comm.rank}: saving a checkpoint")

    def _copy(self, blobs: int | None = None) -> bool:
        """Fill buffers with all blobs, or the first `blobs`. Return whether rank 0 sees the locks that all ranks hold by now."""
        assert self.writer is not None
        asks = self.draft is not None and self.plan.asynchronous
        locked = all(directory.held(self._file_of(rank)) for rank in range(self.comm.world_size if asks else 0))
        frozen = {name: list(vars(identity).values()) for name, identity in identities(self.contents.frozen).items()}
        self.extra = {"ties": self.contents.ties, "frozen": frozen, "scalars": sorted(self.contents.scalars)}
        self.writer.fill(blobs)
        return locked

    def _file_of(self, rank: int, suffix: str = "distcp") -> Path:
        return self.folder / f"rank-{rank:05d}.{suffix}"

    def _open_and_write(self) -> tuple[Opening, bytes]:
        """Make, fill and write this rank's file. Return results of `_open` and `_write`."""
        opened = self._open()
        self._copy()
        if self.draft is not None:  # the disk still writes what was copied, so this costs no time
            self.metadata = self.saver.listed.last_metadata
            if self.metadata:
                with self._write_errors():
                    listing.write_metadata(self.folder, self.metadata)
        return opened, self._write(min(_SMALL_NBYTES, _TOGETHER_NBYTES // self.comm.world_size))

    def _write(self, small_nbytes: int) -> bytes:
        """Finish this rank's file. Return its part of the manifest, or write that to a file and return b""."""
        assert self.writer is not None and self.layout is not None
        with self._write_errors():
            self.writer.finish()
            part = listing.part_of(self.layout, self.file.name, self.writer.digests, self.extra)
            if len(part) <= small_nbytes:
                return part
            directory.write_whole(self._file_of(self.comm.rank, "json"), part)
        return b""

    def _publish(self, parts: list[bytes]) -> None:
        """Write the manifest, give the checkpoint its name and remove older ones: on rank 0, once all ranks' files are written.

        parts: each rank's part of the manifest; b"" if it is in a file.
        """
        assert self.draft is not None
        listed, ranks, plan, mesh = self.saver.listed, range(self.comm.world_size), self.plan, self.stages.mesh
        facts = {
            "step": plan.step,
            "world_size": self.comm.world_size,
            "stage": self.engine.config.stage,
            "precision": self.engine.config.precision,
            "optimizer": None if self.stages.optimizer is None else kind_of(self.stages.optimizer),
            "trained_only": plan.trained_only,
            "per_rank": self.per_rank,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "zeroshard": __version__,
            "torch": torch.__version__,
            **({} if mesh is None else {"mesh": mesh}),
        }
        with write_errors(self.folder, 0, "rank 0: completing a checkpoint"):
            if listed.digests != self.digests:
                names = [self._file_of(rank, "tensors.json") for rank in ranks]
                listed.take(self.digests, [name.read_bytes() for name in names])
                for name in names:
                    name.unlink()
            names = [self._file_of(rank, "json") for rank in ranks if not parts[rank]]
            whole = [parts[rank] or self._file_of(rank, "json").read_bytes() for rank in ranks]
            listing.write(self.folder, listing.join(whole, facts, listed), listed, self.metadata)
            for name in names:
                name.unlink()
            for file, content in self.files.items():
                directory.write_whole(self.folder / file, content, named=False)
            self.draft.publish(plan.overwrite, plan.latest)

        def keep(path: Path) -> bool:
            try:
                return plan.keep_every is not None and int(listing.Manifest.read(path).facts["step"]) % plan.keep_every == 0
            except CheckpointError:  # its step cannot be read
                return True

        try:
            directory.prune(Path(plan.root), plan.name, plan.keep_last, keep)
        except Exception as error:  # the new checkpoint is complete nevertheless, so this is no failure of the save
            print(f"zeroshard: {plan.root}: an older checkpoint could not be removed: {error}", file=sys.stderr)

    # -- in the background ---------------------------------------------------------------------------------------------

    def _copy_rest(self, save: Save) -> None:
        """Copy the tensors that may be copied while training goes on."""
        assert self.writer is not None
        try:
            with self.comm.streams.behind(self.mark):
                self.writer.fill()
        finally:
            self.contents = Contents()
            save._copied.set()

    def _background(self, save: Save) -> None:
        ended = threading.Event()

        def sign() -> None:
            """Renew the modification time of this rank's file every second, until the save has ended."""
            while not ended.wait(_SIGN_S):
                with suppress(OSError):
                    os.utime(self.file)

        try:
            self._copy_rest(save)
            if not self.locked:
                threading.Thread(target=sign, name="zeroshard-sign", daemon=True).start()
            self._write(0)
            if self.draft is not None:
                with write_errors(self.folder, 0, "rank 0: waiting for the other ranks' parts"):
                    self._meet()
                self._publish([b""] * self.comm.world_size)
        except BaseException as error:
            self._fail(save, error)
        finally:
            ended.set()
            self._give_up()  # no effect on a file that is finished
            self.saver.io.rest()
        save.seconds = time.monotonic() - self.begin

    def _fail(self, save: Save, error: BaseException) -> None:
        """Leave `rank-00000.failed` for rank 0. This rank's data file is emptied first, so that a full disk has room for it."""
        save._error = telling(error, "zs.save", self.comm.rank)
        try:
            with suppress(OSError):  # not removed: rank 0 takes a rank without one for dead, and would say that, not the reason
                os.truncate(self.file, 0)
            directory.write_whole(self._file_of(self.comm.rank, "failed"), encode(save._error))
        except Exception as problem:  # rank 0 will report that this rank's part is missing
            with suppress(OSError):
                self.file.unlink()
            print(f"zeroshard: rank {self.comm.rank}: {save._error}; rank 0 could not be told: {problem}", file=sys.stderr)

    def _meet(self) -> None:
        """Wait on rank 0 for all ranks' parts. Raise the error that a failed rank left, or CheckpointError if one has died."""
        gone: set[int] = set()
        pause = _POLL_S
        while True:
            there = set(os.listdir(self.folder))  # not os.path.exists: NFS caches missing names, not listings
            missing = [rank for rank in range(self.comm.world_size) if f"rank-{rank:05d}.json" not in there]
            failed = [rank for rank in missing if f"rank-{rank:05d}.failed" in there]
            if failed:
                raise _reason(self._file_of(failed[0], "failed"))
            if not missing:
                return
            lost = {rank for rank in missing if self._lost(rank, there)}
            if lost & gone:  # lost in two polls: whatever the rank wrote before it released its lock would be visible by now
                raise CheckpointError(
                    f"zs.save: {self.plan.name}: ranks {sorted(lost & gone)} ended before they had written their parts: see their output."
                )
            gone = lost
            time.sleep(pause)
            pause = min(pause * 1.2, _SLOWEST_POLL_S)

    def _lost(self, rank: int, there: set[str]) -> bool:
        """Return whether a rank gives no sign of life: it died, or failed without space to say so. A slow disk is no reason."""
        file = self._file_of(rank)
        if file.name not in there:
            return True
        if self.locked:
            return directory.held(file) is False
        try:
            sign = file.stat().st_mtime_ns
        except OSError:
            sign = -1
        now = time.monotonic()
        if rank not in self.signs or self.signs[rank][0] != sign:
            self.signs[rank] = sign, now
        return now - self.signs[rank][1] > self.engine.config.stall_timeout_s

    def _settle(self, save: Save) -> None:
        """Join the background thread and agree on how the save ended; discard the draft if it failed (collective)."""

        def ended() -> None:
            save.wait_part()
            if save._error is not None:
                raise save._error

        try:
            together(self.comm, "zs.save: how it ended", ended)
        except Exception as error:
            save._error = error
            if self.draft is not None:
                self.draft.discard()


def _whole_digest(digests: list[str]) -> str:
    """Return the XXH3-64 of the digests of all ranks' layouts, in rank order; "", which is none, if there are no digests."""
    return xxhash.xxh3_64_hexdigest(" ".join(digests).encode()) if digests else ""


def _reason(path: Path) -> Exception:
    """Return the error that a failed rank left in the draft. Others may be able to write there, so it is decoded with care."""
    try:
        with open(path, "rb") as file:
            error = decode(file.read(_MOST_REASON_NBYTES))
    except MalformedMessage as malformed:
        error = malformed
    if isinstance(error, Exception) and not isinstance(error, MalformedMessage):
        return error
    return CheckpointError(f"zs.save: a rank failed, and its reason can not be read from {path} ({error!s:.200}).")
