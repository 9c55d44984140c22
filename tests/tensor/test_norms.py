"""Norms and clipping by torch's own functions on sharded gradients: those of one process, and what a step then makes of them.

Trainer, Accelerate and Lightning call torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=2.0) and `.item()` on what
comes back; they know nothing of sharding.
"""

import copy
import itertools
import math

import pytest
import torch
from helpers import MLP, Branches, OddGPT, seeded, token_batches, vector_batches
from torch import nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.comm.shared_memory import SharedComm
from zeroshard.errors import CollectiveMismatch, PeerFailed, StallError
from zeroshard.testing import run_threads

WORLD = 2
ORDERS = (2, 1, math.inf, 0, 3.5, -1, -math.inf)
STAGES = (0, 1, 2, 3)
(BATCHES,), (VECTORS,) = token_batches(1, 1, WORLD)[0], vector_batches(1, 1, WORLD)[0]


def mean_of_gradients(base, batches, world=WORLD):
    """One process: gradients of the mean over ranks' batches."""
    model = copy.deepcopy(base)
    (sum(model(*batch) for batch in batches) / world).backward()
    return model


def sharded(base, rank, batches=BATCHES, optimizer=None, **options):
    model = copy.deepcopy(base)
    params = [p for p in model.parameters() if p.requires_grad]
    made = None if optimizer is None else optimizer(params)
    model, made = zs.shard(model, made, **options)
    model(*batches[rank]).backward()
    return model, made


def close(found, wanted, tolerance=2e-5):
    torch.testing.assert_close(torch.as_tensor(found).float(), torch.as_tensor(wanted).float(), rtol=tolerance, atol=1e-7)


def compare(model, plain, tolerance=2e-5):
    gradients = zs.full_gradients(model)
    for name, param in plain.named_parameters():
        if param.grad is None:
            assert gradients.get(name) is None
        else:
            close(gradients[name], param.grad, tolerance)


