"""zs.load: load a checkpoint into a sharded model, whichever library wrote it and however its tensors were sharded.

    find -> read the manifest -> compare names and shapes -> read slices, verify checksums -> put them into place

The model changes only in the last step, after all others have passed on every rank. Each rank reads its own slices (of replicated
states: whole tensors): new optimizer states into new tensors, everything else into copies, or twice if there is no memory for
these (bulk_reader.py). If states rest on host or disk or in columns, a pass over all files first verifies the checksums.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import Tier
from ..errors import BaseModelMismatch, CheckpointError, CheckpointMismatch, ConfigError, ZeroshardError
from ..seam import Engine, StateSlice, engine_of, exchange_values, kind_of, loaded
from ..state import Restoring, SavedState, Stored
from ..utils.host import ranks_here
from ..utils.host_memory import available_nbytes
from . import directory, module_state, safetensors
from . import state_map as holding
from .bulk_reader import Bulk, Reading
from .fingerprint import Identity, identities, totals
from .heartbeat import telling
from .resolver import agreed, check_digests, check_tensors, hinted, use_any
from .saving import saver_of
from .source import Opened, name_left_out, read_value
from .stages import Stages, agree, names_by_stage
from .user_state import check_named, check_target, keeps_slices, slices_of

_SPARE = 1.25  # memory for a second copy of a state is allocated only if this many times its size is available
_KINDS = {"betas", "eps", "momentum", "momentum_decay", "alpha", "rho", "etas", "lambd"}  # options that show an optimizer's class
_MEMBERS = {"params", "param_names"}  # of the optimizer that loads: a checkpoint may have them in another order
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # not loaded from other libraries' groups


@dataclass
class Loaded:
    """The result of `zs.load`: path, step and facts of the checkpoint. extra: the saved values by name, without those that need
    `trusted=True`. rng: whether the random generators were "restored", "reseeded" or "left".
    """

    path: Path
    step: int
    facts: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    rng: str = "left"


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    name: str | None = None,
    verify: bool | str = True,
    rng: bool = True,
    trusted: bool = False,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint into a sharded model and optimizer, in place (collective). Accumulated gradients are dropped.

    World size, mesh, stage, tiers, precision, units and tiles may differ from those of the run that saved. On a mesh with model
    axes all ranks call this, each stage of a pipeline with its own model, and each rank reads its part. It also reads
    safetensors, files of torch.save, and checkpoints of torch.distributed.checkpoint (FSDP2) and DeepSpeed: see
    docs/how-to/export.md.

    Args:
        path: a checkpoint, or a folder of checkpoints: then `name` in it, or the one saved last. If that one is not complete any
            more, load takes an older one, and rank 0 prints a line on stderr with the number of lost steps.
        optimizer: the model's optimizer, or a list of all that it has; None leaves optimizer states as they are.
        extra: by name, the objects that `zs.save` was given. `load_state_dict` is called for objects that have it; saved plain
            values are in `Loaded.extra`. `check_state_dict(state)`, if an object has it, is called before anything changes.
        verify: True compares all checksums during the first read, before anything changes; what can not be kept in memory until
            then is read, and compared, again. "before" reads all files once more, before the load; so does True if states rest
            on another tier, are encoded, or have split masters. False compares sizes only.
        rng: restore the random generators, if there are as many ranks in the same mesh. Otherwise each rank's generators are
            seeded from rank 0's saved state (ranks along tp and ep with the same seed). `Loaded.rng` says which.
        trusted: unpickle any object in `extra`. Objects of your own classes need it, and can run code. Without it, load raises
            for such an object if `extra` names it, else leaves it unread and prints a line on stderr.
        strict: False keeps parameters and buffers that the checkpoint lacks, and ignores entries that the model lacks. Shapes,
            members of groups and the base model must be the same in any case.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointIncomplete: the checkpoint has no manifest.
        CheckpointCorrupt: a file is damaged; the message has file, byte, expected and actual checksum. Nothing was changed.
        CheckpointMismatch: the checkpoint is of another architecture or optimizer; lists all differences. Nothing was changed.
        BaseModelMismatch: the checkpoint holds only the trained parameters of another base model. Nothing was changed.
        ModelChanged: parameters were replaced, added or removed since zs.shard(). Nothing was changed.
        ConfigError: ranks passed different arguments, or an object's `check_state_dict` raised it.
        CheckpointError: an object's `load_state_dict` raised; everything else has been loaded.
    """
    if torch.is_inference_mode_enabled():  # no optimizer step could change tensors that are made in inference mode
        with torch.inference_mode(False), torch.no_grad():
            return load(path, model, optimizer, extra=extra, name=name, verify=verify, rng=rng, trusted=trusted, strict=strict)
    engine, wanted = engine_of(model), extra or {}
    engine.refuse_ended("zs.load")
    stages = _agree(engine, path, optimizer, name, verify, strict, wanted)
    await_save(engine)
    loading, extras = _put(stages, path, name, verify, trusted, strict, wanted)
    how = agreed(stages.world, "zs.load: done", lambda: loading.finish(wanted, extras, rng))
    return Loaded(loading.opened.path, loading.opened.step, loading.opened.facts, extras, how)


