"""A model whose states exceed the memory that its ranks may use, enforced by the kernel, trains with everything on disk.

The long form, 2 x 10^9 parameters below 6 GiB, is `python -m benchmarks.larger_than_memory` (docs/benchmarks.md).
"""

import subprocess
import sys

import pytest

from benchmarks.larger_than_memory import CageUnavailable, MemoryCage, Plan, run

ROOM_NBYTES = 640 << 20  # beside what two interpreters take; a run needs 0.1 GiB of it here, and page cache in passing
RANKS = 2


def interpreter_nbytes() -> int:
    """Of a process that has imported torch and zeroshard, shared by no other: 150-190 MiB of the CPU build, 280-480 of that for CUDA."""
    program = "import psutil, torch.distributed, zeroshard; print(psutil.Process().memory_full_info().uss)"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow  # 50 s; states on disk that equal states in memory: tests/offload; the limit itself: test_host_memory
@pytest.mark.processes
@pytest.mark.limit(400)
def test_states_beyond_an_enforced_limit_train_on_disk(tmp_path):
    allowed = ROOM_NBYTES + RANKS * interpreter_nbytes()
    try:
        with MemoryCage(allowed):
            limit = allowed
    except CageUnavailable:
        limit = 0  # nothing enforces it here: the resident memory is watched instead
    plan = Plan(
        2e8, str(tmp_path), ranks=RANKS, limit_nbytes=limit, steps=2, seq=16, layers=40, buffer_nbytes=4 << 20, timeout_s=380.0
    )
    result = run(plan)
    assert result.parameters >= 2e8
    assert result.states_nbytes > 2.5 * allowed  # bf16 parameters, fp32 gradients, masters and two moments: 18 bytes
    assert (result.peak_nbytes if limit else result.rss_peak_nbytes) <= allowed
    assert result.losses[1] < result.losses[0]  # the same batch again
    numel = result.parameters
    # a step reads parameters twice, gradients, masters and moments; it writes gradients, masters, moments and parameters
    assert result.moved_nbytes["disk -> host"] == pytest.approx((2 * 2 + 4 + 12) * numel, rel=0.01)
    assert result.moved_nbytes["host -> disk"] == pytest.approx((4 + 12 + 2) * numel, rel=0.01)
    assert not list(tmp_path.iterdir())  # nothing is left behind
