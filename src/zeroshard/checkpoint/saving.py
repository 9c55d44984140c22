"""zs.save: every rank writes its own file; a checkpoint is complete or invisible.

    all ranks   agree on the name |                | fill buffers, write, sync | tell |                          | told
    rank 0                        | make the draft |                                  | manifest, rename, latest |
    asynchronous: `save` returns when buffers are filled; a thread of each rank does the rest, and the threads of different
                  ranks synchronise by files in the draft, since the training loop uses the Comm

This file has the steps before anything is written; writing.py has the others. Steps that may take minutes run in `together`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from errno import EIO, ENOTDIR
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, ModelMismatch
from ..seam import DirectComm, Engine, StateSlice, engine_of, exchange_values
from . import directory
from .heartbeat import raise_first, telling, together
from .stages import Stages, agree
from .user_state import Extra, alike, serialised, slices_of
from .writing import Plan, Save, Saver, Writing, write_error


def saver_of(engine: Engine) -> Saver:
    """Return the model's Saver; the first call makes it."""
    if engine.saver is None:
        engine.saver = Saver(engine)
    return engine.saver


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
    latest: bool = True,
    files: dict[str, bytes] | None = None,
) -> Save:
    """Save a sharded model, its optimizer, random generators and `extra` (collective).

    Each rank writes its shards, on whatever tier they rest, to its own file in a hidden folder of `path`. When all files are on
    the disk, rank 0 renames the folder to `path/NAME`. If the run is killed at any point, earlier checkpoints stay complete.
    `zs.load` loads it with any mesh, number of ranks, stage, tier and precision; torch.distributed.checkpoint reads it, too. On a
    mesh with model axes every rank calls this (a pipeline rank with its stage), and they write one checkpoint.

    Args:
        path: folder of the run's checkpoints, on a filesystem that all ranks see.
        optimizer: the model's optimizer, or a list of all that it has. None: only the model is saved.
        extra: by name, objects with `state_dict` (schedulers, samplers, data loaders, zs.ema) or values that torch.save takes. If
            ranks give different ones, each rank's is saved.
        step: step of the checkpoint, for its name and manifest. None: the number of optimizer steps taken.
        name: name of the checkpoint. None: made from the step, such as step-00000100.
        asynchronous: return while the states are still being copied to host memory (`Save.snapshot_nbytes`) and written. A step,
            a load or a write waits until they are copied, so the copy overlaps with forward and backward. States on disk, and
            parameters that are ordinary tensors (stages 0-2 in fp32), are copied before save returns. If the save fails,
            `Save.wait()` or the next save raises its error.
        if_busy: if an asynchronous save is in progress, "wait" for it, or "refuse": raise CheckpointError.
        keep_last: number of checkpoints to keep, this one included; save removes older ones. Checkpoints with a `name` of your
            own are counted and removed only by saves with such a name.
        keep_every: do not remove checkpoints whose step is a multiple of this.
        trained_only: leave out frozen parameters, and save their checksums. None: do so if some parameters are frozen.
        overwrite: replace a checkpoint of this name. A file or folder that is no checkpoint is never replaced.
        latest: write this checkpoint's name to `latest`, so that a load without a name takes it.
        files: name -> content of further files that rank 0 writes for other programs; `zs.load` ignores them.

    Raises:
        CheckpointWriteError: a rank could not write (disk full, read-only, ...); every rank raises it. Nothing has changed.
        CheckpointError: a checkpoint of this name exists, `path` is a checkpoint, or an asynchronous save has failed or is busy.
        ModelChanged: parameters were replaced, added or removed.
        ModelMismatch: ranks wrote different values into one parameter.
        ConfigError: ranks passed different arguments, a value can not be saved, or `path` is not one folder for all ranks.
    """
    started, engine = time.monotonic(), engine_of(model)
    engine.begin("zs.save")
    saver, given, plan, extras, slices, problem = saver_of(engine), None, None, {}, {}, None
    try:
        engine.states.check()
        given = engine.states.given_optimizer(optimizer, "zs.save")
        options = asynchronous, if_busy, keep_last, keep_every, trained_only, overwrite, latest
        plan = _plan(engine, path, step, name, *options, files or {})
        extras, slices = serialised(extra), slices_of(extra, engine.model)
    except Exception as error:
        problem = telling(error, "zs.save", engine.world.rank)
    digests = {name: hashlib.sha256(each.content).hexdigest() for name, each in extras.items()}
    mine = {} if plan is None else vars(plan) | {"optimizer": None if optimizer is None else "given"}
    stages, told = agree(engine, given, "zs.save", mine, problem, digests)
    assert plan is not None
    plan = replace(plan, trained_only=plan.trained_only is not False and stages.partly_frozen)
    return _write(saver, plan, stages, extras, alike(stages.world, extras, told), slices, files or {}, started)


