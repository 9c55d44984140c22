"""Analytic tables equal what was printed, digit by digit, but for what is explained; the data says where it is from."""

from pathlib import Path

import pytest
import volumes

import benchmarks.papers
from benchmarks.papers import counted, infinity, successors, zero
from benchmarks.papers.table import Cell, Table, digits, printed, rank_correlation
from zeroshard.cli import main
from zeroshard.config import Config, Offload, Tier
from zeroshard.engine.sizes import BUFFERS, Group
from zeroshard.tensor.state_column import StateColumn
from zeroshard.tiers.estimate import needs

DATA = Path(benchmarks.papers.__file__).parent / "data"
FACTS = ("ZeRO", "Offload", "Infinity", "DeepSpeed", "in the column paper")


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_every_file_of_data_names_its_paper_its_table_and_how_it_was_obtained(path):
    file = printed(path.stem)
    assert any(fact in file.paper for fact in FACTS) and file.table and file.how.startswith(("printed", "digitized"))
    assert file.rows and all(None not in row and None not in row.values() for row in file.rows)


@pytest.mark.parametrize(
    ("make", "compared"),
    [
        (zero.table2, 20),
        (infinity.requirements, 2),
        (successors.zeropp_volumes, 6),
        (successors.zeropp_memory, 2),
        (successors.estimators, 16),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_table_is_the_printed_one_in_every_digit(make, compared):
    table = make()
    assert len(table.compared) == compared
    assert [(cell.row, cell.column) for cell in table.compared if not cell.agrees] == []


def test_table_1_is_the_printed_one_in_all_54_cells_each_by_a_run_of_the_stage(monkeypatch):
    table = zero.table1()
    assert [cell.printed for cell in table.cells] == [cell.computed for cell in table.cells] and len(table.cells) == 54
    assert {cell.by for cell in table.cells} == {"runtime"}


def test_what_differs_in_the_other_tables_is_a_known_misprint_or_a_shorter_repetition():
    differing = {
        (c.printed, c.computed): c.note
        for make in (zero.volumes, zero.zero_r, infinity.fig2a)
        for c in make().compared
        if not c.agrees
    }
    assert set(differing) == {("12 b s h", "10 b s h"), ("1.95", "1.56")}
    assert "misprint" in differing["1.95", "1.56"] and all(differing.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [4, 64])
def test_the_run_of_a_stage_and_the_plan_of_its_memory_and_the_papers_formula_agree(stage, ranks):
    numel = 1 << 30
    found = counted.count(numel, ranks, stage=stage).states_nbytes
    columns = (StateColumn(""),) * 2
    group = Group(numel, numel // ranks, counted.torch.float16, counted.torch.float16, Offload(), counted.torch.float32, columns)
    plan = needs(Config.build(None, stage=stage), True, [group])
    assert found == sum(nbytes for (name, tier, _), nbytes in plan.items() if tier is Tier.DEVICE and name != BUFFERS)
    assert (
        found
        == {0: 16 * numel, 1: 4 * numel + 12 * numel // ranks, 2: 2 * numel + 14 * numel // ranks, 3: 16 * numel // ranks}[stage]
    )


def test_volumes_of_packed_collectives_are_those_of_the_benchmark():
    table = successors.zeropp_volumes()
    found = sum(float(cell.computed.split()[0]) for cell in table.cells if cell.column == "with scales")
    row = next(row for row in volumes.rows(8) if row.name == "hpZ, qwZ, qgZ int4")
    assert found == pytest.approx(row.volumes[0](128, 8) * 8 * 128 / 127, abs=2e-4)


def test_buffers_of_constant_size_do_not_grow_with_the_model():
    sizes = {counted.count(matrices << 20, 8, stage=2, matrices=matrices).buffers for matrices in (4, 8, 16)}
    assert len(sizes) == 1 and sizes.pop() > 0


def test_numbers_are_written_with_the_printed_digits_halves_up_or_cut_off():
    assert [digits(value, form) for value, form in ((41.25, "0.0"), (1.875, "0.00"), (0.1171875, "0.00"), (120.0, "0"))] == [
        "41.3",
        "1.88",
        "0.12",
        "120",
    ]
    assert digits(15.625, "0.0", truncate=True) == "15.6" and digits(4187.5, "0", truncate=True) == "4187"


def test_a_difference_without_a_note_is_told_and_one_with_a_note_is_not():
    cells = (Cell("a", "x", "1.0", "1.1"), Cell("b", "x", "1.0", "1.1", note="why"), Cell("c", "x", "1.0", "1.1", within=0.2))
    table = Table("t", "T", "S", cells)
    assert [cell.row for cell in table.unexplained] == ["a"]
    assert [row[1] for row in table.grid()[1]] == ["1.0 # 1.1", "1.0 # 1.1 [1]", "1.0 ~ 1.1 +10%"]
    assert table.verdict().startswith("1 of 3 agree") and "| c | 1.0 ~ 1.1 +10% |" in table.markdown()


def test_rank_correlation_is_spearmans():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert rank_correlation([(1, 1), (2, 2), (2, 3), (4, 4)]) == pytest.approx(0.9487, abs=1e-4)  # as scipy.stats.spearmanr


def test_the_command_prints_writes_and_says_what_it_does_not_know(tmp_path, capsys):
    assert main(["papers", "infinity-efficiency", "zeropp-memory", "--out", str(tmp_path)]) == 0
    assert "14.06 = 14.06" in capsys.readouterr().out
    names = {
        "infinity-efficiency.md",
        "infinity-efficiency.csv",
        "infinity-efficiency.png",
        "zeropp-memory.md",
        "zeropp-memory.csv",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    assert main(["papers", "zero-tabel1"]) == 2
    error = capsys.readouterr().err
    assert "unknown table 'zero-tabel1'" in error and "zero-table1" in error
    assert main(["papers", "zeropp-memory", "--out", "/proc/nowhere"]) == 2
    assert "--out /proc/nowhere" in capsys.readouterr().err
