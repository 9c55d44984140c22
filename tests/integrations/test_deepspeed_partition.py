"""deepspeed.zero on zeroshard: Init, GatheredParameters, and the attributes of partitioned parameters."""

from __future__ import annotations

import copy
import json
import logging
import threading

import pytest
import torch
from torch import nn
from zoo import Stack, adamw, run_threads, same, seeded, square

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.comm.launch import run_processes
from zeroshard.integrations.deepspeed import logs, partition
from zeroshard.integrations.deepspeed.accelerator import get_accelerator
from zeroshard.integrations.deepspeed.partition import GatheredParameters, Init, ZeroParamStatus

BASE = seeded(Stack)
ONES = (torch.ones(2, 7),)
STAGE3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "train_batch_size": 2}
one_at_a_time = threading.Lock()  # ranks share torch's generator


@pytest.fixture
def told():
    """What is said of DeepSpeed's interface."""
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logs.logger.addHandler(handler)
    logs._said.clear()
    yield records
    logs.logger.removeHandler(handler)


def born(**options):
    with Init(**options), one_at_a_time:
        return seeded(Stack)


DTYPES = {
    "no config": ({}, torch.float16 if get_accelerator().is_fp16_supported() else torch.bfloat16), "given": ({"dtype": torch.bfloat16}, torch.bfloat16), "fp32": ({"config_dict_or_path": STAGE3}, torch.float32),
    "bf16": ({"config_dict_or_path": {**STAGE3, "bf16": {"enabled": True}}}, torch.bfloat16),
    "fp16": ({"config": {**STAGE3, "fp16": {"enabled": True}}}, torch.float16),
    "given and bf16": ({"dtype": torch.float32, "config": {**STAGE3, "bf16": {"enabled": True}}}, torch.float32),
    "no override": ({"tensor_overrides": []}, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("case", DTYPES)
def test_born_in_the_dtype_of_the_configuration(case):
    options, dtype = DTYPES[case]

    def run(rank):
        constructors = torch.empty, torch.nn.Module.__init__, torch.nn.functional.linear
        model = born(**options)
        assert all(p.dtype == p.ds_tensor.dtype == dtype and hasattr(p, "ds_id") for p in model.parameters())
        assert sum(p.ds_tensor.numel() for p in model.parameters()) < 0.6 * sum(p.ds_numel for p in model.parameters())
        with one_at_a_time:
            after = nn.Linear(2, 2).weight
        assert not hasattr(after, "ds_id") and after.dtype == torch.float32
        assert constructors == (torch.empty, torch.nn.Module.__init__, torch.nn.functional.linear)
        if dtype == torch.float32:
            for name, value in BASE.state_dict().items():
                same(model.get_parameter(name).full_tensor(), value, name, 0.0)

    run_threads(2, run)


def test_where_nothing_is_partitioned(told, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "train_batch_size": 2}))

    def run(rank):
        for model in (born(enabled=False), born(config_dict_or_path=str(path))):
            assert not any(hasattr(p, "ds_id") for p in model.parameters()) and type(model.first.weight) is nn.Parameter
        with pytest.raises(RuntimeError, match="both enabled"):
            Init(config={**STAGE3, "bf16": {"enabled": True}, "fp16": {"enabled": True}})
        with pytest.raises(ValueError, match="remote_device: expected None"):
            Init(remote_device="gpu")
        Init(zero_quantized_weights=True, dtype=torch.float32, remote_device="cpu", pin_memory=True)

    run_threads(2, run)
    assert [text.split(":")[1][:40] for text in told] == [
        " the configuration asks for stage 2, whi",
        " zero_quantized_weights has no effect",
    ]


