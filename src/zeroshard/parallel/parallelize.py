"""zs.parallelize: distribute a model over a mesh in one call, by tensor parallelism, pipeline stages and ZeRO.

    whole model --cut between blocks--> this rank's stages --cut inside of blocks--> local shards --zs.shard--> over dp
                  mesh["pp"]                                  mesh["tp"], mesh["ep"]                mesh["dp"]

Along an axis sp ranks hold the same part of the model, and compute other tokens of the same sequences.

Each part can be used by itself: `styles_for` and `apply`, `divide_experts`, `cut_stages` and `Pipeline`, `zs.shard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as dtensor_parallel

from .. import api
from ..activations import router_loss
from ..activations.sequence_parallel import check as check_sequences
from ..activations.ulysses import sequence_of
from ..config import Config, Tier, read_layout
from ..data.sequence import IGNORED, check_same, cut
from ..errors import ConfigError
from ..seam import engine_of
from ..utils.axes import AXES, other_model_axes, planned_otherwise
from ..utils.torch_compat import is_distributed
from .experts import divide_experts, divisible, expert_imbalance
from .pipeline import SCHEDULES, Pipeline, schedule_class, stages_of, whole
from .stages import StandIn, cut_stages, logits_of
from .styles import ParallelStyles, Style, divides, styles_for
from .tensor_parallel import apply
from .tied import exchange_objects
from .traffic import Traffic

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import ShardOptions

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Score = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> loss


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    optimizer: MakeOptimizer | None = None,
    micro_batches: int = 1,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    styles: ParallelStyles | Mapping[str, Style] | None = None,
    experts: Iterable[str] | None = None,
    capacity_factor: float | None = None,
    cuts: Sequence[int | str] | None = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    loss: Score | None = None,
    example: Tensor | None = None,
    config: Config | str | os.PathLike | None = None,
    **options: Unpack[ShardOptions],
) -> Parallel:
    """Distribute a Transformer over a mesh of tensor, expert, pipeline and data parallelism (collective); return this rank's part.

    Args:
        model: inputs -> outputs (of a language model: tokens -> logits), the same on every rank (the same seed), on its device or
            on the meta device. Drop your reference afterwards, to free what other ranks hold: this rank's part is `run.model`.
        mesh: a DeviceMesh of some of the axes "pp", "dp" (or "dp_replicate" and "dp_shard"), "ep", "sp" and "tp".
        optimizer: parameters -> optimizer, a class or functools.partial(AdamW, lr=...). It is called with the parameters of each
            of the rank's stages; for a stage without trained parameters, with a trained dummy parameter of one element.
        micro_batches: number of micro-batches of a step: a pipeline overlaps them; without one they run one after the other.
        schedule: the pipeline's schedule: GPipe, 1F1B (default), Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, ...
        stages_per_rank: stages of the pipeline on each rank; None: as few as the schedule needs.
        styles: tensor parallelism: name pattern -> style; they override the model's own styles (`styles_for`).
        experts, capacity_factor: see `divide_experts`, for an axis "ep".
        cuts: the blocks with which stages 1, 2, ... begin; None: cut by cost (see `cut_stages`).
        sequence_parallel, loss_parallel: see `tensor_parallel.apply`.
        loss: (outputs, targets) -> mean loss of a micro-batch, over targets that are not -100. None: their cross-entropy. A model
            of Transformers with output_router_logits=True adds its router's loss in `step`.
        example: an input of the model, of any values; needed if inputs are not tokens. One forward on it shows which modules are
            used before and after the blocks (see `cut_stages`).
        config, options: as of zs.shard (stage, precision, max_grad_norm, offload_optimizer, ...).

    Raises:
        ConfigError: an axis does not divide heads, features, experts, blocks, tokens or ranks. Nothing has changed.

    Sources: Megatron-LM, arXiv 1909.08053 and 2104.04473; ZeRO beside them: 1910.02054, section 10.4.
    """
    sizes = _sizes(mesh)
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches: expected a whole number of at least 1, got {micro_batches!r}.")
    if "plan" in options:
        raise ConfigError("plan is now styles: zs.parallelize(styles={name: style}), of tensor parallelism.")
    if isinstance(config, (str, os.PathLike)):
        planned = read_layout(config)
        text = planned_otherwise(config, planned, {"dp": mesh.size() // math.prod(sizes.values()), **sizes})
        if other_model_axes(planned, sizes):
            raise ConfigError(text)
        if text and mesh.get_rank() == 0:  # only the numbers of ranks differ
            print(f"zeroshard: {text}", file=sys.stderr)
    config = Config.build(config, **options)

    # what each axis needs of the model; nothing has changed yet
    divided = divisible(model, sizes["ep"], experts, capacity_factor) if sizes["ep"] > 1 else {}
    chosen: ParallelStyles | None = None
    if sizes["tp"] > 1:
        chosen = styles if isinstance(styles, ParallelStyles) else styles_for(model, styles)
        # divided experts are cut by one axis alone
        kept = {n: s for n, s in chosen.by_name.items() if not any(f"{n}.".startswith(f"{each}.") for each in divided)}
        chosen = dataclasses.replace(chosen, by_name=kept)
        if sentences := divides(model, sizes["tp"], chosen):
            raise ConfigError(" ".join(sentences))
    takes: frozenset[str] = frozenset()  # names of the forward's arguments
    if sizes["sp"] > 1:
        check_sequences(model)
        parameters = inspect.signature(model.forward).parameters
        takes = frozenset(parameters)
        if "position_ids" not in takes and all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            raise ConfigError(
                f"sp: the forward of {type(model).__name__} takes no position_ids, by which a rank along sp would know where its tokens stand. "
                "Give it this argument, (rows, tokens) int64, or leave the axis sp out."
            )
    coefficient = router_loss.coefficient(model)
    name, modules = "1F1B" if schedule is None else schedule_class(schedule)[0], [model]
    if sizes["pp"] > 1:
        least = 1 if name in SCHEDULES[:2] else 2
        per_rank = least if stages_per_rank is None else stages_per_rank
        own = stages_of(mesh["pp"].get_local_rank(), sizes["pp"], per_rank, name)
        modules = cut_stages(model, sizes["pp"] * per_rank, own, cuts=cuts, example=example)

    for stage in modules:  # of the styles and the experts of the whole model, those that the stage has
        inside = {name for name, module in stage.named_modules() if not isinstance(module, StandIn)}
        if chosen is not None:
            there = inside | {name for name, _ in stage.named_parameters()}
            part = ParallelStyles(
                {name: style for name, style in chosen.by_name.items() if name in there},
                {name: attributes for name, attributes in chosen.divided.items() if name in inside},
                chosen.head if chosen.head in inside else None,
            )
            # logits stay sharded only in the stage with the head; for a model without a head, let `apply` raise its error
            stays_cut = loss_parallel and (part.head is not None or chosen.head is None)
            apply(stage, mesh["tp"], part, sequence_parallel=sequence_parallel, loss_parallel=stays_cut)
        if here := [each for each in divided if each in inside]:
            divide_experts(stage, mesh["ep"], experts=here, capacity_factor=capacity_factor)
    made = [None] * len(modules) if optimizer is None else _optimizers(optimizer, modules, mesh)
    pairs = [api.shard(module, each, config=config, mesh=mesh) for module, each in zip(modules, made, strict=True)]
    context = dtensor_parallel.loss_parallel if loss_parallel and chosen is not None else contextlib.nullcontext
    return Parallel(mesh, pairs, micro_batches, name, loss, context, coefficient, takes)


def _optimizers(make: MakeOptimizer, modules: list[nn.Module], mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each of this rank's stages (collective). If `make` raises on one rank, all raise ConfigError."""
    made, problems = [], {}
    try:
        made = [_optimizer(make, module) for module in modules]
    except Exception as error:  # the user's function may raise anything
        cause: Exception | None = error
        problems[mesh.get_rank()] = f"{type(error).__name__}: {error}"
    else:
        cause = None
    for name in mesh.mesh_dim_names or ():
        for told in exchange_objects(problems, mesh[name].get_group()):  # one axis after the other brings a problem to every rank
            problems = problems | told
    if problems:
        rank, text = min(problems.items())
        raise ConfigError(
            f"optimizer: on rank {rank} ({len(problems)} of {mesh.size()} ranks) the function raised {text} It gets the parameters of that "
            "rank's part of the model only: let it make an optimizer of any part."
        ) from cause
    return made


