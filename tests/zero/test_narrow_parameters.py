"""What a quantizer has made (fp8, fp4, their exponents) keeps its dtype and its bits under every precision, stage and tier, and in files."""

import copy
import json
import struct

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from helpers import seeded
from offloading import tiers
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.checkpoint.safetensors import SAFETENSORS_DTYPES
from zeroshard.integrations.deepspeed import zero_to_fp32
from zeroshard.testing import run_threads

NARROW = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
WIDTH = 8


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


class Scaled(nn.Module):
    """A linear map of frozen narrow values, whose scales and bias are trained. It decodes them by their bits, as all dtypes allow."""

    def __init__(self, dtype, seed=3):
        super().__init__()
        drawn = torch.randint(0, 256, (2, WIDTH, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(drawn[0].view(dtype), requires_grad=False)
        self.register_buffer("table", drawn[1].view(dtype))
        self.scale, self.bias = nn.Parameter(torch.full((WIDTH, 1), 0.01)), nn.Parameter(torch.zeros(WIDTH))
        self.seen = None

    def forward(self, x):
        self.seen = self.weight.dtype, self.table.dtype
        values = (self.weight.view(torch.uint8).to(x.dtype) - 128) + self.table.view(torch.uint8).to(x.dtype) / 256
        return x + torch.tanh(F.linear(x, values * self.scale, self.bias))


def build(dtype, seed=3):
    model = nn.Sequential(Scaled(dtype, seed), Scaled(dtype, seed + 1))
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)


INPUTS = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def steps(model, optimizer, rank):
    for _ in range(2):
        model(INPUTS[rank]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def as_bytes():
    """The same runs with uint8 in the place of the narrow dtype, by precision."""

    def run(rank, precision):
        model, optimizer = build(torch.uint8)
        zs.shard(model, optimizer, stage=0, precision=precision)
        steps(model, optimizer, rank)
        return zs.full_state_dict(model, masters=True)

    return {precision: run_threads(2, run, precision)[0] for precision in ("fp32", "bf16", "fp16")}


PLACES = {
    **{
        f"stage {stage}, {precision}": {"stage": stage, "precision": precision}
        for stage in range(4)
        for precision in ("bf16", "fp16", "fp32")
    },
    "packed": {"stage": 3, "precision": "bf16", "zero_quantized_weights": True},
    "host": {"stage": 3, "precision": "bf16", "on": ("cpu", "none", "cpu")},
    "disk": {"stage": 3, "precision": "bf16", "on": ("nvme", "none", "nvme")},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_frozen_narrow_parameters_and_buffers_stay_as_they_are(dtype, place, as_bytes, tmp_path):
    options = dict(PLACES[place])
    if "on" in options:
        options |= tiers(str(tmp_path), *options.pop("on"))

    def run(rank):
        model, optimizer = build(dtype)
        given = {name: bits(value).clone() for name, value in model.state_dict().items()}
        zs.shard(model, optimizer, cast_buffers=options["precision"] != "fp32", **options)
        steps(model, optimizer, rank)
        assert all(block.seen == (dtype, dtype) for block in model)
        state = zs.full_state_dict(model, masters=True)
        with zs.gathered(model):
            assert model[0].weight.dtype == dtype and torch.equal(bits(model[0].weight), given["0.weight"])
        zs.close(model)
        for values in (state, model.state_dict()):
            for name in ("0.weight", "1.weight", "0.table", "1.table"):
                assert values[name].dtype == dtype and torch.equal(bits(values[name]), given[name])
        return state

    state = run_threads(2, run)[0]
    for name in ("0.scale", "1.scale", "0.bias", "1.bias"):
        expected = as_bytes[options["precision"]][name]
        torch.testing.assert_close(state[name], expected, rtol=0, atol=0.02 if place == "packed" else 0)


def test_scales_are_not_rounded_where_they_are_named():
    """A key of `dtypes` that means no module means parameters, all their names alike."""

    def run(rank):
        model, optimizer = build(torch.float8_e4m3fn)
        zs.shard(model, optimizer, stage=3, precision="bf16", dtypes={"*.weight": torch.bfloat16, "1.scale": "fp32"})
        with zs.gathered(model):
            assert model[0].weight.dtype == torch.bfloat16  # it was named
            assert (model[1].scale.dtype, model[1].bias.dtype, model[0].scale.dtype) == (
                torch.float32,
                torch.bfloat16,
                torch.bfloat16,
            )
        zs.close(model)

    run_threads(2, run)


@pytest.mark.parametrize("key, meant", [("1.scal", "1.scale"), ("codes", None)])
def test_a_key_that_names_no_parameter_is_refused(key, meant):
    model, optimizer = build(torch.float8_e4m3fn)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(zs.ConfigError, match=f"no floating-point parameter has the name.*{meant or ''}"):
        zs.shard(model, optimizer, stage=3, precision="bf16", dtypes={key: "fp32"})


def test_a_frozen_parameter_is_rounded_and_one_that_is_named_is_not(tmp_path):
    """A copy of what was given would take the memory that the precision saves; `dtypes` keeps what is to stay exact."""

    made = seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))

    def run(rank):
        model = copy.deepcopy(made)
        model[0].requires_grad_(False)
        given = model[0].weight.detach().clone(), model[0].bias.detach().clone()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        zs.shard(model, optimizer, stage=3, precision="bf16", dtypes={"0.bias": "fp32"})
        zs.save(tmp_path / "at", model, optimizer, trained_only=False)
        zs.close(model)
        assert torch.equal(model[0].weight, given[0].bfloat16().float()) and not torch.equal(model[0].weight, given[0])
        assert torch.equal(model[0].bias, given[1])
        return given

    weight, bias = run_threads(2, run)[0]
    zs.export(tmp_path / "at", tmp_path / "whole")
    state = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    assert state["0.weight"].dtype == torch.bfloat16 and torch.equal(state["0.weight"], weight.bfloat16())
    assert torch.equal(state["0.bias"], bias)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NARROW, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_they_are_saved_loaded_and_exported(dtype, tmp_path):
    expected = {name: bits(value).clone() for name, value in build(dtype)[0].state_dict().items()}

    def same(state):
        for name in ("0.weight", "1.weight", "0.table", "1.table"):
            assert state[name].dtype == dtype and torch.equal(bits(state[name]), expected[name])

    def save(rank):
        model, optimizer = build(dtype)
        zs.shard(model, optimizer, stage=3)
        zs.save(tmp_path / "at", model, optimizer, trained_only=False)
        zs.save_safetensors(model, tmp_path / "whole.safetensors", dtype=torch.bfloat16)
        for batch in zs.stream_full_tensors(model, dtype=torch.bfloat16):
            assert all(
                value.dtype == (dtype if name.endswith(("weight", "table")) else value.dtype) for name, value in batch.items()
            )
        zs.close(model)

    def load(rank, stage, path):
        model, optimizer = build(dtype, seed=11)
        zs.shard(model, optimizer, stage=stage, precision="bf16")
        zs.load(path, model, optimizer if path == tmp_path / "at" else None)
        same(zs.full_state_dict(model))
        zs.close(model)

    run_threads(2, save)
    assert safetensors.torch.load_file(tmp_path / "whole.safetensors")["0.scale"].dtype == torch.bfloat16
    same(safetensors.torch.load_file(tmp_path / "whole.safetensors"))
    zs.export(tmp_path / "at", tmp_path / "out", dtype=torch.bfloat16)
    same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    zs.export(tmp_path / "at", tmp_path / "out.pt", format="torch")
    same(torch.load(tmp_path / "out.pt", weights_only=True))
    dcp_to_torch_save(tmp_path / "at" / "step-00000000", tmp_path / "dcp.pt")
    same(torch.load(tmp_path / "dcp.pt", weights_only=True)["model"])
    for path in ("at", "whole.safetensors", "out", "out.pt"):
        for stage, world in ((0, 1), (3, 3)):
            run_threads(world, load, stage, tmp_path / path)


def test_they_go_through_the_drop_in(tmp_path):
    dtype = torch.float8_e4m3fn
    expected = build(dtype)[0].state_dict()

    def run(rank):
        model, optimizer = build(dtype)
        config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
                  "data_types": {"buffer_dtype": "bf16"}}  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(INPUTS[rank].bfloat16()).float().square().mean())
        engine.step()
        assert model[0].seen == (dtype, dtype)
        engine.save_checkpoint(tmp_path)

    run_threads(2, run)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name in ("0.weight", "1.weight", "0.table", "1.table"):
        assert state[name].dtype == dtype and torch.equal(bits(state[name]), bits(expected[name]))
    assert state["0.scale"].dtype == torch.float32


