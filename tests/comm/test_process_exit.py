"""A script that ends without destroying its process group: gloo's threads end before the interpreter does."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from zeroshard.comm import backend_select as world
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = world.current(sys.argv[1], torch.device("cpu"), 30.0)
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
    sys.exit()
sys.setswitchinterval(100)  # who has the interpreter keeps it, so that a thread of gloo needs it later
for _ in range(4):
    dist.all_reduce(torch.ones(10), async_op=True)  # nobody waits for it
"""


@pytest.mark.processes
# over gloo, which is what aborted, always; the other one takes 15 s more
@pytest.mark.parametrize("comm", [pytest.param("shared", marks=pytest.mark.slow), "dist"])
def test_it_does_not_abort(comm):
    """Without an orderly end, half of such launches do."""
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, comm, "left"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        launches = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        for launch in launches:
            _, said = launch.communicate(timeout=100)
            assert launch.returncode == 0 and "terminate" not in said and "Error" not in said, said


@pytest.mark.processes
def test_a_group_that_the_script_has_destroyed_is_left_alone():
    command = [sys.executable, "-c", SCRIPT, "shared", "destroyed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
