"""The load-balancing loss of Transformers' mixtures, of the tokens of all data-parallel ranks and of all stages of a pipeline.

    loss = E * sum over experts of f * P        f: choices of the expert / tokens        P: mean of its probability over tokens

f and P are of all layers together. The loss is no mean over tokens, so that the mean of the ranks' losses is not the loss of all
tokens: an expert that is popular on one rank and not on another is balanced. Plain data parallelism takes that mean all the same,
as DDP does. Over an axis ep or sp, whose ranks share layers or sequences, the ranks add up choices, probabilities and tokens first.
Each rank's gradient is that of its own probabilities, times the number of ranks: the mean over ranks, which ZeRO takes of all
gradients, is the gradient of one process with all tokens.

Through a pipeline these sums travel beside the hidden states. Each stage adds those of its layers, and the last computes the loss.

Source: Switch Transformers, arXiv 2101.03961, equations 4 to 6.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import ConfigError
from ..seam import Engine
from ..utils.autograd import Running
from ..utils.transformers_compat import balancing_losses
from .ulysses import active_in, sequence_of

_running = Running()  # the forwards of sharded models, each with its Engine; None: its loss is that of a rank's tokens
_inside = threading.local()  # .stage: the StageSums of the stage that runs


@dataclass
class StageSums:
    """The sums for the loss in a running stage, (2 E + 1,): of all layers so far choices and probabilities of each expert, and
    tokens. They are in fp64, since counts must not be rounded where the precision is bf16.

    received: of the stages before; None in the first one. sent: with this stage's own; in the last stage the loss, a number.
    experts: E, once the forward has called the loss.
    """

    device: torch.device
    last: bool
    experts: int = 0
    received: Tensor | None = None
    sent: Tensor | None = None


def coefficient(model: nn.Module) -> float:
    """Return the factor with which a model adds its router's loss to its own; 0 if it adds none. Raise ConfigError if it has none."""
    if not getattr(getattr(model, "config", None), "output_router_logits", False):
        return 0.0
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(model, name):
            return float(getattr(model, name))
    raise ConfigError(
        f"{type(model).__name__} has output_router_logits=True and no router_aux_loss_coef, by which its router's loss would count: "
        "set config.output_router_logits = False, or take a class of model that has the loss."
    )


def of_output(output: Any) -> Tensor:
    """Return the router's loss in a model's output. Raise ConfigError if it has none."""
    loss = getattr(output, "aux_loss", None)
    if loss is None:
        raise ConfigError(
            f"the model has output_router_logits=True, and its output ({type(output).__name__}) no aux_loss that would count: set "
            "config.output_router_logits = False, or return_dict = True."
        )
    return loss


def is_added_by(model: nn.Module) -> bool:
    """Return whether a model, or one inside of it, adds its router's loss to its own."""
    return any(getattr(getattr(module, "config", None), "output_router_logits", False) for module in model.modules())


def attach(engine: Engine, axes: object) -> None:
    """Let the load-balancing losses of a sharded model's forwards be those of all its data-parallel ranks."""
    model = engine.model
    replace(model)

    def enter(module: nn.Module, args: object) -> None:
        sequence = sequence_of(module)
        alone = sequence is not None and active_in(module) is None  # in evaluation, of sequences of its own
        _running.enter(module, None if alone else engine)

    def leave(module: nn.Module, args: object, output: object) -> None:
        _running.leave(module)

    if is_added_by(model) and not any(map(balancing_losses, model.modules())):
        engine.note("router's loss: the mean of the ranks' own losses, since it is not Transformers' load-balancing loss")
    for module in filter(balancing_losses, model.modules()):
        engine.also_remove([module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)])


@contextlib.contextmanager
def of_stage(sums: StageSums) -> Iterator[None]:
    """Context of a stage's forward, in which the load-balancing loss adds to `sums`."""
    _inside.stage = sums
    try:
        yield
    finally:
        _inside.stage = None


def replace(model: nn.Module) -> None:
    """Replace the functions of a model's load-balancing loss in their modules by ones that, elsewhere, do as before."""
    for source, name in {found for module in model.modules() for found in balancing_losses(module)}:
        original: Callable = getattr(source, name)
        if not hasattr(original, "__wrapped__"):  # else it was done for an earlier model
            setattr(source, name, _replaced(original))


def _replaced(original: Callable) -> Callable:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        engine, stage = next(reversed(_running.values()), None), getattr(_inside, "stage", None)
        if engine is None and stage is None:
            return original(*args, **kwargs)
        return balance_loss(engine, stage, *args, **kwargs)

    return chosen


def balance_loss(
    engine: Engine | None, stage: StageSums | None, gate_logits: Any, num_experts: int, top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:  # fmt: skip
    """Return the load-balancing loss of the tokens of all ranks of an engine (collective); 0 without logits, or before the last stage.

    gate_logits: of each layer, (tokens, num_experts). attention_mask: (batch, seq), 0 for tokens that do not count.
    """
    layers = gate_logits if isinstance(gate_logits, tuple) else ()
    if stage is None and not layers:
        return 0
    device = layers[0].device if stage is None else stage.device
    counts, mass = (torch.zeros(num_experts, device=device) for _ in range(2))
    tokens = torch.zeros((), device=device)
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    for logits in layers:
        chances = logits.to(device).softmax(dim=-1)
        chosen = chances.topk(top_k, dim=-1).indices
        weights = torch.ones(len(chances), device=device) if mask is None else mask
        counts = counts.index_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        mass = mass + (chances.float() * weights.unsqueeze(-1)).sum(dim=0)
        tokens = tokens + weights.sum()
    sums = torch.cat([counts, mass, tokens.view(1)]).double()
    if stage is not None:
        sums = sums if stage.received is None else stage.received + sums
        stage.experts, stage.sent = num_experts, sums
        if not stage.last:
            return sums.new_zeros(())  # which no one reads
    if engine is not None and not engine.ranks.imagined:
        sums = _OverRanks.apply(sums, engine)
    counts, mass, tokens = sums.split([num_experts, num_experts, 1])
    loss = (counts.detach() / tokens.detach() * mass / tokens.detach()).sum().float() * num_experts
    if stage is not None:
        stage.sent = loss
    return loss


class _OverRanks(torch.autograd.Function):
    """The sum of a tensor over data-parallel ranks. Backward is such that the mean over ranks, or the mean weighted by
    `zs.backward`, of the gradients is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, engine: Engine) -> Tensor:
        ctx.engine = engine
        told = engine.ranks.exchange(mine.cpu().numpy().tobytes(), "load-balancing loss: choices and probabilities")
        return torch.stack([torch.frombuffer(bytearray(each), dtype=mine.dtype) for each in told]).sum(0).to(mine.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        comm, weight = ctx.engine.ranks, ctx.engine.weight
        if weight is None:
            return grad * comm.world_size, None
        told = comm.exchange(struct.pack("<d", weight), "load-balancing loss: weights of ranks")
        total = sum(struct.unpack("<d", each)[0] for each in told)
        return grad * (total / weight if weight else 0.0), None  # a rank without weight passes no gradient on
