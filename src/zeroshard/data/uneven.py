"""Uneven data: ranks that have fewer batches than others.

zs.join             rank 0  step 1 | step 2 | step 3          its data ends after two batches: in step 3 it takes part
                    rank 1  step 1 | step 2 | step 3          in rank 1's collectives, with gradients of zero
zs.stop_together    both stop after step 2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

from ..activations import router_loss
from ..activations.ulysses import sequence_of
from ..errors import ConfigError
from ..seam import engine_of

Batch = TypeVar("Batch")


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Allow ranks to have different numbers of batches (collective: every rank enters it around its training loop).

        with zs.join(model):
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loop has ended stays in the `with` block: it takes part in the other ranks' collectives with gradients of zero,
    and steps with their learning rates and other options, until every rank's loop has ended. Gradients are the mean over the
    batches that exist: with plain backwards every batch of a step has the same weight, on any rank and in any micro-batch; with
    `zs.backward`, its given weight. A loader may be empty. At the end torch's learning-rate schedulers of every rank are at the
    position of the rank that ended last.

    Once a rank's loop has ended, the others may still run forward, backward, zs.clip_grad_norm_, step and zero_grad of this
    model. Other verbs that need every rank (zs.save, zs.full_state_dict, writes to parameters, ...) raise ZeroshardError inside
    the block: call them after it.

    Cost: no message until a rank's loop has ended, then one small message for each event. If all-gathers need every rank (stage 3
    over torch.distributed, parameters on another tier), one small message for each forward from the start. (torch.distributed's
    Join adds a collective to every forward.)
    """
    engine = engine_of(model)
    if engine.topology.divided is not None:  # experts are cut along an axis that cuts the batch: each forward needs all ranks
        raise ConfigError(
            "zs.join: in each forward of this model all ranks exchange tokens with the experts, so that none can be without a batch: use "
            "zs.stop_together(model, loader)."
        )
    if sequence_of(engine.model) is not None and router_loss.is_added_by(model):
        raise ConfigError(
            "zs.join: in each forward of this model all ranks add up its router's loss, so that none can be without a batch: use "
            "zs.stop_together(model, loader), or config.output_router_logits = False."
        )
    with engine.joining():
        yield


def stop_together(model: nn.Module, loader: Iterable[Batch]) -> Iterable[Batch]:
    """Return an iterable over a loader's batches that ends on every rank with the shortest loader (iterating is collective).

        for batch in zs.stop_together(model, loader):
            ...

    Each rank reads one batch ahead; the message at the end of each backward also has a bit for "this is the last batch", at no
    cost. For a batch without a communicating backward (an evaluation, zs.accumulate), ranks exchange one small message. If
    batches are left over on some ranks, rank 0 prints a line on stderr.
    """
    return engine_of(model).stopping_together(loader)
