"""What users do with a CUDA device, world 1 over NCCL: each equals plain PyTorch on the same device.

CLOSE is for runs whose kernels are the same up to the optimizer's: additions in another order, and the host's own
kernels where states are offloaded. BF16 is for matmuls that round to bf16, where a library may choose another kernel for
memory that is aligned otherwise. fp32 matmuls are exact to fp32 (PyTorch's default: no TF32).

Skipped where there is no GPU (conftest.py does that for the marker).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from late_modules import Again, NormOutside, Within
from lending_cases import CASES as LENDING
from torch import Tensor, nn
from zoo import Block, Case, Stack, compare, normal_batches, reference, seeded, sgd, sharded, square

import zeroshard as zs
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine.comm.process_group import DistComm
from zeroshard.planner.measure import probe
from zeroshard.tiers import rehearsal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

CLOSE = {"rtol": 5e-5, "atol": 5e-5}
BF16 = {"rtol": 2e-2, "atol": 2e-3}
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "states on the host": {"offload_optimizer": "cpu"},
    "everything on the host": {"offload_optimizer": "cpu", "offload_gradient": "cpu", "offload_param": "cpu"},
    "everything on disk": {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"},
}
every_tier = pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gpt2(attention: str = "sdpa") -> nn.Module:
    """GPT-2 of transformers in miniature, on the device; the same values each time."""
    shape = {"n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    transformers = pytest.importorskip("transformers")  # takes seconds: not where tests are only collected
    config = transformers.GPT2Config(**shape, **no_dropout, attn_implementation=attention)
    return seeded(transformers.GPT2LMHeadModel, config).cuda()


def _adamw(params: object, **options: Any) -> torch.optim.Optimizer:
    """A large epsilon: the gradient of a bias of keys is zero but for rounding, which nothing shall blow up."""
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-6, **options)


def _tokens(device: str | torch.device = "cuda") -> list[Tensor]:
    """A batch (2, 6) for each step."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 31, (2, 6), generator=generator, device="cpu").to(device) for _ in range(STEPS)]


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS) -> nn.Module:
    """The steps [first, last) of `_tokens`."""
    for tokens in _tokens(next(model.parameters()).device)[first:last]:
        _loss(model, tokens).backward()
        _step(optimizer)
    return model


def _plain() -> nn.Module:
    model = _gpt2()
    return _train(model, _adamw(model.parameters()))


def _sharded(model: nn.Module, make: Callable[..., Any] = _adamw, **options: Any) -> tuple[nn.Module, Any]:
    return zs.shard(model, make(model.parameters()), **options)


def _check(model: nn.Module, plain: nn.Module, tolerance: dict[str, float] = CLOSE, close: bool = False) -> None:
    """Equal parameters and buffers; then the end of the sharded model, if it has come."""
    got = zs.full_state_dict(model)
    torch.testing.assert_close(got, dict(plain.state_dict()), **tolerance, check_device=False)
    if close:
        zs.close(model)


def _check_logits(model: nn.Module, plain: nn.Module) -> None:
    tokens = _tokens()[0]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


# -- training, evaluation, optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gpt2_with_clipping_then_evaluated(stage: int, attention: str) -> None:
    reference = _adamw((plain := _gpt2(attention)).parameters())
    model, optimizer = _sharded(_gpt2(attention), stage=stage)
    for tokens in _tokens():
        _loss(plain, tokens).backward()
        _loss(model, tokens).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        torch.testing.assert_close(float(zs.clip_grad_norm_(model, 0.3)), float(expected), rtol=1e-4, atol=1e-6)
        _step(reference, optimizer)
    _check(model, plain)
    _check_logits(model.eval(), plain.eval())
    assert torch.equal(*(each.generate(_tokens()[0], max_new_tokens=5, do_sample=False) for each in (model, plain)))
    zs.close(model)
    assert all(param.is_cuda for param in model.parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam, capturable": lambda params: torch.optim.Adam(params, capturable=True),
    "adamw, fused": lambda params: _adamw(params, fused=True),
    "adamw, one by one": lambda params: _adamw(params, foreach=False),
    "adamw, amsgrad": lambda params: _adamw(params, amsgrad=True),
    "adamw, rate on the device": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3).cuda(), fused=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lion": lambda params: zs.Lion(params, lr=1e-3),
}


