"""Every stage equals one process, bit for bit, on three and four ranks.

    world {3, 4} x {fp32, bf16, fp16} x cells in which every two values of different factors meet

`ZEROSHARD_SLOW=1` runs the whole matrix everywhere.
"""

import pytest
from equivalence_kit import PRECISIONS, assert_every_cell_equals_one_process


@pytest.mark.limit(150)  # whole: 45 s on a machine with as many processes as cores
@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])  # four ranks: tests/comm/mesh, too
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_ranks_equal_one_process(precision: str, world_size: int) -> None:
    assert_every_cell_equals_one_process(precision, world_size)
