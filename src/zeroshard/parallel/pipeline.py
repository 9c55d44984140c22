"""Pipeline: one step of a model whose stages are on different ranks, with the schedules of torch.distributed.pipelining.

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3 r r        1F1B and others: torch's schedule orders computation and messages
    rank 1      F0 B0 F1 B1 F2 B2 F3 B3 r r              r: the reduction over the data-parallel ranks of this stage

Each stage was given to zs.shard. Gradients of all micro-batches but the last accumulate on this rank, as inside zs.accumulate.
The last backward starts the reduction of each unit whose gradients are complete, and waits for no reduction, so that the
previous stage gets its gradients first. So gradients are reduced once per step, while the pipeline drains.

Schedules that split a backward (zero bubble) compute weight gradients apart, by autograd.grad, which the runtime's hooks on
parameters do not see: `_Stage` passes these gradients to `HeldGradients.add`.
"""

from __future__ import annotations

import datetime
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from ..activations import router_loss
from ..comm.backend_select import is_imagined
from ..comm.shared_memory import SharedComm
from ..comm.wrapped import WrappedComm
from ..diagnostics import judge
from ..engine.comm import DistComm
from ..errors import ConfigError, did_you_mean
from ..seam import ally, engine_of
from ..utils import torch_compat
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import is_distributed, stage_backward_weight
from .stages import Stage
from .tied import TiedParameters, exchange_objects

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on one rank
_PATIENCE_S, _PAUSE_S = 5.0, 0.05  # after a connection has broken: time to wait for the failed rank's message; time between polls
Loss = Callable[[Tensor, Any], Tensor]


def schedule_class(schedule: str) -> tuple[str, type]:
    """Return a schedule's name as in SCHEDULES, and its class in torch. Raises ConfigError for unknown names."""
    name = next((name for name in SCHEDULES if name.lower() == str(schedule).lower()), None)
    if name is None:
        raise ConfigError(f"schedule: expected one of {SCHEDULES}, got {schedule!r}.{did_you_mean(str(schedule), SCHEDULES)}")
    return name, get_schedule_class(name)


def stages_of(rank: int, ranks: int, per_rank: int, schedule: str = "1F1B") -> list[int]:
    """Return the numbers of the stages of one rank of a pipeline: (rank, rank + ranks, ...), or for V schedules (rank, 2 * ranks
    - 1 - rank).

    Raises:
        ConfigError: the schedule needs another number of stages on each rank.
    """
    name, cls = schedule_class(schedule)
    if issubclass(cls, PipelineScheduleSingle) and per_rank != 1:
        raise ConfigError(f"{per_rank} stages a rank with schedule {name}, which has one; Interleaved1F1B has several.")
    if name in _V_SHAPED and per_rank != 2:
        raise ConfigError(f"{per_rank} stages a rank with schedule {name}, which has two: the first half of them, then back.")
    if name in _V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(per_rank)]


class _Weight:
    """Proxy for a parameter in torch's stage_backward_weight, which sets the gradient as the proxy's `.grad`, not as p.grad."""

    requires_grad, grad_fn = True, None

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.grad: Tensor | None = None

    def view_as(self, _: object) -> Tensor:
        return self.param.view_as(self.param)  # torch finds the parameter's node in the graph through a view


