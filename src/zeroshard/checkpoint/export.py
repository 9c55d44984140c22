"""zs.export: convert a checkpoint's model to files for other libraries, in one process, some MiB at a time.

    safetensors   OUT/model.safetensors, or
                  OUT/model-00001-of-00002.safetensors ... and OUT/model.safetensors.index.json; OUT/config.json if it is known
    torch         OUT: one file of a state dict, as torch.save(model.state_dict(), OUT) writes it

The output is written under a hidden name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, did_you_mean
from ..state import Stored, StoredTensor
from ..utils.aligned import bytes_of
from ..utils.dtypes import casts_to
from ..utils.module_names import without_wrappers
from ..utils.work import OVER, Work
from . import dcp
from .directory import absolute, sync
from .file_writer import Elements, Range, write_ranges
from .quantized import Quantization, Quantize
from .resolver import Alone, use_any
from .safetensors import SAFETENSORS_NAMES, SafetensorsFile
from .source import Opened, Untrusted, first_of
from .writing import write_errors

CONFIG = "hf_config"  # the extra under which a checkpoint may keep a Hugging Face configuration
_METADATA = "__metadata__"  # key that the safetensors format reserves
FORMATS = ("safetensors", "torch")
_CHUNK_NUMEL = 2 << 20  # elements read, converted and written at a time


@dataclass(frozen=True)
class Exported:
    """The files that `zs.export` wrote.

    Attributes:
        files: names of the files in the folder `path`, or of the one file.
        nbytes: bytes of all files.
        numel: elements of all tensors.
        ties: another name of a tensor -> the name under which it was written.
        trained_only: whether the checkpoint had only the trained parameters.
        quantized: how many of the tensors are quantized weights; each has a scale beside it, which is a tensor too.
    """

    path: Path
    files: tuple[str, ...]
    nbytes: int
    tensors: int
    numel: int
    ties: dict[str, str]
    trained_only: bool
    quantized: int = 0


def export(
    path: str | os.PathLike,
    out: str | os.PathLike,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    format: str = "safetensors",
    max_shard_nbytes: int = 5_000_000_000,
    config: Any = None,
    prefix: str = "",
    names: Iterable[str] | None = None,
    verify: bool = True,
    quantize: str | None = None,
    model: nn.Module | None = None,
    ignore: Collection[str] | None = None,
) -> Exported:
    """Write the model of a checkpoint as safetensors, which `from_pretrained` reads, or as a file of torch.save.

    It needs one process without process group, device or network, and some MiB of memory whatever the model's size. In
    safetensors tied tensors are written once, with their other names in the metadata; in torch's format they are one tensor. What
    modules keep in state dicts that is no tensor (`get_extra_state`) is written in torch's format only. A line on stderr names
    what is left out.

    Args:
        path: a checkpoint, or a folder of them (then `name`, or the newest complete one), or any other that `zs.load` takes.
        out: the folder (safetensors) or file (torch) to make. It must not exist, or be an empty folder.
        dtype: dtype of floating-point tensors, except fp8 and fp4; None: as stored, which is fp32 for parameters with fp32
            masters.
        max_shard_nbytes: a safetensors file holds no more than this, but at least one tensor.
        config: a Hugging Face configuration (or its `to_dict()`, its file, or the folder with it) for OUT/config.json. None: what
            the checkpoint keeps under extra["hf_config"], if anything.
        prefix: export only the part of the model whose names begin so, without the prefix: "policy." of a model that was wrapped.
        names: export only these, as they are named in the checkpoint. Files of torch.save have this order.
        verify: first read everything and compare checksums.
        quantize: "int8" or "fp8": write the weights of nn.Linear modules in 8 bits with a scale for each output, in the format
            of compressed-tensors, which Transformers loads and vLLM serves. Embeddings, norms, biases, routers, the head and
            whatever is no nn.Linear module (GPT-2's Conv1D, experts in one tensor) stay as they are.
        model: with `quantize`, whose nn.Linear modules to quantize; may be on the meta device. None: Transformers builds
            the model of the configuration.
        ignore: nn.Linear modules that stay, by name or its end. None: lm_head (and what Transformers calls the output
            embeddings), gate, router, shared_expert_gate. A weight tied to anything that stays is never quantized.

    Raises:
        CheckpointNotFound: there is no checkpoint. Nothing was written.
        CheckpointCorrupt: a file is damaged. Nothing was written.
        CheckpointError: `out` exists, or a weight to quantize is not finite. Nothing was written.
        CheckpointWriteError: the disk is full, read-only, ... What was written is removed.
        ConfigError: an argument is wrong, or the format cannot store a tensor.
    """
    target = _check_arguments(out, dtype, format, max_shard_nbytes, config)
    quantizing = Quantize.of(quantize, model, ignore, format)
    settings = None if config is None else _read_config(config)
    names = None if names is None else list(names)

    def write(opened: Opened) -> Exported:
        _select(opened, names, prefix)
        return _write(opened, target, dtype, format, max_shard_nbytes, settings, quantizing)

    return use_any(Alone(), path, name, write, verify=verify, values=False)


def _write(
    opened: Opened, target: Path, dtype: torch.dtype | None, format: str, max_shard_nbytes: int,
    settings: dict[str, object] | None, quantizing: Quantize | None,
) -> Exported:  # fmt: skip
    """Write an opened checkpoint to a hidden name and rename it to `target`; remove everything after an error."""
    if settings is None and format == "safetensors" and CONFIG in opened.shared_extras:
        try:
            settings = _read_config(opened.shared_extras[CONFIG]())
        except Untrusted:
            raise CheckpointError(
                f"zs.export: {opened.path}: extra[{CONFIG!r}] is an object of a class that torch does not load by itself: give "
                f"config= (model.config, or a config.json), and save extra={{{CONFIG!r}: model.config.to_dict()}}."
            ) from None
    quantization = None if quantizing is None else quantizing.choose(opened, settings)
    exporting = _Exporting(opened, dtype, format, _read_objects(opened, format), quantization)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(3)}.tmp")
    with write_errors(target, exporting.nbytes, "zs.export"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if format == "torch":
                places = dcp.make_state_dict_file(scratch, exporting.tensors, exporting.ties, exporting.objects)
                with open(scratch, "r+b") as file:  # rather than to find a disk too small after minutes of writing
                    os.posix_fallocate(file.fileno(), 0, scratch.stat().st_size)
                write_ranges(scratch, exporting.ranges(places))
            else:
                scratch.mkdir()
                exporting.write_safetensors(scratch, max_shard_nbytes, settings)
            names = [target.name] if format == "torch" else sorted(file.name for file in scratch.iterdir())
            os.replace(scratch, target)
            sync(target.parent)
        except BaseException:
            if format == "torch":
                scratch.unlink(missing_ok=True)
            else:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
    written = sum((target if format == "torch" else target / name).stat().st_size for name in names)
    return Exported(
        target, tuple(names), written, len(exporting.tensors), exporting.numel, exporting.ties, opened.trained_only,
        0 if quantization is None else len(quantization.names),
    )  # fmt: skip


def _check_arguments(out: str | os.PathLike, dtype: object, format: str, max_shard_nbytes: object, config: object) -> Path:
    """Return the path of the output. Raises ConfigError, and CheckpointError if the output exists and is no empty folder."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"zs.export: dtype: expected a torch.dtype of floating-point numbers, or None, got {dtype!r}.")
    if format not in FORMATS:
        raise ConfigError(f"zs.export: format: expected one of {', '.join(FORMATS)}, got {format!r}.")
    if isinstance(max_shard_nbytes, bool) or not isinstance(max_shard_nbytes, int) or max_shard_nbytes < 1:
        raise ConfigError(f"zs.export: max_shard_nbytes: expected an integer of at least 1, got {max_shard_nbytes!r}.")
    if config is not None and format == "torch":
        raise ConfigError("zs.export: config: a file of torch.save can not hold it; use format='safetensors'.")
    target = Path(absolute(out))
    if target.exists() and not (format == "safetensors" and target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"zs.export: {target} exists; name another, or remove it first.")
    return target


def _read_config(config: Any) -> dict[str, object]:
    """Return a configuration as a dictionary. Raises ConfigError if it is no JSON object."""
    config = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if isinstance(config, Mapping):
        found: Any = dict(config)
        try:
            json.dumps(found)
        except TypeError as error:
            raise ConfigError(f"zs.export: config: expected what JSON can hold: {error}.") from None
        return found
    try:
        path = Path(config)
        found = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"zs.export: config: expected a dictionary, or a config.json: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"zs.export: config: expected a JSON object in {path}, got a {type(found).__name__}.")
    return found


def _select(opened: Opened, names: list[str] | None, prefix: str) -> None:
    """Keep only these names (None: all), and of these only those that begin with the prefix, which is stripped.

    Raises ConfigError if the checkpoint lacks one of the names, or no name has the prefix.
    """
    prefix = without_wrappers(prefix)
    if names is not None:
        names = [without_wrappers(name) for name in names]
        if absent := set(names) - opened.model.keys():
            raise ConfigError(f"zs.export: names: {opened.path} has no {min(absent)!r}.{did_you_mean(min(absent), opened.model)}")
        opened.model = {name: opened.model[name] for name in names}
        opened.module_readers = {name: reader for name, reader in opened.module_readers.items() if name in names}
    if not prefix:
        return
    found = {name.removeprefix(prefix): stored for name, stored in opened.model.items() if name.startswith(prefix)}
    if not found:
        first = ", ".join(list(opened.model)[:3])
        raise ConfigError(f"zs.export: prefix: no name begins with {prefix!r}; the first names: {first}.")
    opened.model = found
    readers = {name.removeprefix(prefix): reader for name, reader in opened.module_readers.items() if name.startswith(prefix)}
    opened.module_readers = readers
    ties = [(alias, name) for alias, name in opened.ties.items() if alias.startswith(prefix) and name.startswith(prefix)]
    opened.ties = {alias.removeprefix(prefix): name.removeprefix(prefix) for alias, name in ties}


def _say(line: str) -> None:
    print(f"zeroshard: {line}", file=sys.stderr)


def _read_objects(opened: Opened, format: str) -> dict[str, object]:
    """Return modules' extra states that are no tensors, by name, if the format can hold them; print what is left out."""
    if opened.trained_only:
        _say(f"{opened.path} holds trained parameters only ({len(opened.frozen)} were left out): so does the export")
    if format == "safetensors":
        if opened.module_readers:
            names = first_of(opened.module_readers)
            _say(f"safetensors holds tensors only: left out {names}; format='torch' holds them as well")
        return {}
    objects, refused = opened.read_objects(opened.module_readers)
    if refused:
        _say(f"left out, being of classes that torch does not load by itself: {first_of(refused)}; load it with strict=False")
    return objects


class _Exporting:
    """One export. tensors: name -> (dtype, shape) in the output. sources: name -> stored tensor. ties: other name -> name.
    objects: values that are no tensors, by name."""

    def __init__(
        self,
        opened: Opened,
        dtype: torch.dtype | None,
        format: str,
        objects: dict[str, object],
        quantization: Quantization | None,
    ) -> None:
        """Raises ConfigError if the format cannot hold a tensor."""
        self.dtype, self.objects, self.quantization = dtype, objects, quantization
        self.scales: dict[str, torch.Tensor] = {}  # of the weight that was quantized last: they are written after it
        self.sources: dict[str, Stored] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.ties = opened.tied()
        for name, stored in opened.model.items():
            if name in self.ties:
                continue
            own = casts_to(stored.dtype, dtype)
            if not (dcp.storable(own) if format == "torch" else own in SAFETENSORS_NAMES):
                what = "this format" if format == "torch" else "safetensors"
                remedy = "; give dtype=" if own.is_floating_point else "; use format='torch'" if dcp.storable(own) else ""
                raise ConfigError(f"zs.export: {name} is {own}, which {what} can not hold{remedy}.")
            self.sources[name] = stored
            self.tensors[name] = (own, tuple(stored.shape))
            if quantization is not None and name in quantization.names:
                self.tensors[name] = (quantization.form.dtype, tuple(stored.shape))
                self.tensors[f"{name}_scale"] = (own, (stored.shape[0], 1))
        scaled = frozenset() if quantization is None else quantization.names
        self.ties |= {f"{alias}_scale": f"{name}_scale" for alias, name in self.ties.items() if name in scaled}
        if format == "safetensors" and _METADATA in self.tensors.keys() | self.ties.keys():
            raise ConfigError(f"zs.export: safetensors can not hold a tensor called {_METADATA!r}; use format='torch'.")
        self.sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in self.tensors.items()}  # in bytes
        self.nbytes, self.numel = sum(self.sizes.values()), sum(math.prod(shape) for _, shape in self.tensors.values())

    def write_safetensors(self, folder: Path, max_shard_nbytes: int, settings: dict[str, object] | None) -> None:
        """Write a folder of safetensors files, index and config; the configuration names the chosen dtype."""
        documents: dict[str, object] = {}
        shards = divide(self.sizes, max_shard_nbytes, "model", ".safetensors")
        files = []
        for name, names in shards.items():
            metadata = {"format": "pt"} | {alias: first for alias, first in self.ties.items() if first in names}
            files.append(SafetensorsFile.of(folder / name, {each: self.tensors[each] for each in names}, metadata))
            files[-1].create()
        for file in files:
            write_ranges(file.path, itertools.chain([(0, file.header)], self.ranges(file.places)))
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            total = {"total_size": self.nbytes, "total_parameters": self.numel}
            documents["model.safetensors.index.json"] = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        if settings is not None:
            chosen = {} if self.dtype is None else dict.fromkeys(("dtype", "torch_dtype"), str(self.dtype).removeprefix("torch."))
            documents["config.json"] = {key: chosen.get(key, value) for key, value in settings.items()}
            if self.quantization is not None:
                documents["config.json"] |= self.quantization.described(settings)  # type: ignore[operator]
        elif self.quantization is not None:  # no library knows the model's class, but its own program may read this
            documents["quantization_config.json"] = self.quantization.settings
        for name, document in documents.items():
            (folder / name).write_text(json.dumps(document, indent=2) + "\n")
            sync(folder / name)
        sync(folder)

    def ranges(self, places: dict[str, StoredTensor]) -> Iterator[Range]:
        """Yield the ranges of a file for tensors that lie there at these places."""
        for name, target in places.items():
            if name in self.sources:
                yield target.offset, Elements(target.dtype, math.prod(target.shape), partial(self._read, name))
            else:  # the scales of the weight before
                scales = self.scales.pop(name)
                yield target.offset, bytes(bytes_of(scales))

    def _read(self, name: str, first: int, out: torch.Tensor) -> Work:
        """Fill `out` (n,) with elements of a tensor of the output, from number `first` on."""
        try:
            if self.quantization is not None and name in self.quantization.names:
                self._quantize(name, first, out)
            else:
                self.sources[name].read(first, out)
        except OSError as error:
            raise CheckpointError(f"zs.export: {name} can not be read: {error}") from error
        return OVER

    def _quantize(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill `out` (n,) with codes of a weight, whose rows are quantized whole, and keep the scales of these."""
        assert self.quantization is not None
        (dtype, shape), columns = self.tensors[f"{name}_scale"], self.tensors[name][1][1]
        scales = self.scales.setdefault(f"{name}_scale", torch.empty(shape, dtype=dtype, device="cpu"))
        stop, most = first + out.numel(), max(_CHUNK_NUMEL // columns, 1)
        for row in range(first // columns, -(-stop // columns), most):
            begin, end = row * columns, min(row + most, shape[0], -(-stop // columns)) * columns
            given = torch.empty(end - begin, dtype=torch.float32, device="cpu")
            self.sources[name].read(begin, given)
            codes, scale = self.quantization.form.quantize(given.view(-1, columns), dtype)
            if not scale.isfinite().all():
                which = row + int(scale.isfinite().logical_not().nonzero()[0, 0])
                raise CheckpointError(
                    f"zs.export: {name}: row {which} has a value that is not finite, or too large for {dtype}, so that it has no "
                    "scale: export an earlier checkpoint, or with another dtype=, or without quantize=."
                )
            scales[row : row + len(scale)] = scale
            low, high = max(begin, first), min(end, stop)
            out[low - first : high - first] = codes.view(-1)[low - begin : high - begin]


def divide(sizes: Mapping[str, int], most: int, stem: str, suffix: str) -> dict[str, list[str]]:
    """Divide tensors, in order, among files of at most `most` bytes, but at least one tensor. sizes: name -> bytes.

    Return the names for each file: {stem}{suffix}, or {stem}-00001-of-00002{suffix} and so on.
    """
    shards: list[list[str]] = [[]]
    room = most
    for name, nbytes in sizes.items():
        if shards[-1] and nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= nbytes
    if len(shards) == 1:
        return {f"{stem}{suffix}": shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}": names for number, names in enumerate(shards, 1)}
