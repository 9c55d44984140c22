"""One save on one rank: its file, and on rank 0 what makes a checkpoint of all of them.

    foreground   open, copy, write, sync, list | publish                      ranks meet after each (see `together`)
    background   open | copy some | . copy, write, sync, list . publish .     and `Save.wait` meets them again

What the library guards (parameters at stage 3, masters, sharded states in memory) is copied while forward and backward run:
who is about to write it, an optimizer step above all, waits until that is done (`Saver.await_copy`). What rests on disk or
in tensors that are the user's own is copied before the save returns.

While training goes on, ranks must not talk through `comm`, which belongs to the training loop; a rank that has written its
file leaves `rank-00000.json` in the draft (or `rank-00000.failed`), and rank 0 waits for all of them. A lock on its file tells
that a rank is alive; where the filesystem has no locks that all ranks see, the time of its file, which it renews.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..comm.codec import decode, encode
from ..config import Tier
from ..errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigError,
    MalformedMessage,
    OffloadIOError,
    ZeroshardError,
)
from ..io.async_file import Engine
from ..version import __version__
from ..zero.runtime import Runtime
from . import directory as places
from . import manifest as listing
from . import state_map as holding
from .fingerprint import identities
from .heartbeat import telling, together
from .rank_file import BUFFER_NBYTES, ROTATING, FileLayout, FileWriter, Ring, memory_nbytes
from .stages import Stages
from .state_map import Contents

_MOST_REASON_NBYTES = 1 << 20  # read of what a failed rank has left
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.25
_SMALL_NBYTES = 1 << 16  # so much of each rank is told to all, rather than through a file
_SIGN_S = 1.0  # between two signs of life where there are no locks


@dataclass(frozen=True)
class Plan:
    """What a call of `save` asked for; the same on every rank."""

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
    """One save, under way or done.

    Threads: the rank's own calls the methods; that of a save in the background sets the events and `_error`, and is joined by `wait`.

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
        self.told = False  # how it ended
        self._copied = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._settle: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether `wait` would not have to wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait_copied(self) -> None:
        """Return when nothing is read from the model any more. Everything that changes states through zeroshard does it."""
        if not self._copied.is_set():
            begin = time.monotonic()
            self._copied.wait()
            self.stall_seconds += time.monotonic() - begin

    def wait(self) -> Path:
        """Return when the checkpoint is complete (collective). Raises CheckpointWriteError on every rank if it can not be."""
        if self._settle is not None:
            self._settle()
            self._settle = None
        self.told = True
        if self._error is not None:
            raise self._error
        return self.path


