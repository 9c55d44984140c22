"""Checkpoints of the engine: zeroshard's format in DeepSpeed's folders (folder/tag, `latest`). DeepSpeed's own load too.

run/
  latest                              the tag of the newest checkpoint
  zero_to_fp32.py                     a script that converts a checkpoint to whole fp32 weights
  global_step100/
    manifest.json, *.distcp           zeroshard's files (docs/checkpoint-format.md); only these are loaded
    mp_rank_00_model_states.pt        for scripts that read DeepSpeed's files: counters, client_state, names and shapes (at stage
                                      3 meta tensors without weights)
    zero_pp_rank_0_mp_rank_00_optim_states.pt    for the same scripts: the stage and the number of ranks
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import api
from ...checkpoint import loading, saving, state_map
from ...checkpoint.dcp import archived
from ...checkpoint.directory import LATEST, write_whole
from ...checkpoint.manifest import Manifest
from ...checkpoint.resolver import agreed, open_any, read_object
from ...checkpoint.source import Opened
from ...errors import CheckpointMismatch, CheckpointNotFound
from ...public import stream_full_tensors
from ...seam import engine_of, exchange_values
from ...utils.dtypes import casts_to
from ...utils.module_names import own_name, own_state
from . import VERSION
from .engine_settings import Settings
from .logs import logger, warning_once
from .partition import GatheredParameters

MODEL_FILE = "mp_rank_00_model_states.pt"
SCRIPT = "zero_to_fp32.py"
_STREAM_NBYTES = 256 << 20  # bytes of tensors that are gathered at a time
_COUNTERS = {"global_steps", "global_samples", "skipped_steps"}
_FACTS = ("ds_config", "ds_version")
_TAKEN = {"global_steps", "skipped_steps", "lr_scheduler", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
_SCRIPT = b'''#!/usr/bin/env python
"""From the checkpoints beside this file to whole fp32 weights: python zero_to_fp32.py . OUTPUT_FOLDER [--help]"""
from zeroshard.integrations.deepspeed.zero_to_fp32 import main

main()
'''


class Checkpoints(Settings):
    """Mixin of the engine: saving and loading of checkpoints, and whole weights."""

    module: nn.Module
    micro_steps: int

    # -- save ----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str, tag: object = None, client_state: dict[str, object] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Save model, optimizer, scheduler, counters and client_state to save_dir/tag (collective). An existing tag is replaced.

        tag: name of the checkpoint; None: "global_step" and the step's number. exclude_frozen_parameters: leave out frozen
        parameters, and save their checksums. With {"checkpoint": {"writer": {"decoupled": true}}} it returns when all states are
        copied to host memory; the next save, a load and destroy() wait until they are written.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        tag = self._agreed(f"global_step{self.global_steps}" if tag is None else str(tag))
        client_state = client_state or {}
        frozen = [name for name, param in self._own_parameters().items() if not param.requires_grad]
        names = list(own_state(self.module))  # the module's order, which zeroshard's format does not keep
        world = engine_of(self.module).world
        if len(engine_of(self.module).topology.stages) > 1:  # stages of a pipeline have different ones
            told = exchange_values(world, (frozen, names), "save_checkpoint: names")
            frozen, names = (list(dict.fromkeys(itertools.chain(*each))) for each in zip(*told, strict=True))
        engine = {**self._counters(), "dp_world_size": self.dp_world_size, "frozen": frozen, "names": names, **self._facts()}
        scheduler = {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}
        saving.save(
            save_dir, self.module, self.basic_optimizer, name=tag, step=self.global_steps,
            extra={"client_state": client_state, "engine": engine, **scheduler}, trained_only=exclude_frozen_parameters,
            overwrite=True, latest=save_latest, asynchronous=self._config.checkpoint_writer_decoupled,
            files=self._described(client_state, exclude_frozen_parameters),
        )  # fmt: skip
        if world.rank == 0:
            self._copy_recovery_script(save_dir)
        return True

    def _agreed(self, tag: str) -> str:
        """Return rank 0's tag (collective). If ranks differ, warn or raise AssertionError, by checkpoint.tag_validation."""
        config, comm = self._config, engine_of(self.module).world
        tags = exchange_values(comm, tag, "save_checkpoint: tag")
        if len(set(tags)) == 1:
            return tag
        told = f"[rank={comm.rank}] The checkpoint tag name '{tag}' is not consistent across all ranks: {tags}."
        assert not config.checkpoint_tag_validation_fail, told
        if config.checkpoint_tag_validation_enabled:
            logger.warning(f"{told} Rank 0's tag is used.")
        return tags[0]

    def _facts(self) -> dict[str, object]:
        """Return the entries that DeepSpeed adds to client_state."""
        return {"ds_config": json.loads(json.dumps(self.config, default=str)), "ds_version": VERSION}

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in sorted(_COUNTERS)}

    def _described(self, client_state: dict[str, object], exclude_frozen: bool) -> dict[str, bytes]:
        """Return name -> content of the files with DeepSpeed's names, on rank 0 ({} on others).

        The model's file has whole weights below stage 3; the optimizer's files have no states.
        """
        state = own_state(self.module)
        if engine_of(self.module).world.rank:  # after state_dict(), which runs the user's hooks on all ranks
            return {}
        scheduler, stage, facts = self.lr_scheduler, self.zero_optimization_stage(), self._facts()
        parameters = self._own_parameters()
        model = {
            "buffer_names": [name for name in state if name not in parameters], "optimizer": None, "param_shapes": self._get_zero_param_shapes(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(), **self._counters(),
            "dp_world_size": self.dp_world_size, "mp_world_size": 1, **facts, **client_state,
        }  # fmt: skip
        try:
            torch.load(io.BytesIO(archived(model)), weights_only=True)
        except pickle.UnpicklingError as error:
            kind = re.search(r"GLOBAL ([\w.]+)", str(error))
            warning_once(
                f"save_checkpoint: client_state, or the scheduler's state, holds an object of a class ({kind[1] if kind else '?'}) "
                "that torch does not load by itself: it takes load_checkpoint(..., trusted=True)."
            )
        whole = stage < 3 and engine_of(self.module).topology.mesh is None  # else this rank has a part of the model
        model["module"] = _told(self._without_frozen(state) if exclude_frozen else state, whole=whole)
        optimizer = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": self.dp_world_size}, **facts}
        before = "bf16_" if self._config.bfloat16_config.enabled else ""
        names = [f"{before}zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(self.dp_world_size if stage else 0)]
        first = f"zero_pp_rank_0_{MODEL_FILE}" if stage == 3 else MODEL_FILE
        return {first: archived(model), **dict.fromkeys(names, archived(optimizer))}

    # programs that write checkpoints themselves call the following by DeepSpeed's names, or replace them

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        """Return name -> whole shape for each optimizer group."""
        engine = engine_of(self.module)
        if engine.optimizer is None:
            return []
        params, groups = self._own_parameters(), state_map.param_groups(engine.slices("value"), engine.optimizer)
        return [{name: params[name].shape for name in group["params"] if name in params} for group in groups]

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters under all of their own names."""
        named = nn.Module.named_parameters(self.module, remove_duplicate=False)  # those of other ranks' experts too
        return {own_name(self.module, name): param for name, param in named}

    def _copy_recovery_script(self, save_path: str | os.PathLike) -> None:
        script = Path(save_path) / SCRIPT
        if not script.exists():
            write_whole(script, _SCRIPT)
            self._change_recovery_script_permissions(script)

    def _change_recovery_script_permissions(self, dst: str | os.PathLike) -> None:
        try:
            os.chmod(dst, os.stat(dst).st_mode | stat.S_IEXEC)
        except (FileNotFoundError, PermissionError) as error:
            logger.info(f"{dst} could not be made executable ({error}): run it as `python {dst}`.")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str | os.PathLike, tag: object, expp_rank: int) -> str:
        """Return the path that DeepSpeed gives an optimizer file of experts; no such file is written here."""
        return os.path.join(checkpoints_path, str(tag), f"expp_rank_{expp_rank}_mp_rank_00_optim_states.pt")

    # -- load ----------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, load_dir: str, tag: object = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Callable[..., object] | None = None,
        trusted: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load a checkpoint of any stage and number of ranks (collective).

        It also loads checkpoints that DeepSpeed itself wrote, and its universal ones. Return the checkpoint's path and
        client_state, or (None, None) if there is no `latest`. client_state is the saved one, with DeepSpeed's entries ds_config,
        ds_version and global_samples. Accumulated gradients are dropped, and the count of micro-steps goes back to the beginning
        of a step.

        Args:
            load_module_strict: if False, tensors that the checkpoint lacks keep their values, and unknown ones are ignored.
            custom_load_fn: called on every rank as custom_load_fn(src=..., dst=...), with whole tensors by name and the module,
                whose parameters are gathered; rank 0's writes are kept. If no optimizer states are loaded, names and shapes may
                differ from the model's.
            trusted: unpickle any object in client_state, which can run code.

        Raises:
            CheckpointNotFound: there is no such tag. ValueError: load_universal without `latest_universal`.
            CheckpointMismatch: it does not fit, or has no scheduler state. Other errors as zs.load.
        """
        if not isinstance(load_dir, (str, os.PathLike)):
            raise TypeError(f"load_checkpoint: load_dir: expected the folder that save_checkpoint was given, got {load_dir!r}.")
        ranks = engine_of(self.module).ranks
        loading.await_save(engine_of(self.module))
        folder = self._tag_folder(Path(load_dir), tag)
        if folder is None:
            return None, None
        wanted = load_optimizer_states and not load_module_only
        optimizer = self.basic_optimizer if wanted else None
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        opened = open_any(ranks, folder, verify=False, trusted=trusted)  # `loading.load` verifies
        engine, saved, client_state = agreed(ranks, "load_checkpoint: extras", lambda: _extras_of(opened, trusted), folder)
        if scheduler is not None and saved is None:
            raise CheckpointMismatch(
                f"{folder} has no state of a scheduler, and this engine has a {type(scheduler).__name__}: "
                "load_checkpoint(..., load_lr_scheduler_states=False) leaves it as it is."
            )
        self._hold(False)
        if custom_load_fn is None or optimizer is not None:
            try:
                loading.load(folder, self.module, optimizer, rng=False, trusted=trusted, strict=load_module_strict)
            except CheckpointMismatch as error:
                raise type(error)(str(error).replace("optimizer=None", "load_optimizer_states=False")) from None
        if custom_load_fn is not None:
            source = agreed(ranks, "load_checkpoint: reading", lambda: read_whole(opened, None), opened.path)
            with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
                custom_load_fn(src=source, dst=self.module)
        if scheduler is not None:
            scheduler.load_state_dict(saved)
            if optimizer is not None and all("lr" not in group for group in opened.groups or ()):  # DeepSpeed's "elastic" ones
                torchs = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
                rates = scheduler.get_last_lr() if torchs else scheduler.get_lr()
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        if not load_module_only:
            for name in _COUNTERS & engine.keys():
                setattr(self, name, engine[name])
        self._backwards = 0  # the gradients of earlier backwards are dropped
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        return str(model_file(folder) or folder), client_state

    def _tag_folder(self, root: Path, tag: object) -> Path | None:
        """Return the folder of rank 0's tag (None: of the tag in `latest`; None if there is no such file) (collective).

        Raises CheckpointNotFound, ValueError.
        """
        pointer = "latest_universal" if self._config.load_universal_checkpoint else LATEST
        comm = engine_of(self.module).world
        tags = exchange_values(comm, latest_tag(root, pointer) if tag is None else str(tag), "load_checkpoint: tag")
        chosen = tags[0]
        if chosen is None and pointer != LATEST:
            raise ValueError(f"Invalid for universal checkpoint: {root / pointer} does not exist; leave load_universal out")
        if chosen is None:
            logger.warning(f"Unable to find latest file at {root / LATEST}: pass a tag, or a folder of save_checkpoint")
            return None
        if not all(exchange_values(comm, (root / chosen).is_dir(), "load_checkpoint: is it there")):
            has = sorted(path.name for path in root.glob("*/") if path.name[0] != ".")[:20]
            raise CheckpointNotFound(f"load_checkpoint: no checkpoint {chosen!r} in {root}. It has: {', '.join(has) or 'none'}.")
        return root / chosen

    # -- whole weights -------------------------------------------------------------------------------------------

    def module_state_dict(
        self, destination: dict[str, object] | None = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, object]:  # fmt: skip
        """Return the module's state dict; at stage 3 with whole tensors (collective)."""
        if self.zero_optimization_partition_weights():
            state: dict[str, object] = {f"{prefix}{name}": value for name, value in api.whole_state(self.module).items()}
        else:
            state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        state = self._without_frozen(state, prefix) if exclude_frozen_parameters else state
        if destination is None:
            return state
        destination.update(state)
        return destination

    def _without_frozen(self, state: Mapping[str, object], prefix: str = "") -> dict[str, object]:
        frozen = {name for name, param in self._own_parameters().items() if not param.requires_grad}
        return {name: each for name, each in state.items() if own_name(self.module, name.removeprefix(prefix)) not in frozen}

    def _whole_on_rank_0(self, exclude_frozen_parameters: bool) -> dict[str, object] | None:
        """Return the state dict in host memory on rank 0, None on other ranks (collective).

        _STREAM_NBYTES are gathered at a time. Tied names get one tensor, and no other tensors share memory.
        """
        first = engine_of(self.module).ranks.rank == 0
        state = own_state(self.module)
        order = self._without_frozen(state) if exclude_frozen_parameters else state
        frozen = state.keys() - order.keys()
        found: dict[str, object] = {}
        for part in stream_full_tensors(self.module, max_nbytes=_STREAM_NBYTES):
            copies: dict[int, Tensor] = {}  # id of a gathered tensor -> its copy, which tied names share
            for name, value in part.items() if first else ():
                if name not in frozen:
                    if id(value) not in copies:
                        copies[id(value)] = value.to("cpu", copy=True)
                    found[name] = copies[id(value)]
        found |= {name: value for name, value in order.items() if not isinstance(value, Tensor)}  # values of get_extra_state
        return {name: found.pop(name) for name in order if name in found} | found if first else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object] | None:
        """Return whole weights in host memory on rank 0, None on others (collective)."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode")
        return self._whole_on_rank_0(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights to one file of torch.save, on rank 0 (collective); return True.

        If stage3_gather_16bit_weights_on_model_save is false at stage 3, write nothing and return False.
        """
        path = os.path.join(save_dir, save_filename)
        sharded = self.zero_optimization_partition_weights()
        if sharded and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning(
                f"Did not save the model {path} because stage3_gather_16bit_weights_on_model_save is False: say true in the section "
                "zero_optimization, or take save_checkpoint and zero_to_fp32."
            )
            return False
        state = self._whole_on_rank_0(exclude_frozen_parameters)

        def write() -> None:
            if state is not None:
                os.makedirs(save_dir, exist_ok=True)
                torch.save(state, path)

        agreed(engine_of(self.module).ranks, "save_16bit_model: writing", write, path)
        return True

    save_fp16_model = save_16bit_model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., object] | None = None,
        **unused: object,
    ) -> None:  # fmt: skip
        """Load whole tensors by name, or from a checkpoint's entry 'module'."""
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, dict) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)


