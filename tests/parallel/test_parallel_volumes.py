"""The published runs on imagined ranks: memory of a rank and bytes along each axis are the closed formulas, to the byte.

The formulas stand in tests/support/case_studies.py, written out from numbers of the publications. Here widths, tokens and
meshes are the published ones and blocks are few; ZEROSHARD_SLOW=1 runs all blocks, of a first, a middle and the last stage.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_studies import blocks_of, count, formula
from torch import nn

import zeroshard as zs
from zeroshard.planner.models import CASE_STUDIES, GPT, GPTConfig
from zeroshard.testing import imagined_mesh

SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
FEW = {"turing-nlg": 2, "bloom": 12, "mt-nlg": 35}  # blocks: one a stage
CASES = (
    [("turing-nlg", 0, 1), ("bloom", 0, 2), ("bloom", 5, 1), ("bloom", 11, 2), ("mt-nlg", 34, 2)] if SLOW else [("mt-nlg", 34, 2)]
)
ALL = [("turing-nlg", 0, 1), *(("bloom", stage, 3) for stage in (0, 5, 11)), *(("mt-nlg", stage, 3) for stage in (0, 17, 34))]
SMALL = GPTConfig(vocab_size=64, seq_len=16, dim=32, layers=4, heads=4, tied=True)


@pytest.mark.parametrize("name, stage, micro_batches", CASES)
def test_bytes_of_a_rank_are_the_formulas(name, stage, micro_batches):
    study = CASE_STUDIES[name]
    few = replace(study, full=replace(study.full, layers=FEW[name]))
    recompute = (name, stage) != ("bloom", 0)
    assert count(few, stage, micro_batches, recompute) == formula(few, stage, micro_batches, recompute)


@pytest.mark.slow  # all blocks, some minutes
@pytest.mark.parametrize("name, stage, micro_batches", ALL)
def test_bytes_of_a_rank_at_full_size(name, stage, micro_batches):
    study = CASE_STUDIES[name]
    assert count(study, stage, micro_batches) == formula(study, stage, micro_batches)


def test_stages_have_the_blocks_that_were_published():
    found = {name: blocks_of(study) for name, study in CASE_STUDIES.items()}
    assert found == {"turing-nlg": [78], "bloom": [5, *[6] * 10, 5], "mt-nlg": [3] * 35}


@pytest.mark.parametrize("name", CASE_STUDIES)
def test_the_document_shows_the_formulas(name):
    text = (Path(__file__).parents[2] / "docs" / "learn" / "axes.md").read_text()
    head, _, *rows = next(part for part in text.split("\n\n") if part.startswith(f"| {name}, bytes")).splitlines()
    cells = [row.strip("| ").split(" | ") for row in (head, *rows)]
    for column, title in enumerate(cells[0][1::2], 1):
        theory = formula(CASE_STUDIES[name], int(title.removeprefix("stage ")), 1 if name == "turing-nlg" else 2)
        told = {row[0].removeprefix("sent along "): tuple(row[2 * column - 1 : 2 * column + 1]) for row in cells[1:]}
        assert told == {key: (f"{nbytes:,}",) * 2 for key, nbytes in (theory.memory | theory.sent).items()}


def imagined(rank: int, schedule: str = "1F1B", **options):
    """Two steps of a rank of a small model on 2 x 2 x 2; bytes by axis."""
    with torch.device("meta"):
        model = GPT(SMALL)
    with imagined_mesh({"pp": 2, "dp": 2, "tp": 2}, rank) as mesh:
        run = zs.parallelize(model, mesh, optimizer=torch.optim.AdamW, micro_batches=4, schedule=schedule, **options)
        tokens = torch.zeros(4, 16, dtype=torch.long)
        before = run.report()
        run.step(tokens, tokens)
        run.step(tokens, tokens)
        first = dict(run.traffic.counted)
        run.step(tokens, tokens)
        assert run.traffic.counted == first  # of the second step alone
        return before, first, run.report()


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"] if SLOW else ["Interleaved1F1B"])
def test_the_report_says_what_each_axis_sends_whatever_the_schedule(schedule):
    before, sent, text = imagined(0, schedule)
    hidden, tied = 4 * 16 * 32 * 4, 64 // 2 * 32 // 2 * 4  # four micro-batches of activations; a slice of the tied embedding
    passes = {"1F1B": 1, "Interleaved1F1B": 3, "ZBVZeroBubble": 2}[schedule]  # of an activation or its gradient
    tied *= schedule != "ZBVZeroBubble"  # both ends of a V are on one rank
    assert before == "what the axes send is counted in the second step" and sent["pp"] == passes * hidden + tied
    assert [line.partition(":")[0] for line in text.splitlines()] == ["tp", "pp", "dp"]


@pytest.mark.parametrize("rank", [0, 4] if SLOW else [4])
def test_a_head_that_stays_cut_is_for_the_last_stage_alone(rank):
    """Of the logits of each token three numbers are sent in place of all of them."""
    whole, cut = (imagined(rank, loss_parallel=kept)[1]["tp"] for kept in (False, True))
    tokens = 4 * 16
    assert whole - cut == (tokens * 4 * 64 / 2 - tokens * 12 if rank == 4 else 0)


def test_an_axis_of_an_imagined_mesh_is_a_comm():
    with imagined_mesh({"dp": 512, "tp": 2}, rank=6) as mesh:
        model = nn.Linear(64, 64)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), comm=mesh["dp"], stage=3)
        model(torch.zeros(2, 64)).sum().backward()
        optimizer.step()
        report = zs.report(model)
        assert (report.rank, report.world_size) == (3, 512) and report.communication["reduce"].count == 1
