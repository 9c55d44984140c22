"""zs.save: every rank writes its own part; complete or invisible.

    all ranks   agree on the name | fill buffers | write, sync | tell |                             | told
    rank 0      make the draft                                        | manifest, rename, latest    |
    asynchronous: the caller goes on here   ^ ; the rest happens in a thread of each rank, which meet by files in the draft

While training goes on, ranks must not talk through `comm`, which belongs to the training loop; a rank that has written its
file leaves `rank-00000.json` in the draft (or `rank-00000.failed`), and rank 0 waits for all of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from errno import EIO, ENOTDIR
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comm.base import Comm
from ..config import Tier
from ..errors import CheckpointError, CheckpointWriteError, ConfigError, OffloadIOError, ZeroshardError
from ..memory.files import Engine
from ..optim.sharded import OptimizerCore
from ..runtime import Runtime, runtime_of
from ..version import __version__
from . import contents as holding
from . import folder as places
from . import manifest as listing
from .contents import Contents
from .datafile import BUFFER_NBYTES, ROTATING, FileLayout, FileWriter, Ring, memory_nbytes
from .identity import identify

_POLL_S = 0.02


@dataclass(frozen=True)
class Plan:
    """What a call of `save` asked for; the same on every rank."""

    root: str
    name: str
    step: int
    overwrite: bool
    asynchronous: bool
    keep_last: int | None
    keep_every: int | None
    trained_only: bool


class Save:
    """One save, under way or done.

    path: where the checkpoint is when it is complete. nbytes: of this rank's file. snapshot_nbytes: host memory that holds
    the copy while it is written (kept for the next asynchronous save). stall_seconds: how long training was held up.
    """

    def __init__(self, path: Path, nbytes: int, snapshot_nbytes: int) -> None:
        self.path, self.nbytes, self.snapshot_nbytes = path, nbytes, snapshot_nbytes
        self.stall_seconds = self.seconds = 0.0
        self.told = False  # how it ended
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._settle: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether `wait` would not have to wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return when the checkpoint is complete (collective). Raises CheckpointWriteError on every rank if it can not be."""
        if self._thread is not None:
            self._thread.join()
        if self._settle is not None:
            settle, self._settle = self._settle, None
            settle()
        self.told = True
        if self._error is not None:
            raise self._error
        return self.path


class Saver:
    """What saves of one model have in common: buffers, the engine, the last one. `runtime.saver`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ring = Ring(lambda nbytes: runtime.tiers.host_buffer(nbytes))
        self.engine = Engine()
        self.last: Save | None = None
        self._layout: FileLayout | None = None
        self.stopped = threading.Event()

    def layout(self, contents: Contents) -> FileLayout:
        """As of the last save where nothing has changed its place."""
        if self._layout is None or self._layout.places != contents.places:
            self._layout = FileLayout.of(contents)
        return self._layout.with_objects(contents.objects)

    def close(self) -> None:
        """Let what is under way end, and free buffers."""
        if self.last is not None and self.last._thread is not None:
            self.last._thread.join()
            if self.last._error is not None and not self.last.told:
                print(f"zeroshard: {self.last.path} was not saved: {self.last._error}", file=sys.stderr)
        self.stopped.set()
        self.engine.close()


def saver_of(runtime: Runtime) -> Saver:
    """The model's, made at its first save."""
    if runtime.saver is None:
        runtime.saver = Saver(runtime)
    return runtime.saver


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    step: int | None = None,
    name: str | None = None,
    asynchronous: bool = False,
    if_busy: str = "wait",
    keep_last: int | None = None,
    keep_every: int | None = None,
    trained_only: bool | None = None,
    overwrite: bool = False,
) -> Save:
    """Save a sharded model, its optimizer and whatever else a run needs to go on (collective).

    Each rank writes its shards, from wherever they rest, to its own file below `path/.NAME.tmp`; when all are on the disk
    the folder becomes `path/NAME`. Killed at any point, what was complete before still is. Any number of ranks, any
    stage, tier, precision and partition can load it (`zs.load`), and so can torch.distributed.checkpoint.

    Args:
        path: folder of the run's checkpoints, on a filesystem that all ranks see.
        optimizer: the model's; None: only the model is saved.
        extra: by name, objects with `state_dict` (schedulers, samplers, data loaders) or plain values that torch.save takes.
            Where ranks give different ones each rank's is kept.
        step: for the name and the record; None: the optimizer steps taken.
        name: of the checkpoint; None: step-00000100.
        asynchronous: return as soon as all is copied to host memory (`Save.snapshot_nbytes`); what rests on disk is written
            before. `Save.wait()` or the next save tells how it went.
        if_busy: an asynchronous save is still under way: "wait" for it, or "refuse" (CheckpointError, nothing done).
        keep_last: remove older checkpoints but so many (this one counts). keep_every: but keep those of steps that are a
            multiple of it.
        trained_only: leave out parameters that are not trained, and record what they were; None: if there are any.
        overwrite: replace a checkpoint of this name.

    Raises:
        CheckpointWriteError: on every rank, if one could not write (full, read-only, ...). Nothing has changed.
        CheckpointError: a checkpoint of this name exists; the last asynchronous save failed, or (if_busy) is under way.
        ConfigError: ranks call it differently; a value has no place in a checkpoint; `path` is not one folder for all ranks.
    """
    begin = time.monotonic()
    runtime = runtime_of(model)
    core = core_of(runtime, optimizer, "zs.save")
    check_idle(runtime, "zs.save")
    if runtime.unusable:  # a load ended half-way: what is there is a mixture
        raise CheckpointError(runtime.unusable)
    plan = _plan(runtime, core, path, step, name, asynchronous, keep_last, keep_every, trained_only, overwrite)
    saver = saver_of(runtime)
    _await_last(saver, if_busy)
    extras = {key: _serialised(key, value) for key, value in (extra or {}).items()}
    shared = _agree(runtime.comm, plan, extras)
    draft = _make_draft(runtime.comm, plan)
    try:
        return _Saving(saver, plan, draft, core, extras, shared, begin).run()
    except BaseException:
        if isinstance(draft, places.Draft):
            draft.discard()
        raise


