"""launch: values and errors come back, a failing or hanging rank ends the others in time, nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zeroshard.comm import launch
from zeroshard.comm.launch import ProcessesFailed, describe_exit, free_port, rank_environment, run_processes, spawn
from zeroshard.utils.host import ranks_here

pytestmark = pytest.mark.processes


def _answer(rank, world_size, offset):
    import torch

    return (
        torch.full((1000,), float(rank * 10 + offset)),
        world_size,
        {name: os.environ[name] for name in rank_environment(0, 1, 1)},
    )


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("the batch of rank 1 is empty")
    time.sleep(3600)  # longer than any test may take


def _die_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _hang(rank, world_size):
    time.sleep(3600)


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until_gone(pids: list[int]) -> None:
    """However long that takes: the test's limit ends it."""
    while any(map(_running, pids)):
        time.sleep(0.05)


def test_values_come_back_in_rank_order_with_the_environment_of_torchrun():
    results = run_processes(_answer, 2, 5)
    assert [tensor.mean().item() for tensor, _, _ in results] == [5.0, 15.0]  # they outlive their processes
    for rank, (_, world_size, environment) in enumerate(results):
        assert world_size == 2
        assert environment == rank_environment(rank, 2, int(results[0][2]["MASTER_PORT"]))
    assert "RANK" not in os.environ


def test_an_error_ends_the_others_and_brings_its_traceback():
    with pytest.raises(ProcessesFailed, match="rank 1 failed first") as caught:
        run_processes(_raise_on_one, 2, grace_s=0.2)
    assert "ValueError: the batch of rank 1 is empty" in str(caught.value)
    assert "rank 0: killed by SIGKILL, rank 1: exit code 1" in str(caught.value)
    assert [result.ok for result in caught.value.results] == [False, False]


def test_a_killed_rank_is_reported_as_such():
    with pytest.raises(ProcessesFailed, match="died without an answer: killed by SIGKILL") as caught:
        run_processes(_die_on_one, 2, grace_s=20)
    first, second = caught.value.results
    assert (first.value, first.ok) == (0, True)
    assert (second.value, second.error, second.exitcode) == (None, None, -signal.SIGKILL)


def test_a_hanging_rank_ends_at_the_limit():
    (result,) = run_processes(_hang, 1, timeout_s=3, check=False)
    assert (result.value, result.error, result.exitcode) == (None, None, -signal.SIGKILL)


def _stand_in(monkeypatch, tmp_path, code: str) -> None:
    """Let `spawn` start a script that runs `code` in place of zeroshard."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys, time\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_spawn_runs_the_command_on_each_rank(capfd):
    assert spawn(["--version"], 2) == 0
    assert capfd.readouterr().out.count("zeroshard ") == 2


def test_spawn_returns_the_exit_code_and_names_the_failing_rank(monkeypatch, capfd, tmp_path):
    _stand_in(monkeypatch, tmp_path, "time.sleep(3600) if os.environ['RANK'] == '0' else sys.exit(3)")
    assert spawn(["train"], 2, grace_s=0.2) == 3
    assert "rank 1 failed: exit code 3; the other ranks were stopped" in capfd.readouterr().err


def test_spawn_reports_a_killed_rank(monkeypatch, capfd, tmp_path):
    _stand_in(monkeypatch, tmp_path, "os.kill(os.getpid(), 9)")
    assert spawn(["train"], 1) == 128 + 9
    assert "rank 0 failed: killed by SIGKILL" in capfd.readouterr().err


def test_spawn_ends_at_the_limit_with_what_the_ranks_started(monkeypatch, capfd, tmp_path):
    child = "import subprocess; child = subprocess.Popen(['sleep', '3600'])"
    note = f"open('{tmp_path}/' + os.environ['RANK'], 'w').write(str(child.pid))"
    _stand_in(monkeypatch, tmp_path, f"{child}\n{note}\ntime.sleep(3600)")
    assert spawn(["train"], 2, timeout_s=3) == 124
    assert "time limit" in capfd.readouterr().err
    _wait_until_gone([int((tmp_path / name).read_text()) for name in "01"])


# elsewhere the launcher promises less: ranks of one that is killed end when they next find their peers gone
@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is of Linux")  # elsewhere comm/launch.py sets none
def test_ranks_die_with_a_killed_launcher(tmp_path):
    for name in ("comm/launch.py", "utils/host_memory.py"):  # without the package's torch these processes start at once
        target = tmp_path / "alone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(launch.__file__).parents[1] / name, target)
    (tmp_path / "main.py").write_text(
        "import os, sys, time\n"
        "from alone.comm.launch import run_processes\n"
        "def work(rank, world_size, path):\n"
        "    open(f'{path}/{rank}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    run_processes(work, 2, sys.argv[1])\n"
    )
    launcher = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), str(tmp_path)])
    files = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    _wait_until_gone([int(file.read_text()) for file in files])


def test_words_for_exit_codes():
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(None) == "still running"
    assert 1024 <= free_port() < 65536


@pytest.mark.parametrize(("given", "ranks"), [(None, 3), ("2", 2), ("0", 1), ("many", 3), ("", 3)])
def test_ranks_of_this_machine_are_what_the_launcher_says(given, ranks, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert ranks_here(3) == ranks
