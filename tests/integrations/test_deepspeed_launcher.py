"""zeroshard-deepspeed: the arguments of DeepSpeed's launcher become torchrun's, and ranks start as theirs do."""

import json
import os
import subprocess
import sys

import pytest

import zeroshard as zs
from zeroshard.integrations.deepspeed import accelerator, launcher


@pytest.fixture
def started(monkeypatch, tmp_path):
    """main(argv) -> (arguments of torchrun by name, plan of the rank, the rank's command, environment)."""
    for name in ("train.py", "t.py", "program"):
        (tmp_path / name).touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accelerator, "_chosen", accelerator.CPU_Accelerator())
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "4")

    def start(*argv):
        calls = []
        assert launcher.main(["-q", *argv], execute=lambda *call: calls.append(call)) == 0
        program, command, env = calls[0]
        assert program == sys.executable and command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        cut = command.index("--no_python")
        assert command[cut + 2].endswith("rank_start.py")
        given = dict(argument.removeprefix("--").split("=") for argument in command[3:cut])
        return given, json.loads(command[cut + 3]), command[cut + 4 :], env

    return start


def test_this_machine_alone(started):
    given, plan, command, env = started("train.py", "--deepspeed", "-q", "--num_gpus", "9")
    assert (
        given["nproc_per_node"] == "4"
        and given["nnodes"] == "1"
        and given["master_addr"] == "127.0.0.1"
        and int(given["master_port"])
    )
    assert command == [sys.executable, "-u", "train.py", "--deepspeed", "-q", "--num_gpus", "9"]
    assert plan == {"position": 3, "cores": None, "log": None} and "OMP_NUM_THREADS" in env
    assert env["PYTHONPATH"].split(os.pathsep)[0].endswith(os.path.join("integrations", "deepspeed", "site"))


def test_numbers_ports_modules_and_programs(started):
    given, plan, command, _ = started("--num_gpus=2", "--master_port", "1234", "--no_local_rank", "-m", "package.train", "-x")
    assert given["nproc_per_node"] == "2" and given["master_port"] == "1234" and plan["position"] is None
    assert command[1:] == ["-u", "-m", "package.train", "-x"]
    assert started("--no_python", "./program", "1")[1:3] == ({"position": 1, "cores": None, "log": None}, ["./program", "1"])
    assert started("--module", "package.train")[1]["position"] == 4


def test_filters_choose_devices(started, monkeypatch):
    monkeypatch.setattr(accelerator, "_chosen", cuda := accelerator.CUDA_Accelerator())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert cuda.device_count() == 4
    for filters, devices in (
        (["-i", "localhost:1,3"], "1,3"),
        (["--exclude", "localhost:0"], "1,2,3"),
        (["--num_gpus", "2"], "0,1"),
    ):
        given, _, _, env = started(*filters, "train.py")
        assert env["CUDA_VISIBLE_DEVICES"] == devices and given["nproc_per_node"] == str(len(devices.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert started("--num_gpus", "2", "train.py")[3]["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_cores_and_logs(started, tmp_path):
    _, plan, _, _ = started(
        "--bind_cores_to_rank", "--bind_core_list", "0-2,7", "--enable_each_rank_log", str(tmp_path / "logs"), "t.py"
    )
    assert plan["cores"] == [0, 1, 2, 7] and plan["log"].startswith(str(tmp_path / "logs")) and (tmp_path / "logs").is_dir()
    with pytest.raises(zs.ConfigError, match="core for each of 4 ranks"):
        started("--bind_cores_to_rank", "--bind_core_list", "0-2", "t.py")


def test_several_hosts_get_a_line_each(started, tmp_path, capsys):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\none slots=2\ntwo slots=2\n\nthree slots=2\n")
    argv = ["-H", str(hostfile), "--num_nodes", "2", "train.py", "--lr", "1"]
    assert launcher.main(argv, execute=lambda *call: pytest.fail("started")) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["one", "two"]
    assert "--no_ssh --node_rank=1 --master_addr=one" in lines[1] and lines[1].endswith("train.py --lr 1")
    given, _, _, _ = started(*lines[1].split(": ")[1].split()[1:])
    assert given == {"nnodes": "2", "node_rank": "1", "nproc_per_node": "2", "master_addr": "one", "master_port": "29500"}
    given, _, _, _ = started("-H", str(hostfile), "-i", "two:1", "train.py")
    assert given["nnodes"] == "1" and given["nproc_per_node"] == "1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--autotuning", "run"], "--autotuning.*zs.forecast"),
        (["--elastic_training"], "--elastic_training.*torchrun"),
        (["--no_python", "--module"], "exclude each other"),
        (["--num_gpus", "1", "-i", "localhost"], "--num_gpus exclude"),
        (["-i", "localhost", "-e", "localhost:0"], "exclude each other"),
        (["-i", "elsewhere"], "no host 'elsewhere'"),
        (["-i", "localhost:9"], r"no slot \[9\]"),
        (["-e", "localhost"], "nothing is left"),
        (["--num_nodes", "2"], "hostfile that names"),
        (["--no_ssh"], "--node_rank"),
        (["-i", "localhost:x"], "--include: expected numbers like 0,2 or 0-3, got 'x'"),
        (["--bind_cores_to_rank", "--bind_core_list", "1-"], "--bind_core_list: expected numbers"),
        (["absent.py"], "no script 'absent.py'"),
        (["--no_python", "./absent"], "no program './absent'"),
    ],
)
def test_what_is_refused(started, argv, message):
    with pytest.raises(zs.ConfigError, match=message):
        started(*argv, "train.py")


@pytest.mark.parametrize("text", ["one slots=x", "one slots=1\none slots=1", "# nothing"])
def test_hostfiles_of_another_form(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(zs.ConfigError, match="hostfile"):
        launcher.fetch_hostfile(str(tmp_path / "hosts"))


@pytest.mark.processes
def test_ranks_start_with_their_number_their_cores_and_their_log(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nknown = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_SIZE')]\n"
        "print(sys.argv[1:], *known, len(os.sched_getaffinity(0)))\n"
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    binding = ["--bind_cores_to_rank", "--bind_core_list", ",".join(map(str, cores))] if len(cores) == 2 else []
    argv = ["--num_gpus", "2", *binding]
    code = "import sys\nfrom zeroshard.integrations.deepspeed.launcher import main\nsys.exit(main())"
    argv += ["--enable_each_rank_log", str(tmp_path / "logs"), str(script), "--steps", "3"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)
    said = [path.read_text().strip() for path in sorted((tmp_path / "logs").iterdir(), key=lambda path: path.name[-5:])]
    assert said == [f"['--local_rank={rank}', '--steps', '3'] {rank} 2 2 {1 if binding else len(cores)}" for rank in (0, 1)]
