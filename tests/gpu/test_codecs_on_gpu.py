"""Codecs on a GPU, by torch's kernels and by Triton's: the bytes and sums of the CPU."""

import importlib.util
import math

import pytest
import torch

from zeroshard.packing.codecs import CODECS, ErrorFeedback, LowRank, TopK, block_quantization, codec_of

pytestmark = pytest.mark.gpu
NUMELS = [0, 1, 33, 257, 4096, (1 << 20) + 77]


@pytest.fixture(params=["torch", "triton"])
def kernels(request, monkeypatch):
    """Which kernels serve the GPU."""
    if request.param == "torch":
        monkeypatch.setattr(block_quantization, "has_triton", lambda device: False)
    elif importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability() < (8, 0):
        # torch's kernels serve there: the other case
        pytest.skip("triton is not installed, or the GPU is before compute capability 8.0")


def codecs():
    return [codec_of(name, block) for name in CODECS for block in (32, 256, 1 << 14)] + [TopK(0.01)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_bytes_and_values_are_those_of_the_cpu(codec, dtype, kernels):
    for numel in NUMELS:
        g = torch.Generator().manual_seed(numel)
        values = torch.randn(numel, generator=g) * 10 ** (6 * (torch.rand(numel, generator=g) - 0.5))
        values[numel // 2 : numel // 2 + 1] = math.nan
        values[numel // 3 : numel // 3 + 1] = math.inf
        values = values.to(dtype)
        packed = torch.empty(codec.packed_nbytes(numel), dtype=torch.uint8)
        codec.pack(values, packed)
        on_gpu = torch.empty_like(packed, device="cuda")
        codec.pack(values.cuda(), on_gpu)
        assert torch.equal(on_gpu.cpu(), packed), numel
        for out_dtype in (torch.float32, dtype):
            expected, found = torch.empty(numel, dtype=out_dtype), torch.empty(numel, dtype=out_dtype, device="cuda")
            codec.unpack(packed, expected)
            codec.unpack(on_gpu, found)
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_sums_are_those_of_the_cpu(codec, kernels):
    for numel in NUMELS:
        parts = [torch.empty(codec.packed_nbytes(numel), dtype=torch.uint8) for _ in range(3)]
        for part in parts:
            codec.pack(torch.randn(numel), part)
        expected = torch.randn(numel)
        found = expected.cuda()
        codec.unpack_sum(parts, expected, scale=1 / 3, accumulate=True)
        assert codec.unpack_sum([part.cuda() for part in parts], found, scale=1 / 3, accumulate=True) is None
        assert torch.equal(found.cpu(), expected)


def test_feedback_and_low_rank_stay_on_the_device():
    codec, values = codec_of("int4"), torch.randn(1000, device="cuda")
    feedback, packed = ErrorFeedback(codec), torch.empty(codec.packed_nbytes(1000), dtype=torch.uint8, device="cuda")
    feedback.pack("w", values, packed)
    found = torch.empty_like(values)
    codec.unpack(packed, found)
    torch.testing.assert_close(feedback.residuals["w"], values - found, rtol=0, atol=1e-6)
    low_rank, flat = LowRank([(0, (40, 30))], 1208, rank=2, device="cuda"), torch.zeros(1208, device="cuda")
    flat[:1200] = (torch.randn(40, 2, device="cuda") @ torch.randn(2, 30, device="cuda")).flatten()
    exact = flat.clone()
    low_rank.finish(flat, low_rank.second(flat, low_rank.first(flat)))
    torch.testing.assert_close(flat, exact, rtol=1e-3, atol=1e-3)
