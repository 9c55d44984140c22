"""The benchmark of offload: its arithmetic on made-up samples, and one tiny race with a contender on disk.

What needs a GPU (the events, the sizes) is written so that everything around it can be tested without one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from bench_kit import TINY, outcome
from torch.autograd import DeviceType

from benchmarks import cases, gpu_day, plan, race, report
from benchmarks.overlap import Overlap
from benchmarks.plan import Contender, Rounds, Workload
from benchmarks.race import Outcome
from benchmarks.sections import swap_folder
from zeroshard.cli.arguments import UsageError
from zeroshard.cli.sheets import show
from zeroshard.planner.simulator.disk_bandwidth import Burst, DiskSpeed, bandwidth
from zeroshard.tiers.io.filesystems import MEMORY_FILESYSTEMS, filesystem_of


def tier_outcome(name: str, rounds_step_s: list[list[float]], **fields) -> Outcome:
    contender = next(c for c in plan.TIER_CONTENDERS if c.name == name)
    return dataclasses.replace(outcome("zs3", rounds_step_s, **fields), contender=contender)


def test_names_of_contenders_that_offload():
    names = [c.name for c in plan.TIER_CONTENDERS]
    assert names[1:5] == ["zs3-host", "zs3-disk", "zs3-infinity", "fsdp2-offload"] and "ds3-offload" in names[8:]
    assert names[5:8] == ["door-offload", "door-opthost", "door-disk"]
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
    assert disk.bounds_s == [1.0, 0.25, 1.0]
    measured = race.table("tiers", "Tiers", Workload(), [disk, memory])
    assert measured.row(race.DISK_LIMIT).seconds == [1.15, 1.1, 1.15]
    assert measured.row("zeroshard 3 opt. disk").facts["/ bound"] == 2.3 and "/ bound" not in measured.row("zeroshard 3").facts
    goals = [(goal.value, goal.verdict) for goal in measured.goals]
    assert goals == [(None, "not measured")] * 2 + [(pytest.approx(1.0), "met")]  # bound, memory, and one round that stumbles


def event(name: str, begin: float, end: float, device: DeviceType = DeviceType.CUDA, annotation: bool = False) -> SimpleNamespace:
    """What torch's profiler gives; milliseconds."""
    times = SimpleNamespace(start=1e3 * begin, end=1e3 * end)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation, time_range=times)


def test_copies_beside_kernels_are_counted_once_for_each_copy():
    kernels = [event("gemm", 0.0, 6.0), event("gelu", 4.0, 10.0), event("gemm", 20.0, 30.0)]
    others = [
        event("Memset (Device)", 10.0, 20.0),
        event("step", 0.0, 99.0, annotation=True),
        event("aten::mm", 0, 99, DeviceType.CPU),
    ]
    copies = [event("Memcpy HtoD (Pinned -> Device)", 5.0, 15.0), event("Memcpy DtoH (Device -> Pinned)", 18.0, 22.0)]
    both = Overlap.of([*kernels, *others, *copies, event("Memcpy DtoD (Device -> Device)", 0.0, 40.0)])
    assert both.copies_ms == {"up": 10.0, "down": 4.0} and both.inside_ms == {"up": 5.0, "down": 2.0}
    assert both.fraction() == pytest.approx(7 / 14) and both.fraction("up") == 0.5
    assert Overlap.of(kernels).fraction() is None


@pytest.mark.parametrize("first", [1, 3, 40, 1000])
def test_search_finds_the_largest_that_fits_to_an_eighth(first):
    found = gpu_day.search(lambda layers: None if layers <= 37 else "out of memory", first, 60.0)
    assert found.complete and 33 <= found.fits <= 37 < found.fails <= found.fits * 9 / 8 and found.trials < 16
    assert "G parameters" in gpu_day.describe(found) and "out of memory" in gpu_day.describe(found)


def test_search_ends_where_nothing_fits_and_where_time_is_over():
    nothing = gpu_day.search(lambda layers: "no", 8, 60.0)
    assert nothing.complete and nothing.fits is None and nothing.fails == 1 and "none trained: no" in gpu_day.describe(nothing)
    seconds = itertools.count()
    late = gpu_day.search(lambda layers: None, 4, 3.5, clock=lambda: float(next(seconds)))
    assert late.fits == 16 and not late.complete and "at least" in gpu_day.describe(late)