# -- equal to one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_torch(stage, foreach):
    """A tied parameter counts once, one of odd shape and a scalar count; the norm is one number on every rank."""
    base = seeded(OddGPT)

    def run(rank):
        found = []
        for order in ORDERS:
            model, _ = sharded(base, rank, stage=stage)
            plain = mean_of_gradients(base, BATCHES)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=order)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order, foreach=foreach)
            assert type(norm) is torch.Tensor and norm.dtype == torch.float32 and norm.dim() == 0
            close(norm.item(), wanted)
            compare(model, plain)
            found.append(norm.item())
        return found

    results = run_threads(WORLD, run)
    assert results[0] == results[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_other_ways_to_ask(stage):
    base = seeded(OddGPT)
    plain = mean_of_gradients(base, BATCHES)
    theirs = [p.grad for p in plain.parameters()]

    def run(rank):
        model, _ = sharded(base, rank, stage=stage)
        mine = [p.grad for p in model.parameters()]
        for order in ORDERS:
            for found, wanted in zip(torch._foreach_norm(mine, order), torch._foreach_norm(theirs, order), strict=True):
                close(found, wanted)
            close(nn.utils.get_total_norm(mine, order), nn.utils.get_total_norm(theirs, order))
        for found, wanted in zip(mine, theirs, strict=True):
            close(found.norm(), wanted.norm())
            close(found.norm(1), wanted.norm(1))
            close(torch.linalg.vector_norm(found, dtype=torch.float64), torch.linalg.vector_norm(wanted, dtype=torch.float64))
            kept = torch.linalg.vector_norm(found, keepdim=True)
            assert kept.shape == torch.linalg.vector_norm(wanted, keepdim=True).shape
            close(torch.linalg.norm(found), torch.linalg.norm(wanted))
            close(found.mul(2).norm(), wanted.mul(2).norm())  # of what was computed from it
        matrix = model.blocks[0].out.weight.grad
        close(matrix.norm(dim=(0, 1)), plain.blocks[0].out.weight.grad.norm())
        close(matrix[2:4].norm(), plain.blocks[0].out.weight.grad[2:4].norm())  # of rows
        total = nn.utils.get_total_norm(mine)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total)
        close(nn.utils.get_total_norm(mine), 0.05)
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        close(nn.utils.get_total_norm(mine, math.inf), 0.001)
        with torch.no_grad():
            close(model.head.weight.norm(), base.head.weight.norm())

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_no_other_norm_than_that_of_zeroshard(stage):
    def run(rank):
        model, _ = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        theirs = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        assert theirs == pytest.approx(zs.clip_grad_norm_(model, 0.01).item(), rel=1e-6)
        after = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert after.item() == pytest.approx(0.01, rel=1e-4)

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_unused_parameters_have_no_part(stage):
    """A branch that no rank took, one that only one rank took, and a frozen layer."""
    base = seeded(Branches)
    base.branches[1][0].requires_grad_(False)
    inputs = torch.randn(WORLD, 3, 6, generator=torch.Generator().manual_seed(3))
    batches = [(inputs[0], (0, 1)), (inputs[1], (1,))]

    def run(rank):
        model, _ = sharded(base, rank, batches, stage=stage)
        plain = mean_of_gradients(base, batches)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
        compare(model, plain)
        assert model.branches[2][0].weight.grad is None

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_and_the_loss_scale(stage, precision):
    """Gradients rest in fp32 and are shown free of the loss scale."""
    base = seeded(OddGPT)

    def run(rank):
        model, optimizer = sharded(
            base, rank, optimizer=torch.optim.SGD, stage=stage, precision=precision, initial_loss_scale=1024.0
        )
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=2.0)
        close(norm, nn.utils.clip_grad_norm_(mean_of_gradients(base, BATCHES).parameters(), 0.05), 0.05)
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(0.05, rel=1e-4) and not optimizer.last_step.skipped

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_rest_in_bf16_and_several_dtypes(stage):
    """bf16 gradients of one model, fp64 and bf16 ones of another and a tensor that is not sharded, clipped together."""
    base, other, plain = seeded(OddGPT), seeded(MLP), nn.Linear(3, 3)
    other.layers[0].double()
    other.forward = lambda x: sum(layer(x.to(layer.weight.dtype)[:, : layer.in_features].repeat(1, 3)[:, : layer.in_features]).square().mean().float()
                                  for layer in other.layers)  # fmt: skip
    plain.weight.grad = torch.full((3, 3), 0.25)
    apart = copy.deepcopy(plain)
    apart.weight.grad = plain.weight.grad.clone()

    def run(rank):
        model, _ = sharded(base, rank, stage=stage, gradient_dtype=torch.bfloat16)
        layers = copy.deepcopy(other.layers)
        second, _ = zs.shard(layers, None, stage=stage)
        mine = copy.deepcopy(plain)
        mine.weight.grad = plain.weight.grad.clone()
        params = [*model.parameters(), *mine.parameters(), *second.parameters()]
        second[0](VECTORS[rank][0].double()).square().mean().backward()
        second[1](torch.ones(2, 9) * (rank + 1)).square().mean().backward()
        whole = [*zs.full_gradients(model).values(), mine.weight.grad.clone(), *zs.full_gradients(second).values()]
        whole = [grad for grad in whole if grad is not None]
        wanted = nn.utils.get_total_norm(whole)
        norm = nn.utils.clip_grad_norm_(params, 0.1)
        close(norm, wanted, 0.01)
        assert {p.grad.dtype for p in params if p.grad is not None} == {torch.bfloat16, torch.float32, torch.float64}
        close(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]), 0.1, 0.01)

    run_threads(WORLD, run)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_rest_elsewhere(stage, place, tmp_path):
    base = seeded(OddGPT)

    def run(rank):
        tier = zs.Offload(place, path=str(tmp_path) if place == "nvme" else None, any_filesystem=True)
        model, optimizer = sharded(
            base, rank, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), stage=stage, offload_optimizer=tier, offload_gradient=tier
        )
        plain = mean_of_gradients(base, BATCHES)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        compare(model, plain)
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        for name, value in zs.full_state_dict(model).items():
            close(value, plain.state_dict()[name])
        zs.close(model)

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_after_accumulation(stage):
    base, batches = seeded(OddGPT), token_batches(1, 3, WORLD)[0]

    def run(rank):
        model, optimizer = zs.shard(copy.deepcopy(base), None, stage=stage)
        model(*batches[0][rank]).backward()
        with zs.accumulate(model):
            model(*batches[1][rank]).backward()
        model(*batches[2][rank]).backward()
        plain = mean_of_gradients(base, [pair for ranks in batches for pair in ranks])
        close(nn.utils.clip_grad_norm_(model.parameters(), 0.2), nn.utils.clip_grad_norm_(plain.parameters(), 0.2))
        compare(model, plain)

    run_threads(WORLD, run)


def test_one_exchange_for_all_norms_of_a_call(monkeypatch):
    labels = []
    exchange = SharedComm.exchange
    monkeypatch.setattr(
        SharedComm, "exchange", lambda comm, payload, label: labels.append(label) or exchange(comm, payload, label)
    )

    def run(rank):
        model, _ = sharded(seeded(OddGPT), rank, stage=3)
        grads = [p.grad for p in model.parameters()]
        if rank == 0:
            labels.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return len(grads)

    (many, _) = run_threads(WORLD, run)
    assert many > 10
    asked = [label for label in labels if label.startswith("norm of")]
    assert 1 <= len(asked) <= 2  # one a rank
    assert asked[0] == f"norm of the gradient of embedding.weight and {many - 1} more (collective: every rank must ask for it)"


