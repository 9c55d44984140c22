"""What the rows of a mesh's axes attach to a model, and what it uses of the engine: zs.shard knows no axis by its name."""

import copy
from types import SimpleNamespace

import pytest
from helpers import adamw, seeded
from torch import nn

import zeroshard as zs
from zeroshard.activations import router_loss, sequence_parallel
from zeroshard.comm.mesh import Axes, Divided, attachments
from zeroshard.errors import ZeroshardError
from zeroshard.seam import engine_of, find_engine, memory_of
from zeroshard.testing import run_threads

PAIR = [[0, 1]]
EXPERTS = Divided(frozenset({"ep"}), [[0, 1]], None, 1.0)


@pytest.mark.parametrize(
    "axes, expected",
    [
        (Axes(None, lines={"dp": PAIR}), []),
        (Axes(None, lines={"tp": PAIR, "pp": PAIR}), []),
        (Axes(None, lines={"sp": PAIR}), [sequence_parallel, router_loss]),
        (Axes(None, lines={"sp": [[0], [1]]}), []),
        (Axes(None, lines={"dp": PAIR, "ep": [[0], [1]]}, divided=EXPERTS), [router_loss]),  # a mesh with ep, of one rank
        (Axes(None, lines={"ep": PAIR, "sp": PAIR}, divided=EXPERTS), [sequence_parallel, router_loss]),
    ],
)
def test_an_axis_attaches_what_its_row_says(axes, expected):
    assert attachments(axes) == expected


def test_an_engine_takes_notes_and_hooks_that_go_with_the_model():
    plain = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def body(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, stage=3)
        engine, removed = engine_of(model), []
        engine.note("a note of a satellite")
        engine.also_remove([SimpleNamespace(remove=lambda: removed.append(rank))])
        assert engine.model is model and engine.ranks.rank == rank and engine.weight is None
        assert "a note of a satellite" in str(zs.report(model))
        assert find_engine(model[0]) is None and find_engine(model).model is model
        param = next(model.parameters())
        assert memory_of(param) is not param and memory_of(next(plain.parameters())) is next(plain.parameters())
        zs.close(model)
        assert removed == [rank] and find_engine(model) is None
        with pytest.raises(ZeroshardError):
            engine_of(model)

    run_threads(2, body)


def test_a_weight_is_known_while_its_backward_runs():
    plain = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def body(rank):
        model, _ = zs.shard(*(lambda model: (model, adamw(model.parameters())))(copy.deepcopy(plain)), stage=2)
        seen = []
        output = model(next(plain.parameters()).detach()).sum()
        output.register_hook(lambda grad: seen.append(engine_of(model).weight))
        zs.backward(model, output, weight=3.0)
        assert seen == [3.0] and engine_of(model).weight is None
        zs.close(model)

    run_threads(1, body)
