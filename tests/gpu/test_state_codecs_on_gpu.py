"""Coded states on a GPU: Triton's kernels and torch's operators write the same bytes, and those of a CPU."""

import pytest
import torch

from zeroshard.formats import state_codecs
from zeroshard.formats.state_codecs import coded_column
from zeroshard.utils.state_format import StateFormat

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_bytes_and_values_are_those_of_a_cpu(name, state, monkeypatch):
    torch.manual_seed(0)
    values = torch.randn(1 << 14) * torch.exp(4 * torch.randn(1 << 14))
    values[:512] = 0
    values = values.square() if state == "exp_avg_sq" else values
    column = coded_column(state, StateFormat(name))
    coded = column.encode(values)
    for _ in range(2):
        found = column.encode(values.cuda())
        assert torch.equal(found.cpu(), coded)
        assert torch.equal(column.decode(found).cpu(), column.decode(coded))
        monkeypatch.setattr(state_codecs, "has_triton", lambda device: False)
