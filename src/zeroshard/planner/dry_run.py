"""The dry run: two steps of the runtime itself, on an imagined rank and fake tensors. The plan is the record of what it held and did.

    model on meta --zs.shard or zs.parallelize--> two steps of one rank --recorder--> Plan
                     over FakeComm                 first: makes states, records the order of units
                                                   second: is as all further steps

Sizes, collectives, copies and their order are those of a real run, but tensors have no values: a plan does not contain what depends
on values, as the routing of experts and dropped tokens.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..activations.storage import CHECKPOINTS
from ..activations.token_tiles import computes_loss_in_tiles, tile_loss, tile_mlps
from ..activations.transformers_attention import find_packed
from ..activations.ulysses import sequence_of
from ..checkpoint.file_writer import BUFFER_NBYTES, ROTATING
from ..comm.fake import FakeComm, Imagination, imagination
from ..config import Config, Tier
from ..data.sequence import cut
from ..errors import ConfigError, ZeroshardError, did_you_mean
from ..parallel.parallelize import next_token_loss
from ..public import accumulate, checkpoint_activations, close, parallelize, report, save, shard
from ..seam import engine_of, listener
from ..testing import imagined_mesh
from ..utils import torch_compat
from ..utils.axes import DP, EP, PLANNED, PP, SP, TP, cuts_model, planned_sizes
from ..utils.option_names import TILES
from ..utils.setting import setting
from ..utils.torch_compat import FakeTensor, PlanMode
from ..utils.transformers_compat import answer_for_packed, is_pretrained
from .faults import NO_NUMBERS, first_line, told, where
from .operators import Groups, Operators
from .plan import ACTIVATIONS, KEPT, PHASES, Moment, Phase, Plan
from .recorder import Recorder
from .simulator.hardware import Hardware
from .simulator.trace import Resource, Trace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ..config import ShardOptions

MOST_RANKS = 1 << 20  # lists of ranks are kept, some of them for each unit of the model
Loss = Callable[[nn.Module, Any], Tensor]
Step = Callable[[list[Any]], None]  # of the micro-batches
_FIXED_SHAPES = "give zs.plan a model whose shapes do not depend on values, e.g. with experts of a fixed capacity, and without asserts on tensors."
_SAME_SIZES = (
    "plan with another optimizer whose states have the same sizes (two as large as the parameters: AdamW; one: SGD with momentum), or with "
    "optimizer=None, and add its states by hand."
)


def plan(
    model_fn: Callable[[], nn.Module], *, ranks: int | None = None, axes: Mapping[str, int] | None = None, batch: Any = None,
    loss: Loss | None = None, optimizer: Callable | None = torch.optim.AdamW, micro_batches: int = 1, rank: int = 0,
    hold: bool = False, node_size: int | None = None, separate: bool | None = None, checkpointing: bool | Mapping[str, Any] = False,
    tiles: Mapping[str, int] | None = None, name: str = "", hardware: str | Hardware | None = None, config: Config | None = None, parallel: Mapping[str, Any] | None = None,
    whole: bool = False, **options: Unpack[ShardOptions],
) -> Plan:  # fmt: skip
    """Find out what one rank of a run would hold and do, by running the runtime itself on imagined ranks (not collective; takes
    no memory).

    Args:
        model_fn: a function that makes the model; it is called on the meta device.
        ranks: number of data-parallel ranks.
        axes: number of ranks along "pp", "dp", "ep", "sp" and "tp", in place of `ranks`. Along ep tokens are thought to be evenly
            spread over the experts; along sp a rank computes its part of the tokens of `batch`.
        rank: the rank that is planned.
        batch: the input of a micro-batch: (rows, seq) of tokens, or a function that makes it.
        loss: a function (model, micro-batch) -> loss. None: cross-entropy of the next token, for a model of tokens -> logits.
        micro_batches: number of forwards and backwards in a step.
        hold: run all micro-batches but the last under zs.accumulate. Otherwise each is reduced, as `zeroshard train` does. Over
            pp or tp they are always held.
        hardware: what the plan is judged by: a name ("a100-80gb", see simulator/hardware.toml), the path of a .toml, or a
            Hardware.
        node_size: number of ranks on a node; None: the hardware's devices of a node, or without hardware all ranks.
        separate: whether the device has a memory of its own (a GPU); False: ranks on CPUs, which share memory within a node.
            None: as the hardware says, without hardware True.
        checkpointing: whether blocks checkpoint their activations: True, or options of zs.checkpoint_activations, of which
            partition=True means over the ranks of tp.
        tiles: "mlp_tokens" and "loss_tokens", the tokens that MLPs and the loss compute at a time, as in zs.long_context; without
            axes that cut the model.
        whole: each rank makes the model with all its values before it is sharded. Otherwise it is made on the meta device, or
            under zs.init.
        config, options: as for zs.shard.
        parallel: further options of zs.parallelize (schedule, sequence_parallel, ...).

    Raises:
        ConfigError: an argument is wrong, or the model cannot be divided so, or cannot be built or run without values.
    """
    axes = checked_axes(ranks, axes)
    total = math.prod(axes.values())
    if not _whole(rank, 0) or rank >= total:
        raise ConfigError(f"rank: expected one of 0 to {total - 1}, got {rank!r}.")
    if isinstance(hardware, str):
        hardware = Hardware.named(hardware)
    if hardware is not None:
        separate = hardware.separate if separate is None else separate
        node_size = hardware.devices_per_node if node_size is None and total > hardware.devices_per_node else node_size
    separate = True if separate is None else separate
    _check(model_fn, batch, loss, optimizer, micro_batches, node_size, hold=hold, separate=separate, whole=whole)
    config = Config.build(config, **options)
    recorder = Recorder(separate)
    one_host = not separate and (node_size or total) >= total
    kind = Imagination(node_size, separate, one_host, recorder)
    try:
        # a plan is of training, even if the caller is under torch.no_grad() or torch.inference_mode()
        with setting(imagination, kind), torch.inference_mode(False), torch.enable_grad():
            _check_options(axes, parallel or {}, checkpointing, tiles or {})
            model = _built(model_fn)
            takes = [inspect.signature(type(each).forward).parameters for each in model.modules() if is_pretrained(each)]
            if any("position_ids" in names for names in takes):  # in a run they read that the positions are those of one sequence
                answer_for_packed(find_packed, f"a plan of {type(model).__name__}")
            run = _Run(
                model, axes, rank, config, optimizer, micro_batches, recorder, node_size or total, loss, parallel or {}, hold,
                model_fn if whole else None, tiles=tiles or {},
            )  # fmt: skip
            return run.plan(batch, checkpointing, name or type(model).__name__, separate, hardware)
    except NO_NUMBERS as error:  # while the model is made, or moved
        raise ConfigError(f"the model reads values of tensors ({error.func}), and a plan has none: {_FIXED_SHAPES}") from error


def _check_options(
    axes: Mapping[str, int], parallel: Mapping[str, Any], checkpointing: bool | Mapping[str, Any], tiles: Mapping[str, int]
) -> None:
    """Refuse options that are unknown or would have no effect."""
    _check_names("parallel", parallel, parallelize, ("model", "mesh", "optimizer", "micro_batches", "config", "options"))
    _check_names(
        "checkpointing", {} if isinstance(checkpointing, bool) else checkpointing, checkpoint_activations, ("model", "off")
    )
    for name, tokens in tiles.items():
        if name not in TILES or not _whole(tokens, 1):
            raise ConfigError(f"tiles: expected whole numbers of at least 1 for {' and '.join(TILES)}, got {name!r}: {tokens!r}.")
    if tiles and cuts_model(axes):
        raise ConfigError(f"tiles: {', '.join(tiles)} are of zs.long_context, for axes dp and sp; got {dict(axes)}.")
    if parallel and not cuts_model(axes):
        raise ConfigError(f"parallel: {', '.join(parallel)} are options of zs.parallelize, for axes pp and tp; got {dict(axes)}.")
    if isinstance(checkpointing, Mapping) and checkpointing.get("partition") is True and axes[TP] == 1:
        raise ConfigError(
            f'checkpointing: "partition": True needs two or more ranks of tp, got the axes {dict(axes)}. Leave it out.'
        )


def _check_names(what: str, given: object, verb: Callable, apart: tuple[str, ...]) -> None:
    """Refuse a name in `given` that is no parameter of `verb`, a function of zs, and those in `apart`, which `plan` passes itself."""
    known = [name for name in inspect.signature(verb).parameters if name not in apart]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{what}: expected {'True, False or ' * (what == 'checkpointing')}options of zs.{verb.__name__} by name, got {given!r}."
        )
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{what}: expected options of zs.{verb.__name__}, {', '.join(known)}; got {name!r}.{did_you_mean(name, known)}"
            )


def observe(
    model_fn: Callable[[], nn.Module], *, ranks: int, rank: int, batch: object, loss: Loss | None = None,
    optimizer: Callable | None = torch.optim.AdamW, micro_batches: int = 1, hold: bool = False, separate: bool = False, whole: bool = False,
    checkpointing: bool | Mapping[str, Any] = False, name: str = "", config: Config | None = None, **options: Unpack[ShardOptions],
) -> Plan:  # fmt: skip
    """Run two steps on real ranks and tensors, look at each operator, and return the plan of what they did (collective).

    Arguments as of `plan`; the ranks are those of the process group, or threads. Tests require that both return the same numbers.
    """
    with torch.device("meta"):
        model = model_fn()
    config = Config.build(config, **options)
    run = _Run(
        model, checked_axes(ranks, None), rank, config, optimizer, micro_batches, Recorder(separate), ranks, loss, {}, hold,
        model_fn if whole else None, real=True,
    )  # fmt: skip
    found = run.plan(batch, checkpointing, name or type(model).__name__, separate)
    close(run.model, restore=False)
    return found


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(
    model_fn: object, batch: object, loss: object, optimizer: object, micro_batches: object, node_size: object, **switches: object
) -> None:
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        raise ConfigError(
            f"zs.plan: expected a function that makes the model (zs.plan(lambda: Model(...), ...)), got {type(model_fn).__name__}."
        )
    shaped = isinstance(batch, (tuple, list)) and len(batch) == 2 and all(_whole(size, 1) for size in batch)
    if not shaped and not callable(batch):
        raise ConfigError(
            f"batch: expected (rows, seq), whole numbers of at least 1, or a function that makes a batch, got {batch!r}."
        )
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            raise ConfigError(f"{name}: expected a function, got {value!r}.")
    for name, value in (("micro_batches", micro_batches), ("node_size", 1 if node_size is None else node_size)):
        if not _whole(value, 1):
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: expected True or False, got {value!r}.")


def checked_axes(ranks: int | None, axes: Mapping[str, int] | None) -> dict[str, int]:
    """Return the number of ranks along each axis that plans have. Raises ConfigError."""
    if (ranks is None) == (axes is None):
        raise ConfigError('zs.plan: expected ranks=N, or axes={"pp": .., "dp": .., "tp": ..}; give one of them.')
    if axes is not None and not isinstance(axes, Mapping):
        raise ConfigError(f'axes: expected ranks by axis, {{"pp": .., "dp": .., "tp": ..}}, got {axes!r}.')
    found: dict[str, Any] = dict(axes) if axes is not None else {DP: ranks}
    for axis, size in found.items():
        if axis not in (*PLANNED, EP, SP) or not _whole(size, 1):
            raise ConfigError(
                f'axes: expected whole numbers of at least 1 for "pp", "dp", "ep", "sp" and "tp", got {axis!r}: {size!r}.'
            )
    if (total := math.prod(found.values())) > MOST_RANKS:
        raise ConfigError(f"ranks: expected at most {MOST_RANKS:,}, got {total:,}; plan for fewer ranks.")
    sizes = planned_sizes(found) | {axis: found[axis] for axis in (EP, SP) if found.get(axis, 1) > 1}
    return {axis: sizes[axis] for axis in (PP, DP, EP, SP, TP) if axis in sizes}  # outermost first, as a mesh has them


def _built(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Return the model on the meta device. Raises ConfigError if it can not be made there."""
    try:
        with torch.device("meta"):
            model = model_fn()
    except ZeroshardError:
        raise
    except Exception as error:
        at = where(error) and f"{where(error)}: "
        raise ConfigError(
            f"the model can not be built on the meta device: {at}{first_line(error)}. Values that its modules read while they are made "
            "(numbers, files) must not come from parameters; make them with device='cpu', or in a function that is called later."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"zs.plan: expected a function that returns a torch.nn.Module, got {type(model).__name__}.")
    if not all(param.is_meta for param in model.parameters()):  # the function returned a model built before: plan on a copy
        memo: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        model = copy.deepcopy(model, memo)
    return model