def _stack(block: type = Block) -> nn.Module:
    return seeded(Stack, 8, 3, block).cuda()


def _train_stack(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for row in normal_batches(STEPS, 1, 4, 8)[first:last]:
        square(model, (row[0][0].cuda(),)).backward()
        _step(optimizer)


@every_tier
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_saved_and_loaded_into_another_stage(name: str, tiers: dict, tmp_path) -> None:
    """Saved after half of the steps; the saved run and the loaded one do the other half."""
    make, plain = OPTIMIZERS[name], _stack()
    _train_stack(plain, make(plain.parameters()), 0, STEPS)
    model, optimizer = _sharded(_stack(), make, stage=3, offload_path=str(tmp_path), **tiers)
    _train_stack(model, optimizer, 0, 2)
    zs.save(tmp_path / "saved", model, optimizer)
    loaded, stepper = _sharded(_stack(), make, stage=2)
    zs.load(tmp_path / "saved", loaded, stepper)
    for each, stepped in ((model, optimizer), (loaded, stepper)):
        _train_stack(each, stepped, 2, STEPS)
        _check(each, plain, {"rtol": 2e-4, "atol": 2e-4}, close=True)


@every_tier
def test_autocast(tiers: dict, tmp_path) -> None:
    """SGD: its steps are as close as the gradients are."""
    reference = sgd((plain := _gpt2()).parameters())
    model, optimizer = _sharded(_gpt2(), sgd, stage=3, offload_path=str(tmp_path), **tiers)
    for tokens in _tokens():
        losses = []
        for each in (plain, model):
            with torch.autocast("cuda", torch.bfloat16):
                losses.append(_loss(each, tokens))
            losses[-1].backward()
        _step(reference, optimizer)
        torch.testing.assert_close(*losses, **BF16)
    _check(model, plain, BF16, close=True)


# -- streams, devices, memory ------------------------------------------------------------------------------------------


@every_tier
def test_a_stream_of_the_users_own(tiers: dict, tmp_path) -> None:
    """Everything on it, an asynchronous save as well."""
    plain, whole, stream = _plain(), _gpt2(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model, optimizer = _sharded(whole, stage=3, offload_path=str(tmp_path), **tiers)
        _train(model, optimizer)
        zs.save(tmp_path / "saved", model, optimizer, asynchronous=True).wait()
        loaded, stepper = _sharded(_gpt2(), stage=0)
        zs.load(tmp_path / "saved", loaded, stepper)
        for each in (model, loaded):
            _check(each, plain, close=True)
    torch.cuda.current_stream().wait_stream(stream)


@every_tier
def test_sharded_and_evaluated_on_one_stream_and_trained_on_another(tiers: dict, tmp_path) -> None:
    plain, stream = _plain(), torch.cuda.Stream()
    model, optimizer = _sharded(_gpt2(), stage=3, offload_path=str(tmp_path), **tiers)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _train(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    _check_logits(model, plain)
    _check(model, plain, close=True)


@every_tier
def test_a_default_device(request, tiers: dict, tmp_path) -> None:
    """What belongs on the host is made there all the same."""
    request.addfinalizer(lambda: torch.set_default_device(None))
    torch.set_default_device("cuda")
    plain = _plain()
    model, optimizer = _sharded(_gpt2(), stage=3, offload_path=str(tmp_path), **tiers)
    _train(model, optimizer, last=2)
    zs.save(tmp_path / "saved", model, optimizer)
    loaded, stepper = _sharded(_gpt2(), stage=2)
    zs.load(tmp_path / "saved", loaded, stepper)
    for each, stepped in ((model, optimizer), (loaded, stepper)):
        _check(_train(each, stepped, 2), plain, close=True)


@every_tier
def test_memory_that_can_not_be_pinned(tiers: dict, tmp_path, monkeypatch) -> None:
    """Copies are slower, and nothing else changes."""
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda pointer, nbytes, flags: 2)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaGetErrorString", lambda error: "out of memory")
    model, optimizer = _sharded(_gpt2(), stage=3, offload_path=str(tmp_path), **tiers)
    _check(_train(model, optimizer), _plain(), close=True)


@every_tier
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_model_on_a_device_that_is_not_current(tiers: dict, offload: str, tmp_path) -> None:
    """On cuda:1 while cuda:0 is current. Nothing of it may be on cuda:0."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")  # the one that is current must not be the model's; the stand-in device can have two
    device, plain = torch.device("cuda:1"), _plain()
    with torch.cuda.device(device):
        comm = DistComm(dist.new_group([0]), device, 30.0, desk=JudgingDesk())
    model = _gpt2().to(device)
    zs.checkpoint_activations(model, offload=offload, min_numel=1)
    before = torch.cuda.memory_allocated(0)
    model, optimizer = _sharded(model, stage=3, comm=comm, offload_path=str(tmp_path), **tiers)
    _train(model, optimizer)
    zs.save(tmp_path / "saved", model, optimizer, asynchronous=True).wait()
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) <= before
    _check(model, plain)
    loaded, stepper = _sharded(_gpt2().to(device), stage=2, comm=comm)
    zs.load(tmp_path / "saved", loaded, stepper)
    _check(loaded, plain)
    zs.close(model)


# -- models that come into being sharded -------------------------------------------------------------------------------


class _Buffered(nn.Module):
    """Batch normalization and a table: buffers beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.register_buffer("table", torch.arange(9.0))

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(9.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) + self.table).square().mean()


def _born(way: str, stage: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if way == "meta" else "cuda"), zs.init(stage=stage) if way == "init" else nullcontext():
        return _Buffered()


@every_tier
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", ["meta", "init"])
def test_born_sharded(way: str, stage: int, tiers: dict, tmp_path) -> None:
    """The values are those that a plain construction on the device draws from the same seed."""
    if tiers and stage != 3:
        pytest.skip("tiers of parameters are stage 3's")  # no such run: zs.shard refuses it, test_tiers_options.py
    reference = sgd((plain := _born("plain", stage)).parameters())
    model, optimizer = _sharded(_born(way, stage), sgd, stage=stage, offload_path=str(tmp_path), **tiers)
    _check(model, plain, {"rtol": 0.0, "atol": 0.0})
    for (x,) in (row[0] for row in normal_batches(3, 1, 4, 7)):
        for each in (plain, model):
            each(x.cuda()).backward()
        _step(reference, optimizer)
    assert all(buffer.is_cuda for buffer in model.buffers())
    _check(model, plain, close=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_streamed_into_a_model_on_meta(stage: int, tmp_path) -> None:
    """Bit for bit what the files hold."""
    plain = _gpt2()
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    model, _ = zs.shard(model, None, stage=stage, weights=str(tmp_path))
    _check(model, plain, {"rtol": 0.0, "atol": 0.0})
    _check_logits(model, plain)


# -- what is looked at between steps -----------------------------------------------------------------------------------


@every_tier
def test_gathered_full_gradients_and_state(tiers: dict, tmp_path) -> None:
    """Read, and written where a model is gathered for it, at every step."""
    reference = _adamw((plain := _gpt2()).parameters())
    model, optimizer = _sharded(_gpt2(), stage=3, offload_path=str(tmp_path), **tiers)
    for tokens in _tokens():
        for each in (plain, model):
            _loss(each, tokens).backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        torch.testing.assert_close(dict(zs.full_gradients(model)), expected, **CLOSE, check_device=False)
        _step(reference, optimizer)
        with zs.gathered(model):
            torch.testing.assert_close(*([param.detach() for param in each.parameters()] for each in (model, plain)), **CLOSE)
        with zs.gathered(model.transformer.h[1], write=True), torch.no_grad():
            for each in (model, plain):
                torch._foreach_mul_(list(each.transformer.h[1].parameters()), 0.99)
        _check(model, plain)
    zs.close(model)


@every_tier
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_activation_checkpoints(offload: str, tiers: dict, tmp_path) -> None:
    model = _gpt2()
    zs.checkpoint_activations(model, offload=offload, path=str(tmp_path) if offload == "nvme" else None, min_numel=1)
    model, optimizer = _sharded(model, stage=3, offload_path=str(tmp_path), **tiers)
    _check(_train(model, optimizer), _plain(), close=True)


class _Drops(Block):
    """A block with dropout, drawn from the device's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


def test_dropout_is_the_same_when_it_is_recomputed() -> None:
    plain = _stack(_Drops)
    model = copy.deepcopy(plain)
    torch.cuda.manual_seed(5)
    _train_stack(plain, sgd(plain.parameters()), 0, STEPS)
    zs.checkpoint_activations(model, min_numel=1)
    model, optimizer = _sharded(model, sgd, stage=3)
    torch.cuda.manual_seed(5)
    _train_stack(model, optimizer, 0, STEPS)
    _check(model, plain)


@every_tier
def test_training_does_not_notice_a_forecast(tiers: dict, tmp_path, monkeypatch) -> None:
    for module in (probe, rehearsal):
        monkeypatch.setattr(module, "_PROBE_S", 0.02)
    model, optimizer = _sharded(_gpt2(), stage=3, offload_path=str(tmp_path), **tiers)
    _train(model, optimizer, last=2)
    forecast = zs.forecast(model, lambda: _loss(model, _tokens()[0]), accumulate=2)
    assert forecast.step_seconds > 0
    _check(_train(model, optimizer, 2), _plain(), close=True)


# -- forwards and backwards that do not go module by module --------------------------------------------------------------

FORWARDS: dict[str, tuple[Callable[[], nn.Module], list, Callable]] = {
    **LENDING,  # a forward computes with the weight of a module that it does not call
    **{build.__name__: (build, normal_batches(3, 1, 4, 7), square) for build in (Again, Within, NormOutside)},
}


@pytest.mark.parametrize("units", ["auto", "leaf"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_weights_that_are_lent_and_gradients_that_come_late(name: str, stage: int, units: str) -> None:
    """The gradients of several uses may be added in another order."""
    build, batches, loss = FORWARDS[name]
    on_device = [[tuple(t.cuda() for t in row[0])] for row in batches]  # of the first rank
    case = Case(seeded(build).cuda(), on_device, loss, optimizer=sgd, tolerance=1e-5)
    compare(sharded(case, 0, stage=stage, units=units), reference(case)[0], case.tolerance)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("wait", [True, False])
def test_states_are_away_for_a_while(stage: int, device: str, wait: bool, tmp_path) -> None:
    """Memory of the device is free in between, and what somebody else writes there meanwhile does no harm."""
    plain = _plain()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, optimizer = _sharded(_gpt2(), stage=stage, precision="fp32", offload_path=str(tmp_path))
    _train(model, optimizer, 0, 2)
    held = torch.cuda.memory_allocated() - before
    zs.offload_states(model, device=device, non_blocking=not wait)
    assert torch.cuda.memory_allocated() - before < held // 4
    other = torch.full((held,), 255, dtype=torch.uint8, device="cuda")
    with pytest.raises(zs.StatesAway):
        optimizer.step()
    del other
    zs.reload_states(model)
    _train(model, optimizer, 2, STEPS)
    _check(model, plain, close=True)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_averages_streams_and_whole_matrices(stage: int, tier: str, tmp_path) -> None:
    """An average and a stream of whole tensors, of Muon's parameters, whose states rest on any tier."""
    model = _gpt2()
    for param in model.parameters():
        param.use_muon = param.dim() == 2
    expected = copy.deepcopy(model)
    for old, new in zip(model.parameters(), expected.parameters(), strict=True):
        new.use_muon = old.use_muon
    reference = zs.Muon(expected.parameters(), lr=1e-3)
    _train(expected, reference)
    options = {"offload_optimizer": tier, "offload_path": str(tmp_path)} if tier != "none" else {}
    model, optimizer = zs.shard(model, zs.Muon(model.parameters(), lr=1e-3), stage=stage, precision="fp32", **options)
    average = zs.ema(model, 0.0)
    _train(model, optimizer)
    with average.swapped(model):
        got = {name: value for part in zs.stream_full_tensors(model, max_nbytes=1 << 16) for name, value in part.items()}
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(average.full_state_dict()[name], got[name])
    zs.close(model)