def _optimizer(make: MakeOptimizer, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a stage. A stage without trained parameters has one, too, since norms and steps are collective."""
    params = list(module.parameters())
    if any(param.requires_grad for param in params):
        return make(iter(params))
    # two dimensions, since an optimizer may require matrices
    stand_in = nn.Parameter(torch.zeros(1, 1, dtype=params[0].dtype, device=params[0].device))
    made = make(iter([stand_in]))
    for group in made.param_groups:
        group["params"] = params if any(param is stand_in for param in group["params"]) else []
    made.state.clear()  # states that the constructor has made for the dummy
    return made


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats) of logits (batch, seq, tokens) over targets (batch, seq) that are not -100, or 0."""
    total = summed_loss(logits, targets)
    return total / (targets != IGNORED).sum().clamp(min=1)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over the targets, where `next_token_loss` returns the mean."""
    logits = logits if is_distributed(logits) else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    known = ("pp", *(name for name, axis in AXES.items() if axis.cuts_batch), "tp")
    if not names or not set(names) <= set(known):
        raise ConfigError(
            f"mesh: expected a DeviceMesh with axes named of {known}, got "
            f"{names or type(mesh).__name__}. init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')) makes one."
        )
    found = dict(zip(names, mesh.shape, strict=True))
    return {name: found.get(name, 1) for name in ("pp", "ep", "sp", "tp")}


class Parallel:
    """One rank's part of a model over a mesh, the result of `parallelize`.

    `model` and `optimizer` are this rank's part, for zs.save, zs.load, zs.report, zs.close and schedulers. If the rank has
    several stages they are the first one's; `models` and `optimizers` list all. `traffic` counts the bytes that each axis sends
    in a step.
    """

    def __init__(
        self, mesh: DeviceMesh, pairs: Sequence[tuple[nn.Module, torch.optim.Optimizer | None]], micro_batches: int, schedule: str,
        loss: Score | None, context: Callable[[], contextlib.AbstractContextManager],
        coefficient: float, takes: Collection[str],
    ) -> None:  # fmt: skip
        """coefficient: of the model's router's loss. takes: names of the arguments of the whole model's forward."""
        self.mesh, self.micro_batches, self._context = mesh, micro_batches, context
        self.models, self.optimizers = [module for module, _ in pairs], [each for _, each in pairs if each is not None]
        self._coefficient, self._takes, self.sequence = coefficient, takes, sequence_of(self.models[0])
        self._given = loss is not None
        self.loss = self._of_own_tokens(loss or next_token_loss)
        self.pipeline: Pipeline | None = None
        if "pp" in (mesh.mesh_dim_names or ()) and mesh["pp"].size() > 1:
            self.pipeline = Pipeline(self.models, mesh["pp"], micro_batches=micro_batches, loss=self.loss, schedule=schedule)
        self.traffic = Traffic(mesh, self.models, self.pipeline)

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if not self.optimizers:
            raise ConfigError("zs.parallelize was given no optimizer: optimizer=functools.partial(torch.optim.AdamW, lr=...).")
        return self.optimizers[0]

    def step(self, inputs: Tensor, targets: Tensor, **more: Any) -> Tensor:
        """Run forward, backward and the optimizer's step (collective). Return the mean loss of this rank's batch.

        inputs, targets: (rows, ...), different along dp and ep and the same along pp, sp and tp; rows is a multiple of
        micro_batches. Along sp they are whole sequences, (rows, tokens, ...), and each target stands for its own token: shift
        labels before. more: what else the model's forward takes by name, with as many rows (attention_mask, position_ids).
        """
        loss = self.backward(inputs, targets, **more)
        self.optimizer  # noqa: B018  # the property raises ConfigError without an optimizer
        for each in self.optimizers:
            each.step()
            each.zero_grad()
        return loss

    def backward(self, inputs: Tensor, targets: Tensor, **more: Any) -> Tensor:
        """Run forward and backward, without the optimizer's step, to clip or read gradients before it (collective)."""
        inputs, more = self._own(inputs, targets, more)
        with self._context(), self.traffic.step():
            if self.pipeline is not None:
                return self._over_sequences(self.pipeline.step(inputs, target=targets, **more))
            losses = []
            engine = engine_of(self.model)
            tier = engine.config.offload_gradient.tier
            # where gradients rest off the device each backward reduces: the device may have no memory for unsharded sums in fp32
            away = tier is Tier.DISK or (tier is Tier.HOST and engine.ranks.streams.separate_host)
            for number, (x, y, others) in enumerate(self._micro_batches(inputs, targets, more), start=1):
                held = number < self.micro_batches and not away
                with api.accumulate(self.model) if held else contextlib.nullcontext():
                    output = self.model(x, **others)
                    loss = whole(self.loss(logits_of(output), y))
                    if self._coefficient:
                        loss = loss + self._coefficient * router_loss.of_output(output)
                    (loss / self.micro_batches).backward()
                losses.append(loss.detach().float())
            return self._over_sequences(torch.stack(losses).mean())

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, **more: Any) -> Tensor:
        """Return the loss of a batch, without gradients (collective). Shapes as in `step`.

        With a `loss` given to parallelize, this is its mean over micro-batches, as in `step`. Without one, it is the sum, in
        nats, of the cross-entropies of all targets that are not -100, to compute a perplexity from. A router's loss does not count.
        """
        inputs, more = self._own(inputs, targets, more)
        score = self.loss if self._given else self._of_own_tokens(summed_loss, summed=True)
        share = 1 if self._given else self.micro_batches
        with self._context():
            if self.pipeline is None:
                batches = self._micro_batches(inputs, targets, more)
                found = [whole(score(logits_of(self.model(x, **others)), y)).float() for x, y, others in batches]
                return self._over_sequences(torch.stack(found).mean() * share)
            previous, self.pipeline.loss = self.pipeline.loss, score
            try:
                return self._over_sequences(self.pipeline.evaluate(inputs, target=targets, **more) * share)
            finally:
                self.pipeline.loss = previous

    def _micro_batches(
        self, inputs: Tensor, targets: Tensor, more: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        rows = {name: len(value) for name, value in {"inputs": inputs, "targets": targets, **more}.items()}
        if len({*rows.values()}) > 1 or len(inputs) % self.micro_batches or not len(inputs):
            nearest = max(round(len(inputs) / self.micro_batches), 1) * self.micro_batches
            raise ConfigError(
                f"a batch of {rows} rows in {self.micro_batches} micro-batches: expected one number of rows, a multiple of "
                f"micro_batches; the nearest is {nearest}."
            )
        parts = (value.chunk(self.micro_batches) for value in (inputs, targets, *more.values()))
        return ((x, y, dict(zip(more, others, strict=True))) for x, y, *others in zip(*parts, strict=True))

    # -- sequences of several ranks ----------------------------------------------------------------------------

    def _own(self, inputs: Tensor, targets: Tensor, more: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return this rank's tokens of whole sequences, and what else its forward gets; all of it without an axis sp (collective)."""
        sequence = self.sequence
        if sequence is None:
            return inputs, dict(more)
        tokens = inputs.shape[1] if inputs.ndim > 1 else 0
        if targets.shape[:2] != inputs.shape[:2] or not tokens or tokens % sequence.size:
            raise ConfigError(
                f"sp: inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: expected whole sequences (rows, tokens, ...) with a "
                f"target for each token, and tokens that the {sequence.size} ranks along sp divide. Pad them, with targets of {IGNORED}."
            )
        check_same({"inputs": inputs, "targets": targets, **more}, sequence.comm)
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        found = cut({name: inputs, **more}, sequence.rank, sequence.size, shift_labels=True)
        inputs, whole_sequences = found.pop(name), inputs
        return inputs, found | ({"sequences": whole_sequences} if "sequences" in self._takes else {})

    def _of_own_tokens(self, score: Score, summed: bool = False) -> Score:
        """Return a function of this rank's outputs and the targets of whole sequences, whose mean over the ranks along sp is `score`.

        score: a mean over targets that are not -100 or, if `summed`, their sum.
        """
        sequence = self.sequence
        if sequence is None:
            return score

        def scored(output: Tensor, targets: Tensor) -> Tensor:
            own = targets.chunk(sequence.size, 1)[sequence.rank]
            count = (own != IGNORED).sum()
            if self._given and not sequence.comm.imagined and not count:  # a mean over no targets would not be a number
                return output.sum() * 0
            share = 1 if summed else count / (targets != IGNORED).sum().clamp(min=1)
            return whole(score(output, own)) * (sequence.size * share)

        return scored

    def _over_sequences(self, loss: Tensor) -> Tensor:
        """Return the mean of a loss over the ranks along sp, which each have the share of their tokens (collective)."""
        if self.sequence is not None:
            dist.all_reduce(loss, group=self.mesh["sp"].get_group())
            loss = loss / self.sequence.size
        return loss

    def close(self) -> None:
        """Call zs.close for each of this rank's stages (collective)."""
        for module in self.models:
            api.close(module)

    def report(self) -> str:
        """Return a line for each axis with the bytes it sends in a step, and one for divided experts: how unevenly tokens came.

        For memory, see zs.report(run.model).
        """
        if not self.traffic.counted:
            return "what the axes send is counted in the second step"
        lines = [
            f"{axis}: {nbytes / 2**20:,.2f} MiB sent by this rank in a step" for axis, nbytes in self.traffic.counted.items()
        ]
        found = {name: value for module in self.models for name, value in expert_imbalance(module).items()}
        if found:
            worst = max(found, key=lambda name: found[name])
            lines.append(
                f"experts: the busiest rank computed {sum(found.values()) / len(found):.3f} times the mean of tokens; "
                f"{found[worst]:.3f} in {worst}"
            )
        return "\n".join(lines)

    @property
    def world_size(self) -> int:
        return engine_of(self.model).world.world_size