@dataclass
class _Run:
    """Two steps of one rank. make_model: function that makes the model with its values (with `whole`). real: on real ranks and tensors."""

    model: nn.Module
    axes: dict[str, int]
    rank: int
    config: Config
    make_optimizer: Callable | None
    micro_batches: int
    recorder: Recorder
    node_size: int
    loss: Loss | None
    parallel: Mapping[str, Any]
    hold: bool
    make_model: Callable[[], nn.Module] | None
    real: bool = False
    tiles: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.sent: dict[str, int] = {}
        self.optimizer: torch.optim.Optimizer | None = None

    def plan(
        self, batch: Any, checkpointing: bool | Mapping[str, Any], name: str, separate: bool, hardware: Hardware | None = None
    ) -> Plan:
        """Shard the model, run the two steps, and return what the recorder has seen of them."""
        meshed, recorder = cuts_model(self.axes), self.recorder
        if meshed and self.loss is not None:
            raise ConfigError(
                "loss: with axes pp or tp the model must map tokens to logits: give a loss of (logits, targets) as parallel={'loss': ...}."
            )
        world: contextlib.AbstractContextManager[Any]
        if meshed:
            world = imagined_mesh(self.axes, self.rank)
        else:
            world = contextlib.nullcontext() if self.real else PlanMode(allow_non_fake_inputs=True)
        with world as entered, setting(listener, recorder.meter):
            mesh: Any = entered if meshed else None
            operators = Operators(recorder, self._groups(mesh) if meshed else Groups())
            with contextlib.nullcontext() if meshed else operators:  # a pipeline runs its stages once to see shapes
                step, models = self._meshed(mesh) if meshed else self._plain()
            if checkpointing:
                for model in models:
                    options = {} if checkpointing is True else dict(checkpointing)
                    if options.get("partition") is True:  # over the ranks of tp, which compute with the same activations
                        options["partition"] = mesh[TP]
                    checkpoint_activations(model, **options)
            self._train(step, models, batch, operators)
            text = self._report
            units = {
                name: sum(each.aligned_numel for each in groups)
                for model in models for name, groups in engine_of(model).snapshot().units
            }  # fmt: skip
        recorder.trace.model_flops, recorder.trace.tokens = 3 * recorder.forward_flops, self._tokens
        phases, moments = self._held(separate)
        return Plan(
            name, self.rank, self.axes, self.config, self.micro_batches, self._tokens, self.num_parameters, separate, phases, moments,
            recorder.trace, text, self.sent, _kept(recorder), units, hardware, None if callable(batch) else batch,
        )  # fmt: skip

    def _held(self, separate: bool) -> tuple[tuple[Phase, ...], tuple[Moment, ...]]:
        """Return the most bytes held in each phase, and the bytes held at each moment, by tier and owner.

        Ranks on CPUs also hold, from a phase's beginning to its end, freed memory that the C library keeps in holes of its heap.
        """
        meter = self.recorder.meter
        has_holes = not separate and self.config.keep_host_memory and self.config.offload_param.tier is not Tier.DISK
        holes = {phase: meter.kept(phase) if has_holes else 0 for phase in PHASES}
        phases = []
        for phase in PHASES:
            held = {tier: dict(meter.fullest[phase, tier]) for tier in Tier if meter.fullest.get((phase, tier))}
            if has_holes:
                held[Tier.DEVICE] = held.get(Tier.DEVICE, {}) | {KEPT: holes[phase]}
            phases.append(Phase(phase, held))
        moments = self.recorder.moments
        return tuple(phases), tuple(replace(m, held={**m.held, KEPT: holes[m.phase]}) if holes[m.phase] else m for m in moments)

    def _told(self, what: str, remedy: str = _FIXED_SHAPES) -> contextlib.AbstractContextManager[None]:
        return told(what, lambda: self.recorder.unit, remedy)

    def _plain(self) -> tuple[Step, list[nn.Module]]:
        """Shard the model over data parallelism; return the function that runs a step, and the model in a list."""
        if self.make_model is not None:
            self.model = self.make_model()
            if not self.real and not all(isinstance(param, FakeTensor) for param in self.model.parameters()):
                raise ConfigError(
                    "whole=True needs a function that builds a new model; it returned one that was built before, and would be changed."
                )
        with self._told("optimizer: the function that makes it"):
            optimizer = None if self.make_optimizer is None else self.make_optimizer(self.model.parameters())
        if not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
            raise ConfigError(
                f"optimizer: expected a function that returns a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        stepping = f"{type(optimizer).__name__}.step"
        comm = None if self.real else FakeComm(self.rank, math.prod(self.axes.values()))
        mesh = {DP: self.axes[DP], SP: self.axes[SP]} if SP in self.axes else None
        if mesh is not None and self.loss is not None:
            raise ConfigError("loss: with an axis sp the model must map tokens to logits: leave loss out.")
        if "mlp_tokens" in self.tiles and not tile_mlps(self.model, self.tiles["mlp_tokens"]):
            raise ConfigError(
                f"mlp_tokens: {type(self.model).__name__} has no module whose class is called ...MLP: leave it out."
            )
        if "loss_tokens" in self.tiles:
            tile_loss(self.model, self.tiles["loss_tokens"])
        model, optimizer = shard(self.model, optimizer, config=self.config, comm=comm, mesh=mesh)
        self.model, self.optimizer, loss = model, optimizer, self.loss or (_next_token if mesh is None else _next_own_token)

        def step(batches: list[Any]) -> None:
            for number, batch in enumerate(batches):
                held = self.hold and number + 1 < len(batches)
                with accumulate(model) if held else contextlib.nullcontext():
                    with self._told("forward"):
                        found = loss(model, batch)
                        if not isinstance(found, Tensor):
                            raise ConfigError(
                                f"loss: expected a function that returns a tensor of one number, got {type(found).__name__}."
                            )
                        found = found / len(batches)
                    with self._told("backward"):
                        found.backward()
                    del found
            self.recorder.computed()
            if optimizer is not None:
                with self._told(stepping, _SAME_SIZES):
                    optimizer.step()
                optimizer.zero_grad()

        return step, [model]

    def _meshed(self, mesh: DeviceMesh) -> tuple[Step, list[nn.Module]]:
        """Parallelize the model over the mesh; return the function that runs a step, and this rank's stages."""
        run = parallelize(
            self.model, mesh, optimizer=self.make_optimizer, micro_batches=self.micro_batches, config=self.config, **self.parallel
        )
        stepping = getattr(self.make_optimizer, "__name__", "the optimizer")

        def step(batches: list[Any]) -> None:
            if not all(isinstance(each, Tensor) for each in batches):
                raise ConfigError(
                    f"batch: with axes pp or tp expected one tensor of tokens (rows, seq), got {type(batches[0]).__name__}."
                )
            tokens = torch.cat(batches)
            with self._told("forward and backward"):
                run.backward(tokens, tokens)
            self.recorder.computed()
            for each in run.optimizers:
                with self._told(f"{stepping}.step", _SAME_SIZES):
                    each.step()
                each.zero_grad()
            self.sent = {axis: round(nbytes) for axis, nbytes in run.traffic.counted.items()}

        return step, run.models

    def _groups(self, mesh: DeviceMesh) -> Groups:
        def link(axis: str) -> Resource:
            nodes = {rank // self.node_size for rank in torch.distributed.get_process_group_ranks(mesh[axis].get_group())}
            return Resource.BETWEEN if len(nodes) > 1 else Resource.INSIDE

        axes: dict[str, tuple[str, int, Resource]] = {mesh[TP].get_group().group_name: (TP, self.axes[TP], link(TP))}
        return Groups(axes, mesh[PP].get_local_rank(), link(PP))

    def _train(self, step: Step, models: list[nn.Module], batch: Any, operators: Operators) -> None:
        """Run the two steps, then save as zs.save does without `asynchronous`: through rotating buffers, wherever states rest."""
        recorder, engines = self.recorder, [engine_of(model) for model in models]
        units = [unit for engine in engines for unit in engine.modules_of_units()]
        handles = [handle for unit in units for handle in _follow(*unit, recorder)]
        with operators:
            for phase in ("first step", "forward"):
                recorder.enter(phase)
                if phase == "forward":
                    operators.begin(Trace(rank=self.rank, axes=self.axes, node_size=self.node_size))
                    before = self._sent(models)
                with self._told("batch: the function that makes it"):
                    make = batch if callable(batch) else lambda: torch.zeros(*batch, dtype=torch.long)
                    batches = [make() for _ in range(self.micro_batches)]
                self._tokens = sum(each.numel() for each in batches if isinstance(each, Tensor)) // self.axes.get(SP, 1)
                step(batches)
                del batches
            recorder.end()
            self._report = report(models[0])
            recorder.enter("save")
            if self.real:
                comm = engines[0].ranks
                with tempfile.TemporaryDirectory() as folder:
                    save(comm.exchange(folder.encode(), "where to save")[0].decode(), self.model, self.optimizer)
                    comm.exchange(b"", "saved")
            else:
                for engine in engines:
                    engine.staging_pool(BUFFER_NBYTES).grow(ROTATING)
        recorder.flush()
        if not self.sent:
            self.sent = {axis: nbytes - before.get(axis, 0) for axis, nbytes in self._sent(models).items()}
        for handle in handles:
            handle.remove()

    def _sent(self, models: list[nn.Module]) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by axis."""
        found = Counter({axis: 0 for axis in (DP, SP) if axis in self.axes})
        for model in models:
            found.update(engine_of(model).snapshot().sent_by_axis)
        return dict(found)


def _next_own_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of this rank's part of the tokens."""
    sequence = sequence_of(model)
    assert sequence is not None and tokens.shape[1] % sequence.size == 0, "the request has checked that sp divides the tokens"
    part = cut({"input_ids": tokens}, sequence.rank, sequence.size, shift_labels=False)
    if _is_tiled(model):
        return model(input_ids=part["input_ids"], position_ids=part["position_ids"], labels=part["input_ids"]).loss
    more = {"sequences": tokens} if "sequences" in inspect.signature(type(model).forward).parameters else {}  # GPT's n-grams
    output = model(part["input_ids"], position_ids=part["position_ids"], **more)
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, 1).float(), part["input_ids"].flatten())