def _put(
    stages: Stages, path: str | os.PathLike, name: str | None, verify: bool | str, trusted: bool, strict: bool,
    wanted: dict[str, object],
) -> tuple[_Loading, dict[str, object]]:  # fmt: skip
    """Find the checkpoint, compare it with the model, load it (collective). Return the `_Loading` and the saved extras."""
    world = stages.world

    def put(opened: Opened) -> tuple[_Loading, dict[str, object]]:
        loading = _Loading(stages, opened, strict, verify)
        extras = agreed(world, "zs.load: comparing", partial(loading.compare, wanted), opened.path)
        loading.check_base()
        with closing(loading.reading):
            loading.put()  # if a running job removes the checkpoint, the next one is loaded over what is loaded so far
        return loading, extras

    how = "small" if verify is True else bool(verify)
    return use_any(world, path, name, put, verify=how, trusted=trusted, mesh=stages.mesh)


def _agree(
    engine: Engine, path: str | os.PathLike, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, name: str | None, verify: object,
    strict: bool, extra: object,
) -> Stages:  # fmt: skip
    """Check the arguments, and that all ranks pass the same (collective). Return the pipeline's stages."""
    mine, chosen, problem = dict[str, object](), None, None
    try:
        chosen = engine.states.given_optimizer(optimizer, "zs.load")
        engine.begin("zs.load")
        engine.states.check()
        check_named(extra, "zs.load")
        if verify not in (True, False, "before"):
            raise ConfigError(f"zs.load: verify: expected True, 'before' or False, got {verify!r}.")
        given, named = None if optimizer is None else "given", None if name is None else os.fspath(name)
        mine = {"path": directory.absolute(path), "optimizer": given, "name": named, "verify": verify, "strict": bool(strict)}
    except Exception as error:
        problem = telling(error, "zs.load", engine.world.rank)
    return agree(engine, chosen, "zs.load", mine, problem)[0]


def await_save(engine: Engine) -> None:
    """Wait until the model's background save is complete or has failed; a failure is not raised here (collective)."""
    last = engine.saver.last if engine.saver is not None else None
    if last is not None and not last.told:
        try:
            last.wait()
        except CheckpointError:
            last.told = False