def test_every_dtype_of_safetensors_that_torch_has_is_read(tmp_path):
    """As the format's own library writes them; F4 counts half bytes there, and pairs of them in torch."""
    given = {
        kind: torch.arange(16, dtype=torch.uint8).remainder(2).view(2, 8).view(dtype)
        for kind, dtype in SAFETENSORS_DTYPES.items()
    }
    safetensors.torch.save_file(given, tmp_path / "all.safetensors")
    (length,) = struct.unpack("<Q", (tmp_path / "all.safetensors").read_bytes()[:8])
    header = json.loads((tmp_path / "all.safetensors").read_bytes()[8 : 8 + length])
    assert {kind: header[kind]["dtype"] for kind in given} == {kind: kind for kind in given}

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            for kind, value in given.items():
                self.register_buffer(kind, torch.zeros(value.shape, dtype=torch.uint8).view(value.dtype) if value.element_size() == 1
                                     else torch.zeros_like(value))  # fmt: skip

    model = Holder()
    zs.shard(model, stage=3)
    zs.load(tmp_path / "all.safetensors", model, strict=False)
    for kind, value in given.items():
        assert torch.equal(bits(model.get_buffer(kind)), bits(value)), kind
    zs.save_safetensors(model, tmp_path / "again.safetensors")
    for kind, value in safetensors.torch.load_file(tmp_path / "again.safetensors").items():
        assert kind == "weight" or torch.equal(bits(value), bits(given[kind])), kind
    zs.close(model)