def test_nested_and_shut_for_a_while():
    def run(rank):
        with Init(config_dict_or_path=STAGE3):
            with Init(config_dict_or_path=STAGE3):
                inner = nn.Linear(4, 4)
            outer = nn.Linear(4, 4)
            partition.shutdown_init_context()
            plain = nn.Linear(4, 4)
            partition.restore_init_context()
            again = nn.Linear(4, 4)
        after = nn.Linear(4, 4)
        return [hasattr(module.weight, "ds_id") for module in (inner, outer, plain, again, after)]

    assert run_threads(2, run) == [[True, True, False, True, False]] * 2


def test_a_module_that_there_is():
    def run(rank):
        model = copy.deepcopy(BASE)
        model.tied = nn.Linear(7, 7, bias=False)
        model.tied.weight = model.first.weight
        weight = model.first.weight
        with torch.no_grad():
            model.first.bias.fill_(rank)  # rank 0's count
        assert Init(module=model, config_dict_or_path=STAGE3).module is model
        assert model.tied.weight is model.first.weight is weight and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        same(weight.full_tensor(), BASE.first.weight, "weight", 0.0)
        assert not model.first.bias.full_tensor().any()
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        square(model, ONES).backward()
        optimizer.step()

    run_threads(2, run)


def seeds(rank, world_size):
    torch.manual_seed(rank)
    own = torch.get_rng_state()
    with Init(config_dict_or_path=STAGE3):
        model = Stack()
    assert torch.equal(torch.get_rng_state(), own) == (rank != 0)  # rank 0's goes on
    torch.manual_seed(0)
    expected = Stack()
    return all(torch.equal(p.full_tensor(), e) for p, e in zip(model.parameters(), expected.parameters(), strict=True))


def test_ranks_with_other_seeds_get_what_rank_0_draws():
    assert run_processes(seeds, 2) == [True, True]


# -- GatheredParameters --------------------------------------------------------------------------------------------


def test_apply_inside_of_init_sees_whole_parameters_and_rank_0_counts():
    def run(rank):
        def write(module):
            if isinstance(module, nn.Linear):
                assert module.weight.t().shape == (module.in_features, module.out_features)  # no slice has that
                module.weight.data.copy_(torch.eye(*module.weight.shape) * (rank + 1))

        class Applies(nn.Sequential):
            def __init__(self, *layers):
                super().__init__(*layers)
                self.apply(write)

        with Init(config_dict_or_path=STAGE3):
            model = Applies(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6)))
            with GatheredParameters([model[0].weight], modifier_rank=0):
                model.apply(write)  # what is gathered already stays so
                assert model[0].weight[0, 0] == rank + 1
        seen = []
        model.apply(lambda module: seen.append(partition.is_zero_param(getattr(module, "weight", None))))
        assert seen == [True, True, False, False]  # at rest again, and torch's apply outside
        with GatheredParameters(model.parameters()):
            return [layer.weight.detach().clone() for layer in (model[0], model[1][0])]

    for weights in run_threads(2, run):
        for weight in weights:
            assert torch.equal(weight, torch.eye(*weight.shape))


def test_modules_of_skip_init_are_whole_until_they_are_sharded():
    def run(rank):
        with Init(config_dict_or_path=STAGE3):
            model = nn.Sequential(nn.utils.skip_init(nn.Linear, 6, 2), nn.Linear(2, 2))
            nn.init.constant_(model[0].weight, rank + 1.0)
            nn.init.constant_(model[0].bias, 0.0)
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        return zs.full_state_dict(model)["0.weight"]

    assert all(torch.equal(weight, torch.ones(2, 6)) for weight in run_threads(2, run))


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_what_one_rank_writes(stage):
    """None: between Init and initialize. Below stage 3 there is nothing to gather, and nothing happens."""

    def run(rank):
        model = born(config=STAGE3) if stage is None else zs.shard(copy.deepcopy(BASE), None, stage=stage)[0]
        weight = model.first.weight
        given = {weight, model.first.bias, nn.Parameter(torch.ones(1))}  # in any order
        with GatheredParameters(given, modifier_rank=0), torch.no_grad():
            if stage != 1:
                assert weight.ds_status is ZeroParamStatus.AVAILABLE and type(copy.deepcopy(weight)) is nn.Parameter
                if rank == 0:
                    weight.fill_(3)
        with GatheredParameters(weight, enabled=False), GatheredParameters(None), GatheredParameters([]):
            assert hasattr(weight, "ds_id") is (stage != 1)
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()

    for value in run_threads(2, run):
        same(value, BASE.first.weight.detach() if stage == 1 else torch.full((7, 7), 3.0), "weight", 0.0)


