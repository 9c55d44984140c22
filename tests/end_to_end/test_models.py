"""Any nn.Module, unchanged: gradients and updated parameters equal one process's at stages 2 and 3.

Here: models as people build them (layers of torch, transformers, outputs of every shape). Ties, freezing, unused
and odd parameters, hooks and evaluation are in test_model_traits.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from zoo import (
    Block,
    Case,
    Language,
    MixtureOfExperts,
    Stack,
    check,
    every_mode,
    normal_batches,
    seeded,
    sharded,
    square,
    token_batches,
)  # fmt: skip

from zeroshard.testing import run_threads


@every_mode
def test_transformer(mode):
    check(Case(seeded(Language), token_batches(3, 2, 17, 2, 5)), **mode)


@every_mode
@pytest.mark.parametrize("units", ["model", "leaf", ("LayerNorm", "Linear")], ids=str)
def test_transformer_in_units_of_every_size(mode, units):
    check(Case(seeded(Language, block=Block), token_batches(2, 2, 17, 2, 5)), units=units, **mode)


@every_mode
def test_split_and_merged_units(mode):
    check(Case(seeded(Stack), normal_batches(2, 2, 4, 7), square), max_unit_numel=120, **mode)
    check(Case(seeded(Stack), normal_batches(2, 2, 4, 7), square), min_unit_numel=400, **mode)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in ((3, 5), (5, 6), (6, 7))
        )
        self.head = nn.Linear(7, 4)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


@every_mode
def test_conv_net_with_batch_norm(mode):
    check(Case(seeded(Conv), normal_batches(3, 2, 2, 3, 9, 9), square), **mode)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 4, batch_first=True)
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x):
        x, _ = self.gru(self.lstm(x)[0])
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


@every_mode
@pytest.mark.parametrize("units", ["auto", "leaf"])
def test_recurrent_nets(mode, units):
    check(Case(seeded(Recurrent), normal_batches(3, 2, 2, 4, 5), square), units=units, **mode)


@every_mode
def test_c03_mini_moe(mode):
    batches = normal_batches(20, 2, 3, 6)  # 3 tokens for 4 experts: at each step an expert is unused
    case = Case(seeded(MixtureOfExperts), batches, square)
    traces = check(case, **mode)
    gone = [n for n, g in traces[0].grads[0].items() if g is None]
    assert gone and all(n.startswith("experts") for n in gone)


# -- outputs and inputs of every shape -------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    extra: dict


class Plain:
    def __init__(self, value):
        self.value = value


class ReturnsDict(Block):
    def forward(self, x):
        return {"x": super().forward(x["x"]), "nothing": None, "n": 3}


class ReturnsDataclass(Block):
    def forward(self, x):
        x = x if isinstance(x, Tensor) else x.hidden
        return Output(super().forward(x), {"list": [x.sum()]})


class ReturnsNested(Block):
    def forward(self, x):
        x = x if isinstance(x, Tensor) else x[1][0]["deep"]
        return ("a", [{"deep": super().forward(x)}, None])


class ReturnsObject(Block):
    def forward(self, x):
        x = x if isinstance(x, Tensor) else x.value
        return Plain(super().forward(x))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class ReturnsSlotted(Block):
    """The tensor is in a slot of an object, not in its __dict__."""

    def forward(self, x):
        x = x if isinstance(x, Tensor) else x.value
        return Slotted(super().forward(x))


class KeywordOnly(Block):
    def forward(self, *, x):
        return super().forward(x)


class Shapes(nn.Module):
    def __init__(self, block, enter, leave):
        super().__init__()
        self.first, self.blocks = nn.Linear(7, 7), nn.ModuleList(block(7) for _ in range(3))
        self.enter, self.leave = enter, leave

    def forward(self, x):
        x = self.enter(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


SHAPES = {
    "dict": (ReturnsDict, lambda x: {"x": x}, lambda y: y["x"]),
    "dataclass": (ReturnsDataclass, lambda x: x, lambda y: y.hidden + y.extra["list"][0]),
    "nested": (ReturnsNested, lambda x: x, lambda y: y[1][0]["deep"]),
    "object": (ReturnsObject, lambda x: x, lambda y: y.value),
    "slotted": (ReturnsSlotted, lambda x: x, lambda y: y.value),
}


@every_mode
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_outputs_of_every_shape(mode, kind, precision):
    case = Case(seeded(Shapes, *SHAPES[kind]), normal_batches(2, 2, 4, 7), square)
    if precision == "fp32":
        check(case, **mode)
    else:  # the casts at the edges walk through the same shapes
        run_threads(2, lambda rank: sharded(case, rank, precision="bf16", **mode))


@every_mode
def test_the_root_may_return_anything(mode):
    class Root(Stack):
        def forward(self, x):
            return {"out": super().forward(x), "loss": None, "list": [x]}

    loss = lambda model, batch: model(*batch)["out"].square().mean()  # noqa: E731
    check(Case(seeded(Root), normal_batches(2, 2, 4, 7), loss), **mode)


@every_mode
def test_keyword_arguments(mode):
    class Root(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x=x)
            return self.last(x)

    check(Case(seeded(Root, block=KeywordOnly), normal_batches(2, 2, 4, 7), square), **mode)


@every_mode
def test_submodules_called_several_times_and_out_of_order(mode):
    class Root(Stack):
        def forward(self, x):
            for number in (2, 0, 1, 0, 2):
                x = self.blocks[number](x)
            return self.last(self.first(self.first(x)))

    check(Case(seeded(Root), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
def test_a_submodule_called_directly(mode):
    """Without the root's forward: the pieces are called by the training loop."""

    def loss(model, batch):
        x = model.first(*batch)
        for block in model.blocks:
            x = block(x)
        return model.last(x).square().mean()

    check(Case(seeded(Stack), normal_batches(2, 2, 4, 7), loss), **mode)


