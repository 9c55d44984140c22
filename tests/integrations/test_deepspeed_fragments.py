"""deepspeed.utils.safe_get_*, safe_set_*: at every stage, whole, and at stage 3 as slices."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo import Stack, adamw, run_threads, same, seeded, square

import zeroshard as zs
from zeroshard.integrations.deepspeed import fragments as ds

BASE = seeded(Stack)
ONES = (torch.ones(2, 7),)
MODES = [
    {"stage": 0}, {"stage": 1, "precision": "bf16"}, {"stage": 2, "offload_optimizer": "cpu"}, {"stage": 3},
    {"stage": 3, "precision": "bf16", "map_shared": False, "offload_optimizer": "cpu"},
]  # fmt: skip
every_mode = pytest.mark.parametrize("mode", MODES, ids=str)
STATES = ("exp_avg", "exp_avg_sq")


def ready(mode, steps=1):
    model = copy.deepcopy(BASE)
    model.first.bias.requires_grad_(False)
    model, optimizer = zs.shard(model, adamw(p for p in model.parameters() if p.requires_grad), **mode)
    for _ in range(steps):
        square(model, ONES).backward()
        optimizer.step()
        optimizer.zero_grad()
    square(model, ONES).backward()
    return model, optimizer


@every_mode
def test_what_there_is_comes_back_in_fp32_and_what_there_is_not_as_none(mode):
    def run(rank):
        model, optimizer = ready(mode, steps=0)
        assert all(ds.safe_get_full_optimizer_state(p, key) is None for p in model.parameters() for key in STATES)
        optimizer.step()
        for param in model.parameters():
            found = [
                ds.safe_get_full_fp32_param(param),
                ds.safe_get_full_grad(param),
                *(ds.safe_get_full_optimizer_state(param, k) for k in STATES),
            ]
            if mode["stage"] == 3:
                slices = [ds.safe_get_local_fp32_param(param), ds.safe_get_local_grad(param)]
                slices += [ds.safe_get_local_optimizer_state(param, key) for key in STATES]
            if not param.requires_grad:
                assert found == [None] * 4 and (mode["stage"] != 3 or slices == [None] * 4)
                continue
            assert all(value.dtype == torch.float32 and value.shape == param.shape for value in found)
            if mode["stage"] == 3:
                assert all(value.dtype == torch.float32 and value.shape == param.to_local().shape for value in slices)
        with pytest.raises(
            ValueError,
            match="'momentum' not found in the optimizer state of blocks.0.up.weight, which has exp_avg, exp_avg_sq, step",
        ):
            ds.safe_get_full_optimizer_state(model.blocks[0].up.weight, "momentum")
        optimizer.zero_grad()
        assert all(ds.safe_get_full_grad(param) is None for param in model.parameters())

    run_threads(2, run)


@every_mode
def test_a_step_with_what_was_set(mode):
    values = {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in BASE.named_parameters()}

    def run(rank):
        model, optimizer = ready(mode)
        for name, param in model.named_parameters():
            value = values[name]
            local = value.reshape(-1)[param._home.start : param._home.stop]
            if mode["stage"] == 3:
                ds.safe_set_local_fp32_param(param, 2 * local)
                ds.safe_set_local_optimizer_state(param, local.square(), "exp_avg_sq")
                ds.safe_set_local_grad(param, 7 * local)
            else:
                ds.safe_set_full_fp32_param(param, 2 * value)
                ds.safe_set_full_optimizer_state(param, value.square(), "exp_avg_sq")
                ds.safe_set_full_grad(param, 7 * value)
            ds.safe_set_full_optimizer_state(param, value.reshape(-1), "exp_avg")
        ds.safe_update_full_grad_vectorized(model.parameters(), lambda grad, param: grad / 28)
        for name, param in model.named_parameters():
            if param.requires_grad:
                same(ds.safe_get_full_fp32_param(param), 2 * values[name], name, 0.0)
                same(ds.safe_get_full_grad(param), values[name] / 4, name, 0.01)
        optimizer.step()
        return {name: ds.safe_get_full_fp32_param(param) for name, param in model.named_parameters()}

    reference = copy.deepcopy(BASE)
    trained = {name: param for name, param in reference.named_parameters() if name != "first.bias"}
    optimizer = adamw(trained.values())
    for name, param in trained.items():
        param.data.copy_(2 * values[name])
        param.grad = values[name] / 4
        optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": values[name].clone(), "exp_avg_sq": values[name].square()}
    optimizer.step()
    for found in run_threads(2, run):
        assert found.pop("first.bias") is None
        for name, value in found.items():
            same(value, trained[name].detach(), name, 2e-3 if "precision" in mode else 1e-6)


def test_what_is_not_partitioned():
    def run(rank):
        plain = copy.deepcopy(BASE)
        square(plain, ONES).backward()
        weight = plain.first.weight
        assert ds.safe_get_full_fp32_param(weight) is None and ds.safe_get_full_grad(weight) is weight.grad
        ds.safe_set_full_grad(weight, torch.ones(7, 7))
        assert weight.grad.unique().tolist() == [1.0] and ds.safe_get_full_optimizer_state(weight, "exp_avg") is None
        model, _ = ready({"stage": 2})
        with pytest.raises(AssertionError, match="ZeRO stage 3"):
            ds.safe_get_local_grad(model.first.weight)
        model, _ = ready({"stage": 3})
        with pytest.raises(zs.ConfigError, match="first.weight, gradient: expected a tensor of shape"):
            ds.safe_set_full_grad(model.first.weight, torch.ones(3))

    run_threads(2, run)