def _write(
    saver: Saver, plan: Plan, stages: Stages, extras: dict[str, Extra], shared: set[str], slices: dict[str, list[StateSlice]],
    files: dict[str, bytes], started: float,
) -> Save:  # fmt: skip
    """Wait for the last save, then write a draft and publish it, or discard it if anything fails (collective).

    Raise ModelMismatch, on all ranks of the mesh, if data-parallel ranks wrote different values somewhere; CheckpointError while
    the last save runs (`if_busy`), and its error if that was not raised yet.
    """
    engine, world, last = saver.engine, stages.world, saver.last
    problem: ModelMismatch | None = None
    try:
        engine.states.agree()
    except ModelMismatch as error:
        if world is engine.ranks:
            raise
        problem = error
    if world is not engine.ranks:
        raise_first(exchange_values(world, problem, "zs.save: values at all places"), world.rank, problem)
    if last is not None:
        if plan.if_busy == "refuse" and any(world.exchange(b"" if last.done() else b"1", "zs.save: is one under way")):
            raise CheckpointError(
                f"zs.save: the save of {last.path.name} is still under way; nothing was saved. Wait for it, or use if_busy='wait'."
            )
        saver.last = None  # its error is raised by `wait`, once
        if not last.told:
            last.wait()
    draft = _make_draft(world, plan)
    try:
        contents = {name: each.content for name, each in extras.items()}
        return Writing(saver, plan, draft, stages, contents, slices, shared, files, started).run()
    except BaseException:
        if isinstance(draft, directory.Draft):
            draft.discard()
        raise


def _plan(
    engine: Engine, path: str | os.PathLike, step: int | None, name: str | None, asynchronous: bool, if_busy: str,
    keep_last: int | None, keep_every: int | None, trained_only: bool | None, overwrite: bool, latest: bool, files: dict[str, bytes],
) -> Plan:  # fmt: skip
    if if_busy not in ("wait", "refuse"):
        raise ConfigError(f"zs.save: if_busy: expected 'wait' or 'refuse', got {if_busy!r}.")
    step = engine.progress.steps if step is None else step
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"zs.save: step: expected an integer of at least 0, got {step!r}.")
    for what, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"zs.save: {what}: expected None or an integer of at least 1, got {value!r}.")
    if keep_every is not None and keep_last is None:
        raise ConfigError("zs.save: keep_every: without keep_last nothing is ever removed; give both.")
    name = f"step-{step:08d}" if name is None else name
    if not directory.valid_name(name):
        expected = "one component of a path: no '/', no '.' in front, no blanks around it, nothing that does not print"
        raise ConfigError(f"zs.save: name: expected {expected}; got {name!r}.")
    for file in files:
        if not directory.plain_name(file) or file.startswith("rank-") or file in (directory.MANIFEST, directory.LOCK):
            taken = f"not {directory.MANIFEST}, {directory.LOCK} or rank-..., which zs.save uses"
            raise ConfigError(f"zs.save: files: expected a plain file name, {taken}; got {file!r}.")
    root = directory.absolute(path)
    return Plan(root, name, step, overwrite, asynchronous, if_busy, keep_last, keep_every, trained_only, latest)


def _make_draft(comm: DirectComm, plan: Plan) -> Path | directory.Draft:
    """Make the folder to write to, on rank 0. Return the Draft there, and its path on other ranks (collective)."""
    root, made = Path(plan.root), []

    def make() -> str:
        try:
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(ENOTDIR, "")
            if (root / directory.MANIFEST).is_file():
                raise CheckpointError(f"{root} is a checkpoint itself; save into the folder that holds it: {root.parent}.")
            directory.sweep(root)
            directory.check_free(root, plan.name, plan.overwrite)
            made.append(directory.Draft(root, plan.name))
        except OSError as error:
            raise write_error(root, error.errno or EIO, 0, "zs.save: making the folder") from error
        return str(made[0].path)

    try:
        path = together(comm, "zs.save: folder", make if comm.rank == 0 else lambda: "")[0]
    except BaseException:
        for draft in made:
            draft.discard()
        raise
    return made[0] if made else Path(path)
