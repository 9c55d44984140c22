"""The benchmarks of state formats: their stand-in for variants is zs.shard's arithmetic, and peers that are missing are named."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks import state_formats, state_quality
from benchmarks.state_formats import Run
from zeroshard.planner.models import GPTConfig

TINY = GPTConfig(seq_len=16, dim=64, layers=1, heads=2, ngram_rows=64)


def trained(make) -> Run:
    text = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    run = Run(make, text, shape=TINY, rows=2, seed=1)
    run.steps(6)
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in run.model.named_parameters()}


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_the_stand_in_has_the_bits_of_zs_shard_and_its_variants_have_others(form):
    expected = weights(trained(partial(state_formats.ours, form)))
    torch.testing.assert_close(weights(trained(partial(state_quality.Recoded, form))), expected, rtol=0, atol=0)
    of_tensors = weights(trained(partial(state_quality.Recoded, form, block=None)))
    assert not torch.equal(of_tensors["blocks.0.mlp.up.weight"], expected["blocks.0.mlp.up.weight"])
    with_tables = trained(partial(state_quality.Recoded, form, embeddings=True))
    assert {id(table.weight) for table in with_tables.model.ngrams} <= {id(param) for param in with_tables.optimizer.coded}
    assert not torch.equal(weights(with_tables)["ngrams.0.weight"], expected["ngrams.0.weight"])


def test_the_section_has_bytes_times_and_losses_and_names_missing_peers(monkeypatch, tmp_path):
    monkeypatch.setattr(state_formats, "SHAPE", TINY)
    monkeypatch.setattr(state_formats, "PEERS", (("nowhere", "AdamW8bit"),))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():  # of the process in which the command runs a section
        monkeypatch.setenv(name, value)
    for name, options in {
        "contenders": {"steps": 2 * state_formats.TURN},
        "matrices": {"layers": 2, "dim": 64, "rounds": 2},
    }.items():
        monkeypatch.setattr(state_formats, name, partial(getattr(state_formats, name), **options))
    measured, in_memory, on_disk = state_formats.section(str(tmp_path))
    facts = {row.name: row.facts for row in measured.rows}
    nbytes = {name: fact[state_formats.BYTES] for name, fact in facts.items()}
    matrices = 12 * 64 * 64 + 256 * 64  # the block's, and the head
    share = matrices / sum(param.numel() for param in trained(partial(state_formats.ours, "fp32")).model.parameters())
    assert nbytes["fp32"] == 8 and nbytes["int8"] == pytest.approx(8 - share * (8 - 2 * 260 / 256))
    losses = {name: fact[state_formats.LOSS] for name, fact in facts.items()}
    assert max(losses.values()) < 8 and losses["int4"] != losses["fp32"] and all(len(row.seconds) == 2 for row in measured.rows)
    assert measured.skipped["nowhere AdamW8bit"].startswith("skipped: ModuleNotFoundError")
    assert "nowhere AdamW8bit skipped" in (text := measured.sheet().markdown()) and "| int4 " in text and "/ fp32" in text
    for found, fact in ((in_memory, "ns an element"), (on_disk, "cpu ms")):
        assert [row.name for row in found.rows] == list(state_formats.TIERS) and all(row.facts[fact] > 0 for row in found.rows)
    assert "everything on disk: 0.0M" in on_disk.title and not list(tmp_path.glob("**/*optim*"))


def test_bytes_of_states_are_counted_in_the_parts_of_a_tensor_and_shared_tables_once():
    class Parts:
        def __init__(self, *parts):
            self.parts = parts

        def __tensor_flatten__(self):
            return [str(index) for index in range(len(self.parts))], None

        def __getattr__(self, name):
            return self.parts[int(name)]

    run = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    table = torch.zeros(256)
    first, second = list(run.model.parameters())[:2]
    run.optimizer.state[first] = {"exp_avg": Parts(torch.zeros(10, dtype=torch.uint8), table), "step": torch.zeros(())}
    run.optimizer.state[second] = {"state1": torch.zeros(3), "qmap1": table, "step": 4}
    assert run.state_nbytes() * sum(param.numel() for param in run.model.parameters()) == pytest.approx(10 + 1024 + 12)


def test_curves_are_kept_by_seed_and_drawn(monkeypatch, tmp_path, capsys):
    for name, value in {"SHAPE": TINY, "STEPS": 4, "BETWEEN": 2, "TUNING_STEPS": 4, "HELD_OUT_NBYTES": 1024}.items():
        monkeypatch.setattr(state_quality, name, value)
    assert state_quality.main([str(tmp_path), "--seeds", "3"]) == 0
    found = json.loads((tmp_path / state_quality.FILE).read_text())
    assert list(found) == ["3"] and found["3"].keys() >= {*state_quality.VARIANTS, "tuned, start", "tuned, int4"}
    assert all(len(losses) == 2 for name, losses in found["3"].items() if name != "tuned, start")
    assert found["3"]["tuned, int8"][-1] < found["3"]["tuned, start"][0] < 8
    assert state_quality.worse(found["3"], "fp32") == [0, 0]
    assert "tuned, int4" in (tmp_path / "state-quality.md").read_text() and (tmp_path / "state-quality.png").stat().st_size > 0
    capsys.readouterr()
    state_quality.main([str(tmp_path), "--draw"])
    assert "seed 3: int8" not in capsys.readouterr().out and json.loads((tmp_path / state_quality.FILE).read_text()) == found
