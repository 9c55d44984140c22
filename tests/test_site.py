"""The documentation site builds without a warning, names all that is public, and shows numbers that were computed."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import source_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "scripts"))
import make_pictures  # noqa: E402

STATES = ("parameters", "gradients", "master weights", "optimizer states")


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="mkdocs needs Python 3.11.5")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    assert (tmp_path / "site" / "examples" / "plain_loop.py").exists()
    options = (tmp_path / "site" / "reference" / "options" / "index.html").read_text()
    missing = [field.name for field in dataclasses.fields(zs.Config) if f"<code>{field.name}</code>" not in options]
    assert not missing, f"options.md has no row of {missing}"


def test_every_public_name_is_in_the_reference_once():
    """Those of `zeroshard` itself; models.md has names of modules beside it."""
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")) if path.name != "models.md")
    shown = re.findall(r"^::: zeroshard\.(?:\w+\.)*(\w+)$", pages, re.M) + re.findall(r"<!-- options: (\w+) -->", pages)
    assert len(shown) == len(set(shown)), sorted(name for name in set(shown) if shown.count(name) > 1)
    public = {*zs.__all__, *zs._LATER} - {"__version__"}
    assert set(shown) == public, f"missing: {sorted(public - set(shown))}; not public: {sorted(set(shown) - public)}"


@pytest.mark.parametrize("cls", [zs.Config, zs.Offload, zs.Compression, zs.StateFormat], ids=lambda cls: cls.__name__)
def test_docstrings_of_options_name_each_field_once(cls):
    site_hooks = pytest.importorskip("site_hooks", reason="mkdocs needs Python 3.11.5")
    named = [name for names in site_hooks.entries(inspect.getdoc(cls)) for name in names]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(cls))


def test_tables_of_memory_are_those_of_the_plans():
    page, found = (DOCS / "learn" / "zero.md").read_text(), json.loads((DOCS / "learn" / "memory.json").read_text())
    assert page == make_pictures.with_tables(page, found), "run scripts/make_pictures.py --draw"


def test_memory_of_the_stages_is_that_of_the_formulas():
    """At rest: 2, 4, 4 and 8 bytes a parameter, in N parts what the stage shards; padding of shards is within a thousandth."""
    found = json.loads((DOCS / "learn" / "memory.json").read_text())
    psi, ranks = found["parameters"], found["ranks"]
    for stage, sharded in enumerate(((), STATES[2:], STATES[1:], STATES)):
        held = found["peak"][f"stage {stage}"]["device"]
        for state, nbytes in zip(STATES, (2, 4, 4, 8), strict=True):
            assert held[state] == pytest.approx(nbytes * psi / (ranks if state in sharded else 1), rel=1e-3)


@pytest.mark.skipif(not os.environ.get("ZEROSHARD_SLOW"), reason="fifteen seconds: ZEROSHARD_SLOW=1")
def test_memory_is_what_a_plan_finds_now():
    found = json.loads((DOCS / "learn" / "memory.json").read_text())
    now = plan(source_of(make_pictures.MODEL).make, ranks=8, batch=(1, make_pictures.SEQUENCE), precision="bf16", stage=3)
    assert sum(found["peak"]["stage 3"]["device"].values()) == max(
        sum(phase.held[zs.config.Tier.DEVICE].values()) for phase in now.phases if phase.name in ("forward", "backward", "step")
    )


def test_the_largest_models_of_each_stage():
    """which-stage.md: billions of parameters of which 70 GiB hold the states in bf16 with Adam."""
    text = (DOCS / "which-stage.md").read_text().partition("<!-- made by tests/test_site.py: capacity -->\n\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.partition("\n\n")[0].splitlines()[2:]]

    def nbytes(stage: int, ranks: int) -> float:
        kept = (2, 4, 12)
        return sum(each / (ranks if stage >= needs else 1) for each, needs in zip(kept, (3, 2, 1), strict=True))

    expected = [
        [str(stage), f"{nbytes(stage, 8):.2f}", *(f"{70 * 2**30 / nbytes(stage, ranks) / 1e9:.1f}" for ranks in (1, 8, 64))]
        for stage in range(4)
    ]
    assert rows == expected