def read_whole(opened: Opened, dtype: torch.dtype | None, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Read a checkpoint's tensors into host memory, by name; tied names get one tensor.

    dtype: dtype of floating-point tensors; None: as stored. wanted: name -> whether to read the tensor.
    """
    ties, state = opened.tied(), {}
    for name, stored in opened.model.items():
        if name not in ties and wanted(name):
            flat = torch.empty(stored.numel, dtype=casts_to(stored.dtype, dtype), device="cpu")
            stored.read(0, flat)
            state[name] = flat.view(stored.shape)
    state.update({alias: state[name] for alias, name in ties.items() if name in state})
    return state


def _extras_of(opened: Opened, trusted: bool) -> tuple[dict[str, Any], object, dict[str, object]]:
    """Return (the engine's counters and facts, the scheduler's state or None, client_state). Raises Untrusted."""
    extras = dict(opened.extras)
    if not opened.ours:
        if trusted and opened.unread:
            whole = torch.load(model_file(opened.path) or opened.path, map_location="cpu", mmap=True, weights_only=False)
            extras |= {name: whole[name] for name in opened.unread}
        engine = {name: extras[name] for name in (*_COUNTERS, *_FACTS, "dp_world_size") if name in extras}
        scheduler = extras.get("lr_scheduler")
        return engine, scheduler, {name: value for name, value in extras.items() if name not in _TAKEN}
    for name in ("client_state", "engine", "lr_scheduler"):
        if name in opened.unread:
            raise opened.unread[name]
        if name in opened.per_rank:  # each rank had its own, and there are other ranks now: take rank 0's
            extras[name] = read_object(opened.path, Manifest.read(opened.path), f"{state_map.EXTRA}{name}.0", trusted)
    engine = extras.get("engine") or {}
    facts = {name: engine[name] for name in ("global_samples", *_FACTS) if name in engine}
    return engine, extras.get("lr_scheduler"), {**facts, **(extras.get("client_state") or {})}


def _told(state: Mapping[str, object], whole: bool) -> dict[str, Tensor]:
    """Return copies of a state dict's tensors on the host, one for tied tensors. whole=False: meta tensors of their shapes."""
    copies: dict[int, Tensor] = {}
    for value in state.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="cpu" if whole else "meta")
            if whole:
                copies[id(value)].copy_(value.detach())
    return {name: copies[id(value)] for name, value in state.items() if isinstance(value, Tensor)}


def model_file(folder: Path) -> Path | None:
    """Return the file of a checkpoint's model, which DeepSpeed's load_checkpoint returns; None if there is none."""
    found = [folder / name for name in (MODEL_FILE, f"zero_pp_rank_0_{MODEL_FILE}") if (folder / name).is_file()]
    return found[0] if found else None


def latest_tag(root: Path, pointer: str = LATEST) -> str | None:
    """Return the first tag in the pointer file with a folder, or None. A killed save leaves the previous tag on a second line."""
    try:
        names = [line.strip() for line in (root / pointer).read_text().splitlines() if line.strip()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((name for name in names if (root / name).is_dir()), next(iter(names), None))
