"""deepspeed.runtime.zero.linear and .tiling compute what torch.nn.Linear does."""

import pytest
import torch
from engine_kit import config
from torch import nn
from zeroshard.deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap
from zeroshard.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.testing import run_threads


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_function_is_that_of_torch(shape, bias, autocast):
    given, results = (drawn(*shape), drawn(4, 5), drawn(4) if bias else None), []
    for function in (zero3_linear_wrap, nn.functional.linear):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = function(*given)
        wanted = [each for each in given if each is not None]
        outer = not autocast and function is zero3_linear_wrap  # which takes nothing of what surrounds backward
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
            results.append((out, *torch.autograd.grad(out.float().square().sum(), wanted)))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2 if autocast else 1e-6, atol=5e-2 if autocast else 1e-6)


def test_the_function_under_transforms():
    weight, x = drawn(4, 5).detach(), drawn(3, 5).detach()
    grads, value = torch.func.grad_and_value(lambda w: zero3_linear_wrap(x, w).sum())(weight)
    assert torch.allclose(grads, x.sum(0).expand(4, 5)) and torch.allclose(value, (x @ weight.t()).sum())
    rows = torch.func.vmap(lambda row: zero3_linear_wrap(row, weight))(x)
    assert torch.allclose(rows, x @ weight.t(), atol=1e-6)


def test_the_decorators_are_those_of_torch_for_the_device():
    from zeroshard.deepspeed.runtime.zero import linear

    for mine, torchs in ((linear.autocast_custom_fwd, torch.amp.custom_fwd), (linear.autocast_custom_bwd, torch.amp.custom_bwd)):
        assert mine.func is torchs and mine.keywords == {"device_type": deepspeed.get_accelerator().device_name()}


class BiasApart(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize(("ins", "outs"), [(1, 1), (2, 3), (5, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_are_parts_of_the_whole(ins, outs, bias):
    whole, x = nn.Linear(5, 7, bias=bias), drawn(3, 5)
    tiled = TiledLinear(5, 7, bias=bias, in_splits=ins, out_splits=outs, init_linear=whole)
    for row, (top, bottom) in zip(tiled.linears, zip(tiled.out_parts, tiled.out_parts[1:], strict=False), strict=False):
        for tile, (start, stop) in zip(row, zip(tiled.in_parts, tiled.in_parts[1:], strict=False), strict=False):
            assert torch.equal(tile.weight, whole.weight[top:bottom, start:stop]) and (tile.bias is not None) == (
                bias and stop == 5
            )
    torch.testing.assert_close(tiled(x), whole(x))
    parts = TiledLinear(
        5, 7, bias=bias, in_splits=ins, out_splits=outs, init_linear=whole, input_is_already_split=True, combine_out_splits=False
    )
    sizes = [stop - start for start, stop in zip(parts.in_parts, parts.in_parts[1:], strict=False)]
    torch.testing.assert_close(torch.cat(parts(x.split(sizes, dim=-1)), dim=-1), whole(x))
    apart = TiledLinearReturnBias(5, 7, bias=bias, in_splits=ins, out_splits=outs, init_linear=whole, linear_cls=BiasApart)
    output, theirs = apart(x)
    torch.testing.assert_close(output, nn.functional.linear(x, whole.weight))
    assert (theirs is None) == (not bias) and (theirs is None or torch.equal(theirs, whole.bias))


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"out_splits": 8}])
def test_tiles_that_there_can_not_be(splits):
    with pytest.raises(RuntimeError, match="expected a number from 1 to"):
        TiledLinear(7, 7, **splits)


def test_tiles_and_modules_train_at_stage_3():
    """Copied from a layer that is born sharded, a step is that of the layer."""

    def body(rank):
        given = config(3, 2, 1)
        with deepspeed.zero.Init(config_dict_or_path=given):
            tiled = TiledLinear(6, 4, in_splits=2, out_splits=2, linear_cls=LinearModuleForZeroStage3)
        whole = nn.Linear(6, 4)
        with torch.no_grad():
            whole.weight.copy_(torch.arange(24.0).view(4, 6) / 24)
            whole.bias.copy_(torch.arange(4.0))
        tiled.copy_params_from(whole)
        states = []
        for model in (tiled, whole):
            engine, *_ = deepspeed.initialize(model=model, config=given)
            engine.backward(engine(torch.full((2, 6), rank + 1.0)).square().sum())
            engine.step()
            states.append(zs.full_state_dict(engine.module))
        cut, state = states
        rows = [torch.cat([cut[f"linears.{out}.{part}.weight"] for part in (0, 1)], dim=1) for out in (0, 1)]
        return torch.cat(rows), torch.cat([cut[f"linears.{out}.1.bias"] for out in (0, 1)]), state["weight"], state["bias"]

    for weight, bias, expected, expected_bias in run_threads(2, body):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(bias, expected_bias, rtol=1e-5, atol=1e-6)