def test_a_write_without_a_rank_raises_where_checks_are_asked_for():
    """On every rank, also where one alone has written."""

    def body(rank):
        config = {**STAGE3, "zero_optimization": {"stage": 3, "enable_sanity_checks": True}}
        with Init(config_dict_or_path=config), one_at_a_time:
            model = nn.Linear(4, 4)
        with pytest.raises(RuntimeError, match="in-place modification of Linear.weight"):
            with GatheredParameters(model.weight), torch.no_grad():
                if rank == 1:
                    model.weight.zero_()
        with GatheredParameters(model.weight):
            return bool(model.weight.abs().sum() > 0)

    assert run_threads(2, body) == [True, True]


def test_a_write_without_a_rank_is_dropped_and_told_once(told):
    def run(rank):
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=3)
        for _ in range(2):
            with GatheredParameters(p for p in model.parameters()), torch.no_grad():
                model.first.weight.fill_(3)
        with (
            pytest.raises(zs.ShardedWriteError, match="replaced inside"),
            GatheredParameters(model.first.weight, modifier_rank=0),
        ):
            model.first.weight = nn.Parameter(torch.ones(7, 7))
        return zs.full_state_dict(model)["first.weight"]

    for value in run_threads(2, run):
        same(value, BASE.first.weight.detach(), "weight", 0.0)
    assert len(told) == 1 and "first.weight (on rank 0)" in told[0] and "modifier_rank=0" in told[0]


def test_in_the_forward_gradients_reach_the_parameter():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x):
            with GatheredParameters(self.first.weight, fwd_module=self):
                return (self.last(self.first(x)) @ self.first.weight).square().sum()

    base = seeded(Uses)
    plain = copy.deepcopy(base)
    plain(*ONES).backward()

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3, map_shared=False)
        partition.attach(model)
        model(*ONES).backward()
        assert len(model._external_params) == 1
        partition.unregister_external_parameter(model, model.first.weight)
        with pytest.raises(RuntimeError, match="not a registered"):
            partition.unregister_external_parameter(model, model.first.weight)
        with pytest.raises(RuntimeError, match="expected an nn.Parameter"):
            partition.register_external_parameter(model, torch.ones(1))
        return zs.full_gradients(model)

    for grads in run_threads(2, run):
        for name, param in plain.named_parameters():
            same(grads[name], param.grad, name, 1e-6)


# -- attributes ----------------------------------------------------------------------------------------------------