@pytest.mark.parametrize("stage", STAGES)
def test_values_that_are_not_finite(stage):
    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        bias = model.blocks[0].into.bias.grad
        bias.fill_(math.inf)
        params = list(model.parameters())
        assert nn.utils.get_total_norm([p.grad for p in params]).item() == math.inf
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        bias.fill_(math.nan)
        for order in (2, math.inf, 1):
            assert math.isnan(nn.utils.get_total_norm([p.grad for p in params], order).item())
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        assert optimizer.last_step.skipped

    run_threads(WORLD, run)


# -- what a step makes of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("option", [None, 10.0])
def test_a_step_after_it_steps_with_the_clipped_gradients(stage, option):
    base = seeded(OddGPT)

    def run(rank):
        model, optimizer = sharded(base, rank, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), stage=stage, max_grad_norm=option)
        plain = mean_of_gradients(base, BATCHES)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        zs.clip_grad_norm_(model, 5.0)  # somebody has asked before: what is written since counts
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(0.1, rel=1e-4)
        for name, value in zs.full_state_dict(model).items():
            close(value, plain.state_dict()[name])

    run_threads(WORLD, run)


def repaired(model):
    for param in model.parameters():
        param.grad.nan_to_num_(0.0, 0.0, 0.0)


def assigned(model):
    for param in model.parameters():
        param.grad = param.grad.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("mend", [repaired, assigned])
