"""Every stage equals one process, bit for bit: the whole matrix of what a user may combine, on one and two ranks.

    world {1, 2} x fp32, world 1 x {bf16, fp16} x all that equivalence_kit.py names
    world 2 x {bf16, fp16} x cells in which every two values of different factors meet

Three and four ranks are in test_equivalence_wide.py: workers share the tests out by file.
"""

import itertools

import pytest
from equivalence_kit import PRECISIONS, all_cells, assert_every_cell_equals_one_process, covering_cells


@pytest.mark.limit(150)  # 16 s on a machine with as many processes as cores
@pytest.mark.parametrize(  # one rank in bf16 and fp16: two are below, and tests/optim has their masters and scales on one
    ("precision", "world_size"),
    [
        pytest.param(name, ranks, marks=pytest.mark.slow if ranks == 1 and name != "fp32" else ())
        for name in PRECISIONS
        for ranks in (1, 2)
    ],
)
def test_every_combination_equals_one_process(precision: str, world_size: int) -> None:
    assert_every_cell_equals_one_process(precision, world_size)


def test_every_two_values_meet_in_the_covering_cells() -> None:
    cells = covering_cells()
    factors = [{getattr(cell, name) for cell in all_cells()} for name in ("placement", "mode", "units", "overlap")]
    assert [len(values) for values in factors] == [5, 5, 3, 2]
    for (first, left), (second, right) in itertools.combinations(zip(vars(cells[0]), factors, strict=True), 2):
        met = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        assert met == set(itertools.product(left, right)), (first, second)
    assert len(cells) < 40 and cells == covering_cells()