@every_mode
def test_the_model_called_twice_before_backward(mode):
    loss = lambda model, batch: (model(*batch) * model(batch[0] + 1)).sum()  # noqa: E731
    check(Case(seeded(Stack), normal_batches(2, 2, 4, 7), loss), **mode)


@every_mode
def test_an_order_of_modules_that_changes_between_steps(mode):
    class Shuffled(Stack):
        def forward(self, x, order):
            for number in order:
                x = self.blocks[number](x)
            return self.last(self.first(x))

    orders = [(0, 1, 2), (2, 1, 0), (1, 2), (0, 0, 1), (0, 1, 2)]
    batches = [[(*b, order) for b in ranks] for ranks, order in zip(normal_batches(5, 2, 4, 7), orders, strict=True)]
    check(Case(seeded(Shuffled), batches, square), **mode)


@every_mode
def test_outputs_that_are_views_and_are_modified_in_place(mode):
    class Viewing(Block):
        def forward(self, x):
            return super().forward(x).view(-1).view(x.shape)

    class Root(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x.mul_(2)
                x[0] += 1
            return self.last(x)

    check(Case(seeded(Root, block=Viewing), normal_batches(3, 2, 4, 7), square), **mode)
    check(Case(seeded(Root), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
def test_chunked_outputs(mode):
    class Chunked(Block):
        def forward(self, x):
            return torch.cat(super().forward(x).chunk(2, -1)[::-1], -1).unbind(0)

    class Root(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = torch.stack(block(x))
            return self.last(x)

    check(Case(seeded(Root, block=Chunked), normal_batches(2, 2, 4, 7), square), **mode)


@every_mode
def test_a_module_that_returns_its_own_parameter(mode):
    class Table(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(dim, dim)), nn.Parameter(torch.randn(dim))

        def forward(self, x):
            return self.weight, self.bias[2:5]

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(Table(7) for _ in range(3))

        def forward(self, x):
            for table in self.tables:
                weight, part = table(x)
                x = x @ weight + part.sum()
            return x

    check(Case(seeded(Root), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
def test_a_model_that_stashes_an_auxiliary_loss(mode):
    class Stash(Block):
        def forward(self, x):
            self.auxiliary = self.up(x).square().mean()
            return super().forward(x)

    def loss(model, batch):
        return square(model, batch) + sum(block.auxiliary for block in model.blocks)

    check(Case(seeded(Stack, block=Stash), normal_batches(3, 2, 4, 7), loss), **mode)


@every_mode
def test_multihead_attention_in_all_its_paths(mode):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 11, 0.0, batch_first=True), 2)
            self.cross = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True, batch_first=True)

        def forward(self, x, k, v):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            x = self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask)
            return self.cross(x, k, v)[0]

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    batches = [[(draw(2, 4, 8), draw(2, 3, 5), draw(2, 3, 6)) for _ in range(2)] for _ in range(2)]
    check(Case(seeded(Root), batches, square), **mode)
    check(Case(seeded(Root), batches, square), units="leaf", **mode)


@every_mode
def test_weight_norm_parametrization(mode):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.utils.parametrizations.weight_norm
            self.layers = nn.ModuleList(nn.Sequential(norm(nn.Linear(7, 7)), nn.Tanh()) for _ in range(2))
            self.last = norm(nn.Linear(7, 3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    check(Case(seeded(Root), normal_batches(3, 2, 4, 7), square), **mode)
