"""Weight norm on a parameter that is born in slices and gathered for it, as Transformers initialises Wav2Vec2: equal to one process."""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch
from engine_kit import install_in_child
from helpers import seeded
from torch import Tensor, nn
from zoo import run_threads, same

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.integrations.deepspeed.partition import GatheredParameters, Init, is_zero_param, register_external_parameter

Norm = Callable[..., nn.Module]
NORMS: dict[str, Norm] = {
    "hooks": lambda layer: nn.utils.weight_norm(layer, name="weight", dim=2),
    "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer, name="weight", dim=2),
    "several": lambda layer: nn.utils.parametrizations.weight_norm(
        nn.utils.parametrizations.weight_norm(layer, "weight", 2), "bias"
    ),
    "computed at once": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Scaled()) or layer,
}
X = torch.linspace(-1, 1, 40).view(2, 4, 5)


class Scaled(nn.Module):
    """A parametrization of torch's safe kind: it is computed when it is registered, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2.0


@contextlib.contextmanager
def whole(params: list[nn.Parameter], style: str):
    """Gathered to be written, natively or by DeepSpeed's interface."""
    gathers = {"plain": contextlib.nullcontext, "native": lambda p: zs.gathered(p, write=True)}
    with gathers.get(style, lambda p: GatheredParameters(p, modifier_rank=0))(params):
        yield


class Positions(nn.Module):
    """A positional convolution, initialised as Transformers does it."""

    def __init__(self, norm: Norm, style: str) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.Linear(5, 2)
        with whole(list(self.parameters()), style), torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(0.5, 2, param.numel()).view(param.shape))
        with whole([self.conv.weight, self.conv.bias], style):
            self.conv = norm(self.conv)
        if style == "deepspeed":
            for param in self.conv.parameters():
                register_external_parameter(self, param)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("style", ["native", "deepspeed"])
@pytest.mark.parametrize("norm", NORMS)
def test_it_trains_as_on_one_process(norm, style):
    plain = Positions(NORMS[norm], "plain")
    wanted = trained(plain, adamw(plain)).state_dict()

    def run(rank: int) -> dict[str, Tensor]:
        with zs.init(stage=3) if style == "native" else Init(dtype=torch.float32):
            model = Positions(NORMS[norm], style)
        cut = {name: param.to_local().numel() for name, param in model.named_parameters()}
        assert cut.keys() == dict(plain.named_parameters()).keys()
        assert cut["last.weight"] == 5, "born in slices, as all others are"
        assert all(
            size < plain.get_parameter(name).numel() for name, size in cut.items() if plain.get_parameter(name).numel() > 1
        )
        model, optimizer = zs.shard(model, adamw(model), stage=3, map_shared=False)
        return zs.full_state_dict(trained(model, optimizer))

    for found in run_threads(2, run):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            same(found[name], value, name, 1e-6)


def test_the_values_are_those_of_rank_0_and_a_failure_leaves_nothing_open():
    def run(rank: int) -> list[float]:
        with Init(dtype=torch.float32):
            layer = nn.Linear(3, 2)
            for error in (KeyError, None):
                with contextlib.suppress(KeyError), GatheredParameters(layer.weight, modifier_rank=0):
                    with GatheredParameters(layer.bias, modifier_rank=0):
                        layer.made = nn.Parameter(torch.full((4,), 1.0 + rank))
                        assert not hasattr(layer.made, "ds_id")
                    assert not hasattr(layer.made, "ds_id"), "the outermost one cuts"
                    if error is not None:
                        raise error
            layer.later = nn.Parameter(torch.full((2,), 3.0))
            assert is_zero_param(layer.later) and hasattr(layer.made, "ds_id")
        assert hasattr(layer.later, "ds_id")
        return layer.made.full_tensor().tolist()

    assert run_threads(2, run) == [[1.0] * 4] * 2


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    return seeded(lambda: Wav2Vec2Model(Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
    )))  # fmt: skip


SOUND = torch.linspace(-1, 1, 600).view(2, 300).sin()


def _of_transformers(rank: int, ranks: int, values: dict[str, Tensor]) -> dict[str, Tensor] | str:
    install_in_child()
    try:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        asked = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        kept = HfDeepSpeedConfig(asked)
        with deepspeed.zero.Init(config_dict_or_path=asked):
            model = wav2vec2()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(values[name])
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=asked)
        assert kept.is_zero3()
        for _ in range(2):
            engine.backward(engine(SOUND).last_hidden_state.square().mean())
            engine.step()
        return zs.full_state_dict(engine.module)
    except Exception:
        return traceback.format_exc()


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))), reason="needs transformers, accelerate"
)
@pytest.mark.processes
@pytest.mark.limit(180)
def test_wav2vec2_of_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = wav2vec2()
    values = {name: param.detach().clone() for name, param in plain.named_parameters()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(SOUND).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in run_processes(_of_transformers, 2, values, check=False):
        assert isinstance(result.value, dict), result.value or result.error
        for name, param in plain.named_parameters():
            same(result.value[name], param.detach(), name, 1e-5)
