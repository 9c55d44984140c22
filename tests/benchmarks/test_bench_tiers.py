"""The benchmark of offload: its arithmetic on made-up samples, and one tiny race with a contender on disk.

What needs a GPU (the events, the sizes) is written so that everything around it can be tested without one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import pytest
import torch
from bench_kit import TINY, outcome

import zeroshard as zs
from benchmarks import disk as disk_bench
from benchmarks import gpu, plan, race, report, statistics, worker
from benchmarks.command import swap_folder
from benchmarks.overlap import Overlap, Recorder, covered, union
from benchmarks.plan import Contender, Rounds, Workload
from benchmarks.race import Outcome
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.sheets import show
from zeroshard.memory.io.filesystems import MEMORY_FILESYSTEMS, filesystem_of
from zeroshard.planner.models.gpt import GPT, GPTConfig
from zeroshard.planner.simulator.disk_bandwidth import Burst, DiskSpeed, bandwidth
from zeroshard.zero.runtime import runtime_of


def tier_outcome(name: str, rounds_step_s: list[list[float]], **fields) -> Outcome:
    contender = next(c for c in (*plan.TIER_CONTENDERS, *gpu.CONTENDERS) if c.name == name)
    return dataclasses.replace(outcome("zs3", rounds_step_s, **fields), contender=contender)


def test_names_of_contenders_that_offload():
    assert [c.name for c in plan.TIER_CONTENDERS][1:6] == ["zs3-host", "zs3-disk", "zs3-infinity", "fsdp2-offload", "ds3-offload"]
    assert Contender("zs", 3, "bf16", "disk").name == "zs3-disk-bf16"
    assert Contender("zs", 3, "bf16", "disk").label == "zeroshard 3 opt. disk bf16"
    chosen = plan.select(("fsdp2", "zs3-host"), ("fp32",), among=plan.TIER_CONTENDERS)
    assert [c.name for c in chosen] == ["zs3-host", "fsdp2"]  # a kind alone is what offloads nothing
    assert [c.name for c in plan.select(("fsdp2", "zs3-host"), ("fp32",))] == ["fsdp2"]
    with pytest.raises(ValueError, match="expected an offload among .*got 'tape'"):
        Contender("zs", 3, offload="tape")


def test_bound_of_a_step_takes_the_faster_way_over_the_disk():
    # Rank 1 begins late: the disk worked for 2 s on 4 GB.
    assert bandwidth([Burst(10.0, 11.5, 2_000), Burst(10.5, 12.0, 2_000)]) == 2_000
    one_after_the_other, side_by_side = DiskSpeed(write=2.0, read=1.0, both=1.0), DiskSpeed(write=2.0, read=1.0, both=3.0)
    assert one_after_the_other.seconds(read_nbytes=3.0, write_nbytes=6.0) == 6.0
    assert side_by_side.seconds(read_nbytes=3.0, write_nbytes=6.0) == 3.0


def test_disk_goal_takes_the_longer_of_bound_and_memory_in_each_round():
    moved, speeds = {"disk -> host": 1.0, "host -> disk": 1.0, "host -> device": 99.0}, [2.0, 8.0, 2.0]
    disk = tier_outcome(
        "zs3-disk", [[1.15], [1.1], [2.3]], moved=[moved] * 3, disk=[DiskSpeed(speed, speed, speed) for speed in speeds]
    )
    memory = tier_outcome("zs3", [[0.5], [1.0], [0.5]])
    assert statistics.bounds_s(disk) == [1.0, 0.25, 1.0]
    assert statistics.disk_ratio([disk, memory]) == pytest.approx(1.0)  # bound, memory, and one round that stumbles
    assert statistics.bound_ratio(disk) == pytest.approx(2.3) and statistics.bound_ratio(memory) is None
    goals = {g.text.split(" / ")[1]: g.verdict for g in report.goals_of("tiers", [disk, memory])}
    assert goals["DeepSpeed 3 offload, step time"] == "not measured"
    assert statistics.disk_ratio([memory]) is None


def test_copies_inside_computation_are_counted_once_for_each_copy():
    assert union([(3, 4), (0, 1), (0.5, 2), (4, 4)]) == [(0, 2), (3, 4)]
    compute = [(0.0, 10.0), (20.0, 30.0)]
    assert covered([(5.0, 15.0), (18.0, 22.0), (40.0, 41.0)], compute) == 7.0
    both = Overlap.of(compute, {"up": [(5.0, 15.0)], "down": [(5.0, 10.0)]}, {"up": 8, "down": 4})
    assert both.inside_ms == {"up": 5.0, "down": 5.0} and both.fraction() == pytest.approx(10 / 15)
    assert Overlap.of(compute, {"up": [], "down": []}, {}).fraction() is None


class ClockRecorder(Recorder):
    """Host time in place of events."""

    def mark(self, stream=None):
        return time.perf_counter()

    def since_origin(self, event):
        return 1e3 * (event - self.origin)


def test_recorder_marks_forward_and_backward_of_every_unit_and_goes():
    model = GPT(GPTConfig(vocab_size=16, seq_len=8, dim=16, layers=3, heads=2))
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, offload_optimizer="cpu")
    runtime, tokens = runtime_of(model), torch.zeros(1, 8, dtype=torch.long)
    before = model(tokens, tokens)
    before.backward()
    with ClockRecorder(runtime) as recorder:
        model(tokens, tokens).backward()
    seen = recorder.overlap()
    assert len(recorder.pieces) == 2 * 4 and seen.compute_ms > 0  # embedding, three blocks; head, three blocks
    assert seen.fraction() is None  # the host's memory is the device's
    held = vars(runtime).keys() | vars(runtime.prefetcher).keys() | vars(runtime.comm.streams).keys()
    assert not {"_open", "staged", "copy"} & held
    zs.close(model)


@pytest.mark.parametrize("first", [1, 3, 40, 1000])
def test_search_finds_the_largest_that_fits_to_an_eighth(first):
    found = gpu.search(lambda layers: None if layers <= 37 else "out of memory", first, 60.0)
    assert found.complete and 33 <= found.fits <= 37 < found.fails <= found.fits * 9 / 8 and found.trials < 16
    assert "G parameters" in gpu.describe(found) and "out of memory" in gpu.describe(found)


def test_search_ends_where_nothing_fits_and_where_time_is_over():
    nothing = gpu.search(lambda layers: "no", 8, 60.0)
    assert nothing.complete and nothing.fits is None and nothing.fails == 1 and "none trained: no" in gpu.describe(nothing)
    seconds = itertools.count()
    late = gpu.search(lambda layers: None, 4, 3.5, clock=lambda: float(next(seconds)))
    assert late.fits == 16 and not late.complete and "at least" in gpu.describe(late)


def test_gpu_arithmetic():
    workload = Workload(shape=gpu.SHAPE, sequences=4)
    assert gpu.parameters(gpu.SHAPE) == worker.parameter_count(workload)
    assert gpu.step_flops(workload) / (4 * 1024) == pytest.approx(6 * (20 * 12 * 1024**2 + 32768 * 1024) + 6 * 20 * 1024 * 1024)
    room = (80 << 30, 100 << 30, 10 << 30)  # device, host, disk
    guess = {c.offload: gpu.first_layers(c, room) for c in gpu.TIERS}
    assert guess["host"] > guess[""] > guess["disk"] >= 1  # bound by the host, the device, the disk


def test_a_trial_that_the_host_could_not_hold_is_not_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "Team", None)
    why = gpu.trial(Contender("zs", 3, "bf16", "host"), Workload(shape=gpu.WIDE_SHAPE), 1 << 30, tmp_path, layers=100)
    assert "GiB of host memory needed, 1 available" in why


def test_every_section_is_shown_and_written(tmp_path, capsys):
    disk = {"disk -> host": 2e6, "host -> disk": 1e6}
    tiers = [
        tier_outcome("zs3", [[1.0]]),
        tier_outcome("zs3-host", [[1.0]]),
        tier_outcome("zs3-disk", [[1.2]], moved=[disk], disk=[DiskSpeed(1e9, 1e9, 2e9)]),
        Outcome(Contender("fsdp2", offload="offload"), failed="rank 0: RuntimeError: cannot"),
    ]
    row = {"name": "zeroshard", "what": "the job | all", "threads": 1, "core_share": 0.5, "ms": 2.0, "bytes_per_parameter": 28,
           "gb_s": 8.0, "g_parameters_s": 0.3, "ratio": 1.0}  # fmt: skip
    copy = {**row, "name": "memory copy", "gb_s": 10.0, "g_parameters_s": None, "ratio": None}
    one = {"gb_per_s": {"engine": [2.0], "dd bs=1M": [1.0]}, "median": {"engine": 2.0, "dd bs=1M": 1.0}, "ratio": 2.0}
    hostadam = {1: [row, copy, {"name": "deepspeed", "skipped": "no compiler"}]}
    files = {"nbytes": 1 << 30, "rounds": 1, "direct": True, "write": one, "read": {**one, "ratio": None}}
    seen = Overlap.of([(0.0, 4.0)], {"up": [(2.0, 6.0)], "down": []}, {"up": 4, "down": 0})
    on_gpu = [tier_outcome("zs3-host-bf16", [[0.5]], cuda_peak=1 << 30, overlap=seen), tier_outcome("local-bf16", [[0.1]])]
    workload = Workload(shape=gpu.SHAPE, sequences=4, ranks=1, device="cuda")
    largest = {
        "zs3-host-bf16": gpu.Largest(10, 12, True, "out of memory", 5),
        "ds3-offload-bf16": gpu.Largest(why="not installed"),
    }
    pack = {"name": "int8 pack", "ms": 1.0, "bytes_per_value": 5.0, "gb_s": 8.0, "of_copy": 0.6, "over_whole": 1.5}
    found = {
        "tiers": tiers,
        "hostadam": hostadam,
        "disk": files,
        "codecs": [pack],
        "gpu": gpu.Measured(workload, on_gpu, largest),
    }
    results = report.Results(Workload(), Rounds(), Rounds(lead_in=1), found)
    for sheet in results.sheets():
        show(sheet)
    report.write_markdown(results, tmp_path / "results.md")
    for text in (capsys.readouterr().out, (tmp_path / "results.md").read_text()):
        assert "FSDP2 offload failed: rank 0: RuntimeError: cannot" in text and "deepspeed: skipped: no compiler" in text
        assert "none trained: not installed" in text and "this process got 50% of its cores" in text
    assert "| zeroshard 3 opt. disk | 1200 | 1200-1200 | 1.20 | 3 | 2 | 800.00 |" in text  # 3 MB, side by side 2 GB/s
    assert "| zeroshard 3 all host bf16 | 15.0 | 4.0 | 50% | 50% | - |" in text and "the job \\| all" in text
    report.write_json(results, tmp_path / "results.json")
    document = json.loads((tmp_path / "results.json").read_text())
    verdicts = {goal["text"]: goal["verdict"] for goal in document["goals"]}
    assert verdicts["host Adam, 1 thread: bytes/s of the update over bytes/s of a memory copy"] == "missed"
    assert verdicts["file engine / best of dd and fio, write"] == "met"
    assert verdicts["int8 pack: bytes/s over a memory copy's"] == "met"
    assert verdicts["int8 pack: speed over whole tensors"] == "missed" and document["codecs"] == [pack]
    assert verdicts["file engine / best of dd and fio, read"] == "not measured"
    assert verdicts["stage 3, optimizer on disk / max(1.15 bound, 1.1 in memory), step time"] == "missed"
    assert document["gpu"]["largest"]["zs3-host-bf16"]["numel"] == gpu.parameters(dataclasses.replace(gpu.WIDE_SHAPE, layers=10))


def test_swap_folder_is_on_a_disk_and_goes(tmp_path):
    if filesystem_of("/dev/shm") == "tmpfs":
        with pytest.raises(UsageError, match="--path: .*which is memory"), swap_folder("/dev/shm", tmp_path):
            pass
    if filesystem_of(tmp_path) not in MEMORY_FILESYSTEMS:
        with swap_folder(None, tmp_path) as path:
            assert str(tmp_path) in path
        assert not list(tmp_path.iterdir())


@pytest.mark.slow  # 20 s; tables and goals of this section are tested above
@pytest.mark.processes
def test_a_tiny_race_of_the_tiers(tmp_path):
    """Losses agree, bytes moved are those of the states, the disk is measured, FSDP2 offloads on CPU ranks."""
    if filesystem_of(tmp_path) in MEMORY_FILESYSTEMS:
        pytest.skip("no disk")  # in memory there is no bandwidth to find, and no direct I/O; counting bytes is in test_tiers_fake
    swap = tmp_path / "swap"
    swap.mkdir()
    workload = Workload(TINY, ranks=1, swap_path=str(swap), checkpoint=True)
    rounds = Rounds(warmup=1, rounds=1, steps=2, memory_steps=1, lead_in=1)
    contenders = [Contender("zs", 3, offload="disk"), Contender("fsdp2", offload="offload")]
    disk, fsdp2 = race.race(contenders, workload, rounds, tmp_path)
    assert disk.ran and fsdp2.ran, (disk.failed, fsdp2.failed)
    assert statistics.losses_agree([disk, fsdp2]) and len(disk.losses) == 1 + 3 + 1
    states = sum(disk.at_rest["measured"].values())
    for moved, speed in zip(disk.moved, disk.disk, strict=True):
        assert moved["disk -> host"] == moved["host -> disk"] and 0 < moved["disk -> host"] < 2 * states
        assert min(speed.write, speed.read, speed.both) > 1e6
    assert not fsdp2.disk and not list(swap.iterdir())


def test_the_benchmark_of_the_file_engine_runs_and_leaves_nothing(tmp_path, monkeypatch):
    if filesystem_of(tmp_path) in MEMORY_FILESYSTEMS:
        pytest.skip("no disk")  # dd and the engine are compared by direct I/O, which memory has none of
    monkeypatch.setattr(disk_bench, "DD_BLOCKS_MIB", (4,))
    monkeypatch.setattr(disk_bench, "FIO_RUNS", (("psync", 4, 1),))
    before = sorted(tmp_path.iterdir())
    result = disk_bench.run(tmp_path, nbytes=16 << 20, rounds=1)
    assert sorted(tmp_path.iterdir()) == before
    assert result["write"]["ratio"] > 0 and result["read"]["median"]["engine"] > 0
    assert [goal.verdict in ("met", "missed") for goal in disk_bench.goals(result)] == [True, True]
    assert "engine" in disk_bench.sheet(result).markdown()