def core_of(runtime: Runtime, optimizer: torch.optim.Optimizer | None, verb: str) -> OptimizerCore | None:
    """Of the optimizer that was given, which must be the model's."""
    if optimizer is None:
        return None
    if optimizer is not runtime.optimizer:
        raise ConfigError(f"{verb}: optimizer: expected the one that zs.shard() returned with this model.")
    return optimizer.core  # type: ignore[attr-defined]


def check_idle(runtime: Runtime, verb: str) -> None:
    """Raise where states are in the middle of something."""
    busy = next((unit.name for unit in runtime.units if unit.depth or unit.in_backward or unit.pinned), None)
    if busy is not None:
        raise ZeroshardError(f"{verb}: called inside a forward, a backward or zs.gathered() ({busy}); call it between steps.")
    runtime.tiers.check()


def _plan(
    runtime: Runtime, core: OptimizerCore | None, path: Any, step: int | None, name: str | None, asynchronous: bool,
    keep_last: int | None, keep_every: int | None, trained_only: bool | None, overwrite: bool,
) -> Plan:  # fmt: skip
    step = runtime.steps if step is None else step
    if not isinstance(step, int) or step < 0:
        raise ConfigError(f"zs.save: step: expected an integer of at least 0, got {step!r}.")
    for what, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"zs.save: {what}: expected None or an integer of at least 1, got {value!r}.")
    if keep_every is not None and keep_last is None:
        raise ConfigError("zs.save: keep_every: without keep_last nothing is ever removed; give both.")
    name = places.step_name(step) if name is None else name
    if not places.valid_name(name):
        raise ConfigError(f"zs.save: name: expected letters, digits, '.', '_' and '-', got {name!r}.")
    some_frozen = any(not group.trainable for group in runtime.groups) and any(g.trainable for g in runtime.groups)
    trained_only = some_frozen if trained_only is None else trained_only and some_frozen
    root = os.path.abspath(os.fspath(path))
    return Plan(root, name, step, overwrite, asynchronous, keep_last, keep_every, trained_only)


def _await_last(saver: Saver, if_busy: str) -> None:
    """One save at a time; how the last one ended is told here at the latest."""
    if if_busy not in ("wait", "refuse"):
        raise ConfigError(f"zs.save: if_busy: expected 'wait' or 'refuse', got {if_busy!r}.")
    last = saver.last
    if last is None:
        return
    if if_busy == "refuse":
        busy = saver.runtime.comm.exchange(b"" if last.done() else b"1", "zs.save: is one under way")
        if any(busy):
            raise CheckpointError(f"zs.save: the save of {last.path.name} is still under way; nothing was done.")
    saver.last = None
    if not last.told:
        last.wait()


