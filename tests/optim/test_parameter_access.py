"""zs.value_of, gradient_of, state_of: what rests where, whole and as a slice, read and written, on every tier."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo import Stack, adamw, run_threads, same, seeded, square

import zeroshard as zs

BASE = seeded(Stack)
ONES = (torch.ones(2, 7),)
MODES = {
    "0": {"stage": 0}, "0 bf16": {"stage": 0, "precision": "bf16"}, "1 fp16": {"stage": 1, "precision": "fp16", "initial_loss_scale": 8.0}, "2": {"stage": 2},
    "2 bf16 host": {"stage": 2, "precision": "bf16", "offload_optimizer": "cpu", "offload_gradient": "cpu"},
    "3": {"stage": 3}, "3 bf16": {"stage": 3, "map_shared": False, "precision": "bf16"},
    "3 host": {"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu", "offload_gradient": "cpu", "precision": "fp16", "initial_loss_scale": 8.0},
    "3 disk": {"stage": 3, "offload_param": "nvme", "offload_optimizer": "nvme", "offload_gradient": "nvme", "precision": "bf16"},
}  # fmt: skip
every_mode = pytest.mark.parametrize("mode", MODES)


def ready(mode, tmp_path, steps=1):
    """After some steps and one more backward."""
    options = dict(MODES[mode])
    if "disk" in mode:
        options["offload_path"] = str(tmp_path)
    model = copy.deepcopy(BASE)
    model.blocks[0].up.bias.requires_grad_(False)
    model, optimizer = zs.shard(model, adamw(p for p in model.parameters() if p.requires_grad), **options)
    for _ in range(steps):
        square(model, ONES).backward()
        optimizer.step()
        optimizer.zero_grad()
    square(model, ONES).backward()
    return model, optimizer


def whole(part, comm):
    """What the slices of all ranks are together."""
    return torch.cat(
        [torch.frombuffer(bytearray(p), dtype=torch.float32) for p in comm.exchange(part.float().numpy().tobytes(), "test") if p]
    )


@every_mode
def test_what_is_read(mode, tmp_path):
    def run(rank):
        model, optimizer = ready(mode, tmp_path, steps=0)
        comm = model._zeroshard.comm
        weight = model.blocks[0].up.weight
        assert zs.state_of(weight, "exp_avg").full() is None and zs.state_of(weight, "exp_avg").local() is None
        optimizer.step()
        gradients, masters, states = (
            zs.full_gradients(model),
            zs.full_state_dict(model, masters=True),
            zs.full_optimizer_state(model),
        )
        for name, param in model.named_parameters():
            value, gradient, first = zs.value_of(param), zs.gradient_of(param), zs.state_of(param, "exp_avg")
            same(value.full(), masters[name], name, 0.0)
            same(whole(value.local(), comm).view(param.shape), masters[name].float(), name, 0.0)
            if not param.requires_grad:
                assert gradient.full() is None and gradient.local() is None and first.full() is None and first.local() is None
                continue
            same(gradient.full(), gradients[name], name, 0.0)
            same(whole(gradient.local(), comm).view(param.shape), gradients[name].float(), name, 0.0)
            same(first.full(), states[name]["exp_avg"], name, 0.0)
            same(whole(first.local(), comm).view(param.shape), states[name]["exp_avg"].float(), name, 0.0)
            assert int(zs.state_of(param, "step").full()) == 1 and zs.state_of(param, "nothing").full() is None
        optimizer.zero_grad()
        assert zs.gradient_of(weight).full() is None and zs.gradient_of(weight).local() is None

    run_threads(3, run)


def new(param, factor):
    return torch.linspace(-1, 1, param.numel()).view(param.shape) * factor


@every_mode
@pytest.mark.parametrize("local", [False, True])
def test_what_is_written_is_what_the_step_uses(mode, local, tmp_path):
    """Value, gradient and states are set; then a step equals that of one process with these."""

    def put(part, value):
        part.set_local(value.reshape(-1)[part.home.start : part.home.stop]) if local else part.set_full(value)

    def run(rank):
        model, optimizer = ready(mode, tmp_path)
        zs.clip_grad_norm_(model, 1e9)  # its norm is not that of what is written below
        for param in model.parameters():
            if param.requires_grad:
                put(zs.gradient_of(param), new(param, 0.25))
                put(zs.state_of(param, "exp_avg"), new(param, 2.0))
                put(zs.state_of(param, "exp_avg_sq"), new(param, 3.0).square())
            put(zs.value_of(param), new(param, 1.01))
        found = [(zs.value_of(p).full(), zs.gradient_of(p).full(), zs.state_of(p, "exp_avg").full()) for p in model.parameters()]
        low = zs.full_state_dict(model)
        optimizer.step()
        assert not optimizer.last_step.skipped
        return (
            found,
            low,
            optimizer.last_step.grad_norm,
            zs.full_state_dict(model, masters=True),
            {n: p.requires_grad for n, p in model.named_parameters()},
        )

    expected = copy.deepcopy(BASE)
    params = dict(expected.named_parameters())
    reference = adamw(p for n, p in params.items() if n != "blocks.0.up.bias")
    for param in reference.param_groups[0]["params"]:
        param.data.copy_(new(param, 1.01))
        param.grad = new(param, 0.25)
        reference.state[param] = {"step": torch.tensor(1.0), "exp_avg": new(param, 2.0), "exp_avg_sq": new(param, 3.0).square()}
    norm = torch.stack([p.grad.norm() for p in reference.param_groups[0]["params"]]).norm()
    reference.step()
    for found, low, measured, after, trained in run_threads(2, run):
        assert abs(measured - norm) < 1e-3 * norm
        for (value, gradient, state), (name, param) in zip(found, params.items(), strict=True):
            exact = new(param, 1.01) if trained[name] else new(param, 1.01).to(value.dtype)
            same(value, exact, name, 0.0)
            same(low[name], new(param, 1.01).to(low[name].dtype), name, 0.0)
            if trained[name]:
                same(gradient.float(), new(param, 0.25), name, 0.01)
                same(state, new(param, 2.0), name, 0.0)
                same(after[name].float(), param.detach(), name, 0.0 if "precision" not in MODES[mode] else 2e-3)


@every_mode
def test_what_does_not_fit_raises_on_every_rank_and_changes_nothing(mode, tmp_path):
    def run(rank):
        model, optimizer = ready(mode, tmp_path)
        weight, frozen = model.blocks[0].up.weight, model.blocks[0].up.bias
        before = zs.full_state_dict(model, masters=True), zs.full_gradients(model)
        for part in (zs.value_of(weight), zs.gradient_of(weight), zs.state_of(weight, "exp_avg")):
            with pytest.raises(
                zs.ConfigError, match=r"blocks.0.up.weight, .*expected a tensor of shape \(14, 7\), got a .*\(on rank 1\)"
            ):
                part.set_full(torch.ones(14, 7 + rank))
            with pytest.raises(zs.ConfigError, match=r"\(on rank 0\)"):
                part.set_local(torch.ones(part.home.stop - part.home.start + 1 - rank))
            if part.replicated:
                with pytest.raises(zs.ConfigError, match="ranks .1. gave other values than rank 0"):
                    part.set_full(torch.full((14, 7), float(rank)))
        with pytest.raises(zs.ConfigError, match="no state of this name"):
            zs.state_of(weight, "momentum").set_full(torch.ones(14, 7))
        with pytest.raises(zs.ConfigError, match="frozen"):
            zs.gradient_of(frozen).set_full(torch.ones(14))
        after = zs.full_state_dict(model, masters=True), zs.full_gradients(model)
        assert all(
            torch.equal(value, one[name])
            for one, other in zip(before, after, strict=True)
            for name, value in other.items()
            if value is not None
        )

    run_threads(2, run)


def test_whose_parameters():
    def run(rank):
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=3)
        assert (
            zs.value_of(model.first.weight).full().shape == (7, 7) and zs.state_of(model.first.weight, "exp_avg").full() is None
        )
        with pytest.raises(zs.ZeroshardError, match="given to zs.shard"):
            zs.value_of(BASE.first.weight)
        with zs.gathered(model), pytest.raises(zs.ZeroshardError, match="first.weight is gathered by zs.gathered"):
            zs.value_of(model.first.weight)

    run_threads(2, run)
