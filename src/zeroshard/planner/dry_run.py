"""The dry run: the runtime itself on imagined ranks and fake tensors, for two steps. What it holds and does is the plan.

    model on meta --zs.shard or zs.parallelize--> two steps of one rank --recorder--> Plan
                     over FakeComm                 first: states are made, the order of units is learnt
                                                   second: as all that follow

Sizes, collectives, copies and the order of all things are those of a real run; numbers there are none. What depends on numbers
(routing of experts, tokens that are dropped) is not seen.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from .. import api
from ..activation_checkpointing.checkpoint import attached_to, checkpoint_activations
from ..activation_checkpointing.storage import CHECKPOINTS
from ..comm.fake import FakeComm, Imagination, imagination
from ..config import Config, Tier
from ..errors import ConfigError
from ..measure.report import report
from ..parallel.parallelize import next_token_loss, parallelize
from ..testing import imagined_mesh
from ..zero.runtime import Runtime, runtime_of
from .plan import ACTIVATIONS, Phase, Plan
from .recorder import Groups, Operators, Recorder
from .trace import Resource, Trace

MODEL_AXES = ("pp", "tp")
Loss = Callable[[nn.Module, Any], Tensor]


def plan(
    model_fn: Callable[[], nn.Module], *, ranks: int | None = None, axes: Mapping[str, int] | None = None, batch: Any = None,
    loss: Loss | None = None, optimizer: Callable | None = torch.optim.AdamW, micro_batches: int = 1, rank: int = 0,
    hold: bool = False, node_size: int | None = None, separate: bool = True, checkpointing: bool | Mapping[str, Any] = False, name: str = "",
    config: Config | None = None, parallel: Mapping[str, Any] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """What one rank of a run would hold and do: the runtime itself, on imagined ranks (not collective; no memory is taken).

    Args:
        model_fn: makes the model; called on the meta device.
        ranks: of data parallelism; or axes: ranks along "pp", "dp" and "tp". rank: which of them is looked at.
        batch: what a micro-batch reads: (rows, seq) of tokens, or a function that makes it.
        loss: (model, what batch makes) -> loss; None: cross-entropy of the next token of a model of tokens -> logits.
        micro_batches: forwards and backwards of a step. hold: with zs.accumulate around all but the last; else each is reduced, as
            `zeroshard train` does. Over pp or tp they are always held.
        node_size: ranks of a node; None: all are on one. separate: the device has a memory of its own (a GPU); False: ranks on CPUs
            that share memory within a node.
        checkpointing: activations of blocks are checkpointed: True, or options of zs.checkpoint_activations, of which partition=True
            is "over the ranks of tp".
        config, options: of zs.shard. parallel: further options of zs.parallelize (schedule, sequence_parallel, ...).

    Raises ConfigError for what can not be divided, and for a model that can not be built or run without numbers.
    """
    axes = _axes(ranks, axes)
    if not _whole(rank, 0) or rank >= _product(axes):
        raise ConfigError(f"rank: expected one of 0 to {_product(axes) - 1}, got {rank!r}.")
    _check(model_fn, batch, loss, optimizer, micro_batches, node_size)
    config = Config.build(config, **options)
    recorder = Recorder()
    kind = Imagination(node_size, separate, not separate and node_size is None, recorder)
    token = imagination.set(kind)
    try:
        with _built(model_fn) as model:
            run = _Run(model, axes, rank, config, optimizer, micro_batches, dict(parallel or {}), recorder, loss, node_size or _product(axes))
            run.hold = hold
            return run.plan(batch, checkpointing, name or type(model).__name__, separate)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"the model asks for numbers ({error.func}), and a plan has none: give zs.plan a model whose shapes do not depend on values, e.g. "
            "with experts of a fixed capacity, and without asserts on tensors."
        ) from error
    finally:
        imagination.reset(token)


def stages(model_fn: Callable[[], nn.Module], axes: Mapping[str, int], *, every: bool = False, **options: Any) -> list[Plan]:
    """Plans of ranks of the first, a middle and the last stage of a pipeline (every: of all of them), in their order. Options as of `plan`.

    The first stage holds the activations of most micro-batches, the last one logits.
    """
    sizes = _axes(None, axes)
    numbers = range(sizes["pp"]) if every else sorted({0, sizes["pp"] // 2, sizes["pp"] - 1})
    place = sizes["dp"] * sizes["tp"]
    return [plan(model_fn, axes=sizes, rank=number * place, **options) for number in numbers]


def _product(axes: Mapping[str, int]) -> int:
    size = 1
    for each in axes.values():
        size *= each
    return size


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(model_fn: object, batch: object, loss: object, optimizer: object, micro_batches: object, node_size: object) -> None:
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ConfigError(f"zs.plan: expected a function that makes the model (zs.plan(lambda: Model(...), ...)), got {type(model_fn).__name__}.")
    shaped = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(_whole(size, 1) for size in batch)
    if not shaped and not callable(batch):
        raise ConfigError(f"batch: expected (rows, seq), whole numbers of at least 1, or a function that makes a batch, got {batch!r}.")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            raise ConfigError(f"{name}: expected a function, got {value!r}.")
    for name, value in (("micro_batches", micro_batches), ("node_size", 1 if node_size is None else node_size)):
        if not _whole(value, 1):
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}.")


def _axes(ranks: int | None, axes: Mapping[str, int] | None) -> dict[str, int]:
    if (ranks is None) == (axes is None):
        raise ConfigError('zs.plan: expected ranks=N, or axes={"pp": .., "dp": .., "tp": ..}; give one of them.')
    if axes is not None and not isinstance(axes, Mapping):
        raise ConfigError(f'axes: expected ranks by axis, {{"pp": .., "dp": .., "tp": ..}}, got {axes!r}.')
    found = dict(axes) if axes is not None else {"dp": ranks}
    for axis, size in found.items():
        if axis not in (*MODEL_AXES, "dp") or not _whole(size, 1):
            raise ConfigError(f'axes: expected whole numbers of at least 1 for "pp", "dp" and "tp", got {axis!r}: {size!r}.')
    return {axis: found.get(axis, 1) for axis in ("pp", "dp", "tp")}


@contextlib.contextmanager
def _built(model_fn: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    try:
        with torch.device("meta"):
            model = model_fn()
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"the model can not be built on the meta device: {error}. Values that its modules read while they are made (numbers, files) "
            "must not come from parameters; make them with device='cpu', or in a function that is called later."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"zs.plan: expected a function that returns a torch.nn.Module, got {type(model).__name__}.")
    yield _without_memory(model)


def _without_memory(model: nn.Module) -> nn.Module:
    """The model, or where it is one that was built before, a copy without values: the plan changes what it is given."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(param.is_meta for param in model.parameters()):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class _Run:
    """Two steps of one rank."""

    def __init__(
        self, model: nn.Module, axes: dict[str, int], rank: int, config: Config, optimizer: Callable | None, micro_batches: int,
        parallel: dict[str, Any], recorder: Recorder, loss: Loss | None, node_size: int,
    ) -> None:  # fmt: skip
        self.model, self.axes, self.rank, self.config, self.make_optimizer = model, axes, rank, config, optimizer
        self.micro_batches, self.parallel, self.recorder, self.loss = micro_batches, parallel, recorder, loss
        self.node_size = node_size
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.hold = False
        self.sent: dict[str, int] = {}

    def plan(self, batch: Any, checkpointing: bool | Mapping[str, Any], name: str, separate: bool) -> Plan:
        meshed = any(self.axes[axis] > 1 for axis in MODEL_AXES)
        if meshed and self.loss is not None:
            raise ConfigError("loss: over axes pp and tp the model is one of tokens -> logits, and parallel={'loss': ...} compares them.")
        with self._world(meshed) as mesh:
            step, runtimes = self._meshed(mesh) if meshed else self._plain()
            if checkpointing:
                for runtime in runtimes:
                    options = {} if checkpointing is True else dict(checkpointing)
                    if options.get("partition") is True:  # over the ranks of tp, which compute with the same activations
                        options["partition"] = mesh["tp"] if mesh is not None and self.axes["tp"] > 1 else None
                    checkpoint_activations(runtime.model, **options)
                    self.recorder.watch(attached_to(runtime.model).store.ledger)
            self._train(step, runtimes, batch, mesh)
            text = report(runtimes[0].model)
            tokens = self._tokens
        recorder = self.recorder
        recorder.trace.model_flops, recorder.trace.tokens = 3 * recorder.forward_flops, tokens
        names = {"first step": ("first step",), "forward": ("forward",), "backward": ("backward",), "step": ("step",), "load": ("load",)}
        phases = tuple(
            Phase(phase, {tier: self._fullest(phase, tier) for tier in Tier if self._fullest(phase, tier)}) for phase in names
        )
        return Plan(
            name, self.rank, self.axes, self.config, self.micro_batches, tokens, self.num_parameters, separate, phases,
            tuple(recorder.moments), recorder.trace, text, self.sent, self.activations,
        )  # fmt: skip

    def _fullest(self, phase: str, tier: Tier) -> dict[str, int]:
        return {name: nbytes for name, nbytes in self.recorder.fullest.get((phase, tier), {}).items() if name != "total" and nbytes}

    @contextlib.contextmanager
    def _world(self, meshed: bool) -> Iterator[Any]:
        if meshed:
            with imagined_mesh(self.axes, self.rank) as mesh:
                yield mesh
        else:
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield None

    def _plain(self) -> tuple[Callable[[Any], None], list[Runtime]]:
        optimizer = None if self.make_optimizer is None else self.make_optimizer(self.model.parameters())
        model, optimizer = api.shard(self.model, optimizer, config=self.config, comm=FakeComm(self.rank, self.axes["dp"]))
        loss = self.loss or _next_token

        def step(batches: list[Any]) -> None:
            for number, each in enumerate(batches):
                held = self.hold and number + 1 < len(batches)
                with api.accumulate(model) if held else contextlib.nullcontext():
                    (loss(model, each) / len(batches)).backward()
            self._computed()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

        return step, [runtime_of(model)]

    def _meshed(self, mesh: Any) -> tuple[Callable[[Any], None], list[Runtime]]:
        run = parallelize(
            self.model, mesh, optimizer=self.make_optimizer, micro_batches=self.micro_batches, config=self.config, **self.parallel
        )

        def step(batches: list[Any]) -> None:
            tokens = torch.cat(batches)
            run.backward(tokens, tokens)
            self._computed()
            for each in run.optimizers:
                each.step()
                each.zero_grad()
            self.sent = {axis: round(nbytes) for axis, nbytes in run.traffic.counted.items()}

        return step, [runtime_of(each) for each in run.models]

    def _computed(self) -> None:
        """Forward and backward are over."""
        self.recorder.at("", False)
        if self.recorder.phase == "forward":
            self.recorder.enter("step")

    def _train(self, step: Callable[[Any], None], runtimes: list[Runtime], batch: Any, mesh: Any) -> None:
        recorder = self.recorder
        for runtime in runtimes:
            recorder.watch(runtime.ledger)
            recorder.fullest["load", Tier.DEVICE] = {**runtime.ledger.peak, "total": runtime.ledger.total_peak}
        handles = [handle for runtime in runtimes for handle in _follow(runtime, recorder)]
        operators = Operators(recorder, Groups() if mesh is None else self._groups(mesh))
        with operators:
            for number, phase in enumerate(("first step", "forward")):
                recorder.enter(phase)
                if number == 1:
                    operators.begin(Trace(rank=self.rank, axes=self.axes, node_size=self.node_size))
                    before = [dict((kind, t.nbytes) for kind, t in runtime.ledger.traffic.items()) for runtime in runtimes]
                batches = [_make(batch) for _ in range(self.micro_batches)]
                self._tokens = sum(each.numel() for each in batches if isinstance(each, Tensor))
                step(batches)
                del batches
                self._settle()
        recorder.flush()
        if mesh is None:
            now = sum(t.nbytes for runtime in runtimes for t in runtime.ledger.traffic.values())
            self.sent = {"dp": now - sum(sum(each.values()) for each in before)}
        for handle in handles:
            handle.remove()
        self.activations = _kept(recorder)

    def _settle(self) -> None:
        """After a step: states that it made are in the ledger."""
        recorder = self.recorder
        recorder.flush()
        if recorder.phase == "first step":
            recorder.alive_nbytes = 0

    def _groups(self, mesh: Any) -> Groups:
        def link(axis: str) -> Resource:
            nodes = {rank // self.node_size for rank in torch.distributed.get_process_group_ranks(mesh[axis].get_group())}
            return Resource.BETWEEN if len(nodes) > 1 else Resource.INSIDE

        axes = {mesh["tp"].get_group().group_name: ("tp", self.axes["tp"], link("tp"))}
        return Groups(axes, mesh["pp"].get_local_rank(), link("pp"))


def _make(batch: Any) -> Any:
    if callable(batch):
        return batch()
    rows, seq = batch
    return torch.zeros(rows, seq, dtype=torch.long)


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
    return next_token_loss(logits, tokens)


def _follow(runtime: Runtime, recorder: Recorder) -> Iterator[Any]:
    """Tell the recorder which unit the rank is in: forward by modules, backward by the gradients of their outputs."""
    for unit in runtime.units:
        for module in unit.modules:
            yield module.register_forward_pre_hook(_entered(unit.name, recorder), prepend=True)
            yield module.register_forward_hook(_left(unit.name, recorder), always_call=False)


def _entered(name: str, recorder: Recorder) -> Callable:
    def hook(module: nn.Module, args: Any) -> None:
        recorder.at(name, torch._C._current_graph_task_id() != -1)  # a repeated forward is a part of backward

    return hook


def _left(name: str, recorder: Recorder) -> Callable:
    def begins(grad: Tensor) -> None:
        recorder.at(name, True)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(begins)

    return hook


def _kept(recorder: Recorder) -> dict[str, int]:
    """Bytes that units keep for backward of a micro-batch: what forward has added from one to the next."""
    kept: dict[str, int] = {}
    before = 0
    for moment in recorder.moments:
        if moment.phase == "backward" or (len(kept) > 2 and moment.unit == next(iter(kept))):
            break  # a second micro-batch
        now = moment.held.get(ACTIVATIONS, 0) + moment.held.get(CHECKPOINTS, 0)
        kept[moment.unit] = kept.get(moment.unit, 0) + now - before
        before = now
    return kept