def _serialised(name: str, value: Any) -> bytes:
    if not isinstance(name, str) or not places.valid_name(name):
        raise ConfigError(f"zs.save: extra: expected names of letters, digits, '.', '_' and '-', got {name!r}.")
    state = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
    if isinstance(value, nn.Module):
        raise ConfigError(f"zs.save: extra[{name!r}]: a module; save its state_dict(), or shard it and save it on its own.")
    out = io.BytesIO()
    try:
        torch.save(state, out)
    except (pickle.PicklingError, TypeError, AttributeError, ZeroshardError) as error:
        raise ConfigError(f"zs.save: extra[{name!r}] can not be saved: {error}") from error
    return out.getvalue()


def _agree(comm: Comm, plan: Plan, extras: dict[str, bytes]) -> set[str]:
    """All ranks ask for the same; the names of extras that are the same on all of them (collective)."""
    mine = (plan, {name: hashlib.sha256(value).hexdigest() for name, value in extras.items()})
    everyone = [pickle.loads(part) for part in comm.exchange(pickle.dumps(mine), "zs.save: begin")]
    first = everyone[0]
    for rank, (other, digests) in enumerate(everyone):
        if other != first[0]:
            what = [f"{k}: {vars(first[0])[k]!r} and {v!r}" for k, v in vars(other).items() if v != vars(first[0])[k]]
            raise ConfigError(f"zs.save: ranks 0 and {rank} call it differently: {'; '.join(what)}.")
        if digests.keys() != first[1].keys():
            raise ConfigError(f"zs.save: extra: rank 0 gives {sorted(first[1])}, rank {rank} {sorted(digests)}.")
    shared = {name for name, digest in first[1].items() if all(d[name] == digest for _, d in everyone)}
    taken = [f"{name}.{rank}" for name in first[1].keys() - shared for rank in range(comm.world_size)]
    if first[1].keys() & set(taken):
        both = sorted(first[1].keys() & set(taken))[0]
        raise ConfigError(f"zs.save: extra[{both!r}]: that is what rank {both.rpartition('.')[2]}'s {both.rpartition('.')[0]!r} is called.")
    return shared


def _make_draft(comm: Comm, plan: Plan) -> Path | places.Draft:
    """The folder to write to: rank 0 makes it, the others see it (collective)."""
    root, draft, problem = Path(plan.root), None, None
    if comm.rank == 0:
        try:
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(ENOTDIR, "")
            places.sweep(root)
            if (root / plan.name).exists() and not plan.overwrite:
                problem = CheckpointError(f"{root / plan.name} exists; save with overwrite=True, another step or name.")
            else:
                draft = places.Draft(root, plan.name)
        except OSError as error:
            problem = write_error(root, error.errno or EIO, 0, "zs.save: making the folder")
    said = comm.exchange(pickle.dumps((problem, str(draft.path) if draft is not None else "")), "zs.save: folder")
    problem, path = pickle.loads(said[0])
    if problem is not None:
        raise problem
    sees = comm.exchange(b"1" if os.path.isdir(path) else b"", "zs.save: who sees the folder")
    if not all(sees):
        if draft is not None:
            draft.discard()
        blind = [rank for rank, answer in enumerate(sees) if not answer]
        raise ConfigError(f"zs.save: {plan.root}: ranks {blind} do not see what rank 0 makes there; name a shared filesystem.")
    return draft if draft is not None else Path(path)


def write_error(path: Path | str, errno: int, needed: int, what: str) -> CheckpointWriteError:
    """With the space that is left."""
    existing = Path(path)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return CheckpointWriteError(str(path), errno, needed, shutil.disk_usage(existing).free, what)


