"""A model whose states exceed the memory that its ranks may use, enforced by the kernel, trains with everything on disk.

The long form, 2 x 10^9 parameters below 6 GiB, is `python -m zeroshard.bench.beyond` (docs/benchmarks.md).
"""

import pytest

from zeroshard.bench.beyond import Plan, run
from zeroshard.bench.cage import CageUnavailable, MemoryCage

LIMIT_NBYTES = 6 << 28  # 1.5 GiB, of which two interpreters with torch take up to 0.8: a run needs 0.6 to 1.1 here


@pytest.mark.processes
@pytest.mark.limit(400)
def test_states_beyond_an_enforced_limit_train_on_disk(tmp_path):
    try:
        with MemoryCage(LIMIT_NBYTES):
            limit = LIMIT_NBYTES
    except CageUnavailable:
        limit = 0  # nothing enforces it here: the resident memory is watched instead
    plan = Plan(2e8, str(tmp_path), limit_nbytes=limit, steps=2, seq=16, layers=40, buffer_nbytes=4 << 20, timeout_s=380.0)
    result = run(plan)
    assert result.parameters >= 2e8
    assert result.states_nbytes > 2 * LIMIT_NBYTES  # bf16 parameters, fp32 gradients, masters and two moments: 18 bytes
    assert (result.peak_nbytes if limit else result.rss_peak_nbytes) <= LIMIT_NBYTES
    assert result.losses[1] < result.losses[0]  # the same batch again
    numel = result.parameters
    # a step reads parameters twice, gradients, masters and moments; it writes gradients, masters, moments and parameters
    assert result.moved_nbytes["disk -> host"] == pytest.approx((2 * 2 + 4 + 12) * numel, rel=0.01)
    assert result.moved_nbytes["host -> disk"] == pytest.approx((4 + 12 + 2) * numel, rel=0.01)
    assert not list(tmp_path.iterdir())  # nothing is left behind
