"""Changes of a run that may make it fit, by kind, and the command-line options that express them.

    mesh, ranks -> stage, tiers -> sequences at a time -> activation checkpointing -> units -> what nodes keep

Changes of several kinds are made in this order, since the choices of a kind depend on those before. Only what applies is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ...utils.axes import DP, PP, TP, cuts_model
from ..request import FLAGS, Request
from ..search.layout import CHECKPOINTING
from ..search.requested import layout_of

_TIMES = (2, 4, 8, 16)
_FIELDS = ("axes", "rows", "checkpointing")  # fields of a request that a change sets, beside its options


def _meshes(request: Request) -> Iterator[Request]:
    """Yield the same ranks with more tp and pp, and as many sequences in a step; then more ranks of dp, which add sequences."""
    axes, source = request.axes, request.source
    for tp, pp in itertools.product((1, *_TIMES), repeat=2):
        whole = axes[TP] * tp, axes[PP] * pp
        # two blocks a stage, or more
        if tp * pp == 1 or axes[DP] % (tp * pp) or (pp > 1 and 2 * whole[1] > (source.layers or 0)):
            continue
        heads = source.heads if source.config is not None else None  # formulas know tp of no other models than GPTs
        if tp > 1 and (not heads or heads % whole[0] or source.vocab % whole[0] or whole[0] > request.ranks_of_node):
            continue
        mesh = {PP: whole[1], DP: axes[DP] // tp // pp, TP: whole[0]}
        yield replace(request, axes=mesh, micro_batches=request.micro_batches * tp * pp)
    for times in _TIMES:
        yield replace(request, axes={**axes, DP: times * axes[DP]})


def _states(request: Request) -> Iterator[Request]:
    """Yield higher stages of ZeRO, and tiers further away. In fp32, stages 0 to 2 send the same, stage 3 half as much again."""
    for moved in request.config.farther():
        useless = not request.hardware.separate and "cpu" in (moved.get("offload_optimizer"), moved.get("offload_param"))
        if useless or (request.axes[DP] == 1 and list(moved) == ["stage"]):
            continue
        if moved.get("offload_gradient") == "cpu" and request.options.get("offload_gradient") is None:
            del moved["offload_gradient"]  # the default with an offloaded optimizer
        path = {"offload_path": request.options.get("offload_path") or "."} if "nvme" in moved.values() else {}
        yield _with(request, **moved, **path)


def _rows(request: Request) -> Iterator[Request]:
    """Yield fewer sequences at a time in more micro-batches: the same step."""
    halves = (request.rows >> times for times in range(1, request.rows.bit_length()))
    for rows in (each for each in halves if request.rows % each == 0):
        yield replace(request, rows=rows, micro_batches=request.rows // rows * request.micro_batches)


def _checkpoints(request: Request) -> Iterator[Request]:
    """Yield checkpointed blocks; partitioned over tp (Pa: ZeRO, arXiv 1910.02054, section 6.1); with checkpoints on the host."""
    kept = layout_of(request).checkpointing
    if kept == "none":
        yield replace(request, checkpointing=True)
    if kept in ("none", "blocks") and request.axes[TP] > 1:
        yield replace(request, checkpointing=CHECKPOINTING["partitioned"])
    if kept != "host" and request.hardware.separate:
        given = dict(request.checkpointing) if isinstance(request.checkpointing, Mapping) else {}
        yield replace(request, checkpointing=given | CHECKPOINTING["host"])


def _units(request: Request) -> Iterator[Request]:
    """Yield blocks gathered in parts: attention, and each linear layer of the MLP, of at most 4 dim^2 elements and biases."""
    hidden = request.source.hidden
    largest = 4 * hidden * (hidden + 2) if hidden else 0
    fine = request.config.max_unit_numel is not None and request.config.max_unit_numel <= largest
    if largest and not fine and request.config.stage == 3:
        yield _with(request, max_unit_numel=largest)


def _kept_in_nodes(request: Request) -> Iterator[Request]:
    """Yield packed secondary shards (ZeRO++), or none; or states that are sharded over larger groups."""
    config = request.config
    if config.zero_hpz_partition_size > 1:
        if config.zero_quantized_weights is None:
            yield _with(request, zero_quantized_weights="int8")
        yield _with(request, zero_hpz_partition_size=1)
    elif config.shard_size is not None:
        for size in dict.fromkeys((2 * config.shard_size, request.axes[DP])):
            if size > config.shard_size and request.axes[DP] % size == 0:
                yield _with(request, shard_size=size)


def _with(request: Request, **options: object) -> Request:
    return replace(request, options={**request.options, **options})


Kind = Callable[[Request], Iterator[Request]]
KINDS: tuple[Kind, ...] = (_meshes, _states, _rows, _checkpoints, _units, _kept_in_nodes)


def changes(before: Request, after: Request) -> dict[str, object]:
    """Return the options and fields in which `after` differs from `before`, by name, with the values of `after`."""
    names = {*before.options, *after.options} - {"offload_path"}
    found = {name: after.options.get(name) for name in sorted(names) if after.options.get(name) != before.options.get(name)}
    return found | {name: getattr(after, name) for name in _FIELDS if getattr(after, name) != getattr(before, name)}


def flags(before: Request, after: Request) -> str:
    """Return the command-line options that turn `before` into `after`."""
    found = changes(before, after)
    kept = after.checkpointing if isinstance(after.checkpointing, Mapping) else {}
    before_kept = before.checkpointing if isinstance(before.checkpointing, Mapping) else {}
    words = [f"--{FLAGS.get(name, name).replace('_', '-')} {found[name]}" for name in found if name not in _FIELDS]
    if "checkpointing" in found:
        named = {"partition": "--partition-activations", "offload": "--offload-activations cpu"}
        words += [named[name] for name in kept if name not in before_kept] or ["--checkpoint-activations"]
    words += [f"--micro-batch {after.rows}"] * (after.rows != before.rows)
    words += [f"--accumulate {after.micro_batches}"] * (after.micro_batches != before.micro_batches)
    words += [f"--ranks {after.ranks}"] * (after.ranks != before.ranks)
    if "axes" in found and cuts_model(after.axes):
        words.append(f"--mesh {','.join(f'{axis}={size}' for axis, size in after.axes.items() if size > 1)}")
    return " ".join(words)