@pytest.mark.parametrize(
    "kind, words", [("F6_E2M3", "which torch has no dtype for"), ("X9", "which is none of the format's dtypes")]
)
def test_a_dtype_that_torch_has_not_is_refused_by_name(kind, words, tmp_path):
    header = json.dumps({"0.weight": {"dtype": kind, "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "six.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0")

    def run(rank):
        model, optimizer = build(torch.float8_e4m3fn)
        zs.shard(model, optimizer, stage=3)
        with pytest.raises(zs.CheckpointError, match=f"six.safetensors: 0.weight is {kind}, {words}.*Convert it to one of"):
            zs.load(tmp_path / "six.safetensors", model)
        steps(model, optimizer, rank)
        zs.close(model)

    run_threads(2, run)


def test_quantized_tensors_are_refused_and_the_remedies_work(tmp_path):
    def build_with(register):
        model = nn.Linear(3, 2)
        register(model, torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.quint8))
        zs.shard(model, stage=3)
        return model

    model = build_with(lambda model, value: model.register_buffer("codes", value))
    with pytest.raises(zs.ConfigError, match=r"codes is torch.quint8.*int_repr\(\), its scale.*persistent=False"):
        zs.save(tmp_path, model)
    zs.close(model)
    remedies = (
        lambda model, value: model.register_buffer("codes", value.int_repr()),
        lambda model, value: model.register_buffer("codes", value, persistent=False),
    )
    for step, register in enumerate(remedies):
        model = build_with(register)
        zs.save(tmp_path, model, step=step)
        zs.load(tmp_path, model)
        zs.close(model)
