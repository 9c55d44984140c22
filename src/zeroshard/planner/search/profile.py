"""The profile of a model: an ordered list of layers, with what each holds, computes and keeps. `load.py` sums up a step of it.

    tokens -> embedding -> position -> block 1 -> ... -> block L -> norm -> head -> loss       forward; backward is the reverse

A layer's parameters are two lists of numbers of elements: those that tensor parallelism divides (*cut*), and those that all of its
ranks hold (*whole*); those of them that an axis ep divides are also in a third (*experts*). Other numbers are per token and of the
whole model: a rank of tp has the cut part divided by tp, and all of the whole part. Parameters that
are gathered and reduced together are a *bucket*, as zs.shard's units are: a norm's is the root, a tied head's the embedding.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config import Tier
from ...errors import ConfigError
from ...formats import coded_column
from ...seam import ALIGNMENT, LARGE_FRACTION, ROOT, round_up
from ...utils.axes import EP, SP, TP, cuts_model
from ...utils.state_format import StateFormat
from ..models.gpt import NGRAM_LENGTHS, GPTConfig
from ..plan import ACTIVATIONS, Plan
from ..simulator.trace import AttentionWork, Resource

# from dry runs: bytes that a forward's kernels move over those that it keeps, and bytes that a backward's move over a forward's
_PASSES, BACKWARD_PASSES = 2.4, 2.5
_FLASH, _FUSED, _EAGER = "flash", "fused", "eager"
KERNELS = {
    # Elements per token that kernels other than products read and write, in a forward and in a backward: over the hidden size,
    # (divided by tp, whole), and over the scores (heads x seq). Each input and output of a kernel counts once; products of scores
    # count too, since their arithmetic is the smaller part of their time; a mask of dropout is half an element.
    _FUSED: ((10, 11, 6.5), (25, 23, 9.5)),  # Megatron-LM since 1.0: scale, mask, softmax; bias, GELU; bias, dropout, residual
    _EAGER: ((30, 19, 12.5), (31, 23, 13.5)),  # Megatron-LM of 2019: each of these by itself, and copies for heads
}
_PARALLEL_LOSS = 1.75  # temporaries of torch's loss over a divided vocabulary, over those of the plain loss (from dry runs)


@dataclass(frozen=True)
class LayerProfile:
    """A part of the model that forward visits once, with parameters of its own or those of another layer.

    cut, whole, experts: elements of its parameters, see the head of this file. bucket: the name of theirs; "": one of their own.
    flops: of a forward, per token (a multiplication and an addition are two); backward takes twice as many.
    last_flops: those of its last linear map, which a recomputed forward skips, since backward does not need the output.
    attention: those of fused attention, over the whole square of scores; causal: whether half of it is skipped.
    kernels: launches of a forward. products: those of them that are matrix products; 0: not told apart.
    moved: elements per token that the other kernels read and write, in the dtype of computation: (divided by tp, whole) of a
        forward, and of a backward; (): estimated from what is kept (_PASSES).
    saved_cut, saved_whole: elements per token, in the dtype of computation, that autograd keeps for backward, with the layer's
        input (the `boundary` of the layer before). saved_fp32: elements that are fp32 in any case, divided by tp.
    working_cut, working_whole, working_fp32: further elements per token at the fullest moment of its backward.
    boundary: elements per token of its output.
    tp_reduces: all-reduces of its output over tp in a forward; as many in a backward.
    block: whether it is one of the repeated blocks, which checkpointing recomputes, and between which stages of pp are cut.
    routed: elements per token that are sent to experts, for each of its choices; as many come back. exchanged: elements per token of
        the queries, and of the keys, of its attention, which ranks along sp exchange.
    mlp: (elements per token that its MLPs keep inside, elements of their parameters); logits: elements per token of the loss; what
        zs.long_context computes in tiles.
    packs: whether parameters and gradients are sent packed if that is asked for (zs.Compression.exempt names those that are not).
    """

    name: str
    cut: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    bucket: str = ""
    flops: float = 0.0
    last_flops: float = 0.0
    attention: float = 0.0
    causal: bool = True
    kernels: int = 1
    products: int = 0
    moved: tuple[tuple[float, float], ...] = ()
    saved_cut: float = 0.0
    saved_whole: float = 0.0
    saved_fp32: float = 0.0
    working_cut: float = 0.0
    working_whole: float = 0.0
    working_fp32: float = 0.0
    boundary: int = 0
    tp_reduces: int = 0
    block: bool = False
    packs: bool = False
    routed: float = 0.0
    exchanged: tuple[float, float] = (0.0, 0.0)
    mlp: tuple[float, float] = (0.0, 0.0)
    logits: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements of its parameters, over all ranks of tp."""
        return sum(self.cut) + sum(self.whole)

    def matrices(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of its parameters (`cut` or `whole`) that are matrices of products, not vectors or embeddings.

        A layer without flops has none. Biases and norms of a block have few elements beside its largest matrix.
        """
        return tuple(n for n in sizes if self.flops and n * n > 16 * max((*self.cut, *self.whole)))

    def saved_nbytes(self, itemsize: int, tp: int = 1) -> float:
        """Return the bytes per token that a forward keeps for backward."""
        return itemsize * (self.saved_cut / tp + self.saved_whole) + 4 * self.saved_fp32 / tp

    def keys(self, sp: int, heads: int) -> float:
        """Return the elements per token of keys as ranks along sp exchange them: `heads`, repeated so often that sp divides them."""
        return self.exchanged[1] * sp // math.gcd(heads, sp)

    def moved_nbytes(self, itemsize: int, tp: int, backward: bool) -> float:
        """Return the bytes per token that kernels move between the device's memory and its cores in a forward, or a backward."""
        if self.moved:
            cut, whole = self.moved[backward]
            return itemsize * (cut / tp + whole)
        forward = _PASSES * self.saved_nbytes(itemsize, tp) + 4 * self.working_fp32 / tp
        return forward * (BACKWARD_PASSES if backward else 1)

    def working_nbytes(self, itemsize: int, tp: int = 1) -> float:
        """Return the bytes per token of temporaries at the fullest moment of its backward."""
        parts = _PARALLEL_LOSS if tp > 1 else 1.0
        return itemsize * (self.working_cut / tp + self.working_whole) + 4 * self.working_fp32 / tp * parts


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered and reduced together, as zs.shard's units. origin: of a part, the name of the split bucket.

    matrices: those of `cut`, and of `whole`, whose optimizer states may rest coded. divided: the parameters of a bucket that ep
    divides, with a rank's own elements: they have flat buffers, and Comms, of their own.
    """

    name: str
    cut: tuple[int, ...]
    whole: tuple[int, ...]
    packs: bool
    origin: str = ""
    matrices: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    divided: bool = False

    @property
    def held(self) -> bool:
        """True if it stays gathered for a whole pass."""
        return self.name == ROOT

    def buffers(self, tp: int, form: StateFormat | None = None) -> list[tuple[list[int], bool]]:
        """Return the elements of the parameters of each flat buffer, and whether their optimizer states rest in the format `form`.

        Matrices of less than `min_numel` elements and all other parameters have a buffer, and fp32 states, of their own.
        """
        found: dict[tuple[bool, bool], list[int]] = {}  # by: coded, divided over tp
        for sizes, matrices, parts in ((self.cut, self.matrices[0], tp), (self.whole, self.matrices[1], 1)):
            coded = Counter(n for n in matrices if form is not None and n >= form.min_numel)
            for which, members in ((True, coded), (False, Counter(sizes) - coded)):
                found.setdefault((which, parts > 1), []).extend(n // parts for n in members.elements())
        return [(members, which) for (which, _), members in found.items() if members]

    def shards(self, tp: int, dp: int, form: StateFormat | None = None) -> tuple[int, ...]:
        """Return the elements of one rank's shard of each of `buffers`, which has dp times as many (engine/flat_layout.py)."""
        found = []
        for sizes, coded in self.buffers(tp, form):
            block = coded_column("exp_avg", form).elements if coded and form is not None else 1
            alignment = math.lcm(ALIGNMENT, block)
            found.append(round_up(-(-sum(round_up(n, alignment) for n in sizes) // dp), alignment))
        return tuple(found)


def buckets_of(layers: Sequence[LayerProfile], max_unit_numel: int | None = None, ep: int = 1) -> list[Bucket]:
    """Return the buckets of the units that zs.shard makes, in the order in which forward comes to them, the root first; of one with experts two
    buckets of one name, if several ranks along ep divide them.

    max_unit_numel: larger ones are split, a matrix in each part; the runtime adds its bias to it, which differs only in padding.
    """
    found: dict[str, list[LayerProfile]] = {}
    for layer in layers:
        if layer.cut or layer.whole or layer.experts:
            found.setdefault(layer.bucket or layer.name, []).append(layer)
    buckets = []
    for name, members in found.items():
        cut, whole = sum((u.cut for u in members), ()), sum((u.whole for u in members), ())
        matrices = sum((u.matrices(u.cut) for u in members), ()), sum((u.matrices(u.whole) for u in members), ())
        experts, wide = sum((u.experts for u in members), ()), sum((u.matrices(u.experts) for u in members), ())
        packs = all(u.packs for u in members)
        if experts and ep > 1:  # tp is 1 then
            own, states = tuple(n // ep for n in experts), ((), tuple(n // ep for n in wide))
            buckets.append(Bucket(name, (), own, packs, matrices=states, divided=True))
            cut, whole, matrices = (), _without(cut + whole, experts), ((), _without(matrices[0] + matrices[1], wide))
        buckets.append(Bucket(name, cut, whole, packs, matrices=matrices))
    split: list[Bucket] = []
    for bucket in buckets:
        numel = sum(bucket.cut) + sum(bucket.whole)
        if max_unit_numel is None or numel <= max_unit_numel or bucket.held:
            split.append(bucket)
            continue
        small = numel // 100  # what is smaller shares the last part
        parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((n,), ()) for n in bucket.cut if n > small]
        parts += [((), (n,)) for n in bucket.whole if n > small]
        rest = tuple(n for n in bucket.cut if n <= small), tuple(n for n in bucket.whole if n <= small)
        parts += [rest] if any(rest) else []
        for at, (cut, whole) in enumerate(parts):
            matrices = tuple(n for n in cut if n in bucket.matrices[0]), tuple(n for n in whole if n in bucket.matrices[1])
            split.append(replace(bucket, name=f"{bucket.name}.{at}", cut=cut, whole=whole, origin=bucket.name, matrices=matrices))
    return sorted(split, key=lambda bucket: not bucket.held)


def _without(sizes: tuple[int, ...], some: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes without those of some parameters; one sum where only sums are known."""
    left = Counter(sizes)
    left.subtract(Counter(some))
    return (sum(sizes) - sum(some),) if min(left.values(), default=0) < 0 else tuple(left.elements())


@dataclass(frozen=True, eq=False)
class Profile:
    """A model as layers, in the order of forward. seq: tokens of a sequence. heads: tp must divide them; 1: only tp = 1 is known.

    experts: ep must divide them; 0: there are none. sp_heads: query heads, which sp must divide, and heads of keys; (1, 1): only
    sp = 1 is known.

    tied: the name of the bucket whose parameters the first and the last stage of a pipeline both hold.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    seq: int
    heads: int = 1
    tied: str = ""
    experts: int = 0
    sp_heads: tuple[int, int] = (1, 1)

    @functools.cached_property
    def numel(self) -> int:
        """Number of parameters of the model."""
        return sum(layer.numel for layer in self.layers)

    @functools.cached_property
    def flops(self) -> float:
        """Flops of a forward, per token."""
        return sum(layer.flops for layer in self.layers)

    @functools.cached_property
    def blocks(self) -> tuple[LayerProfile, ...]:
        return tuple(layer for layer in self.layers if layer.block)

    def check(self, ep: int, sp: int) -> None:
        """Raise ConfigError if ep or sp ranks do not divide what they share."""
        for axis, size, counts in ((EP, ep, (self.experts,)), (SP, sp, (self.sp_heads[0], self.seq))):
            if size > 1 and any(count % size or not count for count in counts):
                what = "experts" if axis == EP else "query heads and the tokens of a sequence"
                raise ConfigError(
                    f"{axis}={size}: expected a divisor of {math.gcd(*counts)}, over which the {what} of {self.name} are divided."
                )

    @functools.lru_cache(maxsize=64)  # noqa: B019  # a profile lives as long as a search
    def over(self, ep: int) -> Profile:
        """Return the profile of a rank's part along ep: layers of the root that are large beside its blocks get buckets of their own."""
        if ep == 1 or not self.experts:
            return self
        block = max(layer.numel - sum(layer.experts) * (ep - 1) // ep for layer in self.blocks)
        large = {layer.name for layer in self.layers if layer.bucket == ROOT and layer.numel >= LARGE_FRACTION * block}
        buckets = {layer.name: "" if layer.name in large else layer.bucket for layer in self.layers}
        if self.tied in large:
            buckets[self.layers[-1].name] = self.tied
        return replace(self, layers=tuple(replace(layer, bucket=buckets[layer.name]) for layer in self.layers))

    @functools.lru_cache(maxsize=64)  # noqa: B019  # a profile lives as long as a search
    def stages(self, pp: int) -> tuple[tuple[LayerProfile, ...], ...]:
        """Return the layers of each of `pp` stages of a pipeline, cut as `zs.parallelize` cuts: by numbers of parameters.

        Raises ConfigError for more stages than blocks.
        """
        from ...parallel.stages import cut_by_cost

        if pp == 1:
            return (self.layers,)
        blocks = self.blocks
        if not 1 <= pp <= len(blocks):
            raise ConfigError(f"pp={pp}: expected 1 to {len(blocks)} stages, as many as {self.name} has blocks.")
        begin, end = self.layers.index(blocks[0]), self.layers.index(blocks[-1]) + 1
        before, after = list(self.layers[:begin]), list(self.layers[end:])
        for at, layer in enumerate(before):
            if layer.name == self.tied:  # both stages hold it, as a bucket of its own
                before[at] = replace(layer, bucket="")
                after[-1] = replace(after[-1], cut=layer.cut, whole=layer.whole, bucket=self.tied)
        costs = [float(block.numel) for block in blocks]
        costs[0] += sum(layer.numel for layer in before)
        costs[-1] += sum(layer.numel for layer in after)
        parts = [[blocks[number] for number in part] for part in cut_by_cost(costs, pp)]
        parts[0], parts[-1] = [*before, *parts[0]], [*parts[-1], *after]
        return tuple(map(tuple, parts))

    # -- where profiles come from --------------------------------------------------------------------------------

    @classmethod
    def of_shape(cls, shape: GPTConfig, name: str = "GPT", *, kernels: str = _FLASH) -> Profile:
        """Return the profile of a GPT (planner/models/gpt.py) by formulas (tested in tests/planner/search/test_profile.py).

        kernels: "flash" (torch's): attention keeps no scores; one of KERNELS: it keeps two matrices (seq, seq) a head. Attention
        counts 4 seq dim flops per token, the whole square, as publications count (Megatron-LM, arXiv 2104.04473, appendix).
        """
        h, ratio, bias, vocab = shape.dim, shape.mlp_ratio, shape.bias, shape.vocab_size
        square = 0 if kernels == _FLASH else shape.heads * shape.seq_len
        moved = tuple((cut * h + each * square, whole * h) for cut, whole, each in KERNELS.get(kernels, ()))
        linear = (4 + 2 * ratio) * h * h  # elements of qkv, out, up, out
        mlp = (ratio * h * h, *[ratio * h] * bias, ratio * h * h)
        block = LayerProfile(
            "",
            cut=(3 * h * h, *[3 * h] * bias, h * h, *mlp),
            whole=(*[h] * (2 + 2 * bias), *[h] * (2 * bias)),  # two norms, and biases of what is cut by columns
            flops=2 * linear + 4 * shape.seq_len * h, last_flops=2 * ratio * h * h, kernels=10,
            products=4 if kernels == _FLASH else 6, attention=4 * shape.seq_len * h * (kernels == _FLASH), moved=moved,
            saved_cut=(4 + 2 * ratio) * h + 2 * square, saved_whole=4 * h, saved_fp32=shape.heads,
            working_cut=2 * ratio * h + square, working_whole=2 * h, boundary=h, tp_reduces=2, block=True, packs=True,
            exchanged=(h, h), mlp=(2 * ratio * h, sum(mlp)),
        )  # fmt: skip
        if shape.experts:  # each token's rows are sorted, multiplied twice and weighted; the router computes in fp32
            rows, experts = shape.experts_per_token * h, (shape.experts * ratio * h * h,) * 2
            block = replace(
                block, cut=block.cut[: -len(mlp)], whole=(*block.whole[: len(block.whole) - bias], shape.experts * h, *experts),
                experts=experts, routed=rows, last_flops=0.0, kernels=35, products=5, mlp=(0.0, 0.0),
                flops=block.flops + 2 * h * shape.experts + 4 * ratio * h * (rows - h),
                saved_cut=4 * h, saved_whole=4 * h + (2 + 2 * ratio) * rows, saved_fp32=shape.heads + shape.experts,
                working_cut=0.0, working_whole=2 * h + (1 + 2 * ratio) * rows,
            )  # fmt: skip

        def bucket(numel: int) -> str:
            return "" if numel >= LARGE_FRACTION * block.numel else ROOT  # as policies/units.py decides

        layers = [LayerProfile("embedding", cut=(vocab * h,), bucket=bucket(vocab * h), boundary=h, tp_reduces=1)]
        if shape.positions == "learned":
            layers.append(
                LayerProfile("position", whole=(shape.seq_len * h,), bucket=bucket(shape.seq_len * h), kernels=2, boundary=h)
            )
        for number in range(len(NGRAM_LENGTHS) if shape.ngram_rows else 0):
            rows = shape.ngram_rows * h
            layers.append(LayerProfile(f"ngrams.{number}", whole=(rows,), bucket=bucket(rows), kernels=12, boundary=h))
        if shape.embedding_norm:
            layers.append(LayerProfile("embedding_norm", whole=(h,) * (1 + bias), bucket=ROOT, saved_whole=h, boundary=h))
        layers += [replace(block, name=f"blocks.{number}") for number in range(shape.layers)]
        layers.append(LayerProfile("norm", whole=(h,) * (1 + bias), bucket=ROOT, saved_whole=h, boundary=h))
        owner = layers[0].bucket or "embedding"
        layers.append(LayerProfile(
            "head", cut=() if shape.tied else (vocab * h,), bucket=owner if shape.tied else bucket(vocab * h),
            flops=2 * h * vocab, kernels=6, products=1, saved_whole=h, saved_fp32=vocab, working_fp32=2 * vocab, packs=not shape.tied,
            logits=vocab,
        ))  # fmt: skip
        tied, along_sp = "embedding" if shape.tied else "", 1 if shape.positions == "alibi" else shape.heads
        return cls(name, tuple(layers), shape.seq_len, shape.heads, tied, shape.experts, (along_sp, along_sp))

    @classmethod
    def of_plan(
        cls, plan: Plan, seq: int, checkpointed: Plan | None = None, halved: Plan | None = None, heads: int = 1
    ) -> Profile:
        """Return the profile of any model, from a dry run over dp alone: its units as layers, with what they computed and kept.

        seq: tokens of its sequences. checkpointed: the same run with activation checkpointing, which shows what blocks then keep;
        None: they cannot be checkpointed. halved: the same run with tp = 2: what is less there is what tp divides; None: layouts
        have tp = 1. heads: the most ranks of tp.
        """
        if cuts_model(plan.axes) or plan.ranks == 1:
            raise ConfigError(
                f"a profile is of a whole model: expected a plan over two or more ranks of dp alone, got {plan.axes}."
            )
        itemsize, micro = plan.config.compute_dtype.itemsize, max(plan.tokens // plan.micro_batches, 1)
        flops: dict[str, float] = {}
        kernels: dict[str, int] = {}
        attention: dict[str, AttentionWork] = {}
        for task in plan.trace.tasks:
            if task.unit and task.phase == "forward" and Resource.DEVICE in task.nbytes:
                flops[task.unit] = flops.get(task.unit, 0.0) + task.flops / plan.micro_batches
                kernels[task.unit] = kernels.get(task.unit, 0) + task.kernels
                if task.attention is not None:
                    found = attention.get(task.unit)
                    attention[task.unit] = task.attention if found is None else found + task.attention
        unused = [name for name in plan.units if name not in flops]
        sizes = {name: plan.units[name] for name in (*unused, *flops)}  # in the order of forward
        common = max(set(sizes.values()), key=list(sizes.values()).count)
        kept = (checkpointed or plan).activations
        blocks = {name for name, numel in sizes.items() if numel == common and name != ROOT}
        again = (
            0 if checkpointed is None else _working_nbytes(checkpointed) - max(plan.activations.get(name, 0) for name in blocks)
        )
        # temporaries of the loss, which follows the last layer, count as that layer's
        working = dict.fromkeys(blocks, max(again, 0)) | {list(sizes)[-1]: _working_nbytes(plan)}
        tasks = halved.trace.tasks if halved is not None else []
        sums = Counter(t.unit for t in tasks if t.axis == TP and t.phase == "forward" and t.name.endswith("all_reduce"))
        layers = []
        for name, numel in sizes.items():
            saved, cut, saved_cut = plan.activations.get(name, 0), 0, 0
            if halved is not None:  # what two ranks divide is twice what one of them has less
                cut = min(max(2 * (numel - halved.units.get(name, numel)), 0), numel)
                saved_cut = min(max(2 * (saved - halved.activations.get(name, saved)), 0), max(saved, 0))
            layers.append(LayerProfile(
                name, cut=(cut,) * bool(cut), whole=(numel - cut,) * bool(numel - cut), flops=flops.get(name, 0.0) / micro,
                kernels=max(kernels.get(name, 0) // plan.micro_batches, 1), saved_cut=saved_cut / micro / itemsize,
                saved_whole=(saved - saved_cut) / micro / itemsize,
                boundary=round(kept.get(name, 0) / micro / itemsize) if checkpointed else 0,
                working_whole=working.get(name, 0) / micro / itemsize, block=name in blocks, packs=name != ROOT,
                tp_reduces=sums[name] // halved.micro_batches if halved is not None else 0, causal=name in attention and attention[name].causal,
                attention=attention[name].flops / plan.micro_batches / micro if name in attention else 0.0,
            ))  # fmt: skip
        return cls(plan.model, tuple(layers), seq, heads if halved is not None else 1)


def _working_nbytes(plan: Plan) -> int:
    """Return the bytes that computation holds at its fullest moment beyond what is kept for backward."""
    held = (phase.held.get(Tier.DEVICE, {}).get(ACTIVATIONS, 0) for phase in plan.phases if phase.name in ("forward", "backward"))
    return max(max(held, default=0) - sum(plan.activations.values()), 0)