class Saver:
    """What saves of one model have in common: buffers, the engine, the last one. `runtime.saver`.

    Threads: the rank's own. A save in the background reads shards in memory until `await_copy` would return (what is on disk it has
    read before), then writes files alone: it never has the Comm, nor the pools.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ring = Ring(runtime.tiers.host_buffer, runtime.ledger)
        self.engine = Engine()
        self.last: Save | None = None
        self.listed = listing.Listed()
        self.tensors, self.digest = b"", ""  # what is told about the layout's tensors, and its XXH3-64
        self._layout: FileLayout | None = None

    def layout(self, contents: Contents) -> FileLayout:
        """As of the last save where nothing has changed its place."""
        if self._layout is None or self._layout.places != contents.places:
            self._layout = FileLayout.of(contents)
            self.tensors = listing.tensors_of(self._layout)
            self.digest = xxhash.xxh3_64_hexdigest(self.tensors)
        return self._layout.with_objects(contents.objects)

    def await_copy(self) -> None:
        """States are about to be changed."""
        if self.last is not None:
            self.last.wait_copied()

    def close(self) -> None:
        """Let what is under way end, say what failed, and free buffers (collective)."""
        last, self.last = self.last, None
        try:
            if last is not None and not last.told:
                last.wait()
        except ZeroshardError as error:
            if last is not None and self.runtime.world.rank == 0:
                print(f"zeroshard: {last.path} was not saved: {error}", file=sys.stderr)
        finally:
            self.engine.close()


def write_error(path: Path | str, errno: int, needed: int, what: str) -> CheckpointWriteError:
    """With the space that is left, where that can be found out."""
    free, existing = None, Path(path)
    for folder in (existing, *existing.parents):  # the path may not be there, or not be for us to look at
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            break
    return CheckpointWriteError(str(path), errno, needed, free, what)


@contextmanager
def write_errors(where: Path, needed: int, what: str) -> Iterator[None]:
    """Errors of the system become CheckpointWriteError. where: the file or folder, if an error does not name one."""
    try:
        yield
    except OffloadIOError as error:
        raise write_error(error.file, error.errno, needed, what) from error
    except OSError as error:
        raise write_error(error.filename or where, error.errno or EIO, needed, what) from error


class Writing:
    """One save on one rank."""

    def __init__(
        self, saver: Saver, plan: Plan, draft: Path | places.Draft, stages: Stages, extras: dict[str, bytes],
        slices: dict[str, holding.Slices], shared: set[str], files: dict[str, bytes], begin: float,
    ) -> None:  # fmt: skip
        self.saver, self.plan, self.stages, self.core, self.begin = saver, plan, stages, stages.core, begin
        self.runtime, self.comm = saver.runtime, saver.runtime.world
        self.draft = draft if isinstance(draft, places.Draft) else None
        self.folder = draft.path if isinstance(draft, places.Draft) else draft
        self.shared, self.per_rank = shared, sorted(extras.keys() - shared)
        self.extras, self.slices, self.files = extras, slices, files
        self.stem = f"rank-{self.comm.rank:05d}"
        self.file = self.folder / f"{self.stem}.distcp"
        self.held: int | None = None  # the lock that tells that this rank is alive
        self.in_vain = False  # what is written will not be used
        self.locked = True  # rank 0 sees the locks of all
        self.signs: dict[int, tuple[int, float]] = {}  # rank -> (time of its file, when that was first seen)
        self.contents = Contents()
        self.layout: FileLayout | None = None
        self.writer: FileWriter | None = None
        self.extra: dict[str, Any] = {}
        self.digests: list[str] = []  # of the ranks' layouts
        self.metadata = b""  # `.metadata`, as far as it is written
        self.mark: Any = None  # in the order of the device's work: the state that is saved

    def run(self) -> Save:
        """Fill, and write: here, or in a thread."""
        try:
            optimizer = self.runtime.optimizer
            if optimizer is not None:
                optimizer.core.drain()
            if self.plan.asynchronous:
                self._compare(self._together("making the files", self._open))
                self.locked = self._together("copying", lambda: self._copy(self.layout.at_once))[0]  # type: ignore[union-attr]
            else:
                written = self._together("writing", lambda: (self._open(), self._copy_and_write()))
                self._compare([opened for opened, _ in written])
                parts = [part for _, part in written]
                self._together("completing", (lambda: self._publish(parts)) if self.draft is not None else lambda: None)
        except BaseException:
            self._give_up()
            raise
        finally:
            self.saver.engine.rest()
        assert self.layout is not None
        snapshot_nbytes = self.saver.ring.nbytes if self.plan.asynchronous else 0
        save = Save(Path(self.plan.root) / self.plan.name, self.layout.nbytes, snapshot_nbytes)
        save.seconds = save.stall_seconds = time.monotonic() - self.begin
        if self.plan.asynchronous:
            self.saver.last = save
            self._go_on_in_background(save)
        else:
            save._copied.set()
        return save

    def _together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Work that does not use `comm`: a swap file that can not be read is an error of this save, told like others."""

        def quiet() -> Any:
            with self.runtime.tiers.beside_comm():
                return work()

        return together(self.comm, f"zs.save: {what}", quiet, self._stop)

    def _stop(self) -> None:
        self.in_vain = True
        if self.writer is not None:
            self.writer.stop()

    def _give_up(self) -> None:
        self._let_go()
        if self.writer is not None:
            self.writer.abandon()

    def _let_go(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            os.close(held)

    def _open(self) -> tuple[str, list[str] | None]:
        """What there is to be written, and the file with all its space; digest of the layout, and of those that rank 0 knows."""
        if not os.path.isdir(self.folder):
            if self.comm.rank == 0:  # who has made it: somebody has removed it
                with self._write_errors():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            raise ConfigError(
                f"zs.save: {self.plan.root}: rank {self.comm.rank} does not see what rank 0 makes there; name a shared filesystem."
            )
        self.contents = holding.collect(
            self.runtime, self.core, frozen=not self.plan.trained_only, names=self.stages, slices=self.slices
        )
        self.layout = layout = self._with_extras(self.saver.layout(self.contents))
        asynchronous = self.plan.asynchronous
        with self._write_errors():
            self.writer = FileWriter(self.file, layout, self.saver.engine, self.saver.ring, eager=not asynchronous)
            self.held = places.hold(self.file) if asynchronous else None
        if self.in_vain:  # a peer was lost while there was no writer to stop
            self.writer.stop()
        ahead = -(-memory_nbytes(layout, self.contents) // BUFFER_NBYTES) + 1 if asynchronous else 0
        self.saver.ring.grow(max(ROTATING, ahead) if _all_in_memory(self.contents) else ROTATING + ahead)
        return self.saver.digest, self.saver.listed.digests if self.draft is not None else None

    def _compare(self, opened: list[tuple[str, list[str] | None]]) -> None:
        """Rank 0 learns the layouts, where they are not those of the last save (collective). opened: what `_open` returned."""
        self.digests = [digest for digest, _ in opened]
        if opened[0][1] != self.digests:
            self._together("telling what is in the files", self._tell_tensors)

    def _tell_tensors(self) -> None:
        with self._write_errors():
            places.write_whole(self._file_of(self.comm.rank, "tensors.json"), self.saver.tensors)

    def _write_errors(self) -> Any:
        nbytes = self.layout.nbytes if self.layout is not None else 0
        return write_errors(self.folder, nbytes, f"rank {self.comm.rank}: saving a checkpoint")

    def _with_extras(self, layout: FileLayout) -> FileLayout:
        end = layout.nbytes
        for name, value in self.extras.items():
            if name in self.shared and self.comm.rank:
                continue
            key = f"{holding.EXTRA}{name}" + ("" if name in self.shared else f".{self.comm.rank}")
            layout.objects.append((key, end, value))
            end += -(-len(value) // 64) * 64
        layout.nbytes = end
        return layout

    def _identities(self) -> dict[str, list]:
        return {name: list(vars(identity).values()) for name, identity in identities(self.contents.frozen).items()}

    def _copy(self, blobs: int | None = None) -> bool:
        """Fill the buffers, with all or with so many. Rank 0 tells whether it sees all ranks' locks, which they hold by now."""
        assert self.writer is not None
        asks = self.draft is not None and self.plan.asynchronous
        locked = all(places.held(self._file_of(rank)) for rank in range(self.comm.world_size if asks else 0))
        self.extra = {"ties": self.contents.ties, "frozen": self._identities(), "scalars": sorted(self.contents.scalars)}
        self.writer.fill(self.contents, blobs)
        return locked

    def _file_of(self, rank: int, suffix: str = "distcp") -> Path:
        return self.folder / f"rank-{rank:05d}.{suffix}"

    def _copy_and_write(self) -> bytes:
        """This rank's part; b"" where it is so large that it is in a file."""
        self._copy()
        if self.draft is not None:  # the disk has not come so far
            with self._write_errors():
                self.metadata = listing.write_ahead(self.folder, self.saver.listed)
        return self._write(_SMALL_NBYTES)

    def _write(self, small_nbytes: int) -> bytes:
        """End this rank's file, and tell about it: what is returned, or is in a file of its own."""
        assert self.writer is not None and self.layout is not None
        with self._write_errors():
            self.writer.finish()
            part = listing.part_of(self.layout, self.file.name, self.writer.digests, self.extra)
            if len(part) <= small_nbytes:
                return part
            places.write_whole(self._file_of(self.comm.rank, "json"), part)
        return b""

    def _publish(self, parts: list[bytes]) -> None:
        """Rank 0, when all data is there: the manifest, the name, and the removal of what is not to be kept.

        parts: by rank; b"": in its file.
        """
        assert self.draft is not None
        listed, ranks = self.saver.listed, range(self.comm.world_size)
        with write_errors(self.folder, 0, "rank 0: completing a checkpoint"):
            if listed.digests != self.digests:
                names = [self._file_of(rank, "tensors.json") for rank in ranks]
                listed.take(self.digests, [name.read_bytes() for name in names])
                for name in names:
                    name.unlink()
            names = [self._file_of(rank, "json") for rank in ranks if not parts[rank]]
            whole = [parts[rank] or self._file_of(rank, "json").read_bytes() for rank in ranks]
            listing.write(self.folder, listing.join(whole, self._facts(), listed), listed, self.metadata)
            for name in names:
                name.unlink()
            for file, content in self.files.items():
                places.write_whole(self.folder / file, content, named=False)
            self.draft.publish(self.plan.overwrite, self.plan.latest)
        try:
            places.prune(Path(self.plan.root), self.plan.name, self.plan.keep_last, self._keeps)
        except Exception as error:  # this checkpoint is complete nevertheless
            print(f"zeroshard: {self.plan.root}: an older checkpoint could not be removed: {error}", file=sys.stderr)

    def _keeps(self, path: Path) -> bool:
        """Whether an older checkpoint is to stay. One that can not be read does: nobody knows what it is."""
        try:
            return self.plan.keep_every is not None and step_of(path) % self.plan.keep_every == 0
        except CheckpointError:
            return True

    def _facts(self) -> dict[str, Any]:
        config, optimizer = self.runtime.config, self.core.outer if self.core is not None else None
        return {
            "step": self.plan.step,
            "world_size": self.comm.world_size,
            "stage": config.stage,
            "precision": config.precision,
            "optimizer": None if optimizer is None else type(optimizer).__name__.removeprefix("Sharded"),
            "trained_only": self.plan.trained_only,
            "per_rank": self.per_rank,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "zeroshard": __version__,
            "torch": torch.__version__,
            **({} if self.runtime.topology.mesh is None else {"mesh": self.runtime.topology.mesh}),
        }

    # -- in the background ---------------------------------------------------------------------------------------------

    def _go_on_in_background(self, save: Save) -> None:
        save._settle = lambda: self._settle(save)
        self.mark = self.comm.streams.mark()
        thread = threading.Thread(target=self._background, args=(save,), name="zeroshard-save", daemon=False)
        try:
            thread.start()
            save._thread = thread
        except RuntimeError as error:  # no more threads: `wait` tells it
            save._copied.set()
            self._fail(save, error)
            self._give_up()

    def _copy_rest(self, save: Save) -> None:
        """Fill the buffers with what was left to be copied beside the training."""
        assert self.writer is not None
        try:
            with self.comm.streams.behind(self.mark):
                self.writer.fill(self.contents)
        finally:
            self.contents = Contents()
            save._copied.set()

    def _background(self, save: Save) -> None:
        ended = threading.Event()
        try:
            self._copy_rest(save)
            if not self.locked:
                threading.Thread(target=self._sign, args=(ended,), name="zeroshard-sign", daemon=True).start()
            self._write(0)
            if self.draft is not None:
                with write_errors(self.folder, 0, "rank 0: waiting for the other ranks' parts"):
                    self._meet()
                self._publish([b""] * self.comm.world_size)
        except BaseException as error:
            self._fail(save, error)
        finally:
            ended.set()
            self._give_up()  # a file that is finished stays as it is
            self.saver.engine.rest()
        save.seconds = time.monotonic() - self.begin

    def _fail(self, save: Save, error: BaseException) -> None:
        """Tell rank 0, which waits for files. Where the disk is full, there is room for the news without this rank's data."""
        save._error = telling(error, "zs.save", self.comm.rank)
        try:
            self.file.unlink(missing_ok=True)
            places.write_whole(self.folder / f"{self.stem}.failed", encode(save._error))
        except Exception as problem:  # rank 0 will miss this rank's part and say so
            print(f"zeroshard: rank {self.comm.rank}: {save._error}; telling it failed too: {problem}", file=sys.stderr)

    def _sign(self, ended: threading.Event) -> None:
        """Renew the time of this rank's file while it writes."""
        while not ended.wait(_SIGN_S):
            with suppress(OSError):
                os.utime(self.file)

    def _meet(self) -> None:
        """Rank 0: return when all parts are there. Raises what a rank has left, CheckpointError where one has gone."""
        gone: set[int] = set()
        pause = _POLL_S
        while True:
            there = set(os.listdir(self.folder))  # NFS: a list is asked for anew, a name that was missing is not
            missing = [rank for rank in range(self.comm.world_size) if f"rank-{rank:05d}.json" not in there]
            failed = [rank for rank in missing if f"rank-{rank:05d}.failed" in there]
            if failed:
                raise _reason(self.folder / f"rank-{failed[0]:05d}.failed")
            if not missing:
                return
            lost = {rank for rank in missing if self._lost(rank, there)}
            if lost & gone:  # twice in a row: what it has written before it let go is seen by now
                raise CheckpointError(
                    f"zs.save: {self.plan.name}: ranks {sorted(lost & gone)} ended before they had written their parts."
                )
            gone = lost
            time.sleep(pause)
            pause = min(pause * 1.2, _SLOWEST_POLL_S)

    def _lost(self, rank: int, there: set[str]) -> bool:
        """Its process has ended, or it has given up and had no room to tell. A disk may be slow for as long as it likes."""
        file = self._file_of(rank)
        if file.name not in there:
            return True
        if self.locked:
            return places.held(file) is False
        try:
            sign = file.stat().st_mtime_ns
        except OSError:
            sign = -1
        now = time.monotonic()
        if rank not in self.signs or self.signs[rank][0] != sign:
            self.signs[rank] = sign, now
        return now - self.signs[rank][1] > self.runtime.config.stall_timeout_s

    def _settle(self, save: Save) -> None:
        """All ranks learn how it ended (collective)."""

        def ended() -> None:
            if save._thread is not None:
                save._thread.join()
            if save._error is not None:
                raise save._error

        try:
            together(self.comm, "zs.save: how it ended", ended)
        except Exception as error:
            save._error = error
            if self.draft is not None:
                self.draft.discard()


def _reason(path: Path) -> Exception:
    """Why a rank gave up, as it has left it in the draft, where others may be able to write, too."""
    try:
        with open(path, "rb") as file:
            error = decode(file.read(_MOST_REASON_NBYTES))
    except MalformedMessage as malformed:
        error = malformed
    known = isinstance(error, Exception) and not isinstance(error, MalformedMessage)
    return (
        error
        if known
        else CheckpointError(f"zs.save: a rank failed, and {path}, which should say why, does not ({error!s:.200}).")
    )


def _all_in_memory(contents: Contents) -> bool:
    return all(source.tier is not Tier.DISK for source in contents.sources)


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved at."""
    return int(listing.Manifest.read(path).facts["step"])