class _Loading:
    """One load on one rank: compare the checkpoint with the model, and load it."""

    def __init__(self, stages: Stages, opened: Opened, strict: bool, verify: bool | str) -> None:
        self.engine, self.stages, self.optimizer, self.opened, self.strict = (
            stages.engine,
            stages,
            stages.optimizer,
            opened,
            strict,
        )
        # of a checkpoint of which only small blocks are verified so far
        self.unverified = opened.manifest if verify is True else None
        self.comm, self.model = stages.world, stages.model
        self.aliases: dict[str, str] = {}  # another name of a parameter -> its name
        self.found: dict[str, Stored] = {}  # parameter -> where it is stored
        self.left_out: list[StateSlice] = []  # parameters that the checkpoint leaves out
        self.states: dict[int, SavedState] = {}
        self.groups: list[dict[str, Any]] = []
        self.reading = Reading()
        self.restoring: list[Restoring] | None = None
        self.slices: list[tuple[str, StateSlice]] = []  # of extras, with their keys in `stored_slices`
        self.stored_slices: dict[str, Stored] = {}

    # -- compare ---------------------------------------------------------------------------------------------

    def compare(self, extra: dict[str, object]) -> dict[str, object]:
        """Find all of the model's entries; return the saved extras. Raise CheckpointMismatch with all entries that do not fit."""
        if self._by_stages or not self.opened.ours:
            for each in self.stages.values:
                self.aliases |= dict.fromkeys(each.names, each.name)
                self.aliases.pop(each.name)
        if not self.opened.ours:
            self.opened.name_layers(self._layers)
        self.opened.fit(self.stages.names)
        if not self.opened.ours:
            module_state.read_objects(self.model, self.opened, self.comm.rank)
        problems, advice = self._compare_model()
        problems += self._compare_optimizer()
        for name, kept in slices_of(extra, self.model).items():
            saved = self.opened.slices.get(name, {})
            for each in kept:
                stored = saved.get(each.name)
                if stored is None or stored.shape != each.shape:
                    found = stored.shape if stored else "nothing"
                    problems.append(f"  extra {name}: {each.name}: saved {found}, wanted {each.shape}")
                    continue
                key = f"{name}.{each.own_name}"
                self.stored_slices[key] = stored.cut(each.part)
                self.slices.append((key, each))
        problems += advice
        if problems:
            raise CheckpointMismatch(f"{self.opened.path} does not fit the model; nothing was changed.\n" + "\n".join(problems))
        return self._extras(extra)

    def _compare_model(self) -> tuple[list[str], list[str]]:
        """Note where parameters are stored. Return the problems of parameters and buffers, and what to do about missing ones."""
        opened = self.opened
        if (manifest := self.unverified) is not None:  # comparing reads expanded buffers, so their checksums come first
            expanded = [name for buffer in safetensors.others_of(self.model)[0] if buffer.expanded for name in buffer.names]
            stored = [f"{holding.MODEL}{opened.saved_names.get(name, name)}" for name in expanded]
            check_tensors(opened.path, manifest, [name for name in stored if name in manifest.tensors])
        fit = module_state.compare(
            self.model, self.stages.values, opened.model, self.engine.ranks, self._by_stages or not opened.ours
        )
        self.found = fit.found
        # masters, as zs.save: under fully_shard those of frozen parameters may be more precise than the values
        frozen = [each for each in self.engine.slices("master") if not each.trainable] if opened.trained_only else []
        self.left_out = [each for each in frozen if fit.missing.pop(each.own_name, "")]
        for each in self.left_out:
            each.refresh()
        of_stages, advice = self.stages.names if self.stages.several else set(), []
        same = {first for alias, first in opened.ties.items() if alias in fit.used} | opened.ties.keys() | of_stages
        unexpected = {name: at.shape for name, at in opened.model.items() if name not in fit.used | same}
        if not self.strict:
            fit.missing, unexpected = {}, {}
        if fit.missing and opened.trained_only:
            advice.append(
                "  The checkpoint holds trained parameters only, and the model trains more now. Freeze the model as it was, load, and "
                "unfreeze afterwards (zs.close, requires_grad_(True), zs.shard), or save with trained_only=False."
            )
        lines = fit.lines(unexpected) + [f"unexpected: {name} {shape}" for name, shape in unexpected.items()]
        return [f"  {line}" for line in lines], advice

    def _compare_optimizer(self) -> list[str]:
        """Return the problems that keep the optimizer from loading; if there are none, note where its states are stored.

        Numbers and tied names of a foreign checkpoint's group members are replaced by the model's names.
        """
        if self.optimizer is None:
            return []
        if self.opened.groups is None:
            return ["  the checkpoint has no optimizer states: load it with optimizer=None"]
        own, saved = kind_of(self.optimizer), self.opened.optimizer
        if saved is not None and own != saved:
            return [f"  optimizer: saved {saved}, wanted {own}: load it with optimizer=None to take the model alone"]
        self.groups = self.opened.groups
        present = self.stages.groups()
        if len(self.groups) != len(present):
            return [f"  optimizer: saved {len(self.groups)} parameter groups, wanted {len(present)}"]
        pairs, names = list(enumerate(zip(self.groups, present, strict=True))), dict[Any, str](self.aliases)
        by_stage = bool(self._layers) and all(isinstance(one, tuple) for group in self.groups for one in group["params"])
        for number, (given, mine) in pairs if not self.opened.ours else ():
            kinds = [_KINDS & group.keys() for group in (given, mine)]
            if kinds[0] != kinds[1] and given.keys() != {"params"}:  # {"params"} alone: options were not saved
                options = [", ".join(sorted(kind)) or "none of its own" for kind in kinds]
                told = f"saved by another kind, with {options[0]}; wanted {options[1]}"
                return [f"  optimizer: {told}: load it with optimizer=None to take the model alone"]
            numbered = [member for member in given["params"] if not isinstance(member, str)]
            if by_stage:
                continue
            if numbered and self.stages.several:
                told = "the checkpoint numbers its parameters, and a stage of a pipeline does not know the numbers of its own"
                return [f"  optimizer: {told}: load it in a run without stages, and save it there by zs.save"]
            if numbered and len(given["params"]) != len(mine["params"]):
                return [f"  optimizer group {number}: saved {len(given['params'])} parameters, wanted {len(mine['params'])}"]
            names |= dict(zip(numbered, mine["params"], strict=False))
        if not self.opened.ours:
            if by_stage:
                names |= names_by_stage(self._layers, self.groups, present)
            for group in self.groups:
                group["params"] = list(dict.fromkeys(names.get(member, member) for member in group["params"]))
            self.opened.states = {names.get(key, key): state for key, state in self.opened.states.items()}
        problems = []
        for number, (given, mine) in pairs:
            differing = sorted({self._one(str(name)) for name in given["params"]} ^ {self._one(name) for name in mine["params"]})
            if differing:
                problems.append(f"  optimizer group {number}: {len(differing)} members differ, first {', '.join(differing[:5])}")
        if problems:
            problems[-1] += ": load it with optimizer=None to take the model alone"
        return problems or self._find_states()

    @property
    def _layers(self) -> tuple[str, ...]:
        """The name of each layer of a model that is a list of layers, as DeepSpeed's pipelines are; () for other models."""
        return getattr(getattr(self.model, "pipeline_stage", None), "layers", ())

    @property
    def _by_stages(self) -> bool:
        """True if pipeline stages saved the checkpoint or load it: stages hold copies of a tensor that is tied in one process."""
        saved = self.opened.facts.get("mesh") if self.opened.ours else None
        return self.stages.several or (saved is not None and len(saved["stages"]) > 1)

    def _one(self, name: str) -> str:
        """Return the name under which the checkpoint stores a parameter's state: that of the first of tied parameters."""
        return self.opened.ties.get(name, self.aliases.get(name, name)) if self._by_stages else name

    def _find_states(self) -> list[str]:
        """Find the stored states of every parameter. Return a problem for each state whose shape is not its parameter's."""
        entries, problems, ours = self.opened.states, [], self.opened.ours
        shapes = {name: stored.shape for name, stored in self.opened.model.items()}
        counters = set(self.opened.scalars) if self.opened.scalars is not None else {"step"} | {
            key for name, states in entries.items() for key, stored in states.items()
            if not isinstance(stored, Stored) or (stored.shape == () and shapes.get(name, ()) != ())
        }  # fmt: skip
        for each in self.stages.values:
            name, shape, state = each.name, shapes.get(each.name, ()), SavedState()
            for key, stored in (entries.get(name) or entries.get(self._one(name), {})).items():
                if not isinstance(stored, Stored):
                    state.scalars[key] = stored
                elif key not in counters and stored.shape == shape:
                    state.tensors[key] = stored.cut(each.part)
                elif not ours and stored.shape != ():
                    problems.append(f"  optimizer: {key} of {name}: saved {stored.shape}, wanted {shape}")
                else:
                    state.scalars[key] = read_value(stored)
            if not ours and isinstance(state.scalars.get("step"), int):
                # torch's optimizers keep step as a float tensor on the host
                state.scalars["step"] = torch.tensor(float(state.scalars["step"]), device="cpu")
            if state.tensors or state.scalars:
                self.states[id(each.param)] = state
        return problems

    def check_base(self) -> None:
        """Raise BaseModelMismatch if parameters that the checkpoint leaves out differ from those at the save (collective)."""
        mine = agreed(self.comm, "zs.load: base model", partial(identities, self.left_out), self.opened.path)
        told = exchange_values(self.comm, {key: list(vars(each).values()) for key, each in mine.items()}, "zs.load: base models")
        held, differing = totals(told), []
        for key, total in held.items():
            saved = self.opened.frozen.get(key)
            if saved is None and not self.strict:
                continue
            if saved is None or not total.same(Identity(*saved)):
                tiled = saved is None and name_left_out(key) in map(name_left_out, self.opened.frozen)
                known = saved[2] if saved else "in other tiles: zs.tile this model as that one was" if tiled else "nothing"
                differing.append(f"{key}: saved {known}, this model {total.exact}")
        if differing:
            raise BaseModelMismatch(
                f"{self.opened.path} holds trained parameters of another base model; nothing was changed. {len(differing)} of "
                f"{len(held)} parameters that it leaves out differ (fingerprints): {'; '.join(differing[:5])}"
            )

    def _extras(self, wanted: dict[str, object]) -> dict[str, object]:
        """Return saved extras by name. Raise if a wanted one is missing, unread, of other ranks, or refused by its target."""
        found, unread = self.opened.extras, self.opened.unread
        for name in sorted(wanted.keys() & unread.keys()):
            raise unread[name]
        for name in sorted(wanted.keys() & self.opened.per_rank):
            raise CheckpointMismatch(
                f"extra[{name!r}] was saved by {self.opened.facts['world_size']} ranks, each with a state of its own, and "
                f"there are {self._now} now: none can be dropped or made up. Load without it, or save one that "
                "does not depend on the rank (zs.ShardedSampler)."
            )
        absent = sorted(wanted.keys() - found.keys())
        if absent:
            has = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"zs.load: extra: {', '.join(absent)} not in {self.opened.path}; it has: {has}.")
        for name, target in wanted.items():
            check_target(name, target)
            if callable(check := getattr(target, "check_state_dict", None)):
                try:
                    check(found[name])
                except Exception as error:
                    raise self._refused(name, error, "nothing was changed") from error
        alike, ours = self.opened.shared_extras.keys(), self.opened.ours
        if left := sorted(unread if self.comm.rank == 0 else unread.keys() - alike if ours else ()):
            why = "which needs trusted=True" if ours else "of classes that are not loaded from files of others"
            what = f"extra {', '.join(left)} of rank {self.comm.rank} unread, {why}"
            print(f"zeroshard: {self.opened.path}: left {what}", file=sys.stderr)
        return found

    @property
    def _now(self) -> str:
        return str(self.comm.world_size) if self.comm.world_size != self.opened.facts["world_size"] else "as many in another mesh"

    def _refused(self, name: str, error: Exception, state: str) -> ZeroshardError:
        """Return the error that all ranks raise if an object refuses its state."""
        kind = ConfigError if isinstance(error, ConfigError) else CheckpointError
        what = str(error) if isinstance(error, ZeroshardError) else f"{type(error).__name__}: {error}"
        who = f" on rank {self.comm.rank}" if self.comm.world_size > 1 else ""
        return kind(f"zs.load: extra[{name!r}] did not take its state from {self.opened.path}{who}: {what} ({state})")

    # -- take ------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Verify and load everything (collective). If loading fails half-way, the model raises when used, until the next load."""
        self.verify()
        try:
            self.take()
        except BaseException as error:
            ours, alone = isinstance(error, ZeroshardError), self.comm.world_size == 1
            what = str(error) if ours else f"{type(error).__name__}: {error}".removesuffix(": ")
            remedy = "load a checkpoint again before you go on" if ours or alone else "the ranks ended with it; start them again"
            why = f"{self.opened.path} could not be loaded to its end ({what}): {remedy}."
            self.engine.states.mark_unusable(CheckpointError(why))
            if ours:  # such an error was agreed on: every rank raises it
                raise
            told = CheckpointError(why)
            if not alone:
                self.comm.abort(f"rank {self.comm.rank}: {what}", told)
            if isinstance(error, Exception):
                raise told from error
            raise
        self.engine.states.mark_unusable(None)

    def verify(self) -> None:
        """Verify checksums, while reading into memory or in a pass over all files (collective). Raises CheckpointError."""
        manifest, path, comm, here = self.unverified, self.opened.path, self.comm, ranks_here(self.comm.world_size)
        if manifest is None:
            return
        # reading verifies all checksums if the load needs the whole checkpoint, and states rest on the device
        everything = self.optimizer is not None or holding.GROUPS not in manifest.objects
        noted = everything and all(each.all_noted for each in self._restore())
        config = self.engine.config
        tiers = {config.offload_param.tier, config.offload_optimizer.tier}
        sliced = any(name.startswith(holding.SLICES) for name in manifest.tensors)  # read one by one, and only if `extra` asks
        if not noted or sliced or tiers != {Tier.DEVICE}:
            agreed(comm, "zs.load: checksums", lambda: check_digests(path, manifest, comm.rank, comm.world_size), path)
            return
        taken = 0  # bytes of host memory that new optimizer states take

        def has(nbytes: int) -> bool:
            nonlocal taken
            if comm.device.type != "cpu":
                return _SPARE * nbytes <= torch.cuda.mem_get_info(comm.device)[0]
            available = available_nbytes()
            fits = available is None or _SPARE * here * (taken + nbytes) <= available
            taken += nbytes * fits
            return fits

        def read() -> None:
            bulk = self.reading.bulk = Bulk(path, manifest, saver_of(self.engine).pool)
            safetensors.note(self.model, self.stages.values, self.found, self.opened.model, bulk)
            for each in self._restore():
                each.note(bulk, has)
            available = available_nbytes()
            most = sys.maxsize if available is None else int(available / here / _SPARE) - taken
            with hinted(path):
                bulk.read(most)

        agreed(comm, "zs.load: reading", read, path)

    def _restore(self) -> list[Restoring]:
        """Return the loads of the optimizers' states, made at the first call: none if no optimizer was given."""
        if self.restoring is None:
            guard = self.reading.guard
            states = {key: SavedState(guard(state.tensors), state.scalars) for key, state in self.states.items()}
            self.restoring = self.engine.states.restoring(states) if self.optimizer is not None else []
        return self.restoring

    @torch.no_grad()
    def take(self) -> None:
        """Load everything, from the buffers of `verify` or from the files (collective)."""
        engine, reading = self.engine, self.reading
        engine.states.replace_all(self.optimizer is not None)
        found, stored = reading.guard(self.found), reading.guard(self.opened.model)
        safetensors.stream(engine, self.stages.values, found, stored, False)
        computed = safetensors.read_computed(self.model, stored)
        refused = module_state.give_back(self.model, self.opened, computed, reading, self.comm.rank)
        loaded([each for each in self.stages.values if each.own_name in self.found])  # the next step follows writes to others
        if self.optimizer is not None:
            for states in self._restore():
                states.put(write_over=True)
            for mine, given in zip(self.optimizer.param_groups, self.groups, strict=True):
                taken = given.keys() if self.opened.ours else (given.keys() & mine.keys()) - _IMPLEMENTATION
                mine.update({key: given[key] for key in taken - _MEMBERS})
        stored = reading.guard(self.stored_slices)
        for key, each in self.slices:
            each.fill(stored[key])
        loaded(each for _, each in self.slices)
        loaded(engine.slices("optimizer") if self.optimizer is not None else ())
        self._take_own()
        outcome = (reading.error, None if refused is None else str(refused))
        everyone = exchange_values(self.comm, outcome, "zs.load: read")
        for rank, (error, _) in enumerate(everyone):
            if error is not None:
                raise CheckpointError(f"rank {rank}, reading {self.opened.path}: {error}") from error
        for rank, (_, words) in enumerate(everyone):
            if words is not None:
                raise refused if refused is not None and rank == self.comm.rank else CheckpointError(words)

    def _take_own(self) -> None:
        progress, own = self.engine.progress, self.opened.progress
        if self.optimizer is None:
            return
        if own is None:  # foreign: the checkpoint's step, or the largest step of any of its parameters
            counts = [int(state.scalars["step"]) for state in self.states.values() if "step" in state.scalars]
            progress.steps = self.opened.step or max(counts, default=0)
            if progress.scaler is not None and self.opened.scaler is not None:
                progress.scaler.load(self.opened.scaler)
            return
        progress.load(own)

    def finish(self, extra: dict[str, Any], saved: dict[str, object], rng: bool) -> str:
        """Load states of objects in `extra`, then random generators; return `Loaded.rng`. Raise the first object's error last."""
        refused: list[Exception] = []
        for name, target in extra.items():
            try:
                if keeps_slices(target):
                    target.take_settings(saved[name])
                elif callable(getattr(target, "load_state_dict", None)):
                    target.load_state_dict(saved[name])
            except Exception as error:
                refused.append(self._refused(name, error, "the model, the optimizer and all else have been loaded"))
                refused[-1].__cause__ = error
        how, states, rank = "left", self.opened.generators if rng else None, self.comm.rank
        try:
            if states is not None and self.opened.same_ranks:
                holding.set_generators(states, self.comm.device)
                how = "restored"
            elif states is not None:
                data = self.engine.ranks  # tensor-parallel ranks get one seed: they share activations, and so dropout masks
                holding.seed_generators(states, data.rank + data.world_size * self.stages.stage)
                how = "reseeded"
                if rank == 0:
                    print(
                        f"zeroshard: {self.opened.path} was saved by {self.opened.facts['world_size']} ranks, now there are "
                        f"{self._now}: random generators are seeded anew from rank 0's",
                        file=sys.stderr,
                    )
        except Exception as error:
            raise CheckpointError(f"{self.opened.path}: the random generators of rank {rank} could not be set, "
                                  f"all else has been loaded: {type(error).__name__}: {error}") from error  # fmt: skip
        if refused:
            raise refused[0]
        return how
