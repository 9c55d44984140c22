"""Pictures of a plan: memory by category over the step, and a page that needs no other file and loads nothing."""

import html
import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from zeroshard.config import Tier
from zeroshard.planner import pictures, tables
from zeroshard.planner.model_source import source_of
from zeroshard.planner.request import Request, judge
from zeroshard.planner.simulator.hardware import Hardware


@pytest.fixture(scope="module")
def planned():
    asked = Request(
        source_of("quickstart"), Hardware.named("a100-40gb"), {"pp": 1, "dp": 2, "tp": 1}, 2, 64, options={"stage": 3}
    )
    return asked, asked.plan()


def test_memory_is_stacked_by_category_up_to_what_each_moment_holds(planned, tmp_path, monkeypatch):
    asked, plan = planned
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    pictures.draw_memory(plan, asked, tmp_path / "memory.png")
    (axis,) = drawn[0].axes
    labels = axis.get_legend_handles_labels()[1]
    assert labels[0] == "the device's overhead" and {"parameters", "gradients", "gathered units", "activations"} <= set(labels)
    assert not any("GiB" in label or "MiB" in label for label in labels)  # 40 GB are far away
    top = max(collection.get_datalim(axis.transData).y1 for collection in axis.collections)
    unit = tables.scale_of(plan.peak(Tier.DEVICE) + asked.hardware.overhead_nbytes)[0]
    assert top * unit == pytest.approx(judge([plan], asked.hardware).used, rel=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_picture_s_top_is_the_headline_s_peak(checkpointing):
    """Between two units a repeated forward and its backward come and go: a visit is drawn at its fullest, not at its end."""
    asked = Request(
        source_of("quickstart"), Hardware.named("a100-40gb"), {"pp": 1, "dp": 2, "tp": 1}, 8, 256, options={"stage": 1},
        checkpointing=checkpointing,
    )  # fmt: skip
    plan = asked.plan()
    fullest = max(sum(moment.held.values()) for moment in plan.moments)
    assert fullest == max(plan.peak("device", ["forward"]), plan.peak("device", ["backward"]))
    assert fullest > max(sum(moment.left.values()) for moment in plan.moments)


def test_the_end_of_the_device_is_drawn_where_it_is_near(planned, tmp_path):
    asked, plan = planned
    near = replace(asked, hardware=replace(asked.hardware, device=replace(asked.hardware.device, memory_nbytes=1 << 30)))
    pictures.draw_memory(plan, near, tmp_path / "memory.png")
    height, width = imread(tmp_path / "memory.png").shape[:2]
    assert width > height > 300


def test_a_page_holds_everything_and_loads_nothing(planned, tmp_path):
    asked, plan = planned
    verdict = judge([plan], asked.hardware)
    pictures.draw_memory(plan, asked, tmp_path / "memory.png")
    shown = [tables.memory(plan), tables.communication(plan), tables.activations(plan)]
    pictures.write_page(
        tmp_path / "plan.html",
        tables.headline(asked, verdict),
        verdict,
        shown,
        {"Memory": tmp_path / "memory.png"},
        ["a <note> & more"],
    )
    page = (tmp_path / "plan.html").read_text()
    assert str(verdict) in page and 'class="verdict fits"' in page and "a &lt;note&gt; &amp; more" in page
    assert re.findall(r'src="(.{22})', page) == ["data:image/png;base64,"]
    assert "http" not in page and "href" not in page and "<script" not in page and "@media print" in page
    for table in shown:
        assert table.title in page and all(html.escape(cell) in page for row in table.rows for cell in row)