@pytest.mark.parametrize(("stage", "options"), [
    *((stage, {}) for stage in STAGES), (2, {"precision": "fp16", "initial_loss_scale": 256.0}), (3, {"offload_gradient": "cpu"}),
], ids=str)  # fmt: skip
def test_gradients_that_are_repaired_after_a_clip_are_stepped_with(stage, options, mend):
    """The clip found them not finite; the step asks again, and clips as was asked."""
    base = seeded(OddGPT)

    def run(rank):
        model, optimizer = sharded(base, rank, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), stage=stage, **options)
        before = zs.full_state_dict(model)
        model.blocks[0].into.bias.grad.fill_(math.nan)
        assert not math.isfinite(zs.clip_grad_norm_(model, 0.1))
        mend(model)
        optimizer.step()
        record = optimizer.last_step
        assert not record.skipped and math.isfinite(record.grad_norm) and record.grad_norm > 0.1
        assert record.clipped_norm == pytest.approx(0.1, rel=1e-4)
        moved = [value - before[name] for name, value in zs.full_state_dict(model, masters=True).items() if name != "head.weight"]
        close(nn.utils.get_total_norm(moved), 0.1, 0.01 if options else 1e-4)

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_clip_after_a_repair_finds_the_norm_anew(stage):
    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        model.blocks[0].into.bias.grad.fill_(math.inf)
        assert zs.clip_grad_norm_(model, 0.1) == math.inf
        repaired(model)
        assert 0.1 < zs.clip_grad_norm_(model, 0.1) < math.inf
        optimizer.step()
        assert not optimizer.last_step.skipped

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_spoilt_after_a_clip_is_not_stepped_with(stage):
    """A norm that was found finite is not that of what was written since."""

    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        before = zs.full_state_dict(model)
        assert zs.clip_grad_norm_(model, 0.1) > 0
        model.blocks[0].into.bias.grad.fill_(math.nan)
        optimizer.step()
        assert optimizer.last_step.skipped and any("blocks.0.into.bias" in name for name in optimizer.last_step.nonfinite)
        for name, value in zs.full_state_dict(model).items():
            assert torch.equal(value, before[name])

    run_threads(WORLD, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_clip_that_nobody_disturbs_is_remembered(stage, monkeypatch):
    """No second message for what is known."""
    labels = []
    exchange = SharedComm.exchange
    monkeypatch.setattr(
        SharedComm, "exchange", lambda comm, payload, label: labels.append(label) or exchange(comm, payload, label)
    )

    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        norm = zs.clip_grad_norm_(model, 0.1)
        _ = [p.grad for p in model.parameters()]  # looking changes nothing
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(norm.item())

    run_threads(WORLD, run)
    norms = [label for label in labels if label.startswith("optimizer step: gradient norm")]
    assert len(norms) == WORLD and not any("anew" in label for label in labels)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_alone_writes_to_gradients_after_a_clip_is_told(stage):
    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        zs.clip_grad_norm_(model, 0.1)
        if rank == 0:
            model.norm.bias.grad.mul_(0.5)
        optimizer.step()

    with pytest.raises((CollectiveMismatch, PeerFailed), match="gradient norm anew .*gradients were written since"):
        run_threads(WORLD, run)


# -- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_asks_alone_is_told(stage):
    def run(rank):
        model, optimizer = sharded(seeded(OddGPT), rank, optimizer=torch.optim.SGD, stage=stage)
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with pytest.raises(
        (CollectiveMismatch, PeerFailed), match=r"norm of the gradient of .*every rank must ask for it.*optimizer step"
    ):
        run_threads(WORLD, run)


def test_a_rank_that_asks_alone_and_is_left_waiting_is_told():
    def run(rank):
        model, _ = sharded(seeded(OddGPT), rank, stage=2)
        if rank == 0:
            model.head.weight.grad.norm()

    with pytest.raises((StallError, PeerFailed), match="norm of the gradient of embedding.weight"):
        run_threads(WORLD, run)


@pytest.mark.parametrize("stage", [1, 3])
def test_weighted_sums_are_refused_on_every_rank(stage):
    """They are divided by the step: a norm of them would be none of the gradient's. Also where this rank's weight is 0."""

    def run(rank):
        model, optimizer = zs.shard(copy.deepcopy(base), None, stage=stage)
        zs.backward(model, model(*BATCHES[rank]), weight=float(rank))
        with pytest.raises(zs.ZeroshardError, match=r"weighted sums.*zs\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    base = seeded(OddGPT)
    run_threads(WORLD, run)


def test_norms_that_can_not_be_had():
    def run(rank):
        model, _ = sharded(seeded(OddGPT), rank, stage=3)
        weight = model.head.weight
        with pytest.raises(zs.ShardedAccessError, match=r"p\.grad\.full_tensor"):
            weight.grad.norm(dim=1)
        with pytest.raises(zs.ShardedAccessError, match=r"under torch\.no_grad"):
            weight.norm()  # a penalty, whose gradient nobody would see
        with pytest.raises(zs.ShardedAccessError, match=r"under torch\.no_grad"):
            torch._foreach_norm([weight, weight])
        plain = torch.ones(4)
        with pytest.raises(zs.ShardedAccessError):
            torch._foreach_add_([plain], [weight.grad])

    run_threads(WORLD, run)


def test_lists_of_sharded_and_plain_tensors_a_stretch_at_a_time(monkeypatch):
    monkeypatch.setattr("zeroshard.tensor.sharded_tensor._STRETCH_NUMEL", 20)

    def run(rank):
        model, _ = sharded(seeded(OddGPT), rank, stage=2)
        grads = [p.grad for p in model.parameters()]
        before = [g.full_tensor() for g in grads]
        mixed = list(itertools.chain.from_iterable(zip(grads, (torch.ones(2) for _ in grads), strict=True)))
        torch._foreach_mul_(mixed, [float(i) for i in range(len(mixed))])
        doubled = torch._foreach_mul(mixed, 2.0)
        for index, (whole, grad) in enumerate(zip(before, grads, strict=True)):
            assert torch.equal(grad.full_tensor(), whole * (2 * index))
            assert torch.equal(doubled[2 * index].full_tensor(), whole * (2 * index) * 2)
            assert torch.equal(mixed[2 * index + 1], torch.full((2,), 2.0 * index + 1))

    run_threads(WORLD, run)


# -- real processes, both transports ---------------------------------------------------------------------------------


def over_both_transports(rank, world):
    torch.distributed.init_process_group("gloo")
    base = seeded(OddGPT)
    for comm, stage in itertools.product(("auto", "dist"), STAGES):
        model, optimizer = sharded(base, rank, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), stage=stage, comm=comm)
        plain = mean_of_gradients(base, BATCHES)
        for order, bound in ((1, 0.5), (math.inf, 0.01), (2, 0.005)):
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), bound, norm_type=order)
            close(nn.utils.clip_grad_norm_(model.parameters(), bound, norm_type=order).item(), wanted)
        model.blocks[0].into.bias.grad.fill_(math.nan)  # found by a clip, mended before the step
        assert math.isnan(zs.clip_grad_norm_(model, 0.004))
        model.blocks[0].into.bias.grad = plain.blocks[0].into.bias.grad
        optimizer.step()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.004)
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        for name, value in zs.full_state_dict(model).items():
            close(value, plain.state_dict()[name])
        if stage < 3:
            model(*BATCHES[rank]).backward()
            with torch.no_grad():
                model.norm.bias.fill_(rank)
            with pytest.raises(zs.ModelMismatch, match=r"norm\.bias \(ranks 1 hold other values than rank 0\)"):
                optimizer.step()
        zs.close(model)
    model, optimizer = sharded(base, rank, optimizer=torch.optim.SGD, stage=2, comm="dist")
    with pytest.raises((CollectiveMismatch, PeerFailed, StallError), match="every rank must ask for it"):
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.processes
def test_over_both_transports():
    run_processes(over_both_transports, WORLD)
