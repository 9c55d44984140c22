"""DeepSpeed's optimizer classes: torch's bits, DeepSpeed's arguments, and the kernels of the host."""

import pytest
import torch
from engine_kit import batches, config
from engine_kit import net as small
from torch import nn

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.integrations.deepspeed import cpu_optimizers as ours
from zeroshard.integrations.deepspeed.stand_ins import FusedLamb, NotSupported
from zeroshard.testing import run_threads
from zeroshard.tiers.cpu_kernels import matches

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
PAIRS = [
    (ours.DeepSpeedCPUAdam, ADAM, torch.optim.AdamW, {}),
    (ours.DeepSpeedCPUAdam, ADAM | {"adamw_mode": False}, torch.optim.Adam, {}),
    (ours.FusedAdam, ADAM, torch.optim.AdamW, {}),
    (ours.FusedAdam, ADAM | {"adam_w_mode": False, "set_grad_none": False}, torch.optim.Adam, {}),
    (ours.DeepSpeedCPUAdagrad, {"lr": 1e-2, "weight_decay": 0.1}, torch.optim.Adagrad, {}),
    (ours.DeepSpeedCPULion, {"lr": 1e-3, "weight_decay": 0.1}, zs.Lion, {"betas": (0.9, 0.999)}),
    (ours.FusedLion, {"lr": 1e-3, "betas": (0.9, 0.98)}, zs.Lion, {}),
]
EACH = pytest.mark.parametrize(("cls", "options", "reference", "more"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
_OURS_ALONE = {"adamw_mode", "adam_w_mode", "set_grad_none"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5))


def train(net, optimizer, steps=4, sharded=False):
    for step in range(steps):
        net(torch.randn(6, 9, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zs.full_state_dict(net) if sharded else net.state_dict()


def expected(reference, options, more, **fused):
    net = model()
    kept = {name: value for name, value in options.items() if name not in _OURS_ALONE}
    return train(net, reference(net.parameters(), **kept, **more, **({} if reference is zs.Lion else {"fused": True})))


@EACH
def test_the_bits_of_torchs_own_class(cls, options, reference, more):
    net = model()
    got = train(net, cls(net.parameters(), **options))
    torch.testing.assert_close(got, expected(reference, options, more), rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": "cpu"}], ids=["device", "host"])
def test_sharded_they_step_with_the_fused_kernel(cls, options, reference, more, offload):
    nets = [model(), model()]  # drawn here: threads share torch's generator

    def work(rank):
        net = nets[rank]
        optimizer = cls(net.parameters(), **options)
        assert matches(optimizer) and type(optimizer) is cls
        net, optimizer = zs.shard(net, optimizer, stage=2, **offload)
        assert optimizer.core.host is None or optimizer.core.host.fused
        assert isinstance(optimizer, cls)
        return train(net, optimizer, sharded=True)

    for got in run_threads(2, work):
        torch.testing.assert_close(got, expected(reference, options, more), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [None, 0, 2])
def test_adagrad_takes_sparse_gradients(stage):
    def train_embedding(sparse, cls, stage=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2))
        optimizer = cls(net.parameters(), lr=0.1)
        if stage is not None:
            net, optimizer = zs.shard(net, optimizer, stage=stage)
        for step in range(3):
            net(torch.tensor([1, 2, 1, step])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict() if stage is None else zs.full_state_dict(net)

    got = train_embedding(True, ours.DeepSpeedCPUAdagrad, stage)
    torch.testing.assert_close(got, train_embedding(False, torch.optim.Adagrad), rtol=0, atol=1e-6)


def test_arguments_and_attributes_are_deepspeeds():
    params = list(model().parameters())
    cpu = ours.DeepSpeedCPUAdam(params, fp32_optimizer_states=False)
    assert cpu.adam_w_mode is True and cpu.fp32_optimizer_states is False and cpu.param_groups[0]["bias_correction"] is True
    fused = ours.FusedAdam(params, 1e-3, True, (0.9, 0.999), 1e-8, False, 0.5)
    assert (
        fused.adam_w_mode == 0
        and fused.param_groups[0]["weight_decay"] == 0.5
        and not fused.param_groups[0]["decoupled_weight_decay"]
    )
    params[0].grad = torch.ones_like(params[0])
    ours.FusedLion(params, set_grad_none=False).zero_grad()
    assert params[0].grad.abs().max() == 0
    ours.FusedAdam(params).zero_grad()
    assert params[0].grad is None


@pytest.mark.parametrize("cls", [ours.DeepSpeedCPUAdam, ours.FusedAdam, ours.DeepSpeedCPUAdagrad], ids=lambda cls: cls.__name__)
def test_variants_that_no_kernel_has_are_refused(cls):
    params = list(model().parameters())
    with pytest.raises(zs.ConfigError, match="amsgrad"):
        cls(params, amsgrad=True)
    if cls is not ours.DeepSpeedCPUAdagrad:
        with pytest.raises(zs.ConfigError, match="bias_correction"):
            cls(params, bias_correction=False)
        with pytest.raises(zs.ConfigError, match="amsgrad"):
            cls([{"params": params, "amsgrad": True}])


def test_lamb_says_what_to_use_instead():
    with pytest.raises(NotSupported, match="FusedAdam"):
        FusedLamb(model().parameters(), lr=1e-3)


LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES16 = {"bf16_optimizer_states": True}
ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("bf16", "zero", "params", "masters", "dtype"),
    [
        (LOW, ON_HOST, {}, "split", torch.float32),
        (LOW, ON_HOST, {"fp32_optimizer_states": False}, False, torch.bfloat16),
        (LOW | STATES16, ON_HOST, {}, False, torch.bfloat16),
        (LOW | STATES16, {}, {"fp32_optimizer_states": True}, False, torch.bfloat16),
    ],
    ids=["fp32 states", "low CPUAdam", "on the host", "on the device"],
)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_masters_have_states_of_the_dtype_that_deepspeed_gives_them(stage, own, bf16, zero, params, masters, dtype):
    given = config(stage, 2, 1, 0.0, bf16=bf16, optimizer={"type": "AdamW", "params": {"lr": 1e-2, **params}})
    given["zero_optimization"].update(zero)
    states = params.get("fp32_optimizer_states", masters == "split" or not zero)

    def work(rank):
        net = small()
        optimizer = ours.DeepSpeedCPUAdam(net.parameters(), lr=1e-2, fp32_optimizer_states=states) if own else None
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=given)
        for step in batches(2, 1):
            engine.backward(engine(*step[0][rank]))
            engine.step()
        assert engine.module._zeroshard.config.master_weights == masters
        found = zs.full_optimizer_state(engine.module)
        return {found[name][state].dtype for name in found for state in ("exp_avg", "exp_avg_sq")}

    assert run_threads(2, work) == [{dtype}] * 2


def test_an_optimizer_for_fp32_states_is_refused_where_the_configuration_says_bf16():
    given = config(2, 1, 1, 0.0, bf16=LOW | STATES16)
    given["zero_optimization"].update(ON_HOST)
    net = small()
    with pytest.raises(
        AssertionError, match="DeepSpeedCPUAdam was made for fp32 states: make it with fp32_optimizer_states=False"
    ):
        deepspeed.initialize(model=net, optimizer=ours.DeepSpeedCPUAdam(net.parameters()), config=given)
