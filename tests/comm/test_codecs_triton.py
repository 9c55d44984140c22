"""The source of Triton's kernels, run by its interpreter on the CPU: the bytes of torch's kernels. (On a GPU: tests/gpu.)"""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import math, warnings
import torch
from zeroshard.comm.codecs import CODECS, codec_of, triton_kernels
warnings.simplefilter("ignore")  # NumPy's, of NaN
torch.manual_seed(0)
count = 0
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
print("equal", count)
"""


@pytest.mark.processes
# 280 MB, of use on a GPU alone, so no requirement; test_codecs holds torch's kernels to the format, gpu/test_codecs_on_gpu these to torch's
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_interpreter_gives_the_bytes_of_torch():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "equal 72", done.stderr[-3000:]
