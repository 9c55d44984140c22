"""Read a DeepSpeed configuration: `DeepSpeedConfig(config)` from a dict, the path of a JSON file, or urlsafe base64 of JSON.

    read -> examine (refused keys raise, notes are collected) -> typed sections -> batch sizes -> contradictions

Attributes have the names of DeepSpeed's class (0.19.8). config_keys.py defines the treatment of each key, and shard_options.py
maps keys to options of zs.shard.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ...config import SECTION
from ...utils.axes import DP, planned_otherwise
from . import sections
from .config_keys import KEYS, Treatment, Values, keys_of
from .sections import DeepSpeedConfigError, Section, examine, without_auto
from .sequence import SequenceGroups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADAM_OPTIMIZER, LAMB_OPTIMIZER = "adam", "lamb"
_OPTIMIZERS = ("adagrad", ADAM_OPTIMIZER, "adamw", LAMB_OPTIMIZER, "muadam", "muadamw", "musgd", "lion", "muon")  # in any case
LOG_LEVEL_DEFAULT: str | None = KEYS["log_level"].default
GRADIENT_CLIPPING_DEFAULT: float = KEYS["gradient_clipping"].default
DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
OFFLOAD_STAGES = {"offload_optimizer": 1, "offload_param": 3}  # lowest stage that shards these states, which offload needs


def get_gradient_clipping(config: Values) -> float:
    """Return the gradient norm at which a configuration clips; 0: no clipping."""
    return config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)


def get_log_level(config: Values) -> str | None:
    """Return the log level in a configuration. None: the logger's level is not changed."""
    return config.get("log_level", LOG_LEVEL_DEFAULT)


def get_bfloat16_config(config: Values) -> Section:
    """Return the section bf16 (bfloat16 in older configurations)."""
    return sections.DeepSpeedBF16Config.of(_section(config, "bf16", "bfloat16"))


def get_float16_config(config: Values) -> Section:
    """Return the section fp16."""
    return sections.DeepSpeedFP16Config.of(_section(config, "fp16"))


def zero_section(config: Values) -> Section:
    """Return the section zero_optimization; true or false, as in old configurations, is stage 1 or 0."""
    given = config.get("zero_optimization")
    return sections.DeepSpeedZeroConfig.of(
        {"stage": int(given)} if isinstance(given, bool) else _section(config, "zero_optimization")
    )


def _section(config: Values, *names: str, within: str = "") -> Values:
    """Return the first of these sections that a configuration has, or {}."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is not None and not isinstance(config[name], Mapping):
        where = f"{within}.{name}" if within else name
        raise DeepSpeedConfigError(f"{where}: expected a mapping of keys to values, got {config[name]!r}.")
    return {} if name is None else config[name]


def _number(name: str, value: object) -> float:
    """Return the value. Raise DeepSpeedConfigError if it is not a number; inf is accepted, nan is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise DeepSpeedConfigError(f"{name}: expected a number, got {value!r}.")
    return value


