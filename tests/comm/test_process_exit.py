"""A script that ends without destroying its process group: gloo's threads end before the interpreter does."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from zeroshard.comm import backend_select as world
for _ in range(int(sys.argv[3])):  # each goes on as a script does that has imported this much, and ends with its interpreter
    if os.fork() == 0:
        break
else:
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(sys.argv[3]))])
    sys.exit()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = world.current(sys.argv[1], torch.device("cpu"), 30.0)
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
    sys.exit()
sys.setswitchinterval(100)  # who has the interpreter keeps it, so that a thread of gloo needs it later
for _ in range(4):
    dist.all_reduce(torch.ones(10), async_op=True)  # nobody waits for it
"""


def _ends(comm: str, group: str, times: int) -> None:
    command = [sys.executable, "-c", SCRIPT, comm, group, str(times)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str([0] * times), done.stdout + done.stderr
    assert "terminate" not in done.stderr and "Error" not in done.stderr, done.stderr


@pytest.mark.processes
# over gloo, which is what aborted, always
@pytest.mark.parametrize("comm", [pytest.param("shared", marks=pytest.mark.slow), "dist"])
def test_it_does_not_abort(comm):
    """Without an orderly end, half of them do."""
    _ends(comm, "left", 6)


@pytest.mark.processes
def test_a_group_that_the_script_has_destroyed_is_left_alone():
    _ends("shared", "destroyed", 1)