class _Stage(PipelineStage):
    """torch's stage, with the backward of a sharded module. sent_nbytes: bytes of activations and gradients sent so far."""

    sent_nbytes = 0

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> tuple[tuple, list | None]:
        engine = engine_of(self.submod)
        whole = engine.gathers  # stage 3 releases parameters, so "input" runs the full backward
        if backward_type == "weight" and whole:
            return (), None
        if backward_type == "weight":
            weights = [_Weight(param) for param in self.submod.parameters() if param.requires_grad]
            stage_backward_weight(iter(weights), bwd_kwargs["param_groups"])
            engine.held_gradients.add((weight.param, weight.grad) for weight in weights if weight.grad is not None)
            return (), None
        with engine.held_gradients.summing(reduce=last_backward):
            if backward_type == "input" and whole:
                if bwd_kwargs["output_grads"] is None:  # the last stage: torch has put its loss into a tuple
                    bwd_kwargs = bwd_kwargs | {"stage_output": bwd_kwargs["stage_output"][0]}
                grads, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
                return grads, []
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # a StallError names the last noted tensor as what this rank waits for
        wanted = f"activations of micro-batch {fwd_chunk_id} from stage {self.stage_index - 1}"
        engine_of(self.submod).ranks.progress.note(f"pipeline stage {self.stage_index}: {wanted}")
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.sent_nbytes += sum(op.tensor.nbytes for op in ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent_nbytes += sum(op.tensor.nbytes for op in ops)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        wanted = f"gradients of micro-batch {bwd_chunk_id} from stage {self.stage_index + 1}"
        engine_of(self.submod).ranks.progress.note(f"pipeline stage {self.stage_index}: {wanted}")
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        """Return the result of torch's vote on whether all stages know their inputs' shapes: 1, yes, on an imagined rank."""
        found: Any = super()  # torch < 2.13 has no vote
        return types.SimpleNamespace(item=lambda: 1) if is_imagined() else found._warmup_backward_result(received_result)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Return the gradients for a previous stage on this rank. V schedules call this in an evaluation too: return () then."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Start the reductions after the step's last backward. No scaling: `_build` divides each loss by the micro-batches."""
        engine_of(self.submod).held_gradients.begin_reductions()


class _OldStage(_Stage):
    """The stage for torch < 2.13, which compares strides with the first batch's and expects a gradient of all that it receives."""

    def _nothing(self, *_: object) -> None:
        """Do nothing: `Pipeline._run` compares shapes and dtypes."""

    _validate_fwd_input: Any = _nothing
    _validate_fwd_outputs: Any = _nothing

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return torch's first messages without those to this rank itself (V schedules), which gloo can not send."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        training, self.has_backward = self.has_backward, False  # it lets integers (masks) require gradients, which raises
        result = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = training
        received: list[Any] = [] if self.is_first else [info for each in self.args_recv_info.values() for info in each]
        for info in received:
            info.buffer.requires_grad_(training and info.buffer.is_floating_point())
        return result

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:  # zeros for what has no gradient; the stage before skips those of integers
            given: tuple[Any, ...] = self.args_recv_info[bwd_chunk_id]
            grads = zip(self.bwd_cache[bwd_chunk_id], given, strict=False)
            self.bwd_cache[bwd_chunk_id] = tuple(torch.zeros_like(at.buffer) if grad is None else grad for grad, at in grads)
        return super().get_bwd_send_ops(bwd_chunk_id)


class Pipeline:
    """The stages of this rank with a schedule; `step` runs forward and backward of the whole model.

    own = zs.stages_of(mesh["pp"].get_local_rank(), mesh["pp"].size(), 1)
    (stage,) = zs.cut_stages(model, 2, own)
    stage, optimizer = zs.shard(stage, AdamW(stage.parameters()), mesh=mesh, stage=1)
    pipeline = zs.Pipeline(stage, mesh["pp"], micro_batches=8, loss=cross_entropy)
    for tokens, targets in loader:
        loss = pipeline.step(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self, stages: nn.Module | Sequence[nn.Module], pp: DeviceMesh | dist.ProcessGroup, *, micro_batches: int, loss: Loss,
        schedule: str = "1F1B",
    ) -> None:  # fmt: skip
        """Make a pipeline (collective over the ranks of the pipeline and of its data parallelism).

        Args:
            stages: this rank's stages in the order of `stages_of`, each sharded by zs.shard over its data-parallel ranks; made by
                `cut_stages`, or your own modules from one tensor (the first stage: from the inputs) to one tensor. ZeRO stage 3
                gathers each unit in every forward and backward, 2 * micro_batches times a step, unless `max_live_parameters`
                keeps it gathered in between; zero-bubble schedules do not split its backwards.
            pp: the mesh axis mesh["pp"], or a process group: the ranks of one pipeline.
            micro_batches: number of parts into which a batch is split along dimension 0, the same on all ranks.
            loss: (output of the last stage, target) -> mean loss of the micro-batch. `step` returns the mean over micro-batches.
            schedule: one of torch's: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.

        In fp16 stages exchange fp32 tensors, each scales gradients that enter it and unscales those that leave it, and all skip a
        step together, so their loss scales stay equal.

        Raises ConfigError, on all ranks: stages do not fit the schedule, or ranks have different numbers of micro-batches.
        """
        self.stages = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.group = pp.get_group() if isinstance(pp, DeviceMesh) else pp
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.micro_batches, self.loss = micro_batches, loss
        self.variant: object = None  # set by callers whose inputs stand for others: what distinguishes the shapes of these
        self.engines = [engine_of(stage) for stage in self.stages]
        self.device = self.engines[0].ranks.device
        self._agree(schedule)
        self.schedule, self._class = schedule_class(schedule)
        self.count = self.ranks * len(self.stages)
        all_ranks = {rank: stages_of(rank, self.ranks, len(self.stages), schedule) for rank in range(self.ranks)}
        self.rank_of = {stage: rank for rank, stages_of_rank in all_ranks.items() for stage in stages_of_rank}
        self.own = all_ranks[self.rank]
        self._built: dict[tuple, PipelineScheduleSingle | PipelineScheduleMulti] = {}  # by shapes of the inputs
        self._made: list[_Stage] = []
        timeout = datetime.timedelta(seconds=self.engines[0].config.stall_timeout_s)
        if not is_imagined():
            torch_compat.set_timeout(timeout, self.group)  # waits for another stage have the same timeout as all others
        self.tied = TiedParameters(self.stages, self.own, self.group, self.rank_of)
        ally(self.engines)  # all stages share one gradient norm and one decision to skip a step
        for engine in self.engines:
            if engine.gathers:
                times = 2 * self.micro_batches
                engine.note(
                    f"a pipeline at stage 3 gathers each unit {times} times a step; raise max_live_parameters to keep some gathered"
                )

    def _agree(self, schedule: str) -> None:
        """Raise ConfigError on all ranks of the pipeline and the data parallelism if anything is wrong on one (collective)."""
        wrong = self._wrong(schedule)
        mine = (wrong, str(schedule).lower(), self.micro_batches, len(self.stages))
        told = exchange_objects(mine, self.group)
        wrong = next((row[0] for row in told if row[0]), None)
        steps = exchange_objects(any(engine.optimizer is not None for engine in self.engines), self.group)
        if wrong is None and any(steps) and not all(steps):
            wrong = (
                f"the stages of rank {steps.index(False)} of the pipeline were sharded without an optimizer, others with one, but all stages "
                "step together. Give zs.shard an optimizer for every stage, also where all is frozen: AdamW(stage.parameters())."
            )
        if wrong is None and any(row != told[0] for row in told):
            wrong = (
                "ranks have built different pipelines: give all the same (schedule, micro_batches, number of stages), "
                f"got {[row[1:] for row in told]}."
            )
        payload = f"{wrong or ''}|{self.micro_batches}".encode()
        for engine in self.engines:
            everyone = [part.decode().rpartition("|") for part in engine.ranks.exchange(payload, "zs.Pipeline")]
            wrong = wrong or next((text for text, _, _ in everyone if text), None)
            counts = [int(number) for _, _, number in everyone]
            if len(set(counts)) > 1 and wrong is None:
                wrong = (
                    f"micro_batches: data-parallel ranks {engine.ranks.ranks} have {counts}: give all the same number, since each reduces "
                    "its gradients once a step."
                )
        wrong = next((text for text in exchange_objects(wrong, self.group) if text), None)
        if wrong is not None:
            raise ConfigError(wrong)

    def _wrong(self, schedule: str) -> str | None:
        try:
            own = stages_of(self.rank, self.ranks, len(self.stages), schedule)
        except ConfigError as error:
            return str(error)
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            return f"micro_batches: expected a whole number of at least 1, got {self.micro_batches!r}."
        if self.micro_batches < self.ranks * len(self.stages) and schedule.lower() != "gpipe":
            least = self.ranks * len(self.stages)
            return f"{self.micro_batches} micro-batches for {least} stages: {schedule} needs at least {least}. GPipe takes fewer."
        places = [getattr(stage, "pipeline_stage", None) for stage in self.stages]
        count = self.ranks * len(self.stages)
        if any(
            place is not None and (place.index, place.count) != (index, count) for place, index in zip(places, own, strict=True)
        ):
            given = [(place.index, place.count) for place in places if place is not None]
            return (
                f"rank {self.rank} of the pipeline runs stages {own} of {count} with schedule {schedule}: expected these, got "
                f"{given}."
            )
        for engine in self.engines if self.ranks > 1 else ():  # stages share the norm and the decision to skip a step
            if engine.optimizer is not None and engine.world is engine.ranks:
                return (
                    "a stage of a pipeline was sharded over its data-parallel ranks alone (comm=): it would know neither the norm of the other "
                    "stages nor that they skip a step. Give zs.shard(stage, optimizer, mesh=mesh) the whole mesh, with its axis pp."
                )
        return None

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self, *inputs: object, target: object = None, losses: list | None = None, **kwargs: object) -> Tensor:
        """Run forward and backward of a batch. Return the mean loss on every rank of the pipeline (collective).

        All ranks of a pipeline pass the same arguments: inputs (batch, ...), target (batch, ...), and keyword arguments for every
        stage's forward. losses: a list that `step` fills with each micro-batch's loss. Afterwards gradients are those of the mean
        loss over micro-batches and data-parallel ranks, as after one backward; call the optimizers' `step` next.
        """
        return self._run(True, inputs, target, losses, kwargs)

    @torch.no_grad()
    def evaluate(self, *inputs: object, target: object = None, losses: list | None = None, **kwargs: object) -> Tensor:
        """Run forward only, as `step` does. Return the mean loss on every rank of the pipeline (collective)."""
        return self._run(False, inputs, target, losses, kwargs)

    def _run(self, training: bool, inputs: tuple, target: object, losses: list | None, kwargs: dict) -> Tensor:
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in find_tensors((inputs, target, kwargs))}
        if len(sizes) != 1 or min(sizes) % self.micro_batches or min(sizes) == 0:
            nearest = max(round(min(sizes, default=1) / self.micro_batches), 1) * self.micro_batches
            raise ConfigError(
                f"a batch of {sorted(sizes)} rows (inputs, target, keyword arguments) in {self.micro_batches} micro-batches: expected one "
                f"number of rows, a multiple of micro_batches; the nearest is {nearest}. Every rank of the pipeline gives inputs and target."
            )
        key: tuple = (training, self.variant, *((tensor.shape, tensor.dtype) for tensor in find_tensors((inputs, kwargs))))
        if key not in self._built:  # new shapes: do all ranks of the pipeline have them?
            told = exchange_objects(key, self.group)
            if any(other != key for other in told):
                shapes = [[(*shape,) for shape, _ in other[2:]] for other in told]
                raise ConfigError(
                    "ranks of a pipeline have given different batches, or one trains and another evaluates: give all the same batch and make "
                    f"the same call; shapes of the inputs by rank: {shapes}."
                )
            self._built[key] = self._build(training, inputs, kwargs)
        built = self._built[key]
        found: list[Tensor] = []
        run = built.step if training else built.eval
        if training:
            self.tied.set_aside()  # the sum over copies must not add gradients of earlier steps twice
        # torch's schedule takes inputs at the first stage, targets at the last
        has_last = self.count - 1 in self.own
        given, wanted = inputs if 0 in self.own else (), target if has_last else None
        try:
            run(*given, target=wanted, losses=found, return_outputs=False, **kwargs)
        except RuntimeError as error:
            self._explain(error)
            raise
        if training:
            for engine in self.engines:
                engine.flush()
            self.tied.add()
        means = torch.zeros(self.micro_batches, dtype=torch.float32, device=self.device)
        if has_last:
            means.copy_(torch.stack([loss.detach().float() for loss in found]))
        dist.broadcast(means, dist.get_global_rank(self.group, self.rank_of[self.count - 1]), group=self.group)
        if losses is not None:
            losses[:] = (means * self.micro_batches).unbind()  # undo the division in `_build`
        return sum(means.unbind(), torch.zeros((), device=self.device))

    def _explain(self, error: RuntimeError) -> None:
        """Raise PeerFailed, with the failed rank's error, if `error` is a broken connection to a stage whose rank has failed."""
        world, deadline = self.engines[0].world, time.monotonic() + _PATIENCE_S
        world = world.comm if isinstance(world, WrappedComm) else world
        if not any(word in str(error).lower() for word in ("connection", "gloo", "nccl", "timed out")):
            return
        late = "timed out" in str(error).lower()  # the rank may be slow, not failed: no message is to be expected
        while isinstance(world, SharedComm) and not late and time.monotonic() < deadline:
            world.serve()  # raises PeerFailed
            time.sleep(_PAUSE_S)
        failure = judge(world, "a step of a pipeline", error) if isinstance(world, (DistComm, SharedComm)) else None
        if failure is not None:
            world.fail(failure)
            raise failure.raised("a step of a pipeline") from error

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent to other stages so far: activations, their gradients, gradients of tied parameters."""
        return sum(stage.sent_nbytes for stage in self._made) + self.tied.sent_nbytes

    # -- torch's schedule ------------------------------------------------------------------------------------

    def _build(self, training: bool, inputs: tuple, kwargs: dict) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return a schedule for batches of this shape; torch's schedules allocate receive buffers for one shape."""
        rows = find_tensors(inputs)[0].shape[0] // self.micro_batches
        first = {key: value[:rows] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        shapes = self._shapes(tuple(x[:rows] for x in inputs), first)
        stages = []
        for module, index in zip(self.stages, self.own, strict=True):
            given, made = (
                tuple(
                    torch.empty(shape, dtype=dtype, device="meta", requires_grad=training and at > 0 and dtype.is_floating_point)
                    for shape, dtype in shapes[at]
                )
                for at in (index, index + 1)
            )
            kind = _Stage if torch.__version__ >= "2.13" else _OldStage
            stages.append(kind(module, index, self.count, self.device, input_args=given, output_args=made, group=self.group))
        self._made += stages
        one = issubclass(self._class, PipelineScheduleSingle)
        balanced = getattr(getattr(self.stages[-1], "pipeline_stage", None), "experts", 0)

        def loss(output: Any, target: object) -> Tensor:
            found = whole(self.loss(output[0] if balanced else output, target))
            if balanced and training:  # `evaluate` returns the loss of the output alone
                found = found + router_loss.coefficient(self.stages[-1]) * output[1]
            return found / self.micro_batches

        return self._class(stages[0] if one else stages, self.micro_batches, loss_fn=loss, scale_grads=False)

    @torch.no_grad()
    def _shapes(self, inputs: tuple, kwargs: dict) -> list[list[tuple[torch.Size, torch.dtype]]]:
        """Return shapes and dtypes of each stage's inputs and the last stage's outputs (collective).

        Each stage runs one forward on zeros of the shapes that the stage before it has broadcast.
        """
        shapes = [[(x.shape, x.dtype) for x in inputs]]
        if is_imagined():  # without peers: from the hidden states' shape that `cut_stages` recorded
            place = cast(Stage, self.stages[0]).pipeline_stage
            hidden = torch.Size((*inputs[0].shape[: place.leading], *place.width))
            sums = [(torch.Size([2 * place.experts + 1]), torch.float64)] * bool(place.experts)
            return shapes + [[(hidden, self.engines[0].slices("value")[0].dtype), *sums]] * self.count
        for number in range(self.count):
            told: list[list | None] = [None]
            if number in self.own:
                module = self.stages[self.own.index(number)]
                given = inputs if number == 0 else tuple(torch.zeros(s, dtype=d, device=self.device) for s, d in shapes[-1])
                training = [part for part in module.modules() if part.training]
                module.eval()  # so that running statistics and dropout are not used
                try:
                    output = module(*given, **kwargs)
                finally:
                    for part in training:
                        part.training = True
                told = [[(x.shape, x.dtype) for x in (output if isinstance(output, tuple) else (output,))]]
            source = dist.get_global_rank(self.group, self.rank_of[number])
            dist.broadcast_object_list(told, source, group=self.group)
            shapes.append(told[0] or [])
        return shapes


def whole(loss: Tensor) -> Tensor:
    """Return the whole value of a loss, which loss_parallel makes a DTensor."""
    return loss.full_tensor() if is_distributed(loss) else loss
