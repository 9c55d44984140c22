"""The source of Triton's kernels for coded states, run by its interpreter on the CPU: the bytes of torch's operators."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, warnings
from zeroshard.tensor import triton_state_codecs
from zeroshard.tensor.state_codecs import coded_column
from zeroshard.utils.state_format import StateFormat
warnings.simplefilter("ignore")  # NumPy's, of divisions by zero
torch.manual_seed(0)
count = 0
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
print("equal", count)
"""


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: 280 MB, of use on a GPU alone")
def test_the_interpreter_gives_the_bytes_of_torch():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "equal 18", done.stderr[-3000:]