def test_what_a_partitioned_parameter_shows():
    def run(rank):
        model = born(config=STAGE3)
        statuses = [{p.ds_status for p in model.parameters()}]
        model, _ = zs.shard(model, None, stage=3, map_shared=False)
        partition.attach(model)
        weight, seen = model.blocks[0].up.weight, []
        model.blocks[0].up.register_forward_hook(
            lambda module, *_: seen.append(
                (module.weight.ds_status, module.weight.ds_id, weight.ds_status, weight.ds_active_sub_modules)
            )
        )
        assert (weight.ds_shape, weight.ds_numel, weight.ds_persist) == (weight.shape, 98, False)
        assert weight.ds_tensor.shape == (weight.ds_tensor.ds_numel,) and weight.partition_numel() == 49
        assert weight.ds_summary()["status"] == "NOT_AVAILABLE" and weight.ds_summary()["ds_shape"] == (14, 7)
        model(*ONES)
        ((inside, number, outside, active),) = seen
        assert inside is outside is ZeroParamStatus.AVAILABLE and number == weight.ds_id and len(active) == 1
        statuses.append({p.ds_status for p in model.parameters()})
        assert len({p.ds_id for p in model.parameters()}) == len(list(model.parameters()))
        ids = [p.ds_id for p in model.parameters()]
        weight.all_gather()
        weight.all_gather_coalesced([weight, model.first.weight]).wait()
        assert (
            weight.ds_status is model.first.weight.ds_status is ZeroParamStatus.AVAILABLE
            and weight.ds_summary()["grad_shape"] is None
        )
        assert weight.ds_tensor.numel() <= 98 and weight.data.shape == (14, 7)
        weight.data.fill_(2)
        model.first.weight.data.fill_(2)
        weight.partition(has_been_updated=True)
        weight.partition([weight, model.first.weight])
        state = zs.full_state_dict(model)
        assert (state["blocks.0.up.weight"] == 2).all() and torch.equal(state["first.weight"], BASE.first.weight)
        partition.detach(model)
        zs.close(model)
        assert not any(hasattr(p, "ds_id") or hasattr(p, "ds_status") for p in model.parameters())
        return statuses, ids

    (first, ids), (other, others) = run_threads(2, run)
    assert first == other == [{ZeroParamStatus.NOT_AVAILABLE}] * 2 and ids == others


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_parameters_have_none_of_it(stage):
    def run(rank):
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=stage)
        with zs.gathered(model):
            inside = list(model.parameters())
            assert not any(hasattr(p, name) for p in inside for name in (*partition._PROPERTIES, *partition._METHODS))
        assert not any(hasattr(p, name) for p in model.parameters() for name in (*partition._PROPERTIES, *partition._METHODS))
        assert not hasattr(torch.ones(1), "ds_id")

    run_threads(2, run)


# -- parameters that persist: small ones, whole at rest ----------------------------------------------------------------


@pytest.mark.parametrize("is_born", [False, True])
def test_small_parameters_persist(is_born):
    """Up to 100,000 elements by default; here up to 15, which are the biases."""
    section = {"stage": 3, "stage3_param_persistence_threshold": 15}
    config = {"zero_optimization": section, "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}

    def run(rank):
        model = born(config_dict_or_path=config) if is_born else copy.deepcopy(BASE)
        engine = deepspeed.initialize(model=model, config=config)[0]
        for name, param in model.named_parameters():
            small = param.numel() <= 15
            assert (param.ds_persist, param.ds_status) == (
                small,
                ZeroParamStatus.AVAILABLE if small else ZeroParamStatus.NOT_AVAILABLE,
            )
            assert param.ds_numel == param.numel() and param.ds_summary()["persist"] == small
            assert param.ds_tensor.numel() <= param.numel()
            if small:
                same(param.data, BASE.get_parameter(name).data, name, 0.0)
                same(copy.deepcopy(param), BASE.get_parameter(name), name, 0.0)
        assert sum(p.ds_tensor.numel() for p in model.parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
        with GatheredParameters(list(model.parameters())):
            for name, param in model.named_parameters():
                same(param.data, BASE.get_parameter(name).data, name, 0.0)
        with GatheredParameters([model.first.bias, model.first.weight], modifier_rank=1), torch.no_grad():
            if rank == 1:
                model.first.bias.fill_(0.5)
                model.first.weight.zero_()
        assert bool((model.first.bias == 0.5).all())
        engine.backward(square(engine, ONES))
        engine.step()
        return zs.full_state_dict(model)

    first, second = run_threads(2, run)
    expected = copy.deepcopy(BASE)
    with torch.no_grad():
        expected.first.bias.fill_(0.5)
        expected.first.weight.zero_()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.0)
    square(expected, ONES).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    optimizer.step()
    for name, value in expected.state_dict().items():
        same(first[name], value, name, 1e-6)
        same(second[name], value, name, 1e-6)
