"""The case studies: parameter counts as published, layouts that fit their models, small scales that can be cut."""

from pathlib import Path

import pytest
import torch

from zeroshard.planner.models import CASE_STUDIES, GPT
from zeroshard.planner.presets import SCALES

NAMES = list(CASE_STUDIES)


def _numel(config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_full_model_has_as_many_parameters_as_published(name):
    study = CASE_STUDIES[name]
    digits = len(str(study.billions).partition(".")[2])
    assert round(_numel(study.full) / 1e9, digits) == study.billions


def test_bloom_has_every_parameter_of_its_model_card():
    assert _numel(CASE_STUDIES["bloom"].full) == 176_247_271_424


@pytest.mark.parametrize("name", NAMES)
def test_the_published_layout_divides_its_model(name):
    shape, layout = CASE_STUDIES[name].full, CASE_STUDIES[name].layout
    assert shape.heads % layout.tp == 0 and shape.vocab_size % (128 * layout.tp) == 0 and layout.pp <= shape.layers
    assert layout.global_batch % (layout.dp * (layout.micro_batch or 1)) == 0
    assert (layout.ranks, layout.stage) == ({"turing-nlg": 256, "bloom": 384, "mt-nlg": 2240}[name], 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    told = " ".join(CASE_STUDIES[name].sources)
    for field in ("layers", "dim", "heads", "seq_len", "vocab_size", "global_batch", "stage", "tp", "dp", "positions", "bias"):
        assert field in told or (name, field) == ("bloom", "bias"), field


@pytest.mark.parametrize("name", NAMES)
def test_the_small_scale_is_the_same_architecture_and_can_be_cut(name):
    full, tiny = (CASE_STUDIES[name].config(scale) for scale in reversed(SCALES))
    for field in ("positions", "bias", "embedding_norm", "tied", "mlp_ratio"):
        assert getattr(full, field) == getattr(tiny, field)
    assert tiny.heads % 4 == 0 and tiny.layers == 4 and tiny.vocab_size == 256 and _numel(tiny) < 1e6
    with pytest.raises(ValueError, match="scale: expected one of tiny, full, got 'huge'"):
        CASE_STUDIES[name].config("huge")


@pytest.mark.parametrize(("name", "column"), [(name, column) for column, name in enumerate(NAMES, 1)])
def test_the_volumes_in_the_document_are_those_of_its_formulas(name, column):
    text = (Path(__file__).parents[3] / "docs" / "learn" / "axes.md").read_text()
    rows = {cells[0]: cells[column] for line in text.splitlines() if len(cells := line.strip("| ").split(" | ")) == 4}
    shape, layout, numel = CASE_STUDIES[name].full, CASE_STUDIES[name].layout, _numel(CASE_STUDIES[name].full)
    rows_of_pass = layout.micro_batch or int(rows["sequences of a micro-batch"].split()[0])
    passes = layout.global_batch // (layout.dp * rows_of_pass)
    activation, model = 2 * rows_of_pass * shape.seq_len * shape.dim, layout.tp * layout.pp
    blocks, ring = round(shape.layers / layout.pp), (layout.tp - 1) / layout.tp
    bubble = (layout.pp - 1) / (passes + layout.pp - 1)
    assert rows["tp x pp x dp = GPUs"].startswith(f"{layout.tp} x {layout.pp} x {layout.dp} = {layout.ranks}")
    assert rows["micro-batches of a step"] == str(passes)
    assert rows["bubble"] == (f"{bubble:.1%}" if bubble else "none")
    assert rows["sent along tp, GB a step"] == f"{12 * activation * passes * blocks * ring / 1e9:.1f}"
    assert rows["sent along pp, GB a step"] == f"{2 * activation * passes * (layout.pp > 1) / 1e9:.1f}"
    assert rows["sent along dp, GB a step"] == f"{4 * numel / model * (layout.dp - 1) / layout.dp / 1e9:.1f}"
    assert rows["model states of a rank, GB"] == f"{(4 + 12 / layout.dp) * numel / model / 1e9:.1f}"
