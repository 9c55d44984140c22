"""The table of changes that may make a run fit (`CHANGES`): what each frees, and how it is written.

    row                          frees                    costs                               offered
    mesh, then more ranks        model states             sums over tp, idle stages; devices  as divisors allow
    experts over ep              model states             tokens sent to experts       as experts and ranks of dp allow
    tokens over sp               activations              tokens sent for attention    as heads and ranks of dp allow
    stage, tiers                 model states             parameters sent; copies             farther than the run's
    sequences at a time          activations              smaller products                    the same step in more micro-batches
    activation checkpointing     activations              a repeated forward; copies          what is not checkpointed yet
    tiles of tokens              activations              MLPs and loss computed again where no axis cuts the model
    units                        gathered parameters      more collectives                    blocks in parts
    what nodes keep              secondary shards         bytes between nodes                 packed, fewer, larger groups

`zeroshard plan` writes a change as options of the command line (`flags`), the error of a running job as what to write in the
program (`program`). Changes of several rows are made in this order, since the choices of a row depend on those before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...config import STATES, Placement, written
from ...utils.axes import DP, EP, PP, SP, TP, cuts_model
from ...utils.option_names import FLAGS, TILES
from ..plan import ACTIVATIONS
from ..request import Request
from ..search.layout import CHECKPOINTING
from ..search.requested import layout_of

_TIMES = (2, 4, 8, 16)
_FIELDS = ("axes", "rows", "checkpointing", "tiles")  # fields of a request that a change sets, beside its options


def _meshes(request: Request) -> Iterator[Request]:
    """Yield the same ranks with more tp and pp, and as many sequences in a step; then more ranks of dp, which add sequences."""
    axes, source = request.axes, request.source
    for tp, pp in () if _beside_dp(request) else itertools.product((1, *_TIMES), repeat=2):
        whole = axes[TP] * tp, axes[PP] * pp
        few = pp > 1 and 2 * whole[1] > (source.layers or 0)  # less than two blocks a stage
        if tp * pp == 1 or axes[DP] % (tp * pp) or few:
            continue
        heads = source.heads if source.config is not None else None  # formulas know tp of no other models than GPTs
        if tp > 1 and (not heads or heads % whole[0] or source.vocab % whole[0] or whole[0] > request.ranks_of_node):
            continue
        mesh = {PP: whole[1], DP: axes[DP] // tp // pp, TP: whole[0]}
        yield replace(request, axes=mesh, micro_batches=request.micro_batches * tp * pp)
    for times in _TIMES:
        yield replace(request, axes={**axes, DP: times * axes[DP]})


def _beside_dp(request: Request) -> bool:
    """Return whether the mesh has an axis beside which formulas know dp alone."""
    return bool({EP, SP} & set(request.axes))


def _experts(request: Request) -> Iterator[Request]:
    """Yield the same ranks with experts over ep: each rank holds and gathers some, and reads as many sequences as before."""
    along = request.axes.get(EP, 1)
    for times in _TIMES if request.source.experts and SP not in request.axes and request.axes[PP] * request.axes[TP] == 1 else ():
        if request.axes[DP] % times == 0 and request.source.experts % (along * times) == 0:
            yield replace(request, axes={**request.axes, DP: request.axes[DP] // times, EP: along * times}, parallel={})


def _tokens(request: Request) -> Iterator[Request]:
    """Yield the same ranks with the tokens of a sequence over sp, and as many sequences in a step."""
    along, heads = request.axes.get(SP, 1), request.source.heads or 1
    for times in _TIMES if not cuts_model(request.axes) and request.source.example is None else ():
        size = along * times
        divided = request.axes[DP] % times == heads % size == request.seq % size == 0
        if divided and size <= request.ranks_of_node:
            axes = {**request.axes, DP: request.axes[DP] // times, SP: size}
            yield replace(request, axes=axes, micro_batches=request.micro_batches * times)


def _tiles(request: Request) -> Iterator[Request]:
    """Yield MLPs, and the loss of a model of Transformers, in tiles of as many tokens as the model is wide (arXiv 2506.13996)."""
    source, own = request.source, request.seq // request.axes.get(SP, 1)
    names = TILES if source.context is not None else TILES[:1]  # others may not be models of Transformers
    tiles = {name: source.hidden for name in names if source.hidden and name not in request.tiles}
    if tiles and source.hidden and source.hidden < own and not cuts_model(request.axes) and source.example is None:
        yield replace(request, tiles={**request.tiles, **tiles})


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


# the words for what one row changed: options of the command line, and a phrase for the program; nothing where it changed nothing
Words = tuple[list[str], str]


def _mesh_words(before: Request, after: Request) -> Words:
    times, words = after.ranks // before.ranks, [f"--ranks {after.ranks}"] * (after.ranks != before.ranks)
    alone = _along(before, after) == [1, 1] and after.axes != before.axes  # else the axis's own row says it
    words += _axes_flags(after) * (alone and (cuts_model(after.axes) or _beside_dp(after)))
    return words, f"{times} times as many ranks, with as many sequences on each" if times > 1 else ""


def _axes_flags(after: Request) -> list[str]:
    return [f"--mesh {','.join(f'{axis}={size}' for axis, size in after.axes.items() if size > 1)}"]


def _along(before: Request, after: Request) -> list[int]:
    """Return how many times as many ranks there are along ep, and along sp."""
    return [after.axes.get(axis, 1) // before.axes.get(axis, 1) for axis in (EP, SP)]


def _experts_words(before: Request, after: Request) -> Words:
    if _along(before, after)[0] <= 1:
        return [], ""
    return _axes_flags(after), f'zs.divide_experts over an axis "ep" of {after.axes[EP]} ranks'


def _tokens_words(before: Request, after: Request) -> Words:
    if _along(before, after)[1] <= 1:
        return [], ""
    mesh = {"dp": after.axes[DP], "sp": after.axes.get(SP, 1)}
    return _axes_flags(after), f"zs.shard(..., mesh={mesh}) and zs.SequenceLoader"


def _tiles_words(before: Request, after: Request) -> Words:
    words = [f"--{name.replace('_', '-')} {size}" for name, size in after.tiles.items() if before.tiles.get(name) != size]
    return words, f"zs.long_context(..., {written(after.tiles)})" if after.tiles != before.tiles else ""


def sums_up(request: Request) -> bool:
    """Return True where a rank holds whole gradients anyway, so that it can add up micro-batches under zs.accumulate."""
    return request.config.row.gradient is not Placement.SHARDED


def _rows_words(before: Request, after: Request) -> Words:
    words = [f"--micro-batch {after.rows}"] * (after.rows != before.rows)
    words += [f"--accumulate {after.micro_batches}"] * (after.micro_batches != before.micro_batches)
    times, summed = before.rows // after.rows, ", and zs.accumulate around all but the last" * sums_up(after)
    program = f"1/{times} of the sequences at a time in {times} times as many micro-batches{summed}"
    return words, program if times > 1 else ""


def _checkpoint_words(before: Request, after: Request) -> Words:
    if after.checkpointing == before.checkpointing:
        return [], ""
    kept, given = (each.checkpointing if isinstance(each.checkpointing, Mapping) else {} for each in (before, after))
    named = {"partition": "--partition-activations", "offload": "--offload-activations cpu"}
    words = [named[name] for name in given if name not in kept] or ["--checkpoint-activations"]
    return words, f"zs.checkpoint_activations({', '.join(['model', *(f'{name}={value!r}' for name, value in given.items())])})"


@dataclass(frozen=True)
class Change:
    """A row of CHANGES. frees: what a rank holds less of. offers: yields changed requests. words: says what was changed."""

    frees: str
    offers: Callable[[Request], Iterator[Request]]
    words: Callable[[Request, Request], Words]


def _of_shard(frees: str, offers: Callable[[Request], Iterator[Request]], *options: str) -> Change:
    """Return a row that sets options of zs.shard."""

    def words(before: Request, after: Request) -> Words:
        found = {name: value for name, value in changes(before, after).items() if name in options}
        flags = [f"--{FLAGS.get(name, name).replace('_', '-')} {value}" for name, value in found.items()]
        return flags, f"zs.shard(..., {written(found)})" if found else ""

    return Change(frees, offers, words)


CHANGES = (
    Change("model states", _meshes, _mesh_words),
    Change("model states", _experts, _experts_words),
    Change(ACTIVATIONS, _tokens, _tokens_words),
    _of_shard("model states", _states, *STATES, "stage"),
    Change(ACTIVATIONS, _rows, _rows_words),
    Change(ACTIVATIONS, _checkpoints, _checkpoint_words),
    Change(ACTIVATIONS, _tiles, _tiles_words),
    _of_shard("gathered parameters", _units, "max_unit_numel"),
    _of_shard("secondary shards", _kept_in_nodes, "shard_size", "zero_hpz_partition_size", "zero_quantized_weights"),
)


def changes(before: Request, after: Request) -> dict[str, object]:
    """Return the options and fields in which `after` differs from `before`, by name, with the values of `after`."""
    names = {*before.options, *after.options} - {"offload_path"}
    found = {name: after.options.get(name) for name in sorted(names) if after.options.get(name) != before.options.get(name)}
    return found | {name: getattr(after, name) for name in _FIELDS if getattr(after, name) != getattr(before, name)}


def flags(before: Request, after: Request) -> str:
    """Return the command-line options that turn `before` into `after`."""
    return " ".join(word for row in reversed(CHANGES) for word in row.words(before, after)[0])