class _Saving:
    """One save on one rank."""

    def __init__(
        self, saver: Saver, plan: Plan, draft: Path | places.Draft, core: OptimizerCore | None, extras: dict[str, bytes],
        shared: set[str], begin: float,
    ) -> None:  # fmt: skip
        self.saver, self.plan, self.core, self.begin = saver, plan, core, begin
        self.runtime, self.comm = saver.runtime, saver.runtime.comm
        self.draft = draft if isinstance(draft, places.Draft) else None
        self.folder = draft.path if isinstance(draft, places.Draft) else draft
        self.shared, self.per_rank = shared, sorted(extras.keys() - shared)
        self.extras = extras
        self.stem = f"rank-{self.comm.rank:05d}"
        self.held: int | None = None  # the lock that tells that this rank is alive

    def run(self) -> Save:
        """Fill, and write: here, or in a thread."""
        contents = self._contents()
        layout = self._with_extras(self.saver.layout(contents))
        asynchronous = self.plan.asynchronous
        ahead = -(-memory_nbytes(layout, contents) // BUFFER_NBYTES) + 1 if asynchronous else 0
        writer = self._open(layout)
        problem, extra = None, {}
        try:
            self.saver.ring.grow(max(ROTATING, ahead) if _all_in_memory(contents) else ROTATING + ahead)
            extra = {"ties": contents.ties, "frozen": self._identities(contents)}
            writer.fill(contents)
        except BaseException as error:
            writer.abandon()
            if not isinstance(error, (ZeroshardError, MemoryError)):
                self._let_go()
                raise
            problem = error
        save = Save(Path(self.plan.root) / self.plan.name, layout.nbytes, self.saver.ring.nbytes if asynchronous else 0)
        if asynchronous:
            self.saver.last = save
            self._in_background(save, writer, layout, extra, problem)
        else:
            self._in_foreground(save, writer, layout, extra, problem)
        save.stall_seconds = time.monotonic() - self.begin
        return save

    def _contents(self) -> Contents:
        core = self.runtime.optimizer.core if self.runtime.optimizer is not None else None
        if core is not None:
            core.drain()
        return holding.collect(self.runtime, self.core, frozen=not self.plan.trained_only)

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

    def _identities(self, contents: Contents) -> dict[str, list]:
        found: dict[str, Any] = {}
        for group, index in contents.frozen:
            home = group.homes[index]
            name, part = holding.names_of_group(group)[index]
            key = name if part is None else f"{name}[{part.dim}:{part.start}:{part.stop}]"
            identity = identify(group.values.rest, home.begin, home.start, home.stop, group.specs[index].shape)
            found[key] = list(vars(identity).values())
        return found

    def _open(self, layout: FileLayout) -> FileWriter:
        """The file with all its space, on every rank or on none (collective)."""
        writer, problem = None, None
        try:
            path, eager = self.folder / f"{self.stem}.distcp", not self.plan.asynchronous
            writer = FileWriter(path, layout, self.saver.engine, self.saver.ring, eager=eager)
            self.held = places.hold(path) if self.plan.asynchronous else None
        except OffloadIOError as error:
            problem = write_error(error.file, error.errno, layout.nbytes, f"rank {self.comm.rank}: saving a checkpoint")
        except OSError as error:
            problem = write_error(path, error.errno or EIO, layout.nbytes, f"rank {self.comm.rank}: saving a checkpoint")
        self._agree(problem, lambda: self._give_up(writer))
        assert writer is not None
        return writer

    def _give_up(self, writer: FileWriter | None) -> None:
        self._let_go()
        if writer is not None:
            writer.abandon()

    def _let_go(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            os.close(held)

    def _agree(self, problem: Exception | None, undo: Callable[[], None]) -> None:
        everyone = [pickle.loads(part) for part in self.comm.exchange(pickle.dumps(problem), "zs.save")]
        found = next((p for p in everyone if p is not None), None)
        if found is not None:
            undo()
            raise found

    def _write(self, writer: FileWriter, layout: FileLayout, extra: dict[str, Any]) -> Exception | None:
        """End this rank's part; what went wrong."""
        try:
            writer.finish()
            part = listing.part_of(layout, f"{self.stem}.distcp", writer.digests, extra)
            places.write_whole(self.folder / f"{self.stem}.json", part)
        except OffloadIOError as error:
            return write_error(error.file, error.errno, layout.nbytes, f"rank {self.comm.rank}: saving a checkpoint")
        except OSError as error:
            where = error.filename or self.folder
            return write_error(where, error.errno or EIO, layout.nbytes, f"rank {self.comm.rank}: saving a checkpoint")
        return None

    def _publish(self) -> Exception | None:
        """Rank 0, when all parts are there: the manifest, the name, and the removal of what is not to be kept."""
        assert self.draft is not None
        try:
            names = [self.folder / f"rank-{rank:05d}.json" for rank in range(self.comm.world_size)]
            listing.write(self.folder, listing.join([json.loads(name.read_bytes()) for name in names], self._facts()))
            for name in names:
                name.unlink()
            self.draft.publish()
        except OSError as error:
            return write_error(error.filename or self.folder, error.errno or EIO, 0, "rank 0: completing a checkpoint")
        try:
            places.prune(Path(self.plan.root), self.plan.keep_last, self._keeps)
        except OSError as error:  # this checkpoint is complete nevertheless
            print(f"zeroshard: {self.plan.root}: an older checkpoint could not be removed: {error}", file=sys.stderr)
        return None

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
        }

    def _in_foreground(
        self, save: Save, writer: FileWriter, layout: FileLayout, extra: dict[str, Any], problem: Exception | None
    ) -> None:
        self._agree(problem or self._write(writer, layout, extra), lambda: None)
        self._agree(self._publish() if self.draft is not None else None, lambda: None)
        save.seconds = time.monotonic() - self.begin

    def _in_background(
        self, save: Save, writer: FileWriter, layout: FileLayout, extra: dict[str, Any], problem: Exception | None
    ) -> None:
        def body() -> None:
            try:
                found = problem or self._write(writer, layout, extra)
                if found is not None:
                    self._tell_failure(found)
                save._error = self._meet(found)
            except BaseException as error:
                save._error = error if isinstance(error, Exception) else CheckpointError(f"zs.save: {error!r}")
                self._tell_failure(save._error)
            finally:
                self._let_go()
            save.seconds = time.monotonic() - self.begin

        save._settle = lambda: self._settle(save)
        save._thread = threading.Thread(target=body, name="zeroshard-save", daemon=False)
        save._thread.start()

    def _tell_failure(self, problem: Exception) -> None:
        """To rank 0, which waits for files. Where the disk is full, there is room for the news without this rank's data."""
        try:
            (self.folder / f"{self.stem}.distcp").unlink(missing_ok=True)
            places.write_whole(self.folder / f"{self.stem}.failed", pickle.dumps(problem))
        except OSError as error:  # the others will miss this rank's part and say so
            print(f"zeroshard: rank {self.comm.rank}: {problem}; telling it failed too: {error}", file=sys.stderr)

    def _meet(self, problem: Exception | None) -> Exception | None:
        """Rank 0: publish when all parts are there. Others: return at once; `wait` asks rank 0."""
        if self.draft is None or problem is not None:
            return problem
        ranks = range(self.comm.world_size)
        patience, seen, since = self.runtime.config.stall_timeout_s, None, time.monotonic()
        gone: list[int] = []
        while True:
            failed = [rank for rank in ranks if (self.folder / f"rank-{rank:05d}.failed").exists()]
            if failed:
                return pickle.loads((self.folder / f"rank-{failed[0]:05d}.failed").read_bytes())
            missing = [rank for rank in ranks if not (self.folder / f"rank-{rank:05d}.json").exists()]
            if not missing:
                return self._publish()
            lost = [rank for rank in missing if self._lost(rank)]
            if lost == gone and lost:  # twice in a row: what it has written before it let go is seen by now
                return CheckpointError(f"zs.save: {self.plan.name}: ranks {lost} ended before they had written their parts.")
            gone = lost
            progress = [self._progress(rank) for rank in missing]
            if progress != seen:
                seen, since = progress, time.monotonic()
            if time.monotonic() - since > patience or self.saver.stopped.is_set():
                return CheckpointError(f"zs.save: {self.plan.name}: ranks {missing} wrote nothing for {patience:.0f} s.")
            time.sleep(_POLL_S)

    def _lost(self, rank: int) -> bool:
        """Its process has ended, or it has given up and had no room to tell."""
        file = self.folder / f"rank-{rank:05d}.distcp"
        return not file.exists() or (self.held is not None and places.abandoned(file))

    def _progress(self, rank: int) -> Any:
        try:
            return (self.folder / f"rank-{rank:05d}.distcp").stat().st_mtime_ns
        except OSError:
            return None

    def _settle(self, save: Save) -> None:
        """All ranks learn how it ended (collective)."""
        everyone = [pickle.loads(p) for p in self.comm.exchange(pickle.dumps(save._error), "zs.save: how it ended")]
        errors = [error for error in everyone if error is not None]
        save._error = next((error for error in errors if isinstance(error, CheckpointWriteError)), errors[0] if errors else None)
        if save._error is not None and self.draft is not None and self.draft.path.exists():
            self.draft.discard()


def _all_in_memory(contents: Contents) -> bool:
    return all(source.tier is not Tier.DISK for source in contents.sources)


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved at."""
    return int(listing.Manifest.read(path).facts["step"])