def test_gpu_arithmetic():
    workload = Workload(shape=gpu_day.SHAPE, sequences=4)
    assert gpu_day.step_flops(workload) / (4 * 1024) == pytest.approx(
        6 * (20 * 12 * 1024**2 + 32768 * 1024) + 6 * 20 * 1024 * 1024
    )
    room = (80 << 30, 100 << 30, 10 << 30)  # device, host, disk
    guess = {c.offload: gpu_day.first_layers(c, room) for c in gpu_day.TIERS}
    assert guess["host"] > guess[""] > guess["disk"] >= 1  # bound by the host, the device, the disk


def test_a_trial_that_the_host_could_not_hold_is_not_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_day, "Team", None)
    why = gpu_day.trial(Contender("zs", 3, "bf16", "host"), Workload(shape=gpu_day.WIDE_SHAPE), 1 << 30, tmp_path, layers=100)
    assert "GiB of host memory needed, 1 available" in why


def test_the_tables_of_tiers_and_of_the_gpu_are_shown(tmp_path, capsys):
    disk = {"disk -> host": 2e6, "host -> disk": 1e6}
    tiers = [
        tier_outcome("zs3", [[1.0]]),
        tier_outcome("zs3-host", [[1.0]]),
        tier_outcome("zs3-disk", [[1.2]], moved=[disk], disk=[DiskSpeed(1e9, 1e9, 2e9)]),
        Outcome(Contender("fsdp2", offload="offload"), failed="rank 0: RuntimeError: cannot"),
    ]
    largest = {
        "zeroshard 3 all host": gpu_day.Largest(10, 12, True, "no memory", 5),
        "DeepSpeed 3": gpu_day.Largest(why="not installed"),
    }
    found = {
        "tiers": [race.table("tiers", "Tiers", Workload(), tiers)],
        "gpu": [gpu_day.largest_table(largest)],
    }
    results = report.Results(Workload(), Rounds(), found)
    assert found["tiers"][0].broken and not found["gpu"][0].broken
    for sheet in results.sheets():
        show(sheet)
    report.write(results, tmp_path)
    for text in (capsys.readouterr().out, (tmp_path / "results.md").read_text()):
        assert "FSDP2 offload failed: rank 0: RuntimeError: cannot" in text and "none trained: not installed" in text
        assert "12 layers: no memory" in text
    # 3 MB, side by side 2 GB/s: 1.5 ms
    assert "| zeroshard 3 opt. disk | 1200 | 1.20 | 1 | 100 | 1 | 3 | 1.5 | 800 | 1 | 1 | 2 |" in text
    document = json.loads((tmp_path / "results.json").read_text())
    verdicts = {goal["text"]: goal["verdict"] for goal in document["goals"]}
    assert verdicts["stage 3, optimizer on disk / max(1.15 bound of opt. disk, 1.1 in memory), step time"] == "missed"
    assert document["sections"]["gpu"][0]["rows"][0]["facts"]["layers"] == 10


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
    assert not race.table("tiers", "Tiers", workload, [disk, fsdp2]).broken and len(disk.losses) == 1 + 3 + 1
    states = sum(disk.at_rest["measured"].values())
    for moved, speed in zip(disk.moved, disk.disk, strict=True):
        assert moved["disk -> host"] == moved["host -> disk"] and 0 < moved["disk -> host"] < 2 * states
        assert min(speed.write, speed.read, speed.both) > 1e6
    assert not fsdp2.disk and not list(swap.iterdir())


def test_the_benchmark_of_the_file_engine_runs_and_leaves_nothing(tmp_path, monkeypatch):
    if filesystem_of(tmp_path) in MEMORY_FILESYSTEMS:
        pytest.skip("no disk")  # dd and the engine are compared by direct I/O, which memory has none of
    monkeypatch.setattr(cases, "DD_BLOCKS_MIB", (4,))
    monkeypatch.setattr(cases, "FIO_RUNS", (("psync", 4, 1),))
    before = sorted(tmp_path.iterdir())
    written, read = cases.disk(tmp_path, nbytes=16 << 20, rounds=1)
    assert sorted(tmp_path.iterdir()) == before
    assert [goal.verdict in ("met", "missed") for goal in written.goals + read.goals] == [True, True]
    assert "| engine |" in written.sheet().markdown() and "dd bs=4M" in {row.name for row in read.rows}
