"""Small reproductions of issues that users of other libraries filed; numbers as in ACCEPTANCE.md, part C.

C03 is in test_models.py, C13 in test_load_memory.py, C14 in test_life_cycle.py. "Reference" = one process, plain torch.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import (
    Case,
    Stack,
    adamw,
    check,
    every_mode,
    normal_batches,
    reference,
    run_threads,
    same,
    seeded,
    sgd,
    square,
)  # fmt: skip

import zeroshard as zs

# -- C01: one shared Linear applied three times per forward (DS#8224) ----------------------------------------------


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 7)
        self.shared = nn.ModuleList([nn.Linear(7, 7)] * 3)
        self.leave = nn.Linear(7, 2)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.shared:
            x = torch.tanh(layer(x))
        return self.leave(x)


@every_mode
@pytest.mark.parametrize("units", ["auto", "leaf"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_c01_reused_block(mode, units, precision, accumulation):
    base, batches = seeded(Reused), normal_batches(4, 2, 4, 5)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd(model.parameters()), precision=precision, units=units, **mode)
        for step, ranks in enumerate(batches):
            if (step + 1) % accumulation:
                with zs.accumulate(model):
                    square(model, ranks[rank]).backward()
                continue
            square(model, ranks[rank]).backward()
            if step + 1 == accumulation:
                grads = zs.full_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return grads, zs.full_state_dict(model)

    model = copy.deepcopy(base)
    optimizer = sgd(model.parameters())
    for step, ranks in enumerate(batches):
        for batch in ranks:
            (square(model, batch) / 2).backward()
        if (step + 1) % accumulation == 0:
            if step + 1 == accumulation:
                wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    for grads, state in run_threads(2, run):
        for name, grad in wanted.items():
            same(grads[name].float(), grad, name, 1e-6 if precision == "fp32" else 0.03)
            same(state[name].float(), model.state_dict()[name], name, 1e-6 if precision == "fp32" else 0.03)


# -- C02: a middle layer used only if a flag says so (DS#5828, DS#7998) ---------------------------------------------


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, flag):
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[1](x)) if flag else x
        return self.layers[2](x)


@every_mode
@pytest.mark.parametrize("flags", ["alike", "alternating", "different"])
def test_c02_divergent_branch(mode, flags):
    flag = {"alike": lambda step, rank: True, "alternating": lambda step, rank: step % 2, "different": lambda step, rank: rank}
    batches = [
        [(*batch, flag[flags](step, rank)) for rank, batch in enumerate(ranks)]
        for step, ranks in enumerate(normal_batches(4, 2, 3, 5))
    ]
    check(Case(seeded(Branch), batches, square), **mode)


# -- C04: a vision tower without an image on one rank, with accumulation (miles#2406, SW#9104) ------------------------


class Multimodal(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.tower = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))).requires_grad_(not frozen)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))

    def forward(self, text, image=None):
        x = text if image is None else text + self.tower(image)
        for block in self.blocks:
            x = block(x)
        return x


@every_mode
@pytest.mark.parametrize("frozen", [False, True])
def test_c04_text_only_step(mode, frozen):
    base, data = seeded(Multimodal, frozen), normal_batches(12, 2, 3, 5)

    def batch(step, micro, rank):
        (text,), (image,) = data[2 * step + micro][rank], data[(2 * step + micro + 1) % 12][rank]
        return (text,) if step in (3, 4) and rank == 1 else (text, image)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd([p for p in model.parameters() if p.requires_grad]), **mode)
        for step in range(6):
            with zs.accumulate(model):
                square(model, batch(step, 0, rank)).backward()
            square(model, batch(step, 1, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    model = copy.deepcopy(base)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(6):
        for rank in range(2):
            for micro in range(2):
                (square(model, batch(step, micro, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_threads(2, run):
        for name, value in model.state_dict().items():
            same(state[name], value, name, 1e-6)


# -- C06: the same 16 samples as 1 x 16 or 4 x 4, stages, unit sizes, overlap (DS#1488, DS#6351, DS#7749) --------------


def c06(rank, base, samples, stage, micros, steps, lr, max_unit_numel=None, overlap=True, map_shared=True):
    model = copy.deepcopy(base)
    model, optimizer = zs.shard(
        model, adamw(model.parameters(), lr=lr), stage=stage, max_grad_norm=1e9, max_unit_numel=max_unit_numel,
        overlap=overlap, map_shared=map_shared,
    )  # fmt: skip
    norms = []
    for _ in range(steps):
        mine = samples.chunk(2)[rank].chunk(micros)
        for number, part in enumerate(mine):
            loss = square(model, (part,)) / micros
            if number + 1 < micros:
                with zs.accumulate(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_step.grad_norm)
    return norms, zs.full_state_dict(model)


def test_c06_the_norm_is_the_same_however_the_batch_is_cut():
    base, samples = seeded(Stack), torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    model = copy.deepcopy(base)
    square(model, (samples,)).backward()
    wanted = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    seen: dict[int, set] = {}
    for stage in range(4):
        for micros in (1, 4):
            for size, overlap, mapped in ((64, True, True), (64, False, False), (None, True, False), (None, False, True)):
                for norms, state in run_threads(2, c06, base, samples, stage, micros, 1, 0.0, size, overlap, mapped):
                    assert norms[0] == pytest.approx(wanted, rel=1e-5)
                    seen.setdefault(micros, set()).add((norms[0], size))
                    for name, value in base.state_dict().items():
                        same(state[name], value, f"{name} at lr=0", 0.0)
    for micros, norms in seen.items():  # the cut in units changes the order of additions; nothing else may
        assert len(norms) == 2, f"{micros}: {norms}"


@pytest.mark.slow  # 13 s; six steps of every stage: test_equivalence
@pytest.mark.limit(180)
def test_c06_parameters_are_equal_after_50_steps():
    base, samples = seeded(Stack), torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    wanted, small = (run_threads(2, c06, base, samples, 0, 4, 50, 1e-3, size)[0][1] for size in (None, 64))
    for stage in (1, 2, 3):
        for size in (None, 64):
            for _, state in run_threads(2, c06, base, samples, stage, 4, 50, 1e-3, size, True, stage == 3):
                for name, value in wanted.items():
                    same(state[name], value, name, 0.0)
                    same(state[name], small[name], name, 0.0)


# -- C07: the clipped norm over uneven shards (PT#170862, PT#148532, AX#3058); the offload part comes with offload ------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("clip", ["function", "option"])
def test_c07_clip_norm_over_uneven_shards(stage, clip):
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (1, 3, 7, 1000))

        def forward(self, x):
            return sum((part * x[0, : len(part)]).sum() for part in self.parts)

    base, (batches,) = seeded(Uneven), normal_batches(1, 3, 1, 1000)
    limit = 0.5

    def run(rank):
        model = copy.deepcopy(base)
        options = {"max_grad_norm": limit} if clip == "option" else {}
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, **options)
        model(*batches[rank]).backward()
        if clip == "function":
            norm = zs.clip_grad_norm_(model, limit)
            after = torch.stack([g.norm() for g in zs.full_gradients(model).values()]).norm()
            assert after <= limit * (1 + 1e-5)
            assert float(norm) == pytest.approx(wanted, rel=1e-6)
        optimizer.step()
        return optimizer.last_step, zs.full_state_dict(model)

    model = copy.deepcopy(base)
    for batch in batches:
        (model(*batch) / 3).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for record, state in run_threads(3, run):
        assert record.grad_norm == pytest.approx(wanted, rel=1e-6)
        assert record.clipped_norm <= limit * (1 + 1e-5) and record.clip_coefficient < 1
        for name, value in model.state_dict().items():
            same(state[name], value, name, 1e-5)


# -- C08: late-stage drift of bf16 (AReaL#1292, A#2624) ----------------------------------------------------------------


@pytest.mark.slow  # 8 s; masters: test_equivalence[bf16], and tests/optim
@pytest.mark.limit(180)
def test_c08_bf16_with_masters_tracks_fp32_where_pure_bf16_stands_still():
    torch.manual_seed(0)
    base, x = nn.Linear(8, 1), torch.randn(64, 8)
    y = x @ torch.linspace(-1, 1, 8)[:, None]
    steps, lr = 2000, 2e-4  # updates of 2e-4 at weights near 1: below half of bf16's epsilon there

    def train(model, optimizer, dtype):
        for _ in range(steps):
            F.mse_loss(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, model, masters):
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        model, optimizer = zs.shard(model, optimizer, stage=2, precision="bf16", master_weights=masters)
        train(model, optimizer, torch.bfloat16)
        states = zs.full_optimizer_state(model)["weight"]
        return zs.full_state_dict(model, masters=True)["weight"].float(), states

    plain = copy.deepcopy(base)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=lr, weight_decay=0.0), torch.float32)
    distance = lambda w: (w - plain.weight).abs().max().item()  # noqa: E731
    moved = distance(base.weight)
    for given in (base, copy.deepcopy(base).bfloat16()):
        ((weight, states),) = run_threads(1, run, given, True)
        assert distance(weight) < 0.1 * moved
        assert states["exp_avg"].dtype == states["exp_avg_sq"].dtype == torch.float32
    ((weight, states),) = run_threads(1, run, base, False)
    assert distance(weight) > 0.3 * moved and states["exp_avg"].dtype == torch.bfloat16


# -- C09: frozen norm and LoRA in a checkpointed block, input without gradient (T#47254, DS PR#8130) -------------------


class Adapted(nn.Module):
    def __init__(self, dim, reentrant):
        super().__init__()
        self.norm, self.base = nn.LayerNorm(dim).requires_grad_(False), nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)
        self.reentrant = reentrant

    def inner(self, x):
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + self.up(self.down(h)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class AdaptedStack(nn.Sequential):
    def __init__(self, reentrant):
        super().__init__(*(Adapted(7, reentrant) for _ in range(3)))


@every_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_c09_frozen_and_checkpointed(mode, reentrant):
    """With reentrant checkpoints the first input must require a gradient, in plain torch too."""
    base, data = seeded(AdaptedStack, reentrant), normal_batches(4, 2, 4, 7)

    def batch(micro, rank):
        (x,) = data[micro][rank]
        return (x.clone().requires_grad_(reentrant),)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd([p for p in model.parameters() if p.requires_grad]), **mode)
        held = []
        for step in range(2):
            with zs.accumulate(model):
                square(model, batch(2 * step, rank)).backward()
            held.append(model._zeroshard.tiers.ledger.now["gathered units"])
            square(model, batch(2 * step + 1, rank)).backward()
            held.append(model._zeroshard.tiers.ledger.now["gathered units"])
            optimizer.step()
            optimizer.zero_grad()
        return held, zs.full_state_dict(model), zs.report(model)

    model = copy.deepcopy(base)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        for rank in range(2):
            for micro in (2 * step, 2 * step + 1):
                (square(model, batch(micro, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for held, state, report in run_threads(2, run):
        assert held == [0] * 4
        # one unit for the forward or backward under way, one gathered ahead; each of 2 dtypes x 2 shards of 32 n elements
        assert report.peak["gathered units"] <= 2 * 4 * (sum(p.numel() + 32 for p in model[0].parameters()) + 2 * 64)
        for name, value in model.state_dict().items():
            same(state[name], value, name, 1e-6)


def test_the_reference_itself_is_right():
    """The replicas of zoo.reference stay equal to one process with the whole batch."""
    base, batches = seeded(Stack), normal_batches(3, 2, 4, 7)
    model = copy.deepcopy(base)
    optimizer = sgd(model.parameters())
    for ranks in batches:
        square(model, (torch.cat([x for (x,) in ranks]),)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trace in reference(Case(base, batches, square, sgd)):
        for name, value in model.state_dict().items():
            same(trace.state[name], value, name, 1e-6)