def _is_tiled(model: nn.Module) -> bool:
    """Return whether the model itself computes the loss, in tiles."""
    return any(computes_loss_in_tiles(module) for module in model.modules())


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens, labels=tokens).loss if _is_tiled(model) else model(tokens)
    logits = getattr(output, "logits", output[0] if isinstance(output, (tuple, list)) and output else output)
    if not isinstance(logits, Tensor) or logits.ndim not in (0, 3):
        got = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"model: expected logits (rows, seq, tokens), or a loss, from tokens (rows, seq); got {got}. Another loss: zs.plan(loss=...)."
        )
    return logits if logits.ndim == 0 else next_token_loss(logits, tokens)


def _follow(name: str, modules: list[nn.Module], recorder: Recorder) -> Iterator[RemovableHandle]:
    """Register hooks that tell the recorder when the rank enters a unit: on its modules, and on the gradients of their outputs."""

    def enters(module: nn.Module, args: object) -> None:
        recorder.at(name, torch_compat.graph_task() != -1)  # a repeated forward is a part of backward

    def leaves(module: nn.Module, args: object, output: object) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda grad: recorder.at(name, True))

    for module in modules:
        yield module.register_forward_pre_hook(enters, prepend=True)
        yield module.register_forward_hook(leaves, always_call=False)


def _kept(recorder: Recorder) -> dict[str, int]:
    """Return the bytes that each unit keeps for backward of one micro-batch: what forward adds from one unit to the next."""
    kept: dict[str, int] = {}
    before = 0
    for moment in recorder.moments:
        if moment.phase == "backward" or (len(kept) > 2 and moment.unit == next(iter(kept))):
            break  # a second micro-batch
        now = moment.left.get(ACTIVATIONS, 0) + moment.left.get(CHECKPOINTS, 0)
        kept[moment.unit] = kept.get(moment.unit, 0) + now - before
        before = now
    return kept
