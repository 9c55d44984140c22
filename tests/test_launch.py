"""launch: values and errors come back, a failing or hanging rank ends the others in time, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from zeroshard.launch import ProcessesFailed, describe_exit, free_port, rank_environment, run_processes, spawn

pytestmark = pytest.mark.processes


def _answer(rank, world_size, offset):
    return rank * 10 + offset, world_size, {name: os.environ[name] for name in rank_environment(0, 1, 1)}


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("the batch of rank 1 is empty")
    time.sleep(60)


def _die_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _hang_with_child(rank, world_size, path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(f"{path}/{rank}", "w") as file:
        file.write(str(child.pid))
    time.sleep(60)


def _return_tensor(rank, world_size):
    import torch

    return torch.full((1000,), float(rank))


def _running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_values_come_back_in_rank_order_with_the_environment_of_torchrun():
    results = run_processes(_answer, 2, 5)
    assert [value for value, _, _ in results] == [5, 15]
    for rank, (_, world_size, environment) in enumerate(results):
        assert world_size == 2
        assert environment == rank_environment(rank, 2, int(results[0][2]["MASTER_PORT"]))
    assert "RANK" not in os.environ


def test_a_tensor_outlives_the_process_that_made_it():
    assert [tensor.sum().item() for tensor in run_processes(_return_tensor, 2)] == [0.0, 1000.0]


def test_an_error_ends_the_others_and_brings_its_traceback():
    started = time.monotonic()
    with pytest.raises(ProcessesFailed, match="rank 1 failed first") as caught:
        run_processes(_raise_on_one, 2, grace_s=0.2)
    assert time.monotonic() - started < 20
    assert "ValueError: the batch of rank 1 is empty" in str(caught.value)
    assert "rank 0: killed by SIGKILL, rank 1: exit code 1" in str(caught.value)
    assert [result.ok for result in caught.value.results] == [False, False]


def test_a_killed_rank_is_reported_as_such():
    results = run_processes(_die_on_one, 2, check=False, grace_s=10)
    assert (results[0].value, results[0].ok) == (0, True)
    assert (results[1].value, results[1].error, results[1].exitcode) == (None, None, -signal.SIGKILL)
    with pytest.raises(ProcessesFailed, match="died without an answer: killed by SIGKILL"):
        run_processes(_die_on_one, 2, grace_s=0.1)


def test_a_hanging_rank_ends_at_the_limit_with_what_it_started(tmp_path):
    started = time.monotonic()
    with pytest.raises(ProcessesFailed, match="within 10 s"):
        run_processes(_hang_with_child, 1, str(tmp_path), timeout_s=10)
    assert time.monotonic() - started < 20
    time.sleep(0.2)
    assert not _running(int((tmp_path / "0").read_text()))


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
    _stand_in(monkeypatch, tmp_path, "time.sleep(60) if os.environ['RANK'] == '0' else sys.exit(3)")
    started = time.monotonic()
    assert spawn(["train"], 2, grace_s=0.2) == 3
    assert time.monotonic() - started < 6
    assert "rank 1 failed: exit code 3; the other ranks were stopped" in capfd.readouterr().err


def test_spawn_reports_a_killed_rank(monkeypatch, capfd, tmp_path):
    _stand_in(monkeypatch, tmp_path, "os.kill(os.getpid(), 9)")
    assert spawn(["train"], 1) == 128 + 9
    assert "rank 0 failed: killed by SIGKILL" in capfd.readouterr().err



def test_spawn_ends_at_the_limit(monkeypatch, capfd, tmp_path):
    _stand_in(monkeypatch, tmp_path, "time.sleep(60)")
    started = time.monotonic()
    assert spawn(["train"], 2, timeout_s=0.5) == 124
    assert time.monotonic() - started < 6
    assert "time limit" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is of Linux")
def test_ranks_die_with_a_killed_launcher(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, sys, time\n"
        "from zeroshard.launch import run_processes\n"
        "def work(rank, world_size, path):\n"
        "    open(f'{path}/{rank}.pid', 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    run_processes(work, 2, sys.argv[1])\n"
    )
    launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    launcher.kill()
    launcher.wait()
    while any(map(_running, pids)) and time.monotonic() < deadline + 5:
        time.sleep(0.05)
    assert not any(map(_running, pids))


def test_words_for_exit_codes():
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(None) == "still running"
    assert 1024 <= free_port() < 65536
