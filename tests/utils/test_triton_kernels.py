"""The source of Triton's kernels, run by its interpreter on the CPU: the bytes of torch's operators. (On a GPU: tests/gpu.)"""

import importlib.util
import os
import subprocess
import sys

import pytest

COLLECTIVES = """
import math
from zeroshard.packing.codecs import CODECS, codec_of, triton_kernels
for name in CODECS:
    for block in (32, 256):
        codec = codec_of(name, block)
        for numel in (1, 31, 257, 1000):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                values = torch.randn(numel) * 10 ** (6 * (torch.rand(numel) - 0.5))
                if dtype == torch.bfloat16:
                    values[numel // 2], values[numel // 3] = math.nan, math.inf
                values = values.to(dtype)
                packed = torch.empty(codec.packed_nbytes(numel), dtype=torch.uint8)
                codec.pack(values, packed)
                steps, codes = packed[: 4 * codec.nblocks(numel)].view(torch.float32), packed[4 * codec.nblocks(numel) :]
                of_triton = torch.full_like(steps, 7), torch.zeros_like(codes)
                triton_kernels.pack(name, codec.most, block, values, *of_triton)
                assert torch.equal(of_triton[0], steps) and torch.equal(of_triton[1], codes), (codec, numel, dtype)
                expected, found = torch.empty(numel), torch.empty(numel)
                codec.unpack(packed, expected)
                triton_kernels.unpack(name, block, steps, codes, found, add=False)
                assert torch.equal(found.nan_to_num(1), expected.nan_to_num(1)), (codec, numel, dtype)
                triton_kernels.unpack(name, block, steps, codes, found, add=True)
                assert torch.equal(found.nan_to_num(1), (expected + expected).nan_to_num(1))
                count += 1
"""

OPTIMIZER_STATES = """
from zeroshard.formats import triton_state_codecs
from zeroshard.formats.state_codecs import coded_column
from zeroshard.utils.state_format import StateFormat
for name in ("int8", "fp8", "int4"):
    for state in ("exp_avg", "exp_avg_sq"):
        for block in (32, 256, 4096):
            values = torch.randn(3 * 4096) * torch.exp(4 * torch.randn(3 * 4096))
            values[:4096] = 0
            values[5000], values[8192:] = 0, values[8192:] * 1e-15
            values = values.square() if state == "exp_avg_sq" else values
            codec = coded_column(state, StateFormat(name, block)).codec
            expected, found = codec.encode(values), torch.full((codec.encode(values).numel(),), 7, dtype=torch.uint8)
            triton_state_codecs.write(codec, values.view(-1, block), *codec.views(found))
            assert torch.equal(found, expected), (name, state, block)
            decoded = torch.empty(values.numel())
            triton_state_codecs.read(codec, *codec.views(expected), decoded.view(-1, block))
            assert torch.equal(decoded.view(torch.int32), codec.decode(expected).view(torch.int32)), (name, state, block)
            count += 1
"""

BEFORE = """
import torch, warnings
warnings.simplefilter("ignore")  # NumPy's, of NaN and of divisions by zero
torch.manual_seed(0)
count = 0
"""


@pytest.mark.processes
# 280 MB, of use on a GPU alone, so no requirement; other tests hold torch's operators to the formats
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("program", "cases"), [(COLLECTIVES, 72), (OPTIMIZER_STATES, 18)], ids=["collectives", "optimizer states"]
)
def test_the_interpreter_gives_the_bytes_of_torch(program, cases):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    text = f"{BEFORE}{program}print('equal', count)"
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == f"equal {cases}", done.stderr[-3000:]
