"""What parameters are in the wild, equal to one process at stages 2 and 3: tied, frozen, unused, odd; and buffers.

Hooks and training loops are in test_training_loops.py.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from zoo import (
    Block,
    Case,
    Language,
    Stack,
    check,
    every_mode,
    normal_batches,
    reference,
    run_threads,
    same,
    seeded,
    sgd,
    sharded,
    square,
    token_batches,
)  # fmt: skip

import zeroshard as zs

# -- ties ------------------------------------------------------------------------------------------------------


@every_mode
def test_b19_tied_embedding_and_head(mode):
    check(Case(seeded(Language, tied=True), token_batches(3, 2, 17, 2, 5)), **mode)
    check(Case(seeded(Language, vocab=170, tied=True), token_batches(3, 2, 17, 2, 5)), **mode)  # a unit of its own


@every_mode
def test_b19_tied_within_a_unit(mode):
    class Tied(Block):
        def __init__(self, dim):
            super().__init__(dim)
            self.again = nn.Linear(dim, 2 * dim)
            self.again.weight = self.up.weight

        def forward(self, x):
            return super().forward(x) + self.again(x).sum(-1, keepdim=True)

    check(Case(seeded(Stack, block=Tied), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
@pytest.mark.parametrize("units", ["auto", "leaf"])
def test_b19_tied_across_units(mode, units):
    def build():
        model = Stack()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[1].norm = model.blocks[0].norm
        model.blocks.append(model.blocks[0])
        return model

    check(Case(seeded(build), normal_batches(3, 2, 4, 7), square), units=units, **mode)


# -- frozen ----------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_lora(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model


@every_mode
def test_c11_lora(mode):
    check(Case(with_lora(seeded(Stack)), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
@pytest.mark.parametrize(
    "frozen", [("blocks.0", "first"), ("blocks.1",), ("blocks.1.up", "blocks.2.norm"), ("last", "blocks.2")], ids=str
)
def test_frozen_parameters(mode, frozen):
    model = seeded(Stack)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    check(Case(model, normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
def test_c04_a_frozen_tower_before_a_trainable_model(mode):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Stack(block=Block).requires_grad_(False)
            self.model = Stack(dim=3)

        def forward(self, x):
            with torch.no_grad():
                x = self.tower(x)
            return self.model(x)

    check(Case(seeded(Towers), normal_batches(3, 2, 4, 7), square), **mode)


@every_mode
def test_everything_frozen_passes_gradients_to_its_input(mode):
    base, (batches,) = seeded(Stack).requires_grad_(False), normal_batches(1, 2, 4, 7)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, **mode)
        for _ in range(2):
            x = batches[rank][0].clone().requires_grad_()
            square(model, (x,)).backward()
        return x.grad

    for grad, (batch,) in zip(run_threads(2, run), batches, strict=True):
        x = batch.clone().requires_grad_()
        square(base, (x,)).backward()
        same(grad, x.grad, "gradient of the input", 0.0)


# -- unused ----------------------------------------------------------------------------------------------------


class Skipping(Stack):
    """Uses block i only if flags[i]."""

    def forward(self, x, flags):
        for block, flag in zip(self.blocks, flags, strict=True):
            if flag:
                x = block(x)
        return self.last(x)


@every_mode
def test_parameters_unused_on_all_ranks(mode):
    flags = [(1, 0, 1), (1, 1, 1), (0, 0, 0), (1, 0, 1)]  # `first` is never used
    batches = [[(*b, f) for b in ranks] for ranks, f in zip(normal_batches(4, 2, 4, 7), flags, strict=True)]
    check(Case(seeded(Skipping), batches, square), **mode)


@every_mode
def test_parameters_unused_on_one_rank(mode):
    flags = [[(1, 0, 1), (1, 1, 1)], [(0, 1, 0), (1, 0, 1)], [(0, 0, 0), (1, 1, 1)], [(1, 1, 1), (1, 1, 1)]]
    batches = [
        [(*b, f) for b, f in zip(ranks, per_rank, strict=True)]
        for ranks, per_rank in zip(normal_batches(4, 2, 4, 7), flags, strict=True)
    ]
    check(Case(seeded(Skipping), batches, square), **mode)


@every_mode
def test_part_of_a_unit_unused_on_one_rank(mode):
    class Half(Block):
        def forward(self, x):
            return super().forward(x) if x.mean() > 0 else x + self.norm(x)

    check(Case(seeded(Stack, block=Half), normal_batches(4, 2, 1, 7), square), **mode)


# -- odd parameters --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, dim):
        super().__init__()
        draw = lambda *shape: 0.1 * torch.randn(*shape)  # noqa: E731
        self.empty = nn.Parameter(torch.empty(0, dim))
        self.scalar = nn.Parameter(torch.tensor(0.3))
        self.one = nn.Parameter(draw(1))
        self.turned = nn.Parameter(draw(5, dim).t())  # (dim, 5), not contiguous
        self.channels = nn.Parameter(draw(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.prime = nn.Parameter(draw(13, dim))
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("hidden", torch.arange(3), persistent=False)
        self.counter = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)

    def forward(self, x):
        self.scale.mul_(0.9)
        x = x * self.scale * self.scalar + self.one + self.empty.sum() + (x @ self.turned).sum(-1, keepdim=True)
        return x + (x @ self.prime.t()).sum(-1, keepdim=True) * self.channels.sum() + 0.1 * self.counter.sum() + self.hidden[0]


@every_mode
@pytest.mark.parametrize("units", ["auto", "model", "leaf"])
def test_b19_odd_parameters_and_buffers(mode, units):
    # contiguous now, the turned parameter is multiplied in another order; SGD, since Adam would magnify that
    case = Case(seeded(Stack, block=Odd), normal_batches(3, 2, 4, 7), square, sgd, tolerance=1e-4)
    check(case, units=units, **mode)


@every_mode
def test_b19_odd_parameters_on_five_ranks(mode):
    check(Case(seeded(Odd, 3), normal_batches(2, 5, 4, 3), square, sgd, tolerance=1e-5), **mode)


@every_mode
def test_b19_mixed_dtypes(mode):
    class Mixed(Block):
        def __init__(self, dim):
            super().__init__(dim)
            self.low, self.high = nn.Linear(dim, dim).bfloat16(), nn.Linear(dim, dim).double()

        def forward(self, x):
            x = super().forward(x)
            return x + self.low(x.bfloat16()).float() + self.high(x.double()).float()

    # a bf16 parameter has an fp32 master here, a bf16 one in the reference
    case = Case(seeded(Stack, block=Mixed), normal_batches(2, 2, 4, 7), square, tolerance=0.1)

    def run(rank):
        trace, wanted = sharded(case, rank, **mode), reference(case)[rank]
        for name, value in wanted.state.items():
            same(trace.state[name], value, name, 0.1)
            if value.dtype != torch.bfloat16 and "low" not in name:
                assert trace.grads[0][name].dtype == value.dtype
        return trace

    run_threads(2, run)


@every_mode
def test_buffers_of_each_rank_are_its_own(mode):
    def run(rank):
        model, optimizer = zs.shard(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), None, **mode)
        model(torch.full((2, 3), float(rank)))
        return model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    torch.manual_seed(0)
    (mean0, count0), (mean1, count1) = run_threads(2, run)
    assert count0 == count1 == 1 and not torch.equal(mean0, mean1)


# -- torch's encoder, which looks at parameters of its first layer before it calls it ------------------------------


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(tokens), src_key_padding_mask=padding)


ENCODINGS = {
    "no_grad": lambda model: torch.no_grad()(model.eval()), "inference": lambda model: torch.inference_mode()(model.eval()),
    "frozen": lambda model: model.requires_grad_(False).eval(), "training": lambda model: model.train(),
    "with gradients": lambda model: model.eval(), "compiled": lambda model: torch.no_grad()(torch.compile(model.eval(), backend="eager")),
}  # fmt: skip


RELEASED = {"stage": 3, "map_shared": False}
PADDED = [{"stage": 2}, {"stage": 3}, RELEASED, {**RELEASED, "units": "leaf"}, {"stage": 3, "offload_param": "cpu"}]
CELLS = [(kind, options) for kind in ENCODINGS for options in PADDED if kind != "compiled" or options is RELEASED]


@pytest.mark.parametrize(("kind", "options"), CELLS, ids=str)
def test_padding_in_an_encoder_of_torch(kind, options):
    """In eval its fast path has zeros, before the norm, at padded positions; the slow one has values."""
    base, tokens = seeded(Padded), torch.arange(12).view(2, 6) % 11
    padding = torch.arange(6) >= torch.tensor([[6], [3]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        expected = ENCODINGS[kind](copy.deepcopy(base))(tokens, padding)
        assert (expected[1, 3:] == base.encoder.norm.bias).all() == (kind in ("no_grad", "inference", "frozen"))

        def run(rank: int) -> None:
            model, _ = zs.shard(copy.deepcopy(base), None, **options)
            same(ENCODINGS[kind](model)(tokens, padding).clone(), expected, kind, 1e-6)
            assert not any(unit.depth for unit in model._zeroshard.units)
            if options["stage"] == 2:
                copy.deepcopy(model.encoder)  # which holds nothing that is sharded
            zs.close(model)
            assert "forward" not in model.encoder.__dict__

        for _ in run_threads(2, run):
            pass


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_may_stay_the_programs_own(stage):
    def trained(shard):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        kept = model[0].bias
        kept.not_sharded = True
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param is not kept], lr=0.1)
        if shard:
            zs.shard(model, optimizer, stage=stage)
            assert type(model[0].bias) is nn.Parameter and model[0].bias is kept
        own = torch.optim.SGD([kept], lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            for each in (optimizer, own):
                each.step()
                each.zero_grad()
        return zs.close(model).state_dict() if shard else model.state_dict()

    for one, other in zip(trained(True).values(), trained(False).values(), strict=True):
        torch.testing.assert_close(one, other)