def dtype_of(key: str, name: object) -> torch.dtype | None:
    """Return the dtype of a name; None for None and "auto". Raise ValueError for other names."""
    if name is None or name == "auto":
        return None
    dtype = name if isinstance(name, torch.dtype) else DTYPES.get(str(name).lower().removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{key}: expected fp32, fp16 or bf16, got {name!r}.")
    return dtype


# -- reading -------------------------------------------------------------------------------------------------------


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raise ValueError if it has a key twice."""
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the configuration has {', '.join(map(repr, twice))} more than once in one section: keep one of each.")
    return dict(pairs)


def _parse(text: str, source: str) -> dict[str, object]:
    """Parse JSON, or Hjson if its package is installed."""
    try:
        found = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        if importlib.util.find_spec("hjson") is None:
            hint = " Comments and the like (Hjson) need the package hjson."
            raise ValueError(f"{source} is not JSON: {error}.{hint}") from None
        import hjson

        try:
            found = hjson.loads(text, object_pairs_hook=_no_duplicates) if text.strip() else None
        except hjson.HjsonDecodeError as error:
            raise ValueError(f"{source} is neither JSON nor Hjson: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source}: expected an object of keys, got {type(found).__name__}.")
    return found


def read_config(config: object) -> dict[str, object]:
    """Return a new dict from a dict, the path of a JSON file, or urlsafe base64 of JSON."""
    if isinstance(config, Mapping):
        return copy.copy(dict(config))
    if isinstance(config, (str, os.PathLike)):
        if os.path.isfile(config):
            with open(config, encoding="utf-8") as file:
                return _parse(file.read(), str(config))
        try:
            text = base64.urlsafe_b64decode(os.fspath(config)).decode("utf-8")
            return _parse(text, "the base64 text")
        except (UnicodeDecodeError, ValueError) as error:
            if "more than once" in str(error):  # the text was valid base64 and JSON: report this, not that it is no path
                raise
        name = os.fspath(config)
        if (os.sep in name or name.endswith(".json")) and not os.path.exists(name):
            raise ValueError(f"{name}: no such file; expected a dict, the path of a JSON file, or urlsafe base64 of JSON.")
    raise ValueError(f"expected a dict, the path of a configuration file that exists, or urlsafe base64 of JSON, got {config!r}.")


# -- the configuration ---------------------------------------------------------------------------------------------


class DeepSpeedConfig:
    """A checked configuration.

    config: dict (not changed), path of a JSON file, or urlsafe base64 of JSON.
    world_size: number of data-parallel ranks. None: that of mpu, mesh_device or torch.distributed, else 1.
    notes: a sentence for each key that has no effect here; `say_notes` prints them once.

    Raises DeepSpeedConfigError for refused keys, ValidationError (a ValueError) for a wrong value or an unknown key of a typed
    section, AssertionError if train_batch_size is not micro-batch x accumulation x ranks, or for modes that exclude each other.
    """

    optimizer_name: str | None
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value of a key; `config_keys` lists them."""

    def __init__(
        self, config: object, mpu: object = None, mesh_device: DeviceMesh | None = None, *, world_size: int | None = None
    ) -> None:
        self._param_dict = read_config(config)
        if world_size is not None:
            self.world_size = world_size
        elif mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
            self.world_size = mpu.get_data_parallel_world_size()
        elif mesh_device is not None:
            self.world_size = mesh_device.get_group(mesh_dim="data_parallel").size()
        else:
            self.world_size = torch.distributed.get_world_size() if _distributed() else 1
        given = without_auto(self._param_dict)
        along = given.get("sequence_parallel_size") or 1
        if isinstance(along, bool) or not isinstance(along, int) or along < 1 or self.world_size % along:
            raise DeepSpeedConfigError(
                f"sequence_parallel_size: expected a number that divides the {self.world_size} ranks, got {along!r}."
            )
        if world_size is not None and not isinstance(mpu, SequenceGroups):  # else it is that of the data-parallel ranks already
            self.world_size //= along
        self.notes: list[str] = []
        self.planned_options = self._planned_options(
            given, config if isinstance(config, (str, os.PathLike)) else "the configuration"
        )
        if isinstance(given.get("zero_optimization"), bool):
            self.notes.append("zero_optimization as true or false is deprecated: it is read as stage 1 or 0.")
            given["zero_optimization"] = {"stage": int(given["zero_optimization"])}
        self.notes += examine(given)
        self._read_plain(given)
        self._read_sections(given)
        self._read_precision(given)
        self._read_checkpoint(given)
        self._configure_train_batch_size()
        self._check()
        self.notes += self.zero_config.notes
        for name, lowest in OFFLOAD_STAGES.items():
            if self.offloads(name) and self.zero_optimization_stage < lowest:
                self.notes.append(
                    f"zero_optimization.{name} has no effect: it needs stage {lowest}, got {self.zero_optimization_stage}."
                )

    def _planned_options(self, given: dict[str, object], path: object) -> dict[str, object]:
        """Remove the section of `zeroshard plan --auto` from `given`, and return the options of zs.shard in it."""
        plan: Values = {"mesh": {}, **_section(given, SECTION)}
        given.pop(SECTION, None)
        if any(size > 1 for axis, size in plan["mesh"].items() if axis != DP):
            raise DeepSpeedConfigError(
                f"{SECTION}.mesh = {plan['mesh']}: the engine is data-parallel only. Give the file to zs.parallelize or `zeroshard train`, "
                "or plan for data parallelism alone."
            )
        otherwise = planned_otherwise(path, plan, {DP: self.world_size}) if plan["mesh"] else ""
        batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if otherwise and all(given.get(name) is not None for name in batches):  # all three together fix the number of ranks
            raise DeepSpeedConfigError(f"{otherwise}, or leave out {batches[0]}.")
        self.notes += [otherwise] if otherwise else []
        return dict(_section(plan, "shard", within=SECTION))

    def _read_plain(self, given: Values) -> None:
        """Read the keys at the top level that are single values."""
        for key in keys_of(""):
            if keys_of(key.name):
                _section(given, key.name)  # raises if it is no mapping
            elif key.treatment is not Treatment.REFUSED:
                setattr(self, key.name, given.get(key.name, key.default))
        self.communication_data_type = dtype_of("communication_data_type", given.get("communication_data_type"))
        self.gradient_allreduce_op = str(given.get("gradient_allreduce_op", "mean")).lower()
        if self.gradient_allreduce_op not in ("mean", "sum"):
            raise ValueError(f'Invalid gradient_allreduce_op {given["gradient_allreduce_op"]!r}: expected "mean" or "sum".')
        self.gradient_clipping = _number("gradient_clipping", get_gradient_clipping(given) or 0.0)
        _number("steps_per_print", self.steps_per_print or 0)
        for kind in ("optimizer", "scheduler"):
            section = _section(given, kind)
            name, params = section.get("type"), _section(section, "params", within=kind)
            if name is None and params:
                self.notes.append(f"{kind} has no type: none is built. Add one, or leave the section out.")
            if name is not None and not isinstance(name, str):
                raise DeepSpeedConfigError(f"{kind}.type: expected the name of a class, got {name!r}.")
            setattr(self, f"{kind}_name", name)
            setattr(self, f"{kind}_params", section.get("params") if name is not None else None)
        if self.optimizer_name is not None and self.optimizer_name.lower() in _OPTIMIZERS:
            self.optimizer_name = self.optimizer_name.lower()

    def _read_sections(self, given: Values) -> None:
        self.zero_config = sections.DeepSpeedZeroConfig.of(_section(given, "zero_optimization"))
        self.zero_optimization_stage: int = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        written = {"tensorboard": sections.TensorBoardConfig, "csv_monitor": sections.CSVConfig, "wandb": sections.WandbConfig}
        monitors = {name: kind.of(_section(given, name)) for name, kind in written.items()}
        self.monitor_config = SimpleNamespace(**monitors, enabled=any(monitor.enabled for monitor in monitors.values()))
        self.timers_config = sections.DeepSpeedThroughputTimerConfig.of(_section(given, "timers").get("throughput"))
        comms = sections.CommsLoggerConfig.of(_section(given, "comms_logger"))
        self.comms_config = SimpleNamespace(comms_logger_enabled="comms_logger" in given, comms_logger=comms)
        self.activation_checkpointing_config = SimpleNamespace(**_with_defaults(given, "activation_checkpointing"))
        self.pipeline = SimpleNamespace(**_with_defaults(given, "pipeline"))
        self.tensor_parallel_config = SimpleNamespace(**_with_defaults(given, "tensor_parallel"))

    def _read_precision(self, given: Values) -> None:
        self.float16_config = get_float16_config(given)
        self.bfloat16_config = get_bfloat16_config(given)
        autocast = _with_defaults(given, "torch_autocast")
        self.torch_autocast_enabled = autocast["enabled"] is True
        self.torch_autocast_dtype = dtype_of("torch_autocast.dtype", autocast["dtype"])
        if self.torch_autocast_enabled and self.torch_autocast_dtype is torch.float16:
            raise DeepSpeedConfigError(
                "torch_autocast.dtype = float16 is not supported: fp32 parameters have no loss scale. Use bfloat16, or fp16.enabled."
            )
        types = _with_defaults(given, "data_types")
        for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
            dtype_of(f"data_types.{name}", types[name])
            setattr(self, name, types[name])
        keep = self.keep_in_fp32_modules = types["keep_in_fp32_modules"]
        if keep != "auto" and not (isinstance(keep, list) and all(isinstance(name, str) for name in keep)):
            raise DeepSpeedConfigError(f'data_types.keep_in_fp32_modules: expected "auto" or a list of patterns, got {keep!r}.')

    def _read_checkpoint(self, given: Values) -> None:
        section = _with_defaults(given, "checkpoint")
        mode = str(section["tag_validation"]).upper()
        if mode not in ("IGNORE", "WARN", "FAIL"):
            raise DeepSpeedConfigError(
                f"checkpoint.tag_validation: expected Ignore, Warn or Fail, got {section['tag_validation']!r}."
            )
        self.checkpoint_tag_validation_enabled, self.checkpoint_tag_validation_fail = mode != "IGNORE", mode == "FAIL"
        self.load_universal_checkpoint = section["load_universal"]
        self.checkpoint_writer_decoupled = bool((section["writer"] or {}).get("decoupled", False))
        _section(section, "parallel_write", within="checkpoint")  # raises if it is no mapping

    # -- checks of keys together ---------------------------------------------------------------------------------

    def _configure_train_batch_size(self) -> None:
        """Complete train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, or raise."""
        train, micro, steps, ranks = (
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, self.world_size,
        )  # fmt: skip
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            value = getattr(self, name)
            whole = isinstance(value, (int, float)) and not isinstance(value, bool) and not value % 1  # nan and inf % 1 are nan
            if value is not None and not whole:
                raise DeepSpeedConfigError(f"{name}: expected a whole number, got {value!r}.")
            assert value is None or value > 0, f"{name}: expected a number above 0, got {value}."
        assert train is not None or micro is not None, (
            "train_batch_size or train_micro_batch_size_per_gpu is needed: "
            "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."
        )
        if steps is None:
            steps = train // micro // ranks if train is not None and micro is not None else 1
        micro = train // ranks // steps if micro is None else micro
        train = micro * steps * ranks if train is None else train
        assert micro * steps * ranks == train and micro * steps > 0, (
            "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks does not hold: "
            f"{train} != {micro} x {steps} x {ranks}. Change one of them, or leave one out."
        )
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = train, micro, steps

    def _check(self) -> None:
        """Raise for modes that exclude each other."""
        fp16, bf16, stage = self.float16_config, self.bfloat16_config, self.zero_optimization_stage
        assert not (fp16.enabled and bf16.enabled), "fp16.enabled and bf16.enabled: one at most may be true."
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            assert not getattr(bf16, name) or stage, f"bf16.{name} needs zero_optimization.stage 1, 2 or 3, got 0."
        assert not bf16.bf16_optimizer_states or bf16.bf16_master_weights_and_grads, (
            "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads: set both, or neither."
        )
        fp32_states = bf16.enabled and bf16.bf16_master_weights_and_grads and not bf16.bf16_optimizer_states
        assert not fp32_states or self.offloads("offload_optimizer"), (
            "bf16.bf16_master_weights_and_grads without bf16.bf16_optimizer_states keeps states in fp32, which needs "
            "zero_optimization.offload_optimizer with device cpu or nvme: add it, or set bf16.bf16_optimizer_states too."
        )
        assert self.param_dtype in (None, "auto") or dtype_of("data_types.param_dtype", self.param_dtype) is self.model_dtype, (
            f"data_types.param_dtype is {self.param_dtype}, the enabled precision {self.model_dtype}: leave it out, or enable "
            "its section."
        )
        if self.gradient_allreduce_op == "sum" and stage == 3:
            raise ValueError('gradient_allreduce_op "sum" is not supported with ZeRO stage 3: use "mean", and scale the loss.')
        if self.monitor_config.wandb.enabled and importlib.util.find_spec("wandb") is None:
            raise DeepSpeedConfigError(
                "wandb.enabled: the package wandb is not installed: install it, or use tensorboard or csv_monitor."
            )

    @property
    def model_dtype(self) -> torch.dtype:
        """Dtype of parameters in forward and backward."""
        if self.float16_config.enabled:
            return torch.float16
        return torch.bfloat16 if self.bfloat16_config.enabled else torch.float32

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients accumulate."""
        return dtype_of("data_types.grad_accum_dtype", self.grad_accum_dtype) or self.model_dtype

    def offloads(self, name: str) -> bool:
        """Return whether the section of this name, offload_optimizer or offload_param, has a device other than "none"."""
        section = getattr(self.zero_config, name)
        return section is not None and section.device != "none"

    # -- printing ---------------------------------------------------------------------------------------------

    def say_notes(self, rank: int | None = None) -> None:
        """Print the notes on stderr, on rank 0, each once in a process."""
        if rank is None:
            rank = torch.distributed.get_rank() if _distributed() else 0
        for note in self.notes if rank == 0 else ():
            if note not in _said:
                _said.add(note)
                print(f"zeroshard: ds_config: {note}", file=sys.stderr)

    def print(self, name: str) -> None:
        """Print every attribute, and the given configuration, on stderr."""
        for attribute, value in sorted(vars(self).items()):
            if not attribute.startswith("_"):
                print(f"{name}.{attribute} = {value}", file=sys.stderr)
        print(json.dumps(self._param_dict, indent=4, sort_keys=True, default=str), file=sys.stderr)


_said: set[str] = set()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _with_defaults(given: Values, name: str) -> Values:
    """Return an untyped section, with the defaults of the keys that it lacks."""
    return {key.field: key.default for key in keys_of(name)} | without_auto(_section(given, name))
